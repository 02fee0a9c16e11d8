"""Exchanges and bindings: which queues a message goes to. Pure routing; nothing is enqueued here.

Source: AMQP 0-9-1, 3.1.3 (exchange types); ``x-match`` with ``all-with-x`` and ``any-with-x`` as RabbitMQ has them.
Invariant: ``cache`` holds only results of the bindings as they are; every change of a binding empties it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from broker_core.broker.queue import Queue
from broker_core.errors import PreconditionFailed
from broker_core.properties import Properties

Queues = tuple[Queue, ...]
_CACHED_KEYS = 65_536
_MATCHES = ("all", "any", "all-with-x", "any-with-x")
_NO_QUEUES: Queues = ()


class Binding(NamedTuple):
    queue: Queue
    routing_key: str
    arguments: dict[str, Any]


def canonical(arguments: Mapping[str, Any]) -> str:
    return json.dumps(arguments, sort_keys=True, default=repr)


class Exchange:
    """What all types share. A subclass tells how its bindings match."""

    type: ClassVar[str] = ""
    by_headers: ClassVar[bool] = False

    def __init__(
        self,
        name: str,
        *,
        durable: bool = True,
        auto_delete: bool = False,
        internal: bool = False,
        arguments: dict[str, Any] | None = None,
    ) -> None:
        self.name = name
        self.durable = durable
        self.auto_delete = auto_delete
        self.internal = internal
        self.arguments = arguments or {}
        self.bindings: dict[tuple[str, str, str], Binding] = {}
        self.cache: dict[str, Queues] = {}

    def bind(self, queue: Queue, routing_key: str, arguments: dict[str, Any]) -> bool:
        """Whether the binding is new."""
        key = (queue.name, routing_key, canonical(arguments))
        if key in self.bindings:
            return False
        self.bindings[key] = Binding(queue, routing_key, arguments)
        self._changed()
        return True

    def unbind(self, queue: Queue, routing_key: str, arguments: dict[str, Any]) -> bool:
        """Whether there was such a binding."""
        found = self.bindings.pop((queue.name, routing_key, canonical(arguments)), None)
        self._changed()
        return found is not None

    def unbind_all(self, queue: Queue) -> list[Binding]:
        """Take away every binding of a queue that is deleted."""
        gone = {key: binding for key, binding in self.bindings.items() if binding.queue is queue}
        for key in gone:
            del self.bindings[key]
        if gone:
            self._changed()
        return list(gone.values())

    def route(self, routing_key: str, properties: bytes = b"") -> Queues:
        """The queues, each once, in order of queue id."""
        found = self.cache.get(routing_key)
        if found is None:
            matched = {queue.queue_id: queue for queue in self._match(routing_key, properties)}
            found = tuple(matched[queue_id] for queue_id in sorted(matched))
            if not self.by_headers:
                if len(self.cache) >= _CACHED_KEYS:
                    self.cache = {}
                self.cache[routing_key] = found
        return found

    def known(self, routing_key: str) -> Queues | None:
        """What ``route`` would say, where that is known without looking at bindings. Safe beside changes of the bindings."""
        return self.cache.get(routing_key)

    def _changed(self) -> None:
        self.cache = {}

    def _match(self, routing_key: str, properties: bytes) -> list[Queue]:
        raise NotImplementedError


class DefaultExchange(Exchange):
    """The nameless exchange: every queue is bound by its own name."""

    type = "direct"

    def __init__(self, queues: Mapping[str, Queue]) -> None:
        super().__init__("")
        self._queues = queues

    def route(self, routing_key: str, properties: bytes = b"") -> Queues:
        queue = self._queues.get(routing_key)
        return _NO_QUEUES if queue is None else (queue,)

    def known(self, routing_key: str) -> Queues | None:
        queue = self._queues.get(routing_key)
        return _NO_QUEUES if queue is None else (queue,)


class DirectExchange(Exchange):
    type = "direct"

    def _match(self, routing_key: str, properties: bytes) -> list[Queue]:
        return [binding.queue for binding in self.bindings.values() if binding.routing_key == routing_key]


class FanoutExchange(Exchange):
    type = "fanout"

    def _match(self, routing_key: str, properties: bytes) -> list[Queue]:
        return [binding.queue for binding in self.bindings.values()]


@dataclass(slots=True)
class _Node:
    children: dict[str, _Node] = field(default_factory=dict)
    queues: list[Queue] = field(default_factory=list)


class TopicExchange(Exchange):
    """Words between dots; ``*`` is one word, ``#`` any number of words."""

    type = "topic"

    def __init__(self, name: str, **properties: Any) -> None:
        super().__init__(name, **properties)
        self._root: _Node | None = None

    def _changed(self) -> None:
        super()._changed()
        self._root = None

    def _trie(self) -> _Node:
        root = _Node()
        for binding in self.bindings.values():
            node = root
            for word in binding.routing_key.split("."):
                node = node.children.setdefault(word, _Node())
            node.queues.append(binding.queue)
        return root

    def _match(self, routing_key: str, properties: bytes) -> list[Queue]:
        if self._root is None:
            self._root = self._trie()
        words = routing_key.split(".")
        found: list[Queue] = []
        seen: set[tuple[int, int]] = set()
        pending = [(self._root, 0)]
        while pending:
            node, at = pending.pop()
            if (id(node), at) in seen:
                continue
            seen.add((id(node), at))
            if at == len(words):
                found.extend(node.queues)
            else:
                for word in {words[at], "*"} - {"#"}:
                    if word in node.children:
                        pending.append((node.children[word], at + 1))
            if "#" in node.children:
                # "#" takes 0, 1, ... of the words that are left
                pending.extend((node.children["#"], after) for after in range(at, len(words) + 1))
        return found


class HeadersExchange(Exchange):
    """Bindings match the message's headers, by ``x-match``; the routing key plays no part."""

    type = "headers"
    by_headers = True

    def bind(self, queue: Queue, routing_key: str, arguments: dict[str, Any]) -> bool:
        if arguments.get("x-match", "all") not in _MATCHES:
            raise PreconditionFailed(
                f"invalid x-match {arguments['x-match']!r} in a binding of queue '{queue.name}': use one of {', '.join(_MATCHES)}"
            )
        return super().bind(queue, routing_key, arguments)

    def _match(self, routing_key: str, properties: bytes) -> list[Queue]:
        headers = (Properties.decode(properties).headers or {}) if properties else {}
        return [binding.queue for binding in self.bindings.values() if _headers_match(binding.arguments, headers)]


def _headers_match(arguments: Mapping[str, Any], headers: Mapping[str, Any]) -> bool:
    match = arguments.get("x-match", "all")
    with_x = match.endswith("-with-x")
    wanted = [(name, value) for name, value in arguments.items() if name != "x-match" and (with_x or not name.startswith("x-"))]
    matched = (name in headers and (value is None or headers[name] == value) for name, value in wanted)
    return all(matched) if match.startswith("all") else any(matched)


EXCHANGE_TYPES: dict[str, type[Exchange]] = {kind.type: kind for kind in (DirectExchange, FanoutExchange, TopicExchange, HeadersExchange)}
