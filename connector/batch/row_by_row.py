"""Splits the rows of a decided operation into those that the table takes, and those that it refuses (C5).

An operator asks for it where a table has changed since the decision (``txmq app skip --refused``). The steps,
each of which may be repeated: 1. the rows, in the order in which they are held; 2. which of them the table
refuses, and why; 3. these, kept once (``refused_file.py``, ``refused_letters.py``); 4. the others, in one
commit of the table, as of the whole operation.

Not here: the commit (``apply.py``), and what a table refuses (``tables/table_format.py``).
Invariant: what is kept decides. It is there before the commit, and where it is there nobody asks the table
again. So each row is once in the table or among those that are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from broker_core.core import failpoint
from broker_core.core.errors import NotApplied, OptionError, cause
from connector.errors import error_summary, is_interruption
from connector.stream.staging import no_rows

MOST_REFUSED = 1000  # each takes some Spark jobs to find

Ready = Callable[[DataFrame], DataFrame]


class RefusedRows(Protocol):
    """A place that stores the refused rows of one operation, durably and once."""

    def numbers(self) -> set[int] | None:
        """The numbers of the stored rows; None if nothing is stored yet."""

    def keep(self, rows: pa.Table, refused: dict[int, str], frame: DataFrame | None) -> set[int]:
        """Stores the refused ones of ``rows``, by number with the reason, unless they are stored already.
        ``frame``: these, in order; None for none. Returns the numbers of the stored rows.
        """


class RowByRow:
    """The rows of one operation. ``ready``: fails for a row that the table refuses."""

    def __init__(self, batches: Iterable[pa.RecordBatch], schema: StructType, ready: Ready) -> None:
        rows = list(batches)
        self._rows = pa.Table.from_batches(rows) if rows else None
        self._schema = schema
        self._ready = ready

    def accepted_rows(self, spark: SparkSession, refusals: RefusedRows) -> pa.Table | None:
        """The rows that the table takes; None for none at all. The others are kept. Raises OptionError,
        NotApplied.
        """
        rows = self._rows
        if rows is None:
            return None
        gone = refusals.numbers()
        if gone is None:
            refused = dict(self._refused(spark, rows, 0))
            failpoint.here("rows.evaluated")
            frame = self.frame(spark, rows.take(list(refused))) if refused else None
            gone = refusals.keep(rows, refused, frame)
            failpoint.here("rows.written")
        left = [number for number in range(rows.num_rows) if number not in gone]
        return rows.take(left) if left else None

    def frame(self, spark: SparkSession, rows: pa.Table | None) -> DataFrame:
        return no_rows(spark, self._schema) if rows is None else spark.createDataFrame(rows, self._schema)

    def _refused(self, spark: SparkSession, rows: pa.Table, first: int) -> Iterator[tuple[int, str]]:
        """The refused ones of ``rows``, by their numbers, which begin at ``first``: halves of halves."""
        reason = self._why(spark, rows)
        if not reason:
            return
        if rows.num_rows == 1:
            yield first, reason
            return
        half, found = rows.num_rows // 2, 0
        for start, piece in ((first, rows.slice(0, half)), (first + half, rows.slice(half))):
            for each in self._refused(spark, piece, start):
                found += 1
                if found > MOST_REFUSED:
                    raise NotApplied(
                        f"the table refuses more than {MOST_REFUSED} rows",
                        "repair the table, or skip all of it: `txmq app skip APP SEQUENCE --to DIR`",
                    )
                yield each

    def _why(self, spark: SparkSession, rows: pa.Table) -> str:
        """Why the table does not take all of these; "" if it does. Raises what is not about the rows."""
        try:
            self._ready(self.frame(spark, rows)).write.format("noop").mode("overwrite").save()
        except Exception as error:
            found = cause(error)
            if isinstance(found, OptionError):
                return found.summary
            if found is not None or is_interruption(error) or not isinstance(error, PySparkException):
                raise
            return error_summary(error)
        return ""
