"""The time limit of an open transaction (semantics 18): that of the broker, or a shorter one of its client.

Not here: the limit of a transaction (``broker/transaction/transaction.py``), which ``tx.commit`` checks too.
"""

from __future__ import annotations

from broker_core.core.errors import TransactionError
from broker_core.server.amqp.ports import ClientConnection
from broker_core.server.amqp.session import Session

_WATCHED = "open_time"  # in ``attached``: the channels with a limit, so that a sweep costs the others nothing


def watch(session: Session) -> None:
    """The channel is transactional. Again is harmless."""
    if session.channel.limits.open_s is not None:
        session.connection.attached.setdefault(_WATCHED, set()).add(session)


def limit(session: Session, seconds: float) -> None:
    """As the client wishes, but not beyond the limit of the broker; 0: that alone."""
    session.channel.limit_open_time(seconds, session.broker.limits.open_s)
    watch(session)


def sweep(connection: ClientConnection) -> None:
    """Closes the channels whose transaction is open for too long."""
    watched: set[Session] = connection.attached.get(_WATCHED, set())
    for session in tuple(watched):
        if session.ended:
            watched.discard(session)
        elif session.ready and session.channel.transactional:
            try:
                session.channel.transaction.check_open_time(session.clock())
            except TransactionError as error:
                session.fail(error, None)
