"""The sessions of one connection: one for each open channel, and the order in which they end.

Not here: what a session does (``session.py``), and which channels are open (``amqp/v0_9_1/channels.py``).

Invariant: every session ends exactly once. After all of them the exclusive queues of the connection are
deleted; then the function given to ``close_all`` is called.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial

from broker_core.amqp.v0_9_1.channels import reply_text
from broker_core.broker.broker import BrokerState
from broker_core.core.change import Change
from broker_core.core.errors import ConnectionException, ResourceExhausted
from broker_core.node.channel import DELETED
from broker_core.server.amqp.input import SMALL_BYTES
from broker_core.server.amqp.ports import ClientConnection, Server
from broker_core.server.amqp.session import Session

logger = logging.getLogger("txmq.amqp")


class Sessions:
    """``by_number``: the sessions that have not ended, by channel number.

    Their channels are open, or closed by the client with work left to do.
    """

    __slots__ = (
        "_connection", "_early", "_ended", "_ending", "_failed", "_finish", "_is_lost", "_left", "_over",
        "_server", "by_number",
    )  # fmt: skip

    def __init__(self, connection: ClientConnection, server: Server) -> None:
        self._connection = connection
        self._server = server
        self.by_number: dict[int, Session] = {}
        self._ending = 0  # sessions whose end is not durable yet
        self._finish: Callable[[], None] | None = None  # called when all have ended
        self._ended = False
        self._left = 0  # sessions of ``end_all`` whose channels are not closed
        self._early = False  # the exclusive queues were to be deleted before all of them were
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
            except ResourceExhausted as error:
                connection.fail(0, error)

    def fail(self, number: int, text: str) -> None:
        """The broker has closed the channel."""
        self._leave(number)
        self.by_number.pop(number).end(text)
        self._finish_when_all_ended()

    def close(self, number: int) -> None:
        """All commands before channel.close are done: answer it when the end is durable."""
        session = self.by_number.pop(number, None)
        if session is not None:
            self._leave(number)
            self._ending += 1
            session.end("it was closed", partial(self._closed, number))
            self._finish_when_all_ended()

    def _closed(self, number: int) -> None:
        self._ending -= 1
        self._connection.protocol.channels.ended(number)
        self._connection.flush_later()
        self._finish_when_all_ended()
        self._let_go()

    def fail_all(self, error: ConnectionException, ids: tuple[int, int], order: float) -> None:
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
        text = reply_text(error.reply_name, error.summary)
        logger.warning("connection %s is closed: %s", connection.name, text)
        connection.pause(self)
        connection.protocol.stop()
        self.stop_deliveries()

        def finish() -> None:
            connection.close(error, ids)
            self.end_all(text, None)

        self.close_all(finish, order)

    def close_all(self, finish: Callable[[], None], failed: float = math.inf) -> None:
        """The connection closes: sessions end after their waiting commands. Then ``finish`` is called, which
        calls ``end_all``. ``failed``: what came after the command of this order is dropped.
        """
        self._finish = finish
        for session in list(self.by_number.values()):
            session.end_before(failed)
        self._finish_when_all_ended()

    def stop_deliveries(self) -> None:
        for session in self.by_number.values():
            session.stop_deliveries()

    def resume_deliveries(self) -> None:
        server = self._server
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
            self.end_all("its connection was lost", None)
        self._let_go()

    def _let_go(self) -> None:
        """Once all is over, the connection, which has this, is freed without the collector."""
        if self._is_lost and self._over and not self._ending:
            del self._connection, self._finish

    def end_all(self, why: str, then: Callable[[], None] | None) -> None:
        """End all sessions at once, then delete the exclusive queues of the connection, in pieces, so that
        other work runs in between.
        """
        if self._ended:
            return
        self._ended = True
        sessions = list(self.by_number.values())
        self.by_number.clear()
        self._left = len(sessions)
        for session in sessions:
            self._leave(session.number)
            session.end(why, partial(self._channel_closed, then))
        self._delete_queues(sessions, then)  # in the same commit, unless one of them waits for a block

    def _channel_closed(self, then: Callable[[], None] | None) -> None:
        self._left -= 1
        if self._early and not self._left:
            self._delete_queues([], then)

    def _delete_queues(self, sessions: list[Session], then: Callable[[], None] | None) -> None:
        connection = self._connection
        topology = connection.seen.topology

        def work(_state: BrokerState, change: Change, _now: int) -> tuple[bool, bool]:
            """Returns whether all channels are closed, and whether all queues are gone."""
            if not all(session.channel.closed for session in sessions):
                return False, False
            queues = topology.exclusive_queues(connection)
            for queue in queues[:DELETED]:
                topology.delete_queue(change, queue.name, connection=connection)
            return True, len(queues) <= DELETED

        self._server.commits.submit(work, partial(self._queues_deleted, then))

    def _queues_deleted(
        self, then: Callable[[], None] | None, done: tuple[bool, bool] | None, error: BaseException | None
    ) -> None:
        all_closed, all_gone = done or (False, False)
        if all_closed and not all_gone:
            self._delete_queues([], then)
        elif all_closed or error is not None:
            self._over = True
            if then is not None:
                then()
            self._let_go()
        elif self._left:
            self._early = True
        else:
            self._delete_queues([], then)

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
