"""Random histories of several drivers over FakeKafka: requests fail in every way, one driver comes between
the requests of another, leaders move, partitions are added, the journal is cleaned.

Whatever happens, a start has one end, for everybody and for ever, and the claimed ranges are every committed
row once.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from broker_core.core.errors import CheckpointMismatch, TxmqError
from broker_core.core.records import canonical
from broker_core.engine import START, Limit, Vector
from broker_core.kafka import names
from broker_core.kafka.cluster.client import Client
from broker_core.kafka.journal import history
from broker_core.kafka.journal.history import History
from broker_core.kafka.protocol import port
from broker_core.kafka.protocol.codes import Code
from broker_core.kafka.protocol.port import Request, TopicPartition
from broker_core.kafka.source.source import KafkaSource
from broker_core.micro_batch.claims import claim as claims_module
from tests.gates import examples
from tests.kafka.bench.fake_kafka import LOST, REFUSED, UNANSWERED
from tests.kafka.bench.source_bench import APP, QUEUE, SourceBench, claim, read
from tests.make import around

JOURNAL = TopicPartition(names.app_topic(APP), names.JOURNAL)
DRIVERS, STEPS = 3, 40
PATIENCE_S = 1e6  # minutes pass between two requests, while partitions are added
FAULTS: list[Any] = [
    REFUSED,
    LOST,
    UNANSWERED,
    Code.NOT_LEADER_OR_FOLLOWER,
    Code.REQUEST_TIMED_OUT,
    Code.UNKNOWN_SERVER_ERROR,
]
BEHIND = (port.CommitOffsets, port.FindCoordinator)  # of a thread, for which nothing waits
UNCODED = (port.Metadata, port.ApiVersions)


class Pipeline:
    """One checkpoint, of which several drivers are alive."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.bench = SourceBench()
        self.sources: list[KafkaSource] = [self.bench.source(PATIENCE_S) for _ in range(DRIVERS)]
        self.ends: dict[str, Vector] = {}  # canonical start -> end, as somebody was answered
        self.passed = False  # batch 0: its end was acknowledged, or is a start, perhaps
        self.committed: list[bytes] = []
        self.busy: list[int] = []  # drivers with a request under way
        self.calm = False
        self.bench.kafka.fault = self.fault

    def fault(self, node: int, request: Request[Any]) -> str | Code | None:
        if self.calm or isinstance(request, BEHIND) or self.rng.random() > 0.1:
            return None
        if self.rng.random() < 0.5 and len(self.busy) < DRIVERS:
            self.step()  # another driver, between two requests of this one
            return None
        fault = self.rng.choice(FAULTS)
        return None if isinstance(fault, Code) and isinstance(request, UNCODED) else fault

    # -- steps -----------------------------------------------------------------------------------------------

    def step(self) -> None:
        """One thing that happens. What a driver does, it does alone: it has a lock."""
        rng = self.rng
        number = rng.choice([each for each in range(DRIVERS) if each not in self.busy])
        kind = rng.choice(["claim"] * 6 + ["send"] * 4 + ["ack", "restart", "move", "grow", "clean", "read"])
        if kind in ("claim", "ack", "read"):
            self.busy.append(number)
            {"claim": self.claim, "ack": self.ack, "read": self.read}[kind](self.sources[number])
            self.busy.remove(number)
        elif kind == "restart":
            self.sources[number] = self.bench.source(PATIENCE_S)
        elif kind == "send":
            self.quietly(self.send)
        elif kind == "move":
            self.move(JOURNAL if rng.random() < 0.5 else TopicPartition(QUEUE, 0))
        elif kind == "grow":
            self.quietly(self.grow)
        else:
            journal = self.bench.kafka.log(JOURNAL)
            if journal is not None and journal.batches:
                self.bench.kafka.compact(JOURNAL)

    def start(self) -> Vector:
        """Mostly the newest; sometimes that of a late driver."""
        starts: list[Vector] = [{QUEUE: START}, *self.ends.values()]
        return starts[-1] if self.rng.random() < 0.7 or len(starts) < 3 else self.rng.choice(starts[-3:-1])

    def claim(self, source: KafkaSource) -> None:
        start = self.start()
        if START in start.values() and len(self.ends) > 1:
            return  # a checkpoint asks for its beginning once
        self.passed |= START not in start.values()  # also where its answer is still under way
        try:
            end = claim(source, start, Limit(max_rows=self.rng.choice([1, 3, None])))
        except CheckpointMismatch:
            # another driver of the checkpoint finished batch 0 meanwhile, so it does not begin any more
            assert START in start.values() and self.passed
            return
        if end != start:
            assert self.ends.setdefault(canonical(start), end) == end

    def ack(self, source: KafkaSource) -> None:
        if self.ends:
            self.passed = True
            source.ack(APP, self.rng.choice([*self.ends.values()][-2:]))

    def read(self, source: KafkaSource) -> None:
        if len(self.ends) > 1:
            start, end = [*self.ends.values()][-2:]
            source.journal(APP).note_read("q", len(self.ends), source.resolve(APP, start, end))

    # -- what others do --------------------------------------------------------------------------------------

    def send(self) -> None:
        partition = self.rng.randrange(len(self.bench.kafka.topics[QUEUE].logs))
        count = self.rng.choice([1, 2, 5])
        bodies = [b"%d" % (len(self.committed) + number) for number in range(count)]
        commit = self.rng.choice([None, True, False])
        if commit is None:
            self.bench.send(partition, *bodies)
        else:
            self.bench.send_in_transaction(partition, *bodies, commit=commit)
        self.committed += bodies if commit is not False else []

    def grow(self) -> None:
        partitions = len(self.bench.kafka.topics[QUEUE].logs)
        if partitions < 5 and self.rng.random() < 0.3:
            self.bench.kafka.grow(QUEUE, partitions + 1)
            self.bench.now += 60

    def move(self, log: TopicPartition) -> None:
        found = self.bench.kafka.log(log)
        if found is not None:
            self.bench.kafka.move_leader(log, found.leader % 3 + 1, ends_unknown=self.rng.randrange(3))

    def quietly(self, work: Any) -> None:
        """What is not the engine's own: without faults."""
        calm, self.calm = self.calm, True
        try:
            work()
        finally:
            self.calm = calm

    def check(self) -> None:
        self.calm = True
        fresh = self.bench.source()
        start: Vector = {QUEUE: START}
        found: list[bytes] = []
        while canonical(start) in self.ends:
            end = self.ends[canonical(start)]
            for source in (fresh, *self.sources):
                ranges = source.resolve(APP, start, end)
            found += read(fresh, ranges, query="")
            start = end
        end = claim(fresh, start)
        if end != start:
            found += read(fresh, fresh.resolve(APP, start, end), query="")
        assert sorted(found) == sorted(self.committed)


