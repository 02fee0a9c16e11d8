"""A handler that decides by the routing key of a content, for tests that name it on a command line too."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from broker_core.amqp.v0_9_1.events import ContentHeader
from broker_core.amqp.v0_9_1.methods import BasicPublish
from broker_core.core.errors import NotAllowed, PreconditionFailed
from broker_core.server.amqp.handlers.handler import Handler
from broker_core.server.amqp.session import Session


def _redirect(header: ContentHeader) -> ContentHeader:
    assert isinstance(header.method, BasicPublish)
    exchange, _, key = header.method.routing_key.removeprefix("to ").rpartition("/")
    return header._replace(method=dataclasses.replace(header.method, exchange=exchange, routing_key=key))


def _refuse(error: BaseException) -> Callable[[ContentHeader], ContentHeader]:
    def refuse(_: ContentHeader) -> ContentHeader:
        raise error

    return refuse


DECISIONS: Mapping[str, Callable[[ContentHeader], ContentHeader | None]] = {
    "drop": lambda _: None,
    "to": _redirect,
    "channel": _refuse(PreconditionFailed("not this content")),
    "connection": _refuse(NotAllowed("no such content here")),
    "broken": _refuse(ZeroDivisionError("a bug")),
    "exit": _refuse(SystemExit(3)),
    "garbage": lambda _: True,  # type: ignore[dict-item, return-value]
}


class Gate(Handler):
    """``seen``: channel, routing key and size of each content. ``limit`` bytes: a larger one is refused."""

    def __init__(self, limit: int = 1 << 40) -> None:
        self.limit = limit
        self.seen: list[tuple[int, str, int]] = []

    def content_in(self, session: Session, header: ContentHeader) -> ContentHeader | None:
        assert isinstance(header.method, BasicPublish)
        self.seen.append((header.channel, header.method.routing_key, header.size))
        if header.size > self.limit:
            raise PreconditionFailed(f"more than {self.limit} bytes")
        decide = DECISIONS.get(header.method.routing_key.split(" ")[0])
        return header if decide is None else decide(header)
