"""Claims: which ranges of its logs an app was given, and how far each is acknowledged or released (S3 to S6).

Pure, and the same for every engine: a port says what the logs are (``logs.py``), a sink takes the records
(``sink.py``). Records that another process wrote are applied one by one.

Not here: which range follows a start (``next_range.py``), what a symbolic start means (``origins.py``), and
which batch has read which claim (``reads.py``).
Invariant: a claim never changes. The same start vector has the same end, whatever the limit, the new messages
or the number of drivers that ask. What a claim's range reads is fixed with it (what was settled before, what
may have been sent before).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from broker_core.core.address import VHOST
from broker_core.core.errors import CheckpointMismatch
from broker_core.core.records import (
    ClaimRecord,
    LedgerRecord,
    OriginRecord,
    ReadRecord,
    ReleaseNoteRecord,
    canonical,
)
from broker_core.core.undo import Undo
from broker_core.engine import START, Ranges, Vector
from broker_core.micro_batch.claims.finished import CommittedBelow, Counts, anybody, is_consumed
from broker_core.micro_batch.claims.logs import Logs
from broker_core.micro_batch.claims.origins import Origins
from broker_core.micro_batch.claims.reads import Reads, age, other_ranges, require_not_released
from broker_core.micro_batch.claims.releases import Release, Releases
from broker_core.micro_batch.claims.sources import Sources
from broker_core.micro_batch.positions import brief
from broker_core.micro_batch.sink import RecordSink

Kept = ClaimRecord | OriginRecord | ReadRecord | ReleaseNoteRecord

KEPT_CLAIMS = 1000  # per app and set of logs, for restored checkpoints and late drivers


class Below(NamedTuple):
    """What lies below ``vector``. ``finished``: the claim that ends there; None: it is acked, and pruned."""

    app_id: str
    vector: Mapping[str, int]
    finished: ClaimRecord | None = None
    consumed: bool = True


class Claims:
    """The claims, origins and reads of every app, in memory; the sink makes each new one durable."""

    def __init__(
        self,
        records: Iterable[Kept] = (),
        decided: Iterable[LedgerRecord] = (),
        undo: Undo | None = None,
        vhost: str = VHOST,
    ) -> None:
        """``decided``: the ledger, which names positions of claims that were dropped."""
        self._undo = Undo() if undo is None else undo
        self.vhost = vhost
        self._positions: dict[str, int] = {}  # app -> the newest position that it was ever given
        self._by_start: dict[tuple[str, str], list[ClaimRecord]] = {}  # (app, start) -> newest lineage last
        self._by_app: dict[str, list[ClaimRecord]] = {}  # in order of position
        self.sources = Sources(self._undo)
        self.origins = Origins(self._undo, vhost)
        self.releases = Releases(self._undo, vhost)
        self.reads = Reads(self._undo, vhost, self.release_text)
        for record in sorted([*decided, *records], key=_age):
            self.apply(record)
        self._opened = dict(self._positions)  # claims above were made by this process

    def size(self) -> int:
        """Returns how many claims, origins and reads there are. For any thread."""
        return sum(map(len, list(self._by_app.values()))) + self.origins.size() + self.reads.size()

    # -- replay ----------------------------------------------------------------------------------------------
    def apply(self, record: Kept | LedgerRecord) -> None:
        """Takes in a durable record: of the catalog, or of another process. Claims of an app come in the
        order of their positions. A record that is known already changes nothing; an origin replaces the one
        of its key. An entry of the ledger names a position only.
        """
        if isinstance(record, LedgerRecord):
            self.raise_position(record.app_id, record.claim_position)
        elif isinstance(record, ClaimRecord):
            if record not in self._by_start.get((record.app_id, record.start), ()):
                self._add(record)
        elif isinstance(record, OriginRecord):
            self.origins.apply(record)
        elif isinstance(record, ReleaseNoteRecord):
            self.releases.apply(record)
        else:
            self.reads.apply(record)

    def remove(self, record: Kept) -> None:
        """Takes back a record that is durably gone; one that is not known changes nothing."""
        if isinstance(record, ClaimRecord):
            if record in self._by_start.get((record.app_id, record.start), ()):
                self._remove_claim(record)
        elif isinstance(record, OriginRecord):
            self.origins.remove(record)
        elif isinstance(record, ReleaseNoteRecord):
            self.releases.remove(record)
        else:
            self.reads.remove(record)

    def raise_position(self, app_id: str, position: int) -> None:
        self._undo.item(self._positions, app_id)
        self._positions[app_id] = max(position, self._positions.get(app_id, 0))

    def _add(self, claim: ClaimRecord) -> None:
        app = claim.app_id
        for same in (self._by_start.setdefault((app, claim.start), []), self._by_app.setdefault(app, [])):
            self._undo.growth(same)
            same.append(claim)
        self.sources.add(claim)
        self.raise_position(app, claim.position)

    def _remove_claim(self, claim: ClaimRecord) -> None:
        same = self._by_app[claim.app_id]
        at = same.index(claim)
        self._undo.append((same.insert, at, claim))
        del same[at]
        self.sources.remove(claim)
        key = (claim.app_id, claim.start)
        self._undo.item(self._by_start, key)
        others = [other for other in self._by_start[key] if other != claim]
        if others:
            self._by_start[key] = others
        else:
            del self._by_start[key]

    def records(self) -> list[Kept]:
        """Returns all that is durable."""
        claims = [claim for of_app in self._by_app.values() for claim in of_app]
        return [*claims, *self.origins.records(), *self.reads.records(), *self.releases.records()]

    def apps(self) -> set[str]:
        return self.origins.apps() | set(self._by_app)

    def knows(self, app_id: str) -> bool:
        return bool(self._by_app.get(app_id)) or self.origins.knows(app_id)

    def position(self, app_id: str) -> int:
        """Returns the position of the app's newest claim, even a released one; 0: none. Never decreases."""
        return self._positions.get(app_id, 0)

    def ends(self, app_id: str, logs: Collection[str]) -> dict[str, int]:
        """Returns per log where the app's claims end; logs without a claim are missing."""
        found: dict[str, int] = {}
        for claim in self._by_app.get(app_id, ()):
            for log in claim.ranges.keys() & set(logs):
                found[log] = max(found.get(log, 0), int(claim.ranges[log][1]))
        return found

    def release_text(self, app_id: str, logs: Collection[str]) -> str:
        """Returns what an operator has done to these logs of an app, and the way on; "" for nothing."""
        return self.releases.release_text(app_id, logs, followed=bool(self.ends(app_id, logs)))

    def _refuse_released(self, app_id: str, logs: Collection[str]) -> None:
        """Raises CheckpointMismatch where one of them was released: no claim of before is known any more."""
        if release_text := self.release_text(app_id, logs):
            raise CheckpointMismatch(release_text)

    def _drop(self, sink: RecordSink, claim: ClaimRecord) -> None:
        self._remove_claim(claim)
        sink.drop(ClaimRecord, claim.key)

    def prune(self, sink: RecordSink, newest: ClaimRecord) -> None:
        """Drops old claims of one source. Others do not count: an idle source still needs the end of its
        newest claim, however many claims another one has made since then.
        """
        claims = self.sources.claims(newest)
        while len(claims) > KEPT_CLAIMS:
            self._drop(sink, claims[0])

    def at(self, app_id: str, start: Vector, lineage: int | None = None) -> ClaimRecord | None:
        for claim in reversed(self._by_start.get((app_id, canonical(start)), ())):
            if lineage is None or claim.lineage == lineage:
                return claim
        return None

    def ending(self, app_id: str, vector: Mapping[str, object]) -> ClaimRecord | None:
        """Returns the newest claim that ends there."""
        claims = reversed(self._by_app.get(app_id, ()))
        return next((each for each in claims if each.end.items() >= vector.items()), None)

    def _require_end(self, app_id: str, start: Vector, vector: Mapping[str, int]) -> ClaimRecord | None:
        """Returns the newest claim that ends at the offsets of ``start``. Raises CheckpointMismatch.

        None if that claim was pruned, and a claim that starts there proves that it existed.
        """
        if (claim := self.ending(app_id, vector)) is not None:
            return claim
        if self._by_start.get((app_id, canonical(start))) or self.origins.starts_at(app_id, vector):
            return None
        self._refuse_released(app_id, vector)
        raise _no_end(app_id, vector)

    # -- S3, S4, S5 ------------------------------------------------------------------------------------------
    def resolve(self, app_id: str, start: Vector, end: Vector) -> ClaimRecord | None:
        """Returns the claim for exactly this start and end; None if they are equal (an empty range)."""
        if start == end:
            return None
        for claim in reversed(self._by_start.get((app_id, canonical(start)), ())):
            if claim.end == end:
                return claim
        self._refuse_released(app_id, end)
        raise _no_range(app_id, start, end)

    def by_ranges(self, app_id: str, ranges: Ranges) -> ClaimRecord:
        """Returns the newest claim with these concrete ranges. Raises CheckpointMismatch if there is none."""
        spans = {log: [first, last] for log, (first, last) in ranges.items()}
        for claim in reversed(self._by_app.get(app_id, ())):
            if claim.ranges == spans:
                return claim
        self._refuse_released(app_id, spans)
        raise CheckpointMismatch(f"app {app_id!r} reads {brief(spans)}, which is not a range that it claimed")

    def record_read(
        self, sink: RecordSink, app_id: str, query_id: str, batch_id: int, ranges: Ranges
    ) -> None:
        """Records a read (S4): without a read, no consumption; a batch can read only one range."""
        self.by_ranges(app_id, ranges)
        self.reads.record(sink, app_id, query_id, batch_id, ranges, limit=KEPT_CLAIMS)

    def ranges_read(self, query_id: str, batch_id: int, counts: Counts = anybody) -> dict[str, list[int]]:
        """Returns everything that this (query, batch) has read, over all its sources, whatever their app_id,
        if that ``counts``.

        Raises CheckpointMismatch for a range without a claim (its queue was released meanwhile), and for two
        ranges of one log.
        """
        ranges: dict[str, list[int]] = {}
        for read in self.reads.of_batch(query_id, batch_id):
            if not counts(read.app_id):
                continue
            require_not_released(read, self.release_text)
            self.by_ranges(read.app_id, {log: (first, last) for log, (first, last) in read.ranges.items()})
            if read.ranges.keys() & ranges.keys():
                raise other_ranges(read, ranges)
            ranges |= read.ranges
        return ranges

    def below(self, logs: Logs, app_id: str, start: Vector, committed: CommittedBelow) -> Below:
        """Returns what lies below the offsets of ``start``. Raises CheckpointMismatch."""
        vector = {log: int(offset) for log, offset in start.items() if offset != START}
        finished = self._require_end(app_id, start, vector) if vector else None
        if finished is None or all((logs.goes_on(log, app_id) or 0) >= at for log, at in vector.items()):
            return Below(app_id, vector, finished)  # nothing below is left
        new = finished.position > self._opened.get(app_id, 0)
        consumed = is_consumed(finished, committed, self.sources.claims(finished), self.reads, new=new)
        return Below(app_id, vector, finished, consumed)

    def ack(self, logs: Logs, sink: RecordSink, app_id: str, end: Vector, committed: CommittedBelow) -> None:
        """Acks below ``end`` (S5), which Spark has in its commit log."""
        self.ack_below(logs, sink, self.below(logs, app_id, end, committed))

    def ack_below(self, logs: Logs, sink: RecordSink, below: Below) -> None:
        """Settles entries below a start, if they are consumed, and keeps only the range of the claim that
        ends there for replays.

        That range is kept until the next ack: Spark runs the batch again if its newest commit log entry is
        lost.
        """
        app_id, vector, finished, consumed = below
        self.origins.pass_by(sink, app_id, vector, finished)
        for log, offset in vector.items() if consumed else ():
            logs.ack(log, app_id, offset, int(finished.ranges[log][0]) if finished is not None else None)

    def note_release(
        self, logs: Logs, sink: RecordSink, done: Release, released: Collection[str], ends: Mapping[str, int]
    ) -> None:
        """Records a release before it takes place, and where the app is. ``ends``: of what is decided."""
        ended = [claim for claim in self._by_app.get(done.app_id, ()) if claim.ranges.keys() & set(released)]
        every = {*released, *(log for claim in ended for log in claim.ranges)}
        self.releases.note(logs, sink, done, every, ends, self.position(done.app_id))

    def release(
        self, logs: Logs, sink: RecordSink, app_id: str, queue: str, released: Collection[str]
    ) -> None:
        """Releases the claim on one queue for an operator (S6); ``released`` are its logs. What the app
        claimed and did not consume is available to others again.

        A claim over several queues ends as a whole: its ranges of the others are not claimed either, but the
        app still owns them.
        """
        others: set[str] = set()
        self.origins.release(sink, app_id, queue)
        gone = set(released)
        for claim in [claim for claim in self._by_app.get(app_id, ()) if gone & claim.ranges.keys()]:
            self._drop(sink, claim)
            others |= claim.ranges.keys() - gone
        for other in sorted(others):
            ranges = [claim.ranges[other] for claim in self._by_app[app_id] if other in claim.ranges]
            logs.reclaim(other, app_id, ranges)
        self.reads.release(sink, app_id, gone)


def _no_end(app_id: str, vector: Mapping[str, int]) -> CheckpointMismatch:
    return CheckpointMismatch(
        f"the checkpoint of app {app_id!r} starts at {brief(vector)}, which is not the end of a "
        "range that this broker gave to the app; it is the checkpoint of another app, of another broker, "
        f"or older than the last {KEPT_CLAIMS} batches, or the data directory is older than it. Use the "
        "checkpoint that belongs to the app, or a new one with onNewCheckpoint=resume"
    )


def _no_range(app_id: str, start: Vector, end: Vector) -> CheckpointMismatch:
    return CheckpointMismatch(
        f"app {app_id!r} asks for the range {brief(start)} to {brief(end)}, which it never "
        "claimed; the checkpoint belongs to another app or broker, or is older than what the broker "
        "remembers, or the data directory is older than it. Use the checkpoint that belongs to the app, or a "
        "new one with onNewCheckpoint=resume"
    )


def _age(record: Kept | LedgerRecord) -> int:
    """Returns what orders durable records of one class by their age."""
    if isinstance(record, ClaimRecord):
        return record.position
    return age(record) if isinstance(record, ReadRecord) else 0
