"""LocalBroker: the domain over a store, thread-safe, in this process; and its channels.

Not here: the rules (``broker/``), the order of a commit (``committer.py``), sealing and compaction (``upkeep.py``), sockets.

Invariant: whatever a call answers is durable. The state is looked at and changed only under ``committer.lock``; a body is
read outside it wherever it is stored.
"""

from __future__ import annotations

import _thread
import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar
from weakref import WeakValueDictionary

import pyarrow as pa

from broker_core.broker.arguments import check_text
from broker_core.broker.broker import BrokerState, Committed
from broker_core.broker.change import Change
from broker_core.broker.channel import Channel
from broker_core.broker.content import check_properties
from broker_core.broker.outcomes import Kept
from broker_core.broker.queue import Run
from broker_core.broker.spilled import TRANSIENT, spill
from broker_core.broker.transaction import Limits, Outcome, Publish, Settle, State, Transaction, to_batch
from broker_core.checks import check_call, checked, checked_calls
from broker_core.engine import PreparedInfo, QueueInfo
from broker_core.errors import AccessRefused, OptionError, StoreError, StoreFailed, TxmqError
from broker_core.message import Delivery, Message
from broker_core.node.burial import Burial, bury, forget, is_worth_it
from broker_core.node.clock import SteadyClock, now_us
from broker_core.node.committer import Committer, Work
from broker_core.node.shield import uninterrupted
from broker_core.node.upkeep import Upkeep
from broker_core.properties import Properties, delivery_mode
from broker_core.store.codec import merged_batch
from broker_core.store.port import BatchInfo, Location, Store

T = TypeVar("T")
_new = tuple.__new__  # a third of the time of a NamedTuple's own

logger = logging.getLogger("txmq.broker")

# An open transaction with more than this goes to a segment, piece by piece: the broker's memory stays flat.
SPILL_ROWS = 16_384
SPILL_BYTES = 4 * 1024 * 1024
# What is left at its commit goes there as well when it has more than this, instead of row by row into the catalog.
INBOX_ROWS = 1_000
INBOX_BYTES = 1024 * 1024


CLOSED = "the broker is closed; open it again"


