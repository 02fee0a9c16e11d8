"""Random histories of drivers on one checkpoint: each opens, stages and decides in its own time, overtakes
another one in the middle of a request, loses answers, dies and is replaced.

Whatever happens, every row of every batch is published once, the ledger has one entry for each batch, and no
driver is refused: none of them skips a batch, so a gap or a conflict would be a false one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from broker_core.core.errors import TransactionState, TxmqError
from broker_core.core.records import LedgerRecord
from broker_core.engine import StagedBranch
from broker_core.kafka.cluster.client import Client
from broker_core.kafka.protocol.port import EndTransaction, Request, TopicPartition
from broker_core.kafka.sink import decisions as owner_module
from broker_core.kafka.sink.decisions import FencedApp
from broker_core.kafka.sink.producer import ProducerEpoch, ProducerTransaction
from tests.kafka.bench.fake_kafka import LATE, LOST, REFUSED, UNANSWERED
from tests.kafka.bench.sink_bench import APP, Cluster, Driver

DRIVERS, ROWS = 3, 3
KILLED, OVERTAKEN = "killed", "overtaken"


class Killed(BaseException):
    pass


class Process:
    """A driver with its Spark loop: which batch it is in, and how far."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.batch = -1
        self.token = ""
        self.branches: list[StagedBranch] | None = None


class World:
    def __init__(self, version: int, marker_lag: int) -> None:
        self.cluster = Cluster(version)
        self.cluster.kafka.marker_lag = marker_lag
        self.processes = [Process(self.cluster.driver()) for _ in range(DRIVERS)]
        self.committed = 0  # Spark's commit log: batches below are in it
        self.due: tuple[int, str, int] | None = None  # in so many requests: what, and who
        self.running: list[int] = []  # one in the middle of a phase, and the one that overtakes it
        self.cluster.kafka.fault = self.fault

    def fault(self, node: int, request: Request[Any]) -> str | None:
        if self.due is None or len(self.running) > 1:
            return None
        left, what, who = self.due
        self.due = (left - 1, what, who) if left else None
        if left:
            return None
        if what == KILLED:
            raise Killed
        if what == OVERTAKEN:
            if who not in self.running:
                self.act(who, lambda: self.advance(who))
            return None
        return what

    def step(self, kind: str, who: int, number: int) -> None:
        kafka = self.cluster.kafka
        if kind in ("advance", "apply"):
            try:
                self.act(who, lambda: self.advance(who) if kind == "advance" else self.apply(who, number))
            except Killed:
                self.processes[who] = Process(self.cluster.driver())
        elif kind == "move":
            kafka.move_coordinator(f"txmq.{APP}", 1 + number % 3)
            kafka.move_leader(TopicPartition("orders", number % 2), 1 + who % 3)
        elif kind == "age":
            for known in kafka.transactions.all.values():
                known.began -= 100
        elif kind == "deliver":
            kafka.deliver_late()
        else:
            self.due = number, kind, who

    def act(self, who: int, work: Callable[[], None]) -> None:
        self.running.append(who)
        try:
            work()
        finally:
            self.running.pop()

    def apply(self, who: int, sequence: int) -> None:
        self.processes[who].driver.sink.mark_applied(APP, 1 + sequence % 8)

    def advance(self, who: int) -> None:
        """One phase of the driver's batch."""
        process = self.processes[who]
        driver, number = process.driver, process.batch
        if number < 0:
            number = self.committed
            opened = driver.open(number)
            process.batch, process.token, process.branches = number, opened.token, None
            if opened.already:
                process.branches = []
        elif process.branches is None:
            process.branches = [
                driver.stage(process.token, [body], batch=number, partition=task)
                for task, body in enumerate(bodies(number))
            ]
            process.branches.append(
                driver.stage(process.token, [b"row"], batch=number, kind="append", target={"table": "t"})
            )
        else:
            driver.commit(number, process.token, process.branches)
            self.committed = max(self.committed, number + 1)
            process.batch = -1

    def finish(self) -> None:
        """A clean restart, and one batch more."""
        self.cluster.kafka.fault = lambda node, request: None
        self.cluster.kafka.deliver_late()
        self.processes = [Process(self.cluster.driver())]
        last = self.committed + 1
        while self.committed <= last:
            self.advance(0)
        self.cluster.kafka.deliver_late()
        expected = [body for number in range(self.committed) for body in bodies(number)]
        assert sorted(self.cluster.bodies()) == sorted(expected)
        assert self.cluster.entries() == [(number + 1, number) for number in range(self.committed)]
        for entry in self.cluster.driver().sink.unapplied(APP):
            for to_apply in entry.to_apply:
                (found,) = self.cluster.driver().sink.read_branches(to_apply.branches)
                assert found["body"].to_pylist() == [b"row"]


def bodies(batch: int) -> list[bytes]:
    return [b"%d:%d" % (batch, task) for task in range(ROWS)]


