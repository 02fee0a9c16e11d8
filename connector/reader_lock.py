"""One source per queue and app in a Spark driver: names on the host that a source holds for as long as its process lives.

Two sources of one app over one queue cannot be kept in step. A message that comes between their two questions of one trigger is in the
micro-batch for the one and not for the other; the batch consumes it all the same, and the other is refused its range from then on. So the
second source is refused when its query starts, before anything is claimed.

Not here: who owns a queue (the broker, by app). Two drivers on one checkpoint are no two sources: claims are made for that, so the name
carries the driver. Nor one DataFrame that is used twice, which Spark reads through one source as long as no column meets itself.

Invariant: a name is held by at most one reader, and by none that has ended: the system lets go of it with the process.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import socket
import time
from collections.abc import Sequence

from broker_core.errors import ResourceLocked

# Spark ends the source processes of a query before the query counts as ended; so long may the end of one take.
PATIENCE_S = 10.0


class ReaderLock:
    """What one reader holds. A copy in another process, as in a task, holds nothing."""

    def __init__(self) -> None:
        self.taken = False
        self._held: list[socket.socket] = []

    def __reduce__(self) -> tuple[type[ReaderLock], tuple[()]]:
        return (ReaderLock, ())

    def take(self, broker: str, app_id: str, queues: Sequence[str]) -> None:
        """Raises ResourceLocked where another reader of this driver has one of the queues of ``broker`` (its identity) under this app.

        Where the system has no such names nothing is held: there the broker stops such a query once its sources are out of step.
        """
        deadline = time.monotonic() + PATIENCE_S
        held: list[socket.socket] = []
        for queue in sorted(queues):  # in one order, so that two readers never wait for each other
            try:
                found = _bound(_name(broker, app_id, queue))
                while found is None and time.monotonic() < deadline:
                    time.sleep(0.05)
                    found = _bound(_name(broker, app_id, queue))
            except OSError:
                break
            if found is None:
                for one in held:
                    one.close()
                raise ResourceLocked(
                    f"queue {queue!r} is read already by another source of app {app_id!r} in this Spark driver: an app reads a queue once. "
                    "In one query use one readStream and its DataFrame twice (df.union(df), a self-join where one side renames its "
                    "columns: otherwise Spark makes two sources), or bind a second queue and read that; if another query reads it, "
                    "stop that one, or give each a queue and an appId of its own"
                )
            held.append(found)
        self.taken, self._held = True, held


def driver() -> str:
    """The Spark driver: the process that starts the processes of sources. Raises OSError where that cannot be told."""
    parent = os.getppid()
    with open(f"/proc/{parent}/stat", encoding="latin-1") as file:
        started = file.read().rpartition(")")[2].split()[19]  # a process number is used again, with another start
    return f"{os.readlink('/proc/self/ns/pid')} {parent} {started}"


def _name(broker: str, app_id: str, queue: str) -> str:
    whole = json.dumps([os.geteuid(), driver(), broker, app_id, queue])
    return "\0txmq-source-" + hashlib.sha256(whole.encode()).hexdigest()[:40]  # NUL: no file


def _bound(name: str) -> socket.socket | None:
    """A socket of this name, which nobody ever connects to; None where another one has the name. Raises OSError."""
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        found.bind(name)
    except OSError as error:
        found.close()
        if error.errno != errno.EADDRINUSE:
            raise
        return None
    return found
