"""Parts that a writer on the broker's host passes as a file: written once, by the writer, in the directory of
the broker's segments.

The file has no name until the broker names it (``O_TMPFILE``, then a link to the writer's descriptor), so a
writer that dies leaves nothing behind. It has the form of a closed segment: the schema message, one
encapsulated message for each part, the end mark.

Not here: naming, syncing and committing it (``store``), and sending rows if files cannot be passed
(``client/broker.py``).

Invariant: nothing in the file counts before the broker has checked its inode and every checksum, synced it
and committed its parts. It is checked and named under a lease, which proves that no process can write to it,
so the checked bytes do not change. Then it is as safe as any other segment.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import stat
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import pyarrow as pa
import xxhash

from broker_core.arrow.outside import read_message
from broker_core.core import failpoint
from broker_core.core.checks import Unsigned
from broker_core.core.errors import DiskFull, StoreFailed
from broker_core.message.message import MESSAGE_SCHEMA

END_MARK = b"\xff\xff\xff\xff\x00\x00\x00\x00"  # Arrow IPC: continuation, length 0
# bytes written since the last sync: enough to make the cost of a disk flush small
EARLY_BYTES = 16 * 1024 * 1024
ROOM, LARGER = "free some space", "raise the limit of a file's size (ulimit -f)"
FULL = {errno.ENOSPC: ROOM, errno.EDQUOT: ROOM, errno.EFBIG: LARGER}  # what helps


@dataclass(frozen=True, slots=True)
class FilePart:
    """The place of a part: one encapsulated IPC message."""

    position: int
    length: int
    rows: int
    checksum: Unsigned  # xxh3_64 of those bytes


@dataclass(frozen=True, slots=True)
class PartFile:
    """An ended file, held open by process ``pid``; ``device`` and ``inode`` identify it if the numbers are
    reused.
    """

    pid: int
    descriptor: int
    device: Unsigned
    inode: Unsigned
    size_bytes: int
    parts: tuple[FilePart, ...]

    def open(self) -> int:
        """Returns a descriptor of this process for reading. Raises OSError if the file is not accessible, as
        between containers; ValueError.

        Only a file without a name is opened, so only its writers can have it, and only one of this process's
        user.
        """
        # does not open a pipe or a device
        seen = os.open(f"/proc/{self.pid:d}/fd/{self.descriptor:d}", os.O_PATH)
        try:
            found = os.fstat(seen)
            if not stat.S_ISREG(found.st_mode) or found.st_nlink or found.st_uid != os.geteuid():
                raise OSError(errno.EPERM, "not a file without a name of this user")
            if (found.st_dev, found.st_ino, found.st_size) != (self.device, self.inode, self.size_bytes):
                raise OSError(errno.ESTALE, "another file than the writer's")
            return os.open(f"/proc/self/fd/{seen}", os.O_RDONLY | os.O_NONBLOCK)
        finally:
            os.close(seen)

    def batches(self, descriptor: int) -> Iterator[pa.RecordBatch]:
        """Yields the parts, mapped from ``descriptor``, each verified. Raises ValueError (ArrowInvalid is
        one), OSError.

        The broker holds :func:`unwritable` meanwhile, because truncating a mapped file kills the process that
        reads it.
        """
        schema_bytes = memoryview(MESSAGE_SCHEMA.serialize())
        end = len(schema_bytes)
        with pa.memory_map(f"/proc/self/fd/{descriptor}") as file:
            if memoryview(file.read_buffer(len(schema_bytes))) != schema_bytes:
                raise ValueError("a file of parts must have the schema of messages")
            for part in self.parts:
                if part.position != end or part.length <= 0:
                    raise ValueError(
                        f"the part at position {part.position} does not follow the one that ends at {end}"
                    )
                end += part.length
                data = file.read_buffer(part.length)
                if len(data) != part.length or xxhash.xxh3_64_intdigest(data) != part.checksum:
                    raise ValueError(f"the part at position {part.position} is not what its checksum says")
                batch = read_message(data, MESSAGE_SCHEMA)  # a checksum is the writer's own
                if batch.num_rows != part.rows:
                    raise ValueError(
                        f"the part at position {part.position} has {batch.num_rows} rows "
                        f"instead of {part.rows}"
                    )
                yield batch
            if bytes(file.read_buffer(len(END_MARK) + 1)) != END_MARK:
                raise ValueError(f"the file of parts does not end at {end}")


@contextlib.contextmanager
def unwritable(descriptor: int) -> Iterator[None]:
    """Ensures that no process has the file open or mapped for writing, and that none can open it so or
    truncate it.

    Raises OSError if one has, or if the file system has no leases. A process that opens it for writing waits.
    """
    import fcntl  # not on every platform, like files without a name

    # ignored by default; the default signal for a waiting writer would end the process
    fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
    fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    try:
        yield
    finally:
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)


class _Pieces:
    """A file object for Arrow that keeps the buffers of a batch without copying them."""

    closed = False

    def __init__(self) -> None:
        self.written: list[pa.Buffer | bytes] = []

    def write(self, piece: pa.Buffer | bytes) -> int:
        self.written.append(piece)
        return len(piece)

    def flush(self) -> None:
        return


def encapsulated(batch: pa.RecordBatch) -> list[pa.Buffer | bytes]:
    """Returns the bytes of ``batch.serialize()`` in order, without a copy: the large pieces are the batch's
    own buffers.
    """
    pieces = _Pieces()
    schema_bytes = batch.schema.serialize().size
    with pa.ipc.new_stream(pa.PythonFile(pieces, "w"), batch.schema) as writer:
        writer.write_batch(batch)
        written = list(pieces.written)
    while schema_bytes > 0:  # the schema at the start of the stream
        schema_bytes -= len(written.pop(0))
    return written


class PartWriter:
    """Writes parts of MESSAGE_SCHEMA to a new file without a name in a data directory. Its pages are written
    to disk while later parts are made.
    """

    def __init__(self, directory: str) -> None:
        """Raises OSError if this system, file system or user does not support it."""
        flag = getattr(os, "O_TMPFILE", 0)  # Linux has it
        if not flag:
            raise OSError(errno.ENOTSUP, "no files without a name here")
        self._directory = directory
        self.descriptor = os.open(os.path.join(directory, "segments"), flag | os.O_RDWR, 0o644)
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="part-file")
        self._syncing: Future[None] | None = None
        self._parts: list[FilePart] = []
        self._early_bytes = 0  # are synced, or will soon be
        self.size_bytes = 0
        self._write(MESSAGE_SCHEMA.serialize())

    def append(self, batch: pa.RecordBatch) -> None:
        """Writes a part. Raises DiskFull, StoreFailed: the file is abandoned, the broker continues."""
        position, checksum = self.size_bytes, xxhash.xxh3_64()
        for piece in encapsulated(batch):
            checksum.update(piece)
            self._write(piece)
        self._parts.append(
            FilePart(position, self.size_bytes - position, batch.num_rows, checksum.intdigest())
        )
        if self.size_bytes - self._early_bytes >= EARLY_BYTES:
            self._synced()
            # optional, to be early: the broker syncs before it commits; an error found here is raised here
            self._syncing = self._disk.submit(os.fdatasync, self.descriptor)
            self._early_bytes = self.size_bytes

    def end(self) -> PartFile:
        """Ends the file and returns it; no process can write to it now. Raises DiskFull, StoreFailed."""
        self._write(END_MARK)
        self._synced()
        try:
            written, self.descriptor = (
                self.descriptor,
                os.open(f"/proc/self/fd/{self.descriptor}", os.O_RDONLY),
            )
        except OSError as error:
            raise self._failed(error) from error
        os.close(written)
        failpoint.here("client.file.written")
        found = os.fstat(self.descriptor)
        return PartFile(
            os.getpid(), self.descriptor, found.st_dev, found.st_ino, self.size_bytes, tuple(self._parts)
        )

    def close(self) -> None:
        """Closes the file. It disappears, unless the broker has named it."""
        self._disk.shutdown()
        os.close(self.descriptor)

    def _write(self, data: pa.Buffer | bytes) -> None:
        view = memoryview(data)
        self.size_bytes += len(view)
        try:
            while view:
                view = view[os.write(self.descriptor, view) :]
        except OSError as error:
            raise self._failed(error) from error

    def _synced(self) -> None:
        try:
            if self._syncing is not None:
                self._syncing.result()
        except OSError as error:
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> DiskFull | StoreFailed:
        what = (
            f"rows could not be written to {self._directory}: {error.strerror}; nothing of them was published"
        )
        if error.errno in FULL:
            return DiskFull(f"{what}: {FULL[error.errno]}, then write them again")
        return StoreFailed(f"{what}: check the disk, then write them again")
