"""The sessions of one connection: one for each open channel, and the order in which they end.

Not here: what a session does (``session.py``), and which channels are open (``amqp/v0_9_1/channels.py``).

Invariant: every session ends exactly once. After all of them the exclusive queues of the connection are
deleted; then the function given to ``close_all`` is called.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from broker_core.amqp.v0_9_1.events import Command
from broker_core.amqp.v0_9_1.methods import ChannelClose
from broker_core.broker.broker import BrokerState
from broker_core.broker.state.change import Change
from broker_core.node.channel import DELETED
from broker_core.server.amqp.ports import ClientConnection, Server
from broker_core.server.amqp.session import Session


class Sessions:
    """``by_number``: the sessions that have not ended, by channel number.

    Their channels are open, or closed by the client with work left to do.
    """

    __slots__ = ("_connection", "_ended", "_ending", "_finish", "_server", "by_number")

    def __init__(self, connection: ClientConnection, server: Server) -> None:
        self._connection = connection
        self._server = server
        self.by_number: dict[int, Session] = {}
        self._ending = 0  # sessions whose end is not durable yet
        self._finish: Callable[[], None] | None = None  # called when all have ended
        self._ended = False

    def open(self, number: int) -> None:
        """Raises NotAllowed: the limit of channels is reached."""
        self._server.quotas.channels.enter((self._connection, number), self._connection.user)
        self.by_number[number] = Session(self._connection, number, self._server)

    def fail(self, number: int, text: str) -> None:
        """The broker has closed the channel."""
        self._left(number)
        self.by_number.pop(number).end(text)

    def close(self, number: int) -> None:
        """All commands before channel.close are done: answer it when the end is durable."""
        session = self.by_number.pop(number, None)
        if session is not None:
            self._left(number)
            self._ending += 1
            session.end("it was closed", partial(self._closed, number))

    def _closed(self, number: int) -> None:
        self._ending -= 1
        self._connection.protocol.channel_ended(number)
        self._connection.flush_later()
        self._finish_when_all_ended()

    def close_all(
        self, why: str, then: Callable[[], None] | None, at_once: Callable[[Session], bool] = lambda _: False
    ) -> None:
        """The connection closes.

        Sessions end after their commands that wait, or ``at_once``; then ``then`` is called.
        """
        self._finish = partial(self.end_all, why, then)
        for session in list(self.by_number.values()):
            if at_once(session):
                self.close(session.number)
            else:
                session.handle(Command(session.number, ChannelClose()))
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
        if self._finish is None:  # else they end by themselves
            self.end_all("its connection was lost", None)

    def end_all(self, why: str, then: Callable[[], None] | None) -> None:
        """End all sessions at once, then delete the exclusive queues of the connection, in pieces, so that
        other work runs in between.
        """
        if self._ended:
            return
        self._ended = True
        sessions = list(self.by_number.values())
        self.by_number.clear()
        left = len(sessions)
        early = False  # the deletion was asked for before all channels were closed

        topology = self._connection.seen.topology

        def work(_state: BrokerState, change: Change, _now: int) -> tuple[bool, bool]:
            """Returns whether all channels are closed, and whether all queues are gone."""
            if left and not all(session.channel.closed for session in sessions):
                return False, False
            queues = topology.exclusive_queues(self._connection)
            for queue in queues[:DELETED]:
                topology.delete_queue(change, queue.name, connection=self._connection)
            return True, len(queues) <= DELETED

        def deleted(done: tuple[bool, bool] | None, error: BaseException | None) -> None:
            nonlocal early
            all_closed, all_gone = done or (False, False)
            if all_closed and not all_gone:
                delete()
            elif all_closed or error is not None:
                if then is not None:
                    then()
            elif left:
                early = True
            else:
                delete()

        def ended() -> None:
            nonlocal left
            left -= 1
            if early and not left:
                delete()

        def delete() -> None:
            self._server.commits.submit(work, deleted)

        for session in sessions:
            self._left(session.number)
            session.end(why, ended)
        delete()  # in the same commit, unless one of them waits for a block

    def _left(self, number: int) -> None:
        self._server.quotas.channels.leave((self._connection, number))

    def _finish_when_all_ended(self) -> None:
        if self._finish is not None and not self.by_number and not self._ending:
            self._finish()
