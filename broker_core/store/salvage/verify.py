"""``verify``: reads a whole data directory, without changes, and reports whether every checksum and every
reference is valid.

It works on a copy of the catalog, because SQLite writes even when only reading. No broker may own the
directory meanwhile. What the machine refuses for now is no problem of the directory, and raises.

Invariant: a report without problems means that every message that a queue needs can be delivered; ``repairs``
are what opening the directory corrects automatically.
"""

from __future__ import annotations

import tempfile
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from broker_core.broker.history.history import unreadable
from broker_core.broker.repair import leave_out_history, repair
from broker_core.core.change import Damaged, HistoryBeside, InboxRow
from broker_core.core.errors import CorruptCatalog, DataDirectoryInvalid, DiskFull, StoreError, TxmqError
from broker_core.core.ids import BlockId
from broker_core.core.records import Record
from broker_core.store.catalog import Catalog, SegmentRow
from broker_core.store.directory import DirectoryLock, segment_path
from broker_core.store.failure import corrupt_catalog
from broker_core.store.inbox import unpack_all
from broker_core.store.salvage.damage import FAILURES, copy_catalog, read_twice, read_whole, require_damage
from broker_core.store.segment import END_MARK, BlockPlace


@dataclass(slots=True)
class VerifyReport:
    """The result of ``verify``. ``problems`` and ``repairs`` are single-line texts."""

    path: str
    segments: int = 0
    blocks: int = 0
    rows: int = 0  # in segments
    inbox_rows: int = 0
    records: int = 0
    size_bytes: int = 0  # of the blocks, as stored in the files
    problems: list[str] = field(default_factory=list)
    repairs: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems


class _Contents(NamedTuple):
    """What a catalog holds. ``problems``: of SQLite's own check."""

    problems: list[str]
    segments: list[SegmentRow]
    blocks: dict[BlockId, BlockPlace]
    inbox: list[InboxRow]
    history: list[HistoryBeside]  # beside the messages of the inbox
    records: list[Record]
    damaged: list[Damaged]


def verify(path: str | Path) -> VerifyReport:
    """Checks the data directory ``path``. Raises DataDirectoryInvalid, DataDirectoryLocked,
    DataDirectoryFormat, ResourceShortage, DiskFull.

    Damage does not raise: it is in the report.
    """
    directory = Path(path).absolute()
    if not (directory / "catalog.db").is_file() and not (directory / "segments").is_dir():
        raise DataDirectoryInvalid(f"{directory} is not a data directory: it has no catalog.db")
    report = VerifyReport(str(directory))
    lock = DirectoryLock(directory, write=False)
    try:
        with tempfile.TemporaryDirectory(prefix="txmq-verify-", ignore_cleanup_errors=True) as copy:
            _verify_copy(directory, Path(copy), report)
    except (OSError, MemoryError) as error:
        require_damage(error, directory / "catalog.db")
        raise
    finally:
        lock.release()
    return report


def _verify_copy(directory: Path, copy: Path, report: VerifyReport) -> None:
    name = directory / "catalog.db"
    if not name.exists():
        report.problems.append(str(corrupt_catalog(name, "the file is missing")))
        return
    try:
        hidden = copy_catalog(name, copy)
        if hidden is not None:
            report.problems.append(str(corrupt_catalog(name, hidden)))
        contents = read_twice(lambda: _contents(copy / name.name), copy / name.name)
    except FAILURES as error:
        if isinstance(error, TxmqError) and not isinstance(error, CorruptCatalog):
            raise
        report.problems.append(str(corrupt_catalog(name, getattr(error, "message", error))))
        return
    report.problems += [f"catalog {name}: {problem}" for problem in contents.problems]
    _verify_contents(directory, contents, report)


def _contents(path: Path) -> _Contents:
    damaged: list[Damaged] = []
    with closing(Catalog(path, log=False)) as catalog:
        inbox, history = unpack_all(catalog.packed_inbox())
        return _Contents(
            catalog.integrity(),
            list(catalog.segments()),
            catalog.blocks(),
            inbox,
            history,
            list(catalog.records(damaged)),
            damaged,
        )


def _verify_contents(directory: Path, catalog: _Contents, report: VerifyReport) -> None:
    schemas = {row.segment: pa.ipc.read_schema(pa.py_buffer(row.schema)) for row in catalog.segments}
    states = {row.segment: row.state for row in catalog.segments}
    places = catalog.blocks
    report.segments = len(schemas)
    for number, state in states.items():
        _verify_file(segment_path(directory, number), state, report)
    for block_id, place in sorted(places.items(), key=lambda item: item[1][:2]):
        _verify_block(directory, block_id, place, schemas.get(place.segment), report)
    inbox: dict[BlockId, int] = {}
    rows = catalog.inbox
    for row in rows:
        expected = inbox.get(row.block_id, 0)
        if row.row != expected:
            report.problems.append(f"open block {row.block_id}: row {row.row} where row {expected} should be")
        inbox[row.block_id] = row.row + 1
    report.inbox_rows = len(rows)
    report.problems += [
        f"block {block_id} is both open and in a segment" for block_id in sorted(inbox.keys() & places.keys())
    ]
    records = catalog.records
    report.records = len(records)
    repaired = repair(records, rows, [place.info(block_id) for block_id, place in places.items()])
    left_out, unread = unreadable(records, catalog.history)
    leave_out_history(repaired, [*catalog.damaged, *left_out])
    report.problems += repaired.problems + unread
    report.repairs += repaired.done


def _verify_file(path: Path, state: str, report: VerifyReport) -> None:
    try:
        ended = read_twice(lambda: _is_ended(path), path)
    except OSError as error:
        report.problems.append(f"segment {path}: {error.strerror}")
        return
    if state == "closed" and not ended:
        report.problems.append(f"segment {path} is closed but has no end mark")


def _is_ended(path: Path) -> bool:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - len(END_MARK)))
        return file.read() == END_MARK


def _verify_block(
    directory: Path, block_id: BlockId, place: BlockPlace, schema: pa.Schema | None, report: VerifyReport
) -> None:
    report.blocks += 1
    report.rows += place.rows
    report.size_bytes += place.length
    path = segment_path(directory, place.segment)
    if schema is None:
        report.problems.append(
            f"block {block_id} is in segment {place.segment}, which the catalog does not know"
        )
        return
    try:
        read_whole(path, block_id, place, schema)
    except DiskFull:
        raise
    except (StoreError, OSError) as error:
        report.problems.append(str(error))
    except pa.ArrowInvalid as error:
        report.problems.append(f"segment {path}, block {block_id}: {' '.join(str(error).split())}")
