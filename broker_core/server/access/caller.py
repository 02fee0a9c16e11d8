"""The caller of a Flight call, and what it may ask for.

Not here: which call needs what (``permits.py``), who it is (``login.py``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from broker_core.broker.access.permission import Permission
from broker_core.broker.access.rights import Actor, Rights
from broker_core.broker.access.users import ADMINISTRATOR, LOOKING, OPERATOR
from broker_core.broker.broker import BrokerState
from broker_core.broker.history.lookup import Visibility
from broker_core.core.errors import AccessRefused
from broker_core.server.access.identity import Identity

_ANY: tuple[Permission, ...] = ("configure", "write", "read")


@dataclass(frozen=True, slots=True)
class Caller:
    """Every method raises AccessRefused. ``address``: of the client, without its port. ``state``: as the
    virtual host of the call sees it.

    A call may last, so what it may do is that of now, and not of its start: a deleted user may do nothing.
    """

    identity: Identity
    rights: Rights
    address: str
    state: BrokerState
    client: str = ""  # what it calls itself

    @property
    def tags(self) -> frozenset[str]:
        return self.state.users.tags(self.identity.user)

    @property
    def administers(self) -> bool:
        return self.identity.owner or ADMINISTRATOR in self.tags

    @property
    def enters_somewhere(self) -> bool:
        """Whether it has a permission in any virtual host, or a tag."""
        users, user = self.state.users, self.identity.user
        return self.identity.owner or self._looks or any(name == user for name, _ in list(users.permissions))

    @property
    def actor(self) -> Actor:
        return Actor(self.identity.user, self.administers, self.operates, self.rights)

    @property
    def _looks(self) -> bool:
        return not self.tags.isdisjoint(LOOKING)

    @property
    def sees(self) -> Visibility:
        """What it sees of the history of its virtual host."""
        users, user, vhost = self.state.users, self.identity.user, self.state.vhost
        return Visibility(
            vhost,
            self.identity.owner or self._looks,
            user,
            lambda queue: any(self.rights.may(permission, queue) for permission in _ANY),
            lambda app: users.apps.get((vhost, app)) == user,
            self.state.transactions.history.hidden,
        )

    def enter(self) -> None:
        """Needs any permission in the virtual host, or a tag. Raises NotAllowed once that is deleted."""
        self.state.topology.require_there()
        if not self.rights.enters and not self._looks and not self.identity.owner:
            raise AccessRefused(
                f"access to vhost '{self.rights.vhost}' refused for user '{self.identity.user}'",
                "an administrator gives permissions with `txmq permission set`",
            )

    def read(self, queues: Iterable[str]) -> None:
        self.enter()
        for queue in queues:
            self.rights.require("read", "queue", queue)

    @property
    def operates(self) -> bool:
        return self.administers or OPERATOR in self.tags

    def look(self, what: str) -> None:
        """Needs a tag."""
        if not self.identity.owner and not self._looks:
            raise self._refused(what, " or ".join(LOOKING))

    def operate(self, what: str) -> None:
        """To decide for others: ``monitoring`` only looks."""
        if not self.operates:
            raise self._refused(what, f"{ADMINISTRATOR} or {OPERATOR}")

    def administer(self, what: str) -> None:
        if not self.administers:
            raise self._refused(what, ADMINISTRATOR)

    def _refused(self, what: str, tags: str) -> AccessRefused:
        return AccessRefused(
            f"access to {what} refused for user '{self.identity.user}'", f"it needs the tag {tags}"
        )
