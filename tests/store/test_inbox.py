"""Messages of small commits that share a row of the catalog: their encoding, and its damage."""

from __future__ import annotations

import random
import shutil
import sqlite3
import struct
import tracemalloc
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from broker_core.core import failpoint
from broker_core.core.change import ROUTE, Change, InboxRow
from broker_core.core.errors import CorruptCatalog, StoreError
from broker_core.core.records import ProgressRecord, QueueRecord
from broker_core.store import inbox
from broker_core.store.codec import guard
from broker_core.store.durable import DurableStore
from broker_core.store.inbox import GROUP_BYTES, MAX_ROWS, guarded, pack, unpack
from broker_core.store.salvage.salvage import salvage
from broker_core.store.salvage.verify import verify

_NUMBER = st.integers(-(2**63), 2**63 - 1)
_TEXT = st.text("ak.é€𝄞\0", max_size=10)
_BYTES = st.binary(max_size=30)


@st.composite
def rows(draw: st.DrawFn) -> list[InboxRow]:
    """Of several blocks, as a commit has them (without gaps), or an upgrade (block after block). Stamps are
    equal, or mixed.
    """
    stamps = draw(
        st.sampled_from(
            [st.just((7, 9)), st.tuples(st.integers(1, 3), st.integers(1, 3)), st.tuples(_NUMBER, _NUMBER)]
        )
    )
    block_ids = draw(st.lists(st.sampled_from((1, 1, 1, 2, 2**31)), max_size=12))
    if draw(st.booleans()):
        numbers = [block_ids[:at].count(block_id) for at, block_id in enumerate(block_ids)]
    else:
        block_ids.sort()
        numbers = list(accumulate(draw(st.sampled_from((1, 1, 1, 2))) for _ in block_ids))
    places = zip(block_ids, numbers, strict=True)
    return [
        InboxRow(*place, *draw(stamps), *draw(st.tuples(_TEXT, _TEXT, _BYTES, _BYTES, _BYTES)))
        for place in places
    ]


@given(rows().filter(bool), st.sampled_from((0, GROUP_BYTES)))
def test_a_history_is_kept_in_fewer_bytes_where_a_row_has_all_its_messages(
    messages: list[InboxRow], more_bytes: int
) -> None:
    messages[0] = messages[0]._replace(body=bytes(more_bytes))
    packed = inbox.pack_group(messages, (b"the history", b"own"))
    unpacked, history = inbox.unpack_all(packed)
    assert unpacked == [row for each in pack(messages) for row in unpack(*each)]
    (found,) = history
    assert found.block_id == messages[-1].block_id and found.messages[-1] == messages[-1]
    if len(pack(messages)) == 1:
        assert found.text == b"own" and found.messages == messages
    else:
        assert found.text == b"the history"


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(rows())
def test_what_is_packed_is_unpacked_in_order_and_whole(messages: list[InboxRow]) -> None:
    packed = pack(messages)
    assert [row for each in packed for row in unpack(*each)] == messages
    assert [count for _, count, _ in packed] == [len(unpack(*each)) for each in packed]
    for each in packed:
        assert guarded(each) == (*each, guard(each))


@given(st.tuples(_NUMBER, _NUMBER, _TEXT, _TEXT, _BYTES, _BYTES, _BYTES))
def test_one_message_is_packed_as_a_group_of_one_is(
    values: tuple[int, int, str, str, bytes, bytes, bytes],
) -> None:
    row = InboxRow(5, 6, *values)
    assert pack([row]) == list(inbox._pack([row]))


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(rows().filter(bool), st.randoms(use_true_random=False))
def test_damaged_bytes_are_refused_or_are_other_messages_and_never_another_error(
    messages: list[InboxRow], chosen: random.Random
) -> None:
    key, count, blob = chosen.choice(pack(messages))
    damaged = bytearray(blob)
    for _ in range(chosen.choice((1, 1, 3))):
        damaged[chosen.randrange(min(len(damaged), chosen.choice((8, 60, 1000))))] ^= 1 << chosen.randrange(8)
    cut = blob[: chosen.randrange(len(blob))]
    for content in (bytes(damaged), cut, blob + b"x", chosen.randbytes(chosen.randrange(100)), b""):
        for number in (count, chosen.randrange(-1, 5), 1 << 62):
            try:
                found = unpack(key, number, content)
            except ValueError:
                continue
            assert len(found) == number and sum(
                len(row.body) + len(row.properties) + len(row.routes) for row in found
            ) <= len(content)
    with pytest.raises(ValueError, match="bytes"):
        unpack(key, count, cut)


