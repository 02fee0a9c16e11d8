"""What an operator sees of the apps: what they own, how far they are, and what they have staged. Pure;
nothing changes.
"""

from __future__ import annotations

from broker_core.broker.broker import BrokerState
from broker_core.engine import AppInfo, AttemptInfo
from broker_core.micro_batch.micro_batch import MicroBatches


def apps(state: BrokerState, batches: MicroBatches) -> list[AppInfo]:
    """Returns every app that owns a queue, has claimed or has decided, by name."""
    owners = {queue.owner for queue in state.topology.queues.values() if queue.owner}
    found = []
    for app_id in sorted(owners | batches.ledger.apps() | batches.claims.apps()):
        queues = sorted(queue.name for queue in state.topology.queues.values() if queue.owner == app_id)
        last = batches.ledger.last(app_id)
        unapplied, unmirrored = batches.ledger.waiting(app_id)
        found.append(
            AppInfo(
                app_id=app_id,
                queues=tuple(queues),
                sequence=last.sequence if last else 0,
                query_id=last.query_id if last else "",
                batch_id=last.batch_id if last else -1,
                lag=sum(state.topology.queue(name).to_read for name in queues),
                unapplied=unapplied,
                unmirrored=unmirrored,
            )
        )
    return found


def app_of_token(batches: MicroBatches, token: str) -> str:
    """Returns the app of an attempt, open or decided; "" for a batch write and for an unknown token."""
    attempt, entry = batches.branches.attempt(token), batches.ledger.by_token(token)
    return attempt.app_id if attempt is not None else entry.app_id if entry is not None else ""


def app_of_branch(batches: MicroBatches, branch: str) -> str:
    """Returns the app that has staged a branch; "" as for ``app_of_token``."""
    parts = batches.branches.parts(branch)
    return app_of_token(batches, parts[0].token) if parts else ""


def attempts(batches: MicroBatches, now_us: int) -> list[AttemptInfo]:
    """Returns what is staged for undecided batches and batch writes, oldest first."""
    found = []
    for attempt in batches.branches.attempts():
        parts = batches.branches.of_token(attempt.token)
        found.append(
            AttemptInfo(
                token=attempt.token,
                app_id=attempt.app_id,
                query_id=attempt.query_id,
                batch_id=attempt.batch_id,
                idle_s=max(0, now_us - attempt.opened_at) / 1e6,
                branches=len({part.branch for part in parts}),
                rows=sum(part.rows for part in parts),
                size_bytes=sum(part.size_bytes for part in parts),
            )
        )
    return found
