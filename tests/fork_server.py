"""A process that has imported txmq once, and forks for each order: a child starts without the half second of
CPU that the imports take. The other end is ``forked.py``.

Invariant: it has one thread and opens nothing of txmq, so a child begins as a new process would. It ends when
its socket is closed; its children do not.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
from typing import Any

from broker_core import failpoint

ORDER_BYTES = 1 << 20
IMPORTED = (
    "txmq.cli",
    "broker_core.launcher",
    "broker_core.server.amqp.rate_limit",
    "broker_core.server.amqp.trace",
)


class ForkServer:
    def __init__(self, orders: socket.socket) -> None:
        self._orders = orders
        self._ended, wake = os.pipe()
        self._fds = [self._ended, wake, orders.fileno()]  # not for children
        self._running: dict[int, int] = {}  # pid -> where its exit status is awaited
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def order(self) -> dict[str, Any] | None:
        """Returns in each child, with its order; in the server itself None, at the end."""
        while True:
            ready, _, _ = select.select([self._orders, self._ended], [], [])
            if self._ended in ready:
                os.read(self._ended, 4096)
                self._reap()
            if self._orders in ready:
                data, fds, _, _ = socket.recv_fds(self._orders, ORDER_BYTES, 3)
                if not data:
                    return None
                *streams, status = fds
                pid = os.fork()
                if pid == 0:
                    self._become_a_child(streams, status)
                    found: dict[str, Any] = json.loads(data)
                    return found
                for fd in streams:
                    os.close(fd)
                self._running[pid] = status
                os.write(status, b"%d\n" % pid)

    def _reap(self) -> None:
        for pid, status in list(self._running.items()):
            ended, code = os.waitpid(pid, os.WNOHANG)
            if ended:
                os.write(status, b"%d\n" % os.waitstatus_to_exitcode(code))
                os.close(status)
                del self._running[pid]

    def _become_a_child(self, streams: list[int], status: int) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for fd in (status, *self._fds, *self._running.values()):
            os.close(fd)
        for number, fd in enumerate(streams, 1):
            os.dup2(fd, number)
            os.close(fd)


def main() -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    with socket.socket(fileno=int(sys.argv[1])) as orders:
        order = ForkServer(orders).order()
        if order is None:
            return
        orders.detach()  # closed already
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["folder"])
    failpoint.arm_from_environment()
    sys.argv = [order["module"], *order["arguments"]]
    runpy.run_module(order["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
