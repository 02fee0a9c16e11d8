"""A row of the history as bytes: who committed, the names of the queues, and the effects of each commit.

    {"who": [[listener, vhost, user, client, address], ...],
     "queues": {"id": [vhost, name], ...},
     "commits": [[sequence, time, place in who, effects, more], ...],
     "plain": "..."}

``plain``: base64 of commits with one effect on one range of a queue, 48 bytes each, little-endian: sequence,
time, queue, start, entries (int64), place and kind (uint32). Nearly all are like that, and text would take
seven times as long to write.

What is beside the messages of a block says in ``who`` and ``queues`` only what the earlier ones of this block
do not say, from one on that is ``fresh``. If its commits have only published these messages, one each, it
says ``own`` instead of ``plain``: the places in ``who``; all else is in the messages.

An effect is ``[kind, queue, source, entries, start, end, ...]``, with several ranges; ``source``: the queue
of dead letters, else 0. ``more``, if there is any: ``xid``, ``batch``, ``left_out``. A packed row has several
of these texts, a line each.

Not here: how long rows are kept (``history.py``). A row names the queues of the time of its commits, so it
can be read when these are deleted.
Invariant: a text is of bounded size for each commit (``ENTRY_BYTES``, beside the names of its queues).
"""

from __future__ import annotations

import json
import struct
import zlib
from binascii import a2b_base64, b2a_base64
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

from broker_core.core.change import KINDS, PUBLISHED, Author, Effects, InboxRow, Key, Named, routes_of
from broker_core.core.ids import CommitSequence
from broker_core.core.records import HistoryRecord

ENTRY_BYTES = 4_096
NAMES_BYTES = 64 * 1024  # of names that several rows share
_NAME_BYTES = 200  # of one, beside its text
LINES, COMPRESSED = 1, 2  # how a row is packed
_UNPACKED = 512 * 1024 * 1024  # no row that was written has so much
_UNREADABLE = (ValueError, KeyError, IndexError, TypeError, AttributeError, struct.error, zlib.error)
_new = tuple.__new__  # takes a third of the time of a NamedTuple's own
_OWN = [b'{"own":[%d]}' % place for place in range(100)]  # nearly always it is one of these
_PLAIN = struct.Struct("<5q2I")  # of a multiple of three bytes, so that texts can be joined
PLAIN_BYTES = _PLAIN.size


class Effect(NamedTuple):
    """What a commit did to ``entries`` of a queue. ``ranges``: [start, end); if they are not ``exact``, only
    from the first to the last. ``queue`` and ``source``: ids.
    """

    kind: str
    queue: int
    source: int
    entries: int
    ranges: tuple[tuple[int, int], ...]

    @property
    def exact(self) -> bool:
        return sum(end - start for start, end in self.ranges) == self.entries

    def may_concern(self, offset: int) -> bool:
        return any(start <= offset < end for start, end in self.ranges)


class PastCommit(NamedTuple):
    """A commit, as its row says. ``queues``: id -> (virtual host, name)."""

    sequence: int
    committed_at: int
    who: Author
    effects: tuple[Effect, ...]
    queues: dict[int, tuple[str, str]]
    xid: str
    batch: tuple[str, str, int, int] | None
    left_out: int


class Entries(NamedTuple):
    """Commits from one sequence to another, the last one at ``ended_at``: ``plain`` as bytes, and the others
    as text.
    """

    first: int
    last: int
    ended_at: int
    plain: bytes
    texts: str

    @property
    def size_bytes(self) -> int:
        return len(self.plain) + len(self.texts)


