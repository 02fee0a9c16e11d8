"""The logins of a running broker: who a caller is.

Not here: whether a password is right (``password_checks.py``), what the caller may do
(``broker/access/rights.py``), who changes users (``accounts.py``).
"""

from __future__ import annotations

import hmac
import threading
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future

from broker_core.broker.access.rights import Rights
from broker_core.broker.access.users import DEFAULT_USER, Users
from broker_core.core.address import VHOST
from broker_core.core.errors import Busy, LoginRefused
from broker_core.flight.authorization import CHALLENGE_BYTES, Basic, Bearer, proof
from broker_core.server.access.audit import Audit
from broker_core.server.access.identity import OWNER, Identity, Standing
from broker_core.server.access.password_checks import (
    REMEMBERED,
    TOKEN_ONLY,
    WRONG,
    PasswordChecks,
    is_loopback,
    remember,
)

WAITING = 64  # calls of Flight that wait for their check: each holds a thread


class Logins:
    """Implements ``identity.Authenticator``.

    ``file_users``: of ``--users``, with passwords or hashes. ``token``: of ``endpoint.json``; "": there is
    none. ``open_to_anonymous``: while nobody has added a user, a call of this host needs no login, and the
    default user logs in from there.
    """

    def __init__(
        self,
        users: Users,
        audit: Audit | None = None,
        *,
        file_users: Mapping[str, str] | None = None,
        token: str = "",
        open_to_anonymous: bool = True,
    ) -> None:
        self.audit = audit or Audit()
        self._users = users
        self._token = token.encode()
        self._open = open_to_anonymous
        self.checks = PasswordChecks(users, self.audit, file_users or {}, open_to_anonymous)
        self._lock = threading.Lock()
        self._proved: OrderedDict[tuple[str, bytes], str] = OrderedDict()  # by connection and digest
        self._rights: dict[tuple[str, str, bool], Rights] = {}
        self._waiting = threading.BoundedSemaphore(WAITING)

    # -- the port ----------------------------------------------------------------------------------------
    def basic(self, user: str, password: str, address: str, connection: str = "") -> Identity:
        """``connection`` has a name of its own. What has proved itself on it goes on without a turn, so that
        nobody who guesses can stop it.
        """
        proof_of = (connection, self.checks.digest(user, password)) if connection else None
        stored = self.checks.verifier_of(user)
        if proof_of is not None and stored is not None and self._proved.get(proof_of) == stored:
            return Identity(user)
        answer = self.checks.ask(user, password, address)
        if answer.done():
            found = answer.result()
        else:
            if not self._waiting.acquire(blocking=False):
                raise Busy("too many logins are being checked", "try again")
            try:
                found = answer.result()
            finally:
                self._waiting.release()
        self._logged_in(user, address, proof_of, stored)
        return found

    def _logged_in(
        self, user: str, address: str, proof_of: tuple[str, bytes] | None, stored: str | None
    ) -> None:
        """A line for each connection, even if its password was remembered from another one."""
        if proof_of is None or stored is None:
            return
        with self._lock:
            proven = self._proved.get(proof_of) == stored
            remember(self._proved, proof_of, stored)
        if not proven:
            self.audit.record("login", user, address, listener="flight", answer="accepted")

    def bearer(self, token: str, address: str) -> Identity:
        if self._is_token(token):
            return OWNER
        raise LoginRefused("the token is not valid for this broker", "read it again from endpoint.json")

    def prove(self, challenge: bytes) -> bytes:
        """The proof that this broker has the directory's token; b"" if there is none, or to no challenge."""
        if not self._token or len(challenge) != CHALLENGE_BYTES:
            return b""
        return proof(self._token.decode(), challenge)

    def standing(self, credentials: Basic | Bearer | None) -> Standing:
        if credentials is None:
            return Standing.unproven if self._open and self._users.default else Standing.refused
        if isinstance(credentials, Bearer):
            return Standing.proven if self._is_token(credentials.token) else Standing.refused
        remembered = self.checks.remembers(credentials.user, credentials.password)
        return Standing.proven if remembered else Standing.unproven

    def _is_token(self, token: str) -> bool:
        return bool(self._token) and hmac.compare_digest(self._token, token.encode(errors="surrogateescape"))

    def anonymous(self, address: str) -> Identity:
        if self._open and self._users.default and is_loopback(address):
            return Identity(DEFAULT_USER)
        if not self._open:
            raise LoginRefused(*TOKEN_ONLY)
        raise LoginRefused(
            "this broker requires a login",
            "give user and password; without users, the default user comes from the host of the broker",
        )

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
            self.checks.refused(user, address, why)
            raise LoginRefused(WRONG)
        return Identity(user)

    def ask(self, user: str, password: str, address: str) -> Future[Identity]:
        """For a listener that must not wait: the caller, at once or later, or LoginRefused, which is also
        raised at once.
        """
        return self.checks.ask(user, password, address)

    def basis(self, user: str, address: str) -> str | None:
        """What a login of the user from there rests on: another one after its password has changed, None if
        it cannot log in.
        """
        if self._users.default:
            return DEFAULT_USER if self._open and user == DEFAULT_USER and is_loopback(address) else None
        return self.checks.verifier_of(user)

    @property
    def default(self) -> bool:
        """Whether there are no users, and the default user comes in from this host."""
        return self._users.default

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

    @property
    def refusals(self) -> int:
        """Returns how many logins were refused since the start."""
        return self.checks.refusals

    def close(self) -> None:
        self.checks.close()

    def forget(self, connection: str) -> None:
        """It has ended, and another one may get its name."""
        with self._lock:
            for key in [key for key in self._proved if key[0] == connection]:
                del self._proved[key]
