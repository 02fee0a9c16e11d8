"""Who makes a request, and whether it may: the tags of RabbitMQ, and those of txmq.

======================  ==================================================================================
a route needs           and is refused to
======================  ==================================================================================
``nobody``              nobody
``management``          users without a tag of MANAGING
``vhost``               the same, and who may not enter the virtual host of the path
``monitoring``          users without a tag of LOOKING
``metrics``             the same, unless ``--open-metrics``
``operator``            users without the tag administrator or operator
``administrator``       users without the tag administrator
======================  ==================================================================================

Permissions on names are asked by the route itself (``broker/command_permissions.py``), as at every listener.
Not here: whether a password is right (``access/logins.py``).
Invariant: the answer about a virtual host is the same whether it is missing or forbidden, unless the caller
may look at all of them.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import ipaddress
import os
import platform
from functools import lru_cache
from hashlib import blake2b
from typing import Literal
from urllib.parse import urlsplit

from broker_core.broker.access.users import LOOKING, MANAGING
from broker_core.broker.topology.topology import Topology
from broker_core.core.address import VHOST
from broker_core.core.errors import LoginRefused, NotAllowed
from broker_core.server.access.caller import Caller
from broker_core.server.access.identity import Identity
from broker_core.server.http.backend import Backend
from broker_core.server.http.connection import HttpConnection
from broker_core.server.http.refusal import HttpRefusal, denied, not_found
from broker_core.server.http.state.page_sessions import PageSession

Need = Literal["nobody", "management", "vhost", "monitoring", "metrics", "operator", "administrator"]
CHALLENGE = {"www-authenticate": 'Basic realm="txmq"'}
NO_VHOST = "User not authorised to access virtual host"
HOST_BYTES = 300  # of a name with a port
LONGEST = 4096  # characters of a login
_SECRET = os.urandom(32)  # of this process


def read_basic(header: str) -> tuple[str, str]:
    """User and password. Raises Refusal."""
    scheme, _, coded = header.partition(" ")
    if scheme.lower() != "basic" or len(coded) > LONGEST:
        raise HttpRefusal(401, "not_authorised", "Login failed")
    try:
        user, colon, password = base64.b64decode(coded.strip(), validate=True).decode().partition(":")
    except (binascii.Error, ValueError):
        raise HttpRefusal(401, "not_authorised", "Login failed") from None
    if not colon:
        raise HttpRefusal(401, "not_authorised", "Login failed")
    return user, password


async def log_in(backend: Backend, connection: HttpConnection, header: str, host: str) -> Caller:
    """The caller, as ``/`` sees it. Who has proved itself on this connection goes on without a turn, so that
    nobody who guesses can stop it. Raises Refusal, NotAllowed (too many connections of the user).
    """
    if not header:
        raise HttpRefusal(401, "not_authorised", "Login required")
    _check_host(backend, host)
    digest = blake2b(header.encode("latin-1"), key=_SECRET, digest_size=32).digest()
    proved = connection.proved.get(digest)
    previous = _still(backend, connection, *proved) if proved is not None else None
    if previous is not None:
        return previous
    user, password = read_basic(header)
    basis = backend.logins.basis(
        user, connection.address
    )  # before the check: a later password is another login
    caller = await check(backend, connection, user, password, host)
    if basis is not None:
        connection.has_proved(digest, user, basis)
    return caller


async def check(backend: Backend, connection: HttpConnection, user: str, password: str, host: str) -> Caller:
    """The same, of a name and a password. ``host``: by which the client calls this listener."""
    logins = backend.logins
    _check_host(backend, host)
    try:
        answer = logins.ask(user, password, connection.address)
        identity = answer.result() if answer.done() else await asyncio.wrap_future(answer)
    except LoginRefused as error:
        throttled = error.summary if error.message != error.summary else "Login failed"
        raise HttpRefusal(401, "not_authorised", throttled) from None
    if not logins.default:
        logins.audit.record("login", user, connection.address, listener="http", answer="accepted")
    connection.logged_in(user)
    return Caller(identity, logins.rights(identity), connection.address, backend.broker.state)


def _check_host(backend: Backend, host: str) -> None:
    """Raises Refusal."""
    if backend.logins.default and not is_own_name(host):
        text = f"without users, this listener is called localhost or by its address, and not {host[:80]!r}"
        raise HttpRefusal(401, "not_authorised", text)


def is_own_name(host: str) -> bool:
    """Whether ``host`` of a request is an address, or a name of this host. A page of another host may give
    its name an address of here (DNS rebinding), and its requests come from here then; the password of the
    default user is known.
    """
    return len(host) <= HOST_BYTES and _is_own_name(host)


@lru_cache(100)
def _is_own_name(host: str) -> bool:
    try:
        name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return False
    if name in ("localhost", platform.node().lower()) or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True


def nobody(backend: Backend, connection: HttpConnection) -> Caller:
    """Whoever reads metrics, or opens the page, without a login."""
    identity = Identity("")
    return Caller(identity, backend.logins.rights(identity), connection.address, backend.broker.state)


def of_session(backend: Backend, connection: HttpConnection, session: PageSession) -> Caller | None:
    """The caller of a session, as in ``_still``."""
    return _still(backend, connection, session.user, session.basis)


def _still(backend: Backend, connection: HttpConnection, user: str, basis: str) -> Caller | None:
    """The caller of an earlier login; None if it is no longer one: the user is gone, or has another password.
    Raises NotAllowed (too many connections of the user).
    """
    logins = backend.logins
    if logins.basis(user, connection.address) != basis:
        return None
    connection.logged_in(user)
    identity = Identity(user)
    return Caller(identity, logins.rights(identity), connection.address, backend.broker.state)


def looks(caller: Caller) -> bool:
    """At what all users have."""
    return caller.identity.owner or not caller.tags.isdisjoint(LOOKING)


def permit(caller: Caller, need: Need) -> None:
    """Raises Refusal."""
    if need in ("management", "vhost") and caller.tags.isdisjoint(MANAGING):
        raise denied("Not management user")
    if need in ("monitoring", "metrics") and not looks(caller):
        raise denied("Not monitor user")
    if need == "operator" and not caller.operates:
        raise denied("Not operator user")
    if need == "administrator" and not caller.administers:
        raise denied("Not administrator user")


def within(backend: Backend, caller: Caller, vhost: str) -> Caller:
    """The same caller in a virtual host of its own. Raises Refusal."""
    rights = backend.logins.rights(caller.identity, vhost)
    try:
        state = backend.broker.state.of(vhost)
    except NotAllowed:
        raise not_found() if looks(caller) else denied(NO_VHOST) from None
    if not rights.enters and not looks(caller):
        raise denied(NO_VHOST)
    return Caller(caller.identity, rights, caller.address, state)


def visible(backend: Backend, caller: Caller) -> list[Topology]:
    """The virtual hosts that the caller may see, by name."""
    hosts = sorted(backend.broker.state.virtual_hosts.by_name.items())
    if looks(caller):
        return [topology for _, topology in hosts]
    return [
        topology for name, topology in hosts if backend.logins.rights(caller.identity, name or VHOST).enters
    ]
