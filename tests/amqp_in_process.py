"""An AMQP server in the process of the test, and a thread that leads the commits and is held in the middle of
one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future

from broker_core.core import failpoint
from broker_core.node.local import LocalBroker
from broker_core.server.amqp.handlers.handler import Handler
from broker_core.server.amqp.server import AmqpServer
from broker_core.store.memory import MemoryStore
from tests.amqp_peer import Peer


class Served:
    """An AMQP server in this process, over a broker that keeps nothing."""

    def __init__(self, *handlers: Handler, store: MemoryStore | None = None) -> None:
        self.broker = LocalBroker(store or MemoryStore())
        self.server = AmqpServer(self.broker, ["127.0.0.1:0"], handlers=handlers)
        self.server.start()

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@{self.server.addresses[0]}/"

    def counts(self) -> dict[str, int]:
        return {queue.name: queue.messages for queue in self.broker.queues()}

    def close(self) -> None:
        failpoint.disarm()
        self.server.stop()
        self.broker.close()


@contextlib.contextmanager
def serving(*handlers: Handler, store: MemoryStore | None = None) -> Iterator[Served]:
    with contextlib.closing(Served(*handlers, store=store)) as served:
        yield served


class Leader:
    """Another thread that leads the commits, and is held in the middle of one."""

    def __init__(self, served: Served) -> None:
        self._held, self._go_on = threading.Event(), threading.Event()
        failpoint.arm("committer.planned", self._hold)
        self._thread = threading.Thread(target=served.broker.run, args=(lambda _state, _change, _now: None,))
        self._thread.start()
        assert self._held.wait(600)

    def _hold(self, _name: str) -> None:
        self._held.set()
        self._go_on.wait(600)

    def let_go(self) -> None:
        self._go_on.set()
        self._thread.join()

    def __enter__(self) -> Leader:
        return self

    def __exit__(self, *_: object) -> None:
        self.let_go()


def ended(served: Served, *but: Peer) -> None:
    """Wait until the broker has nothing left of connections that are gone. It is asked in its loop: between
    two steps of a commit nothing seems to wait.
    """
    server = served.server

    def look(found: Future[bool]) -> None:
        found.set_result(len(server.connections) <= len(but) and server.commits.idle and server.turns.idle)

    while True:
        found: Future[bool] = Future()
        server.loop.call_soon_threadsafe(look, found)
        if found.result(600):
            return
        threading.Event().wait(0.005)
