"""``startingOffsets`` as a batch of a Delta ledger: where an app was before it decided that batch.

Not here: reading the table (``ledger_file.py``), continuing as the same app (``ledger/resume.py``).
Invariant: what it answers is where every batch below has been, and none from that batch on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from broker_core.core.errors import OptionError
from broker_core.engine import EARLIEST, Engine, Origin

COLUMNS = ("app_id", "token", "log", "start_offset", "end_offset", "sequence", "log_id")


@dataclass(frozen=True)
class LedgerStart:
    """``batch``: the number of the first batch that is processed again; None: what follows the last one.
    ``app_id``: whose; None: that of the only app in the table.
    """

    ledger: str
    batch: int | None = None
    app_id: str | None = None

    def origin(self, engine: Engine, logs: Mapping[str, Sequence[str]]) -> Origin:
        """``logs``: of each queue of the source. Raises OptionError."""
        from connector.ledger_file import rows  # it reads Parquet, which a source seldom does

        found = self._found(rows(self.ledger, COLUMNS))
        own = {log for of_queue in logs.values() for log in of_queue}
        offsets = {log: at for log, at in _position(found, self.batch).items() if log in own}
        for queue in logs:
            if not offsets.keys() & set(logs[queue]):
                raise self._refused(f"has no batch of queue {queue!r}")
        ids = engine.log_ids(sorted(offsets))
        strange = {row["log"] for row in found if row["log"] in own and row["log_id"] != ids.get(row["log"])}
        if strange:
            other = ", ".join(sorted(strange))
            raise self._refused(f"counts other messages of {other} than this engine has")
        begins = engine.available(sorted(offsets))
        gone = {log: begins[log].start for log, at in offsets.items() if at < begins[log].start}
        if gone:
            raise self._refused(
                f"begins before what is kept of {', '.join(sorted(gone))}, which begins at "
                f"{', '.join(str(at) for _, at in sorted(gone.items()))}",
                "begin at a later batch",
            )
        return Origin(offsets={log: offsets.get(log, EARLIEST) for log in own})

    def _refused(self, why: str, advice: str = "give startingOffsets by queue and offset") -> OptionError:
        batch = "the end" if self.batch is None else f"batch {self.batch}"
        return OptionError(f"startingOffsets at {batch} of ledger {self.ledger!r} {why}", advice)

    def _found(self, rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """The rows of the app. Raises OptionError."""
        every = list(rows)
        apps = sorted({str(row["app_id"]) for row in every})
        app_id = self.app_id if self.app_id is not None else apps[0] if len(apps) == 1 else None
        if app_id is None or app_id not in apps:
            raise self._refused(
                f"cannot be found: the table has batches of {', '.join(apps) or 'no app'}",
                'name one of them: {"ledger": ..., "batch": ..., "app": ...}',
            )
        found = [row for row in every if row["app_id"] == app_id]
        numbers = {row["sequence"]: row["token"] for row in found}
        if None in numbers or any(numbers[row["sequence"]] != row["token"] for row in found):
            raise self._refused(
                f"cannot be found: batches of app {app_id!r} are not numbered, or two have one number"
            )
        if self.batch is not None and self.batch not in numbers and self.batch != max(numbers) + 1:
            raise self._refused(
                f"cannot be found: the table has batches {min(numbers)} to {max(numbers)} of app {app_id!r}",
                "give one of them, or none, to begin after the last one",
            )
        return found


def _position(found: Iterable[Mapping[str, Any]], batch: int | None) -> dict[str, int]:
    """Where the app was in each log before it decided ``batch``."""
    position: dict[str, int] = {}
    for row in sorted(found, key=lambda row: int(row["sequence"])):
        if row["log"] is None:
            continue
        if batch is None or int(row["sequence"]) < batch:
            position[row["log"]] = int(row["end_offset"])
        else:
            position.setdefault(row["log"], int(row["start_offset"]))
    return position
