"""The users of the broker, their permissions and their apps, and how the names that they give are kept: each
is one of its user, and no two users share one. Pure; ``Change`` makes each durable.

Ids that a caller makes:

    T             token, branch or channel T of the owner of the data directory
    @ann:T        that of ann

Keys of transactions, which are a kind, a virtual host, a user and a name, as one text:

    xid@%2F@ann:order-7         a user's xid or commit token, in its virtual host
    xid@%2F@ann@17000000:order-7    the same, prepared at that time by an ann who was deleted: ann:17000000
    write@%2F@ann:TOKEN         a batch write of a user, in its virtual host

Not here: passwords (``password.py``), logins (``server/access``), what a permission means
(``permission.py``).

Invariant: ``epoch`` is another object after each change, also after one that is undone, so a cached answer
of an older one is never taken for a current one. It changes last: whoever reads without the lock, and reads
``epoch`` first, never takes old permissions for new ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from urllib.parse import quote, unquote

from broker_core.broker.access.permission import check_pattern
from broker_core.core.address import VHOST
from broker_core.core.change import Change
from broker_core.core.errors import OptionError
from broker_core.core.records import (
    AppUserRecord,
    PermissionRecord,
    TopicPermissionRecord,
    UserRecord,
    WriteUserRecord,
)
from broker_core.core.undo import Undo
from broker_core.message.arguments import check_text

DEFAULT_USER = "guest"  # until the first user is added
ADMINISTRATOR, OPERATOR, MONITORING = "administrator", "operator", "monitoring"
LOOKING = (ADMINISTRATOR, OPERATOR, MONITORING)  # who sees what all users have
MANAGEMENT = "management"  # uses the API of HTTP, for the virtual hosts that it may enter
MANAGING = (MANAGEMENT, *LOOKING)
IMPERSONATOR = "impersonator"  # publishes with the user_id of another
TAGS = (*MANAGING, IMPERSONATOR)

_OF_USER = "@"
_XID, _WRITE = "xid@", "write@"


class Users:
    """``file_users``: those that the catalog does not keep (``--users``)."""

    def __init__(self, undo: Undo) -> None:
        self._undo = undo
        self.by_name: dict[str, UserRecord] = {}
        self.permissions: dict[tuple[str, str], PermissionRecord] = {}
        # (user, vhost) -> exchange -> record
        self.topics: dict[tuple[str, str], dict[str, TopicPermissionRecord]] = {}
        self.apps: dict[tuple[str, str], str] = {}  # (vhost, app_id) -> user
        self.apps_of: dict[str, dict[tuple[str, str], None]] = {}  # the same by user
        self.writes: dict[tuple[str, str], str] = {}  # (vhost, token) -> user, of open batch writes
        self.file_users: frozenset[str] = frozenset()
        self.epoch: object = object()

    def restore(
        self,
        users: Iterable[UserRecord],
        permissions: Iterable[PermissionRecord],
        topics: Iterable[TopicPermissionRecord],
        apps: Iterable[AppUserRecord],
        writes: Iterable[WriteUserRecord] = (),
    ) -> None:
        self.by_name = {record.name: record for record in users}
        self.permissions = {(record.user, record.vhost): record for record in permissions}
        for topic in topics:
            self.topics.setdefault((topic.user, topic.vhost), {})[topic.exchange] = topic
        for app in apps:
            self.apps[app.vhost, app.app_id] = app.user
            self.apps_of.setdefault(app.user, {})[app.vhost, app.app_id] = None
        self.writes = {(record.vhost, record.token): record.user for record in writes}

    # -- who there is ----------------------------------------------------------------------------------------
    @property
    def default(self) -> bool:
        """No user was ever added: the default user exists, and may do everything."""
        return not self.by_name and not self.file_users

    def exists(self, name: str) -> bool:
        return name in self.by_name or name in self.file_users or (self.default and name == DEFAULT_USER)

    def trusts(self, name: str) -> bool:
        """Whether the user may do everything, without a record that says so: the default user, and one that
        is only given.
        """
        return name not in self.by_name and self.exists(name)

    def tags(self, name: str) -> frozenset[str]:
        if name in self.by_name:
            return frozenset(self.by_name[name].tags)
        return frozenset({ADMINISTRATOR} if self.exists(name) else ())

    # -- changes ---------------------------------------------------------------------------------------------
    def add(self, change: Change, name: str, password_hash: str, tags: Sequence[str] = ()) -> None:
        """Raises OptionError: it exists, or the name or a tag is wrong."""
        if not name or ":" in name:
            raise OptionError(f"{name!r} cannot be the name of a user", "give one without a colon")
        check_text("the name of a user", name)
        if name in self.by_name:
            raise OptionError(f"user '{name}' already exists", "set another password with `txmq user passwd`")
        self._put(change, UserRecord(name, password_hash, _tags(tags)))

    def set_password(self, change: Change, name: str, password_hash: str) -> None:
        """Raises OptionError."""
        self._put(change, UserRecord(name, password_hash, list(self._user(name).tags)))

    def set_tags(self, change: Change, name: str, tags: Sequence[str]) -> None:
        """Raises OptionError."""
        self._put(change, UserRecord(name, self._user(name).password_hash, _tags(tags)))

    def delete(self, change: Change, name: str) -> None:
        """Deletes a user with its permissions; its apps have no owner then, and only administrators use them.

        Raises OptionError: there is no such user, or no other, because the default user would come back.
        """
        self._user(name)
        if len(self.by_name) == 1 and not self.file_users - {name}:
            raise OptionError(
                f"user '{name}' is the last one: without users the default user '{DEFAULT_USER}' comes back",
                "add another user first",
            )
        with self._changing():
            self._undo.item(self.by_name, name)
            del self.by_name[name]
            change.drop(UserRecord, (name,))
            for user, vhost in [key for key in self.permissions if key[0] == name]:
                self._drop_permission(change, user, vhost)
            for user, vhost in [key for key in self.topics if key[0] == name]:
                for exchange in list(self.topics[user, vhost]):
                    self._drop_topic(change, user, vhost, exchange)
            for app in list(self.apps_of.get(name, ())):
                self._disown(change, app)
            for write in [write for write, user in self.writes.items() if user == name]:
                self.disown_write(change, *write)

    def permit(
        self, change: Change, user: str, configure: str, write: str, read: str, vhost: str = VHOST
    ) -> None:
        """Raises OptionError: no such user, or no regular expression."""
        self._user(user)
        for pattern in (configure, write, read):
            check_pattern(pattern)
        with self._changing():
            self._undo.item(self.permissions, (user, vhost))
            record = self.permissions[user, vhost] = PermissionRecord(user, vhost, configure, write, read)
            change.put(record)

    def forbid(self, change: Change, user: str, vhost: str = VHOST) -> None:
        """Takes the permissions. Raises OptionError: no such user."""
        self._user(user)
        if (user, vhost) in self.permissions:
            with self._changing():
                self._drop_permission(change, user, vhost)

    def permit_topic(
        self, change: Change, user: str, exchange: str, write: str, read: str, vhost: str = VHOST
    ) -> None:
        """Raises OptionError: no such user, or no regular expression."""
        self._user(user)
        check_text("the name of an exchange", exchange)
        for pattern in (write, read):
            check_pattern(pattern)
        with self._changing():
            self._undo.item(self.topics, (user, vhost))
            topics = self.topics.setdefault((user, vhost), {})
            self._undo.item(topics, exchange)
            record = topics[exchange] = TopicPermissionRecord(user, vhost, exchange, write, read)
            change.put(record)

    def forbid_topic(self, change: Change, user: str, exchange: str = "", vhost: str = VHOST) -> None:
        """Takes the topic permissions of an exchange, or of all. Raises OptionError: no such user."""
        self._user(user)
        for name in [exchange] if exchange else list(self.topics.get((user, vhost), ())):
            if name in self.topics.get((user, vhost), {}):
                with self._changing():
                    self._drop_topic(change, user, vhost, name)

    def forget_vhost(self, change: Change, vhost: str) -> None:
        """Deletes the permissions and apps of a virtual host that is deleted."""
        with self._changing():
            for user in [user for user, other in self.permissions if other == vhost]:
                self._drop_permission(change, user, vhost)
            for user in [user for user, other in self.topics if other == vhost]:
                for exchange in list(self.topics[user, vhost]):
                    self._drop_topic(change, user, vhost, exchange)
            for app in [app for app in self.apps if app[0] == vhost]:
                self._disown(change, app)
            for write in [write for write in self.writes if write[0] == vhost]:
                self.disown_write(change, *write)

    def own_id(self, user: str, name: str) -> str:
        """Returns how an id of ``user`` is kept; the default user shares those of the directory's owner."""
        return own_id("" if user == DEFAULT_USER and self.default else user, name)

    def own_write(self, change: Change, vhost: str, token: str, user: str) -> None:
        """The batch write belongs to ``user`` until it ends."""
        self._undo.item(self.writes, (vhost, token))
        self.writes[vhost, token] = user
        change.put(WriteUserRecord(vhost, token, user))

    def disown_write(self, change: Change, vhost: str, token: str) -> None:
        """It has ended, or its user is deleted: only the tasks of an administrator continue it."""
        if (vhost, token) in self.writes:
            self._undo.item(self.writes, (vhost, token))
            del self.writes[vhost, token]
            change.drop(WriteUserRecord, (vhost, token))

    def own_app(self, change: Change, app_id: str, user: str, vhost: str = VHOST) -> None:
        """From now on the app belongs to ``user``; "": to the owner of the data directory."""
        if not user or self.exists(user):
            app = (vhost, app_id)
            if app in self.apps:
                self._undo.leave(self.apps_of, self.apps[app], app)
            self._undo.item(self.apps, app)
            self.apps[app] = user
            self._undo.enter(self.apps_of, user, app)
            change.put(AppUserRecord(vhost, app_id, user))

    def _disown(self, change: Change, app: tuple[str, str]) -> None:
        self._undo.leave(self.apps_of, self.apps[app], app)
        self._undo.item(self.apps, app)
        del self.apps[app]
        change.drop(AppUserRecord, app)

    def give_app(self, change: Change, app_id: str, user: str, vhost: str = VHOST) -> None:
        """Raises OptionError: no such user."""
        if not self.exists(user):
            self._user(user)
        check_text("an app id", app_id)
        self.own_app(change, app_id, user, vhost)

    def _user(self, name: str) -> UserRecord:
        if name in self.by_name:
            return self.by_name[name]
        if self.exists(name):
            what = "in the users file alone" if name in self.file_users else "the default user"
            raise OptionError(
                f"user '{name}' is {what}, and has all permissions",
                "add it with `txmq user add`, to give it others",
            )
        raise OptionError(f"user '{name}' does not exist", "list the users with `txmq user list`")

    def _put(self, change: Change, record: UserRecord) -> None:
        with self._changing():
            self._undo.item(self.by_name, record.name)
            self.by_name[record.name] = record
            change.put(record)

    def _drop_permission(self, change: Change, user: str, vhost: str) -> None:
        self._undo.item(self.permissions, (user, vhost))
        del self.permissions[user, vhost]
        change.drop(PermissionRecord, (user, vhost))

    def _drop_topic(self, change: Change, user: str, vhost: str, exchange: str) -> None:
        topics = self.topics[user, vhost]
        self._undo.item(topics, exchange)
        del topics[exchange]
        change.drop(TopicPermissionRecord, (user, vhost, exchange))

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        self._undo.append((self._renew,))  # the last step of the undo
        yield
        self._renew()

    def _renew(self) -> None:
        self.epoch = object()


