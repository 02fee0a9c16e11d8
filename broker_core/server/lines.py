"""What waits for a place, in a line for each who asked: one of each line at a time, so that nobody who asks
for much is in the way of others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class Lines(Generic[T]):
    """``owners``: those who wait, in the order of their turns. What one has asked for stays in order."""

    __slots__ = ("_lines", "_turns")

    def __init__(self) -> None:
        self._lines: dict[object, deque[T]] = {}
        self._turns: deque[object] = deque()  # the owners

    def __bool__(self) -> bool:
        return bool(self._turns)

    @property
    def owners(self) -> Iterable[object]:
        return self._turns

    def put(self, owner: object, item: T) -> None:
        line = self._lines.get(owner)
        if line is None:
            line = self._lines[owner] = deque()
            self._turns.append(owner)
        line.append(item)

    def take(self, most: int) -> list[T]:
        """The next ones, at most so many."""
        found: list[T] = []
        lines, turns = self._lines, self._turns
        while turns and len(found) < most:
            owner = turns.popleft()
            line = lines[owner]
            found.append(line.popleft())
            if line:
                turns.append(owner)
            else:
                del lines[owner]
        return found
