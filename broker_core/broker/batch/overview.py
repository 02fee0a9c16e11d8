"""What an operator sees of the apps: what they own, how far they are, and what they have staged. Pure;
nothing changes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from broker_core.broker.access.users import name_in, user_in
from broker_core.broker.batch.extent import waiting_since
from broker_core.broker.batch.micro_batch import MicroBatches
from broker_core.broker.broker import BrokerState
from broker_core.broker.queue import Queue
from broker_core.core.block import ReadBlock
from broker_core.core.records import LedgerRecord
from broker_core.engine import AppInfo, StagedBatch
from broker_core.micro_batch.claims.releases import Releases


def apps(
    state: BrokerState, batches: MicroBatches, now_us: int, read_block: ReadBlock | None = None
) -> list[AppInfo]:
    """Returns every app that owns a queue, has claimed or has decided, by name. Without ``read_block``,
    ``lag_s`` may be that of a later message of the same block: less than it is.
    """
    owned: dict[str, list[Queue]] = {}
    for queue in state.topology.queues.values():
        if queue.owner:
            owned.setdefault(queue.owner, []).append(queue)
    found = []
    released = {note.app_id for note in batches.claims.releases.records() if note.interrupted}
    for app_id in sorted(owned.keys() | batches.ledger.apps() | batches.claims.apps() | released):
        queues = sorted(owned.get(app_id, ()), key=lambda queue: queue.name)
        last = batches.ledger.last(app_id)
        unapplied, unmirrored = batches.ledger.waiting(app_id)
        found.append(
            AppInfo(
                app_id=app_id,
                queues=tuple(queue.name for queue in queues),
                sequence=last.sequence if last else 0,
                query_id=last.query_id if last else "",
                batch_id=last.batch_id if last else -1,
                lag=sum(queue.to_read for queue in queues) + _left(state, batches.claims.releases, app_id),
                unapplied=unapplied,
                unmirrored=unmirrored,
                lag_s=_age(now_us, [waiting_since(queue, read_block) for queue in queues]),
            )
        )
    return found


def _age(now_us: int, since: Iterable[int | None]) -> float | None:
    """Returns the age of the oldest, in seconds; None: there is none."""
    oldest = min((at for at in since if at is not None), default=None)
    return None if oldest is None else max(0, now_us - oldest) / 1e6


class AppBatches(NamedTuple):
    """An app, and its last decided batches, oldest first."""

    app: AppInfo
    last: list[LedgerRecord]


def app_batches(
    state: BrokerState, batches: MicroBatches, now_us: int, count: int, app_id: str | None = None
) -> list[AppBatches]:
    """Returns every app, or one, with its last ``count`` batches."""
    return [
        AppBatches(app, list(deque(batches.ledger.entries(app.app_id), count)))
        for app in apps(state, batches, now_us)
        if app_id in (None, app.app_id)
    ]


def _left(state: BrokerState, releases: Releases, app_id: str) -> int:
    """Returns how many messages wait for an app in queues that were released while it was not finished, and
    that nobody has taken since then.
    """
    waiting = 0
    for note in releases.of(app_id):
        queue = state.topology.queues.get(note.queue)
        if (
            note.interrupted
            and queue is not None
            and not queue.owner
            and str(queue.queue_id) == note.queue_id
        ):
            first, end = int(note.ends.get(note.queue, 0)), queue.log.visible_end
            waiting += queue.progress.unsettled_count(first, end)
    return waiting


def staged_batches(batches: MicroBatches, now_us: int) -> list[StagedBatch]:
    """Returns what is staged for undecided batches and batch writes, oldest first."""
    found = []
    for attempt in batches.branches.attempts():
        parts = batches.branches.of_token(attempt.token)
        found.append(
            StagedBatch(
                token=name_in(attempt.token),
                user=user_in(attempt.token),
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
