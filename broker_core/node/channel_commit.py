"""The commit of a channel, the same behind every door: AMQP, Flight, and this process.

    1. spill         what is too much for the catalog is written to a segment
    2. write ahead   very many dead letters are written to segments, in a thread that may wait
    3. commit        one work: the rights are asked again, and all of the transaction becomes one change
    4. finish        the channel begins its next transaction (``Channel.finish``)

A caller that may wait calls :meth:`ChannelCommits.run`. The loop of AMQP calls the steps, and waits between
them in its own way (``server/amqp/commands/tx.py``).

Not here: what a commit means (``broker/commit.py``), groups of commits (``committer.py``).
Invariant: until step 3 nothing that the transaction holds is visible, and what steps 1 and 2 have written is
forgotten if step 3 fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import pyarrow as pa

from broker_core.broker.access.rights import Rights
from broker_core.broker.broker import BrokerState
from broker_core.broker.channel import Channel
from broker_core.broker.command_permissions import publish_again
from broker_core.broker.commit import CommitResult
from broker_core.broker.message.dead_letter import DeadLetters
from broker_core.broker.message.removals import messages_of
from broker_core.broker.queue import Queue
from broker_core.broker.state.change import Change, InboxRow
from broker_core.broker.transaction.publish import Publish
from broker_core.broker.transaction.spilled import Spilled, spill
from broker_core.broker.transaction.transaction import DeadLetterBlock, Settle, Transaction, to_rows
from broker_core.errors import CorruptSegment, DataLoss, Unroutable
from broker_core.ids import BlockId
from broker_core.message.message import Message
from broker_core.message.properties import TRANSIENT, delivery_mode
from broker_core.node.committer import Committer
from broker_core.node.deferred_signals import uninterrupted
from broker_core.store.port import BlockInfo

# An open transaction above these limits is written to a segment in pieces, so the broker's memory stays flat.
SPILL_ROWS = 16_384
SPILL_BYTES = 4 * 1024 * 1024
# So is, at its commit, one that reaches very many queues: a run of each takes less time than entries.
MANY_ENTRIES, MANY_QUEUES = 10_000, 8  # of all messages, and of one on average
PIECE_SETTLES, PIECE_REJECTS = 2_048, 512  # in one commit of what a channel gathered outside a transaction
_STEP = 256  # dead letters that are read under the lock at a time
_BLOCK_ROWS = 16_384
_BLOCK_BYTES = 4 * 1024 * 1024

Call = tuple[str, int]  # of a channel that another process holds: its id, and the number of the call


@dataclass
class DeadLetterBatch:
    """Copies in segments; ``places`` are the indexes of their rejects in ``settles``. They are routed at the
    commit. A reject that was not copied (additional routing keys, a message that cannot be read) stays a
    reject, which the commit handles as usual.
    """

    dead_letter_blocks: list[DeadLetterBlock] = field(default_factory=list)
    places: list[int] = field(default_factory=list)

    def apply(self, transaction: Transaction) -> None:
        settles = transaction.settles
        for place in self.places:
            queue, offset, _ = settles[place]
            settles[place] = Settle(queue, offset, "copied")
        transaction.dead_letter_blocks += self.dead_letter_blocks

    @property
    def appended(self) -> list[BlockId]:
        return [dead_letter_block.block_id for dead_letter_block in self.dead_letter_blocks]


class ChannelCommits:
    """``append`` writes bytes to a segment, outside a commit. ``spill_rows``, ``spill_bytes``: see
    ``spill_early``.
    """

    def __init__(
        self,
        state: BrokerState,
        committer: Committer,
        append: Callable[[pa.RecordBatch], BlockInfo],
        clock: Callable[[], int],
    ) -> None:
        self._state = state
        self._committer = committer
        self._append = append
        self._clock = clock
        self.spill_rows, self.spill_bytes = SPILL_ROWS, SPILL_BYTES

    def run(
        self,
        channel: Channel,
        transaction: Transaction,
        rights: Rights | None,
        call: Call | None = None,
        routed: bool = False,
    ) -> CommitResult:
        """Steps 1 to 3, for a caller that may wait. ``routed``: every mandatory message must reach a queue.
        Raises what ``commit`` raises, StoreFailed, and Unroutable.
        """
        if transaction.transactional:  # one publish or ack is no more than a row
            self.spill_large(transaction)
        if transaction.settles and transaction.rejects_many:
            self.write_ahead(transaction).apply(transaction)

        def work(_state: BrokerState, change: Change, now: int) -> CommitResult:
            committed = self.commit(channel, transaction, rights, call, change, now)
            if routed and committed.returned:
                raise _unroutable(committed.returned)
            return committed

        return self._committer.run(work)

    # -- 1. spill --------------------------------------------------------------------------------------------
    def pieces(self, transaction: Transaction) -> list[Transaction]:
        """Returns what a channel gathered outside a transaction, cut where it is too much for one commit:
        others commit in between.
        """
        settles = PIECE_REJECTS if transaction.rejects_many else PIECE_SETTLES
        ends = list(self._ends(transaction)) if reaches_many_queues(transaction) else []
        if not ends and len(transaction.settles) <= settles:
            return [transaction]
        return _cut(transaction, ends, settles)

    def _ends(self, transaction: Transaction) -> Iterator[int]:
        """Where publishes to very many queues are cut. Queues that equal routes reach in a run are counted
        once, if no message is checked for room.
        """
        each = bool(transaction.incoming or self._state.virtual_hosts.limited)
        known: set[int] = set()
        entries = 0
        for place, (_, queues, _) in enumerate(transaction.publishes):
            more = len(queues) if each or id(queues) not in known else 1
            if entries and entries + more > MANY_ENTRIES:
                yield place
                entries, more = 0, len(queues)
                known.clear()
            entries += more
            known.add(id(queues))

    @uninterrupted
    def spill(self, transaction: Transaction) -> None:
        """Writes the publishes so far to a segment."""
        spilled = self.write(transaction)
        if spilled is not None:
            transaction.spill(spilled)

    def write(self, transaction: Transaction) -> Spilled | None:
        """The same, in any thread: the transaction, which must not change meanwhile, gets it later."""
        publishes = [publish for publish in transaction.publishes if publish.queues or publish.mandatory]
        if not publishes:
            return None
        info = self._append(to_rows([publish.message for publish in publishes]))
        return spill(info.block_id, info.size_bytes, publishes)

    def spill_full(self, transaction: Transaction) -> None:
        """Spills a large transaction while it is open, so that memory stays flat."""
        if len(transaction.publishes) >= self.spill_rows or transaction.unspilled_bytes >= self.spill_bytes:
            self.spill(transaction)

    def spill_early(self, early: bool) -> None:
        """Lowers the limits of ``spill_full`` to a sixteenth while open transactions use too much memory
        together, or restores them.
        """
        parts = 16 if early else 1
        self.spill_rows, self.spill_bytes = SPILL_ROWS // parts, SPILL_BYTES // parts

    def spill_large(self, transaction: Transaction, *, prepare: bool = False) -> None:
        """Before its commit: writes what is too much for the catalog to a segment, but not messages that need
        no catalog, fit into memory and reach few queues. Before it is prepared, all of it is written.
        """
        many_queues = reaches_many_queues(transaction)
        if many_queues or transaction.is_large:
            small = len(transaction.publishes) < SPILL_ROWS and transaction.unspilled_bytes < SPILL_BYTES
            if prepare:
                self.spill(transaction)
            elif transaction.atomic:
                if (
                    many_queues
                    or not small
                    or transaction.spilled
                    or any(map(_is_written, transaction.publishes))
                ):
                    self.spill(transaction)
            elif not (transaction.incoming or self._state.virtual_hosts.limited) and (
                many_queues
                or all(_is_written(publish) for publish in transaction.publishes if publish.queues)
            ):
                # otherwise each message is checked for room, or some are never written
                self.spill(transaction)

    # -- 2. write ahead --------------------------------------------------------------------------------------
    def write_ahead(self, transaction: Transaction) -> DeadLetterBatch:
        """If ``Transaction.rejects_many``, in a thread that may wait: writes the dead letters. ``apply`` the
        result, or ``discard`` what it has appended.

        A commit blocks all others, so it must not make fifty thousand copies. They are made before, a few at
        a time under the lock; the transaction must not change meanwhile.
        """
        dead_letters = DeadLetterBatch()
        places: dict[Queue, list[int]] = {}
        for place, (queue, _, outcome) in enumerate(transaction.settles):
            if outcome == "reject" and queue.arguments.dead_letters:
                places.setdefault(queue, []).append(place)
        try:
            for queue, found in places.items():
                rejects = [(place, transaction.settles[place].offset) for place in found]
                self._write_queue_ahead(queue, rejects, dead_letters)
        except BaseException:
            if self._committer.failure is None:
                self.discard(dead_letters.appended)
            raise
        return dead_letters

    def _write_queue_ahead(
        self, queue: Queue, rejects: list[tuple[int, int]], dead_letters: DeadLetterBatch
    ) -> None:
        """Writes the copies of the rejects of one queue; ``rejects`` are indexes and offsets."""
        exchange, key = queue.arguments.dead_letter_exchange, queue.arguments.dead_letter_routing_key
        letters = DeadLetters(queue.name, "rejected", exchange, key, self._clock(), self._state.names.of)
        messages: list[Message] = []
        copied: list[int] = []
        size_bytes = 0

        def write() -> None:
            nonlocal messages, copied, size_bytes
            if messages:
                rows = to_rows(messages)
                info = self._append(rows)
                keys = rows.select(["routing_key", "properties"])
                dead_letters.dead_letter_blocks.append(
                    DeadLetterBlock(queue, exchange, info.block_id, info.rows, info.size_bytes, keys)
                )
                dead_letters.places += copied
            messages, copied, size_bytes = [], [], 0

        for start in range(0, len(rejects), _STEP):
            step = rejects[start : start + _STEP]
            try:
                rows = self._rows(queue, [offset for _, offset in step])
            except (CorruptSegment, DataLoss):
                continue  # the commit raises it
            if len(rows) != len(step):
                continue  # some are settled
            for (place, _), row in zip(step, rows, strict=True):
                message, keys, _ = letters.copy(row)
                if not keys:
                    messages.append(message)
                    copied.append(place)
                    size_bytes += len(message.body)
            if len(messages) >= _BLOCK_ROWS or size_bytes >= _BLOCK_BYTES:
                write()
        write()

    def _rows(self, queue: Queue, offsets: list[int]) -> list[InboxRow]:
        return self._committer.read(lambda _state: [] if queue.deleted else messages_of(queue, offsets))

    def discard(self, block_ids: list[BlockId]) -> None:
        """Forgets the bytes of a transaction that ended without them."""
        if block_ids:
            self._committer.run(lambda _state, change, _now: change.forgets.extend(block_ids))

    # -- 3. commit -------------------------------------------------------------------------------------------
    def commit(
        self,
        channel: Channel,
        transaction: Transaction,
        rights: Rights | None,
        call: Call | None,
        change: Change,
        now: int,
    ) -> CommitResult:
        """A work. ``call`` is remembered with the commit, so that it is answered again if it is repeated.

        Raises NotAllowed (the virtual host is deleted), AccessRefused, and what ``Commits.commit`` raises.
        """
        _ask_again(channel, transaction, rights)
        change.effects.who = channel.who
        committed = self._state.transactions.commit(change, transaction, now)
        if call is not None:
            self._state.names.outcomes.remember_call(change, *call, now)
        return committed

    def prepare(
        self,
        channel: Channel,
        transaction: Transaction,
        rights: Rights | None,
        call: Call | None,
        xid: str,
        user: str,
        change: Change,
        now: int,
    ) -> Literal["prepared", "read_only"]:
        """The same, to prepare it under ``xid``, which belongs to ``user``."""
        _ask_again(channel, transaction, rights)
        prepared = self._state.prepared.prepare(change, transaction, xid, now, channel.state.vhost, user)
        if call is not None:
            self._state.names.outcomes.remember_call(change, *call, now)
        return prepared


def _unroutable(returned: list[Message]) -> Unroutable:
    first = returned[0]
    return Unroutable(
        f"{len(returned)} messages of the transaction reach no queue, the first one from exchange "
        f"'{first.exchange}' with the key '{first.routing_key}'; nothing is committed"
    )


def _ask_again(channel: Channel, transaction: Transaction, rights: Rights | None) -> None:
    """The virtual host may have been deleted since it began, and rights may have changed."""
    state = channel.state
    if state.topology.deleted:
        state.topology.require_there()
    if rights is not None and channel.asked is not state.users.epoch and not rights.everything:
        publish_again(rights, state.topology, transaction, state.blocks)


def _cut(transaction: Transaction, ends: Sequence[int], most: int) -> list[Transaction]:
    """Splits one that is not atomic and not spilled. Returns its publishes, cut at ``ends``, and then its
    settles, ``most`` in a piece. What is requeued is one: what was published later must not come between.
    """
    publishes, settles = transaction.publishes, transaction.settles
    bounds = pairwise([0, *ends, len(publishes)] if publishes else [])
    pieces = [_piece(transaction, publishes[start:end], []) for start, end in bounds]
    requeued = [settle for settle in settles if settle.outcome == "requeue"]
    others = [settle for settle in settles if settle.outcome != "requeue"] if requeued else settles
    some = [others[start : start + most] for start in range(0, len(others), most)]
    return pieces + [_piece(transaction, [], each) for each in (*some, requeued) if each]


def _piece(whole: Transaction, publishes: list[Publish], settles: list[Settle]) -> Transaction:
    piece = Transaction(whole.limits, whole.opened_us)
    piece.atomic, piece.connection = False, whole.connection
    piece.publishes, piece.settles = publishes, settles
    piece.messages = len(publishes)
    piece.size_bytes = sum(len(message.body) for message, _, _ in publishes)
    piece.unspilled_bytes = piece.size_bytes + sum(len(message.properties) for message, _, _ in publishes)
    piece.incoming = whole.incoming  # only whether there are any
    return piece


def reaches_many_queues(transaction: Transaction) -> bool:
    """Whether it takes long to say which queue gets which of its messages."""
    count = len(transaction.publishes)
    if count < 2:
        return False
    entries = sum([len(queues) for _, queues, _ in transaction.publishes])
    return entries > MANY_ENTRIES and entries >= MANY_QUEUES * count


def _is_written(publish: Publish) -> bool:
    """Returns whether the message must survive a restart."""
    properties = publish.message.properties
    return not (properties and delivery_mode(properties) == TRANSIENT) and any(
        queue.written for queue in publish.queues
    )
