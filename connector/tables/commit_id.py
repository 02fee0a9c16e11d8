"""The identity of a commit to a table: a step of a decided batch. A table takes each once. Pure.

Not here: the order of the steps (``batch/steps.py``), how a table remembers them (``table_format.py``).
Invariant: two steps never have the same ``txn_app_id`` and sequence.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from broker_core.engine import LedgerEntry

OTHERS = "others"  # what the commit of several batches says about those before the last one
STEP = "#"  # in the txn_app_id of the second and later step of a batch on a table
_RESTORED = "~"  # behind it, and before STEP: the version of a RESTORE


def txn_app_id(app_id: str, identity: str, location: str, step: int = 0, restored: int = 0) -> str:
    """The id of a step of an app on a table, within which batches are numbered: ``identity`` is that of the
    data directory, which numbers them.

    It contains the location: spellings that txmq cannot compare (``s3://t``, ``s3a://t``) make two commits.
    Each step of a batch has its own one: a table skips a second commit with the same id and number.
    """
    table = numbered_anew(f"{app_id}@{identity}/{_digest(location)}", restored)
    return f"{table}{STEP}{step}" if step else table


def ids_at(txn_app_id: str, locations: Collection[str]) -> set[str]:
    """The ids that an app would have on a table at other locations; a ledger has one id."""
    head, _, last = txn_app_id.rpartition("/")
    on_table = re.fullmatch("[0-9a-f]{8}", last) is not None
    return {txn_app_id, *(f"{head}/{_digest(location)}" for location in locations if on_table)}


def _digest(location: str) -> str:
    return hashlib.sha256(location.encode()).hexdigest()[:8]


def numbered_anew(txn_app_id: str, restored: int) -> str:
    """The id behind a RESTORE (0: none) that has taken batches out of a table: a table that is restored skips
    their numbers all the same, and an engine that was restored uses them again.
    """
    return f"{txn_app_id}{_RESTORED}{restored}" if restored else txn_app_id


def restored_in(name: str, txn_app_id: str) -> int | None:
    """The RESTORE behind which ``name``, the id of any step of ``txn_app_id``, is numbered; None for another
    id.
    """
    found = re.fullmatch(rf"(?:{_RESTORED}(\d+))?(?:{STEP}.*)?", name.removeprefix(txn_app_id))
    return int(found[1] or 0) if found is not None and name.startswith(txn_app_id) else None


@dataclass(frozen=True)
class CommitId:
    """One step of one decided batch. ``batch``: what its commit says; ``token`` and ``txn_app_id`` in it tell
    the commit from any other.
    """

    txn_app_id: str
    sequence: int
    batch: Mapping[str, object]
    decided_at_us: int

    @classmethod
    def of(cls, entry: LedgerEntry, txn_app_id: str) -> CommitId:
        """Returns the step ``txn_app_id`` of a batch."""
        batch = {**offsets_of(entry), "txn_app_id": txn_app_id}
        return cls(txn_app_id, entry.sequence, batch, entry.committed_at_us)

    @classmethod
    def of_all(cls, entries: Sequence[LedgerEntry], txn_app_id: str) -> CommitId:
        """Returns the step that writes several batches in one commit, with the number of the last one."""
        once = cls.of(entries[-1], txn_app_id)
        others = [offsets_of(entry) for entry in entries[:-1]]
        return replace(once, batch={**once.batch, OTHERS: others}) if others else once

    def behind(self, restored: int) -> CommitId:
        """Returns the same step behind a RESTORE that has taken it out (:func:`numbered_anew`)."""
        app, _, last = self.txn_app_id.rpartition("@")  # an app may have any character in its name
        table, mark, step = last.partition(STEP)
        name = f"{app}@{numbered_anew(table.partition(_RESTORED)[0], restored)}{mark}{step}"
        return replace(self, txn_app_id=name, batch={**self.batch, "txn_app_id": name})

    @property
    def app_id(self) -> str:
        return str(self.batch["app_id"])

    @property
    def metadata(self) -> str:
        """The text that the commit carries."""
        return json.dumps(dict(self.batch), sort_keys=True)


def offsets_of(entry: LedgerEntry) -> dict[str, object]:
    """What the commit of a batch says about it."""
    return {
        "app_id": entry.app_id,
        "sequence": entry.sequence,
        "token": entry.token,
        "query_id": entry.query_id,
        "batch_id": entry.batch_id,
        "offsets": {name: [start, end] for name, (start, end) in sorted(entry.ranges.items())},
    }
