"""The Kafka engine on a real node: whole micro-batches, races of processes that are killed, compaction, and
what other clients send.

Not here: faults at will (``tests/kafka``).
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from kafka import KafkaProducer

from broker_core.core import errors
from broker_core.core.backoff import Time
from broker_core.engine import START, BranchHeader, LedgerEntry, Limit, Origin, ReadTicket, Vector
from broker_core.kafka import names
from broker_core.kafka.cluster.client import Client
from broker_core.kafka.cluster.connection import Settings
from broker_core.kafka.cluster.wire import SocketWire
from broker_core.kafka.engine import KafkaEngine
from broker_core.kafka.journal import history
from broker_core.kafka.protocol.port import EARLIEST, LATEST, TopicPartition
from broker_core.kafka.protocol.sasl import SaslLogin
from broker_core.kafka.record.encode import encode, stamp
from broker_core.message.message import READ_SCHEMA
from broker_core.message.properties import Properties
from broker_core.micro_batch.claims import claim as claims_module
from tests.kafka.bench.real_node import PASSWORD, USER, RealNode
from tests.progress import wait_until

pytestmark = pytest.mark.slow

WAIT_S = 120.0
SETTINGS = {"kafka.request.timeout.ms": "120000", "kafka.default.api.timeout.ms": "120000"}
ROOT = Path(__file__).resolve().parents[2]
_names = itertools.count()


class Bench:
    def __init__(self, node: RealNode) -> None:
        self.node = node
        self.url = f"kafka://{node.plain}"
        self.client = Client(SocketWire(Settings(request_s=WAIT_S)), [node.plain], reconnect_s=WAIT_S)
        self.engines: list[KafkaEngine] = []
        self.app = f"app {os.getpid()}.{next(_names)}"

    def queue(self, partitions: int = 2, **configs: str) -> str:
        name = f"queue-{os.getpid()}-{next(_names)}"
        found = {key.replace("_", "."): value for key, value in configs.items()}
        self.client.create_topic(name, partitions, replication=1, configs=found)
        return name

    def engine(self) -> KafkaEngine:
        """Of another process."""
        self.engines.append(KafkaEngine(self.url, SETTINGS))
        return self.engines[-1]

    def send(self, queue: str, partition: int, *bodies: bytes) -> None:
        batch = encode(pa.array(bodies, pa.binary()), timestamp=time.time_ns() // 1_000_000)
        self.client.produce({TopicPartition(queue, partition): batch})

    def bodies(self, queue: str) -> list[bytes]:
        engine = self.engine()
        slices = [(log, 0, found.end) for log, found in engine.available(engine.logs([queue])).items()]
        return sorted(body for rows in engine.browse(slices) for body in rows.column("body").to_pylist())

    def claim(
        self,
        engine: KafkaEngine,
        queue: str,
        start: Vector | None = None,
        limit: Limit | None = None,
        *,
        ran: bool = False,
    ) -> Vector:
        first: Vector = {queue: START}
        return engine.claim(self.app, [queue], start or first, limit or Limit(), Origin(), "fail", ran=ran)

    def read(self, engine: KafkaEngine, ranges: Any, batch: int = 0, *, fail: bool = True) -> pa.Table:
        slices = tuple((log, first, last) for log, (first, last) in ranges.items())
        ticket = ReadTicket(self.app, "q", batch, ranges, slices, fail)
        return pa.Table.from_batches(engine.read(ticket), READ_SCHEMA)


class Pipeline:
    """Micro-batches of one driver and one task from queue to queue."""

    def __init__(self, bench: Bench, source: str, target: str) -> None:
        self.bench, self.source, self.target = bench, source, target
        self.driver, self.task = bench.engine(), bench.engine()
        self.start: Vector = {source: START}
        self.batch = 0

    def run(
        self, *, fail_on_data_loss: bool = True, staged: Callable[[], object] = lambda: None
    ) -> LedgerEntry:
        """One micro-batch. ``staged`` is called before it is decided."""
        bench, driver, batch = self.bench, self.driver, self.batch
        end = bench.claim(driver, self.source, self.start)
        opened = driver.open_batch(bench.app, "q", batch, "fail")
        ranges = driver.resolve(bench.app, self.start, end)
        rows = bench.read(self.task, ranges, batch, fail=fail_on_data_loss).select(["body"]).to_batches()
        target = {"exchange": "", "routing_key": self.target}
        name = os.urandom(16).hex()
        header = BranchHeader(opened.token, name, "publish", target, bench.app, "q", batch)
        branch = self.task.stage(header, rows)
        staged()
        committed = driver.commit_batch(bench.app, "q", batch, opened.token, [branch])
        assert committed.entry.ranges == ranges
        self.start, self.batch = end, batch + 1
        return committed.entry


@pytest.fixture
def bench(real: RealNode) -> Iterator[Bench]:
    bench = Bench(real)
    yield bench
    bench.client.close()
    for engine in bench.engines:
        engine.close()


@pytest.mark.soak  # tests/crash/test_spark_crash.py has drivers on a real Kafka
def test_every_row_goes_through_once(bench: Bench) -> None:
    pipeline = Pipeline(bench, bench.queue(), bench.queue())
    source, target = pipeline.source, pipeline.target
    for batch in range(5):
        bench.send(source, batch % 2, *(b"%d-%d" % (batch, row) for row in range(100)))
        assert pipeline.run().published == 100
    wait_until(lambda: len(bench.bodies(target)) == 500)
    assert bench.bodies(target) == bench.bodies(source)
    info = bench.engine().app(bench.app)
    assert info is not None and (info.sequence, info.lag, info.queues) == (5, 0, (source,))
    wait_until(lambda: bench.node.position(names.producer_of(bench.app), TopicPartition(source, 1)) > 0)


def test_rows_of_another_client(bench: Bench) -> None:
    queue = bench.queue(1)
    producer = KafkaProducer(bootstrap_servers=str(bench.node.plain), compression_type="gzip")
    sent = [
        (None, b"a", []),
        (b"k\xff", None, [("h", b"\xff")]),
        ("é".encode(), b"", [("h", b"1"), ("h", b"2")]),
    ]
    for key, value, headers in sent:
        producer.send(queue, key=key, value=value, headers=headers, timestamp_ms=1_700_000_000_123)
    producer.flush()
    producer.close()
    engine = bench.engine()
    end = bench.claim(engine, queue)
    rows = bench.read(engine, engine.resolve(bench.app, {queue: START}, end)).to_pylist()
    assert [(row["routing_key"], row["body"]) for row in rows] == [
        (queue, b"a"),
        ("0x6bff", None),
        ("é", b""),
    ]
    assert [dict(Properties.decode(row["properties"]).headers) for row in rows] == [
        {},
        {"h": b"\xff"},
        {"h": "2", "x-kafka-headers": '[["h","1"]]'},
    ]
    assert {row["timestamp"].microsecond for row in rows} == {123_000} and [
        row["offset"] for row in rows
    ] == [0, 1, 2]


def test_retention_and_a_topic_made_again(bench: Bench) -> None:
    queue = bench.queue(1)
    bench.send(queue, 0, b"a", b"b")
    engine = bench.engine()
    end = bench.claim(engine, queue)
    ranges = engine.resolve(bench.app, {queue: START}, end)
    bench.client.delete_records({TopicPartition(queue, 0): 1})
    with pytest.raises(errors.DataLoss, match="is lost: Kafka has 1 to 2"):
        bench.read(engine, ranges)
    bench.client.delete_topic(queue)
    wait_until(lambda: queue not in bench.client.topics())
    bench.client.create_topic(queue, 1, replication=1)
    bench.send(queue, 0, b"x", b"y")
    with pytest.raises(errors.DataLoss, match="deleted"):
        bench.read(engine, ranges, 1)
    with pytest.raises(errors.DataLoss, match="deleted"):
        bench.claim(bench.engine(), queue, end)


def test_rows_that_retention_deletes_under_a_claim_are_left_out_where_that_is_allowed(bench: Bench) -> None:
    pipeline = Pipeline(bench, bench.queue(1), bench.queue(1))
    bench.send(pipeline.source, 0, b"a", b"b", b"c")
    end = bench.claim(pipeline.driver, pipeline.source)
    bench.client.delete_records({TopicPartition(pipeline.source, 0): 2})
    with pytest.raises(errors.DataLoss, match=r"offset 0 of .* is lost: Kafka has 2 to 3"):
        pipeline.run()
    assert pipeline.run(fail_on_data_loss=False).published == 1 and pipeline.start == end
    bench.send(pipeline.source, 0, b"d")
    pipeline.run()
    wait_until(lambda: bench.bodies(pipeline.target) == [b"c", b"d"])


def test_a_topic_that_is_made_again_before_its_batch_is_decided_is_data_loss(bench: Bench) -> None:
    pipeline = Pipeline(bench, bench.queue(1), bench.queue(1))
    bench.send(pipeline.source, 0, b"a")

    def make_again() -> None:
        bench.client.delete_topic(pipeline.source)
        wait_until(lambda: pipeline.source not in bench.client.topics())
        bench.client.create_topic(pipeline.source, 1, replication=1)
        bench.send(pipeline.source, 0, b"another")
        pipeline.driver.client.cluster.forget(pipeline.source)  # as half a minute later

    with pytest.raises(errors.DataLoss, match="was deleted and made again"):
        pipeline.run(staged=make_again)
    assert bench.bodies(pipeline.target) == [] and bench.engine().last_entry(bench.app) is None


@pytest.mark.parametrize("commit", [True, False], ids=["committed", "aborted"])
def test_a_foreign_transaction_that_stays_open_holds_the_stream_until_it_ends(
    bench: Bench, commit: bool
) -> None:
    pipeline = Pipeline(bench, bench.queue(2), bench.queue(2))
    source, driver, foreign = pipeline.source, pipeline.driver, f"foreign-{bench.app}"
    bench.send(source, 0, b"before")
    producer = bench.client.fence(foreign)
    rows = bytearray(encode(pa.array([b"foreign"], pa.binary()), timestamp=1, transactional=True))
    stamp(rows, producer_id=producer.id, epoch=producer.epoch, sequence=0, timestamp=1)
    bench.client.produce({TopicPartition(source, 0): rows}, transactional_id=foreign, implicit=True)
    bench.send(source, 0, b"behind")
    bench.send(source, 1, b"beside")
    assert pipeline.run().published == 2
    ends = {log: int(at) for log, at in pipeline.start.items()}
    assert ends == {f"{source}/0": 1, f"{source}/1": 1}
    # nothing more may be read, and whoever waits sleeps until it ends
    assert bench.claim(driver, source, pipeline.start) == pipeline.start
    assert not driver.wait([source], ends, 0.2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(driver.wait, [source], ends, WAIT_S)
        bench.client.end_transaction(foreign, producer, commit=commit, bump=True)
        assert waiting.result(WAIT_S)
    pipeline.run()
    expected = sorted([b"before", b"beside", b"behind", *([b"foreign"] if commit else [])])
    wait_until(lambda: len(bench.bodies(pipeline.target)) >= len(expected))
    assert bench.bodies(pipeline.target) == expected
    assert bench.claim(driver, source, pipeline.start) == pipeline.start


def test_partitions_that_are_added_between_two_batches_are_read_from_their_beginning(bench: Bench) -> None:
    pipeline = Pipeline(bench, bench.queue(1), bench.queue(1))
    bench.send(pipeline.source, 0, b"a")
    pipeline.run()
    bench.node.grow(pipeline.source, 3)
    wait_until(lambda: len(bench.engine().logs([pipeline.source])) == 3)
    for number in range(3):
        bench.send(pipeline.source, number, b"%d" % number)
    pipeline.driver.client.cluster.forget(pipeline.source)  # as half a minute later
    assert pipeline.run().published == 3
    wait_until(lambda: bench.bodies(pipeline.target) == [b"0", b"1", b"2", b"a"])


def test_a_wrong_password_is_refused_at_once(bench: Bench) -> None:
    def sleep(_: float) -> None:
        raise AssertionError("it is asked again")

    settings = Settings(login=SaslLogin("SCRAM-SHA-512", USER, "wrong"))
    client = Client(SocketWire(settings), [bench.node.sasl], time=Time(sleep=sleep))
    for ask in (client.topics, lambda: client.topic("orders"), lambda: client.fence("t")):
        with pytest.raises(errors.AccessRefused, match="correct the mechanism, the user and the password"):
            ask()
    client.close()


def test_wait_and_growth(bench: Bench) -> None:
    queue = bench.queue(1)
    engine = bench.engine()
    assert not engine.wait([queue], {f"{queue}/0": 0}, 0.05)
    bench.send(queue, 0, b"a")
    assert engine.wait([queue], {f"{queue}/0": 0}, WAIT_S)
    end = bench.claim(engine, queue)
    bench.node.grow(queue, 2)
    wait_until(lambda: len(bench.engine().logs([queue])) == 2)
    bench.send(queue, 1, b"b")
    assert bench.claim(bench.engine(), queue, end) == {f"{queue}/0": 1, f"{queue}/1": 1}


def test_settings_with_a_login_and_with_tls(bench: Bench) -> None:
    queue = bench.queue(3)
    login = {
        "kafka.security.protocol": "SASL_PLAINTEXT",
        "kafka.sasl.mechanism": "SCRAM-SHA-512",
        "kafka.sasl.username": USER,
    }
    with KafkaEngine(f"kafka://{bench.node.sasl}", {**login, "kafka.sasl.password": PASSWORD}) as engine:
        assert len(engine.logs([queue])) == 3 and engine.identity() == bench.engine().identity()
    wrong = {**login, "kafka.sasl.password": "wrong", "kafka.default.api.timeout.ms": "100"}
    with KafkaEngine(f"kafka://{bench.node.sasl}", wrong) as engine, pytest.raises(errors.AccessRefused):
        engine.logs([queue])
    tls = {"kafka.security.protocol": "SSL", "kafka.ssl.ca.location": str(bench.node.certificate)}
    with KafkaEngine(f"kafka://{bench.node.tls}", tls) as engine:
        assert len(engine.logs([queue])) == 3


def worker_command(bench: Bench, queue: str, rounds: int, answers: Path) -> list[str]:
    arguments = [bench.url, bench.app, queue, str(rounds), str(answers)]
    return [sys.executable, "-m", "tests.kafka.bench.claim_worker", *arguments]


@pytest.mark.soak
def test_processes_that_race_and_are_killed_get_one_end_for_each_start(bench: Bench, tmp_path: Path) -> None:
    queue = bench.queue(2)
    rounds, rng = 40, random.Random(7)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def spawn(number: int, life: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            worker_command(bench, queue, rounds, tmp_path / f"{number}.{life}"), cwd=ROOT, env=environment
        )

    workers = {number: spawn(number, 0) for number in range(3)}
    lives = dict.fromkeys(workers, 0)
    deadline = time.monotonic() + WAIT_S
    while any(worker.poll() is None for worker in workers.values()):
        assert time.monotonic() < deadline
        bench.send(queue, rng.randrange(2), b"x")
        number = rng.randrange(3)
        if lives[number] < 3 and rng.random() < 0.05 and workers[number].poll() is None:
            workers[number].send_signal(signal.SIGKILL)
            workers[number].wait()
            lives[number] += 1
            workers[number] = spawn(number, lives[number])
        time.sleep(0.01)
    assert all(worker.returncode == 0 for worker in workers.values()) and sum(lives.values()) > 0
    ends: dict[str, str] = {}
    for path in tmp_path.iterdir():
        for line in path.read_text().splitlines():
            start, end = json.loads(line)
            assert ends.setdefault(start, end) == end
    assert len(ends) >= rounds - 1  # a worker does not write the end of its symbolic start


@pytest.mark.crash
@pytest.mark.parametrize("point", ["kafka.journal.append", "kafka.journal.appended"])
def test_a_driver_that_is_killed_around_its_claim_leaves_one_end(
    bench: Bench, tmp_path: Path, point: str
) -> None:
    queue = bench.queue(1)
    for number in range(9):
        bench.send(queue, 0, b"%d" % number)
    answers = tmp_path / "answers"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TXMQ_FAILPOINTS": f"{point}@3=kill"}
    worker = subprocess.run(worker_command(bench, queue, 3, answers), cwd=ROOT, env=environment, check=False)
    assert worker.returncode == -signal.SIGKILL
    before = [json.loads(line) for line in answers.read_text().splitlines()]
    (start, last) = (json.loads(each) for each in before[-1])
    successor = bench.engine()
    assert bench.claim(successor, queue, start) == last
    bench.send(queue, 0, b"later")
    end = bench.claim(successor, queue, last)
    # what was appended holds, though its driver never told anybody; else the successor claims more
    assert end == {f"{queue}/0": 9} if point.endswith("appended") else {f"{queue}/0": 10}
    assert bench.claim(bench.engine(), queue, last) == end


@pytest.mark.soak  # waits for a cleaner; a Kafka in memory compacts in tests/kafka
def test_what_a_real_cleaner_leaves_is_read_as_the_same(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims_module, "KEPT_CLAIMS", 3)
    monkeypatch.setattr(history, "GARBAGE", 4)
    topic = names.app_topic(bench.app)
    configs = {
        "cleanup.policy": "compact",
        "segment.ms": "100",
        "min.cleanable.dirty.ratio": "0.01",
        "delete.retention.ms": "86400000",
    }
    bench.client.create_topic(topic, 2, replication=1, configs=configs)
    queue = bench.queue(1)
    journal = TopicPartition(topic, names.JOURNAL)
    driver, other = bench.engine(), bench.engine()
    ends: list[Vector] = [{queue: START}]

    def cleaned() -> bool:
        """Some early record is gone; the log has a new segment whenever something is appended. The sink is
        another system, so a batch that ran is acknowledged, and the position is written again.
        """
        bench.send(queue, 0, b"x")
        turn = len(ends)
        ends.append(bench.claim(driver if turn % 2 else other, queue, ends[-1], ran=True))
        end = bench.client.offsets({journal: LATEST})[journal]
        start = bench.client.offsets({journal: EARLIEST})[journal]
        fetched = bench.client.fetch({journal: start})[journal]
        first = int.from_bytes(fetched.records[:8], "big")
        return first > 0 and end > 100

    wait_until(cleaned)
    for engine in (bench.engine(), driver, other):
        assert bench.claim(engine, queue, ends[-2]) == ends[-1]
        ranges = engine.resolve(bench.app, ends[-2], ends[-1])
        assert [ranges[f"{queue}/0"][0]] == [ends[-2][f"{queue}/0"]]
