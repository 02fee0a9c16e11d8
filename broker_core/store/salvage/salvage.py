"""``salvage``: makes a new data directory from the intact part of a damaged one, and reports what is lost.

The old directory is only read, and no broker may own it. Of a damaged block the rows whose own checksums
match (``sums.py``) are kept.
Not here: reading a damaged catalog (``remains.py``), what its records mean together (``broker/repair.py``).

Invariant: the new directory holds no message that does not match its checksum, and no message that the old
one did not hold. What the old one held and the new one does not is in the report. The new directory is
complete, or has no catalog.
"""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from broker_core.broker.access.users import name_of
from broker_core.broker.queue.progress import IntervalSet
from broker_core.broker.repair import repair
from broker_core.core.address import VHOST
from broker_core.core.block import RowSelection, row_numbers
from broker_core.core.change import Change, InboxRow, routes_of
from broker_core.core.errors import DataDirectoryInvalid, DiskFull, StoreError, one_line
from broker_core.core.files import sync
from broker_core.core.ids import BlockId, QueueId
from broker_core.core.records import (
    ClaimRecord,
    HoleRecord,
    LedgerRecord,
    MessageIdsRecord,
    PartRecord,
    PreparedRecord,
    ProgressRecord,
    QueueRecord,
    Record,
    RunRecord,
)
from broker_core.store import catalog as catalog_file
from broker_core.store.catalog import Catalog
from broker_core.store.codec import encode_change
from broker_core.store.directory import DirectoryLock, prepare, segment_path
from broker_core.store.failure import store_error
from broker_core.store.inbox import pack
from broker_core.store.salvage.damage import copy_catalog, intact_rows, read_whole, require_damage
from broker_core.store.salvage.remains import Remains, read_remains
from broker_core.store.segment import BlockPlace, Segments

SALVAGED = "salvaged-{}"  # the name of a queue whose own record is lost


@dataclass(frozen=True, slots=True)
class LostMessages:
    """Offsets [start, end) of a queue."""

    queue: str
    start: int
    end: int
    where: str  # file and position
    why: str


@dataclass(slots=True)
class SalvageReport:
    path: str
    to: str
    blocks: int = 0  # kept
    rows: int = 0  # in these
    inbox_rows: int = 0
    messages: dict[str, int] = field(default_factory=dict)  # not settled, per queue, in the new directory
    lost: list[LostMessages] = field(default_factory=list)
    losses: list[str] = field(default_factory=list)  # everything lost besides messages of queues

    @property
    def whole(self) -> bool:
        return not (self.lost or self.losses)


def salvage(path: str | Path, to: str | Path) -> SalvageReport:
    """Makes a new data directory. Raises DataDirectoryInvalid, DataDirectoryLocked, DataDirectoryFormat;
    CorruptCatalog if nothing can be read; DiskFull, ResourceShortage.
    """
    source, target = Path(path).absolute(), Path(to).absolute()
    if not (source / "catalog.db").is_file():
        read = "Messages can still be read from its segments with any Arrow stream reader"
        advice = read if (source / "segments").is_dir() else "It is no data directory"
        raise DataDirectoryInvalid(f"{source} cannot be salvaged: it has no catalog.db. {advice}")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise DataDirectoryInvalid(
            f"{target} exists and is not empty; name a new directory for what is salvaged"
        )
    if target.is_relative_to(source):
        raise DataDirectoryInvalid(
            f"{target} lies in {source}, which is only read; name a directory elsewhere"
        )
    lock = DirectoryLock(source, write=False)
    try:
        with tempfile.TemporaryDirectory(prefix="txmq-salvage-", ignore_cleanup_errors=True) as copy:
            hidden = copy_catalog(source / "catalog.db", Path(copy))
            remains = read_remains(Path(copy) / "catalog.db", source)
            if hidden is not None:
                remains.lost.append(
                    f"the commits of the catalog's log behind position {hidden.position}, at "
                    f"least {hidden.commits}"
                )
        return _Salvage(source, target, remains).run()
    except (OSError, MemoryError, sqlite3.Error) as error:
        require_damage(error, target / "catalog.db")
        raise store_error(error, target) from error
    finally:
        lock.release()


