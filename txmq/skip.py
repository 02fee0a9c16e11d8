"""Lists decided rows that are not applied, and writes rows that a table refuses to files.

Not here: applying, which every start of the query does.

Invariant: rows leave the broker only after their files are durable; the ledger stores the directory.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from broker_core.engine import Engine, LedgerEntry, ToApply
from broker_core.errors import OptionError, UnknownTransaction


def goal(part: ToApply) -> str:
    """The table or function of a part."""
    return str(part.target["table"] if part.kind == "append" else part.target["name"])


def waiting(engine: Engine, app_id: str) -> list[dict[str, Any]]:
    """A row for each batch and table or function, in the order in which they will be applied."""
    return [
        {
            "sequence": entry.sequence,
            "batch_id": entry.batch_id,
            "kind": part.kind,
            "to": goal(part),
            "rows": part.rows,
        }
        for entry in engine.unapplied(app_id)
        for part in entry.to_apply
    ]


def skip(engine: Engine, app_id: str, sequence: int, to: str, only: str | None) -> list[str]:
    """Write the rows to Parquet files in ``to`` and drop them. Raises UnknownTransaction, OptionError."""
    entry = next((entry for entry in engine.unapplied(app_id) if entry.sequence == sequence), None)
    parts = (
        [part for part in entry.to_apply if only in (None, goal(part), part.target.get("location"))]
        if entry is not None
        else []
    )
    if entry is None or not parts:
        what = f"nothing for {only!r}" if only else "nothing"
        raise UnknownTransaction(
            f"batch {sequence} of app {app_id!r} has {what} to apply",
            f"list the waiting batches with `txmq unapplied {app_id}`",
        )
    directory = Path(os.path.abspath(to))
    files: list[str] = []
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for number, part in enumerate(parts):
            files.append(
                str(_write(engine, directory / f"{_safe(app_id)}.{sequence}.{number}.parquet", entry, part))
            )
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise OptionError(
            f"the rows cannot be written to {directory} ({error}), and nothing was skipped",
            "name another directory",
        ) from error
    engine.skip(app_id, sequence, [branch for part in parts for branch in part.branches], str(directory))
    return files


def _write(engine: Engine, path: Path, entry: LedgerEntry, part: ToApply) -> Path:
    """Write one durable file; the metadata of its schema describes the batch."""
    about = {
        "app_id": entry.app_id,
        "sequence": entry.sequence,
        "batch_id": entry.batch_id,
        "token": entry.token,
        "kind": part.kind,
    }
    about |= {"to": goal(part), "rows": part.rows}
    with path.open("xb") as file:
        writer: pq.ParquetWriter | None = None
        for batch in engine.read_branches(part.branches):
            if writer is None:
                metadata = {**(batch.schema.metadata or {}), b"txmq": json.dumps(about).encode()}
                writer = pq.ParquetWriter(file, batch.schema.with_metadata(metadata))
            writer.write_batch(batch)
        if writer is not None:
            writer.close()
        file.flush()
        os.fsync(file.fileno())
    return path


def _safe(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in name)
