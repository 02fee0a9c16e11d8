"""The patterns of a topic exchange, as a trie of words that changes in place.

Keys are words between dots; ``*`` matches one word, ``#`` any number of words. The trie has the patterns that
a key matches in few ways (``_is_plain``); ``WildPatterns`` has the others.
Not here: what a pattern leads to (``exchange.py``).

Invariant: a node has an entry or leads to one. Its path is a pattern in normal form, so each node has one
parent, and ``matching`` looks at a node at most once for each word of the key. So a key of 127 words, the
longest one, leads to a few thousand nodes at most, whatever the patterns are. ``add`` and ``remove`` may be
interrupted anywhere; each completes or undoes the other.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")

_ONE, _ANY = "*", "#"
_SHORT, _LONG = 8, 16  # words
_STEPS = 4  # of a node
_PAGE_STEPS = 4  # of a word at a page
PAGE_BITS = 8192
Places = dict[str, list[int]]  # where each word is, in order


class _Node(Generic[K, V]):
    __slots__ = ("any", "entries", "one", "words")

    def __init__(self) -> None:
        self.words: dict[str, _Node[K, V]] = {}
        self.one: _Node[K, V] | None = None  # after "*"
        self.any: _Node[K, V] | None = None  # after "#"; it has neither of the two itself
        self.entries: dict[K, V] = {}

    def child(self, word: str) -> _Node[K, V] | None:
        return self.one if word == _ONE else self.any if word == _ANY else self.words.get(word)

    def make(self, word: str) -> _Node[K, V]:
        found = self.child(word)
        if found is None:
            found = _Node()
            if word == _ONE:
                self.one = found
            elif word == _ANY:
                self.any = found
            else:
                self.words[word] = found
        return found

    def drop(self, word: str) -> None:
        if word == _ONE:
            self.one = None
        elif word == _ANY:
            self.any = None
        else:
            del self.words[word]

    @property
    def empty(self) -> bool:
        return not (self.words or self.entries or self.one or self.any)


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
    """Patterns with so many wildcards that a key may match them in many ways, all of them followed at once: a
    pattern has a bit for each number of its words that are matched. A word of the key moves the bits of all
    patterns of a page in a few operations on large numbers (Shift-And), so the time is that of the words of
    the key times the size of the pages, whatever the patterns are. Patterns are in normal form (``_normal``).
    """

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

    def matching(self, words: Sequence[str], pay: Callable[[int], None]) -> list[V]:
        """Returns the values whose patterns match, in any order, some perhaps twice. ``pay`` counts steps."""
        found: list[object] = []
        for page in self._pages:
            pay(_PAGE_STEPS * len(words))
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


class TopicPatterns(Generic[K, V]):
    def __init__(self) -> None:
        self._root: _Node[K, V] = _Node()
        self._wild: WildPatterns[K, V] = WildPatterns()

    def add(self, pattern: str, key: K, value: V) -> None:
        """Also completes an ``add`` that was interrupted, and undoes an interrupted ``remove``."""
        words = _normal(pattern)
        if not _is_plain(words):
            self._wild.add(words, key, value)
            return
        node = self._root
        for word in words:
            node = node.make(word)
        node.entries[key] = value

    def remove(self, pattern: str, key: K) -> None:
        """Also undoes an ``add`` that was interrupted, and completes an interrupted ``remove``."""
        words = _normal(pattern)
        if not _is_plain(words):
            self._wild.remove(words, key)
            return
        path = [self._root]
        for word in words:
            child = path[-1].child(word)
            if child is None:
                break
            path.append(child)
        else:
            path[-1].entries.pop(key, None)
        while len(path) > 1 and path.pop().empty:
            path[-1].drop(words[len(path) - 1])

    def matching(self, routing_key: str, pay: Callable[[int], None]) -> list[V]:
        """Returns the values whose patterns match, in any order. ``pay`` counts steps."""
        place, active = 0, [self._root]  # the nodes that the words so far lead to
        reached: set[_Node[K, V]] = set()  # nodes after "#": once reached, they are active for the rest
        coming: dict[int, list[_Node[K, V]]] = {}  # nodes that the word at a place leads to, from those
        words, places = _words(routing_key)
        found = self._wild.matching(words, pay)
        while True:
            steps = 1 + len(active)
            for node in active:
                after = node.any
                if after is not None and after not in reached:
                    reached.add(after)
                    found += after.entries.values()
                    steps += _after(after, places, place, coming)
            pay(_STEPS * steps)
            if place == len(words) or not (active or coming):
                break
            if not active and place not in coming:
                place = min(coming)
            word = words[place]
            following = [child for node in active if (child := node.words.get(word)) is not None]
            following += [node.one for node in active if node.one is not None]
            following += coming.pop(place, ())
            active, place = following, place + 1
        for node in active:
            found += node.entries.values()
        return found


def _after(node: _Node[K, V], places: Places, place: int, coming: dict[int, list[_Node[K, V]]]) -> int:
    """Adds to ``coming`` where the words from ``place`` on lead from a node after "#". Returns how many."""
    steps = 1 + min(len(places), len(node.words)) // 8
    for word in places.keys() & node.words.keys():
        child, at = node.words[word], places[word]
        first = bisect_left(at, place)
        # one that is followed by "#" alone finds all the first time
        end = None if child.words or child.one or child.entries else first + 1
        for each in at[first:end]:
            coming.setdefault(each, []).append(child)
            steps += 1
    return steps


@lru_cache(maxsize=128)  # a message is looked up in many exchanges
def _words(key: str) -> tuple[list[str], Places]:
    """Returns the words of a key. An empty key has none."""
    words = key.split(".") if key else []
    places: Places = {}
    for place, word in enumerate(words):
        places.setdefault(word, []).append(place)
    return words, places


def _is_plain(words: list[str]) -> bool:
    """Returns whether a key matches the beginnings of such patterns in few ways, however many there are: they
    have no wildcard but a ``#`` at the end, or are short (2 to the power of 8 ways), or have one in 16 words;
    and no ``#`` but at the beginning and the end.
    """
    body = words[:-1] if words and words[-1] == _ANY else words
    wildcards = [at for at, word in enumerate(body) if word in (_ONE, _ANY)]
    if _ANY in body:
        return wildcards == [0] and len(body) <= _LONG
    return not wildcards or len(body) <= _SHORT or (len(wildcards) == 1 and len(body) <= _LONG)


def _normal(pattern: str) -> list[str]:
    """Returns the words of a pattern. Wildcards in a row with a ``#`` among them match as many words as there
    are ``*``, or more: the ``#`` comes last, once.
    """
    words: list[str] = []
    pending = False
    for word in _words(pattern)[0]:
        if word == _ANY:
            pending = True
            continue
        if pending and word != _ONE:
            words.append(_ANY)
            pending = False
        words.append(word)
    return [*words, _ANY] if pending else words
