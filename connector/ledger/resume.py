"""Continues an app after its Delta ledger, where the engine has lost its own, or is another one (C7).

1. The newest rows of each log are read, and proved: the log of the table has the commit of each of them,
   which says the same, and no later commit of that engine.
2. Each log of the engine is the one that the rows count, or somebody has said so (``resume_from``), and has
   the offsets.
3. The ledger is taken over: one commit, which a table takes once for an engine and a batch.
4. The engine takes in the entries.

Not here: what the engine does (``micro_batch/resume.py``).
Invariant: nothing is consumed before all of it is done. Each step may be repeated, also by several drivers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from broker_core.core.errors import CheckpointMismatch, OptionError
from broker_core.core.failpoint import here
from broker_core.engine import Engine, LedgerEntry, OnNewCheckpoint
from connector.ledger.delta_ledger import LEDGER_COLUMNS, LEDGER_NAMES, ledger_id
from connector.tables.checks import last_stored
from connector.tables.commit_id import CommitId, offsets_of
from connector.tables.table import Table
from connector.tables.table_format import TableFormat

TAKEN = "txmq-resumed:"  # how the id of a commit begins that takes a ledger over from an engine
_OTHERWISE = "to begin anew, give another app_id, or another ledger"


@dataclass(frozen=True)
class Newest:
    """What a ledger says of an app. ``entries``: the last one of each log, in order; the last one is the last
    batch. ``log_ids``: of the logs that they name.
    """

    engine: str
    entries: Sequence[LedgerEntry]
    log_ids: Mapping[str, str] = field(default_factory=dict)

    @property
    def last(self) -> LedgerEntry:
        return self.entries[-1]

    @property
    def ends(self) -> dict[str, int]:
        return {log: end for entry in self.entries for log, (_, end) in sorted(entry.ranges.items())}


def _json(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def taken_id(app_id: str, engine: str) -> str:
    """The id of the commit that takes the ledger of an app over from an engine."""
    return f"{TAKEN}{app_id}@{engine}"


@dataclass(frozen=True)
class Resume:
    """Of one app. ``resume_from``: the engine whose offsets, somebody says, are those of this one."""

    tables: TableFormat
    ledger: str
    engine: Engine
    app_id: str
    on_new_checkpoint: OnNewCheckpoint
    resume_from: str | None = None

    def ready(self, spark: SparkSession) -> dict[str, int]:
        """Continues after the ledger if it must, and may. Returns from which engines the app was taken over,
        and behind which batch.

        Raises CheckpointMismatch where the engine has no ledger of the app and the table has, unless
        ``on_new_checkpoint`` is resume; where another engine has taken the app over.
        """
        table = self.tables.resolve(spark, self.ledger)
        if not table.exists:
            return {}
        mine = self.engine.identity(self.app_id)
        others = self._take_overs(spark, table)
        last = self.engine.last_entry(self.app_id)
        if last is not None and self.tables.only_latest(spark):
            rows = rows_of(self.tables, spark, table, self.app_id).where(~F.col("engine").isin(mine, *others))
            if rows.where(F.col("sequence") > last.sequence).head(1):
                others = {mine: last.sequence, **others}
        if (behind := others.get(mine)) is not None:
            raise CheckpointMismatch(
                f"app {self.app_id!r} was taken over by another engine after batch {behind}, as ledger "
                f"{self.ledger!r} says: a batch of it here would be done twice",
                f"stop this query; {_OTHERWISE}",
            )
        if last is None and (newest := self._newest(spark, table)) is not None:
            self._go_on(spark, table, mine, newest)
            others = self._take_overs(spark, table)
        return others

    def _take_overs(self, spark: SparkSession, table: Table) -> dict[str, int]:
        prefix = taken_id(self.app_id, "")
        found = self.tables.sequences(spark, table, prefix)
        return {name.removeprefix(prefix): behind for name, behind in found.items()}

    def _go_on(self, spark: SparkSession, table: Table, mine: str, newest: Newest) -> None:
        last, text = newest.last, self._text(newest)
        if newest.engine == mine:
            raise CheckpointMismatch(
                f"{text}, and this engine, which wrote that, has decided nothing: an older copy of its data "
                "was restored (nothing was consumed)",
                f"restore the newest data; {_OTHERWISE}",
            )
        if self.on_new_checkpoint != "resume":
            raise CheckpointMismatch(
                f"{text}, and this engine has no ledger of the app: that was lost, or it is another engine. "
                "Nothing was consumed",
                "to continue after these batches, start with a new checkpoint and onNewCheckpoint=resume, "
                f"in source and function; {_OTHERWISE}",
            )
        # 1.
        self._prove(spark, table, newest)
        here("resume.proved")
        # 2.
        self._require_same_logs(newest)
        # 3.
        batch = {
            **offsets_of(last),
            "token": f"taken over by {mine}",
            "engine": mine,
            "txn_app_id": taken_id(self.app_id, newest.engine),
        }
        once = CommitId(taken_id(self.app_id, newest.engine), last.sequence, batch, last.committed_at_us)
        try:
            self.tables.append(
                spark, table, lambda session: session.createDataFrame([], LEDGER_COLUMNS), once
            )
        except CheckpointMismatch:
            raise CheckpointMismatch(
                f"{text}, and another engine has taken the app over since: it may have done later batches",
                "continue there; if that engine is lost too, give another app_id, and startingOffsets where "
                f"the app was: {_json(newest.ends)}",
            ) from None
        here("resume.taken_over")
        # 4.
        self.engine.resume(self.app_id, list(newest.entries))
        here("resume.resumed")

    def _text(self, newest: Newest) -> str:
        return (
            f"ledger {self.ledger!r} says that app {self.app_id!r} has decided {newest.last.sequence} "
            f"batches on engine {newest.engine}, up to {_json(newest.ends)}"
        )

    def _newest(self, spark: SparkSession, table: Table) -> Newest | None:
        """What the rows say; None if there are none, and have never been. Raises CheckpointMismatch if there
        have been, or the rows contradict each other.
        """
        rows = newest_rows(self.tables, spark, table, self.app_id)
        if not rows:
            if found := self.tables.sequences(spark, table, ledger_id(self.app_id, "")):
                raise self._doubtful(f"its rows of {max(found.values())} batches are gone")
            return None
        if any(row["sequence"] is None or not row["engine"] for row in rows):
            raise self._doubtful("others wrote rows of it, without the number of a batch or its engine")
        entries: dict[int, LedgerEntry] = {}
        for row in sorted(rows, key=lambda row: int(row["sequence"])):
            sequence = int(row["sequence"])
            ranges = {} if row["log"] is None else {row["log"]: (row["start_offset"], row["end_offset"])}
            entry = entries.get(sequence)
            if entry is not None and entry.token != row["token"]:
                raise self._doubtful(f"it has two batches with the number {sequence}")
            entries[sequence] = LedgerEntry(
                app_id=self.app_id,
                sequence=sequence,
                query_id=row["query_id"],
                batch_id=int(row["batch_id"]),
                token=row["token"],
                ranges={**(entry.ranges if entry else {}), **ranges},
                messages=(entry.messages if entry else 0) + int(row["messages"] or 0),
                published=int(row["published"] or 0),
                committed_at_us=int(row["committed_at_us"]),
            )
        last = max(entries)
        (engine,) = {row["engine"] for row in rows if row["sequence"] == last}
        ids = {row["log"]: row["log_id"] for row in rows if row["log"] is not None}
        return Newest(engine, [entries[number] for number in sorted(entries)], ids)

    def _prove(self, spark: SparkSession, table: Table, newest: Newest) -> None:
        """Raises CheckpointMismatch unless the log of the table says the same as the rows."""
        name, last = ledger_id(self.app_id, newest.engine), newest.last
        _, written = last_stored(self.tables, spark, table, name)
        if written > last.sequence:
            raise self._doubtful(
                f"its newest row is of batch {last.sequence}, and it had one of batch {written}: rows were "
                "deleted, or an older version was restored",
                "restore the newest version of the table",
            )
        commits = self.tables.commits_of(spark, table, [entry.token for entry in newest.entries])
        for entry in newest.entries:
            commit, row = commits.get(entry.token), offsets_of(entry)
            if commit is None or written < last.sequence:
                raise self._doubtful(
                    f"its log does not know who wrote the rows of batch {entry.sequence}: the log was "
                    "cleaned since, the table was copied, or others wrote them"
                )
            offsets = commit.get("offsets")
            ends = offsets if isinstance(offsets, dict) else {}
            expected = offsets if entry is last else {log: ends.get(log) for log in entry.ranges}
            if {**row, "offsets": expected} != row or any(commit.get(each) != row[each] for each in _SAID):
                raise self._doubtful(
                    f"its rows of batch {entry.sequence} say {_json(row['offsets'])}, and were "
                    f"written with {_json(offsets)}: others have changed them",
                    "restore the version before that",
                )

    def _require_same_logs(self, newest: Newest) -> None:
        """Raises CheckpointMismatch, QueueNotFound unless the offsets of the rows count the messages of this
        engine.
        """
        ids = self.engine.log_ids(sorted(newest.ends))
        if missing := sorted(newest.ends.keys() - ids.keys()):
            raise CheckpointMismatch(
                f"{self._text(newest)}, and there is no {', '.join(missing)} here",
                "declare the queue, and send its messages, under the offsets that they had; or delete the "
                "rows of a log that the app does not read any more from the ledger",
            )
        others = [log for log in newest.ends if ids.get(log) != newest.log_ids.get(log)]
        if others and self.resume_from != newest.engine:
            raise CheckpointMismatch(
                f"{self._text(newest)}. There, {', '.join(others)} had other messages than here, or the same "
                "under other offsets, as far as txmq can know",
                "if each message has the offset here that it had there (a mirrored topic, a queue whose "
                f"messages were all sent again in their order), give resume_from={newest.engine!r} too; "
                f"{_OTHERWISE}",
            )
        for log, found in self.engine.available(sorted(newest.ends)).items():
            if found.end < newest.ends[log]:
                raise CheckpointMismatch(
                    f"{self._text(newest)}, and {log!r} ends here at {found.end}",
                    f"wait until its messages are there, under the offsets that they had; {_OTHERWISE}",
                )

    def _doubtful(self, why: str, instead: str = "") -> CheckpointMismatch:
        return CheckpointMismatch(
            f"app {self.app_id!r} cannot continue after ledger {self.ledger!r}: {why}. Nothing was consumed",
            f"{instead + ', or ' if instead else ''}give another app_id, another ledger, and startingOffsets "
            "where the app was",
        )


_SAID = ("app_id", "sequence", "token", "query_id", "batch_id")


def rows_of(tables: TableFormat, spark: SparkSession, table: Table, app_id: str) -> DataFrame:
    """Raises OptionError."""
    frame = tables.read(spark, table)
    if not set(LEDGER_NAMES) <= set(frame.columns):
        raise OptionError(f"table {table.name!r} is not a ledger of txmq", "name another one with ledger=")
    return frame.where(F.col("app_id") == app_id)


def newest_rows(
    tables: TableFormat, spark: SparkSession, table: Table, app_id: str
) -> list[Mapping[str, Any]]:
    """The rows of the newest batch of each log of an app, and of batches whose number another one has."""
    rows = rows_of(tables, spark, table, app_id)
    rows = rows.withColumn("committed_at_us", F.unix_micros("committed_at")).drop("committed_at")
    whole = F.struct(*rows.columns)
    newest = rows.groupBy("log").agg(F.max_by(whole, F.coalesce("sequence", F.lit(0))).alias("row"))
    doubled = (
        rows.groupBy("sequence")
        .agg(F.min_by(whole, "token").alias("first"), F.max_by(whole, "token").alias("last"))
        .where("first.token <> last.token")
    )
    both = doubled.select(F.explode(F.array("first", "last")).alias("row"))
    found = newest.select("row").unionByName(both).select("row.*").distinct().collect()
    return [row.asDict() for row in found]
