from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from broker_core.broker.queue.progress import IntervalSet
from broker_core.core.undo import Undo

SPAN = st.tuples(st.integers(0, 40), st.integers(0, 8)).map(lambda pair: (pair[0], pair[0] + pair[1]))
STEPS = st.lists(st.tuples(st.sampled_from(["add", "subtract", "drop_below"]), SPAN), max_size=30)


PARTS = st.sets(st.integers(0, 60), min_size=1).map(
    lambda members: [list(part) for part in IntervalSet((member, member + 1) for member in sorted(members))]
)


@given(st.sets(st.integers(0, 60)), PARTS, st.booleans())
def test_parts_that_are_added_at_once_are_those_added_one_by_one(
    before: set[int], parts: list[list[int]], merged: bool
) -> None:
    undo = Undo()
    found = IntervalSet(((at, at + 1) for at in sorted(before)), undo)
    known = dict(found)
    undo.begin()
    if merged:
        gone, new = found.merge(parts)
        assert {start: end for start, end in known.items() if start not in gone} | dict(new) == dict(found)
        assert new == sorted(new) and not set(new) & set(known.items())
    else:
        found.add_all(parts)
    after = before | {at for start, end in parts for at in range(start, end)}
    assert {at for start, end in found for at in range(start, end)} == after
    assert found.total == len(after)
    assert all(left[1] < right[0] for left, right in pairwise(found))
    undo.roll_back()
    assert dict(found) == known and found.total == len(before)


@given(st.sets(st.integers(0, 40)), SPAN, st.integers(1, 5))
def test_the_first_gaps_are_those_before_the_place_where_they_end(
    members: set[int], span: tuple[int, int], most: int
) -> None:
    found, (start, end) = IntervalSet((at, at + 1) for at in sorted(members)), span
    parts, stop = found.outside_some(start, end, most)
    assert parts == found.outside(start, stop) and len(parts) <= most + 1
    assert stop <= end and (stop == end or len(parts) >= most)


@given(STEPS, SPAN)
def test_interval_set_agrees_with_a_plain_set_after_any_history(
    steps: list[tuple[str, tuple[int, int]]], span: tuple[int, int]
) -> None:
    found, model = IntervalSet(), set[int]()
    for step, (start, end) in steps:
        if step == "add":
            low, high, absorbed = found.add(start, end)
            model |= set(range(start, end))
            assert set(range(low, high)) <= model
            assert all(low <= at <= high for at in absorbed)
        elif step == "subtract":
            found.subtract(start, end)
            model -= set(range(start, end))
        else:
            found.drop_below(start)
            model = {member for member in model if member >= start}
        pairs = list(found)
        assert found.total == len(model)
        assert {member for low, high in pairs for member in range(low, high)} == model
        assert all(low < high for low, high in pairs)
        assert all(before[1] < after[0] for before, after in pairwise(pairs)), "disjoint, and never touching"
    start, end = span
    inside = {member for low, high in found.within(start, end) for member in range(low, high)}
    outside = {member for low, high in found.outside(start, end) for member in range(low, high)}
    assert inside == model & set(range(start, end))
    assert outside == set(range(start, end)) - model
    assert found.measure(start, end) == len(inside)
    assert found.measure(start, 60) == len([member for member in model if member >= start])
    assert found.measure(0, end) == len([member for member in model if member < end])
    assert found.covers(start, end) == (set(range(start, end)) <= model)
    assert found.contains(start) == (start in model)
    assert found.first_outside(start) == min(set(range(start, 100)) - model)
    assert found.next_start(start, 60) == min((low for low, _ in found if low > start), default=60)
    assert not len(found) or found.first() == next(iter(found))
    assert found.end() == max(model, default=-1) + 1
