"""Logins of browsers: a cookie names a session, and the session names its user.

Not here: whether a password is right (``access/logins.py``), the cookie itself (``page/login.py``).
Invariant: a session ends IDLE_S after its last request and LONGEST_S after its login; it says nothing about
rights, which are asked for again with each request. The token of a session is kept as a digest alone.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256

IDLE_S, LONGEST_S = 30 * 60.0, 12 * 60 * 60.0
MOST, OF_USER = 1_000, 20


@dataclass(slots=True)
class PageSession:
    """``basis``: what the login rests on; another password makes another one. ``form``: a secret that every
    form sends back. ``notice``: shown once.
    """

    user: str
    basis: str
    form: str
    began_s: float
    used_s: float
    notice: str = ""


class PageSessions:
    """Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._by_digest: OrderedDict[bytes, PageSession] = OrderedDict()  # the last used one last

    def __len__(self) -> int:
        return len(self._by_digest)

    def open(self, user: str, basis: str) -> str:
        """Returns the token of a new session. The oldest one of a user who has OF_USER ends."""
        token, now = secrets.token_urlsafe(32), self._clock()
        with self._lock:
            self._end_old(now)
            own = [digest for digest, each in self._by_digest.items() if each.user == user]
            for digest in own[: max(len(own) - OF_USER + 1, 0)]:
                del self._by_digest[digest]
            while len(self._by_digest) >= MOST:
                self._by_digest.popitem(last=False)
            session = PageSession(user, basis, secrets.token_urlsafe(32), now, now)
            self._by_digest[_digest(token)] = session
        return token

    def find(self, token: str) -> PageSession | None:
        digest, now = _digest(token), self._clock()
        with self._lock:
            self._end_old(now)
            found = self._by_digest.get(digest)
            if found is None:
                return None
            if now - found.began_s > LONGEST_S:
                del self._by_digest[digest]
                return None
            found.used_s = now
            self._by_digest.move_to_end(digest)
            return found

    def close(self, token: str) -> None:
        """It may be repeated."""
        with self._lock:
            self._by_digest.pop(_digest(token), None)

    def _end_old(self, now: float) -> None:
        while self._by_digest:
            digest, oldest = next(iter(self._by_digest.items()))
            if now - oldest.used_s <= IDLE_S:
                return
            del self._by_digest[digest]


def _digest(token: str) -> bytes:
    return sha256(token.encode(errors="surrogateescape")).digest()
