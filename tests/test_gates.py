"""Combinations that run before a change lands: few, and every value is in one."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tests.gates import Values, cover


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_a_few_combinations_have_every_value(sizes: list[int], data: st.DataObject) -> None:
    every = [
        frozenset((f"p{at}", value) for at, value in enumerate(values))
        for values in itertools.product(*map(range, sizes))
    ]
    cases: list[Values] = data.draw(st.lists(st.sampled_from(every), min_size=1, unique=True))
    chosen = cover(cases)
    assert set().union(*(cases[number] for number in chosen)) == set().union(*cases)
    whole = cover(every)
    assert len(whole) == max(sizes)
    assert 0 in whole, "the first value of each parameter is the usual one"
