"""Undo: how to restore what a work has changed in memory, if it fails.

Not here: durable data. A change whose work failed is never written, so only memory must be restored.

A mutator appends a step before it writes; a step is a function and its arguments, including the old value.
Steps run backwards. A step must also be correct if its write did not happen, because the exception may occur
between the two. Not restored: caches, and marks that only cause an additional check (``touched``,
``runnable``, ``next_deadline``).
Invariant: after ``roll_back`` the state is as it was when the work began; the committer calls ``begin``
before each work.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, TypeVar

K = TypeVar("K")
V = TypeVar("V")
_MISSING = object()


class Undo(list[tuple[Any, ...]]):
    """A hot path appends ``(function, *arguments)`` itself; other code uses the methods below.

    ``work`` counts works, so that an object can save its state once per work, before its first change.
    """

    __slots__ = ("work",)

    def __init__(self) -> None:
        super().__init__()
        self.work = 1

    def begin(self) -> None:
        """Begins a work; earlier changes are kept."""
        self.clear()
        self.work += 1

    def attribute(self, owner: object, name: str) -> None:
        """Saves ``owner.name``, which is about to be set."""
        self.append((setattr, owner, name, getattr(owner, name)))

    def item(self, table: MutableMapping[K, V], key: K) -> None:
        """Saves ``table[key]``, which is about to be set or deleted. A restored key is the last one of its
        dict: see ``order``.
        """
        self.append((_restore_item, table, key, table.get(key, _MISSING)))

    def order(self, table: dict[K, V]) -> None:
        """Saves a dict whose order matters before keys are deleted; copies it."""
        self.append((_restore_table, table, dict(table)))

    def growth(self, items: list[V]) -> None:
        """Saves the length of a list that is about to grow."""
        self.append((_truncate, items, len(items)))

    def enter(self, groups: dict[K, dict[V, None]], key: K, member: V) -> None:
        """Adds ``member`` to the group ``key``. A group without members is not in ``groups``."""
        self.append((_drop_member, groups, key, member))
        groups.setdefault(key, {})[member] = None

    def leave(self, groups: dict[K, dict[V, None]], key: K, member: V) -> None:
        """Removes ``member`` from the group ``key``."""
        self.append((_add_member, groups, key, member))
        _drop_member(groups, key, member)

    def roll_back(self) -> None:
        steps = self[::-1]
        self.clear()
        for function, *arguments in steps:
            function(*arguments)
        self.clear()  # steps that were appended meanwhile


class Tally:
    """A running count, which a failed work gives back: saved once per work."""

    __slots__ = ("_saved", "_undo", "total")

    def __init__(self, undo: Undo) -> None:
        self._undo = undo
        self._saved = 0  # ``Undo.work`` when the total was last saved
        self.total = 0

    def add(self, count: int) -> None:
        if self._saved != self._undo.work:
            self._saved = self._undo.work
            self._undo.append((setattr, self, "total", self.total))
        self.total += count


def _restore_item(table: MutableMapping[K, V], key: K, value: V) -> None:
    if value is _MISSING:
        table.pop(key, None)
    else:
        table[key] = value


def _restore_table(table: dict[K, V], before: dict[K, V]) -> None:
    table.clear()
    table.update(before)


def _truncate(items: list[V], length: int) -> None:
    del items[length:]


def _add_member(groups: dict[K, dict[V, None]], key: K, member: V) -> None:
    groups.setdefault(key, {})[member] = None


def _drop_member(groups: dict[K, dict[V, None]], key: K, member: V) -> None:
    members = groups.get(key, {})
    members.pop(member, None)
    if not members:
        groups.pop(key, None)
