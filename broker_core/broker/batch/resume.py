"""An app goes on behind another ledger (C7) in the embedded broker: everything in one change.

Not here: the rules (``micro_batch/resume.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from broker_core.broker.access.rights import Actor
from broker_core.broker.access.users import name_in
from broker_core.broker.batch.micro_batch import MicroBatches
from broker_core.broker.broker import BrokerState
from broker_core.broker.transaction.transaction import StagedTransaction
from broker_core.core.change import Change
from broker_core.engine import LedgerEntry
from broker_core.micro_batch.resume import newest_of_each_log, take_ends, take_entries


def resume(
    state: BrokerState,
    batches: MicroBatches,
    change: Change,
    app_id: str,
    entries: Sequence[LedgerEntry],
    now_us: int,
    actor: Actor,
) -> bool:
    """Returns whether the app has decided just these. Raises AccessRefused, QueueNotFound, ResourceLocked,
    CheckpointMismatch, OptionError.
    """
    batches.owners.take(change, actor, app_id)
    newest = newest_of_each_log(app_id, entries)
    if (last := batches.ledger.last(app_id)) is not None:
        return name_in(last.token) == newest[-1].token
    newest = [replace(entry, token=batches.owners.own(actor, entry.token)) for entry in newest]
    take_ends(batches.claims.origins, batches.logs(change, now_us), change, app_id, newest, batches.vhost)
    # nothing is published: a commit gives the entries their place among those of other apps
    transaction = StagedTransaction("", now_us)
    transaction.decided = True
    sequence = state.transactions.commit(change, transaction, now_us).sequence
    take_entries(batches.ledger, change, newest, sequence, batches.vhost)
    return True
