"""What becomes of a decided batch: its rows are applied or skipped, what refused them is noted (C5), and its
entry is mirrored to a Delta ledger (C6). The same in every engine. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any

from broker_core.core.errors import UnknownTransaction
from broker_core.core.records import LedgerRecord
from broker_core.engine import VERSION
from broker_core.micro_batch.ledger import Ledger
from broker_core.micro_batch.sink import RecordSink


def mark_applied(
    ledger: Ledger, sink: RecordSink, app_id: str, sequence: int, versions: Mapping[str, int]
) -> LedgerRecord | None:
    """Returns the entry that was marked; None if it was marked before or does not exist."""
    entry = ledger.at(app_id, sequence)
    if entry is None or entry.applied:
        return None
    branches = _noting(entry, {branch: {VERSION: at} for branch, at in versions.items()})
    ledger.replace(sink, replace(entry, branches=branches, applied=True))
    return entry


def skip(
    ledger: Ledger, sink: RecordSink, app_id: str, sequence: int, branches: set[str], to: str
) -> list[str]:
    """Marks branches as skipped; returns those not skipped before. Raises UnknownTransaction."""
    entry = ledger.at(app_id, sequence)
    targets = {branch: target for _, target, branch, _ in entry.branches} if entry is not None else {}
    if (
        entry is None
        or not branches <= set(targets)
        or (entry.applied and not all("skipped" in targets[name] for name in branches))
    ):
        raise _nothing_waits(app_id, sequence)
    fresh = [branch for branch in sorted(branches) if "skipped" not in targets[branch]]
    if fresh:
        noting = _noting(entry, {branch: {"skipped": to} for branch in fresh})
        applied = all("skipped" in target for _, target, _, _ in noting)
        ledger.replace(sink, replace(entry, branches=noting, applied=applied))
    return fresh


def note(
    ledger: Ledger,
    sink: RecordSink,
    app_id: str,
    sequence: int,
    branches: Set[str],
    name: str,
    at_us: int,
    text: str,
) -> dict[str, int]:
    """Adds ``name`` to the targets of branches that wait; returns those that did not say ``text`` yet,
    with the time when they said something first. Raises UnknownTransaction.
    """
    entry, targets = _waiting_entry(ledger, app_id, sequence, branches)
    fresh = {
        branch: int(targets[branch].get(name, [at_us])[0])
        for branch in sorted(branches)
        if "skipped" not in targets[branch] and targets[branch].get(name, ["", ""])[1] != text
    }
    if fresh:
        branches_now = _noting(entry, {branch: {name: [since, text]} for branch, since in fresh.items()})
        ledger.replace(sink, replace(entry, branches=branches_now))
    return fresh


def note_of(ledger: Ledger, app_id: str, sequence: int, branches: Set[str], name: str) -> str | None:
    """Returns what branches that wait say under ``name``; None if nothing. Raises UnknownTransaction."""
    _, targets = _waiting_entry(ledger, app_id, sequence, branches)
    return next((str(targets[branch][name][1]) for branch in branches if name in targets[branch]), None)


def _waiting_entry(
    ledger: Ledger, app_id: str, sequence: int, branches: Set[str]
) -> tuple[LedgerRecord, dict[str, Mapping[str, Any]]]:
    """Returns an entry that is not applied, and the targets of its branches. Raises UnknownTransaction
    if not all of ``branches`` are among them.
    """
    entry = ledger.at(app_id, sequence)
    targets = {branch: target for _, target, branch, _ in entry.branches} if entry is not None else {}
    if entry is None or entry.applied or not branches <= targets.keys():
        raise _nothing_waits(app_id, sequence)
    return entry, targets


def mark_mirrored(ledger: Ledger, sink: RecordSink, app_id: str, sequence: int) -> None:
    """Marks the entries up to ``sequence``."""
    for entry in ledger.unmirrored(app_id):
        if entry.sequence > sequence:
            break
        ledger.replace(sink, replace(entry, mirrored=True))


def _noting(entry: LedgerRecord, notes: Mapping[str, Mapping[str, object]]) -> list[list[Any]]:
    """Returns the branches of the entry with more in their targets, by branch."""
    return [[kind, {**to, **notes.get(name, {})}, name, rows] for kind, to, name, rows in entry.branches]


def _nothing_waits(app_id: str, sequence: int) -> UnknownTransaction:
    return UnknownTransaction(
        f"batch {sequence} of app {app_id!r} has no such rows to apply: they are applied, or the batch was "
        "never decided. `txmq app unapplied APP` lists what waits"
    )
