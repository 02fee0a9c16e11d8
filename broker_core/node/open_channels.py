"""Who uses each channel, and what it holds, as rows for an operator.

Not here: who may see them (``server/flight/call_permissions.py``), ending a channel (the servers).
Invariant: rows are read without the lock of the state, from copies that one step of Python makes. So a row is
one of a moment, and a channel that works meanwhile is not stopped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime, timezone
from itertools import chain, islice
from shlex import quote
from typing import NamedTuple
from weakref import WeakKeyDictionary

from broker_core.admin import LISTED, ChannelInfo, ClientInfo, ConsumerInfo
from broker_core.broker.access.users import name_of, user_of
from broker_core.broker.channel import Channel
from broker_core.broker.queue import REPLIES, Queue
from broker_core.broker.queue.consumer import Consumer
from broker_core.broker.topology.ownership import QueueHeld
from broker_core.broker.transaction.transaction import Transaction
from broker_core.core.change import Author
from broker_core.core.errors import ResourceLocked, printable

NAMED = 3  # holders in an error
LOOKED = 100_000  # deliveries that one error looks through
_SHORT = 60  # characters of a name in it


class ChannelHolder(NamedTuple):
    """``listener``: amqp, flight or process. ``client``: what the client calls itself. ``since_us``: when the
    channel was opened, by the clock of commits.
    """

    id: str
    listener: str
    user: str
    address: str
    client: str
    vhost: str
    since_us: int

    @property
    def who(self) -> Author:
        """Returns the same for the history of commits."""
        return Author(self.listener, self.vhost, self.user, self.client, self.address)


class OpenChannels:
    """The channels of all listeners, while they exist, and how each listener ends one. For any thread."""

    def __init__(self) -> None:
        self._holders: WeakKeyDictionary[Channel, ChannelHolder] = WeakKeyDictionary()
        self._closers: list[Callable[[str], bool]] = []
        self._connections: list[Callable[[], list[ClientInfo]]] = []

    def add_listener(self, close: Callable[[str], bool], connections: Callable[[], list[ClientInfo]]) -> None:
        """``close``: ends what has an id, if it is of this listener; whether it was."""
        self._closers.append(close)
        self._connections.append(connections)

    def add(self, channel: Channel, holder: ChannelHolder) -> None:
        self._holders[channel] = holder
        channel.who = holder.who

    def transaction_id(self, channel: Channel) -> str:
        """Returns the id of the transaction of a channel that is transactional."""
        return _transaction_id(channel, self._holders[channel])

    def __len__(self) -> int:
        return len(self._holders)

    def channels(self) -> list[Channel]:
        return [found for reference in self._holders.keyrefs() if (found := reference()) is not None]

    def all(self) -> list[tuple[Channel, ChannelHolder]]:
        found = [(channel, self._holders.get(channel)) for channel in self.channels()]
        return [(channel, holder) for channel, holder in found if holder is not None]

    def rows(self, vhost: str, now_us: int) -> list[ChannelInfo]:
        """Returns the open channels of a virtual host, oldest first, at most LISTED."""
        return channel_rows(self.all(), vhost, now_us)

    def clients(self, vhost: str) -> list[ClientInfo]:
        """Returns the connections that have entered a virtual host, oldest first, at most LISTED."""
        found = [each for listener in self._connections for each in listener() if each.vhost == vhost]
        return sorted(found, key=lambda each: -each.age_s)[:LISTED]

    def consumers(self, vhost: str) -> list[ConsumerInfo]:
        """Returns the consumers of a virtual host, in the order of their channels, at most LISTED."""
        found = (
            _consumer(consumer, holder)
            for channel, holder in sorted(self.all(), key=lambda each: each[1].since_us)
            if holder.vhost == vhost and not channel.closed
            for consumer in list(channel.consumers.values())
            if not consumer.queue.replies
        )
        return list(islice(found, LISTED))

    def close(self, id: str) -> bool:
        """Ends a channel or a connection. Whether there was one of this id."""
        return any(close(id) for close in self._closers)


def channel_rows(
    channels: Iterable[tuple[Channel, ChannelHolder]], vhost: str, now_us: int
) -> list[ChannelInfo]:
    """Returns the open channels of a virtual host, oldest first, at most LISTED."""
    found = [
        (channel, holder) for channel, holder in channels if holder.vhost == vhost and not channel.closed
    ]
    found.sort(key=lambda each: each[1].since_us)
    return [_row(channel, holder, now_us) for channel, holder in found[:LISTED]]


def _consumer(consumer: Consumer, holder: ChannelHolder) -> ConsumerInfo:
    return ConsumerInfo(
        consumer.queue.name,
        consumer.tag,
        holder.id,
        holder.user,
        holder.address,
        holder.client,
        not consumer.no_ack,
        consumer.exclusive,
        consumer.active,
        consumer.prefetch,
        consumer.unacked,
    )


def _transaction_id(channel: Channel, holder: ChannelHolder) -> str:
    return f"{holder.id or holder.listener}/{channel.transactions}"


def _row(channel: Channel, holder: ChannelHolder, now_us: int) -> ChannelInfo:
    transaction = channel.transaction
    is_open = channel.transactional and bool(transaction)
    marked = [unacked for unacked, _ in list(channel.marked.values())]
    counts = Counter(each.queue.name for each in [*list(channel.unacked.values()), *marked])
    consumers = list(channel.consumers.values())
    counts.update({REPLIES[:-1]: each.queue.messages for each in consumers if each.queue.replies})
    return ChannelInfo(
        holder.id,
        holder.listener,
        holder.user,
        holder.address,
        holder.client,
        max(0, now_us - holder.since_us) / 1e6,
        max(0, now_us - transaction.opened_us) / 1e6 if is_open and transaction.opened_us else 0.0,
        transaction.messages if is_open else 0,
        len(transaction.settles) if is_open else 0,
        transaction.memory_bytes if is_open else 0,
        {name: count for name, count in counts.items() if count},
        tuple(sorted(each.queue.name for each in consumers if not each.queue.replies)),
        _transaction_id(channel, holder) if is_open else "",
    )


def explain(error: QueueHeld, channels: OpenChannels, prepared: Mapping[str, Transaction]) -> ResourceLocked:
    """Returns the error with the first holders of the queue, since when each is there, and how it ends."""
    queue = error.queue
    found = list(islice(chain(_users(queue, channels), _names(queue, prepared)), NAMED + 1))
    if not found:  # they have ended meanwhile
        return error
    texts = [*found[:NAMED], *(("others",) if len(found) > NAMED else ())]
    advice = error.message.removeprefix(f"{error.summary}: ")
    return ResourceLocked(f"{error.summary}: {'; '.join(texts)}", advice)


def _users(queue: Queue, channels: OpenChannels) -> Iterator[str]:
    there = [each for each in channels.all() if each[1].vhost == queue.vhost]
    entries = (
        (holder, used)
        for channel, holder in sorted(there, key=lambda each: each[1].since_us)
        for used in _used(channel)
    )
    for holder in dict.fromkeys(holder for holder, used in islice(entries, LOOKED) if used is queue):
        who = f"{_short(holder.client) or holder.listener} of user '{_short(holder.user)}'"
        where = f" at {holder.address}" if holder.address else " in the broker's process"
        close = f" (`txmq connection close {quote(printable(holder.id))}`)" if holder.id else ""
        since = datetime.fromtimestamp(holder.since_us // 1_000_000, timezone.utc)
        yield f"{who}{where} since {since:%Y-%m-%d %H:%M:%S} UTC{close}"


def _used(channel: Channel) -> Iterator[Queue]:
    marked = [unacked for unacked, _ in list(channel.marked.values())]
    for used in (list(channel.consumers.values()), list(channel.unacked.values()), marked):
        yield from (each.queue for each in used)


def _names(queue: Queue, prepared: Mapping[str, Transaction]) -> Iterator[str]:
    entries = ((key, each.queue) for key, found in list(prepared.items()) for each in found.settles)
    for key in dict.fromkeys(key for key, used in islice(entries, LOOKED) if used is queue):
        command = f"txmq tx rollback {quote(printable(name_of(key)))}"
        yield f"a prepared transaction of user '{_short(user_of(key) or '')}' (`{command}`)"


def _short(text: str) -> str:
    plain = printable(text)
    return plain if len(plain) <= _SHORT else f"{plain[:_SHORT]}..."
