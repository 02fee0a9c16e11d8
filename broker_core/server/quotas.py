"""How much of a broker its users may take, together and each: connections, channels, calls of Flight, and
parts that are being staged. A user without a limit of its own has its share (``broker/access/shares.py``).

Not here: the limits of one connection (``amqp/options.py``), of one transaction
(``broker/transaction/transaction.py``), and of what is staged (``broker/batch/branch.py``). Texts of refusals
are RabbitMQ's where it has them.

Invariant: a limit never closes an accepted connection. Who is refused has changed nothing.
"""

from __future__ import annotations

import contextlib
import resource
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from broker_core.broker.access.shares import SHARE, Shares
from broker_core.broker.batch.branch import StagedLimits
from broker_core.core.errors import Busy, NotAllowed, OptionError, ResourceExhausted, TxmqError
from broker_core.server.alarm import Alarm

MiB = 1024 * 1024


class UserLimit(NamedTuple):
    """``total``: of all users; ``user``: of each. None: no limit; of a user: its share of the total."""

    total: int | None = None
    user: int | None = None


UNLIMITED = UserLimit()
CHANNELS = UserLimit(100_000)  # 4 kB each
CALLS = UserLimit(2000, 1000)
PART_BYTES = UserLimit(1024 * MiB, 512 * MiB)
CONTENT_BYTES = UserLimit(1024 * MiB, 512 * MiB)
UNREAD_BYTES = UserLimit(512 * MiB, 256 * MiB)


@dataclass(frozen=True, slots=True)
class QuotaLimits:
    """``connections``: of AMQP, logged in; a total of None is half of the files that the process may open.
    ``channels``: of AMQP and of Flight. ``calls``: of Flight, in progress. ``part_bytes``: of the parts that
    calls are staging. ``content_bytes``: of messages of AMQP that are not whole. ``unread_bytes``: of AMQP
    output. ``flight_connections``: None is an eighth of the files. ``share``: of each bound that all users
    share, which one of them may have.
    """

    connections: UserLimit = UNLIMITED
    channels: UserLimit = CHANNELS
    calls: UserLimit = CALLS
    part_bytes: UserLimit = PART_BYTES
    content_bytes: UserLimit = CONTENT_BYTES
    unread_bytes: UserLimit = UNREAD_BYTES
    staged: StagedLimits = field(default_factory=StagedLimits)
    flight_connections: int | None = None
    share: float = SHARE

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise OptionError(
                f"the share of a user is {self.share:g}", "give 0.1 for a tenth, 1 for no shares"
            )


Refusal = Callable[[str, int, bool], TxmqError]  # of a user, for a limit, which is of this user alone


class Quota:
    """What is in use of one thing. Thread-safe."""

    def __init__(self, most: UserLimit, refusal: Refusal, shares: Shares | None = None) -> None:
        """``shares`` None: ``most.user`` is the only limit of a user."""
        self.most = most
        self._refusal, self._shares = refusal, shares
        self._lock = threading.Lock()
        self._holders: dict[object, tuple[str, int]] = {}
        self.used = 0
        self.used_by: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def __contains__(self, holder: object) -> bool:
        return holder in self._holders

    def enter(self, holder: object, user: str, amount: int = 1) -> None:
        """``holder`` takes ``amount`` until it leaves. Raises the refusal. One that is larger than the limit
        is let in where nothing else is.
        """
        with self._lock:
            used = self.used_by.get(user, 0)
            total, mine = self.most
            shares = self._shares
            if shares and mine is None and total is not None and used + amount > total * shares.fraction:
                mine = shares.most(user, total)
            for limit, taken, own in ((mine, used, True), (total, self.used, False)):
                if limit is not None and taken + amount > limit and (taken or amount == 1):
                    raise self._refusal(user, limit, own)
            self._holders[holder] = (user, amount)
            self.used += amount
            self.used_by[user] = used + amount

    def leave(self, holder: object) -> None:
        """It may be repeated."""
        with self._lock:
            user, amount = self._holders.pop(holder, ("", 0))
            self.used -= amount
            left = self.used_by.pop(user, 0) - amount
            if left:
                self.used_by[user] = left

    @contextlib.contextmanager
    def within(self, user: str, amount: int = 1) -> Iterator[None]:
        holder = object()
        self.enter(holder, user, amount)
        try:
            yield
        finally:
            self.leave(holder)


