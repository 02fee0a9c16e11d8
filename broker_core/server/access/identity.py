"""Who a caller is, once it has proved it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from broker_core.flight.authorization import Basic, Bearer


@dataclass(frozen=True, slots=True)
class Identity:
    """A user. ``owner``: a process that may read the data directory, and do all; its ``user`` is ""."""

    user: str
    owner: bool = False


OWNER = Identity("", owner=True)


class Standing(Enum):
    """What can be said of the credentials of a call at once. ``proven``: they are right, or were a moment
    ago. ``unproven``: a check may take its time.
    """

    proven = auto()
    unproven = auto()
    refused = auto()


class Authenticator(Protocol):
    """Decides who a caller is. ``address``: of the client, without its port; "" if it is not known.
    ``connection``: a name of its own for each.

    Every method raises LoginRefused, and may wait for as long as a slow hash takes: not for an event loop.
    """

    def basic(self, user: str, password: str, address: str, connection: str) -> Identity: ...

    def bearer(self, token: str, address: str) -> Identity: ...

    def anonymous(self, address: str) -> Identity:
        """Of a call that carries no ``authorization``."""
        ...

    def standing(self, credentials: Basic | Bearer | None) -> Standing:
        """Waits for nothing, and raises nothing."""
        ...

    def prove(self, challenge: bytes) -> bytes: ...
