"""A decided batch as an operator sees it: its entry in the ledger, and what it does to each table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from broker_core.admin import SKIPPED, LedgerInfo, TableInfo
from broker_core.core.records import LedgerRecord
from broker_core.engine import EMPTY, FILES, REFUSED, VERSION


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
        note = target.get(REFUSED)
        refused = str(note[1]) if isinstance(note, list) and len(note) > 1 and not entry.applied else ""
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