@pytest.mark.parametrize(
    "row", [("1", 1, b""), (1, None, b""), (1, 1, "x"), (1.5, 1, b""), (None, None, None)]
)
def test_values_of_other_types_are_refused(row: tuple[object, object, object]) -> None:
    with pytest.raises(ValueError, match="wrong types"):
        unpack(*row)


def test_lengths_that_lie_cost_no_memory() -> None:
    blob = struct.pack("<I", MAX_ROWS) + bytes(100)
    tracemalloc.start()
    for count in (1, MAX_ROWS, MAX_ROWS + 1):
        with pytest.raises(ValueError, match="bytes"):
            unpack(0, count, blob)
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()
    with pytest.raises(ValueError, match="from row"):  # beyond the last row of a block
        unpack(MAX_ROWS - 1, 2, pack([InboxRow(0, 0, 1, 1, "", "", b"", b"", b"")] * 2)[0][2])


def test_large_groups_are_cut_and_a_large_message_has_a_row_of_its_own() -> None:
    bodies = [b"x" * 1000] * 1000 + [b"y" * 3 * GROUP_BYTES] + [b"z"] * 10
    messages = [
        InboxRow(1, number, 1, 1, "", "q", b"", body, bytes(16)) for number, body in enumerate(bodies)
    ]
    packed = pack(messages)
    assert [row for each in packed for row in unpack(*each)] == messages
    assert all(len(blob) <= GROUP_BYTES + 40 * count for _, count, blob in packed if count > 1)
    assert len(packed) < 40


def message(number: int, sequence: int, queue_id: int = 5) -> InboxRow:
    return InboxRow(
        1, number, sequence, sequence * 10, "", "q", b"", b"body-%03d" % number, ROUTE.pack(queue_id, number)
    )


def filled(path: Path) -> None:
    """Groups of 1, 5 (of three commits) and 4 messages, in a queue; of which the first two are settled."""
    store = DurableStore(path)
    store.load()
    records = [QueueRecord(5, "q", True, False, False, {}), ProgressRecord(5, "", 2, 2, 10, 0)]
    store.commit([Change(sequence=1, rows=[message(0, 1)], journal=[*records])])
    store.commit(
        [
            Change(sequence=2, rows=[message(1, 2), message(2, 2)]),
            Change(sequence=3, rows=[message(3, 3)]),
            Change(sequence=4, rows=[message(4, 4), message(5, 4)]),
        ]
    )
    store.commit([Change(sequence=5, rows=[message(number, 5) for number in range(6, 10)])])
    store.close()


def executed(path: Path, statement: str, *values: object) -> list[tuple[object, ...]]:
    connection = sqlite3.connect(path / "catalog.db", isolation_level=None)
    found = connection.execute(statement, values).fetchall()
    connection.close()
    return found


def test_a_commit_of_many_messages_is_one_row_and_a_group_of_commits_too(tmp_path: Path) -> None:
    filled(tmp_path / "data")
    assert executed(tmp_path / "data", "SELECT id - (1 << 20), count FROM inbox") == [(0, 1), (1, 5), (6, 4)]
    store = DurableStore(tmp_path / "data")
    image = store.load()
    assert [(row.row, row.sequence) for row in image.inbox] == list(
        enumerate([1, 2, 2, 3, 4, 4, 5, 5, 5, 5])
    ) and image.sequence == 5
    store.close()
    assert verify(tmp_path / "data").inbox_rows == 10


@pytest.mark.parametrize("where", ["body", "length", "count", "key"])
def test_a_damaged_group_is_refused_by_name_and_salvage_names_the_offsets_that_it_loses(
    tmp_path: Path, where: str
) -> None:
    filled(tmp_path / "data")
    ((blob,),) = executed(tmp_path / "data", "SELECT messages FROM inbox WHERE count = 5")
    assert isinstance(blob, bytes)
    if where == "body":
        changed = blob.replace(b"body-003", b"bodY-003")
    else:
        changed = blob[:100] + bytes([blob[100] ^ 1]) + blob[101:] if where == "length" else blob
    column, value = {"count": ("count", 4), "key": ("id", (1 << 20) + 11)}.get(where, ("messages", changed))
    executed(tmp_path / "data", f"UPDATE inbox SET {column} = ? WHERE count = 5", value)
    key = (1 << 20) + (11 if where == "key" else 1)
    store = DurableStore(tmp_path / "data")
    with pytest.raises(
        CorruptCatalog, match=f"a row of table inbox with key {key} does not match its checksum"
    ):
        store.load()
    store.close(clean=False)
    assert any(f"key {key} " in problem for problem in verify(tmp_path / "data").problems)
    report = salvage(tmp_path / "data", tmp_path / "new")
    assert [(lost.queue, lost.start, lost.end) for lost in report.lost] == [("q", 2, 6)], (
        "offset 1 is settled"
    )
    assert (
        report.inbox_rows == 5
        and f"table inbox: the row with key {key} does not match its checksum" in report.losses
    )
    assert verify(tmp_path / "new").problems == []
    store = DurableStore(tmp_path / "new")
    assert [row.body for row in store.load().inbox] == [b"body-%03d" % number for number in (0, 6, 7, 8, 9)]
    store.close()


