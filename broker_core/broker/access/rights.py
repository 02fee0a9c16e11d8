"""What a user may do: the answers of its permissions, kept until the users change, and what its tags let it
do beside them.

Not here: which command needs which permission (``broker/command_permissions.py``), logins
(``server/access``).

Invariant: an answer is that of the patterns of the current ``Users.epoch``. ``writable`` is only a shortcut:
a change of users empties it (``forget``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, TypeAlias

from broker_core.broker.access.permission import EVERYTHING, Permission, matches
from broker_core.broker.access.users import ADMINISTRATOR, IMPERSONATOR, OPERATOR, Users
from broker_core.core.address import VHOST
from broker_core.core.checks import MAX_NAME_BYTES
from broker_core.core.errors import AccessRefused

DEFAULT_EXCHANGE = "amq.default"  # the name under which the default exchange is permitted
KEPT = 1_000  # answers, of a connection or of a user's calls

Kind: TypeAlias = Literal["queue", "exchange"]


class _Snapshot:
    """The patterns of one epoch, and the answers they gave."""

    __slots__ = ("answers", "epoch", "everything", "patterns", "topics")

    def __init__(self, users: Users, user: str, vhost: str, *, owner: bool) -> None:
        self.epoch = users.epoch
        self.answers: dict[tuple[str, str, str], bool] = {}
        record = users.permissions.get((user, vhost))
        self.patterns = (
            {"configure": record.configure, "write": record.write, "read": record.read}
            if record is not None and users.exists(user)
            else None
        )
        self.topics = {} if owner else dict(users.topics.get((user, vhost), {}))
        self.everything = (
            owner
            or users.trusts(user)
            or (
                self.patterns is not None
                and all(pattern == EVERYTHING for pattern in self.patterns.values())
                and not self.topics
            )
        )


class Rights:
    """What ``user`` may do in ``vhost``. ``owner``: everything, whatever the users are.

    ``writable``: exchanges to which it may publish with any routing key. Thread-safe, but for ``writable``,
    which belongs to the thread of one listener.
    """

    __slots__ = ("_now", "_owner", "_users", "user", "vhost", "writable")

    def __init__(self, users: Users, user: str, vhost: str = VHOST, *, owner: bool = False) -> None:
        self._users = users
        self._owner = owner
        self.user = user
        self.vhost = vhost
        self.writable: set[str] = set()
        self._now = _Snapshot(users, user, vhost, owner=owner)

    def forget(self) -> None:
        """The users have changed."""
        self.writable.clear()

    def _current(self) -> _Snapshot:
        now = self._now
        if now.epoch is not self._users.epoch:
            now = self._now = _Snapshot(self._users, self.user, self.vhost, owner=self._owner)
        return now

    @property
    def everything(self) -> bool:
        """Nothing needs to be asked."""
        return self._current().everything

    @property
    def epoch(self) -> object:
        """Another object after each change of users and permissions."""
        return self._current().epoch

    def holds(self, epoch: object) -> bool:
        """Whether what was asked in ``epoch`` need not be asked again; None: nothing was."""
        now = self._current()
        return now.everything or now.epoch is epoch

    @property
    def now(self) -> tuple[str, object]:
        """Whose rights, and of which epoch: what was asked of these is not asked again."""
        return self.user, self.epoch

    @property
    def impersonates(self) -> bool:
        """Whether its messages may name any user."""
        return self._owner or IMPERSONATOR in self._users.tags(self.user)

    @property
    def enters(self) -> bool:
        """Whether the user may open a connection to the virtual host."""
        now = self._current()
        return now.everything or now.patterns is not None

    def may(self, permission: Permission, name: str) -> bool:
        """``name``: of a queue or an exchange."""
        now = self._current()
        if now.everything:
            return True
        if now.patterns is None:
            return False
        key = (permission, "", name)
        answer = now.answers.get(key)
        if answer is None:
            answer = _keep(now, key, matches(now.patterns[permission], name))
        return answer

    def require(self, permission: Permission, kind: Kind, name: str) -> None:
        """Raises AccessRefused, with RabbitMQ's text."""
        if kind == "exchange" and not name:
            name = DEFAULT_EXCHANGE
        if not self.may(permission, name):
            raise AccessRefused(
                f"access to {kind} '{name}' in vhost '{self.vhost}' refused for user '{self.user}'"
            )

    def limits_topics(self, exchange: str) -> bool:
        """Whether routing keys of this exchange have to be asked for, if it is a topic exchange."""
        now = self._current()
        return not now.everything and exchange in now.topics

    def require_topic(self, permission: Literal["write", "read"], exchange: str, routing_key: str) -> None:
        """For a topic exchange: whether this routing key is permitted. Raises AccessRefused."""
        now = self._current()
        record = None if now.everything else now.topics.get(exchange)
        if record is None:
            return
        key = (permission, exchange, routing_key)
        answer = now.answers.get(key)
        if answer is None:
            pattern = record.write if permission == "write" else record.read
            for name, value in (("{username}", self.user), ("{vhost}", self.vhost)):
                pattern = pattern.replace(name, re.escape(value))
            answer = _keep(now, key, matches(pattern, routing_key))
        if not answer:
            raise AccessRefused(
                f"access to topic '{routing_key}' in exchange '{exchange}' in vhost '{self.vhost}' "
                f"refused for user '{self.user}'"
            )

    def require_publish(self, exchange: str, routing_key: str, *, topic: bool) -> None:
        """``topic``: it is a topic exchange. Raises AccessRefused."""
        self.require("write", "exchange", exchange)
        if topic:
            self.require_topic("write", exchange, routing_key)
        if not self.limits_topics(exchange):
            if len(self.writable) >= KEPT:
                self.writable.clear()
            self.writable.add(exchange)


def _keep(now: _Snapshot, key: tuple[str, str, str], answer: bool) -> bool:
    if len(key[1]) > MAX_NAME_BYTES or len(key[2]) > MAX_NAME_BYTES:
        return answer  # nothing has such a name, and an entry would take memory
    if len(now.answers) >= KEPT:
        now.answers.clear()
    now.answers[key] = answer
    return answer


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