def run(seed: int) -> None:
    pipeline = Pipeline(seed)
    for _ in range(STEPS):
        pipeline.step()
    pipeline.check()


@pytest.fixture(autouse=True)
def _much_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "GARBAGE", 3)


@pytest.mark.slow
@examples(40)
@given(st.integers(0, 2**32))
@example(1215)  # a driver ends batch 0 while another one asks for its start
@example(2208)  # and is not answered yet
def test_every_driver_gets_the_same_ends_and_every_row_once(seed: int) -> None:
    run(seed)


def run_many() -> None:
    for seed in range(300):
        run(seed)


# -- rules that are switched off -----------------------------------------------------------------------------


def offsets_say_nothing(patch: pytest.MonkeyPatch) -> None:
    """A change counts wherever it stands."""

    def always(accepts: Any, self: History, key: str, found: Any) -> bool:
        return accepts(self, key, found) or accepts(self, key, {**found, "version": self.version + 1})

    around(patch, History, "_accepts", always)


def changes_are_sent_again(patch: pytest.MonkeyPatch) -> None:
    """A change without an answer may then stand there twice, and the second one is void."""
    produce = Client.produce
    patch.setattr(
        Client, "produce", lambda self, batches, **more: produce(self, batches, **{**more, "repeat": True})
    )


def claims_are_made_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(claims_module.Claims, "at", lambda self, app_id, start, lineage=None: None)


@pytest.mark.parametrize("rule_off", [offsets_say_nothing, changes_are_sent_again, claims_are_made_again])
def test_a_rule_that_is_switched_off_is_found(rule_off: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rule_off(monkeypatch)
    with pytest.raises((AssertionError, TxmqError)):
        run_many()
