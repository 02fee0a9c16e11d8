"""Who a caller is, once it has proved it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Identity:
    """A user. ``owner``: a process that may read the data directory; it may do everything. Its ``user`` is
    "".
    """

    user: str
    owner: bool = False


OWNER = Identity("", owner=True)


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
