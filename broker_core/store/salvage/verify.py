"""``verify``: reads a whole data directory, without changes, and reports whether every checksum and every
reference is valid.

It works on a copy of the catalog, because SQLite writes even when only reading. No broker may own the
directory meanwhile.

Invariant: a report without problems means that every message that a queue needs can be delivered; ``repairs``
are what opening the directory corrects automatically.
"""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from broker_core.broker.repair import repair
from broker_core.errors import DataDirectoryInvalid, StoreError
from broker_core.ids import BlockId
from broker_core.store.catalog import Catalog, log_path
from broker_core.store.directory import DirectoryLock, segment_path
from broker_core.store.failure import corrupt_catalog
from broker_core.store.log import hidden_commits
from broker_core.store.port import BlockInfo
from broker_core.store.segment import END_MARK, BlockPlace, parse, read_buffer


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


def verify(path: str | Path) -> VerifyReport:
    """Checks the data directory ``path``. Raises DataDirectoryInvalid, DataDirectoryLocked,
    DataDirectoryFormat.

    Damage does not raise: it is in the report.
    """
    directory = Path(path).absolute()
    if not (directory / "catalog.db").is_file() and not (directory / "segments").is_dir():
        raise DataDirectoryInvalid(f"{directory} is not a data directory: it has no catalog.db")
    report = VerifyReport(str(directory))
    lock = DirectoryLock(directory, write=False)
    try:
        with tempfile.TemporaryDirectory(prefix="txmq-verify-") as copy:
            _verify_copy(directory, Path(copy), report)
    finally:
        lock.release()
    return report


def _verify_copy(directory: Path, copy: Path, report: VerifyReport) -> None:
    name = directory / "catalog.db"
    if not name.exists():
        report.problems.append(str(corrupt_catalog(name, "the file is missing")))
        return
    hidden = hidden_commits(log_path(name))
    if hidden is not None:
        report.problems.append(str(corrupt_catalog(name, hidden)))
    for source in (name, log_path(name)):
        if source.exists():
            shutil.copy(source, copy / source.name)
    try:
        catalog = Catalog(copy / name.name, log=False)
    except (sqlite3.Error, StoreError, TypeError, ValueError) as error:
        if isinstance(error, StoreError) and not error.code.endswith("CATALOG"):
            raise
        report.problems.append(str(corrupt_catalog(name, getattr(error, "message", error))))
        return
    try:
        report.problems += [f"catalog {name}: {problem}" for problem in catalog.integrity()]
        _verify_contents(directory, catalog, report)
    except (sqlite3.Error, StoreError, TypeError, ValueError) as error:
        report.problems.append(
            str(error) if isinstance(error, StoreError) else str(corrupt_catalog(name, error))
        )
    finally:
        catalog.close()


def _verify_contents(directory: Path, catalog: Catalog, report: VerifyReport) -> None:
    schemas = {row.segment: pa.ipc.read_schema(pa.py_buffer(row.schema)) for row in catalog.segments()}
    states = {row.segment: row.state for row in catalog.segments()}
    places = catalog.blocks()
    report.segments = len(schemas)
    for number, state in states.items():
        _verify_file(segment_path(directory, number), state, report)
    for block_id, place in sorted(places.items(), key=lambda item: item[1][:2]):
        _verify_block(directory, block_id, place, schemas.get(place.segment), report)
    inbox: dict[BlockId, int] = {}
    rows = list(catalog.inbox())
    for row in rows:
        expected = inbox.get(row.block_id, 0)
        if row.row != expected:
            report.problems.append(f"open block {row.block_id}: row {row.row} where row {expected} should be")
        inbox[row.block_id] = row.row + 1
    report.inbox_rows = len(rows)
    report.problems += [
        f"block {block_id} is both open and in a segment" for block_id in sorted(inbox.keys() & places.keys())
    ]
    records = list(catalog.records())
    report.records = len(records)
    infos = [
        BlockInfo(block_id, place.rows, place.size_bytes, place.checksum)
        for block_id, place in places.items()
    ]
    repaired = repair(records, rows, infos)
    report.problems += repaired.problems
    report.repairs += repaired.done


def _verify_file(path: Path, state: str, report: VerifyReport) -> None:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - len(END_MARK)))
            ended = file.read() == END_MARK
    except OSError as error:
        report.problems.append(f"segment {path}: {error.strerror}")
        return
    if state == "closed" and not ended:
        report.problems.append(f"segment {path} is closed but has no end mark")


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
        parse(read_buffer(path, block_id, place), schema, path, block_id, place).validate(full=True)
    except (StoreError, OSError) as error:
        report.problems.append(str(error))
    except pa.ArrowInvalid as error:
        report.problems.append(f"segment {path}, block {block_id}: {' '.join(str(error).split())}")
