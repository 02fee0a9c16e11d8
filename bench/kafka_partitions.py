"""kafka_partitions_ms: a micro-batch of one row of each of 1,000 partitions, beside that of Spark's own Kafka
source, in the same session; the notes have the time as the number grows.

Not here: rates of a few partitions (``kafka.py``), the embedded broker with many queues (``scale.py``).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from kafka import KafkaProducer

from bench.kafka_rig import Rig
from bench.report import Figure, against, note
from bench.scale import growing
from bench.streams import run

PARTITIONS = 1_000
MICRO_BATCHES, WARM = 7, 2
REFERENCES = 4  # of them: the first two of Spark's source take minutes, with a consumer for each partition
# the first row of a partition makes files: of a thousand, for half a minute
PATIENCE = {"request_timeout_ms": 200_000, "delivery_timeout_ms": 300_000}


def partitions(rig: Rig) -> Iterator[Figure]:
    for count in growing(PARTITIONS):
        topic = f"partitions-{count}"
        rig.topics(topic, partitions=count)
        _fill(rig, topic, count)
        limit = {"maxOffsetsPerTrigger": count}
        ours = _times_ms(rig, rig.ours(topic, topic, **limit), count * MICRO_BATCHES)
        theirs = _times_ms(rig, rig.theirs(topic, **limit), count * REFERENCES)
        value, reference = statistics.median(ours), statistics.median(theirs)
        note(f"kafka_partitions_ms of {count}: {value:,.0f}, {value / reference:.3f} of {reference:,.0f}")
    yield against("kafka_partitions_ms", ours, theirs, "ms")


def _fill(rig: Rig, topic: str, count: int) -> None:
    """A row of each partition for each micro-batch."""
    producer = KafkaProducer(bootstrap_servers=rig.bootstrap, acks="all", **PATIENCE)
    for _ in range(MICRO_BATCHES):
        sent = [producer.send(topic, b"x" * 100, partition=number) for number in range(count)]
        for each in sent:
            each.get()
    producer.close()


def _times_ms(rig: Rig, rows: Any, count: int) -> list[float]:
    """Of the warm micro-batches, from one trigger's begin to its end."""
    progress = run(rows.writeStream.format("noop"), rig.folder, count)
    return [each["durationMs"]["triggerExecution"] for each in progress[WARM:]]
