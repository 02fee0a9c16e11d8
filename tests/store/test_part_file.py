"""Which files of writers the broker takes: those that nobody can change, that are what they are said to be,
and no others.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import xxhash

from broker_core.arrow.part_file import END_MARK, FilePart, PartFile, PartWriter, unwritable
from broker_core.core.change import Change
from broker_core.message.message import MESSAGE_SCHEMA
from broker_core.store.durable import DurableStore
from broker_core.store.salvage.verify import verify
from tests.store.test_segment import files, handed_over, messages


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DurableStore]:
    store = DurableStore(tmp_path)
    store.load()
    yield store
    store.close()


def _other_file_system() -> bool:
    with contextlib.suppress(OSError):
        os.close(os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR))
        return os.stat("/dev/shm").st_dev != os.stat(tempfile.gettempdir()).st_dev
    return False


def described(descriptor: int, parts: tuple[FilePart, ...] = ()) -> PartFile:
    found = os.fstat(descriptor)
    return PartFile(os.getpid(), descriptor, found.st_dev, found.st_ino, found.st_size, parts)


def written(path: Path, *pieces: bytes) -> int:
    """A file without a name, of these bytes, that nobody can write to."""
    descriptor = os.open(path / "segments", os.O_TMPFILE | os.O_RDWR)
    os.write(descriptor, b"".join(pieces))
    readable = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)
    os.close(descriptor)
    return readable


def part(position: int, data: bytes, rows: int) -> FilePart:
    return FilePart(position, len(data), rows, xxhash.xxh3_64_intdigest(data))


# -- what a writer can still do ------------------------------------------------------------------------------


def test_a_writer_cannot_change_or_cut_its_file_once_it_is_handed_over(
    store: DurableStore, tmp_path: Path
) -> None:
    writer, file = handed_over(tmp_path, messages(3))
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(file.descriptor, b"other bytes", 2000)
    with pytest.raises(OSError, match="Invalid argument"):
        os.ftruncate(file.descriptor, 10)
    ((info, _),) = store.adopt(file)
    store.commit([Change(names=[info.block_id])])
    writer.close()
    assert store.read(info.block_id) == messages(3)


@pytest.mark.parametrize("kept", ["a descriptor", "a mapping"])
def test_a_file_that_somebody_can_still_write_to_is_not_taken(
    store: DurableStore, tmp_path: Path, kept: str
) -> None:
    writer = PartWriter(str(tmp_path))
    writer.append(messages(3))
    descriptor = os.dup(writer.descriptor)
    mapping = mmap.mmap(descriptor, writer.size_bytes) if kept == "a mapping" else None
    file = writer.end()
    if mapping is not None:
        os.close(descriptor)
    assert store.adopt(file) == []
    assert files(tmp_path) == []
    if mapping is not None:
        mapping.close()
    else:
        os.close(descriptor)
    assert len(store.adopt(file)) == 1
    writer.close()


def test_nobody_can_open_a_file_for_writing_or_cut_it_while_it_is_verified(tmp_path: Path) -> None:
    (tmp_path / "segments").mkdir()
    descriptor = written(tmp_path, b"x" * 100)
    with unwritable(descriptor):
        with pytest.raises(BlockingIOError):
            os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK)
        with pytest.raises(BlockingIOError):
            os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_TRUNC | os.O_NONBLOCK)
        assert os.fstat(descriptor).st_size == 100
    os.close(os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK))
    os.close(descriptor)


# -- what is not a writer's file -----------------------------------------------------------------------------


def test_a_pipe_is_refused_without_waiting_for_its_other_end(store: DurableStore, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    descriptor = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    pipe = described(descriptor)
    answers: list[Any] = []
    asking = threading.Thread(target=lambda: answers.append(store.adopt(pipe)), daemon=True)
    asking.start()
    asking.join(600)
    assert answers == [[]], "it waits until somebody writes to the pipe"
    os.close(descriptor)


def test_a_pipe_is_not_even_opened(store: DurableStore, tmp_path: Path) -> None:
    """Opening has effects of its own: a writer of the pipe would see a reader come and go."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    seen = os.open(fifo, os.O_PATH)
    assert store.adopt(described(seen)) == []
    with pytest.raises(OSError, match="No such device or address"):  # there is no reader
        os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
    os.close(seen)


@pytest.mark.parametrize("kind", ["directory", "device", "socket", "none"])
def test_a_descriptor_that_is_no_file_is_refused(store: DurableStore, tmp_path: Path, kind: str) -> None:
    with contextlib.ExitStack() as stack:
        if kind == "socket":
            descriptor = stack.enter_context(socket.socket()).fileno()
        else:
            descriptor = os.open(
                {"directory": tmp_path, "device": "/dev/zero", "none": tmp_path}[kind], os.O_RDONLY
            )
            stack.callback(os.close, descriptor)
        file = described(descriptor)
        assert store.adopt(replace(file, descriptor=1 << 20) if kind == "none" else file) == []


