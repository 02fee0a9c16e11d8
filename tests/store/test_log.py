"""The catalog's log after a crash: what was cut off is forgotten, what was acknowledged never silently."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from broker_core.core import errors
from broker_core.core.change import Change, InboxRow
from broker_core.core.records import HoleRecord
from broker_core.store.catalog import log_path
from broker_core.store.durable import DurableStore
from broker_core.store.log import hidden_commits
from broker_core.store.salvage.salvage import salvage
from broker_core.store.salvage.verify import verify

COMMITS = 60
FRAME = 24 + 1024


def commit(store: DurableStore, number: int, size: int = 100) -> None:
    row = InboxRow(1, number, number + 1, number, "", "q", b"", b"%d " % number + b"x" * size, bytes(16))
    store.commit(
        [Change(sequence=number + 1, rows=[row], journal=[HoleRecord(1, 2 * number, 2 * number + 1)])]
    )


@pytest.fixture(scope="module")
def crashed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("crashed")
    store = DurableStore(directory / "live")
    store.load()
    for number in range(COMMITS):
        commit(store, number, 100 + number * 37 % 2000)
    shutil.copytree(directory / "live", directory / "data")
    store.close()
    return directory / "data"


def used(log: Path) -> int:
    return len(log.read_bytes().rstrip(b"\0"))


def survivors(directory: Path) -> int:
    store = DurableStore(directory)
    found = len(store.load().inbox)
    store.close()
    return found


def test_a_log_that_is_whole_hides_nothing(crashed: Path, tmp_path: Path) -> None:
    assert hidden_commits(log_path(crashed / "catalog.db")) is None
    assert hidden_commits(tmp_path / "missing") is None
    assert survivors(Path(shutil.copytree(crashed, tmp_path / "data"))) == COMMITS


@pytest.mark.parametrize("seed", range(40))
def test_a_flipped_byte_in_the_log_forgets_at_most_the_last_commit_silently(
    crashed: Path, tmp_path: Path, seed: int
) -> None:
    directory = tmp_path / "data"
    shutil.copytree(crashed, directory)
    log = log_path(directory / "catalog.db")
    chosen = random.Random(seed)
    content = bytearray(log.read_bytes())
    at = chosen.randrange(32) if seed % 8 == 0 else chosen.randrange(used(log))
    content[at] ^= 1 << chosen.randrange(8)
    log.write_bytes(content)
    problems = verify(directory).problems
    try:
        found = survivors(directory)
    except errors.CorruptCatalog:
        assert problems
        report = salvage(directory, tmp_path / "new")
        assert not report.whole
        assert "log" in " ".join(report.losses)
    else:
        assert found >= COMMITS - 1
        assert problems == []


@pytest.mark.parametrize("seed", range(30))
def test_a_write_that_a_power_cut_has_torn_is_no_damage(tmp_path: Path, seed: int) -> None:
    """Of the frames of the last commit any may have reached the disk, whole or in part."""
    chosen = random.Random(seed)
    store = DurableStore(tmp_path / "live")
    store.load()
    for number in range(10):
        commit(store, number)
    log = log_path(tmp_path / "live" / "catalog.db")
    end = used(log)
    before = log.read_bytes()
    commit(store, 10, 20_000)
    after = log.read_bytes()
    torn = bytearray(before)
    for position in range(end - end % 512, used(log), 512):
        if chosen.random() < 0.6:
            torn[position : position + 512] = after[position : position + 512]
    shutil.copytree(tmp_path / "live", tmp_path / "data")
    store.close()
    (tmp_path / "data" / "catalog.db-wal").write_bytes(torn)
    assert survivors(tmp_path / "data") in (10, 11)
    assert verify(tmp_path / "data").problems == []


def test_what_two_power_cuts_have_torn_is_no_damage_either(tmp_path: Path) -> None:
    directory = tmp_path / "0"
    count = 0
    for cut in range(4):
        store = DurableStore(directory)
        assert len(store.load().inbox) == count
        commit(store, count)
        log = log_path(directory / "catalog.db")
        before, end = log.read_bytes(), used(log)
        commit(store, count + 1, 20_000 - cut * 4000)
        torn = bytearray(log.read_bytes())
        torn[end : end + FRAME] = before[end : end + FRAME]  # its first frame did not reach the disk
        other = tmp_path / str(cut + 1)
        shutil.copytree(directory, other)
        store.close()
        log_path(other / "catalog.db").write_bytes(torn)
        directory, count = other, count + 1
    assert survivors(directory) == count