STEPS = st.tuples(
    st.sampled_from(
        ["advance"] * 8
        + [REFUSED, LOST, UNANSWERED, LATE, KILLED, OVERTAKEN, OVERTAKEN]
        + ["move", "age", "deliver", "deliver", "apply"]
    ),
    st.integers(0, DRIVERS - 1),
    st.integers(0, 12),
)


def history(version: int, steps: list[tuple[str, int, int]], marker_lag: int = 0) -> None:
    world = World(version, marker_lag)
    for step in steps:
        world.step(*step)
    world.finish()


def search(version: int, examples: int, *, seed: int | None = None) -> None:
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate] if seed is not None else list(Phase),
    )
    @given(st.lists(STEPS, min_size=30, max_size=60), st.integers(0, 4))
    def run(steps: list[tuple[str, int, int]], marker_lag: int) -> None:
        history(version, steps, marker_lag)

    run()


@pytest.mark.slow
@pytest.mark.parametrize("version", [1, 2])
def test_every_history_publishes_each_row_once_and_refuses_no_driver(version: int) -> None:
    search(version, 25 * int(os.environ.get("TXMQ_SOAK_ROUNDS", "1")))


# -- rules switched off --------------------------------------------------------------------------------------


def believe_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever memory says is answered from an epoch that was kept."""

    def answer(
        self: FencedApp, ask: Callable[[], LedgerRecord | None], lasting_ms: int = owner_module.TIMEOUT_MS
    ) -> LedgerRecord | None:
        if not self.epoch.is_held:
            self.fence(lasting_ms)
        return ask()

    monkeypatch.setattr(FencedApp, "answer", answer)


def use_epochs_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """An epoch serves every transaction, also after a lost answer, until it is fenced."""
    monkeypatch.setattr(Client, "failures", 0)  # a lost node leads to a fence, which takes another epoch
    begin = ProducerEpoch.begin

    def kept(self: ProducerEpoch) -> ProducerTransaction:
        producer = self._producer
        assert producer is not None
        transaction = begin(self)
        self.renew(producer)
        return transaction

    def until_fenced(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(self: ProducerTransaction, *args: Any, **options: Any) -> Any:
            try:
                return call(self, *args, **options)
            except TransactionState:
                self._epoch._producer = None
                raise

        return called

    monkeypatch.setattr(ProducerEpoch, "begin", kept)
    monkeypatch.setattr(ProducerEpoch, "release", lambda self: None)
    for name in ("join", "append", "_end"):
        monkeypatch.setattr(ProducerTransaction, name, until_fenced(getattr(ProducerTransaction, name)))


def judge_without_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fence is not followed by a replay."""
    monkeypatch.setattr(FencedApp, "fence", lambda self, lasting_ms=60_000: self.epoch.fence(lasting_ms))


def delete_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stage topic is cleaned whatever is still to be applied."""
    from broker_core.kafka.sink.staged_branches import Cleaner

    clean = Cleaner.clean
    monkeypatch.setattr(Cleaner, "clean", lambda self, unapplied: clean(self, []))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("version", "rule"),
    [(2, believe_memory), (1, judge_without_replay), (2, judge_without_replay), (2, delete_to_the_end)],
)
def test_a_rule_that_is_switched_off_is_found(
    version: int, rule: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    rule(monkeypatch)
    with pytest.raises((AssertionError, TxmqError)):
        search(version, 300, seed=1)


def overtaken(version: int) -> None:
    """The other driver decides two batches; then this one, whose epoch was kept, goes on with the next
    one.
    """
    world = World(version, 0)
    for who in (0, 1, 1, 0):
        for _ in range(3):
            world.advance(who)
    world.finish()


def late_end(version: int) -> None:
    """The end of a batch is lost in the network, and arrives in the middle of the next one."""
    world = World(version, 0)
    seen = 0

    def fault(node: int, request: Request[Any]) -> str | None:
        nonlocal seen
        seen += isinstance(request, EndTransaction)
        if isinstance(request, EndTransaction) and seen == 2:  # behind the one of the lineage
            return LATE
        if isinstance(request, EndTransaction) and seen == 4:
            world.cluster.kafka.deliver_late()
            return LOST
        return None

    world.cluster.kafka.fault = fault
    for _ in range(6):
        world.advance(0)
    world.finish()


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("scenario", [overtaken, late_end])
def test_the_scenarios_hold(scenario: Callable[[int], None], version: int) -> None:
    scenario(version)


def test_c1_a_memory_that_is_believed_raises_a_false_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    believe_memory(monkeypatch)
    with pytest.raises(TxmqError, match="expects batch"):
        overtaken(2)


def test_c4_a_late_end_of_an_epoch_that_is_used_twice_ends_another_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_epochs_twice(monkeypatch)
    with pytest.raises(AssertionError):
        late_end(1)
