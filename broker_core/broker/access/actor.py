"""Who calls: a user, its permissions on names, and what its tags let it do beside them. Pure.

Not here: what a permission allows (``rights.py``), logins (``server/access``).
"""

from __future__ import annotations

from dataclasses import dataclass

from broker_core.broker.access.rights import Rights
from broker_core.broker.access.users import ADMINISTRATOR, OPERATOR, Users


@dataclass(frozen=True, slots=True)
class Actor:
    """The default is the owner of the data directory. ``operates``: it decides for others. ``rights`` None:
    all.
    """

    user: str = ""
    administers: bool = True
    operates: bool = True
    rights: Rights | None = None


OWNER = Actor()


def actor_of(users: Users, user: str) -> Actor:
    """Returns the user with its tags of now."""
    tags = users.tags(user)
    administers = ADMINISTRATOR in tags
    return Actor(user, administers, administers or OPERATOR in tags)
