"""Lists decided rows that are not applied, and writes rows that a table refuses to files.

Not here: applying, which every start of the query does.

Invariant: rows leave the app only after their files are durable; the ledger stores the directory. Rows
whose data files are gone are given up only if the operator says so.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from broker_core.core.errors import NotApplied, OptionError, UnknownTransaction
from broker_core.core.files import readable, sync
from broker_core.engine import REFUSED, ROWS_TO, TO_QUEUE, Engine, LedgerEntry, ToApply
from connector.table_formats import table_format
from connector.tables.target import CHANGE, LOST, is_change, is_files, rows_in


def goal(part: ToApply) -> str:
    """The table or function of a part."""
    return str(part.target["name"] if part.kind == "after_commit" else part.target["table"])


def waiting(engine: Engine, app_id: str, examples: int = 0) -> list[dict[str, object]]:
    """A row for each batch and table or function, in the order in which they will be applied, with the last
    error and the time of the first. ``examples``: how many rows of each to show.
    """
    return [
        {
            "sequence": entry.sequence,
            "batch_id": entry.batch_id,
            "kind": part.kind,
            "to": goal(part),
            "rows": rows_in(part),
            "held": "files" if is_files(part) else "rows",
            "from": {log: f"{start}-{end - 1}" for log, (start, end) in entry.ranges.items() if start < end},
            **_fields(part),
            **({"examples": _examples(engine, part, examples)} if examples else {}),
        }
        for entry in engine.unapplied(app_id)
        for part in entry.to_apply
    ]


def _fields(part: ToApply) -> dict[str, str]:
    at_us, error = part.target.get(REFUSED, (0, ""))
    since = datetime.fromtimestamp(at_us / 1e6, timezone.utc).isoformat(timespec="seconds") if at_us else ""
    return {"since": since, "error": error, "rows_to": part.target.get(ROWS_TO, (0, ""))[1]}


def _examples(engine: Engine, part: ToApply, count: int) -> list[dict[str, object]]:
    """The first rows of a part that are there."""
    found: list[dict[str, object]] = []
    for batch in _rows(engine, part, lost=True):
        found += batch.slice(0, count - len(found)).to_pylist()
        if len(found) == count:
            break
    return found


def skip_rows(
    engine: Engine, app_id: str, sequence: int, to: str | None, queue: str | None, only: str | None
) -> str:
    """Let the next start of the query write the rows that a table refuses to a directory, or publish them to
    a queue, and apply the others. Returns the place. Raises UnknownTransaction, OptionError, QueueNotFound.
    """
    _, parts = _waiting_parts(engine, app_id, sequence, only)
    branches = [branch for part in parts if part.kind != "after_commit" for branch in part.branches]
    if not branches:
        raise OptionError("--refused is for tables, but only functions wait", "leave --refused out")
    if queue is not None:
        engine.logs([queue])
    where = os.path.abspath(to) if to is not None else f"{TO_QUEUE}{queue}"
    engine.note(app_id, sequence, branches, ROWS_TO, where)
    return where


def _waiting_parts(
    engine: Engine, app_id: str, sequence: int, only: str | None
) -> tuple[LedgerEntry, list[ToApply]]:
    """Raises UnknownTransaction."""
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
            f"list the waiting batches with `txmq app unapplied {app_id}`",
        )
    return entry, parts


def skip(
    engine: Engine, app_id: str, sequence: int, to: str, only: str | None, *, lost: bool = False
) -> list[str]:
    """Write the rows to Parquet files in ``to`` and drop them; with ``lost`` also those whose data files are
    gone. Raises UnknownTransaction, OptionError, NotApplied (gone).
    """
    entry, parts = _waiting_parts(engine, app_id, sequence, only)
    directory = Path(os.path.abspath(to))
    files: list[str] = []
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for number, part in enumerate(parts):
            path = directory / f"{readable(app_id)}.{sequence}.{number}.parquet"
            rows = _rows(engine, part, lost=lost)
            files.append(str(_write(path, entry, part, rows)))
        sync(directory)
    except (OSError, pa.ArrowInvalid) as error:
        raise OptionError(
            f"the rows cannot be written to {directory} ({error}), and nothing was skipped",
            "name another directory",
        ) from error
    engine.skip(app_id, sequence, [branch for part in parts for branch in part.branches], str(directory))
    return files


def _rows(engine: Engine, part: ToApply, *, lost: bool) -> Iterator[pa.RecordBatch]:
    """The rows of a part. Raises NotApplied if data files are gone, and not ``lost``."""
    batches = engine.read_branches(part.branches) if rows_in(part) else iter(())
    if not is_files(part):
        return batches
    files = table_format().exported_files(part, batches)
    gone = files.missing()
    if gone and not lost:
        raise NotApplied(
            f"{len(gone)} of {len(files)} data files with {rows_in(part)} decided rows for "
            f"{goal(part)!r} are gone ({', '.join(gone[:3])}), and nothing was skipped. If the table has the "
            "rows already, the next start of the query finds that",
            LOST,
        )
    return files.rows()


def _write(path: Path, entry: LedgerEntry, part: ToApply, rows: Iterator[pa.RecordBatch]) -> Path:
    """Write one durable file; the metadata of its schema describes the batch."""
    about = {
        "app_id": entry.app_id,
        "sequence": entry.sequence,
        "batch_id": entry.batch_id,
        "token": entry.token,
        "kind": part.kind,
    }
    about |= {"to": goal(part), "rows": rows_in(part)}
    if is_change(part):
        about["change"] = part.target[CHANGE]
    first = next(rows, None)
    schema = first.schema if first is not None else pa.schema([])  # of a change without rows
    schema = schema.with_metadata({**(schema.metadata or {}), b"txmq": json.dumps(about).encode()})
    with path.open("xb") as file:
        with pq.ParquetWriter(file, schema) as writer:
            for batch in [first] if first is not None else []:
                writer.write_batch(batch)
            for batch in rows:
                writer.write_batch(batch)
        file.flush()
        os.fsync(file.fileno())
    return path
