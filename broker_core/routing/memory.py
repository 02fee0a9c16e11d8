"""How much memory the queues, exchanges and bindings of a virtual host take, and how much they may.

Not here: the memory of messages (``server/alarm.py``). These names have a bound of their own, because nobody
frees them by waiting.
Invariant: a virtual host has at most a quarter of what the others leave, so that some is left whatever others
have.
"""

from __future__ import annotations

from collections.abc import Mapping

from broker_core.core.errors import PreconditionFailed
from broker_core.core.undo import Tally, Undo
from broker_core.routing.exchange import canonical

NAMES_BYTES = 2048 * 1024 * 1024  # of all virtual hosts
NAME_BYTES = 4_000  # of a queue or an exchange, about


class NamesMemory:
    """Of one virtual host. ``everywhere``: of all; None: there is no other."""

    __slots__ = ("_all", "_here", "vhost")

    def __init__(self, undo: Undo, vhost: str, everywhere: Tally | None = None) -> None:
        self.vhost = vhost
        self._here = Tally(undo)
        self._all = Tally(undo) if everywhere is None else everywhere

    @property
    def total(self) -> int:
        return self._here.total

    def add(self, size_bytes: int) -> None:
        self._here.add(size_bytes)
        self._all.add(size_bytes)

    def check(self, what: str, more: int = 0) -> None:
        """Before one more, with ids that take ``more`` bytes. Raises PreconditionFailed, which says that it
        ``what``.
        """
        taken = self._here.total
        most = max(NAMES_BYTES - (self._all.total - taken), 0) // 4
        taken += more
        if taken >= most:
            raise PreconditionFailed(
                f"{what}: the queues, exchanges and bindings of vhost '{self.vhost}' take {taken} bytes, "
                f"the limit is {most}, a quarter of what other vhosts leave: "
                "delete some, or lower x-cache-size in the policy that gives it"
            )


def bytes_of(name: str, arguments: Mapping[str, object]) -> int:
    """Returns how much memory a queue or an exchange takes, about, without its bindings."""
    return NAME_BYTES + len(name) + 8 * len(canonical(arguments))
