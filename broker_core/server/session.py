"""A session: one AMQP channel of a connection. Commands in, replies and deliveries out; the domain does the rest.

Not here: bytes and sockets (``amqp_connection.py``), the rules (``broker/``), the order of a commit (``committer.py``).

Commands are answered in the order in which they came. Publishes and acks outside a transaction are gathered and committed at the
end of the loop's tick; every other command waits until that is done. While a command waits for its commit, those behind it wait in
``backlog``: a client may send on during a commit.
Invariant: a confirm, a commit-ok and every other reply that speaks of the broker's state is sent after that state is durable.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from broker_core.amqp.v0_9_1 import methods as m
from broker_core.amqp.v0_9_1.encoder import DeliverEncoder, encode_ack, encode_nack
from broker_core.amqp.v0_9_1.events import Command
from broker_core.broker.broker import BrokerState, Committed
from broker_core.broker.carbon_copy import carbon_copies, has_copies
from broker_core.broker.change import Change, InboxRow
from broker_core.broker.channel import Channel
from broker_core.broker.consumer import Consumer, Send, consumer_priority
from broker_core.broker.transaction import Outcome, Settle, Transaction
from broker_core.burial import Burial, is_worth_it
from broker_core.errors import (
    InternalFault,
    NotImplementedFeature,
    OptionError,
    PreconditionFailed,
    QueueNotFound,
    TransactionError,
    TxmqError,
)
from broker_core.local import log_dropped
from broker_core.message import Message
from broker_core.properties import Properties, delivery_mode
from broker_core.server import direct_reply, topology_commands, transaction_exchange

if TYPE_CHECKING:
    from broker_core.server.amqp import AmqpServer
    from broker_core.server.amqp_connection import Connection

BACKLOG_COMMANDS = 1_000  # that wait behind a commit, before the connection is not read any more
BACKLOG_BYTES = 16 * 1024 * 1024  # of their bodies
REJECTS = 512  # of one commit, where a client rejects a great many outside a transaction
IN_FLIGHT = 8  # ticks whose publishes and acks are not durable yet, before the connection is not read any more
_USER_ID = 0x10  # in the second byte of the property flags
_REPLY_TO = 0x02  # in the first one
_DELIVERY_MODES = (2, 1, None)
_HANDS_OUT = (m.BasicGet, m.BasicConsume)
_CONSUME_ARGUMENTS = ("x-priority", "x-cancel-on-ha-failover")

Work = Callable[[BrokerState, Change, int], Any]
Reply = Callable[[Any], m.Method | None]


class Session:
    """``handle`` raises ChannelError and ConnectionException: the connection closes the channel, or itself, with them."""

    def __init__(self, connection: Connection, number: int, server: AmqpServer) -> None:
        self.connection = connection
        self.number = number
        self._broker = server.broker
        self.state = server.broker.state
        self._lock = server.broker.committer.lock
        self._clock = server.broker.clock
        self._commits = server.commits
        self._plain = not server.handlers  # nobody looks at what goes out: deliveries may take the short way
        self.channel = Channel(self.state, connection=connection, limits=server.broker.limits)
        server.broker.watch(self.channel)
        self._timed = server.broker.limits.open_s is not None
        self._backlog: deque[Command] = deque()
        self._backlog_bytes = 0
        self._busy = False  # a command waits for its commit
        self._waits = False  # and it waits for what was gathered before it
        self._gathered = False  # hand_over will be called at the end of the tick
        self._in_flight = 0  # gathered transactions that are not durable yet
        self._published = 0  # the last publish's number, on a channel that confirms
        self.last_queue = ""
        self.replies = ""  # the queue of its direct reply-to, while it consumes that
        self._named = transaction_exchange.Named()  # what the open transaction will be called
        self.ended = False

    # -- commands in ----------------------------------------------------------------------------------------------------
    def handle(self, command: Command) -> None:
        if self._busy:
            self._backlog.append(command)
            self._backlog_bytes += len(command.body)
            if len(self._backlog) >= BACKLOG_COMMANDS or self._backlog_bytes > BACKLOG_BYTES:
                self.connection.pause(self)
            return
        handler = _HANDLERS.get(type(command.method))
        if handler is None:
            raise NotImplementedFeature(f"{command.method.NAME} is not implemented")
        handler(self, command)

    def _go_on(self) -> None:
        """The command in hand is answered: carry out those that came meanwhile."""
        self._busy = False
        backlog = self._backlog
        while backlog and not self._busy and not self.ended:
            command = backlog.popleft()
            self._backlog_bytes -= len(command.body)
            if self.connection.mute and isinstance(command.method, _HANDS_OUT):
                continue  # nobody would get what it hands out
            try:
                self.handle(command)
            except Exception as error:
                self._fail(error, command.method)
        if len(backlog) < BACKLOG_COMMANDS and self._backlog_bytes <= BACKLOG_BYTES:
            self.connection.resume(self)

    def _fail(self, error: BaseException, method: m.Method | None) -> None:
        self.connection.fail(self.number, as_amqp(error), method, late=True)

    def wait_for_gathered(self, command: Command) -> bool:
        """Whether ``command`` has to wait until earlier publishes and acks are durable; it is carried out then."""
        if not (self._gathered or self._in_flight):
            return False
        self._wait(command)
        self._waits = True
        return True

    def _wait(self, command: Command) -> None:
        """It is carried out, once more or at last, when the session goes on."""
        self._backlog.appendleft(command)
        self._backlog_bytes += len(command.body)
        self._busy = True

    def submit(self, command: Command, work: Work, reply: Reply) -> None:
        """Carry out ``work``, and answer with the method that ``reply`` makes of what it gives; None: no answer."""
        self._busy = True
        self._commits.submit(work, partial(self._submitted, command.method, reply))

    def _submitted(self, method: m.Method, reply: Reply, answer: Any, error: BaseException | None) -> None:
        if self.ended:
            return
        if error is not None:
            self._fail(error, method)
        else:
            answered = reply(answer)
            if answered is not None:
                self.connection.send(self.number, answered)
        self._go_on()

    def queue_name(self, name: str) -> str:
        """An empty name is the queue that this channel declared last (specification 1.7.2.1.2)."""
        if name:
            return name
        if not self.last_queue:
            raise QueueNotFound("no previously declared queue", "name the queue")
        return self.last_queue

    # -- gathering: publishes and acks outside a transaction ------------------------------------------------------------
    def hand_over(self) -> None:
        """The tick ends: what was gathered becomes one transaction, whose parts stand for themselves."""
        if not self._gathered:  # the session ended, and handed over then
            return
        self._gathered = False
        transaction = self.channel.take()
        self._in_flight += 1
        if self._in_flight == IN_FLIGHT:  # another thread's commit takes its time
            self.connection.pause(self.channel)
        try:
            self._broker.spill_large(transaction)
        except Exception as error:
            self._handed_over(transaction, 0, 0, None, error)
            return
        publishes = transaction.messages if self.channel.confirming else 0
        then = partial(self._handed_over, transaction, self._published - publishes, publishes)
        if is_worth_it(transaction):
            self._commit_pieces(deque(transaction.pieces(REJECTS)), then)
        else:
            self._commits.submit(partial(_commit, transaction), then)

    def _commit_pieces(self, pieces: deque[Transaction], then: Callable[[Committed | None, BaseException | None], None]) -> None:
        """A great many rejects: one commit after the other, so that others come between. ``then`` hears of the first, at the end."""
        answers: list[Committed] = []

        def committed(answer: Committed | None, error: BaseException | None) -> None:
            piece = pieces.popleft()
            if answer is not None:
                answers.append(answer)
                if pieces:
                    self._commits.submit(partial(_commit, pieces[0]), committed)
                else:
                    then(answers[0], None)
                return
            with self._lock:
                self.state.requeue((queue, offset) for left in pieces for queue, offset, _ in left.settles)
                if answers:
                    self.state.requeue((queue, offset) for queue, offset, _ in piece.settles)
            then(answers[0] if answers else None, None if answers else error)
            if answers and not self.ended:
                assert error is not None
                self._fail(error, None)

        self._commits.submit(partial(_commit, pieces[0]), committed)

    def _handed_over(
        self, transaction: Transaction, before: int, publishes: int, committed: Committed | None, error: BaseException | None
    ) -> None:
        self._in_flight -= 1
        if self._in_flight == IN_FLIGHT - 1:
            self.connection.resume(self.channel)
        if committed is None:  # what it acked is not this channel's any more, so nobody else would give it back
            with self._lock:
                self.state.requeue((queue, offset) for queue, offset, _ in transaction.settles)
        if self.ended:
            return
        if committed is None:
            assert error is not None
            for number in range(before + 1, before + publishes + 1):
                self.connection.write(encode_nack(self.number, number, multiple=False))
            self._fail(error, None)
        else:
            for message in committed.returned:
                self._return(message)
            if publishes and not self.ended:
                self._confirm(before, publishes, committed.rejected)
        if self._waits and not self._in_flight and not self._gathered:
            self._waits = False
            self._go_on()

    def _confirm(self, before: int, publishes: int, rejected: list[int]) -> None:
        write, number = self.connection.write, self.number
        for index in rejected:
            write(encode_nack(number, before + 1 + index, multiple=False))
        last = publishes
        refused = set(rejected)
        while last and last - 1 in refused:
            last -= 1
        if last:
            write(encode_ack(number, before + last, multiple=last > 1))

    def _return(self, message: Message) -> None:
        method = m.BasicReturn(312, "NO_ROUTE", message.exchange, message.routing_key)
        self.connection.send(self.number, method, message.properties, message.body)

    # -- basic: publishing ----------------------------------------------------------------------------------------------
    def _basic_publish(self, command: Command) -> None:
        _, method, properties, body = command
        assert type(method) is m.BasicPublish
        name, routing_key = method.exchange, method.routing_key
        if method.immediate:
            raise NotImplementedFeature("immediate=true")
        if properties:
            if properties[1] & _USER_ID:
                self._check_user_id(properties)
            if properties[0] & _REPLY_TO and direct_reply.RAW_NAME in properties:
                properties = direct_reply.addressed(self, properties)
            if delivery_mode(properties) not in _DELIVERY_MODES:
                raise PreconditionFailed(f"invalid message: {{delivery_mode_unknown,{delivery_mode(properties)}}}")
        source = self.state.exchanges.get(name)
        if source is None or source.internal:
            if name == transaction_exchange.NAME:
                self._named_by(command)
                return
            queues = None
        else:
            queues = source.known(routing_key)
        if queues is None or has_copies(properties):
            with self._lock:
                queues = self.state.route(name, routing_key, properties)
                keys, delivered = carbon_copies(properties)
                if keys:
                    queues = self.state.route_all(name, (routing_key, *keys), properties)
                properties = delivered
        channel = self.channel
        if channel.transactional:
            if queues or method.mandatory:
                channel.publish(Message(body, routing_key, name, properties), queues, method.mandatory, self._clock() if self._timed else 0)
                self._broker.spill_full(channel.transaction)
            return
        if channel.confirming:
            self._published += 1
        elif not queues and not method.mandatory:
            return
        channel.publish(Message(body, routing_key, name, properties), queues, method.mandatory, 0)
        if not self._gathered:
            self._gathered = True
            self._commits.gather(self)

    def _check_user_id(self, properties: bytes) -> None:
        user_id = Properties.decode(properties).user_id
        if user_id != self.connection.user:
            raise PreconditionFailed(f"user_id property set to '{user_id}' but authenticated user was '{self.connection.user}'")

    # -- basic: consuming -----------------------------------------------------------------------------------------------
    def _basic_qos(self, command: Command) -> None:
        method = command.method
        assert isinstance(method, m.BasicQos)
        if method.prefetch_size:
            raise NotImplementedFeature(f"prefetch_size!=0 ({method.prefetch_size})")
        # py-amqp, with kombu and Celery above it, means what the specification says, the whole channel, where the product is not RabbitMQ
        whole = method.global_ or self.connection.client_properties.get("product") == "py-amqp"
        with self._lock:
            self.channel.qos(method.prefetch_count, whole)
        self.connection.send(self.number, m.BasicQosOk())
        self._commits.wake()

    def _basic_consume(self, command: Command) -> None:
        if self.wait_for_gathered(command):
            return
        method = command.method
        assert isinstance(method, m.BasicConsume)
        name = self.queue_name(method.queue)
        tag = method.consumer_tag or f"amq.ctag-{secrets.token_urlsafe(16)}"
        if name == direct_reply.NAME:
            direct_reply.consume(self, command, tag)
            return
        priority = _consume_priority(name, dict(method.arguments))
        with self._lock:
            queue = self.state.usable(name, self.connection)
            self.state.touch(queue, self._clock())
            consumer = self.channel.consume(
                queue,
                tag,
                self.sender(tag, name),
                self.cancelled,
                no_ack=method.no_ack,
                exclusive=method.exclusive,
                no_local=method.no_local,
                priority=priority,
                arguments=dict(method.arguments),
            )
            consumer.writable = self.connection.writable
        if not method.nowait:
            self.connection.send(self.number, m.BasicConsumeOk(tag))
        self._commits.wake()

    def sender(self, tag: str, queue: str) -> Send:
        connection = self.connection
        if self._plain:
            encode = DeliverEncoder(self.number, tag, connection.protocol.tuned.frame_max).encode
            write = connection.write

            def deliver(_consumer: Consumer, delivery_tag: int, redelivered: bool, row: InboxRow) -> None:
                write(encode(delivery_tag, redelivered, row.exchange, row.routing_key, row.properties, row.body))

            return deliver

        def observed(_consumer: Consumer, delivery_tag: int, redelivered: bool, row: InboxRow) -> None:
            method = m.BasicDeliver(tag, delivery_tag, redelivered, row.exchange, row.routing_key)
            connection.send(self.number, method, row.properties, row.body, queue=queue)

        return observed

    def _basic_cancel(self, command: Command) -> None:
        if self.wait_for_gathered(command):
            return
        method = command.method
        assert isinstance(method, m.BasicCancel)
        tag = method.consumer_tag
        reply = None if method.nowait else m.BasicCancelOk(tag)
        with self._lock:
            consumer = self.channel.cancel(tag)
            if consumer is not None:
                self.state.touch(consumer.queue, self._clock())
                if consumer.queue.replies:
                    self.replies = ""
        if consumer is not None and consumer.queue.auto_delete:
            self.submit(command, lambda state, change, _now: state.delete_abandoned(change), lambda _: reply)
        elif reply is not None:
            self.connection.send(self.number, reply)
        self._commits.wake()  # a single active consumer may have made room

    def cancelled(self, consumer: Consumer) -> None:
        """Its queue is deleted, or cannot be read."""
        if not self.ended and self.connection.announces("consumer_cancel_notify"):
            self.connection.send(self.number, m.BasicCancel(consumer.tag, True))

    def _basic_get(self, command: Command) -> None:
        if self.wait_for_gathered(command):
            return
        method = command.method
        assert isinstance(method, m.BasicGet)
        name = self.queue_name(method.queue)
        if name.startswith(transaction_exchange.QUEUE_PREFIX):
            self._outcome(command, name)
            return
        channel = self.channel
        if self.state.runnable:
            self._commits.dispatch(name)  # what consumers can take is not there for a get
        with self._lock:
            queue = self.state.usable(name, self.connection)
            now = self._clock()
            self.state.touch(queue, now)
            expired = self.state.head_expired(queue, now)
            delivery = None if expired else channel.get(queue)
            if delivery is not None:
                ready, _ = self.state.queue_counts(name)
                if method.no_ack:
                    unacked = channel.unacked.pop(delivery.tag)
                    self._commits.settle([Settle(unacked.queue, unacked.offset, "ack")])
        if expired:
            self._wait(command)  # it looks again
            self.submit(command, lambda state, change, now: state.expire(change, now, [queue]), lambda _: None)
        elif delivery is None:
            self.connection.send(self.number, m.BasicGetEmpty())
        else:
            message = delivery.message
            found = m.BasicGetOk(delivery.tag, delivery.redelivered, message.exchange, message.routing_key, ready)
            self.connection.send(self.number, found, message.properties, message.body, queue=name)

    def _basic_ack(self, command: Command) -> None:
        method = command.method
        assert type(method) is m.BasicAck
        self._settle(method.delivery_tag, "ack", method.multiple)

    def _basic_nack(self, command: Command) -> None:
        method = command.method
        assert isinstance(method, m.BasicNack)
        self._settle(method.delivery_tag, "requeue" if method.requeue else "reject", method.multiple)

    def _basic_reject(self, command: Command) -> None:
        method = command.method
        assert isinstance(method, m.BasicReject)
        self._settle(method.delivery_tag, "requeue" if method.requeue else "reject", False)

    def _settle(self, tag: int, outcome: Outcome, multiple: bool) -> None:
        channel = self.channel
        channel.settle(tag, outcome, multiple, self._clock() if self._timed else 0)
        if not channel.transactional and not self._gathered and channel.transaction:
            self._gathered = True
            self._commits.gather(self)

    def _basic_recover(self, command: Command) -> None:
        if self.wait_for_gathered(command):
            return
        method = command.method
        assert isinstance(method, (m.BasicRecover, m.BasicRecoverAsync))
        if not method.requeue:
            raise NotImplementedFeature("requeue=false")
        reply = m.BasicRecoverOk() if isinstance(method, m.BasicRecover) else None
        self.submit(command, lambda _state, change, now: self.channel.recover(change, now), lambda _: reply)

    # -- transactions ---------------------------------------------------------------------------------------------------
    def _confirm_select(self, command: Command) -> None:
        if self.wait_for_gathered(command):
            return
        method = command.method
        assert isinstance(method, m.ConfirmSelect)
        self.channel.confirm_select()
        if not method.nowait:
            self.connection.send(self.number, m.ConfirmSelectOk())

    def _tx_select(self, command: Command) -> None:
        if self.wait_for_gathered(command):
            return
        self.channel.tx_select(self._clock())
        self.connection.send(self.number, m.TxSelectOk())

    def _tx_commit(self, command: Command) -> None:
        channel = self.channel
        channel.check_transactional()
        transaction, named = channel.transaction, self._named
        if not transaction and not named:
            self.connection.send(self.number, m.TxCommitOk())
            return
        if self._timed:
            transaction.check_open_time(self._clock())
        if named.prepare:
            self._broker.spill_before_prepare(transaction)
        else:
            self._broker.spill_large(transaction)
        self._busy = True
        if not named.prepare and is_worth_it(transaction):
            self._commits.aside(partial(self._broker.bury, transaction), partial(self._buried, command, transaction))
        else:
            self._commit_tx(command, transaction)

    def _buried(self, command: Command, transaction: Transaction, burial: Burial | None, error: BaseException | None) -> None:
        """Its many dead letters are in segments."""
        if self.ended:
            if burial is not None:
                self._commits.aside(partial(self._broker.discard_burial, burial), lambda _answer, _error: None)
        elif burial is None:
            assert error is not None
            self._fail(error, command.method)
        else:
            burial.apply(transaction)
            self._commit_tx(command, transaction)

    def _commit_tx(self, command: Command, transaction: Transaction) -> None:
        named = self._named
        if named.prepare:
            work: Work = partial(_prepare, transaction, named.prepare)
        else:
            transaction.xid = named.token
            work = partial(_commit, transaction)
        self._commits.submit(work, partial(self._tx_committed, command.method))

    def _tx_committed(self, method: m.Method, committed: Committed | None, error: BaseException | None) -> None:
        if self.ended:
            return
        if error is not None:
            self._fail(error, method)
            return
        with self._lock:
            self.channel.finish(self._clock() if self._timed else 0)
        self._named = transaction_exchange.Named()
        if committed is not None:
            for message in committed.returned:
                self._return(message)
        self.connection.send(self.number, m.TxCommitOk())
        if self.channel.consumers:
            self._commits.wake()
        self._go_on()

    def _tx_rollback(self, command: Command) -> None:
        channel = self.channel
        channel.check_transactional()
        self._named = transaction_exchange.Named()
        with self._lock:
            batch_ids = channel.rollback(self._clock() if self._timed else 0)
        if batch_ids:
            self.submit(command, lambda _state, change, _now: change.forgets.extend(batch_ids), lambda _: m.TxRollbackOk())
        else:
            self.connection.send(self.number, m.TxRollbackOk())

    @property
    def spillable(self) -> bool:
        """Whether its open transaction may go to a segment now: it has something in memory, and no commit of it is under way."""
        channel = self.channel
        return channel.transactional and not self._busy and not self.ended and bool(channel.transaction.publishes)

    def check_open_time(self) -> None:
        """Once a second: a transaction that is open for too long closes its channel (semantics 18)."""
        if self._timed and not self._busy and not self.ended and self.channel.transactional:
            try:
                self.channel.transaction.check_open_time(self._clock())
            except TransactionError as error:
                self._fail(error, None)

    # -- named transactions (semantics 20, 21) --------------------------------------------------------------------------
    def _named_by(self, command: Command) -> None:
        """A publish to ``amq.transaction``: see transaction_exchange.py."""
        method = command.method
        assert isinstance(method, m.BasicPublish)
        verb, xid = transaction_exchange.parse(method.routing_key, command.body)
        if verb in ("prepare", "token"):
            self.channel.check_transactional()
            self._named = self._named.with_name(verb, xid)
            return
        if self.channel.transactional:
            raise PreconditionFailed(f"cannot {verb} transaction '{xid}' on a channel that is transactional", "use another channel")
        if self.wait_for_gathered(command):
            return
        if self.channel.confirming:
            self._published += 1
        number = self._published

        def decided(dropped: int) -> None:
            log_dropped(xid, dropped)
            if self.channel.confirming:
                self.connection.write(encode_ack(self.number, number, multiple=False))

        self.submit(command, partial(transaction_exchange.decide, verb, xid), decided)

    def _outcome(self, command: Command, name: str) -> None:
        """A get from ``amq.transaction.XID``: how the transaction of this name ended, if there is one."""
        method = command.method
        assert isinstance(method, m.BasicGet)
        if not method.no_ack:
            raise PreconditionFailed(f"queue '{name}' only answers, it holds nothing to acknowledge", "get with no_ack")
        xid = name[len(transaction_exchange.QUEUE_PREFIX) :]

        def answer(outcome: transaction_exchange.Answer | None) -> m.Method | None:
            if outcome is None:
                return m.BasicGetEmpty()
            found = m.BasicGetOk(self.channel.next_tag(), False, transaction_exchange.NAME, xid, 0)
            self.connection.send(self.number, found, outcome.properties, outcome.body)
            return None

        self.submit(command, partial(transaction_exchange.asked, xid), answer)

    # -- the channel itself ---------------------------------------------------------------------------------------------
    def _channel_flow(self, command: Command) -> None:
        method = command.method
        assert isinstance(method, m.ChannelFlow)
        if not method.active:
            raise NotImplementedFeature("active=false")
        self.connection.send(self.number, m.ChannelFlowOk(True))

    def _channel_close(self, command: Command) -> None:
        if not self.wait_for_gathered(command):
            self.connection.close_session(self)

    # -- ending ---------------------------------------------------------------------------------------------------------
    def stop_deliveries(self) -> None:
        """Nobody reads any more what its consumers would be given, and what goes to one that does not ack would be lost."""
        for consumer in tuple(self.channel.consumers.values()):  # a copy: this thread may, or may not, hold the lock of the state
            consumer.writable = False

    def end(self, why: str, then: Callable[[], None] | None = None) -> None:
        """Commit what was gathered, roll back, requeue, and let go of the consumers; then call ``then``. Once."""
        if self.ended:
            if then is not None:
                then()
            return
        self.ended = True
        self._backlog.clear()
        self.stop_deliveries()
        if self._gathered:
            self.hand_over()
        self.connection.resume(self)
        channel = self.channel

        def work(state: BrokerState, change: Change, now: int) -> None:
            change.forgets.extend(channel.close(why, change, now))
            state.delete_abandoned(change)

        def ended(_answer: object, _error: BaseException | None) -> None:
            self._commits.wake()
            if then is not None:
                then()

        self._commits.submit(work, ended)


def as_amqp(error: BaseException) -> TxmqError:
    """The exception of the specification that a client sees."""
    if isinstance(error, (TransactionError, OptionError)):
        return PreconditionFailed(error.summary)
    if isinstance(error, TxmqError) and hasattr(error, "reply_code"):
        return error
    return InternalFault(error.message if isinstance(error, TxmqError) else f"{type(error).__name__}: {error}")


def _commit(transaction: Transaction, state: BrokerState, change: Change, now: int) -> Committed:
    return state.commit_transaction(change, transaction, now)


def _prepare(transaction: Transaction, xid: str, state: BrokerState, change: Change, now: int) -> None:
    state.prepare(change, transaction, xid, now)


def _consume_priority(queue: str, arguments: dict[str, Any]) -> int:
    for name in arguments:
        if name.startswith("x-") and name not in _CONSUME_ARGUMENTS:
            raise PreconditionFailed(f"unknown argument '{name}' of a consumer", f"txmq knows {', '.join(_CONSUME_ARGUMENTS)}")
    return consumer_priority(queue, arguments)


_HANDLERS: dict[type[m.Method], Callable[[Session, Command], None]] = {
    **topology_commands.HANDLERS,
    m.BasicPublish: Session._basic_publish,
    m.BasicAck: Session._basic_ack,
    m.BasicNack: Session._basic_nack,
    m.BasicReject: Session._basic_reject,
    m.BasicQos: Session._basic_qos,
    m.BasicConsume: Session._basic_consume,
    m.BasicCancel: Session._basic_cancel,
    m.BasicGet: Session._basic_get,
    m.BasicRecover: Session._basic_recover,
    m.BasicRecoverAsync: Session._basic_recover,
    m.ConfirmSelect: Session._confirm_select,
    m.TxSelect: Session._tx_select,
    m.TxCommit: Session._tx_commit,
    m.TxRollback: Session._tx_rollback,
    m.ChannelFlow: Session._channel_flow,
    m.ChannelClose: Session._channel_close,
}
