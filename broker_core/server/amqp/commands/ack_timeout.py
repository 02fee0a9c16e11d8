"""``x-consumer-timeout``: closes a channel that holds a delivery for longer, as RabbitMQ does.

A delivery has no time of its own: now and then, the highest delivery tag is noted with the time. A tag that
is not above a note was sent before it.

Not here: where the argument is checked (``message/arguments/table.py``).
Invariant: a delivery is never called late before its time, whatever the clock of the host does. It is noticed
within a sixteenth of its time, and a second or two.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING

from broker_core.broker.channel import Channel
from broker_core.broker.queue import Queue
from broker_core.broker.queue.consumer import Consumer
from broker_core.core.errors import PreconditionFailed

if TYPE_CHECKING:
    from broker_core.server.amqp.ports import ClientConnection
    from broker_core.server.amqp.session import Session

NOTES = 16  # in a limit
NOTED = 64  # limits of a channel, before it looks for some that it no longer needs
LEAST_S = 1.0  # between two
_NONE: Mapping[str, object] = {}


def limit_of(queue: Queue, arguments: Mapping[str, object] = _NONE) -> int:
    """Returns the shorter limit of a queue and its consumer, in ms; 0: none."""
    both = (queue.arguments.consumer_timeout_ms, arguments.get("x-consumer-timeout"))
    return min((each for each in both if isinstance(each, int)), default=0)


def _limit(queue: Queue, consumer: Consumer | None) -> int:
    return limit_of(queue, _NONE if consumer is None else consumer.arguments)


def watch(session: Session, limit: int) -> None:
    """Before the first delivery with a limit; again is harmless. 0: none."""
    if limit:
        session.connection.attached.setdefault(AckTimeouts, AckTimeouts()).watch(session, limit)


def sweep(connection: ClientConnection, now_s: float) -> None:
    """Closes the channels that are late. ``now_s``: of a clock that never goes back."""
    found = connection.attached.get(AckTimeouts)
    if found is not None:
        found.sweep(now_s)


class AckTimeouts:
    """Of the channels of a connection."""

    def __init__(self) -> None:
        self._notes: dict[Session, dict[int, TagNotes]] = {}  # by limit

    def watch(self, session: Session, limit: int) -> None:
        notes = self._notes.setdefault(session, {})
        if limit not in notes and len(notes) % NOTED == NOTED - 1:  # those of consumers that are gone
            channel = session.channel
            there = {limit_of(each.queue, each.arguments) for each in channel.consumers.values()}
            there |= {_limit(queue, consumer) for queue, _, consumer in channel.unacked.values()}
            for other in notes.keys() - there:
                del notes[other]
        notes.setdefault(limit, TagNotes(limit))

    def sweep(self, now_s: float) -> None:
        for session, notes in tuple(self._notes.items()):
            if session.ended:
                del self._notes[session]
                continue
            if not session.ready:  # a commit may use the channel in another thread: the next sweep looks
                continue
            channel = session.channel
            highest = {limit: each.late(now_s, channel.last_tag) for limit, each in notes.items()}
            limit = late(channel, highest)
            if limit:
                del self._notes[session]
                error = PreconditionFailed(
                    f"delivery acknowledgement on channel {session.number} timed out. Timeout value used: "
                    f"{limit} ms. This timeout value can be configured, see consumers doc guide to learn more"
                )
                session.fail(error, None)


class TagNotes:
    """(time, highest tag then), the oldest first; of one limit."""

    __slots__ = ("_all", "_apart_s", "_limit_s")

    def __init__(self, limit: int) -> None:
        self._limit_s = limit / 1000
        self._apart_s = max(self._limit_s / NOTES, LEAST_S)
        self._all: deque[tuple[float, int]] = deque()

    def late(self, now_s: float, tag: int) -> int:
        """Returns the highest tag that was sent before the limit; 0: none, or looked for a moment ago."""
        notes = self._all
        if notes and now_s - notes[-1][0] < self._apart_s:
            return 0
        notes.append((now_s, tag))
        while len(notes) > 1 and notes[1][0] + self._limit_s <= now_s:
            notes.popleft()
        return notes[0][1] if notes[0][0] + self._limit_s <= now_s else 0


def late(channel: Channel, highest: Mapping[int, int]) -> int:
    """Returns the limit of a delivery that is not above the highest tag of its limit; 0: there is none."""
    last = max(highest.values())
    for tag, (queue, _, consumer) in channel.unacked.items():
        if tag > last:
            break
        limit = _limit(queue, consumer)
        if limit and tag <= highest.get(limit, 0):
            return limit
    return 0
