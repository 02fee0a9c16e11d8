"""LocalBroker: a node, and its calls for users.

Not here: the calls of a channel (``channel.py``), and the port of the connector (``engine.py``).
"""

from __future__ import annotations

import logging

from broker_core.address import VHOST
from broker_core.admin import QueueInfo
from broker_core.broker.broker import BrokerState
from broker_core.broker.change import Change
from broker_core.broker.transaction import Limits
from broker_core.broker.transaction_key import name_of
from broker_core.checks import checked
from broker_core.engine import PreparedInfo
from broker_core.node.channel import LocalChannel
from broker_core.node.node import Node

logger = logging.getLogger("txmq.broker")


class LocalBroker(Node):
    """The interface for users; see :class:`Node` for its arguments."""

    def channel(
        self, *, connection: object = None, limits: Limits | None = None, vhost: str = VHOST
    ) -> LocalChannel:
        """Returns a new channel. Exclusive queues belong to ``connection``, or to the channel.

        Raises NotAllowed: there is no such virtual host.
        """
        self.committer.check()
        return LocalChannel(self, connection, limits or self.limits, vhost)

    def queues(self, vhost: str = VHOST) -> list[QueueInfo]:
        with self.look as state:
            topology = state.hosts.get(vhost)
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
                for queue in sorted(topology.queues.values(), key=lambda queue: queue.name)
                if not queue.replies
            ]

    def prepared(self, vhost: str | None = None) -> list[PreparedInfo]:
        """Returns prepared transactions that are not decided, of one virtual host or of all, oldest first."""
        now = self.clock()
        with self.look as state:
            found = [
                PreparedInfo(
                    name_of(key),
                    max(0, now - state.prepared.since_us[key]) / 1e6,
                    prepared.messages,
                    len(prepared.settles),
                    prepared.size_bytes,
                    prepared.dropped,
                )
                for key, prepared in state.prepared.by_key.items()
                if vhost in (None, state.prepared.vhosts[key])
            ]
        return sorted(found, key=lambda info: -info.age_s)

    @checked
    def commit(self, xid: str, vhost: str | None = None) -> int:
        """Commits a prepared transaction; it may be repeated. Raises UnknownTransaction, TransactionState.
        ``vhost``: only if it was prepared there.

        Returns how many of its messages and acks had no effect because their queue was deleted; 0 if
        repeated.
        """
        dropped = self.run(lambda state, change, now: state.prepared.commit(change, xid, now, vhost)).dropped
        log_dropped(xid, dropped)
        return dropped

    @checked
    def rollback(self, xid: str, vhost: str | None = None) -> None:
        """Rolls back a prepared transaction; repeatable. Raises UnknownTransaction, TransactionState."""
        self.run(lambda state, change, now: state.prepared.rollback(change, xid, now, vhost))

    @checked
    def outcome(self, xid: str, since: float | None = None, vhost: str | None = None) -> str:
        """Returns how the transaction of an xid or commit token ended: prepared, committed or rolled_back.
        ``vhost``: the name is one of there; None: of any.

        Raises UnknownTransaction: there is none. UnknownOutcome: there may have been one, and its outcome is
        forgotten; not if the transaction began after the forgotten ones, by ``since``, in seconds since the
        epoch.
        """
        since_us = int(min(max(since, 0.0), 1e12) * 1_000_000) if since is not None else 0

        def work(state: BrokerState, _change: Change, _now: int) -> str:
            key = state.prepared.of_any_host(xid) if vhost is None else state.names.key(vhost, xid)
            return state.names.outcome(key, since_us)

        return self.run(work)


def log_dropped(xid: str, dropped: int) -> None:
    """Logs what had no effect in the commit of a prepared transaction."""
    if dropped:
        logger.warning(
            "transaction '%s' is committed; %d messages or acks of it named queues that are gone, and were "
            "dropped",
            xid,
            dropped,
        )
