"""Which rows of a damaged block are whole: those that have their values, and no others."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker_core.message.message import MERGED_SCHEMA, MESSAGE_SCHEMA
from broker_core.store.sums import (
    CHUNK_ROWS,
    NOT_READABLE,
    block_sums,
    drop_sums,
    kept_sums,
    read_sums,
    whole_rows,
    write_sums,
)
from tests.gates import examples


def block_of(rows: int, size: int, schema: pa.Schema = MESSAGE_SCHEMA) -> pa.RecordBatch:
    columns = {
        "exchange": [""] * rows,
        "routing_key": [f"key.{number}.\u00e9" for number in range(rows)],
        "body": [b"%d " % number * size for number in range(rows)],
        "properties": [b"\x10"] * rows,
        "commit_sequence": list(range(rows)),
        "committed_at": [1_700_000_000_000_000 + number for number in range(rows)],
    }
    return pa.RecordBatch.from_pydict({name: columns[name] for name in schema.names}, schema=schema)


shapes = st.tuples(
    st.sampled_from([1, 2, CHUNK_ROWS - 1, CHUNK_ROWS, CHUNK_ROWS + 1, 3 * CHUNK_ROWS + 7]),
    st.sampled_from([0, 1, 5]),
    st.sampled_from([MESSAGE_SCHEMA, MERGED_SCHEMA]),
)


@pytest.mark.slow
@examples(200)
@given(shapes, st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), max_size=4))
def test_a_row_that_counts_as_whole_has_the_values_that_were_written(
    shape: tuple[int, int, pa.Schema], flips: list[tuple[float, int]]
) -> None:
    block = block_of(*shape)
    content = bytearray(block.serialize())
    for place, mask in flips:
        content[int(place * len(content))] ^= mask
    try:
        found = whole_rows(pa.py_buffer(bytes(content)), block.schema, block.num_rows, block_sums(block))
    except NOT_READABLE:
        return
    if found is None:
        assert flips
        return
    whole, read = found
    read.validate(full=True)
    assert read.schema.equals(block.schema) and read.num_rows == block.num_rows
    mask = pa.array(whole)
    assert read.filter(mask).equals(block.filter(mask))
    if not flips or bytes(content) == bytes(block.serialize()):
        assert whole.all()


@examples(50)
@given(st.integers(0, 4 * CHUNK_ROWS - 1))
def test_a_flipped_byte_of_one_body_loses_the_rows_of_its_block_alone(row: int) -> None:
    block = block_of(4 * CHUNK_ROWS, 5)
    content = bytes(block.serialize())
    body = block.column("body")[row].as_py()
    at = content.index(body)
    found = whole_rows(
        pa.py_buffer(content[:at] + b"X" + content[at + 1 :]), block.schema, block.num_rows, block_sums(block)
    )
    assert found is not None
    assert (~found[0]).sum() in (0, CHUNK_ROWS)  # 0: the byte was an X of another kind of value
    assert not found[0][row] or content[at : at + 1] == b"X"


def test_the_sums_of_a_slice_are_those_of_its_rows() -> None:
    block = block_of(1000, 3, MERGED_SCHEMA)
    part = block.slice(300, 500)
    copied = pa.RecordBatch.from_pylist(part.to_pylist(), schema=part.schema)
    assert block_sums(part) == block_sums(copied)
    assert block_sums(block.slice(0, 0)) == b""


def test_sums_are_found_by_position_up_to_where_their_file_is_damaged(tmp_path: Path) -> None:
    assert read_sums(tmp_path, 7) == {} and kept_sums(tmp_path) == []
    blocks = [block_of(rows, 1) for rows in (1, 300, 600)]
    for position, block in enumerate(blocks):
        write_sums(tmp_path, 7, position, block)
    expected = {position: (block.num_rows, block_sums(block)) for position, block in enumerate(blocks)}
    assert read_sums(tmp_path, 7) == expected
    assert kept_sums(tmp_path) == [7]
    path = tmp_path / "sums" / "00000007"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert read_sums(tmp_path, 7) == {0: expected[0], 1: expected[1]}
    path.write_bytes(content[:40])
    assert set(read_sums(tmp_path, 7)) <= {0}
    drop_sums(tmp_path, 7)
    assert kept_sums(tmp_path) == []
