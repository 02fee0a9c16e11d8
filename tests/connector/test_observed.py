"""What metrics tell of broken rows counts only if it is complete: every partition, and every broken row of each."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from connector.dead_letters import CHECKED_COLUMNS, with_reason
from connector.observed import _broken

Note = tuple[str, int, int, str | None, int | None]

partitions = st.lists(st.integers(0, 3), max_size=4)  # how many broken rows each has
merges = st.lists(st.integers(0, 3), max_size=6)  # which partitions the metrics have been told of, in order


def notes_of(partition: int, count: int) -> list[Note]:
    return [("in", partition, offset, f"reason {offset}", None) for offset in range(count)]


def told(counts: list[int], order: list[int], most: int) -> dict[str, Any]:
    """As Spark's aggregates merge what tasks have seen."""
    notes: list[Note] = []
    bits, broken = bytearray(4096), 0
    for partition in order:
        bits[partition // 8] |= 1 << partition % 8
        broken += counts[partition]
        notes += notes_of(partition, counts[partition])
    return {"broken": broken, "notes": sorted(notes, key=lambda note: -note[2])[:most], "tasks": bytes(bits)}


@given(partitions, merges, st.integers(1, 8))
def test_what_is_known_is_all_and_what_is_not_certain_is_not_known(
    counts: list[int], order: list[int], most: int
) -> None:
    order = [partition for partition in order if partition < len(counts)]
    found = _broken(told(counts, order, most), len(counts))
    everything = [note for partition, count in enumerate(counts) for note in notes_of(partition, count)]
    if found is not None:
        assert found.schema == CHECKED_COLUMNS
        assert [tuple(row.values()) for row in found.to_pylist()] == everything
    elif sorted(order) == list(range(len(counts))) and counts:
        assert len(everything) > most


def test_a_batch_without_partitions_or_with_too_many_is_not_known() -> None:
    nothing = {"broken": 0, "notes": None, "tasks": None}
    assert _broken(nothing, 0) is None and _broken(nothing, 1) is None
    assert _broken({**nothing, "tasks": b"\xff" * 4096}, (1 << 15) + 1) is None
    assert _broken({**nothing, "tasks": b"\xff" * 4096}, 1 << 15) is not None


def test_a_reason_replaces_the_reasons() -> None:
    batch = pa.RecordBatch.from_pylist(
        [dict(zip(CHECKED_COLUMNS.names, note, strict=True)) for note in notes_of(0, 2)], CHECKED_COLUMNS
    )
    assert with_reason(batch, None) is batch
    assert with_reason(batch, "x" * 2_000).column("reason").to_pylist() == ["x" * 1_000] * 2
    assert with_reason(batch, "").column("offset").to_pylist() == [0, 1]