class _Salvage:
    def __init__(self, source: Path, target: Path, remains: Remains) -> None:
        self.source = source
        self.target = target
        self.remains = remains
        self.report = SalvageReport(str(source), str(target))
        self.queues: dict[QueueId, str] = {}
        self.intact: dict[BlockId, int] = {}  # intact blocks: rows
        self.lost_blocks: dict[BlockId, tuple[BlockPlace | None, str]] = {}
        # which rows of lost blocks are intact
        self.partial: dict[BlockId, npt.NDArray[np.bool_]] = {}
        self.lost_offsets: dict[QueueId, IntervalSet] = {}

    def run(self) -> SalvageReport:
        self.report.losses += self.remains.lost
        if "block" in self.remains.torn:
            self.report.losses.append(
                f"where some blocks lie is lost; their bytes are in {self.source / 'segments'}, and any "
                "Arrow stream reader reads them"
            )
        self._look_at_blocks()
        records, inbox = self._records()
        self._write(records, inbox)
        self._count(records, inbox)
        return self.report

    # -- what is intact --------------------------------------------------------------------------------------
    def _look_at_blocks(self) -> None:
        """Reads every block once; only the numbers are kept."""
        self.schemas: dict[int, pa.Schema] = {}  # one whose row is lost is in the file too
        for row in self.remains.segments:
            self.schemas[row.segment] = pa.ipc.read_schema(pa.py_buffer(row.schema))
        for block_id, place in self.remains.blocks.items():
            try:
                self._block(block_id, place)
                self.intact[block_id] = place.rows
            except DiskFull:
                raise
            except (StoreError, OSError, pa.ArrowInvalid) as error:
                why = error.summary if isinstance(error, StoreError) else one_line(error)
                self.lost_blocks[block_id] = (place, why)
                found = self._intact_rows(place)
                if found is not None:
                    self.partial[block_id] = found[0]

    def _intact_rows(self, place: BlockPlace) -> tuple[npt.NDArray[np.bool_], pa.RecordBatch] | None:
        path = segment_path(self.source, place.segment)
        return intact_rows(path, place, self.schemas.get(place.segment))

    def _block(self, block_id: BlockId, place: BlockPlace) -> pa.RecordBatch:
        path = segment_path(self.source, place.segment)
        return read_whole(path, block_id, place, self.schemas.get(place.segment))

    # -- what it means ---------------------------------------------------------------------------------------
    def _records(self) -> tuple[list[Record], list[InboxRow]]:
        blocks = self.remains.blocks  # a row of one of them is in a segment too
        inbox = _numbered(row for row in self.remains.inbox if row.block_id not in blocks)
        records = [*self.remains.records, *self._lost_queues(inbox)]
        found = repair(records, inbox, [place.info(block_id) for block_id, place in blocks.items()])
        self.queues = {
            record.queue_id: _name(record) for record in found.records if isinstance(record, QueueRecord)
        }
        self.report.losses += found.problems
        by_queue = self._settled(found.records)
        salvaged: list[Record] = []
        for record in found.records:
            if isinstance(record, RunRecord):
                why = found.lost_runs.get((record.queue_id, record.first), "")
                salvaged += self._readable_runs(record, why, by_queue[record.queue_id])
            elif isinstance(record, PartRecord):
                if self._keeps_part(record):
                    salvaged.append(record)
            elif isinstance(record, PreparedRecord):
                salvaged.append(self._prepared(record))
            else:
                salvaged.append(record)
        if not self.remains.torn.isdisjoint(("run", "inbox")):
            self._unaccounted(salvaged, inbox, by_queue)
        unread, queues = found.unread, self.queues
        read = [row for row in inbox if not any((each, row.block_id, row.row) in unread for each in queues)]
        return _follow(salvaged, self.lost_offsets), _numbered(read)

    def _lost_queues(self, inbox: Iterable[InboxRow]) -> list[Record]:
        """Returns records for queues with messages whose record is lost; leftovers in an intact catalog."""
        if "queue" not in self.remains.torn:
            return []
        with_record = {record.queue_id for record in self.remains.records if isinstance(record, QueueRecord)}
        with_messages = {record.queue_id for record in self.remains.records if isinstance(record, RunRecord)}
        with_messages |= {queue_id for row in inbox for queue_id, _ in routes_of(row)}
        for queue_id in sorted(with_messages - with_record):
            self.report.losses.append(
                f"the name of queue {queue_id} and its arguments are lost: its messages are in queue "
                f"'{SALVAGED.format(queue_id)}'"
            )
        return [
            QueueRecord(queue_id, SALVAGED.format(queue_id), True, False, False, {})
            for queue_id in sorted(with_messages - with_record)
        ]

    def _settled(self, records: Iterable[Record]) -> dict[QueueId, IntervalSet]:
        for table in ("progress", "hole"):
            if table in self.remains.torn:
                self.report.losses.append(
                    f"rows of table {table} are lost: messages that were settled may come again"
                )
        return _settled(records, self.queues)

    def _readable_runs(self, run: RunRecord, why: str, settled: IntervalSet) -> list[Record]:
        """Returns the runs of its readable messages. Lost messages that are not settled are reported."""
        place, reason = self.lost_blocks.get(run.block_id, (None, why))
        if not reason:
            return [run]
        rows = row_numbers(RowSelection(run.row, run.count, run.bitmap))
        whole = (
            self.partial[run.block_id][rows]
            if run.block_id in self.partial and not why
            else np.zeros(run.count, np.bool_)
        )
        runs: list[Record] = []
        for is_whole, group in groupby(range(run.count), key=lambda index: bool(whole[index])):
            indexes = list(group)
            first, end = run.first + indexes[0], run.first + indexes[-1] + 1
            if is_whole:
                runs.append(_part_of(run, first, rows[indexes[0] : indexes[-1] + 1]))
                continue
            for start, stop in settled.outside(first, end):
                self._lose(run.queue_id, start, stop, place, reason)
        return runs

    def _lose(self, queue_id: QueueId, start: int, end: int, place: BlockPlace | None, why: str) -> None:
        where = self._where(place) if place else str(self.source / "catalog.db")
        self.report.lost.append(LostMessages(self.queues[queue_id], start, end, where, why))
        self.lost_offsets.setdefault(queue_id, IntervalSet()).add(start, end)

    def _where(self, place: BlockPlace) -> str:
        return f"{segment_path(self.source, place.segment)}, position {place.position}"

    def _unaccounted(
        self, records: Sequence[Record], inbox: Sequence[InboxRow], settled: dict[QueueId, IntervalSet]
    ) -> None:
        """Reports offsets that were given, and that no row of the damaged tables names."""
        there = _offsets(records, inbox, self.queues)
        ends = {queue_id: found.end() for queue_id, found in there.items()}
        for record in records:
            if isinstance(record, ProgressRecord):
                ends[record.queue_id] = max(ends[record.queue_id], record.next_offset)
        for queue_id, end in ends.items():
            found = IntervalSet([*settled[queue_id], *there[queue_id], *self.lost_offsets.get(queue_id, ())])
            for start, stop in found.outside(0, end):
                self._lose(queue_id, start, stop, None, "no row that can be read says where they are")

    def _keeps_part(self, part: PartRecord) -> bool:
        place, why = self.lost_blocks.get(part.block_id, (None, ""))
        if part.block_id and not why and part.block_id not in self.intact:
            why = f"block {part.block_id} does not exist"
        if not part.block_id or not why:
            return True
        where = f"{self._where(place)}: " if place else ""
        self.report.losses.append(
            f"part {part.part} of branch {part.branch}, {part.rows} staged rows ({where}{why})"
        )
        return False

    def _prepared(self, record: PreparedRecord) -> PreparedRecord:
        routes: list[object] = []
        for route in record.routes:
            if isinstance(route, dict) and route["block"][0] not in self.intact:
                block_id, rows = route["block"][:2]
                why = self.lost_blocks.get(block_id, (None, f"block {block_id} does not exist"))[1]
                self.report.losses.append(
                    f"{rows} messages of the prepared transaction '{name_of(record.xid)}': {why}"
                )
            else:
                routes.append(route)
        return replace(record, routes=routes)

    # -- the new directory -----------------------------------------------------------------------------------
    def _write(self, records: Sequence[Record], inbox: Sequence[InboxRow]) -> None:
        """Writes the catalog last: a directory without one is not a data directory."""
        prepare(self.target)
        (self.target / "segments").mkdir(exist_ok=True)
        segments = Segments(self.target, 1)
        places: dict[BlockId, BlockPlace] = {}
        try:
            for block_id in sorted([*self.intact, *self.partial]):
                place = self.remains.blocks[block_id]
                partly = self._intact_rows(place) if block_id in self.partial else None
                block = self._block(block_id, place) if partly is None else partly[1]
                places[block_id] = segments.append(block_id, block)
                self.report.blocks += 1
                self.report.rows += block.num_rows
            segments.end_all()
        finally:
            segments.release_files()
        if "ledger" not in self.remains.torn and (self.source / "id").is_file():
            shutil.copy(self.source / "id", self.target / "id")  # the identity of the same broker
        name, unready = self.target / "catalog.db", self.target / "salvage.new"
        unready.mkdir()
        catalog_file.create(unready / name.name)
        catalog = Catalog(unready / name.name)
        try:
            catalog.begin()
            self._fill(catalog, segments, places, records, inbox)
            catalog.commit()
        finally:
            catalog.close()
        (unready / name.name).rename(name)
        shutil.rmtree(unready)
        (self.target / "lock").touch()
        sync(self.target)

    def _fill(
        self,
        catalog: Catalog,
        segments: Segments,
        places: dict[BlockId, BlockPlace],
        records: Sequence[Record],
        inbox: Sequence[InboxRow],
    ) -> None:
        for number in sorted({place.segment for place in places.values()}):
            segment = segments.info(number)
            catalog.put_segment(number, segment.kind, segment.schema_bytes)
            catalog.close_segment(number)
        for block_id, place in places.items():
            catalog.put_block(block_id, place)
        catalog.put_inbox(pack(inbox))
        catalog.put_records([encode_change(Change(rows=list(inbox), journal=list(records)))])
        self.report.inbox_rows = len(inbox)
        catalog.set_meta(**_numbers(self.remains, records, inbox), next_segment=segments.next_number)

    def _count(self, records: Sequence[Record], inbox: Sequence[InboxRow]) -> None:
        settled = _settled(records, self.queues)
        there = _offsets(records, inbox, self.queues)
        for queue_id, name in sorted(self.queues.items(), key=lambda item: item[1]):
            self.report.messages[name] = sum(
                end - start
                for first, last in there[queue_id]
                for start, end in settled[queue_id].outside(first, last)
            )


