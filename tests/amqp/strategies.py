"""Hypothesis strategies of this folder: methods of every kind, contents, byte streams and ways to cut them.

Invariant: what a strategy makes is something that both this codec and pamqp can hold, unless its name says
otherwise.
"""

from __future__ import annotations

from datetime import datetime, timezone
from decimal import Decimal
from typing import Any

from hypothesis import strategies as st

from broker_core.amqp.v0_9_1.decoder import Decoder
from broker_core.amqp.v0_9_1.encoder import HEARTBEAT, encode_content, encode_method
from broker_core.amqp.v0_9_1.methods import METHODS, BasicAck, BasicPublish, Method
from broker_core.message.field_table import Timestamp
from broker_core.message.properties import NAMES, Properties

PRINTABLE = st.characters(exclude_categories=["C", "Z"], include_characters=" ")
SHORT = st.text(PRINTABLE, max_size=30)  # of 120 bytes at most
NAME = st.text("abcXYZ019-_.:@#,/", max_size=40)  # what pamqp lets pass as the name of a queue or an exchange
NAMED = frozenset({"exchange", "queue", "source", "destination", "virtual_host"})

SCALAR = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**31), 2**31 - 1),
    st.integers(-(2**63), 2**63 - 1),
    st.text(max_size=20),
    st.binary(max_size=20),
    st.integers(0, 2**32 - 1).map(Timestamp),
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.builds(
        lambda unscaled, scale: Decimal(unscaled).scaleb(-scale), st.integers(0, 2**31 - 1), st.integers(0, 9)
    ),
)
VALUE: st.SearchStrategy[Any] = st.recursive(
    SCALAR,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(SHORT, inner, max_size=3),
    max_leaves=6,
)
TABLE = st.dictionaries(SHORT, VALUE, max_size=3)

FIELD: dict[str, st.SearchStrategy[Any]] = {
    "octet": st.integers(0, 2**8 - 1),
    "short": st.integers(0, 2**16 - 1),
    "long": st.integers(0, 2**32 - 1),
    "longlong": st.integers(0, 2**63 - 1),  # pamqp reads it with a sign
    "shortstr": SHORT,
    "longstr": st.text(max_size=60).map(str.encode),  # pamqp writes text only
    "bit": st.booleans(),
    "table": TABLE,
}


def method_of(kind: type[Method]) -> st.SearchStrategy[Method]:
    """Any instance of one method."""
    return st.builds(
        kind, **{name: NAME if name in NAMED else FIELD[of] for name, of in kind.LAYOUT if name is not None}
    )


METHOD = st.one_of([method_of(kind) for kind in METHODS.values()])
CHANNEL = st.integers(1, 2**16 - 1)

PROPERTIES = st.builds(
    Properties,
    **{
        name: st.none() | SHORT
        for name in NAMES
        if name not in ("headers", "delivery_mode", "priority", "timestamp")
    },
    headers=TABLE,
    delivery_mode=st.none() | st.integers(0, 255),
    priority=st.none() | st.integers(0, 255),
    timestamp=st.none() | st.integers(0, 2**32 - 1) | st.integers(0, 2**64 - 1),
)
# Few values, so that a stream repeats them as clients do.
ENCODED_PROPERTIES = st.one_of(
    st.just(b""),
    st.sampled_from([Properties(delivery_mode=2).encode(), Properties(content_type="a/b").encode()]),
    PROPERTIES.map(Properties.encode),
)
BODY = st.one_of(
    st.just(b""),
    st.just(b"x"),
    st.binary(max_size=200),
    st.integers(4080, 4100).map(bytes),
    st.integers(9000, 20000).map(bytes),
)
FRAME_MAX = st.sampled_from([4096, 8192, 131072])


@st.composite
def command_bytes(draw: st.DrawFn) -> bytes:
    """The frames of one command or a heartbeat, as a client or a server would send them."""
    channel = draw(st.integers(1, 3))
    kind = draw(st.sampled_from(["publish", "ack", "publish", "any", "heartbeat"]))
    if kind == "heartbeat":
        return HEARTBEAT
    if kind == "ack":
        return encode_method(channel, draw(method_of(BasicAck)))
    method = draw(method_of(BasicPublish) if kind == "publish" else METHOD)
    if method.HAS_CONTENT:
        return encode_content(channel, method, draw(ENCODED_PROPERTIES), draw(BODY), draw(FRAME_MAX))
    return encode_method(channel, method)


@st.composite
def repeated_publishes(draw: st.DrawFn) -> bytes:
    """Publishes that differ in their bodies, with others and other frames between them."""
    properties = [draw(ENCODED_PROPERTIES) for _ in range(2)]
    parts = []
    for kind in draw(st.lists(st.sampled_from("aaaabcdx"), min_size=3, max_size=12)):
        method = BasicPublish("e", "k", mandatory=kind == "b")
        channel, chosen = (2 if kind == "c" else 1), properties[kind == "d"]
        parts.append(
            draw(command_bytes())
            if kind == "x"
            else encode_content(channel, method, chosen, draw(BODY), draw(FRAME_MAX))
        )
    return b"".join(parts)


REPEATED = repeated_publishes()
STREAM = st.lists(command_bytes(), max_size=12).map(b"".join)


@st.composite
def chunked(draw: st.DrawFn, stream: st.SearchStrategy[bytes] = STREAM) -> tuple[bytes, list[bytes]]:
    """A stream, and the same bytes in pieces."""
    data = draw(stream)
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=12)))
    return data, [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]


def as_pamqp(value: Any) -> Any:
    """A field value of ours as pamqp gives it."""
    if isinstance(value, Timestamp):
        return datetime.fromtimestamp(value, tz=timezone.utc)
    if isinstance(value, dict):
        return {name: as_pamqp(item) for name, item in value.items()}
    if isinstance(value, list):
        return [as_pamqp(item) for item in value]
    return bytearray(value) if isinstance(value, bytes) else value


def buffered_bytes(decoder: Decoder) -> int:
    """What a decoder keeps between two calls: the incomplete frame and the contents in assembly."""
    rest = b"" if decoder._over else decoder._rest  # which is for whoever looks for close-ok
    return len(rest) + decoder.pending_bytes
