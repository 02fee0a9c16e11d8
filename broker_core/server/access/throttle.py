"""Slows down logins after failed ones: by address, and by user and address.

Pure: the time goes in. Not here: who waits (``logins.py``).

Invariant: memory is bounded: users of an address share SLOTS counters, the newest ADDRESSES addresses are
known. However many logins fail, an address gets at most one check in ADDRESS_S, and a user of it one in
MAX_S, once they have failed often enough.
"""

from __future__ import annotations

import ipaddress
from collections import OrderedDict
from hashlib import blake2b

ADDRESSES = 4096
SLOTS = 16
FREE = 10  # failures of an address that do not slow down its other users
ADDRESS_S = 0.25
FIRST_S, MAX_S = 0.1, 2.0  # for a user after its first failure, doubled with each, and at most
PATIENCE_S = 5.0  # a login that would wait longer is refused at once
FORGET_S = 60.0  # without a failure


class _Turns:
    """``failures`` in a row; ``next_at``: when the next login may be checked."""

    __slots__ = ("failed_at", "failures", "next_at")

    def __init__(self) -> None:
        self.failures = 0
        self.failed_at = 0.0
        self.next_at = 0.0

    def fail(self, now: float) -> None:
        self.failures += 1
        self.failed_at = now

    def forget(self, now: float) -> None:
        if self.failures and now - self.failed_at > FORGET_S:
            self.failures = 0


class _Address:
    __slots__ = ("all", "by_slot")

    def __init__(self) -> None:
        self.all = _Turns()
        self.by_slot: dict[int, _Turns] = {}


class Throttle:
    """``salt`` keeps it secret which users share a counter. One thread at a time."""

    def __init__(self, salt: bytes) -> None:
        self._salt = salt
        self._known: OrderedDict[str, _Address] = OrderedDict()

    def __len__(self) -> int:
        """How many counters there are."""
        return sum(1 + len(address.by_slot) for address in self._known.values())

    def turn(self, user: str, address: str, now: float) -> float | None:
        """Seconds to wait before this login is checked; None: it is refused, too many wait already."""
        found = self._known.get(_network(address))
        if found is None:
            return 0.0
        everyone, one = found.all, found.by_slot.get(self._slot(user))
        everyone.forget(now)
        at = now
        if everyone.failures > FREE:
            at = max(at, everyone.next_at)
        if one is not None:
            one.forget(now)
            if one.failures:
                at = max(at, one.next_at)
        if at - now > PATIENCE_S:
            return None
        if everyone.failures > FREE:
            everyone.next_at = at + ADDRESS_S
        if one is not None and one.failures:
            one.next_at = at + min(FIRST_S * 2 ** min(one.failures - 1, 10), MAX_S)
        return at - now

    def failed(self, user: str, address: str, now: float) -> None:
        network = _network(address)
        found = self._known.get(network)
        if found is None:
            found = self._known[network] = _Address()
            if len(self._known) > ADDRESSES:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(network)
        one = found.by_slot.setdefault(self._slot(user), _Turns())
        for turns in (found.all, one):
            turns.forget(now)
            turns.fail(now)
        one.next_at = max(one.next_at, now + FIRST_S * 2 ** min(one.failures - 1, 4))

    def succeeded(self, user: str, address: str) -> None:
        found = self._known.get(_network(address))
        if found is not None:
            found.by_slot.pop(self._slot(user), None)

    def _slot(self, user: str) -> int:
        return (
            blake2b(user.encode(errors="surrogateescape"), key=self._salt, digest_size=8).digest()[0] % SLOTS
        )


def _network(address: str) -> str:
    """One household of IPv6 has 2**64 addresses."""
    try:
        known = ipaddress.ip_address(address)
    except ValueError:
        return address[:64]
    if isinstance(known, ipaddress.IPv6Address):
        mapped = known.ipv4_mapped
        return str(mapped) if mapped else str(ipaddress.ip_network((int(known) >> 64 << 64, 64)))
    return str(known)
