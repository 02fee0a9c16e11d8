"""Exchanges, queues and bindings: declaring, binding, deleting, and automatic deletion (auto-delete,
x-expires).

Not here: messages. Every operation checks first, then changes memory and fills the change; codes and texts
are RabbitMQ's.
Invariant: every durable queue, durable exchange and binding between two durable ones has a record; nothing
else has. An auto-delete exchange that has had a binding since the broker started has one now.
"""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

from broker_core.address import VHOST
from broker_core.broker.arguments import (
    EXCHANGE_ARGUMENTS,
    check_arguments,
    check_binding,
    check_exchange_arguments,
    check_known,
    check_text,
    inequivalent,
    inequivalent_arguments,
)
from broker_core.broker.queue import Queue
from broker_core.broker.queue.tally import Tally
from broker_core.broker.routing.carbon_copy import Copies
from broker_core.broker.routing.exchange import (
    EXCHANGE_TYPES,
    Binding,
    DefaultExchange,
    Destination,
    Exchange,
    Queues,
    check_type,
)
from broker_core.broker.routing.routing import FREE, Held, Routed, find_exchange, route_column
from broker_core.broker.state.block import Blocks
from broker_core.broker.state.change import ANY, Change
from broker_core.broker.state.numbers import Numbers
from broker_core.broker.state.records import (
    BindingRecord,
    ExchangeBindingRecord,
    ExchangeRecord,
    HoleRecord,
    ProgressRecord,
    QueueRecord,
)
from broker_core.broker.topology import refusals
from broker_core.broker.topology.registry import Registry
from broker_core.errors import (
    AccessRefused,
    PreconditionFailed,
)
from broker_core.ids import CommitSequence, QueueId

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
_EACH = 64  # the records of so many bindings are dropped one by one; the catalog looks for those of more


