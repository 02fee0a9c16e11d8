"""The transaction: what it collects between its start and its end, its states, and its name.

Not here: how it becomes durable (``commit.py``), and where the bytes of a large one are written
(``node/node.py`` spills them).

    active --prepare--> prepared --commit / rollback--> committed / rolled_back
    active --commit / rollback-----------------------> committed / rolled_back

Invariant: nothing that a transaction collects is visible or durable before it is committed or prepared;
``publishes`` and ``spilled`` together keep the order of publishing (spilled rows come first).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, NamedTuple

import pyarrow as pa

from broker_core.arrow.parts import stream_of
from broker_core.broker.access.users import name_of
from broker_core.broker.queue import Queue, Queues
from broker_core.broker.transaction.publish import Publish
from broker_core.broker.transaction.spilled import Letters, Spilled, SpilledLetters, restore
from broker_core.core.block import EXPIRATION, NotLoaded, selected_rows
from broker_core.core.change import InboxRow
from broker_core.core.errors import TransactionState, TransactionTooLarge
from broker_core.core.ids import BlockId, QueueId
from broker_core.core.records import PreparedRecord
from broker_core.core.undo import Undo
from broker_core.message.message import MAX_BODY_BYTES, MESSAGE_SCHEMA, Message

# reject: dead-letter, or drop
Outcome = Literal["ack", "reject", "requeue"]


class State(Enum):
    ACTIVE = "active"
    PREPARED = "prepared"
    COMMITTED = "committed"
    ROLLED_BACK = "rolled_back"
    __hash__ = object.__hash__  # Enum's own is written in Python, and every commit uses the table


_new = tuple.__new__  # takes a third of the time of a NamedTuple's own
_PUBLISH_BYTES = 400  # of a publish, without its body and properties

_NEXT = {
    State.ACTIVE: {State.PREPARED, State.COMMITTED, State.ROLLED_BACK},
    State.PREPARED: {State.COMMITTED, State.ROLLED_BACK},
    State.COMMITTED: set[State](),
    State.ROLLED_BACK: set[State](),
}


class Settle(NamedTuple):
    """A delivery marked with its outcome."""

    queue: Queue
    offset: int
    outcome: Outcome


class Consumed(NamedTuple):
    """Offsets [start, end) of a queue that an app owns. They are settled, and kept for replays until the app
    acks them.
    """

    queue: Queue
    start: int
    end: int


# At its commit, what is above these limits is written to a segment, not row by row to the catalog.
INBOX_ROWS = 1_000
INBOX_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one transaction (decision 18), and of the body of one message. None: no limit."""

    messages: int | None = 10_000_000
    size_bytes: int | None = 8 * 1024**3
    open_s: float | None = None
    body_bytes: int = MAX_BODY_BYTES


