"""One behaviour, two stores: what broker_core/store/port.py promises holds for MemoryStore and for
DurableStore.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import Field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import xxhash

from broker_core.core import failpoint, ids
from broker_core.core.change import Change, Drop, InboxRow
from broker_core.core.errors import DataLoss, OptionError, StoreFailed
from broker_core.core.records import (
    RECORDS,
    BindingRecord,
    HoleRecord,
    LedgerRecord,
    PartRecord,
    ProgressRecord,
    QueueRecord,
    Record,
    RunRecord,
)
from broker_core.message.message import MERGED_SCHEMA, MESSAGE_SCHEMA
from broker_core.store.durable import DurableStore
from broker_core.store.memory import MemoryStore

Store = MemoryStore | DurableStore


class Case:
    """A store that can crash: all that is not committed is gone."""

    def __init__(self, kind: str, path: Path) -> None:
        self.kind, self.path = kind, path
        self.store: Store = MemoryStore() if kind == "memory" else DurableStore(path)
        self.image = self.store.load()

    def crash(self) -> Store:
        failpoint.disarm()
        if isinstance(self.store, MemoryStore):
            self.store = self.store.reopened()
        else:
            self.store.close(clean=False)
            self.store = DurableStore(self.path)
        self.image = self.store.load()
        return self.store

    def reopen(self) -> Store:
        self.store.close()
        return self.crash()


@pytest.fixture(params=["memory", "durable"])
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Case]:
    case = Case(request.param, tmp_path / "data")
    yield case
    failpoint.disarm()
    case.store.close()


def messages(*bodies: bytes, key: str = "q") -> pa.RecordBatch:
    columns: list[list[Any]] = [[""] * len(bodies), [key] * len(bodies), list(bodies), [b""] * len(bodies)]
    return pa.RecordBatch.from_arrays(
        [pa.array(column, field.type) for column, field in zip(columns, MESSAGE_SCHEMA, strict=True)],
        schema=MESSAGE_SCHEMA,
    )


def inbox(block_id: int, row: int, sequence: int, body: bytes = b"m") -> InboxRow:
    return InboxRow(
        block_id,
        row,
        sequence,
        1_700_000_000_000_000 + sequence,
        "ex",
        "key.é",
        b"\x01\x02",
        body,
        struct.pack("<qq", 7, row),
    )


def put_row(store: Store, block_id: int, row: int, sequence: int, body: bytes = b"m") -> InboxRow:
    written = inbox(block_id, row, sequence, body)
    store.commit([Change(sequence=sequence, rows=[written])])
    return written


SAMPLES: dict[str, Callable[[int], Any]] = {
    "int": lambda i: i - (1 << 62),
    "bool": lambda i: i % 2 == 0,
    "str": lambda i: f"näme-{i}'\"",
    "bytes": lambda i: bytes([i, 0, 255]),
    "Literal": lambda i: f"state-{i}",
    "dict": lambda i: {"b": {"x": [i, None, True]}, "a": "é", "start": "start"},
    "list": lambda i: [[i, "x"], ["y", 1.5]],
}


def kind_of(field: Field[Any]) -> str:
    kind = str(field.type).partition("[")[0]
    return "int" if hasattr(ids, kind) else kind


def sample(cls: type[Record], i: int) -> Record:
    values = {}
    for place, field in enumerate(fields(cls)):
        value = SAMPLES[kind_of(field)](i + place)
        values[field.name] = abs(value) if field.name == "checksum" else value
    return cls(**values)


def test_an_empty_store_is_empty_and_clean(case: Case) -> None:
    assert (
        case.image.records,
        case.image.inbox,
        case.image.blocks,
        case.image.sequence,
        case.image.clean,
    ) == ([], [], [], 0, True)


@pytest.mark.parametrize("cls", RECORDS, ids=lambda cls: cls.__name__)
def test_every_record_class_survives_a_crash_as_it_was_put(case: Case, cls: type[Record]) -> None:
    first, second = sample(cls, 1), sample(cls, 40)
    case.store.commit([Change(journal=[first, second])])
    case.crash()
    assert case.image.records in ([first, second], [second, first])


@pytest.mark.parametrize("cls", RECORDS, ids=lambda cls: cls.__name__)
def test_a_dropped_record_is_gone_and_the_others_stay(case: Case, cls: type[Record]) -> None:
    first, second = sample(cls, 1), sample(cls, 40)
    case.store.commit([Change(journal=[first, second])])
    case.store.commit([Change(journal=[Drop(cls, first.key)])])
    case.crash()
    assert case.image.records == [second]


def test_a_put_replaces_the_record_with_the_same_key_also_within_one_commit(case: Case) -> None:
    case.store.commit(
        [
            Change(journal=[ProgressRecord(1, "a", 1, 1, 1, 0)]),
            Change(journal=[ProgressRecord(1, "a", 2, 2, 2, 0)]),
        ]
    )
    case.store.commit([Change(journal=[ProgressRecord(1, "b", 3, 3, 3, 0)])])
    case.crash()
    assert case.image.records == [ProgressRecord(1, "b", 3, 3, 3, 0)]


def test_the_last_of_put_and_drop_holds_within_a_change_and_between_the_changes_of_a_commit(
    case: Case,
) -> None:
    def hole(queue_id: int, end: int = 6) -> HoleRecord:
        return HoleRecord(queue_id, 5, end)

    def drop(queue_id: int) -> Drop:
        return Drop(HoleRecord, (queue_id, 5))

    case.store.commit([Change(journal=[hole(1), hole(5)])])
    case.store.commit(
        [
            Change(journal=[drop(1), hole(1, 9), hole(2), drop(2), hole(3), hole(4)]),
            Change(journal=[drop(3), drop(5), hole(5, 7), drop(5)]),
            Change(journal=[hole(3, 8), drop(4), hole(4, 7), drop(4)]),
        ]
    )
    case.crash()
    assert sorted(case.image.records, key=lambda record: record.key) == [hole(1, 9), hole(3, 8)]


def test_a_key_with_a_dict_is_the_same_key_in_any_order_of_its_entries(case: Case) -> None:
    case.store.commit([Change(journal=[BindingRecord("e", "q", "k", {"a": 1, "b": 2})])])
    case.store.commit([Change(journal=[Drop(BindingRecord, ("e", "q", "k", {"b": 2, "a": 1}, "/"))])])
    case.crash()
    assert case.image.records == []


def test_a_64_bit_checksum_survives(case: Case) -> None:
    part = PartRecord("b", 0, "t", "publish", {}, 0, 0, 1, 1, (1 << 64) - 1, 0, b"x", {}, 0, [])
    case.store.commit([Change(journal=[part])])
    case.crash()
    assert case.image.records == [part]


def test_dropping_what_is_not_there_is_no_error(case: Case) -> None:
    case.store.commit([Change(journal=[Drop(HoleRecord, (1, 2))], forgets=[12345])])
    case.crash()
    assert case.image.records == []


def test_an_appended_block_that_no_commit_names_does_not_exist_after_a_crash(case: Case) -> None:
    info = case.store.append(messages(b"a"))
    case.store.sync()
    case.crash()
    assert case.image.blocks == []
    with pytest.raises(DataLoss):
        case.store.read(info.block_id)


def test_a_named_block_reads_back_equal_and_with_its_size(case: Case) -> None:
    block = messages(b"abc", b"", b"x" * 1000)
    info = case.store.append(block.slice(1))
    assert info.checksum == xxhash.xxh3_64_intdigest(block.slice(1).serialize())
    case.store.commit([Change(sequence=3, names=[info.block_id])])
    assert (info.rows, info.size_bytes) == (2, 1000)
    assert case.store.read(info.block_id).equals(block.slice(1))
    case.crash()
    assert case.image.blocks == [info] and case.image.sequence == 3
    assert case.store.read(info.block_id).equals(block.slice(1))


def test_an_empty_block_and_a_block_of_another_schema_read_back_equal(case: Case) -> None:
    rows = pa.record_batch(
        {"id": pa.array([1, None], pa.int32()), "x": pa.array([[1.5], []], pa.list_(pa.float64()))}
    )
    infos = [case.store.append(messages()), case.store.append(rows)]
    case.store.commit([Change(names=[info.block_id for info in infos])])
    case.crash()
    assert case.store.read(infos[0].block_id).equals(messages())
    assert case.store.read(infos[1].block_id).equals(rows)


def test_block_ids_are_not_used_twice_by_what_is_durable(case: Case) -> None:
    ids = [case.store.append(messages(b"a")).block_id for _ in range(3)]
    open_batch = case.store.new_block_id()
    case.store.commit([Change(rows=[inbox(open_batch, 0, 1)], names=ids)])
    store = case.crash()
    assert store.new_block_id() not in {*ids, open_batch}


def test_inbox_rows_come_back_in_order_and_whole(case: Case) -> None:
    block_id = case.store.new_block_id()
    rows = [put_row(case.store, block_id, i, i + 1, bytes([i]) * i) for i in range(5)]
    case.crash()
    assert case.image.inbox == rows and case.image.sequence == 5


def test_an_open_block_reads_as_merged_rows_while_it_grows(case: Case) -> None:
    block_id = case.store.new_block_id()
    for i in range(3):
        put_row(case.store, block_id, i, i + 1, b"%d" % i)
        block = case.store.read(block_id)
        assert block.schema.equals(MERGED_SCHEMA) and block.column("body").to_pylist() == [
            b"%d" % j for j in range(i + 1)
        ]
    row = block.to_pylist()[2]
    assert (row["commit_sequence"], row["committed_at"], row["exchange"], row["routing_key"], row["properties"]) == (
        3, 1_700_000_000_000_003, "ex", "key.é", b"\x01\x02",
    )  # fmt: skip
    assert case.store.locate(block_id) is None


def test_a_sealed_block_reads_the_same_before_and_after_the_commit_and_leaves_the_inbox(case: Case) -> None:
    block_id = case.store.new_block_id()
    for i in range(4):
        put_row(case.store, block_id, i, i + 1)
    before = case.store.read(block_id)
    case.store.seal(block_id)
    assert case.store.read(block_id).equals(before)
    run = RunRecord(7, 0, 4, block_id, 0, b"", 0, 0)
    case.store.commit([Change(seals=[block_id], journal=[run])])
    assert case.store.read(block_id).equals(before)
    case.crash()
    assert case.image.inbox == [] and [info.rows for info in case.image.blocks] == [4]
    assert case.image.records == [run] and case.image.sequence == 4
    assert case.store.read(block_id).equals(before)


def test_a_seal_that_no_commit_names_leaves_the_block_open(case: Case) -> None:
    block_id = case.store.new_block_id()
    row = put_row(case.store, block_id, 0, 1)
    case.store.seal(block_id)
    case.crash()
    assert case.image.inbox == [row] and case.image.blocks == []
    case.store.seal(block_id)
    case.store.commit([Change(seals=[block_id])])
    assert case.store.read(block_id).num_rows == 1


def test_a_rewrite_blanks_dead_bodies_only_once_it_is_committed_and_keeps_the_rows(case: Case) -> None:
    info = case.store.append(messages(b"a", b"b", b"c"))
    case.store.commit([Change(names=[info.block_id])])
    case.store.rewrite(info.block_id, b"\x05")
    assert case.store.read(info.block_id).column("body").to_pylist() == [b"a", b"b", b"c"]
    case.crash()
    assert case.store.read(info.block_id).column("body").to_pylist() == [b"a", b"b", b"c"]
    case.store.rewrite(info.block_id, b"\x05")
    case.store.commit([Change(moves=[info.block_id])])
    assert case.store.read(info.block_id).column("body").to_pylist() == [b"a", b"", b"c"]
    case.crash()
    assert case.store.read(info.block_id).column("body").to_pylist() == [b"a", b"", b"c"]
    assert [(found.rows, found.size_bytes) for found in case.image.blocks] == [(3, 2)]


def test_a_forgotten_block_is_gone_sealed_open_or_never_named(case: Case) -> None:
    named = case.store.append(messages(b"a")).block_id
    open_batch = case.store.new_block_id()
    case.store.commit([Change(sequence=9, rows=[inbox(open_batch, 0, 9)], names=[named])])
    staged = case.store.append(messages(b"b")).block_id
    case.store.commit([Change(forgets=[named, open_batch, staged])])
    for block_id in (named, open_batch, staged):
        with pytest.raises(DataLoss):
            case.store.read(block_id)
    case.crash()
    assert (case.image.blocks, case.image.inbox, case.image.sequence) == ([], [], 9)


def test_one_commit_takes_many_changes_together(case: Case) -> None:
    block_id = case.store.new_block_id()
    case.store.commit(
        [
            Change(sequence=i + 1, rows=[inbox(block_id, i, i + 1)], journal=[HoleRecord(1, i, i + 1)])
            for i in range(16)
        ]
    )
    case.crash()
    assert len(case.image.inbox) == len(case.image.records) == 16 and case.image.sequence == 16


@pytest.mark.parametrize("step", ["begin", "synced", "executed"])
def test_a_commit_that_fails_before_its_commit_point_leaves_nothing_and_ends_the_store(
    case: Case, step: str
) -> None:
    block_id = case.store.new_block_id()
    kept = put_row(case.store, block_id, 0, 1)
    info = case.store.append(messages(b"a"))
    failpoint.arm(f"store.commit.{step}", "raise")
    change = Change(
        sequence=2, rows=[inbox(block_id, 1, 2)], journal=[HoleRecord(1, 2, 3)], names=[info.block_id]
    )
    with pytest.raises(StoreFailed):
        case.store.commit([change])
    failpoint.disarm()
    for write in (lambda: case.store.commit([]), lambda: case.store.append(messages(b"z")), case.store.sync):
        with pytest.raises(StoreFailed, match="an earlier write failed"):
            write()
    case.crash()
    assert (case.image.inbox, case.image.records, case.image.blocks, case.image.sequence) == (
        [kept],
        [],
        [],
        1,
    )
    put_row(case.store, block_id, 1, 2)


def test_a_row_that_is_not_the_next_of_its_open_block_is_refused(case: Case) -> None:
    with pytest.raises(StoreFailed, match="row 1 of block 1 is not the next one, 0"):
        case.store.commit([Change(rows=[inbox(1, 1, 1)])])


WRONG: dict[str, list[Any]] = {
    "int": [None, "1", 1.5, 1 << 63, -(1 << 63) - 1],
    "bool": [None, "x", 1],
    "str": [None, 1, b"x", "\ud800", "a\udfffb"],
    "bytes": [None, "x", 3],
    "Literal": [None, 1],
    "dict": [None, [1], {1: 2}, {"a": [{2: 3}]}, {"a": {1}}, {"a": float("nan")}, "x"],
    "list": [None, {"a": 1}, "x", [{1}], [{3: 4}]],
}


@pytest.mark.parametrize("cls", RECORDS, ids=lambda cls: cls.__name__)
def test_a_record_that_cannot_be_read_back_as_it_is_is_refused_and_nothing_is_written(
    case: Case, cls: type[Record]
) -> None:
    good = sample(cls, 1)
    for field in fields(cls):
        for value in WRONG[kind_of(field)]:
            if field.name == "checksum" and value == 1 << 63:
                continue
            bad = Change(journal=[good, replace(good, **{field.name: value})])
            with pytest.raises(OptionError, match=rf"{cls.TABLE}\.{field.name}"):
                case.store.encode(bad)
            with pytest.raises(OptionError):
                case.store.commit([Change(journal=[good]), bad])
    case.store.commit([Change(journal=[HoleRecord(1, 2, 3)])])
    case.crash()
    assert case.image.records == [HoleRecord(1, 2, 3)]


def test_a_record_that_is_too_deep_is_refused(case: Case) -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(OptionError):
        case.store.encode(Change(journal=[QueueRecord(1, "q", True, False, False, {"x": nested})]))


@pytest.mark.parametrize(
    "values",
    [
        {"body": bytearray(b"x")},
        {"body": "x"},
        {"routing_key": "\ud800"},
        {"exchange": b"e"},
        {"exchange": "\udc80"},
        {"properties": None},
    ],
    ids=repr,
)
def test_a_message_that_cannot_be_read_back_as_it_is_is_refused_and_nothing_is_written(
    case: Case, values: dict[str, Any]
) -> None:
    good, bad = inbox(1, 0, 1), inbox(1, 1, 2)._replace(**values)
    with pytest.raises(OptionError, match=f"the {next(iter(values))} of a message"):
        case.store.encode(Change(rows=[good, bad]))
    with pytest.raises(OptionError):
        case.store.commit([Change(rows=[good]), Change(rows=[bad])])
    case.store.commit([Change(rows=[good])])
    case.crash()
    assert case.image.inbox == [good]


def test_numbers_of_numpy_are_stored_as_numbers(case: Case) -> None:
    case.store.commit([Change(journal=[HoleRecord(np.int64(1), np.uint8(2), 3)])])  # type: ignore[arg-type]
    case.crash()
    assert case.image.records == [HoleRecord(1, 2, 3)]


def test_what_was_encoded_before_is_what_is_committed(case: Case) -> None:
    change = Change(rows=[inbox(1, 0, 1)], journal=[HoleRecord(1, 2, 3)])
    case.store.encode(change)
    encoded = change.encoded
    case.store.commit([change])
    assert change.encoded is encoded
    case.crash()
    assert case.image.records == [HoleRecord(1, 2, 3)] and case.image.inbox == [inbox(1, 0, 1)]


def test_a_closed_store_says_so_and_reopens_clean_and_a_crashed_one_does_not(case: Case) -> None:
    case.store.commit(
        [Change(journal=[LedgerRecord("a", 1, "q", 0, "t", {}, 1, 1, 1, 1, [], 0, True, False)])]
    )
    old = case.store
    case.reopen()
    assert case.image.clean and len(case.image.records) == 1
    with pytest.raises(StoreFailed, match="closed"):
        old.append(messages(b"a")) if isinstance(old, DurableStore) else MemoryStore.append(
            old, messages(b"a")
        )
    case.crash()
    assert not case.image.clean
