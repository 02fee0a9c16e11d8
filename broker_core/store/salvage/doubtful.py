"""Rows that may be wrong: the parsable part of blocks that do not match their checksum, as a file for manual
inspection.

Invariant: nothing here reaches a queue. It runs after everything else is written, because it passes damaged
bytes to Arrow.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from broker_core.broker.state.block import RowSelection, row_numbers
from broker_core.broker.state.change import InboxRow
from broker_core.broker.state.records import RunRecord
from broker_core.store.directory import segment_path
from broker_core.store.segment import BlockPlace
from broker_core.store.sums import NOT_READABLE

SCHEMA = pa.schema(
    [
        ("queue", pa.string()),
        ("offset", pa.int64()),
        ("exchange", pa.string()),
        ("routing_key", pa.string()),
        ("properties", pa.binary()),
        ("body", pa.binary()),
    ]
)


@dataclass(frozen=True, slots=True)
class _Wanted:
    run: RunRecord
    start: int
    end: int
    queue: str
    path: Path
    place: BlockPlace
    schema: pa.Schema


class Doubtful:
    def __init__(self) -> None:
        self._wanted: list[_Wanted] = []
        self._rows: list[tuple[str, int, InboxRow]] = []

    def want(
        self,
        run: RunRecord,
        start: int,
        end: int,
        queue: str,
        source: Path,
        place: BlockPlace,
        schema: pa.Schema | None,
    ) -> None:
        """Adds offsets [start, end) of a run over a damaged block."""
        if schema is not None:
            self._wanted.append(
                _Wanted(run, start, end, queue, segment_path(source, place.segment), place, schema)
            )

    def add(self, queue: str, offset: int, row: InboxRow) -> None:
        self._rows.append((queue, offset, row))

    def write(self, path: Path) -> int:
        """Writes the file, if there are rows, and returns their number."""
        blocks = [block for wanted in self._wanted if (block := _parsed(wanted)) is not None]
        if self._rows:
            blocks.append(_messages(self._rows))
        count = sum(int(block.num_rows) for block in blocks)
        if count:
            with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, SCHEMA) as writer:
                for block in blocks:
                    writer.write_batch(block)
        return count


def _parsed(wanted: _Wanted) -> pa.RecordBatch | None:
    """Returns None if Arrow cannot parse the bytes."""
    try:
        with wanted.path.open("rb") as file:
            file.seek(wanted.place.position)
            block = pa.ipc.read_record_batch(pa.py_buffer(file.read(wanted.place.length)), wanted.schema)
        block.validate(full=True)
        rows = selected(wanted.run)[wanted.start - wanted.run.first : wanted.end - wanted.run.first]
        rows = rows[rows < block.num_rows]
        taken = block.take(pa.array(rows))
    except NOT_READABLE:
        return None
    columns = {
        "queue": pa.array([wanted.queue] * len(rows), pa.string()),
        "offset": pa.array(range(wanted.start, wanted.start + len(rows)), pa.int64()),
        **{name: taken.column(name) for name in ("exchange", "routing_key", "properties", "body")},
    }
    return pa.RecordBatch.from_arrays(
        [columns[field.name].cast(field.type) for field in SCHEMA], schema=SCHEMA
    )


def _messages(rows: list[tuple[str, int, InboxRow]]) -> pa.RecordBatch:
    columns = {
        "queue": [queue for queue, _, _ in rows],
        "offset": [offset for _, offset, _ in rows],
        "exchange": [_readable(row.exchange) for _, _, row in rows],
        "routing_key": [_readable(row.routing_key) for _, _, row in rows],
        "properties": [row.properties for _, _, row in rows],
        "body": [row.body for _, _, row in rows],
    }
    return pa.RecordBatch.from_pydict(columns, schema=SCHEMA)


def _readable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def selected(run: RunRecord) -> npt.NDArray[np.int64]:
    """Returns the rows of its block, in offset order."""
    return row_numbers(RowSelection(run.row, run.count, run.bitmap))