class Names:
    """Who committed, and the queues, of rows that are read together. They only grow. ``size_bytes``: about
    how much memory they take.
    """

    def __init__(self) -> None:
        self.who: dict[Author, int] = {}
        self.queues: dict[int, str] = {}
        self.size_bytes = 0
        self._written = 0, 0  # how many of each a row has said

    def place(self, who: Author) -> int:
        place = self.who.get(who)
        if place is None:
            place = self.who[who] = len(self.who)
            self.size_bytes += _NAME_BYTES + sum(map(len, who))
        return place

    def id(self, queue: Named) -> int:
        queue_id = queue.queue_id
        if queue_id not in self.queues:
            self._name(queue_id, [queue.vhost, queue.name])
        return queue_id

    def _name(self, queue_id: int, name: list[str]) -> None:
        text = self.queues[queue_id] = f'"{queue_id}":{_text(name)}'
        self.size_bytes += _NAME_BYTES + len(text)

    def text(self, entries: Iterable[Entries]) -> str:
        """Returns a row of these entries that says all."""
        return self._row(0, 0, entries)

    def new_texts(self, entries: Entries, own: list[int]) -> tuple[bytes, bytes]:
        """Returns a row of these entries that says what no row before has said, and the same with ``own``, or
        b"" where that cannot be. ``own``: places in ``who``, if these have published the messages beside it.
        """
        who, queues = self._written
        if who != len(self.who) or queues != len(self.queues):
            self._written = len(self.who), len(self.queues)
            row = self._row(who, queues, (entries,))
            return (row if who else f'{{"fresh":1,{row[1:]}').encode(), b""
        by_place = b'{"own":%a}' % own if own else b""
        if entries.texts:
            return f"{{{_commits_text((entries,))}}}".encode(), by_place
        # like _commits_text, in a third of the time
        return b'{"plain":"%b"}' % b2a_base64(entries.plain, newline=False), by_place

    def published(self, sequence: int, now_us: int, effects: Effects) -> tuple[bytes, bytes] | None:
        """Returns a commit that has only published one message as a plain entry and as a row; None for
        another one, and for one with a name that is new.
        """
        if len(effects) != 1 or not effects.is_plain:
            return None
        (((kind, queue, source), found),) = effects.items()
        place = self.who.get(effects.who, len(_OWN))
        if kind != PUBLISHED or source is not None or found[0] != 1 or place >= len(_OWN):
            return None
        if queue.queue_id not in self.queues or self._written != (len(self.who), len(self.queues)):
            return None
        return _PLAIN.pack(sequence, now_us, queue.queue_id, found[1], 1, place, kind), _OWN[place]

    def _row(self, who: int, queues: int, entries: Iterable[Entries]) -> str:
        return (
            f'{{"who":[{",".join(map(_text, islice(self.who, who, None)))}],'
            f'"queues":{{{",".join(islice(self.queues.values(), queues, None))}}},'
            f"{_commits_text(entries)}}}"
        )

    def learn(self, row: dict[str, Any], messages: Sequence[InboxRow] = ()) -> Entries:
        """Takes the names of a row that was beside ``messages``. Returns its commits. Raises ValueError."""
        try:
            if "own" in row:
                row = {**row, "plain": b2a_base64(_published(row["own"], messages))}
            for each in row.get("who", ()):
                self.place(Author(*each))
            for queue_id, name in row.get("queues", {}).items():
                self._name(int(queue_id), name)
            found = _effects(row)
            if not found or not all(len(each) >= 4 for each in found):
                raise ValueError("it has no commits")
            texts = [json.dumps(each, separators=(",", ":")) for each in row.get("commits", ())]
        except (KeyError, IndexError, TypeError, AttributeError, ValueError, struct.error) as error:
            raise ValueError(f"a row of the history cannot be read: {error}") from error
        self._written = len(self.who), len(self.queues)
        first, last = found[0], found[-1]
        return Entries(first[0], last[0], last[1], a2b_base64(row.get("plain", "")), ",".join(texts))


def _published(places: list[int], messages: Sequence[InboxRow]) -> bytes:
    """Returns the plain entries of commits that have published a message each. Raises ValueError."""
    entries = []
    for place, message in zip(places, messages, strict=True):
        ((queue_id, offset),) = routes_of(message)
        entries.append(
            _PLAIN.pack(message.sequence, message.committed_at, queue_id, offset, 1, place, PUBLISHED)
        )
    return b"".join(entries)


def written(
    group: Sequence[tuple[CommitSequence, int, Effects]], names: Names
) -> tuple[Entries, list[int]] | None:
    """Returns the commits of a group, in their order, and their places in ``who``, if all have published one
    message each; otherwise none. None: they concern only queues that are not shown.
    """
    plain, texts = [], []
    places: list[int] = []
    who, place = None, 0
    for sequence, now_us, effects in group:
        if effects.who is not who:
            who = effects.who
            place = names.place(who)
        if len(effects) == 1 and effects.is_plain:
            (((kind, queue, source), found),) = effects.items()
            queue_id = queue.queue_id
            if queue_id in names.queues and source is None and len(found) == 3:
                count, start, end = found
                if end - start == count:
                    plain.append(_PLAIN.pack(sequence, now_us, queue_id, start, count, place, kind))
                    if kind == PUBLISHED and count == 1:
                        places.append(place)
                    continue
        text = _entry(sequence, now_us, place, effects, names)
        if text:
            texts.append(text)
    if not plain and not texts:
        return None
    if texts or len(places) < len(plain):
        places = []
    return _new(Entries, (group[0][0], sequence, now_us, b"".join(plain), ",".join(texts))), places


