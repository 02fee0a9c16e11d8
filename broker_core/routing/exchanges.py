"""Exchanges and bindings of one virtual host, whatever its queues are: declaring, binding, deleting, and
automatic deletion of exchanges (auto-delete).

Not here: queues (``broker/topology/topology.py``; on Kafka a topic is one), messages. Every operation checks
first, then changes memory and fills the change; codes and texts are RabbitMQ's.
Invariant: every durable exchange and binding between two durable ones has a record; nothing else has. An
auto-delete exchange that has had a binding since the broker started has one now.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic

import pyarrow as pa

from broker_core.core.address import VHOST
from broker_core.core.change import ANY, Change
from broker_core.core.errors import AccessRefused
from broker_core.core.ids import QueueId
from broker_core.core.records import BindingRecord, ExchangeBindingRecord, ExchangeRecord
from broker_core.core.undo import Tally, Undo
from broker_core.message.arguments import (
    check_binding,
    check_exchange_arguments,
    check_text,
    inequivalent,
    inequivalent_arguments,
)
from broker_core.routing import refusals
from broker_core.routing.carbon_copy import Copies
from broker_core.routing.column import FREE, Lock, Routed, find_exchange, route_column
from broker_core.routing.exchange import Binding, DefaultExchange, Exchange, Q
from broker_core.routing.exchange_types import EXCHANGE_TYPES, check_type, compared_arguments, id_bytes
from broker_core.routing.memory import NamesMemory, bytes_of
from broker_core.routing.route_cache import RouteCacheBudget
from broker_core.routing.stale_bindings import StaleBindings

TRACE_EXCHANGE = "amq.rabbitmq.trace"
PREDECLARED = {
    "amq.direct": "direct",
    "amq.fanout": "fanout",
    "amq.topic": "topic",
    "amq.headers": "headers",
    "amq.match": "headers",
    TRACE_EXCHANGE: "topic",
}
_RESERVED = "amq."
Table = dict[str, object] | None
_EACH = 64  # the records of so many bindings are dropped one by one; the catalog looks for those of more


class Alternates(Generic[Q]):
    """Which exchange gets what another one has no queue for (alternate-exchange)."""

    def __init__(self, undo: Undo, exchanges: dict[str, Exchange[Q]]) -> None:
        self._undo = undo
        self._exchanges = exchanges
        self.chosen: dict[Exchange[Q], str] = {}
        self._by_name: dict[str, dict[Exchange[Q], None]] = {}  # the same, by the alternate exchange

    def choose(self, exchange: Exchange[Q], alternate: object) -> None:
        """Sets the alternate exchange; no text: none. Raises PreconditionFailed: too many have that one."""
        before = self.chosen.get(exchange)
        if before == alternate:
            return
        self._undo.item(self.chosen, exchange)
        if before is not None:
            self._undo.leave(self._by_name, self.chosen.pop(exchange), exchange)
            exchange.divert(None)
        if isinstance(alternate, str):
            refusals.check_sources(self._by_name.get(alternate, ()), f"exchange '{alternate}'")
            self.chosen[exchange] = alternate
            self._undo.enter(self._by_name, alternate, exchange)
            exchange.divert(self._exchanges.get(alternate))

    def change(self, name: str, exchange: Exchange[Q] | None) -> None:
        """The exchange of this name is made, or deleted."""
        for other in self._by_name.get(name, ()):
            other.divert(exchange)


class Exchanges(Generic[Q]):
    """``routes``, ``stale_bindings`` and ``everywhere``: those that several virtual hosts share; None: its
    own. ``strict``: it refuses arguments without effect.
    """

    def __init__(
        self,
        undo: Undo,
        vhost: str = VHOST,
        routes: RouteCacheBudget | None = None,
        stale_bindings: StaleBindings | None = None,
        queues_by_id: dict[QueueId, Q] | None = None,
        everywhere: Tally | None = None,
    ) -> None:
        self._undo = undo
        self.routes = RouteCacheBudget() if routes is None else routes
        self._stale_bindings = StaleBindings(undo) if stale_bindings is None else stale_bindings
        self.vhost = vhost
        self.deleted = self.strict = False
        self.memory = NamesMemory(undo, vhost, everywhere)
        self.queues: dict[str, Q] = {}
        self.queues_by_id: dict[QueueId, Q] = {} if queues_by_id is None else queues_by_id
        self.exchanges: dict[str, Exchange[Q]] = {"": DefaultExchange(self.queues)}
        self.alternates = Alternates(undo, self.exchanges)
        for name, kind in PREDECLARED.items():
            self.add_exchange(EXCHANGE_TYPES[kind](name, internal=name == TRACE_EXCHANGE, undo=undo))

    # -- looking up ------------------------------------------------------------------------------------------
    def queue(self, name: str) -> Q:
        """Returns a queue. Raises QueueNotFound."""
        queue = self.queues.get(name)
        if queue is None:
            raise refusals.no_queue(name, self.vhost)
        return queue

    def add_queue(self, queue: Q) -> None:
        self._undo.item(self.queues, queue.name)
        self._undo.item(self.queues_by_id, queue.queue_id)
        self.queues[queue.name] = queue
        self.queues_by_id[queue.queue_id] = queue
        self.exchanges[""].cache.change()

    def exchange(self, name: str) -> Exchange[Q]:
        """Returns an exchange that a client may inspect or bind. Raises AccessRefused (the default exchange),
        ExchangeNotFound.
        """
        refusals.check_not_default(name)
        exchange = self.exchanges.get(name)
        if exchange is None:
            raise refusals.no_exchange(name, self.vhost)
        return exchange

    def route(self, exchange: str, routing_key: str, properties: bytes = b"") -> tuple[Q, ...]:
        """Returns the queues of one message. Raises ExchangeNotFound, AccessRefused (internal exchange)."""
        return find_exchange(self.exchanges, exchange, self.vhost).route(routing_key, properties)

    def route_copies(self, exchange: str, routing_key: str, properties: bytes) -> tuple[tuple[Q, ...], bytes]:
        """Like ``route``, by the keys under CC and BCC too. Returns the properties to deliver as well. Raises
        PreconditionFailed.
        """
        return find_exchange(self.exchanges, exchange, self.vhost).route_copies(routing_key, properties)

    def route_column(self, exchange: str | pa.Array, routing_keys: pa.Array, properties: pa.Array) -> Routed:
        """Returns the queues of many messages, by their own keys. Each distinct key is routed once."""
        return route_column(self.exchanges, exchange, routing_keys, properties, self.vhost)

    def route_block(self, block: pa.RecordBatch, copies: Copies | None, lock: Lock = FREE) -> Routed:
        """Returns the queues of every row of a block of MESSAGE_SCHEMA. ``copies``: ``copies_of_rows``."""
        columns = block.column("exchange"), block.column("routing_key"), block.column("properties")
        return route_column(self.exchanges, *columns, self.vhost, copies, lock)

    def require_there(self) -> None:
        """Raises NotAllowed once the virtual host is deleted: late work of its clients makes nothing."""
        if self.deleted:
            raise refusals.no_vhost(self.vhost)

    # -- exchanges -------------------------------------------------------------------------------------------
    def declare_exchange(
        self,
        change: Change,
        name: str,
        type: str = "direct",
        *,
        durable: bool = True,
        auto_delete: bool = False,
        internal: bool = False,
        arguments: dict[str, object] | None = None,
    ) -> Exchange[Q]:
        """Declares an exchange. Raises CommandInvalid (unknown type), AccessRefused (reserved names),
        PreconditionFailed (other properties, wrong argument).
        """
        check_type(type, None if name in self.exchanges else arguments or {})
        refusals.check_not_default(name)
        self.require_there()
        arguments, of = dict(arguments or {}), f"exchange '{name}' in vhost '{self.vhost}'"
        existing = self.exchanges.get(name)
        if existing is not None:
            properties = {"type": type, "durable": durable, "auto_delete": auto_delete, "internal": internal}
            inequivalent(of, properties, {key: getattr(existing, key) for key in properties})
            inequivalent_arguments(of, arguments, existing.arguments, compared_arguments(existing))
            check_exchange_arguments(of, arguments, strict=self.strict)
            return self._ready(change, existing)
        check_text("the name of an exchange", name)
        if name.startswith(_RESERVED):
            raise AccessRefused(f"exchange name '{name}' contains reserved prefix 'amq.*'")
        check_exchange_arguments(of, arguments, strict=self.strict)
        self.memory.check(f"cannot declare exchange '{name}'", id_bytes(type, arguments))
        flags = {"durable": durable, "auto_delete": auto_delete, "internal": internal}
        exchange = EXCHANGE_TYPES[type](name, **flags, arguments=arguments, undo=self._undo)
        self.add_exchange(exchange)
        if durable:
            change.put(ExchangeRecord(name, type, durable, auto_delete, internal, arguments, self.vhost))
        return self._ready(change, exchange)

    def _ready(self, _change: Change, exchange: Exchange[Q]) -> Exchange[Q]:
        return exchange  # a broker gives it what it needs beside itself

    def add_exchange(self, exchange: Exchange[Q]) -> None:
        self._undo.item(self.exchanges, exchange.name)
        self.exchanges[exchange.name] = exchange
        self.memory.add(bytes_of(exchange.name, exchange.arguments))
        exchange.cache.budget, exchange.stale_bindings = self.routes, self._stale_bindings
        self.alternates.choose(exchange, self.alternate_of(exchange))
        self.alternates.change(exchange.name, exchange)

    def alternate_of(self, exchange: Exchange[Q]) -> object:
        return exchange.arguments.get("alternate-exchange")

    def delete_exchange(self, change: Change, name: str, *, if_unused: bool = False) -> None:
        """Deletes an exchange, if it exists. Raises AccessRefused (reserved names), PreconditionFailed (it
        has bindings to others).
        """
        refusals.check_not_default(name)
        if name.startswith(_RESERVED):
            raise refusals.system_exchange(name, self.vhost)
        exchange = self.exchanges.get(name)
        if exchange is None:
            return
        if if_unused and exchange.bound:
            raise refusals.in_use(name, self.vhost, exchange.size)
        self._remove_exchanges(change, [exchange])

    def _remove_exchanges(self, change: Change, pending: list[Exchange[Q]]) -> None:
        """Removes exchanges, and the auto-delete exchanges that lose their last binding by that."""
        while pending:
            exchange = pending.pop()
            if self.exchanges.get(exchange.name) is not exchange:
                continue
            self._undo.item(self.exchanges, exchange.name)
            del self.exchanges[exchange.name]
            self._undo.attribute(exchange, "deleted")
            exchange.deleted = True
            if exchange.size <= _EACH:
                _drop_bindings(change, self.vhost, exchange, exchange.bindings)
            elif exchange.durable:
                for kind in (BindingRecord, ExchangeBindingRecord):
                    change.drop(kind, (exchange.name, ANY, ANY, ANY, self.vhost))
            self.memory.add(-exchange.size_bytes - bytes_of(exchange.name, exchange.arguments))
            exchange.leave()
            pending += self._unbind_everywhere(change, exchange)
            self.alternates.choose(exchange, None)
            self.alternates.change(exchange.name, None)
            if exchange.durable:
                change.drop(ExchangeRecord, (exchange.name, self.vhost))

    def _unbind_everywhere(self, change: Change, destination: Q | Exchange[Q]) -> list[Exchange[Q]]:
        """Drops the bindings to a deleted destination. Returns the auto-delete exchanges that have none
        left.
        """
        sources = list(destination.upstream)
        self.memory.add(-sum(source.bytes_of(destination) for source in sources))
        gone = {source: source.unbind_all(destination) for source in sources}
        kind = _record_of(destination)
        if len(gone) > _EACH:
            change.drop(kind, (ANY, destination.name, ANY, ANY, self.vhost))
        else:
            for source, bindings in gone.items():
                if len(bindings) <= _EACH:
                    _drop_bindings(change, self.vhost, source, bindings)
                elif _is_written(source, destination):
                    change.drop(kind, (source.name, destination.name, ANY, ANY, self.vhost))
        return [source for source, found in gone.items() if found and source.auto_delete and not source.bound]

    # -- bindings --------------------------------------------------------------------------------------------
    def bind(
        self, change: Change, queue: str, exchange: str, routing_key: str = "", arguments: Table = None
    ) -> None:
        """Binds a queue; it may be repeated. Raises AccessRefused (default exchange), ExchangeNotFound,
        QueueNotFound, PreconditionFailed (arguments).
        """
        source = self.exchange(exchange)
        self._bind(change, source, Binding(self.queue(queue), routing_key, arguments or {}))

    def unbind(
        self, change: Change, queue: str, exchange: str, routing_key: str = "", arguments: Table = None
    ) -> None:
        """Removes a binding, if it exists. Raises AccessRefused (default exchange)."""
        refusals.check_not_default(exchange)
        source, target = self.exchanges.get(exchange), self.queues.get(queue)
        if source is not None and target is not None:
            self._unbind(change, source, Binding(target, routing_key, arguments or {}))

    def bind_exchange(
        self, change: Change, destination: str, source: str, routing_key: str = "", arguments: Table = None
    ) -> None:
        """Routes messages that match in ``source`` on to ``destination``; cycles are allowed.

        Raises AccessRefused (default exchange), ExchangeNotFound, PreconditionFailed (arguments).
        """
        refusals.check_not_default(destination)
        found = self.exchange(source)
        self._bind(change, found, Binding(self.exchange(destination), routing_key, arguments or {}))

    def unbind_exchange(
        self, change: Change, destination: str, source: str, routing_key: str = "", arguments: Table = None
    ) -> None:
        """Like ``unbind``."""
        refusals.check_not_default(destination, source)
        found, target = self.exchanges.get(source), self.exchanges.get(destination)
        if found is not None and target is not None:
            check_binding(f"exchange '{destination}' in vhost '{self.vhost}'", arguments or {})
            self._unbind(change, found, Binding(target, routing_key, arguments or {}))

    def _bind(self, change: Change, source: Exchange[Q], binding: Binding) -> None:
        target, routing_key, arguments = binding
        check_text("a routing key", routing_key)
        kind = "queue" if _is_queue(target) else "exchange"
        check_binding(f"{kind} '{target.name}' in vhost '{self.vhost}'", arguments)
        if not source.is_bound(target, routing_key, arguments):
            sources = () if source in target.upstream else target.upstream
            self.memory.check(f"cannot bind {kind} '{target.name}'")
            refusals.check_sources(sources, f"{kind} '{target.name}'")
            refusals.check_destinations(source, target, self.vhost)
        before = source.bytes_of(target)
        new = source.bind(target, routing_key, arguments)
        self.memory.add(source.bytes_of(target) - before)
        if new and _is_written(source, target):
            change.put(_record_of(target)(source.name, target.name, routing_key, arguments, self.vhost))

    def _unbind(self, change: Change, source: Exchange[Q], binding: Binding) -> None:
        target = binding.destination
        before = source.bytes_of(target)
        if source.unbind(*binding):
            self.memory.add(source.bytes_of(target) - before)
            _drop_bindings(change, self.vhost, source, [binding])
            if source.auto_delete and not source.bound:
                self._remove_exchanges(change, [source])


def _is_queue(target: Q | Exchange[Q]) -> bool:
    return not isinstance(target, Exchange)


def _record_of(destination: Q | Exchange[Q]) -> type[BindingRecord] | type[ExchangeBindingRecord]:
    return BindingRecord if _is_queue(destination) else ExchangeBindingRecord


def _is_written(source: Exchange[Q], target: Q | Exchange[Q]) -> bool:
    return source.durable and (target.durable if isinstance(target, Exchange) else target.written)


def _drop_bindings(change: Change, vhost: str, source: Exchange[Q], bindings: Iterable[Binding]) -> None:
    for target, routing_key, arguments in bindings:
        if _is_written(source, target):
            key = source.name, target.name, routing_key, arguments, vhost
            change.drop(_record_of(target), key)
