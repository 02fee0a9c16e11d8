"""The ledger: which micro-batches of an app are decided (C4), the same in every engine. Pure.

Not here: which batch may be opened (``opening.py``), what becomes of an entry afterwards (``unapplied.py``),
what else an engine checks before a decision (``MicroBatches.decide``, Kafka's ``Decider.commit``).
Invariant: entries of an app have consecutive values of ``sequence``; a log's range starts where the last
decided range of that log ended, whichever app decided it (the sink may have another app_id than the source);
an entry never changes except for ``applied`` and ``mirrored``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import NamedTuple

from broker_core.core.address import VHOST
from broker_core.core.errors import BatchGap, CheckpointMismatch
from broker_core.core.ids import NO_SEQUENCE, CommitSequence
from broker_core.core.records import LedgerRecord, LineageRecord, ReleaseRecord, canonical
from broker_core.core.undo import Undo
from broker_core.engine import VERSION, BranchKind, InTable, LedgerEntry, ToApply
from broker_core.micro_batch.claims.finished import Decision
from broker_core.micro_batch.claims.other_sources import require_same_offsets
from broker_core.micro_batch.positions import brief
from broker_core.micro_batch.sink import RecordSink

# per app; more while they are not applied, or not mirrored to a Delta ledger that is in use
KEPT_ENTRIES = 1000
MIRROR_LAG = 3 * KEPT_ENTRIES  # a Delta ledger that is further behind is no longer in use


Durable = LedgerRecord | LineageRecord | ReleaseRecord
Settled = Callable[[str, int | None, int], bool]  # of a log between two offsets; None: all that is claimed


class MicroBatch(NamedTuple):
    """Which micro-batch: the batch of a query of an app."""

    app_id: str
    query_id: str
    batch_id: int


class Ledger:
    """The decided batches and lineages of every app, in memory; the sink makes each durable."""

    def __init__(self, records: Iterable[Durable] = (), undo: Undo | None = None, vhost: str = VHOST) -> None:
        self._undo = Undo() if undo is None else undo
        self.vhost = vhost
        self._entries: dict[str, dict[int, LedgerRecord]] = {}  # app -> sequence -> entry, ascending
        self._batches: dict[MicroBatch, LedgerRecord] = {}
        self._tokens: dict[str, LedgerRecord] = {}
        self._unapplied: dict[str, dict[int, None]] = {}  # app -> sequences
        self._unmirrored: dict[str, dict[int, None]] = {}
        self._mirrored: dict[str, int] = {}  # app -> last mirrored sequence
        self._lineages: dict[str, list[LineageRecord]] = {}  # current one last
        # log -> (end of the last decided range, its commit sequence)
        self._consumed: dict[str, tuple[int, CommitSequence]] = {}
        self._released: dict[str, CommitSequence] = {}  # log -> commit sequence of its release
        for record in sorted(records, key=_age):
            self.apply(record)

    # -- replay ----------------------------------------------------------------------------------------------
    def apply(self, record: Durable) -> None:
        """Takes in a durable record: of the catalog, or of another process. Entries and lineages of an app
        come in their order; a record replaces the one of its key.
        """
        if isinstance(record, LedgerRecord):
            self._keep(record)
        elif isinstance(record, ReleaseRecord):
            self._keep_release(record)
        else:
            others = [each for each in self.lineages(record.app_id) if each.query_id != record.query_id]
            self._undo.item(self._lineages, record.app_id)
            self._lineages[record.app_id] = [*others, record]

    def remove(self, record: LedgerRecord | LineageRecord) -> None:
        """Takes back a record that is durably gone; one that is not known changes nothing. A release is never
        gone.
        """
        if isinstance(record, LedgerRecord):
            found = self._entries.get(record.app_id, {})
            if record.sequence in found:
                self._undo.order(found)
                self._remove_entry(found[record.sequence])
        else:
            others = [each for each in self.lineages(record.app_id) if each.query_id != record.query_id]
            self._undo.item(self._lineages, record.app_id)
            self._lineages[record.app_id] = others

    def size(self) -> int:  # for any thread
        return len(self._batches)

    def _keep(self, entry: LedgerRecord) -> None:
        undo = self._undo
        undo.item(self._entries.setdefault(entry.app_id, {}), entry.sequence)
        batch = _batch_of(entry)
        undo.item(self._batches, batch)
        undo.item(self._tokens, entry.token)
        self._entries[entry.app_id][entry.sequence] = entry
        self._batches[batch] = entry
        self._tokens[entry.token] = entry
        self._wait(self._unapplied, entry, waits=not entry.applied)
        self._wait(self._unmirrored, entry, waits=not entry.mirrored)
        if entry.mirrored and entry.sequence > self._mirrored.get(entry.app_id, 0):
            undo.item(self._mirrored, entry.app_id)
            self._mirrored[entry.app_id] = entry.sequence
        for log, (_, end) in entry.ranges.items():
            latest = max(self._consumed.get(log, (0, NO_SEQUENCE))[1], self._released.get(log, NO_SEQUENCE))
            if entry.commit_sequence > latest:
                undo.item(self._consumed, log)
                self._consumed[log] = (int(end), entry.commit_sequence)

    def _remove_entry(self, entry: LedgerRecord) -> None:
        """Removes an entry; the caller saves the order of the app's entries."""
        batch = _batch_of(entry)
        del self._entries[entry.app_id][entry.sequence]
        self._undo.item(self._batches, batch)
        self._undo.item(self._tokens, entry.token)
        self._batches.pop(batch, None)
        self._tokens.pop(entry.token, None)
        self._wait(self._unapplied, entry, waits=False)
        self._wait(self._unmirrored, entry, waits=False)

    def _keep_release(self, record: ReleaseRecord) -> None:
        self._undo.item(self._released, record.queue)
        self._released[record.queue] = record.commit_sequence
        if self._consumed.get(record.queue, (0, NO_SEQUENCE))[1] <= record.commit_sequence:
            self._undo.item(self._consumed, record.queue)
            self._consumed.pop(record.queue, None)

    def records(self) -> list[Durable]:
        """Returns all that is durable."""
        return [
            *(entry for entries in self._entries.values() for entry in entries.values()),
            *(lineage for lineages in self._lineages.values() for lineage in lineages),
            *(ReleaseRecord(log, sequence, self.vhost) for log, sequence in self._released.items()),
        ]

    def apps(self) -> set[str]:
        return set(self._lineages) | set(self._entries)

    def knows(self, app_id: str) -> bool:
        return bool(self._lineages.get(app_id) or self._entries.get(app_id))

    def lineages(self, app_id: str) -> list[LineageRecord]:
        return list(self._lineages.get(app_id, ()))  # the current one is the last

    def last(self, app_id: str) -> LedgerRecord | None:
        entries = self._entries.get(app_id)
        return entries[next(reversed(entries))] if entries else None

    def at(self, app_id: str, sequence: int) -> LedgerRecord | None:
        return self._entries.get(app_id, {}).get(sequence)

    def entry(self, batch: MicroBatch) -> LedgerRecord | None:
        return self._batches.get(batch)

    def by_token(self, token: str) -> LedgerRecord | None:
        return self._tokens.get(token)

    def consumed(self, logs: Iterable[str]) -> dict[str, int]:
        """Returns per log where its last decided range ended; logs without consumption are missing."""
        return {log: self._consumed[log][0] for log in logs if log in self._consumed}

    def decision(self, query_id: str, batch_id: int, counts: Callable[[str], bool]) -> Decision:
        """Returns the entry of the batch; None: its query does not decide here, by apps that count."""
        queries = ((app, each.query_id) for app, found in self._lineages.items() for each in found)
        apps = [app for app, query in queries if query == query_id and counts(app)]
        entries = (self.entry(MicroBatch(app, query_id, batch_id)) for app in apps)
        return next(filter(None, entries), False) if apps else None

    def next_sequence(self, app_id: str) -> int:
        last = self.last(app_id)
        return last.sequence + 1 if last else 1

    # -- C4 --------------------------------------------------------------------------------------------------
    def expected(self, app_id: str, query_id: str) -> int:
        """Returns the next batch id of the current lineage; -1 if ``query_id`` is not the current one."""
        lineages = self._lineages.get(app_id)
        if not lineages or lineages[-1].query_id != query_id:
            return -1
        last = self.last(app_id)
        if last is not None and last.query_id == query_id:
            return last.batch_id + 1
        return lineages[-1].first_batch

    def decided(self, batch: MicroBatch, offset_log: str = "") -> LedgerRecord | None:
        """Returns the entry of a batch that is decided; None for the next one to decide. Raises
        CheckpointMismatch or BatchGap for any other one.
        """
        if (entry := self.entry(batch)) is not None:
            require_same_offsets(entry, offset_log)
            return entry
        app_id, query_id, batch_id = batch
        expected = self.expected(app_id, query_id)
        if expected == -1:
            lineages = self._lineages.get(app_id)
            raise CheckpointMismatch(
                f"batch {batch_id} of query {query_id} cannot be committed: app {app_id!r} belongs to query "
                f"{lineages[-1].query_id if lineages else 'none'} now. Another checkpoint has taken over; "
                "stop this query"
            )
        if batch_id != expected:
            raise BatchGap(
                f"batch {batch_id} of query {query_id} cannot be committed: app {app_id!r} expects batch "
                f"{expected}. Start the query again"
            )
        return None

    def require_ranges(self, batch: MicroBatch, ranges: Mapping[str, list[int]], settled: Settled) -> None:
        """Raises CheckpointMismatch unless every range starts where the app's last range of that log ended.

        It may start later if everything between is ``settled`` (from None: all that the app has claimed), or
        if the batch before did not read its range: it is decided, and so is every one before it.
        """
        consumed = self.consumed(ranges)
        before = self.entry(batch._replace(batch_id=batch.batch_id - 1))
        for log, (start, _) in ranges.items():
            at = consumed.get(log)
            passed = before is not None and log not in before.ranges
            if at == start or ((at is None or at < start) and (passed or settled(log, at, start))):
                continue
            where = "claimed below it and not consumed" if at is None else f"consumed up to {at}"
            raise CheckpointMismatch(
                f"batch {batch.batch_id} of query {batch.query_id} has read {brief(ranges)}, but "
                f"{log!r} is {where}: committing it would lose or duplicate messages. The checkpoint does "
                f"not fit the ledger of app {batch.app_id!r}; use the one that was last in use, or start "
                "once more with a new one and onNewCheckpoint=resume"
            )

    def decide(self, sink: RecordSink, entry: LedgerRecord) -> None:
        self.replace(sink, entry)
        self._prune(sink, entry.app_id)

    def _prune(self, sink: RecordSink, app_id: str) -> None:
        """Keeps the newest ``KEPT_ENTRIES``, and those needed for the start of a log's next range, an apply,
        or a mirror in use.
        """
        entries = self._entries[app_id]
        surplus = len(entries) - KEPT_ENTRIES
        if surplus <= 0:
            return
        mirrored = self._mirrored.get(app_id, 0)  # that entry is kept as proof of a Delta ledger
        in_use = mirrored and next(reversed(entries)) - mirrored <= MIRROR_LAG
        gone = []
        for entry in islice(entries.values(), surplus):
            if in_use and not entry.mirrored:
                break  # mirrored in order: later ones wait too
            if entry.applied and entry.sequence != mirrored and not self._is_needed(entry):
                gone.append(entry)
        if gone:
            self._undo.order(entries)
        for entry in gone:
            self._remove_entry(entry)
            sink.drop(LedgerRecord, entry.key)

    def _is_needed(self, entry: LedgerRecord) -> bool:
        """Returns whether the next range of one of its logs starts where it ends."""
        return any(
            self._consumed.get(log, (0, NO_SEQUENCE))[1] == entry.commit_sequence for log in entry.ranges
        )

    # -- C5, C6 ----------------------------------------------------------------------------------------------
    def unapplied(self, app_id: str) -> list[LedgerRecord]:
        return [self._entries[app_id][sequence] for sequence in sorted(self._unapplied.get(app_id, ()))]

    def entries(self, app_id: str) -> list[LedgerRecord]:
        return list(self._entries.get(app_id, {}).values())

    def unmirrored(self, app_id: str, limit: int | None = None) -> list[LedgerRecord]:
        sequences = sorted(self._unmirrored.get(app_id, ()))[:limit]
        return [self._entries[app_id][sequence] for sequence in sequences]

    def waiting(self, app_id: str) -> tuple[int, int]:
        """Returns how many entries are not applied, and how many its Delta ledger lacks, if it has one."""
        lag = len(self._unmirrored.get(app_id, ())) if app_id in self._mirrored else 0
        return len(self._unapplied.get(app_id, ())), lag

    def replace(self, sink: RecordSink, entry: LedgerRecord) -> None:
        """Puts an entry in the place of the one with its number."""
        self._keep(entry)
        sink.put(entry)

    def _wait(self, waiting: dict[str, dict[int, None]], entry: LedgerRecord, *, waits: bool) -> None:
        if waits != (entry.sequence in waiting.get(entry.app_id, ())):
            (self._undo.enter if waits else self._undo.leave)(waiting, entry.app_id, entry.sequence)

    def release(self, sink: RecordSink, log: str, commit_sequence: CommitSequence) -> None:
        """Forgets the end of a released queue: its next range may start anywhere."""
        record = ReleaseRecord(log, commit_sequence, self.vhost)
        self._keep_release(record)
        sink.put(record)


