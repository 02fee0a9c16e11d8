"""The logins of a running broker: who a caller is.

Not here: what the caller may do (``broker/rights.py``), who changes users (``accounts.py``), how a password
is hashed (``password.py``).

A password that was right is remembered by a keyed digest, until the user has another one: a call of Flight
costs no scrypt. Everything else waits for its turn (``throttle.py``) and is checked in one of two threads, so
that no door is blocked.
Invariant: an unknown user costs the same time as a wrong password, and its refusal has the same text. A log
never has a password.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b

import pyarrow as pa

from broker_core import password as passwords
from broker_core.address import VHOST
from broker_core.broker.rights import Rights
from broker_core.broker.users import DEFAULT_USER, Users
from broker_core.errors import LoginRefused
from broker_core.flight.authorization import CHALLENGE_BYTES, proof
from broker_core.server.access.audit import Audit
from broker_core.server.access.identity import OWNER, Identity
from broker_core.server.access.throttle import Throttle

logger = logging.getLogger("txmq.access")

THREADS = 2  # of scrypt
WAITING = 64  # calls of Flight that wait because logins failed: each holds a thread
REMEMBERED = 10_000
TOLD_S = 1.0  # between two lines in the log about logins that are not checked
UNKNOWN = passwords.unmatched()  # with which the password of an unknown user is compared
_TOKEN_ONLY = (
    "this broker serves only those who have its token",
    "name its data directory with data=DIR, as the user that it belongs to",
)
_WRONG = "unknown user or wrong password"


class Logins:
    """Implements ``identity.Authenticator``.

    ``given``: users of ``--users``, with passwords or hashes. ``token``: of ``endpoint.json``; "": there is
    none. ``open_to_anonymous``: while nobody has added a user, a call of this host needs no login, and the
    default user logs in from there.
    """

    def __init__(
        self,
        users: Users,
        audit: Audit | None = None,
        *,
        given: Mapping[str, str] | None = None,
        token: str = "",
        open_to_anonymous: bool = True,
    ) -> None:
        self.audit = audit or Audit()
        self.pool = ThreadPoolExecutor(THREADS, thread_name_prefix="txmq-login")
        self._users = users
        self._token = token.encode()
        self._open = open_to_anonymous
        self._secret = os.urandom(32)
        self._given = {name: self._kept(name, text) for name, text in (given or {}).items()}
        users.given = frozenset(self._given)
        self._throttle = Throttle(self._secret)
        self._lock = threading.Lock()  # of what follows, and of the throttle
        self._right: OrderedDict[bytes, str] = OrderedDict()  # digest -> what the password was checked with
        self._told = (0, 0.0)  # refused without a check since the last line in the log, and when that was
        self._rights: dict[tuple[str, str, bool], Rights] = {}
        self._waiting = threading.BoundedSemaphore(WAITING)

    # -- the port ----------------------------------------------------------------------------------------
    def basic(self, user: str, password: str, address: str) -> Identity:
        known = self.known(user, password, address)
        if known is not None:
            return known
        wait_s = self.turn(user, address)
        if wait_s:
            if not self._waiting.acquire(blocking=False):
                raise LoginRefused("too many logins wait, because others have failed", "try again later")
            try:
                time.sleep(wait_s)
            finally:
                self._waiting.release()
        found = self.pool.submit(self.check, user, password, address).result()
        self.audit.say("login", user, address, door="flight", answer="accepted")
        return found

    def bearer(self, token: str, address: str) -> Identity:
        if self._token and hmac.compare_digest(self._token, token.encode(errors="surrogateescape")):
            return OWNER
        raise LoginRefused("the token is not that of this broker", "read it again from endpoint.json")

    def prove(self, challenge: pa.Buffer) -> bytes:
        """The proof that this broker has the directory's token; b"" if there is none, or to no challenge."""
        if not self._token or challenge.size != CHALLENGE_BYTES:
            return b""
        return proof(self._token.decode(), challenge.to_pybytes())

    def anonymous(self, address: str) -> Identity:
        if self._open and self._users.default and is_loopback(address):
            return self._identity(DEFAULT_USER)
        if not self._open:
            raise LoginRefused(*_TOKEN_ONLY)
        raise LoginRefused(
            "this broker serves nobody without a login",
            "give user and password; without users, the default user comes from the host of the broker",
        )

    # -- the steps of a login, for a door that must not wait --------------------------------------------
    def known(self, user: str, password: str, address: str) -> Identity | None:
        """The caller, if this password was right before, or is that of the default user; costs no time."""
        if self._users.default:
            same = hmac.compare_digest(password.encode(errors="surrogateescape"), DEFAULT_USER.encode())
            right = self._open and user == DEFAULT_USER and same and is_loopback(address)
            return self._identity(user) if right else None
        kept = self._kept_of(user)
        digest = self._digest(user, password)
        if kept is None or self._right.get(digest) != kept:
            return None
        return self._identity(user)

    def external(self, user: str, address: str) -> Identity:
        """The user that a certificate names: TLS has proved it. Raises LoginRefused."""
        why = ""
        if not user:
            why = "the client has sent no certificate with a name"
        elif not self._users.exists(user):
            why = "its certificate names no user"
        elif self._users.default and not (self._open and is_loopback(address)):
            why = f"user '{DEFAULT_USER}' can only connect via localhost"
        if why:
            logger.warning("login of %r from %s is refused: %s", user, address, why)
            self.audit.say("login", user, address, answer="refused", why=why)
            raise LoginRefused(_WRONG)
        return self._identity(user)

    def turn(self, user: str, address: str) -> float:
        """Seconds until this login is to be checked. Raises LoginRefused: too many failed."""
        if self._users.default and not self._open:
            raise LoginRefused(*_TOKEN_ONLY)  # there is no password to guess
        now = time.monotonic()
        with self._lock:
            wait_s = self._throttle.turn(user, address, now)
            told, told_at = self._told
            told += wait_s is None
            tells = wait_s is None and now - told_at > TOLD_S
            self._told = (0, now) if tells else (told, told_at)
        if tells:
            logger.warning(
                "%d logins are refused without a check, because too many have failed; the last of %r from %s",
                told,
                user,
                address,
            )
        if wait_s is None:
            raise LoginRefused("too many logins of this user or address failed", "try again later")
        return wait_s

    def check(self, user: str, password: str, address: str) -> Identity:
        """Takes tens of milliseconds: in a thread of ``pool``. Raises LoginRefused."""
        known = self.known(user, password, address)
        if known is not None:  # many clients come at once, with one password
            return known
        kept = self._kept_of(user)
        if kept is not None and kept.startswith("="):
            right = hmac.compare_digest(kept[1:], self._digest(user, password).hex())
            if not right:
                passwords.is_right(password, UNKNOWN)
        else:
            right = passwords.is_right(password, kept or UNKNOWN) and kept is not None
        why = "" if right else _WRONG
        if self._users.default and user == DEFAULT_USER and password == DEFAULT_USER:
            why = f"user '{DEFAULT_USER}' can only connect via localhost"
        now = time.monotonic()
        with self._lock:
            if why:
                self._throttle.failed(user, address, now)
            else:
                assert kept is not None
                self._throttle.succeeded(user, address)
                self._right[self._digest(user, password)] = kept
                while len(self._right) > REMEMBERED:
                    self._right.popitem(last=False)
        if why:
            logger.warning("login of %r from %s is refused: %s", user, address, why)
            self.audit.say("login", user, address, answer="refused", why=why)
            raise LoginRefused(_WRONG)
        return self._identity(user)

    # -- what the caller may do --------------------------------------------------------------------------
    def rights(self, identity: Identity, vhost: str = VHOST) -> Rights:
        """One for each user and virtual host, for calls of Flight."""
        key = (identity.user, vhost, identity.owner)
        found = self._rights.get(key)
        if found is None:
            if len(self._rights) >= REMEMBERED:
                self._rights.clear()
            found = self._rights[key] = Rights(self._users, identity.user, vhost, owner=identity.owner)
        return found

    def close(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)

    def _identity(self, user: str) -> Identity:
        return Identity(user, self._users.tags(user))

    def _kept_of(self, user: str) -> str | None:
        """With what a password of this user is compared: a hash, or "=" and the digest of a plain one."""
        given = self._given.get(user)
        if given is not None:
            return given
        record = self._users.by_name.get(user)
        return record.password_hash if record is not None and record.password_hash else None

    def _kept(self, user: str, text: str) -> str:
        return text if passwords.is_hash(text) else "=" + self._digest(user, text).hex()

    def _digest(self, user: str, password: str) -> bytes:
        """Of user and password, under a key that only this process has."""
        name = user.encode(errors="surrogateescape")
        digest = blake2b(len(name).to_bytes(4, "big") + name, key=self._secret, digest_size=32)
        digest.update(password.encode(errors="surrogateescape"))
        return digest.digest()


def is_loopback(address: str) -> bool:
    try:
        known = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = known.ipv4_mapped if isinstance(known, ipaddress.IPv6Address) else None
    return (mapped or known).is_loopback
