"""The patterns of a topic exchange, as a trie of words that changes in place.

Keys are words between dots; ``*`` matches one word, ``#`` any number of words. The trie has the patterns that
a key matches in few ways (``_is_plain``); ``wild_patterns.py`` has the others.
Not here: what a pattern leads to (``exchange.py``).

Invariant: a node has an entry or leads to one. Its path is a pattern in normal form, so each node has one
parent, and ``matching`` looks at a node at most once for each word of the key. So a key of 127 words, the
longest one, leads to a few thousand nodes at most, whatever the patterns are.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from broker_core.routing.wild_patterns import WildPatterns

K = TypeVar("K")
V = TypeVar("V")

_ONE, _ANY = "*", "#"
_SHORT, _LONG = 8, 16  # words


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

    def matching(self, routing_key: str) -> list[V]:
        """Returns the values whose patterns match, in any order."""
        active = [self._root]  # the nodes that the words so far lead to
        lasting: list[_Node[K, V]] = []  # nodes after "#": once reached, they are active for the rest
        reached: set[_Node[K, V]] = set()
        words = _words(routing_key)
        found = self._wild.matching(words)
        for word in (*words, None):
            for node in active:
                after = node.any
                if after is not None and after not in reached:
                    reached.add(after)
                    lasting.append(after)
                    found += after.entries.values()
            if word is None:
                break
            following = [child for node in active if (child := node.words.get(word)) is not None]
            following += [node.one for node in active if node.one is not None]
            following += [child for node in lasting if (child := node.words.get(word)) is not None]
            active = following
            if not active and not lasting:
                break
        for node in active:
            found += node.entries.values()
        return found


def _words(key: str) -> list[str]:
    """Returns the words of a key. An empty key has none."""
    return key.split(".") if key else []


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
    for word in _words(pattern):
        if word == _ANY:
            pending = True
            continue
        if pending and word != _ONE:
            words.append(_ANY)
            pending = False
        words.append(word)
    return [*words, _ANY] if pending else words
