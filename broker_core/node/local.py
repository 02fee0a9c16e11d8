"""LocalBroker: a node, and what its user calls.

Not here: the calls of a channel (``channel.py``), and the port of the connector (``engine.py``).
"""

from __future__ import annotations

import logging

from broker_core.broker.transaction import Limits
from broker_core.checks import checked
from broker_core.engine import PreparedInfo, QueueInfo
from broker_core.node.channel import LocalChannel
from broker_core.node.node import Node

logger = logging.getLogger("txmq.broker")


class LocalBroker(Node):
    """What a user calls; see :class:`Node` for its arguments."""

    def channel(self, *, connection: object = None, limits: Limits | None = None) -> LocalChannel:
        """A new channel. Exclusive queues belong to ``connection``; without one to the channel."""
        self.committer.check()
        return LocalChannel(self, connection, limits or self.limits)

    def queues(self) -> list[QueueInfo]:
        with self.look as state:
            return [
                QueueInfo(
                    queue.name,
                    queue.messages,
                    queue.unacknowledged,
                    queue.log.visible_end,
                    len(queue.consumers),
                    queue.owner,
                    queue.durable,
                    dict(queue.arguments.declared),
                )
                for queue in sorted(state.topology.queues.values(), key=lambda queue: queue.name)
                if not queue.replies
            ]

    def prepared(self) -> list[PreparedInfo]:
        """Transactions that are prepared and not decided, oldest first."""
        now = self.clock()
        with self.look as state:
            found = [
                PreparedInfo(
                    xid,
                    max(0, now - state.prepared.since_us[xid]) / 1e6,
                    prepared.messages,
                    len(prepared.settles),
                    prepared.size_bytes,
                    prepared.dropped,
                )
                for xid, prepared in state.prepared.by_xid.items()
            ]
        return sorted(found, key=lambda info: -info.age_s)

    @checked
    def commit(self, xid: str) -> int:
        """Commit a prepared transaction; twice is fine. Raises UnknownTransaction, TransactionState.

        How many messages and acks of it came to nothing, because their queue is gone; a second call answers
        0.
        """
        dropped = self.run(lambda state, change, now: state.prepared.commit(change, xid, now)).dropped
        log_dropped(xid, dropped)
        return dropped

    @checked
    def rollback(self, xid: str) -> None:
        """Roll back a prepared transaction; twice is fine. Raises UnknownTransaction, TransactionState."""
        self.run(lambda state, change, now: state.prepared.rollback(change, xid, now))

    @checked
    def outcome(self, xid: str, since: float | None = None) -> str:
        """Was it committed? For an xid or a commit token: prepared, committed or rolled_back.

        Raises UnknownTransaction: there is none. UnknownOutcome: there may have been one, and its outcome is
        forgotten; not where the transaction began after what is forgotten, by ``since``, in seconds since the
        epoch.
        """
        since_us = int(min(max(since, 0.0), 1e12) * 1_000_000) if since is not None else 0
        return self.run(lambda state, _change, _now: state.names.outcome(xid, since_us))


def log_dropped(xid: str, dropped: int) -> None:
    """After the commit of a prepared transaction: say what of it came to nothing."""
    if dropped:
        logger.warning(
            "transaction '%s' is committed; %d messages or acks of it named queues that are gone, and were "
            "dropped",
            xid,
            dropped,
        )
