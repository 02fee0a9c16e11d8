"""Exchanges, queues and bindings: declaring, binding, deleting.

Not here: messages. Every operation checks first, then changes memory and fills the change; texts follow RabbitMQ's.
Invariant: a durable queue, a durable exchange and a binding between two durable ones each have a record; nothing else has.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from broker_core.broker.arguments import check_arguments, check_binding, check_text, inequivalent, inequivalent_arguments
from broker_core.broker.batch import Batches
from broker_core.broker.change import Change
from broker_core.broker.exchange import EXCHANGE_TYPES, Binding, DefaultExchange, Exchange, Queues
from broker_core.broker.queue import Queue
from broker_core.broker.records import BindingRecord, ExchangeRecord, HoleRecord, ProgressRecord, QueueRecord
from broker_core.broker.routing import Routed, find_exchange, route_column
from broker_core.errors import AccessRefused, ExchangeNotFound, PreconditionFailed, QueueNotFound, ResourceLocked

_PREDECLARED = {"amq.direct": "direct", "amq.fanout": "fanout", "amq.topic": "topic", "amq.headers": "headers", "amq.match": "headers"}


class Topology:
    def __init__(self, batches: Batches) -> None:
        self.batches = batches
        self.queues: dict[str, Queue] = {}
        self.queues_by_id: dict[int, Queue] = {}
        self.exchanges: dict[str, Exchange] = {"": DefaultExchange(self.queues)}
        for name, kind in _PREDECLARED.items():
            self.exchanges[name] = EXCHANGE_TYPES[kind](name)
        self.sequence = 0

    def next_sequence(self) -> int:
        """The next commit sequence number. The caller puts it into its change."""
        self.sequence += 1
        return self.sequence

    # -- looking up -----------------------------------------------------------------------------------------------------
    def queue(self, name: str) -> Queue:
        """Raises QueueNotFound."""
        queue = self.queues.get(name)
        if queue is None:
            raise QueueNotFound(f"no queue '{name}' in vhost '/': declare it first")
        return queue

    def exchange(self, name: str) -> Exchange:
        """Raises ExchangeNotFound."""
        exchange = self.exchanges.get(name)
        if exchange is None:
            raise ExchangeNotFound(f"no exchange '{name}' in vhost '/': declare it first")
        return exchange

    def route(self, exchange: str, routing_key: str, properties: bytes = b"") -> Queues:
        """The queues of one message. Raises ExchangeNotFound, AccessRefused (internal exchange)."""
        return find_exchange(self.exchanges, exchange).route(routing_key, properties)

    def route_column(self, exchange: str | pa.Array, routing_keys: pa.Array, properties: pa.Array) -> Routed:
        """The queues of many messages, each distinct key routed once."""
        return route_column(self.exchanges, exchange, routing_keys, properties)

    def usable(self, name: str, connection: object = None) -> Queue:
        """A queue that a channel may get from, purge or delete. Raises QueueNotFound, ResourceLocked."""
        queue = self.queue(name)
        if queue.owner:
            raise ResourceLocked(
                f"queue '{name}' belongs to app '{queue.owner}': only its stream consumes it; "
                f"`txmq release {queue.owner} {name}` takes it from a pipeline that will not come back"
            )
        if queue.exclusive and queue.connection is not connection:
            raise ResourceLocked(f"cannot obtain exclusive access to locked queue '{name}' in vhost '/': it belongs to another connection")
        return queue

    # -- exchanges ------------------------------------------------------------------------------------------------------
    def declare_exchange(
        self,
        change: Change,
        name: str,
        type: str = "direct",
        *,
        durable: bool = True,
        auto_delete: bool = False,
        internal: bool = False,
        arguments: dict[str, Any] | None = None,
    ) -> Exchange:
        """Raises PreconditionFailed (other properties, unknown type or argument), AccessRefused (reserved names)."""
        if name == "":
            raise AccessRefused("operation not permitted on the default exchange")
        existing = self.exchanges.get(name)
        wanted = {"type": type, "durable": durable, "auto_delete": auto_delete, "internal": internal}
        if existing is not None:
            inequivalent("exchange", name, wanted, {key: getattr(existing, key) for key in wanted})
            inequivalent_arguments("exchange", name, arguments or {}, existing.arguments)
            return existing
        check_text("the name of an exchange", name)
        if name.startswith("amq."):
            raise AccessRefused(f"exchange name '{name}' contains reserved prefix 'amq.*'")
        if type not in EXCHANGE_TYPES:
            raise PreconditionFailed(f"invalid exchange type '{type}' for exchange '{name}': use one of {', '.join(EXCHANGE_TYPES)}")
        if arguments:
            raise PreconditionFailed(f"unknown argument '{min(arguments)}' for exchange '{name}' in vhost '/': txmq knows none")
        exchange = self.exchanges[name] = EXCHANGE_TYPES[type](name, durable=durable, auto_delete=auto_delete, internal=internal)
        if durable:
            change.puts.append(ExchangeRecord(name, type, durable, auto_delete, internal, {}))
        return exchange

    def delete_exchange(self, change: Change, name: str, *, if_unused: bool = False) -> None:
        """Deleting what does not exist is fine. Raises AccessRefused (reserved names), PreconditionFailed (in use)."""
        if name == "" or name in _PREDECLARED:
            raise AccessRefused(f"operation not permitted on exchange '{name}': it is part of the broker")
        exchange = self.exchanges.get(name)
        if exchange is None:
            return
        if if_unused and exchange.bindings:
            raise PreconditionFailed(f"exchange '{name}' in vhost '/' in use: it has {len(exchange.bindings)} bindings")
        del self.exchanges[name]
        for binding in exchange.bindings.values():
            self._drop_binding(change, exchange, binding)
        if exchange.durable:
            change.drops.append((ExchangeRecord, (name,)))

    # -- queues ---------------------------------------------------------------------------------------------------------
    def declare_queue(
        self,
        change: Change,
        name: str,
        *,
        durable: bool = True,
        exclusive: bool = False,
        auto_delete: bool = False,
        arguments: dict[str, Any] | None = None,
        connection: object = None,
    ) -> Queue:
        """Raises PreconditionFailed (other properties, unknown argument), ResourceLocked (another connection's)."""
        wanted = {"durable": durable, "exclusive": exclusive, "auto_delete": auto_delete}
        existing = self.queues.get(name)
        if existing is not None:
            if existing.exclusive and existing.connection is not connection:
                raise ResourceLocked(
                    f"cannot obtain exclusive access to locked queue '{name}' in vhost '/': it belongs to another connection"
                )
            inequivalent("queue", name, wanted, {key: getattr(existing, key) for key in wanted})
            inequivalent_arguments("queue", name, arguments or {}, existing.arguments)
            return existing
        check_text("the name of a queue", name)
        check_arguments(name, arguments or {})
        # the commit sequence never falls, not even over restarts: an id from it is never used again
        change.sequence = change.sequence or self.next_sequence()
        queue_id = max(change.sequence, max(self.queues_by_id, default=0) + 1)
        self.sequence = change.sequence = max(queue_id, change.sequence)
        # an exclusive queue ends with its connection, so a restart has none to bring back
        queue = Queue(
            queue_id, name, self.batches, durable=durable, exclusive=exclusive, auto_delete=auto_delete, arguments=dict(arguments or {})
        )
        queue.connection = connection
        self._add(queue)
        if queue.written:
            change.puts.append(QueueRecord(queue_id, name, durable, exclusive, auto_delete, queue.arguments))
        return queue

    def _add(self, queue: Queue) -> None:
        self.queues[queue.name] = queue
        self.queues_by_id[queue.queue_id] = queue

    def delete_queue(self, change: Change, name: str, *, if_unused: bool = False, if_empty: bool = False, connection: object = None) -> int:
        """How many messages went with it; 0 for a queue that does not exist. Raises ResourceLocked, PreconditionFailed."""
        if name not in self.queues:
            return 0
        queue = self.usable(name, connection)
        messages = queue.messages
        if if_unused and queue.held:
            raise PreconditionFailed(f"queue '{name}' in vhost '/' in use: channels hold {len(queue.held)} of its messages")
        if if_empty and messages:
            raise PreconditionFailed(f"queue '{name}' in vhost '/' not empty: it holds {messages} messages")
        del self.queues[name], self.queues_by_id[queue.queue_id]
        queue.deleted = True
        for exchange in self.exchanges.values():
            for binding in exchange.unbind_all(queue):
                self._drop_binding(change, exchange, binding)
        holes = queue.settled_within(queue.floor, queue.next_offset)
        queue.forget_runs()
        queue.record(change)
        if queue.written:
            change.puts[:] = [
                put for put in change.puts if not (isinstance(put, (ProgressRecord, HoleRecord)) and put.queue_id == queue.queue_id)
            ]
            change.drops.extend((HoleRecord, (queue.queue_id, start)) for start, _ in holes)
            change.drops += [(ProgressRecord, (queue.queue_id,)), (QueueRecord, (queue.queue_id,))]
        return messages

    # -- bindings -------------------------------------------------------------------------------------------------------
    def bind(
        self,
        change: Change,
        queue: str,
        exchange: str,
        routing_key: str = "",
        arguments: dict[str, Any] | None = None,
        *,
        connection: object = None,
    ) -> None:
        """Binding twice is fine. Raises QueueNotFound, ExchangeNotFound, AccessRefused (default exchange), PreconditionFailed."""
        target, source = self._pair(queue, exchange, connection)
        check_text("a routing key", routing_key)
        check_binding(queue, arguments or {})
        if source.bind(target, routing_key, arguments or {}) and source.durable and target.written:
            change.puts.append(BindingRecord(exchange, queue, routing_key, arguments or {}))

    def unbind(
        self,
        change: Change,
        queue: str,
        exchange: str,
        routing_key: str = "",
        arguments: dict[str, Any] | None = None,
        *,
        connection: object = None,
    ) -> None:
        """Unbinding what is not bound is fine."""
        target, source = self._pair(queue, exchange, connection)
        if source.unbind(target, routing_key, arguments or {}):
            self._drop_binding(change, source, Binding(target, routing_key, arguments or {}))

    def _pair(self, queue: str, exchange: str, connection: object) -> tuple[Queue, Exchange]:
        target, source = self.queue(queue), self.exchange(exchange)
        if exchange == "":
            raise AccessRefused("operation not permitted on the default exchange")
        if target.exclusive and target.connection is not connection:
            raise ResourceLocked(f"cannot obtain exclusive access to locked queue '{queue}' in vhost '/': it belongs to another connection")
        return target, source

    def _drop_binding(self, change: Change, exchange: Exchange, binding: Binding) -> None:
        if exchange.durable and binding.queue.written:
            change.drops.append((BindingRecord, (exchange.name, binding.queue.name, binding.routing_key, binding.arguments)))

    # -- loading --------------------------------------------------------------------------------------------------------
    def _restore_exchange(self, record: ExchangeRecord) -> None:
        self.exchanges[record.name] = EXCHANGE_TYPES[record.type](
            record.name, durable=record.durable, auto_delete=record.auto_delete, internal=record.internal, arguments=record.arguments
        )

    def _restore_queue(self, record: QueueRecord) -> None:
        self._add(
            Queue(
                record.queue_id,
                record.name,
                self.batches,
                durable=record.durable,
                exclusive=record.exclusive,
                auto_delete=record.auto_delete,
                arguments=record.arguments,
            )
        )
