"""The catalog: SQLite in WAL mode with synchronous=FULL. What it does not name does not exist.

Not here: the order of a commit (``durable.py``), the bytes of blocks (``segment.py``). Errors are SQLite's
own. One thread at a time: ``commit`` has one caller at a time, and nothing else is read after the store is
open.

Optimized for commits of one message, compared with write + fdatasync: such a commit changes one page (rows
are appended in key order, and contain the commit sequence), the lock is exclusive (no shared memory), and the
log is allocated in advance and checkpointed every 1,024 pages, so it is overwritten in place and its
fdatasync writes no metadata.
"""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from broker_core.core import failpoint
from broker_core.core.change import ANY, Damaged, InboxRow
from broker_core.core.errors import DataDirectoryFormat
from broker_core.core.files import sync
from broker_core.core.ids import BlockId
from broker_core.core.records import RECORDS, HistoryRecord, Record
from broker_core.store.codec import Encoded, Row, decode, guard, is_wide, merged, to_signed, to_unsigned
from broker_core.store.failure import corrupt_catalog
from broker_core.store.inbox import MAX_ROWS, ROW_BITS, Packed, guarded, unpack
from broker_core.store.log import hidden_commits
from broker_core.store.segment import BlockPlace

FORMAT = 17
# a commit of one message writes one page: SQLite checksums and writes a small one faster
PAGE_BYTES = 1024
_CHECKPOINT_PAGES = 1024
CATALOG_COPY = "catalog.db.copy"  # while a backup begins
_COPY_PAGES = 1024  # of a step, during which no commit is written: a few milliseconds
_COPY_AGAIN_S = 0.001
_LOG_BYTES = (_CHECKPOINT_PAGES + 256) * (PAGE_BYTES + 24)


def other_format(what: str, found: int) -> DataDirectoryFormat:
    age = "a newer" if found > FORMAT else "an older"
    return DataDirectoryFormat(
        f"{what} has format {found}, written by {age} txmq; this one reads format {FORMAT}",
        "install the txmq that wrote it, or begin with a new directory",
    )


