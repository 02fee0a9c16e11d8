"""Actors: pieces of real, synchronous code that stop before every step that another process could see.

Not here: what they do. Each actor is a thread, but only one of them runs at a time and only when it is told
to, so a run is decided by the order of ``step`` calls and nothing else.

Invariant: an actor that was killed does nothing any more: its next step raises :class:`Killed`, and so does
every one after it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

DEADLOCK_S = 600.0
_running = threading.local()


class Killed(BaseException):
    """SIGKILL: no ``except Exception`` sees it, and what ``finally`` does reaches nobody."""


class Actor:
    def __init__(self, name: str, body: Callable[[], None]) -> None:
        self.name = name
        self.pending = "start"  # what it does when it is stepped
        self.done = False
        self.error: BaseException | None = None
        self._body = body
        self._mode = "go"
        self._dead = False
        self._go = threading.Semaphore(0)
        self._back = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return (
            f"<{self.name} before {self.pending}>"
            if not self.done
            else f"<{self.name} ended: {self.error!r}>"
        )

    def _run(self) -> None:
        self._go.acquire()
        _running.actor = self
        try:
            if not self._dead:
                self._body()
        except Killed:
            pass
        except BaseException as error:  # it is looked at by whoever stepped
            self.error = error
        finally:
            self.done = True
            self._back.release()

    def step(self, mode: str = "go") -> None:
        """Let it do what is pending, in a good or a bad way, up to the next step."""
        assert not self.done
        self._mode = mode
        self._go.release()
        assert self._back.acquire(timeout=DEADLOCK_S), f"{self!r} waits for a lock that another actor holds"

    def kill(self) -> None:
        if not self.done:
            self._dead = True
            self.step()
            while not self.done:
                self.step()
        self._thread.join(DEADLOCK_S)

    def point(self, label: str) -> str:
        """Called by the actor: stop before ``label``; the mode that it is stepped with."""
        if self._dead:
            raise Killed
        self.pending = label
        self._back.release()
        self._go.acquire()
        if self._dead:
            raise Killed
        return self._mode


def current() -> Actor | None:
    """The actor that is running; None in the test itself."""
    return getattr(_running, "actor", None)


def point(label: str) -> str:
    actor = current()
    return "go" if actor is None else actor.point(label)
