"""The queues of the embedded broker as the logs of the claims: every queue is one log.

Pure: blocks are read through a function, and the time is given.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from broker_core.broker.batch import extent
from broker_core.broker.broker import BrokerState
from broker_core.broker.queue import Queue
from broker_core.broker.topology.ownership import own, require_ownable
from broker_core.core.block import ReadBlock
from broker_core.core.change import Change
from broker_core.engine import Limit, Origin
from broker_core.micro_batch.claims.logs import Claimed


class QueueLogs:
    """Implements :class:`broker_core.micro_batch.claims.logs.Logs` for one change of the broker."""

    def __init__(self, state: BrokerState, change: Change, read_block: ReadBlock, now_us: int) -> None:
        self._state = state
        self._change = change
        self._read_block = read_block
        self._now_us = now_us

    # -- asked -----------------------------------------------------------------------------------------------
    def of(self, queue: str) -> list[str]:
        return [self._queue(queue).name]

    def queue_of(self, log: str) -> str:
        return log

    def id_of(self, queue: str) -> str:
        return str(self._queue(queue).queue_id)

    def first(self, log: str) -> int:
        return self._queue(log).progress.floor

    def goes_on(self, log: str, app_id: str) -> int | None:
        queue = self._queue(log)
        return queue.progress.first_to_read() if queue.owner == app_id else None

    def offsets(self, queues: Sequence[str], origin: Origin) -> dict[str, int]:
        return extent.offsets(self._state, queues, origin, self._read_block)

    def require_ownable(self, log: str, app_id: str) -> None:
        require_ownable(self._queue(log), app_id)

    def too_few(self, begin: Mapping[str, int], limit: Limit) -> bool:
        return extent.too_few(self._queues(begin), begin, limit, self._read_block, self._now_us)

    def cut(self, begin: Mapping[str, int], limit: Limit) -> dict[str, int]:
        return extent.cut(self._queues(begin), begin, limit, self._read_block)

    # -- told ------------------------------------------------------------------------------------------------
    def own(self, log: str, app_id: str, start: int) -> None:
        own(self._change, self._queue(log), app_id, start)

    def claim(self, log: str, start: int, end: int) -> Claimed:
        queue = self._queue(log)
        self._state.messages.persist(self._change, queue, start, end)
        queue.claim(start, end)
        queue.record(self._change)
        return Claimed(queue.progress.settled_within(start, end), queue.ready.redelivered_within(start, end))

    def ack(self, log: str, app_id: str, end: int, kept_from: int | None) -> None:
        queue = self._owned(log, app_id)
        if queue is not None:
            queue.settle_claimed(end)  # a stream without a ledger consumes only by its acks
            if kept_from is not None:
                queue.ack_to(kept_from)
            queue.record(self._change)

    def reclaim(self, log: str, app_id: str, ranges: Iterable[Sequence[int]]) -> None:
        queue = self._owned(log, app_id)
        if queue is not None:
            queue.reclaim(ranges)
            queue.record(self._change)

    def _queue(self, log: str) -> Queue:
        return self._state.topology.shared(log)

    def _queues(self, logs: Iterable[str]) -> dict[str, Queue]:
        return {log: self._queue(log) for log in logs}

    def _owned(self, log: str, app_id: str) -> Queue | None:
        queue = self._state.topology.queues.get(log)
        return queue if queue is not None and queue.owner == app_id else None
