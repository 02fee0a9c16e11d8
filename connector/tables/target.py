"""What the target of a branch says about an operation on a table: the change, the files, the table. Pure.

The decision stores it, so that the operation can be done after it, by any process.
Not here: doing it (``batch/apply.py``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict

import pyarrow as pa
from pyspark.sql.types import StructType

from broker_core.core.errors import OptionError
from broker_core.engine import EMPTY, FILES, REFUSED_ROWS, ROWS_TO, ToApply
from connector.tables.change import Change, Merge, Overwrite
from connector.tables.table import Table

CHANGE = "change"  # a merge, a delete or an overwrite
CONTEXT = "context"  # of SQL text, from the session that decided
ALL_ROWS = (
    "stop the query, list the waiting rows with `txmq app unapplied APP`, and write the rows to Parquet "
    "files with `txmq app skip APP SEQUENCE --to DIR --table TABLE`"
)
UNAPPLIED = f"{ALL_ROWS} (with --refused only those that the table refuses)"
AGAIN = (
    "start the query again, which applies them once before it continues; a conflict is waited for as long as "
    "conflict_timeout_s of transactional says"
)
LOST = (
    "put them back and start the query again, or give them up: stop the query, and `txmq app skip APP "
    "SEQUENCE --to DIR --table TABLE --lost`"
)


def of_change(
    table: Table, change: Change, schema: StructType, context: Mapping[str, object]
) -> dict[str, object]:
    """``schema``: of the rows."""
    about = {"table": table.name, "table_id": table.table_id, "schema": schema.json()}
    return {**about, CHANGE: asdict(change), CONTEXT: dict(context)}


def nothing() -> pa.RecordBatch:
    """The row that is staged for a change without rows, because a branch without rows is not kept."""
    return pa.RecordBatch.from_pydict({"nothing": pa.nulls(1, pa.int32())})


def is_change(part: ToApply) -> bool:
    """Whether a part is a merge, a delete or an overwrite."""
    return CHANGE in part.target


def change_of(part: ToApply) -> Change:
    """What a part changes."""
    stored = part.target[CHANGE]
    return Overwrite(**stored) if part.kind == "overwrite" else Merge.of(stored)


def is_files(part: ToApply) -> bool:
    """Whether a part holds files, and not rows."""
    return FILES in part.target


def rows_in(part: ToApply) -> int:
    """Returns how many rows of the user a part holds."""
    if EMPTY in part.target:
        return 0
    return int(part.target[FILES]["rows"]) if is_files(part) else part.rows


def rows_to(parts: Sequence[ToApply]) -> str:
    """Where the rows that the table refuses go: a directory, or TO_QUEUE and a queue; "" if no operator
    decided it.
    """
    return str(next((part.target[ROWS_TO][1] for part in parts if ROWS_TO in part.target), ""))


def refused_rows(parts: Sequence[ToApply]) -> set[int] | None:
    """The numbers of the rows that were published because the table refuses them; None if nothing was."""
    refused = next((part.target[REFUSED_ROWS][1] for part in parts if REFUSED_ROWS in part.target), None)
    return None if refused is None else set(json.loads(refused))


def missing(table: str, parts: Sequence[ToApply], batch: str) -> OptionError:
    """The error of an append whose table is not there any more."""
    what = f"table {table!r} was dropped or renamed before the append of {batch}"
    renamed = "if it was renamed, give it its name back and start the query"
    of_files = [part for part in parts if is_files(part)]
    if not of_files:
        return OptionError(what, f"{renamed}; otherwise create it again and start the query, or {UNAPPLIED}")
    places = ", ".join(sorted({part.target[FILES]["directory"] for part in of_files}))
    return OptionError(
        f"{what}, and its {sum(map(rows_in, parts))} rows wait in data files in its directory ({places})",
        f"{renamed}; if the directory is gone, so are they: {LOST}",
    )


def replaced(table: str, change: str, decided: str, *, exists: bool) -> OptionError:
    """The error of a change whose table is not there any more. ``exists``: another one has its name."""
    what = "was replaced by another one" if exists else "was dropped or renamed"
    return OptionError(
        f"table {table!r} {what} before the {change} (its id was {decided})",
        "it is not done on another table; if it was renamed, give it its name back and start the query; "
        f"otherwise {UNAPPLIED}",
    )
