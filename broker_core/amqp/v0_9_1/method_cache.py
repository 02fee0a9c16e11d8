"""Methods and properties that were decoded before, so that equal bytes need no second decoding.

Not here: the publish that came last on a connection (``publish_template.py``).
Invariant: all connections share what is remembered, because it never changes. It is bounded, because clients
choose the bytes.
"""

from __future__ import annotations

from broker_core.amqp.v0_9_1.methods import METHODS, BasicPublish, ChannelCloseOk, Method
from broker_core.core.errors import MethodSyntaxError, RemoteProtocolError
from broker_core.message.properties import check

_ENTRIES = 4096
_KEY_BYTES = 256
_KINDS = frozenset(
    kind
    for kind in METHODS.values()
    if (kind is BasicPublish or not kind.HAS_CONTENT)
    and kind is not ChannelCloseOk  # which ends the skipping of contents
    and not {"table", "longlong", "longstr"} & {field_type for _, field_type in kind.LAYOUT}
)

METHODS_SEEN: dict[bytes, Method] = {}  # by payload
SOUND_PROPERTIES: set[bytes] = set()


def remember(payload: bytes, method: Method) -> None:
    """Remembers a method of a kind that clients repeat."""
    if type(method) in _KINDS and len(payload) <= _KEY_BYTES:
        if len(METHODS_SEEN) >= _ENTRIES:
            METHODS_SEEN.clear()
        METHODS_SEEN[payload] = method


def publish_of(payload: bytes) -> Method | None:
    """The basic.publish of a payload, decoded without its layout; None if it is damaged."""
    try:
        routing_key = 7 + payload[6]
        end = routing_key + 1 + payload[routing_key]
        bits = payload[end]
        exchange_text, routing_key_text = (
            payload[7:routing_key].decode(),
            payload[routing_key + 1 : end].decode(),
        )
    except (IndexError, UnicodeDecodeError):
        return None
    if end + 1 != len(payload):
        return None
    method = BasicPublish(exchange_text, routing_key_text, bits & 1 == 1, bits & 2 == 2)
    remember(payload, method)
    return method


def check_properties(properties: bytes) -> None:
    """Raises MethodSyntaxError unless ``properties`` are flags and a list that decode (specification
    4.2.6.1).
    """
    if properties in SOUND_PROPERTIES:
        return
    try:
        if not properties:
            raise MethodSyntaxError("a content header has no property flags")
        check(properties)
    except MethodSyntaxError:
        raise
    except RemoteProtocolError as damaged:
        raise MethodSyntaxError(damaged.summary) from None
    if len(properties) <= _KEY_BYTES:
        if len(SOUND_PROPERTIES) >= _ENTRIES:
            SOUND_PROPERTIES.clear()
        SOUND_PROPERTIES.add(properties)


def are_sound(properties: bytes) -> bool:
    """Returns whether ``check_properties`` raises nothing."""
    try:
        check_properties(properties)
    except MethodSyntaxError:
        return False
    return True
