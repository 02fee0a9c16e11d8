"""What sessions, commands and handlers use of a connection and of the server.

Not here: what implements it (``connection.py``, ``server.py``). Both import sessions and handlers, which
import only this.
Invariant: this module imports nothing else of the AMQP server.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from broker_core.amqp.v0_9_1.connection import AmqpConnection
from broker_core.amqp.v0_9_1.decoder import Decoder
from broker_core.amqp.v0_9_1.events import ChannelFailed, Command
from broker_core.amqp.v0_9_1.methods import Method
from broker_core.amqp.v0_9_1.states import ConnectionState
from broker_core.broker.access.rights import Rights
from broker_core.broker.broker import BrokerState
from broker_core.core.errors import ConnectionException
from broker_core.node.local import LocalBroker
from broker_core.server.access.logins import Logins
from broker_core.server.commit_queue import CommitQueue
from broker_core.server.quotas import Quotas

FLUSH_BYTES = 256 * 1024  # gathered above this: written before the tick ends
HIGH_BYTES = 1024 * 1024  # unsent above this: consumers stop, until it is below LOW_BYTES
LOW_BYTES = 256 * 1024
HARD_BYTES = 16 * 1024 * 1024  # unsent above this: the broker stops reading from the client


class Server(Protocol):
    """``commands``: the function of each method, called with session, method and command."""

    broker: LocalBroker
    quotas: Quotas
    logins: Logins
    commits: CommitQueue
    loop: asyncio.AbstractEventLoop

    @property
    def connections(self) -> Iterable[ClientConnection]: ...

    @property
    def commands(self) -> Mapping[type[Method], Callable[[Any, Any, Command], None]]: ...


class ClientConnection(Protocol):
    """The connection of one client.

    ``name``: both addresses. ``address``: of the client. ``user``: "" before the login. ``rights``: what the
    user may do. ``seen``: the state as its virtual host sees it, and before connection.open as ``/`` does.
    ``attached``: what handlers and commands keep as long as it lives. ``writable``: the client
    reads what it is sent. ``observed``: decodes what ``write`` gets, if handlers see it, else None.
    """

    name: str
    address: str
    rights: Rights
    seen: BrokerState
    attached: dict[Any, Any]
    writable: bool
    observed: Decoder | None
    protocol: AmqpConnection

    @property
    def server(self) -> Server: ...

    @property
    def user(self) -> str: ...

    @property
    def state(self) -> ConnectionState: ...

    @property
    def closed_for_sending(self) -> bool:
        """Nothing more can be sent on a channel."""

    def announces(self, capability: str) -> bool:
        """Whether the client announced this capability."""

    def send(
        self, number: int, method: Method, properties: bytes = b"", body: bytes = b"", *, queue: str = ""
    ) -> None:
        """Send a method with its content. ``queue``: the queue of a delivery, for handlers."""

    def write(self, data: bytes) -> None:
        """Send encoded frames: whole commands of one open channel."""

    def flush_later(self) -> None:
        """Write what the protocol has encoded, at the end of the tick."""

    def fail(
        self, number: int, error: BaseException, method: Method | None = None, order: float = math.inf
    ) -> None:
        """Close channel ``number``, or the connection, with ``error``, when what came before is answered;
        ``method`` caused it. ``order``: of its command, if that has waited.
        """

    def close(self, error: ConnectionException, ids: tuple[int, int]) -> None:
        """Close the connection now. ``ids``: class and method that caused it, or 0 and 0."""

    def close_channel(self, failed: ChannelFailed) -> None:
        """Close it now."""

    def end_session(self, number: int) -> None:
        """End the session of channel ``number`` because the client closes the channel."""

    def add_handler(self, handler: Any) -> None:
        """Call a ``Handler`` last, from the next event of this connection on, unless it is called already."""

    def remove_handler(self, handler: Any) -> None:
        """Call it no more, drop what it has in ``attached``, and resume what it has paused."""

    def abort(self, why: str) -> None:
        """Close the socket at once."""

    def pause(self, why: object) -> None:
        """Read and carry out no more commands until each ``why`` has resumed."""

    def resume(self, why: object) -> None:
        """Does nothing if the connection is not paused for ``why``."""

    def go_on(self, waiting: Any) -> None:
        """What waited in ``waiting`` is carried out in the next turn."""
