"""Segments: append-only Arrow IPC streams, ``NNNNNNNN.arrow``, that any Arrow tool can read after they are
closed.

A segment is the schema message, one encapsulated message per block, and the end mark. The catalog names the
blocks, not the file: bytes that no catalog row names have no meaning.

Invariant: a file is written only at its end, under the lock; a reader gets only bytes that match their
checksum; a number is never used twice; a closed file never changes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import xxhash

from broker_core.arrow.part_file import END_MARK as END_MARK
from broker_core.arrow.part_file import PartFile, unwritable
from broker_core.core import failpoint
from broker_core.core.errors import (
    CorruptSegment,
    DataLoss,
    OptionError,
    ResourceLocked,
    ResourceShortage,
    one_line,
)
from broker_core.core.ids import BlockId
from broker_core.message.message import MERGED_SCHEMA, MESSAGE_SCHEMA
from broker_core.store.codec import body_bytes
from broker_core.store.directory import segment_path
from broker_core.store.failure import PASSING, passing
from broker_core.store.port import BlockInfo
from broker_core.store.reserve import Reserve
from broker_core.store.sums import drop_sums, write_sums

ROLL_BYTES = 128 * 1024 * 1024
_MAX_BRANCH_FILES = 8  # open at a time


class BlockPlace(NamedTuple):
    """The place of a block."""

    segment: int
    position: int
    length: int
    rows: int
    size_bytes: int  # of the bodies
    checksum: int  # xxh3_64 of the ``length`` bytes

    def info(self, block_id: BlockId) -> BlockInfo:
        return BlockInfo(block_id, self.rows, self.size_bytes, self.checksum)


@dataclass(slots=True)
class Segment:
    number: int
    kind: str  # message, merged, branch
    schema: pa.Schema
    schema_bytes: bytes
    size_bytes: int
    live: set[BlockId]  # blocks that are named, or written before the commit that names them
    descriptor: int = -1  # -1: closed
    ended: bool = False  # has its end mark
    in_catalog: bool = False  # has a row there
    new: bool = False  # its name in the directory is not durable yet


def kind_of(schema: pa.Schema) -> str:
    if schema.equals(MESSAGE_SCHEMA):
        return "message"
    return "merged" if schema.equals(MERGED_SCHEMA) else "branch"


def _require_plain(schema: pa.Schema) -> None:
    for field in schema:
        if pa.types.is_dictionary(field.type):
            raise OptionError(
                f"column {field.name} is dictionary-encoded, which a segment cannot hold; "
                f"cast it to {field.type.value_type}"
            )


def _write_all(descriptor: int, data: pa.Buffer | bytes, path: Path) -> None:
    """Raises ResourceShortage if nothing was written, and OSError."""
    view = whole = memoryview(data)
    try:
        while view:
            view = view[os.write(descriptor, view) :]
    except OSError as error:
        if len(view) == len(whole):
            with passing(path):
                raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def _create(path: Path, schema_bytes: bytes, files: Reserve) -> int:
    """Returns the descriptor of a new file. Raises ResourceShortage, with nothing left of it, and OSError."""
    with passing(path):
        descriptor = files.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        _write_all(descriptor, schema_bytes, path)
    except BaseException:
        files.close(descriptor)
        with contextlib.suppress(OSError):  # the next recovery removes it
            path.unlink()
        raise
    return descriptor


def link(descriptor: int, path: Path) -> None:
    """Gives the open file the name ``path``. Raises OSError."""
    root = os.open("/", os.O_RDONLY | os.O_DIRECTORY)
    try:
        # with a directory, Python follows the link in /proc
        os.link(f"/proc/self/fd/{descriptor}", path, src_dir_fd=root)
    finally:
        os.close(root)


def read_buffer(path: Path, block_id: BlockId, place: BlockPlace, files: Reserve | None = None) -> pa.Buffer:
    """Returns the bytes of a block, verified. Raises CorruptSegment, and OSError for a file that cannot be
    opened, or not be read for now.
    """
    buffer = pa.allocate_buffer(place.length)
    view, filled = memoryview(buffer), 0
    descriptor = os.open(path, os.O_RDONLY) if files is None else files.open(path, os.O_RDONLY)
    try:
        while filled < place.length:
            count = os.preadv(descriptor, [view[filled:]], place.position + filled)
            if count == 0:
                break
            filled += count
    except OSError as error:
        if error.errno in PASSING:
            raise
        raise _corrupt(path, block_id, place, f"the file cannot be read: {error.strerror}") from error
    finally:
        os.close(descriptor) if files is None else files.close(descriptor)
    if filled < place.length:
        raise _corrupt(path, block_id, place, f"the file ends {place.length - filled} bytes too early")
    found = xxhash.xxh3_64_intdigest(view)
    if found != place.checksum:
        raise _corrupt(path, block_id, place, f"checksum {found:016x} instead of {place.checksum:016x}")
    return buffer


def parse(
    buffer: pa.Buffer, schema: pa.Schema, path: Path, block_id: BlockId, place: BlockPlace
) -> pa.RecordBatch:
    """Parses a block in verified bytes. Raises CorruptSegment if the bytes match but Arrow fails."""
    try:
        block = pa.ipc.read_record_batch(buffer, schema)
    except (pa.ArrowInvalid, OSError) as error:
        raise _corrupt(path, block_id, place, one_line(error)) from error
    if block.num_rows != place.rows:
        raise _corrupt(path, block_id, place, f"{block.num_rows} rows instead of {place.rows}")
    return block


def _corrupt(path: Path, block_id: BlockId, place: BlockPlace, what: str) -> CorruptSegment:
    where = f"position {place.position}, block {block_id} ({place.rows} rows, {place.length} bytes)"
    directory = path.parent.parent
    return CorruptSegment(
        f"segment {path} is damaged at {where}, see `txmq broker salvage`: {what}",
        f"none of the damaged bytes was delivered; restore the file from a backup; `txmq broker verify "
        f"{directory}` lists all damage, `txmq queue skip-damaged QUEUE` takes it out of a queue, and, once "
        f"the broker is stopped, `txmq broker salvage {directory} --to NEWDIR` keeps "
        "all else and names what is lost",
    )


def cut_tail(path: Path, end: int) -> int:
    """Recovers a file that was open: removes bytes after ``end``, writes the end mark, syncs. Returns the
    file's size.

    A file that is shorter than ``end`` has lost named bytes; it is not changed, and reading it raises.
    """
    descriptor = os.open(path, os.O_RDWR)
    try:
        size = os.fstat(descriptor).st_size
        if size < end:
            return size
        os.ftruncate(descriptor, end)
        os.lseek(descriptor, end, os.SEEK_SET)
        _write_all(descriptor, END_MARK, path)
        os.fsync(descriptor)
        return end + len(END_MARK)
    finally:
        os.close(descriptor)


class Deletions:
    """Files that are deleted, but not during a copy of the directory. Thread-safe."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._waiting: list[int] | None = None  # what was to be deleted during a copy

    @contextlib.contextmanager
    def pin(self) -> Iterator[None]:
        """Until its end no file is deleted. Raises ResourceLocked: one at a time."""
        with self._lock:
            if self._waiting is not None:
                raise ResourceLocked(
                    "another backup of this broker is in progress", "wait until it has ended"
                )
            self._waiting = []
        try:
            yield
        finally:
            with self._lock:
                waiting, self._waiting = self._waiting, None
            for number in waiting:
                self.delete(number)

    def delete(self, number: int) -> None:
        with self._lock:
            if self._waiting is not None:
                self._waiting.append(number)
                return
        with contextlib.suppress(OSError):  # the next recovery removes it
            segment_path(self._directory, number).unlink()
        drop_sums(self._directory, number)


