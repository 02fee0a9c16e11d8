"""LocalBroker: a node, and its calls for users.

Not here: the calls of a channel (``channel.py``), and the port of the connector (``engine.py``).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from broker_core.admin import (
    BindingInfo,
    ChannelInfo,
    ClientInfo,
    ConsumerInfo,
    DamagedMessages,
    ExchangeInfo,
    PreparedInfo,
    QueueInfo,
    SkippedDamage,
)
from broker_core.broker.access.rights import OWNER, Actor, Rights
from broker_core.broker.broker import BrokerState
from broker_core.broker.decision import Decided, Decision, all_of, decide, rollback_all
from broker_core.broker.history.history import HistoryLimits
from broker_core.broker.message.damage import blocks_of, damaged_entries, require_free, settle
from broker_core.broker.queue import Queue
from broker_core.broker.queue.log import committed_at
from broker_core.broker.recover import recover
from broker_core.broker.transaction.prepared_row import prepared_row
from broker_core.broker.transaction.transaction import Limits
from broker_core.core import failpoint
from broker_core.core.address import VHOST
from broker_core.core.change import Change
from broker_core.core.checks import checked
from broker_core.core.errors import StoreError, UnknownTransaction
from broker_core.core.ids import BlockId
from broker_core.core.pieces import in_order
from broker_core.core.records import HEURISTICALLY
from broker_core.core.xa.recover_info import RecoverInfo
from broker_core.node.channel import LocalChannel
from broker_core.node.node import Node
from broker_core.node.open_channels import ChannelHolder
from broker_core.node.upkeep import compact_history
from broker_core.routing.listing import binding_rows, bindings, exchange_row
from broker_core.store.salvage.live import DamagedBlock, damaged

logger = logging.getLogger("txmq.broker")
T = TypeVar("T")
R = TypeVar("R")
LOCKED = 10  # queues or exchanges that are read under the lock at once
DECIDED = 100  # transactions that are rolled back in one piece
_leaves_out = threading.Lock()  # what is damaged: one at a time


class LocalBroker(Node):
    """The interface for users; see :class:`Node` for its arguments."""

    def channel(
        self,
        *,
        connection: object = None,
        limits: Limits | None = None,
        vhost: str = VHOST,
        user: str = "",
        rights: Rights | None = None,
        holder: ChannelHolder | None = None,
    ) -> LocalChannel:
        """Returns a new channel. Exclusive queues belong to ``connection``, or to the channel; the
        transactions that it names to ``user``, whose ``rights`` are asked again at a commit. ``holder``: who
        uses it; None: this process.

        Raises NotAllowed: there is no such virtual host.
        """
        self.committer.check()
        return LocalChannel(self, connection, limits or self.limits, vhost, user, rights, holder)

    def limit_history(self, limits: HistoryLimits) -> None:
        """From now on. Without a history nothing of it is left when this returns."""
        self.state.transactions.history.limits = limits
        if not limits.size_bytes:
            compact_history(self.committer, self.clock())

    def queues(self, vhost: str = VHOST) -> list[QueueInfo]:
        """Returns the queues of a virtual host, by name."""
        now_us = self.clock()
        with self.look as state:
            queues = list(state.virtual_hosts.get(vhost).queues.values())
        chosen = in_order((queue for queue in queues if not queue.replies), lambda queue: queue.name)
        return self.map_under_lock(chosen, partial(_queue_row, now_us=now_us))

    def exchanges(self, vhost: str = VHOST) -> list[ExchangeInfo]:
        """Returns the exchanges of a virtual host, by name."""
        with self.look as state:
            exchanges = list(state.virtual_hosts.get(vhost).exchanges.values())
        return self.map_under_lock(in_order(exchanges, lambda exchange: exchange.name), exchange_row)

    def map_under_lock(self, things: Sequence[T], show: Callable[[T], R]) -> list[R]:
        """Returns the things as ``show`` shows them, some at a time under the lock."""
        found: list[R] = []
        for start in range(0, len(things), LOCKED):
            with self.look:
                found += map(show, things[start : start + LOCKED])
            time.sleep(0.0001)  # others have the interpreter: several lists at once would keep it
        return found

    def bindings(self, vhost: str = VHOST) -> list[BindingInfo]:
        with self.look as state:
            found = bindings(state.virtual_hosts.get(vhost))
        return binding_rows(found)

    def channels(self, vhost: str = VHOST) -> list[ChannelInfo]:
        """Returns the open channels of a virtual host, oldest first."""
        return self.open_channels.rows(vhost, self.clock())

    def connections(self, vhost: str = VHOST) -> list[ClientInfo]:
        return self.open_channels.clients(vhost)

    def consumers(self, vhost: str = VHOST) -> list[ConsumerInfo]:
        return self.open_channels.consumers(vhost)

    def prepared(
        self, vhost: str | None = None, reads: Callable[[str], bool] | None = None
    ) -> list[PreparedInfo]:
        """Returns prepared transactions that are not decided, of one virtual host or of all, oldest first.
        ``reads``: whether the caller may see the messages of a queue; None: of none.
        """
        now = self.clock()
        with self.look as state:
            found = [
                (key, transaction, state.prepared.since_us[key])
                for key, transaction in state.prepared.by_key.items()
                if vhost in (None, state.prepared.vhosts[key])
            ]
        found.sort(key=lambda each: each[2])
        # what a transaction has collected does not change any more, so nobody waits for this
        return [prepared_row(key, each, max(0, now - since) / 1e6, reads) for key, each, since in found]

    @checked
    def skip_damaged(self, queue: str, check: bool = False, vhost: str = VHOST) -> SkippedDamage:
        """Takes the messages in damaged rows of the blocks of ``queue`` out of every queue that needs these
        rows. ``check``: only says what that would be. Raises QueueNotFound, ResourceLocked, ResourceShortage,
        and PreconditionFailed if somebody holds or has claimed one of the messages.
        """
        with _leaves_out:
            with self.look as state:
                block_ids = blocks_of(state.virtual_hosts.get(vhost).shared(queue))
            # 1. which rows are intact, by the disk
            with self.open_store() as store:
                blocks = {block_id: damaged(store, block_id) for block_id in block_ids}
            damage = {block_id: each for block_id, each in blocks.items() if each is not None}
            if not damage:
                return SkippedDamage([])
            return self._leave_out(damage, check)

    def _leave_out(self, damage: dict[BlockId, DamagedBlock], check: bool) -> SkippedDamage:
        intact = {block_id: each.intact for block_id, each in damage.items()}
        with self.look as state:
            found = damaged_entries(state.queues, state.blocks, intact)
            messages = [
                DamagedMessages(queue.vhost, queue.name, start, end, damage[run.block_id].why)
                for queue, run, start, end in found
            ]
            require_free(found)
        if check:
            return SkippedDamage(messages, len(damage))
        failpoint.here("skip.found")
        # 2. the blocks again, without the damaged rows
        moved = [block_id for block_id, each in damage.items() if each.block is not None]
        with self.writing(), self.open_store() as store:
            for block_id in moved:
                store.rewrite(block_id, None, damage[block_id].block)
        failpoint.here("skip.rewritten")

        # 3. the messages leave, and the blocks move, in one commit
        def work(state: BrokerState, change: Change, _now: int) -> None:
            settle(damaged_entries(state.queues, state.blocks, intact), change)
            for block_id in moved:
                state.blocks.moved(change, block_id)

        self.run(work)
        failpoint.here("skip.committed")
        return SkippedDamage(messages, len(damage))

    @checked
    def commit(self, xid: str, vhost: str | None = None, of: str | None = None) -> int:
        """Commits a prepared transaction; it may be repeated. Raises UnknownTransaction, TransactionState.
        ``vhost``: only if it was prepared there. ``of``: the user who named it, if several have this name.

        Returns how many of its messages and acks had no effect because their queue was deleted; 0 if
        repeated.
        """
        return self.decide("commit", xid, OWNER, None, vhost, of).dropped

    @checked
    def rollback(self, xid: str, vhost: str | None = None, of: str | None = None) -> None:
        """Rolls back a prepared transaction; repeatable. Raises UnknownTransaction, TransactionState."""
        self.decide("rollback", xid, OWNER, None, vhost, of)

    def decide(
        self,
        verb: Decision,
        xid: str,
        actor: Actor,
        rights: Rights | None,
        vhost: str | None,
        of: str | None = None,
        by_hand: bool = False,
    ) -> Decided:
        """Like ``commit`` and ``rollback``, for ``actor``; or what they say of a decision ``by_hand`` is
        forgotten. Raises AccessRefused too.
        """
        where = partial(decide, verb, xid, actor=actor, rights=rights, of=of, vhost=vhost, by_hand=by_hand)
        decided = self.run(where)
        log_dropped(xid, decided.dropped)
        return decided

    def rollback_all(
        self, actor: Actor = OWNER, of: str | None = None, vhost: str = VHOST, by_hand: bool = False
    ) -> int:
        """Rolls back what a user has prepared in a virtual host up to now; returns how many. Each piece is a
        commit of its own; after a crash the same call continues. Raises AccessRefused.
        """
        with self.look as state:
            keys = all_of(state, actor, of, vhost)
        ended = 0
        for start in range(0, len(keys), DECIDED):
            ended += self.run(partial(rollback_all, keys[start : start + DECIDED], actor, by_hand))
            failpoint.here("rollback.piece")
        return ended

    def recover(self, user: str = "", vhost: str = VHOST) -> list[RecoverInfo]:
        """Returns what the user has prepared in a virtual host, oldest first."""
        found: list[RecoverInfo] = []
        left = 1
        while left:
            with self.look as state:
                rows, left = recover(state, vhost, user, found[-1].since_us if found else 0)
            found += rows
        return found

    @checked
    def outcome(self, xid: str, since: float | None = None, vhost: str | None = None, of: str = "") -> str:
        """Returns how the transaction of an xid or commit token ended, as ``TransactionNames.outcome`` does.
        ``vhost``: the name is one of there; None: of any. ``of``: the user who named it; "": the owner of the
        data directory.

        Raises UnknownTransaction: there is none. UnknownOutcome: there may have been one, and its outcome is
        forgotten; not if the transaction began after the forgotten ones, by ``since``, in seconds since the
        epoch.
        """
        since_us = int(min(max(since, 0.0), 1e12) * 1_000_000) if since is not None else 0

        def work(state: BrokerState, _change: Change, _now: int) -> str:
            vhosts = state.virtual_hosts.by_name if vhost is None else [vhost]
            keys = [state.names.key(each, xid, of) for each in vhosts]
            found = sorted(filter(state.names.knows, keys), key=lambda key: key not in state.prepared.by_key)
            return state.names.outcome((found or keys)[0], since_us)

        return self.run(work)

    def committed(
        self, token: str, since: float | None = None, vhost: str | None = None, of: str = ""
    ) -> bool:
        """Returns whether a commit that was given this token took place. Raises UnknownOutcome."""
        try:
            return self.outcome(token, since, vhost, of).removeprefix(HEURISTICALLY) == "committed"
        except UnknownTransaction:
            return False


def _queue_row(queue: Queue, now_us: int) -> QueueInfo:
    """Called under the lock."""
    return QueueInfo(
        queue.name,
        queue.messages,
        queue.unacknowledged,
        queue.log.visible_end,
        len(queue.consumers),
        queue.owner,
        queue.durable,
        dict(queue.arguments.declared),
        oldest_s=_age(queue, now_us),
    )


def _age(queue: Queue, now_us: int) -> float | None:
    """Returns how long ago its oldest unsettled message was committed, at least; reads no block."""
    if queue.progress.floor >= queue.log.visible_end:
        return None
    try:
        return max(0, now_us - committed_at(queue.log, queue.progress.floor)[0]) / 1e6
    except StoreError:
        return None


def log_dropped(xid: str, dropped: int) -> None:
    """Logs what had no effect in the commit of a prepared transaction."""
    if dropped:
        logger.warning(
            "transaction '%s' is committed; %d messages or acks of it named queues that are gone, and were "
            "dropped",
            xid,
            dropped,
        )
