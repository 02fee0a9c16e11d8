"""One request, read and permitted: what a route gets.

Invariant: values from outside have their type and their length when a route sees them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from broker_core.broker.access.rights import Rights
from broker_core.broker.topology.topology import Topology
from broker_core.core.checks import MAX_NAME_BYTES
from broker_core.server.access.accounts import Accounts
from broker_core.server.access.caller import Caller
from broker_core.server.access.vhosts import Vhosts
from broker_core.server.http.backend import Backend
from broker_core.server.http.connection import HttpConnection
from broker_core.server.http.refusal import bad_request
from broker_core.server.http.state.page_sessions import PageSession

T = TypeVar("T")
_TYPES = {str: "string", bool: "boolean", int: "integer", dict: "object", list: "array"}


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """``body`` None: empty. Anything else is JSON."""

    status: int = 200
    body: object = None
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Visit:
    """A request of a browser. ``target``: path and query. ``host``: by which it calls this listener.
    ``connection``: for a login on it. ``secure``: over TLS. ``session`` None: nobody has logged in.
    ``token``: of the session, in the cookie of this name.
    """

    target: str
    host: str
    connection: HttpConnection
    cookie: str
    secure: bool = False
    session: PageSession | None = None
    token: str = ""


CREATED, DONE = HttpAnswer(201), HttpAnswer(204)


@dataclass(frozen=True, slots=True)
class HttpCall:
    """``params``: of the path, decoded; of a page, also those of the query. ``body``: JSON, or the fields of
    a form, {} if there is none. ``reason``: that the caller gives for what it does. ``at``: where a browser
    is.
    """

    backend: Backend
    caller: Caller
    params: Mapping[str, str]
    query: Mapping[str, str]
    body: Mapping[str, Any]
    reason: str = ""
    at: Visit | None = None

    @property
    def vhost(self) -> str:
        return self.caller.state.vhost

    @property
    def topology(self) -> Topology:
        return self.caller.state.topology

    @property
    def rights(self) -> Rights:
        return self.caller.rights

    @property
    def user(self) -> str:
        return self.caller.identity.user

    @property
    def accounts(self) -> Accounts:
        return self.backend.accounts.by(self.record)

    @property
    def vhosts(self) -> Vhosts:
        return self.backend.vhosts.by(self.record)

    def get(self, name: str, kind: type[T], default: T) -> T:
        """A field of the body. Raises Refusal."""
        value = self.body.get(name)
        if value is None:
            return default
        if kind is bool and value in ("true", "false"):  # as rabbitmqadmin sends them
            return cast(T, value == "true")
        if kind is int and isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 10:
            return cast(T, int(value))
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise bad_request(f"field '{name}' must be of type {_TYPES[kind]}")
        return value

    def require(self, *names: str) -> None:
        """Raises Refusal: some are missing in the body, with RabbitMQ's text."""
        missing = [f"{{key_missing,{name}}}" for name in names if name not in self.body]
        if missing:
            raise bad_request(f"[{','.join(missing)}]")

    def flag(self, name: str) -> bool:
        """A flag of the query."""
        return self.query.get(name, "").lower() == "true"

    def record(self, event: str, **what: object) -> None:
        """Into the audit log, once it is durable."""
        fields = {
            "listener": "http",
            **what,
            **({"reason": self.reason[:MAX_NAME_BYTES]} if self.reason else {}),
        }
        self.backend.logins.audit.record(event, self.user, self.caller.address, **fields)
