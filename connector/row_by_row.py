"""Splits the rows of a decided operation into those that the table takes, and those that it refuses (C5).

An operator asks for it where a table has changed since the decision (`txmq skip --rows`). The steps, each of
which may be repeated: 1. the rows, in the order in which they are held; 2. which of them the table refuses,
and why; 3. these in a durable Parquet file; 4. the others, in one commit of the table, as of the whole
operation.

Not here: the commit (``apply.py``), and what a table refuses (``table_format.py``).
Invariant: the file decides. It is there before the commit, also without rows, and where it is there nobody
asks the table again. So each row is once in the table or in the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from broker_core import failpoint
from broker_core.engine import LedgerEntry, ToApply
from broker_core.errors import NotApplied, OptionError, cause
from connector.once import Once
from connector.trace import INTERRUPTIONS, told

ROW, REASON = "__txmq_row", "__txmq_reason"  # columns of the file, beside those of the rows
MOST_REFUSED = 1000  # each takes some Spark jobs to find

Ready = Callable[[DataFrame], DataFrame]


class RowByRow:
    """The rows of one operation. ``ready``: fails for a row that the table refuses."""

    def __init__(
        self, batches: Iterable[pa.RecordBatch], schema: StructType, ready: Ready, directory: str
    ) -> None:
        held = list(batches)
        self._rows = pa.Table.from_batches(held) if held else None
        self._schema = schema
        self._ready = ready
        self._directory = Path(directory)

    def taken(self, spark: SparkSession, entry: LedgerEntry, part: ToApply, once: Once) -> pa.Table | None:
        """The rows that the table takes; None for none at all. The others are in the file. Raises
        OptionError, NotApplied.
        """
        if self._rows is None:
            return None
        path = self._directory / _name(once)
        about = {"app_id": entry.app_id, "sequence": entry.sequence, "token": entry.token, "kind": part.kind}
        try:
            if not path.exists():
                refused = dict(self._refused(spark, self._rows, 0))
                failpoint.here("rows.evaluated")
                self._write(path, refused, {**about, "to": part.target["table"]})
                failpoint.here("rows.written")
            gone = _read(path, entry.token)
        except OSError as error:
            raise OptionError(
                f"the rows that table {part.target['table']!r} refuses cannot be written to {path} ({error})",
                "name a directory that the driver can write to: `txmq skip APP SEQUENCE --rows --to DIR`",
            ) from error
        kept = [number for number in range(self._rows.num_rows) if number not in gone]
        return self._rows.take(kept) if kept else None

    def frame(self, spark: SparkSession, rows: pa.Table) -> DataFrame:
        return spark.createDataFrame(rows, self._schema)

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
                        "repair the table, or skip the whole operation: `txmq skip APP SEQUENCE --to DIR`",
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
            interrupted = any(name in str(error) for name in INTERRUPTIONS)
            if found is not None or interrupted or not isinstance(error, PySparkException):
                raise
            return told(error)
        return ""

    def _write(self, path: Path, refused: dict[int, str], about: dict[str, object]) -> None:
        """One durable file, or none. A driver that comes second leaves the one that is there."""
        assert self._rows is not None
        rows = self._rows.take(list(refused))
        rows = rows.append_column(ROW, pa.array(list(refused), pa.int64()))
        rows = rows.append_column(REASON, pa.array(list(refused.values()), pa.string()))
        about = {**about, "rows": rows.num_rows, "of": self._rows.num_rows}
        known = rows.schema.metadata or {}
        rows = rows.replace_schema_metadata({**known, b"txmq": json.dumps(about).encode()})
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        try:
            with new.open("xb") as file:
                pq.write_table(rows, file)
                file.flush()
                os.fsync(file.fileno())
            with contextlib.suppress(FileExistsError):
                os.link(new, path)
        finally:
            new.unlink(missing_ok=True)
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _read(path: Path, token: str) -> set[int]:
    """The numbers of the refused rows. Raises OptionError for the file of another batch."""
    found = pq.read_table(path)
    about = json.loads((found.schema.metadata or {}).get(b"txmq", b"{}"))
    if about.get("token") != token:
        raise OptionError(f"{path} holds rows of another batch", "move it away")
    return set(found.column(ROW).to_pylist())


def _name(once: Once) -> str:
    """The name of the file: another one for each step of each batch."""
    readable = "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in once.app_id)[:60]
    step = hashlib.sha256(once.txn_app_id.encode()).hexdigest()[:12]
    return f"{readable}.{once.sequence}.{step}.refused.parquet"
