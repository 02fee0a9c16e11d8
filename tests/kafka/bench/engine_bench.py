"""The Kafka engine over FakeKafka, with the words of the contract of all engines."""

from __future__ import annotations

import time

import pyarrow as pa

from broker_core.kafka import names
from broker_core.kafka.cluster.client import Client
from broker_core.kafka.engine import KafkaEngine
from broker_core.kafka.protocol.port import EARLIEST, TopicPartition
from broker_core.kafka.record.encode import encode
from tests.contract.engine.bench import APP, QUEUES, EngineBench
from tests.kafka.bench.fake_kafka import FakeKafka

URL = "kafka://fake:1,fake:2,fake:3"


class KafkaBench(EngineBench):
    # a topic has any number of apps and keeps acked records for its retention; a late task stages
    lacks = frozenset({"exclusive_claims", "deletes_acked", "refuses_late_tasks"})

    def __init__(self, transaction_version: int = 2) -> None:
        self.kafka = FakeKafka(transaction_version=transaction_version)
        self.client = Client(self.kafka.wire(), list(self.kafka.nodes.values()))
        self.now_ms = time.time_ns() // 1_000_000 - 1_000_000
        for queue in QUEUES:
            self.client.create_topic(queue, 1)
        self.crash()

    def produce(self, *bodies: bytes, queue: str = "in") -> None:
        batch = encode(pa.array(bodies, pa.binary()), timestamp=self.now_ms)
        self.client.produce({TopicPartition(queue, 0): batch})

    def crash(self) -> None:
        self.engine = KafkaEngine(URL, None, lambda settings: self.kafka.wire())
        self.engine.sink._clean_every_bytes = 0  # what is freed is deleted at once

    def remake(self, queue: str) -> None:
        self.client.delete_topic(queue)
        self.client.create_topic(queue, 1)
        self.crash()

    def staged(self) -> int:
        """Records of branches that are still there."""
        found = 0
        for name, topic in self.kafka.topics.items():
            if name.startswith(names.STAGE):
                found += sum(head.records for log in topic.logs for head, _ in log.batches)
        return found

    def deleted(self, offset: int, queue: str = "in") -> bool:
        return self.client.offsets({TopicPartition(queue, 0): EARLIEST})[TopicPartition(queue, 0)] > offset

    def later(self) -> int:
        self.now_ms += 1000
        return self.now_ms * 1000

    def visible(self, queue: str = "out") -> list[bytes]:
        """Kafka keeps what is consumed: it begins where the app's ledger and acks end."""
        log = self.log(queue)
        source, sink = self.engine.source, self.engine.sink
        journal = source.journal(APP)
        journal.catch_up()
        position = journal.positions.get(queue)
        acked = 0 if position is None else int(position.acked.get(log, 0))
        begin = max(acked, sink.decided(APP).consumed([log]).get(log, 0))
        end = self.engine.available([log])[log].end
        return [
            body
            for batch in self.engine.browse([(log, begin, end)])
            for body in batch.column("body").to_pylist()
        ]

    def close(self) -> None:
        self.engine.close()