def _entry(sequence: int, now_us: int, place: int, effects: Effects, names: Names) -> str:
    """Returns a commit as text; "" for one that concerns only queues that are not shown."""
    pairs = [(key, found) for key, found in effects.items() if not key[1].replies]
    if not pairs and effects.batch is None:
        return ""
    text = ",".join([_effect_text(key, found, names) for key, found in pairs])
    if len(text) > ENTRY_BYTES:
        pairs = [(key, [found[0], min(found[1::2]), max(found[2::2])]) for key, found in pairs]
        text = ",".join([_effect_text(key, found, names) for key, found in pairs])
    more = f",{_more(effects)}" if effects.xid or effects.batch or effects.left_out else ""
    return f"[{sequence},{now_us},{place},[{text}]{more}]"


def _effect_text(key: Key, found: list[int], names: Names) -> str:
    kind, queue, source = key
    source_id = names.id(source) if source is not None else 0
    return f"[{kind},{names.id(queue)},{source_id},{','.join(map(str, found))}]"


def _more(effects: Effects) -> str:
    more: dict[str, object] = {}
    if effects.xid:
        more["xid"] = effects.xid
    if effects.batch is not None:
        more["batch"] = effects.batch
    if effects.left_out:
        more["left_out"] = effects.left_out
    return _text(more)


def _text(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def compressed(row: HistoryRecord) -> HistoryRecord:
    """Returns a row of several texts in fewer bytes. It takes time, so not under the lock."""
    return replace(row, packed=COMPRESSED, commits=zlib.compress(row.commits, 1))


def commits(
    row: HistoryRecord, mark: bytes = b"", spend: Callable[[int], None] = lambda size_bytes: None
) -> Iterator[PastCommit]:
    """Yields the commits of a row, in their order. ``mark``: only those of texts that contain it. ``spend``
    is told what is read. Raises ValueError for a row that this module did not write, behind what can be read.
    """
    found: list[PastCommit] = []
    damage: Exception | None = None
    try:
        for text in _texts(row):
            if mark in text:
                spend(len(text))
                found += _commits(json.loads(text))
    except _UNREADABLE as error:
        damage = error
    yield from sorted(found, key=attrgetter("sequence"))
    if damage is not None:
        raise ValueError(f"row {row.number} of the history cannot be read: {damage}") from damage


def _texts(row: HistoryRecord) -> list[bytes]:
    if not row.packed:
        return [row.commits]
    if row.packed == LINES:
        return row.commits.split(b"\n")
    unpacking = zlib.decompressobj()
    text = unpacking.decompress(row.commits, _UNPACKED)
    if unpacking.unconsumed_tail:
        raise ValueError(f"row {row.number} of the history has more than {_UNPACKED} bytes")
    return text.split(b"\n")


def _commits_text(entries: Iterable[Entries]) -> str:
    items = list(entries)
    plain = b2a_base64(b"".join([each.plain for each in items]), newline=False).decode()
    texts = ",".join([each.texts for each in items if each.texts])
    if not texts:
        return f'"plain":"{plain}"'
    return f'"commits":[{texts}]' + (f',"plain":"{plain}"' if plain else "")


def _effects(row: dict[str, Any]) -> list[list[Any]]:
    """Returns the commits of a row in their order, the plain ones as lists like the others."""
    found = [
        [sequence, committed_at, place, [[kind, queue, 0, count, start, start + count]]]
        for sequence, committed_at, queue, start, count, place, kind in _PLAIN.iter_unpack(
            a2b_base64(row.get("plain", ""))
        )
    ]
    return sorted([*row.get("commits", ()), *found], key=itemgetter(0))


def _commits(row: dict[str, Any]) -> Iterator[PastCommit]:
    who = [Author(*each) for each in row["who"]]
    queues = {int(queue): (vhost, name) for queue, (vhost, name) in row["queues"].items()}
    for sequence, committed_at, place, effects, *more in _effects(row):
        extra = more[0] if more else {}
        yield PastCommit(
            sequence,
            committed_at,
            who[place],
            tuple(map(_effect, effects)),
            queues,
            extra.get("xid", ""),
            tuple(extra["batch"]) if "batch" in extra else None,
            extra.get("left_out", 0),
        )


def _effect(found: list[int]) -> Effect:
    kind, queue, source, entries, *ends = found
    return Effect(KINDS[kind], queue, source, entries, tuple(zip(ends[::2], ends[1::2], strict=True)))
