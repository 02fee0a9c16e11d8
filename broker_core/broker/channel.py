"""A channel: its delivery tags, its consumers, the deliveries that it holds, and its transaction.

Pure. Publishes and settlements are always collected in ``transaction``: under tx.select until tx.commit,
otherwise until the shell takes them (``take``) and commits them later in this order. Errors are AMQP channel
exceptions.

Threads: one thread uses a channel, without the lock of the state, except where other threads may access it:
``get``, ``consume``, ``cancel``, ``recover``, ``rollback`` and ``close`` need the lock. Deleting a queue
removes its consumers from ``consumers``, under the lock.
Invariant: tags count from 1 and are never used twice. A tag is in ``unacked`` (in tag order) from its
delivery until it is settled. One that the open transaction settles is in ``marked`` until commit; rollback
returns it. Credit returns when it left both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from operator import attrgetter

from broker_core.broker.access.shares import CONSUMER_BYTES, CONSUMERS
from broker_core.broker.broker import BrokerState
from broker_core.broker.message.dispatch import with_header
from broker_core.broker.queue import Queue, Queues
from broker_core.broker.queue.consumer import Cancelled, Consumer, Send, memory_bytes
from broker_core.broker.queue.consumer import Unacked as Unacked
from broker_core.broker.transaction.transaction import Limits, Outcome, Settle, State, Transaction
from broker_core.core.block import EXPIRATION, NotLoaded
from broker_core.core.change import BROKER, Change, InboxRow
from broker_core.core.errors import NotAllowed, PreconditionFailed, TransactionState
from broker_core.core.ids import BlockId
from broker_core.message.field_table import Long
from broker_core.message.message import Delivery, Message
from broker_core.routing.content import check_expiration

QUEUE_CONSUMERS, CHANNEL_CONSUMERS = 10_000, 10_000
MOST_CONSUMER_BYTES = 1024 * 1024 * 1024  # of all consumers
_consumer_of: Callable[[Unacked], Consumer | None] = attrgetter("consumer")
_new = tuple.__new__  # takes a third of the time of a NamedTuple's own


class Channel:
    """``connection`` decides which exclusive queues the channel may use, and which messages a no-local
    consumer does not get.
    """

    def __init__(
        self, state: BrokerState, *, connection: object = None, limits: Limits | None = None
    ) -> None:
        self.state = state
        self.connection = self if connection is None else connection
        self.limits = limits or Limits()
        self.who = BROKER  # whose commits these are in the history; set by the listener
        self.rights_epoch: object = None  # the epoch of permissions when its transaction began
        self.transactional = False
        self.confirming = False
        self.closed = ""  # the reason, once it is closed
        self.transactions = 0  # that it has begun, under tx.select
        self.transaction = self._begin()
        self.unacked: dict[int, Unacked] = {}
        self.marked: dict[int, tuple[Unacked, Outcome]] = {}
        # under a limit of the channel: the one served least recently is first
        self.consumers: dict[str, Consumer] = {}
        self.prefetch = 0  # of all consumers together; 0: no limit
        self.consuming = 0  # deliveries that count against it
        self.default_prefetch = 0  # of consumers made from now on
        self.last_tag = 0
        self._lowest = 1  # no lower tag is in ``unacked``

    def _begin(self) -> Transaction:
        transaction = Transaction(self.limits, 0)
        self.transactions += self.transactional
        transaction.atomic = transaction.transactional = self.transactional
        transaction.connection = self.connection
        self.rights_epoch = self.state.users.epoch
        return transaction

    # -- modes -----------------------------------------------------------------------------------------------
    def tx_select(self) -> None:
        """Starts tx mode; it may be repeated. Raises PreconditionFailed on a channel in confirm mode."""
        self.check_open()
        if self.confirming:
            raise PreconditionFailed("cannot switch from confirm to tx mode")
        if not self.transactional:
            assert not self.transaction, "take() what was gathered before the mode changes"
            self.transactional = True
            self.transaction = self._begin()

    def confirm_select(self) -> None:
        """Starts confirm mode. Raises PreconditionFailed on a transactional channel."""
        self.check_open()
        if self.transactional:
            raise PreconditionFailed("cannot switch from tx to confirm mode")
        self.confirming = True

    def check_open(self) -> None:
        if self.closed:
            raise TransactionState(f"the channel is closed: {self.closed}; open another")

    def check_transactional(self) -> None:
        self.check_open()
        if not self.transactional:
            raise PreconditionFailed("channel is not transactional", "call tx_select first")

    # -- publishing ------------------------------------------------------------------------------------------
    def publish(self, message: Message, queues: Queues, mandatory: bool, now_us: int) -> None:
        """Adds a message routed to ``queues``. ``now_us`` 0: the transaction does not begin with it.

        Raises PreconditionFailed (expiration), TransactionTooLarge.
        """
        if message.properties and message.properties[0] & EXPIRATION:
            check_expiration(message.properties)
        transaction = self.transaction
        if now_us and not transaction:
            transaction.opened_us = now_us
        transaction.publish(message, queues, mandatory)

    def take(self) -> Transaction:
        """Outside tx.select: returns what was collected since the last call, for a commit. It may be empty
        (false).
        """
        assert not self.transactional
        taken = self.transaction
        self.transaction = self._begin()
        return taken

    # -- consumers -------------------------------------------------------------------------------------------
    def qos(self, prefetch: int, global_: bool) -> None:
        """Sets the prefetch limit (0: none): of each consumer made from now on, or, if ``global_``, of all
        consumers of the channel together.

        As in RabbitMQ, a limit for consumers removes the one of the channel.
        """
        self.check_open()
        if not global_:
            self.default_prefetch = prefetch
        self.prefetch = prefetch if global_ else 0
        for consumer in self.consumers.values():
            self.state.pending_checks.wake(consumer.queue)

    def consume(
        self,
        queue: Queue,
        tag: str,
        send: Send,
        cancelled: Cancelled,
        *,
        no_ack: bool = False,
        exclusive: bool = False,
        no_local: bool = False,
        priority: int = 0,
        prefetch: int | None = None,
        arguments: Mapping[str, object] | None = None,
    ) -> Consumer:
        """Adds a consumer. ``prefetch`` None: as basic.qos set it. Raises NotAllowed (the tag is in use),
        AccessRefused (exclusive), ResourceLocked, PreconditionFailed (too many, or too large).
        """
        self.check_open()
        if tag in self.consumers:
            raise NotAllowed(f"attempt to reuse consumer tag '{tag}'")
        if not queue.replies:
            self.state.topology.usable(queue.name, self.connection)
        _check_consumers(self, queue, memory_bytes(tag, arguments or {}))
        consumer = Consumer(
            self,
            queue,
            tag,
            send,
            cancelled,
            no_ack=no_ack,
            exclusive=exclusive,
            no_local=no_local,
            priority=priority,
            prefetch=self.default_prefetch if prefetch is None else prefetch,
            arguments=arguments,
        )
        queue.consumers.add(consumer)
        self.consumers[tag] = consumer
        consumer.count(self.state.undo, 1)
        self.state.pending_checks.wake(queue)
        return consumer

    def cancel(self, tag: str) -> Consumer | None:
        """Removes a consumer and returns it, or None. The channel keeps its deliveries, unacked.

        An auto-delete queue that lost its last consumer is added to ``state.topology.abandoned``.
        """
        consumer = self.consumers.get(tag)
        if consumer is not None:
            _cancel(self, [consumer])
        return consumer

    # -- deliveries ------------------------------------------------------------------------------------------
    def next_tag(self) -> int:
        self.last_tag += 1
        return self.last_tag

    def forget(self, tag: int) -> tuple[Queue, int]:
        """Removes a delivery that is settled at once (no_ack). The caller settles the entry."""
        delivery = self.unacked.pop(tag)
        return delivery.queue, delivery.offset

    def get(self, queue: Queue) -> Delivery | None:
        """Returns the next message, held until it is settled or requeued."""
        offset = queue.ready.head(queue.log.visible_end)
        if offset is None:
            return None
        # before it is taken, so that a damaged segment does not lose it
        row = self.state.messages.fetch(queue, offset)
        queue.ready.take_head(offset)
        return self._delivered(queue, offset, row)

    def get_at(self, queue: Queue, offsets: Sequence[int], size_bytes: int, now: int) -> list[Delivery]:
        """Returns the messages at these offsets that are ready, held as by ``get``; see ``_ready_rows``."""
        found = _ready_rows(self.state, queue, offsets, size_bytes, now)
        for offset, _ in found:
            queue.ready.hold(offset)
        return [self._delivered(queue, offset, row) for offset, row in found]

    def _delivered(self, queue: Queue, offset: int, row: InboxRow) -> Delivery:
        """The delivery of a message that is held from now on."""
        tag = self.next_tag()
        self.unacked[tag] = _new(Unacked, (queue, offset, None))
        if queue.ready.deliveries is not None:
            row = with_header(row, "x-delivery-count", Long(queue.ready.deliveries.count(offset)))
        message = _new(Message, (row.body, row.routing_key, row.exchange, row.properties))
        again = queue.marks.got_one(queue.ready.was_sent(offset))
        return Delivery(tag, queue.name, offset, again, row.committed_at, message)

    def settle(self, tag: int, outcome: Outcome, multiple: bool, now_us: int) -> None:
        """Acks, rejects or requeues one tag, or all up to it (0: all).

        Raises PreconditionFailed for a tag that is unknown or settled, also in the open transaction.
        """
        self.check_open()
        unacked = self.unacked
        if tag not in unacked and not (multiple and tag == 0):
            raise PreconditionFailed(f"unknown delivery tag {tag}")
        if not multiple:
            tags: list[int] = [tag]
        elif tag == 0:
            tags = list(unacked)
            self._lowest = self.last_tag + 1
        else:
            tags = [each for each in range(self._lowest, tag + 1) if each in unacked]
            self._lowest = tag + 1
        transaction = self.transaction
        if now_us and not transaction:
            transaction.opened_us = now_us
        if self.transactional:
            taken = [unacked.pop(each) for each in tags]
            self.marked.update(zip(tags, [(found, outcome) for found in taken], strict=True))
            transaction.settle([_new(Settle, (queue, offset, outcome)) for queue, offset, _ in taken])
            return
        for each in tags:  # mostly one
            queue, offset, consumer = unacked.pop(each)
            transaction.settles.append(_new(Settle, (queue, offset, outcome)))
            if consumer is not None:
                self._return_credit(consumer, 1)

    def _return_credits(self, deliveries: Iterable[Unacked]) -> None:
        for consumer, run in groupby(deliveries, _consumer_of):
            if consumer is not None:
                self._return_credit(consumer, sum(1 for _ in run))

    def _return_credit(self, consumer: Consumer, count: int) -> None:
        consumer.unacked -= count
        # the consumer served last is last in order: queues share the channel's limit
        if self.prefetch and self.consuming >= self.prefetch:
            # a copy: another thread may delete a queue and remove its consumers
            for other in tuple(self.consumers.values()):
                if other.parked:
                    other.parked = False
                    self.state.pending_checks.wake(other.queue)
        if consumer.parked:
            consumer.parked = False
            self.state.pending_checks.wake(consumer.queue)
        self.consuming -= count

    def served(self, consumer: Consumer) -> None:
        """Moves a consumer that was served under the limit of the channel behind the others."""
        if self.consumers.get(consumer.tag) is consumer:
            self.consumers[consumer.tag] = self.consumers.pop(consumer.tag)

    def recover(self, change: Change | None = None, now_us: int = 0) -> int:
        """Requeues and counts unsettled deliveries, except those that the open transaction settles."""
        self.check_open()
        count = len(self.unacked)
        self._give_back(change, now_us)
        return count

    def _give_back(self, change: Change | None, now_us: int) -> None:
        deliveries = self.unacked
        entries = ((each.queue, each.offset) for each in deliveries.values())
        self.state.settlement.requeue(entries, change, now_us)
        undo = self.state.undo
        for name in ("unacked", "_lowest", "consuming"):
            undo.attribute(self, name)
        for consumer in {each.consumer for each in deliveries.values() if each.consumer is not None}:
            undo.attribute(consumer, "unacked")
        self.unacked = {}
        self._lowest = self.last_tag + 1
        self._return_credits(deliveries.values())

    # -- the transaction -------------------------------------------------------------------------------------
    def limit_open_time(self, seconds: float, most: float | None) -> None:
        """Of the open transaction and of those to come: not beyond ``most``, and 0 is that alone."""
        open_s = min(seconds or math.inf, most or math.inf)
        self.limits = self.transaction.limits = replace(self.limits, open_s=open_s)

    def finish(self) -> None:
        """Starts a new transaction after the open one was committed or prepared: its deliveries leave the
        channel, and their credit returns.
        """
        marked, self.marked = self.marked, {}
        if marked:
            self._return_credits([delivery for delivery, _ in marked.values()])
        self.transaction = self._begin()

    def rollback(self) -> list[BlockId]:
        """Drops the publishes and makes acked tags unacked again, without redelivery. Returns the blocks that
        the transaction appended, to be forgotten.

        If a commit or prepare of the transaction was executed in the meantime, it acts like ``finish``.
        """
        dropped = self.transaction
        if dropped.state is not State.ACTIVE:
            self.finish()
            return []
        dropped.become(State.ROLLED_BACK)
        marked, self.marked = self.marked, {}
        self.hold({tag: delivery for tag, (delivery, _) in marked.items()})
        self.transaction = self._begin()
        return dropped.appended

    def hold(self, deliveries: Mapping[int, Unacked]) -> None:
        """Returns unsettled tags to ``unacked``, from which they were taken."""
        if deliveries:
            self.unacked = dict(sorted({**self.unacked, **deliveries}.items()))
            self._lowest = next(iter(self.unacked))

    def close(
        self, why: str = "it was closed", change: Change | None = None, now_us: int = 0
    ) -> list[BlockId]:
        """Cancels its consumers, rolls back, and requeues all deliveries as redelivered, also those acked in
        the transaction.

        Outside tx.select, call ``take`` first. Returns appended blocks like ``rollback``.
        """
        assert self.transactional or not self.transaction, (
            "take() what was gathered before the channel closes"
        )
        undo = self.state.undo
        for name in ("unacked", "marked", "transaction", "transactions", "_lowest", "consuming", "closed"):
            undo.attribute(self, name)
        undo.attribute(self.transaction, "state")
        for delivery, _ in self.marked.values():
            if delivery.consumer is not None:
                undo.attribute(delivery.consumer, "unacked")
        _cancel(self, list(self.consumers.values()))
        dropped = self.rollback()
        self._give_back(change, now_us)
        self.closed = self.closed or why
        return dropped


def _check_consumers(channel: Channel, queue: Queue, size_bytes: int) -> None:
    """Each message looks at the consumers of its queue. Raises NotAllowed, PreconditionFailed."""
    if len(channel.consumers) >= CHANNEL_CONSUMERS:
        raise NotAllowed(
            f"reached maximum ({CHANNEL_CONSUMERS}) of consumers per channel", "open another channel"
        )
    user, count, shares = channel.who.user, len(queue.consumers), channel.state.names.shares
    if shares.over(user, count + 1, QUEUE_CONSUMERS) > 0:
        mine = sum(each.channel.who.user == user for each in queue.consumers)
        shares.require(CONSUMERS, user, mine, count, QUEUE_CONSUMERS, [queue.vhost])
    mine, total = shares.consumers[user] + size_bytes - 1, shares.consumer_bytes + size_bytes - 1
    shares.require(CONSUMER_BYTES, user, mine, total, MOST_CONSUMER_BYTES, [queue.vhost])


def _cancel(channel: Channel, consumers: Sequence[Consumer]) -> None:
    """In one pass over the consumers of each queue."""
    state, by_queue = channel.state, dict[Queue, list[Consumer]]()
    for consumer in consumers:
        state.undo.item(channel.consumers, consumer.tag)
        del channel.consumers[consumer.tag]
        consumer.count(state.undo, -1)
        by_queue.setdefault(consumer.queue, []).append(consumer)
    for queue, gone in by_queue.items():
        queue.consumers.remove(gone, state.undo)
        state.pending_checks.wake(queue)  # another consumer may be the active one now
        if queue.auto_delete and not queue.consumers:
            state.undo.growth(state.topology.abandoned)
            state.topology.abandoned.append(queue)


def _ready_rows(
    state: BrokerState, queue: Queue, offsets: Sequence[int], size_bytes: int, now: int
) -> list[tuple[int, InboxRow]]:
    """Returns the messages at these offsets that are ready and not past their time. Ends behind the one that
    makes their bodies ``size_bytes`` or more, and before a block that is not loaded. Raises NotLoaded if that
    is the first.
    """
    found: list[tuple[int, InboxRow]] = []
    end = queue.log.visible_end
    for offset in offsets:
        if queue.ready.first_ready(offset, min(offset + 1, end)) is None:
            continue
        try:
            if state.expiry.deadline(queue, offset) <= now:
                continue
            row = state.messages.fetch(queue, offset)
        except NotLoaded:
            if not found:
                raise
            break
        found.append((offset, row))
        size_bytes -= len(row.body)
        if size_bytes <= 0:
            break
    return found
