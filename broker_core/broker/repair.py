"""Repair of a catalog whose records contradict each other, if other records determine the right value.

Not here: damaged bytes (a row that does not match its checksum is refused earlier). Pure, from records
alone, so that ``txmq broker verify`` reports the same as opening does. What cannot be derived is a problem:
the messages concerned are lost until the catalog is repaired, and reading them raises CorruptCatalog;
everything else is available.

Invariant: nothing that a queue, an open transaction or a decided block still needs is dropped; repairing
twice changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from broker_core.broker.access.users import name_of
from broker_core.broker.queue.progress import IntervalSet
from broker_core.broker.topology.topology import PREDECLARED
from broker_core.core.address import VHOST
from broker_core.core.change import ROUTE, Damaged, Drop, InboxRow, routes_of
from broker_core.core.ids import BlockId, QueueId
from broker_core.core.records import (
    AttemptRecord,
    BindingRecord,
    ClaimRecord,
    DeliveryRecord,
    ExchangeBindingRecord,
    ExchangeRecord,
    HistoryRecord,
    HoleRecord,
    LedgerRecord,
    LineageRecord,
    MessageIdsRecord,
    OriginRecord,
    PartRecord,
    PolicyRecord,
    PreparedRecord,
    ProgressRecord,
    QueueRecord,
    ReadRecord,
    Record,
    ReleaseNoteRecord,
    ReleaseRecord,
    RunRecord,
    VhostRecord,
)

R = TypeVar("R", bound=Record)

_IN_HOSTS: tuple[type[Any], ...] = (
    QueueRecord, ExchangeRecord, BindingRecord, ExchangeBindingRecord, ClaimRecord, OriginRecord,
    ReadRecord, LineageRecord, AttemptRecord, PartRecord, LedgerRecord, ReleaseRecord, ReleaseNoteRecord,
    PreparedRecord, PolicyRecord,
)  # fmt: skip
_SHOWN = 3  # offsets or names in one line


class Info(Protocol):
    """The attributes of a stored block that the domain uses (``store.port.BlockInfo``)."""

    @property
    def block_id(self) -> BlockId: ...
    @property
    def rows(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...


@dataclass(slots=True)
class RepairResult:
    """What to load instead of the stored records, and what to write so that it is stored correctly."""

    records: list[Record] = field(default_factory=list)
    journal: list[Record | Drop] = field(default_factory=list)
    done: list[str] = field(default_factory=list)  # what was derived
    problems: list[str] = field(default_factory=list)  # what could not be derived
    # by (queue_id, first): why its rows cannot be read
    lost_runs: dict[tuple[QueueId, int], str] = field(default_factory=dict)
    # missing blocks that something names: rows, and the reason
    lost_blocks: dict[BlockId, tuple[int, str]] = field(default_factory=dict)
    # (queue_id, block_id, row): two messages have one offset
    unread: set[tuple[QueueId, BlockId, int]] = field(default_factory=set)


class _Log:
    """Which entries a queue has, and which are settled."""

    def __init__(
        self, queue: QueueRecord, progress: ProgressRecord | None, holes: Iterable[HoleRecord]
    ) -> None:
        self.queue = queue
        self.progress = progress or ProgressRecord(queue.queue_id, "", 0, 0, 0, 0)
        self.holes = list(holes)
        self.floor = max(0, self.progress.floor)
        self.settled = IntervalSet()
        for hole in self.holes:
            if hole.end > max(hole.start, self.floor):
                self.settled.add(max(hole.start, self.floor), hole.end)
        if len(self.settled) and self.settled.first()[0] <= self.floor:
            self.floor = self.settled.first()[1]
            self.settled.drop_below(self.floor)
        # what is not settled below ``acked`` is skipped by the owner
        self.acked = (
            min(self.progress.acked, max(self.floor, self.progress.next_offset))
            if self.progress.owner
            else self.floor
        )

    @property
    def name(self) -> str:
        return f"queue '{self.queue.name}'"

    def deletable(self, start: int, end: int) -> bool:
        """Returns whether nothing needs these entries."""
        if self.progress.owner and end > self.acked:
            return False
        return end <= self.floor or self.settled.covers(max(start, self.floor), end)

    def is_settled(self, offset: int) -> bool:
        return offset < self.floor or self.settled.contains(offset)


def repair(records: Sequence[Record], inbox: Sequence[InboxRow], blocks: Iterable[Info]) -> RepairResult:
    """Repairs the records. ``blocks`` are those in segments; the rows of the others are ``inbox``, in
    (block_id, row) order.
    """
    return _Repair(records, inbox, blocks).run()


def leave_out_history(found: RepairResult, damaged: Iterable[Damaged]) -> None:
    """Drops rows of the history of commits that cannot be read: no message needs them."""
    for each in damaged:
        if each.number:
            found.journal.append(Drop(HistoryRecord, (each.number,)))
        found.done.append(f"{each.why}; the history of commits continues without it")


class _Repair:
    def __init__(self, records: Sequence[Record], inbox: Sequence[InboxRow], blocks: Iterable[Info]) -> None:
        self.found = RepairResult()
        self.inbox = inbox
        self.rows = {info.block_id: info.rows for info in blocks}
        self.rows.update((row.block_id, row.row + 1) for row in inbox)
        self.by_class: dict[type[Record], list[Any]] = {}
        for record in records:
            self.by_class.setdefault(type(record), []).append(record)
        self.logs: dict[QueueId, _Log] = {}

    def of(self, kind: type[R]) -> list[R]:
        return self.by_class.get(kind, [])

    def run(self) -> RepairResult:
        _keep_hosts(self)
        _keep_topology(self)
        self._queues()
        self._deliveries()
        self._runs()
        self._inbox()
        self._parts()
        self._prepared()
        self.found.records = [record for records in self.by_class.values() for record in records]
        return self.found

    # -- one class of records --------------------------------------------------------------------------------
    def keep(self, kind: type[R], holds: Callable[[R], bool], what: Callable[[list[R]], str]) -> None:
        """Drops the records for which ``holds`` is false."""
        whole: list[R] = []
        gone: list[R] = []
        for record in self.of(kind):
            (whole if holds(record) else gone).append(record)
        if gone:
            self.by_class[kind] = whole
            self.found.journal += [Drop(kind, record.key) for record in gone]
            self.found.done.append(what(gone))

    def put(self, old: R | None, new: R) -> None:
        records = self.by_class.setdefault(type(new), [])
        if old is not None:
            records.remove(old)
        records.append(new)
        self.found.journal.append(new)

    # -- queues ----------------------------------------------------------------------------------------------
    def _queues(self) -> None:
        ids = {queue.queue_id for queue in self.of(QueueRecord)}
        for kind in (ProgressRecord, HoleRecord, DeliveryRecord, MessageIdsRecord, RunRecord):
            self.keep(
                kind,
                lambda record: record.queue_id in ids,  # type: ignore[attr-defined]
                lambda gone: (
                    f"{len(gone)} records of table {gone[0].TABLE} of queues that do not exist were dropped"
                ),
            )
        progress = {record.queue_id: record for record in self.of(ProgressRecord)}
        holes: dict[QueueId, list[HoleRecord]] = {}
        for hole in self.of(HoleRecord):
            holes.setdefault(hole.queue_id, []).append(hole)
        for queue in self.of(QueueRecord):
            log = self.logs[queue.queue_id] = _Log(
                queue, progress.get(queue.queue_id), holes.get(queue.queue_id, ())
            )
            self._settled(log, progress.get(queue.queue_id))

    def _settled(self, log: _Log, progress: ProgressRecord | None) -> None:
        """Corrects the holes: they must be above the floor and not touch it or each other."""
        expected = {start: HoleRecord(log.queue.queue_id, start, end) for start, end in log.settled}
        stale = [hole for hole in log.holes if expected.get(hole.start) != hole]
        for hole in stale:
            self.by_class[HoleRecord].remove(hole)
            if hole.start not in expected:
                self.found.journal.append(Drop(HoleRecord, hole.key))
        for hole in set(expected.values()) - set(log.holes):
            self.put(None, hole)
        if stale:
            self.found.done.append(
                f"{log.name}: {len(stale)} settled ranges below its floor, or touching it or each other, "
                "were merged"
            )
        if progress is None and log.floor == 0 and not expected:
            return
        right = replace(log.progress, floor=log.floor, acked=log.acked)
        if right != progress:
            self.put(progress, right)
            self.found.done.append(
                f"{log.name}: its floor is {log.floor}, by what is settled; its record said "
                f"{log.progress.floor}"
            )

    def _deliveries(self) -> None:
        self.keep(
            DeliveryRecord,
            lambda record: record.count > 0 and not self.logs[record.queue_id].is_settled(record.offset),
            lambda gone: f"{len(gone)} delivery counts of settled messages were dropped",
        )

    def _runs(self) -> None:
        def text(gone: list[RunRecord]) -> str:
            names = _excerpt(f"{self.logs[run.queue_id].name} at offset {run.first}" for run in gone)
            return f"{len(gone)} runs of messages that nothing needs any more were dropped ({names})"

        self.keep(
            RunRecord,
            lambda run: (
                run.count > 0 and not self.logs[run.queue_id].deletable(run.first, run.first + run.count)
            ),
            text,
        )
        by_queue: dict[QueueId, list[RunRecord]] = {}
        for run in self.of(RunRecord):
            by_queue.setdefault(run.queue_id, []).append(run)
            why = self._wrong(run)
            if why:
                self._lose(run, why)
        for runs in by_queue.values():
            runs.sort(key=lambda run: run.first)
            for index, run in enumerate(runs[1:], 1):
                before = runs[index - 1]
                if run.first < before.first + before.count:
                    self._overlap(runs, index)

    def _overlap(self, runs: list[RunRecord], index: int) -> None:
        """Handles two runs with common offsets: neither can be trusted. The first ends where the second
        begins; both are lost.
        """
        before, run = runs[index - 1], runs[index]
        end = max(before.first + before.count, run.first + run.count)
        shorter, longer = replace(before, count=run.first - before.first), replace(run, count=end - run.first)
        for old, new in ((before, shorter), (run, longer)):
            self.by_class[RunRecord].remove(old)
            if new.count:
                self.by_class[RunRecord].append(new)
        runs[index - 1], runs[index] = shorter, longer
        text = f"the runs at offsets {before.first} and {run.first} overlap"
        self.found.problems.append(f"{self.logs[run.queue_id].name}: {text}")
        for part in (shorter, longer):
            self.found.lost_runs[(part.queue_id, part.first)] = text

    def _wrong(self, run: RunRecord) -> str:
        """Returns why the rows of a run cannot be found; empty if they can."""
        if run.block_id not in self.rows:
            return f"block {run.block_id} does not exist"
        selected = last = run.count
        if run.bitmap:
            bits = int.from_bytes(run.bitmap, "little")
            selected, last = bits.bit_count(), bits.bit_length()
        if selected != run.count:
            return f"its bitmap selects {selected} rows, not {run.count}"
        if run.row < 0 or run.row + last > self.rows[run.block_id]:
            rows = self.rows[run.block_id]
            return f"rows {run.row} to {run.row + last} are not in block {run.block_id} of {rows} rows"
        return ""

    def _lose(self, run: RunRecord, why: str) -> None:
        self.found.problems.append(f"{self.logs[run.queue_id].name}, run at offset {run.first}: {why}")
        self.found.lost_runs[(run.queue_id, run.first)] = why

    def _inbox(self) -> None:
        """Checks messages of open blocks: each must have its offset alone."""
        taken = {queue_id: IntervalSet() for queue_id in self.logs}
        for run in self.of(RunRecord):
            taken[run.queue_id].add(run.first, run.first + run.count)
        seen: set[tuple[QueueId, int]] = set()
        for row in self.inbox:
            if len(row.routes) % ROUTE.size:
                self.found.problems.append(
                    f"open block {row.block_id}, row {row.row}: its routes are not pairs of 64-bit numbers"
                )
                continue
            for queue_id, offset in routes_of(row):
                log = self.logs.get(queue_id)
                if log is None:
                    continue
                if taken[queue_id].contains(offset) or (queue_id, offset) in seen:
                    self.found.unread.add((queue_id, row.block_id, row.row))
                    if not log.is_settled(offset):
                        self.found.problems.append(
                            f"{log.name}: row {row.row} of open block {row.block_id} has offset {offset}, "
                            "which another message has"
                        )
                seen.add((queue_id, offset))

    # -- transactions ----------------------------------------------------------------------------------------
    def _parts(self) -> None:
        attempts = {(attempt.vhost, attempt.token) for attempt in self.of(AttemptRecord)}
        decided = {
            (entry.vhost, branch[2])
            for entry in self.of(LedgerRecord)
            if not entry.applied
            for branch in entry.branches
        }

        def text(gone: list[PartRecord]) -> str:
            names = _excerpt(f"part {part.part} of branch {part.branch}" for part in gone)
            what = "staged parts of transactions that are over, or whose rows do not exist,"
            return f"{len(gone)} {what} were dropped ({names})"

        def lacks_rows(part: PartRecord) -> bool:
            return bool(part.block_id) and self.rows.get(part.block_id, -1) < part.rows

        self.keep(
            PartRecord,
            lambda part: (
                (part.vhost, part.branch) in decided
                or ((part.vhost, part.token) in attempts and not lacks_rows(part))
            ),
            text,
        )
        for part in self.of(PartRecord):
            if lacks_rows(part):
                where = f"part {part.part} of branch {part.branch}, which is decided and not applied"
                self._lost_block(
                    part.block_id,
                    part.rows,
                    f"{where}: its {part.rows} rows are not in block {part.block_id}",
                )

    def _prepared(self) -> None:
        for prepared in self.of(PreparedRecord):
            for route in prepared.routes:
                if isinstance(route, Mapping):
                    block_id, rows = route["block"][:2]
                    if self.rows.get(block_id, -1) < rows:
                        where = f"prepared transaction '{name_of(prepared.xid)}'"
                        self._lost_block(
                            block_id, rows, f"{where}: its {rows} messages are not in block {block_id}"
                        )

    def _lost_block(self, block_id: BlockId, rows: int, text: str) -> None:
        self.found.problems.append(text)
        if block_id not in self.rows:
            self.found.lost_blocks.setdefault(block_id, (rows, text))


def _keep_hosts(repair: _Repair) -> None:
    """Makes a virtual host that records name and that has none."""
    hosts = {VHOST, *(record.name for record in repair.of(VhostRecord))}
    used = {record.vhost for kind in _IN_HOSTS for record in repair.of(kind)}
    for name in sorted(used - hosts):
        repair.put(None, VhostRecord(name, 0, -1, -1, -1))
        repair.found.done.append(f"virtual host '{name}' was made again, without limits: queues are in it")


def _keep_topology(repair: _Repair) -> None:
    queues = {(queue.vhost, queue.name) for queue in repair.of(QueueRecord)}
    exchanges = {(exchange.vhost, exchange.name) for exchange in repair.of(ExchangeRecord)}

    def is_exchange(vhost: str, name: str) -> bool:
        return not name or name in PREDECLARED or (vhost, name) in exchanges

    def text(gone: Sequence[BindingRecord | ExchangeBindingRecord]) -> str:
        names = _excerpt(map(_binding, gone))
        return f"{len(gone)} bindings of queues or exchanges that do not exist were dropped ({names})"

    repair.keep(
        BindingRecord,
        lambda binding: (
            is_exchange(binding.vhost, binding.exchange) and (binding.vhost, binding.queue) in queues
        ),
        text,
    )
    repair.keep(
        ExchangeBindingRecord,
        lambda binding: (
            is_exchange(binding.vhost, binding.source) and is_exchange(binding.vhost, binding.destination)
        ),
        text,
    )


def _binding(binding: BindingRecord | ExchangeBindingRecord) -> str:
    if isinstance(binding, BindingRecord):
        return f"'{binding.exchange}' to queue '{binding.queue}'"
    return f"'{binding.source}' to exchange '{binding.destination}'"


def _excerpt(texts: Iterable[str]) -> str:
    listed = list(texts)
    return ", ".join(listed[:_SHOWN]) + (", ..." if len(listed) > _SHOWN else "")
