"""The rows that a table refuses, in a durable Parquet file (``txmq app skip --refused --to DIR``).

Not here: which rows these are (``row_by_row.py``).
Invariant: the file decides. It is there before the commit of the table, also without rows, and is never
written again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame

from broker_core.core.errors import OptionError
from broker_core.core.files import readable, sync
from broker_core.engine import LedgerEntry, ToApply
from connector.tables.commit_id import CommitId

ROW, REASON = "__txmq_row", "__txmq_reason"  # columns of the file, beside those of the rows


class RefusedFile:
    """Of one operation. Its methods raise OptionError if the directory cannot be used."""

    def __init__(self, directory: str, entry: LedgerEntry, part: ToApply, once: CommitId) -> None:
        # another one for each step of each batch
        step = hashlib.sha256(once.txn_app_id.encode()).hexdigest()[:12]
        name = f"{readable(once.app_id)[:60]}.{once.sequence}.{step}.refused.parquet"
        self._path = Path(directory) / name
        self._token = entry.token
        about = {"app_id": entry.app_id, "sequence": entry.sequence, "token": entry.token}
        self._about = {**about, "kind": part.kind, "to": part.target["table"]}

    def numbers(self) -> set[int] | None:
        """The numbers of the rows in the file; None if there is no file."""
        with self._usable():
            return self._read() if self._path.exists() else None

    def keep(self, rows: pa.Table, refused: dict[int, str], _frame: DataFrame | None) -> set[int]:
        """Writes these of the rows, unless another driver was first; the numbers of those in the file."""
        with self._usable():
            self._write(rows, refused)
            return self._read()

    @contextlib.contextmanager
    def _usable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OptionError(
                f"the rows that table {self._about['to']!r} refuses cannot be written to {self._path} "
                f"({error})",
                "name a directory that the driver can write to: `txmq app skip APP SEQUENCE --refused --to "
                "DIR`",
            ) from error

    def _read(self) -> set[int]:
        found = pq.read_table(self._path)
        about = json.loads((found.schema.metadata or {}).get(b"txmq", b"{}"))
        if about.get("token") != self._token:
            raise OptionError(f"{self._path} holds rows of another batch", "move it away")
        return set(found.column(ROW).to_pylist())

    def _write(self, all_rows: pa.Table, refused: dict[int, str]) -> None:
        """One durable file, or none. A driver that comes second leaves the one that is there."""
        path = self._path
        numbers = pa.array(list(refused), pa.int64())  # of none, if the table takes all now
        rows = all_rows.take(numbers).append_column(ROW, numbers)
        rows = rows.append_column(REASON, pa.array(list(refused.values()), pa.string()))
        about = {**self._about, "rows": rows.num_rows, "of": all_rows.num_rows}
        metadata = rows.schema.metadata or {}
        rows = rows.replace_schema_metadata({**metadata, b"txmq": json.dumps(about).encode()})
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
        sync(path.parent)
