"""Users, permissions and virtual hosts of a broker in another process.

A password is hashed here, so it never crosses to the broker. Every method raises OptionError for a wrong
name, tag, pattern or password, and AccessRefused for a caller without the tag administrator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from broker_core.admin import Exported, Imported, PermissionInfo, UserInfo, VhostInfo
from broker_core.client.broker import BrokerClient
from broker_core.core import password as passwords
from broker_core.core.address import VHOST
from broker_core.core.records import PolicyRecord


class RemoteAccounts:
    """The same words as ``Broker.accounts`` has, with passwords in place of hashes. Permissions are for
    the virtual host of the client.
    """

    def __init__(self, client: BrokerClient) -> None:
        self.client = client
        self._vhost = client.address.vhost

    def users(self) -> list[UserInfo]:
        return self.client.administer(list[UserInfo], "users")

    def add_user(self, name: str, password: str, tags: Sequence[str] = ()) -> None:
        """A user without permissions. It ends the default user."""
        self._do("add_user", name=name, password_hash=passwords.hashed(password), tags=list(tags))

    def set_password(self, name: str, password: str) -> None:
        self._do("set_password", name=name, password_hash=passwords.hashed(password))

    def set_tags(self, name: str, tags: Sequence[str]) -> None:
        """In place of those that it has."""
        self._do("set_tags", name=name, tags=list(tags))

    def delete_user(self, name: str) -> None:
        """Its connections are closed; its apps have no owner, and administrators alone use them."""
        self._do("delete_user", name=name)

    def permissions(self) -> list[PermissionInfo]:
        return self.client.administer(list[PermissionInfo], "permissions")

    def set_permissions(self, user: str, configure: str, write: str, read: str) -> None:
        """Regular expressions, for names of queues and exchanges; "" is none, ".*" all."""
        self._do("set_permissions", user=user, configure=configure, write=write, read=read, vhost=self._vhost)

    def clear_permissions(self, user: str) -> None:
        self._do("clear_permissions", user=user, vhost=self._vhost)

    def set_topic_permissions(self, user: str, exchange: str, write: str, read: str) -> None:
        """Regular expressions for routing keys, with ``{username}`` and ``{vhost}``."""
        self._do(
            "set_topic_permissions", user=user, exchange=exchange, write=write, read=read, vhost=self._vhost
        )

    def clear_topic_permissions(self, user: str, exchange: str = "") -> None:
        """``exchange`` "": of all."""
        self._do("clear_topic_permissions", user=user, exchange=exchange, vhost=self._vhost)

    def give_app(self, app_id: str, user: str) -> None:
        """It is the owner from now on, also of an app that is yet to be."""
        self._do("give_app", app_id=app_id, user=user, vhost=self._vhost)

    def export_definitions(self) -> Exported:
        """Of all virtual hosts, with the hashes of passwords."""
        return self.client.administer(Exported, "export_definitions")

    def import_definitions(self, definitions: Mapping[str, object], *, check: bool = False) -> Imported:
        """All or nothing; ``check``: only what would be done. What names no virtual host is for that of the
        client. Raises PreconditionFailed and others too, where something is there in another form.
        """
        return self.client.administer(
            Imported, "import_definitions", definitions=definitions, vhost=self._vhost, check=check
        )

    def _do(self, word: str, **arguments: Any) -> None:
        self.client.administer(type(None), word, **arguments)


class RemoteVhosts:
    """The same words as ``Broker.vhosts`` has. Every method raises OptionError for a wrong name or limit, and
    AccessRefused for a caller without the tag administrator.
    """

    def __init__(self, client: BrokerClient) -> None:
        self.client = client

    def vhosts(self) -> list[VhostInfo]:
        return self.client.administer(list[VhostInfo], "vhosts")

    def add_vhost(self, name: str, **limits: int | None) -> None:
        """``limits``: max_queues, max_connections, max_messages; None: no limit."""
        self.client.administer(type(None), "add_vhost", name=name, **limits)

    def limit_vhost(self, name: str, **limits: int | None) -> None:
        """Changes the limits that are given; -1: none."""
        self.client.administer(type(None), "limit_vhost", name=name, **limits)

    def delete_vhost(self, name: str) -> None:
        """With its queues, exchanges, permissions and apps; its connections are closed."""
        self.client.administer(type(None), "delete_vhost", name=name)

    def policies(self, vhost: str | None = None) -> list[PolicyRecord]:
        """Those of one virtual host, or of all."""
        return self.client.administer(list[PolicyRecord], "policies", vhost=vhost)

    def set_policy(self, name: str, pattern: str, definition: dict[str, object], **where: Any) -> None:
        """``where``: vhost, apply_to, priority, operator (limits beside all others)."""
        self.client.administer(
            type(None), "set_policy", name=name, pattern=pattern, definition=definition, **where
        )

    def delete_policy(self, name: str, *, vhost: str = VHOST, operator: bool = False) -> None:
        self.client.administer(type(None), "delete_policy", name=name, vhost=vhost, operator=operator)
