"""The catalog file: its columns, its damage, its format."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker_core import failpoint
from broker_core.broker.state.change import Change, InboxRow
from broker_core.broker.state.records import (
    RECORDS,
    BindingRecord,
    ChannelCommitRecord,
    DeliveryRecord,
    ExchangeBindingRecord,
    ExchangeRecord,
    ForgottenRecord,
    HoleRecord,
    PartRecord,
    ProgressRecord,
    QueueRecord,
    Record,
    RunRecord,
)
from broker_core.errors import CorruptCatalog, DataDirectoryFormat, OptionError, StoreError
from broker_core.ids import BlockId
from broker_core.store.catalog import FORMAT, OF_HOSTS, PAGE_BYTES
from broker_core.store.codec import encode, encode_change, guard, sql_types
from broker_core.store.durable import DurableStore
from broker_core.store.salvage.salvage import salvage
from broker_core.store.salvage.verify import verify

FORMAT_1 = Path(__file__).with_name("catalog_format_1.sql")


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


def test_a_newer_format_is_refused_and_says_what_to_install(tmp_path: Path) -> None:
    catalog = filled(tmp_path / "data")
    connection = sqlite3.connect(catalog)
    connection.execute("UPDATE meta SET format = ?", (FORMAT + 1,))
    connection.commit()
    connection.close()
    with pytest.raises(
        DataDirectoryFormat,
        match=f"has format {FORMAT + 1}, written by a newer txmq; .* up to {FORMAT}: install",
    ):
        DurableStore(tmp_path / "data")
    with pytest.raises(DataDirectoryFormat):
        verify(tmp_path / "data")


INBOX = [
    InboxRow(1, 0, 7, 1, "", "q", b"", b"body", bytes(16)),
    InboxRow(1, 1, 7, 1, "e", "k.é", b"\1\2", b"", bytes(32)),
    InboxRow(1, 2, 8, 2, "", "q", b"", b"x" * 5000, bytes(16)),
    InboxRow(3, 0, 9, 3, "", "q", b"", b"of the next block", bytes(16)),
]


def format_1(path: Path) -> list[Record]:
    """A data directory as format 1 left it; what it holds."""
    records: list[Record] = [
        ExchangeRecord("e", "topic", True, False, False, {}),
        QueueRecord(1, "q", True, False, False, {"x-max-length": 5}),
        BindingRecord("e", "q", "k", {"a": 1}),
        ProgressRecord(1, "", 2, 2, 7, 3),
        HoleRecord(1, 4, 5),
        RunRecord(1, 5, 1, 1, 0, b"", 0, 0),
        PartRecord("b", 0, "t", "append", {"table": "t"}, 0, 0, 1, 3, 7, 0, b"row", {}, 0, []),
    ]
    path.mkdir()
    (path / "lock").write_text("1 host\n")
    (path / "segments").mkdir()
    connection = sqlite3.connect(path / "catalog.db", isolation_level=None)
    connection.executescript(f"PRAGMA page_size = {PAGE_BYTES};" + FORMAT_1.read_text())
    for table, rows in {
        "meta": [(1, 9, 4, 1, 1)],
        "inbox": [(row[0] << 20 | row[1], *row[2:]) for row in INBOX],
        **{record.TABLE: [_old(record)] for record in records},
    }.items():
        for row in rows:
            values = ((1, *row) if table == "meta" else row) + (guard(row),)
            connection.execute(f'INSERT INTO "{table}" VALUES ({", ".join("?" * len(values))})', values)
    connection.close()
    return records


def _old(record: Record) -> tuple[object, ...]:
    """The columns before there were virtual hosts."""
    return encode(record)[:-1] if type(record) in OF_HOSTS else encode(record)


NEW_IN_2: list[Record] = [ExchangeBindingRecord("e", "f", "k", {"a": 1}), DeliveryRecord(1, 5, 2)]
NEW_IN_2 += [ChannelCommitRecord("c", 3, 9), ForgottenRecord("outcome", 8)]  # and in 3


def test_a_directory_of_format_1_is_upgraded_in_place_with_all_that_it_holds_and_stays_so(
    tmp_path: Path,
) -> None:
    held = format_1(tmp_path / "data")
    assert verify(tmp_path / "data").ok
    store = DurableStore(tmp_path / "data")
    image = store.load()
    assert image.records == held and image.sequence == 9 and image.clean
    assert image.inbox == INBOX
    store.commit([Change(journal=NEW_IN_2)])
    store.close()
    store = DurableStore(tmp_path / "data")
    image = store.load()
    assert sorted(image.records, key=repr) == sorted([*held, *NEW_IN_2], key=repr) and image.inbox == INBOX
    store.close()
    assert verify(tmp_path / "data").ok
    connection = sqlite3.connect(tmp_path / "data" / "catalog.db")
    upgraded = connection.execute(
        "SELECT format, (SELECT group_concat(name) FROM sqlite_schema) FROM meta"
    ).fetchone()
    connection.close()
    DurableStore(tmp_path / "new").close()
    connection = sqlite3.connect(tmp_path / "new" / "catalog.db")
    assert (
        upgraded
        == connection.execute(
            "SELECT format, (SELECT group_concat(name) FROM sqlite_schema) FROM meta"
        ).fetchone()
    )
    connection.close()


def test_an_upgrade_that_a_crash_interrupts_leaves_format_1_whole_and_the_next_opening_does_it(
    tmp_path: Path,
) -> None:
    held = format_1(tmp_path / "data")
    failpoint.arm("store.recovery.upgraded", "raise")
    try:
        with pytest.raises(StoreError):
            DurableStore(tmp_path / "data")
    finally:
        failpoint.disarm()
    connection = sqlite3.connect(tmp_path / "data" / "catalog.db")
    assert connection.execute("SELECT format FROM meta").fetchone() == (1,)
    assert "delivery" not in {name for (name,) in connection.execute("SELECT name FROM sqlite_schema")}
    connection.close()
    store = DurableStore(tmp_path / "data")
    image = store.load()
    assert image.records == held and image.inbox == INBOX
    store.close()


def test_a_damaged_message_of_format_1_is_refused_by_name_and_nothing_is_upgraded(tmp_path: Path) -> None:
    format_1(tmp_path / "data")
    catalog = tmp_path / "data" / "catalog.db"
    catalog.write_bytes(catalog.read_bytes().replace(b"of the next block", b"of the nExt block"))
    with pytest.raises(
        CorruptCatalog, match=f"a row of table inbox with key {3 << 20} does not match its checksum"
    ):
        DurableStore(tmp_path / "data")
    assert not verify(tmp_path / "data").ok
    connection = sqlite3.connect(catalog)
    assert connection.execute("SELECT format FROM meta").fetchone() == (1,)
    connection.close()


def test_a_directory_of_format_1_is_salvaged_with_all_that_it_holds_but_a_damaged_message(
    tmp_path: Path,
) -> None:
    held = format_1(tmp_path / "data")
    report = salvage(tmp_path / "data", tmp_path / "new")
    assert report.inbox_rows == len(INBOX) and "block" not in " ".join(report.losses)
    store = DurableStore(tmp_path / "new")
    image = store.load()
    assert image.inbox == INBOX and [record for record in image.records if isinstance(record, RunRecord)] == [
        held[5]
    ]
    store.close()
    catalog = tmp_path / "data" / "catalog.db"
    catalog.write_bytes(catalog.read_bytes().replace(b"of the next block", b"of the nExt block"))
    report = salvage(tmp_path / "data", tmp_path / "damaged")
    assert f"table inbox: the row with key {3 << 20} does not match its checksum" in report.losses
    store = DurableStore(tmp_path / "damaged")
    assert store.load().inbox == INBOX[:3]
    store.close()


def test_a_damaged_catalog_of_format_1_is_refused_and_not_upgraded(tmp_path: Path) -> None:
    format_1(tmp_path / "data")
    connection = sqlite3.connect(tmp_path / "data" / "catalog.db")
    connection.execute("UPDATE meta SET sequence = 8")
    connection.commit()
    connection.close()
    with pytest.raises(CorruptCatalog, match="the row of table meta does not match its checksum"):
        DurableStore(tmp_path / "data")
    connection = sqlite3.connect(tmp_path / "data" / "catalog.db")
    assert connection.execute("SELECT format FROM meta").fetchone() == (1,)
    connection.close()


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
