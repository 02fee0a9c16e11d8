"""What each user has staged: open attempts, and the bytes of parts until they are published or applied. Pure.

Not here: the parts (``branch.py``), and parts that are on their way (``server/quotas.py``).
Invariant: an attempt is paid for by the user who opened it, whatever its app is called, until its last part
is gone, also after a restart.
"""

from __future__ import annotations

from dataclasses import dataclass

from broker_core.broker.state.undo import Undo
from broker_core.errors import NotAllowed, TransactionTooLarge


@dataclass(frozen=True, slots=True)
class StagedLimits:
    """``user_bytes``: of what one user has staged and is not published or applied. None: no limit.
    ``user_attempts``: open attempts of one user. ``idle_s``: an attempt that staged nothing for so long, and
    was not decided, has lost its driver; at least an hour, because times of attempts are that coarse.
    """

    user_bytes: int | None = None
    user_attempts: int = 10_000
    idle_s: float = 24 * 3600


class StagedRoom:
    def __init__(self, undo: Undo) -> None:
        self.limits = StagedLimits()  # the engine may set others
        self._undo = undo
        self._payer: dict[str, str] = {}  # token -> user
        self._open: dict[str, dict[str, None]] = {}  # user -> tokens of open attempts
        self._bytes: dict[str, int] = {}  # token -> of its parts
        self._of_user: dict[str, int] = {}

    def open(self, token: str, user: str) -> None:
        """Counts an attempt against ``user``. Raises NotAllowed."""
        if len(self._open.get(user, ())) >= self.limits.user_attempts:
            raise NotAllowed(
                f"{whose(user)} has {self.limits.user_attempts} open attempts, which is the limit",
                "`txmq staged` lists them, and `txmq discard` drops one; or raise --user-attempts",
            )
        self.restore(token, user, is_open=True)

    def restore(self, token: str, user: str, *, is_open: bool) -> None:
        """``user`` pays for a token from now on."""
        self._undo.item(self._payer, token)
        self._payer[token] = user
        if is_open:
            self._undo.enter(self._open, user, token)

    def close(self, token: str) -> None:
        """The attempt is over; its parts may stay until they are applied."""
        user = self._payer.get(token, "")
        if token in self._open.get(user, ()):
            self._undo.leave(self._open, user, token)
        self._forget_payer(token)

    def count(self, token: str, size_bytes: int) -> None:
        """Adds a part, or takes it away."""
        user = self._payer.get(token, "")
        for table, key in ((self._bytes, token), (self._of_user, user)):
            self._undo.item(table, key)
            total = table.pop(key, 0) + size_bytes
            if total:
                table[key] = total
        self._forget_payer(token)

    def _forget_payer(self, token: str) -> None:
        user = self._payer.get(token, "")
        if token not in self._bytes and token not in self._open.get(user, ()):
            self._undo.item(self._payer, token)
            self._payer.pop(token, None)

    @property
    def total(self) -> int:
        """Returns the bytes of all parts."""
        return sum(self._of_user.values())

    def bytes_of(self, token: str) -> int:
        return self._bytes.get(token, 0)

    def payer(self, token: str, user: str) -> str:
        """Returns who pays for a token; ``user`` if nobody does yet."""
        return self._payer.get(token, user)

    def over(self, user: str, more: int) -> int:
        """Returns how many bytes ``more`` would be over the limit; 0 or less if they fit."""
        limit = self.limits.user_bytes
        return 0 if limit is None else self._of_user.get(user, 0) + more - limit

    def refusal(self, user: str, more: int) -> TransactionTooLarge:
        return TransactionTooLarge(
            f"{whose(user)} has staged {self._of_user.get(user, 0)} bytes and would stage {more} more; the "
            f"limit is {self.limits.user_bytes}",
            "raise --staged-bytes, or make batches smaller; `txmq staged` lists what is staged, and "
            "`txmq discard` drops it",
        )


def whose(user: str) -> str:
    """Returns how a refusal calls a user."""
    return f"user '{user}'" if user else "the owner of the data directory"