def _tags(tags: Iterable[str]) -> list[str]:
    wrong = sorted(set(tags) - set(TAGS))
    if wrong:
        raise OptionError(f"there is no tag '{wrong[0]}'", f"use {', '.join(TAGS)}")
    return sorted(set(tags))


# -- names that users give -----------------------------------------------------------------------------------
def own_id(user: str, name: str) -> str:
    """``user``: "" for the owner of the data directory."""
    return f"{_OF_USER}{quote(user, safe='')}:{name}" if user or name.startswith(_OF_USER) else name


def name_in(own: str) -> str:
    """Returns the id as its caller gave it."""
    return own.partition(":")[2] if own.startswith(_OF_USER) else own


def user_in(own: str) -> str:
    return unquote(own.partition(":")[0].removeprefix(_OF_USER)) if own.startswith(_OF_USER) else ""


# -- keys of transactions ------------------------------------------------------------------------------------
def transaction_key(vhost: str, user: str, name: str) -> str:
    """``user``: as ``owner_of`` returns it; "" for the owner of the data directory."""
    return f"{_XID}{_quoted(vhost)}@{quote(user, safe=':').replace(':', '@')}:{name}"


def disowned_key(key: str, time_us: int) -> str:
    """Returns the key of a transaction whose user is deleted."""
    owner, _, name = key.partition(":")
    return f"{owner}@{time_us}:{name}"


