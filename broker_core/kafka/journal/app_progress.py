"""What the sink takes from the journal of an app: reads, claims, acks, and which decided rows are applied and
mirrored.

``journal.py`` fills it from partition 1 of the app's topic; the sink knows nothing else of the source.
Invariant: an answer holds what was in the journal when ``refresh`` was called last.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from typing import NamedTuple, Protocol

from broker_core.engine import LedgerEntry


class Lag(NamedTuple):
    """About how many messages an app has not consumed, and when the oldest was written, in milliseconds since
    the epoch; None: there is none, or this user may not read it.
    """

    messages: int
    since_ms: int | None


class AppProgress(Protocol):
    def refresh(self) -> None:
        """Replays the journal to its end of now, which ListOffsets says."""

    # -- claims and reads ------------------------------------------------------------------------------------
    def ranges_read(self, query_id: str, batch_id: int) -> dict[str, list[int]]:
        """Returns by log what this (query, batch) has read. Raises LineageConflict where it is no claim of
        the app, DataLoss where a topic was deleted and made again since the claim.
        """

    def settled(self, log: str, start: int, end: int) -> bool:
        """Returns whether the source has acknowledged everything between two offsets."""

    def position(self) -> int:
        """Returns the position of the newest claim; 0: none."""

    def queues(self) -> tuple[str, ...]:
        """Returns the queues that the app has claimed, in order."""

    def lag(self, consumed: Mapping[str, int]) -> Lag:
        """Returns what of its queues is not consumed. ``consumed``: by log, as the ledger says."""

    def undecided(self, queue: str, consumed: Mapping[str, int]) -> int:
        """Returns how many offsets of a queue are claimed, and neither decided nor acknowledged."""

    def note_release(self, queue: str, consumed: Mapping[str, int], *, by: str, interrupted: bool) -> None:
        """Records that a queue is released now, and where the app is in it."""

    def release(self, queue: str) -> None:
        """Drops the claims on a queue. Raises PreconditionFailed where the app has none."""

    def resume(self, entries: Sequence[LedgerEntry]) -> None:
        """Records that the app has consumed its logs up to the ends of entries of another ledger. Raises
        QueueNotFound, LineageConflict.
        """

    # -- decided rows ----------------------------------------------------------------------------------------
    def applied(self) -> Set[int]:
        """Returns sequences whose rows are applied."""

    def mirrored(self) -> int:
        """Returns the sequence up to which the Delta ledger has every entry."""

    def skipped(self) -> Mapping[int, Mapping[str, str]]:
        """Returns by sequence: branch -> where an operator has written its rows."""

    def versions(self) -> Mapping[int, Mapping[str, int]]:
        """Returns by sequence: branch -> version of the table that has its rows."""

    def mark_applied(self, sequence: int, versions: Mapping[str, int]) -> None: ...

    def mark_mirrored(self, sequence: int) -> None: ...

    def skip(self, sequence: int, branches: Collection[str], to: str) -> None: ...

    def notes(self) -> Mapping[int, Sequence[tuple[str, str, int, str]]]:
        """Returns by sequence, oldest first: (branch, name, time, text), for the target of the branch."""

    def note(self, sequence: int, branches: Mapping[str, int], name: str, text: str) -> None:
        """Replaces what these branches say under ``name``; their values are times."""

    def forget(self, sequences: Collection[int]) -> None:
        """Drops what is known of entries that the ledger no longer has. Need not be done at once."""
