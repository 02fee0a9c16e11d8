"""The state of a broker, all in memory: queues, open block, prepared transactions, and the records of claims and ledger.

Pure: no I/O, no clock, no threads. Every operation that must be durable takes a :class:`Change` and fills it; it checks first,
then changes memory, so that a refused operation has changed nothing. The committer writes the change and calls ``publish``.
Bodies of stored blocks and new block ids come through the two functions given at load.

Invariant: entries at or above a queue's ``visible_end`` belong to a commit that is not durable yet, and nobody is shown them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from broker_core.broker.arguments import check_text
from broker_core.broker.block import Blocks
from broker_core.broker.change import Change, InboxRow
from broker_core.broker.dispatch import Dispatch
from broker_core.broker.messages import ROUTE, Dying
from broker_core.broker.outcomes import Outcomes
from broker_core.broker.queue import Queue
from broker_core.broker.records import (
    AttemptRecord,
    BindingRecord,
    ChannelCommitRecord,
    ClaimRecord,
    DeliveryRecord,
    ExchangeBindingRecord,
    ExchangeRecord,
    ForgottenRecord,
    HoleRecord,
    LedgerRecord,
    LineageRecord,
    OriginRecord,
    OutcomeRecord,
    PartRecord,
    PreparedRecord,
    ProgressRecord,
    QueueRecord,
    ReadRecord,
    Record,
    ReleaseRecord,
    RunRecord,
)
from broker_core.broker.repair import Info, Repaired, repair
from broker_core.broker.routing import Selection, route_rows, selected_rows
from broker_core.broker.spilled import Share, Spilled
from broker_core.broker.transaction import Buried, State, Transaction
from broker_core.errors import CorruptCatalog, PreconditionFailed, ResourceLocked, TransactionState, UnknownTransaction
from broker_core.message import Message

NAMES_KEPT = 100_000  # of transactions, for dead letters
_new = tuple.__new__  # a third of the time of a NamedTuple's own

_OF_MICRO_BATCHES = (
    AttemptRecord, ClaimRecord, LedgerRecord, LineageRecord, OriginRecord, PartRecord, ReadRecord, ReleaseRecord,
)  # fmt: skip

R = TypeVar("R", bound=Record)


class Image(Protocol):
    """What was durable (``store.port.StoreImage``)."""

    records: list[Record]
    inbox: list[InboxRow]
    sequence: int
    clean: bool

    @property
    def blocks(self) -> Sequence[Info]: ...


class Committed(NamedTuple):
    """What a commit answers: its sequence number (0: nothing was published), and mandatory messages that reach no queue any more.

    ``rejected`` are places in ``publishes`` that a full queue refused, in a transaction that is not atomic. ``dropped``: messages and
    settlements of a prepared transaction that came to nothing, because their queue is gone.
    """

    sequence: int
    returned: list[Message]
    rejected: list[int] = []
    dropped: int = 0


class BrokerState(Dispatch):
    def __init__(self, *, new_block_id: Callable[[], int], read: Callable[[int], pa.RecordBatch]) -> None:
        super().__init__(Blocks(new_block_id, read))
        self.repaired = Repaired()  # while loading
        self.latest_us = 0  # the latest commit time that was found while loading
        self.identity = ""  # of the data directory
        self._names: dict[int, str] = {}  # commit time -> xid or token
        self.prepared: dict[str, Transaction] = {}
        self.prepared_at: dict[str, int] = {}
        self.outcomes = Outcomes(self.undo)
        self._records: dict[type[Record], list[Any]] = {}  # of micro-batches, until ``take_records``

    # -- loading --------------------------------------------------------------------------------------------------------
    @classmethod
    def load(cls, image: Image, *, new_block_id: Callable[[], int], read: Callable[[int], pa.RecordBatch]) -> BrokerState:
        """Raises CorruptCatalog for records of which no sense can be made; what ``repair`` can derive is put right."""
        state = cls(new_block_id=new_block_id, read=read)
        try:
            state._load(image, new_block_id)
        except (LookupError, TypeError, ValueError, AttributeError, struct.error, pa.ArrowException) as error:
            raise CorruptCatalog(
                f"the catalog holds a record of which no sense can be made ({type(error).__name__}: {error}); its checksum holds, so a"
                " program wrote it so. Keep a copy of the data directory; `txmq salvage` makes a new one of what is whole"
            ) from error
        return state

    def _load(self, image: Image, new_block_id: Callable[[], int]) -> None:
        found = self.repaired = repair(image.records, image.inbox, image.blocks)
        self.restore_numbers(image.sequence, image.records)
        by_class: dict[type[Record], list[Any]] = {}
        for record in found.records:
            by_class.setdefault(type(record), []).append(record)
        for info in image.blocks:
            self.blocks.name(info.block_id, info.rows, info.size_bytes)
        for block_id, (rows, why) in found.lost_blocks.items():
            self.blocks.lose(block_id, rows, why)
        for exchange in by_class.get(ExchangeRecord, ()):
            self._restore_exchange(exchange)
        for queue in by_class.get(QueueRecord, ()):
            self._restore_queue(queue)
        for binding in (*by_class.get(BindingRecord, ()), *by_class.get(ExchangeBindingRecord, ())):
            self._restore_binding(binding)
        for part in by_class.get(PartRecord, ()):
            if part.block_id in self.blocks.by_id:
                self.blocks.pin(part.block_id)
        self._load_queues(by_class, image, new_block_id)
        self.outcomes.restore(*(by_class.get(kind, ()) for kind in (OutcomeRecord, ChannelCommitRecord, ForgottenRecord)))
        for prepared in by_class.get(PreparedRecord, ()):
            self._restore_prepared(prepared)
        self.blocks.forget_unpinned()
        self._records = {kind: records for kind, records in by_class.items() if kind in _OF_MICRO_BATCHES}

    def take_records(self, kind: type[R]) -> list[R]:
        """Records of micro-batches that were loaded, once: the rules that know them keep them from now on."""
        return self._records.pop(kind, [])

    def _load_queues(self, by_class: Mapping[type[Record], list[Any]], image: Image, new_block_id: Callable[[], int]) -> None:
        holes: dict[int, list[HoleRecord]] = {}
        for hole in by_class.get(HoleRecord, ()):
            holes.setdefault(hole.queue_id, []).append(hole)
        for progress in by_class.get(ProgressRecord, ()):
            if progress.queue_id in self.queues_by_id:
                self.queues_by_id[progress.queue_id].restore_progress(progress, holes.get(progress.queue_id, []))
        deliveries: dict[int, list[DeliveryRecord]] = {}
        for delivery in by_class.get(DeliveryRecord, ()):
            deliveries.setdefault(delivery.queue_id, []).append(delivery)
        for queue_id, found in deliveries.items():
            if queue_id in self.queues_by_id:
                self.queues_by_id[queue_id].restore_counts(found)
        self._load_runs([self._readable(run, new_block_id) for run in by_class.get(RunRecord, ())], image.inbox)
        self.latest_us = max(
            max((row.committed_at for row in image.inbox), default=0),
            max((run.committed_at for run in by_class.get(RunRecord, ())), default=0),
            max((outcome.decided_at for outcome in by_class.get(OutcomeRecord, ())), default=0),
            max((entry.committed_at for entry in by_class.get(LedgerRecord, ())), default=0),
        )
        named = [(outcome.decided_at, outcome.xid) for outcome in by_class.get(OutcomeRecord, ()) if outcome.state == "committed"]
        self._names = dict(sorted([*((entry.committed_at, entry.token) for entry in by_class.get(LedgerRecord, ())), *named])[-NAMES_KEPT:])
        claimed: list[tuple[Queue, int]] = []
        for claim in by_class.get(ClaimRecord, ()):
            for log, (start, end) in claim.ranges.items():
                queue = self.queues.get(log)
                if queue is not None and queue.owner == claim.app_id:
                    queue.restore_claim(start, end)
                    claimed.append((queue, end))
        for queue, end in claimed:  # settling lets go of what no claim names
            queue.reserve(end)
        for queue in self.queues.values():
            queue.loaded(clean=image.clean)

    def _readable(self, run: RunRecord, new_block_id: Callable[[], int]) -> RunRecord:
        """``run``, or, if its rows are lost, a run over a missing block: its offsets stay, and reading them raises."""
        why = self.repaired.lost_runs.get((run.queue_id, run.first))
        if why is None:
            return run
        if run.block_id in self.blocks.by_id:
            self.blocks.pin(run.block_id)  # some of its rows are meant: they stay for whoever looks into it
        where = f"queue '{self.queues_by_id[run.queue_id].name}', offsets {run.first} to {run.first + run.count}"
        block = self.blocks.lose(new_block_id(), run.count, f"{where}: {why}")
        return replace(run, block_id=block.block_id, row=0, bitmap=b"")

    def _load_runs(self, runs: Iterable[RunRecord], inbox: Sequence[InboxRow]) -> None:
        unread = self.repaired.unread
        entries: dict[int, list[tuple[int, InboxRow | RunRecord]]] = {}
        for run in runs:
            entries.setdefault(run.queue_id, []).append((run.first, run))
        for row in inbox:
            block = self.blocks.by_id.get(row.block_id)
            if block is None or block.inbox is None:
                block = self.blocks.reopen(row.block_id)
            block.add(row)
            if len(row.routes) % ROUTE.size:
                continue  # named by ``repair``
            for queue_id, offset in ROUTE.iter_unpack(row.routes):
                if not unread or (queue_id, row.block_id, row.row) not in unread:
                    entries.setdefault(queue_id, []).append((offset, row))
        for queue_id, found in entries.items():
            if queue_id in self.queues_by_id:
                self.queues_by_id[queue_id].restore_entries(sorted(found, key=_first), self.blocks)

    def _restore_prepared(self, record: PreparedRecord) -> None:
        transaction = Transaction.restore(record, self.queues_by_id)
        for queue, offset, _ in transaction.settles:
            queue.reserve(offset + 1)  # a transient message is gone; its offset must not become another's
            if not queue.is_settled(offset):
                queue.hold(offset)
        for spilled in transaction.spilled:
            self.blocks.pin(spilled.block_id)
        self.keep_room(transaction.incoming)
        self.prepared[record.xid] = transaction
        self.prepared_at[record.xid] = record.prepared_at

    # -- transactions ---------------------------------------------------------------------------------------------------
    def commit_transaction(self, change: Change, transaction: Transaction, now: int) -> Committed:
        """All of it in one change (decision 1).

        Raises, with nothing changed, PreconditionFailed (overflow), TransactionState, CorruptSegment.
        """
        xid, publishes, settles = transaction.xid, transaction.publishes, transaction.settles
        if transaction.state is State.ACTIVE:  # a prepared one was looked at when it was prepared, and its room is kept
            if transaction.atomic and transaction.incoming:
                self.check_overflow(transaction.incoming)
            if xid:
                self._check_new(xid)
        if settles:
            self.check_readable(settles)
        returned: list[Message] = []
        for spilled in transaction.spilled:
            returned += self._unreached(spilled)
        self._become(transaction, State.COMMITTED)
        rejected: list[int] = []
        if transaction.transactional and (publishes or transaction.spilled):
            change.sequence = self.next_sequence(transaction=True)
        if xid:
            self.name_transaction(xid, now)
        for spilled in transaction.spilled:
            self._enqueue_spilled(change, spilled, now, transaction.connection)
        if publishes:
            dying = Dying()
            returned += self._enqueue(change, publishes, now, dying, transaction.atomic, rejected, transaction.connection)
            if dying:
                self._bury(change, dying, now)
        if settles:
            self._settle(change, settles, now)
        for buried in transaction.buried:
            self._enqueue_buried(change, buried, now)
        if xid:
            self.remember(change, OutcomeRecord(xid, "committed", now))
        return _new(Committed, (change.sequence, returned, rejected, 0))

    def _unreached(self, spilled: Spilled) -> list[Message]:
        """Mandatory messages that reach no queue any more. Raises CorruptSegment."""
        lost = spilled.unreached()
        if not lost:
            return []
        rows = self.blocks.decode(spilled.block_id, np.array(lost, np.int64), 1, 0)
        return [Message(row.body, row.routing_key, row.exchange, row.properties) for row in rows]

    def _enqueue_spilled(self, change: Change, spilled: Spilled, now: int, connection: object) -> None:
        change.sequence = change.sequence or self.next_sequence()
        shares = list(spilled.shares())
        if spilled.block_id not in self.blocks.by_id:  # otherwise it is a prepared transaction's
            if not shares:
                change.forgets.append(spilled.block_id)
                return
            change.names.append(spilled.block_id)
        block = self.blocks.name(spilled.block_id, spilled.rows, spilled.size_bytes)
        if block.expiring is None:
            block.expiring = spilled.expiring
        limited: dict[Queue, None] = {}
        for share in shares:
            self._enqueue_share(change, spilled, share, now, connection)
            if share.queue.limited:
                limited[share.queue] = None
        dying = Dying()
        for queue in limited:
            self._overflow(change, queue, now, dying)
        if dying:
            self._bury(change, dying, now)

    def _enqueue_share(self, change: Change, spilled: Spilled, share: Share, now: int, connection: object) -> None:
        queue, (row, count, bitmap), recorded = share
        sizes: npt.NDArray[Any] | None = None
        if "x-max-length-bytes" in queue.arguments:
            if queue.sizes is None:
                self._measure(queue, queue.floor)  # before there are new ones
            sizes = spilled.sizes if spilled.sizes is not None else self.blocks.body_sizes(spilled.block_id)
        first = queue.append(count, spilled.block_id, row, bitmap, change.sequence, now)
        if recorded:
            change.put(queue.record_last_run())
        self.touched.add(queue)
        if queue.publishers is not None and connection is not None:
            self.undo.append((setattr, queue, "publishers", dict(queue.publishers)))
            queue.publishers.update(dict.fromkeys(range(first, first + count), connection))
        if spilled.expiring:
            queue.timed = True
        if sizes is not None:
            rows = selected_rows(share.selection)
            for offset, size in enumerate(sizes[np.asarray(rows)].tolist(), first):
                queue.add_size(offset, size)

    def _enqueue_buried(self, change: Change, buried: Buried, now: int) -> None:
        """As ``_bury``, of rejects whose copies are in a segment. Raises nothing."""
        source = self.exchanges.get(buried.exchange)
        routes: dict[int, Selection] = {}
        if source is not None and not buried.queue.deleted:
            routes = route_rows(source, buried.keys.column("routing_key"), buried.keys.column("properties"))
        change.sequence = change.sequence or self.next_sequence()
        self.enqueue_block(
            change, buried.block_id, buried.rows, buried.size_bytes, routes, change.sequence, now, expiring=False, readable=False
        )

    def delete_abandoned(self, change: Change) -> None:
        """Auto-delete queues whose last consumer has gone. One that an app owns, or that is consumed again, stays."""
        self.undo.attribute(self, "abandoned")
        abandoned, self.abandoned = self.abandoned, []
        self.delete_unused(change, abandoned)

    def prepare(self, change: Change, transaction: Transaction, xid: str, now: int) -> Literal["prepared", "read_only"]:
        """Durable, invisible, transferable (XA), and sure to be committable: all that could refuse its commit refuses now.

        Nothing to do: read-only, and the transaction is over. Raises, with nothing changed, TransactionState, PreconditionFailed (a full
        queue), CorruptSegment.
        """
        if not xid:
            raise TransactionState("a prepared transaction needs an xid: give it a unique one")
        self._check_new(xid)
        if not transaction:
            self._become(transaction, State.COMMITTED)
            return "read_only"
        self.check_overflow(transaction.incoming)
        self.check_readable(transaction.settles)
        self._become(transaction, State.PREPARED)
        for spilled in transaction.spilled:
            self.blocks.name(spilled.block_id, spilled.rows, spilled.size_bytes)
            self.blocks.pin(spilled.block_id)
            change.names.append(spilled.block_id)
        self.undo.attribute(transaction, "xid")
        self.undo.item(self.prepared, xid)
        self.undo.item(self.prepared_at, xid)
        transaction.xid = xid
        self.prepared[xid] = transaction
        self.prepared_at[xid] = now
        self.keep_room(transaction.incoming)
        change.put(transaction.record(now))
        return "prepared"

    def commit_prepared(self, change: Change, xid: str, now: int) -> Committed:
        """A committed transaction may be committed again. Raises UnknownTransaction, TransactionState (rolled back), CorruptSegment."""
        if self._decided(xid, "committed"):
            return Committed(0, [])
        dropped = self.prepared[xid].dropped
        self.give_room_back(self.prepared[xid].incoming)
        committed = self.commit_transaction(change, self.prepared[xid], now)
        self._forget_prepared(change, xid)
        return committed._replace(dropped=dropped)

    def rollback_prepared(self, change: Change, xid: str, now: int) -> None:
        """Its deliveries are ready again, as redelivered. Raises UnknownTransaction, TransactionState (committed)."""
        if self._decided(xid, "rolled_back"):
            return
        transaction = self.prepared[xid]
        self._become(transaction, State.ROLLED_BACK)
        self.give_room_back(transaction.incoming)
        self.requeue(((queue, offset) for queue, offset, _ in transaction.settles), change, now)
        self.remember(change, OutcomeRecord(xid, "rolled_back", now))
        self._forget_prepared(change, xid)

    def outcome(self, xid: str, since_us: int = 0) -> str:
        """Was it committed? ``prepared``, ``committed``, ``rolled_back``.

        Raises UnknownTransaction (there was none since ``since_us``), UnknownOutcome (there may have been one, and it is forgotten).
        """
        if xid in self.prepared:
            return "prepared"
        if xid not in self.outcomes:
            self.outcomes.require_known(xid, since_us)
            raise UnknownTransaction(f"no transaction has the xid '{xid}': it was not prepared and has not ended")
        return self.outcomes[xid].state

    def _decided(self, xid: str, wanted: str) -> bool:
        """Whether it has ended as ``wanted`` already."""
        state = self.outcome(xid)
        if state not in ("prepared", wanted):
            raise TransactionState(f"transaction '{xid}' is {state}, it cannot become {wanted}")
        return state == wanted

    def _check_new(self, xid: str) -> None:
        check_text("an xid", xid)
        if xid in self.prepared or xid in self.outcomes:
            raise TransactionState(f"transaction '{xid}' is {self.outcome(xid)}: an xid names one transaction only, choose another")

    def _become(self, transaction: Transaction, state: State) -> None:
        self.undo.append((setattr, transaction, "state", transaction.state))
        transaction.become(state)

    def _forget_prepared(self, change: Change, xid: str) -> None:
        self.undo.item(self.prepared, xid)
        self.undo.item(self.prepared_at, xid)
        for spilled in self.prepared.pop(xid).spilled:
            self.blocks.unpin(spilled.block_id)
        self.blocks.record(change)
        del self.prepared_at[xid]
        change.drop(PreparedRecord, (xid,))

    def name_transaction(self, name: str, now: int) -> None:
        """Messages that are committed ``now`` belong to a transaction of this name. Each work of a commit has a time of its own."""
        self.undo.item(self._names, now)
        self._names[now] = name
        if len(self._names) > NAMES_KEPT:
            del self._names[next(iter(self._names))]

    def transaction_of(self, row: InboxRow) -> str:
        """The id of the transaction that published a message: its name while that is remembered, else a unique id.

        "" for a message that was published outside a transaction.
        """
        return (self._names.get(row.committed_at) or f"{self.identity}:{row.sequence}") if row.sequence % 2 else ""

    def remember(self, change: Change, record: OutcomeRecord) -> None:
        """How a named transaction ended."""
        self.outcomes.remember(change, record)

    # -- ownership (protocol S6) ----------------------------------------------------------------------------------------
    def require_ownable(self, queue: Queue, app_id: str) -> None:
        """Raises ResourceLocked while channels hold deliveries, or where another app owns the queue."""
        if queue.owner == app_id:
            return
        if queue.owner:
            raise ResourceLocked(
                f"queue '{queue.name}' belongs to app '{queue.owner}', not to '{app_id}'; "
                f"`txmq release {queue.owner} {queue.name}` takes it from a pipeline that will not come back"
            )
        if queue.consumers:
            raise ResourceLocked(
                f"queue '{queue.name}' cannot be owned by app '{app_id}': {len(queue.consumers)} consumers are subscribed to it; "
                "cancel them first, or give the stream a queue of its own"
            )
        if queue.held:
            raise ResourceLocked(
                f"queue '{queue.name}' cannot be owned by app '{app_id}': channels or prepared transactions hold "
                f"{len(queue.held)} of its messages; let them ack or close first"
            )
        if not queue.durable:
            raise PreconditionFailed(
                f"queue '{queue.name}' is not durable: a stream needs a queue that survives the broker; declare it durable"
            )
        if queue.exclusive:
            raise ResourceLocked(f"queue '{queue.name}' is exclusive to a connection: app '{app_id}' cannot own it")

    def own(self, change: Change, queue: Queue, app_id: str, start: int = 0) -> None:
        """From its first claim an app owns a queue, and skips what lies below ``start``. Raises as ``require_ownable``."""
        if queue.owner != app_id:
            self.require_ownable(queue, app_id)
            queue.own(app_id, start)
            queue.record(change)

    def release(self, change: Change, queue: Queue) -> None:
        """Nobody owns the queue any more. Whether the caller may say so is its rule."""
        queue.release()
        queue.record(change)

    # -- upkeep ---------------------------------------------------------------------------------------------------------
    def sealing(self, block_id: int) -> list[RunRecord]:
        """The runs of an open block that goes to a segment; their records belong into the change that seals it."""
        puts: list[RunRecord] = []
        for queue in self.queues.values():
            if queue.written:
                puts += queue.record_runs(block_id)
        return puts

    def living_rows(self, block_ids: Sequence[int]) -> dict[int, tuple[bytes, int]]:
        """Per block a bitmap of the rows that some queue still needs, and how many; none for a block that a staged part holds."""
        masks = {block_id: np.zeros(self.blocks.rows(block_id), dtype=np.bool_) for block_id in block_ids if block_id in self.blocks.by_id}
        pins = dict.fromkeys(masks, 0)
        for queue in self.queues.values():
            for run in queue.runs_in(masks.keys()):
                pins[run.block_id] += 1
                mask = masks[run.block_id]
                rows = np.asarray(run.rows())
                for start, end in queue.needed_within(run.first, run.end):
                    mask[rows[start - run.first : end - run.first]] = True
        return {
            block_id: (np.packbits(mask, bitorder="little").tobytes(), int(np.count_nonzero(mask)))
            for block_id, mask in masks.items()
            if pins[block_id] == self.blocks.by_id[block_id].pins
        }

    def moved(self, change: Change, block_id: int) -> bool:
        """A rewritten block is in another segment; False where nothing needs it any more."""
        if block_id not in self.blocks.by_id:
            change.forgets.append(block_id)
            return False
        change.moves.append(block_id)
        return True

    def closing(self, change: Change) -> None:
        """A clean end: how far each queue was handed out."""
        for queue in self.queues.values():
            queue.record(change)
            if queue.written:
                change.put(queue.progress())


def _first(entry: tuple[int, Any]) -> int:
    return entry[0]
