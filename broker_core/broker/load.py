"""Loading: the state of a broker from durable data.

Pure. Contradictions between records are repaired before (``repair.py``), or the whole load fails.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any, Protocol

import pyarrow as pa

from broker_core.broker.access.users import name_of
from broker_core.broker.broker import BrokerState
from broker_core.broker.queue import Queue
from broker_core.broker.repair import Info, leave_out_history, repair
from broker_core.broker.topology.topology import Topology
from broker_core.broker.topology.waiting_exchanges import WAITING
from broker_core.core.block import ReadBlock
from broker_core.core.change import ROUTE, Damaged, HistoryBeside, InboxRow, routes_of
from broker_core.core.errors import CorruptCatalog
from broker_core.core.ids import BlockId, CommitSequence, QueueId
from broker_core.core.records import (
    HEURISTICALLY,
    AppUserRecord,
    AttemptRecord,
    BindingRecord,
    ChannelCommitRecord,
    ClaimRecord,
    DeliveryRecord,
    ExchangeBindingRecord,
    ExchangeRecord,
    ForgottenRecord,
    HistoryRecord,
    HoleRecord,
    LedgerRecord,
    LineageRecord,
    MessageIdsRecord,
    OriginRecord,
    OutcomeRecord,
    PartRecord,
    PermissionRecord,
    PolicyRecord,
    PreparedRecord,
    ProgressRecord,
    QueueRecord,
    ReadRecord,
    Record,
    ReleaseNoteRecord,
    ReleaseRecord,
    RunRecord,
    TopicPermissionRecord,
    UserRecord,
    VhostRecord,
    WriteUserRecord,
)
from broker_core.routing.exchange_types import EXCHANGE_TYPES, WaitingExchange

_OF_MICRO_BATCHES = (
    AttemptRecord, ClaimRecord, LedgerRecord, LineageRecord,
    OriginRecord, PartRecord, ReadRecord, ReleaseNoteRecord, ReleaseRecord,
)  # fmt: skip


class Image(Protocol):
    """The durable data (``store.port.StoreImage``)."""

    records: list[Record]
    inbox: list[InboxRow]
    sequence: CommitSequence
    clean: bool
    history: list[HistoryBeside]
    damaged_history: list[Damaged]

    @property
    def blocks(self) -> Sequence[Info]: ...


def load(image: Image, *, new_block_id: Callable[[], BlockId], read: ReadBlock) -> BrokerState:
    """Loads the state. ``repair`` corrects what it can derive. Raises CorruptCatalog for records that
    contradict each other.
    """
    state = BrokerState(new_block_id=new_block_id, read=read)
    try:
        _load(state, image, new_block_id)
    except (LookupError, TypeError, ValueError, AttributeError, struct.error, pa.ArrowException) as error:
        raise CorruptCatalog(
            f"the catalog holds a record that cannot be read ({type(error).__name__}: {error}); "
            "its checksum is right, so a program wrote it. Keep a copy of the data directory; `txmq broker "
            "salvage` copies the intact data to a new one"
        ) from error
    return state


def _load(state: BrokerState, image: Image, new_block_id: Callable[[], BlockId]) -> None:
    found = state.loaded.repaired = repair(image.records, image.inbox, image.blocks)
    state.numbers.restore(image.sequence, image.records)
    by_class: dict[type[Record], list[Any]] = {}
    for record in found.records:
        by_class.setdefault(type(record), []).append(record)
    for info in image.blocks:
        state.blocks.name(info.block_id, info.rows, info.size_bytes)
    for block_id, (rows, why) in found.lost_blocks.items():
        state.blocks.lose(block_id, rows, why)
    state.virtual_hosts.restore(by_class.get(VhostRecord, ()))
    for exchange in by_class.get(ExchangeRecord, ()):
        _restore_exchange(state, exchange)
    for queue in by_class.get(QueueRecord, ()):
        _restore_queue(state, queue)
    policies: dict[str, list[PolicyRecord]] = {}
    for policy in by_class.get(PolicyRecord, ()):
        policies.setdefault(policy.vhost, []).append(policy)
    for vhost, records in policies.items():
        state.virtual_hosts.get(vhost).policies.restore(records)
    for binding in (*by_class.get(BindingRecord, ()), *by_class.get(ExchangeBindingRecord, ())):
        _restore_binding(state.virtual_hosts.get(binding.vhost), binding)
    for part in by_class.get(PartRecord, ()):
        if part.block_id in state.blocks.by_id:
            state.blocks.pin(part.block_id)
    _load_queues(state, by_class, image, new_block_id)
    for queue in state.queues:  # a kill may have come between a policy and its cut
        if queue.arguments.limited:
            state.pending_checks.obey_soon(queue, 0)
    outcomes: list[OutcomeRecord] = by_class.get(OutcomeRecord, [])
    heuristic = [each for each in outcomes if each.state.startswith(HEURISTICALLY)]
    state.names.heuristics.restore(heuristic)
    state.names.outcomes.restore(
        [each for each in outcomes if not each.state.startswith(HEURISTICALLY)],
        *(by_class.get(kind, ()) for kind in (ChannelCommitRecord, ForgottenRecord)),
    )
    for prepared in by_class.get(PreparedRecord, ()):
        state.prepared.restore(prepared, state.virtual_hosts.registry.by_id)
    state.users.restore(
        *(
            by_class.get(kind, ())
            for kind in (UserRecord, PermissionRecord, TopicPermissionRecord, AppUserRecord, WriteUserRecord)
        )
    )
    unread = state.transactions.history.restore(
        by_class.get(HistoryRecord, ()), image.history, by_class.get(ForgottenRecord, ())
    )
    leave_out_history(found, [*image.damaged_history, *unread])
    state.loaded.latest_us = max(state.loaded.latest_us, state.transactions.history.latest_us)
    state.blocks.forget_unpinned()
    state.loaded.records = {kind: records for kind, records in by_class.items() if kind in _OF_MICRO_BATCHES}


def _restore_exchange(state: BrokerState, record: ExchangeRecord) -> None:
    flags = {"durable": record.durable, "auto_delete": record.auto_delete, "internal": record.internal}
    kind = EXCHANGE_TYPES[record.type]
    exchange = kind(record.name, **flags, arguments=record.arguments, undo=state.undo)
    state.virtual_hosts.get(record.vhost).add_exchange(exchange)


def _restore_queue(state: BrokerState, record: QueueRecord) -> None:
    topology = state.virtual_hosts.get(record.vhost)
    queue = Queue(
        record.queue_id,
        record.name,
        state.blocks,
        durable=record.durable,
        auto_delete=record.auto_delete,
        arguments=record.arguments,
        vhost=record.vhost,
        tally=topology.tally,
    )
    delays = topology.exchanges.get(record.name.removeprefix(WAITING)) if record.exclusive else None
    if isinstance(delays, WaitingExchange) and delays.waiting is None:
        topology.wait_in(queue, delays)
    else:  # also one whose exchange was lost: its messages are there
        topology.add_queue(queue)


def _restore_binding(topology: Topology, record: BindingRecord | ExchangeBindingRecord) -> None:
    if isinstance(record, BindingRecord):
        topology.exchanges[record.exchange].bind(
            topology.queues[record.queue], record.routing_key, record.arguments
        )
    else:
        topology.exchanges[record.source].bind(
            topology.exchanges[record.destination], record.routing_key, record.arguments
        )


def _load_queues(
    state: BrokerState,
    by_class: Mapping[type[Record], list[Any]],
    image: Image,
    new_block_id: Callable[[], BlockId],
) -> None:
    holes: dict[QueueId, list[HoleRecord]] = {}
    for hole in by_class.get(HoleRecord, ()):
        holes.setdefault(hole.queue_id, []).append(hole)
    for progress in by_class.get(ProgressRecord, ()):
        if progress.queue_id in state.virtual_hosts.registry.by_id:
            state.virtual_hosts.registry.by_id[progress.queue_id].restore_progress(
                progress, holes.get(progress.queue_id, [])
            )
    deliveries: dict[QueueId, list[DeliveryRecord]] = {}
    for delivery in by_class.get(DeliveryRecord, ()):
        deliveries.setdefault(delivery.queue_id, []).append(delivery)
    ids: dict[QueueId, list[MessageIdsRecord]] = {}
    for each in by_class.get(MessageIdsRecord, ()):
        ids.setdefault(each.queue_id, []).append(each)
    for queue_id, seen in ids.items():
        message_ids = state.virtual_hosts.registry.by_id[queue_id].log.ids
        if message_ids is not None:
            message_ids.restore(seen)
    for queue_id, found in deliveries.items():
        if queue_id in state.virtual_hosts.registry.by_id:
            state.virtual_hosts.registry.by_id[queue_id].restore_counts(found, state.undo)
    _load_runs(
        state, [_readable(state, run, new_block_id) for run in by_class.get(RunRecord, ())], image.inbox
    )
    state.loaded.latest_us = max(
        max((row.committed_at for row in image.inbox), default=0),
        max((run.committed_at for run in by_class.get(RunRecord, ())), default=0),
        max((outcome.decided_at for outcome in by_class.get(OutcomeRecord, ())), default=0),
        max((entry.committed_at for entry in by_class.get(LedgerRecord, ())), default=0),
        max((each.prepared_at for each in by_class.get(PreparedRecord, ())), default=0),
        max((each.committed_at for each in by_class.get(MessageIdsRecord, ())), default=0),
    )
    outcomes = [
        (outcome.decided_at, name_of(outcome.xid))
        for outcome in by_class.get(OutcomeRecord, ())
        if outcome.state.removeprefix(HEURISTICALLY) == "committed"
    ]
    state.names.of_messages.restore(
        [*((entry.committed_at, entry.token) for entry in by_class.get(LedgerRecord, ())), *outcomes]
    )
    claimed: list[tuple[Queue, int]] = []
    for claim in by_class.get(ClaimRecord, ()):
        for log, (start, end) in claim.ranges.items():
            queue = state.virtual_hosts.get(claim.vhost).queues.get(log)
            if queue is not None and queue.owner == claim.app_id:
                queue.progress.restore_claim(start, end)
                claimed.append((queue, end))
    for queue, end in claimed:  # settling drops what no claim names
        queue.reserve(end)
    for queue in state.queues:
        queue.loaded(clean=image.clean)
    for topology in state.virtual_hosts.by_name.values():
        topology.tally.total = sum(queue.depth for queue in topology.every_queue())
        topology.memory.add(sum(exchange.size_bytes for exchange in topology.exchanges.values()))


def _readable(state: BrokerState, run: RunRecord, new_block_id: Callable[[], BlockId]) -> RunRecord:
    """Returns ``run``, or, if its rows are lost, a run over a missing block: its offsets are kept, and
    reading them raises.
    """
    why = state.loaded.repaired.lost_runs.get((run.queue_id, run.first))
    if why is None:
        return run
    if run.block_id in state.blocks.by_id:
        state.blocks.pin(run.block_id)  # some of its rows are valid: they are kept for inspection
    name = state.virtual_hosts.registry.by_id[run.queue_id].name
    where = f"queue '{name}', offsets {run.first} to {run.first + run.count}"
    block = state.blocks.lose(new_block_id(), run.count, f"{where}: {why}")
    return replace(run, block_id=block.block_id, row=0, bitmap=b"")


def _load_runs(state: BrokerState, runs: Iterable[RunRecord], inbox: Sequence[InboxRow]) -> None:
    unread = state.loaded.repaired.unread
    entries: dict[QueueId, list[tuple[int, InboxRow | RunRecord]]] = {}
    for run in runs:
        entries.setdefault(run.queue_id, []).append((run.first, run))
        state.blocks.by_id[run.block_id].expires_us = run.expires_us
    for row in inbox:
        block = state.blocks.by_id.get(row.block_id)
        if block is None or block.inbox is None:
            block = state.blocks.reopen(row.block_id)
        block.add(row)
        if len(row.routes) % ROUTE.size:
            continue  # reported by ``repair``
        for queue_id, offset in routes_of(row):
            if not unread or (queue_id, row.block_id, row.row) not in unread:
                entries.setdefault(queue_id, []).append((offset, row))
    for queue_id, found in entries.items():
        if queue_id in state.virtual_hosts.registry.by_id:
            state.virtual_hosts.registry.by_id[queue_id].log.restore_entries(
                sorted(found, key=itemgetter(0)), state.blocks
            )
