"""The policies of one virtual host: which one a queue or an exchange has.

Not here: what a policy may set, and what a queue makes of it (``arguments/policy.py``).
Invariant: a name has the policy of the highest priority that matches it, of several the first by name, and
one operator policy by the same rule, as in RabbitMQ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, Protocol, TypeAlias

from broker_core.broker.access.permission import check_pattern, matching
from broker_core.broker.queue import Queue
from broker_core.broker.queue.deliveries import Deliveries
from broker_core.broker.queue.message_ids import MessageIds
from broker_core.broker.topology.leases import Leases
from broker_core.core.change import ANY, Change
from broker_core.core.errors import OptionError
from broker_core.core.records import PolicyRecord
from broker_core.core.undo import Undo
from broker_core.message.arguments import ARGUMENT_BYTES, QueueArguments, check_text
from broker_core.message.arguments.policy import NO_POLICY, Policy, check_definition, combine, effective
from broker_core.message.arguments.table import EXCHANGE
from broker_core.routing.exchange import Exchange
from broker_core.routing.exchanges import Alternates
from broker_core.routing.memory import NamesMemory

POLICY, OPERATOR = "policy", "operator_policy"
KINDS = (POLICY, OPERATOR)
APPLY_TO = ("all", "queues", "exchanges", "classic_queues", "quorum_queues")
MOST = 100  # of one kind and virtual host: each is matched with every name

QueueKind: TypeAlias = Literal["classic_queues", "quorum_queues"]
Kind: TypeAlias = QueueKind | Literal["exchanges"]  # of what has a name


def kind_of(arguments: Mapping[str, object]) -> QueueKind:
    """Of a queue that was declared with them."""
    return "quorum_queues" if arguments.get("x-queue-type") == "quorum" else "classic_queues"


class PolicyHost(Protocol):
    """The virtual host, as far as its policies concern it."""

    vhost: str
    queues: dict[str, Queue]
    exchanges: dict[str, Exchange[Queue]]
    leases: Leases
    memory: NamesMemory
    alternates: Alternates[Queue]


class Policies:
    def __init__(self, undo: Undo, host: PolicyHost) -> None:
        self._undo = undo
        self._host = host
        self.by_key: dict[tuple[str, str], PolicyRecord] = {}  # (kind, name)
        self._order: tuple[tuple[PolicyRecord, ...], ...] = ((), ())  # by ``KINDS``

    def put(self, change: Change, record: PolicyRecord) -> list[Queue]:
        """Sets a policy, and returns the queues that obey another one now. Raises OptionError."""
        of = f"{record.kind.replace('_', ' ')} '{record.name}'"
        check_text(f"the name of {of}", record.name)
        check_pattern(record.pattern)
        if record.apply_to not in APPLY_TO:
            raise OptionError(f"{of} applies to {record.apply_to!r}", f"use {', '.join(APPLY_TO)}")
        check_definition(of, record.definition, operator=record.kind == OPERATOR)
        if len(str(record.definition)) > ARGUMENT_BYTES:
            raise OptionError(f"{of} is larger than {ARGUMENT_BYTES} bytes", "give shorter texts")
        others = self._order[KINDS.index(record.kind)]
        if self.by_key.get((record.kind, record.name)) is None and len(others) >= MOST:
            raise OptionError(
                f"virtual host '{self._host.vhost}' has {MOST} of its kind, the limit, without {of}",
                "one pattern can name several queues: a|b",
            )
        self._undo.attribute(self, "_order")
        self._undo.item(self.by_key, (record.kind, record.name))
        self.by_key[record.kind, record.name] = record
        self._sort()
        change.put(record)
        before = self._host.memory.total
        changed = self._apply(change)
        if self._host.memory.total > before:
            self._host.memory.check(f"cannot set {of}")
        return changed

    def restore(self, records: Iterable[PolicyRecord]) -> None:
        """Restores all while loading, after the queues and exchanges: each pattern is matched once."""
        self.by_key = {(record.kind, record.name): record for record in records}
        self._sort()
        self._apply(Change())

    def delete(self, change: Change, kind: str, name: str) -> list[Queue]:
        """Likewise. Raises OptionError: there is none of this name."""
        if (kind, name) not in self.by_key:
            raise OptionError(
                f"virtual host '{self._host.vhost}' has no {kind.replace('_', ' ')} '{name}'",
                "list those that exist with `txmq policy list`",
            )
        self._undo.attribute(self, "_order")
        self._undo.item(self.by_key, (kind, name))
        del self.by_key[kind, name]
        self._sort()
        change.drop(PolicyRecord, (self._host.vhost, kind, name))
        return self._apply(change)

    def delete_all(self, change: Change) -> None:
        """With the virtual host."""
        if self.by_key:
            change.drop(PolicyRecord, (self._host.vhost, ANY, ANY))

    def _sort(self) -> None:
        self._order = tuple(
            tuple(
                sorted(
                    (each for each in self.by_key.values() if each.kind == kind),
                    key=lambda each: (-each.priority, each.name),
                )
            )
            for kind in KINDS
        )

    # -- whose they are --------------------------------------------------------------------------------------
    def of(self, name: str, kind: Kind) -> Policy:
        """Returns what is set for one name."""
        return self.of_all([name], kind)[0] if self.by_key else NO_POLICY

    def of_all(self, names: Sequence[str], kind: Kind) -> list[Policy]:
        """Returns what is set for each name: one object for all names with the same policies."""
        chosen = [self._first(names, kind, records) for records in self._order]
        found: dict[tuple[int, int], Policy] = {}
        for pair in zip(*chosen, strict=True):
            key = id(pair[0]), id(pair[1])
            if key not in found:
                found[key] = _set_by(*pair)
        return [found[id(policy), id(operator)] for policy, operator in zip(*chosen, strict=True)]

    def alternate_of(self, exchange: Exchange[Queue]) -> object:
        """Returns the name of the alternate exchange, of its arguments or its policy; None: it has none."""
        return _alternate_of(exchange, self.of(exchange.name, "exchanges"))

    def all(self) -> list[PolicyRecord]:
        """Returns them in the order of the rule, those of an operator last."""
        return [record for records in self._order for record in records]

    def _apply(self, change: Change) -> list[Queue]:
        changed: list[Queue] = []
        for kind, names in self._by_kind().items():
            for each, policy in zip(names.values(), self.of_all(list(names), kind), strict=True):
                if isinstance(each, Exchange):
                    self._host.alternates.choose(each, _alternate_of(each, policy))
                elif each.arguments.policy != policy:
                    self._host.memory.add(-each.arguments.id_bytes)
                    _obey(self._undo, change, each, policy)
                    self._host.memory.add(each.arguments.id_bytes)
                    self._host.leases.renew(each)
                    changed.append(each)
        return changed

    def _by_kind(self) -> Mapping[Kind, Mapping[str, Queue | Exchange[Queue]]]:
        found: dict[Kind, dict[str, Queue | Exchange[Queue]]] = {
            "exchanges": {name: each for name, each in self._host.exchanges.items() if name}
        }
        for name, queue in self._host.queues.items():
            if not queue.replies:
                found.setdefault(kind_of(queue.arguments.declared), {})[name] = queue
        return found

    def _first(
        self, names: Sequence[str], kind: Kind, records: Iterable[PolicyRecord]
    ) -> list[PolicyRecord | None]:
        chosen: list[PolicyRecord | None] = [None] * len(names)
        for record in records:
            if record.apply_to not in ("all", kind) and not (
                record.apply_to == "queues" and kind != "exchanges"
            ):
                continue
            left = [at for at, found in enumerate(chosen) if found is None]
            if not left:
                break
            for at, does in zip(left, matching(record.pattern, [names[at] for at in left]), strict=True):
                if does:
                    chosen[at] = record
        return chosen


def _obey(undo: Undo, change: Change, queue: Queue, policy: Policy) -> None:
    """The queue has another policy from now on. What it has too much leaves with its next check."""
    undo.attribute(queue, "arguments")
    parsed = queue.arguments = QueueArguments.parse(queue.arguments.declared, policy)
    marks, ready = queue.marks, queue.ready
    # such a mark may stay up; it must not be missing if this is undone
    marks.timed |= parsed.ttl_ms is not None
    marks.hasty |= parsed.ttl_ms == 0
    marks.deadline = None
    if parsed.max_bytes is None and queue.room.sizes is not None:
        queue.room.forget()
    _obey_deduplication(undo, change, queue)
    if ready.deliveries is not None:
        undo.attribute(ready.deliveries, "limit")
        ready.deliveries.limit = parsed.delivery_limit
    elif parsed.counts_deliveries:
        undo.attribute(ready, "deliveries")
        ready.deliveries = Deliveries(parsed.delivery_limit, undo)


def _obey_deduplication(undo: Undo, change: Change, queue: Queue) -> None:
    rule, log = queue.arguments.deduplication, queue.log
    if rule is not None and log.ids is not None:
        undo.attribute(log.ids, "rule")
        log.ids.rule = rule
        return
    undo.attribute(log, "ids")
    if log.ids is not None and queue.written:
        log.ids.forget_all(change)
    log.ids = None if rule is None else MessageIds(rule, queue.queue_id, queue.progress, undo)


def _alternate_of(exchange: Exchange[Queue], policy: Policy) -> object:
    return effective(exchange.arguments, policy, EXCHANGE).get("alternate-exchange")


def _set_by(policy: PolicyRecord | None, operator: PolicyRecord | None) -> Policy:
    own, limits = (each.definition if each else {} for each in (policy, operator))
    names = (each.name if each else None for each in (policy, operator))
    return Policy(combine(own, limits), *names)
