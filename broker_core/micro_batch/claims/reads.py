"""Reads: which claimed ranges each batch of a query has read (S4). Pure.

Not here: whether a range is claimed (``claim.py``).
Invariant: what this process records for one (query, batch) has one range per log. Records of other processes
may contradict it; then every further read of that batch and its decision are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

from broker_core.core.address import VHOST
from broker_core.core.errors import CheckpointMismatch, OptionError
from broker_core.core.records import LedgerRecord, ReadRecord, canonical
from broker_core.core.undo import Undo
from broker_core.engine import UNKNOWN_OFFSETS, Ranges, StagedBranch
from broker_core.micro_batch.positions import brief
from broker_core.micro_batch.sink import RecordSink

ReleaseText = Callable[[str, Collection[str]], str]

RELEASED = [-1, -1]  # the range of a read whose queue was released since then: no claim has it


class Reads:
    def __init__(
        self, undo: Undo, vhost: str = VHOST, release_text: ReleaseText = lambda _app_id, _logs: ""
    ) -> None:
        """``release_text``: what happened to released logs of an app (``releases.py``)."""
        self._undo = undo
        self._vhost = vhost
        self._release_text = release_text
        # (query, batch) -> (app, ranges) -> read
        self._by_batch: dict[tuple[str, int], dict[tuple[str, str], ReadRecord]] = {}
        self._by_logs: dict[tuple[str, str], list[ReadRecord]] = {}  # (app, logs) -> oldest first

    # -- replay ----------------------------------------------------------------------------------------------
    def apply(self, record: ReadRecord) -> None:
        """Takes in a durable record; one that is known already changes nothing."""
        batch = (record.query_id, record.batch_id)
        of_batch = self._by_batch.get(batch, {})
        if _of(record) in of_batch:
            return
        self._undo.item(self._by_batch, batch)
        self._by_batch[batch] = {**of_batch, _of(record): record}
        reads = self._by_logs.setdefault((record.app_id, record.queues), [])
        self._undo.growth(reads)
        reads.append(record)

    def remove(self, record: ReadRecord) -> None:
        """Takes back a record that is durably gone; one that is not known changes nothing."""
        batch = (record.query_id, record.batch_id)
        of_batch = self._by_batch.get(batch, {})
        if _of(record) not in of_batch:
            return
        reads = self._by_logs[(record.app_id, record.queues)]
        at = reads.index(record)
        self._undo.append((reads.insert, at, record))
        del reads[at]
        self._undo.item(self._by_batch, batch)
        others = {key: other for key, other in of_batch.items() if key != _of(record)}
        if others:
            self._by_batch[batch] = others
        else:
            del self._by_batch[batch]

    def size(self) -> int:
        """Returns how many there are. For any thread."""
        return sum(map(len, list(self._by_logs.values())))

    def records(self) -> list[ReadRecord]:
        return [read for reads in self._by_logs.values() for read in reads]

    # -- S4 --------------------------------------------------------------------------------------------------
    def of_batch(self, query_id: str, batch_id: int) -> Collection[ReadRecord]:
        return self._by_batch.get((query_id, batch_id), {}).values()

    def of_ranges(self, app_id: str, ranges: Mapping[str, list[int]]) -> list[ReadRecord]:
        """Returns the reads of just these ranges."""
        reads = self._by_logs.get((app_id, canonical(sorted(ranges))), ())
        return [read for read in reads if read.ranges == ranges]

    def last_query(self, app_id: str) -> str:
        """Returns the query that has read last for the app; "" for none."""
        for (query_id, _), reads in reversed(self._by_batch.items()):
            if any(app == app_id for app, _ in reads):
                return query_id
        return ""

    def already(self, app_id: str, query_id: str, batch_id: int, ranges: Ranges) -> bool:
        """Returns whether exactly these ranges are recorded for (query, batch). Raises CheckpointMismatch for
        other ranges of the same logs, OptionError for those of an earlier batch.
        """
        spans = {log: [first, last] for log, (first, last) in ranges.items()}
        self._require_no_earlier(app_id, query_id, batch_id, spans)
        found = False
        for read in self.of_batch(query_id, batch_id):
            if read.app_id != app_id or not read.ranges.keys() & spans.keys():
                continue
            require_not_released(read, self._release_text)
            if read.ranges != spans:
                raise other_ranges(read, spans)
            found = True
        return found

    def _require_no_earlier(
        self, app_id: str, query_id: str, batch_id: int, spans: Mapping[str, list[int]]
    ) -> None:
        """Raises OptionError if an earlier batch of the query has read the ranges. Recorded for this one too,
        they would be what it has to consume, and nothing could be decided any more.
        """
        newest = sum(end for _, end in spans.values())
        for read in reversed(self._by_logs.get((app_id, canonical(sorted(spans))), ())):
            if age(read) < newest:
                return
            if read.query_id == query_id and read.batch_id < batch_id and read.ranges == spans:
                raise OptionError(
                    f"batch {batch_id} of query {query_id} reads {brief(spans)}, the range of batch "
                    f"{read.batch_id}: its function uses the frame of another batch, whose rows are consumed",
                    "keep values or a table of the rows between batches, and not the frame",
                )

    def record(
        self, sink: RecordSink, app_id: str, query_id: str, batch_id: int, ranges: Ranges, *, limit: int
    ) -> None:
        """Records a read, unless it is recorded. Of the same logs only the newest ``limit`` reads stay: a
        sink in another system decides nothing here.
        """
        if not query_id or self.already(app_id, query_id, batch_id, ranges):
            return
        spans = {log: [first, last] for log, (first, last) in ranges.items()}
        newest = ReadRecord(app_id, query_id, batch_id, canonical(sorted(ranges)), spans, self._vhost)
        self.apply(newest)
        sink.put(newest)
        reads = self._by_logs[(app_id, newest.queues)]
        while len(reads) > limit:
            oldest = reads[0]
            self.remove(oldest)
            sink.drop(ReadRecord, oldest.key)

    def release(self, sink: RecordSink, app_id: str, logs: Collection[str]) -> None:
        """Marks the ranges of released logs, so that no batch reads or decides them any more."""
        gone = set(logs)
        for reads in [reads for (app, _), reads in self._by_logs.items() if app == app_id]:
            for at, read in enumerate(reads):
                if not gone & read.ranges.keys():
                    continue
                void = dict.fromkeys(gone & read.ranges.keys(), RELEASED)
                voided = replace(read, ranges={**read.ranges, **void})
                batch = (read.query_id, read.batch_id)
                others = {key: other for key, other in self._by_batch[batch].items() if key != _of(read)}
                self._undo.item(self._by_batch, batch)
                self._undo.append((reads.__setitem__, at, read))
                self._by_batch[batch] = {**others, _of(voided): voided}
                reads[at] = voided
                sink.put(voided)


def require_not_released(read: ReadRecord, release_text: ReleaseText) -> None:
    """Raises CheckpointMismatch for a released read: a new queue of that name may reuse the numbers."""
    gone = [log for log, found in read.ranges.items() if found == RELEASED]
    if gone:
        raise CheckpointMismatch(
            f"batch {read.batch_id} of query {read.query_id} has read {', '.join(gone)} before that was "
            "released, and cannot be read or decided any more: "
            + (
                release_text(read.app_id, gone)
                or f"it was taken from app {read.app_id!r}. Start once more with a new checkpoint and "
                "onNewCheckpoint=resume"
            )
        )


def other_ranges(read: ReadRecord, spans: Mapping[str, object]) -> CheckpointMismatch:
    return CheckpointMismatch(
        f"batch {read.batch_id} of query {read.query_id} has read {brief(read.ranges, spans)} and now asks "
        f"for {brief(spans, read.ranges)}: an older or changed checkpoint of app {read.app_id!r} was "
        "restored. Use the newest checkpoint, or a new one with onNewCheckpoint=resume"
    )


def require_range(offset_log: str, branches: Iterable[StagedBranch], *, reads: bool) -> None:
    """Raises OptionError for rows of a batch that reads no range, if other offsets are not known."""
    if offset_log == UNKNOWN_OFFSETS and not reads and any(branch.rows for branch in branches):
        raise OptionError(
            "the batch has rows of no queue, and which offsets it has of another source is not known: "
            "format('txmq') cannot read the checkpoint. Nothing was done",
            "give format('txmq') the option checkpointLocation on a disk of the driver, or use foreachBatch "
            "with transactional",
        )


def unread(entry: LedgerRecord, ranges: Collection[str], claim_position: int) -> bool:
    """Returns whether a decided batch may read ``ranges`` later: it was decided without a range of these
    logs, and its source has claimed nothing since.
    """
    return not entry.ranges.keys() & set(ranges) and claim_position <= entry.claim_position


def age(read: ReadRecord) -> int:
    """Returns what orders the reads of one source by their age."""
    return sum(int(end) for _, end in read.ranges.values())


def _of(read: ReadRecord) -> tuple[str, str]:
    return read.app_id, canonical(read.ranges)
