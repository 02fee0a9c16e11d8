"""Logins that wait for their check, and which of them is next.

Pure: the time goes in. Not here: how soon one may be checked (``throttle.py``), the check (``logins.py``).

Invariant: at most WAITING wait, and PAIR of them for one user from one address, of which one at a time is
checked, in the order of their arrival. A user who has logged in from its address before goes first; the
others go by turns, of addresses and then of users, so that many logins of one address or for one user delay
nobody else. In a full queue, one of the address that has most of it gives way.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future

from broker_core.server.access.identity import Identity
from broker_core.server.access.throttle import Throttle, network_of

WAITING = 256
PAIR = 4
PATIENCE_S = 8.0  # who waits longer is refused; an AMQP client has ten seconds
SERVED = 4096  # addresses and users whose last turn is known

Pair = tuple[str, str]  # network and user
_Rank = tuple[bool, int, int, int]


class Login:
    """One password that waits. ``answers``: of all clients that have sent it meanwhile."""

    __slots__ = ("address", "answers", "digest", "number", "pair", "password", "since", "user")

    def __init__(self, user: str, password: str, address: str, digest: bytes, since: float) -> None:
        self.user, self.password, self.address, self.digest = user, password, address, digest
        self.pair: Pair = (network_of(address), user)
        self.since = since
        self.number = 0  # of its arrival
        self.answers: list[Future[Identity]] = []


class LoginQueue:
    """One thread at a time."""

    def __init__(self, throttle: Throttle) -> None:
        self._throttle = throttle
        self._waiting: dict[Pair, list[Login]] = {}
        self._checked: dict[Pair, Login] = {}
        self._served: OrderedDict[tuple[str, str], int] = OrderedDict()
        self._turns = 0
        self._arrivals = 0
        self._size = 0
        self._counts: dict[tuple[str, str], int] = {}  # how many wait, of an address and for a user

    def __len__(self) -> int:
        return self._size

    def would_be_next(self, pair: Pair) -> bool:
        """Whether there is room for a login, and none before it that is not answered."""
        return len(self) < WAITING and pair not in self._waiting and pair not in self._checked

    def of_network(self, network: str) -> int:
        return self._counts.get(("network", network), 0)

    def like(self, pair: Pair, digest: bytes) -> Login | None:
        """One that waits with the same password: to check it once tells no more than to check it twice."""
        return next((each for each in self._waiting.get(pair, ()) if each.digest == digest), None)

    def add(self, login: Login) -> Login | None:
        """Returns who is refused for it, which may be itself."""
        waiting = self._waiting.get(login.pair, [])
        if len(waiting) + (login.pair in self._checked) >= PAIR:
            return login
        self._arrivals += 1
        login.number = self._arrivals
        self._waiting.setdefault(login.pair, []).append(login)
        self._count(login, 1)
        if len(self) <= WAITING:
            return None
        last = max((each[-1] for each in self._waiting.values()), key=self._weight)
        self._remove(last)
        return last

    def next(self, now: float) -> Login | None:
        """The one that is checked now, until ``done``."""
        ready = [
            logins[0]
            for (network, user), logins in self._waiting.items()
            if (network, user) not in self._checked and self._throttle.free_at(user, network, now) <= now
        ]
        if not ready:
            return None
        login = min(ready, key=self._rank)
        self._remove(login)
        self._checked[login.pair] = login
        self._turns += 1
        network, user = login.pair
        for key in _keys(login):
            self._served[key] = self._turns
            self._served.move_to_end(key)
        while len(self._served) > SERVED:
            self._served.popitem(last=False)
        self._throttle.take(user, network, now)
        return login

    def done(self, login: Login) -> None:
        del self._checked[login.pair]

    def next_at(self, now: float) -> float | None:
        """When somebody is to be checked or refused; None: not before another one comes or is done."""
        times = []
        for (network, user), logins in self._waiting.items():
            times.append(logins[0].since + PATIENCE_S)
            if (network, user) not in self._checked:
                times.append(self._throttle.free_at(user, network, now))
        return min(times, default=None)

    def expired(self, now: float) -> list[Login]:
        """Those that have waited too long."""
        found = [each for each in self._all() if now - each.since > PATIENCE_S]
        for each in found:
            self._remove(each)
        return found

    def clear(self) -> list[Login]:
        found = list(self._all())
        for each in found:
            self._remove(each)
        return found

    def _all(self) -> Iterator[Login]:
        for logins in self._waiting.values():
            yield from logins

    def _rank(self, login: Login) -> _Rank:
        """The lowest is next."""
        network, user = (self._served.get(key, 0) for key in _keys(login))
        return (not self._throttle.has_logged_in(login.user, login.pair[0]), network, user, login.number)

    def _weight(self, login: Login) -> _Rank:
        """The highest gives way."""
        network, user = (self._counts[key] for key in _keys(login))
        return (not self._throttle.has_logged_in(login.user, login.pair[0]), network, user, login.number)

    def _remove(self, login: Login) -> None:
        logins = self._waiting[login.pair]
        logins.remove(login)
        if not logins:
            del self._waiting[login.pair]
        self._count(login, -1)

    def _count(self, login: Login, by: int) -> None:
        self._size += by
        for key in _keys(login):
            left = self._counts.pop(key, 0) + by
            if left:
                self._counts[key] = left


def _keys(login: Login) -> tuple[tuple[str, str], tuple[str, str]]:
    return ("network", login.pair[0]), ("user", login.user)