class Transaction:
    """``xid``: the key of a named transaction (``access/users.py``), else ""; a commit token is the xid of
    a one-phase commit.

    A transaction that is not ``atomic`` is what a channel collected outside tx.select: each of its publishes
    succeeds or fails separately. It is also not ``transactional``: its messages belong to no transaction.
    ``connection`` is the publisher's, for no-local consumers.
    """

    __slots__ = (
        "atomic", "connection", "entries", "gone", "incoming", "letters", "limits", "messages",
        "opened_us", "publishes", "settles", "size_bytes", "spilled", "state", "transactional",
        "unspilled_bytes", "xid",
    )  # fmt: skip

    staged: Sequence[Spilled | list[Publish]] = ()  # in this order
    consumed: Sequence[Consumed] = ()
    decided = False

    def __init__(self, limits: Limits, opened_us: int, xid: str = "") -> None:
        self.xid = xid
        self.atomic = True
        self.transactional = False  # the channel is in tx mode
        self.connection: object = None
        self.state = State.ACTIVE
        self.limits = limits
        self.opened_us = opened_us
        self.publishes: list[Publish] = []
        self.entries = 0  # how many queues they reach
        self.spilled: list[Spilled] = []
        self.settles: list[Settle] = []
        self.letters: Letters | None = None  # None: it rejects nothing that has a dead-letter exchange
        # messages and bytes for each queue that has a maximum length
        self.incoming: dict[Queue, tuple[int, int]] = {}
        self.messages = 0
        self.size_bytes = 0
        self.unspilled_bytes = 0
        self.gone = 0  # of a prepared one after a restart: its effects on queues that did not survive

    def __bool__(self) -> bool:
        """Returns whether there is anything to commit."""
        return bool(self.publishes or self.settles or self.spilled)

    @property
    def is_large(self) -> bool:
        """Returns whether it has too much for the catalog, so that it is spilled before its commit."""
        return len(self.publishes) > INBOX_ROWS or self.unspilled_bytes > INBOX_BYTES

    def publish(self, message: Message, queues: Queues, mandatory: bool = False) -> None:
        """Adds a publish. Raises TransactionTooLarge, with nothing added."""
        size_bytes = len(message.body)
        messages, limit = self.messages, self.limits.messages
        if size_bytes > self.limits.body_bytes:
            raise TransactionTooLarge(
                f"a message body of {size_bytes} bytes is over the limit of {self.limits.body_bytes}: split "
                "it, or store it elsewhere and send a reference; --max-message-size is the limit"
            )
        if limit is not None and messages >= limit:
            raise TransactionTooLarge(
                f"the transaction holds {messages} messages, which is the limit: commit it, or raise "
                "--transaction-messages"
            )
        total, limit = self.size_bytes + size_bytes, self.limits.size_bytes
        if limit is not None and total > limit:
            raise TransactionTooLarge(
                f"the transaction would hold more than {limit} bytes of bodies, which is the limit: commit "
                "it, or raise --transaction-bytes"
            )
        for queue in queues:
            if queue.arguments.limited:
                self._count(queue, 1, size_bytes)
        self.publishes.append(_new(Publish, (message, queues, mandatory)))
        self.entries += len(queues)
        self.messages = messages + 1
        self.size_bytes = total
        self.unspilled_bytes += size_bytes + len(message.properties)

    def publish_many(
        self, like: Message, bodies: Sequence[bytes], queues: Queues, mandatory: bool, now_us: int
    ) -> bool:
        """Does what ``Channel.publish`` does with a message for each body, which has all else of ``like``.
        Returns False, with nothing done, if one of them may have to be refused.
        """
        _, routing_key, exchange, properties = like
        count, size_bytes = len(bodies), sum(map(len, bodies))
        most, most_bytes = self.limits.messages, self.limits.size_bytes
        if (
            (properties and properties[0] & EXPIRATION)
            or size_bytes > self.limits.body_bytes
            or (most is not None and self.messages + count > most)
            or (most_bytes is not None and self.size_bytes + size_bytes > most_bytes)
        ):
            return False
        if now_us and not self:
            self.opened_us = now_us
        for queue in queues:
            if queue.arguments.limited:
                self._count(queue, count, size_bytes)
        self.publishes += [
            _new(Publish, (_new(Message, (body, routing_key, exchange, properties)), queues, mandatory))
            for body in bodies
        ]
        self.entries += count * len(queues)
        self.messages += count
        self.size_bytes += size_bytes
        self.unspilled_bytes += size_bytes + count * len(properties)
        return True

    def _count(self, queue: Queue, messages: int, size_bytes: int) -> None:
        counts = self.incoming.get(queue, (0, 0))
        self.incoming[queue] = (counts[0] + messages, counts[1] + size_bytes)

    def settle(self, settles: Sequence[Settle]) -> None:
        """Adds settled deliveries, all with the same outcome."""
        self.settles += settles
        if settles and settles[0].outcome == "reject":
            self.expect_letters(settles)

    def expect_letters(self, settles: Iterable[Settle]) -> None:
        """Counts the dead letters of what it rejects."""
        rejected = [queue for queue, _, outcome in settles if outcome == "reject"]
        count = sum(queue.arguments.dead_letters for queue in rejected)
        if count:
            self.letters = self.letters or Letters()
            self.letters.count += count

    @property
    def letters_ahead(self) -> Sequence[SpilledLetters]:
        """Returns its dead letters that were written before its commit."""
        return () if self.letters is None else self.letters.ahead or ()

    def blocks_with_ids(self) -> list[tuple[BlockId, Queue]]:
        """Returns its stored blocks, each with the queues that remember the ids of its messages."""
        return [
            (each.block_id, queue)
            for each in (*self.spilled, *self.staged)
            if isinstance(each, Spilled)
            for queue, _ in each.selections
            if queue.log.ids is not None and not queue.deleted
        ]

    @property
    def memory_bytes(self) -> int:
        """Returns the approximate size of what it holds in memory."""
        return self.unspilled_bytes + _PUBLISH_BYTES * len(self.publishes)

    @property
    def appended(self) -> list[BlockId]:
        """Returns the blocks that belong to nothing after a rollback."""
        return [
            *(spilled.block_id for spilled in self.spilled),
            *(spilled.block_id for _, spilled in self.letters_ahead),
        ]

    def check_open_time(self, now_us: int) -> None:
        """Raises TransactionTooLarge if it has been open for too long."""
        limit_s = self.limits.open_s
        if limit_s is not None and self and now_us - self.opened_us > limit_s * 1_000_000:
            raise TransactionTooLarge(
                f"the transaction is open for longer than {limit_s} s, the limit: it is rolled back; commit "
                "more often, or raise --transaction-time or the timeout that the client has set"
            )

    def spill(self, spilled: Spilled) -> None:
        """Drops the publishes so far from memory; they are in a segment."""
        self.spilled.append(spilled)
        self.publishes = []
        self.entries = self.unspilled_bytes = 0

    @property
    def dropped(self) -> int:
        """Returns how many messages and settled deliveries have no effect because their queue was deleted."""
        return (
            self.gone
            + sum(queue.deleted for publish in self.publishes for queue in publish.queues)
            + sum(
                selection.rows
                for spilled in self.spilled
                for queue, selection in spilled.selections
                if queue.deleted
            )
            + sum(queue.deleted for queue, _, _ in self.settles)
        )

    def record(self, now_us: int, vhost: str) -> PreparedRecord:
        """Returns the record of a prepared transaction. ``routes`` starts with one object for each spilled
        block, then has a list of queue ids for each publish.
        """
        routes: list[object] = [spilled.record() for spilled in self.spilled]
        routes += [[queue.queue_id for queue in publish.queues] for publish in self.publishes]
        settles = [[queue.queue_id, offset, outcome] for queue, offset, outcome in self.settles]
        rows = to_rows([publish.message for publish in self.publishes])
        publishes = bytes(stream_of([rows], MESSAGE_SCHEMA))
        return PreparedRecord(self.xid, now_us, publishes, routes, settles, vhost)

    @classmethod
    def restore(cls, record: PreparedRecord, queues: Mapping[QueueId, Queue]) -> Transaction:
        """Restores a prepared transaction after a restart. Deleted queues are left out; ``gone`` counts the
        messages and settlements lost by that.
        """
        transaction = cls(Limits(None, None), record.prepared_at, record.xid)
        transaction.state = State.PREPARED
        transaction.transactional = True
        rows = pa.ipc.open_stream(record.publishes).read_all().to_pylist()
        messages = (Message(*map(row.__getitem__, Message._fields)) for row in rows)
        for route in record.routes:
            if isinstance(route, dict):
                spilled, gone = restore(route, queues)
                transaction.spilled.append(spilled)
                transaction.gone += gone
                transaction.messages += spilled.rows
                transaction.size_bytes += spilled.size_bytes
                for queue, selection in spilled.selections:
                    if queue.arguments.limited:
                        transaction._count(
                            queue, selection.rows, spilled.size_bytes * selection.rows // spilled.rows
                        )
            else:
                found = tuple(queues[queue_id] for queue_id in route if queue_id in queues)
                transaction.gone += len(route) - len(found)
                transaction.publish(next(messages), found)
        transaction.settles = [
            Settle(queues[queue_id], offset, outcome)
            for queue_id, offset, outcome in record.settles
            if queue_id in queues
        ]
        transaction.gone += len(record.settles) - len(transaction.settles)
        transaction.expect_letters(transaction.settles)
        return transaction

    def become(self, state: State) -> None:
        """Changes the state. Raises TransactionState for a change that is not in the diagram above."""
        if state not in _NEXT[self.state]:
            name = f"'{name_of(self.xid)}' " if self.xid else ""
            raise TransactionState(f"transaction {name}is {self.state.value}, it cannot become {state.value}")
        self.state = state


