"""The types of exchanges by name, and the one that delays.

Not here: when a message is due, and what then happens (``broker/message/delays.py``).
Source of x-delayed-message: the plugin rabbitmq/rabbitmq-delayed-message-exchange, whose names and limits
these are.
Invariant: a message waits at most once. Its header ``x-delay`` is negative afterwards, as after the plugin.
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
from broker_core.message.arguments.table import COMPARED_EXCHANGE
from broker_core.message.field_table import FieldReader, Long
from broker_core.message.message import DELAY, MAX_DELAY_MS
from broker_core.message.properties import rewrite
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

DELAYED, THEN = "x-delayed-message", "x-delayed-type"
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


class DelayedExchange(Exchange[Q]):
    """Routes like an exchange of the type in ``x-delayed-type``, once a message has waited in ``waiting``;
    None: nothing waits (on Kafka).
    """

    type = DELAYED
    matches_headers = True

    def __init__(self, name: str, **properties: Any) -> None:
        super().__init__(name, **properties)
        kind = EXCHANGE_TYPES[str(self.arguments[THEN])]
        self.then: Exchange[Q] = kind(name, **properties)
        self.then._by_destination = self._by_destination
        self.matches_keys, self.chooses_one = kind.matches_keys, kind.chooses_one
        self.waiting: Q | None = None

    def _look(self) -> tuple[bool, int, int]:
        by_headers, most, matched = super()._look()
        return by_headers, most + 1, matched

    @property
    def by_key(self) -> bool:
        return True

    def check(self, routing_key: str, arguments: Mapping[str, object]) -> None:
        self.then.check(routing_key, arguments)

    def route_copies(self, routing_key: str, properties: bytes) -> tuple[tuple[Q, ...], bytes]:
        if self.waiting is not None and delay_ms(properties):
            return (self.waiting,), properties  # with its keys under BCC, which count once it has waited
        return super().route_copies(routing_key, properties)

    def _added(self, key: BindingKey, binding: Binding) -> None:
        self.then._added(key, binding)

    def _removed(self, key: BindingKey, binding: Binding) -> None:
        self.then._removed(key, binding)

    def _match(self, routing_key: str, properties: bytes) -> Sequence[Q | Exchange[Q]]:
        if self.waiting is not None and delay_ms(properties):
            return (self.waiting,)
        return self.then._match(routing_key, properties)


EXCHANGE_TYPES: dict[str, type[Exchange[Any]]] = {
    kind.type: kind
    for kind in (
        DirectExchange,
        FanoutExchange,
        TopicExchange,
        HeadersExchange,
        ConsistentHashExchange,
        DelayedExchange,
    )
}


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
    return exchange.then.type if isinstance(exchange, DelayedExchange) else exchange.type


def compared_arguments(exchange: Exchange[Q]) -> tuple[str, ...]:
    """Returns which arguments a declaration that is repeated must have alike. The plugin does not
    compare how it hashes; two programs that differ there would lose the order of each key.
    """
    return COMPARED_EXCHANGE + (HASH_ARGUMENTS if key_type(exchange) == CONSISTENT_HASH else ())


def check_type_arguments(type: str, arguments: Mapping[str, object]) -> None:
    """Raises PreconditionFailed, with the text of its plugin, for what a new exchange cannot route by."""
    if type == DELAYED and (arguments.get(THEN) not in EXCHANGE_TYPES or arguments.get(THEN) == DELAYED):
        raise PreconditionFailed(
            f"Invalid argument, '{THEN}' must be an existing exchange type",
            f"give one of {', '.join(each for each in EXCHANGE_TYPES if each != DELAYED)}",
        )
    if CONSISTENT_HASH in (type, arguments.get(THEN) if type == DELAYED else ""):
        check_hash_arguments(arguments)
