"""A handler that publishes a copy of every message that comes in or goes out: RabbitMQ's firehose.

Copies go to the topic exchange ``amq.rabbitmq.trace``, with routing key ``publish.EXCHANGE`` or
``deliver.QUEUE``, the same body, and headers that describe the message (``_publish``). Bind a queue to see
them.
Not here: that exchange (``broker/topology/topology.py``).

Invariant: a copy is never traced itself, and tracing does not change messages. A message that a session then
refuses is traced too. Copies are transient and are routed at the end of the loop's tick.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from broker_core.amqp.v0_9_1.events import Command
from broker_core.amqp.v0_9_1.methods import BasicDeliver, BasicGetOk, BasicPublish
from broker_core.broker.broker import BrokerState
from broker_core.broker.state.change import Change
from broker_core.broker.topology.topology import Topology
from broker_core.broker.transaction.transaction import Transaction
from broker_core.errors import LocalProtocolError, RemoteProtocolError
from broker_core.message.field_table import Timestamp
from broker_core.message.message import Message
from broker_core.message.properties import NAMES, Properties
from broker_core.server.amqp.handlers.handler import Handler
from broker_core.server.amqp.ports import Server
from broker_core.server.amqp.session import Session

EXCHANGE = "amq.rabbitmq.trace"


class _Copy(NamedTuple):
    """One traced message. ``published``: by a client; else it was delivered."""

    routing_key: str
    published: bool
    exchange: str
    original_key: str
    headers: dict[str, object]
    properties: bytes
    body: bytes
    topology: Topology


class Tracer(Handler):
    """For one server. ``node``: the value of the header ``node``."""

    def __init__(self, node: str = "txmq") -> None:
        self._node = node
        self._server: Server | None = None
        self._copies: list[_Copy] = []

    def session_in(self, session: Session, command: Command) -> Command | None:
        method = command.method
        if type(method) is BasicPublish and method.exchange != EXCHANGE:
            key = f"publish.{method.exchange}"
            self._trace(
                session,
                _Copy(
                    key,
                    True,
                    method.exchange,
                    method.routing_key,
                    {},
                    command.properties,
                    command.body,
                    session.state.topology,
                ),
            )
        return command

    def session_out(self, session: Session, command: Command, queue: str) -> Command | None:
        method = command.method
        if isinstance(method, (BasicDeliver, BasicGetOk)) and method.exchange != EXCHANGE:
            key = f"deliver.{queue}"
            more: dict[str, object] = {"redelivered": int(method.redelivered)}
            self._trace(
                session,
                _Copy(
                    key,
                    False,
                    method.exchange,
                    method.routing_key,
                    more,
                    command.properties,
                    command.body,
                    session.state.topology,
                ),
            )
        return command

    def _trace(self, session: Session, copy: _Copy) -> None:
        connection = session.connection
        copy.headers.update(
            vhost=session.state.vhost,
            connection=connection.name,
            channel=session.number,
            user=connection.user,
        )
        if not self._copies:
            self._server = connection.server
            self._server.commits.gather(self)
        self._copies.append(copy)

    def hand_over(self) -> None:
        """The tick ends, and this thread does not hold the lock: route and commit the copies."""
        copies, self._copies = self._copies, []
        server = self._server
        assert server is not None
        transactions: dict[Topology, Transaction] = {}  # one of each virtual host
        with server.broker.look:
            for copy in copies:
                transaction = transactions.get(copy.topology)
                if transaction is None:
                    transaction = transactions[copy.topology] = Transaction(server.broker.limits, 0)
                    transaction.atomic = False
                self._publish(transaction, copy)
        for transaction in transactions.values():
            if transaction:
                server.commits.submit(partial(_commit, transaction), _ignore)

    def _publish(self, transaction: Transaction, copy: _Copy) -> None:
        exchanges = copy.topology.exchanges
        trace, source = exchanges.get(EXCHANGE), exchanges.get(copy.exchange)
        queues = trace.route(copy.routing_key, b"") if trace is not None else ()
        if not queues or source is None:
            return
        headers = {
            "exchange_name": copy.exchange,
            "routing_keys": [copy.original_key],
            "properties": _table(copy.properties),
            "node": self._node,
            **copy.headers,
        }
        if copy.published:
            headers["routed_queues"] = [
                queue.name for queue in source.route(copy.original_key, copy.properties)
            ]
        try:
            properties = Properties(headers=headers, delivery_mode=1).encode()
        except LocalProtocolError:  # too deep for one more table around them
            properties = Properties(
                headers={**headers, "properties": copy.properties}, delivery_mode=1
            ).encode()
        transaction.publish(Message(copy.body, copy.routing_key, EXCHANGE, properties), queues, False)


def _table(properties: bytes) -> dict[str, object]:
    """The properties that are set, by name."""
    try:
        decoded = Properties.decode(properties)
    except RemoteProtocolError:
        return {"damaged": properties}
    found = {name: getattr(decoded, name) for name in NAMES}
    if found["timestamp"] is not None:
        found["timestamp"] = Timestamp(found["timestamp"])
    return {
        name: value for name, value in found.items() if value is not None and (name != "headers" or value)
    }


def _commit(transaction: Transaction, state: BrokerState, change: Change, now_us: int) -> None:
    state.transactions.commit(change, transaction, now_us)


def _ignore(_answer: object, _error: BaseException | None) -> None:
    """If the broker has stopped, callers that wait for an answer get the error."""
