"""What a batch has of sources that are not txmq: its number may come again with other rows (row 16). Pure.

Not here: the digest of Spark's offset log (``connector/stream/offset_log.py``).
Invariant: offsets that are not known are equal to no others. Rows are decided with them if the batch has read
a range: Spark asks for its claim once (``finished.py``).
"""

from __future__ import annotations

from broker_core.core.errors import CheckpointMismatch
from broker_core.core.records import LedgerRecord
from broker_core.engine import UNKNOWN_OFFSETS


def require_same_offsets(entry: LedgerRecord, offset_log: str) -> None:
    """Raises CheckpointMismatch for a decided batch whose number Spark has given to other offsets, or may
    have: a batch that was taken over from a Delta ledger has none.
    """
    by_range = entry.offset_log == UNKNOWN_OFFSETS and (not offset_log or bool(entry.ranges))
    if not by_range and entry.offset_log != offset_log:
        raise planned_anew(entry, offset_log)


def planned_anew(entry: LedgerRecord, offset_log: str = "") -> CheckpointMismatch:
    newest = "continue with the newest checkpoint, or "
    if not entry.offset_log:
        why, newest = "of which offsets is not told here: it comes from a Delta ledger", ""
    elif offset_log == UNKNOWN_OFFSETS:
        why = "its offsets are not known now: its checkpoint cannot be read"
    else:
        why = "Spark has planned it anew: an older checkpoint was restored"
    return CheckpointMismatch(
        f"batch {entry.batch_id} of query {entry.query_id} is decided (app {entry.app_id!r}), and {why}. "
        "Nothing was done",
        f"{newest}use a new checkpoint with onNewCheckpoint=resume, and begin each source that is not txmq "
        "after this batch (startingOffsets, modifiedAfter)",
    )
