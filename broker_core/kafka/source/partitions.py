"""The partitions of queues: which there are, where they begin and end, and about how many bytes an offset
takes.

Not here: claims, and reading rows.
Invariant: an end is the last stable offset, from ListOffsets: what is below it is committed or aborted, and
never changes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from uuid import UUID

from broker_core.core import errors
from broker_core.engine import Origin
from broker_core.kafka.cluster.client import Client
from broker_core.kafka.journal.history import PositionRecord
from broker_core.kafka.protocol.port import EARLIEST, LATEST, TopicPartition
from broker_core.kafka.topics import topics
from broker_core.kafka.topics.row_times import committed_ms

SIZES_S = 10.0  # how old a number of bytes per offset may be


class Partitions:
    """Of one cluster, in one process. Threads may share it."""

    def __init__(self, client: Client, now: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._now = now
        self._checked: dict[str, UUID] = {}  # queues whose settings lose no rows
        self._weights: dict[
            TopicPartition, tuple[float, float]
        ] = {}  # bytes per offset, and when it was measured

    def topic_id(self, queue: str) -> UUID:
        """Returns the id of the queue's topic. Raises QueueNotFound, PreconditionFailed."""
        found = self._client.topic(queue).id if queue in self._checked else None
        if found is None or self._checked[queue] != found:
            found = topics.require_queue(self._client, queue).id
            self._checked[queue] = found
        return found

    def of(self, queue: str) -> list[TopicPartition]:
        """Returns the logs of a queue, in order. Raises QueueNotFound, PreconditionFailed."""
        self.topic_id(queue)
        return [TopicPartition(queue, number) for number in sorted(self._client.topic(queue).partitions)]

    def begins(self, logs: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        return self._client.offsets(dict.fromkeys(logs, EARLIEST))

    def ends(self, logs: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        return self._client.offsets(dict.fromkeys(logs, LATEST))

    def offsets(self, queues: Sequence[str], origin: Origin) -> dict[str, int]:
        """Returns ``origin`` as an offset of every log of these queues, as of now. Raises OptionError for an
        offset that a log does not have.
        """
        logs = [log for queue in queues for log in self.of(queue)]
        begins, ends = self.begins(logs), self.ends(logs)
        if origin.timestamp_us is not None:
            first_ms = -(-origin.timestamp_us // 1000)
            found = self._client.offsets(dict.fromkeys(logs, first_ms))
            return {str(log): ends[log] if found[log] < 0 else min(found[log], ends[log]) for log in logs}
        vector: dict[str, int] = {}
        for log in logs:
            at = origin.offset(log.topic, str(log))
            if at in (LATEST, EARLIEST):
                at = ends[log] if at == LATEST else begins[log]
            if not begins[log] <= at <= ends[log]:
                raise errors.OptionError(
                    f"startingOffsets names offset {at} of {str(log)!r}, which has {begins[log]} to "
                    f"{ends[log]}",
                    "give an offset that it has, -2 (earliest) or -1 (latest)",
                )
            vector[str(log)] = at
        return vector

    def weights(self, logs: Iterable[TopicPartition]) -> dict[TopicPartition, float]:
        """Returns about how many bytes an offset of each log takes on the disk. Raises AccessRefused."""
        logs = list(logs)
        old = [log for log in logs if self._now() - self._weights.get(log, (0.0, -SIZES_S))[1] >= SIZES_S]
        if old:
            sizes, begins, ends = self._client.sizes(old), self.begins(old), self.ends(old)
            for log in old:
                self._weights[log] = sizes[log] / max(1, ends[log] - begins[log]), self._now()
        return {log: self._weights[log][0] for log in logs}

    def committed_ms(
        self, positions: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int]
    ) -> list[int]:
        """Returns the timestamp of the first row of each log from its position on, where there is one."""
        return committed_ms(self._client, positions, ends)


def require_same_topics(
    positions: Mapping[str, PositionRecord], partitions: Partitions, queues: Iterable[str]
) -> None:
    """Raises DataLoss where the topic of a queue is not the one that the app has claimed."""
    for queue in queues:
        position = positions.get(queue)
        if position is not None and position.topic_id != str(partitions.topic_id(queue)):
            raise topic_lost(queue)


def topic_lost(queue: str) -> errors.DataLoss:
    return errors.DataLoss(
        f"the topic {queue!r} was deleted, or deleted and made again, since its rows were claimed",
        "release the queue (`txmq app release APP QUEUE --force`), and start with a new checkpoint and "
        "onNewCheckpoint=resume",
    )