class LettersNotAhead(NotLoaded):
    """The dead letters of ``transaction`` are too many for its commit: they must be written to segments
    before. Like NotLoaded: the caller has them written, without the lock of the state, and tries again.
    """

    def __init__(self, transaction: Transaction) -> None:
        super().__init__([])
        self.transaction = transaction


class StagedTransaction(Transaction):
    """The transaction of a micro-batch or a batch write, with what Spark's tasks have staged.

    ``decided``: it is a micro-batch; its outcome is only in its ledger entry.
    """

    __slots__ = ("consumed", "decided", "staged")

    def __init__(self, name: str, opened_us: int) -> None:
        super().__init__(Limits(None, None), opened_us, name)
        self.transactional = True
        self.staged: list[Spilled | list[Publish]] = []
        self.consumed: list[Consumed] = []
        self.decided = False

    def stage(self, piece: Spilled, rows: list[dict[str, Any]]) -> None:
        """Publishes what was staged. ``rows``: the messages, where they are few and in no block."""
        targets: list[list[Queue]] = [[] for _ in rows]
        for queue, selection in piece.selections:
            if queue.arguments.limited:
                self._count(queue, selection.rows, piece.size_bytes * selection.rows // max(1, piece.rows))
            for row in () if piece.block_id else selected_rows(selection):
                targets[row].append(queue)
        few = [Publish(Message(**row), tuple(queues)) for row, queues in zip(rows, targets, strict=True)]
        self.staged.append(piece if piece.block_id else few)


def to_rows(messages: Sequence[Message]) -> pa.RecordBatch:
    """Returns messages as MESSAGE_SCHEMA."""
    columns = {
        "exchange": [message.exchange for message in messages],
        "routing_key": [message.routing_key for message in messages],
        "body": [message.body for message in messages],
        "properties": [message.properties for message in messages],
    }
    return pa.RecordBatch.from_pydict(columns, schema=MESSAGE_SCHEMA)


NAMES_KEPT = 100_000  # for dead letters


class MessageTransactions:
    """Which transaction published a message. ``identity``: of the data directory."""

    def __init__(self, undo: Undo) -> None:
        self.identity = ""
        self._undo = undo
        self._by_time: dict[int, str] = {}  # commit time -> name

    def restore(self, pairs: Iterable[tuple[int, str]]) -> None:
        """Restores (commit time, name) of committed transactions while loading."""
        self._by_time = dict(sorted(pairs)[-NAMES_KEPT:])

    def give(self, name: str, now: int) -> None:
        """Names the transaction of messages that are committed ``now``. Each work of a commit has its own
        time.
        """
        self._undo.item(self._by_time, now)
        self._by_time[now] = name
        if len(self._by_time) > NAMES_KEPT:
            del self._by_time[next(iter(self._by_time))]

    def of(self, row: InboxRow) -> str:
        """Returns the id of the transaction that published a message: its name while that is remembered, else
        a unique id.

        Returns "" for a message that was published outside a transaction.
        """
        return (
            (self._by_time.get(row.committed_at) or f"{self.identity}:{row.sequence}")
            if row.sequence % 2
            else ""
        )
