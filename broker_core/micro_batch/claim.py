"""Claims: which range of its queues an app reads next, decided once and permanently (S1 to S6).

Pure: works run one after another in the committer, and get the time and the blocks as arguments.

Invariant: a claim never changes. The same start vector has the same end, whatever the limit, the new messages
or the number of drivers that ask. What a claim's range reads is fixed with it (what was settled before, what
may have been sent before).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from broker_core.broker.broker import BrokerState
from broker_core.broker.change import Change
from broker_core.broker.ownership import own, require_ownable
from broker_core.broker.queue import Queue
from broker_core.broker.records import ClaimRecord, LedgerRecord, OriginRecord, ReadRecord
from broker_core.broker.undo import Undo
from broker_core.engine import START, Limit, OnNewCheckpoint, Origin, Ranges, Vector
from broker_core.errors import LineageConflict, OptionError
from broker_core.micro_batch.extent import ReadBlock, cut, offsets, too_few

RELEASED = [-1, -1]  # the range of a read whose queue was released since then: no claim has it
KEPT_CLAIMS = 1000  # per app and set of queues, for restored checkpoints and late drivers


def canonical(value: object) -> str:
    """Returns one text for equal JSON values."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


class Claims:
    """The claims, origins and reads of every app, in memory; ``Change`` makes each new one durable."""

    def __init__(
        self,
        records: Iterable[ClaimRecord | OriginRecord | ReadRecord],
        decided: Iterable[LedgerRecord],
        undo: Undo,
    ) -> None:
        """``decided``: the ledger, which names positions of claims that were dropped."""
        self._undo = undo
        self._positions: dict[str, int] = {}  # app -> the newest position that it was ever given
        for entry in decided:
            self._positions[entry.app_id] = max(entry.claim_position, self._positions.get(entry.app_id, 0))
        self._by_start: dict[tuple[str, str], list[ClaimRecord]] = {}  # (app, start) -> newest lineage last
        self._by_app: dict[str, list[ClaimRecord]] = {}  # in order of position
        # (app, queues) -> as above: the claims of one source
        self._by_queues: dict[tuple[str, str], list[ClaimRecord]] = {}
        self._origins: dict[tuple[str, str], OriginRecord] = {}
        # (query, batch) -> (app, queues) -> read
        self._reads: dict[tuple[str, int], dict[tuple[str, str], ReadRecord]] = {}
        self._reads_by_queues: dict[tuple[str, str], list[ReadRecord]] = {}  # (app, queues) -> oldest first
        claims = [record for record in records if isinstance(record, ClaimRecord)]
        for claim in sorted(claims, key=lambda record: record.position):
            self._add(claim)
        for record in records:
            if isinstance(record, OriginRecord):
                self._origins[(record.app_id, record.queues)] = record
        reads = [record for record in records if isinstance(record, ReadRecord)]
        for read in sorted(reads, key=lambda record: sum(end for _, end in record.ranges.values())):
            self._keep_read(read)

    def _add(self, claim: ClaimRecord) -> None:
        app = claim.app_id
        for same in (
            self._by_start.setdefault((app, claim.start), []),
            self._by_app.setdefault(app, []),
            self._by_queues.setdefault((app, _queues(claim)), []),
        ):
            self._undo.growth(same)
            same.append(claim)
        self._undo.item(self._positions, claim.app_id)
        self._positions[claim.app_id] = max(claim.position, self._positions.get(claim.app_id, 0))

    def _drop(self, change: Change, claim: ClaimRecord) -> None:
        for same in (self._by_app[claim.app_id], self._by_queues[(claim.app_id, _queues(claim))]):
            at = same.index(claim)
            self._undo.append((same.insert, at, claim))
            del same[at]
        key = (claim.app_id, claim.start)
        self._undo.item(self._by_start, key)
        others = [other for other in self._by_start[key] if other is not claim]
        if others:
            self._by_start[key] = others
        else:
            del self._by_start[key]
        change.drop(ClaimRecord, claim.key)

    def _keep_read(self, record: ReadRecord) -> None:
        key = (record.query_id, record.batch_id)
        self._undo.item(self._reads, key)
        self._reads[key] = {**self._reads.get(key, {}), (record.app_id, record.queues): record}
        reads = self._reads_by_queues.setdefault((record.app_id, record.queues), [])
        self._undo.growth(reads)
        reads.append(record)

    def apps(self) -> set[str]:
        return {app for app, _ in self._origins} | set(self._by_app)

    def position(self, app_id: str) -> int:
        """Returns the position of the app's newest claim, even a released one; 0: none. Never decreases."""
        return self._positions.get(app_id, 0)

    # -- S2 --------------------------------------------------------------------------------------------------
    def claim(
        self,
        state: BrokerState,
        change: Change,
        app_id: str,
        start: Vector,
        limit: Limit,
        origin: Origin,
        on_new_checkpoint: OnNewCheckpoint,
        consumed: Mapping[str, int],
        read_block: ReadBlock,
        *,
        now_us: int,
    ) -> Vector:
        """Returns the end vector for ``start``. ``consumed`` is where the last decided range of each log
        ended (missing: another system's sink).

        All checks and reads are done before anything changes. Then, as one change:
        1. resolve a symbolic start; 2. ack below a concrete start; 3. add the claim, unless it exists.
        """
        queues = {log: state.topology.queue(log) for log in sorted(start)}
        if not queues:
            raise OptionError("the stream names no queue; give the option queue")
        begin = {log: int(offset) for log, offset in start.items() if offset != START}
        symbolic = [log for log in queues if start[log] == START]
        acked = dict(begin)
        finished = self._require_end(app_id, start) if acked else None
        for queue in queues.values():
            require_ownable(queue, app_id)
        lineage = self._lineage(app_id, list(queues))
        origin_record: OriginRecord | None = None
        if symbolic:
            origin_record = self._origin(
                state, app_id, symbolic, origin, on_new_checkpoint, consumed, read_block
            )
            begin |= {log: int(offset) for log, offset in origin_record.start.items()}
            lineage = origin_record.lineage
        known = self._known(app_id, start, lineage if symbolic else None)
        if known is not None:
            end = dict(known.end)
        elif too_few(queues, begin, limit, read_block, now_us):
            end = dict(begin)
        else:
            end = cut(queues, begin, limit, read_block)

        for queue in queues.values():
            own(change, queue, app_id, begin[queue.name])
        if origin_record is not None:
            self._keep_origin(change, origin_record)
        if acked:  # Spark has everything below a concrete start in its commit log
            self._ack(state, change, app_id, finished, acked)
        if known is None:
            if end == begin:
                return start
            self._record(state, change, app_id, lineage, start, begin, end, queues)
        return dict(end)

    def _record(
        self,
        state: BrokerState,
        change: Change,
        app_id: str,
        lineage: int,
        start: Vector,
        begin: dict[str, int],
        end: dict[str, int],
        queues: Mapping[str, Queue],
    ) -> None:
        spans = {log: (begin[log], end[log]) for log in queues}
        for log, (first, last) in spans.items():
            state.messages.persist(change, queues[log], first, last)
            queues[log].claim(first, last)
            queues[log].record(change)
        claim = ClaimRecord(
            app_id=app_id,
            lineage=lineage,
            start=canonical(start),
            end=dict(end),
            ranges={log: [first, last] for log, (first, last) in spans.items()},
            skipped={
                log: found
                for log, span in spans.items()
                if (found := queues[log].progress.settled_within(*span))
            },
            redelivered={
                log: found
                for log, span in spans.items()
                if (found := queues[log].ready.redelivered_within(*span))
            },
            position=self.position(app_id) + 1,
        )
        self._add(claim)
        change.put(claim)
        self._prune(change, claim)

    def _prune(self, change: Change, newest: ClaimRecord) -> None:
        """Drops old claims of one source. Others do not count: an idle source still needs the end of its
        newest claim, however many claims another one has made since then.
        """
        claims = self._by_queues[(newest.app_id, _queues(newest))]
        while len(claims) > KEPT_CLAIMS:
            self._drop(change, claims[0])

    def _known(self, app_id: str, start: Vector, lineage: int | None) -> ClaimRecord | None:
        for claim in reversed(self._by_start.get((app_id, canonical(start)), ())):
            if lineage is None or claim.lineage == lineage:
                return claim
        return None

    def _lineage(self, app_id: str, logs: list[str]) -> int:
        return max(
            (
                entry.lineage
                for (app, _), entry in self._origins.items()
                if app == app_id and set(entry.start) & set(logs)
            ),
            default=1,
        )

    def _require_end(self, app_id: str, start: Vector) -> ClaimRecord | None:
        """Returns the newest claim that ends at the offsets of ``start``. Raises LineageConflict.

        None if that claim was pruned, and a claim that starts there proves that it existed.
        """
        vector = {log: int(offset) for log, offset in start.items() if offset != START}
        for claim in reversed(self._by_app.get(app_id, ())):
            if all(claim.end.get(log) == offset for log, offset in vector.items()):
                return claim
        if self._by_start.get((app_id, canonical(start))):
            return None
        raise LineageConflict(
            f"the checkpoint of app {app_id!r} starts at {canonical(vector)}, which is no end of a range "
            "that this app was given "
            "by this broker; "
            "it is the checkpoint of another app, of another broker, or older than the last "
            f"{KEPT_CLAIMS} batches. Use the checkpoint that belongs to the app, or a new one with "
            "onNewCheckpoint=resume"
        )

    # -- S1, S2: what a symbolic start means -----------------------------------------------------------------
    def _origin(
        self,
        state: BrokerState,
        app_id: str,
        logs: list[str],
        origin: Origin,
        on_new_checkpoint: OnNewCheckpoint,
        consumed: Mapping[str, int],
        read_block: ReadBlock,
    ) -> OriginRecord:
        """Returns the meaning of the symbolic start of ``logs``: the recorded origin, or a new one, which is
        not recorded yet.
        """
        key = canonical(logs)
        found = self._origins.get((app_id, key))
        overlapping = self._overlapping(app_id, key, logs)
        if found is None and not overlapping:
            return OriginRecord(app_id, key, 1, dict(offsets(state, logs, origin, read_block)), passed=False)
        if found is not None and not overlapping and not found.passed and not self._decided(found, consumed):
            return found
        # a start that was passed is asked for again: another checkpoint
        if on_new_checkpoint != "resume":
            raise self._new_checkpoint(app_id, logs, consumed)
        # acked offsets may be behind the ledger: resuming there would publish twice
        owned = {
            log: state.topology.queue(log).progress.first_to_read()
            for log in logs
            if state.topology.queue(log).owner == app_id
        }
        resumed = {
            log: consumed[log] if log in consumed else owned[log]
            for log in logs
            if log in consumed or log in owned
        }
        if len(resumed) < len(logs):  # the app reads some queue for the first time
            resumed = offsets(state, logs, origin, read_block) | resumed
        lineage = 1 + max(entry.lineage for entry in [*overlapping, *([found] if found else [])])
        return OriginRecord(app_id, key, lineage, dict(resumed), passed=False)

    def _overlapping(self, app_id: str, key: str, logs: list[str]) -> list[OriginRecord]:
        """Returns origins of other sets of queues that share a queue with ``logs``: earlier, the stream had
        other queues.
        """
        return [
            entry
            for (app, queues), entry in self._origins.items()
            if app == app_id and queues != key and set(entry.start) & set(logs)
        ]

    def _keep_origin(self, change: Change, entry: OriginRecord) -> None:
        if self._origins.get((entry.app_id, entry.queues)) == entry:
            return
        for other in self._overlapping(entry.app_id, entry.queues, list(entry.start)):
            self._undo.item(self._origins, (other.app_id, other.queues))
            del self._origins[(other.app_id, other.queues)]
            change.drop(OriginRecord, other.key)
        self._undo.item(self._origins, (entry.app_id, entry.queues))
        self._origins[(entry.app_id, entry.queues)] = entry
        change.put(entry)

    def _decided(self, origin: OriginRecord, consumed: Mapping[str, int]) -> bool:
        return any(consumed.get(log, -1) > int(offset) for log, offset in origin.start.items())

    def _new_checkpoint(self, app_id: str, logs: list[str], consumed: Mapping[str, int]) -> LineageConflict:
        queries = [
            query for (query, _), reads in self._reads.items() if any(app == app_id for app, _ in reads)
        ]
        where = (
            canonical({log: consumed[log] for log in logs if log in consumed})
            if consumed
            else "what its source acknowledged"
        )
        return LineageConflict(
            f"a new checkpoint starts under appId {app_id!r}, but this app has already read "
            f"{', '.join(logs)} "
            f"(query {queries[-1] if queries else 'unknown'}, consumed up to {where}). Go on with the old "
            "checkpoint, give the "
            "new pipeline an appId "
            "of its own, or set onNewCheckpoint=resume to go on where the app's last committed batch ended"
        )

    # -- S3, S4, S5 ------------------------------------------------------------------------------------------
    def resolve(self, app_id: str, start: Vector, end: Vector) -> ClaimRecord | None:
        """Returns the claim for exactly this start and end; None if they are equal (an empty range)."""
        if start == end:
            return None
        for claim in reversed(self._by_start.get((app_id, canonical(start)), ())):
            if claim.end == end:
                return claim
        raise LineageConflict(
            f"app {app_id!r} asks for the range {canonical(start)} to {canonical(end)}, which it was never "
            "given; the checkpoint "
            "belongs to another "
            "app or broker, or is older than what the broker remembers. Use the checkpoint that belongs to "
            "the app"
        )

    def by_ranges(self, app_id: str, ranges: Ranges) -> ClaimRecord:
        """Returns the newest claim with these concrete ranges. Raises LineageConflict if there is none."""
        wanted = {log: [first, last] for log, (first, last) in ranges.items()}
        for claim in reversed(self._by_app.get(app_id, ())):
            if claim.ranges == wanted:
                return claim
        raise LineageConflict(
            f"app {app_id!r} reads {canonical(wanted)}, which is not a range that it claimed"
        )

    def already_read(self, app_id: str, query_id: str, batch_id: int, ranges: Ranges) -> bool:
        """Returns whether exactly these ranges are recorded for (query, batch). Raises LineageConflict for
        other ranges of the same logs.
        """
        recorded = self._reads.get((query_id, batch_id), {}).get((app_id, canonical(sorted(ranges))))
        if recorded is None:
            return False
        wanted = {log: [first, last] for log, (first, last) in ranges.items()}
        _require_not_released(recorded)
        if recorded.ranges != wanted:
            raise LineageConflict(
                f"batch {batch_id} of query {query_id} has read {canonical(recorded.ranges)} and now asks "
                "for "
                f"{canonical(wanted)}: an older or changed "
                f"checkpoint of app {app_id!r} was restored. Use the newest checkpoint, or a new one with "
                "onNewCheckpoint=resume"
            )
        return True

    def record_read(self, change: Change, app_id: str, query_id: str, batch_id: int, ranges: Ranges) -> None:
        """Records a read (S4): without a read, no consumption; a batch can read only one range."""
        self.by_ranges(app_id, ranges)
        if not query_id or self.already_read(app_id, query_id, batch_id, ranges):
            return
        wanted: dict[str, Any] = {log: [first, last] for log, (first, last) in ranges.items()}
        record = ReadRecord(app_id, query_id, batch_id, canonical(sorted(ranges)), wanted)
        self._keep_read(record)
        change.put(record)
        self._prune_reads(change, record)

    def _prune_reads(self, change: Change, newest: ReadRecord) -> None:
        """Drops old reads by number, as with claims: a sink in another system decides nothing here."""
        app_id = newest.app_id
        reads = self._reads_by_queues[(app_id, newest.queues)]
        while len(reads) > KEPT_CLAIMS:
            oldest = reads[0]
            self._undo.append((reads.insert, 0, oldest))
            del reads[0]
            key = (oldest.query_id, oldest.batch_id)
            self._undo.item(self._reads, key)
            known = {
                read: record for read, record in self._reads[key].items() if read != (app_id, oldest.queues)
            }
            if known:
                self._reads[key] = known
            else:
                del self._reads[key]
            change.drop(ReadRecord, oldest.key)

    def ranges_read(self, query_id: str, batch_id: int) -> dict[str, list[int]]:
        """Returns everything that this (query, batch) has read, over all its sources, whatever their app_id.

        Raises LineageConflict for a range without a claim: its queue was released meanwhile.
        """
        ranges: dict[str, list[int]] = {}
        for record in self._reads.get((query_id, batch_id), {}).values():
            _require_not_released(record)
            self.by_ranges(
                record.app_id, {log: (first, last) for log, (first, last) in record.ranges.items()}
            )
            ranges |= record.ranges
        return ranges

    def ack(self, state: BrokerState, change: Change, app_id: str, end: Vector) -> None:
        """Acks below ``end`` (S5), which Spark has in its commit log."""
        vector = {log: int(offset) for log, offset in end.items() if offset != START}
        if vector:
            self._ack(state, change, app_id, self._require_end(app_id, end), vector)

    def _ack(
        self,
        state: BrokerState,
        change: Change,
        app_id: str,
        finished: ClaimRecord | None,
        vector: Mapping[str, int],
    ) -> None:
        """Settles entries below ``vector``, where ``finished`` ends, and keeps only the range of ``finished``
        for replays.

        That range is kept until the next ack: Spark runs the batch again if its newest commit log entry is
        lost.
        """
        for (app, key), entry in list(self._origins.items()):
            if (
                app == app_id
                and not entry.passed
                and any(vector.get(log, 0) > int(first) for log, first in entry.start.items())
            ):
                passed = replace(entry, passed=True)
                self._undo.item(self._origins, (app, key))
                self._origins[(app, key)] = passed
                change.put(passed)
        for log, offset in vector.items():
            queue = state.topology.queues.get(log)
            if queue is not None and queue.owner == app_id:
                queue.settle_claimed(offset)  # a stream without a ledger consumes only by its acks
                if finished is not None:
                    queue.ack_to(int(finished.ranges[log][0]))
                queue.record(change)

    def release(self, state: BrokerState, change: Change, app_id: str, log: str) -> None:
        """Releases the claim on one queue for an operator (S6). What the app claimed and did not consume is
        available to others again.

        A claim over several queues ends as a whole: its ranges of the others are not claimed either, but the
        app still owns them.
        """
        others: set[str] = set()
        for (app, key), entry in list(self._origins.items()):
            if app == app_id and log in entry.start:
                self._undo.item(self._origins, (app, key))
                del self._origins[(app, key)]
                change.drop(OriginRecord, entry.key)
        for claim in [claim for claim in self._by_app.get(app_id, ()) if log in claim.ranges]:
            self._drop(change, claim)
            others |= claim.ranges.keys() - {log}
        for other in sorted(others):
            queue = state.topology.queues.get(other)
            if queue is not None and queue.owner == app_id:
                queue.reclaim(
                    [claim.ranges[other] for claim in self._by_app[app_id] if other in claim.ranges]
                )
                queue.record(change)
        for reads in [reads for (app, _), reads in self._reads_by_queues.items() if app == app_id]:
            for at, read in enumerate(reads):
                if log in read.ranges:
                    voided = replace(read, ranges={**read.ranges, log: RELEASED})
                    batch = (read.query_id, read.batch_id)
                    self._undo.item(self._reads, batch)
                    self._undo.append((reads.__setitem__, at, read))
                    self._reads[batch] = {**self._reads[batch], (app_id, read.queues): voided}
                    reads[at] = voided
                    change.put(voided)


def _require_not_released(read: ReadRecord) -> None:
    """Raises LineageConflict for a released read: a new queue of that name may reuse the numbers."""
    gone = [log for log, found in read.ranges.items() if found == RELEASED]
    if gone:
        raise LineageConflict(
            f"batch {read.batch_id} of query {read.query_id} has read {', '.join(gone)} before that was "
            f"released from app {read.app_id!r}: "
            "it cannot be read or decided any more. Start once more with a new checkpoint and "
            "onNewCheckpoint=resume"
        )


def _queues(claim: ClaimRecord) -> str:
    return canonical(sorted(claim.ranges))
