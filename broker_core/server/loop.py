"""The event loop of a listener, in a thread of its own: uvloop's where it is installed."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from concurrent.futures import Future


def new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


class LoopThread(ABC):
    """``start`` and ``stop`` are for any thread; all else of a listener belongs to the thread of its loop."""

    loop: asyncio.AbstractEventLoop

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._serves = threading.Event()

    @abstractmethod
    async def _listen(self) -> None:
        """Raises OptionError if an address cannot be used."""

    @abstractmethod
    async def _end(self) -> None:
        """Takes no more clients, and ends those that there are."""

    def start(self, *, serves: bool = True) -> None:
        """Listens, and serves in a thread of its own; else clients wait, and take no files, until ``serve``.
        Raises OptionError if an address cannot be used.
        """
        if serves:
            self.serve()
        started: Future[None] = Future()
        self.loop = new_loop()
        self._thread = threading.Thread(target=self._run, args=(started,), name=self._name, daemon=True)
        self._thread.start()
        try:
            started.result()
        except BaseException:
            self._thread.join()
            self._thread = None
            raise

    def serve(self) -> None:
        self._serves.set()

    def stop(self) -> bool:
        """Ends all clients, then the thread. Returns whether it had been started; it may be repeated."""
        thread, self._thread = self._thread, None
        if thread is None:
            return False
        self.serve()
        asyncio.run_coroutine_threadsafe(self._end(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        thread.join()
        return True

    def _run(self, started: Future[None]) -> None:
        """``started`` gets the error of ``_listen``, or its success."""
        loop = self.loop
        asyncio.set_event_loop(loop)
        try:
            try:
                loop.run_until_complete(self._listen())
            except BaseException as error:
                started.set_exception(error)
                return
            started.set_result(None)
            self._serves.wait()
            loop.run_forever()
        finally:
            asyncio.set_event_loop(None)
            loop.close()