def write_key(vhost: str, token: str) -> str:
    """``token``: with its user (``own_id``)."""
    return f"{_WRITE}{_quoted(vhost)}@{_quoted(user_in(token))}:{name_in(token)}"


def name_of(key: str) -> str:
    """Returns the name as its user gave it."""
    if key.startswith(_WRITE):
        return f"batch:{key.partition(':')[2]}"
    return key.partition(":")[2] if key.startswith(_XID) else key


def owner_of(key: str) -> str | None:
    """Returns whose a user's transaction is; None: nobody's. Of a deleted one: ``ann:17000000``."""
    parts = key.partition(":")[0].split("@")
    return ":".join(map(unquote, parts[2:])) if key.startswith(_XID) and len(parts) > 2 else None


def user_of(key: str) -> str | None:
    """Returns the name alone, also of a deleted user."""
    return (owner := owner_of(key)) and owner.partition(":")[0]


def payer_of(key: str) -> str:
    """Returns whose share a transaction or a batch write takes; "": nobody's, or of the owner of the data
    directory.
    """
    if key.startswith(_WRITE):
        parts = key.partition(":")[0].split("@")
        return unquote(parts[2]) if len(parts) == 3 else ""
    return (user_of(key) or "") if is_owned(key) else ""


def keys_in(vhost: str, keys: Iterable[str]) -> list[str]:
    """Returns those of the transactions of a virtual host."""
    within = f"{_quoted(vhost)}@"
    return [key for key in keys if key.partition("@")[2].startswith(within)]


def is_owned(key: str) -> bool:
    """Whether its user may decide it: it was not deleted since."""
    return key.startswith(_XID) and len(key.partition(":")[0].split("@")) == 3


def _quoted(text: str) -> str:
    return quote(text, safe="")