def _numbers(remains: Remains, records: Sequence[Record], inbox: Sequence[InboxRow]) -> dict[str, int]:
    """Returns the numbers from which the new directory goes on: none is used twice."""
    meta = remains.meta
    blocks = [
        *remains.blocks,
        *(row.block_id for row in inbox),
        *(getattr(record, "block_id", 0) for record in records),
    ]
    names = ("sequence", "commit_sequence", "queue_id")
    sequences = [getattr(record, name, 0) for record in records for name in names]
    return {
        "sequence": max([meta.sequence if meta else 0, *sequences, *(row.sequence for row in inbox)]),
        "next_block_id": max([meta.next_block_id if meta else 1, *(block_id + 1 for block_id in blocks)]),
        "clean": 0,  # so that messages are marked redelivered if they may have been sent
    }


def _follow(records: Sequence[Record], lost_offsets: Mapping[QueueId, IntervalSet]) -> list[Record]:
    """Records the losses: in claims, so that a replay skips them, in progress, in decided blocks."""
    rows: Counter[tuple[str, str]] = Counter()  # by virtual host and branch
    lost: dict[tuple[str, str], IntervalSet] = {}  # offsets by virtual host and queue
    for record in records:
        if isinstance(record, PartRecord):
            rows[record.vhost, record.branch] += record.rows
        elif isinstance(record, QueueRecord) and record.queue_id in lost_offsets:
            lost[record.vhost, record.name] = lost_offsets[record.queue_id]
    followed: list[Record] = []
    for record in records:
        if isinstance(record, ClaimRecord):
            followed.append(_claim(record, lost))
        elif isinstance(record, LedgerRecord) and not record.applied:
            left = [
                [kind, target, branch, rows.get((record.vhost, branch), count)]
                for kind, target, branch, count in record.branches
                if (record.vhost, branch) in rows or "skipped" in target
            ]
            applied = all("skipped" in target for _, target, _, _ in left)
            followed.append(replace(record, branches=left, applied=applied))
        elif isinstance(record, MessageIdsRecord) and record.queue_id in lost_offsets:
            continue  # what is lost may be sent again
        elif not isinstance(record, ProgressRecord):
            followed.append(record)
    return followed + _progress(records, lost_offsets)


