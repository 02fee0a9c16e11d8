"""Damaged blocks of a store that is in use: which rows are intact.

Not here: which messages that are (``broker/message/damage.py``), and a directory that no broker uses
(``salvage.py``).
Invariant: what is called damaged was read twice from the disk. Nothing here is changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from broker_core.core.errors import CorruptSegment, DataLoss, StoreFailed
from broker_core.core.ids import BlockId
from broker_core.store.port import Location, Store
from broker_core.store.salvage.damage import intact_rows, read_twice
from broker_core.store.segment import BlockPlace, read_buffer


@dataclass(frozen=True, slots=True)
class DamagedBlock:
    """``block``: its intact rows, and empty ones in the place of the others; None: no row is intact."""

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
            rows = store.peek(block_id)
            if rows is not None:  # it was intact when it was read
                return DamagedBlock(np.ones(place.rows, np.bool_), rows, "")
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
    why = error.summary if isinstance(error, CorruptSegment) else f"segment {path} is missing"
    intact, block = intact_rows(path, place) or (np.zeros(place.rows, np.bool_), None)
    return DamagedBlock(intact, block, why)
