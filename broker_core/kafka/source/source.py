"""The source of the Kafka engine: claims, reads and acks of the apps over partitions.

Not here: the rules of a claim (``micro_batch/claims/claim.py``), the sink (``sink/sink.py``).
Invariant: what ``claim`` has answered is in the app's journal, acknowledged by all in-sync replicas: whoever
asks again gets the same end. Nothing of a queue is changed by reading it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar
from uuid import UUID

import pyarrow as pa

from broker_core.core import errors
from broker_core.core.records import parse
from broker_core.engine import (
    START,
    Available,
    LedgerEntry,
    Limit,
    OnNewCheckpoint,
    Origin,
    Ranges,
    ReadTicket,
    Slice,
    Vector,
)
from broker_core.kafka import names
from broker_core.kafka.cluster.client import Client
from broker_core.kafka.journal.history import PositionRecord, Proposal
from broker_core.kafka.journal.journal import Journal
from broker_core.kafka.lost import unknown_start
from broker_core.kafka.protocol.port import TopicPartition, parse_log
from broker_core.kafka.source.partition_logs import PartitionLogs
from broker_core.kafka.source.partitions import Partitions, require_same_topics
from broker_core.kafka.source.reader import LogSlice, PartitionReader
from broker_core.micro_batch.claims.claim import Claims
from broker_core.micro_batch.claims.finished import CommittedBelow
from broker_core.micro_batch.claims.next_range import next_range
from broker_core.micro_batch.claims.releases import Release
from broker_core.micro_batch.ledger import Ledger
from broker_core.micro_batch.resume import take_ends

T = TypeVar("T")
Rows = Iterator[pa.RecordBatch]
Decided = Callable[[str], Ledger]  # app -> its decisions

WAIT_SLICE_S = 0.1  # how late a second leader is asked while the first one has nothing new
WAIT_LANE = "wait"


class KafkaSource:
    """In one process. Threads may share it."""

    def __init__(self, client: Client, decided: Decided) -> None:
        self._client = client
        self._decided = decided
        self._partitions = Partitions(client)
        self._journals: dict[str, Journal] = {}
        self._lock = threading.Lock()

    def journal(self, app_id: str) -> Journal:
        with self._lock:
            if app_id not in self._journals:
                self._journals[app_id] = Journal(self._client, app_id)
            return self._journals[app_id]

    # -- logs ------------------------------------------------------------------------------------------------
    def logs(self, queues: Sequence[str]) -> list[str]:
        return [str(log) for log in self._logs(queues)]

    def log_ids(self, logs: Sequence[str]) -> dict[str, str]:
        found: dict[str, str] = {}
        for log in logs:
            with contextlib.suppress(errors.QueueNotFound):
                found[log] = str(self._partitions.topic_id(parse_log(log).topic))
        return found

    def available(self, logs: Sequence[str], starts: Mapping[str, int] | None = None) -> dict[str, Available]:
        parts = [parse_log(log) for log in logs]
        begins, ends = self._partitions.begins(parts), self._partitions.ends(parts)
        first = {log: max(begins[log], (starts or {}).get(str(log), 0)) for log in parts}
        return self._counted({log: (min(first[log], ends[log]), ends[log]) for log in parts})

    def offsets(self, queues: Sequence[str], origin: Origin) -> dict[str, int]:
        origin.check({queue: self.logs([queue]) for queue in queues})
        return self._partitions.offsets(queues, origin)

    def wait(self, queues: Sequence[str], ends: Mapping[str, int], timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while True:
            logs = self._logs(queues)
            now = self._partitions.ends(logs)
            if any(now[log] > ends.get(str(log), 0) for log in logs):
                return True
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            self._await_more(now, min(left_s, WAIT_SLICE_S) if self._are_led_by_several(logs) else left_s)

    def _await_more(self, ends: Mapping[TopicPartition, int], timeout_s: float) -> None:
        with contextlib.suppress(errors.DataLoss, errors.QueueNotFound):  # asked again, by the ends
            self._client.fetch(ends, max_bytes=1, max_wait_ms=max(1, int(timeout_s * 1000)), lane=WAIT_LANE)

    def _are_led_by_several(self, logs: Iterable[TopicPartition]) -> bool:
        leaders = {self._client.topic(log.topic).partitions[log.partition].leader for log in logs}
        return len(leaders) > 1

    # -- claims ----------------------------------------------------------------------------------------------
    def claim(
        self,
        app_id: str,
        queues: Sequence[str],
        start: Vector,
        limit: Limit,
        origin: Origin,
        on_new_checkpoint: OnNewCheckpoint,
        *,
        acks: bool = True,
        ran: bool = False,
    ) -> Vector:
        """The end of the range that begins at ``start`` (S2): 1. ends of the logs and of the journal; 2. what
        is decided, where the rules ask for it; 3. the rules; 4. one change of the journal.
        """
        journal = self.journal(app_id)
        logs = self._logs(queues)
        journal.ensure()
        ends = self._partitions.ends([*logs, journal.log])
        journal.catch_up(ends[journal.log])
        committed = self._committed(app_id, start, acks, ran)
        question = app_id, queues, start, limit, origin, on_new_checkpoint

        def compute(claims: Claims, proposal: Proposal) -> Vector:
            require_same_topics(journal.positions, self._partitions, queues)
            kafka_logs = PartitionLogs(self._partitions, app_id, journal.positions, ends)
            try:
                end = next_range(claims, kafka_logs, proposal, *question, committed)
            except errors.CheckpointMismatch:
                if START in start.values() or claims.position(app_id) or claims.release_text(app_id, start):
                    raise
                raise unknown_start(app_id, start) from None
            kafka_logs.record(proposal)
            return end

        end = journal.change(compute, ends[journal.log])
        if acks:
            show_lag(self._client, app_id, self._acked(app_id, start))
        return end

    def resolve(self, app_id: str, start: Vector, end: Vector) -> Ranges:
        journal = self.journal(app_id)
        claim = self._answered(journal, lambda claims: claims.resolve(app_id, start, end))
        if claim is None:
            return {}
        require_same_topics(
            journal.positions, self._partitions, {parse_log(log).topic for log in claim.ranges}
        )
        return {log: (first, last) for log, (first, last) in claim.ranges.items()}

    def count(self, app_id: str, ranges: Ranges) -> dict[str, Available]:
        if not ranges:
            return {}
        self._answered(self.journal(app_id), lambda claims: claims.by_ranges(app_id, ranges))
        return self._counted({parse_log(log): span for log, span in ranges.items()})

    def _committed(self, app_id: str, vector: Vector, by_spark: bool, ran: bool) -> CommittedBelow:
        """Asks what is decided where the rules need it: of a symbolic start, a claim that is there, a first
        batch, and where more is committed than is known to be acknowledged. Behind a later batch C1 refuses.
        """
        journal = self.journal(app_id)
        again, ended = journal.look(lambda claims: (claims.at(app_id, vector), claims.ending(app_id, vector)))
        first = ended is not None and START in parse(ended.start).values()
        acked = (ran and not first) or not by_spark or self._acked(app_id, vector) == vector
        certain = START not in vector.values() and again is None and acked
        return CommittedBelow(Ledger() if certain else self._decided(app_id), by_spark, ran)

    def _acked(self, app_id: str, vector: Vector) -> dict[str, int]:
        """Returns what of a vector is acknowledged, as far as memory knows."""
        positions = self.journal(app_id).positions.values()
        acked = {log: int(at) for position in positions for log, at in position.acked.items()}
        return {log: int(at) for log, at in vector.items() if at != START and acked.get(log, -1) >= int(at)}

    def ack(self, app_id: str, end: Vector, ran: bool = False) -> None:
        journal = self.journal(app_id)
        committed = self._committed(app_id, end, True, ran)

        def compute(claims: Claims, proposal: Proposal) -> None:
            kafka_logs = PartitionLogs(self._partitions, app_id, journal.positions, {})
            claims.ack(kafka_logs, proposal, app_id, end, committed)
            kafka_logs.record(proposal)

        journal.change(compute)
        show_lag(self._client, app_id, self._acked(app_id, end))

    def note_release(
        self, app_id: str, queue: str, consumed: Mapping[str, int], *, by: str, interrupted: bool
    ) -> None:
        """Records a release before it takes place. ``consumed``: as the ledger says."""
        journal = self.journal(app_id)

        def compute(claims: Claims, proposal: Proposal) -> None:
            position = journal.positions.get(queue)
            if position is not None:
                kafka_logs = PartitionLogs(self._partitions, app_id, journal.positions, {})
                done = Release(app_id, queue, by, time.time_ns() // 1000, interrupted)
                claims.note_release(kafka_logs, proposal, done, list(position.acked), consumed)

        journal.change(compute)

    def release(self, app_id: str, queue: str) -> None:
        """Drops the app's claims on a queue (S6). Raises PreconditionFailed where it has none."""
        journal = self.journal(app_id)

        def compute(claims: Claims, proposal: Proposal) -> None:
            position = journal.positions.get(queue)
            if position is None:
                raise errors.PreconditionFailed(
                    f"app {app_id!r} has claimed nothing of queue {queue!r}",
                    "see `txmq app list` for what it reads",
                )
            kafka_logs = PartitionLogs(self._partitions, app_id, journal.positions, {})
            claims.release(kafka_logs, proposal, app_id, queue, list(position.acked))
            proposal.drop(PositionRecord, position.key)

        journal.change(compute)

    def resume(self, app_id: str, entries: Sequence[LedgerEntry]) -> None:
        """Records that the app has consumed its logs up to the ends of entries of another ledger (C7)."""
        journal = self.journal(app_id)

        def compute(claims: Claims, proposal: Proposal) -> None:
            kafka_logs = PartitionLogs(self._partitions, app_id, journal.positions, {})
            take_ends(claims.origins, kafka_logs, proposal, app_id, entries)
            kafka_logs.record(proposal)

        journal.change(compute)

    # -- rows ------------------------------------------------------------------------------------------------
    def read(self, ticket: ReadTicket) -> Rows:
        """1. The first fetch; 2. the fact that this batch reads these ranges; 3. the rows."""
        slices = [LogSlice(parse_log(log), first, last) for log, first, last in ticket.slices]
        journal = self.journal(ticket.app_id)
        logs = [*(parse_log(log) for log in ticket.ranges), *(each.log for each in slices)]
        ids = self._claimed_ids(ticket.app_id, {log.topic for log in logs})
        with PartitionReader(self._client, slices, ids, fail_on_data_loss=ticket.fail_on_data_loss) as reader:
            if ticket.query_id:
                journal.note_read(ticket.query_id, ticket.batch_id, ticket.ranges)
            yield from reader.rows(record=ticket.record)

    def browse(self, slices: Sequence[Slice], *, transaction: bool = False, record: bool = False) -> Rows:
        parts = [LogSlice(parse_log(log), first, last) for log, first, last in slices]
        ids = {each.log.topic: self._partitions.topic_id(each.log.topic) for each in parts}
        ends = self._partitions.ends({each.log for each in parts})
        visible = [LogSlice(log, first, min(last, ends[log])) for log, first, last in parts]
        with PartitionReader(self._client, visible, ids, fail_on_data_loss=False) as reader:
            yield from reader.rows(record=record)

    # -- help ------------------------------------------------------------------------------------------------
    def _logs(self, queues: Iterable[str]) -> list[TopicPartition]:
        return [log for queue in queues for log in self._partitions.of(queue)]

    def _counted(self, spans: Mapping[TopicPartition, tuple[int, int]]) -> dict[str, Available]:
        try:
            weights: Mapping[TopicPartition, float] = self._partitions.weights(spans)
        except errors.AccessRefused:  # DescribeLogDirs needs an ACL of the cluster; sizes only balance tasks
            weights = dict.fromkeys(spans, 0.0)
        return {
            str(log): Available(first, last, last - first, int((last - first) * weights[log]))
            for log, (first, last) in spans.items()
        }

    def _answered(self, journal: Journal, question: Callable[[Claims], T]) -> T:
        """Returns the answer from memory; from the journal's tail if memory has no such claim."""
        try:
            return journal.look(question)
        except errors.CheckpointMismatch:
            journal.catch_up()
            return journal.look(question)

    def _claimed_ids(self, app_id: str, queues: Iterable[str]) -> dict[str, UUID]:
        """Returns the ids that the topics had when the app claimed them first. Raises CheckpointMismatch."""
        queues, journal = set(queues), self.journal(app_id)
        if not all(self._has_claimed(journal, queue) for queue in queues):
            journal.catch_up()
        for queue in sorted(queues):
            if queue not in journal.positions:
                logs = {str(log) for log in self._partitions.of(queue)}
                if release_text := journal.look(lambda claims: claims.release_text(app_id, logs)):  # noqa: B023
                    raise errors.CheckpointMismatch(release_text)
                raise errors.CheckpointMismatch(
                    f"a batch reads queue {queue!r}, of which its app has claimed nothing",
                    "use the checkpoint that belongs to the app",
                )
        return {queue: UUID(journal.positions[queue].topic_id) for queue in queues}

    def _has_claimed(self, journal: Journal, queue: str) -> bool:
        """Whether memory has a claim of the topic that exists now."""
        position = journal.positions.get(queue)
        return position is not None and position.topic_id == str(self._client.topic(queue).id)


def show_lag(client: Client, app_id: str, acked: Mapping[str, int]) -> None:
    """Commits offsets to the group of the app, for tools that show its lag. Nothing waits for it."""
    offsets = {parse_log(log): offset for log, offset in acked.items()}

    def commit() -> None:
        with contextlib.suppress(errors.TxmqError):
            client.commit_offsets(names.producer_of(app_id), offsets)

    if offsets:
        threading.Thread(target=commit, name="txmq-lag", daemon=True).start()
