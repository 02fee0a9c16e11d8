"""One message on its way through the exchanges: what they read of it, read once, and what that may cost.

The cost grows with what others have bound: exchanges that lead to each other, times the keys of the message,
times the words of a key. So it is counted, in steps of about 0.1 us.
Not here: what a message is looked up in (``exchange.py``).
Invariant: a message takes ``MOST`` steps, and what is left of one look at an index.
"""

from __future__ import annotations

from collections.abc import Mapping

from broker_core.core.errors import PreconditionFailed, RemoteProtocolError
from broker_core.message.properties import Properties

MOST = 200_000  # some 20 ms
STEPS = 20  # as long as an entry of a queue takes
EXCHANGE, KEY = 20, 2  # steps of an exchange, and of each key there, whatever its type


class Search:
    """Of one message after the other. ``steps``: of all. ``refuses``: one that is too dear is refused;
    otherwise, as one that was accepted before, it goes as far as the steps lead. ``waits``: the answers of
    types of exchanges in which a message may wait.
    """

    __slots__ = ("_headers", "_most", "properties", "refuses", "steps", "waits")

    def __init__(self, *, refuses: bool = True) -> None:
        self.refuses, self.steps, self._most = refuses, 0, 0

    def begin(self, properties: bytes) -> None:
        self.properties, self._most = properties, self.steps + MOST
        self.waits: dict[str, bool] = {}
        self._headers: Mapping[str, object] | None = None

    def pay(self, steps: int) -> None:
        """Raises PreconditionFailed."""
        self.steps += steps
        if self.steps > self._most:
            raise PreconditionFailed(
                f"the route of this message takes more than {MOST:,} steps through bindings: bind the queues "
                "closer to the exchange where it is published, or give fewer keys in CC"
            )

    @property
    def complete(self) -> bool:
        """Returns whether the last message has found all of its queues."""
        return self.steps <= self._most

    @property
    def headers(self) -> Mapping[str, object]:
        """Returns the headers; none for damaged properties, which are refused at entry."""
        if self._headers is None:
            try:
                self._headers = Properties.decode(self.properties).headers
            except RemoteProtocolError:
                self._headers = {}
        return self._headers
