"""Whether a micro-batch may begin: it is the next of its query (C1), and not decided when it reads (S4).

Pure. Not here: the decision (``ledger.py``), and which ranges there are (``claims/``).
Invariant: an app belongs to one query at a time, the one that was opened last, and each batch of it to one
place in the ledger.
"""

from __future__ import annotations

from broker_core.core.errors import BatchGap, CheckpointMismatch
from broker_core.core.records import LedgerRecord, LineageRecord
from broker_core.engine import OnNewCheckpoint, Ranges
from broker_core.micro_batch.claims.claim import Claims
from broker_core.micro_batch.claims.finished import Counts
from broker_core.micro_batch.claims.other_sources import require_same_offsets
from broker_core.micro_batch.claims.reads import unread
from broker_core.micro_batch.ledger import Ledger, MicroBatch, other_decision
from broker_core.micro_batch.sink import RecordSink

KEPT_LINEAGES = 1000  # queries of an app; a forgotten one is a new checkpoint


def open_batch(
    ledger: Ledger, sink: RecordSink, batch: MicroBatch, on_new: OnNewCheckpoint, offset_log: str = ""
) -> LedgerRecord | None:
    """Returns the entry of a decided batch; None for a batch that may be staged now, with its lineage
    opened. Raises CheckpointMismatch, BatchGap.
    """
    app_id, query_id, batch_id = batch
    lineages = ledger.lineages(app_id)
    if not lineages or lineages[-1].query_id != query_id:
        gone: list[LineageRecord] = []
        if lineages:
            _refuse(ledger, batch, on_new)
            if all(entry.query_id != lineages[-1].query_id for entry in ledger.entries(app_id)):
                gone.append(lineages.pop())  # it has decided nothing: its late drivers are refused
        if batch_id > 0 and on_new != "resume":
            raise BatchGap(
                f"query {query_id} starts app {app_id!r} with batch {batch_id}, but no batch before it "
                "is in the ledger: transactional was not called for each, or another sink was. Call it for "
                "each, and set onNewCheckpoint=resume to go on here; or start with a new checkpoint"
            )
        position = lineages[-1].position + 1 if lineages else 1
        if len(lineages) >= KEPT_LINEAGES:
            gone.append(lineages[0])
        for lineage in gone:
            ledger.remove(lineage)
            sink.drop(LineageRecord, lineage.key)
        current = LineageRecord(app_id, query_id, position, batch_id, ledger.vhost)
        ledger.apply(current)
        sink.put(current)
    return _follow(ledger, batch, offset_log)


def _refuse(ledger: Ledger, batch: MicroBatch, on_new: OnNewCheckpoint) -> None:
    app_id, query_id, _ = batch
    lineages = ledger.lineages(app_id)
    current = lineages[-1]
    if any(lineage.query_id == query_id for lineage in lineages):
        raise CheckpointMismatch(
            f"query {query_id} of app {app_id!r} was followed by query {current.query_id}: an older "
            "checkpoint was started again. "
            f"Continue with the checkpoint of {current.query_id}, or use a new one with "
            "onNewCheckpoint=resume"
        )
    decided = ledger.last(app_id)
    if on_new != "resume" and decided is not None:
        raise CheckpointMismatch(
            f"query {query_id} is a new checkpoint under appId {app_id!r}, whose batches belong to query "
            f"{current.query_id} (last: batch {decided.batch_id}, number {decided.sequence} of the app). "
            "Continue with that checkpoint, or set onNewCheckpoint=resume to continue where the last "
            "committed batch ended; another query needs an appId and queues of its own, and a second "
            "flow into a sink of a declarative pipeline a sink with an appId of its own"
        )


def _follow(ledger: Ledger, batch: MicroBatch, offset_log: str) -> LedgerRecord | None:
    app_id, query_id, batch_id = batch
    expected = ledger.expected(app_id, query_id)
    if batch_id == expected:
        return None
    if batch_id > expected:
        raise BatchGap(
            f"query {query_id} of app {app_id!r} opens batch {batch_id}, but the ledger expects "
            f"batch {expected}: transactional was not called for it, or its error was caught, or an older "
            "data directory was restored. Nothing was done; call it for every batch, an empty one too, and "
            "use a new checkpoint with onNewCheckpoint=resume, which has no state of this one; let "
            f"other sources begin after batch {batch_id - 1} of this one (startingOffsets, modifiedAfter)"
        )
    entry = ledger.entry(batch)
    if entry is None:
        raise CheckpointMismatch(
            f"batch {batch_id} of query {query_id} lies before what the ledger of app {app_id!r} holds: "
            "an older checkpoint was restored. Use the newest checkpoint, or a new one with "
            "onNewCheckpoint=resume"
        )
    require_same_offsets(entry, offset_log)
    return entry


def record_read(
    claims: Claims, ledger: Ledger, sink: RecordSink, batch: MicroBatch, ranges: Ranges, counts: Counts
) -> None:
    """Records what a batch reads (S4). Raises CheckpointMismatch if an app that ``counts`` has decided it: it
    cannot read what it did not consume.
    """
    if not claims.reads.already(*batch, ranges):
        require_undecided(ledger, batch, ranges, claims.position(batch.app_id), counts)
    claims.record_read(sink, *batch, ranges)


def require_undecided(
    ledger: Ledger, batch: MicroBatch, ranges: Ranges, claim_position: int, counts: Counts
) -> None:
    app_id, query_id, batch_id = batch
    for sink in ledger.apps() if query_id else ():
        entry = ledger.entry(MicroBatch(sink, query_id, batch_id))
        if entry is None or not counts(sink) or (sink == app_id and unread(entry, ranges, claim_position)):
            continue
        raise other_decision(entry, ranges)
