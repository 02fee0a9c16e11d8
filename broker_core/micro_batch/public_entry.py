"""An entry of the ledger as the connector sees it: branches grouped by kind and target."""

from __future__ import annotations

from collections.abc import Mapping

from broker_core.broker.access.own_id import name_in
from broker_core.broker.state.records import LedgerRecord, canonical
from broker_core.engine import BranchKind, LedgerEntry, ToApply


def public(entry: LedgerRecord) -> LedgerEntry:
    """Returns the entry for the connector: branches grouped by kind and target."""
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
        token=name_in(entry.token),
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
