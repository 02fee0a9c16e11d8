"""Histories of one journal agree on every claim, whoever writes, replays and compacts, in any order."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from broker_core.core.errors import CheckpointMismatch, KafkaError
from broker_core.core.records import ClaimRecord, ReadRecord, canonical
from broker_core.engine import START, Limit, Origin
from broker_core.kafka.journal import history
from broker_core.kafka.journal.history import History, PositionRecord, Proposal, read_key, surviving
from broker_core.kafka.topics.entry import Entry, Row, dumps, fields_of
from broker_core.micro_batch.claims import claim
from broker_core.micro_batch.claims.claim import Claims
from broker_core.micro_batch.claims.finished import CommittedBelow
from broker_core.micro_batch.claims.next_range import next_range
from broker_core.micro_batch.ledger import Ledger
from tests.make import around
from tests.micro_batch.partitions import APP, Partitions

DRIVERS = 3
drivers = st.integers(0, DRIVERS - 1)


class Log:
    """A partition as rows, and what compaction does to it."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.end = 0
        self.cleaned = 0

    def append(self, entries: list[Entry]) -> int:
        first = self.end
        for entry in entries:
            value = None if entry.value is None else entry.value.encode()
            self.rows.append(Row(self.end, 0, entry.key.encode(), value))
            self.end += 1
        return first

    def compact(self, dirty: int, rewritten: int, *, tombstones: bool) -> None:
        """``dirty``: up to where keys were looked up; ``rewritten``: up to where segments were exchanged
        before a crash of the cleaner.
        """
        last = {row.key: row.offset for row in self.rows if row.offset < dirty}
        self.rows = [
            row
            for row in self.rows
            if row.offset >= min(rewritten, dirty)
            or (
                row.offset == last[row.key]
                and not (tombstones and row.value is None and row.offset < self.cleaned)
            )
        ]
        if rewritten >= dirty:
            self.cleaned = dirty


class Reader:
    """A driver. One that comes later than tombstones are kept begins again, as a journal does."""

    def __init__(self) -> None:
        self.late = False
        self.history = History(APP)
        self.position = 0

    def catch_up(self, log: Log) -> set[str]:
        if self.late:
            self.__init__()  # type: ignore[misc]
        rows = [row for row in log.rows if row.offset >= self.position]
        accepted = self.history.apply(rows if self.position else surviving(rows))
        self.position = log.end
        return accepted

    def claims(self) -> list[ClaimRecord]:
        """In the order of their positions."""
        return [each for each in self.history.claims.records() if isinstance(each, ClaimRecord)]

    def state(self) -> Any:
        """Everything that decides what a driver answers."""
        others = [each for each in self.history.claims.records() if not isinstance(each, ClaimRecord)]
        return (
            self.history.version,
            self.history.claims.position(APP),
            self.claims(),
            sorted(f"{type(each).__name__} {canonical(fields_of(each))}" for each in others),
            self.history.positions,
            self.history.facts,
            set(self.history._void),
        )


