"""An app goes on behind another ledger (C7) on Kafka: its journal first, then its decisions.

1. Behind a fence, the ends, in the journal. 2. The entries, in one transaction. One that is cut off is done
again; a source that has the ends begins nowhere else.
Not here: the rules (``micro_batch/resume.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

from broker_core.core.failpoint import here
from broker_core.engine import LedgerEntry
from broker_core.kafka.journal.journal import AppProgress
from broker_core.kafka.sink.decisions import Decisions, FencedApp
from broker_core.micro_batch.resume import take_entries


def resume(
    fenced: FencedApp, decisions: Decisions, progress: AppProgress, entries: Sequence[LedgerEntry]
) -> bool:
    """Returns whether the app has decided just these. Raises QueueNotFound, CheckpointMismatch."""

    def attempt() -> bool:
        fenced.fence()
        if (last := decisions.ledger.last(decisions.app_id)) is not None:
            return last.token == entries[-1].token
        progress.resume(entries)
        here("kafka.resume.ends")
        _, changes = decisions.trial(lambda sink: take_entries(decisions.ledger, sink, entries))
        fenced.write(changes)
        decisions.take(changes)
        here("kafka.resume.entries")
        return True

    return fenced.patiently(attempt)
