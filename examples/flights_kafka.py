"""Real flights through Kafka, exactly once, while drivers and nodes are killed: ``make demo-kafka``.

    producers --(plain Kafka clients)--> topics JFK, LGA, EWR
    job 1 (foreachBatch): topics --> Delta table `flights`, delays over an hour --> topic `alerts`
    job 2 (native sink):  topic `alerts` --> topic `notifications`

The jobs, the kills and the comparison at the end are those of ``flights.py``; only the url and the broker
differ. The cluster has three nodes on loopback, three replicas of each partition and ``min.insync.replicas``
2. A node is killed with SIGKILL, one at a time, and started again. Needs a JDK and about 2 GB of memory; the
jars come by Maven coordinates.
"""

from __future__ import annotations

import random
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for bench, which starts Kafka

from flights import PRODUCERS, QUEUES, State, main, messages

from bench.kafka_server import Cluster, Node, cluster

PARTITIONS = 3
NODES = 3
DOWN_S = 5.0
READS = {**dict.fromkeys(QUEUES, "flights"), "alerts": "notifications"}  # queue -> the app that reads it


def addresses(url: str) -> list[str]:
    return url.removeprefix("kafka://").split(",")


def produce(url: str, part: int, rate: float) -> None:
    """Sends every second flight, as any Kafka client would: idempotent, acknowledged by all replicas."""
    from kafka import KafkaProducer

    producer = KafkaProducer(
        bootstrap_servers=addresses(url),
        acks="all",
        enable_idempotence=True,
        linger_ms=20,
        delivery_timeout_ms=600_000,
        max_block_ms=600_000,
    )
    started = time.monotonic()
    sent = []
    for index, routing_key, body in messages():
        if index % PRODUCERS == part:
            sent.append(producer.send(routing_key.split(".")[0], body))
            if len(sent) % 500 == 0:
                time.sleep(max(0.0, started + len(sent) / rate - time.monotonic()))
    producer.flush()
    for each in sent:
        each.get()  # raises what became of it
    producer.close()


class KafkaNodes:
    """The cluster of the demo, of which one node at a time is killed."""

    def __init__(self, folder: Path) -> None:
        self.kills = 0
        self._stack = ExitStack()
        self._cluster: Cluster = self._stack.enter_context(cluster(folder, NODES, heap="512m"))
        self._down: tuple[Node, float] | None = None
        self._last = self._cluster.nodes[0]
        self._watch: Watch | None = None
        self.url = f"kafka://{self._cluster.bootstrap}"

    @property
    def log(self) -> Path:
        return self._last.log

    def start(self) -> None:
        from kafka.admin import KafkaAdminClient, NewTopic

        names = [*QUEUES, "alerts", "notifications"]
        admin = KafkaAdminClient(bootstrap_servers=addresses(self.url))
        admin.create_topics([NewTopic(name, PARTITIONS, NODES) for name in names])
        admin.close()

    def kill(self) -> None:
        if self._down is not None:
            self._revive()
            self._last.wait()  # never two at once
        self._last = random.choice(self._cluster.nodes)
        self._last.kill()
        self._down = (self._last, time.monotonic())
        self.kills += 1

    def keep(self) -> None:
        """Starts the killed node again after some seconds, in which other nodes lead its partitions."""
        if self._down is not None and time.monotonic() - self._down[1] > DOWN_S:
            self._revive()

    def _revive(self) -> None:
        assert self._down is not None
        node, _ = self._down
        self._down = None
        node.start()

    def state(self) -> State | None:
        from kafka.errors import KafkaError

        from txmq import TxmqError

        try:
            if self._watch is None:
                self._watch = Watch(self.url)
            return self._watch.state()
        except (KafkaError, TxmqError) as error:
            if not error.retriable:
                raise
            self._forget()  # a client that has lost a node may take minutes to notice
            return None

    def _forget(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def close(self) -> None:
        self._forget()
        self._stack.close()


class Watch:
    """What the tools of Kafka see, ends of topics and lag of groups, and the ledgers of txmq."""

    def __init__(self, url: str) -> None:
        from kafka import KafkaConsumer, TopicPartition
        from kafka.admin import KafkaAdminClient

        from broker_core.engines import connect

        self._engine: Any = connect(url)
        self._admin = KafkaAdminClient(bootstrap_servers=addresses(url))
        self._consumer = KafkaConsumer(bootstrap_servers=addresses(url), isolation_level="read_committed")
        self._logs = {name: [TopicPartition(name, number) for number in range(PARTITIONS)] for name in READS}
        self._counted = 0
        self._consumer.assign([TopicPartition("notifications", number) for number in range(PARTITIONS)])
        self._consumer.seek_to_beginning()

    def state(self) -> State:
        groups = {f"txmq.{app}": None for app in set(READS.values())}
        # before the ends, so that a lag is never too small
        positions = {
            log: found.offset
            for group in self._admin.list_group_offsets(groups).values()
            for log, found in group.items()
        }
        ends = self._consumer.end_offsets([log for logs in self._logs.values() for log in logs])
        apps = [self._engine.app(app) for app in sorted(set(READS.values()))]
        return State(
            depth={
                name: sum(max(0, ends[log] - max(0, positions.get(log, 0))) for log in self._logs[name])
                for name in READS
            },
            total={
                **{name: sum(ends[log] for log in logs) for name, logs in self._logs.items()},
                "notifications": self._count(),
            },
            batches={app.app_id: app.sequence for app in apps if app is not None},
            unapplied=sum(app.unapplied for app in apps if app is not None),
        )

    def _count(self) -> int:
        """Counts records: an offset may also be the marker of a transaction."""
        while found := self._consumer.poll(100, max_records=10_000):
            self._counted += sum(map(len, found.values()))
        return self._counted

    def close(self) -> None:
        self._engine.close()
        self._admin.close()
        self._consumer.close()


if __name__ == "__main__":
    sys.exit(main(produce, KafkaNodes, __file__))
