"""Who calls: a user, and what its tags let it do beside its permissions on names. Pure.

Not here: permissions on queues and exchanges (``rights.py``), logins (``server/access``).
"""

from __future__ import annotations

from dataclasses import dataclass

from broker_core.broker.users import ADMINISTRATOR, OPERATOR, Users


@dataclass(frozen=True, slots=True)
class Actor:
    """The default is the owner of the data directory. ``operates``: it decides for others."""

    user: str = ""
    administers: bool = True
    operates: bool = True


OWNER = Actor()


def actor_of(users: Users, user: str) -> Actor:
    """Returns the user with its tags of now."""
    tags = users.tags(user)
    administers = ADMINISTRATOR in tags
    return Actor(user, administers, administers or OPERATOR in tags)
