"""A row of the history as bytes: who committed, the names of the queues, and the effects of each commit.

    {"who": [[door, vhost, user, client, address], ...],
     "queues": {"id": [vhost, name], ...},
     "commits": [[sequence, time, place in who, effects, more], ...]}

What is beside the messages of a block says in ``who`` and ``queues`` only what the earlier ones of this block
do not say, from one on that is ``fresh``.

An effect is ``[kind, queue, source, entries, start, end, ...]``, with several ranges; ``source``: the queue
of dead letters, else 0. ``more``, if there is any: ``xid``, ``batch``, ``left_out``. A packed row has several
of these texts, a line each.

Not here: how long rows are kept (``history.py``). A row names the queues of the time of its commits, so it
can be read when these are deleted.
Invariant: a text is of bounded size for each commit (``ENTRY_BYTES``, beside the names of its queues).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

from broker_core.broker.state.change import KINDS, Effects, Key, Named, Who
from broker_core.broker.state.records import HistoryRecord

ENTRY_BYTES = 4_096
NAMES_BYTES = 64 * 1024  # of names that several rows share
_NAME_BYTES = 200  # of one, beside its text
LINES, COMPRESSED = 1, 2  # how a row is packed
_UNPACKED = 512 * 1024 * 1024  # no row that was written has so much


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
    who: Who
    effects: tuple[Effect, ...]
    queues: dict[int, tuple[str, str]]
    xid: str
    batch: tuple[str, str, int, int] | None
    left_out: int


class Names:
    """Who committed, and the queues, of rows that are read together. They only grow. ``size_bytes``: about
    how much memory they take.
    """

    def __init__(self) -> None:
        self.who: dict[Who, int] = {}
        self.queues: dict[int, str] = {}
        self.size_bytes = 0
        self._told = 0, 0  # how many of each a row has said

    def place(self, who: Who) -> int:
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

    def text(self, entries: Iterable[str]) -> str:
        """Returns a row of these entries that says all."""
        return self._row(0, 0, entries)

    def text_of_new(self, entries: str) -> str:
        """Returns a row of these entries that says what no row before has said."""
        who, queues = self._told
        if who == len(self.who) and queues == len(self.queues):
            return f'{{"commits":[{entries}]}}'
        self._told = len(self.who), len(self.queues)
        row = self._row(who, queues, (entries,))
        return row if who else f'{{"fresh":1,{row[1:]}'

    def _row(self, who: int, queues: int, entries: Iterable[str]) -> str:
        return (
            f'{{"who":[{",".join(map(_text, islice(self.who, who, None)))}],'
            f'"queues":{{{",".join(islice(self.queues.values(), queues, None))}}},'
            f'"commits":[{",".join(entries)}]}}'
        )

    def learn(self, row: dict[str, Any]) -> list[list[Any]]:
        """Takes the names of a row that was beside messages, and returns its commits. Raises ValueError."""
        try:
            for each in row.get("who", ()):
                self.place(Who(*each))
            for queue_id, name in row.get("queues", {}).items():
                self._name(int(queue_id), name)
            found: list[list[Any]] = row["commits"]
            if not found or not all(len(each) >= 4 for each in found):
                raise ValueError("it has no commits")
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"a row of the history cannot be read: {error}") from error
        self._told = len(self.who), len(self.queues)
        return found


def entry(sequence: int, now_us: int, effects: Effects, names: Names) -> str:
    """Returns a commit as text; "" for one that concerns only queues that are not shown."""
    place = names.who.get(effects.who)
    if place is None:
        place = names.place(effects.who)
    if len(effects) == 1:  # as below, for nearly all, in half the time
        (((kind, queue, source), found),) = effects.items()
        queue_id = queue.queue_id
        if queue_id in names.queues and source is None and len(found) == 3 and effects.is_plain:
            count, start, end = found
            return f"[{sequence},{now_us},{place},[[{kind},{queue_id},0,{count},{start},{end}]]]"
    shown = [(key, found) for key, found in effects.items() if not key[1].replies]
    if not shown and effects.batch is None:
        return ""
    text = ",".join([_effect_text(key, found, names) for key, found in shown])
    if len(text) > ENTRY_BYTES:
        shown = [(key, [found[0], min(found[1::2]), max(found[2::2])]) for key, found in shown]
        text = ",".join([_effect_text(key, found, names) for key, found in shown])
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
    return replace(row, packed=COMPRESSED, commits=zlib.compress(row.commits, 6))


def commits(row: HistoryRecord, mark: bytes = b"") -> Iterator[PastCommit]:
    """Yields the commits of a row, in their order. ``mark``: only those of texts that contain it. Raises
    ValueError for a row that this module did not write.
    """
    try:
        for text in _texts(row):
            if mark in text:
                yield from _commits(json.loads(text))
    except (KeyError, IndexError, TypeError, AttributeError, zlib.error) as error:
        raise ValueError(f"row {row.number} of the history cannot be read: {error}") from error


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


def _commits(row: dict[str, Any]) -> Iterator[PastCommit]:
    who = [Who(*each) for each in row["who"]]
    queues = {int(queue): (vhost, name) for queue, (vhost, name) in row["queues"].items()}
    for sequence, committed_at, place, effects, *more in row["commits"]:
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
