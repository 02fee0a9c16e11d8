"""Channels of other processes: each is kept here under an id while its client renews its lease.

Not here: what a channel does (``node/``).

Invariant: an id is one of its user, whoever knows it. A call is done once, however often and however late it
arrives. Calls are numbered without gaps. The answer of the last call is kept; an older call, and one after a
gap, is refused. The id of a channel that has ended opens no other. The channel of a client that is silent for
LEASE_S ends like an AMQP connection: rolled back and requeued; so does one whose transaction is open for too
long. What fails then is tried again at the next look.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from itertools import islice
from typing import Any

from broker_core.broker.access.users import name_in
from broker_core.broker.broker import BrokerState
from broker_core.core import checks, errors
from broker_core.core.change import Change
from broker_core.flight import contract
from broker_core.message.message import Message
from broker_core.node.channel import LocalChannel
from broker_core.node.local import LocalBroker
from broker_core.node.open_channels import ChannelHolder
from broker_core.server import slots
from broker_core.server.access.caller import Caller
from broker_core.server.flight import call_permissions
from broker_core.server.flight.call_permissions import CallPermissions
from broker_core.server.quotas import Quota
from broker_core.server.threads import started_thread

logger = logging.getLogger("txmq.flight")

LEASE_S = 60.0
LOOK_S = 5.0  # how often leases are checked
ENDED = 100_000  # ids of ended channels that are known, for ENDED_S: a call cannot be on its way for longer
ENDED_S = 3600.0


class _Held:
    """One channel and its last call. ``lock`` puts the calls of a channel in order."""

    def __init__(self, broker: LocalBroker, channel: LocalChannel, opened_us: int, caller: Caller) -> None:
        self.broker, self.channel = broker, channel
        self.caller = caller  # who opened it
        self.opened_us = opened_us  # by the clock of commits: this channel commits nothing earlier
        self.lock = threading.Lock()
        self.number = 0
        self.answer: object = None
        self.error: Exception | None = None
        self.used_at = time.monotonic()
        self.ended = False
        self.taken = 0  # by the client, of what came back of the last commit

    def take_returned(self, taken: int) -> list[Message]:
        """The next messages that came back, those of a block, for a client that has ``taken`` so many."""
        stored, rest, passed, count = self.channel.stored, self.channel.returned, self.taken, 0
        while count < len(stored) and passed + len(stored[count].rows) <= taken:
            passed, count = passed + len(stored[count].rows), count + 1

        def work(state: BrokerState, change: Change, _now: int) -> list[Message]:
            for each in islice(stored, count):
                state.blocks.unhold(change, each.block_id)
            if count < len(stored):
                return state.transactions.messages_of(stored[count])
            return rest[max(taken - passed, 0) :]

        found = self.broker.run(work)
        self.taken = passed
        for _ in range(count):  # nothing is dropped if the next block cannot be read
            stored.popleft()
        return found


class FlightChannels:
    def __init__(self, broker: LocalBroker, call_permissions: CallPermissions, quota: Quota) -> None:
        self._broker = broker
        self._quota = quota
        self._call_permissions = call_permissions
        self._entries: dict[str, _Held] = {}
        self._ended: OrderedDict[str, float] = OrderedDict()  # ids, and when their channels ended
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._watcher: threading.Thread | None = None
        broker.open_channels.add_listener(self.close_one, call_permissions.clients.connections)
        broker.committer.waits = slots.free

    @property
    def count(self) -> int:
        return len(self._entries)

    def own(self, caller: Caller, channel_id: str) -> str:
        """Returns how a channel of the caller is kept: nobody else opens, uses or ends it, or asks for it."""
        return self._broker.state.users.own_id(caller.identity.user, channel_id)

    def ended(self) -> int:
        """How many ids of ended channels are known."""
        return len(self._ended)

    def call(self, word: str, call: contract.ChannelCall, caller: Caller) -> object:
        """Carry out ``word``. Raises what the channel does; AccessRefused; ConnectionFailed if it is gone."""
        own = self.own(caller, call.channel)
        entry = self._entries.get(own)
        if entry is not None and entry.caller.state.vhost != caller.state.vhost:
            raise errors.AccessRefused(
                f"access to channel {call.channel} in vhost '{caller.state.vhost}' refused for user "
                f"'{caller.identity.user}'"
            )
        if word == "open":
            caller.enter()
            return self._open(own, caller)
        if word == "close":
            self._end(own)
            return None
        if entry is None:
            raise _no_channel(call.channel)
        entry.used_at = time.monotonic()
        if word == "keepalive":
            return None
        if word not in call_permissions.CHANNEL:
            raise errors.RemoteProtocolError(
                f"a channel has no call {word!r}; client and broker are of different versions"
            )
        with slots.holding(entry.lock):
            if entry.ended:
                raise _no_channel(call.channel)
            if word == "take_returned":  # it says what has come, so it may be repeated
                arguments: dict[str, Any] = _arguments(word, call.arguments)
                self._call_permissions.check(call_permissions.CHANNEL, word, caller, arguments)
                return entry.take_returned(**arguments)
            if word == "tx_commit" and call.number > entry.number:  # nobody asks for the rest of the last one
                if entry.channel.stored:
                    entry.take_returned(sys.maxsize)
                entry.taken, entry.channel.returned = 0, []
            return self._once(entry, own, word, call, caller)

    def _once(self, entry: _Held, own: str, word: str, call: contract.ChannelCall, caller: Caller) -> object:
        number = call.number
        if number < max(entry.number, 1):
            raise errors.RemoteProtocolError(
                f"call {number} of channel {call.channel} is older than its last call, {entry.number}: it is "
                "late and is not repeated"
            )
        if number > entry.number + 1:
            raise errors.RemoteProtocolError(
                f"call {number} of channel {call.channel} is not the next after {entry.number}: calls are "
                "missing; open a new channel"
            )
        if number != entry.number:
            entry.number, entry.answer, entry.error = number, None, None
            entry.channel.call = (own, number)
            try:
                arguments = _arguments(word, call.arguments)
                self._call_permissions.check(call_permissions.CHANNEL, word, caller, arguments)
                entry.answer = _carry_out(entry.channel, word, arguments)
                self._call_permissions.carried_out(caller, f"channel.{word}", arguments)
            except Exception as error:  # kept as the answer: the call was made and is not made again
                entry.error = error
                if not isinstance(error, errors.AccessRefused):  # which has its line
                    who = caller.identity.user, caller.address
                    logger.info(
                        "channel %s of user '%s' at %s: %s failed: %s", name_in(own), *who, word, error
                    )
        entry.used_at = time.monotonic()
        if entry.error is not None:
            raise entry.error
        return entry.answer

    def _open(self, channel_id: str, caller: Caller) -> int:
        """The client makes the id, so a repeated open opens one channel. When it was opened, by the clock of
        commits. Raises NotAllowed: the limit of channels is reached. Raises ResourceShortage.
        """
        now = self._broker.run(lambda _state, _change, now: now)
        with self._lock:
            if self._closed.is_set():
                raise errors.ConnectionFailed(
                    "the broker is stopping; open the channel again when it is back"
                )
            if channel_id in self._ended:
                raise errors.RemoteProtocolError(f"channel {name_in(channel_id)} has ended; open another one")
            if self._watcher is None:
                self._watcher = started_thread(self._watch, "channel-leases")
            if channel_id not in self._entries:
                self._quota.enter(channel_id, caller.identity.user)
                self._entries[channel_id] = _Held(
                    self._broker, self._channel(channel_id, caller, now), now, caller
                )
            return self._entries[channel_id].opened_us

    def _channel(self, channel_id: str, caller: Caller, now: int) -> LocalChannel:
        user, vhost = caller.identity.user, caller.state.vhost
        holder = ChannelHolder(channel_id, "flight", user, caller.address, caller.client, vhost, now)
        return self._broker.channel(vhost=vhost, user=user, rights=caller.rights, holder=holder)

    def close_one(self, channel_id: str) -> bool:
        """For an operator. Whether there is a channel of this id."""
        there = channel_id in self._entries
        self._end(channel_id)
        return there

    def _end(self, channel_id: str) -> None:
        """The channel is removed after its last call is answered; callers wait meanwhile. If closing it
        fails, nothing has changed.
        """
        entry = self._entries.get(channel_id)
        if entry is None:
            return
        with entry.lock:
            if entry.ended:
                return
            entry.channel.close()
            entry.ended = True
        with self._lock:
            del self._entries[channel_id]
            self._quota.leave(channel_id)
            self._ended[channel_id] = now = time.monotonic()
            while len(self._ended) > ENDED or next(iter(self._ended.values())) < now - ENDED_S:
                self._ended.popitem(last=False)

    def _watch(self) -> None:
        while not self._closed.wait(LOOK_S):
            overdue = time.monotonic() - LEASE_S
            for channel_id, entry in list(self._entries.items()):
                if not entry.lock.locked():
                    self._try(self._end if entry.used_at < overdue else self._end_late, channel_id)

    def _end_late(self, channel_id: str) -> None:
        entry = self._entries.get(channel_id)
        if entry is not None:
            with entry.lock:
                entry.channel.end_late()

    def _try(self, end: Callable[[str], None], channel_id: str) -> None:
        """The next look tries again."""
        try:
            end(channel_id)
        except Exception as error:
            logger.error("channel %s cannot be ended, and it is tried again: %s", channel_id, error)

    def end_deleted(self) -> None:
        """Ends the channels of users, and of virtual hosts, that are deleted."""
        users = self._broker.state.users
        for channel_id, entry in list(self._entries.items()):
            who = entry.caller.identity
            gone = entry.caller.state.topology.deleted
            if gone or (not who.owner and not users.exists(who.user)):
                entry.used_at = -LEASE_S  # if it cannot be ended now, it is overdue
                self._try(self._end, channel_id)

    def close(self) -> None:
        self._closed.set()
        for channel_id in list(self._entries):
            self._try(self._end, channel_id)


def _no_channel(channel_id: str) -> errors.ConnectionFailed:
    return errors.ConnectionFailed(
        f"channel {channel_id} is gone: its broker was restarted or its lease of {LEASE_S:.0f} s ran out. "
        "What was not committed is rolled back and its deliveries are requeued; open a new channel"
    )


def _arguments(word: str, values: dict[str, object]) -> dict[str, object]:
    """The checked arguments. Raises OptionError before the call is made."""
    call = f"channel.{word}"
    if word != "publish_all":
        checks.check_call(call, getattr(_Held if word == "take_returned" else LocalChannel, word), values)
        return values
    messages = values.get("messages")
    if not isinstance(messages, list) or len(values) != 1:
        raise errors.OptionError(f"{call}: argument 'messages' must be a list, and the only one")
    for place, message in enumerate(messages):
        if not isinstance(message, dict):
            raise errors.OptionError(
                f"{call}: argument 'messages[{place}]' must be a dict, not {checks.show(message)}"
            )
        checks.check_call(f"{call}: messages[{place}]", LocalChannel.publish, message)
    return values


def _carry_out(channel: LocalChannel, word: str, arguments: dict[str, Any]) -> Any:
    if word == "publish_all":  # the publishes of a transaction that its client has gathered
        for message in arguments["messages"]:
            channel.publish(**message)
        return None
    answer = getattr(channel, word)(**arguments)
    if word == "publish":
        answer, channel.returned = channel.returned, []
    elif word == "tx_commit":
        answer = len(channel.returned) + sum(len(rows) for _, rows in channel.stored)
    return answer
