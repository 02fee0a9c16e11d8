"""The commit of a channel, the same behind every listener: AMQP, Flight, and this process.

    1. spill         what is too much for the catalog is written to a segment
    2. commit        one work: the rights are asked again, and all of the transaction becomes one change
       write ahead   if it has too many dead letters for that, or they reach too many queues: they are written
                     to segments (``letters_ahead.py``), and it is tried again
    3. finish        the channel begins its next transaction (``Channel.finish``)

A caller that may wait calls :meth:`ChannelCommits.run`. The loop of AMQP calls the steps, and waits between
them in its own way (``server/amqp/commands/tx.py``).

Not here: what a commit means (``broker/commit.py``), groups of commits (``committer.py``).
Invariant: until step 2 nothing that the transaction holds is visible, and what was written before is
forgotten if step 2 fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Literal

import pyarrow as pa

from broker_core.broker.access.rights import Rights
from broker_core.broker.broker import BrokerState
from broker_core.broker.channel import Channel
from broker_core.broker.command_permissions import publish_again
from broker_core.broker.commit import CommitResult
from broker_core.broker.message.settlement import MANY_REJECTS
from broker_core.broker.queue import Queue
from broker_core.broker.transaction.publish import Publish
from broker_core.broker.transaction.spilled import Spilled, spill
from broker_core.broker.transaction.transaction import Settle, Transaction, to_rows
from broker_core.core.change import Change
from broker_core.core.errors import Unroutable
from broker_core.core.ids import BlockId
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
# Others wait for a commit, so what costs more is cut: of an entry, of one that may drop another for a maximum
# length, of one whose dead letter that makes, and of some bytes of its headers (a microsecond or so)
COST, ENTRY, DROP, LETTER, HEADER_BYTES = 10_000, 4, 16, 64, 8
PIECE_SETTLES, PIECE_REJECTS = 2_048, 512  # in one commit of what a channel gathered outside a transaction

Call = tuple[str, int]  # of a channel that another process holds: its id, and the number of the call


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
        """Steps 1 and 2, for a caller that may wait. ``routed``: every mandatory message must reach a queue,
        and none is dropped as a duplicate. Raises what ``commit`` raises, StoreFailed, and Unroutable.
        """
        # one publish or ack is no more than a row
        if transaction.transactional and (len(transaction.publishes) > 1 or transaction.is_large):
            self.spill_large(transaction)

        def work(_state: BrokerState, change: Change, now: int) -> CommitResult:
            change.repeats = routed  # a duplicate that is dropped would reach none
            committed = self.commit(channel, transaction, rights, call, change, now, bool(routed or call))
            returned, stored = committed.returned, committed.stored
            if routed and (returned or stored):
                some = returned or self._state.transactions.take_back(change, stored[0])
                raise _unroutable(some[0], len(returned) + sum(len(each.rows) for each in stored))
            return committed

        return self._committer.run(work)

    # -- 1. spill --------------------------------------------------------------------------------------------
    def pieces(self, transaction: Transaction) -> list[Transaction]:
        """Returns what a channel gathered outside a transaction, cut where it is too much for one commit:
        others commit in between.
        """
        rejects = sum(outcome == "reject" for _, _, outcome in transaction.settles)
        settles = PIECE_REJECTS if rejects >= MANY_REJECTS else PIECE_SETTLES
        refused = self._refused(transaction)
        letters = any(queue.arguments.dead_letters for queue in transaction.incoming)
        weight = LETTER if letters else DROP if transaction.incoming else ENTRY
        many = refused or letters or transaction.entries * weight > COST
        ends = list(self._ends(transaction, refused, weight)) if many else []
        if not ends and len(transaction.settles) <= settles:
            return [transaction]
        return _cut(transaction, ends, settles)

    def _refused(self, transaction: Transaction) -> dict[Queue, int]:
        """How many queues the dead letter of a message reaches that a queue refuses because it is full."""
        queues = [queue for queue in transaction.incoming if queue.arguments.overflow == "reject-publish-dlx"]
        if not queues:
            return {}
        with self._committer.look as state:
            return {queue: state.messages.widest(queue) for queue in queues if queue.arguments.dead_letters}

    def _ends(self, transaction: Transaction, refused: Mapping[Queue, int], weight: int) -> Iterator[int]:
        """Where publishes are cut, each of whose entries costs ``weight``. Queues that equal routes reach in
        a run are counted once, if no message is checked for room.
        """
        each = bool(transaction.incoming or self._state.virtual_hosts.limited)
        seen: set[int] = set()
        cost = 0
        for place, (message, queues, _) in enumerate(transaction.publishes):
            whole = weight * len(queues)
            if refused:
                whole += ENTRY * sum(refused.get(queue, 0) for queue in queues)
            if weight == LETTER:
                whole += len(message.properties) // HEADER_BYTES
            more = whole if each or id(queues) not in seen else ENTRY
            if cost and cost + more > COST:
                yield place
                cost, more = 0, whole
                seen.clear()
            cost += more
            seen.add(id(queues))

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
                if many_queues or not small or transaction.spilled or any(_written(transaction.publishes)):
                    self.spill(transaction)
            elif not (transaction.incoming or self._state.virtual_hosts.limited) and (
                many_queues or all(_written(transaction.publishes))
            ):
                # otherwise each message is checked for room, or some are never written
                self.spill(transaction)

    def discard(self, block_ids: list[BlockId]) -> None:
        """Forgets the bytes of a transaction that ended without them."""
        if block_ids:
            self._committer.run(lambda _state, change, _now: change.forgets.extend(block_ids))

    # -- 2. commit -------------------------------------------------------------------------------------------
    def commit(
        self,
        channel: Channel,
        transaction: Transaction,
        rights: Rights | None,
        call: Call | None,
        change: Change,
        now: int,
        later: bool = False,
    ) -> CommitResult:
        """A work. ``call`` is remembered with the commit, so that it is answered again if it is repeated;
        ``later``: see ``Commits.commit``.

        Raises NotAllowed (the virtual host is deleted), AccessRefused, and what ``Commits.commit`` raises.
        """
        if rights is not None or channel.state.topology.deleted:
            _ask_again(channel, transaction, rights)
        change.effects.who = channel.who
        committed = self._state.transactions.commit(change, transaction, now, later=later)
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


def _unroutable(first: Message, count: int) -> Unroutable:
    return Unroutable(
        f"{count} messages of the transaction reach no queue, the first one from exchange "
        f"'{first.exchange}' with the key '{first.routing_key}'; nothing is committed"
    )


def _ask_again(channel: Channel, transaction: Transaction, rights: Rights | None) -> None:
    """The virtual host may have been deleted since it began, and rights may have changed."""
    state = channel.state
    if state.topology.deleted:
        state.topology.require_there()
    if rights is not None and channel.rights_epoch is not state.users.epoch and not rights.everything:
        publish_again(rights, state.topology, transaction, state.blocks)


def _cut(transaction: Transaction, ends: Sequence[int], most: int) -> list[Transaction]:
    """Splits one that is not atomic and not spilled. Returns its publishes, cut at ``ends``, and then its
    settles, ``most`` in a piece. What is requeued is one: what was published later must not come between.
    """
    publishes, settles = transaction.publishes, transaction.settles
    bounds = pairwise([0, *ends, len(publishes)] if publishes else [])
    pieces = [cut_piece(transaction, publishes[start:end], []) for start, end in bounds]
    requeued = [settle for settle in settles if settle.outcome == "requeue"]
    others = [settle for settle in settles if settle.outcome != "requeue"] if requeued else settles
    some = [others[start : start + most] for start in range(0, len(others), most)]
    return pieces + [cut_piece(transaction, [], each) for each in (*some, requeued) if each]


def cut_piece(whole: Transaction, publishes: list[Publish], settles: Sequence[Settle]) -> Transaction:
    """Returns a part of what a channel gathered outside a transaction."""
    piece = Transaction(whole.limits, whole.opened_us)
    piece.atomic, piece.connection = False, whole.connection
    piece.publishes, piece.settles = publishes, list(settles)
    piece.entries = sum(len(queues) for _, queues, _ in publishes)
    piece.messages = len(publishes)
    piece.size_bytes = sum(len(message.body) for message, _, _ in publishes)
    piece.unspilled_bytes = piece.size_bytes + sum(len(message.properties) for message, _, _ in publishes)
    piece.incoming = whole.incoming  # only whether there are any
    return piece


def reaches_many_queues(transaction: Transaction) -> bool:
    """Whether it takes long to say which queue gets which of its messages."""
    count, entries = len(transaction.publishes), transaction.entries
    return count > 1 and entries > MANY_ENTRIES and entries >= MANY_QUEUES * count


def _written(publishes: list[Publish]) -> Iterator[bool]:
    """Whether messages must survive a restart: once for all that have the same properties and queues, of
    those that reach any.
    """
    kinds = {(message.properties, id(queues)): queues for message, queues, _ in publishes if queues}
    for (properties, _), queues in kinds.items():
        transient = properties and delivery_mode(properties) == TRANSIENT
        yield not transient and any(queue.written for queue in queues)
