"""Damaged blocks of a store that is in use: which rows are intact, and what can still be read of the others.

Not here: which messages that are (``broker/message/damaged.py``), and a directory that no broker uses
(``salvage.py``).
Invariant: what is called damaged was read twice from the disk. Nothing here is changed but new files named
``doubtful``, which are durable when they have their name.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from broker_core import failpoint
from broker_core.errors import CorruptSegment, DataLoss, StoreFailed
from broker_core.files import sync
from broker_core.ids import BlockId
from broker_core.store.failure import store_error
from broker_core.store.port import Location, Store
from broker_core.store.salvage.damage import read_twice, require_damage
from broker_core.store.salvage.doubtful import Doubtful
from broker_core.store.segment import BlockPlace, read_buffer
from broker_core.store.sums import NOT_READABLE, read_sums, whole_rows


@dataclass(frozen=True, slots=True)
class DamagedBlock:
    """``block``: its intact rows, and empty ones in the place of the others; None: no row is intact."""

    directory: Path
    place: BlockPlace
    schema: pa.Schema | None  # None: the segment is missing
    intact: npt.NDArray[np.bool_]
    block: pa.RecordBatch | None
    why: str


def damaged(store: Store, block_id: BlockId) -> DamagedBlock | None:
    """None: the block is intact, or nothing needs it any more. Raises ResourceShortage."""
    for _ in range(3):
        try:
            location = store.locate(block_id)
        except DataLoss:
            return None
        if location is None:
            return None
        try:
            path, place = _place(location)
            read_twice(partial(read_buffer, path, block_id, place), path)
            return None
        except (CorruptSegment, FileNotFoundError) as error:
            kept = store.peek(block_id)
            if kept is not None:  # it was intact when it was read
                return DamagedBlock(path.parent.parent, place, None, np.ones(place.rows, np.bool_), kept, "")
            if _locate(store, block_id) == location:  # else it was moved meanwhile
                return _partly(path, place, error)
    raise StoreFailed(f"block {block_id} moved again and again while it was looked at", "try it again")


def _locate(store: Store, block_id: BlockId) -> Location | None:
    try:
        return store.locate(block_id)
    except DataLoss:
        return None


def _place(location: Location) -> tuple[Path, BlockPlace]:
    path = Path(location.path)
    where = (location.position, location.length, location.rows)
    return path, BlockPlace(int(path.stem), *where, 0, location.checksum)


def _partly(path: Path, place: BlockPlace, error: Exception) -> DamagedBlock:
    directory = path.parent.parent
    why = error.summary if isinstance(error, CorruptSegment) else f"segment {path} is missing"
    nothing = np.zeros(place.rows, np.bool_)
    schema: pa.Schema | None = None
    try:
        with pa.OSFile(str(path)) as file:
            schema = pa.ipc.read_schema(file)
            file.seek(place.position)
            content = pa.py_buffer(file.read(place.length))
        rows, sums = read_sums(directory, place.segment).get(place.position, (-1, b""))
        found = whole_rows(content, schema, rows, sums) if rows == place.rows else None
    except NOT_READABLE as failed:
        require_damage(failed, path)
        return DamagedBlock(directory, place, schema, nothing, None, why)
    if found is None:
        return DamagedBlock(directory, place, schema, nothing, None, why)
    return DamagedBlock(directory, place, schema, found[0], found[1], why)


def write_doubtful(directory: Path, rows: Doubtful) -> tuple[str, int]:
    """Writes what can be parsed to a new file in ``directory``, durably. Its path and its rows; "" if there
    are none. Raises DiskFull, StoreFailed.
    """
    try:
        return _written(directory, rows)
    except OSError as error:
        raise store_error(error, directory) from error


def _written(directory: Path, rows: Doubtful) -> tuple[str, int]:
    unready = directory / "doubtful.new"
    unready.unlink(missing_ok=True)
    count = rows.write(unready)
    if not count:
        return "", 0
    with unready.open("rb") as file:
        os.fsync(file.fileno())
    failpoint.here("skip.doubtful.written")
    for path in _names(directory):
        try:
            os.link(unready, path)
        except FileExistsError:
            continue
        unready.unlink()
        sync(directory)
        return str(path), count
    raise AssertionError


def _names(directory: Path) -> Iterable[Path]:
    yield directory / "doubtful.arrow"
    number = 2
    while True:
        yield directory / f"doubtful-{number}.arrow"
        number += 1
