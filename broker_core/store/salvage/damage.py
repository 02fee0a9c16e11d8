"""What is damage, and what is not: an error of the machine that passes says nothing of what is stored. And
what of a damaged block is intact.

Invariant: what is called damaged was read twice, and nothing was short at the second time.
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from broker_core.core.errors import DiskFull, ResourceShortage, StoreError
from broker_core.core.ids import BlockId
from broker_core.store.catalog import log_path
from broker_core.store.failure import full_disk_named, passing, unreadable
from broker_core.store.log import HiddenCommits, hidden_commits
from broker_core.store.segment import BlockPlace, parse, read_buffer
from broker_core.store.sums import NOT_READABLE, read_sums, whole_rows

_Read = TypeVar("_Read")
FAILURES = (
    StoreError, ResourceShortage, OSError, MemoryError, sqlite3.Error, pa.ArrowException,
    TypeError, ValueError,
)  # fmt: skip


def read_twice(read: Callable[[], _Read], path: Path) -> _Read:
    """Returns what ``read`` returns, at its second attempt if the first fails, because a disk may fail once.
    Raises what the second raises; ResourceShortage, DiskFull.
    """
    try:
        return read()
    except FAILURES:
        pass
    try:
        return read()
    except FAILURES as error:
        require_damage(error, path)
        raise


def require_damage(error: BaseException, path: Path) -> None:
    """Raises ResourceShortage or DiskFull if ``error`` comes from the machine, and not from what is in the
    file ``path``.
    """
    if isinstance(error, (ResourceShortage, DiskFull)):
        raise error
    found = unreadable(path) if isinstance(error, sqlite3.Error) else error
    if isinstance(found, (OSError, MemoryError)):
        with contextlib.suppress(OSError), passing(path), full_disk_named(str(path.parent)):
            raise found


def copy_catalog(catalog: Path, folder: Path) -> HiddenCommits | None:
    """Copies a catalog and its log, and returns the commits that SQLite would lose. Raises OSError,
    ResourceShortage, DiskFull.
    """
    log = log_path(catalog)
    hidden = read_twice(partial(hidden_commits, log), log)
    for source in (catalog, log):
        if source.exists():
            read_twice(partial(shutil.copy, source, folder / source.name), source)
    return hidden


def read_whole(path: Path, block_id: BlockId, place: BlockPlace, schema: pa.Schema | None) -> pa.RecordBatch:
    """Returns a block, each of its values valid. ``schema`` None: as the file says. Raises CorruptSegment,
    OSError, ArrowInvalid; ResourceShortage, DiskFull.
    """

    def read() -> pa.RecordBatch:
        buffer = read_buffer(path, block_id, place)
        block = parse(buffer, schema or _schema_of(path), path, block_id, place)
        block.validate(full=True)
        return block

    return read_twice(read, path)


def _schema_of(path: Path) -> pa.Schema:
    with pa.OSFile(str(path)) as file:
        return pa.ipc.read_schema(file)


def intact_rows(
    path: Path, place: BlockPlace, schema: pa.Schema | None = None
) -> tuple[npt.NDArray[np.bool_], pa.RecordBatch] | None:
    """Returns which rows of a damaged block are intact, and the block, with empty values in the place of the
    others; None: no row is. ``schema`` None: as the file says. Raises ResourceShortage, DiskFull.
    """
    rows, sums = read_sums(path.parent.parent, place.segment).get(place.position, (-1, b""))
    if rows != place.rows:
        return None
    try:
        with path.open("rb") as file:
            file.seek(place.position)
            content = pa.py_buffer(file.read(place.length))
        return whole_rows(content, schema or _schema_of(path), rows, sums)
    except NOT_READABLE as error:
        require_damage(error, path)
        return None
