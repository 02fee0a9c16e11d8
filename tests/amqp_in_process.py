"""An AMQP server in the process of the test, and a thread that leads the commits and is held in the middle of
one.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from broker_core.core import failpoint
from broker_core.node.local import LocalBroker
from broker_core.server.access.logins import Logins
from broker_core.server.amqp.handlers.handler import Handler
from broker_core.server.amqp.options import AmqpOptions
from broker_core.server.amqp.server import AmqpServer
from broker_core.store.memory import MemoryStore
from tests.amqp_peer import Peer

T = TypeVar("T")


class Served:
    """An AMQP server in this process, over a broker that keeps nothing."""

    def __init__(
        self,
        *handlers: Handler,
        store: MemoryStore | None = None,
        options: AmqpOptions | None = None,
        listeners: Sequence[str] = ("127.0.0.1:0",),
        directory: str = "",
        users: dict[str, str] | None = None,
    ) -> None:
        self.broker = LocalBroker(store or MemoryStore())
        logins = Logins(self.broker.state.users, file_users=users)
        more = {"options": options, "handlers": handlers, "logins": logins, "directory": directory}
        self.server = AmqpServer(self.broker, listeners, **more)
        self.server.start()

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@{self.server.addresses[0]}/"

    @property
    def port(self) -> int:
        return int(self.server.addresses[0].rpartition(":")[2])

    def in_loop(self, function: Callable[[], T]) -> T:
        """What a program beside the loop does to reach a connection."""

        async def run() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self.server.loop).result(600)

    def counts(self) -> dict[str, int]:
        return {queue.name: queue.messages for queue in self.broker.queues()}

    def close(self) -> None:
        failpoint.disarm()
        self.server.stop()
        self.broker.close()


@contextlib.contextmanager
def serving(*handlers: Handler, **more: Any) -> Iterator[Served]:
    with contextlib.closing(Served(*handlers, **more)) as served:
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

    def look() -> bool:
        return len(server.connections) <= len(but) and server.commits.idle and server.turns.idle

    while not served.in_loop(look):
        threading.Event().wait(0.005)
