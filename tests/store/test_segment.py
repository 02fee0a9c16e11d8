"""Segment files: what they hold, what damage does, when they go."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import xxhash

from broker_core.arrow.part_file import PartFile, PartWriter, encapsulated
from broker_core.core.change import Change, InboxRow
from broker_core.core.errors import CorruptSegment, DataLoss, OptionError
from broker_core.core.records import LedgerRecord, PartRecord, QueueRecord, Record, RunRecord
from broker_core.message.message import MESSAGE_SCHEMA
from broker_core.store.durable import DurableStore
from broker_core.store.salvage.verify import verify
from broker_core.store.segment import END_MARK


def messages(count: int, body: bytes = b"x" * 100) -> pa.RecordBatch:
    columns: list[list[Any]] = [
        [""] * count,
        ["q"] * count,
        [b"%06d" % i + body for i in range(count)],
        [b""] * count,
    ]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, MESSAGE_SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=MESSAGE_SCHEMA)


def branch_rows(count: int) -> pa.RecordBatch:
    return pa.record_batch({"n": pa.array(range(count), pa.int64())})


def named(store: DurableStore, block: pa.RecordBatch) -> int:
    block_id = store.append(block).block_id
    store.commit([Change(names=[block_id])])
    return block_id


def files(path: Path) -> list[str]:
    return sorted(entry.name for entry in (path / "segments").iterdir())


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DurableStore]:
    store = DurableStore(tmp_path, roll_bytes=100_000)
    store.load()
    yield store
    store.close()


def test_a_closed_segment_is_a_plain_arrow_stream_of_its_blocks(store: DurableStore, tmp_path: Path) -> None:
    blocks = [messages(100 + i) for i in range(12)]
    for block in blocks:
        named(store, block)
    store.close()
    found = []
    for name in files(tmp_path):
        with pa.ipc.open_stream(str(tmp_path / "segments" / name)) as reader:
            found += list(reader)
    assert len(files(tmp_path)) >= 2
    assert found == blocks


def test_messages_share_segments_merged_blocks_have_theirs_and_other_schemas_their_own(
    store: DurableStore, tmp_path: Path
) -> None:
    named(store, messages(3))
    named(store, messages(3))
    named(store, branch_rows(3))
    open_batch = store.new_block_id()
    store.commit([Change(sequence=1, rows=[InboxRow(open_batch, 0, 1, 1, "", "q", b"", b"b", b"")])])
    store.seal(open_batch)
    store.commit([Change(seals=[open_batch])])
    assert files(tmp_path) == ["00000001.arrow", "00000002.arrow", "00000003.arrow"]


def test_a_reader_on_this_host_finds_the_same_verified_bytes_where_locate_says(store: DurableStore) -> None:
    block = messages(1000)
    block_id = named(store, block)
    place = store.locate(block_id)
    assert place is not None
    data = pa.memory_map(place.path).read_at(place.length, place.position)
    assert xxhash.xxh3_64_intdigest(data) == place.checksum
    assert pa.ipc.read_record_batch(pa.py_buffer(data), MESSAGE_SCHEMA).equals(block)


@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_a_flipped_byte_is_an_error_that_names_file_position_and_block_and_the_others_still_read(
    where: str, tmp_path: Path
) -> None:
    store = DurableStore(tmp_path)
    store.load()
    ids = [named(store, messages(50)) for _ in range(3)]
    place = store.locate(ids[1])
    assert place is not None
    store.close()
    with open(place.path, "r+b") as file:
        at = place.position + {"first": 0, "middle": place.length // 2, "last": place.length - 1}[where]
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 0x10]))
    store = DurableStore(tmp_path)
    store.load()
    with pytest.raises(CorruptSegment) as caught:
        store.read(ids[1])
    text = str(caught.value)
    assert re.search(
        rf"segment {re.escape(place.path)} is damaged at position {place.position}, block "
        rf"{ids[1]} \(50 rows, ",
        text,
    )
    assert (
        "restore the file from a backup" in text
        and f"txmq broker verify {tmp_path}" in text
        and "\n" not in text
    )
    assert [store.read(block_id).num_rows for block_id in (ids[0], ids[2])] == [50, 50]
    store.close()
    report = verify(tmp_path)
    assert [f"position {place.position}, block {ids[1]}" in problem for problem in report.problems] == [True]


def test_a_segment_cut_short_or_removed_is_told_by_read_and_verify_and_not_repaired(tmp_path: Path) -> None:
    store = DurableStore(tmp_path)
    store.load()
    first, last = named(store, messages(50)), named(store, messages(50))
    store.close(clean=False)
    path = tmp_path / "segments" / "00000001.arrow"
    os.truncate(path, path.stat().st_size - 10)
    store = DurableStore(tmp_path)
    store.load()
    assert store.read(first).num_rows == 50
    with pytest.raises(CorruptSegment, match="the file ends 10 bytes too early"):
        store.read(last)
    path.unlink()
    with pytest.raises(DataLoss, match=r"00000001\.arrow is missing, which holds block"):
        store.read(last)
    store.close()
    assert not verify(tmp_path).ok


def handed_over(path: Path, *blocks: pa.RecordBatch) -> tuple[PartWriter, PartFile]:
    writer = PartWriter(str(path))
    for block in blocks:
        writer.append(block)
    return writer, writer.end()


def test_a_writers_file_becomes_a_closed_segment_with_the_same_checksums(tmp_path: Path) -> None:
    blocks = [messages(3), messages(5)]
    with contextlib.closing(DurableStore(tmp_path)) as store:
        store.load()
        writer, file = handed_over(tmp_path, *blocks)
        infos = [info for info, _ in store.adopt(file)]
        store.commit([Change(names=[info.block_id for info in infos])])
        writer.close()
        assert [info.checksum for info in infos] == [store.append(block).checksum for block in blocks]
        location = store.locate(infos[0].block_id)
        assert location is not None
        with pa.ipc.open_stream(Path(location.path).read_bytes()) as stream:
            assert list(stream) == blocks
    with contextlib.closing(DurableStore(tmp_path)) as store:
        store.load()
        assert [store.read(info.block_id) for info in infos] == blocks
    assert verify(tmp_path).problems == []


@pytest.mark.parametrize(
    "block", [messages(3), messages(50).slice(7, 20), messages(1, b""), messages(0), branch_rows(9)]
)
def test_a_block_in_pieces_has_the_bytes_of_its_serialized_message(block: pa.RecordBatch) -> None:
    assert b"".join(memoryview(piece) for piece in encapsulated(block)) == block.serialize().to_pybytes()


def test_a_writers_file_that_is_never_handed_over_or_never_named_leaves_nothing(tmp_path: Path) -> None:
    store = DurableStore(tmp_path)
    store.load()
    handed_over(tmp_path, messages(3))[0].close()
    assert files(tmp_path) == []
    writer, file = handed_over(tmp_path, messages(3))
    ((unnamed, _),) = store.adopt(file)
    writer.close()
    assert len(files(tmp_path)) == 1
    store.commit([Change(forgets=[unnamed.block_id])])
    assert files(tmp_path) == []
    writer, file = handed_over(tmp_path, messages(3))
    store.adopt(file)
    writer.close()
    store.close(clean=False)  # as a crash before the commit
    assert len(files(tmp_path)) == 1
    with contextlib.closing(DurableStore(tmp_path)):
        assert files(tmp_path) == []


@pytest.mark.parametrize("fault", ["inode", "size_bytes", "pid", "checksum", "rows", "length"])
def test_a_writers_file_that_is_not_what_it_is_said_to_be_is_not_taken(
    fault: str, store: DurableStore, tmp_path: Path
) -> None:
    writer, file = handed_over(tmp_path, messages(3))
    if fault in ("checksum", "rows", "length"):
        wrong = replace(file, parts=(replace(file.parts[0], **{fault: 8}),))
    else:
        wrong = replace(file, **{fault: 1 << 22})
    assert store.adopt(wrong) == []
    assert files(tmp_path) == []
    ((info, block),) = store.adopt(file)
    writer.close()
    store.commit([Change(names=[info.block_id])])
    assert block == store.read(info.block_id) == messages(3)


def test_a_torn_tail_is_cut_and_the_file_ends_as_a_stream(tmp_path: Path) -> None:
    store = DurableStore(tmp_path)
    store.load()
    kept = named(store, messages(50))
    store.append(messages(70))
    store.close(clean=False)
    path = tmp_path / "segments" / "00000001.arrow"
    with path.open("ab") as file:
        file.write(b"\xff" * 5000)
    store = DurableStore(tmp_path)
    store.load()
    assert path.read_bytes().endswith(END_MARK)
    assert [block.num_rows for block in pa.ipc.open_stream(str(path))] == [50]
    assert named(store, messages(5)) != kept
    assert files(tmp_path) == ["00000001.arrow", "00000002.arrow"]  # the old file is never appended to
    store.close()
    assert verify(tmp_path).problems == []


def test_a_segment_goes_when_its_last_block_is_forgotten_and_a_mapping_of_it_stays_readable(
    store: DurableStore, tmp_path: Path
) -> None:
    ids = [named(store, messages(300)) for _ in range(9)]
    first, *_ = store.segment_usage()
    held, size_bytes = [block.block_id for block in first.blocks], first.size_bytes
    assert (
        held == ids[: len(held)] and size_bytes == (tmp_path / "segments" / "00000001.arrow").stat().st_size
    )
    place = store.locate(held[0])
    assert place is not None
    mapping = pa.memory_map(place.path)
    for block_id in held:
        assert "00000001.arrow" in files(tmp_path)
        store.commit([Change(forgets=[block_id])])
    assert "00000001.arrow" not in files(tmp_path)
    data = mapping.read_at(place.length, place.position)
    assert xxhash.xxh3_64_intdigest(data) == place.checksum
    mapping.close()
    assert store.read(ids[-1]).num_rows == 300


def test_compaction_moves_live_rows_out_of_a_mostly_dead_segment_which_then_goes(
    store: DurableStore, tmp_path: Path
) -> None:
    ids = [named(store, messages(300)) for _ in range(9)]
    first, *_ = store.segment_usage()
    held, size_bytes = [block.block_id for block in first.blocks], first.size_bytes
    live = (1 << 7).to_bytes(38, "little")  # row 7 only
    before = store.read(held[0]).slice(7, 1)
    for block_id in held:
        store.rewrite(block_id, live)
    assert "00000001.arrow" in files(tmp_path)
    store.commit([Change(moves=held)])
    assert "00000001.arrow" not in files(tmp_path)
    moved = store.read(held[0])
    assert moved.num_rows == 300 and moved.slice(7, 1).equals(before)
    place = store.locate(held[0])
    assert place is not None and place.length < size_bytes // len(held) // 2
    assert store.read(ids[-1]).num_rows == 300


def test_branch_rows_give_their_file_back_as_soon_as_they_are_forgotten(
    store: DurableStore, tmp_path: Path
) -> None:
    ids = [named(store, branch_rows(1000)) for _ in range(2)]
    store.commit([Change(forgets=ids[:1])])
    assert files(tmp_path) == ["00000001.arrow"]
    staged = store.append(branch_rows(10)).block_id
    store.commit([Change(forgets=ids[1:])])
    assert files(tmp_path) == ["00000001.arrow"]  # still holds what is staged
    store.commit([Change(names=[staged])])
    store.commit([Change(forgets=[staged])])
    assert files(tmp_path) == []
    assert named(store, branch_rows(5)) > staged
    assert files(tmp_path) == ["00000002.arrow"]  # a number is never used twice


def test_segment_numbers_and_block_ids_are_not_used_again_after_everything_was_forgotten(
    tmp_path: Path,
) -> None:
    store = DurableStore(tmp_path)
    store.load()
    block_id = named(store, branch_rows(1))
    store.commit([Change(forgets=[block_id])])
    store.close()
    store = DurableStore(tmp_path)
    store.load()
    assert store.new_block_id() > block_id
    named(store, branch_rows(1))
    assert files(tmp_path) == ["00000002.arrow"]
    store.close()


def test_many_schemas_at_once_keep_few_files_open_and_read_back(store: DurableStore) -> None:
    blocks = [pa.record_batch({f"c{i}": pa.array([i])}) for i in range(30)]
    ids = [named(store, block) for block in blocks]
    assert [store.read(block_id) for block_id in ids] == blocks


def test_a_dictionary_column_is_refused_and_the_store_goes_on(store: DurableStore) -> None:
    with pytest.raises(OptionError, match=r"column c is dictionary-encoded, .* cast it to string"):
        store.append(pa.record_batch({"c": pa.array(["a", "b"]).dictionary_encode()}))
    named(store, messages(1))


def test_threads_append_and_sync_at_once_while_another_commits(store: DurableStore) -> None:
    found: dict[int, int] = {}

    def stage(seed: int) -> None:
        for i in range(20):
            info = store.append(messages(10 + seed * 20 + i))
            store.sync()
            found[info.block_id] = info.rows

    threads = [threading.Thread(target=stage, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    done: set[int] = set()
    while len(done) < 80:
        ready = [block_id for block_id in list(found) if block_id not in done]
        store.commit([Change(names=ready)])
        done.update(ready)
    for thread in threads:
        thread.join()
    assert {block_id: store.read(block_id).num_rows for block_id in found} == found


def test_verify_finds_runs_and_parts_that_name_rows_which_are_not_there(tmp_path: Path) -> None:
    store = DurableStore(tmp_path)
    store.load()
    block_id = named(store, messages(8))
    queues = [QueueRecord(number, f"q{number}", True, False, False, {}) for number in range(1, 6)]
    good: list[Record] = [
        *queues,
        RunRecord(1, 0, 8, block_id, 0, b"", 1, 1),
        RunRecord(2, 0, 2, block_id, 4, b"\x09", 1, 1),
    ]
    store.commit([Change(journal=good)])
    store.close()
    assert verify(tmp_path).problems == []
    store = DurableStore(tmp_path)
    store.load()
    bad: list[Record] = [
        RunRecord(3, 0, 8, block_id, 1, b"", 1, 1),
        RunRecord(4, 0, 2, block_id, 0, b"\x07", 1, 1),
        RunRecord(5, 0, 1, 99, 0, b"", 1, 1),
        RunRecord(1, 4, 2, block_id, 0, b"", 1, 1),
        LedgerRecord("a", 1, "q", 0, "t", {}, 1, 1, 1, 1, [["append", {}, "branch-1", 9]], 0, False, False),
        PartRecord("branch-1", 0, "t", "append", {}, 0, 0, 9, 1, 1, block_id, b"", {}, 0, []),
    ]
    store.commit([Change(journal=bad)])
    store.close()
    problems = verify(tmp_path).problems
    assert problems == [
        f"queue 'q3', run at offset 0: rows 1 to 9 are not in block {block_id} of 8 rows",
        "queue 'q4', run at offset 0: its bitmap selects 3 rows, not 2",
        "queue 'q5', run at offset 0: block 99 does not exist",
        "queue 'q1': the runs at offsets 0 and 4 overlap",
        "part 0 of branch branch-1, which is decided and not applied: its 9 rows are not in block "
        f"{block_id}",
    ]


def test_reads_share_verified_blocks_within_a_bounded_cache(tmp_path: Path) -> None:
    store = DurableStore(tmp_path, cache_bytes=100_000)
    store.load()
    ids = [named(store, messages(300)) for _ in range(6)]
    assert store.read(ids[0]) is store.read(ids[0])
    for block_id in ids:
        store.read(block_id)
    assert 0 < store._blocks.cache.size_bytes <= 100_000
    big = named(store, messages(3000))
    held = store.read(big)
    assert store.read(big) is held  # too large to keep, but found while somebody holds it
    store.close()


@pytest.mark.slow
def test_a_backlog_of_ten_million_messages_opens_without_reading_bodies(tmp_path: Path) -> None:
    store = DurableStore(tmp_path)
    store.load()
    block = messages(16_384, b"")
    for i in range(600):
        info = store.append(block)
        run = RunRecord(1, i * 16_384, 16_384, info.block_id, 0, b"", i, 1)
        store.commit([Change(sequence=i + 1, names=[info.block_id], journal=[run])])
    store.close()
    before = _bytes_read()
    store = DurableStore(tmp_path)
    image = store.load()
    read = _bytes_read() - before
    store.close()
    assert sum(info.rows for info in image.blocks) == 600 * 16_384 and len(image.records) == 600
    assert read < 2_000_000


def _bytes_read() -> int:
    text = Path("/proc/self/io").read_text()
    return int(re.search(r"rchar: (\d+)", text).group(1))  # type: ignore[union-attr]
