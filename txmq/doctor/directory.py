"""A data directory, existing or new: its owner, permissions, room, and file system.

What the broker does with a file system is tried in a directory of its own within, which is deleted again.
Not here: the content (``txmq broker verify``).
Invariant: the lock of a broker is neither taken nor waited for.
"""

from __future__ import annotations

import errno
import fcntl
import os
import pwd
import sqlite3
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import psutil

from broker_core.arrow.part_file import unwritable
from broker_core.core.endpoint import read_endpoint
from broker_core.core.errors import DataDirectoryInvalid
from broker_core.core.files import sync
from broker_core.server.alarm import AlarmLimits, MiB
from broker_core.store.directory import check
from broker_core.store.segment import link
from txmq.doctor.finding import Finding, hint, ok, problem
from txmq.doctor.port import hello, process

LITTLE_ROOM = 1024 * MiB
SLOW_SYNC_S = 0.05
NETWORK = ("nfs", "nfs4", "cifs", "smb3", "9p", "afs", "ceph", "lustre", "gpfs", "beegfs", "glusterfs")
MEMORY = ("tmpfs", "ramfs")
ANOTHER = "name another directory with --data"


def directory(data: str) -> Iterator[Finding]:
    path = place = Path(os.path.abspath(data))
    try:
        place = next(each for each in (path, *path.parents) if each.exists())
        check(place, foreign=place == path)
    except (OSError, DataDirectoryInvalid) as error:
        text = error.message if isinstance(error, DataDirectoryInvalid) else f"{path}: {error.strerror}"
        denied = not os.access(place, os.R_OK | os.W_OK) or (place.is_dir() and not os.access(place, os.X_OK))
        denied = denied and getattr(error, "errno", None) != errno.ENAMETOOLONG
        yield problem("directory", text, f"let {_me()} write there, or {ANOTHER}" if denied else ANOTHER)
        return
    yield ok("directory", f"{path} " + ("can be written" if path.exists() else f"can be made in {place}"))
    if path.exists():
        yield from _permissions(path)
        yield from _holder(path)
    yield from _room(place)
    yield from _file_system(place)


# -- whose ---------------------------------------------------------------------------------------------------


def _permissions(path: Path) -> Iterator[Finding]:
    info = path.stat()
    names = [
        name for name in ("lock", "id", "catalog.db", "catalog.db-wal", "segments") if (path / name).exists()
    ]
    for name in names:
        if not os.access(path / name, os.R_OK | os.W_OK):
            owner = _user((path / name).stat().st_uid)
            yield problem(
                "directory",
                f"{path / name} belongs to {owner}, and {_me()} may not write it",
                f"run the broker as {owner}, or chown -R the directory to {_me()}",
            )
            return
    if os.geteuid() == 0 and info.st_uid != 0:
        yield hint(
            "directory",
            f"{path} belongs to {_user(info.st_uid)}, and this is root",
            f"run the broker as {_user(info.st_uid)}: what root makes there, nobody else can write",
        )
    if info.st_mode & stat.S_IWOTH:
        yield hint("directory", f"every user of this machine may write to {path}", f"chmod o-w {path}")


def _holder(path: Path) -> Iterator[Finding]:
    pid = _locked_by(path / "lock")
    if pid is None:
        yield ok("broker", f"no broker has {path}")
        return
    found = read_endpoint(str(path))
    answer = hello(found.host, found.port, found.token) if found is not None else None
    if found is None or answer is None or answer.id != found.id:
        yield hint(
            "broker",
            f"{process(pid)} holds {path} and does not answer",
            f"it starts or ends; if it stays so, look into {path / 'broker.log'}",
        )
    else:
        yield ok("broker", f"{process(pid)} is its broker, at txmq://{found.host}:{found.port}")


def _locked_by(lock: Path) -> int | None:
    """The process that holds the lock file; taking the lock instead could make a broker fail that starts."""
    try:
        info = lock.stat()
        locks = Path("/proc/locks").read_text().splitlines()
        written = lock.read_text().split()
    except OSError:
        return None
    device = f"{os.major(info.st_dev):02x}:{os.minor(info.st_dev):02x}"
    for line in locks:
        words = line.split()  # 1: FLOCK ADVISORY WRITE 1234 fd:00:5678 0 EOF
        if len(words) < 6 or words[1] != "FLOCK":
            continue
        where, _, inode = words[5].rpartition(":")
        # a file system of several devices has another number here
        if inode == str(info.st_ino) and (where == device or words[4] in written[:1]):
            return int(words[4])
    return None


# -- where ---------------------------------------------------------------------------------------------------


