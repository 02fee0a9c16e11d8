"""Which bindings of a headers exchange match the headers of a message, without a look at all others.

A binding that needs all of its headers is kept under one of them, the one under which the fewest bindings
were at that time; one that needs any is kept under each.
Not here: what a binding leads to (``exchange.py``), equality of values (``arguments.same``).

Invariant: every binding that may match is under a header of the message, or needs none. Which header was
chosen has no effect but on the time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any, Generic, NamedTuple, TypeVar

from broker_core.message.arguments import same

K = TypeVar("K")
V = TypeVar("V")

MATCHES = ("all", "any", "all-with-x", "any-with-x")
Place = tuple[str, object, object]  # a header, the kind of its value, the value

_PLAIN = frozenset({str, int, bytes})
_PRESENT, _NESTED = "present", "nested"  # any value; a table or an array, which cannot be hashed


class _Entry(NamedTuple):
    conditions: list[tuple[str, object]]
    value: Any
    all: bool
    steps: int  # of a comparison, about


class HeaderIndex(Generic[K, V]):
    def __init__(self) -> None:
        self._always: dict[K, _Entry] = {}
        self._under: dict[Place, dict[K, _Entry]] = {}
        self._places: dict[K, list[Place]] = {}  # of each entry in ``_under``
        self._names: dict[str, int] = {}  # of headers -> places in ``_under``

    def add(self, key: K, arguments: Mapping[str, object], value: V) -> None:
        """Also completes an ``add`` that was interrupted."""
        self.remove(key)
        match = str(arguments.get("x-match", "all"))
        with_x = match.endswith("-with-x")
        conditions = [
            (name, expected)
            for name, expected in arguments.items()
            if name != "x-match" and (with_x or not name.startswith("x-"))
        ]
        entry = _Entry(conditions, value, match.startswith("all"), 4 + len(repr(conditions)) // 2)
        places = [_place(*each) for each in conditions]
        if entry.all and not conditions:
            self._always[key] = entry
        elif entry.all:
            places = [min(places, key=lambda place: len(self._under.get(place, ())))]
        self._places[key] = places
        for place in places:
            if place not in self._under:
                self._under[place] = {}
                self._names[place[0]] = self._names.get(place[0], 0) + 1
            self._under[place][key] = entry

    def remove(self, key: K) -> None:
        """It may be repeated."""
        self._always.pop(key, None)
        for place in self._places.get(key, ()):
            found = self._under.get(place, {})
            found.pop(key, None)
            if not found and self._under.pop(place, None) is not None:
                self._names[place[0]] -= 1
                if not self._names[place[0]]:
                    del self._names[place[0]]
        self._places.pop(key, None)

    def matching(self, headers: Mapping[str, object], pay: Callable[[int], None]) -> list[V]:
        """Returns the values whose bindings match, in any order, some perhaps twice. ``pay`` counts steps."""
        pay(min(len(headers), len(self._names)))
        found = [entry.value for entry in self._always.values()]
        for name in headers.keys() & self._names.keys():
            value = headers[name]
            for place in ((name, _PRESENT, None), _place(name, value)):
                exact = place[1] is not _NESTED
                under = self._under.get(place, {})
                pay(len(under))
                for entry in under.values():
                    if exact and not entry.all:
                        found.append(entry.value)
                        continue
                    pay(entry.steps)
                    if _matches(entry, headers):
                        found.append(entry.value)
        return found


def _matches(entry: _Entry, headers: Mapping[str, object]) -> bool:
    matched = (
        name in headers and (expected is None or same(headers[name], expected))
        for name, expected in entry.conditions
    )
    return all(matched) if entry.all else any(matched)


def _place(name: str, expected: object) -> Place:
    """Returns where a binding is that expects this value: equal for values that are ``same``, and for no
    others unless they are nested.
    """
    if type(expected) in _PLAIN:
        return name, None, expected
    if expected is None:
        return name, _PRESENT, None
    try:
        hash(expected)
    except TypeError:
        return name, _NESTED, None
    # Python takes 1, 1.0, True and Decimal(1) for one key
    return name, next((kind for kind in (bool, float, Decimal) if isinstance(expected, kind)), None), expected
