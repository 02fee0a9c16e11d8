"""An app goes on behind what a copy of its ledger says, where the engine has no ledger of it (C7). Pure.

Not here: the copy, and whether it is whole (``connector/ledger/resume.py``).
Invariant: of an app that has decided something here, nothing changes. Ends are taken before entries: what has
entries has ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from broker_core.core.address import VHOST
from broker_core.core.errors import CheckpointMismatch, OptionError
from broker_core.core.ids import CommitSequence
from broker_core.core.records import LineageRecord, OriginRecord, canonical
from broker_core.engine import LedgerEntry, Origin
from broker_core.micro_batch.claims.logs import Logs
from broker_core.micro_batch.claims.origins import Origins
from broker_core.micro_batch.ledger import Ledger, MicroBatch, new_entry
from broker_core.micro_batch.positions import brief
from broker_core.micro_batch.sink import RecordSink

LARGEST = 1 << 62  # a sequence goes on from it


def newest_of_each_log(app_id: str, entries: Sequence[LedgerEntry]) -> list[LedgerEntry]:
    """Returns the entries, each with the ranges of those logs of which it is the newest; the last one is the
    last batch of the app. Raises OptionError if they are not entries of the app, in order.
    """
    before = 0
    tokens = {entry.token for entry in entries}
    for entry in entries:
        fits = all(0 <= start <= end for start, end in entry.ranges.values())
        fits &= before < entry.sequence < LARGEST and 0 <= entry.batch_id < LARGEST
        if entry.app_id != app_id or not fits:
            raise OptionError(
                f"batch {entry.sequence} of app {entry.app_id!r} does not follow batch {before} of app "
                f"{app_id!r}",
                "give entries of one app, in the order of their sequence",
            )
        before = entry.sequence
    if not entries or len(tokens) < len(entries) or "" in tokens:
        raise OptionError(
            "an app resumes after at least one entry, and each has a token of its own", "give them"
        )
    newest: list[LedgerEntry] = []
    seen: set[str] = set()
    for entry in reversed(entries):
        own = {log: span for log, span in entry.ranges.items() if log not in seen}
        seen |= own.keys()
        if own or entry is entries[-1]:
            newest.append(replace(entry, ranges=own))
    return newest[::-1]


def take_ends(
    origins: Origins,
    logs: Logs,
    sink: RecordSink,
    app_id: str,
    entries: Sequence[LedgerEntry],
    vhost: str = VHOST,
) -> None:
    """The app has consumed its logs up to the ends of ``entries``: a source that resumes goes on there.

    It may be repeated. Raises QueueNotFound, CheckpointMismatch for an end that a log has not reached,
    ResourceLocked.
    """
    queues: dict[str, dict[str, int]] = {}
    for log, (_, end) in ((log, span) for entry in entries for log, span in entry.ranges.items()):
        queues.setdefault(logs.queue_of(log), {})[log] = end
    for queue, ends in queues.items():
        for log in ends:
            logs.require_ownable(log, app_id)
        try:
            logs.offsets([queue], Origin(offsets=ends))
        except OptionError as error:
            raise CheckpointMismatch(
                f"the ledger says that app {app_id!r} has consumed {brief(ends)}, and queue {queue!r} "
                f"does not have these offsets ({error.message})",
                "wait until its messages are there, under the offsets that they had; otherwise begin with "
                "another app_id",
            ) from None
    for queue, ends in queues.items():
        for log, end in ends.items():
            first = logs.first(log)
            logs.own(log, app_id, min(first, end))
            if first < end:
                logs.claim(log, first, end)
            logs.ack(log, app_id, end, end)
        lineage = 1 + origins.lineage(app_id, [queue])
        origin = OriginRecord(app_id, canonical([queue]), lineage, dict(ends), passed=True, vhost=vhost)
        origins.keep(sink, origin)


def take_entries(
    ledger: Ledger,
    sink: RecordSink,
    entries: Sequence[LedgerEntry],
    commit_sequence: CommitSequence | None = None,
    vhost: str = VHOST,
) -> None:
    """The app, which has decided nothing here, has decided ``entries``. ``commit_sequence``: of this change;
    None where an app counts its own commits.
    """
    last = entries[-1]
    for lineage in [record for record in ledger.records() if isinstance(record, LineageRecord)]:
        if lineage.app_id == last.app_id:  # of a query that has decided nothing
            ledger.remove(lineage)
            sink.drop(LineageRecord, lineage.key)
    current = LineageRecord(last.app_id, last.query_id, 1, last.batch_id, vhost)
    ledger.apply(current)
    sink.put(current)
    for entry in entries:
        record = new_entry(
            ledger,
            MicroBatch(entry.app_id, entry.query_id, entry.batch_id),
            entry.token,
            {log: [start, end] for log, (start, end) in entry.ranges.items()},
            [],
            messages=entry.messages,
            published=entry.published,
            committed_at=entry.committed_at_us,
            claim_position=0,
            commit_sequence=CommitSequence(entry.sequence) if commit_sequence is None else commit_sequence,
        )
        record = replace(record, sequence=entry.sequence, mirrored=True)
        ledger.apply(record)
        sink.put(record)
