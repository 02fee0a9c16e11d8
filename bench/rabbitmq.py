"""Starts RabbitMQ for a benchmark: one node of the Debian package on loopback, as the current user.

Not here: measurements. The service of the package is not used.
Invariant: the node has its own port mapper (epmd) and files, which end with the context.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.ports import free_ports
from bench.report import Skipped

SERVER = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")  # the wrapper in /usr/sbin needs root
CONTROL = SERVER.with_name("rabbitmqctl")
START_S = 60.0
GREETING = b"AMQP\x00\x00\x09\x01"


def installed() -> None:
    """Raises Skipped if the package is not installed."""
    if not SERVER.exists():
        raise Skipped("rabbitmq-server is not installed: apt-get install rabbitmq-server")


def _environment(
    folder: Path, port: int, mapper: int, distribution: int, plugins: Sequence[str] = ()
) -> dict[str, str]:
    for name in ("home", "mnesia", "log"):
        (folder / name).mkdir(parents=True)
    (folder / "rabbitmq.conf").write_text(f"listeners.tcp.1 = 127.0.0.1:{port}\n")
    (folder / "enabled_plugins").write_text(f"[{','.join(plugins)}].\n")
    own = {
        "HOME": folder / "home",  # for the cookie
        "LANG": "C.UTF-8",
        "ERL_EPMD_PORT": mapper,
        "ERL_EPMD_ADDRESS": "127.0.0.1",
        "RABBITMQ_NODENAME": f"bench{uuid.uuid4().hex[:8]}@localhost",
        "RABBITMQ_CONF_ENV_FILE": "/dev/null",
        "RABBITMQ_CONFIG_FILE": folder / "rabbitmq.conf",
        "RABBITMQ_ENABLED_PLUGINS_FILE": folder / "enabled_plugins",
        "RABBITMQ_MNESIA_BASE": folder / "mnesia",
        "RABBITMQ_LOG_BASE": folder / "log",
        "RABBITMQ_DIST_PORT": distribution,
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
        "RUNNING_UNDER_SYSTEMD": "true",  # the script replaces itself by the server and keeps its process id
    }
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("RABBITMQ_", "ERL_", "NOTIFY_"))
    }
    return inherited | {name: str(value) for name, value in own.items()}


def _answers(port: int) -> bool:
    """Whether an AMQP server greets on this port."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as connection:
        connection.sendall(GREETING)
        return connection.recv(1) == b"\x01"
    return False


@dataclass
class Node:
    """A node that runs. ``uri``: of AMQP, for guest."""

    uri: str
    environment: dict[str, str]
    folder: Path
    port: int
    _server: subprocess.Popen[bytes] | None = None

    def ctl(self, *arguments: str) -> str:
        """The output of rabbitmqctl."""
        command = [str(CONTROL), *arguments]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(arguments)}: {done.stdout}{done.stderr}")
        return done.stdout

    def start(self) -> None:
        """Returns when it greets."""
        self._server = self.run(str(SERVER))
        deadline = time.monotonic() + START_S
        while not _answers(self.port):
            if self._server.poll() is not None or time.monotonic() > deadline:
                output = (self.folder / "output.log").read_text()
                raise SystemExit(f"RabbitMQ did not start:\n{output[-3000:]}")
            time.sleep(0.1)

    def kill(self) -> None:
        """SIGKILL."""
        assert self._server is not None
        self._server.kill()
        self._server.wait()

    def run(self, *command: str) -> subprocess.Popen[bytes]:
        """One of its processes."""
        with (self.folder / "output.log").open("ab") as out:
            return subprocess.Popen(
                command,
                env=self.environment,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )


@contextlib.contextmanager
def rabbitmq(folder: Path) -> Iterator[str]:
    """Run RabbitMQ; its AMQP URI for guest. Raises Skipped if the package is not installed."""
    with node(folder) as running:
        yield running.uri


@contextlib.contextmanager
def node(folder: Path, plugins: Sequence[str] = ()) -> Iterator[Node]:
    """Run RabbitMQ with these plugins. Raises Skipped if the package is not installed."""
    installed()
    port, mapper, distribution = free_ports(3)
    environment = _environment(folder, port, mapper, distribution, plugins)
    running = Node(f"amqp://guest:guest@127.0.0.1:{port}/%2f", environment, folder, port)
    names = running.run("epmd", "-port", str(mapper), "-address", "127.0.0.1")
    try:
        running.start()
        yield running
    finally:
        running.kill()  # its data is deleted, so nothing must be written
        names.kill()
        names.wait()
