"""Where a broker is: addresses that a user gives, and the file in a data directory that tells where its broker listens.

Not here: talking to a broker (``client.py``), and being one (``launcher.py``).

Invariant: however many processes ask for the broker of a data directory at once, at most one of them starts it, and all are
given the same one. ``DIR/endpoint.json`` is a hint: whoever reads it asks the broker there for its id.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from broker_core import errors

DEFAULT_PORT = 5673
DEFAULT_AMQP = "127.0.0.1:5672"
NO_AMQP = "none"
IDLE_TIMEOUT_S = 60
START_TIMEOUT_S = 60.0
LOCKED_TIMEOUT_S = 15.0  # for a process that holds the data directory: it is about to listen, or about to end

ENDPOINT = "endpoint.json"
START_LOCK = "broker.start.lock"
LOG = "broker.log"
ID = "id"

_started: set[int] = set()  # brokers that this process started: reaped when they end


@dataclass(frozen=True, slots=True)
class Address:
    """A broker as the user names it: a host and port, or a data directory (absolute path)."""

    host: str = ""
    port: int = 0
    directory: str = ""
    user: str = ""
    password: str = field(default="", repr=False)

    def __str__(self) -> str:
        if self.directory:
            return f"data={self.directory}"
        return f"txmq://{bracketed(self.host)}:{self.port}"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The content of ``DIR/endpoint.json``; ``id`` is that of the data directory."""

    host: str
    port: int
    pid: int
    id: str


def bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def parse(url: str | None = None, data: str | os.PathLike[str] | None = None) -> Address:
    """The address in ``url`` or ``data``. Raises OptionError unless exactly one is given and valid."""
    if (url is None) == (data is None):
        wrong = "both options 'url' and 'data' are given" if url is not None else "neither option 'url' nor 'data' is given"
        raise errors.OptionError(f"{wrong}; give one: url=txmq://host:{DEFAULT_PORT} for a broker that runs elsewhere, or data=DIR")
    if data is not None:
        text = os.fspath(data)
        if not text:
            raise errors.OptionError("option 'data' is empty; it must name a directory")
        return Address(directory=os.path.abspath(text))
    assert url is not None
    return _parse_url(url)


def _parse_url(url: str) -> Address:
    scheme = url.partition("://")[0].lower()
    if scheme == "txmqs":
        raise errors.OptionError(
            f"option 'url' is {_shown(url)!r}, but TLS (txmqs://) is not supported by this version; use txmq://host:port"
        )
    if scheme == "kafka":
        raise errors.OptionError(f"option 'url' is {_shown(url)!r}, but the Kafka engine is not part of this version; use txmq://host:port")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise errors.OptionError(f"option 'url' is {_shown(url)!r}; its port must be a number from 1 to 65535") from None
    if parts.scheme != "txmq" or not parts.hostname or parts.path not in ("", "/") or parts.query or parts.fragment or port == 0:
        raise errors.OptionError(
            f"option 'url' is {_shown(url)!r}; it must be txmq://[user:password@]host:port, for example txmq://localhost:{DEFAULT_PORT}"
        )
    return Address(
        host=parts.hostname,
        port=port or DEFAULT_PORT,
        user=unquote(parts.username or ""),
        password=unquote(parts.password or ""),
    )


def _shown(url: str) -> str:
    """``url`` without its password."""
    head, at, tail = url.rpartition("@")
    if not at:
        return url
    scheme, _, login = head.partition("://")
    return f"{scheme}://{login.partition(':')[0]}:***@{tail}"


def parse_listen(listen: str) -> tuple[str, int]:
    """HOST:PORT of ``serve --listen``. Raises OptionError."""
    host, _, port = listen.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise errors.OptionError(
            f"--listen is {listen!r}; it must be HOST:PORT, for example 127.0.0.1:{DEFAULT_PORT}, or port 0 for a free one"
        )
    return host.strip("[]"), int(port)


# -- DIR/endpoint.json ----------------------------------------------------------------------------------------------------


