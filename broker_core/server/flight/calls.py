"""The calls of the Flight server that are in progress: how many, how long there was none, and how many there
may be.

Not here: what a call does (``server.py``).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import grpc
import pyarrow as pa

from broker_core.core.errors import Busy
from broker_core.server.alarm import Alarm
from broker_core.server.quotas import MiB, Quota, UserLimit, busy
from broker_core.server.slots import Slots

# they are short, and a client needs them to give back what it has
UNLIMITED = ("hello", "channel.keepalive", "channel.close")
# they bring messages; while memory or the disk is low, only what makes room goes on
PUBLISHES = ("channel.publish", "channel.publish_all", "stage", "adopt", "put")
ANSWERS, LARGE = UserLimit(128 * MiB, 32 * MiB), 64 * 1024  # bytes that clients have not read yet
STREAMS, PIECE_BYTES = UserLimit(256 * MiB, 64 * MiB), 256 * 1024  # of streams; who has no room sends pieces
COMPUTING = 4  # calls at once
WAITS = "engine.wait"
READS = 4  # of streams at once: each has a block in memory meanwhile
SILENT = UserLimit(1000, 100)  # calls that have sent nothing yet; each holds a thread


class CallFailed(Exception):
    """Ends a call with a status of gRPC."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code


class Calls:
    """Thread-safe."""

    def __init__(self, quota: Quota, alarm: Alarm | None = None) -> None:
        self._quota = quota
        self._alarm = alarm
        self._silent = Quota(SILENT, busy("calls", "have sent nothing yet"))
        self.answers = Quota(ANSWERS, busy("bytes of answers", "are not read yet"))
        self.streams = Quota(STREAMS, busy("bytes of streams", "are not read yet"))
        self._slots = Slots(COMPUTING)
        self._reads = threading.BoundedSemaphore(READS)
        self._lock = threading.Lock()
        self._last_end = time.monotonic()
        self.in_progress = 0

    def idle_s(self) -> float:
        """How long there has been no call and no stream; 0 while there is one."""
        with self._lock:
            return 0.0 if self.in_progress else time.monotonic() - self._last_end

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        with self._lock:
            self.in_progress += 1
        try:
            yield
        finally:
            with self._lock:
                self.in_progress -= 1
                self._last_end = time.monotonic()

    def silent(self, user: str) -> contextlib.AbstractContextManager[None]:
        """While the call has brought nothing yet. Raises Busy."""
        return self._silent.within(user)

    def answered(self, answer: bytes, user: str, ended: Callable[[Callable[[], None]], bool]) -> None:
        """A large answer counts until it is sent. Raises Busy."""
        if len(answer) > LARGE:
            holder = object()
            self.answers.enter(holder, user, len(answer))
            if not ended(lambda: self.answers.leave(holder)):
                self.answers.leave(holder)

    def computing(self, name: str, user: str) -> contextlib.AbstractContextManager[None]:
        """While the answer is made; a call that only waits, or is short, needs no slot."""
        if name == WAITS or name in UNLIMITED:
            return contextlib.nullcontext()
        return self._slots.computing(user)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        with self._reads:
            yield
            pa.default_memory_pool().release_unused()  # this thread would keep that of a block for itself

    def most(self, stream: object, user: str, rows: pa.RecordBatch) -> int:
        """How many rows a stream may send, now that its client has what came before, until it leaves
        ``streams``: all while there is room, else a piece. Raises Busy: a row alone is too large for that.
        """
        count: int = rows.num_rows
        self.streams.leave(stream)
        with contextlib.suppress(Busy):
            self.streams.enter(stream, user, 2 * rows.nbytes)  # and gRPC's copy
            return count
        while count > 1 and rows.slice(0, count).nbytes > PIECE_BYTES:
            count //= 2
        if (size := rows.slice(0, count).nbytes) > PIECE_BYTES:
            self.streams.enter(stream, user, 2 * size)
        return count

    def limited(self, name: str, user: str) -> contextlib.AbstractContextManager[None]:
        """Raises Busy, also for a publish while the broker is short of memory or disk."""
        if name in PUBLISHES:
            self.require_room()
        return contextlib.nullcontext() if name in UNLIMITED else self._quota.within(user)

    def require_room(self) -> None:
        """Raises Busy while the broker is short of memory or disk."""
        shortage = self._alarm.now() if self._alarm is not None else None
        if shortage is not None:
            raise Busy(
                f"publishers have to wait: the broker is {shortage.reason} ({shortage.numbers})",
                "the call is tried again when consumers, commits or rollbacks have made room",
            )
