"""What AMQP clients do that the audit log has: topology, decisions by hand, refusals.

Not here: logins (``handshake.py``), the file (``access/audit.py``).
"""

from __future__ import annotations

from broker_core.amqp.v0_9_1 import methods as m
from broker_core.core.errors import AccessRefused, NotAllowed, TxmqError
from broker_core.server.amqp.ports import ClientConnection

# the fields that are written, by method; a passive one changes nothing
TOPOLOGY: dict[type[m.Method], tuple[str, ...]] = {
    m.ExchangeDeclare: ("exchange", "type"),
    m.ExchangeDelete: ("exchange",),
    m.ExchangeBind: ("destination", "source", "routing_key"),
    m.ExchangeUnbind: ("destination", "source", "routing_key"),
    m.QueueDeclare: ("queue",),
    m.QueueDelete: ("queue",),
    m.QueuePurge: ("queue",),
    m.QueueBind: ("queue", "exchange", "routing_key"),
    m.QueueUnbind: ("queue", "exchange", "routing_key"),
}


def carried_out(connection: ClientConnection, method: m.Method) -> None:
    fields = TOPOLOGY.get(type(method))
    if fields is not None and not getattr(method, "passive", False):
        _record(connection, method.NAME, **{name: getattr(method, name) for name in fields})


def decided(connection: ClientConnection, verb: str, xid: str, of: str | None) -> None:
    """``of``: whose it was."""
    _record(connection, f"transaction.{verb}", xid=xid, of=of)


def failed(connection: ClientConnection, method: m.Method | None, error: BaseException) -> None:
    """Only a refusal is written: for a permission, or for the limit of channels."""
    limited = isinstance(error, NotAllowed) and isinstance(method, m.ChannelOpen)
    if isinstance(error, TxmqError) and (limited or isinstance(error, AccessRefused)):
        refused(connection, method.NAME if method is not None else "", error.summary)


def refused(connection: ClientConnection, request: str, why: str, vhost: str | None = None) -> None:
    """``vhost``: that it asked for and did not enter."""
    _record(connection, "refused", vhost, asked=request, why=why)


def _record(connection: ClientConnection, event: str, vhost: str | None = None, **what: object) -> None:
    where = {"listener": "amqp", "vhost": connection.seen.vhost if vhost is None else vhost}
    connection.server.logins.audit.record(event, connection.user, connection.address, **where, **what)