class Journals(RuleBasedStateMachine):
    """Drivers of one app that know each other's changes late, or never."""

    def __init__(self) -> None:
        super().__init__()
        self.log = Log()
        self.drivers = [Reader() for _ in range(DRIVERS)]
        self.queue = Partitions(orders=[0, 0], events=[0])
        self.ends: dict[tuple[int, str], dict[str, int]] = {}  # (lineage, start) -> end, as it was answered
        self.changes = 0

    @initialize()
    def small(self) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(claim, "KEPT_CLAIMS", 2)
        self.patch.setattr(history, "GARBAGE", 2)
        self.patch.setattr(history, "KEPT_READS", 2)

    def teardown(self) -> None:
        if hasattr(self, "patch"):
            self.patch.undo()

    def propose(self, driver: int, work: Any, *, released: bool = False) -> None:
        """A change computed from what the driver knows now. Whether it counts, the log says."""
        reader = self.drivers[driver]
        if reader.late:
            reader.catch_up(self.log)
        try:
            _, proposal = reader.history.compute(work)
        except CheckpointMismatch:
            return
        self.changes += 1
        change = f"{self.changes:x}"
        entries = reader.history.entries(proposal, change)
        known = reader.position == self.log.end
        if entries:
            self.log.append(entries)
            accepted = reader.catch_up(self.log)
            assert not known or change in accepted  # nobody came between
            if released and change in accepted:
                self.ends.clear()

    @rule(driver=drivers)
    def catch_up(self, driver: int) -> None:
        self.drivers[driver].catch_up(self.log)

    @rule(driver=drivers)
    def restart(self, driver: int) -> None:
        self.drivers[driver] = Reader()
        self.drivers[driver].catch_up(self.log)

    @rule(log=st.sampled_from(["orders/0", "orders/1", "events/0"]), count=st.integers(1, 3))
    def grow(self, log: str, count: int) -> None:
        queue, _, number = log.partition("/")
        self.queue.ends[queue][int(number)] += count

    @rule(
        driver=drivers,
        queues=st.sampled_from([("orders",), ("orders", "events")]),
        resume=st.booleans(),
        symbolic=st.booleans(),
    )
    def claim(self, driver: int, queues: tuple[str, ...], resume: bool, symbolic: bool) -> None:
        known = self.drivers[driver].claims()
        newest = [
            each
            for each in known
            if set(each.end) == {log for queue in queues for log in self.queue.of(queue)}
        ]
        start = dict.fromkeys(queues, START) if symbolic or not newest else dict(newest[-1].end)

        def work(claims: Claims, proposal: Proposal) -> None:
            next_range(
                claims,
                self.queue,
                proposal,
                APP,
                queues,
                start,
                Limit(),
                Origin(),
                "resume" if resume else "fail",
                CommittedBelow(Ledger()),
            )
            proposal.put(PositionRecord(APP, queues[0], "id", {"orders/0": self.changes}))

        self.propose(driver, work)

    @rule(driver=drivers, queue=st.sampled_from(["orders", "events"]))
    def release(self, driver: int, queue: str) -> None:
        def work(claims: Claims, proposal: Proposal) -> None:
            claims.release(self.queue, proposal, APP, queue, self.queue.of(queue))
            proposal.drop(PositionRecord, (APP, queue))

        self.propose(driver, work, released=True)

    @rule(driver=drivers, batch=st.integers(0, 5), ranges=st.integers(0, 3))
    def read(self, driver: int, batch: int, ranges: int) -> None:
        spans = {"orders/0": [ranges, ranges + 1]}
        record = ReadRecord(APP, "query", batch, canonical(sorted(spans)), spans)
        self.log.append([Entry(read_key(record, str(ranges)), dumps(fields_of(record)))])

    @rule(number=st.integers(0, 2), gone=st.booleans())
    def fact(self, number: int, gone: bool) -> None:
        self.log.append([Entry(f"applied/{number}", None if gone else dumps(number))])

    @rule(dirty=st.integers(0, 100), rewritten=st.integers(0, 100), tombstones=st.booleans())
    def compact(self, dirty: int, rewritten: int, tombstones: bool) -> None:
        """In per cent of the log. Its last record is in the active segment, which is never cleaned."""
        for driver in self.drivers:
            driver.late |= tombstones and driver.position < self.log.cleaned
        end = max(0, self.log.end - 1)
        self.log.compact(end * dirty // 100, end * rewritten // 100, tombstones=tombstones)

    @invariant()
    def all_agree(self) -> None:
        fresh = Reader()
        fresh.catch_up(self.log)
        expected = fresh.state()
        for reader in self.drivers:
            if reader.position == self.log.end:
                assert reader.state() == expected
        for each in fresh.claims():
            assert self.ends.setdefault((each.lineage, each.start), each.end) == each.end


@pytest.mark.slow
def test_drivers_that_race_agree_on_every_claim_also_after_compaction() -> None:
    rounds = int(os.environ.get("TXMQ_SOAK_ROUNDS", "1"))
    run_state_machine_as_test(
        Journals, settings=settings(max_examples=60 * rounds, stateful_step_count=50, deadline=None)
    )


def rows(*entries: Entry) -> list[Row]:
    log = Log()
    log.append(list(entries))
    return log.rows


@pytest.mark.parametrize(
    "value",
    [
        "[]",
        '{"put":["claim",{}]}',
        '{"version":1}',
        '{"version":1,"put":["queue",{}]}',
        '{"version":1,"put":["claim",{}]}',
    ],
)
def test_a_change_of_another_version_is_refused(value: str) -> None:
    with pytest.raises(KafkaError, match="this version cannot read"):
        History(APP).apply(rows(Entry("change/a/0", value)))


def drops_are_garbage_at_once(patch: pytest.MonkeyPatch) -> None:
    def at_once(take: Any, self: History, key: str, found: Any) -> None:
        take(self, key, found)
        self._stale |= dict.fromkeys(self._drops)

    around(patch, History, "_take", at_once)


def every_change_counts(patch: pytest.MonkeyPatch) -> None:
    def always(accepts: Any, self: History, key: str, found: Any) -> bool:
        return accepts(self, key, found) or accepts(self, key, {**found, "version": self.version + 1})

    around(patch, History, "_accepts", always)


def stale_goes_before_void(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(History, "garbage", lambda self: list(self._stale))


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize("rule_off", [drops_are_garbage_at_once, every_change_counts, stale_goes_before_void])
def test_a_rule_that_is_switched_off_is_found(rule_off: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rule_off(monkeypatch)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(
            Journals,
            settings=settings(
                max_examples=2_000,
                stateful_step_count=40,
                deadline=None,
                derandomize=True,
                phases=[Phase.generate],
                database=None,
            ),
        )


def test_a_void_record_whose_winner_is_gone_is_not_taken_in() -> None:
    """The cleaner crashed after it removed the winner, and before the loser: both have tombstones."""
    read = ReadRecord(APP, "q", 0, '["orders/0"]', {"orders/0": [0, 1]})
    fact = Entry(read_key(read, "x"), dumps(fields_of(read)))
    voided = ["read", {**fields_of(read), "ranges": {"orders/0": [-1, -1]}}]
    loser = Entry("change/b/0", dumps({"version": 1, "put": voided}))
    newer = Entry("change/c/0", dumps({"version": 2, "drop": "change/a/0"}))
    tombstones = [Entry("change/b/0", None), Entry("change/a/0", None)]
    found = History(APP)
    found.apply(surviving(rows(fact, loser, newer, *tombstones)))
    assert [*found.claims.reads.of_batch("q", 0)] == [read] and found.version == 2


def test_a_late_reader_lets_go_what_has_a_tombstone() -> None:
    """The change that dropped the record is compacted away."""
    position = PositionRecord(APP, "orders", "id", {})
    put = Entry("change/a/0", dumps({"version": 1, "put": ["position", fields_of(position)]}))
    found = History(APP)
    found.apply(rows(put))
    assert found.positions == {"orders": position}
    found.apply(rows(Entry("change/a/0", None)))
    assert found.positions == {}
