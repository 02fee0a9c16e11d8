"""Finding the broker of a data directory, or starting one as a detached process.

Not here: talking to a broker (``connection.py``), and being one (``launcher.py``).

Invariant: if many processes ask for the broker of a data directory at once, at most one of them starts it,
and all get the same one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from broker_core.core import errors
from broker_core.core.address import NO_AMQP
from broker_core.core.credentials import PASSWORD_VARIABLE
from broker_core.core.endpoint import LOG, Endpoint, read_endpoint, why_foreign

IDLE_TIMEOUT_S = 60
START_TIMEOUT_S = 60.0
LOCKED_TIMEOUT_S = 15.0  # for a process that holds the data directory: it is about to listen, or about to end

START_LOCK = "broker.start.lock"

_started: set[int] = set()  # brokers that this process started: reaped when they end


def find(directory: str, answers: Callable[[Endpoint], bool]) -> Endpoint | None:
    """The running broker of ``directory``. ``answers`` says whether the broker of this data directory answers
    there.
    """
    if why := why_foreign(directory):
        raise errors.DataDirectoryInvalid(why)
    endpoint = read_endpoint(directory)
    return endpoint if endpoint is not None and answers(endpoint) else None


def find_or_start(directory: str, answers: Callable[[Endpoint], bool]) -> Endpoint:
    """The running broker of ``directory``, started as a detached process if none runs.

    Raises the error with which the broker failed to start (DataDirectoryLocked, CorruptCatalog, ...), or
    ConnectionFailed with the last lines of its log.
    """
    deadline = time.monotonic() + START_TIMEOUT_S
    found = find(directory, answers)
    if found is not None:
        return found
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
    except OSError as error:
        raise errors.DataDirectoryInvalid(
            f"cannot create the data directory {directory}: {error.strerror}; choose another one"
        ) from error
    with _start_lock(directory, deadline):
        found = find(directory, answers)  # the last owner of the lock may have started it
        return found if found is not None else _start(directory, answers, deadline)


@contextlib.contextmanager
def _start_lock(directory: str, deadline: float) -> Iterator[None]:
    try:
        descriptor = os.open(
            os.path.join(directory, START_LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
    except OSError as error:
        raise errors.DataDirectoryInvalid(
            f"cannot write in the data directory {directory}: {error.strerror}"
        ) from error
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise errors.ConnectionFailed(
                        f"another process starts the broker of {directory}, and it did not answer in time; "
                        f"look into {directory}/{LOG}"
                    ) from None
                time.sleep(0.02)
        yield
    finally:
        os.close(descriptor)


def _start(directory: str, answers: Callable[[Endpoint], bool], deadline: float) -> Endpoint:
    log = os.path.join(directory, LOG)
    locked_deadline = time.monotonic() + LOCKED_TIMEOUT_S
    while True:
        position = os.path.getsize(log) if os.path.exists(log) else 0
        pid = _spawn(directory, log)
        while not _ended(pid):
            found = find(directory, answers)
            if found is not None:
                return found
            if time.monotonic() > deadline:
                raise errors.ConnectionFailed(
                    f"the broker of {directory} (pid {pid}) was started and does not answer; look into {log}"
                )
            time.sleep(0.01)
        failure = _failure(directory, log, position)
        if not isinstance(failure, errors.DataDirectoryLocked) or time.monotonic() > min(
            locked_deadline, deadline
        ):
            raise failure
        found = find(directory, answers)
        if found is not None:
            return found
        time.sleep(0.1)


def _spawn(directory: str, log: str) -> int:
    """Start the broker in a session of its own: it outlives this process."""
    command = [
        sys.executable, "-m", "txmq", "serve",
        "--data", directory, "--listen", "127.0.0.1:0", "--amqp", NO_AMQP,
        "--idle-timeout", str(IDLE_TIMEOUT_S), "--token-only",
    ]  # fmt: skip
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        pid = os.posix_spawn(
            sys.executable,
            command,
            _environment(),
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, output, 1),
                (os.POSIX_SPAWN_DUP2, output, 2),
            ],
            setsid=True,
        )
    finally:
        os.close(output)
    _started.add(pid)
    return pid


def _environment() -> dict[str, str]:
    """That of this process; the child must find this package, even if it is not installed."""
    environment = dict(os.environ)
    environment.pop(PASSWORD_VARIABLE, None)
    root = str(Path(__file__).resolve().parents[2])
    if Path(root).name not in ("site-packages", "dist-packages"):
        before = environment.get("PYTHONPATH", "")
        environment["PYTHONPATH"] = os.pathsep.join([root, before]) if before else root
    return environment


def _ended(pid: int) -> bool:
    """Whether a broker that this process started has ended; reaps all that have."""
    for child in tuple(_started):
        try:
            if os.waitpid(child, os.WNOHANG)[0]:
                _started.discard(child)
        except ChildProcessError:  # started before a fork: the parent waits for it
            _started.discard(child)
    return pid not in _started


def _failure(directory: str, log: str, position: int) -> errors.TxmqError:
    with open(log, "rb") as file:
        file.seek(position)
        lines = file.read().decode(errors="replace").strip().splitlines()
    for line in reversed(lines):
        error = errors.from_text(line)
        if error is not None:
            return error
    tail = " | ".join(line.strip() for line in lines[-5:]) or "it wrote nothing"
    return errors.ConnectionFailed(f"the broker of {directory} failed to start; the end of {log}: {tail}")
