"""Exchanges and bindings of a cluster: the rules of AMQP over one compacted topic.

A queue is a topic, so it exists without a record here. Exchanges and bindings are records of
``_txmq.topology``, and every process that publishes replays them.
Not here: the rules (``broker_core/routing``), encoding.
Invariant: what is routed was routed by the bindings that were written when it was asked for (``refresh``).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from broker_core.core import errors
from broker_core.core.change import ANY, Change, Drop
from broker_core.core.ids import QueueId
from broker_core.core.records import BindingRecord, ExchangeBindingRecord, ExchangeRecord, Record
from broker_core.core.undo import Undo
from broker_core.kafka import names
from broker_core.kafka.cluster.client import Client
from broker_core.kafka.protocol.port import LATEST, TopicPartition
from broker_core.kafka.topics import entry, topics
from broker_core.kafka.topics.entry import now_ms
from broker_core.routing.carbon_copy import Copies
from broker_core.routing.column import Routed, is_alike
from broker_core.routing.exchange import Exchange
from broker_core.routing.exchange_types import EXCHANGE_TYPES
from broker_core.routing.exchanges import Exchanges

_USUAL_LARGEST = 1_048_588  # Kafka's default of max.message.bytes, where this user may not ask


@dataclass(eq=False, slots=True)
class RoutedTopic:
    """A topic as routing sees a queue. One that is deleted leaves with its bindings (``target``)."""

    queue_id: QueueId
    name: str
    written: bool = True
    deleted: bool = False
    upstream: dict[Exchange[RoutedTopic], None] = field(default_factory=dict)


Rules = Exchanges[RoutedTopic]


class Target(NamedTuple):
    """A topic as publishing sees it. ``largest``: the bytes of a record batch that it takes."""

    topic: str
    partitions: int
    largest: int


class ClusterTopology:
    def __init__(self, client: Client) -> None:
        self._client = client
        self._log = TopicPartition(names.TOPOLOGY, 0)
        self._position = 0
        self._records: dict[str, Record] = {}  # by key
        self._rules = _rules(())
        self._largest: dict[str, tuple[int, float]] = {}  # topic -> its limit, and when it was asked for

    # -- routing ---------------------------------------------------------------------------------------------
    def route(self, rows: pa.RecordBatch, copies: Copies | None = None) -> Routed:
        """Returns the rows of each queue id. Raises ExchangeNotFound, AccessRefused."""
        exchanges, keys = rows.column("exchange"), rows.column("routing_key")
        if is_alike(exchanges) and is_alike(keys):
            exchanges, keys = exchanges.slice(0, 1), keys.slice(0, 1)
        direct = pc.equal(exchanges, "")
        if not pc.all(direct).as_py():
            self.refresh()
        names = keys.filter(direct).unique().to_pylist()
        if names and copies is not None:
            names += {key for more in copies.keys for key in more}
        self._know(name for name in names if name not in self._rules.queues)
        return self._rules.route_block(rows, copies)

    def target(self, queue_id: QueueId, *, fresh: bool = False) -> Target:
        """Returns the topic of a queue, with as many partitions as the client knows, or as it has now if
        ``fresh``. Raises QueueNotFound if it was deleted.
        """
        name = self._rules.queues_by_id[queue_id].name
        try:
            partitions = len(self._client.topic(name, fresh=fresh).partitions)
            return Target(name, partitions, self._largest_of(name))
        except errors.QueueNotFound:
            self._rules = _rules(self._records.values())
            raise

    def _know(self, missing: Iterable[str]) -> None:
        """Adds those names that are topics. Raises AccessRefused for one that this user may not see: it is
        not known to be no queue.
        """
        for name in sorted(self._client.existing({name for name in missing if names.is_queue_name(name)})):
            _add_queue(self._rules, name)

    def _largest_of(self, name: str) -> int:
        largest = self._largest.get(name)
        if largest is None or time.monotonic() - largest[1] > topics.ASKED_S:
            try:
                value = self._client.configs(name, topics.LARGEST).get(topics.LARGEST)
            except errors.AccessRefused:
                value = None
            largest = self._largest[name] = int(value or _USUAL_LARGEST), time.monotonic()
        return largest[0]

    # -- records ---------------------------------------------------------------------------------------------
    def refresh(self) -> None:
        """Takes in what other processes have declared."""
        if self._client.find_topic(names.TOPOLOGY) is None:
            return
        end = self._client.offsets({self._log: LATEST})[self._log]
        changed = False
        for row in entry.replay(self._client, self._log, self._position, end):
            changed = True
            key = (row.key or b"").decode()
            if row.value is None:
                self._records.pop(key, None)
            else:
                self._records[key] = entry.parse(key, row.value)
        self._position = end
        if changed:
            self._rules = _rules(self._records.values())

    def rules(self) -> Rules:
        """Returns exchanges and bindings as they are now."""
        self.refresh()
        return self._rules

    def change(self, work: Callable[[Rules, Change], object], *queues: str) -> None:
        """Declares, binds, unbinds or deletes: ``work`` is a method of the rules. Raises what it raises, and
        QueueNotFound if one of ``queues``, which it names, is no topic.

        The last one of two that contradict each other holds.
        """
        topics.ensure(self._client, topics.topology())
        self.refresh()
        self._know(name for name in queues if name not in self._rules.queues)
        change = Change()
        try:
            work(self._rules, change)
            entries = [
                written
                for each in change.journal
                for written in (self._dropped(each) if isinstance(each, Drop) else [entry.put(each)])
            ]
            if entries:
                self._client.produce({self._log: entry.batch(entries, now_ms())}, repeat=True)
        finally:  # memory has what the topic has, even where the answer was lost
            self._rules = _rules(self._records.values())
        self.refresh()

    def _dropped(self, drop: Drop) -> list[entry.Entry]:
        """A topic has tombstones of single keys."""
        if ANY not in drop.key:
            return [entry.drop(drop.kind, drop.key)]
        return [
            entry.drop(drop.kind, record.key)
            for record in self._records.values()
            if type(record) is drop.kind
            and all(expected in (ANY, value) for expected, value in zip(drop.key, record.key, strict=True))
        ]


def _rules(records: Iterable[Record]) -> Rules:
    """Returns exchanges and bindings as the records say. A binding to what is gone or changed is left out."""
    rules = Rules(Undo())
    found = list(records)
    for record in found:
        if isinstance(record, ExchangeRecord) and record.type in EXCHANGE_TYPES:
            rules.add_exchange(
                EXCHANGE_TYPES[record.type](
                    record.name,
                    durable=record.durable,
                    auto_delete=record.auto_delete,
                    internal=record.internal,
                    arguments=record.arguments,
                )
            )
    for record in found:
        with contextlib.suppress(errors.PreconditionFailed):  # another process made it anew, of another type
            _bind(rules, record)
    return rules


def _bind(rules: Rules, record: Record) -> None:
    """Raises PreconditionFailed if the exchange takes no such binding."""
    if isinstance(record, BindingRecord):
        if (source := rules.exchanges.get(record.exchange)) is not None:
            source.bind(_add_queue(rules, record.queue), record.routing_key, record.arguments)
    elif isinstance(record, ExchangeBindingRecord):
        source, target = rules.exchanges.get(record.source), rules.exchanges.get(record.destination)
        if source is not None and target is not None:
            source.bind(target, record.routing_key, record.arguments)


def _add_queue(rules: Rules, name: str) -> RoutedTopic:
    topic = rules.queues.get(name)
    if topic is None:
        topic = RoutedTopic(QueueId(len(rules.queues) + 1), name)
        rules.add_queue(topic)
    return topic
