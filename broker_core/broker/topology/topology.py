"""Queues of one virtual host: declaring, binding, deleting, and automatic deletion (auto-delete, x-expires).

Not here: exchanges and bindings (``routing/exchanges.py``), messages. Every operation checks first, then
changes memory and fills the change; codes and texts are RabbitMQ's.
Invariant: every durable queue has a record; nothing else has.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from broker_core.broker.queue import REPLIES, Queue
from broker_core.broker.topology import ownership
from broker_core.broker.topology.leases import Leases
from broker_core.broker.topology.policies import Policies, kind_of
from broker_core.broker.topology.registry import Registry
from broker_core.broker.topology.waiting_exchanges import WaitingExchanges
from broker_core.core.address import VHOST
from broker_core.core.block import Blocks
from broker_core.core.change import ANY, Change, Numbers
from broker_core.core.errors import PreconditionFailed
from broker_core.core.ids import QueueId
from broker_core.core.records import BindingRecord, ExchangeBindingRecord, ExchangeRecord, QueueRecord
from broker_core.core.undo import Tally
from broker_core.message.arguments import (
    check_arguments,
    check_binding,
    check_properties,
    check_text,
    inequivalent,
    inequivalent_arguments,
)
from broker_core.routing import refusals
from broker_core.routing.exchange import Binding, DefaultExchange, Exchange
from broker_core.routing.exchanges import PREDECLARED as PREDECLARED
from broker_core.routing.exchanges import TRACE_EXCHANGE as TRACE_EXCHANGE
from broker_core.routing.exchanges import Alternates
from broker_core.routing.memory import NamesMemory, bytes_of


class Topology(WaitingExchanges):
    """The names of one virtual host."""

    def __init__(
        self, blocks: Blocks, numbers: Numbers, vhost: str = VHOST, registry: Registry | None = None
    ) -> None:
        self._registry = registry = Registry(blocks.undo) if registry is None else registry
        # ``queues_by_id`` has those of all virtual hosts
        self.policies = Policies(blocks.undo, self)
        self.leases = Leases(blocks.undo)
        shared = registry.routes, registry.stale_bindings, registry.by_id, registry.memory
        super().__init__(blocks.undo, vhost, *shared)
        self._blocks = blocks
        self._numbers = numbers
        self.max_queues = self.max_messages = -1
        self.tally = Tally(self._undo)  # of the messages in ``queues``
        # auto-delete queues without their last consumer: the shell deletes them
        self.abandoned: list[Queue] = []
        self._exclusive: dict[object, dict[Queue, None]] = {}  # by connection

    # -- looking up ------------------------------------------------------------------------------------------
    def shared(self, name: str, connection: object = None) -> Queue:
        """Returns a queue that a connection may see, or calls without one. Raises QueueNotFound (also for
        direct replies), ResourceLocked (exclusive).
        """
        queue = self.queue(name)
        if queue.replies:
            raise refusals.no_queue(name, self.vhost)
        ownership.check_exclusive(queue, connection)
        return queue

    def visible_to(self, name: str, connection: object) -> Queue:
        """Returns a queue. Raises QueueNotFound, ResourceLocked (exclusive to another connection)."""
        queue = self.queue(name)
        if not queue.replies:
            ownership.check_exclusive(queue, connection)
        return queue

    def usable(self, name: str, connection: object = None) -> Queue:
        """Returns a queue that a channel may consume, get from, purge or delete. Raises QueueNotFound,
        ResourceLocked.
        """
        queue = self.shared(name, connection)
        if queue.owner:
            raise ownership.owned(queue)
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
                raise ownership.locked(existing)
            flags = {"durable": durable and not exclusive, "auto_delete": auto_delete}
            inequivalent(of, flags, {key: getattr(existing, key) for key in flags})
            inequivalent_arguments(of, arguments, existing.arguments.declared)
            check_arguments(of, arguments, strict=self.strict)
            return existing
        check_text("the name of a queue", name)
        _check_room(self.queues.values(), name, self.memory, self.max_queues)
        check_arguments(of, arguments, strict=self.strict)
        check_properties(of, arguments, durable, exclusive, auto_delete)
        queue_id = self._new_id(change)
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
            policy=self.policies.of(name, kind_of(arguments)),
            vhost=self.vhost,
            tally=self.tally,
        )
        if queue.arguments.id_bytes:
            self.memory.check(f"cannot declare queue '{name}'", queue.arguments.id_bytes)
        if exclusive:
            queue.connection = connection
            self._undo.enter(self._exclusive, connection, queue)
        self.add_queue(queue)
        if queue.written:
            change.put(QueueRecord(queue_id, name, durable, exclusive, auto_delete, arguments, self.vhost))
        return queue

    def add_queue(self, queue: Queue) -> None:
        self.memory.add(bytes_of(queue.name, queue.arguments.declared) + queue.arguments.id_bytes)
        super().add_queue(queue)
        self._registry.last_id = max(self._registry.last_id, queue.queue_id)
        self.leases.renew(queue)

    def alternate_of(self, exchange: Exchange[Queue]) -> object:
        return self.policies.alternate_of(exchange)

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
        del self.queues[queue.name]
        self.exchanges[""].cache.change()
        if queue.exclusive:
            self._undo.leave(self._exclusive, queue.connection, queue)
        self._end(change, queue)
        self.leases.renew(queue)

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
        target = self.visible_to(queue, connection)
        if target.replies:
            raise refusals.no_queue(queue, self.vhost)
        self._bind(change, source, Binding(target, routing_key, arguments or {}))

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
        source, target = self.exchanges.get(exchange) if exchange else None, self.queues.get(queue)
        if source is not None and target is not None:
            check_binding(f"queue '{queue}' in vhost '{self.vhost}'", arguments or {})
            if source.is_bound(target, routing_key, arguments or {}):
                ownership.check_exclusive(target, connection)
        super().unbind(change, queue, exchange, routing_key, arguments)

    # -- the virtual host ------------------------------------------------------------------------------------
    def delete_all(self, change: Change) -> None:
        """Deletes the virtual host's names at once, also those in use. Its queues are ``ending`` then."""
        for name in ("deleted", "exchanges", "queues", "abandoned", "_exclusive", "alternates"):
            self._undo.attribute(self, name)
        queues, by_id = self.every_queue(), self.queues_by_id
        self._undo.append((_restore_queues, by_id, queues))
        self._undo.growth(self._registry.ending)
        self._registry.ending += queues
        for queue in queues:
            queue.deleted = True
            by_id.pop(queue.queue_id, None)
            if queue.written:
                change.drop(QueueRecord, (queue.queue_id,))
        for exchange in self.exchanges.values():
            exchange.cache.clear()
        self.policies.delete_all(change)
        change.drop(ExchangeRecord, (ANY, self.vhost))
        for kind in (BindingRecord, ExchangeBindingRecord):
            change.drop(kind, (ANY, ANY, ANY, ANY, self.vhost))
        self.queues, self._exclusive = {}, {}
        self.leases.end_all()
        self.exchanges = {"": DefaultExchange(self.queues)}
        self.alternates = Alternates(self._undo, self.exchanges)
        self.memory.add(-self.memory.total)
        self.abandoned, self.deleted = [], True


def _restore_queues(by_id: dict[QueueId, Queue], queues: Iterable[Queue]) -> None:
    for queue in queues:
        queue.deleted = False
        by_id[queue.queue_id] = queue


def _check_room(queues: Collection[Queue], name: str, memory: NamesMemory, limit: int) -> None:
    """Raises PreconditionFailed if ``queues`` of a virtual host are as many as its limit (-1: none), or its
    memory is full.
    """
    if name.startswith(REPLIES):
        return
    memory.check(f"cannot declare queue '{name}'")
    if 0 <= limit <= len(queues) and sum(not queue.replies for queue in queues) >= limit:
        raise PreconditionFailed(
            f"cannot declare queue '{name}': queue limit in vhost '{memory.vhost}' ({limit}) is reached",
            "delete a queue, or raise the limit with `txmq vhost limit`",
        )
