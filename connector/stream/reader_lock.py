"""One source per queue and app in a Spark driver: each source holds a name on the host.

Two sources of one app on one queue cannot be kept in step. If a message arrives between the calls of their
``latestOffset`` in one trigger, only one source has it in its range. The micro-batch consumes it, and from
then on the other source is refused its range. So the second source is refused when its query starts, before
anything is claimed.

Not here: which app owns a queue (the broker). Two drivers on one checkpoint are allowed, because claims
handle them; therefore the name contains the driver. A DataFrame that is used twice is also allowed: Spark
reads it through one source, unless a join compares a column with itself.

Invariant: a name is held by at most one reader. The operating system frees it when the process ends.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import socket
import time
from collections.abc import Sequence

from broker_core.core.errors import ResourceLocked

# The longest time until the source processes of an ended query are gone.
PATIENCE_S = 10.0


class ReaderLock:
    """The names that one reader holds. A copy in another process (a task) holds none."""

    def __init__(self) -> None:
        self.is_held = False
        self._sockets: list[socket.socket] = []

    def __reduce__(self) -> tuple[type[ReaderLock], tuple[()]]:
        return (ReaderLock, ())

    def take(self, broker: str, app_id: str, queues: Sequence[str]) -> None:
        """Raises ResourceLocked if another reader of this driver has one of the queues under this app.

        ``broker`` is its identity. On systems without such names nothing is held; the broker then stops the
        query when its sources are out of step.
        """
        deadline = time.monotonic() + PATIENCE_S
        sockets: list[socket.socket] = []
        for queue in sorted(queues):  # sorted, so that two readers never wait for each other
            try:
                name = _name(broker, app_id, queue)
                while (found := _bound(name)) is None and time.monotonic() < deadline:
                    time.sleep(0.05)
            except OSError:
                break
            if found is None:
                for one in sockets:
                    one.close()
                raise ResourceLocked(
                    f"queue {queue!r} already has another source of app {app_id!r} in this Spark driver",
                    "use one readStream and its DataFrame twice, as in df.union(df) (one side of a "
                    "self-join renames its columns), or give each query a queue and an appId",
                )
            sockets.append(found)
        self.is_held, self._sockets = True, sockets


def driver() -> str:
    """The Spark driver, which starts the source processes. Raises OSError if it cannot be determined."""
    parent = os.getppid()
    with open(f"/proc/{parent}/stat", encoding="latin-1") as file:
        started = file.read().rpartition(")")[2].split()[19]  # differs if the process id was reused
    return f"{os.readlink('/proc/self/ns/pid')} {parent} {started}"


def _name(broker: str, app_id: str, queue: str) -> str:
    whole = json.dumps([os.geteuid(), driver(), broker, app_id, queue])
    # NUL: an abstract name, not a file
    return "\0txmq-source-" + hashlib.sha256(whole.encode()).hexdigest()[:40]


def _bound(name: str) -> socket.socket | None:
    """A bound socket of this name, for no connections; None if the name is taken. Raises OSError."""
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        found.bind(name)
    except OSError as error:
        found.close()
        if error.errno != errno.EADDRINUSE:
            raise
        return None
    return found