def read_endpoint(directory: str) -> Endpoint | None:
    """None where there is none, or none that can be read."""
    try:
        found = json.loads(Path(directory, ENDPOINT).read_text())
        return Endpoint(str(found["host"]), int(found["port"]), int(found["pid"]), str(found["id"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_endpoint(directory: str, endpoint: Endpoint) -> None:
    """Written aside and renamed: a reader sees the old file or the new one."""
    aside = Path(directory, f"{ENDPOINT}.{os.getpid()}")
    aside.write_text(json.dumps(asdict(endpoint)) + "\n")
    aside.replace(Path(directory, ENDPOINT))


def remove_endpoint(directory: str, pid: int) -> None:
    found = read_endpoint(directory)
    if found is not None and found.pid == pid:
        Path(directory, ENDPOINT).unlink(missing_ok=True)


def read_id(directory: str) -> str:
    """The id of a data directory, "" where it has none."""
    try:
        return Path(directory, ID).read_text().strip()
    except OSError:
        return ""


# -- find or start --------------------------------------------------------------------------------------------------------


def find(directory: str, answers: Callable[[Endpoint], bool]) -> Endpoint | None:
    """The running broker of ``directory``. ``answers`` says whether the broker of this data directory answers there."""
    endpoint = read_endpoint(directory)
    return endpoint if endpoint is not None and answers(endpoint) else None


def find_or_start(directory: str, answers: Callable[[Endpoint], bool], timeout_s: float = START_TIMEOUT_S) -> Endpoint:
    """The running broker of ``directory``, started as a detached process where none runs.

    Raises the error with which the broker failed to start (DataDirectoryLocked, CorruptCatalog, ...), or ConnectionFailed with the
    last lines of its log.
    """
    deadline = time.monotonic() + timeout_s
    found = find(directory, answers)
    if found is not None:
        return found
    try:
        os.makedirs(directory, exist_ok=True)
    except OSError as error:
        raise errors.DataDirectoryInvalid(f"cannot create the data directory {directory}: {error.strerror}; choose another one") from error
    with _start_lock(directory, deadline):
        found = find(directory, answers)  # whoever held the lock before us may have started it
        return found if found is not None else _start(directory, answers, deadline)


@contextlib.contextmanager
def _start_lock(directory: str, deadline: float) -> Iterator[None]:
    try:
        descriptor = os.open(os.path.join(directory, START_LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise errors.DataDirectoryInvalid(f"cannot write in the data directory {directory}: {error.strerror}") from error
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise errors.ConnectionFailed(
                        f"another process starts the broker of {directory}, and it did not answer in time; look into {directory}/{LOG}"
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
                raise errors.ConnectionFailed(f"the broker of {directory} (pid {pid}) was started and does not answer; look into {log}")
            time.sleep(0.01)
        failure = _failure(directory, log, position)
        if not isinstance(failure, errors.DataDirectoryLocked) or time.monotonic() > min(locked_deadline, deadline):
            raise failure
        found = find(directory, answers)
        if found is not None:
            return found
        time.sleep(0.1)


def _spawn(directory: str, log: str) -> int:
    """Start the broker in a session of its own: it outlives us, and is not killed with us."""
    command = [
        sys.executable, "-m", "txmq", "serve", "--data", directory, "--listen", "127.0.0.1:0", "--amqp", NO_AMQP,
        "--idle-timeout", str(IDLE_TIMEOUT_S),
    ]  # fmt: skip
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
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
    """Ours; the child must find this package where we found it, also when it is not installed."""
    environment = dict(os.environ)
    root = str(Path(__file__).resolve().parent.parent)
    if Path(root).name not in ("site-packages", "dist-packages"):
        known = environment.get("PYTHONPATH", "")
        environment["PYTHONPATH"] = os.pathsep.join([root, known]) if known else root
    return environment


def _ended(pid: int) -> bool:
    """Whether a broker that we started has ended; reaps it and all others that have."""
    for child in tuple(_started):
        try:
            if os.waitpid(child, os.WNOHANG)[0]:
                _started.discard(child)
        except ChildProcessError:  # started before a fork: not ours to wait for
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
