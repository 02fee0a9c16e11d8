"""Whether a password is right: remembered, or checked in its turn.

Not here: who calls, and by which listener (``logins.py``), how a password is hashed (``password.py``).

A password that was right is remembered by a keyed digest, until the user has another one: it costs no scrypt.
Everything else waits for its turn (``login_queue.py``, ``throttle.py``) and is checked in one of two threads,
so that no listener is blocked.
Invariant: a check is one scrypt of each cost that a hash of any user has, whoever it is for, so that its time
tells nothing of the user. A right password is answered only when a wrong one in its place would be checked:
else its answer, which is quicker, or is one at all, would tell a guesser more than the throttle permits. An
unknown user costs the same as a wrong password, and its refusal has the same text. A log has no password.
"""

from __future__ import annotations

import hmac
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future
from functools import lru_cache
from hashlib import blake2b
from typing import TypeVar

from broker_core.broker.access.users import DEFAULT_USER, Users
from broker_core.core import password as passwords
from broker_core.core.errors import LoginRefused
from broker_core.server.access.audit import Audit
from broker_core.server.access.identity import Identity
from broker_core.server.access.login_queue import Login, LoginQueue
from broker_core.server.access.throttle import FREE, Throttle, parse_ip

logger = logging.getLogger("txmq.access")

THREADS = 2  # of scrypt
REMEMBERED = 10_000
TOLD_S = 1.0  # between two lines in the log about logins that are not checked
TOKEN_ONLY = (
    "this broker serves only those who have its token",
    "name its data directory with data=DIR, as the user that it belongs to",
)
WRONG = "unknown user or wrong password"
TOO_MANY = ("too many logins of this user or address failed", "try again later")
_Key = TypeVar("_Key")


