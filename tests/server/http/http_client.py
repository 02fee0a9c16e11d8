"""A client of the HTTP listener: one connection, each answer with its status and JSON."""

from __future__ import annotations

import base64
import http.client
import json
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from broker_core.core import password as passwords
from broker_core.launcher import Broker
from broker_core.server.listener_options import ListenerOptions

OTHER = "other"  # a virtual host
# whom the tests log in: name -> tags, and where they have all permissions
PEOPLE: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "plain": ((), ("/",)),
    "manager": (("management",), ("/",)),
    "stranger": (("management",), (OTHER,)),
    "watcher": (("monitoring",), ()),
    "operator": (("operator",), ("/",)),
    "boss": (("administrator",), ("/", OTHER)),
}
PASSWORD = "a password"
CHEAP = passwords.hashed(PASSWORD, passwords.Cost(4, 8, 1))


class Answer(NamedTuple):
    status: int
    body: Any
    headers: Mapping[str, str]


class Api:
    """``user`` "": without a login."""

    def __init__(
        self,
        url: str,
        user: str = "guest",
        password: str = "",
        tls: ssl.SSLContext | None = None,
        timeout_s: float = 120.0,
    ):
        parts = urlsplit(url)
        kind = http.client.HTTPConnection if tls is None else http.client.HTTPSConnection
        more: Any = {} if tls is None else {"context": tls}
        self._connection = kind(parts.hostname or "", parts.port, timeout=timeout_s, **more)
        password = password or (user if user == "guest" else PASSWORD)
        coded = base64.b64encode(f"{user}:{password}".encode()).decode()
        self._headers = {"authorization": f"Basic {coded}"} if user else {}

    def ask(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        content = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
        try:
            response = self._answered(method, path, content, headers)
        except http.client.RemoteDisconnected:  # it was idle for too long
            self._connection.close()
            response = self._answered(method, path, content, headers)
        told = response.read()
        kind = response.headers.get("content-type", "")
        shown = json.loads(told) if kind.startswith("application/json") and told else told.decode()
        return Answer(response.status, shown, {name.lower(): text for name, text in response.getheaders()})

    def _answered(
        self, method: str, path: str, content: bytes | None, headers: Mapping[str, str] | None
    ) -> http.client.HTTPResponse:
        self._connection.request(method, path, content, {**self._headers, **(headers or {})})
        return self._connection.getresponse()

    def get(self, path: str) -> Any:
        """The body of a 200."""
        answer = self.ask("GET", path)
        assert answer.status == 200, (path, answer)
        return answer.body

    def close(self) -> None:
        self._connection.close()


@contextmanager
def serving(directory: Path, **listeners: Any) -> Iterator[Broker]:
    """A broker with the listener of HTTP, and AMQP."""
    opened = ListenerOptions(http=["127.0.0.1:0"], **listeners)
    with Broker.open(directory / "data", amqp=["127.0.0.1:0"], listeners=opened) as broker:
        yield broker


def add_people(broker: Broker) -> None:
    broker.vhosts.add_vhost(OTHER)
    for name, (tags, vhosts) in PEOPLE.items():
        broker.accounts.add_user(name, CHEAP, tags)
        for vhost in vhosts:
            broker.accounts.set_permissions(name, ".*", ".*", ".*", vhost=vhost)
