"""What a message may contain when it enters, the same for all interfaces; and its own time to live.

Not here: AMQP's rules for frames and lengths (``amqp/``), and routing (``routing/exchange.py``).
Invariant: an accepted message has properties that decode, a valid delivery mode and expiration, lists of keys
under CC and BCC, and a routing key that fits into AMQP's short string. A message that is already in a queue
is never checked again: readers accept damaged properties as they are.
"""

from __future__ import annotations

import re
from functools import lru_cache

import pyarrow as pa
import pyarrow.compute as pc

from broker_core.arrow.outside import require_valid
from broker_core.core.block import EXPIRATION as EXPIRATION
from broker_core.core.errors import (
    OptionError,
    PreconditionFailed,
    RemoteProtocolError,
    TransactionTooLarge,
    TxmqError,
)
from broker_core.core.records import NEVER
from broker_core.message.arguments import MAX_TEXT_BYTES, MAX_TIME_MS, check_text
from broker_core.message.message import MAX_BODY_BYTES, MESSAGE_SCHEMA
from broker_core.message.properties import Properties, check, delivery_mode, expiration
from broker_core.routing.carbon_copy import carbon_copies, has_copies

USER_ID = 0x10  # in the second byte of the property flags
_DELIVERY_MODES = (2, 1, None)
_TIME_TO_LIVE = re.compile(r"[+-]?[0-9]+", re.ASCII)
PROPERTIES_BYTES = 128 * 1024 - 20  # no client of AMQP could send or receive more
_REMEMBERED_BYTES = 256  # longer properties are seldom repeated


def own_expiration_us(properties: bytes) -> int:
    """Returns the time to live in a message's encoded properties, in microseconds; NEVER: none, also for
    damaged ones, which are passed on unchanged.
    """
    try:
        text = expiration(properties)
    except RemoteProtocolError:
        return NEVER
    return NEVER if text is None or not _TIME_TO_LIVE.fullmatch(text) else min(int(text) * 1000, NEVER)


def check_expiration(properties: bytes) -> None:
    """Raises PreconditionFailed, with RabbitMQ's text, for an invalid time to live."""
    text = expiration(properties)
    if text is None:
        return
    start = _TIME_TO_LIVE.match(text)
    if start is None:
        why = "no_integer"
    elif start.end() < len(text):
        why = f'{{leftover_string,"{text[start.end() :]}"}}'
    elif int(text) < 0:
        why = f"{{value_negative,{int(text)}}}"
    elif int(text) > MAX_TIME_MS:
        why = f"{{value_too_large,{int(text)}}}"
    else:
        return
    raise PreconditionFailed(
        f"invalid expiration '{text}': {why}", "give milliseconds as a whole number, 0 or more"
    )


# -- at entry ------------------------------------------------------------------------------------------------


def check_properties(properties: bytes) -> None:
    """Raises RemoteProtocolError (damaged), PreconditionFailed (delivery mode, expiration, CC, BCC, size), as
    for basic.publish.
    """
    if len(properties) <= _REMEMBERED_BYTES:
        _known_properties(properties)
    else:
        _check_properties(properties)


def check_user_id(properties: bytes, user: str) -> None:
    """Raises PreconditionFailed for a user_id that is not the name of who publishes."""
    if len(properties) > 1 and properties[1] & USER_ID:
        user_id = Properties.decode(properties).user_id
        if user_id != user:
            raise PreconditionFailed(
                f"user_id property set to '{user_id}' but authenticated user was '{user}'"
            )


def _check_properties(properties: bytes) -> None:
    if len(properties) > PROPERTIES_BYTES:
        raise PreconditionFailed(
            f"the properties of a message have {len(properties)} bytes; at most {PROPERTIES_BYTES} may be, "
            "which a frame of AMQP can have: put it into the body"
        )
    _check_values(properties)


def _check_values(properties: bytes) -> None:
    check(properties)
    mode = delivery_mode(properties)
    if mode not in _DELIVERY_MODES:
        raise PreconditionFailed(
            f"invalid message: {{delivery_mode_unknown,{mode}}}", "give 1 (transient) or 2 (persistent)"
        )
    if properties and properties[0] & EXPIRATION:
        check_expiration(properties)
    if has_copies(properties):
        carbon_copies(properties)


_known_properties = lru_cache(maxsize=4096)(_check_properties)  # an exception is not cached


def check_rows(rows: pa.RecordBatch, body_bytes: int = MAX_BODY_BYTES, *, on_kafka: bool = False) -> int:
    """Like ``check_properties``, for a block of MESSAGE_SCHEMA, and no body is larger than ``body_bytes``, or
    null. ``on_kafka``: where a body may be null, and keys and properties may be larger than in AMQP. Returns
    the shortest expiration in microseconds, or NEVER. Raises the error of its first bad row, or OptionError,
    both naming the row.

    Arrow data comes from another process, so it is validated before anything else is asked of it.
    """
    if rows.schema.names != MESSAGE_SCHEMA.names or rows.schema.types != MESSAGE_SCHEMA.types:
        need = ", ".join(f"{field.name} {field.type}" for field in MESSAGE_SCHEMA)
        have = ", ".join(f"{field.name} {field.type}" for field in rows.schema)
        raise OptionError(f"rows to publish have the columns {have}; a block of messages has {need}")
    try:
        require_valid(rows)
    except ValueError as error:
        raise OptionError(f"the rows to publish are damaged: {error}; send them again") from None
    for name, column in zip(rows.schema.names, rows.columns, strict=True):
        if column.null_count and not (on_kafka and name == "body"):
            raise OptionError(f"row {pc.index(column.is_null(), True).as_py()} has no {name} (null)")
    if rows.num_rows == 0:
        return NEVER
    if not on_kafka:
        _check_keys(rows)
    sizes = pc.binary_length(rows.column("body"))
    if (pc.max(sizes).as_py() or 0) > body_bytes:
        row = pc.index(pc.greater(sizes, body_bytes), True).as_py()
        raise TransactionTooLarge(
            f"the body of row {row} has {sizes[row].as_py()} bytes; at most {body_bytes} may be "
            "(--max-message-size): publish a reference"
        )
    properties = rows.column("properties")
    shortest_us = NEVER
    if pc.max(pc.binary_length(properties)).as_py() == 0:
        return shortest_us
    for encoded in properties.unique().to_pylist():
        try:
            size = len(encoded)  # a death makes them longer
            is_dead_letter = PROPERTIES_BYTES < size <= 2 * PROPERTIES_BYTES and b"\x07x-deathA" in encoded
            if is_dead_letter or (on_kafka and size > PROPERTIES_BYTES):
                _check_values(encoded)
            else:
                check_properties(encoded)
        except TxmqError as error:
            row = pc.index(properties, pa.scalar(encoded, pa.binary())).as_py()
            raise type(error)(f"row {row}: {error.message}") from error
        if encoded and encoded[0] & EXPIRATION:
            shortest_us = min(shortest_us, own_expiration_us(encoded))
    return shortest_us


def _check_keys(rows: pa.RecordBatch) -> None:
    keys = rows.column("routing_key")
    sizes = pc.binary_length(keys)
    if pc.max(sizes).as_py() > MAX_TEXT_BYTES:
        row = pc.index(pc.greater(sizes, MAX_TEXT_BYTES), True).as_py()
        check_text(f"the routing key of row {row}", keys[row].as_py())