def _room(place: Path) -> Iterator[Finding]:
    found = os.statvfs(place)
    free = found.f_bavail * found.f_frsize
    least = AlarmLimits().disk_free_bytes
    text = f"{free // MiB} MiB free at {place}"
    if free < least:
        yield problem("room", text, f"free some space: below {least // MiB} MiB publishers have to wait")
    elif found.f_files and not found.f_favail:
        yield problem("room", f"no file can be made at {place} (no inodes)", "delete some files")
    elif free < LITTLE_ROOM:
        yield hint(
            "room", text, "the last finished batch of a queue stays until the next one: leave some room"
        )
    else:
        yield ok("room", text)


def _file_system(place: Path) -> Iterator[Finding]:
    kind = _kind(place)
    try:
        with tempfile.TemporaryDirectory(prefix="broker.doctor.", dir=place) as scratch:
            failed = {name: why for name, step in STEPS.items() if (why := _try(step, Path(scratch)))}
            sync_s = _sync_s(Path(scratch)) if "sync" not in failed else 0.0
            slower = _try(_map_parts, Path(scratch))
    except OSError as error:
        yield problem("files", f"nothing can be written at {place}: {error.strerror}", ANOTHER)
        return
    if failed:
        text = "; ".join(f"{name}: {why}" for name, why in failed.items())
        yield problem(
            "files", f"{kind or 'the file system'} at {place} cannot hold a broker: {text}", ANOTHER
        )
    elif kind in NETWORK:
        yield problem(
            "files", f"{place} is on another machine ({kind})", f"SQLite's log needs a local disk: {ANOTHER}"
        )
    elif kind in MEMORY:
        yield hint("files", f"{place} is memory ({kind})", "messages are lost when this machine restarts")
    elif kind == "overlay":
        yield hint("files", f"{place} is a layer of a container", "it goes with the container: use a volume")
    elif sync_s > SLOW_SYNC_S:
        yield hint(
            "files", f"a sync takes {sync_s * 1000:.0f} ms", "every commit waits for that: use a faster disk"
        )
    else:
        yield ok(
            "files", f"{kind or 'the file system'} can hold a broker; a sync takes {sync_s * 1000:.1f} ms"
        )
    if slower and not failed:
        yield hint(
            "files",
            f"files without a name, or leases on them, do not work here ({slower})",
            "large batches go through the broker's port, which is slower; a local ext4 or xfs has both",
        )


def _kind(place: Path) -> str:
    """The type of the file system, as /proc/mounts names it; "" if unknown."""
    real = os.path.realpath(place)
    types = {each.mountpoint: each.fstype for each in psutil.disk_partitions(all=True)}
    inside = [mount for mount in types if real == mount or real.startswith(mount.rstrip("/") + "/")]
    return types[max(inside, key=len)] if inside else ""


def _try(step: Callable[[Path], None], scratch: Path) -> str:
    """Why a step failed, "" if it did not."""
    try:
        step(scratch)
    except (OSError, sqlite3.Error) as error:
        return " ".join(str(getattr(error, "strerror", None) or error).split())
    return ""


def _sync(scratch: Path) -> None:
    path = scratch / "synced"
    with path.open("wb") as file:
        file.write(b"x" * 4096)
        file.flush()
        os.fdatasync(file.fileno())
    path.rename(scratch / "renamed")
    sync(scratch)


def _lock(scratch: Path) -> None:
    with (scratch / "lock").open("w") as one, (scratch / "lock").open("w") as another:
        fcntl.flock(one, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            fcntl.flock(another, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        raise OSError(errno.ENOLCK, "a lock does not keep others out")


def _sqlite(scratch: Path) -> None:
    connection = sqlite3.connect(scratch / "catalog.db", isolation_level=None)
    try:
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
        if mode != "wal":
            raise sqlite3.OperationalError("no write-ahead log")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("CREATE TABLE t (x)")
        connection.execute("INSERT INTO t VALUES (1)")
    finally:
        connection.close()


STEPS: dict[str, Callable[[Path], None]] = {"sync": _sync, "flock": _lock, "SQLite": _sqlite}


def _map_parts(scratch: Path) -> None:
    """What a task on this machine does with a large batch: a file without a name, a lease, a name."""
    unnamed = getattr(os, "O_TMPFILE", 0)
    if not unnamed:
        raise OSError(errno.ENOTSUP, "not on this system")
    descriptor = os.open(scratch, unnamed | os.O_RDWR, 0o644)
    try:
        os.write(descriptor, b"x")
        reading = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)
    finally:
        os.close(descriptor)
    try:
        with unwritable(reading):
            link(reading, scratch / "named")
    finally:
        os.close(reading)


def _sync_s(scratch: Path) -> float:
    times = []
    with (scratch / "timed").open("wb") as file:
        for _ in range(5):
            file.write(b"x" * 4096)
            file.flush()
            start = time.perf_counter()
            os.fdatasync(file.fileno())
            times.append(time.perf_counter() - start)
    return median(times)


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def _me() -> str:
    return _user(os.geteuid())
