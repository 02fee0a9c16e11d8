"""How a micro-batch is split into tasks: evenly, exactly, and whatever the number of queues."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker_core.engine import Available
from connector.options import ReadOptions, read_options
from connector.stream import source
from connector.stream.source import split, task_count


@st.composite
def logs(draw: st.DrawFn) -> dict[str, Available]:
    found = {}
    for index in range(draw(st.integers(1, 5))):
        start = draw(st.integers(0, 1000))
        length = draw(st.integers(0, 200))
        found[f"q{index}"] = Available(start, start + length, draw(st.integers(0, length)), 0)
    return found


@given(logs(), st.integers(1, 12))
def test_slices_cover_every_range_exactly_once_and_in_order(found: dict[str, Available], tasks: int) -> None:
    parts = split(found, tasks)
    assert len(parts) <= tasks
    assert all(parts)
    for log, one in found.items():
        position = one.start
        for part in parts:
            for name, start, end in part:
                if name == log:
                    assert start == position
                    assert end > start
                    position = end
        assert position == max(one.end, one.start)


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=5), st.integers(1, 12))
def test_tasks_are_even_over_all_queues(sizes: list[int], tasks: int) -> None:
    found = {f"q{index}": Available(5, 5 + size, size, 0) for index, size in enumerate(sizes)}
    tasks = min(tasks, sum(sizes)) or 1
    parts = split(found, tasks)
    rows = [sum(end - start for _, start, end in part) for part in parts]
    assert len(parts) == (tasks if sum(sizes) else 0)
    assert not rows or max(rows) - min(rows) <= 1


def options(**extra: str) -> ReadOptions:
    return read_options({"url": "txmq://h:1", "queue": "q", "appid": "a", **extra}, "stream read")


@pytest.mark.parametrize(
    ("rows", "extra", "expected"),
    [
        (0, {}, 1),
        (1, {}, 1),
        (10, {"minpartitions": "4"}, 4),
        (3, {"minpartitions": "4"}, 3),
        (100, {"maxrecordsperpartition": "10"}, 10),
        (100, {"maxrecordsperpartition": "30", "minpartitions": "2"}, 4),
        (100, {"maxrecordsperpartition": "90", "minpartitions": "7"}, 7),
    ],
)
def test_task_counts(rows: int, extra: dict[str, str], expected: int) -> None:
    assert task_count({"q": Available(0, rows, rows, 0)}, options(**extra)) == expected


def test_a_queue_of_many_partitions_gets_more_tasks_than_this_host_has_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(source, "parallelism", lambda: 2)
    full, none = Available(0, 1_000, 1_000, 0), Available(7, 7, 0, 0)
    partitioned = {f"q/{number}": full if number < 12 else none for number in range(16)}
    assert task_count(partitioned, options()) == 12
    assert task_count({f"q/{number}": Available(0, 10, 10, 0) for number in range(16)}, options()) == 1
    assert task_count({"q": Available(0, 12_000, 12_000, 0)}, options()) == 2
