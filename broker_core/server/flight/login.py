"""The login of a Flight call: its ``authorization`` header becomes an ``Identity``, before anything that the
call brings is read.

Not here: whether a password is right (``access/logins.py``), what the caller may do.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from urllib.parse import unquote

from broker_core.core.address import VHOST
from broker_core.core.errors import LoginRefused, RemoteProtocolError
from broker_core.flight import authorization
from broker_core.server.access.identity import Authenticator, Identity

_LONGEST = 255  # characters of what a client calls itself
_PEER = re.compile(r"^(?:ipv4|ipv6):(.*?)(?::\d+)?$")
Credentials = authorization.Basic | authorization.Bearer | None  # None: the call brings none


class Headers:
    """What a call says of its caller."""

    __slots__ = ("_values",)

    def __init__(self, metadata: Iterable[tuple[str, str | bytes]]) -> None:
        self._values = [(name, value) for name, value in metadata if isinstance(value, str)]

    def values(self, name: str) -> list[str]:
        return [value for found, value in self._values if found == name]


def identity(brought: Credentials, authenticator: Authenticator, peer: str) -> Identity:
    """Who makes the call. ``peer``: gRPC's name of the client. Raises LoginRefused."""
    address = peer_address(peer)
    match brought:
        case None:
            return authenticator.anonymous(address)
        case authorization.Basic(user, password):
            return authenticator.basic(user, password, address, peer)
        case authorization.Bearer(token):
            return authenticator.bearer(token, address)


def credentials(headers: Headers) -> Credentials:
    """What the call brings. Raises LoginRefused."""
    values = headers.values(authorization.HEADER)
    if len(values) > 1:
        raise LoginRefused(f"a call has {len(values)} headers {authorization.HEADER!r}", "send one")
    return authorization.parse(values[0]) if values else None


def asked_vhost(headers: Headers) -> str:
    """The virtual host of a call; ``/`` if it names none. Raises RemoteProtocolError."""
    values = headers.values(authorization.VHOST_HEADER)
    if not values:
        return VHOST
    try:
        (value,) = values
        return unquote(value, errors="strict")
    except ValueError:
        raise RemoteProtocolError(
            f"the header {authorization.VHOST_HEADER!r} of a call must be one percent-encoded name"
        ) from None


def client_of(headers: Headers) -> str:
    """What the client of a call calls itself; "" if it does not. It is shown, and no rule asks for it."""
    values = headers.values(authorization.CLIENT_HEADER)
    return unquote(values[0][: 3 * _LONGEST])[:_LONGEST] if values else ""


def peer_address(peer: str) -> str:
    """The address in gRPC's name of a client, ``ipv4:127.0.0.1:4711``; "" if it has none."""
    found = _PEER.match(peer.replace("%5B", "[").replace("%5D", "]").replace("%25", "%"))
    return found.group(1).strip("[]").partition("%")[0] if found else ""
