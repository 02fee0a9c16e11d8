"""``txmq app ledger``: the decided batches of an app, from its engine or from a Delta table.

Not here: reading either.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import datetime, timezone

from broker_core.core.errors import OptionError
from broker_core.engine import LedgerEntry
from txmq.address import ANY_BROKER, URL_VARIABLE, app_names, engine_at
from txmq.command.declare import Options, argument, command, option
from txmq.command.values import Misuse, count
from txmq.output import Row, show

COLUMNS = (
    *("app_id", "sequence", "query_id", "batch_id", "log", "start_offset", "end_offset", "messages"),
    *("published", "committed_at", "engine"),
)


@command(
    "app ledger",
    "list the decided batches of an app",
    *ANY_BROKER,
    argument("APP", shell_complete=app_names),
    option("--batch", "N", "only the batch with this sequence", type=count),
    option("--table", "PATH", "read a Delta ledger on a disk of this host, instead of a broker"),
)
def ledger(options: Options) -> int:
    """Shows the batches, oldest first: a row for each log."""
    broker = options.data is not None or options.url is not None
    has_address = options.data is not None or options.url not in (None, os.environ.get(URL_VARIABLE))
    if has_address if options.table is not None else not broker:
        raise Misuse("`txmq app ledger` shows one ledger", "give --url, --data or --table")
    found = _of_table(options.table, options.app) if options.table else _of_engine(options)
    rows = [row for row in found if options.batch is None or row["sequence"] == options.batch]
    if not rows and options.table is None:
        require_app(options)
    if not rows and (options.table or options.batch is not None):
        which = "batch" if options.batch is None else f"batch {options.batch}"
        raise OptionError(f"the ledger has no {which} of app {options.app!r}", "list them without --batch")
    return show(options, rows)


def require_app(options: Options) -> None:
    """Raises OptionError: no app of this name has run."""
    if engine_at(options).app(options.app) is None:
        raise OptionError(f"no app {options.app!r} has run", "list the apps with `txmq app list`")


def _of_engine(options: Options) -> Iterator[Row]:
    for entry in engine_at(options).entries(options.app):
        spans: list[tuple[str, tuple[object, object]]] = [*sorted(entry.ranges.items())] or [
            ("", (None, None))
        ]
        for log, span in spans:
            yield _row(entry, log, span)


def _row(entry: LedgerEntry, log: str, span: tuple[object, object]) -> Row:
    return {
        "sequence": entry.sequence,
        "query_id": entry.query_id,
        "batch_id": entry.batch_id,
        "log": log,
        "start": span[0],
        "end": span[1],
        "messages": entry.messages,
        "published": entry.published,
        "committed_at": _time(datetime.fromtimestamp(entry.committed_at_us / 1e6, timezone.utc)),
        "applied": entry.applied,
        "mirrored": entry.mirrored,
    }


def _of_table(table: str, app_id: str) -> list[Row]:
    from connector.ledger_file import rows  # Arrow's Parquet only here

    found = [row for row in rows(table, COLUMNS) if row.pop("app_id") == app_id]
    for row in found:
        row["start"], row["end"] = row.pop("start_offset"), row.pop("end_offset")
        row["log"] = row["log"] or ""
        row["committed_at"] = _time(row["committed_at"])
    return sorted(found, key=lambda row: (row["sequence"] or 0, row["log"]))


def _time(moment: datetime | None) -> str:
    return "" if moment is None else moment.astimezone(timezone.utc).isoformat()