def _progress(records: Iterable[Record], lost_offsets: Mapping[QueueId, IntervalSet]) -> list[Record]:
    """Prevents that used offsets are used again."""
    progress = {record.queue_id: record for record in records if isinstance(record, ProgressRecord)}
    for queue_id, lost in lost_offsets.items():
        record = progress.get(queue_id, ProgressRecord(queue_id, "", 0, 0, 0, 0))
        progress[queue_id] = replace(record, next_offset=max(record.next_offset, lost.end()))
    return list(progress.values())


def _claim(claim: ClaimRecord, lost: Mapping[tuple[str, str], IntervalSet]) -> ClaimRecord:
    """Returns the claim with its lost offsets skipped."""
    skipped = dict(claim.skipped)
    for log, (start, end) in claim.ranges.items():
        if gone := lost.get((claim.vhost, log), IntervalSet()).within(start, end):
            skipped[log] = [list(part) for part in IntervalSet([*skipped.get(log, []), *gone])]
    return replace(claim, skipped=skipped)


def _settled(records: Iterable[Record], queues: Iterable[QueueId]) -> dict[QueueId, IntervalSet]:
    """Returns the settled offsets by queue id."""
    settled = {queue_id: IntervalSet() for queue_id in queues}
    for record in records:
        if isinstance(record, ProgressRecord):
            settled[record.queue_id].add(0, record.floor)
        elif isinstance(record, HoleRecord):
            settled[record.queue_id].add(record.start, record.end)
    return settled


