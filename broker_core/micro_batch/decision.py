"""The decision of a micro-batch, the same in every engine: what is asked before it, its entry, and what the
connector and an operator see of that.

Not here: what else an engine checks, and how the entry becomes durable with what the batch has published
(``MicroBatches.decide``, Kafka's ``Decider.commit``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from broker_core.address import VHOST
from broker_core.admin import SKIPPED, LedgerInfo, TableInfo
from broker_core.broker.state.records import LedgerRecord, canonical
from broker_core.engine import EMPTY, FILES, REFUSED, VERSION, BranchKind, LedgerEntry, ToApply
from broker_core.ids import CommitSequence
from broker_core.micro_batch.ledger import Ledger

Batch = tuple[str, str, int]  # app, query, batch


def before(ledger: Ledger, batch: Batch) -> LedgerRecord | None:
    """Returns the entry of a batch that is decided. Raises LineageConflict or BatchGap unless another one is
    the next of its app.
    """
    entry = ledger.entry(*batch)
    if entry is None:
        ledger.require_next(*batch)
    return entry


def new_entry(
    ledger: Ledger,
    batch: Batch,
    token: str,
    ranges: dict[str, list[int]],
    branches: Sequence[Sequence[object]],
    *,
    messages: int,
    published: int,
    committed_at: int,
    claim_position: int,
    commit_sequence: CommitSequence | None = None,
    vhost: str = VHOST,
) -> LedgerRecord:
    """``branches``: to be applied. ``commit_sequence`` None: the sequence of the app orders its commits."""
    app_id, query_id, batch_id = batch
    sequence = ledger.next_sequence(app_id)
    return LedgerRecord(
        app_id=app_id,
        sequence=sequence,
        query_id=query_id,
        batch_id=batch_id,
        token=token,
        ranges=ranges,
        messages=messages,
        published=published,
        committed_at=committed_at,
        commit_sequence=CommitSequence(sequence) if commit_sequence is None else commit_sequence,
        branches=list(branches),
        claim_position=claim_position,
        applied=not branches,
        mirrored=False,
        vhost=vhost,
    )


def public(entry: LedgerRecord, token: str = "") -> LedgerEntry:
    """Returns the entry for the connector: branches grouped by kind and target. ``token``: as its user gave
    it, where the record has it otherwise.
    """
    groups: dict[str, tuple[Mapping[str, object], list[str], int, BranchKind]] = {}
    for kind, target, branch, rows in entry.branches:
        if "skipped" in target:
            continue
        key = canonical([kind, target])
        known = groups.get(key, (target, [], 0, kind))
        groups[key] = (target, [*known[1], branch], known[2] + rows, kind)
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
    )


def ledger_info(entry: LedgerRecord, transaction: int) -> LedgerInfo:
    """Returns the entry for an operator. ``transaction``: the number of its commit, 0 if it has none."""
    return LedgerInfo(
        app_id=entry.app_id,
        sequence=entry.sequence,
        query_id=entry.query_id,
        batch_id=entry.batch_id,
        transaction=transaction,
        committed_at_us=entry.committed_at,
        ranges={log: (int(start), int(end)) for log, (start, end) in entry.ranges.items()},
        messages=entry.messages,
        published=entry.published,
        applied=entry.applied,
        mirrored=entry.mirrored,
        tables=tuple(tables(entry)),
    )


def tables(entry: LedgerRecord) -> Iterable[TableInfo]:
    """Yields what the batch applies, or has applied, by table, operation and version."""
    rows: dict[tuple[str, str, str, int | None], int] = {}
    versions = [
        ({name: value for name, value in target.items() if name != VERSION}, target[VERSION])
        for _, target, _, _ in entry.branches
        if VERSION in target
    ]
    for kind, target, _branch, count in entry.branches:
        version = next((at for same, at in versions if same == target), target.get(VERSION))
        noted = target.get(REFUSED)
        refused = str(noted[1]) if isinstance(noted, list) and len(noted) > 1 and not entry.applied else ""
        key = (_table(target), kind, SKIPPED if "skipped" in target else refused, version)
        rows[key] = rows.get(key, 0) + _rows(target, count)
    return (
        TableInfo(table, kind, count, entry.applied, refused, version)
        for (table, kind, refused, version), count in rows.items()
    )


def _rows(target: Mapping[str, Any], count: int) -> int:
    """Returns how many rows of the user a branch of ``count`` rows stands for."""
    if EMPTY in target:
        return 0
    return int(target[FILES]["rows"]) if FILES in target else count


def _table(target: Mapping[str, object]) -> str:
    return str(next((target[name] for name in ("path", "table", "name") if target.get(name)), ""))