class LocalBroker:
    """Owns ``store`` from now on and closes it. ``clock`` gives microseconds since the epoch, ``ids`` unique names."""

    def __init__(
        self,
        store: Store,
        clock: Callable[[], int] = now_us,
        ids: Callable[[], str] = lambda: uuid.uuid4().hex,
        *,
        limits: Limits | None = None,
        outcomes: Kept | None = None,
        upkeep: bool = True,
        identity: str = "",
    ) -> None:
        self._store = store
        self._ids = ids
        self.limits = limits or Limits()
        try:
            self.state = BrokerState.load(store.load(), new_batch_id=store.new_batch_id, read=store.read)
            self.state.identity = identity or uuid.uuid4().hex
            self._write_repairs()
            self.state.outcomes.kept = outcomes or Kept()
        except BaseException:
            store.close(clean=False)
            raise
        self.clock = clock = SteadyClock(clock, latest_us=self.state.latest_us)
        self._mutex = _thread.allocate_lock()  # guards the next two
        self._readers: set[_thread.LockType] = set()  # gates of those who wait for messages
        self._writing = 0  # batches on their way into a segment
        self._written = threading.Event()  # set when there is none, and looked at when the broker closes
        self._closed = False
        self._channels: WeakValueDictionary[int, Channel] = WeakValueDictionary()  # by ``id``
        self.spill_rows, self.spill_bytes = SPILL_ROWS, SPILL_BYTES  # the alarm lowers them while memory is scarce
        self.awaken: Callable[[], None] | None = None  # called, by any thread, when there is something to dispatch to consumers
        self.committer = Committer(self.state, store, clock, self._published)
        self.upkeep = Upkeep(self.committer, self.state, store, clock, self.notify_consumers)
        if upkeep:
            self.upkeep.start()

    def _write_repairs(self) -> None:
        found = self.state.repaired
        for text in found.done:
            logger.warning("the catalog was repaired: %s", text)
        for text in found.problems:
            logger.error("the catalog contradicts itself; what is concerned cannot be read, the rest is served: %s", text)
        if found.journal:
            self._store.commit([Change(journal=list(found.journal))])

    # -- what the engine builds on --------------------------------------------------------------------------------------
    def run(self, work: Work[T]) -> T:
        """``work(state, change, now_us)`` in commit order; its answer, once all that it changed is durable."""
        return self.committer.run(work)

    def append(self, batch: pa.RecordBatch) -> BatchInfo:
        """Bytes into a segment, off the commit path; a work has to name them."""
        with self.writing():
            return self._store.append(batch)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Around writing to the store outside a commit: the store stays open until it is done, and a failure stops the broker."""
        self._count_writing(1)
        try:
            yield
        except StoreError as error:
            self.committer.stop(error)
            raise
        finally:
            self._count_writing(-1)

    def _count_writing(self, step: int) -> None:
        with self._mutex:
            if self._closed and step > 0:
                raise StoreFailed(CLOSED)
            self._writing += step
            if self._closed and not self._writing:
                self._written.set()

    @uninterrupted
    def spill(self, transaction: Transaction) -> None:
        """The publishes so far go to a segment."""
        publishes = [publish for publish in transaction.publishes if publish.queues or publish.mandatory]
        if not publishes:
            return
        info = self.append(to_batch([publish.message for publish in publishes]))
        transaction.spill(spill(info.batch_id, info.size_bytes, publishes))

    def spill_full(self, transaction: Transaction) -> None:
        """Keep memory flat while a transaction grows."""
        if len(transaction.publishes) >= self.spill_rows or transaction.unspilled_bytes >= self.spill_bytes:
            self.spill(transaction)

    def watch(self, channel: Channel) -> None:
        """Count what the open transaction of ``channel`` holds, for as long as the channel exists."""
        self._channels[id(channel)] = channel

    def transaction_bytes(self) -> int:
        """What open and prepared transactions hold in memory, about. From any thread."""
        channels = [found for reference in self._channels.valuerefs() if (found := reference()) is not None]
        opened = sum(channel.transaction.memory_bytes for channel in channels)
        return opened + sum(transaction.memory_bytes for transaction in list(self.state.prepared.values()))

    def spill_early(self, early: bool) -> None:
        """Open transactions take too much memory together: each spills when it is a sixteenth as large as usual."""
        parts = 16 if early else 1
        self.spill_rows, self.spill_bytes = SPILL_ROWS // parts, SPILL_BYTES // parts

    def spill_large(self, transaction: Transaction) -> None:
        """Before its commit: what is too much for the catalog goes to a segment; not what needs no catalog and fits into memory."""
        if len(transaction.publishes) > INBOX_ROWS or transaction.unspilled_bytes > INBOX_BYTES:
            small = len(transaction.publishes) < SPILL_ROWS and transaction.unspilled_bytes < SPILL_BYTES
            if transaction.atomic:
                if not small or transaction.spilled or any(map(_is_written, transaction.publishes)):
                    self.spill(transaction)
            elif not transaction.incoming and all(_is_written(publish) for publish in transaction.publishes if publish.queues):
                self.spill(transaction)  # otherwise each message is looked at on its own, by a full queue, or never written

    def spill_before_prepare(self, transaction: Transaction) -> None:
        """The same for a transaction that is to be prepared: all of it is written."""
        if len(transaction.publishes) > INBOX_ROWS or transaction.unspilled_bytes > INBOX_BYTES:
            self.spill(transaction)

    def bury(self, transaction: Transaction) -> Burial:
        """Before its commit, where ``burial.is_worth_it``, in a thread that may take its time. ``apply`` it, or ``discard_burial``."""
        return bury(transaction, self.state, self.committer, self.append, self.clock())

    def discard_burial(self, burial: Burial) -> None:
        forget(burial, self.committer)

    def discard(self, batch_ids: list[int]) -> None:
        """The bytes of a rolled-back transaction that are in a segment already."""
        if batch_ids:
            self.run(lambda _state, change, _now: change.forgets.extend(batch_ids))

    def read_batch(self, batch_id: int) -> pa.RecordBatch:
        """A whole batch, wherever it is: segment, inbox or memory. May be called within a work. Raises CorruptSegment, DataLoss."""
        self.state.batches.require(batch_id)
        batch = self.state.batches.by_id.get(batch_id)
        inbox = batch.inbox if batch is not None else None
        return self._store.read(batch_id) if inbox is None else merged_batch(inbox[:])

    def read_rows(self, run: Run) -> pa.RecordBatch:
        """The rows of a run, in offset order."""
        batch = self.read_batch(run.batch_id)
        rows = run.rows()
        return batch.slice(rows.start, len(rows)) if isinstance(rows, range) else batch.take(pa.array(rows))

    def locate(self, batch_id: int) -> Location | None:
        """Where a reader on this host finds a batch; None where it has to be read through the broker. Raises CorruptCatalog."""
        self.state.batches.require(batch_id)
        batch = self.state.batches.by_id.get(batch_id)
        return None if batch is None or batch.inbox is not None else self._store.locate(batch_id)

    def wait(self, grown: Callable[[BrokerState], bool], timeout_s: float) -> bool:
        """Wait until ``grown(state)``, which is asked after each commit that made messages visible. Raises StoreFailed."""
        deadline = time.monotonic() + timeout_s
        while True:
            gate = _thread.allocate_lock()
            gate.acquire()
            with self._mutex:
                self._readers.add(gate)  # before looking: what grows after the look opens the gate
            try:
                self.committer.check()
                with self.committer.lock:
                    if grown(self.state):
                        return True
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return False
                gate.acquire(True, min(left_s, threading.TIMEOUT_MAX))
            finally:
                with self._mutex:
                    self._readers.discard(gate)

    def _published(self) -> None:
        if self._readers:
            with self._mutex:
                readers, self._readers = self._readers, set()
            for gate in readers:
                gate.release()
        self.notify_consumers()
        self.upkeep.look()

    def notify_consumers(self) -> None:
        """After a change outside a commit that may have given consumers something, or taken their queue."""
        if self.awaken is not None and (self.state.runnable or self.state.cancelled):
            self.awaken()

    # -- what a user calls ----------------------------------------------------------------------------------------------
    def channel(self, *, connection: object = None, limits: Limits | None = None) -> LocalChannel:
        """A new channel. Exclusive queues belong to ``connection``; without one to the channel."""
        self.committer.check()
        return LocalChannel(self, connection, limits or self.limits)

    def queues(self) -> list[QueueInfo]:
        with self.committer.lock:
            return [
                QueueInfo(
                    queue.name,
                    queue.messages,
                    queue.unacknowledged,
                    queue.visible_end,
                    len(queue.consumers),
                    queue.owner,
                    queue.durable,
                    dict(queue.arguments),
                )
                for queue in sorted(self.state.queues.values(), key=lambda queue: queue.name)
                if not queue.replies
            ]

    def prepared(self) -> list[PreparedInfo]:
        """Transactions that are prepared and not decided, oldest first."""
        now = self.clock()
        with self.committer.lock:
            found = [
                PreparedInfo(
                    xid,
                    max(0, now - self.state.prepared_at[xid]) / 1e6,
                    prepared.messages,
                    len(prepared.settles),
                    prepared.size_bytes,
                    prepared.dropped,
                )
                for xid, prepared in self.state.prepared.items()
            ]
        return sorted(found, key=lambda info: -info.age_s)

    @checked
    def commit(self, xid: str) -> int:
        """Commit a prepared transaction; twice is fine. Raises UnknownTransaction, TransactionState.

        How many messages and acks of it came to nothing, because their queue is gone; a second call answers 0.
        """
        dropped = self.run(lambda state, change, now: state.commit_prepared(change, xid, now)).dropped
        log_dropped(xid, dropped)
        return dropped

    @checked
    def rollback(self, xid: str) -> None:
        """Roll back a prepared transaction; twice is fine. Raises UnknownTransaction, TransactionState."""
        self.run(lambda state, change, now: state.rollback_prepared(change, xid, now))

    @checked
    def outcome(self, xid: str, since: float | None = None) -> str:
        """Was it committed? For an xid or a commit token: prepared, committed or rolled_back.

        Raises UnknownTransaction: there is none. UnknownOutcome: there may have been one, and its outcome is forgotten; not where the
        transaction began after what is forgotten, by ``since``, in seconds since the epoch.
        """
        since_us = int(min(max(since, 0.0), 1e12) * 1_000_000) if since is not None else 0
        return self.run(lambda state, _change, _now: state.outcome(xid, since_us))

    def new_name(self) -> str:
        return f"amq.gen-{self._ids()}"

    @uninterrupted
    def close(self) -> None:
        """Twice is fine. What channels hold is delivered again after the next start. Other threads finish the commit they are in."""
        with self._mutex:
            if self._closed:
                return
            self._closed = True
            if not self._writing:
                self._written.set()
        self.upkeep.stop()
        self._written.wait()  # 1. nobody writes beside commits
        clean = self.committer.failure is None
        try:
            if clean:
                self.run(lambda state, change, _now: state.closing(change))
        except StoreFailed:
            clean = False
        finally:
            self.committer.end(StoreFailed(CLOSED))  # 2. nobody commits
            self._store.close(clean=clean)


@checked_calls(but=("publish", "get", "ack", "nack", "reject"))
class LocalChannel:
    """A transactional channel in this process (docs/transactions.md). For one thread at a time.

    Every method raises TransactionState once the channel is closed, and StoreFailed once the broker has stopped.
    ``returned`` gathers mandatory messages that reached no queue.
    """

    def __init__(self, broker: LocalBroker, connection: object, limits: Limits) -> None:
        self._broker = broker
        self._state = broker.state
        self._committer = broker.committer
        self._clock = broker.clock
        self._channel = Channel(broker.state, connection=connection, limits=limits)
        broker.watch(self._channel)
        self._timed = limits.open_s is not None
        self.call: tuple[str, int] | None = None  # of a channel that another process holds: its id, and the number of this call
        self._ended = False
        self.returned: list[Message] = []

    # -- exchanges and queues -------------------------------------------------------------------------------------------
    def exchange_declare(
        self,
        exchange: str,
        type: str = "direct",
        *,
        durable: bool = True,
        auto_delete: bool = False,
        internal: bool = False,
        arguments: dict[str, Any] | None = None,
    ) -> None:
        """Raises PreconditionFailed (exists with other properties), AccessRefused (reserved name)."""

        def work(state: BrokerState, change: Change, _now: int) -> None:
            state.declare_exchange(change, exchange, type, durable=durable, auto_delete=auto_delete, internal=internal, arguments=arguments)

        self._run(work)

    def exchange_delete(self, exchange: str, *, if_unused: bool = False) -> None:
        self._run(lambda state, change, _now: state.delete_exchange(change, exchange, if_unused=if_unused))

    def queue_declare(
        self,
        queue: str = "",
        *,
        durable: bool = True,
        exclusive: bool = False,
        auto_delete: bool = False,
        arguments: dict[str, Any] | None = None,
        passive: bool = False,
    ) -> str:
        """The queue's name; "" lets the broker choose one. ``passive`` only looks.

        Raises PreconditionFailed (exists with other properties, unknown argument), ResourceLocked, AccessRefused, QueueNotFound.
        """
        if not queue:
            queue = self._broker.new_name()
        elif queue.startswith("amq.") and not passive and queue not in self._state.queues:
            raise AccessRefused(f"queue name '{queue}' contains reserved prefix 'amq.*'")

        def work(state: BrokerState, change: Change, _now: int) -> None:
            if passive:
                state.visible_to(queue, self._channel.connection)
            else:
                state.declare_queue(
                    change,
                    queue,
                    durable=durable,
                    exclusive=exclusive,
                    auto_delete=auto_delete,
                    arguments=arguments,
                    connection=self._channel.connection,
                )

        self._run(work)
        return queue

    def queue_bind(self, queue: str, exchange: str, routing_key: str = "", arguments: dict[str, Any] | None = None) -> None:
        connection = self._channel.connection
        self._run(lambda state, change, _now: state.bind(change, queue, exchange, routing_key, arguments, connection=connection))

    def queue_unbind(self, queue: str, exchange: str, routing_key: str = "", arguments: dict[str, Any] | None = None) -> None:
        connection = self._channel.connection
        self._run(lambda state, change, _now: state.unbind(change, queue, exchange, routing_key, arguments, connection=connection))

    def queue_purge(self, queue: str) -> int:
        """How many messages were dropped; those that somebody holds stay. Raises QueueNotFound, ResourceLocked."""
        return self._run(lambda state, change, _now: state.purge(change, queue, self._channel.connection))

    def queue_delete(self, queue: str, *, if_unused: bool = False, if_empty: bool = False) -> int:
        """How many messages went with it. Raises ResourceLocked, PreconditionFailed."""
        connection = self._channel.connection
        return self._run(
            lambda state, change, _now: state.delete_queue(change, queue, if_unused=if_unused, if_empty=if_empty, connection=connection)
        )

    # -- publishing -----------------------------------------------------------------------------------------------------
    def publish(
        self, body: bytes, exchange: str = "", routing_key: str = "", properties: bytes | Properties = b"", *, mandatory: bool = False
    ) -> bool:
        """Whether the message is routed to a queue. In a transaction it waits for tx_commit, else it is durable when this returns.

        Raises ExchangeNotFound, AccessRefused, PreconditionFailed (a full queue; a delivery mode, an expiration, CC or BCC that mean
        nothing), RemoteProtocolError (damaged properties), OptionError (a routing key), TransactionTooLarge.
        """
        channel = self._channel
        if channel.closed:
            channel.check_open()
        if type(exchange) is not str or (mandatory is not True and mandatory is not False):
            check_call("publish", LocalChannel.publish, {"body": b"", "exchange": exchange, "mandatory": mandatory})
        if isinstance(properties, Properties):
            properties = properties.encode()
        if type(body) is not bytes or type(routing_key) is not str or type(properties) is not bytes:
            body, properties = _as_bytes("a body", body), _as_bytes("properties", properties)
            check_text("a routing key", routing_key)
        if properties:
            check_properties(properties)
        message = _new(Message, (body, routing_key, exchange, properties))
        source = self._state.exchanges.get(exchange)
        queues = None if source is None or source.internal else source.known(routing_key)
        if not queues:
            check_text("a routing key", routing_key)
        if queues is None:
            with self._committer.lock:
                queues = self._state.route(exchange, routing_key, properties)
        if not queues and not mandatory:
            return False
        channel.publish(message, queues, mandatory, self._clock() if self._timed else 0)
        if channel.transactional:
            self._broker.spill_full(channel.transaction)
        else:
            self._commit_single()
        return bool(queues)

    # -- deliveries -----------------------------------------------------------------------------------------------------
    @uninterrupted
    def get(self, queue: str, *, no_ack: bool = False) -> Delivery | None:
        """The next message, or None. ``no_ack``: it is settled at once. Raises QueueNotFound, ResourceLocked."""
        if type(queue) is not str or type(no_ack) is not bool:
            check_call("get", LocalChannel.get, {"queue": queue, "no_ack": no_ack})
        channel = self._channel
        channel.check_open()
        self._committer.check()
        while True:
            with self._committer.lock:
                found = self._state.usable(queue, channel.connection)
                if not self._state.head_expired(found, self._clock()):
                    delivery = channel.get(found)
                    break
            self._broker.run(lambda state, change, now, due=found: state.expire(change, now, [due]))  # type: ignore[misc]
        if delivery is not None and no_ack:
            self._settle_at_once(delivery.tag)
        return delivery

    @uninterrupted
    def _settle_at_once(self, tag: int) -> None:
        """Also within a transaction. Where it fails nobody has got the message, and it is ready again."""
        channel = self._channel
        single = Transaction(channel.limits, 0)
        queue, offset, _ = channel.unacked[tag]
        single.settles.append(Settle(queue, offset, "ack"))
        try:
            self._commit(single)
        finally:
            with self._committer.lock:
                if channel.unacked.pop(tag, None) is not None and single.state is State.ACTIVE:
                    single.become(State.ROLLED_BACK)
                    self._state.requeue([(queue, offset)])

    def ack(self, tag: int = 0, *, multiple: bool = False) -> None:
        """Raises PreconditionFailed for an unknown or repeated tag."""
        if type(tag) is not int or type(multiple) is not bool:
            check_call("ack", LocalChannel.ack, {"tag": tag, "multiple": multiple})
        self._settle(tag, "ack", multiple)

    def nack(self, tag: int = 0, *, multiple: bool = False, requeue: bool = True) -> None:
        if type(tag) is not int or type(multiple) is not bool or type(requeue) is not bool:
            check_call("nack", LocalChannel.nack, {"tag": tag, "multiple": multiple, "requeue": requeue})
        self._settle(tag, "requeue" if requeue else "reject", multiple)

    def reject(self, tag: int, *, requeue: bool = True) -> None:
        if type(tag) is not int or type(requeue) is not bool:
            check_call("reject", LocalChannel.reject, {"tag": tag, "requeue": requeue})
        self._settle(tag, "requeue" if requeue else "reject", False)

    @uninterrupted
    def _settle(self, tag: int, outcome: Outcome, multiple: bool) -> None:
        self._channel.settle(tag, outcome, multiple, self._clock() if self._timed else 0)
        if not self._channel.transactional:
            self._commit_single()

    @uninterrupted
    def recover(self) -> int:
        """Requeue what is delivered and not acked, also not in the open transaction; how many."""
        count = self._run(lambda _state, change, now: self._channel.recover(change, now))
        self._broker.notify_consumers()
        return count

    # -- transactions ---------------------------------------------------------------------------------------------------
    def tx_select(self) -> None:
        """May be repeated. Raises PreconditionFailed on a channel that confirms."""
        self._channel.tx_select(self._clock())

    def confirm_select(self) -> None:
        """In process every publish outside a transaction is confirmed by its return. Raises PreconditionFailed with tx_select."""
        self._channel.confirm_select()

    @uninterrupted
    def tx_commit(self, token: str = "") -> None:
        """All publishes and acks of the transaction, or nothing. ``token``: a name under which ``LocalBroker.outcome`` answers.

        Raises PreconditionFailed (not transactional; a full queue), TransactionTooLarge, TransactionState (token used before).
        After a failure the transaction is rolled back and the channel is closed.
        """
        channel = self._channel
        channel.check_transactional()
        transaction = channel.transaction
        if not transaction and not token:
            return
        transaction.xid = token
        try:
            if self._timed:
                transaction.check_open_time(self._clock())
            self._broker.spill_large(transaction)
            if transaction.settles and is_worth_it(transaction):
                self._broker.bury(transaction).apply(transaction)
            self._commit(transaction, self.call)
            channel.finish(0)
        except TxmqError as error:
            self._end(f"its commit failed ({error.message})")
            raise

    @uninterrupted
    def tx_rollback(self) -> None:
        """Publishes are dropped, acked tags are unacked again. Raises PreconditionFailed (not transactional)."""
        self._channel.check_transactional()
        with self._committer.lock:
            batch_ids = self._channel.rollback(0)
        self._broker.discard(batch_ids)

    @uninterrupted
    def prepare(self, xid: str) -> Literal["prepared", "read_only"]:
        """The transaction becomes durable under ``xid``, invisible, for any process to commit or roll back; the channel goes on.

        Raises PreconditionFailed (not transactional), TransactionState (xid used before), TransactionTooLarge.
        """
        channel = self._channel
        channel.check_transactional()
        transaction = channel.transaction
        transaction.check_open_time(self._clock())
        self._broker.spill_before_prepare(transaction)
        call = self.call

        def work(state: BrokerState, change: Change, now: int) -> Literal["prepared", "read_only"]:
            found = state.prepare(change, transaction, xid, now)
            if call is not None:
                state.outcomes.remember_call(change, *call, now)
            return found

        answer = self._run(work)
        channel.finish(0)
        return answer

    # -- ending ---------------------------------------------------------------------------------------------------------
    @property
    def closed(self) -> str:
        """Why the channel is closed; "" while it is open."""
        return self._channel.closed

    @uninterrupted
    def close(self) -> None:
        """Roll back, requeue what is not acked (as redelivered), delete exclusive queues. Twice is fine."""
        if not self._ended:
            self._end("it was closed")

    @uninterrupted
    def _end(self, why: str) -> None:
        """In one commit, behind whatever this channel has still on its way."""
        channel = self._channel

        def work(state: BrokerState, change: Change, _now: int) -> None:
            change.forgets.extend(channel.close(why, change))
            for queue in state.exclusive_queues(channel):
                state.delete_queue(change, queue.name, connection=channel)

        try:
            self._broker.run(work)
        except StoreFailed:
            with self._committer.lock:
                channel.close(why)
        self._ended = True
        self._broker.notify_consumers()

    @uninterrupted
    def _commit_single(self) -> None:
        """Outside tx.select every publish and every ack is a transaction of its own, and raises what is wrong with it."""
        single = self._channel.take()
        single.atomic = True
        if single:
            try:
                if single.settles and is_worth_it(single):
                    self._broker.bury(single).apply(single)
                self._commit(single)
            except TxmqError:  # what it acked is not this channel's any more, so nobody else would give it back
                if self._committer.failure is None:
                    self._broker.discard(single.appended)
                    with self._committer.lock:
                        self._state.requeue((queue, offset) for queue, offset, _ in single.settles)
                    self._broker.notify_consumers()
                raise

    def _commit(self, transaction: Transaction, call: tuple[str, int] | None = None) -> None:
        def work(state: BrokerState, change: Change, now: int) -> Committed:
            committed = state.commit_transaction(change, transaction, now)
            if call is not None:
                state.outcomes.remember_call(change, *call, now)
            return committed

        committed = self._committer.run(work)
        if committed.returned:
            self.returned += committed.returned

    def _run(self, work: Work[T]) -> T:
        channel = self._channel
        channel.check_open()

        def while_open(state: BrokerState, change: Change, now: int) -> T:
            channel.check_open()  # it may have been closed meanwhile, and what is exclusive to it would be nobody's
            return work(state, change, now)

        return self._committer.run(while_open)

    def __enter__(self) -> LocalChannel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _is_written(publish: Publish) -> bool:
    """Whether a restart has to keep it."""
    properties = publish.message.properties
    return not (properties and delivery_mode(properties) == TRANSIENT) and any(queue.written for queue in publish.queues)


def log_dropped(xid: str, dropped: int) -> None:
    """After the commit of a prepared transaction: say what of it came to nothing."""
    if dropped:
        logger.warning(
            "transaction '%s' is committed; %d messages or acks of it named queues that are gone, and were dropped", xid, dropped
        )


def _as_bytes(what: str, value: object) -> bytes:
    if not isinstance(value, (bytes, bytearray, memoryview)):
        raise OptionError(f"{what} must be bytes, not {type(value).__name__}: encode it first")
    return bytes(value)
