"""Exchanges and bindings: which queues a message goes to. Pure routing; nothing is enqueued here.

Source: AMQP 0-9-1, 3.1.3 (exchange types); RabbitMQ's bindings from exchange to exchange, alternate
exchanges, and ``x-match`` with ``all-with-x`` and ``any-with-x``.
Invariant: ``cache`` has only results of the current bindings, here and in all exchanges that they came by
(``route_cache.py``). A route that came by a headers exchange is not cached. A change costs what it changes,
and what it removes from caches: no index is built again. What is deleted costs the same whatever number of
bindings it has: an index may have entries of deleted destinations, which match nothing
(``stale_bindings.py``).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

from broker_core.core.errors import PreconditionFailed
from broker_core.core.ids import QueueId
from broker_core.core.undo import Undo
from broker_core.message.arguments import type_name
from broker_core.routing.carbon_copy import MAX_COPIES, carbon_copies
from broker_core.routing.header_index import MATCHES, HeaderIndex
from broker_core.routing.route_cache import RouteCache
from broker_core.routing.search import EXCHANGE, KEY, Search
from broker_core.routing.stale_bindings import StaleBindings
from broker_core.routing.topic_patterns import TopicPatterns

Q = TypeVar("Q", bound="RoutedQueue")

BindingKey = tuple["RoutedQueue | Exchange[Any]", str, str]  # destination, routing key, arguments
BINDING_BYTES, PART_BYTES = 600, 400  # of a binding, and of a word or an argument, about


class RoutedQueue(Protocol):
    """What routing needs of a queue. ``written``: its bindings have records."""

    queue_id: QueueId
    name: str
    written: bool
    deleted: bool
    upstream: dict[Any, None]  # the exchanges with a binding to it


class Binding(NamedTuple):
    destination: Any  # a queue or an exchange
    routing_key: str
    arguments: dict[str, object]


def canonical(arguments: Mapping[str, object]) -> str:
    return json.dumps(arguments, sort_keys=True, default=repr) if arguments else "{}"


def _key(destination: Destination, routing_key: str, arguments: Mapping[str, object]) -> BindingKey:
    return (destination, routing_key, canonical(arguments))


class Exchange(Generic[Q]):
    """The common part of all types. A subclass implements how its bindings match. ``undo`` is that of the
    whole state; ``Q`` are its queues, of which routing needs little.
    """

    type: ClassVar[str] = ""
    matches_keys: bool = True
    matches_headers: bool = False
    chooses_one: bool = False  # of all destinations, each of which it looks at

    def __init__(
        self,
        name: str,
        *,
        durable: bool = True,
        auto_delete: bool = False,
        internal: bool = False,
        arguments: dict[str, object] | None = None,
        undo: Undo | None = None,
    ) -> None:
        self._undo = Undo() if undo is None else undo
        self.name = name
        self.durable = durable
        self.auto_delete = auto_delete
        self.internal = internal
        self.arguments = arguments or {}
        self.deleted = False
        self.cache: RouteCache[Q] = RouteCache()
        self.stale_bindings = StaleBindings(self._undo)  # one for all exchanges of a virtual host
        self.alternate: Exchange[Q] | None = None  # receives messages that no binding here matches
        # those with a binding or an alternate to this one, in that order
        self.upstream: dict[Exchange[Q], None] = {}
        self._by_destination: dict[Q | Exchange[Q], dict[BindingKey, Binding]] = {}
        self._bytes: dict[Q | Exchange[Q], int] = {}  # that the bindings take, about
        self._downstream: set[Exchange[Q]] = set()  # those that bindings lead to

    # -- bindings --------------------------------------------------------------------------------------------
    @property
    def bound(self) -> bool:
        """Returns whether it has a binding."""
        return bool(self._by_destination)

    def bytes_of(self, destination: Q | Exchange[Q]) -> int:
        """Returns how much memory the bindings to a destination take, about."""
        return self._bytes.get(destination, 0)

    @property
    def size_bytes(self) -> int:
        """Returns how much memory its bindings take, about."""
        return sum(self._bytes.values())

    @property
    def size(self) -> int:
        """Returns how many bindings it has."""
        return sum(map(len, self._by_destination.values()))

    @property
    def bindings(self) -> list[Binding]:
        return list(chain.from_iterable([found.values() for found in self._by_destination.values()]))

    def bindings_to(self, destination: Q | Exchange[Q]) -> list[Binding]:
        return list(self._by_destination.get(destination, {}).values())

    def check(self, routing_key: str, arguments: Mapping[str, object]) -> None:
        """Raises PreconditionFailed for what a binding of this type cannot have."""

    def bind(self, destination: Q | Exchange[Q], routing_key: str, arguments: dict[str, object]) -> bool:
        """Adds a binding and returns whether it is new. Raises like ``check``."""
        self.check(routing_key, arguments)
        key = _key(destination, routing_key, arguments)
        if key in self._by_destination.get(destination, ()):
            return False
        binding = Binding(destination, routing_key, arguments)
        self._undo.item(self._bytes, destination)
        self._bytes[destination] = self.bytes_of(destination) + _bytes_of(key, binding)
        self._undo.append((self._remove, key, binding))
        self._insert(key, binding)
        return True

    def _insert(self, key: BindingKey, binding: Binding) -> None:
        """Also undoes an incomplete ``_remove``; ``_remove`` undoes an incomplete insert."""
        self._by_destination.setdefault(binding.destination, {})[key] = binding
        self._added(key, binding)
        self._know(binding.destination)
        self.cache.change()

    def _remove(self, key: BindingKey, binding: Binding) -> None:
        found = self._by_destination.get(binding.destination, {})
        found.pop(key, None)
        self._removed(key, binding)
        if not found:
            self._forget(binding.destination)
        self.cache.change()

    def is_bound(self, target: Q | Exchange[Q], routing_key: str, arguments: Mapping[str, object]) -> bool:
        return _key(target, routing_key, arguments) in self._by_destination.get(target, ())

    def unbind(self, destination: Q | Exchange[Q], routing_key: str, arguments: Mapping[str, object]) -> bool:
        """Removes a binding and returns whether it existed."""
        key = _key(destination, routing_key, arguments)
        binding = self._by_destination.get(destination, {}).get(key)
        if binding is None:
            return False
        self._undo.item(self._bytes, destination)
        self._bytes[destination] -= _bytes_of(key, binding)
        self._undo.append((self._insert, key, binding))
        self._remove(key, binding)
        return True

    def unbind_all(self, destination: Q | Exchange[Q]) -> Collection[Binding]:
        """Removes every binding of a queue or an exchange that is deleted, and returns them."""
        gone = self._by_destination.get(destination)
        if gone is None:
            return ()
        self._undo.append((self._take_back, destination, gone))
        self.stale_bindings.add(self._removed, gone)
        self._undo.item(self._bytes, destination)
        self._bytes.pop(destination, None)
        self._forget(destination)
        self.cache.change()
        return gone.values()

    def _take_back(self, destination: Q | Exchange[Q], gone: dict[BindingKey, Binding]) -> None:
        self._by_destination[destination] = gone
        self._know(destination)
        self.cache.change()

    def leave(self) -> None:
        """The exchange is deleted: its destinations do not know it any more."""
        self._undo.append((self._join,))
        for destination in self._by_destination:
            destination.upstream.pop(self, None)
        self.cache.change()

    def _join(self) -> None:
        for destination in self._by_destination:
            destination.upstream[self] = None
        self.cache.change()

    def divert(self, alternate: Exchange[Q] | None) -> None:
        """Makes ``alternate`` receive messages that no binding here matches."""
        before = self.alternate
        self._undo.append((self._divert, before))
        self._divert(alternate)

    def _divert(self, alternate: Exchange[Q] | None) -> None:
        before, self.alternate = self.alternate, alternate
        if before is not None and before not in self._downstream:
            before.upstream.pop(self, None)
        if alternate is not None:
            alternate.upstream[self] = None
        self.cache.change()

    def _know(self, destination: Q | Exchange[Q]) -> None:
        destination.upstream[self] = None
        if isinstance(destination, Exchange):
            self._downstream.add(destination)

    def _forget(self, destination: Q | Exchange[Q]) -> None:
        self._by_destination.pop(destination, None)
        if destination is not self.alternate:
            destination.upstream.pop(self, None)
        if isinstance(destination, Exchange):
            self._downstream.discard(destination)

    # -- routing ---------------------------------------------------------------------------------------------
    def route(self, routing_key: str, properties: bytes = b"", search: Search | None = None) -> tuple[Q, ...]:
        """Returns the queues, each once, in order of queue id. ``search``: it may be one of many
        messages. Raises PreconditionFailed.
        """
        found = self.cache.by_key.get(routing_key)
        if found is None:
            search = search or Search()
            found, seen = _reached(self, (routing_key,), properties, search)
            if search.complete and not (self.matches_headers or _by_headers(seen)):
                found = self.cache.keep(routing_key, found, (each.cache for each in seen))
        return found

    def cached(self, routing_key: str) -> tuple[Q, ...] | None:
        """Returns a cached result of ``route``. It is safe during changes of the bindings."""
        return self.cache.by_key.get(routing_key)

    @property
    def by_headers(self) -> bool:
        """Returns whether a message's headers affect its route from here."""
        return self._look()[0]

    def _look(self) -> tuple[bool, int]:
        """Returns whether headers affect a route from here, and how many destinations it may have."""
        if self.cache.reach is None:
            seen, pending = {self}, [self]  # the exchanges that a message may come by
            while pending:
                found = pending.pop()._next() - seen
                seen |= found
                pending += found
            self.cache.rely_on(each.cache for each in seen)
            self.cache.reach = (
                _by_headers(seen) or self.matches_headers,
                sum(1 if each.chooses_one else destinations(each) for each in seen),
            )
        return self.cache.reach

    @property
    def by_key(self) -> bool:
        """Returns whether its routing key affects the route."""
        return not self.matches_headers or bool(self._next())

    def _next(self) -> set[Exchange[Q]]:
        """Returns the exchanges that a message may go to from here."""
        return self._downstream if self.alternate is None else self._downstream | {self.alternate}

    def route_all(
        self, routing_keys: Sequence[str], properties: bytes = b"", search: Search | None = None
    ) -> tuple[Q, ...]:
        """Like ``route``, for several keys: at each exchange a binding may match any of them."""
        return _reached(self, routing_keys, properties, search or Search())[0]

    def route_copies(self, routing_key: str, properties: bytes) -> tuple[tuple[Q, ...], bytes]:
        """Like ``route``, by the keys under CC and BCC too. Returns the properties to deliver as well. Raises
        PreconditionFailed.
        """
        keys, delivered = carbon_copies(properties)
        if not keys:
            return self.route(routing_key, properties), delivered
        return self.route_all((routing_key, *keys), properties), delivered

    # -- what a type has of its own --------------------------------------------------------------------------
    def _match(self, routing_key: str, search: Search) -> Sequence[Q | Exchange[Q]]:
        """Returns the destinations of matching bindings, in any order, some perhaps twice or deleted."""
        raise NotImplementedError

    def _added(self, key: BindingKey, binding: Binding) -> None:
        """Adds a binding to an index."""

    def _removed(self, key: BindingKey, binding: Binding) -> None:
        """Removes a binding from an index."""