@pytest.mark.parametrize(
    "values",
    [(1, b""), (4, b"\1\0\0\0" + bytes(500)), (5, b"\5\0\0\0" + b"\xff" * 500), ("five", b"x"), (5, "text")],
)
def test_a_group_that_matches_its_checksum_and_makes_no_sense_is_a_corrupt_catalog(
    tmp_path: Path, values: tuple[object, object]
) -> None:
    filled(tmp_path / "data")
    row = ((1 << 20) + 1, *values)
    executed(tmp_path / "data", "DELETE FROM inbox WHERE id = ?", row[0])
    executed(tmp_path / "data", "INSERT INTO inbox VALUES (?, ?, ?, ?)", *row, guard(row))  # type: ignore[arg-type]
    store = DurableStore(tmp_path / "data")
    with pytest.raises(CorruptCatalog, match="is damaged: "):
        store.load()
    store.close(clean=False)
    assert not verify(tmp_path / "data").ok
    report = salvage(tmp_path / "data", tmp_path / "new")
    assert [(lost.queue, lost.start, lost.end) for lost in report.lost] == [("q", 2, 6)]


@pytest.mark.parametrize("point", ["begin", "synced", "executed"])
def test_a_group_whose_commit_fails_is_not_there_and_one_that_was_committed_is(
    tmp_path: Path, point: str
) -> None:
    store = DurableStore(tmp_path / "data")
    store.load()
    store.commit([Change(sequence=1, rows=[message(0, 1), message(1, 1)])])
    failpoint.arm(f"store.commit.{point}", "raise")
    try:
        with pytest.raises(StoreError):
            store.commit([Change(sequence=2, rows=[message(2, 2)]), Change(sequence=3, rows=[message(3, 3)])])
    finally:
        failpoint.disarm()
    store.close()
    store = DurableStore(tmp_path / "data")
    assert store.load().inbox == [message(0, 1), message(1, 1)]
    store.close()


def test_rows_of_two_blocks_in_one_commit_are_a_row_for_each_and_leave_with_their_block(
    tmp_path: Path,
) -> None:
    store = DurableStore(tmp_path / "data")
    store.load()
    first, second = (
        [message(number, 1)._replace(block_id=block_id) for number in range(3)] for block_id in (1, 2)
    )
    mixed = [row for pair in zip(first, second, strict=True) for row in pair]
    store.commit([Change(sequence=1, rows=mixed)])
    store.seal(1)
    store.commit([Change(seals=[1])])
    store.close()
    assert {row[0] >> 20 for row in executed(tmp_path / "data", "SELECT id FROM inbox")} == {2}  # type: ignore[operator]
    store = DurableStore(tmp_path / "data")
    assert store.load().inbox == second and store.read(1).column("body").to_pylist() == [
        row.body for row in first
    ]
    store.close()


def test_a_commit_of_messages_alone_is_one_statement_and_survives_a_crash_as_any_other(
    tmp_path: Path,
) -> None:
    store = DurableStore(tmp_path / "data")
    store.load()
    store.commit(
        [Change(sequence=1, rows=[message(0, 1)], journal=[QueueRecord(5, "q", True, False, False, {})])]
    )
    seen: list[str] = []
    store._catalog._connection.set_trace_callback(lambda statement: seen.append(statement.split()[0]))
    store.commit(
        [Change(sequence=2, rows=[message(1, 2)]), Change(sequence=3, rows=[message(2, 3), message(3, 3)])]
    )
    assert seen == ["INSERT"]
    seen.clear()
    # a number that no row carries
    store.commit([Change(sequence=4, rows=[message(4, 4)]), Change(sequence=9)])
    assert seen[0] == "BEGIN" and seen[-1] == "COMMIT" and seen.count("INSERT") == 2
    shutil.copytree(tmp_path / "data", tmp_path / "crashed")
    store.close()
    store = DurableStore(tmp_path / "crashed")
    image = store.load()
    assert [row.row for row in image.inbox] == [0, 1, 2, 3, 4] and image.sequence == 9
    store.close()
