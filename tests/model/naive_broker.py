"""A broker as plain lists, from the guarantees of docs/transactions.md: what the real one is held against.

No offsets, batches, holes, segments or records: a queue is a list of copies in the order of their commits,
and a copy is ready, held by a channel, held by a prepared transaction, or claimed. A crash forgets what the
guarantees let it forget, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from broker_core.core.records import HEURISTICALLY

Outcome = Literal["ack", "reject", "requeue"]

LENGTH = 3  # x-max-length of the bounded queues
TTL_US = 1_000_000  # x-message-ttl of the queue ``timed``
DEAD = "dead"
LATER = "later"  # where messages wait for an exchange that delays; then they go to ``plain`` and ``once``
DELAYS_MS = (470, 2_130)  # of a message, by its number
EXPIRATIONS_MS = (None, 730, None, 2_570, None)  # likewise, where it goes to none but these
EXPIRE = frozenset(["plain", "short", "timed", "refusing", "memory"])
ONCE, PENDING = "once", "pending"  # drop what they have seen, or what they have
NEWS = "news"  # an exchange that drops what it has seen; what it has not goes to ``out``
BURIED = ("short", "timed", "plain")  # queues with a dead-letter exchange


class Refused(Exception):
    """A full queue that rejects publishes: nothing of the commit happens."""


@dataclass
class Copy:
    """One message in one queue."""

    body: bytes
    durable: bool
    at_us: int
    state: Literal["ready", "held", "prepared", "claimed"] = "ready"
    redelivered: bool | None = False  # None: not known, it may have been sent before a crash
    own_ms: int | None = None  # its expiration; a dead letter has none

    def seen(self) -> tuple[bytes, str]:
        return (self.body, "ready" if self.state == "ready" else "taken")


def delay_ms(body: bytes) -> int:
    return DELAYS_MS[int(body) % len(DELAYS_MS)]


def expiration_ms(body: bytes, queues: tuple[str, ...]) -> int | None:
    return EXPIRATIONS_MS[int(body) % len(EXPIRATIONS_MS)] if EXPIRE.issuperset(queues) else None


def later_us(copy: Copy) -> int:
    return copy.at_us + delay_ms(copy.body) * 1000


def at_once(_copy: Copy) -> int:
    return 0


# exchange in which messages wait -> when one is due, and the queues where it arrives
WAITING: dict[str, tuple[Callable[[Copy], int], tuple[str, ...]]] = {
    LATER: (later_us, ("plain", ONCE)),
    NEWS: (at_once, ("out",)),
}


def _late(copy: Copy, now_us: int, name: str = "") -> bool:
    """Whether it is too old by its expiration; in a queue, also by the time to live of that."""
    times_us = [TTL_US] if name == "timed" else []
    times_us += [] if copy.own_ms is None else [copy.own_ms * 1000]
    return bool(times_us) and copy.at_us + min(times_us) <= now_us


@dataclass
class Work:
    """What a channel has gathered: (queues, body, persistent) and (queue, copy, outcome)."""

    publishes: list[tuple[tuple[str, ...], bytes, bool]] = field(default_factory=list)
    settles: list[tuple[str, Copy, Outcome]] = field(default_factory=list)

    def forget(self, name: str) -> None:
        """A queue that is gone."""
        self.publishes = [
            (tuple(other for other in queues if other != name), *rest) for queues, *rest in self.publishes
        ]  # type: ignore[misc]
        self.settles = [settle for settle in self.settles if settle[0] != name]


@dataclass
class NaiveBroker:
    queues: dict[str, list[Copy]] = field(default_factory=dict)
    durable: dict[str, bool] = field(default_factory=dict)
    prepared: dict[str, Work] = field(default_factory=dict)
    outcomes: dict[str, str] = field(default_factory=dict)
    owned: bool = False  # the queue ``in`` by the app
    # by a queue or an exchange, and body: whether that is durable
    seen: dict[str, dict[bytes, bool]] = field(default_factory=lambda: {ONCE: {}, NEWS: {}})
    bounded: set[str] = field(default_factory=lambda: {"short"})  # by an argument, or a policy

    def declare(self, name: str, *, durable: bool) -> None:
        self.queues[name] = []
        self.durable[name] = durable

    # -- what a commit does ----------------------------------------------------------------------------------
    def commit(self, work: Work, now_us: int, *, xid: str = "", decision: bool = False) -> None:
        """All of it. ``decision``: of a prepared transaction, whose room is promised. Raises Refused."""
        if not decision:
            self._check_room(work)
        for queues, body, persistent in work.publishes:
            for name in queues:
                if name in self.queues:
                    copy = Copy(body, persistent and self.durable[name], now_us)
                    copy.own_ms = expiration_ms(body, queues)
                    self._enqueue(name, copy, now_us)
        requeued: dict[str, None] = {}
        for name, copy, outcome in work.settles:
            queue = self.queues.get(name)
            if queue is None or not any(copy is other for other in queue):
                continue
            if outcome == "requeue":
                copy.state, copy.redelivered = "ready", True
                requeued[name] = None
            else:
                self._remove(name, copy)
                if outcome == "reject":
                    self._bury(name, copy, now_us)
        for name in requeued:
            self.overflow(name, now_us)
        if xid:
            self.outcomes[xid] = "committed"

    def _check_room(self, work: Work) -> None:
        coming = sum("refusing" in queues for queues, _, _ in work.publishes)
        ready = sum(copy.state == "ready" for copy in self.queues.get("refusing", ()))
        promised = sum(
            "refusing" in queues for other in self.prepared.values() for queues, _, _ in other.publishes
        )
        if coming and ready + promised + coming > LENGTH:
            raise Refused

    def _enqueue(self, name: str, copy: Copy, now_us: int) -> None:
        if (seen := self.seen.get(name)) is not None:
            if copy.body in seen:
                return
            seen[copy.body] = copy.durable
        if name == PENDING and any(copy.body == other.body for other in self.queues[name]):
            return
        self.queues[name].append(copy)
        self.overflow(name, now_us)

    def bound(self, name: str, bound: bool) -> None:
        (self.bounded.add if bound else self.bounded.discard)(name)

    def overflow(self, name: str, now_us: int) -> None:
        if name not in self.bounded:
            return
        while len(ready := [copy for copy in self.queues[name] if copy.state == "ready"]) > LENGTH:
            self._remove(name, ready[0])
            self._bury(name, ready[0], now_us)

    def _remove(self, name: str, copy: Copy) -> None:
        self.queues[name] = [other for other in self.queues[name] if other is not copy]

    def _bury(self, name: str, copy: Copy, now_us: int) -> None:
        if name in BURIED:
            self._enqueue(DEAD, Copy(copy.body, copy.durable, now_us), now_us)

    # -- deliveries ------------------------------------------------------------------------------------------
    def take(self, name: str) -> Copy | None:
        copy = next((copy for copy in self.queues[name] if copy.state == "ready"), None)
        if copy is not None:
            copy.state = "held"
        return copy

    def give_back(self, copies: Iterable[Copy]) -> None:
        for copy in copies:
            copy.state, copy.redelivered = "ready", True

    def expire(self, now_us: int, name: str = "", *, sweep: bool = True) -> None:
        """What is too old at the head of a queue, or of each; with that, or in a ``sweep``, also what is behind
        it by an expiration of its own, in the order of time.
        """
        for each in [name] if name else sorted(EXPIRE):
            found = sweep
            while (head := next(self._ready(each), None)) is not None and _late(head, now_us, each):
                self._expire_one(each, head, now_us)
                found = True
            late = [copy for copy in self._ready(each) if found and _late(copy, now_us)]
            for copy in sorted(late, key=lambda copy: copy.at_us + (copy.own_ms or 0) * 1000):
                self._expire_one(each, copy, now_us)

    def _ready(self, name: str) -> Iterator[Copy]:
        return (copy for copy in self.queues[name] if copy.state == "ready")

    def _expire_one(self, name: str, copy: Copy, now_us: int) -> None:
        self._remove(name, copy)
        self._bury(name, copy, now_us)

    def arrive(self, now_us: int) -> None:
        """What waits and is due."""
        for name, (due_us, queues) in WAITING.items():
            for copy in sorted(self.queues[name], key=due_us):
                if due_us(copy) <= now_us:
                    self._remove(name, copy)
                    for queue in queues:
                        self._enqueue(queue, Copy(copy.body, copy.durable, now_us), now_us)

    def purge(self, name: str) -> int:
        before = len(self.queues[name])
        self.queues[name] = [copy for copy in self.queues[name] if copy.state != "ready"]
        return before - len(self.queues[name])

    # -- prepared transactions -------------------------------------------------------------------------------
    def prepare(self, work: Work, xid: str) -> None:
        self._check_room(work)
        for _, copy, _ in work.settles:
            copy.state = "prepared"
        self.prepared[xid] = work

    def decide(self, xid: str, commit: bool, now_us: int, by_hand: bool = False) -> None:
        work = self.prepared.pop(xid)
        if commit:
            self.commit(work, now_us, decision=True)
        else:
            self.give_back(copy for _, copy, _ in work.settles)
        self.outcomes[xid] = HEURISTICALLY * by_hand + ("committed" if commit else "rolled_back")

    def forget(self, xid: str) -> None:
        self.outcomes[xid] = self.outcomes[xid].removeprefix(HEURISTICALLY)

    def in_doubt(self) -> list[tuple[str, str]]:
        """What a manager finds: xid and state."""
        heuristic = (each for each in self.outcomes.items() if each[1].startswith(HEURISTICALLY))
        return sorted([*((xid, "prepared") for xid in self.prepared), *heuristic])

    def delete(self, name: str) -> None:
        """The queue goes, and another one of the same name comes: what named the old one does not reach the
        new one.
        """
        self.queues[name] = []
        if name == ONCE:
            self.seen[ONCE].clear()
        for work in self.prepared.values():
            work.forget(name)

    # -- crash -----------------------------------------------------------------------------------------------
    def crash(self, left: Container[bytes]) -> None:
        """The broker ends without a word, and another one opens what was durable.

        Of the transient messages of ``in`` those of ``left`` survived: a claim may write more of them than
        its own.
        """
        for name, queue in self.queues.items():  # a queue that is not durable is declared anew
            kept = [
                copy
                for copy in queue
                if copy.durable or copy.state == "claimed" or (name == "in" and copy.body in left)
            ]
            self.queues[name] = kept if self.durable[name] else []
            for copy in self.queues[name]:
                if copy.state == "held":
                    copy.state = "ready"
                copy.redelivered = True if copy.redelivered else None
        self.seen = {name: {body: True for body in seen if seen[body]} for name, seen in self.seen.items()}
        for work in self.prepared.values():
            for name in self.durable:
                if not self.durable[name]:
                    work.forget(name)

    # -- looking ---------------------------------------------------------------------------------------------
    def contents(self) -> dict[str, list[Any]]:
        """Per queue its copies in order: body, and ready or taken. Dead letters in any order."""
        found: dict[str, list[Any]] = {"(in doubt)": [*self.in_doubt()]}
        found |= {name: [copy.seen() for copy in queue] for name, queue in self.queues.items()}
        return {**found, DEAD: sorted(found[DEAD])}
