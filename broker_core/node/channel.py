"""A channel in this process: AMQP's commands as calls.

Not here: what a channel holds (``broker/channel.py``), and a channel of another process
(``client/channel.py``).
Invariant: the effect of a call that returns is durable, or waits in the transaction of the channel.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Concatenate, Literal, ParamSpec, TypeVar

from broker_core.broker.access.rights import Rights
from broker_core.broker.broker import BrokerState
from broker_core.broker.channel import Channel
from broker_core.broker.message.purge import Purge
from broker_core.broker.queue import Queue
from broker_core.broker.transaction.spilled import Unreached
from broker_core.broker.transaction.transaction import Limits, Outcome, Settle, State, Transaction
from broker_core.core.address import VHOST
from broker_core.core.block import NotLoaded
from broker_core.core.change import Change
from broker_core.core.checks import check_call, checked_calls
from broker_core.core.errors import OptionError, StoreFailed, TransactionTooLarge, TxmqError
from broker_core.message.arguments import check_reserved, check_text
from broker_core.message.message import Delivery, Message
from broker_core.message.properties import Properties
from broker_core.node.channel_commit import Call
from broker_core.node.committer import Work, changes
from broker_core.node.deferred_signals import uninterrupted
from broker_core.node.node import Node
from broker_core.node.open_channels import ChannelHolder
from broker_core.routing.carbon_copy import has_copies
from broker_core.routing.content import check_properties

P = ParamSpec("P")
T = TypeVar("T")
GET_MESSAGES = 1_000  # of one ``get_at``
GET_BYTES = 4 * 1024 * 1024
DELETED = 250  # exclusive queues, in one work
_new = tuple.__new__  # takes a third of the time of a NamedTuple's own


@checked_calls(but=("publish", "get", "ack", "nack", "reject", "tx_commit"))
class LocalChannel:
    """A transactional channel in this process (docs/transactions.md). For one thread at a time.

    Every method raises TransactionState after the channel is closed, and StoreFailed after the broker has
    stopped. ``returned`` collects mandatory messages that reached no queue.
    """

    def __init__(
        self,
        broker: Node,
        connection: object,
        limits: Limits,
        vhost: str = VHOST,
        user: str = "",
        rights: Rights | None = None,
        holder: ChannelHolder | None = None,
    ) -> None:
        """``user``: whose the transactions are that it names. ``rights``: asked again at a commit.
        ``holder``: who uses it; None: this process.
        """
        self._broker = broker
        self._state = broker.state.of(vhost)
        self._topology = self._state.topology
        self._committer = broker.committer
        self._commits = broker.channel_commits
        self._clock = broker.clock
        self._channel = Channel(self._state, connection=connection, limits=limits)
        holder = holder or ChannelHolder("", "process", user, "", "", vhost, broker.clock())
        broker.open_channels.add(self._channel, holder)
        self._open_s, self._user, self._rights = limits.open_s, user, rights
        # of a channel that another process holds: its id, and the number of this call
        self.call: Call | None = None
        self._ended = False
        self.returned: list[Message] = []
        self.stored: deque[Unreached] = deque()  # before those, of a commit that another process made

    # -- exchanges and queues --------------------------------------------------------------------------------
    def exchange_declare(
        self,
        exchange: str,
        type: str = "direct",
        *,
        durable: bool = True,
        auto_delete: bool = False,
        internal: bool = False,
        arguments: dict[str, object] | None = None,
    ) -> None:
        """Declares an exchange. Raises PreconditionFailed (other properties), AccessRefused (reserved)."""
        self._do(
            self._topology.declare_exchange,
            exchange,
            type,
            durable=durable,
            auto_delete=auto_delete,
            internal=internal,
            arguments=arguments,
        )

    def exchange_delete(self, exchange: str, *, if_unused: bool = False) -> None:
        self._do(self._topology.delete_exchange, exchange, if_unused=if_unused)

    def queue_declare(
        self,
        queue: str = "",
        *,
        durable: bool = True,
        exclusive: bool = False,
        auto_delete: bool = False,
        arguments: dict[str, object] | None = None,
        passive: bool = False,
    ) -> str:
        """Declares a queue and returns its name; for "" the broker chooses one. ``passive`` only checks.

        Raises PreconditionFailed (exists with other properties, unknown argument), ResourceLocked,
        AccessRefused, QueueNotFound.
        """
        if not queue:
            queue = self._broker.new_name()
        elif not passive:
            check_reserved(queue, self._topology.queues)
        connection = self._channel.connection
        if passive:
            self._do(lambda _change: self._topology.visible_to(queue, connection))
        else:
            self._do(
                self._topology.declare_queue,
                queue,
                durable=durable,
                exclusive=exclusive,
                auto_delete=auto_delete,
                arguments=arguments,
                connection=connection,
            )
        return queue

    def queue_bind(
        self, queue: str, exchange: str, routing_key: str = "", arguments: dict[str, object] | None = None
    ) -> None:
        connection = self._channel.connection
        self._do(self._topology.bind, queue, exchange, routing_key, arguments, connection=connection)

    def queue_unbind(
        self, queue: str, exchange: str, routing_key: str = "", arguments: dict[str, object] | None = None
    ) -> None:
        connection = self._channel.connection
        self._do(self._topology.unbind, queue, exchange, routing_key, arguments, connection=connection)

    def queue_purge(self, queue: str) -> int:
        """Drops messages that are not held, and returns how many. Raises QueueNotFound, ResourceLocked."""
        purge = Purge(self._topology, queue, self._channel.connection)
        while not self._run(purge.step):
            pass
        return purge.count

    def queue_delete(self, queue: str, *, if_unused: bool = False, if_empty: bool = False) -> int:
        """Deletes a queue and returns how many messages it had. Raises ResourceLocked, PreconditionFailed."""
        delete, connection = self._topology.delete_queue, self._channel.connection
        return self._do(delete, queue, if_unused=if_unused, if_empty=if_empty, connection=connection)

    # -- publishing ------------------------------------------------------------------------------------------
    def publish(
        self,
        body: bytes,
        exchange: str = "",
        routing_key: str = "",
        properties: bytes | Properties = b"",
        *,
        mandatory: bool = False,
    ) -> bool:
        """Publishes a message and returns whether it is routed to a queue. In a transaction it waits for
        tx_commit; otherwise it is durable when this returns.

        Raises ExchangeNotFound, AccessRefused, PreconditionFailed (a full queue; an invalid delivery mode,
        expiration, CC or BCC), RemoteProtocolError (damaged properties), OptionError (a routing key),
        TransactionTooLarge.
        """
        channel = self._channel
        if channel.closed:
            channel.check_open()
        if type(exchange) is not str or (mandatory is not True and mandatory is not False):
            some: dict[str, object] = {"body": b"", "exchange": exchange, "mandatory": mandatory}
            check_call("publish", LocalChannel.publish, some)
        if isinstance(properties, Properties):
            properties = properties.encode()
        if type(body) is not bytes or type(routing_key) is not str or type(properties) is not bytes:
            body, properties = _as_bytes("a body", body), _as_bytes("properties", properties)
            check_text("a routing key", routing_key)
        if properties:
            check_properties(properties)
        message = _new(Message, (body, routing_key, exchange, properties))
        source = self._topology.exchanges.get(exchange)
        reached = None if source is None or source.internal else source.cached(routing_key)
        queues = None if properties and has_copies(properties) else reached
        if not queues:
            check_text("a routing key", routing_key)
        if queues is None:
            with self._committer.look:
                queues, properties = self._topology.route_copies(exchange, routing_key, properties)
            message = _new(Message, (body, routing_key, exchange, properties))
        if not queues and not mandatory:
            return False
        channel.publish(message, queues, mandatory, self._begun_us())
        if channel.transactional:
            self._commits.spill_full(channel.transaction)
        else:
            self._commit_single()
        return bool(queues)

    # -- deliveries ------------------------------------------------------------------------------------------
    @uninterrupted
    def get(self, queue: str, *, no_ack: bool = False) -> Delivery | None:
        """Returns the next message or None; ``no_ack``: settled now. Raises QueueNotFound, ResourceLocked."""
        if type(queue) is not str or type(no_ack) is not bool:
            check_call("get", LocalChannel.get, {"queue": queue, "no_ack": no_ack})
        channel = self._channel
        channel.check_open()
        self._committer.check()
        try:
            with self._committer.look as state:
                found = self._topology.usable(queue, channel.connection)
                late = state.expiry.head_expired(found, self._clock())
                delivery = None if late else channel.get(found)
        except NotLoaded:
            late = True
        if late:
            delivery = self._get_later(queue)
        if delivery is not None and no_ack:
            self._settle_at_once(delivery.tag)
        return delivery

    def _get_later(self, queue: str) -> Delivery | None:
        """Gets the next message in works, which may load blocks and expire messages before it."""

        def take_or_expire(state: BrokerState, change: Change, now: int) -> tuple[Delivery | None, bool]:
            found = state.topology.usable(queue, self._channel.connection)
            late = state.expiry.head_expired(found, self._clock())
            if late:
                state.expiry.expire(change, now, [found])
            return None if late else self._channel.get(found), late

        late = True
        while late:
            delivery, late = self._run(take_or_expire)
        return delivery

    def get_at(self, queue: str, offsets: Sequence[int]) -> list[Delivery]:
        """Returns the messages at these offsets that are ready, held as by ``get``; others are left out. It
        may end early: at about GET_BYTES of bodies, or at a block that must be read first.

        Raises OptionError (more than GET_MESSAGES), QueueNotFound, ResourceLocked.
        """
        if len(offsets) > GET_MESSAGES:
            raise OptionError(
                f"{len(offsets)} offsets are more than the {GET_MESSAGES} allowed", "give fewer"
            )

        def work(state: BrokerState, _change: Change, now: int) -> list[Delivery]:
            found = state.topology.usable(queue, self._channel.connection)
            return self._channel.get_at(found, offsets, GET_BYTES, now)

        return self._run(work)

    @uninterrupted
    def _settle_at_once(self, tag: int) -> None:
        """Settles outside the transaction. If that fails, the message is not delivered and is ready again."""
        channel = self._channel
        single = Transaction(channel.limits, 0)
        queue, offset, _ = channel.unacked[tag]
        single.settles.append(Settle(queue, offset, "ack"))
        try:
            self._commit(single)
        finally:
            with self._committer.look as state:
                if channel.unacked.pop(tag, None) is not None and single.state is State.ACTIVE:
                    single.become(State.ROLLED_BACK)
                    state.settlement.requeue([(queue, offset)])

    def ack(self, tag: int = 0, *, multiple: bool = False) -> None:
        """Acks deliveries. Raises PreconditionFailed for an unknown or repeated tag."""
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

    def _begun_us(self) -> int:
        """Returns the time if the open transaction may begin now, else 0."""
        channel = self._channel
        return self._clock() if channel.transactional and not channel.transaction.opened_us else 0

    @uninterrupted
    def _settle(self, tag: int, outcome: Outcome, multiple: bool) -> None:
        self._channel.settle(tag, outcome, multiple, self._begun_us())
        if not self._channel.transactional:
            self._commit_single()

    @uninterrupted
    def recover(self) -> int:
        """Requeues and counts unacked deliveries, except those acked in the open transaction."""
        count = self._run(lambda _state, change, now: self._channel.recover(change, now))
        self._committer.listeners.tell_consumers()
        return count

    # -- transactions ----------------------------------------------------------------------------------------
    def tx_select(self) -> None:
        """Starts tx mode; it may be repeated. Raises PreconditionFailed on a channel in confirm mode."""
        self._channel.tx_select()

    def confirm_select(self) -> None:
        """Starts confirm mode: a publish that returns is confirmed. Raises PreconditionFailed in tx mode."""
        self._channel.confirm_select()

    @uninterrupted
    def tx_commit(self, token: str = "", *, routed: bool = False) -> None:
        """Commits all publishes and acks of the transaction, or nothing. ``token``: a name for
        ``LocalBroker.outcome``. ``routed``: only if every mandatory message reaches a queue, also one whose
        queues were deleted since its publish.

        Raises PreconditionFailed (not transactional; a full queue), TransactionTooLarge, TransactionState
        (token used before), Unroutable. It is rolled back then, and the channel is closed.
        """
        if type(token) is not str or type(routed) is not bool:
            check_call("tx_commit", LocalChannel.tx_commit, {"token": token, "routed": routed})
        channel = self._channel
        channel.check_transactional()
        transaction = channel.transaction
        if not transaction and not token:
            return
        transaction.xid = self._state.names.key(self._state.vhost, token, self._user) if token else ""
        try:
            if channel.limits.open_s is not None:
                transaction.check_open_time(self._clock())
            self._commit(transaction, self.call, routed)
            channel.finish()
        except TxmqError as error:
            self._end(f"its commit failed ({error.message})")
            raise

    def tx_timeout(self, seconds: float) -> None:
        """Limits the open time of this transaction and of the next ones: not beyond the broker's limit, and 0
        is that alone. One that is open for longer cannot be committed; over Flight it also ends by itself.
        Raises OptionError, PreconditionFailed (not transactional).
        """
        self._channel.check_transactional()
        if not 0 <= seconds < math.inf:
            raise OptionError(f"a timeout is a number of seconds, not {seconds}")
        self._channel.limit_open_time(seconds, self._open_s)

    def tx_current(self) -> str:
        """Returns the id of the open transaction. Raises PreconditionFailed (not transactional)."""
        self._channel.check_transactional()
        return self._broker.open_channels.transaction_id(self._channel)

    @uninterrupted
    def end_late(self) -> None:
        """Rolls back and closes the channel if its transaction is open for too long."""
        try:
            self._channel.transaction.check_open_time(self._clock())
        except TransactionTooLarge as late:
            self._end(late.message)

    @uninterrupted
    def tx_rollback(self) -> None:
        """Drops publishes; acked tags are unacked again. Raises PreconditionFailed (not transactional)."""
        self._channel.check_transactional()
        with self._committer.look:
            block_ids = self._channel.rollback()
        self._commits.discard(block_ids)

    @uninterrupted
    def prepare(self, xid: str) -> Literal["prepared", "read_only"]:
        """Makes the transaction durable under ``xid``, invisible, for any process to commit or roll back. The
        channel stays open.

        Raises PreconditionFailed (not transactional), TransactionState (a used xid), TransactionTooLarge.
        """
        channel = self._channel
        channel.check_transactional()
        transaction = channel.transaction
        transaction.check_open_time(self._clock())
        commits, call = self._commits, self.call
        commits.spill_large(transaction, prepare=True)
        answer = self._run(
            lambda _state, change, now: commits.prepare(
                channel, transaction, self._rights, call, xid, self._user, change, now
            )
        )
        channel.finish()
        return answer

    # -- ending ----------------------------------------------------------------------------------------------
    @property
    def closed(self) -> str:
        """Returns why the channel is closed; "" while it is open."""
        return self._channel.closed

    @uninterrupted
    def close(self) -> None:
        """Rolls back, requeues unacked deliveries, deletes exclusive queues. It may be repeated."""
        if not self._ended:
            self._end("it was closed")

    @uninterrupted
    def _end(self, why: str) -> None:
        """Closes the channel in one commit, behind its earlier work, then its exclusive queues in pieces."""
        channel, topology = self._channel, self._topology

        def work(state: BrokerState, change: Change, now: int) -> None:
            change.forgets.extend(channel.close(why, change, now))
            for block_id, _ in self.stored:
                state.blocks.unhold(change, block_id)

        def delete(queues: list[Queue], _state: BrokerState, change: Change, _now: int) -> None:
            for queue in queues:
                topology.delete_queue(change, queue.name, connection=channel)

        try:
            self._broker.run(work)
            queues = topology.exclusive_queues(channel)
            for start in range(0, len(queues), DELETED):
                self._broker.run(partial(delete, queues[start : start + DELETED]))
        except StoreFailed:
            with self._committer.look:
                channel.close(why)
        self._ended, self.stored = True, deque()
        self._committer.listeners.tell_consumers()

    @uninterrupted
    def _commit_single(self) -> None:
        """Commits each publish or ack outside tx.select as a transaction of its own, and raises its error. An
        ack of very many deliveries is several.
        """
        single = self._channel.take()
        if not single:
            return
        pieces = self._commits.pieces(single)
        for place, piece in enumerate(pieces):
            piece.atomic = True
            piece.expect_letters(piece.settles)
            try:
                self._commit(piece)
            # what it acked has left this channel, so it must be requeued here
            except TxmqError:
                if self._committer.failure is None:
                    self._commits.discard(piece.appended)
                    settles = [settle for left in pieces[place:] for settle in left.settles]
                    with self._committer.look as state:
                        state.settlement.requeue((queue, offset) for queue, offset, _ in settles)
                    self._committer.listeners.tell_consumers()
                raise

    def _commit(self, transaction: Transaction, call: Call | None = None, routed: bool = False) -> None:
        committed = self._commits.run(self._channel, transaction, self._rights, call, routed)
        self.stored += committed.stored
        self.returned += committed.returned

    def _run(self, work: Work[T]) -> T:
        channel, seen = self._channel, self._state
        channel.check_open()

        def while_open(_state: BrokerState, change: Change, now: int) -> T:
            # the channel may have been closed meanwhile; a new exclusive queue would have no owner
            channel.check_open()
            seen.topology.require_there()
            change.effects.who = channel.who
            return work(seen, change, now)

        return self._committer.run(while_open)

    def _do(self, work: Callable[Concatenate[Change, P], T], *args: P.args, **keywords: P.kwargs) -> T:
        """Runs a work of the rules that needs nothing but the change."""
        return self._run(changes(work, *args, **keywords))

    def __enter__(self) -> LocalChannel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _as_bytes(what: str, value: object) -> bytes:
    if not isinstance(value, (bytes, bytearray, memoryview)):
        raise OptionError(f"{what} must be bytes, not {type(value).__name__}: encode it first")
    return bytes(value)
