"""What metrics tell of broken rows counts only if it is complete: every partition, and every broken row of each."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from connector.reject.dead_letters import CHECKED_COLUMNS, with_reason
from connector.reject.rejected_metrics import Metric, Watchable, broken_rows

METRIC = Metric("name", ("reason 0", "reason 1", "reason 2"), Watchable(sums=True, words=8))
Note = tuple[str, int, int, str, int]

partitions = st.lists(st.integers(0, 3), max_size=4)  # how many broken rows each has
merges = st.lists(st.integers(0, 3), max_size=6)  # which partitions the metrics have been told of, in order


def notes_of(partition: int, count: int) -> list[Note]:
    return [("in", partition, offset + 2**40, f"reason {offset}", 2**32 - 1) for offset in range(count)]


def packed(note: Note) -> tuple[int, int]:
    """As the column of Spark: (offset, checksum and partition and number of the reason)."""
    _, partition, offset, reason, checksum = note
    return offset, (checksum << 30) + (partition << 16) + METRIC.reasons.index(reason) + 1


def told(counts: list[int], order: list[int], most: int, last_queue: str = "in") -> dict[str, Any]:
    """As Spark's aggregates merge what tasks have seen."""
    notes: list[Note] = []
    bits = 0
    for partition in order:
        bits |= 1 << partition
        notes += notes_of(partition, counts[partition])
    words = {f"tasks{number}": bits >> 62 * number & (1 << 62) - 1 or None for number in range(8)}
    queues = (
        {"first_queue": "in", "last_queue": last_queue}
        if notes
        else dict.fromkeys(("first_queue", "last_queue"))
    )
    kept = sorted(map(packed, notes), reverse=True)[:most]
    return {"broken": len(notes), "notes": kept, **queues, **words}


@given(partitions, merges, st.integers(1, 8))
def test_what_is_known_is_all_and_what_is_not_certain_is_not_known(
    counts: list[int], order: list[int], most: int
) -> None:
    order = [partition for partition in order if partition < len(counts)]
    found = broken_rows(METRIC, told(counts, order, most), len(counts))
    everything = [note for partition, count in enumerate(counts) for note in notes_of(partition, count)]
    if found is not None:
        assert found.schema == CHECKED_COLUMNS
        assert [tuple(row.values()) for row in found.to_pylist()] == everything
    elif sorted(order) == list(range(len(counts))) and counts:
        assert len(everything) > most


def test_a_batch_without_partitions_or_with_too_many_or_of_several_queues_is_not_known() -> None:
    assert broken_rows(METRIC, told([], [], 9), 0) is None
    assert broken_rows(METRIC, told([0], [], 9), 1) is None
    for tasks in (61, 62, 63, 496):
        assert broken_rows(METRIC, told([0] * tasks, list(range(tasks)), 9), tasks) is not None
        assert broken_rows(METRIC, told([0] * tasks, list(range(tasks - 1)), 9), tasks) is None
    assert broken_rows(METRIC, told([0] * 497, list(range(497)), 9), 497) is None
    assert broken_rows(METRIC, told([1], [0], 9), 1) is not None
    assert broken_rows(METRIC, told([1], [0], 9, "out"), 1) is None


def test_a_reason_replaces_the_reasons() -> None:
    batch = pa.RecordBatch.from_pylist(
        [dict(zip(CHECKED_COLUMNS.names, note, strict=True)) for note in notes_of(0, 2)], CHECKED_COLUMNS
    )
    assert with_reason(batch, None) == batch
    assert with_reason(batch, "x" * 2_000).column("reason").to_pylist() == ["x" * 1_000] * 2
    assert with_reason(batch, "").column("offset").to_pylist() == [2**40, 2**40 + 1]