def test_a_file_that_has_a_name_is_refused_also_a_segment_of_the_broker(
    store: DurableStore, tmp_path: Path
) -> None:
    info = store.append(messages(3))
    store.commit([Change(names=[info.block_id])])
    location = store.locate(info.block_id)
    assert location is not None
    own = next(fd for fd in map(int, os.listdir("/proc/self/fd")) if _target(fd) == location.path)
    readable = os.open(location.path, os.O_RDONLY)
    for descriptor in (own, readable):
        parts = (FilePart(location.position, location.length, location.rows, location.checksum),)
        assert store.adopt(described(descriptor, parts)) == []
    os.close(readable)
    assert len(files(tmp_path)) == 1
    assert os.stat(location.path).st_nlink == 1


def _target(descriptor: int) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/self/fd/{descriptor}")
    return ""


def test_a_file_is_taken_once(store: DurableStore, tmp_path: Path) -> None:
    writer, file = handed_over(tmp_path, messages(3))
    assert len(store.adopt(file)) == 1
    assert store.adopt(file) == []
    assert len(files(tmp_path)) == 1
    writer.close()


@pytest.mark.skipif(not _other_file_system(), reason="there is one file system for files without a name")
def test_a_file_of_another_file_system_is_refused(store: DurableStore, tmp_path: Path) -> None:
    elsewhere = Path(tempfile.mkdtemp(dir="/dev/shm"))
    (elsewhere / "segments").mkdir()
    writer, file = handed_over(elsewhere, messages(3))
    assert store.adopt(file) == [] and len(files(tmp_path)) == 0
    writer.close()
    shutil.rmtree(elsewhere)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_refused(store: DurableStore, tmp_path: Path) -> None:
    writer, file = handed_over(tmp_path, messages(3))
    os.fchown(file.descriptor, 12345, -1)
    assert store.adopt(file) == []
    os.fchown(file.descriptor, os.geteuid(), -1)
    assert len(store.adopt(file)) == 1
    writer.close()


@pytest.mark.parametrize("wrong", ["self/../1", "-1", ""])
def test_numbers_of_processes_and_descriptors_are_numbers(
    store: DurableStore, tmp_path: Path, wrong: str
) -> None:
    writer, file = handed_over(tmp_path, messages(3))
    assert store.adopt(replace(file, pid=wrong)) == []  # type: ignore[arg-type]
    assert store.adopt(replace(file, descriptor=wrong)) == []  # type: ignore[arg-type]
    writer.close()


# -- what is in the file -------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["overlap", "gap", "twice", "order", "end", "rest", "schema"])
def test_a_file_whose_parts_are_not_laid_out_as_in_a_segment_is_not_taken(
    store: DurableStore, tmp_path: Path, fault: str
) -> None:
    schema = MESSAGE_SCHEMA.serialize().to_pybytes()
    one, two = messages(3).serialize().to_pybytes(), messages(5).serialize().to_pybytes()
    pieces, position = [schema, one, two, END_MARK], len(schema)
    parts = [part(position, one, 3), part(position + len(one), two, 5)]
    if fault == "overlap":
        parts[1] = part(position, one, 3)
    elif fault == "gap":
        pieces = [schema, one, b"\0" * 8, two, END_MARK]
        parts[1] = part(position + len(one) + 8, two, 5)
    elif fault == "twice":
        parts.append(parts[1])
    elif fault == "order":
        parts.reverse()
    elif fault == "end":
        pieces[-1] = b""
    elif fault == "rest":
        pieces.append(b"more")
    elif fault == "schema":
        pieces[0] = schema[:-8] + b"\1" * 8
    descriptor = written(tmp_path, *pieces)
    assert store.adopt(described(descriptor, tuple(parts))) == []
    assert files(tmp_path) == []
    os.close(descriptor)


def test_a_file_laid_out_as_a_segment_is_taken(store: DurableStore, tmp_path: Path) -> None:
    schema = MESSAGE_SCHEMA.serialize().to_pybytes()
    one, two = messages(3).serialize().to_pybytes(), messages(5).serialize().to_pybytes()
    descriptor = written(tmp_path, schema, one, two, END_MARK)
    parts = (part(len(schema), one, 3), part(len(schema) + len(one), two, 5))
    infos = [info for info, _ in store.adopt(described(descriptor, parts))]
    os.close(descriptor)
    store.commit([Change(names=[info.block_id for info in infos])])
    assert [store.read(info.block_id) for info in infos] == [messages(3), messages(5)]
    store.close()
    assert verify(tmp_path).problems == []


def test_a_writer_that_waits_to_write_goes_on_when_its_file_was_looked_at(
    store: DurableStore, tmp_path: Path
) -> None:
    """It opens the file anew, which nobody can keep it from: it waits for the broker, and never the broker
    for it.
    """
    writer, file = handed_over(tmp_path, *[messages(2000) for _ in range(20)])
    stop = threading.Event()
    cut: list[int] = []

    def cuts() -> None:
        while not stop.is_set():
            again = os.open(f"/proc/self/fd/{file.descriptor}", os.O_WRONLY)
            cut.append(again)
            os.close(again)

    cutting = threading.Thread(target=cuts)
    cutting.start()
    while not cut:
        time.sleep(0.001)
    for _ in range(20):
        if store.adopt(file):
            break
    before = len(cut)
    while len(cut) < before + 3:
        time.sleep(0.001)
    stop.set()
    cutting.join()
    writer.close()
