"""Who uses each channel, and what it holds, as rows for an operator.

Not here: who may see them (``server/flight/call_permissions.py``), ending a channel (the servers).
Invariant: rows are read without the lock of the state, from copies that one step of Python makes. So a row is
one of a moment, and a channel that works meanwhile is not stopped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple
from weakref import WeakKeyDictionary

from broker_core.admin import ChannelInfo
from broker_core.broker.channel import Channel


class ChannelHolder(NamedTuple):
    """``door``: amqp, flight or process. ``client``: what the client calls itself. ``since_us``: when the
    channel was opened, by the clock of commits.
    """

    id: str
    door: str
    user: str
    address: str
    client: str
    vhost: str
    since_us: int


class HeldChannels:
    """The channels of all doors, while they exist, and how each door ends one. For any thread.

    ``closers``: end what has an id, if it is of their door; whether it was.
    """

    def __init__(self) -> None:
        self._holders: WeakKeyDictionary[Channel, ChannelHolder] = WeakKeyDictionary()
        self.closers: list[Callable[[str], bool]] = []

    def add(self, channel: Channel, holder: ChannelHolder) -> None:
        self._holders[channel] = holder

    def channels(self) -> list[Channel]:
        return [found for reference in self._holders.keyrefs() if (found := reference()) is not None]

    def all(self) -> list[tuple[Channel, ChannelHolder]]:
        found = [(channel, self._holders.get(channel)) for channel in self.channels()]
        return [(channel, holder) for channel, holder in found if holder is not None]

    def rows(self, vhost: str, now_us: int) -> list[ChannelInfo]:
        """Returns the open channels of a virtual host, oldest first."""
        return channel_rows(self.all(), vhost, now_us)

    def close(self, id: str) -> bool:
        """Ends a channel or a connection. Whether there was one of this id."""
        return any(close(id) for close in self.closers)


def channel_rows(
    channels: Iterable[tuple[Channel, ChannelHolder]], vhost: str, now_us: int
) -> list[ChannelInfo]:
    """Returns the open channels of a virtual host, oldest first."""
    rows = [
        (holder.since_us, _row(channel, holder, now_us))
        for channel, holder in channels
        if holder.vhost == vhost and not channel.closed
    ]
    return [row for _, row in sorted(rows, key=lambda each: each[0])]


def _row(channel: Channel, holder: ChannelHolder, now_us: int) -> ChannelInfo:
    transaction = channel.transaction
    is_open = channel.transactional and bool(transaction)
    marked = [unacked for unacked, _ in list(channel.marked.values())]
    held = Counter(each.queue.name for each in [*list(channel.unacked.values()), *marked])
    return ChannelInfo(
        holder.id,
        holder.door,
        holder.user,
        holder.address,
        holder.client,
        max(0, now_us - holder.since_us) / 1e6,
        max(0, now_us - transaction.opened_us) / 1e6 if is_open and transaction.opened_us else 0.0,
        transaction.messages if is_open else 0,
        len(transaction.settles) if is_open else 0,
        transaction.memory_bytes if is_open else 0,
        dict(held),
        tuple(sorted(each.queue.name for each in list(channel.consumers.values()))),
    )
