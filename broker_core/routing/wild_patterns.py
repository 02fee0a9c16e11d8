"""Patterns with so many wildcards that a key may match them in many ways, all of them followed at once.

A pattern has a bit for each number of its words that are matched. A word of the key moves the bits of all
patterns of a page in a few operations on large numbers (Shift-And), so the time is that of the words of the
key times the size of the pages, whatever the patterns are.
Not here: patterns that a trie finds faster (``topic_patterns.py``).

Invariant: ``add`` and ``remove`` may be interrupted anywhere; each completes or undoes the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")

_ONE, _ANY = "*", "#"
PAGE_BITS = 8192


class _Page:
    """``by_word``: the bits that a word moves on; ``any_word``: those that every word moves on; ``staying``:
    those that stay whatever the word is.
    """

    __slots__ = ("any_word", "by_word", "end", "final", "first", "slots", "staying", "used")

    def __init__(self) -> None:
        self.by_word: dict[str, int] = {}
        self.any_word = self.staying = self.first = self.final = 0
        self.end = 0  # bits from here on were never used
        self.used = 0
        self.slots: dict[int, _Slot] = {}  # by their last bit

    def matching(self, words: Sequence[str]) -> list[_Slot]:
        active, any_word, staying, by_word = self.first, self.any_word, self.staying, self.by_word
        for word in words:
            active = (active & (by_word.get(word, 0) | any_word)) << 1 | active & staying
            if not active:
                return []
        active &= self.final
        found = []
        while active:
            last = active.bit_length() - 1
            found.append(self.slots[last])
            active ^= 1 << last
        return found

    def put(self, slot: _Slot) -> None:
        bit = 1 << slot.at
        self.first |= bit
        for word in slot.words:
            if word == _ANY:
                self.staying |= bit
                continue
            if word == _ONE:
                self.any_word |= bit
            else:
                self.by_word[word] = self.by_word.get(word, 0) | bit
            bit <<= 1
        self.final |= bit
        self.slots[bit.bit_length() - 1] = slot

    def clear(self, slot: _Slot) -> None:
        bits = ((1 << slot.size) - 1) << slot.at
        for name in ("any_word", "staying", "first", "final"):
            setattr(self, name, getattr(self, name) & ~bits)
        for word in slot.words:
            left = self.by_word.get(word, 0) & ~bits
            if left:
                self.by_word[word] = left
            else:
                self.by_word.pop(word, None)
        self.slots.pop(slot.at + slot.size - 1, None)


class _Slot:
    """One pattern, and what it leads to."""

    __slots__ = ("at", "entries", "page", "size", "words")

    def __init__(self, words: Sequence[str]) -> None:
        self.words = words
        self.size = 1 + sum(word != _ANY for word in words)
        self.entries: dict[object, object] = {}
        self.page: _Page | None = None
        self.at = 0


class WildPatterns(Generic[K, V]):
    """Patterns are in normal form (``topic_patterns.py``)."""

    def __init__(self) -> None:
        self._slots: dict[tuple[str, ...], _Slot] = {}
        self._pages: dict[_Page, None] = {}
        self._open: _Page | None = None  # the page that takes the next pattern

    def add(self, words: Sequence[str], key: K, value: V) -> None:
        pattern = tuple(words)
        slot = self._slots.get(pattern)
        if slot is None:
            slot = self._slots[pattern] = _Slot(pattern)
        if slot.page is None:
            self._place(slot)
        else:
            slot.page.put(slot)  # an interrupted ``remove`` may have cleared some of it
        slot.entries[key] = value

    def remove(self, words: Sequence[str], key: K) -> None:
        pattern = tuple(words)
        slot = self._slots.get(pattern)
        if slot is None:
            return
        slot.entries.pop(key, None)
        if not slot.entries:
            self._take_out(slot)
            self._slots.pop(pattern, None)

    def matching(self, words: Sequence[str]) -> list[V]:
        """Returns the values whose patterns match, in any order, some perhaps twice."""
        found: list[object] = []
        for page in self._pages:
            for slot in page.matching(words):
                found += slot.entries.values()
        return found  # type: ignore[return-value]

    def _place(self, slot: _Slot) -> None:
        page = self._open
        if page is None or page.end + slot.size > PAGE_BITS:
            page = self._open = _Page()
            self._pages[page] = None
        slot.at, slot.page = page.end, page
        page.end += slot.size
        page.used += slot.size
        page.put(slot)

    def _take_out(self, slot: _Slot) -> None:
        page = slot.page
        if page is None:
            return
        page.clear(slot)
        slot.page = None
        page.used -= slot.size
        if page is not self._open and page.used < PAGE_BITS // 4:  # its bits are mostly of what is gone
            for left in list(page.slots.values()):
                left.page = None
                self._place(left)
            self._pages.pop(page, None)
