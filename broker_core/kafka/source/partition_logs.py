"""The partitions of Kafka as the logs of the claims: a queue has several, and every app may read them all.

Not here: the rules (``micro_batch/claims/claim.py``), and how a change becomes durable
(``journal/journal.py``).
Invariant: nothing is written to Kafka here. What an app has read is a record of the change.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

from broker_core.engine import Limit, Origin
from broker_core.kafka.journal.history import PositionRecord
from broker_core.kafka.protocol.port import TopicPartition, parse_log
from broker_core.kafka.source.partitions import Partitions
from broker_core.micro_batch.claims.logs import Claimed
from broker_core.micro_batch.sink import RecordSink


class PartitionLogs:
    """Implements :class:`broker_core.micro_batch.claims.logs.Logs` for one change. ``ends``: as of now."""

    def __init__(
        self,
        partitions: Partitions,
        app_id: str,
        positions: Mapping[str, PositionRecord],
        ends: Mapping[TopicPartition, int],
    ) -> None:
        self._partitions = partitions
        self._app_id = app_id
        self._positions = positions
        self._ends = dict(ends)
        self._acked: dict[str, dict[str, int]] = {}  # by queue: what this change sets

    # -- asked -----------------------------------------------------------------------------------------------

    def of(self, queue: str) -> list[str]:
        return [str(log) for log in self._partitions.of(queue)]

    def queue_of(self, log: str) -> str:
        return parse_log(log).topic

    def id_of(self, queue: str) -> str:
        position = self._positions.get(queue)
        return str(self._partitions.topic_id(queue)) if position is None else position.topic_id

    def first(self, log: str) -> int:
        return self._partitions.begins([parse_log(log)])[parse_log(log)]

    def goes_on(self, log: str, app_id: str) -> int | None:
        position = self._positions.get(parse_log(log).topic)
        return None if position is None else position.acked.get(log)

    def offsets(self, queues: Sequence[str], origin: Origin) -> dict[str, int]:
        return self._partitions.offsets(queues, origin)

    def require_ownable(self, log: str, app_id: str) -> None:
        """Claims on Kafka exclude nobody, as groups of consumers do not."""

    def too_few(self, begin: Mapping[str, int], limit: Limit) -> bool:
        if limit.min_rows is None:
            return False
        positions = {parse_log(log): at for log, at in begin.items()}
        ends = self._known_ends(positions)
        if sum(max(0, ends[log] - at) for log, at in positions.items()) >= limit.min_rows:
            return False
        if limit.max_delay_s is None:
            return True
        due_ms = time.time() * 1000 - limit.max_delay_s * 1000
        return all(found > due_ms for found in self._partitions.committed_ms(positions, ends))

    def cut(self, begin: Mapping[str, int], limit: Limit) -> dict[str, int]:
        """Each log gets its share of the backlog, as in Spark's own Kafka source."""
        ends = self._known_ends(parse_log(log) for log in begin)
        backlog: dict[str, int] = {}
        for log, at in begin.items():
            end = ends[parse_log(log)]
            if limit.end is not None:
                end = min(end, limit.end.get(log, at))
            backlog[log] = max(0, end - at)
        taken = _shares(backlog, limit.max_rows)
        if limit.max_bytes is not None and any(taken.values()):
            weights = self._partitions.weights(parse_log(log) for log in begin)
            size = {log: rows * weights[parse_log(log)] for log, rows in taken.items()}
            if sum(size.values()) > limit.max_bytes:
                # at least one: a message that alone is over the limit must be read too
                rows = max(1, int(sum(taken.values()) * limit.max_bytes / sum(size.values())))
                taken = _shares(taken, rows)
        return {log: at + taken[log] for log, at in begin.items()}

    # -- told ------------------------------------------------------------------------------------------------

    def own(self, log: str, app_id: str, start: int) -> None:
        if self._acked_offset(log) is None:
            self._set(log, start)

    def claim(self, log: str, start: int, end: int) -> Claimed:
        return Claimed()

    def ack(self, log: str, app_id: str, end: int, kept_from: int | None) -> None:
        before = self._acked_offset(log)
        if before is not None and end > before:
            self._set(log, end)

    def reclaim(self, log: str, app_id: str, ranges: Iterable[Sequence[int]]) -> None:
        """Nothing was kept back for the app."""

    def record(self, sink: RecordSink) -> None:
        """Adds the acks of this change to it."""
        for queue, acked in self._acked.items():
            at = self._positions.get(queue)
            before = {} if at is None else at.acked
            topic_id = str(self._partitions.topic_id(queue)) if at is None else at.topic_id
            sink.put(PositionRecord(self._app_id, queue, topic_id, {**before, **acked}))

    def _acked_offset(self, log: str) -> int | None:
        queue = parse_log(log).topic
        acked = self._acked.get(queue, {}).get(log)
        return self.goes_on(log, self._app_id) if acked is None else acked

    def _set(self, log: str, offset: int) -> None:
        self._acked.setdefault(parse_log(log).topic, {})[log] = offset

    def _known_ends(self, logs: Iterable[TopicPartition]) -> Mapping[TopicPartition, int]:
        """A partition that came after the question is asked for now."""
        missing = [log for log in logs if log not in self._ends]
        if missing:
            self._ends |= self._partitions.ends(missing)
        return self._ends


def _shares(backlog: Mapping[str, int], rows: int | None) -> dict[str, int]:
    """Returns at most ``rows`` in all, for each log by its share; the largest remainders get what is left."""
    total = sum(backlog.values())
    if rows is None or total <= rows:
        return dict(backlog)
    shares = {log: divmod(count * rows, total) for log, count in backlog.items()}
    taken = {log: whole for log, (whole, _) in shares.items()}
    left = rows - sum(taken.values())
    for log in sorted(shares, key=lambda each: shares[each][1], reverse=True)[:left]:
        taken[log] += 1
    return taken
