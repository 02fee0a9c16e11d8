"""The readable part of a catalog that may be damaged: every row that matches its checksum.

Not here: what the rows mean together (``salvage.py``). It reads a copy, because SQLite may write to it. A
table is read from its start, and, if a damaged page stops that, from its end. Only rows in the table's tree
are used: freed pages still contain deleted rows.
Invariant: a returned row matches its checksum; ``lost`` names rows that do not, and tables that were not read
to their end.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from broker_core.core.change import InboxRow
from broker_core.core.errors import CorruptCatalog
from broker_core.core.ids import BlockId
from broker_core.core.records import RECORDS, Record
from broker_core.store.catalog import FORMAT, Meta, SegmentRow, is_whole, other_format, quoted
from broker_core.store.codec import decode, to_unsigned
from broker_core.store.inbox import unpack
from broker_core.store.salvage.damage import require_damage
from broker_core.store.segment import BlockPlace

Row = tuple[Any, ...]


@dataclass(slots=True)
class Remains:
    meta: Meta | None = None
    segments: list[SegmentRow] = field(default_factory=list)
    blocks: dict[BlockId, BlockPlace] = field(default_factory=dict)
    inbox: list[InboxRow] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    torn: set[str] = field(default_factory=set)  # tables with lost rows


def read_remains(path: Path, source: Path) -> Remains:
    """Reads the copy at ``path`` of the catalog of ``source``. Raises CorruptCatalog if nothing can be read,
    DataDirectoryFormat, ResourceShortage, DiskFull.
    """
    found = _read(path, source)
    return _read(path, source) if found.torn else found  # a disk may fail once


def _read(path: Path, source: Path) -> Remains:
    connection = sqlite3.connect(path, isolation_level=None)
    # a damaged text does not stop the reading; its row does not match its checksum
    connection.text_factory = lambda raw: raw.decode("utf-8", "surrogateescape")
    try:
        return _Reader(path, source, connection).read()
    finally:
        connection.close()


class _Reader:
    def __init__(self, path: Path, source: Path, connection: sqlite3.Connection) -> None:
        self.path, self.source = path, source
        self.connection = connection
        self.found = Remains()
        self.tables: set[str] = set()

    def read(self) -> Remains:
        found = self.found
        try:
            self.tables = self._tables()
        except (sqlite3.Error, UnicodeDecodeError) as error:  # of its text, which has bytes of the file
            require_damage(error, self.path)
            raise self._unreadable(error) from error
        if "meta" not in self.tables:
            raise self._unreadable("the table meta is not in it")
        self._take("meta", Meta._fields, "id", self._meta)
        self._take(
            "segment", SegmentRow._fields, "segment", lambda row: found.segments.append(SegmentRow(*row))
        )
        self._take("block", ("block_id", *BlockPlace._fields), "block_id", self._block)
        inbox = ("id", "count", "messages")
        self._take("inbox", inbox, "id", lambda row: found.inbox.extend(unpack(*row)))
        for cls in RECORDS:
            self._take(cls.TABLE, cls.columns(), quoted(cls.KEY), partial(self._record, cls))
        return found

    def _unreadable(self, why: object) -> CorruptCatalog:
        return CorruptCatalog(
            f"the list of tables of {self.source / 'catalog.db'} cannot be read: {why}",
            "restore the whole data directory from a backup; without one, any Arrow stream reader reads the "
            f"messages in {self.source / 'segments'}",
        )

    def _meta(self, row: Row) -> None:
        self.found.meta = Meta(*row)
        if self.found.meta.format != FORMAT:
            raise other_format(f"the data directory {self.source}", self.found.meta.format)

    def _block(self, row: Row) -> None:
        self.found.blocks[row[0]] = BlockPlace._make((*row[1:6], to_unsigned(row[6])))

    def _record(self, cls: type[Record], row: Row) -> None:
        self.found.records.append(decode(cls, row))

    def _tables(self) -> set[str]:
        query = "SELECT name FROM sqlite_schema WHERE type = 'table'"
        return {row[0] for row in self.connection.execute(query)}

    # -- one table -------------------------------------------------------------------------------------------
    def _take(self, table: str, columns: tuple[str, ...], key: str, keep: Callable[[Row], None]) -> None:
        if table not in self.tables:
            self._lose(table, f"table {table} is gone")
            return
        for row in self._rows(table, columns, key):
            if is_whole(row):
                try:
                    keep(row[:-1])
                    continue
                except (TypeError, ValueError):
                    pass
            own = ", ".join(repr(value)[:60] for value in row[: key.count(",") + 1])
            self._lose(table, f"table {table}: the row with key {own} does not match its checksum")

    def _lose(self, table: str, text: str) -> None:
        self.found.torn.add(table)
        self.found.lost.append(text)

    def _rows(self, table: str, columns: tuple[str, ...], key: str) -> list[Row]:
        """Returns every reachable row, once."""
        query = f'SELECT {quoted((*columns, "guard"))} FROM "{table}"'
        rows, error = self._read(f"{query} NOT INDEXED")  # a damaged index loses no row
        if error is not None:
            last_first = ", ".join(f"{name} DESC" for name in key.split(", "))
            backward, _ = self._read(f"{query} ORDER BY {last_first}")
            rows = list(dict.fromkeys((*rows, *reversed(backward))))
            self._lose(table, f"table {table} cannot be read to its end: {error}")
        return rows

    def _read(self, query: str) -> tuple[list[Row], Exception | None]:
        """Returns the rows up to the first error, and the error."""
        rows: list[Row] = []
        try:
            for row in self.connection.execute(query):
                rows.append(row)  # one by one, to keep the rows before the error
        except (sqlite3.Error, UnicodeDecodeError) as error:
            require_damage(error, self.path)
            return rows, error
        return rows, None
