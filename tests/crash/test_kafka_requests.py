"""A node of Kafka is killed at each request of a micro-batch: a claim, a read, a stage, a decision, an apply.

The driver goes on, or dies with the node and is started again. Each row is published once and appended once,
and the next batch goes through. ``make test`` kills one node at the requests after which an answer that was
lost matters most; the soak kills at every request, one node and one of three, with replicas and without.
Not here: faults without a process (``tests/kafka/sink/test_sink_faults.py``), kills by chance
(``test_kafka_nodes.py``).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import pyarrow as pa
import pytest

from bench.kafka_server import Cluster
from broker_core.engine import START, BranchHeader, BranchKind, Limit, Origin, ReadTicket, Vector
from broker_core.kafka import names
from broker_core.kafka.engine import KafkaEngine
from broker_core.kafka.protocol.port import LATEST, TopicPartition, Unanswered
from broker_core.kafka.record.encode import encode
from tests.kafka.bench import batch_worker
from tests.kafka.bench.real_node import real_cluster
from tests.kafka.kills import DriverKilled, Kills, Moment

pytestmark = [pytest.mark.crash, pytest.mark.slow]

WAIT_S = 300.0
PATIENT = {"kafka.request.timeout.ms": "15000", "kafka.default.api.timeout.ms": str(int(WAIT_S * 1000))}
SETTINGS = {
    "auto.create.topics.enable": "false",
    "offsets.topic.num.partitions": "1",
    "transaction.state.log.num.partitions": "2",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "500",
    "group.coordinator.append.linger.ms": "0",
    # a node that was killed may come back soon, and loses its leaders soon
    "broker.heartbeat.interval.ms": "300",
    "broker.session.timeout.ms": "1500",
    "controller.quorum.election.timeout.ms": "500",
    "controller.quorum.fetch.timeout.ms": "1000",
    "replica.lag.time.max.ms": "4000",
}
QUERY, PARTITIONS, ROWS = "q", 2, 6
MOST_TRIES = 5  # of one batch, by a driver that Spark starts again
# as often as it takes, in the background: a thread that dies there is no driver
BESIDE = "FindCoordinator", "CommitOffsets source"
_names = itertools.count()


@dataclass
class Pipeline:
    """Micro-batches of one checkpoint as Spark runs them: from a queue to a queue and a table."""

    kills: Kills
    app: str = field(default_factory=lambda: f"kills-{next(_names)}")
    ends: list[Vector] = field(default_factory=list)  # the offset log
    table: dict[int, list[bytes]] = field(default_factory=dict)  # by sequence: applied twice is applied once
    tries: Counter[str] = field(default_factory=Counter)
    batches: int = 0
    sent: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.source, self.target = f"source-{self.app}", f"target-{self.app}"
        self.operator = KafkaEngine(
            f"kafka://{self.kills.cluster.bootstrap}", PATIENT
        )  # its wire is not counted
        for queue in (self.source, self.target):
            self.operator.client.create_topic(queue, PARTITIONS)
        self._start()

    def _start(self) -> None:
        """A driver and a task, which are two processes."""
        url = f"kafka://{self.kills.cluster.bootstrap}"
        self.driver, self.task = (KafkaEngine(url, PATIENT, self.kills.wire) for _ in range(2))
        self.driver._here().sink._clean_every_bytes = 0

    def send(self) -> None:
        for log in (TopicPartition(self.source, partition) for partition in range(PARTITIONS)):
            bodies = [b"%d" % (len(self.sent) + number) for number in range(ROWS // PARTITIONS)]
            end = self._end_of(log)
            # a node may die of a request in the background; nobody else writes here
            while self._end_of(log) == end:
                with contextlib.suppress(Unanswered):
                    batch = encode(pa.array(bodies, pa.binary()), timestamp=time.time_ns() // 1_000_000)
                    self.operator.client.produce({log: batch})
            self.sent += bodies

    def _end_of(self, log: TopicPartition) -> int:
        return self.operator.client.offsets({log: LATEST})[log]

    def run(self) -> None:
        """The next micro-batch, as often as Spark tries it."""
        for _ in range(MOST_TRIES):
            try:
                self._micro_batch()
            except DriverKilled:
                self._end()
                self.kills.revive()
                self.send()  # a claim that was stored has the same end
                self._start()
                self.tries["the driver is killed"] += 1
            except batch_worker.AGAIN as error:
                self.tries[type(error).__name__] += 1
            else:
                self.batches += 1
                return
        raise AssertionError(f"batch {self.batches} does not end: {self.tries}")

    def _micro_batch(self) -> None:
        driver, batch = self.driver, self.batches
        start: Vector = self.ends[batch - 1] if batch else {self.source: START}
        if len(self.ends) == batch:
            self.ends.append(driver.claim(self.app, [self.source], start, Limit(), Origin(), "fail"))
        end = self.ends[batch]
        opened = driver.open_batch(self.app, QUERY, batch, "fail")
        ranges = driver.resolve(self.app, start, end)
        slices = tuple((log, first, last) for log, (first, last) in ranges.items())
        read = self.task.read(ReadTicket(self.app, QUERY, batch, ranges, slices))
        rows = [pa.record_batch({"body": found.column("body")}) for found in read]
        staged = []
        if not opened.already:
            kinds: dict[BranchKind, dict[str, str]] = {
                "publish": {"exchange": "", "routing_key": self.target},
                "append": {"table": "t"},
            }
            for number, (kind, target) in enumerate(kinds.items()):
                name = os.urandom(16).hex()
                header = BranchHeader(
                    opened.token, name, kind, target, self.app, QUERY, batch, partition=number
                )
                staged.append(self.task.stage(header, rows))
        driver.commit_batch(self.app, QUERY, batch, opened.token, staged)
        for entry in driver.unapplied(self.app):
            for each in entry.to_apply:
                found = driver.read_branches(each.branches)
                bodies = [body for rows in found for body in rows.column("body").to_pylist()]
                self.table.setdefault(entry.sequence, bodies)
            driver.mark_applied(self.app, entry.sequence)
        for entry in driver.unmirrored(self.app):
            driver.mark_mirrored(self.app, entry.sequence)
        driver.ack(self.app, end)

    def require_once(self) -> None:
        """Each row that was sent, and nothing that waits."""
        deadline = time.monotonic() + WAIT_S
        while (found := self._published()).total() < len(self.sent) and time.monotonic() < deadline:
            time.sleep(0.02)  # markers come after a decision
        assert found == Counter(self.sent)
        assert Counter(itertools.chain(*self.table.values())) == Counter(self.sent)
        assert sorted(self.table) == [*range(1, self.batches + 1)]
        entries = self.operator.entries(self.app)
        assert [(entry.sequence, entry.batch_id) for entry in entries] == [
            (number + 1, number) for number in range(self.batches)
        ]
        assert not self.operator.unapplied(self.app) and not self.operator.unmirrored(self.app)

    def _published(self) -> Counter[bytes]:
        found = self.operator.available(self.operator.logs([self.target]))
        slices = [(log, one.start, one.end) for log, one in found.items()]
        return Counter(
            body for rows in self.operator.browse(slices) for body in rows.column("body").to_pylist()
        )

    def _end(self) -> None:
        self.driver.close()
        self.task.close()

    def close(self, *, topics: bool = False) -> None:
        """``topics``: they are not needed any more; a node that has many starts late."""
        self._end()
        if topics:
            for topic in (
                self.source, self.target, names.app_topic(self.app), names.stage_topic(self.app)
            ):  # fmt: skip
                self.operator.client.delete_topic(topic)
        self.operator.close()


@dataclass(frozen=True)
class Case:
    """``name``: of a request, ``turn``: which one of that name in two micro-batches, from 1 on."""

    name: str
    turn: int
    moment: Moment
    ends_driver: bool

    def __str__(self) -> str:
        return f"{self.name} {self.turn} {self.moment.value}{', driver too' if self.ends_driver else ''}"


def run(pipeline: Pipeline, case: Case) -> None:
    """Two micro-batches, in which the node dies once, and one behind them."""
    kills, turns = pipeline.kills, itertools.count(1)

    def chosen(name: str) -> bool:
        return name == case.name and next(turns) == case.turn

    kills.plan(chosen, case.moment, ends_driver=case.ends_driver)
    for _ in range(2):
        pipeline.send()
        pipeline.run()
    kills.revive()
    pipeline.send()
    pipeline.run()
    pipeline.require_once()


def requests_of(nodes: Cluster) -> Counter[str]:
    """How many of each name the first two micro-batches of an app send."""
    kills = Kills(nodes)
    pipeline = Pipeline(kills)
    for _ in range(2):
        pipeline.send()
        pipeline.run()
    pipeline.close(topics=True)
    return Counter(kills.seen)


@pytest.fixture(scope="module")
def one_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with real_cluster(tmp_path_factory.mktemp("kafka"), settings=SETTINGS, heap="512m") as started:
        yield started


@pytest.fixture(scope="module")
def three_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with real_cluster(tmp_path_factory.mktemp("kafka"), 3, settings=SETTINGS, heap="512m") as started:
        yield started


@pytest.fixture(scope="module")
def three_without_replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Of txmq's topics and the queues: a coordinator goes on while a log has no leader."""
    settings = SETTINGS | {"default.replication.factor": "1", "min.insync.replicas": "1"}
    with real_cluster(tmp_path_factory.mktemp("kafka"), 3, settings=settings, heap="512m") as started:
        yield started


