"""The login of a Flight call: its ``authorization`` header becomes an ``Identity``.

Not here: whether a password is right (``access/logins.py``), what the caller may do.
"""

from __future__ import annotations

import re
from urllib.parse import unquote

import pyarrow.flight

from broker_core.core.address import VHOST
from broker_core.core.errors import LoginRefused, RemoteProtocolError
from broker_core.flight import authorization
from broker_core.server.access.identity import Authenticator, Identity
from broker_core.server.flight.connection_limit import FlightConnectionLimit

MIDDLEWARE = "authorization"  # the name under which a server has ``ReadHeader``
_LONGEST = 255  # characters of what a client calls itself
_PEER = re.compile(r"^(?:ipv4|ipv6):(.*?)(?::\d+)?$")


class ReadHeader(pyarrow.flight.ServerMiddlewareFactory):  # type: ignore[misc]  # pyarrow has no types
    """Keeps the header of each call: only the call itself knows the address of its client."""

    def __init__(self, connection_limit: FlightConnectionLimit) -> None:
        super().__init__()
        self._connection_limit = connection_limit

    def start_call(self, _info: object, headers: dict[str, list[str]]) -> Header:
        """Before the call has sent anything else. Refuses it if too many have not."""
        made = Header(
            self._connection_limit,
            headers.get(authorization.HEADER, []),
            headers.get(authorization.VHOST_HEADER, []),
            headers.get(authorization.CLIENT_HEADER, []),
        )
        if not self._connection_limit.begin(made):
            raise pyarrow.flight.FlightUnavailableError(
                "too many calls have sent nothing but headers; try again"
            )
        return made


class Header(pyarrow.flight.ServerMiddleware):  # type: ignore[misc]
    """The ``authorization`` headers of one call, and those that name its virtual host and its client."""

    def __init__(
        self,
        connection_limit: FlightConnectionLimit,
        values: list[str],
        vhosts: list[str],
        clients: list[str],
    ) -> None:
        super().__init__()
        self.clients = clients
        self._connection_limit = connection_limit
        self.values = values
        self.vhosts = vhosts

    def begun(self) -> None:
        self._connection_limit.begun(self)

    def call_completed(self, _error: Exception | None) -> None:
        self._connection_limit.begun(self)


def identity(
    context: pyarrow.flight.ServerCallContext, authenticator: Authenticator, address: str
) -> Identity:
    """Who makes the call of ``context``. Raises LoginRefused."""
    header = context.get_middleware(MIDDLEWARE)
    values = [] if header is None else header.values
    if header is not None:
        header.begun()
    if not values:
        return authenticator.anonymous(address)
    if len(values) > 1:
        raise LoginRefused(f"a call has {len(values)} headers {authorization.HEADER!r}", "send one")
    match authorization.parse(values[0]):
        case authorization.Basic(user, password):
            return authenticator.basic(user, password, address, context.peer())
        case authorization.Bearer(token):
            return authenticator.bearer(token, address)


def asked_vhost(context: pyarrow.flight.ServerCallContext) -> str:
    """The virtual host of a call; ``/`` if it names none. Raises RemoteProtocolError."""
    header = context.get_middleware(MIDDLEWARE)
    values = [] if header is None else header.vhosts
    if not values:
        return VHOST
    try:
        (value,) = values
        return unquote(value, errors="strict")
    except ValueError:
        raise RemoteProtocolError(
            f"the header {authorization.VHOST_HEADER!r} of a call must be one percent-encoded name"
        ) from None


def client_of(context: pyarrow.flight.ServerCallContext) -> str:
    """What the client of a call calls itself; "" if it does not. It is shown, and no rule asks for it."""
    header = context.get_middleware(MIDDLEWARE)
    return unquote(header.clients[0][: 3 * _LONGEST])[:_LONGEST] if header and header.clients else ""


def peer_address(peer: str) -> str:
    """The address in gRPC's name of a client, ``ipv4:127.0.0.1:4711``; "" if it has none."""
    found = _PEER.match(peer.replace("%5B", "[").replace("%5D", "]").replace("%25", "%"))
    return found.group(1).strip("[]").partition("%")[0] if found else ""