def _numbered(rows: Iterable[InboxRow]) -> list[InboxRow]:
    """Renumbers rows of open blocks after a loss: only their own routes name them."""
    lengths: dict[BlockId, int] = {}
    numbered: list[InboxRow] = []
    for row in rows:
        number = lengths.get(row.block_id, 0)
        numbered.append(row._replace(row=number))
        lengths[row.block_id] = number + 1
    return numbered


def _offsets(
    records: Iterable[Record], inbox: Iterable[InboxRow], queues: Iterable[QueueId]
) -> dict[QueueId, IntervalSet]:
    """Returns the offsets that have a message by queue id."""
    there = {queue_id: IntervalSet() for queue_id in queues}
    for record in records:
        if isinstance(record, RunRecord):
            there[record.queue_id].add(record.first, record.first + record.count)
    for row in inbox:
        for queue_id, offset in routes_of(row):
            if queue_id in there:
                there[queue_id].add(offset, offset + 1)
    return there


def _part_of(run: RunRecord, first: int, rows: npt.NDArray[np.int64]) -> RunRecord:
    """Returns the entries of ``run`` from ``first`` on, which are in these rows."""
    row, bitmap = int(rows[0]), b""
    if run.bitmap:
        bits = np.zeros(int(rows[-1]) - row + 1, np.bool_)
        bits[rows - row] = True
        bitmap = np.packbits(bits, bitorder="little").tobytes()
    return replace(run, first=first, count=len(rows), row=row, bitmap=bitmap)


def _name(queue: QueueRecord) -> str:
    """Returns a name that is that of one queue only."""
    return queue.name if queue.vhost == VHOST else f"{queue.name} in vhost {queue.vhost}"