def _reached(
    source: Exchange[Q], keys: Sequence[str], properties: bytes, search: Search
) -> tuple[tuple[Q, ...], set[Exchange[Q]]]:
    """Returns the queues, and the exchanges by which the message comes."""
    queues: dict[QueueId, Q] = {}
    pending: list[Exchange[Q]] = [source]
    seen = {source}
    search.begin(properties)
    try:
        for exchange in pending:  # it grows
            search.pay(EXCHANGE)
            found = _destinations(exchange, keys, search, queues) - seen
            seen |= found
            pending += found
    except PreconditionFailed:  # too dear
        if search.refuses:
            raise
    return tuple(queues[queue_id] for queue_id in sorted(queues)), seen


def _destinations(
    source: Exchange[Q], keys: Sequence[str], search: Search, queues: dict[QueueId, Q]
) -> set[Exchange[Q]]:
    """Adds to ``queues`` and returns the exchanges. A queue that is new takes no step: it is the aim."""
    found: set[Exchange[Q]] = set()
    missed = True
    for routing_key in keys if source.matches_keys else keys[:1]:
        before = len(queues)
        matched = source._match(routing_key, search)
        for destination in matched:
            if destination.deleted:
                continue
            missed = False
            if isinstance(destination, Exchange):
                found.add(destination)
            else:
                queues[destination.queue_id] = destination
        search.pay(KEY + (len(matched) - (len(queues) - before)) // 2)
    return {source.alternate} if missed and source.alternate is not None else found


def reach(exchange: Exchange[Q]) -> int:
    """Returns how many queues one message may reach, at most."""
    return 1 + MAX_COPIES if isinstance(exchange, DefaultExchange) else exchange._look()[1]


def destinations(exchange: Exchange[Q]) -> int:
    """Returns how many queues and exchanges have a binding to it."""
    return len(exchange._by_destination)


Destination = RoutedQueue | Exchange[Any]


def _bytes_of(key: BindingKey, binding: Binding) -> int:
    """Returns how much memory a binding takes, about: itself, its words and its arguments in an index."""
    _, routing_key, arguments = key
    parts = 1 + routing_key.count(".") + len(binding.arguments)
    return BINDING_BYTES + PART_BYTES * parts + len(routing_key) + 8 * len(arguments)


def _by_headers(seen: set[Exchange[Q]]) -> bool:
    """Returns whether one of several exchanges looks at headers."""
    return len(seen) > 1 and any(exchange.matches_headers for exchange in seen)


class DefaultExchange(Exchange[Q]):
    """The nameless exchange: every queue is bound by its own name."""

    type = "direct"

    def __init__(self, queues: Mapping[str, Q]) -> None:
        super().__init__("")
        self._queues = queues

    def route(self, routing_key: str, properties: bytes = b"", search: Search | None = None) -> tuple[Q, ...]:
        queue = self._queues.get(routing_key)
        return () if queue is None else (queue,)

    cached = route

    def _match(self, routing_key: str, search: Search) -> Sequence[Q | Exchange[Q]]:
        return self.route(routing_key)


class DirectExchange(Exchange[Q]):
    type = "direct"

    def __init__(self, name: str, **properties: Any) -> None:
        super().__init__(name, **properties)
        self._index: dict[str, dict[BindingKey, Q | Exchange[Q]]] = {}

    def _added(self, key: BindingKey, binding: Binding) -> None:
        self._index.setdefault(binding.routing_key, {})[key] = binding.destination

    def _removed(self, key: BindingKey, binding: Binding) -> None:
        found = self._index.get(binding.routing_key, {})
        found.pop(key, None)
        if not found:
            self._index.pop(binding.routing_key, None)

    def _match(self, routing_key: str, search: Search) -> Sequence[Q | Exchange[Q]]:
        found = self._index.get(routing_key)
        return list(found.values()) if found else ()


class FanoutExchange(Exchange[Q]):
    type = "fanout"
    matches_keys = False

    def route(self, routing_key: str, properties: bytes = b"", search: Search | None = None) -> tuple[Q, ...]:
        return super().route(self._same(routing_key), properties, search)

    def cached(self, routing_key: str) -> tuple[Q, ...] | None:
        return self.cache.by_key.get(self._same(routing_key))

    def _same(self, routing_key: str) -> str:
        """Returns one key for all, if no other exchange looks at it."""
        return routing_key if self._downstream or self.alternate is not None else ""

    def _match(self, routing_key: str, search: Search) -> Sequence[Q | Exchange[Q]]:
        return list(self._by_destination)


class TopicExchange(Exchange[Q]):
    """Keys are words between dots; ``*`` matches one word, ``#`` any number of words."""

    type = "topic"

    def __init__(self, name: str, **properties: Any) -> None:
        super().__init__(name, **properties)
        self._patterns: TopicPatterns[BindingKey, Q | Exchange[Q]] = TopicPatterns()

    def _added(self, key: BindingKey, binding: Binding) -> None:
        self._patterns.add(binding.routing_key, key, binding.destination)

    def _removed(self, key: BindingKey, binding: Binding) -> None:
        self._patterns.remove(binding.routing_key, key)

    def _match(self, routing_key: str, search: Search) -> Sequence[Q | Exchange[Q]]:
        return self._patterns.matching(routing_key, search.pay)


class HeadersExchange(Exchange[Q]):
    """Bindings match the message's headers, by ``x-match``; the routing key is not used."""

    type = "headers"
    matches_keys = False
    matches_headers = True

    def __init__(self, name: str, **properties: Any) -> None:
        super().__init__(name, **properties)
        self._candidates: HeaderIndex[BindingKey, Q | Exchange[Q]] = HeaderIndex()

    def check(self, routing_key: str, arguments: Mapping[str, object]) -> None:
        match = arguments.get("x-match", "all")
        expected = f"expected {', '.join(MATCHES[:-1])}, or {MATCHES[-1]}"
        if not isinstance(match, str):
            raise PreconditionFailed(
                f"Invalid x-match field type {type_name(match)} (value {match}); expected longstr", expected
            )
        if match not in MATCHES:
            raise PreconditionFailed(f'Invalid x-match field value <<"{match}">>; {expected}')

    def _added(self, key: BindingKey, binding: Binding) -> None:
        self._candidates.add(key, binding.arguments, binding.destination)

    def _removed(self, key: BindingKey, binding: Binding) -> None:
        self._candidates.remove(key)

    def _match(self, routing_key: str, search: Search) -> Sequence[Q | Exchange[Q]]:
        return self._candidates.matching(search.headers, search.pay)
