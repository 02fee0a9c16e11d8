"""The hidden directory of a table: data files that Delta has written for an attempt and not committed.

``<table>/_txmq/<app>/<sequence>.<token>/<number>/`` holds the files of one append, in the layout of the
table. Its name begins with ``_``, so neither VACUUM nor a reader of the table looks into it.

Not here: what the files hold (``staged_files.py``), when they reach the table (``adding.py``).
Invariant: what may still be decided or added is never deleted. An attempt whose sequence is decided can only
be decided if it is the one that was: each (query, batch) is decided once, and gets the next sequence.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from broker_core.engine import LedgerEntry
from connector.table_files import TableFiles

ROOT = "_txmq"


@dataclass(frozen=True)
class Attempt:
    """One attempt of an app at one table. ``txn_app_id`` contains the id of the engine's data and the table:
    other data count their batches anew.
    """

    app_id: str
    txn_app_id: str
    sequence: int
    token: str

    @property
    def directory(self) -> str:
        return f"{_app_directory(self.app_id, self.txn_app_id)}/{self.sequence}.{self.token}"

    def append(self, number: int) -> str:
        """Returns the directory of one append of the attempt."""
        return f"{self.directory}/{number}"


def sweep(
    files: TableFiles, app_id: str, txn_app_id: str, decided: int, unapplied: Callable[[], list[LedgerEntry]]
) -> None:
    """Deletes the attempts of an app that can be neither decided nor added any more.

    ``decided``: a decided sequence. ``unapplied`` is asked after it was, so that no decision is missed.
    """
    directory = _app_directory(app_id, txn_app_id)
    old = [name for name in files.children(directory) if 0 < _sequence(name) <= decided]
    kept = {f"{entry.sequence}.{entry.token}" for entry in unapplied()} if old else set()
    for name in old:
        if name not in kept:
            files.delete(f"{directory}/{name}")


def _sequence(name: str) -> int:
    number = name.partition(".")[0]
    return int(number) if number.isdigit() else 0


def _app_directory(app_id: str, txn_app_id: str) -> str:
    readable = "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in app_id)[:60]
    return f"{ROOT}/{readable}-{hashlib.sha256(txn_app_id.encode()).hexdigest()[:16]}"
