"""The operations on ``tx`` that are under way, in any thread of the function.

1. ``finish``: the function has returned. What is under way is waited for; what begins later is refused.
2. ``seal``: the decision is asked for. What was refused until here, nobody may have seen.

A process that the function has forked has a copy of ``tx``, whose operations nobody would decide. They are
refused, and fail the batch, because a function seldom looks at how such a process ended.

Not here: what an operation does (``batch_transaction.py``).
Invariant: once ``seal`` has returned, every operation that was called before has ended well; one that is
called later is refused, and fails nothing but its thread.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import threading
from collections.abc import Iterator

from broker_core.core.errors import OptionError

log = logging.getLogger("txmq")

_IN_THE_DRIVER = "call it in the process of the function, with what another one has worked out"


class Operations:
    """Made in the thread that runs the function. Thread-safe."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._process = os.getpid()
        self._forked = mmap.mmap(-1, 1)  # shared with forked processes: one has called an operation
        self._changed = threading.Condition()
        self._under_way = 0
        self._closed = False
        self._sealed = False
        self._failure: BaseException | None = None  # of another thread: nobody may have seen it

    @property
    def elsewhere(self) -> bool:
        """Whether the caller is another thread than that of the function."""
        return threading.get_ident() != self._thread

    @contextlib.contextmanager
    def one(self, name: str) -> Iterator[None]:
        """Raises OptionError after the function returned."""
        failure: BaseException | None = None
        self._begin(name)
        try:
            yield
        except BaseException as error:
            failure = error
            raise
        finally:
            with self._changed:
                late = self._note(failure)  # set before the end of the operation is visible
                self._under_way -= 1
                self._changed.notify_all()
            self._log_failure(name, failure, late)

    def _begin(self, name: str) -> None:
        if os.getpid() != self._process:
            self._forked[0] = 1
            raise OptionError(f"tx.{name} was called in a forked process", _IN_THE_DRIVER)
        with self._changed:
            if not self._closed:
                self._under_way += 1
                return
            refused = OptionError(
                f"tx.{name} was called after the function returned",
                "call it within the function, and wait for the threads that use tx",
            )
            late = self._note(refused)
        self._log_failure(name, refused, late)
        raise refused

    def _note(self, failure: BaseException | None) -> bool:
        """Returns whether the failure is too late to fail the micro-batch."""
        if failure is not None and self.elsewhere:
            self._failure = self._failure or failure
        return self._sealed

    def _log_failure(self, name: str, failure: BaseException | None, late: bool) -> None:
        if failure is not None and self.elsewhere:
            what = "is not part of the micro-batch" if late else "failed, and the micro-batch with it"
            log.warning("tx.%s in a thread %s: %s", name, what, failure)

    def finish(self) -> None:
        """The function has returned: waits for what is under way. Raises the error of an operation that
        failed in another thread, or was refused there.
        """
        self.close()
        self._require_no_failure()

    def seal(self) -> None:
        """After ``finish``, right before the decision. Raises the error of an operation that was refused in
        another thread since then.
        """
        with self._changed:
            self._require_no_failure()
            self._sealed = True

    def _require_no_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._forked[0]:
            raise OptionError("tx was called in a process that the function has forked", _IN_THE_DRIVER)

    def close(self) -> None:
        """Lets no operation begin, and waits for what is under way."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._under_way)
