"""The operator's port on Kafka: topics as queues, exchanges and bindings, and messages by hand.

Not here: what is routed (``topics/routing.py``), how a batch write is committed (``sink/batch_writes.py``).
Invariant: no argument is ignored. What Kafka does not have is refused, with the name of what it has instead.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from broker_core.admin import (
    PAGE,
    BindingInfo,
    ConsumerInfo,
    ExchangeInfo,
    LedgerInfo,
    MessageLife,
    MessageStep,
    Preparation,
    QueueInfo,
    TransactionInfo,
    of_batch,
)
from broker_core.core import errors
from broker_core.core.change import Change
from broker_core.engine import BranchHeader
from broker_core.kafka import engine, names
from broker_core.kafka.engine import KafkaEngine
from broker_core.kafka.protocol.port import EARLIEST, LATEST, TopicPartition, parse_log
from broker_core.kafka.topics import setup, topics
from broker_core.kafka.topics.routing import Rules
from broker_core.kafka.topics.row_times import committed_ms
from broker_core.micro_batch.ledger_info import ledger_info
from broker_core.routing.exchange_types import DEDUPLICATING, DELAYED
from broker_core.routing.listing import binding_rows, bindings, exchange_row

PARTITIONS, REPLICATION = "x-partitions", "x-replication"  # arguments of a queue
_INTERNAL = "__"  # how Kafka's own topics begin
_INSTEAD = {
    "x-message-ttl": "retention.ms of the topic",
    "x-expires": "nothing: delete the topic",
    "x-max-length": "retention.bytes of the topic",
    "x-max-length-bytes": "retention.bytes of the topic",
    "x-overflow": "nothing: retention deletes the oldest messages",
    "x-dead-letter-exchange": "nothing: publish rejected rows to a topic of their own",
    "x-dead-letter-routing-key": "nothing: publish rejected rows to a topic of their own",
    "x-delivery-limit": "nothing: a micro-batch is repeated until it is decided",
    "x-message-deduplication": "an idempotent producer, which drops what it sends again itself",
    "x-max-priority": "nothing: use a topic for each priority",
}
_MOST = 10_000  # partitions


def connect(url: str, settings: Mapping[str, object] | None = None) -> KafkaAdmin:
    """Raises OptionError."""
    return KafkaAdmin(engine.connect(url, settings))


class KafkaAdmin:
    """Implements :class:`broker_core.admin.Admin`."""

    def __init__(self, engine: KafkaEngine) -> None:
        self._engine = engine

    def prepare(
        self, principal: str, apps: Sequence[str], sources: Sequence[str], targets: Sequence[str]
    ) -> list[Preparation]:
        engine = self._engine
        return setup.prepare(engine.client, engine.bootstrap, principal, apps, sources, targets)

    def queues(self) -> list[QueueInfo]:
        client = self._engine.client
        logs = {
            name: [TopicPartition(name, number) for number in found.partitions]
            for name, found in sorted(client.topics().items())
            if not name.startswith((names.RESERVED, _INTERNAL)) and not found.code
        }
        every = [log for found in logs.values() for log in found]
        begins, ends = (client.offsets(dict.fromkeys(every, at)) for at in (EARLIEST, LATEST))
        return [
            QueueInfo(
                name,
                messages=sum(ends[log] - begins[log] for log in found),
                unacknowledged=0,
                next_offset=sum(ends[log] for log in found),
                consumers=0,
                owner="",
                durable=True,
                arguments={PARTITIONS: len(found)},
                logs=len(found),
            )
            for name, found in logs.items()
        ]

    def exchanges(self) -> list[ExchangeInfo]:
        exchanges = self._engine.topology.rules().exchanges
        return [exchange_row(each) for _, each in sorted(exchanges.items())]

    def bindings(self) -> list[BindingInfo]:
        return binding_rows(bindings(self._engine.topology.rules()))

    # -- apps ------------------------------------------------------------------------------------------------
    def consumers(self) -> list[ConsumerInfo]:
        raise errors.OptionError(
            "a cluster of Kafka has no consumers of AMQP",
            "list its groups with kafka-consumer-groups.sh, and what reads for txmq with `txmq app list`",
        )

    def ledger(self, app_id: str = "", sequence: int = 0, limit: int = PAGE) -> list[LedgerInfo]:
        found: list[LedgerInfo] = []
        for app in self._engine.sink.app_ids():
            if app >= app_id and len(found) < limit:
                found += [each for each in self._decided(app) if (app, each.sequence) > (app_id, sequence)]
        return found[:limit]

    def _decided(self, app_id: str) -> list[LedgerInfo]:
        """Nothing of an app that this user may see and not read."""
        try:
            return [ledger_info(each, 0) for each in self._engine.sink.entry_records(app_id)]
        except errors.AccessRefused:
            return []

    def history(self, limit: int = PAGE, before: int = 0) -> list[TransactionInfo]:
        """The decided micro-batches: nothing keeps what else was committed. They have no numbers."""
        decided = [each for app in self._engine.sink.app_ids() for each in self._decided(app)]
        decided.sort(key=lambda each: each.committed_at_us, reverse=True)
        return [of_batch(each) for each in decided[:limit]]

    def transaction(self, sequence: int) -> TransactionInfo:
        raise errors.OptionError(
            f"there is no transaction {sequence}, because commits of Kafka have no numbers",
            "list the micro-batches with `txmq history list --last 10`, and see one with `txmq history show "
            "APP/SEQUENCE`",
        )

    def message(self, queue: str, offset: int) -> MessageLife:
        """Of a log, ``orders/3``: when its record was written, and the batches that have consumed it."""
        log, client = parse_log(queue), self._engine.client
        topics.require_queue(client, log.topic)
        if log.partition not in client.topic(log.topic).partitions:
            raise errors.QueueNotFound(f"topic {log.topic!r} has no partition {log.partition}")
        begin, end = (client.offsets({log: at})[log] for at in (EARLIEST, LATEST))
        steps = []
        if begin <= offset < end:
            written = committed_ms(client, {log: offset}, {log: offset + 1})
            steps += [MessageStep(0, at * 1000, "published", certain=True) for at in written]
        for app in self._engine.sink.app_ids():
            for each in self._decided(app):
                first, last = each.ranges.get(queue, (0, 0))
                if first <= offset < last:
                    step = MessageStep(0, each.committed_at_us, "consumed", certain=True, listener="spark")
                    steps.append(replace(step, app_id=app, batch_id=each.batch_id))
        there = "ready" if steps and steps[0].effect == "published" else "unknown"
        state = "settled" if offset < begin else there
        return MessageLife(queue, offset, state, tuple(steps))

    # -- topics ----------------------------------------------------------------------------------------------
    def declare_queue(
        self, name: str, *, durable: bool = True, arguments: Mapping[str, object] | None = None
    ) -> None:
        """Makes a topic, of ``x-partitions`` and ``x-replication`` (default: the cluster's)."""
        names.require_queue_name(name)
        values = dict(arguments or {})
        partitions, replication = (_number(name, values, key) for key in (PARTITIONS, REPLICATION))
        if not durable:
            raise errors.PreconditionFailed(f"queue {name!r}: a topic of Kafka is always durable")
        for key in values:
            raise errors.PreconditionFailed(
                f"queue {name!r} has the argument {key!r}, which Kafka does not have",
                f"use {_INSTEAD[key]}" if key in _INSTEAD else f"use {PARTITIONS} and {REPLICATION}",
            )
        client = self._engine.client
        existing = client.topics().get(name)
        if existing is None:
            client.create_topic(name, partitions or -1, replication=replication or -1)
        elif partitions not in (0, len(existing.partitions)):
            raise errors.PreconditionFailed(
                f"queue {name!r} has {len(existing.partitions)} partitions, but {partitions} were asked for",
                "partitions are added with kafka-topics.sh --alter",
            )
        topics.require_queue(client, name)

    def delete_queue(self, name: str) -> None:
        names.require_queue_name(name)

        def unbind(rules: Rules, change: Change) -> None:
            for exchange in list(rules.exchanges.values()):
                for binding in exchange.bindings:
                    if binding.destination.name == name and name in rules.queues:
                        rules.unbind(change, name, exchange.name, binding.routing_key, binding.arguments)

        with contextlib.suppress(errors.QueueNotFound):
            self._engine.client.delete_topic(name)
        if self._engine.client.find_topic(names.TOPOLOGY) is not None:
            self._engine.topology.change(unbind)

    # -- exchanges -------------------------------------------------------------------------------------------
    def declare_exchange(self, name: str, type: str, arguments: Mapping[str, object] | None = None) -> None:
        if type == DEDUPLICATING:
            raise errors.PreconditionFailed(
                f"exchange '{name}' cannot have the type {type}: Kafka remembers no ids of messages",
                "use an idempotent producer, or an embedded broker",
            )
        if type == DELAYED:
            raise errors.PreconditionFailed(
                f"exchange '{name}' cannot have the type {type}: Kafka keeps no message back",
                "publish at the time itself, or use an embedded broker",
            )
        values = dict(arguments or {})
        self._engine.topology.change(
            lambda rules, change: rules.declare_exchange(change, name, type, arguments=values)
        )

    def delete_exchange(self, name: str) -> None:
        self._engine.topology.change(lambda rules, change: rules.delete_exchange(change, name))

    def bind(
        self, queue: str, exchange: str, routing_key: str = "", arguments: Mapping[str, object] | None = None
    ) -> None:
        values = dict(arguments or {})
        self._engine.topology.change(
            lambda rules, change: rules.bind(change, queue, exchange, routing_key, values), queue
        )

    def unbind(
        self, queue: str, exchange: str, routing_key: str = "", arguments: Mapping[str, object] | None = None
    ) -> None:
        values = dict(arguments or {})
        self._engine.topology.change(
            lambda rules, change: rules.unbind(change, queue, exchange, routing_key, values)
        )

    # -- messages --------------------------------------------------------------------------------------------
    def publish(
        self, bodies: Iterable[bytes], exchange: str = "", routing_key: str = "", properties: bytes = b""
    ) -> int:
        token = uuid.uuid4().hex
        chosen = list(bodies)
        columns = {
            "body": pa.array(chosen, pa.binary()),
            "properties": pa.array([properties] * len(chosen), pa.binary()),
        }
        target = {"exchange": exchange, "routing_key": routing_key}
        header = BranchHeader(token, uuid.uuid4().hex, "publish", target)
        staged = self._engine.stage(header, [pa.record_batch(columns)])
        return self._engine.commit_branches(token, [staged])


def _number(queue: str, values: dict[str, Any], key: str) -> int:
    """Takes an argument; 0: it was not given. Raises PreconditionFailed."""
    value = values.pop(key, 0)
    if value and (not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= _MOST):
        raise errors.PreconditionFailed(
            f"queue {queue!r} has {key}={value!r}", f"give a number from 1 to {_MOST}"
        )
    return int(value)
