"""A system call of the store that fails: before a byte is written it may be tried again; a torn write and a failed
sync end the store. To ``verify`` and ``salvage`` it is no damage.
"""

from __future__ import annotations

import errno
import io
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from broker_core.core import errors
from broker_core.core.change import Change
from broker_core.core.errors import ResourceShortage, StoreFailed
from broker_core.launcher import Broker
from broker_core.store.durable import DurableStore
from broker_core.store.salvage.salvage import salvage
from broker_core.store.salvage.verify import verify
from tests.refused_calls import PASSING
from tests.store.test_segment import files, messages, named

NAMES = [errno.errorcode[number] for number in PASSING]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DurableStore]:
    store = DurableStore(tmp_path / "data", roll_bytes=100_000, cache_bytes=0)
    store.load()
    yield store
    store.close()


def refuse(patch: pytest.MonkeyPatch, name: str, error: str, *, after: int = 0) -> None:
    """The call with this name, after so many, until ``patch`` is undone."""
    real: Callable[..., Any] = getattr(os, name)
    left = after

    def call(*arguments: Any, **named: Any) -> Any:
        nonlocal left
        left -= 1
        if left >= 0:
            return real(*arguments, **named)
        number = getattr(errno, error)
        raise OSError(number, os.strerror(number))

    patch.setattr(os, name, call)


BEFORE_A_BYTE = pytest.mark.parametrize(
    ("call", "after", "size"),
    [("open", 0, 1), ("write", 0, 1), ("write", 1, 1), ("write", 0, 2_000), ("open", 0, 2_000)],
    ids=["new file", "its schema", "its block", "the end of the last one", "the file after it"],
)


@pytest.mark.parametrize("error", NAMES)
@BEFORE_A_BYTE
def test_what_is_refused_before_a_byte_is_written_is_tried_again(
    store: DurableStore, tmp_path: Path, call: str, after: int, size: int, error: str
) -> None:
    before = [named(store, messages(900))] if size > 1 else []
    with pytest.MonkeyPatch.context() as patch:
        refuse(patch, call, error, after=after)
        with pytest.raises(ResourceShortage, match="try again"):
            store.append(messages(size))
    after_it = named(store, messages(size))
    for block_id in (*before, after_it):
        assert store.read(block_id).num_rows in (size, 900)
    assert len(files(tmp_path / "data")) == len(before) + 1
    store.close()
    with closing(DurableStore(tmp_path / "data")) as again:
        assert again.read(after_it).num_rows == size


@BEFORE_A_BYTE
def test_a_volume_that_turns_read_only_ends_the_store_and_is_named(
    store: DurableStore, tmp_path: Path, call: str, after: int, size: int
) -> None:
    before = named(store, messages(900))
    if size == 1:
        store.roll(store.segment_usage()[0].number)
    with pytest.MonkeyPatch.context() as patch:
        refuse(patch, call, "EROFS", after=after)
        with pytest.raises(StoreFailed, match=r"data is read-only: make the file system .* writable"):
            store.append(messages(size))
    with pytest.raises(StoreFailed, match="an earlier write failed"):
        store.append(messages(1))
    store.close()
    with closing(DurableStore(tmp_path / "data")) as again:
        assert again.read(before).num_rows == 900


@pytest.mark.parametrize("error", NAMES)
@pytest.mark.parametrize("call", ["open", "preadv"])
def test_a_read_that_is_refused_is_no_damage_and_is_tried_again(
    store: DurableStore, call: str, error: str
) -> None:
    block_id = named(store, messages(10))
    with pytest.MonkeyPatch.context() as patch:
        refuse(patch, call, error)
        with pytest.raises(ResourceShortage, match="try again"):
            store.read(block_id)
    assert store.read(block_id).num_rows == 10


@pytest.mark.parametrize("error", [*NAMES, "EIO", "ENOSPC", "EROFS"])
@pytest.mark.parametrize("call", ["fdatasync", "fsync"])
def test_a_failed_sync_ends_the_store_whatever_the_error(
    store: DurableStore, tmp_path: Path, call: str, error: str
) -> None:
    block_id = named(store, messages(10))
    store.roll(store.segment_usage()[0].number)
    lost = store.append(messages(10)).block_id  # in a new file, whose name is synced too
    with pytest.MonkeyPatch.context() as patch:
        refuse(patch, call, error)
        with pytest.raises(Exception, match=r"TXMQ_STORE_FAILED|TXMQ_DISK_FULL"):
            store.commit([Change(names=[lost])])
    with pytest.raises(StoreFailed, match="an earlier write failed"):
        store.append(messages(1))
    store.close()
    again = DurableStore(tmp_path / "data")
    assert again.read(block_id).num_rows == 10
    assert [block.block_id for block in again.load().blocks] == [block_id]
    again.close()