# a claim, a stage, and within a decision: its rows and its end
FIRST = (
    Case("Produce journal", 1, Moment.DONE, True),
    Case("Produce stage", 1, Moment.DONE, False),
    Case("Produce decisions+target", 1, Moment.DONE, True),
    Case("EndTransaction", 2, Moment.DONE, False),
)
# a fence, and the end of a decision in other ways
MORE = (
    Case("InitProducer", 1, Moment.DONE, False),
    Case("EndTransaction", 1, Moment.BEFORE, False),
    Case("EndTransaction", 2, Moment.DONE, True),
)


@pytest.mark.parametrize("cases", [FIRST, pytest.param(MORE, marks=pytest.mark.soak)], ids=["first", "more"])
def test_a_node_that_dies_with_what_it_has_done_unanswered_leaves_every_row_once(
    one_node: Cluster, cases: tuple[Case, ...]
) -> None:
    """A killed node may come back with the end of a transaction that it never tells its logs (docs/kafka_operations.md)."""
    pipeline = Pipeline(Kills(one_node))
    for case in cases:
        run(pipeline, case)
        assert pipeline.kills.killed is not None, f"{case} never came: {Counter(pipeline.kills.seen)}"
    pipeline.close()


@pytest.mark.soak
@pytest.mark.parametrize("moment", Moment, ids=lambda moment: moment.name.lower())
@pytest.mark.parametrize("running", ["one_node", "three_nodes", "three_without_replicas"])
def test_soak_whatever_request_a_node_dies_at_every_row_is_there_once(
    running: str, moment: Moment, request: pytest.FixtureRequest, seed: int, rounds: int
) -> None:
    """Each request of the first two micro-batches of an app, the first of each kind first, ``rounds`` of
    them.
    """
    nodes: Cluster = request.getfixturevalue(running)
    replicas = 3 if running == "three_nodes" else 1
    choice = random.Random(seed)
    sent = requests_of(nodes)
    cases = [
        Case(name, turn, moment, choice.random() < 0.5 and name not in BESIDE)
        for name, times in sent.items()
        for turn in range(1, times + 1)
        if name not in BESIDE or turn == 1
    ]
    choice.shuffle(cases)
    cases = sorted(cases, key=lambda case: case.turn)[:rounds]
    killed, tries = 0, Counter[str]()
    for case in cases:
        pipeline = Pipeline(Kills(nodes, replicas))
        try:
            run(pipeline, case)
        except Exception as error:
            raise AssertionError(f"{case}: {pipeline.tries}") from error
        killed += pipeline.kills.killed is not None
        tries += pipeline.tries
        pipeline.kills.revive()
        print(f"{case}: {dict(pipeline.tries)}", flush=True)
        pipeline.close(topics=True)
    print(f"\nof {len(cases)} requests, {killed} killed a node; tried again: {dict(tries)}")
    assert killed > 0.8 * len(cases)  # what runs beside a micro-batch may come elsewhere
