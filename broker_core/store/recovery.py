"""Recovery: a data directory is opened as its catalog names it; everything else is cut off or removed.

Not here: what a commit writes (``durable.py``), a directory that is damaged (``salvage/``).
Invariant: each step may be repeated after a crash in it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from broker_core.core import failpoint
from broker_core.core.files import sync
from broker_core.core.ids import BlockId
from broker_core.store import catalog as catalog_file
from broker_core.store.catalog import Catalog, Meta
from broker_core.store.directory import segment_path
from broker_core.store.failure import corrupt_catalog
from broker_core.store.segment import BlockPlace, Segments, cut_tail
from broker_core.store.sums import drop_sums, kept_sums


class Recovered(NamedTuple):
    """``meta``: before the start, except that the next block id is free."""

    catalog: Catalog
    meta: Meta
    segments: Segments
    places: dict[BlockId, BlockPlace]


def recover(directory: Path, roll_bytes: int) -> Recovered:
    """Restores the state that the catalog names. Raises CorruptCatalog, and errors of files and SQLite."""
    path = directory / "catalog.db"
    segments = directory / "segments"
    # 1. there is a catalog, or the directory is new
    if not path.exists():
        if segments.exists():
            raise corrupt_catalog(path, "the file is missing")
        catalog_file.create(path)
    segments.mkdir(exist_ok=True)
    sync(directory)
    failpoint.here("store.recovery.catalog")
    # 2. SQLite replays its log
    catalog = Catalog(path)
    try:
        return _recovered(directory, catalog, roll_bytes)
    except BaseException:
        catalog.close()
        raise


def _recovered(directory: Path, catalog: Catalog, roll_bytes: int) -> Recovered:
    folder = directory / "segments"
    meta = catalog.meta()
    rows = catalog.segments()
    places = catalog.blocks()
    next_block_id = max([meta.next_block_id, *(block_id + 1 for block_id in places)])
    failpoint.here("store.recovery.replayed")
    # 3. files that no row names are removed; their numbers are not reused
    live: dict[int, set[BlockId]] = {row.segment: set() for row in rows}
    ends: dict[int, int] = {row.segment: len(row.schema) for row in rows}
    for block_id, place in places.items():
        if place.segment not in live:
            raise corrupt_catalog(
                directory / "catalog.db", f"block {block_id} is in segment {place.segment}, which has no row"
            )
        live[place.segment].add(block_id)
        ends[place.segment] = max(ends[place.segment], place.position + place.length)
    numbers = [int(name.stem) for name in folder.iterdir() if re.fullmatch(r"\d{8}\.arrow", name.name)]
    for number in numbers:
        if not live.get(number):
            segment_path(directory, number).unlink()
    for number in kept_sums(directory):
        if not live.get(number):
            drop_sums(directory, number)
    sync(folder)
    failpoint.here("store.recovery.removed")
    segments = Segments(
        directory, max([meta.next_segment, *(n + 1 for n in (*numbers, *live))]), roll_bytes=roll_bytes
    )
    # 4. files that were open lose their incomplete tail and get their end mark
    opened = [row for row in rows if row.state == "open" and live[row.segment]]
    for row in rows:
        if live[row.segment]:
            size = _closed_size(segment_path(directory, row.segment), ends[row.segment], cut=row in opened)
            segments.adopt(row.segment, row.kind, row.schema, size, live[row.segment])
    failpoint.here("store.recovery.cut")
    # 5. the catalog records this
    catalog.begin()
    for row in opened:
        catalog.close_segment(row.segment)
    for row in rows:
        if not live[row.segment]:
            catalog.drop_segment(row.segment)
    catalog.set_meta(clean=0, next_block_id=next_block_id, next_segment=segments.next_number)
    failpoint.here("store.recovery.executed")
    catalog.commit()
    failpoint.here("store.recovery.committed")
    catalog.lay_out_log()
    return Recovered(catalog, meta._replace(next_block_id=next_block_id), segments, places)


def _closed_size(path: Path, end: int, *, cut: bool) -> int:
    """Returns the size of a closed file. If it is missing or short, reading its blocks raises."""
    try:
        return cut_tail(path, end) if cut else path.stat().st_size
    except FileNotFoundError:
        return 0
