"""The operations on ``tx`` that are under way, in any thread of the function.

Not here: what an operation does (``batch_transaction.py``).
Invariant: once ``finish`` has returned, every operation that was begun has ended well, and no other begins.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

from broker_core.errors import OptionError

log = logging.getLogger("txmq")


class Operations:
    """Made in the thread that runs the function. Thread-safe."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._changed = threading.Condition()
        self._under_way = 0
        self._closed = False
        self._failure: BaseException | None = None  # of another thread: nobody may have seen it

    @property
    def elsewhere(self) -> bool:
        """Whether the caller is another thread than that of the function."""
        return threading.get_ident() != self._thread

    @contextlib.contextmanager
    def one(self, name: str) -> Iterator[None]:
        """Raises OptionError after the function returned."""
        try:
            with self._changed:
                if self._closed:
                    raise OptionError(
                        f"tx.{name} after the function returned",
                        "call it within the function, and wait for the threads that use tx",
                    )
                self._under_way += 1
            try:
                yield
            finally:
                with self._changed:
                    self._under_way -= 1
                    self._changed.notify_all()
        except BaseException as error:
            if self.elsewhere:
                log.warning("tx.%s in a thread failed, and the micro-batch with it: %s", name, error)
                self._failure = self._failure or error
            raise

    def finish(self) -> None:
        """The function has returned: waits for what is under way. Raises the error of an operation that
        failed in another thread, or was refused there.
        """
        self.close()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Lets no operation begin, and waits for what is under way."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._under_way)