def _text(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text("utf-8")


QUERIES: dict[str, str] = {
    name: statement.strip()
    for name, statement in re.findall(
        r"^-- name: (\w+)\n(.*?)(?=^-- name:|\Z)", _text("queries.sql"), re.M | re.S
    )
}


_Rows = Iterator[tuple[Any, ...]]
_PUT_INBOX = QUERIES["put_inbox"]


def quoted(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


class _Statements(NamedTuple):
    put: str
    drop: str
    select: str


def _statements(cls: type[Record]) -> _Statements:
    columns = (*cls.columns(), "guard")
    return _Statements(
        f'INSERT OR REPLACE INTO "{cls.TABLE}" ({quoted(columns)}) VALUES ({", ".join("?" * len(columns))})',
        _drop_where(cls, cls.KEY),
        f'SELECT {quoted(columns)} FROM "{cls.TABLE}" ORDER BY {quoted(cls.KEY)}',
    )


def _drop_where(cls: type[Record], names: Sequence[str]) -> str:
    where = " AND ".join(f'"{name}" = ?' for name in names)
    return f'DELETE FROM "{cls.TABLE}" WHERE {where}'


_RECORD_STATEMENTS = {cls: _statements(cls) for cls in RECORDS}


class Meta(NamedTuple):
    format: int
    sequence: int
    next_block_id: int
    next_segment: int
    clean: int


class SegmentRow(NamedTuple):
    segment: int
    kind: str
    schema: bytes
    state: str


def create(path: Path) -> None:
    """Creates an empty catalog at ``path``, completely or not at all."""
    new = path.with_name("catalog.db.new")
    new.unlink(missing_ok=True)
    connection = sqlite3.connect(new, isolation_level=None)
    try:
        connection.executescript(
            f"PRAGMA page_size = {PAGE_BYTES}; PRAGMA synchronous = FULL; BEGIN;" + _text("catalog.sql")
        )
        meta = Meta(FORMAT, sequence=0, next_block_id=1, next_segment=1, clean=1)
        connection.execute(QUERIES["set_meta"], (*meta, guard(meta)))
        connection.execute("COMMIT")
    finally:
        connection.close()
    failpoint.here("store.recovery.created")
    new.rename(path)
    sync(path.parent)


def log_path(path: Path) -> Path:
    """Returns the write-ahead log of the catalog at ``path``."""
    return path.with_name(path.name + "-wal")


def is_whole(row: tuple[Any, ...]) -> bool:
    """Returns whether the row matches its guard, the last value."""
    try:
        return guard(row[:-1]) == int(row[-1])
    except (TypeError, ValueError):
        return False


class Catalog:
    """One connection to the catalog at ``path``, which must exist."""

    def __init__(self, path: Path, *, log: bool = True) -> None:
        """``log`` False leaves the journal unchanged, and omits all checks but SQLite's.

        Raises sqlite3.Error, CorruptCatalog, DataDirectoryFormat.
        """
        self.path = path
        hidden = hidden_commits(log_path(path)) if log else None
        if hidden is not None:  # SQLite would continue without them
            raise corrupt_catalog(path, hidden)
        self._meta: Meta | None = None
        self._connection = sqlite3.connect(
            path, isolation_level=None, check_same_thread=False, cached_statements=256, timeout=1.0
        )
        self._execute = self._connection.execute
        # one for all writes: a new one for each costs as much as the statement
        self._cursor = self._connection.cursor()
        self._write = self._cursor.execute
        self._executemany = self._cursor.executemany
        try:
            self._open(log)
        except BaseException as error:
            self._connection.close()
            if isinstance(error, UnicodeDecodeError):  # of the text of SQLite's error: bytes of the file
                raise corrupt_catalog(path, error) from error
            raise

    def _open(self, log: bool) -> None:
        if log:
            self.path.with_name(CATALOG_COPY).unlink(missing_ok=True)
        self._execute("PRAGMA locking_mode = EXCLUSIVE")
        # before anything that a newer format may have changed
        found = self._execute(QUERIES["read_format"]).fetchone()[0]
        if found != FORMAT:
            raise other_format(f"the data directory {self.path.parent}", found)
        problem = self._execute("PRAGMA quick_check(1)").fetchone()[0]
        if problem != "ok":
            raise corrupt_catalog(self.path, " ".join(str(problem).split()))
        if log:
            self._execute("PRAGMA journal_mode = WAL")
            # ends the read of the pragma, which would keep the log
            self._execute(QUERIES["read_format"]).fetchall()
            # a new log: commits that a crash cut off must not be left behind later ones
            self._execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        for pragma in (
            "synchronous = FULL",
            f"wal_autocheckpoint = {_CHECKPOINT_PAGES}",
            "secure_delete = OFF",
            "temp_store = MEMORY",
        ):
            self._execute(f"PRAGMA {pragma}")

    def lay_out_log(self) -> None:
        """Gives the log its usual size now, so that commits overwrite it in place. SQLite ignores the zeros
        after the last frame.
        """
        with contextlib.suppress(OSError):  # only a matter of speed
            descriptor = os.open(log_path(self.path), os.O_RDWR)
            try:
                size = os.fstat(descriptor).st_size
                if size < _LOG_BYTES:
                    os.pwrite(descriptor, bytes(_LOG_BYTES - size), size)
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def copy_to(self, path: Path, progress: Callable[[], None]) -> None:
        """Copies what is committed at one moment, in steps between which others commit. For any thread.
        ``progress``: called after each step; what it raises ends the copy. Raises sqlite3.Error.
        """
        failpoint.here("store.backup.kept")
        target = sqlite3.connect(path, isolation_level=None)
        try:
            for pragma in ("journal_mode = OFF", "synchronous = OFF"):  # whoever receives it syncs it
                target.execute(f"PRAGMA {pragma}")
            # during a transaction of a commit a step copies nothing, and is repeated
            self._connection.backup(
                target, pages=_COPY_PAGES, progress=lambda *_: progress(), sleep=_COPY_AGAIN_S
            )
        finally:
            target.close()

    def close(self) -> None:
        """Releases the file and its lock, also during a transaction, which is then rolled back."""
        self._cursor.close()  # SQLite keeps a connection with unfinished statements
        if self._connection.in_transaction:
            with contextlib.suppress(sqlite3.Error):  # the next opening rolls back
                self._connection.rollback()
        self._connection.close()

    # What is there

    def meta(self) -> Meta:
        row = self._execute(QUERIES["read_meta"]).fetchone()
        if row is None:
            raise corrupt_catalog(self.path, "the table meta is empty")
        if not is_whole(row):
            raise corrupt_catalog(self.path, "the row of table meta does not match its checksum")
        return Meta(*row[:-1])

    def segments(self) -> list[SegmentRow]:
        return [SegmentRow(*row) for row in self._guarded(QUERIES["segments"], "segment")]

    def _guarded(self, query: str, table: str, damaged: list[Damaged] | None = None) -> _Rows:
        for row in self._execute(query):
            if is_whole(row):
                yield row[:-1]
            else:
                why = f"a row of table {table} with key {row[0]!r} does not match its checksum"
                if damaged is None:
                    raise corrupt_catalog(self.path, why)
                damaged.append(Damaged(row[0], why))

    def blocks(self) -> dict[BlockId, BlockPlace]:
        rows = self._guarded(QUERIES["blocks"], "block")
        return {row[0]: BlockPlace._make((*row[1:6], to_unsigned(row[6]))) for row in rows}

    def inbox(self) -> Iterator[InboxRow]:
        for row in self.packed_inbox():
            yield from unpack(*row)

    def packed_inbox(self) -> Iterator[tuple[Any, ...]]:
        return self._guarded(QUERIES["inbox"], "inbox")

    def records(self, damaged: list[Damaged] | None = None) -> Iterator[Record]:
        """``damaged`` takes those of the history, which no message needs; without it they are refused."""
        for cls, statements in _RECORD_STATEMENTS.items():
            spare = damaged if cls is HistoryRecord else None
            for row in self._guarded(statements.select, cls.TABLE, spare):
                yield decode(cls, row)

    def integrity(self) -> list[str]:
        """Returns the results of SQLite's own full check."""
        return [str(row[0]) for row in self._execute("PRAGMA integrity_check(20)") if row[0] != "ok"]

    # One transaction

    def begin(self) -> None:
        self._write("BEGIN IMMEDIATE")

    def commit(self) -> None:
        self._write("COMMIT")

    def put_inbox(self, rows: Iterable[Packed]) -> None:
        for row in rows:
            self._write(_PUT_INBOX, guarded(row))

    def drop_inbox(self, block_id: BlockId) -> None:
        first = block_id << ROW_BITS
        self._execute(QUERIES["drop_inbox"], (first, first + MAX_ROWS - 1))

    def put_records(self, changes: Sequence[Encoded]) -> None:
        """Writes all puts and drops of the changes, the last one of each key."""
        wide = any(change.wide for change in changes)
        for cls, rows in merged(changes).items():
            dropped = [key for key, value in rows.items() if value is None]
            if wide and any(map(is_wide, dropped)):
                self._put_in_order(cls, rows)
                continue
            if dropped:
                self._executemany(_RECORD_STATEMENTS[cls].drop, dropped)
            if len(dropped) < len(rows):
                self._executemany(
                    _RECORD_STATEMENTS[cls].put,
                    [(*row, guard(row)) for row in rows.values() if row is not None],
                )

    def _put_in_order(self, cls: type[Record], rows: Mapping[Row, Row | None]) -> None:
        """A wide drop removes what was put before it."""
        for key, row in rows.items():
            if row is not None:
                self._write(_RECORD_STATEMENTS[cls].put, (*row, guard(row)))
            elif is_wide(key):
                where = [name for name, value in zip(cls.KEY, key, strict=True) if value is not ANY]
                self._write(_drop_where(cls, tuple(where)), [value for value in key if value is not ANY])
            else:
                self._write(_RECORD_STATEMENTS[cls].drop, key)

    def put_block(self, block_id: BlockId, place: BlockPlace) -> None:
        values = (block_id, *place[:5], to_signed(place.checksum))
        self._execute(QUERIES["put_block"], (*values, guard(values)))

    def drop_block(self, block_id: BlockId) -> None:
        self._execute(QUERIES["drop_block"], (block_id,))

    def put_segment(self, number: int, kind: str, schema: bytes) -> None:
        values = (number, kind, schema, "open")
        self._execute(QUERIES["put_segment"], (*values, guard(values)))

    def close_segment(self, number: int) -> None:
        row = self._execute(QUERIES["segment"], (number,)).fetchone()
        if row is not None:  # a segment closed before a commit named it has no row yet
            values = (*row[:3], "closed")
            self._execute(QUERIES["put_segment"], (*values, guard(values)))

    def drop_segment(self, number: int) -> None:
        self._execute(QUERIES["drop_segment"], (number,))

    def set_meta(self, **values: int) -> None:
        """Changes some of the fields of :class:`Meta`."""
        if self._meta is None:
            self._meta = self.meta()
        self._meta = self._meta._replace(**values)
        self._execute(QUERIES["set_meta"], (*self._meta, guard(self._meta)))
