"""Whether a claim that Spark has committed may be acknowledged (S2, S5). Pure.

A checkpoint says that the batch of a claim is done. Where this engine decides the batches, its ledger must
say so too: an older copy of a data directory has the claim, and not the decision, and what it acknowledged
would be neither in its queues nor in what the batch wrote.
Not here: what an acknowledgement settles (``claim.py``).
Invariant: what may still have to be decided here is not acknowledged. Nothing changes before this is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from broker_core.core.errors import CheckpointMismatch
from broker_core.core.records import ClaimRecord, LedgerRecord, canonical
from broker_core.engine import UNKNOWN_OFFSETS
from broker_core.micro_batch.claims.other_sources import planned_anew
from broker_core.micro_batch.claims.reads import Reads
from broker_core.micro_batch.positions import brief

Counts = Callable[[str], bool]  # of an app
Decision = LedgerRecord | Literal[False] | None  # False: not yet; None: its query does not decide here


def anybody(_app_id: str) -> bool:
    return True


class DecidedBatches(Protocol):
    """What a ledger says of claims."""

    def consumed(self, logs: Iterable[str]) -> dict[str, int]:
        """Returns per log where its last decided range ended; logs without consumption are missing."""

    def last(self, app_id: str) -> LedgerRecord | None:
        """Returns the newest entry of the app."""

    def knows(self, app_id: str) -> bool:
        """Returns whether a batch of the app was opened, decided or not."""

    def decision(self, query_id: str, batch_id: int, counts: Counts) -> Decision:
        """Returns what is decided, if the query decides here, under an app that ``counts``."""


@dataclass(frozen=True, slots=True)
class CommittedBelow:
    """What is known of all below a start. ``decided``: by the ledger, of apps that ``counts``; ``by_spark``:
    it is in its commit log; ``ran``: the reader that asks has planned the batch that ends there.
    """

    decided: DecidedBatches
    by_spark: bool = True
    ran: bool = False
    counts: Counts = anybody

    def decisions(self, claim: ClaimRecord, reads: Reads) -> list[Decision]:
        """Returns those of the batches that have read just this claim."""
        found = reads.of_ranges(claim.app_id, claim.ranges)
        return [self.decided.decision(read.query_id, read.batch_id, self.counts) for read in found]


def asked_once(claim: ClaimRecord | None, committed: CommittedBelow, reads: Reads) -> ClaimRecord | None:
    """Returns it. Raises CheckpointMismatch if its batch is decided: Spark plans it anew (row 16), and
    offsets of other sources that are not known may be others now.
    """
    for entry in () if claim is None else committed.decisions(claim, reads):
        if entry and entry.offset_log == UNKNOWN_OFFSETS:
            raise planned_anew(entry)
    return claim


def is_consumed(
    claim: ClaimRecord, committed: CommittedBelow, source: Sequence[ClaimRecord], reads: Reads, *, new: bool
) -> bool:
    """Returns whether ``claim`` and those before it are consumed; False: that is not known yet, and the next
    batch will tell. ``source``: the claims of its source. ``new``: the claim was made since this process
    opened the directory, so no decision of it is missing. Raises CheckpointMismatch if it should be decided
    here, and is not.
    """
    if not committed.by_spark:
        return False
    ledger = committed.decided
    # 1. the ledger says so
    consumed = ledger.consumed(claim.ranges)
    spans = {log: (first, last) for log, (first, last) in claim.ranges.items() if first < last}
    if all(consumed.get(log, -1) >= last for log, (_, last) in spans.items()):
        return True
    done = committed.decisions(claim, reads)
    if any(done):  # without a range: its cache was read
        return True
    # 2. the first batch that was opened, the next one to decide, or of a query that decides here
    last = ledger.last(claim.app_id)
    is_next = last is None and not done and ledger.knows(claim.app_id)
    if last is not None and last.claim_position < claim.position:
        is_next = all(consumed.get(log, -1) == first for log, (first, _) in spans.items())
    ran = committed.ran and new
    if False in done or (is_next and not (ran and done)):
        raise CheckpointMismatch(
            f"the checkpoint of app {claim.app_id!r} has committed the batch that ends at "
            f"{brief(claim.end)}, but the ledger has not decided it: transactional was not called for it, or "
            "its error was caught, or an older data directory was restored. Nothing was done, and the "
            "messages of this batch are still in the queue",
            "after a restore, use the data directory that was last in use; else call it for every batch, let "
            "its errors through, and start once more with a new checkpoint and onNewCheckpoint=resume, which "
            "reads them again",
        )
    # 3. Spark ran the batch beside this process, and its sink is another system
    if ran:
        return True
    # 4. the batch before is acknowledged, and a query that does not decide here has read it
    before = (
        other
        for other in reversed(source)
        if other.lineage == claim.lineage and canonical(other.end) == claim.start
    )
    passed = committed.decisions(found, reads) if last is None and (found := next(before, None)) else []
    return bool(passed) and all(decision is None for decision in passed)
