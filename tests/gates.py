"""What runs before a change lands, and what only in ``make soak``.

A test with the marker ``product`` runs its parameters in all combinations in ``make soak``. Before a change lands it
runs so many of them that each value of each parameter is there once. A property is tried with the same examples each
time before a change lands, so they are few; a round of ``make soak`` draws ``ROUND`` times as many, and others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import settings

ROUND = 4

Values = frozenset[tuple[str, int]]  # parameters, each with the identity of its value


def load_profile(rounds: int, base: settings) -> None:
    """The examples of a property that says nothing about their number; ``rounds``: of ``make soak``, 0 before."""
    settings.register_profile("gate", base, max_examples=100 // ROUND, derandomize=True, database=None)
    settings.register_profile("soak", base, max_examples=100 * max(1, rounds), print_blob=True)
    settings.load_profile("soak" if rounds else "gate")


def examples(of_a_round: int) -> settings:
    """For a property that needs more of them than others, or less."""
    return settings(max_examples=max(1, of_a_round * settings().max_examples // 100))


def thin_out(items: Iterable[pytest.Item]) -> None:
    """Marks as ``soak`` the combinations of each ``product`` that are not needed for its values."""
    products: dict[tuple[str, str], list[tuple[pytest.Function, Values]]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("product"):
            if not hasattr(item, "callspec") or item.get_closest_marker("soak"):
                continue
            values = frozenset((name, id(value)) for name, value in item.callspec.params.items())
            products.setdefault((str(item.path), item.originalname), []).append((item, values))
    for cases in products.values():
        chosen = cover([values for _, values in cases])
        for number, (item, _) in enumerate(cases):
            if number not in chosen:
                item.add_marker(pytest.mark.soak)


def seldom(values: Iterable[Any], soaked: Callable[[Any], bool]) -> list[Any]:
    """``values`` as parameters of a test: ``soaked`` ones run in ``make soak`` alone, if a neighbour stays before."""
    return [pytest.param(value, marks=pytest.mark.soak if soaked(value) else []) for value in values]


def cover(cases: list[Values]) -> set[int]:
    """Returns cases that have every value that one of all has: always the one that adds most, the first of these."""
    missing = set().union(*cases)
    chosen: set[int] = set()
    while missing:
        best = max(range(len(cases)), key=lambda number: (len(cases[number] & missing), -number))
        chosen.add(best)
        missing -= cases[best]
    return chosen