@pytest.mark.parametrize("error", NAMES)
def test_a_torn_write_ends_the_store(store: DurableStore, tmp_path: Path, error: str) -> None:
    block_id = named(store, messages(10))
    real, calls = os.write, 0

    def torn(descriptor: int, data: Any) -> int:
        nonlocal calls
        calls += 1
        if calls == 1:
            return real(descriptor, data[:100])
        number = getattr(errno, error)
        raise OSError(number, os.strerror(number))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", torn)
        with pytest.raises(StoreFailed):
            store.append(messages(10))
    with pytest.raises(StoreFailed, match="an earlier write failed"):
        store.append(messages(1))
    store.close()
    again = DurableStore(tmp_path / "data")
    assert again.read(block_id).num_rows == 10
    again.close()


# -- verify and salvage --------------------------------------------------------------------------------------

LOOKS = [(os, "open"), (os, "preadv"), (io, "open"), (shutil, "copy")]
REFUSED = (errors.ResourceShortage, errors.StoreFailed, errors.DataDirectoryInvalid, errors.DiskFull)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Messages in segments and in the catalog."""
    directory = tmp_path_factory.mktemp("whole") / "data"
    with Broker.open(directory) as broker, broker.channel() as channel:
        channel.queue_declare("q")
        for count in (2_000, 3):
            channel.tx_select()
            for number in range(count):
                channel.publish(b"%d" % number, routing_key="q")
            channel.tx_commit()
    return directory


def verified(directory: Path, _to: Path) -> bool:
    return verify(directory).ok


def salvaged(directory: Path, to: Path) -> bool:
    return salvage(directory, to).whole


def refusing(module: Any, name: str, number: int, *, after: int, times: int) -> tuple[Any, list[int]]:
    """The call with this name, refused so many times after so many; and how often it was called."""
    real, calls = getattr(module, name), [0]

    def call(path: Any, *arguments: Any, **named: Any) -> Any:
        calls[0] += 1
        if after < calls[0] <= after + times:
            raise OSError(number, os.strerror(number), str(path))
        return real(path, *arguments, **named)

    return call, calls


def refusal(look: Callable[[Path, Path], bool], directory: Path, to: Path) -> str:
    """Why it could not look for now; "" for a directory that it found whole."""
    try:
        assert look(directory, to)
    except REFUSED as error:
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("look", [verified, salvaged])
@pytest.mark.parametrize(("module", "name"), LOOKS, ids=[f"{m.__name__}.{n}" for m, n in LOOKS])
def test_what_the_machine_refuses_for_now_is_no_damage(
    whole: Path, tmp_path: Path, look: Callable[[Path, Path], bool], module: Any, name: str
) -> None:
    """Each call, once, and from then on: it is whole, or one error says what was short."""

    def looked(to: Path, number: int, after: int, times: int) -> tuple[str, int]:
        call, calls = refusing(module, name, number, after=after, times=times)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, name, call)
            return refusal(look, whole, to), calls[0]

    said, called = looked(tmp_path / "all", 0, 0, 0)
    assert not said and called
    refusals = set()
    for after in range(called):
        short = PASSING[after % len(PASSING)]
        for number, times in ((short, 1_000), (short, 1), (errno.EIO, 1)):
            to = tmp_path / f"{after}-{number}-{times}"
            said, _ = looked(to, number, after, times)
            refusals.add(said)
            assert "damaged" not in said and "\n" not in said
            assert not (to / "catalog.db").exists() or contents_are_there(to), "a part is not the whole"
            assert said or look is verified or (to / "catalog.db").exists()
    assert len(refusals) > 1


def contents_are_there(directory: Path) -> bool:
    with Broker.open(directory) as broker:
        return [queue.messages for queue in broker.queues()] == [2_003]


@pytest.mark.parametrize("look", [verified, salvaged])
def test_a_moment_without_files_in_sqlite_is_no_damage(
    whole: Path, tmp_path: Path, look: Callable[[Path, Path], bool]
) -> None:
    """A real limit: a few files more each time, until they are enough."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = [os.open(os.devnull, os.O_RDONLY)]
    while held[-1] < max(map(int, os.listdir("/proc/self/fd"))) - 1:  # no gaps below the limit
        held.append(os.open(os.devnull, os.O_RDONLY))
    said = ["not yet"]
    while said[-1] and len(said) < 40:  # salvage writes, with a reserve of files
        resource.setrlimit(resource.RLIMIT_NOFILE, (held[-1] + 2 * len(said), hard))
        try:
            said.append(refusal(look, whole, tmp_path / str(len(said))))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for each in held:
        os.close(each)
    assert len(said) > 2 and not said[-1]
    assert not [each for each in said if "damaged" in each]


def test_a_segment_that_the_disk_never_gives_is_damage(whole: Path, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        call, _ = refusing(os, "preadv", errno.EIO, after=0, times=1_000_000)
        patch.setattr(os, "preadv", call)
        assert not verified(whole, tmp_path)
