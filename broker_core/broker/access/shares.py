"""What one user may have of what all users share, so that no user fills it for the others: one rule for every
bound. Pure.

A share is a tenth of the bound (``--user-share``). It binds who is not an administrator, as long as there is
another user: an administrator may delete the others, the owner of the data directory and the default user
have nobody to share with. Where an option gives a bound for each user, that is the share, and binds all.

====================================  ===============================================================
shared                                who is above the share
====================================  ===============================================================
PREPARED, CONSUMERS, and their bytes  is refused, and told what to do
connections, channels, calls, parts   is refused (``server/quotas.py``)
outcomes, commits and ids of channels loses the oldest of its own, and nobody another's
====================================  ===============================================================

Not here: what is counted, which is where it changes, by the records of the catalog, as after a restart.
Invariant: what a user has is never taken away because a share became smaller. It gets no more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from shlex import quote
from typing import NamedTuple

from broker_core.broker.access.users import ADMINISTRATOR, Users
from broker_core.core.address import VHOST
from broker_core.core.errors import PreconditionFailed, printable
from broker_core.core.undo import Undo

SHARE = 0.1


class ShareBound(NamedTuple):
    """A bound that refuses. ``what``: of it, with ``{n}`` for the number; ``user_advice``: to who is at the
    share, with ``{user}``, and ``--vhost`` of it; ``advice``: where all together are at the bound.
    """

    what: str
    user_advice: str
    advice: str


PREPARED = ShareBound(
    "{n} prepared transactions",
    "commit or roll back some (`txmq tx rollback --of {user} --all`: all there), or raise --user-share",
    "`txmq tx list` lists them; commit or roll back the old ones",
)

PREPARED_BYTES = ShareBound(
    "{n} bytes in prepared transactions", PREPARED.user_advice, "commit or roll back the old ones"
)

CONSUMERS = ShareBound(
    "{n} consumers of one queue", "cancel some, or raise --user-share", "cancel some, or use several queues"
)
CONSUMER_BYTES = ShareBound("{n} bytes in consumers", "cancel some, or raise --user-share", "cancel some")


class Shares:
    """The shares of the users of one broker. Reading is for any thread."""

    def __init__(self, users: Users) -> None:
        self._users = users
        self.fraction = SHARE
        self.consumers, self.consumer_bytes = Counter[str](), 0  # bytes: by user, and of all

    def count(self, undo: Undo, user: str, consumer_bytes: int) -> None:
        """So much more is the user's in consumers; below 0: less."""
        undo.item(self.consumers, user)
        undo.attribute(self, "consumer_bytes")
        self.consumer_bytes += consumer_bytes
        if (left := self.consumers.pop(user, 0) + consumer_bytes) > 0:  # who has none takes no memory
            self.consumers[user] = left

    def most(self, user: str, total: int) -> int:
        """Returns how much of ``total`` the user may have; "": the owner of the data directory."""
        users = self._users
        alone = len({*users.by_name, *users.file_users}) < 2
        return total if alone or not user or ADMINISTRATOR in users.tags(user) else self._part(total)

    def over(self, user: str, amount: int, total: int) -> int:
        """Returns how much ``amount`` of the user is above what it may have; 0 or less: it fits."""
        part = self._part(total)
        return amount - part if amount <= part else amount - self.most(user, total)

    def require(
        self, shared: ShareBound, user: str, mine: int, everyone: int, total: int, vhosts: Iterable[str]
    ) -> None:
        """Before a user who has ``mine`` of what all have takes one more. ``vhosts``: of what is the user's;
        read for a refusal only. Raises PreconditionFailed.
        """
        if everyone >= total:
            what = shared.what.format(n=total)
            raise PreconditionFailed(f"{what} are there, which is the limit: {shared.advice}")
        if self.over(user, mine + 1, total) > 0:
            what = shared.what.format(n=self._part(total))
            names = sorted(set(vhosts))
            where = ", ".join(f"'{vhost}'" for vhost in names)
            at = "".join(f" --vhost {quote(printable(name))}" for name in names[:1] if VHOST not in names)
            advice = shared.user_advice.format(user=quote(printable(user)) + at)
            raise PreconditionFailed(
                f"user '{user}' has {what} in vhost {where}, which is its share of {total}: {advice}"
            )

    def _part(self, total: int) -> int:
        return max(1, int(total * self.fraction))
