"""Whether a broker has an administrator who can log in: a change may not take the last one.

Not here: the owner of the data directory, who needs no user and may always add one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

from broker_core.broker.access.users import ADMINISTRATOR, Users
from broker_core.core import password as passwords
from broker_core.core.errors import OptionError
from broker_core.core.records import UserRecord

T = TypeVar("T")


def administered(users: Mapping[str, UserRecord], listed: Collection[str]) -> bool:
    """``users``: those of the catalog; ``listed``: those of ``--users``, whose passwords hold. Without any,
    the default user is one.
    """
    if not users or any(name not in users for name in listed):
        return True
    return any(is_administrator(each, listed) for each in users.values())


def is_administrator(user: UserRecord, listed: Collection[str]) -> bool:
    """Whether it has the tag and a password."""
    return ADMINISTRATOR in user.tags and (
        user.name in listed or not passwords.is_unmatched(user.password_hash)
    )


def keep_one(users: Users, change: Callable[[], T]) -> T:
    """Raises OptionError, in a work that is undone then, if ``change`` has taken the last administrator."""
    before = administered(users.by_name, users.file_users)
    done = change()
    if before:
        require_one(users.by_name, users.file_users)
    return done


def require_one(users: Mapping[str, UserRecord], listed: Collection[str]) -> None:
    """Raises OptionError."""
    if not administered(users, listed):
        raise OptionError(
            "no administrator who can log in would be left",
            "first give another user, who has a password, the tag: `txmq user tag NAME administrator`",
        )
