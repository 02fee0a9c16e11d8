"""The hidden directory of a table: data files that Delta has written for an attempt and not committed.

``<table>/_txmq/<app>/<sequence>.<token>/<number>/`` holds the files of one append, in the layout of the
table. Its name begins with ``_``, so neither VACUUM nor a reader of the table looks into it. Beside them, the
file ``accepted`` is of the rehearsals (``rehearsal.py``).

Not here: what the files hold (``staged_files.py``), when they reach the table (``after/add_files.py``).
Invariant: what may still be decided or added is never deleted. An attempt whose sequence is decided can only
be decided if it is the one that was: each (query, batch) is decided once, and gets the next sequence.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from broker_core.core.files import readable
from broker_core.engine import LedgerEntry
from connector.delta.table_files import TableFiles
from connector.tables.table_format import Attempt

ROOT = "_txmq"


def directory(attempt: Attempt) -> str:
    """Returns the directory of an attempt. ``txn_app_id`` contains the id of the engine's data and the table:
    other data count their batches anew.
    """
    return f"{_app_directory(attempt)}/{attempt.sequence}.{attempt.token}"


def sweep(location: str, attempt: Attempt, unapplied: Callable[[], list[LedgerEntry]]) -> None:
    """Deletes the attempts of the same app that can be neither decided nor added any more.

    ``attempt`` is decided. ``unapplied`` is asked after that, so that no decision is missed.
    """
    files, ours = TableFiles.at(location), _app_directory(attempt)
    numbers = {name: name.partition(".")[0] for name in files.children(ours)}
    old = [name for name, of in numbers.items() if of.isdigit() and 0 < int(of) <= attempt.sequence]
    kept = {f"{entry.sequence}.{entry.token}" for entry in unapplied()} if old else set()
    for name in old:
        if name not in kept:
            files.delete(f"{ours}/{name}")


def _app_directory(attempt: Attempt) -> str:
    name = hashlib.sha256(attempt.txn_app_id.encode()).hexdigest()[:16]
    return f"{ROOT}/{readable(attempt.app_id)[:60]}-{name}"
