"""A backup: the data directory of one moment, as pieces of its files. The broker goes on meanwhile.

1. From now on no segment is deleted. 2. The catalog is copied, in steps; its last step is the moment of the
backup. 3. What the copy names is sent: the catalog, the segments, their sums, and the id.

Not here: the files of the copy (``client/backup.py``).
Invariant: between two pieces nothing is held but the segments: no lock, and no commit waits. An open segment
may have more than the catalog of the copy names; whoever opens the copy cuts that off.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pyarrow as pa
import xxhash

from broker_core.core import failpoint
from broker_core.core.endpoint import ID
from broker_core.core.errors import DataLoss, OptionError, ResourceShortage, one_line
from broker_core.flight import contract
from broker_core.node.local import LocalBroker
from broker_core.server.access.caller import Caller
from broker_core.server.flight.call_permissions import CallPermissions
from broker_core.server.flight.calls import CallFailed
from broker_core.server.flight.streams import Stream
from broker_core.store.catalog import CATALOG_COPY, QUERIES
from broker_core.store.directory import segment_path
from broker_core.store.durable import DurableStore
from broker_core.store.sums import sums_path

PIECE_BYTES = 1024 * 1024


def opened(
    broker: LocalBroker, call_permissions: CallPermissions, caller: Caller, stopping: threading.Event
) -> Stream:
    """Raises AccessRefused, OptionError."""

    def permitted() -> None:
        caller.administer("a copy of the data directory")

    permitted()
    with broker.open_store() as store:
        if not isinstance(store, DurableStore):
            raise OptionError("this broker is in memory, and has no data directory to copy")
    call_permissions.carried_out(caller, "get.backup", {})
    return Stream(contract.BACKUP_SCHEMA, _pieces(broker, stopping), permitted)


def _pieces(broker: LocalBroker, stopping: threading.Event) -> Iterator[pa.RecordBatch]:
    """Raises ResourceLocked (one is in progress), ResourceShortage: nothing of the broker is concerned."""
    files: dict[str, tuple[int, str]] = {}
    try:
        with contextlib.ExitStack() as stack:
            with broker.open_store() as store:
                assert isinstance(store, DurableStore)
                numbers, catalog = stack.enter_context(_catalog(store, stopping))
                directory = store.directory
            failpoint.here("server.backup.catalog")
            yield from _pieces_of("catalog.db", catalog, files)
            for number in numbers:
                path, sums = segment_path(directory, number), sums_path(directory, number)
                yield from _file(f"segments/{path.name}", path, files)
                if sums.exists():  # they may be missing
                    yield from _file(f"sums/{sums.name}", sums, files)
            yield from _file(ID, directory / ID, files)
    except FileNotFoundError as error:
        raise DataLoss(
            f"{error.filename} is missing: see `txmq broker verify`, and restore an older backup"
        ) from error
    except (OSError, sqlite3.Error) as error:
        raise ResourceShortage(
            f"the backup was given up: {one_line(error)}", "the broker continues; try again"
        ) from error
    yield _piece("", contract.encode(contract.Manifest(files)))


@contextlib.contextmanager
def _catalog(store: DurableStore, stopping: threading.Event) -> Iterator[tuple[list[int], int]]:
    """The numbers of its segments, and a descriptor of a copy without a name."""

    def progress() -> None:
        failpoint.here("server.backup.step")
        if stopping.is_set():
            raise CallFailed(grpc.StatusCode.UNAVAILABLE, "the broker is stopping")

    path = store.directory / CATALOG_COPY
    with store.pin_segments() as copy_catalog:  # one at a time: nobody else has this path
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            copy_catalog(path, progress)
            with contextlib.closing(sqlite3.connect(f"{path.as_uri()}?immutable=1", uri=True)) as copy:
                numbers = [row[0] for row in copy.execute(QUERIES["segments"])]
            path.unlink()
            yield numbers, descriptor
        finally:
            path.unlink(missing_ok=True)
            os.close(descriptor)


def _file(name: str, path: Path, files: dict[str, tuple[int, str]]) -> Iterator[pa.RecordBatch]:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        yield from _pieces_of(name, descriptor, files)
    finally:
        os.close(descriptor)


def _pieces_of(name: str, descriptor: int, files: dict[str, tuple[int, str]]) -> Iterator[pa.RecordBatch]:
    """As long as it is now: an open segment grows."""
    size, position, checksum = os.fstat(descriptor).st_size, 0, xxhash.xxh3_64()
    while position < size:
        piece = os.pread(descriptor, min(PIECE_BYTES, size - position), position)
        if not piece:
            raise OSError(f"{name} became shorter")
        failpoint.here("server.backup.piece")
        checksum.update(piece)
        yield _piece(name, piece)
        position += len(piece)
    if size:
        files[name] = (position, checksum.hexdigest())


def _piece(name: str, piece: bytes) -> pa.RecordBatch:
    return pa.record_batch([[name], [piece]], schema=contract.BACKUP_SCHEMA)
