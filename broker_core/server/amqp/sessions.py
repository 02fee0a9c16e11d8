"""The sessions of one connection: one for each open channel, and the order in which they end.

Not here: what a session does (``session.py``), and which channels are open (``amqp/v0_9_1/channels.py``).

Invariant: every session ends exactly once, and counts for its user until its end is durable, unless the
broker has closed its channel. After all of them the exclusive queues of the connection are deleted. The end
of a connection takes turns, as its commands do.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from broker_core.amqp.v0_9_1.channels import reply_text
from broker_core.amqp.v0_9_1.events import ChannelFailed
from broker_core.amqp.v0_9_1.methods import Method
from broker_core.broker.broker import BrokerState
from broker_core.core import errors
from broker_core.core.change import Change
from broker_core.node.channel import DELETED
from broker_core.server.amqp import audit
from broker_core.server.amqp.input import SMALL_BYTES
from broker_core.server.amqp.ports import HARD_BYTES, HIGH_BYTES, ClientConnection, Server
from broker_core.server.amqp.session import Session, as_amqp

logger = logging.getLogger("txmq.amqp")


class Sessions:
    """``by_number``: the sessions that have not ended, by channel number.

    Their channels are open, or closed by the client with work left to do.
    """

    __slots__ = (
        "_connection", "_cuts", "_ended", "_ending", "_failed", "_finish", "_is_lost", "_line", "_over",
        "_server", "by_number",
    )  # fmt: skip

    def __init__(self, connection: ClientConnection, server: Server) -> None:
        self._connection = connection
        self._server = server
        self.by_number: dict[int, Session] = {}
        self._line: deque[int] = deque()  # of the sessions that have still to end when the connection closes
        self._cuts = False  # they do not wait for their commands
        self._ending = 0  # sessions whose end is not durable yet
        self._finish: Callable[[], None] | None = None  # called when all have ended
        self._ended = False
        self._over = False  # all has ended, and the queues are deleted
        self._is_lost = False
        self._failed: float | None = None  # the order of the command that closes the connection

    def open(self, number: int) -> None:
        """Raises NotAllowed: the limit of channels is reached."""
        self._server.quotas.channels.enter((self._connection, number), self._connection.user)
        self.by_number[number] = Session(self._connection, number, self._server)

    def count_content(self, size_bytes: int) -> None:
        """Contents of the connection have so many bytes, and are not whole."""
        quota, connection = self._server.quotas.content_bytes, self._connection
        quota.leave(connection)
        if size_bytes > SMALL_BYTES:
            try:
                quota.enter(connection, connection.user, size_bytes)
            except errors.ResourceExhausted as error:
                connection.fail(0, error)

    def count_unread(self, size_bytes: int) -> None:
        """So many bytes wait for a client that does not read. A pause bounds them, except for the last
        answer, which may be a large message. All clients of a user have a limit, beyond which it is closed.
        """
        quota, connection = self._server.quotas.unread_bytes, self._connection
        quota.leave(connection)
        if size_bytes > HARD_BYTES:
            connection.pause("output")
        if size_bytes > HIGH_BYTES:
            try:
                quota.enter(connection, connection.user, size_bytes - HIGH_BYTES)
            except errors.Busy as error:
                connection.abort(error.summary)

    def refuse(
        self, number: int, error: BaseException, method: Method | None = None, order: float = math.inf
    ) -> None:
        """Closes the channel, or the connection, when what came before is answered: ``method`` failed."""
        if self._ends(number):
            return
        if not isinstance(error, errors.TxmqError):
            what = method.NAME if method else "a command"
            logger.error("connection %s: %s failed", self._connection.name, what, exc_info=error)
        failure = as_amqp(error)
        audit.failed(self._connection, method, failure)
        ids = (method.CLASS_ID, method.METHOD_ID) if method is not None else (0, 0)
        if not isinstance(failure, errors.ChannelError) or not number:
            fault = errors.InternalFault(failure.summary)
            self.fail_all(failure if isinstance(failure, errors.ConnectionException) else fault, ids, order)
        elif number in self.by_number:
            self.by_number[number].refuse(ChannelFailed(number, failure, ids), order)

    def _ends(self, number: int) -> bool:
        """Returns whether nothing more can be sent: then nothing else ends the session."""
        ends = self._over or self._connection.closed_for_sending
        if ends:
            self.close(number)
        return ends

    def fail(self, failed: ChannelFailed) -> None:
        """The broker closes the channel now."""
        if self._ends(failed.channel):
            return
        number, connection = failed.channel, self._connection
        text, lost = connection.protocol.channels.close(*failed), _rolled_back(self.by_number.get(number))
        where = connection.name, connection.user
        logger.info("%s of user '%s': channel %d is closed: %s%s", *where, number, text, lost)
        connection.flush_later()
        self._leave(number)
        self.by_number.pop(number).end(text)
        self._finish_when_all_ended()

    def close(self, number: int) -> None:
        """All commands before channel.close are done: answer it when the end is durable."""
        session = self.by_number.pop(number, None)
        if session is not None:
            self._ending += 1
            session.end("it was closed", partial(self._closed, number))
            self._finish_when_all_ended()

    def _closed(self, number: int) -> None:
        self._ending -= 1
        self._leave(number)
        self._connection.protocol.channels.ended(number)
        self._connection.flush_later()
        self._finish_when_all_ended()

    def fail_all(self, error: errors.ConnectionException, ids: tuple[int, int], order: float) -> None:
        """Close the connection because of the command with this ``order``.

        1. nothing that came after it is carried out
        2. what came before is, on all channels, and answered
        3. connection.close
        Of two such commands the first one counts, which may fail later.
        """
        connection = self._connection
        first = self._failed is None or order < self._failed
        if not first or (connection.protocol.closing and order == math.inf):
            return
        self._failed = order
        logger.warning("%s is closed: %s", connection.name, reply_text(error.reply_name, error.summary))
        connection.pause(self)
        connection.protocol.stop()

        def finish() -> None:
            connection.close(error, ids)
            self.end_all(None)

        self.close_all(finish, order)

    def close_all(self, finish: Callable[[], None], failed: float = math.inf) -> None:
        """The connection closes: sessions end after their waiting commands, by turns. Then ``finish`` is
        called, which calls ``end_all``. ``failed``: what came after the command of this order is dropped;
        0: all is, and a session does not wait for its command.
        """
        self._finish = finish
        self._cuts = not failed
        self.stop_deliveries()
        for session in self.by_number.values() if failed != math.inf else ():
            session.drop_behind(failed)
        self._line = deque(self.by_number)
        self.carry_on(0)

    def carry_on(self, ends: float) -> None:
        """End the next session, and more until ``ends``."""
        while self._line:
            number = self._line.popleft()
            if self._cuts:
                self.close(number)
            elif number in self.by_number:
                self.by_number[number].close()
            if time.monotonic() > ends:
                break
        if self._line:
            self._connection.go_on(self)
        else:
            self._finish_when_all_ended()

    def stop_deliveries(self) -> None:
        for session in self.by_number.values():
            if session.channel.consumers:
                session.stop_deliveries()

    def resume_deliveries(self) -> None:
        server = self._server
        server.quotas.unread_bytes.leave(self._connection)
        if self._finish is not None:  # the connection closes
            return
        with server.broker.look as state:
            for session in self.by_number.values():
                for consumer in session.channel.consumers.values():
                    consumer.writable = True
                    state.pending_checks.wake(consumer.queue)
        server.commits.wake()

    def lost(self) -> None:
        """The socket is gone."""
        self._is_lost = True
        if self._finish is None:  # else they end by themselves
            self.close_all(partial(self.end_all, None), 0)
        self._let_go()

    def _let_go(self) -> None:
        """Once all is over, the connection, which has this, is freed without the collector."""
        if self._is_lost and self._over:
            del self._connection, self._finish

    def end_all(self, then: Callable[[], None] | None) -> None:
        """All sessions have ended. Delete the exclusive queues of the connection once no channel uses them,
        in pieces, so that other work runs in between; then call ``then``.
        """
        if self._ending:
            self._finish = partial(self.end_all, then)
        else:
            self._ended = True
            self._delete_queues(then)

    def _delete_queues(self, then: Callable[[], None] | None) -> None:
        connection = self._connection
        topology = connection.seen.topology

        def work(_state: BrokerState, change: Change, _now: int) -> bool:
            """Returns whether there are more."""
            queues = topology.exclusive_queues(connection)
            for queue in queues[:DELETED]:
                topology.delete_queue(change, queue.name, connection=connection)
            return len(queues) > DELETED

        self._server.commits.submit(work, partial(self._queues_deleted, then))

    def _queues_deleted(
        self, then: Callable[[], None] | None, more: bool | None, _error: BaseException | None
    ) -> None:
        if more:
            self._delete_queues(then)
            return
        self._over = True
        if then is not None:
            then()
        self._let_go()

    def _leave(self, number: int) -> None:
        self._server.quotas.channels.leave((self._connection, number))

    def _finish_when_all_ended(self) -> None:
        if self._finish is None or self.by_number or self._ended:
            return
        connection = self._connection.protocol
        # an error does not wait for the end of a channel to which no answer is due
        if connection.channels.unanswered if connection.stopped else self._ending:
            return
        self._finish()


def _rolled_back(session: Session | None) -> str:
    """For the log: the open transaction that ends with its channel."""
    if session is None or not (session.channel.transactional and session.channel.transaction):
        return ""
    return f"; transaction {session.broker.open_channels.transaction_id(session.channel)} is rolled back"
