"""Decided micro-batches on a real Kafka: what other clients read of them, and how long a decision takes.

Not here: faults at will (``tests/kafka/sink/test_sink_faults.py``).
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from dataclasses import dataclass

import pytest
from kafka import KafkaConsumer
from kafka import TopicPartition as KafkaTopicPartition

from broker_core.core import errors, failpoint
from broker_core.core.change import Change
from broker_core.engine import BranchHeader, StagedBranch
from broker_core.kafka.cluster.client import Client
from broker_core.kafka.cluster.connection import Settings
from broker_core.kafka.cluster.wire import SocketWire
from broker_core.kafka.protocol.port import LATEST, Isolation, NodeAddress, TopicPartition
from broker_core.kafka.record.record_batch import Codec
from broker_core.kafka.sink.decisions import Decisions
from broker_core.kafka.sink.encoded_batches import BATCH_BYTES
from broker_core.kafka.sink.sink import KafkaSink
from broker_core.kafka.topics.routing import Rules
from broker_core.message.properties import Properties
from tests.kafka.bench.real_node import RealNode
from tests.kafka.bench.sink_bench import Journal, View, rows
from tests.progress import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.product]

WAIT_S = 120.0
QUERY = "q"
ROWS, PARTITIONS = 1000, 4
_names = itertools.count()


@dataclass
class Bench:
    node: NodeAddress
    version: int
    app: str
    queue: str
    journal: Journal

    def client(self) -> Client:
        client = Client(SocketWire(Settings(request_s=WAIT_S)), [self.node], reconnect_s=WAIT_S)
        if client.transaction_version() > self.version:
            client.transaction_version = lambda: self.version  # type: ignore[method-assign]
        return client

    def sink(self, codec: Codec = Codec.NONE) -> KafkaSink:
        return KafkaSink(self.client(), lambda _: View(self.journal), codec=codec)

    def stage(
        self, sink: KafkaSink, token: str, batch: int, bodies: list[bytes], task: int = 0
    ) -> StagedBranch:
        header = BranchHeader(
            token,
            f"{token}-{task}",
            "publish",
            {"exchange": "", "routing_key": self.queue},
            self.app,
            QUERY,
            batch,
            partition=task,
        )
        return sink.stage(header, [rows(*bodies)])

    def consumed(self, count: int) -> list[bytes]:
        """What kafka-python reads, read_committed, until so many records are there and the logs end."""
        return [body for bodies in self.consumed_of_each(count) for body in bodies]

    def consumed_of_each(self, count: int) -> list[list[bytes]]:
        """As ``consumed``, by log."""
        consumer = KafkaConsumer(
            bootstrap_servers=[str(self.node)], isolation_level="read_committed", enable_auto_commit=False
        )
        try:
            logs = [KafkaTopicPartition(self.queue, number) for number in range(PARTITIONS)]
            consumer.assign(logs)
            consumer.seek_to_beginning(*logs)
            found: list[list[bytes]] = [[] for _ in logs]
            deadline = time.monotonic() + WAIT_S
            while sum(map(len, found)) < count and time.monotonic() < deadline:
                for log, records in consumer.poll(timeout_ms=1000).items():
                    found[log.partition] += [record.value for record in records]
            return found
        finally:
            consumer.close()


@pytest.fixture(params=[1, 2], ids=["tv1", "tv2"])
def bench(request: pytest.FixtureRequest, real: RealNode) -> Bench:
    name = f"{os.getpid()}-{next(_names)}"
    found = Bench(real.plain, request.param, f"app-{name}", f"sink-{name}", Journal())
    client = found.client()
    if client.transaction_version() < request.param:
        pytest.skip("this Kafka has no transaction.version 2")
    client.create_topic(found.queue, PARTITIONS, replication=1)
    client.close()
    return found


@pytest.mark.soak
def test_a_thousand_rows_of_each_batch_are_read_once_by_kafka_python(bench: Bench) -> None:
    sink, expected, taken_ms = bench.sink(), [], []
    for batch in range(30):
        token = sink.open_batch(bench.app, QUERY, batch, "fail").token
        tasks = [
            [b"%d:%d:%d" % (batch, task, number) for number in range(ROWS // PARTITIONS)]
            for task in range(PARTITIONS)
        ]
        branches = [bench.stage(sink, token, batch, bodies, task) for task, bodies in enumerate(tasks)]
        began = time.perf_counter()
        committed = sink.commit_batch(bench.app, QUERY, batch, token, branches)
        taken_ms.append(1000 * (time.perf_counter() - began))
        assert committed.entry.published == ROWS and committed.entry.sequence == batch + 1
        expected += [body for bodies in tasks for body in bodies]
    taken_ms.sort()
    print(
        f"\ndecide of {ROWS} rows, transaction.version {bench.version}: best {taken_ms[0]:.1f} ms, "
        f"p50 {statistics.median(taken_ms):.1f} ms, p95 {taken_ms[-2]:.1f} ms"
    )
    assert sorted(bench.consumed(len(expected))) == sorted(expected)
    successor = bench.sink()
    last = successor.last_entry(bench.app)
    assert last is not None and last.sequence == 30
    assert successor.open_batch(bench.app, QUERY, 29, "fail").already


def test_rows_of_many_requests_are_published_in_the_order_of_their_task(bench: Bench) -> None:
    """Four batches of each log, which go out on several connections."""
    sink = bench.sink()
    token = sink.open_batch(bench.app, QUERY, 0, "fail").token
    bodies = [b"%03d" % number + bytes(BATCH_BYTES // 3) for number in range(3 * 4 * PARTITIONS)]
    sink.commit_batch(bench.app, QUERY, 0, token, [bench.stage(sink, token, 0, bodies)])
    logs = bench.consumed_of_each(len(bodies))
    assert sorted(itertools.chain(*logs)) == bodies
    assert all(len(found) > 6 and found == sorted(found) for found in logs)  # two batches hold at most six


def test_keys_headers_and_times_are_those_of_any_producer(bench: Bench) -> None:
    sink = bench.sink(Codec.GZIP)

    def declare(rules: Rules, change: Change) -> None:
        rules.declare_exchange(change, bench.app, "topic")
        rules.bind(change, bench.queue, bench.app, "order.#")

    sink.topology.change(declare, bench.queue)
    token = sink.open_batch(bench.app, QUERY, 0, "fail").token
    properties = Properties(content_type="text/plain", headers={"tenant": "a", "n": 5}).encode()
    header = BranchHeader(token, "b", "publish", {"exchange": bench.app}, bench.app, QUERY, 0)
    keys = [f"order.{number}" for number in range(50)]
    before_ms = time.time_ns() // 1_000_000
    branch = sink.stage(header, [rows(*[b"x"] * 50, routing_key=keys, properties=[properties] * 50)])
    sink.commit_batch(bench.app, QUERY, 0, token, [branch])
    consumer = KafkaConsumer(bench.queue, bootstrap_servers=[str(bench.node)], isolation_level="read_committed",
                             auto_offset_reset="earliest", consumer_timeout_ms=20_000, group_id=None)  # fmt: skip
    found = list(itertools.islice(consumer, 50))
    consumer.close()
    assert sorted(record.key.decode() for record in found) == sorted(keys)
    assert all(before_ms <= record.timestamp <= time.time_ns() // 1_000_000 for record in found)
    assert dict(found[0].headers) == {
        "txmq.exchange": bench.app.encode(),
        "txmq.content_type": b"text/plain",
        "tenant": b"a",
        "n": b"5",
        "txmq.types": b'{"n":"I"}',
    }
    chosen = {record.key: record.partition for record in found}
    # Java's partitioner, as kafka-python has it
    from kafka.partitioner.default import murmur2

    assert chosen == {key.encode(): (murmur2(key.encode()) & 0x7FFFFFFF) % PARTITIONS for key in keys}


def test_a_driver_that_was_overtaken_decides_nothing_and_is_answered_already(bench: Bench) -> None:
    first, second = bench.sink(), bench.sink()
    for batch in range(4):
        tokens = [sink.open_batch(bench.app, QUERY, batch, "fail").token for sink in (first, second)]
        staged = [
            bench.stage(sink, token, batch, [b"%d" % batch])
            for sink, token in zip((first, second), tokens, strict=True)
        ]
        winner, loser = (0, 1) if batch % 2 else (1, 0)
        committed = (second, first)[winner].commit_batch(
            bench.app, QUERY, batch, tokens[1 - winner], [staged[1 - winner]]
        )
        answered = (second, first)[loser].commit_batch(
            bench.app, QUERY, batch, tokens[1 - loser], [staged[1 - loser]]
        )
        assert not committed.already and answered.already and answered.entry.token == committed.entry.token
    assert sorted(bench.consumed(4)) == [b"0", b"1", b"2", b"3"]


def test_a_transaction_that_a_driver_leaves_open_is_aborted_by_the_next_one(bench: Bench) -> None:
    """Killed in the middle of publishing: readers wait at its first record, and the next fence ends it."""

    class Killed(BaseException):
        pass

    def kill(_: str) -> None:
        raise Killed

    first = bench.sink()
    for number, step in enumerate(("joined", "published", "entered", "committed")):
        token = first.open_batch(bench.app, QUERY, number, "fail").token
        branch = bench.stage(first, token, number, [b"%d" % number])
        failpoint.arm(f"kafka.decide.{step}", kill)
        try:
            with pytest.raises(Killed):
                first.commit_batch(bench.app, QUERY, number, token, [branch])
        finally:
            failpoint.disarm()
        second = bench.sink()
        opened = second.open_batch(bench.app, QUERY, number, "fail")
        assert opened.already == (step == "committed")
        if not opened.already:
            again = bench.stage(second, opened.token, number, [b"%d" % number])
            second.commit_batch(bench.app, QUERY, number, opened.token, [again])
        first = second
    assert sorted(bench.consumed(4)) == [b"0", b"1", b"2", b"3"]


@pytest.mark.parametrize("point", ["kafka.decide.published", "kafka.decide.entered"])
def test_a_transaction_that_kafka_aborts_for_its_age_is_decided_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    """Between its first round of rows and its last, or before its end."""
    fence = Client.fence
    monkeypatch.setattr(Client, "fence", lambda client, id, timeout_ms=0: fence(client, id, 300))
    sink, observer, transactional_id = bench.sink(), bench.client(), f"txmq.{bench.app}"

    def wait(_: str) -> None:
        """Every other batch ends with CompleteCommit."""
        wait_until(lambda: getattr(observer.transaction(transactional_id), "state", "") == "CompleteAbort")

    for batch in range(3):
        token = sink.open_batch(bench.app, QUERY, batch, "fail").token
        # rows of two tasks for one partition are sent one behind the other
        staged = [
            bench.stage(sink, token, batch, [b"%d:%d" % (batch, task)], task) for task in (0, PARTITIONS)
        ]
        failpoint.arm(point, wait)
        try:
            assert not sink.commit_batch(bench.app, QUERY, batch, token, staged).already
        finally:
            failpoint.disarm()
    expected = sorted(b"%d:%d" % (batch, task) for batch in range(3) for task in (0, PARTITIONS))
    assert sorted(bench.consumed(len(expected))) == expected
    assert bench.sink().open_batch(bench.app, QUERY, 2, "fail").already


def test_rows_for_a_table_wait_in_the_stage_topic_until_they_are_applied(bench: Bench) -> None:
    sink = KafkaSink(bench.client(), lambda _: View(bench.journal), clean_every_bytes=0)
    token = sink.open_batch(bench.app, QUERY, 0, "fail").token
    header = BranchHeader(token, "b", "append", {"table": "t"}, bench.app, QUERY, 0)
    branch = sink.stage(header, [rows(*[b"%d" % number for number in range(ROWS)])])
    sink.commit_batch(bench.app, QUERY, 0, token, [branch])
    other = bench.sink()
    wait_until(lambda: bool(other.unapplied(bench.app)))
    ((to_apply,),) = (entry.to_apply for entry in other.unapplied(bench.app))
    found = [body for batch in other.read_branches(to_apply.branches) for body in batch["body"].to_pylist()]
    assert found == [b"%d" % number for number in range(ROWS)]
    sink.mark_applied(bench.app, 1)
    with pytest.raises(errors.MissingBranch, match="not in the stage topic any more"):
        list(other.read_branches(to_apply.branches))
    assert other.unapplied(bench.app) == []


def test_a_batch_write_is_published_once(bench: Bench) -> None:
    sink = bench.sink()
    header = BranchHeader(f"write-{bench.app}", "b", "publish", {"routing_key": bench.queue})
    branch = sink.stage(header, [rows(b"x", b"y")])
    for each in (sink, sink, bench.sink()):
        assert each.commit_branches(header.token, [branch]) == 2
    with pytest.raises(errors.BatchDecided):
        bench.sink().rollback_batch(header.token)
    assert sorted(bench.consumed(2)) == [b"x", b"y"]


def test_after_a_fence_the_last_stable_offset_is_the_end(bench: Bench) -> None:
    """So a replay behind a fence sees every decision: markers are written before the fence is answered."""
    client = bench.client()
    for batch in range(20):
        sink = bench.sink()
        token = sink.open_batch(bench.app, QUERY, batch, "fail").token
        sink.commit_batch(bench.app, QUERY, batch, token, [])
        client.fence(f"txmq.{bench.app}")
        log = Decisions(client, bench.app).log
        ends = [client.offsets({log: LATEST}, isolation)[log] for isolation in Isolation]
        assert ends[0] == ends[1]
        assert isinstance(log, TopicPartition)