def new_entry(
    ledger: Ledger,
    batch: MicroBatch,
    token: str,
    ranges: dict[str, list[int]],
    to_apply: list[list[object]],
    *,
    messages: int,
    published: int,
    committed_at: int,
    claim_position: int,
    commit_sequence: CommitSequence | None = None,
    offset_log: str = "",
) -> LedgerRecord:
    """Returns the entry of the next batch of an app. ``commit_sequence`` None: that of the app."""
    app_id, query_id, batch_id = batch
    sequence = ledger.next_sequence(app_id)
    return LedgerRecord(
        *(app_id, sequence, query_id, batch_id, token, ranges, messages, published, committed_at),
        commit_sequence=CommitSequence(sequence) if commit_sequence is None else commit_sequence,
        branches=to_apply,
        claim_position=claim_position,
        applied=not to_apply,
        mirrored=False,
        vhost=ledger.vhost,
        offset_log=offset_log,
    )


def _batch_of(entry: LedgerRecord) -> MicroBatch:
    return MicroBatch(entry.app_id, entry.query_id, entry.batch_id)


def public(entry: LedgerRecord, token: str = "") -> LedgerEntry:
    """Returns the entry for the connector: branches grouped by kind and target. ``token``: as its user gave
    it, where the record has it otherwise.
    """
    groups: dict[str, tuple[Mapping[str, object], list[str], int, BranchKind]] = {}
    for kind, target, branch, rows in entry.branches:
        if "skipped" in target:
            continue
        key = canonical([kind, target])
        group = groups.get(key, (target, [], 0, kind))
        groups[key] = (target, [*group[1], branch], group[2] + rows, kind)
    return LedgerEntry(
        app_id=entry.app_id,
        sequence=entry.sequence,
        query_id=entry.query_id,
        batch_id=entry.batch_id,
        token=token or entry.token,
        ranges={log: (int(start), int(end)) for log, (start, end) in entry.ranges.items()},
        messages=entry.messages,
        published=entry.published,
        committed_at_us=entry.committed_at,
        to_apply=()
        if entry.applied
        else tuple(
            ToApply(kind, target, tuple(branches), rows) for target, branches, rows, kind in groups.values()
        ),
        applied=entry.applied,
        mirrored=entry.mirrored,
        in_tables=tuple(
            InTable(str(target.get("table_id", "")), int(target[VERSION]))
            for _, target, _, _ in entry.branches
            if VERSION in target
        ),
    )


def _age(record: Durable) -> int:
    """Returns what orders durable records of one class by their age."""
    if isinstance(record, LedgerRecord):
        return record.sequence
    return record.position if isinstance(record, LineageRecord) else 0


def other_decision(entry: LedgerRecord, ranges: Mapping[str, object]) -> CheckpointMismatch:
    return CheckpointMismatch(
        f"batch {entry.batch_id} of query {entry.query_id} is decided (app {entry.app_id!r}, consumed "
        f"{brief(entry.ranges, ranges)}) and now asks for {brief(ranges, entry.ranges)}: an older checkpoint "
        "was restored. Use the newest checkpoint, or a new one with onNewCheckpoint=resume"
    )
