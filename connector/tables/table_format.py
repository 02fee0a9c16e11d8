"""The port to a table format: what it does so that operations on its tables take effect once.

Delta fills it (``connector/delta``). Not here: the implementation that is used (``table_formats.py``), the
decision between the two halves (``batch/foreach_batch.py``), the order of the steps (``batch/apply.py``).
Invariant: every implementation passes ``tests/contract/tables/test_table_format.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from broker_core.engine import LedgerEntry, ToApply
from connector.tables.change import Change
from connector.tables.commit_id import CommitId
from connector.tables.table import Table


@dataclass(frozen=True)
class CheckResult:
    """An operation that a table takes, of rows of one schema. ``ready``: makes them the rows to stage, whose
    execution fails for one that the table would refuse. ``by_rows``: why the files of an append cannot be
    written before the decision; "" if they can. ``by_context``: whether it matters in which session the rows
    are written after it. ``compared``: SQL over ``s`` of what a merge compares in the place of a column of
    the rows, by its name in lower case.
    """

    ready: Callable[[DataFrame], DataFrame]
    by_rows: str = ""
    by_context: bool = False
    compared: Mapping[str, str] = field(default_factory=dict)


class Writing(NamedTuple):
    """How an append writes: with options of the format's writer, into a new table with these partitions."""

    options: Mapping[str, str] = {}
    partition_by: Sequence[str] = ()


PLAIN = Writing()
Rows: TypeAlias = Callable[[SparkSession], DataFrame]  # made in a session
CONFLICT_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Attempt:
    """One attempt of an app at a batch, on one table."""

    app_id: str
    txn_app_id: str
    sequence: int
    token: str


class HiddenFiles(Protocol):
    """The files of one append that no reader of the table sees yet."""

    @property
    def rows(self) -> int: ...

    def target(self) -> dict[str, object]:
        """What the target of the branch says about them: ``FILES``."""

    def batch(self) -> pa.RecordBatch:
        """What the engine holds until they are added."""


class ExportedFiles(Protocol):
    """The files of a decided append outside of a session, for an operator who takes their rows."""

    def __len__(self) -> int: ...

    def missing(self) -> list[str]:
        """Returns the paths of the files that are gone, in order."""

    def rows(self) -> Iterator[pa.RecordBatch]:
        """Yields the rows of the others, with the names and types of the append."""


class TableMark(NamedTuple):
    """A table as it was after some commit."""

    table_id: str
    version: int


class Later(NamedTuple):
    """``version``: of the first commit of a later batch that is part of the table, as far as it is known.
    ``restored``: the version of the RESTORE that has taken all of them out of it; 0 if that is not proved.
    ``of_others``: the commits behind ``version`` that are not the app's, which a RESTORE would take out too.
    """

    version: int | None
    restored: int = 0
    of_others: int = 0