class PasswordChecks:
    """``listed``: users of ``--users``, with passwords or hashes. ``open_``: the default user logs in from
    this host while nobody has added a user. Thread-safe.
    """

    def __init__(self, users: Users, audit: Audit, listed: Mapping[str, str], open_: bool) -> None:
        self._users = users
        self._audit = audit
        self._open = open_
        self._secret = os.urandom(32)
        self._listed = {name: self._verifier(name, text) for name, text in listed.items()}
        users.file_users = frozenset(self._listed)
        self._found_costs: tuple[object, frozenset[passwords.Cost]] = (None, frozenset())
        self.throttle = Throttle(self._secret)
        self._queue = LoginQueue(self.throttle)
        self._right: OrderedDict[bytes, str] = OrderedDict()  # digest -> what the password was checked with
        self._wrong: OrderedDict[tuple[str, bytes], str] = OrderedDict()  # the same, by network and digest
        self._work = threading.Condition()  # of the throttle, and of all that follows it here
        self._threads: list[threading.Thread] = []
        self._closed = False
        self.refusals = 0  # about: of any thread
        self._reported = (0, 0.0)  # refused without a check since the last line in the log, and when that was

    def ask(self, user: str, password: str, address: str) -> Future[Identity]:
        """The caller, at once or later. Raises LoginRefused at once, or puts it into the answer."""
        answer: Future[Identity] = Future()
        if self._users.default:
            if not self._open:
                raise LoginRefused(*TOKEN_ONLY)  # there is no password to guess
            same = hmac.compare_digest(password.encode(errors="surrogateescape"), DEFAULT_USER.encode())
            if user == DEFAULT_USER and same and is_loopback(address):
                answer.set_result(Identity(user))
                return answer
        login = Login(user, password, address, self.digest(user, password), time.monotonic())
        stored = self.verifier_of(user)
        with self._work:
            again = self._wrong.get((login.pair[0], login.digest)) == (stored or "")
            proven = not again and self._recognises(login, stored)
            refused = None if again or proven else self._enter(login, answer)
        if again:  # who sends one wrong password all the time guesses nothing, and stops nobody
            self.refused(user, address, WRONG)
            raise LoginRefused(WRONG)
        if proven:
            answer.set_result(Identity(user))
        if refused is not None:
            self._unchecked([refused])
            if refused is login:
                raise LoginRefused(*TOO_MANY)
        return answer

    def _recognises(self, login: Login, text: str | None) -> bool:
        """Whether this password was right before, and a login would be checked now."""
        network, user = login.pair
        if text is None or self._right.get(login.digest) != text or not self._queue.would_be_next(login.pair):
            return False
        calm = self.throttle.failures(network) + self._queue.of_network(network) <= FREE
        if not (calm or self.throttle.has_logged_in(user, network)):
            return False
        if self.throttle.free_at(user, network, login.since) > login.since:
            return False
        self.throttle.take(user, network, login.since)
        self.throttle.note_login(user, network)
        return True

    def _enter(self, login: Login, answer: Future[Identity]) -> Login | None:
        """The login waits, and a thread is there for it. Returns who is refused for it."""
        same = self._queue.like(login.pair, login.digest)
        if same is not None:
            same.answers.append(answer)
            return None
        self._start()
        login.answers.append(answer)
        refused = self._queue.add(login)
        if refused is not login:
            self._work.notify()
        if refused is not None and refused is not login:
            self.throttle.count_failure(refused.user, refused.pair[0], login.since)
        return refused

    def _start(self) -> None:
        """Raises RuntimeError: there is no thread, and none can be had."""
        if len(self._threads) < THREADS:
            name = f"txmq-login-{len(self._threads)}"
            thread = threading.Thread(target=self._run, name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError:
                if not self._threads:
                    raise
            else:
                self._threads.append(thread)

    def _run(self) -> None:
        while True:
            with self._work:
                login, expired = self._next()
            self._unchecked(expired)
            if login is not None:
                try:
                    self._check(login)
                except Exception as error:  # no memory for scrypt: the next one may find some
                    for answer in login.answers:
                        if not answer.done():
                            answer.set_exception(error)
                finally:
                    with self._work:
                        self._queue.done(login)
                        self._work.notify()
            elif self._closed:
                return

    def _next(self) -> tuple[Login | None, list[Login]]:
        """Waits for the next login, or for some that have waited too long."""
        while not self._closed:
            now = time.monotonic()
            expired = self._queue.expired(now)
            for each in expired:
                self.throttle.count_failure(each.user, each.pair[0], now)
            login = self._queue.next(now)
            if login is not None or expired:
                return login, expired
            at = self._queue.next_at(now)
            self._work.wait(None if at is None else max(at - now, 0.001))
        return None, []

    def _check(self, login: Login) -> None:
        user, address = login.user, login.address
        stored = self.verifier_of(user)
        right = stored is not None and self._right.get(login.digest) == stored
        if not right:
            if stored is not None and stored.startswith("="):
                right = hmac.compare_digest(stored[1:], login.digest.hex())
                if not right:
                    passwords.is_right(login.password, None, self._costs())
            else:
                right = passwords.is_right(login.password, stored, self._costs())
        why = "" if right else WRONG
        if self._users.default and user == DEFAULT_USER and login.password == DEFAULT_USER:
            why = f"user '{DEFAULT_USER}' can only connect via localhost"
        now = time.monotonic()
        with self._work:
            if why:
                self.throttle.count_failure(user, login.pair[0], now)
                remember(self._wrong, (login.pair[0], login.digest), stored or "")
            else:
                assert stored is not None
                self.throttle.note_login(user, login.pair[0])
                remember(self._right, login.digest, stored)
        if why:
            self.refused(user, address, why)
        for answer in login.answers:
            if why:
                answer.set_exception(LoginRefused(WRONG))
            else:
                answer.set_result(Identity(user))

    def refused(self, user: str, address: str, why: str) -> None:
        self.refusals += 1
        if self._audit.record("login", user, address, answer="refused", why=why):
            logger.warning("login of %r from %s is refused: %s", user, address, why)

    def _unchecked(self, logins: list[Login]) -> None:
        self.refusals += len(logins)
        for login in logins:
            self._audit.record(
                "login", login.user, login.address, answer="refused", why="not checked: too many"
            )
            self._report(login)
            for answer in login.answers:
                answer.set_exception(LoginRefused(*TOO_MANY))

    def _report(self, login: Login) -> None:
        now = time.monotonic()
        with self._work:
            reported, reported_at = self._reported
            reported += 1
            tells = now - reported_at > TOLD_S
            self._reported = (0, now) if tells else (reported, reported_at)
        if tells:
            logger.warning(
                "%d logins are refused without a check, because too many have failed; the last of %r from %s",
                reported,
                login.user,
                login.address,
            )

    def close(self) -> None:
        with self._work:
            self._closed = True
            left = self._queue.clear()
            self._work.notify_all()
        self._unchecked(left)

    def verifier_of(self, user: str) -> str | None:
        """With what a password of this user is compared: a hash, or "=" and the digest of a plain one."""
        listed = self._listed.get(user)
        if listed is not None:
            return listed
        record = self._users.by_name.get(user)
        return record.password_hash if record is not None and record.password_hash else None

    def _costs(self) -> frozenset[passwords.Cost]:
        """Of all hashes that a password may be compared with."""
        epoch, costs = self._found_costs
        if epoch is not self._users.epoch:
            epoch = self._users.epoch
            records = tuple(self._users.by_name.values())
            stored = [each.password_hash for each in records if each.password_hash]
            hashes = {
                text.rsplit("$", 2)[0]: text for text in (*stored, *self._listed.values()) if text[0] == "$"
            }
            costs = frozenset(map(passwords.cost_of, hashes.values())) or frozenset({passwords.COST})
            self._found_costs = epoch, costs
        return costs

    def _verifier(self, user: str, text: str) -> str:
        return text if passwords.is_hash(text) else "=" + self.digest(user, text).hex()

    def remembers(self, user: str, password: str) -> bool:
        """Whether this password of the user was right before."""
        stored = self.verifier_of(user)
        return stored is not None and self._right.get(self.digest(user, password)) == stored

    def digest(self, user: str, password: str) -> bytes:
        """Of user and password, under a key that only this process has."""
        name = user.encode(errors="surrogateescape")
        digest = blake2b(len(name).to_bytes(4, "big") + name, key=self._secret, digest_size=32)
        digest.update(password.encode(errors="surrogateescape"))
        return digest.digest()


def remember(answers: OrderedDict[_Key, str], key: _Key, stored: str) -> None:
    answers[key] = stored
    answers.move_to_end(key)
    if len(answers) > REMEMBERED:
        answers.popitem(last=False)


@lru_cache(1000)
def is_loopback(address: str) -> bool:
    try:
        return parse_ip(address).is_loopback
    except ValueError:
        return False
