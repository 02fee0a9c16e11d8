"""The rows of a Delta ledger without Spark: from the log and the Parquet files.

It is read so where there is no session: in the process of a source, on the command line.

Not here: what the rows mean. What this reader does not know of Delta it refuses.
Invariant: the rows are those of one version, the newest one that the log has.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from broker_core.core.errors import OptionError

_COMMIT = re.compile(r"(\d{20})\.json")
_CHECKPOINT = re.compile(r"(\d{20})\.checkpoint(?:\.(\d{10})\.(\d{10}))?\.parquet")
_URL = re.compile(r"(?i)([a-z][a-z0-9+.-]*):(?!\\)")
# features that change nothing for a reader of whole files
_KNOWN = {"timestampNtz", "vacuumProtocolCheck", "deletionVectors", "columnMapping", "v2Checkpoint"}


Action = Mapping[str, Any]  # of Delta's log, as JSON


def rows(table: str, columns: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the rows of a table at a path, with these columns; one that the table lacks is None. Raises
    OptionError.
    """
    place = _place(table)
    try:
        return list(_rows(place, table, columns))
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
        raise OptionError(
            f"table {table!r} cannot be read here ({error})", "repair it, or restore it"
        ) from error


def _place(table: str) -> Path:
    path = table
    if found := _URL.match(table):
        if found[1].lower() != "file":
            raise OptionError(
                f"table {table!r} is not on a disk of this host, and this reads it without Spark",
                "give a path, such as one below /Volumes or /dbfs",
            )
        path = re.sub(r"^/+", "/", table[len(found[0]) :])
    place = Path(path)
    if not (place / "_delta_log").is_dir():
        raise OptionError(
            f"there is no Delta table at {os.fspath(place.absolute())!r}",
            "give the path of the table, not its name in a catalog",
        )
    return place


def _rows(place: Path, table: str, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    files, metadata, protocol = _snapshot(place / "_delta_log", table)
    features = set(protocol.get("readerFeatures") or ())
    mapping = (metadata.get("configuration") or {}).get("delta.columnMapping.mode", "none")
    if strange := features - _KNOWN or ({f"columnMapping={mapping}"} if mapping != "none" else set()):
        raise OptionError(
            f"table {table!r} has features that need Spark: {', '.join(sorted(strange))}",
            "read it with Spark",
        )
    for path, add in sorted(files.items()):
        if add.get("deletionVector"):
            raise OptionError(
                f"table {table!r} has deletion vectors, which need Spark",
                f"run REORG TABLE delta.`{table}` APPLY (PURGE)",
            )
        partition = dict(add.get("partitionValues") or {})
        found = pq.ParquetFile(place / unquote(path))
        stored = [name for name in columns if name in found.schema_arrow.names]
        for row in found.read(columns=stored).to_pylist():
            yield {name: row.get(name, partition.get(name)) for name in columns}


def _snapshot(log: Path, table: str) -> tuple[dict[str, Action], Action, Action]:
    """Files, metadata and protocol of the newest version."""
    names = os.listdir(log)
    commits = sorted(int(found[1]) for name in names if (found := _COMMIT.fullmatch(name)))
    parts: dict[int, list[tuple[str, int]]] = {}
    for name in names:
        if found := _CHECKPOINT.fullmatch(name):
            parts.setdefault(int(found[1]), []).append((name, int(found[3] or 1)))
    whole = [version for version, each in parts.items() if len(each) == each[0][1]]
    base = max(whole, default=-1)
    files: dict[str, Action] = {}
    state: dict[str, Action] = {}

    def take(action: Action) -> None:
        if add := action.get("add"):
            files[add["path"]] = add
        if remove := action.get("remove"):
            files.pop(remove["path"], None)
        for kind in ("metaData", "protocol"):
            if action.get(kind):
                state[kind] = action[kind]

    for name, _ in sorted(parts.get(base, ())):
        for batch in pq.read_table(log / name, columns=["add", "metaData", "protocol"]).to_batches():
            for action in batch.to_struct_array().to_pylist(maps_as_pydicts="strict"):
                take(action)
    needed = [version for version in commits if version > base]
    if needed != list(range(base + 1, base + 1 + len(needed))) or (base < 0 and not needed):
        raise OptionError(
            f"the log of table {table!r} is incomplete from version {base + 1} on, or has a checkpoint of a "
            "newer kind",
            "read it with Spark",
        )
    for version in needed:
        for line in (log / f"{version:020d}.json").read_text().splitlines():
            take(json.loads(line))
    if state.keys() != {"metaData", "protocol"}:
        raise OptionError(f"the log of table {table!r} has no metadata", "read it with Spark")
    return files, state["metaData"], state["protocol"]
