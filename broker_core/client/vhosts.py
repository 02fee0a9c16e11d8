"""Virtual hosts of a broker in another process.

Every method raises OptionError for a wrong name or limit, and AccessRefused for a caller without the tag
administrator.
"""

from __future__ import annotations

from broker_core.admin import VhostInfo
from broker_core.client.broker import BrokerClient


class RemoteVhosts:
    """The same words as ``Broker.vhosts`` has."""

    def __init__(self, client: BrokerClient) -> None:
        self._client = client

    def vhosts(self) -> list[VhostInfo]:
        return self._client.administer(list[VhostInfo], "vhosts")

    def add_vhost(self, name: str, **limits: int | None) -> None:
        """``limits``: max_queues, max_connections, max_messages; None: no limit."""
        self._client.administer(type(None), "add_vhost", name=name, **limits)

    def limit_vhost(self, name: str, **limits: int | None) -> None:
        """Changes the limits that are given; -1: none."""
        self._client.administer(type(None), "limit_vhost", name=name, **limits)

    def delete_vhost(self, name: str) -> None:
        """With its queues, exchanges, permissions and apps; its connections are closed."""
        self._client.administer(type(None), "delete_vhost", name=name)
