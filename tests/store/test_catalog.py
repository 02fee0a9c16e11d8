"""The catalog file: its columns, its damage, its format."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker_core.core.change import Change, InboxRow
from broker_core.core.errors import CorruptCatalog, DataDirectoryFormat, OptionError, StoreError
from broker_core.core.ids import BlockId
from broker_core.core.records import RECORDS, HoleRecord, Record, RunRecord
from broker_core.store.catalog import FORMAT, PAGE_BYTES
from broker_core.store.codec import encode_change, guard, sql_types
from broker_core.store.durable import DurableStore
from broker_core.store.salvage.salvage import salvage
from broker_core.store.salvage.verify import verify


def filled(path: Path) -> Path:
    """A data directory whose catalog has many pages. Returns the catalog."""
    store = DurableStore(path)
    store.load()
    rows = [
        InboxRow(1, i, i + 1, i, "", "secret-key", b"", b"body-%06d" % i * 8, bytes(16)) for i in range(2000)
    ]
    runs: list[Record] = [RunRecord(1, i * 10, 5, 1, 0, b"", 1, 1) for i in range(2000)]
    for start in range(0, len(rows), 4):  # a few messages in each page, and none in overflow pages
        store.commit([Change(sequence=start + 4, rows=rows[start : start + 4])])
    store.commit([Change(journal=[*runs])])
    store.close()
    return path / "catalog.db"


@pytest.mark.parametrize("cls", RECORDS, ids=lambda cls: cls.__name__)
def test_the_hand_written_columns_and_keys_are_those_of_the_record_classes(
    cls: type[Record], tmp_path: Path
) -> None:
    DurableStore(tmp_path / "data").close()
    catalog = sqlite3.connect(tmp_path / "data" / "catalog.db")
    columns = catalog.execute(f'PRAGMA table_info("{cls.TABLE}")').fetchall()
    catalog.close()
    assert [column[1] for column in columns] == [*cls.columns(), "guard"]
    assert [column[2] for column in columns] == [*sql_types(cls), "INTEGER"]
    assert (
        tuple(column[1] for column in sorted(columns, key=lambda column: column[5]) if column[5]) == cls.KEY
    )


def open_and_load(path: Path) -> None:
    store = DurableStore(path)
    try:
        store.load()
    finally:
        store.close(clean=False)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def garbage_header(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(b"not a database at all" + data[21:])


def zero_page(path: Path) -> None:
    data = bytearray(path.read_bytes())
    page = len(data) // PAGE_BYTES // 2
    data[page * PAGE_BYTES : (page + 1) * PAGE_BYTES] = bytes(PAGE_BYTES)
    path.write_bytes(data)


def swap_pages(path: Path) -> None:
    data = bytearray(path.read_bytes())
    a, b = data.index(b"body-000500") // PAGE_BYTES, data.index(b"body-001500") // PAGE_BYTES
    data[a * PAGE_BYTES : (a + 1) * PAGE_BYTES], data[b * PAGE_BYTES : (b + 1) * PAGE_BYTES] = (
        data[b * PAGE_BYTES : (b + 1) * PAGE_BYTES],
        data[a * PAGE_BYTES : (a + 1) * PAGE_BYTES],
    )
    path.write_bytes(data)


def flip_inside_a_value(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data.replace(b"body-000777", b"bodY-000777", 1))


def remove(path: Path) -> None:
    path.unlink()


DAMAGES = [truncate, empty, garbage_header, zero_page, swap_pages, flip_inside_a_value, remove]


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_catalog_is_refused_by_name_with_what_to_do_and_left_as_it_is(
    damage: Callable[[Path], None], tmp_path: Path
) -> None:
    catalog = filled(tmp_path / "data")
    damage(catalog)
    before = catalog.read_bytes() if catalog.exists() else None
    with pytest.raises(CorruptCatalog) as caught:
        open_and_load(tmp_path / "data")
    text = str(caught.value)
    assert (
        f"the catalog {catalog} is damaged: " in text
        and "Restore the whole data directory from a backup" in text
        and "\n" not in text
    )
    if before is not None and damage is not flip_inside_a_value:
        assert catalog.read_bytes() == before
    report = verify(tmp_path / "data")
    assert not report.ok and any("TXMQ_CORRUPT_CATALOG" in problem for problem in report.problems)


def test_a_flipped_bit_in_a_record_is_found_though_sqlite_does_not_see_it(tmp_path: Path) -> None:
    catalog = filled(tmp_path / "data")
    connection = sqlite3.connect(catalog)
    connection.execute("UPDATE run SET row = row + 1 WHERE first = 500")
    connection.commit()
    connection.close()
    store = DurableStore(tmp_path / "data")
    with pytest.raises(CorruptCatalog, match="a row of table run with key 1 does not match its checksum"):
        store.load()
    store.close()


@pytest.mark.parametrize(("format", "age"), [(FORMAT + 1, "a newer"), (FORMAT - 1, "an older")])
def test_another_format_is_refused_and_says_what_to_install(tmp_path: Path, format: int, age: str) -> None:
    catalog = filled(tmp_path / "data")
    connection = sqlite3.connect(catalog)
    meta = connection.execute("SELECT sequence, next_block_id, next_segment, clean FROM meta").fetchone()
    connection.execute("UPDATE meta SET format = ?, guard = ?", (format, guard((format, *meta))))
    connection.commit()
    connection.close()
    before = catalog.read_bytes()
    text = f"has format {format}, written by {age} txmq; this one reads format {FORMAT}"
    with pytest.raises(DataDirectoryFormat, match=text):
        DurableStore(tmp_path / "data")
    with pytest.raises(DataDirectoryFormat, match=text):
        verify(tmp_path / "data")
    with pytest.raises(DataDirectoryFormat, match=text):
        salvage(tmp_path / "data", tmp_path / "new")
    assert catalog.read_bytes() == before


def test_a_crash_while_the_catalog_is_first_made_leaves_a_directory_that_opens(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("1 host\n")
    (tmp_path / "catalog.db.new").write_bytes(b"half")
    store = DurableStore(tmp_path)
    assert store.load().records == []
    store.commit([Change(journal=[HoleRecord(1, 2, 3)])])
    store.close()
    assert not (tmp_path / "catalog.db.new").exists()


@pytest.mark.slow
def test_another_program_that_holds_the_catalog_is_named_as_the_cause(tmp_path: Path) -> None:
    catalog = filled(tmp_path / "data")
    connection = sqlite3.connect(catalog, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match="another program holds the catalog"):
        DurableStore(tmp_path / "data")
    connection.close()
    DurableStore(tmp_path / "data").close()


_VALUES = st.tuples(
    st.sampled_from([7, 7, True, 1 << 64]),
    st.sampled_from(["", "", "\ud800"]),
    st.sampled_from(["key", "key", "\u00e9", "\ud800", b"key"]),
    st.sampled_from([b"", b"p", "p"]),
    st.sampled_from([b"x", b"x", bytearray(b"x")]),
)


@given(st.lists(_VALUES, max_size=6))
def test_a_message_is_checked_however_many_like_it_came_before(messages: list[tuple[Any, ...]]) -> None:
    rows = [
        InboxRow(BlockId(1), number, sequence, 1, *values, b"")
        for number, (sequence, *values) in enumerate(messages)
    ]

    def is_refused(some: list[InboxRow]) -> bool:
        try:
            encode_change(Change(rows=some))
        except OptionError:
            return True
        return False

    assert is_refused(rows) == any(is_refused([row]) for row in rows)