class Segments:
    """All segments of a data directory: the closed ones, and an open one for each schema in use.
    Thread-safe.
    """

    def __init__(self, directory: Path, next_number: int, *, roll_bytes: int = ROLL_BYTES) -> None:
        self._directory = directory
        self._roll_bytes = roll_bytes
        self._files = Reserve()
        # open all the time: a commit needs no new descriptor; the reserve may have taken all that were left
        self._folder = self._files.open(directory / "segments", os.O_RDONLY | os.O_DIRECTORY)
        self._lock = threading.Lock()
        self._sync_lock = threading.Lock()  # taken before _lock; held while descriptors are synced or closed
        self._segments: dict[int, Segment] = {}
        self._open: dict[bytes, Segment] = {}  # by schema
        self._dirty: dict[int, Segment] = {}  # with unsynced bytes
        self.closed: list[int] = []  # end mark durable, not in the catalog yet
        self.idle: set[int] = set()  # without a live block
        # a failed write or sync: after it the content of the page cache is unknown
        self._broken: BaseException | None = None
        self.next_number = next_number
        self.deletions = Deletions(directory)

    def adopt(self, number: int, kind: str, schema_bytes: bytes, size_bytes: int, live: set[BlockId]) -> None:
        """Adds a closed segment that the catalog names."""
        schema = pa.ipc.read_schema(pa.py_buffer(schema_bytes))
        segment = Segment(number, kind, schema, schema_bytes, size_bytes, live)
        segment.ended = segment.in_catalog = True
        self._segments[number] = segment

    def path(self, number: int) -> Path:
        return segment_path(self._directory, number)

    def append(self, block_id: BlockId, block: pa.RecordBatch) -> BlockPlace:
        """Writes ``block`` at the end of the open segment of its schema. Durable after ``sync``."""
        _require_plain(block.schema)
        with passing(self._directory):
            schema_bytes = block.schema.serialize().to_pybytes()
            data = block.serialize()
        checksum = xxhash.xxh3_64_intdigest(data)
        with self._lock, self._breaking():
            segment = self._writable(block.schema, schema_bytes, data.size)
            position = segment.size_bytes
            _write_all(segment.descriptor, data, self.path(segment.number))
            self._dirty[segment.number] = segment
            segment.size_bytes += data.size
            segment.live.add(block_id)
            self.idle.discard(segment.number)
        if segment.kind != "branch":
            write_sums(self._directory, segment.number, position, block)
        return BlockPlace(segment.number, position, data.size, block.num_rows, body_bytes(block), checksum)

    def adopt_file(
        self, block_ids: Sequence[BlockId], file: PartFile
    ) -> list[tuple[BlockPlace, pa.RecordBatch]]:
        """Makes a writer's file a closed segment, after comparing its checksums. Durable after ``sync``.
        Empty if that is impossible.
        """
        try:
            failpoint.here("store.adopt.open")
            descriptor = file.open()
        except (OSError, ValueError):
            return []
        try:
            with unwritable(descriptor):
                blocks = list(file.batches(descriptor))
                failpoint.here("store.adopt.verified")
                with self._lock:
                    number, self.next_number = self.next_number, self.next_number + 1
                link(descriptor, self.path(number))
        except (OSError, ValueError):
            os.close(descriptor)
            return []
        schema_bytes = MESSAGE_SCHEMA.serialize().to_pybytes()
        live = set(block_ids)
        segment = Segment(number, "message", MESSAGE_SCHEMA, schema_bytes, file.size_bytes, live, descriptor)
        segment.ended = segment.new = True
        with self._lock:
            self._segments[number] = self._dirty[number] = segment
        adopted = []
        for part, block in zip(file.parts, blocks, strict=True):
            write_sums(self._directory, number, part.position, block)
            where = number, part.position, part.length, part.rows
            adopted.append((BlockPlace(*where, body_bytes(block), part.checksum), block))
        return adopted

    @contextlib.contextmanager
    def _breaking(self) -> Iterator[None]:
        """Blocks all writes and syncs after a failed one: the next sync could succeed although bytes were
        lost.
        """
        if self._broken is not None:
            raise OSError(errno.EIO, f"an earlier write failed: {self._broken}")
        try:
            yield
        except ResourceShortage:  # nothing was written
            raise
        except BaseException as error:
            self._broken = error
            raise

    def _writable(self, schema: pa.Schema, schema_bytes: bytes, size: int) -> Segment:
        segment = self._open.get(schema_bytes)
        if segment is not None and (
            segment.size_bytes + size <= self._roll_bytes or segment.size_bytes == len(schema_bytes)
        ):
            return segment
        if segment is not None:
            self._end(segment)
        branches = [other for other in self._open.values() if other.kind == "branch"]
        if len(branches) >= _MAX_BRANCH_FILES:
            self._end(branches[0])
        number, self.next_number = self.next_number, self.next_number + 1
        segment = Segment(number, kind_of(schema), schema, schema_bytes, len(schema_bytes), set(), new=True)
        segment.descriptor = _create(self.path(number), schema_bytes, self._files)
        self._segments[number] = self._open[schema_bytes] = self._dirty[number] = segment
        return segment

    def _end(self, segment: Segment) -> None:
        """Writes the end mark. The next sync makes it durable and closes the file."""
        _write_all(segment.descriptor, END_MARK, self.path(segment.number))
        del self._open[segment.schema_bytes]
        segment.size_bytes += len(END_MARK)
        segment.ended = True
        self._dirty[segment.number] = segment

    def roll(self, number: int) -> None:
        """Closes this segment, durably, if it is open."""
        with self._lock, self._breaking():
            segment = self._segments.get(number)
            if segment is None or self._open.get(segment.schema_bytes) is not segment:
                return
            self._end(segment)
        self.sync({number})

    def end_all(self) -> None:
        """Closes every open segment, durably."""
        with self._lock, self._breaking():
            for segment in list(self._open.values()):
                self._end(segment)
        self.sync()

    def sync(self, numbers: Iterable[int] | None = None) -> None:
        """Runs fdatasync on the files with unsynced bytes (only those in ``numbers``), and on the directory
        if a file is new.
        """
        subset = None if numbers is None else set(numbers)
        with self._sync_lock, self._breaking():
            with self._lock:
                dirty = [
                    segment for number, segment in self._dirty.items() if subset is None or number in subset
                ]
                # chosen before the sync that makes their end durable
                ended = [segment for segment in dirty if segment.ended]
                for segment in dirty:
                    del self._dirty[segment.number]
            for segment in dirty:
                os.fdatasync(segment.descriptor)
            if any(segment.new for segment in dirty):
                os.fsync(self._folder)
                for segment in dirty:
                    segment.new = False
            with self._lock:
                for segment in ended:
                    self._files.close(segment.descriptor)
                    segment.descriptor = -1
                    self.closed.append(segment.number)

    def info(self, number: int) -> Segment:
        return self._segments[number]

    def take_closed(self) -> list[int]:
        """Returns the segments that were closed, durably, since the last call."""
        with self._lock:
            closed, self.closed = self.closed, []
        return closed

    def release(self, number: int, block_id: BlockId) -> None:
        """Records that ``number`` holds ``block_id`` no longer."""
        with self._lock:
            segment = self._segments.get(number)
            if segment is not None:
                segment.live.discard(block_id)
                if not segment.live:
                    self.idle.add(number)

    def take_idle(self) -> list[int]:
        """Returns segments that nothing needs and that get no more blocks; the caller deletes them. Branch
        segments are included at once.
        """
        with self._lock:
            taken = []
            for number in list(self.idle):
                segment = self._segments[number]
                if segment.schema_bytes in self._open and self._open[segment.schema_bytes] is segment:
                    if segment.kind != "branch":
                        continue
                    del self._open[segment.schema_bytes]
                self.idle.discard(number)
                taken.append(number)
            return taken

    def delete(self, number: int) -> None:
        """Removes the file, after the catalog dropped it. Mappings and open files of readers keep its
        bytes.
        """
        with self._sync_lock, self._lock:
            segment = self._segments.pop(number)
            self._dirty.pop(number, None)
            if segment.descriptor >= 0:
                self._files.close(segment.descriptor)
        self.deletions.delete(number)

    def usage(self) -> list[tuple[int, str, int, bool, list[BlockId]]]:
        """Returns number, kind, size, whether it is open, and its blocks that are named or may be."""
        with self._lock:
            return [
                (segment.number, segment.kind, segment.size_bytes, not segment.ended, sorted(segment.live))
                for segment in self._segments.values()
            ]

    def read(self, block_id: BlockId, place: BlockPlace) -> tuple[pa.RecordBatch, int]:
        """Returns the block and its size in memory. Raises CorruptSegment, DataLoss, ResourceShortage."""
        path = self.path(place.segment)
        try:
            schema = self._segments[place.segment].schema
            with passing(path):
                buffer = read_buffer(path, block_id, place, self._files)
        except (KeyError, FileNotFoundError) as error:
            raise DataLoss(
                f"segment {path} is missing, which holds block {block_id} ({place.rows} rows): restore the "
                "file from a backup"
            ) from error
        return parse(buffer, schema, path, block_id, place), place.length

    def release_files(self) -> None:
        """Closes all descriptors and writes nothing."""
        with self._sync_lock, self._lock:
            for segment in self._segments.values():
                if segment.descriptor >= 0:
                    with contextlib.suppress(OSError):
                        os.close(segment.descriptor)
                    segment.descriptor = -1
            self._open.clear()
            self._dirty.clear()
            os.close(self._folder)
            self._files.release()