class Quotas:
    """Of one broker, at all its listeners, with the alarm that stops publishers."""

    def __init__(self, limits: QuotaLimits | None = None, shares: Shares | None = None) -> None:
        limits = limits or QuotaLimits()
        if shares is not None:
            shares.fraction = limits.share
        self.staged, self.shares = limits.staged, shares
        self.alarm: Alarm | None = None
        total, user = limits.connections
        self.connections = Quota(UserLimit(sockets() if total is None else total, user), _connection, shares)
        self.channels = Quota(limits.channels, _channel, shares)
        self.calls = Quota(limits.calls, _call, shares)
        self.part_bytes = Quota(limits.part_bytes, _part, shares)
        self.content_bytes = Quota(limits.content_bytes, _content, shares)
        self.unread_bytes = Quota(limits.unread_bytes, busy("bytes for clients", "are not read"), shares)


def sockets() -> int:
    """Half of the files that this process may open: the other half is for the store, and for connections that
    wait for their login.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(hard // 2, 1) if hard != resource.RLIM_INFINITY else 1 << 30


def _connection(user: str, limit: int, own: bool) -> TxmqError:
    if own:
        text = f"connection refused for user '{user}': user connection limit ({limit}) is reached"
        return NotAllowed(f"{text}; raise --user-connections")
    return NotAllowed(
        f"connection refused: node connection limit ({limit}) is reached; close some, or raise --connections"
    )


def _channel(user: str, limit: int, own: bool) -> TxmqError:
    if own:
        text = f"number of channels opened for user '{user}' has reached the maximum allowed user limit of"
        return NotAllowed(f"{text} ({limit}); raise --user-channels")
    text = "number of channels opened on node 'txmq' has reached the maximum allowed limit of"
    return NotAllowed(f"{text} ({limit}); close some, or raise --channels")


def _call(user: str, limit: int, own: bool) -> TxmqError:
    if own:
        text = f"{limit} calls of user '{user}' are in progress, which is the limit"
        return Busy(text, "raise --user-calls")
    return Busy(f"{limit} calls are in progress, which is the limit", "try again, or raise --calls")


def _part(user: str, limit: int, own: bool) -> TxmqError:
    if own:
        text = f"user '{user}' is staging parts of {limit} bytes, which is the limit"
        return Busy(text, "raise --user-part-bytes, or stage in fewer tasks")
    text = f"parts of {limit} bytes are being staged, which is the limit"
    return Busy(text, "try again, or raise --part-bytes")


def _content(user: str, limit: int, own: bool) -> TxmqError:
    whose = f" of user '{user}'" if own else ""
    text = f"messages{whose} that have not come whole take more than {limit} bytes, which is the limit"
    return ResourceExhausted(f"{text}; finish some before others begin")


def flight_connection(user: str, limit: int, own: bool) -> TxmqError:
    if own:
        text = f"{limit} connections of user '{user}' are open, which is its share"
        return Busy(text, "close some, raise --flight-connections or --user-share")
    return Busy(f"{limit} connections are open, which is the limit", "raise --flight-connections")


def http_connection(user: str, limit: int, own: bool) -> TxmqError:
    if own:
        return Busy(f"{limit} connections of HTTP of user '{user}' are open: the limit", "close some")
    return Busy(f"{limit} connections of HTTP are open, which is the limit", "close some")


def busy(things: str, are: str) -> Refusal:
    """Of a limit of ``things`` that is free again soon."""

    def refusal(user: str, limit: int, own: bool) -> TxmqError:
        whose = f" of user '{user}'" if own else ""
        return Busy(f"{limit} {things}{whose} {are}, which is the limit", "try again")

    return refusal
