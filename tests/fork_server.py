"""A process that has imported what others need, and forks for each order: a child starts without the half second of
CPU that the imports take. The other ends are ``forked.py`` and ``startup/standing_in.py``.

An order is a connection: its first packet is the order, with stdin, stdout and stderr; the answers are the child's id
and, at its end, its exit status. If the connection is closed before, the child is killed.

Invariant: it has one thread and opens nothing of txmq, so a child begins as a new process would. When the process
that has started it ends, it takes no orders any more; its children go on.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import sys
import uuid
from collections.abc import Sequence
from typing import Any, NoReturn

from broker_core.core import failpoint

ORDER_BYTES = 1 << 20
PLACE = "TXMQ_TEST_FORKS"  # in the environment of a JVM: whose forks its Python processes are


def listen() -> tuple[socket.socket, str]:
    """A socket for orders, and its name, which needs no file."""
    name = f"txmq-forks-{uuid.uuid4().hex}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"\0{name}")
    listener.listen(64)
    return listener, name


def fork_here(modules: Sequence[str]) -> None:
    """For a process that has done nothing yet but imports. It returns with a fork server as its child, of which the
    Python processes of its JVM are forks; in each of those it does not return.
    """
    listener, name = listen()
    starter, ours = os.pipe()
    if os.fork() == 0:
        os.close(ours)
        serve(listener, starter, modules)
    listener.close()
    os.close(starter)  # ``ours`` is closed by the end of this process
    os.environ[PLACE] = place(name)


def place(name: str) -> str:
    """Another Python than this one has other packages, and so is no fork of it."""
    return f"{name}@{sys.prefix}"


def serve(listener: socket.socket, starter: int, modules: Sequence[str]) -> NoReturn:
    """``starter``: is at its end when the process ends that has started this one."""
    for name in modules:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # so that no child copies these pages
    order = ForkServer(listener, starter).order()
    if order is not None:
        _run(order)
    sys.exit()


class ForkServer:
    def __init__(self, listener: socket.socket, starter: int) -> None:
        self._starter: int | None = starter
        self._listener = listener
        self._ended, self._wake = os.pipe()
        self._running: dict[int, socket.socket | None] = {}  # pid -> where its exit status is awaited
        os.set_blocking(self._wake, False)
        signal.set_wakeup_fd(self._wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def order(self) -> dict[str, Any] | None:
        """Returns in each child, with its order; in the server itself None, at the end."""
        while self._starter is not None or self._running:
            sources = [] if self._starter is None else [self._starter, self._listener]
            awaited = {connection: pid for pid, connection in self._running.items() if connection is not None}
            ready, _, _ = select.select([*sources, self._ended, *awaited], [], [])
            for connection in awaited.keys() & {*ready}:  # closed, or the end of the child is not read yet
                os.kill(awaited[connection], signal.SIGKILL)
                connection.close()
                self._running[awaited[connection]] = None
            if self._ended in ready:
                os.read(self._ended, 4096)
                self._reap()
            if self._listener in ready and (found := self._fork()) is not None:
                return found
            if self._starter in ready:
                self._listener.close()
                self._starter = None
        return None

    def _fork(self) -> dict[str, Any] | None:
        connection, _ = self._listener.accept()
        _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        data, streams, _, _ = socket.recv_fds(connection, ORDER_BYTES, 3)
        pid = 1
        if data and user == os.getuid() and (pid := os.fork()) == 0:
            self._become_a_child(streams, connection)
            order: dict[str, Any] = json.loads(data)
            return order
        for fd in streams:
            os.close(fd)
        if pid > 1:
            self._running[pid] = connection
            _answer(connection, pid)
        else:
            connection.close()
        return None

    def _reap(self) -> None:
        for pid in list(self._running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended and (connection := self._running.pop(pid)) is not None:
                _answer(connection, os.waitstatus_to_exitcode(status))
                connection.close()

    def _become_a_child(self, streams: list[int], connection: socket.socket) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for each in (self._listener, connection, *self._running.values()):
            if each is not None:
                each.close()
        for fd in (self._ended, self._wake, self._starter):
            if fd is not None:
                os.close(fd)
        for number, fd in enumerate(streams):
            os.dup2(fd, number)
            os.close(fd)


def _answer(connection: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # nobody waits
        connection.send(b"%d" % number)


def rearm() -> None:
    """As a new process is; also for a worker that is forked from Spark's daemon."""
    failpoint.disarm()
    failpoint.arm_from_environment()


def _run(order: dict[str, Any]) -> None:
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["folder"])
    sys.path[:] = order.get("path", sys.path)
    rearm()
    os.register_at_fork(after_in_child=rearm)
    module = order["module"]
    sys.modules.pop(module, None)
    sys.argv = [module, *order["arguments"]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def main() -> NoReturn:
    listener, starter, *modules = sys.argv[1:]
    serve(socket.socket(fileno=int(listener)), int(starter), modules)


if __name__ == "__main__":
    main()