class TableFormat(Protocol):
    """A format. Every method may be called again, by any number of drivers."""

    def resolve(self, spark: SparkSession, spelling: str) -> Table:
        """The table that ``spelling`` names now. Raises OptionError if it cannot be one of this format."""

    def read(self, spark: SparkSession, table: Table) -> DataFrame:
        """The rows of an existing table."""

    def writing(self, table: str, options: Mapping[str, object]) -> Writing:
        """What the options of a write to a table say. Raises OptionError."""

    def disturbances(
        self, spark: SparkSession, table: Table, seen: TableMark | None
    ) -> tuple[TableMark | None, list[str]]:
        """A mark of an existing table that was just resolved, and what has happened to it since ``seen`` that
        may have taken rows away, except what txmq does; None and nothing if that cannot be said cheaply.
        """

    def context(self, spark: SparkSession) -> dict[str, object]:
        """What of a session decides what SQL text means, as JSON."""

    def sequences(self, spark: SparkSession, table: Table, prefix: str) -> dict[str, int]:
        """The last sequence that an existing table has of each id that begins with ``prefix``."""

    def only_latest(self, spark: SparkSession) -> bool:
        """Whether ``sequences`` has the latest commits alone."""

    def commits_of(
        self, spark: SparkSession, table: Table, tokens: Collection[str]
    ) -> dict[str, Mapping[str, object]]:
        """What the log of an existing table says of these batches, by token; what it does not know is
        missing.
        """

    def later(self, spark: SparkSession, table: Table, txn_app_id: str, sequence: int) -> Later:
        """What has become of the batches behind ``sequence`` that an existing table has had of an app."""

    def lacks(self, spark: SparkSession, table: Table, version: int, token: str) -> bool:
        """Whether an existing table, as its log proves, is without the commit of a batch that it had in
        ``version``.
        """

    # -- before the decision: nothing that a reader of the table sees ----------------------------------------
    def check_append(
        self, spark: SparkSession, table: Table, schema: StructType, writing: Writing
    ) -> CheckResult:
        """Raises OptionError if the append of such rows would fail after the decision, whatever they are."""

    def settled(
        self, table: Table, columns: Sequence[str], change: Change, context: Mapping[str, object]
    ) -> Change:
        """The change with the names of all columns, if it sets all columns that an existing table has now.
        ``columns``: of the rows.
        """

    def check_change(
        self,
        spark: SparkSession,
        table: Table,
        schema: StructType,
        change: Change,
        context: Mapping[str, object] | None = None,
    ) -> CheckResult:
        """Raises OptionError if a merge, delete or overwrite of such rows would fail, whatever they are, or
        if its text means something only in ``spark``, and not in any session with ``context``.
        """

    def stage(
        self, rows: DataFrame, table: Table, options: Mapping[str, str], attempt: Attempt, number: int
    ) -> HiddenFiles | None:
        """Write the files of append ``number``, durable and invisible; None if the table has changed since it
        was resolved. Raises OptionError if it refuses them, or the error of a task.
        """

    def lost(self, location: str, attempt: Attempt) -> list[str]:
        """The files of an attempt of this process that are gone since they were staged."""

    def drop(self, location: str, attempt: Attempt) -> None:
        """Delete the files of an attempt that is not decided, or applied."""

    def sweep(self, location: str, attempt: Attempt, unapplied: Callable[[], list[LedgerEntry]]) -> None:
        """Delete the files of attempts that ``attempt``, which is decided, has left behind: those that can
        neither be decided nor be among ``unapplied``.
        """

    # -- after it: one commit, or none if the table has that of ``once`` -------------------------------------
    def decided(
        self, spark: SparkSession, context: Mapping[str, object] | None
    ) -> AbstractContextManager[SparkSession]:
        """A session with what ``context`` returned for the one that decided; ``spark`` if that is None."""

    def transient(self, error: BaseException) -> str:
        """Why a write has failed, if that passes without a change of the table (a conflict that was waited
        for, a full disk, storage that is away), as a sentence about the table; else "".
        """

    # Raise CheckpointMismatch if the table has another batch with this number, or cannot know. Return the
    # version of the table that this commit made, if the log tells.
    def has(self, spark: SparkSession, table: Table, once: CommitId) -> bool:
        """Whether the table has the commit of ``once``."""

    def append(
        self, spark: SparkSession, table: Table, rows: Rows, once: CommitId, writing: Writing = PLAIN
    ) -> int | None:
        """Append ``rows``. Creates the table."""

    def add(
        self,
        spark: SparkSession,
        table: Table,
        parts: Sequence[tuple[ToApply, Iterable[pa.RecordBatch]]],
        rows: Rows | None,
        once: CommitId,
        options: Mapping[str, str],
    ) -> int | None:
        """Add the files of ``parts``, each with what the engine held of it, and append ``rows`` too. Rows of
        files that do not fit the table any more are written again. Raises NotApplied if a file is gone.
        """

    def change(
        self,
        spark: SparkSession,
        table: Table,
        change: Change,
        rows: Rows,
        once: CommitId,
        context: Mapping[str, object] | None = None,
    ) -> int | None:
        """Merge or overwrite with the rows that ``rows`` makes in a session, where the text means what it
        means in ``context``. Raises OptionError if another table has the name of ``table``.
        """

    # -- without Spark ---------------------------------------------------------------------------------------
    def exported_files(self, part: ToApply, batches: Iterable[pa.RecordBatch]) -> ExportedFiles:
        """The files of a part. Raises OSError, pyarrow.ArrowInvalid if this process cannot reach them."""
