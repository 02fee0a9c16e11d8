"""A system call of the store that fails: before a byte is written it may be tried again; a torn write and a failed
sync end the store.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from broker_core.broker.state.change import Change
from broker_core.errors import ResourceShortage, StoreFailed
from broker_core.store.durable import DurableStore
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


@pytest.mark.parametrize("error", NAMES)
@pytest.mark.parametrize(
    ("call", "after", "size"),
    [("open", 0, 1), ("write", 0, 1), ("write", 1, 1), ("write", 0, 2_000), ("open", 0, 2_000)],
    ids=["new file", "its schema", "its block", "the end of the last one", "the file after it"],
)
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


@pytest.mark.parametrize("error", [*NAMES, "EIO", "ENOSPC"])
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