class Topology:
    """The names of one virtual host."""

    def __init__(
        self, blocks: Blocks, numbers: Numbers, vhost: str = VHOST, registry: Registry | None = None
    ) -> None:
        self._undo = blocks.undo
        self._blocks = blocks
        self._numbers = numbers
        self._registry = registry = Registry(self._undo) if registry is None else registry
        self.vhost = vhost
        self.deleted = False
        self.max_queues = self.max_messages = -1
        self.tally = Tally(self._undo)  # of the messages in ``queues``
        self.bound = Tally(self._undo)  # of the bytes of bindings
        self.queues: dict[str, Queue] = {}
        self.queues_by_id = registry.by_id  # of all virtual hosts
        self.exchanges: dict[str, Exchange] = {"": DefaultExchange(self.queues)}
        # auto-delete queues without their last consumer: the shell deletes them
        self.abandoned: list[Queue] = []
        # exchange name -> exchanges with this alternate exchange
        self._alternates: dict[str, dict[Exchange, None]] = {}
        self._leased: dict[Queue, None] = {}  # with x-expires
        self._exclusive: dict[object, dict[Queue, None]] = {}  # by connection
        for name, kind in PREDECLARED.items():
            self.add_exchange(EXCHANGE_TYPES[kind](name, internal=name == TRACE_EXCHANGE, undo=self._undo))

    # -- looking up ------------------------------------------------------------------------------------------
    def queue(self, name: str) -> Queue:
        """Returns a queue. Raises QueueNotFound."""
        queue = self.queues.get(name)
        if queue is None:
            raise refusals.no_queue(name, self.vhost)
        return queue

    def exchange(self, name: str) -> Exchange:
        """Returns an exchange that a client may inspect or bind. Raises AccessRefused (the default exchange),
        ExchangeNotFound.
        """
        if name == "":
            raise refusals.default_exchange()
        exchange = self.exchanges.get(name)
        if exchange is None:
            raise refusals.no_exchange(name, self.vhost)
        return exchange

    def route(self, exchange: str, routing_key: str, properties: bytes = b"") -> Queues:
        """Returns the queues of one message. Raises ExchangeNotFound, AccessRefused (internal exchange)."""
        return find_exchange(self.exchanges, exchange, self.vhost).route(routing_key, properties)

    def route_copies(self, exchange: str, routing_key: str, properties: bytes) -> tuple[Queues, bytes]:
        """Like ``route``, by the keys under CC and BCC too. Returns the properties to deliver as well. Raises
        PreconditionFailed.
        """
        return find_exchange(self.exchanges, exchange, self.vhost).route_copies(routing_key, properties)

    def route_column(self, exchange: str | pa.Array, routing_keys: pa.Array, properties: pa.Array) -> Routed:
        """Returns the queues of many messages, by their own keys. Each distinct key is routed once."""
        return route_column(self.exchanges, exchange, routing_keys, properties, self.vhost)

    def route_block(self, block: pa.RecordBatch, copies: Copies | None = None, held: Held = FREE) -> Routed:
        """Returns the queues of every row of a block of MESSAGE_SCHEMA. ``copies``: ``copies_of_rows``."""
        columns = block.column("exchange"), block.column("routing_key"), block.column("properties")
        return route_column(self.exchanges, *columns, self.vhost, copies, held)

    def shared(self, name: str, connection: object = None) -> Queue:
        """Returns a queue that a connection may see, or calls without one. Raises QueueNotFound (also for
        direct replies), ResourceLocked (exclusive).
        """
        queue = self.queue(name)
        if queue.replies:
            raise refusals.no_queue(name, self.vhost)
        refusals.check_exclusive(queue, connection)
        return queue

    def visible_to(self, name: str, connection: object) -> Queue:
        """Returns a queue. Raises QueueNotFound, ResourceLocked (exclusive to another connection)."""
        queue = self.queue(name)
        if not queue.replies:
            refusals.check_exclusive(queue, connection)
        return queue

    def usable(self, name: str, connection: object = None) -> Queue:
        """Returns a queue that a channel may consume, get from, purge or delete. Raises QueueNotFound,
        ResourceLocked.
        """
        queue = self.shared(name, connection)
        if queue.owner:
            raise refusals.owned(queue)
        return queue

    def purgeable(self, name: str, connection: object = None) -> Queue:
        """Returns a queue that a channel may purge, also one of an app, of what that app skipped. Raises
        QueueNotFound, ResourceLocked.
        """
        queue = self.queue(name)
        return queue if queue.progress.skipped() else self.usable(name, connection)

    def queue_counts(self, name: str) -> tuple[int, int]:
        """Returns how many messages are ready, and how many consumers. Raises QueueNotFound."""
        queue = self.queue(name)
        return queue.messages - queue.unacknowledged, len(queue.consumers)

    def exclusive_queues(self, connection: object) -> list[Queue]:
        """Returns the queues that end with the connection."""
        return list(self._exclusive.get(connection, ()))

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
    ) -> Exchange:
        """Declares an exchange. Raises CommandInvalid (unknown type), AccessRefused (reserved names),
        PreconditionFailed (other properties, wrong argument).
        """
        check_type(type)
        if name == "":
            raise refusals.default_exchange()
        self.require_there()
        arguments, of = dict(arguments or {}), f"exchange '{name}' in vhost '{self.vhost}'"
        existing = self.exchanges.get(name)
        if existing is not None:
            wanted = {"type": type, "durable": durable, "auto_delete": auto_delete, "internal": internal}
            inequivalent(of, wanted, {key: getattr(existing, key) for key in wanted})
            inequivalent_arguments(of, arguments, existing.arguments, EXCHANGE_ARGUMENTS)
            check_exchange_arguments(of, arguments)
            return existing
        check_text("the name of an exchange", name)
        if name.startswith(_RESERVED):
            raise AccessRefused(f"exchange name '{name}' contains reserved prefix 'amq.*'")
        check_exchange_arguments(of, arguments)
        alternate = str(arguments.get("alternate-exchange"))
        refusals.check_sources(self._alternates.get(alternate, ()), f"exchange '{alternate}'")
        exchange = EXCHANGE_TYPES[type](
            name,
            durable=durable,
            auto_delete=auto_delete,
            internal=internal,
            arguments=arguments,
            undo=self._undo,
        )
        self.add_exchange(exchange)
        if durable:
            change.put(ExchangeRecord(name, type, durable, auto_delete, internal, arguments, self.vhost))
        return exchange

    def add_exchange(self, exchange: Exchange) -> None:
        self._undo.item(self.exchanges, exchange.name)
        self.exchanges[exchange.name] = exchange
        exchange.room, exchange.stale_bindings = self._registry.routes, self._registry.stale_bindings
        alternate = exchange.arguments.get("alternate-exchange")
        if isinstance(alternate, str):
            self._undo.enter(self._alternates, alternate, exchange)
            exchange.divert(self.exchanges.get(alternate))
        for other in self._alternates.get(exchange.name, ()):
            other.divert(exchange)

    def delete_exchange(self, change: Change, name: str, *, if_unused: bool = False) -> None:
        """Deletes an exchange, if it exists. Raises AccessRefused (reserved names), PreconditionFailed (it
        has bindings to others).
        """
        if name == "":
            raise refusals.default_exchange()
        if name.startswith(_RESERVED):
            raise refusals.system_exchange(name, self.vhost)
        exchange = self.exchanges.get(name)
        if exchange is None:
            return
        if if_unused and exchange.bound:
            bound = f"it has {exchange.size} bindings"
            raise PreconditionFailed(f"exchange '{name}' in vhost '{self.vhost}' in use", bound)
        self._remove_exchanges(change, [exchange])

    def _remove_exchanges(self, change: Change, pending: list[Exchange]) -> None:
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
                self._drop_bindings(change, exchange, exchange.bindings)
            elif exchange.durable:
                for kind in (BindingRecord, ExchangeBindingRecord):
                    change.drop(kind, (exchange.name, ANY, ANY, ANY, self.vhost))
            self.bound.add(-exchange.size_bytes)
            exchange.leave()
            pending += self._unbind_everywhere(change, exchange)
            exchange.divert(None)
            alternate = exchange.arguments.get("alternate-exchange")
            if isinstance(alternate, str):
                self._undo.leave(self._alternates, alternate, exchange)
            for other in self._alternates.get(exchange.name, ()):
                other.divert(None)
            if exchange.durable:
                change.drop(ExchangeRecord, (exchange.name, self.vhost))

    def _unbind_everywhere(self, change: Change, destination: Destination) -> list[Exchange]:
        """Drops the bindings to a deleted destination. Returns the auto-delete exchanges that have none
        left.
        """
        sources = list(destination.upstream)
        self.bound.add(-sum(source.bytes_of(destination) for source in sources))
        gone = {source: source.unbind_all(destination) for source in sources}
        kind = BindingRecord if isinstance(destination, Queue) else ExchangeBindingRecord
        if len(gone) > _EACH:
            change.drop(kind, (ANY, destination.name, ANY, ANY, self.vhost))
        else:
            for source, bindings in gone.items():
                if len(bindings) <= _EACH:
                    self._drop_bindings(change, source, bindings)
                elif _is_written(source, destination):
                    change.drop(kind, (source.name, destination.name, ANY, ANY, self.vhost))
        return [source for source, found in gone.items() if found and source.auto_delete and not source.bound]

    # -- queues ----------------------------------------------------------------------------------------------
    def declare_queue(
        self,
        change: Change,
        name: str,
        *,
        durable: bool = True,
        exclusive: bool = False,
        auto_delete: bool = False,
        arguments: dict[str, object] | None = None,
        connection: object = None,
    ) -> Queue:
        """Declares a queue. Raises PreconditionFailed (other properties, wrong or unknown argument),
        ResourceLocked (another connection's).
        """
        self.require_there()
        arguments, of = dict(arguments or {}), f"queue '{name}' in vhost '{self.vhost}'"
        existing = self.queues.get(name)
        if existing is not None:
            if existing.exclusive != exclusive or (exclusive and existing.connection is not connection):
                raise refusals.locked(existing)
            wanted = {"durable": durable and not exclusive, "auto_delete": auto_delete}
            inequivalent(of, wanted, {key: getattr(existing, key) for key in wanted})
            inequivalent_arguments(of, arguments, existing.arguments.declared)
            check_known(of, arguments)
            return existing
        check_text("the name of a queue", name)
        refusals.check_room(self.queues.values(), name, self.vhost, self.max_queues)
        check_arguments(of, arguments, durable=durable, exclusive=exclusive, auto_delete=auto_delete)
        # the commit sequence never decreases, even over restarts (state/numbers.py), so an id from it is
        # never reused
        change.sequence = change.sequence or self._numbers.next_sequence()
        queue_id = QueueId(max(change.sequence, self._registry.last_id + 1))
        self._numbers.sequence = change.sequence = CommitSequence(queue_id)
        # an exclusive queue ends with its connection, so a restart does not restore it
        durable = durable and not exclusive
        queue = Queue(
            queue_id,
            name,
            self._blocks,
            durable=durable,
            exclusive=exclusive,
            auto_delete=auto_delete,
            arguments=arguments,
            vhost=self.vhost,
            tally=self.tally,
        )
        if exclusive:
            queue.connection = connection
            self._undo.enter(self._exclusive, connection, queue)
        self.add_queue(queue)
        if queue.written:
            declared = queue.arguments.declared
            change.put(QueueRecord(queue_id, name, durable, exclusive, auto_delete, declared, self.vhost))
        return queue

    def add_queue(self, queue: Queue) -> None:
        self._undo.item(self.queues, queue.name)
        self._undo.item(self.queues_by_id, queue.queue_id)
        self._undo.item(self._leased, queue)
        self.queues[queue.name] = queue
        self.queues_by_id[queue.queue_id] = queue
        self._registry.last_id = max(self._registry.last_id, queue.queue_id)
        self.exchanges[""].changed()
        if queue.arguments.expires_ms is not None:
            self._leased[queue] = None

    def touch(self, queue: Queue, now: int) -> None:
        """Records that the queue is used (declared, consumed or got from) at ``now``, in microseconds since
        the epoch. Its x-expires starts again.
        """
        queue.marks.used_at_us = now

    def unused_queues(self, now: int) -> list[Queue]:
        """Returns the queues whose x-expires is over, for ``delete_unused``. A queue with consumers or an
        owner, or checked for the first time, is not due.
        """
        due: list[Queue] = []
        for queue in self._leased:
            if queue.consumers or queue.owner:
                queue.marks.used_at_us = 0  # the time starts when they have left
            elif not queue.marks.used_at_us:
                queue.marks.used_at_us = now
            elif queue.marks.used_at_us + (queue.arguments.expires_ms or 0) * 1000 <= now:
                due.append(queue)
        return due

    def delete_queue(
        self,
        change: Change,
        name: str,
        *,
        if_unused: bool = False,
        if_empty: bool = False,
        connection: object = None,
    ) -> int:
        """Deletes a queue and returns how many ready messages it had; 0 if it does not exist. Raises
        ResourceLocked, PreconditionFailed.

        Its consumers are added to ``cancelled``.
        """
        if name not in self.queues or self.queues[name].replies:
            return 0
        queue = self.usable(name, connection)
        messages, consumers = self.queue_counts(name)
        if if_unused and consumers:
            raise PreconditionFailed(f"{queue.full_name} in use", f"it has {consumers} consumers")
        if if_empty and messages:
            raise PreconditionFailed(f"{queue.full_name} not empty", f"it holds {messages} messages")
        self._remove_queue(change, queue)
        return messages

    def delete_unused(self, change: Change, queues: Iterable[Queue]) -> None:
        """Deletes those that still have no consumers and no owner: they expired, or lost their last consumer
        (auto-delete).
        """
        for queue in queues:
            if not (queue.deleted or queue.consumers or queue.owner):
                self._remove_queue(change, queue)

    def delete_abandoned(self, change: Change) -> None:
        """Deletes auto-delete queues that lost their last consumer. One that an app owns, or that is consumed
        again, is kept.
        """
        self._undo.attribute(self, "abandoned")
        abandoned, self.abandoned = self.abandoned, []
        self.delete_unused(change, abandoned)

    def _remove_queue(self, change: Change, queue: Queue) -> None:
        self._undo.item(self.queues, queue.name)
        self._undo.item(self.queues_by_id, queue.queue_id)
        self._undo.item(self._leased, queue)
        self._undo.attribute(queue, "deleted")
        del self.queues[queue.name], self.queues_by_id[queue.queue_id]
        queue.deleted = True
        self.exchanges[""].changed()
        self._leased.pop(queue, None)
        if queue.exclusive:
            self._undo.leave(self._exclusive, queue.connection, queue)
        queue.leave(self._undo)
        self._remove_exchanges(change, self._unbind_everywhere(change, queue))
        self._forget_messages(change, queue)
        if queue.written:
            change.drop(QueueRecord, (queue.queue_id,))

    def _forget_messages(self, change: Change, queue: Queue) -> None:
        """Drops what a deleted queue had, and adds its consumers to ``cancelled``."""
        self._undo.growth(self._registry.cancelled)
        self._registry.cancelled += queue.consumers.clear(self._undo)
        holes = queue.progress.holes.total
        queue.forget_runs()
        queue.record(change)
        if queue.written:
            if holes:
                change.drop(HoleRecord, (queue.queue_id, ANY))
            change.drop(ProgressRecord, (queue.queue_id,))

    # -- bindings --------------------------------------------------------------------------------------------
    def bind(
        self,
        change: Change,
        queue: str,
        exchange: str,
        routing_key: str = "",
        arguments: dict[str, object] | None = None,
        *,
        connection: object = None,
    ) -> None:
        """Binds a queue; it may be repeated.

        Raises AccessRefused (default exchange), ExchangeNotFound, QueueNotFound, ResourceLocked,
        PreconditionFailed (arguments).
        """
        source = self.exchange(exchange)
        self._bind(change, source, self.visible_to(queue, connection), routing_key, arguments or {})

    def bind_exchange(
        self,
        change: Change,
        destination: str,
        source: str,
        routing_key: str = "",
        arguments: dict[str, object] | None = None,
    ) -> None:
        """Routes messages that match in ``source`` on to ``destination``; cycles are allowed.

        Raises AccessRefused (default exchange), ExchangeNotFound, PreconditionFailed (arguments).
        """
        if destination == "":
            raise refusals.default_exchange()
        found = self.exchange(source)
        self._bind(change, found, self.exchange(destination), routing_key, arguments or {})

    def _bind(
        self,
        change: Change,
        source: Exchange,
        target: Destination,
        routing_key: str,
        arguments: dict[str, object],
    ) -> None:
        check_text("a routing key", routing_key)
        if isinstance(target, Queue) and target.replies:
            raise refusals.no_queue(target.name, self.vhost)
        kind = "queue" if isinstance(target, Queue) else "exchange"
        check_binding(f"{kind} '{target.name}' in vhost '{self.vhost}'", arguments)
        if not source.is_bound(target, routing_key, arguments):
            sources = () if source in target.upstream else target.upstream
            refusals.check_bindings(self.bound.total, sources, f"{kind} '{target.name}'", self.vhost)
        before = source.bytes_of(target)
        new = source.bind(target, routing_key, arguments)
        self.bound.add(source.bytes_of(target) - before)
        if new and _is_written(source, target):
            of = BindingRecord if isinstance(target, Queue) else ExchangeBindingRecord
            change.put(of(source.name, target.name, routing_key, arguments, self.vhost))

    def unbind(
        self,
        change: Change,
        queue: str,
        exchange: str,
        routing_key: str = "",
        arguments: dict[str, object] | None = None,
        *,
        connection: object = None,
    ) -> None:
        """Removes a binding, if it exists. Raises AccessRefused (default exchange), ResourceLocked."""
        if exchange == "":
            raise refusals.default_exchange()
        source, target = self.exchanges.get(exchange), self.queues.get(queue)
        if (
            source is not None
            and target is not None
            and source.is_bound(target, routing_key, arguments or {})
        ):
            refusals.check_exclusive(target, connection)
            self._unbind(change, source, target, routing_key, arguments or {})

    def unbind_exchange(
        self,
        change: Change,
        destination: str,
        source: str,
        routing_key: str = "",
        arguments: dict[str, object] | None = None,
    ) -> None:
        """Like ``unbind``."""
        if "" in (destination, source):
            raise refusals.default_exchange()
        found, target = self.exchanges.get(source), self.exchanges.get(destination)
        if found is not None and target is not None:
            self._unbind(change, found, target, routing_key, arguments or {})

    def _unbind(
        self,
        change: Change,
        source: Exchange,
        target: Destination,
        routing_key: str,
        arguments: dict[str, object],
    ) -> None:
        before = source.bytes_of(target)
        if source.unbind(target, routing_key, arguments):
            self.bound.add(source.bytes_of(target) - before)
            self._drop_bindings(change, source, [Binding(target, routing_key, arguments)])
            if source.auto_delete and not source.bound:
                self._remove_exchanges(change, [source])

    def _drop_bindings(self, change: Change, source: Exchange, bindings: Iterable[Binding]) -> None:
        for target, routing_key, arguments in bindings:
            if _is_written(source, target):
                kind = BindingRecord if isinstance(target, Queue) else ExchangeBindingRecord
                change.drop(kind, (source.name, target.name, routing_key, arguments, self.vhost))

    # -- the virtual host ------------------------------------------------------------------------------------
    def require_there(self) -> None:
        """Raises NotAllowed once the virtual host is deleted: late work of its clients makes nothing."""
        if self.deleted:
            raise refusals.no_vhost(self.vhost)

    def delete_all(self, change: Change) -> None:
        """Deletes the virtual host's names at once, also those in use. Its queues are ``ending`` then."""
        for name in ("deleted", "exchanges", "queues", "abandoned", "_leased", "_exclusive", "_alternates"):
            self._undo.attribute(self, name)
        queues, by_id = list(self.queues.values()), self.queues_by_id
        self._undo.append((_restore_queues, by_id, queues))
        self._undo.growth(self._registry.ending)
        self._registry.ending += queues
        for queue in queues:
            queue.deleted = True
            by_id.pop(queue.queue_id, None)
            if queue.written:
                change.drop(QueueRecord, (queue.queue_id,))
        for exchange in self.exchanges.values():
            exchange.forget_routes()
        change.drop(ExchangeRecord, (ANY, self.vhost))
        for kind in (BindingRecord, ExchangeBindingRecord):
            change.drop(kind, (ANY, ANY, ANY, ANY, self.vhost))
        self.queues, self._leased, self._exclusive, self._alternates = {}, {}, {}, {}
        self.exchanges = {"": DefaultExchange(self.queues)}
        self.abandoned = []
        self.deleted = True

    def end_some(self, change: Change, count: int) -> bool:
        """Forgets the messages of so many queues of deleted virtual hosts. Returns whether others are left;
        after a crash, nothing names what they had.
        """
        ending = self._registry.ending
        some = ending[-count:]
        self._undo.append((ending.extend, some))
        del ending[-count:]
        for queue in some:
            self._forget_messages(change, queue)
        return bool(ending)


def _restore_queues(by_id: dict[QueueId, Queue], queues: Iterable[Queue]) -> None:
    for queue in queues:
        queue.deleted = False
        by_id[queue.queue_id] = queue


def _is_written(source: Exchange, target: Destination) -> bool:
    return source.durable and (target.written if isinstance(target, Queue) else target.durable)
