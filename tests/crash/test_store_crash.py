"""The store's rows of the crash table: a real process that commits, killed with SIGKILL at every step of
every write.

What was acknowledged is there, the commit in flight is there whole or not at all, nothing else is, and the
store goes on working.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker_core.core.errors import StoreError
from broker_core.store.catalog import Catalog
from broker_core.store.durable import DurableStore
from broker_core.store.memory import MemoryStore
from broker_core.store.salvage.verify import verify
from tests.crash import store_workload
from tests.crash.store_workload import ROLL_BYTES, State, contents, step
from tests.forked import Forked

pytestmark = pytest.mark.crash

STEPS = 120

# every failpoint of the store, and at which hit the process dies: late enough that all kinds of steps have
# been done
COMMIT_POINTS = [
    "store.append.written@20",
    "store.commit.begin@60",
    "store.commit.synced@60",
    "store.commit.executed@60",
]
COMMIT_POINTS += [
    "store.commit.committed@60",
    "store.seal.written@5",
    "store.seal.synced@5",
    "store.rewrite.synced@5",
]
COMMIT_POINTS += [
    "store.adopt.linked@5",
    "store.sync.synced@5",
    "store.forget.unlinked@3",
    "store.close.synced",
    "store.close.committed",
]
RECOVERY_POINTS = [
    f"store.recovery.{name}" for name in ("catalog", "replayed", "removed", "cut", "executed", "committed")
]


def start(path: Path, seed: int, steps: int, *limits: int, failpoints: str = "") -> Forked:
    return Forked(
        store_workload.__name__,
        [str(path), str(seed), str(steps), *map(str, limits)],
        {**os.environ, "TXMQ_FAILPOINTS": failpoints},
    )


def run(path: Path, seed: int, steps: int, *limits: int, failpoints: str = "") -> tuple[int, list[str]]:
    """Exit code (negative: the signal) and what was printed."""
    process = start(path, seed, steps, *limits, failpoints=failpoints)
    with process.stdout:
        lines = process.stdout.read().splitlines()
    return process.wait(600), lines


def acknowledged(lines: list[str], before: int = 0) -> int:
    """How many steps are acknowledged."""
    return max([before, *(int(line.split()[1]) for line in lines if line.startswith("ack "))])


class Model:
    """A MemoryStore that does the same steps."""

    def __init__(self, seed: int) -> None:
        self._seed, self._store = seed, MemoryStore()
        self._state = State.of(self._store.load())

    def contents(self, steps: int) -> list[object]:
        while self._state.steps < steps:
            step(self._store, self._state, self._seed)
        reopened = self._store.reopened()
        return contents(reopened, reopened.load())


def check(path: Path, model: Model, acked: int) -> int:
    """Open the directory after a crash. Returns how many steps it holds."""
    store = DurableStore(path, roll_bytes=ROLL_BYTES)
    try:
        image = store.load()
        steps = State.of(image).steps
        assert acked <= steps <= acked + 1
        assert contents(store, image) == model.contents(steps)
    finally:
        store.close(clean=False)
    assert verify(path).problems == []
    return steps


@pytest.mark.parametrize("failpoint", COMMIT_POINTS)
def test_killed_at_this_step_everything_acknowledged_is_there_nothing_is_partial_and_work_goes_on(
    failpoint: str, tmp_path: Path
) -> None:
    path, model = tmp_path / "data", Model(1)
    code, lines = run(path, 1, STEPS, failpoints=f"{failpoint}=kill")
    assert code == -signal.SIGKILL
    acked = acknowledged(lines)
    assert acked >= 10
    steps = check(path, model, acked)
    code, lines = run(path, 1, 30)
    assert code == 0 and lines[-1] == "closed"
    assert check(path, model, acknowledged(lines)) == steps + 30


@pytest.mark.soak
@pytest.mark.parametrize("failpoint", RECOVERY_POINTS)
def test_killed_at_this_step_of_recovery_the_next_recovery_finds_the_same(
    failpoint: str, tmp_path: Path
) -> None:
    path, model = tmp_path / "data", Model(2)
    code, lines = run(path, 2, STEPS, failpoints="store.commit.synced@90=kill")
    assert code == -signal.SIGKILL
    acked = acknowledged(lines)
    code, lines = run(path, 2, 5, failpoints=f"{failpoint}=kill")
    assert code == -signal.SIGKILL and lines == []
    steps = check(path, model, acked)
    code, lines = run(path, 2, 30)
    assert (code, acknowledged(lines)) == (0, steps + 30)
    check(path, model, steps + 30)


def test_killed_while_the_directory_is_first_made_it_opens_empty(tmp_path: Path) -> None:
    code, lines = run(tmp_path / "data", 1, 5, failpoints="store.recovery.created=kill")
    assert (code, lines) == (-signal.SIGKILL, [])
    assert run(tmp_path / "data", 1, 5)[1][-1] == "closed"
    assert check(tmp_path / "data", Model(1), 5) == 5


def named_ends(path: Path) -> dict[int, int]:
    """Segment -> the last byte that the catalog names, read from a copy."""
    with tempfile.TemporaryDirectory() as copy:
        for name in ("catalog.db", "catalog.db-wal"):
            if (path / name).exists():
                shutil.copy(path / name, copy)
        catalog = Catalog(Path(copy) / "catalog.db", log=False)
        try:
            ends = {row.segment: len(row.schema) for row in catalog.segments() if row.state == "open"}
            closed = {row.segment for row in catalog.segments()} - ends.keys()
            for place in catalog.blocks().values():
                if place.segment in ends:
                    ends[place.segment] = max(ends[place.segment], place.position + place.length)
        finally:
            catalog.close()
    numbers = (
        [int(file.stem) for file in (path / "segments").iterdir()] if (path / "segments").exists() else []
    )
    return {number: ends.get(number, 0) for number in numbers if number not in closed}


def tear(path: Path, choice: random.Random) -> int:
    """What a power cut may do to bytes that were never synced: they are missing, or anything. Returns the
    number of files torn.
    """
    torn = 0
    for number, end in named_ends(path).items():
        file = path / "segments" / f"{number:08d}.arrow"
        tail = file.stat().st_size - end
        kind = choice.choice(("cut", "garbage", "longer"))
        with file.open("r+b") as handle:
            if kind == "cut":
                handle.truncate(end + choice.randint(0, max(tail, 0)))
            else:
                handle.seek(end)
                handle.write(choice.randbytes(max(tail, 0) + (4000 if kind == "longer" else 0)))
        torn += 1
    log = path / "catalog.db-wal"
    if log.exists():
        with log.open("ab") as handle:
            handle.write(choice.randbytes(choice.randrange(5000)))
    return torn


@pytest.mark.parametrize(
    "failpoint",
    ["store.append.written@25", "store.commit.begin@70", "store.seal.written@4", "store.commit.executed@77"],
)
def test_torn_bytes_that_were_never_synced_take_nothing_acknowledged_with_them(
    failpoint: str, tmp_path: Path
) -> None:
    model = Model(3)
    code, lines = run(tmp_path / "data", 3, STEPS, failpoints=f"{failpoint}=kill")
    assert code == -signal.SIGKILL
    for seed in range(6):
        path = Path(shutil.copytree(tmp_path / "data", tmp_path / str(seed)))
        assert tear(path, random.Random(seed)) > 0
        check(path, model, acknowledged(lines))


def kill_again_and_again(tmp_path: Path, seed: int, rounds: int) -> None:
    choice = random.Random(seed)
    path, model, acked = tmp_path / "data", Model(seed), 0
    for _ in range(rounds):
        point = choice.choice([*COMMIT_POINTS, ""]).partition("@")[0]
        failpoints = f"{point}@{choice.randint(1, 20)}=kill" if point and choice.random() < 0.5 else ""
        process = start(path, seed, 10_000, failpoints=failpoints)
        wanted = acked + choice.randint(1, 150)
        for line in process.stdout:
            acked = acknowledged([line], acked)
            if acked >= wanted:
                break
        process.kill()
        with process.stdout:  # not communicate: it would miss what is buffered here already
            acked = acknowledged(process.stdout.readlines(), acked)
        process.wait(timeout=600)
        if choice.random() < 0.5:
            tear(path, choice)
        acked = check(path, model, acked)


def test_killed_at_random_moments_again_and_again_the_store_equals_the_model(
    tmp_path: Path, seed: int
) -> None:
    kill_again_and_again(tmp_path, seed, int(os.environ.get("TXMQ_SOAK_ROUNDS", "4")))


@pytest.mark.soak
def test_soak_killed_at_random_moments_the_store_equals_the_model(
    tmp_path: Path, seed: int, rounds: int
) -> None:
    kill_again_and_again(tmp_path, seed, rounds)


@pytest.mark.parametrize(
    ("failpoint", "text"),
    [
        ("store.commit.synced@40=raise", "TXMQ_STORE_FAILED"),
        ("store.commit.executed@40=raise", "TXMQ_STORE_FAILED"),
        ("store.commit.committed@40=raise", "TXMQ_STORE_FAILED"),
        ("store.append.written@10=enospc", "TXMQ_DISK_FULL"),
        ("store.sync.synced@3=raise", "TXMQ_STORE_FAILED"),
        ("store.seal.synced@2=enospc", "TXMQ_DISK_FULL"),
    ],
)
def test_a_disk_error_at_this_step_ends_the_store_loudly_and_loses_nothing_acknowledged(
    failpoint: str, text: str, tmp_path: Path
) -> None:
    code, lines = run(tmp_path / "data", 4, STEPS, failpoints=failpoint)
    assert code == 0 and text in lines[-1]
    check(tmp_path / "data", Model(4), acknowledged(lines))


@pytest.mark.soak
def test_a_segment_that_hits_the_limit_of_the_disk_names_it_and_all_acknowledged_is_there_after_reopening(
    tmp_path: Path,
) -> None:
    path, model = tmp_path / "data", Model(5)
    code, lines = run(path, 5, 10_000, 1_500_000, 1 << 30)
    assert code == 0
    assert "[TXMQ_DISK_FULL] no space to write to " in lines[-1] and str(path) in lines[-1]
    assert "file system /" in lines[-1] and "Nothing of this commit was acknowledged" in lines[-1]
    steps = check(path, model, acknowledged(lines))
    assert run(path, 5, 10)[1][-1] == "closed"  # there is room again
    check(path, model, steps + 10)


@contextlib.contextmanager
def small_file_system(path: Path, size_bytes: int) -> Iterator[Path]:
    path.mkdir()
    mounted = (
        os.geteuid() == 0
        and subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", path]).returncode
        == 0
    )
    if not mounted:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        yield path
    finally:
        subprocess.run(["umount", path], check=True)


def test_a_broker_that_starts_on_a_full_disk_says_so_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "txmq", "serve", "--data", str(tmp_path / "disk" / "data")]
    command += ["--listen", "127.0.0.1:0", "--amqp", "none"]
    with small_file_system(tmp_path / "disk", 256 << 10) as disk:
        for filled in (0, 1 << 20):  # full behind the catalog, and before it
            (disk / "filler").unlink(missing_ok=True)
            with contextlib.suppress(OSError), (disk / "filler").open("wb") as file:
                file.write(bytes(filled))
            ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
            assert ended.returncode != 0 and ended.stdout == ""
            (line,) = ended.stderr.splitlines()
            assert "[TXMQ_DISK_FULL] no space to write to " in line and f"file system {disk}, " in line


@pytest.mark.parametrize("size_bytes", [2 << 20, 3 << 20])
def test_a_full_file_system_is_named_and_all_acknowledged_is_there_once_there_is_room(
    size_bytes: int, tmp_path: Path
) -> None:
    with small_file_system(tmp_path / "disk", size_bytes) as disk:
        path, model = disk / "data", Model(6)
        code, lines = run(path, 6, 100_000, 0, 1 << 30)
        assert code == 0 and "[TXMQ_DISK_FULL]" in lines[-1]
        assert (
            f"file system {disk}, " in lines[-1]
            and "free some space, then start the broker again" in lines[-1]
        )
        acked = acknowledged(lines)
        assert acked > 100
        with contextlib.suppress(StoreError):  # still full: it may open or say so, it must not lose anything
            DurableStore(path).close(clean=False)
        subprocess.run(["mount", "-o", f"remount,size={8 << 20}", disk], check=True)
        steps = check(path, model, acked)
        assert run(path, 6, 20, 0, 1 << 30)[1][-1] == "closed"
        check(path, model, steps + 20)
