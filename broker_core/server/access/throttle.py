"""When a login may be checked, after others have failed: by address, and by user and address.

Pure: the time goes in. Not here: the logins that wait (``login_queue.py``).

Invariant: memory is bounded: users of an address share SLOTS counters, of at most COUNTERS in all. However
many logins fail, an address gets at most one check in ADDRESS_S, and a user of it one in MAX_S, once they
have failed often enough. The failures of an address do not slow down a user who has logged in from there.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

ADDRESSES = 4096
SLOTS = 1024
COUNTERS = 32_768
FREE = 10  # failures of an address that do not slow down its other users
ADDRESS_S = 0.05
FIRST_S, MAX_S = 0.1, 2.0  # for a user after its first failure, doubled with each, and at most
FORGET_S = 60.0  # without a failure
LOGINS = 10_000  # users and addresses that have logged in


class _Turns:
    """``failures`` in a row; ``next_at``: when the next login may be checked."""

    __slots__ = ("failed_at", "failures", "next_at")

    def __init__(self) -> None:
        self.failures = 0
        self.failed_at = 0.0
        self.next_at = 0.0

    def fail(self, now: float) -> None:
        self.forget(now)
        self.failures += 1
        self.failed_at = now

    def forget(self, now: float) -> None:
        if self.failures and now - self.failed_at > FORGET_S:
            self.failures = 0

    @property
    def pause_s(self) -> float:
        return min(FIRST_S * 2 ** min(self.failures - 1, 10), MAX_S) if self.failures else 0.0


class _Address:
    __slots__ = ("all", "by_slot")

    def __init__(self) -> None:
        self.all = _Turns()
        self.by_slot: dict[int, _Turns] = {}


class Throttle:
    """``salt`` hides which users share a counter. For one thread. ``network``: see :func:`network_of`."""

    def __init__(self, salt: bytes) -> None:
        self._salt = salt
        self._addresses: OrderedDict[str, _Address] = OrderedDict()
        self._counters = 0
        self._logins: OrderedDict[tuple[str, str], None] = OrderedDict()

    def __len__(self) -> int:
        """How many counters there are."""
        return len(self._addresses) + self._counters

    def has_logged_in(self, user: str, network: str) -> bool:
        """Whether the user has logged in from there."""
        return (network, user) in self._logins

    def free_at(self, user: str, network: str, now: float) -> float:
        """The time from which on a login may be checked; not later than ``now``: at once."""
        found = self._addresses.get(network)
        if found is None:
            return now
        at = now
        found.all.forget(now)
        if found.all.failures > FREE and not self.has_logged_in(user, network):
            at = max(at, found.all.next_at)
        one = found.by_slot.get(self._slot(user))
        if one is not None:
            one.forget(now)
            at = max(at, one.next_at if one.failures else now)
        return at

    def take(self, user: str, network: str, now: float) -> None:
        """A login is checked, or answered as one that is checked."""
        found = self._addresses.get(network)
        if found is None:
            return
        if found.all.failures > FREE and not self.has_logged_in(user, network):
            found.all.next_at = max(found.all.next_at, now) + ADDRESS_S
        one = found.by_slot.get(self._slot(user))
        if one is not None:
            one.next_at = now + one.pause_s

    def failures(self, network: str) -> int:
        """Of all users of an address."""
        found = self._addresses.get(network)
        return 0 if found is None else found.all.failures

    def count_failure(self, user: str, network: str, now: float) -> None:
        found = self._addresses.get(network)
        if found is None:
            found = self._addresses[network] = _Address()
        else:
            self._addresses.move_to_end(network)
        slot = self._slot(user)
        one = found.by_slot.get(slot)
        if one is None:
            one = found.by_slot[slot] = _Turns()
            self._counters += 1
        found.all.fail(now)
        one.fail(now)
        one.next_at = max(one.next_at, now + one.pause_s)
        while len(self._addresses) > ADDRESSES or (self._counters > COUNTERS and len(self._addresses) > 1):
            _, oldest = self._addresses.popitem(last=False)
            self._counters -= len(oldest.by_slot)

    def note_login(self, user: str, network: str) -> None:
        """The failures stay: a right login between them must not speed up who guesses."""
        self._logins[network, user] = None
        self._logins.move_to_end((network, user))
        if len(self._logins) > LOGINS:
            self._logins.popitem(last=False)

    def _slot(self, user: str) -> int:
        digest = blake2b(user.encode(errors="surrogateescape"), key=self._salt, digest_size=8).digest()
        return int.from_bytes(digest, "big") % SLOTS


def parse_ip(address: str | bytes) -> IPv4Address | IPv6Address:
    """Of IPv4 even where a socket of IPv6 has it. Raises ValueError."""
    parsed = ip_address(address)
    return (parsed.ipv4_mapped if isinstance(parsed, IPv6Address) else None) or parsed


def network_of(address: str) -> str:
    """What counts as one address: one household of IPv6 has 2**64."""
    try:
        parsed = parse_ip(address)
    except ValueError:
        return address[:64]
    return str(parsed if parsed.version == 4 else ip_network((int(parsed) >> 64 << 64, 64)))
