"""The types of exchanges by name, and those in which messages wait before they are routed.

Not here: when a message is due, and what then happens (``broker/message/delays.py``); which one is a
duplicate (``broker/message/admission.py``).
Source of x-delayed-message and x-message-deduplication: the plugins rabbitmq-delayed-message-exchange and
rabbitmq-message-deduplication, whose names and limits these are.
Invariant: a message is delayed at most once. Its header ``x-delay`` is negative afterwards, as after the
plugin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from broker_core.core.errors import (
    CommandInvalid,
    LocalProtocolError,
    PreconditionFailed,
    RemoteProtocolError,
)
from broker_core.message.arguments.table import CACHE, COMPARED_EXCHANGE
from broker_core.message.deduplication import COST_BYTES, HEADER, MOST, Deduplication
from broker_core.message.field_table import FieldReader, Long
from broker_core.message.message import DELAY, MAX_DELAY_MS
from broker_core.message.properties import rewrite
from broker_core.routing.carbon_copy import carbon_copies
from broker_core.routing.consistent_hash import (
    CONSISTENT_HASH,
    HASH_ARGUMENTS,
    ConsistentHashExchange,
    check_hash_arguments,
)
from broker_core.routing.exchange import (
    Binding,
    BindingKey,
    DirectExchange,
    Exchange,
    FanoutExchange,
    HeadersExchange,
    Q,
    TopicExchange,
)
from broker_core.routing.search import Search

DELAYED, THEN = "x-delayed-message", "x-delayed-type"
DEDUPLICATING = "x-message-deduplication"
_HEADERS = 0x20  # in the first byte of the property flags
_NAME = b"\x07x-delay"


def delay_ms(properties: bytes) -> int:
    """Returns how long a message has to wait, in milliseconds; 0: not at all, also with a header that the
    plugin does not obey either.
    """
    if not properties or not properties[0] & _HEADERS or _NAME not in properties:
        return 0
    try:
        value = _first_header(properties)
        if isinstance(value, bool) or not isinstance(value, (int, float, Decimal, str)):
            return 0
        found = int(value)
    except (RemoteProtocolError, ValueError, OverflowError, IndexError):
        return 0
    return found if 0 < found <= MAX_DELAY_MS else 0


def _first_header(properties: bytes) -> object:
    """Returns the value of the first header ``x-delay``; what follows it is not read."""
    reader = FieldReader(properties)
    reader.position = 2
    for flag in (0x80, 0x40):  # content type and encoding are before the headers
        if properties[0] & flag:
            reader.position += 1 + properties[reader.position]
    end = reader.end_of_length()
    while reader.position < end:
        name, value = reader.short_string(), reader.value(0)
        if name == DELAY:
            return value
    return None


def after_delay(properties: bytes) -> bytes:
    """Returns the properties of a message that has waited."""
    try:
        return rewrite(properties, {DELAY: Long(-delay_ms(properties))})
    except (RemoteProtocolError, LocalProtocolError):
        return properties


class WaitingExchange(Exchange[Q]):
    """Routes like an exchange of the type ``then``, once a message has waited in ``waiting``; None: nothing
    waits (on Kafka).
    """

    matches_headers = True
    drops_duplicates = False

    def __init__(self, name: str, **properties: Any) -> None:
        super().__init__(name, **properties)
        kind = EXCHANGE_TYPES[self._type_then()]
        self.then: Exchange[Q] = kind(name, **properties)
        self.then._by_destination = self._by_destination
        self.matches_keys, self.chooses_one = kind.matches_keys, kind.chooses_one
        self.waiting: Q | None = None

    def _type_then(self) -> str:
        raise NotImplementedError

    def _waits(self, properties: bytes) -> bool:
        raise NotImplementedError

    @property
    def waiting_arguments(self) -> dict[str, object]:
        """Returns the arguments of the queue where messages wait."""
        return {}

    def _look(self) -> tuple[bool, int]:
        by_headers, most = super()._look()
        return by_headers, most + 1

    @property
    def by_key(self) -> bool:
        return True

    def check(self, routing_key: str, arguments: Mapping[str, object]) -> None:
        self.then.check(routing_key, arguments)

    def route_copies(self, routing_key: str, properties: bytes) -> tuple[tuple[Q, ...], bytes]:
        if self.waiting is not None and self._waits(properties):
            return (self.waiting,), properties  # with its keys under BCC, which count once it has waited
        return super().route_copies(routing_key, properties)

    def release(self, routing_key: str, properties: bytes, search: Search) -> tuple[tuple[Q, ...], bytes]:
        """Like ``route_copies``, for a message that has waited here."""
        properties, routed = self._released(properties)
        try:
            keys, properties = carbon_copies(properties)
        except PreconditionFailed:  # it was checked at entry, and may have changed since, as a dead letter
            keys = []
        return self.route_all((routing_key, *keys), routed, search), properties

    def _released(self, properties: bytes) -> tuple[bytes, bytes]:
        """Returns the properties to deliver, and those by which it is routed: it does not wait again."""
        raise NotImplementedError

    def _added(self, key: BindingKey, binding: Binding) -> None:
        self.then._added(key, binding)

    def _removed(self, key: BindingKey, binding: Binding) -> None:
        self.then._removed(key, binding)

    def _match(self, routing_key: str, search: Search) -> Sequence[Q | Exchange[Q]]:
        if self.waiting is not None:
            if self.type not in search.waits:
                search.waits[self.type] = self._waits(search.properties)
            if search.waits[self.type]:
                return (self.waiting,)
        return self.then._match(routing_key, search)


class DelayedExchange(WaitingExchange[Q]):
    """Routes as ``x-delayed-type`` says, after the delay of a message."""

    type = DELAYED

    def _type_then(self) -> str:
        return str(self.arguments[THEN])

    def _waits(self, properties: bytes) -> bool:
        return delay_ms(properties) > 0

    def _released(self, properties: bytes) -> tuple[bytes, bytes]:
        return (properties := after_delay(properties)), properties


class DeduplicationExchange(WaitingExchange[Q]):
    """Routes to all, each id once. A message with an id waits only for the commit of its id, and is routed on
    without it: others of this type let it pass, so that it cannot go round for ever.
    """

    type = DEDUPLICATING
    drops_duplicates = True

    def __init__(self, name: str, **properties: Any) -> None:
        super().__init__(name, **properties)
        rule = Deduplication.parse(self.waiting_arguments)
        assert rule is not None
        self.rule = rule._replace(by_message_id=False)

    def _type_then(self) -> str:
        return FanoutExchange.type

    def _waits(self, properties: bytes) -> bool:
        return bool(self.rule.id_of(properties))

    @property
    def waiting_arguments(self) -> dict[str, object]:
        return {
            DEDUPLICATING: True,
            **{name: self.arguments[name] for name in CACHE if name in self.arguments},
        }

    def _released(self, properties: bytes) -> tuple[bytes, bytes]:
        try:
            return properties, rewrite(properties, {HEADER: ""})
        except (RemoteProtocolError, LocalProtocolError):
            return properties, b""


EXCHANGE_TYPES: dict[str, type[Exchange[Any]]] = {
    kind.type: kind
    for kind in (
        DirectExchange,
        FanoutExchange,
        TopicExchange,
        HeadersExchange,
        ConsistentHashExchange,
        DelayedExchange,
        DeduplicationExchange,
    )
}
_UNDELAYED = [each for each in EXCHANGE_TYPES if each not in (DELAYED, DEDUPLICATING)]
# arguments that have a meaning for these alone
ARGUMENTS_OF: Mapping[str, tuple[str, ...]] = {DELAYED: (THEN,), DEDUPLICATING: CACHE}


def check_type(type: str, new: Mapping[str, object] | None = None) -> None:
    """Raises CommandInvalid for an unknown type. ``new``: arguments, for ``check_type_arguments``."""
    if type not in EXCHANGE_TYPES:
        raise CommandInvalid(
            f"unknown exchange type '{type}'" if type else "invalid exchange type ''",
            f"use one of {', '.join(EXCHANGE_TYPES)}",
        )
    if new is not None:
        check_type_arguments(type, new)


def key_type(exchange: Exchange[Q]) -> str:
    """Returns the type by which it looks at routing keys."""
    return exchange.then.type if isinstance(exchange, WaitingExchange) else exchange.type


def compared_arguments(exchange: Exchange[Q]) -> tuple[str, ...]:
    """Returns which arguments a declaration that is repeated must have alike. The plugin does not
    compare how it hashes; two programs that differ there would lose the order of each key. Nor does the other
    one compare which ids are remembered.
    """
    if exchange.type == DEDUPLICATING:
        return COMPARED_EXCHANGE + CACHE
    return COMPARED_EXCHANGE + (HASH_ARGUMENTS if key_type(exchange) == CONSISTENT_HASH else ())


def id_bytes(type: str, arguments: Mapping[str, object]) -> int:
    """Returns how much memory the ids of an exchange may take; its arguments were checked."""
    size = arguments.get("x-cache-size")
    return COST_BYTES * size if type == DEDUPLICATING and isinstance(size, int) else 0


def check_type_arguments(type: str, arguments: Mapping[str, object]) -> None:
    """Raises PreconditionFailed, with the text of its plugin, for what a new exchange cannot route by."""
    if type == DEDUPLICATING:
        size = arguments.get("x-cache-size")
        if isinstance(size, bool) or not isinstance(size, int) or size <= 0:
            raise PreconditionFailed(
                "Missing or invalid argument, 'x-cache-size' must be an integer greater than 0",
                f"give at most {MOST}",
            )
    if type == DELAYED and arguments.get(THEN) not in _UNDELAYED:
        raise PreconditionFailed(
            f"Invalid argument, '{THEN}' must be an existing exchange type",
            f"give one of {', '.join(_UNDELAYED)}",
        )
    if CONSISTENT_HASH in (type, arguments.get(THEN) if type == DELAYED else ""):
        check_hash_arguments(arguments)
