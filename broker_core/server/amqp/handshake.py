"""What the server offers before a connection is open, and the login (specification 2.2.4).

Not here: the order of the steps (``amqp/v0_9_1/states.py``), the limits (``amqp/v0_9_1/negotiation.py``),
whether a password is right (``access/logins.py``).
Invariant: a refused client never learns which of user, password or address was wrong; only the log has it.
"""

from __future__ import annotations

import contextlib
import platform
from concurrent.futures import Future
from typing import Protocol

from broker_core import __version__
from broker_core.amqp.v0_9_1 import sasl
from broker_core.amqp.v0_9_1.methods import ConnectionStart, ConnectionStartOk
from broker_core.amqp.v0_9_1.negotiation import Offer
from broker_core.broker.access.rights import Rights
from broker_core.core.errors import CommandInvalid, ConnectionAccessRefused, LoginRefused, NotAllowed
from broker_core.server.access.identity import Identity
from broker_core.server.access.logins import Logins
from broker_core.server.amqp import audit
from broker_core.server.amqp.options import AmqpOptions
from broker_core.server.amqp.ports import ClientConnection, Server
from broker_core.server.listen.unauthenticated_limit import UnauthenticatedLimit

CAPABILITIES = {
    "publisher_confirms": True,
    "exchange_exchange_bindings": True,
    "basic.nack": True,
    "consumer_cancel_notify": True,
    "connection.blocked": True,
    "consumer_priorities": True,
    "authentication_failure_close": True,
    "per_consumer_qos": True,
    "direct_reply_to": True,
}
EXTERNAL = "EXTERNAL"
_MECHANISMS = {"PLAIN": sasl.plain, "AMQPLAIN": sasl.amqplain}


def offer(options: AmqpOptions, *, external: bool = False) -> Offer:
    """What each client is offered. ``external``: also a login with the certificate of its TLS."""
    return Offer(
        start=_start(options, [EXTERNAL, *_MECHANISMS] if external else list(_MECHANISMS)),
        channel_max=options.channel_max,
        frame_max=options.frame_max,
        heartbeat_s=options.heartbeat_s,
        handshake_timeout_s=options.handshake_timeout_s,
        close_timeout_s=options.close_timeout_s,
        max_body_bytes=options.max_body_bytes,
        max_pending_bytes=options.max_pending_bytes,
    )


def _start(options: AmqpOptions, mechanisms: list[str]) -> ConnectionStart:
    """The first method that a client gets."""
    properties = {
        "product": "txmq",
        "version": __version__,
        "platform": f"Python {platform.python_version()}",
        "copyright": "none",
        "information": "AMQP 0-9-1 as RabbitMQ speaks it",
        "cluster_name": options.cluster_name,
        "capabilities": CAPABILITIES,
    }
    return ConnectionStart(0, 9, properties, " ".join(mechanisms).encode(), b"en_US")


class UnauthenticatedConnection(ClientConnection, Protocol):
    """A connection whose client logs in."""

    def logged_in(self, user: str) -> None: ...


def log_in(
    connection: UnauthenticatedConnection,
    method: ConnectionStartOk,
    logins: Logins,
    certified: str | None = None,
) -> None:
    """Calls ``connection.logged_in``, at once or later; the connection is paused meanwhile. A refusal closes
    it. ``certified``: the name in the client's certificate, "" if it has none, None if none was asked for.

    Raises CommandInvalid, MethodSyntaxError, ConnectionAccessRefused.
    """
    if method.mechanism == EXTERNAL and certified is not None:
        try:
            user = logins.external(certified, connection.address).user
        except LoginRefused:
            raise _refused(method) from None
        _accept(connection, user, logins)
        return
    read = _MECHANISMS.get(method.mechanism)
    if read is None:
        raise CommandInvalid(
            f"unknown authentication mechanism '{method.mechanism}'", f"use {' or '.join(_MECHANISMS)}"
        )
    user, password = read(method.response)
    address, loop = connection.address, connection.server.loop
    try:
        answer = logins.ask(user, password, address)
    except LoginRefused:
        raise _refused(method) from None
    if answer.done():
        answer.result()
        _accept(connection, user, logins)
        return
    connection.pause(log_in)

    def done() -> None:
        if connection.protocol.closing:
            return
        error = answer.exception()
        if error is None:
            _accept(connection, user, logins)
        else:
            refused = _refused(method) if isinstance(error, LoginRefused) else error
            connection.fail(0, refused, method)
        connection.resume(log_in)

    def tell(_answer: Future[Identity]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and its connections with it
            loop.call_soon_threadsafe(done)

    answer.add_done_callback(tell)


def _accept(connection: UnauthenticatedConnection, user: str, logins: Logins) -> None:
    logins.audit.record("login", user, connection.address, listener="amqp", answer="accepted")
    connection.logged_in(user)


def _refused(method: ConnectionStartOk) -> ConnectionAccessRefused:
    return ConnectionAccessRefused(
        f"Login was refused using authentication mechanism {method.mechanism}. For details see the broker "
        "logfile."
    )


class AdmittingServer(Server, Protocol):
    """The server that a connection enters. ``connections_to``: how many have entered a virtual host, of one
    user or of all.
    """

    @property
    def unauthenticated(self) -> UnauthenticatedLimit: ...

    def connections_to(self, vhost: str, user: str | None = None) -> int: ...


def enter(connection: ClientConnection, server: AdmittingServer, vhost: str) -> None:
    """Sets what the connection sees and may do.

    Raises NotAllowed, with RabbitMQ's texts: there is no such virtual host, it has too many connections, the
    user has no permission there or is at a limit.
    """
    user, state = connection.user, server.broker.state
    rights = Rights(state.users, user, vhost)
    try:
        seen = state.of(vhost)
        limit = state.virtual_hosts.limits(vhost).max_connections
        refused = f"access to vhost '{vhost}' refused for user '{user}'"
        if 0 <= limit <= server.connections_to(vhost):
            raise NotAllowed(f"{refused}: connection limit ({limit}) is reached")
        mine = server.connections_to(vhost, user) if limit > 0 else 0
        if mine and state.names.shares.over(user, mine + 1, limit) > 0:
            raise NotAllowed(
                f"{refused}: it has {mine} connections, its share of the connection limit ({limit})",
                "close some, raise the limit with `txmq vhost limit`, or raise --user-share",
            )
        if not rights.enters:
            raise NotAllowed(refused)
        server.quotas.connections.enter(connection, user)
    except NotAllowed as error:
        audit.refused(connection, "connection.open", error.summary, vhost)
        raise
    connection.seen, connection.rights = seen, rights
    server.unauthenticated.leave(connection)  # who is refused stays there until its socket is closed
