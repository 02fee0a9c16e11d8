"""A session: one AMQP channel of a connection. Commands in, replies and deliveries out; the domain does the
rest.

Not here: the socket (``connection.py``), what each command does (``commands/``), what is gathered outside a
transaction (``tick_commit.py``), the rules (``broker/``), the order of a commit (``node/committer.py``).

Commands are answered in the order in which they came, and so is an error: it waits for what came before it.
Publishes and acks outside a transaction are gathered and committed at the end of the loop's tick; every other
command waits until that is done. While a command waits for its commit, later ones wait in the backlog,
because a client may send more during a commit.
Invariant: a confirm, a commit-ok and every other reply about the broker's state is sent after that state is
durable.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from functools import partial
from typing import TypeVar

from broker_core.amqp.v0_9_1 import methods as m
from broker_core.amqp.v0_9_1.backlog import Backlog
from broker_core.amqp.v0_9_1.encoder import DeliverEncoder, require_header_fits
from broker_core.amqp.v0_9_1.events import ChannelFailed, Command
from broker_core.broker.broker import BrokerState
from broker_core.broker.channel import Channel
from broker_core.broker.queue.consumer import Consumer, Send
from broker_core.core.change import Author, Change, InboxRow
from broker_core.core.errors import (
    InternalFault,
    OptionError,
    PreconditionFailed,
    QueueNotFound,
    ResourceShortage,
    TransactionError,
    TxmqError,
)
from broker_core.message.message import Message
from broker_core.server.amqp import audit, transaction_exchange
from broker_core.server.amqp.channel_holder import channel_holder
from broker_core.server.amqp.ports import FLUSH_BYTES, ClientConnection, Server
from broker_core.server.amqp.tick_commit import TickCommit


class DroppedPublish(m.Method, ids=(60, 40), sent_by="client"):
    """A publish that a handler drops: it has its number for a confirm. Not in METHODS, so never decoded."""


_HANDS_OUT = (m.BasicGet, m.BasicConsume)
_GATHERED = frozenset({m.BasicPublish, m.BasicAck, m.BasicNack, m.BasicReject, DroppedPublish})

T = TypeVar("T")
Work = Callable[[BrokerState, Change, int], T]


class Phase(Enum):
    """``waiting``: a command waits until what was gathered before it is durable, or for its turn.

    ``committing``: it waits for its own work.
    """

    ready = auto()
    waiting = auto()
    committing = auto()
    ended = auto()
    __hash__ = object.__hash__  # Enum's own is written in Python, and every commit uses the table


class Move(Enum):
    wait = auto()
    submit = auto()
    go_on = auto()
    end = auto()
    __hash__ = object.__hash__


PHASES: Mapping[tuple[Phase, Move], Phase] = {
    (Phase.ready, Move.wait): Phase.waiting,
    (Phase.ready, Move.submit): Phase.committing,
    (Phase.waiting, Move.wait): Phase.waiting,
    (Phase.committing, Move.wait): Phase.waiting,
    (Phase.waiting, Move.go_on): Phase.ready,
    (Phase.committing, Move.go_on): Phase.ready,
    **{(phase, Move.end): Phase.ended for phase in Phase},
    # Its own command may end it: a channel.close, or one that fails.
    (Phase.ended, Move.go_on): Phase.ended,
    (Phase.ended, Move.wait): Phase.ended,
}
_READY = Phase.ready


class Session:
    """``handle`` raises ChannelError and ConnectionException: the connection closes the channel, or itself,
    with them, when what came before is answered.

    ``state``: as its virtual host sees it. ``last_queue``: declared last. ``replies``: the queue of its
    direct reply-to consumer, "" without one. ``transaction_name``: that of the open transaction.
    """

    def __init__(self, connection: ClientConnection, number: int, server: Server) -> None:
        self.connection = connection
        self.number = number
        self.broker = server.broker
        self.commits = server.commits
        self.state = connection.seen
        self.look = server.broker.look
        self.channel = Channel(self.state, connection=connection, limits=server.broker.limits)
        holder = channel_holder(connection, number, server.broker.clock())
        server.broker.open_channels.add(self.channel, holder)
        self.tick_commit = TickCommit(self)
        self.last_queue = ""
        self.replies = ""
        self.ordinary = b""  # properties of the last publish that needed nothing but its queues
        self.transaction_name = transaction_exchange.NamedTransaction()
        self._backlog = Backlog()
        self._commands = server.commands
        self._phase = Phase.ready

    @property
    def ended(self) -> bool:
        return self._phase is Phase.ended

    @property
    def ready(self) -> bool:
        """Returns whether a command is carried out at once."""
        return self._phase is _READY

    @property
    def order(self) -> float:
        """Of the current command. Infinity: all that waits in other channels came before it."""
        return self._backlog.order or math.inf

    def move(self, move: Move) -> None:
        self._phase = PHASES[self._phase, move]
        self._backlog.stamp()

    def clock(self) -> int:
        return self.broker.clock()

    @property
    def begun_us(self) -> int:
        """The time if the transaction may begin now, else 0."""
        return 0 if self.channel.transaction.opened_us else self.clock()

    # -- commands in --------------------------------------------------------------------------------------
    def handle(self, command: Command) -> None:
        if self._phase is not _READY:
            self._backlog.append(command)
            if self._backlog.full:
                self.connection.pause(self)
            return
        method = command.method
        kind = type(method)
        # a transactional channel gathers nothing
        if kind in _GATHERED or self.channel.transactional or not self.wait_for_tick_commit(command):
            self._commands[kind](self, method, command)

    def go_on(self) -> None:
        """The current command is answered: the commands that came meanwhile have their turn."""
        if self._backlog:
            self.move(Move.wait)
            self.connection.go_on(self)
            return
        self.move(Move.go_on)
        if self._phase is Phase.ready:
            self._backlog.order = 0
        self.connection.resume(self)

    def carry_on(self, ends: float) -> None:
        """Carry out commands that waited, until ``ends``; at least one."""
        self.move(Move.go_on)
        backlog = self._backlog
        while backlog and self._phase is Phase.ready:
            command = backlog.pop()
            if isinstance(command, ChannelFailed):
                self.refuse(command)
                continue
            if self.connection.closed_for_sending and isinstance(command.method, _HANDS_OUT):
                continue  # its messages could not be sent
            try:
                self.handle(command)
            except Exception as error:
                self.fail(error, command.method)
            if backlog and self.ready and time.monotonic() > ends:
                self.go_on()
        if self._phase is Phase.ready:
            backlog.order = 0
        if not backlog.full:
            self.connection.resume(self)

    def durable(self) -> None:
        """Resumes the waiting command once the batch is durable."""
        if self._phase is Phase.waiting:
            self.go_on()

    def fail(self, error: BaseException, method: m.Method | None) -> None:
        self.connection.fail(self.number, as_amqp(error), method, self.order)

    def refuse(self, failed: ChannelFailed, order: float = math.inf) -> None:
        """Close the channel when all that came before is answered. ``order``: of the command that failed, if
        it has waited.

        1. what comes from now on is ignored
        2. what waits before it is carried out; nothing more is delivered
        3. what was gathered is durable and answered
        4. channel.close
        """
        self.connection.protocol.channels.fail(self.number)
        if self.ready and self.tick_commit.durable:
            self.connection.close_channel(failed)
        elif order == math.inf and not self.ready:
            self._backlog.append(failed)
        else:
            self.stop_deliveries()
            self._backlog.put_back(failed)
            if self.ready:
                self.move(Move.wait)

    def wait_for_tick_commit(self, command: Command) -> bool:
        """Whether ``command`` has to wait until what was gathered is durable; it is carried out then."""
        if self.tick_commit.durable:
            return False
        self.put_back(command)
        self.move(Move.wait)
        return True

    def put_back(self, command: Command) -> None:
        """Carry it out next, when the session goes on."""
        self._backlog.put_back(command)

    def submit(self, method: m.Method, work: Work[T], reply: Callable[[T], m.Method | None]) -> None:
        """Carry out ``work`` in this virtual host, and send ``reply(answer)`` if that is a method."""
        self.move(Move.submit)
        there = partial(_there, self.state, self.channel.who, work)
        self.commits.submit(there, partial(self.submitted, method, reply), self)

    def submitted(
        self, method: m.Method, reply: Callable[[T], m.Method | None], answer: T, error: BaseException | None
    ) -> None:
        if self.ended:
            return
        if error is not None:
            self.fail(error, method)
        else:
            audit.carried_out(self.connection, method)
            self.send_unless_none(reply(answer))
        self.go_on()

    # -- out ----------------------------------------------------------------------------------------------
    def send(self, method: m.Method, properties: bytes = b"", body: bytes = b"", *, queue: str = "") -> None:
        self.connection.send(self.number, method, properties, body, queue=queue)

    def send_unless_none(self, method: m.Method | None) -> None:
        if method is not None:
            self.connection.send(self.number, method)

    def give_back(self, message: Message) -> None:
        """Return a mandatory message that reached no queue."""
        method = m.BasicReturn(312, "NO_ROUTE", message.exchange, message.routing_key)
        self.send(method, message.properties, message.body)
        self.broker.committer.counts.returned[self.state.topology.vhost] += 1

    def fail_open(self, error: PreconditionFailed) -> None:
        if not self.ended:
            self.fail(error, None)

    def cancelled(self, consumer: Consumer) -> None:
        """The queue of ``consumer`` is deleted or cannot be read."""
        if not self.ended and self.connection.announces("consumer_cancel_notify"):
            self.send(m.BasicCancel(consumer.tag, True))

    def queue_name(self, name: str) -> str:
        """An empty name is the queue that this channel declared last (specification 1.7.2.1.2)."""
        if name:
            return name
        if not self.last_queue:
            raise QueueNotFound("no previously declared queue", "name the queue")
        return self.last_queue

    # -- the open transaction -----------------------------------------------------------------------------
    @property
    def spillable(self) -> bool:
        """Whether its open transaction may be spilled to a segment now.

        It holds messages in memory then, and its commit has not begun.
        """
        return (
            self._phase is Phase.ready
            and self.channel.transactional
            and bool(self.channel.transaction.publishes)
        )

    # -- ending -------------------------------------------------------------------------------------------
    def stop_deliveries(self) -> None:
        """The client does not read: messages to a consumer without acks would be lost."""
        for consumer in tuple(self.channel.consumers.values()):  # a copy: another thread may change it
            consumer.writable = False

    def drop_behind(self, failed: float) -> None:
        """Drop what waits behind the command of the order ``failed``."""
        if self._backlog.drop_behind(failed):
            self.connection.protocol.channels.reopen(self.number)

    def close(self) -> None:
        """End after the commands that wait."""
        self.handle(Command(self.number, m.ChannelClose()))

    def end(self, why: str, then: Callable[[], None] | None = None) -> None:
        """Commit what was gathered, roll back, requeue and cancel the consumers; then call ``then``."""
        self.move(Move.end)
        self._backlog.clear()
        self.stop_deliveries()
        self.tick_commit.end()
        self.connection.resume(self)
        _close(self, why, then)


def sender(session: Session, tag: str, queue: str) -> Send:
    """The function that sends messages of ``queue`` to a consumer.

    It takes the fast path while no handler sees what is sent.
    """
    connection = session.connection
    encoder = DeliverEncoder(session.number, tag, connection.protocol.tuned.frame_max)
    encode, encode_many, write = encoder.encode, encoder.encode_many, connection.write
    out = connection.protocol.out

    def deliver(
        consumer: Consumer, first_tag: int, redelivered: Sequence[bool], rows: Sequence[InboxRow]
    ) -> int:
        if connection.observed is not None:
            return observed(consumer, first_tag, redelivered, rows)
        messages = [row[4:8] for row in rows]
        total = 0
        try:
            if len(messages) == 1:
                write(encode(first_tag, redelivered[0], *messages[0]))
                return 1
            while total < len(messages) and consumer.writable:
                room = FLUSH_BYTES - out.size
                data, count = encode_many(first_tag + total, redelivered[total:], messages[total:], room)
                write(data)
                total += count
        except PreconditionFailed as error:
            _refuse(session, consumer, error)
        return total

    def observed(
        consumer: Consumer, first_tag: int, redelivered: Sequence[bool], rows: Sequence[InboxRow]
    ) -> int:
        sent = 0
        for row, again in zip(rows, redelivered):
            if not consumer.writable:
                break
            try:
                require_header_fits(row.properties, connection.protocol.tuned.frame_max)
            except PreconditionFailed as error:
                _refuse(session, consumer, error)
                break
            method = m.BasicDeliver(tag, first_tag + sent, again, row.exchange, row.routing_key)
            connection.send(session.number, method, row.properties, row.body, queue=queue)
            sent += 1
        return sent

    return deliver


def _refuse(session: Session, consumer: Consumer, error: PreconditionFailed) -> None:
    """Its client cannot take a message: close the channel, once this dispatch is over."""
    consumer.writable = False
    session.connection.server.loop.call_soon_threadsafe(session.fail_open, error)


def submit_steps(
    session: Session, method: m.Method, step: Work[bool], reply: Callable[[], m.Method | None]
) -> None:
    """Like ``Session.submit``, for a work of several steps; each returns whether it was the last one. Others
    commit in between.
    """

    def submit() -> None:
        session.commits.submit(partial(_there, session.state, session.channel.who, step), stepped, session)

    def stepped(last: bool, error: BaseException | None) -> None:
        if error is None and not last:
            submit()
        else:
            session.submitted(method, lambda _: reply(), last, error)

    session.move(Move.submit)
    submit()


def _close(session: Session, why: str, then: Callable[[], None] | None) -> None:
    """Close its channel in the broker; it is tried again until that has succeeded."""
    channel = session.channel

    def work(_state: BrokerState, change: Change, now: int) -> None:
        change.forgets.extend(channel.close(why, change, now))
        session.state.topology.delete_abandoned(change)

    def ended(_answer: object, _error: BaseException | None) -> None:
        if then is not None:
            then()

    session.commits.insist(work, ended, session)


def _there(seen: BrokerState, who: Author, work: Work[T], _state: BrokerState, change: Change, now: int) -> T:
    seen.topology.require_there()
    change.effects.who = who
    return work(seen, change, now)


def as_amqp(error: BaseException) -> TxmqError:
    """The exception of the specification that a client sees."""
    if isinstance(error, (TransactionError, OptionError, ResourceShortage)):
        return PreconditionFailed(error.message)
    if isinstance(error, TxmqError):
        return error if hasattr(error, "reply_code") else InternalFault(error.message)
    return InternalFault(f"{type(error).__name__}: {error}")
