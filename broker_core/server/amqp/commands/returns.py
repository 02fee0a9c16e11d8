"""Mandatory messages of transactions that reached no queue go back to their publisher, as far as it reads:
one block is in memory, the others stay in their segments. Not here: which they are (``broker/commit.py``).

Invariant: a block that is returned is unpinned once, even if the connection ends before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from broker_core.broker.broker import BrokerState
from broker_core.broker.commit import CommitResult
from broker_core.broker.transaction.spilled import Unreached
from broker_core.core.change import Change
from broker_core.message.message import Message
from broker_core.server.amqp.ports import ClientConnection
from broker_core.server.amqp.session import Session

Left = deque[Unreached | Message]


def add(session: Session, committed: CommitResult, then: Callable[[], None]) -> None:
    """Call ``then`` behind the last message, or when the connection is lost."""
    session.connection.attached.setdefault(Returns, Returns()).add(session, committed, then)


def go_on(connection: ClientConnection) -> None:
    """The client reads, or is lost."""
    if Returns in connection.attached:
        connection.attached[Returns].go_on()


class Returns:
    """Of one connection."""

    __slots__ = ("_line", "_reads")

    def __init__(self) -> None:
        self._line: deque[tuple[Session, Left, Callable[[], None]]] = deque()
        self._reads = False  # a block of the first one

    def add(self, session: Session, committed: CommitResult, then: Callable[[], None]) -> None:
        self._line.append((session, deque([*committed.stored, *committed.returned]), then))
        self.go_on()

    def go_on(self) -> None:
        while self._line and not self._reads:
            session, left, then = self._line[0]
            if session.connection.closed_for_sending or not left:
                self._line.popleft()
                _release(session, left)
                if not session.ended:
                    then()
            elif not session.connection.writable:
                return
            elif isinstance(first := left.popleft(), Message):
                session.give_back(first)
            else:
                self._reads = True
                work, taken = partial(_take_back, first), partial(self._put_back, session, left, first)
                session.commits.submit(work, taken, session)

    def _put_back(
        self,
        session: Session,
        left: Left,
        unreached: Unreached,
        messages: list[Message] | None,
        error: BaseException | None,
    ) -> None:
        self._reads = False
        left.extendleft(reversed(messages or []))
        if error is not None:  # the transaction is committed, and a block of it is damaged now
            self._line.popleft()
            _release(session, deque([unreached, *left]))
            if not session.ended:
                session.fail(error, None)
                session.go_on()
        self.go_on()


def _take_back(unreached: Unreached, state: BrokerState, change: Change, _now: int) -> list[Message]:
    return state.transactions.take_back(change, unreached)


def _release(session: Session, left: Left) -> None:
    block_ids = [each.block_id for each in left if isinstance(each, Unreached)]

    def work(state: BrokerState, change: Change, _now: int) -> None:
        for block_id in block_ids:
            state.blocks.unhold(change, block_id)

    if block_ids:
        session.commits.insist(work, lambda _answer, _error: None, session)
