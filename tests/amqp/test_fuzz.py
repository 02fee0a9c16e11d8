"""Any bytes give events or exactly one violation, never an exception, and never more memory than the
limits.
"""

from __future__ import annotations

import random
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker_core.amqp.v0_9_1.decoder import PROTOCOL_HEADER, Decoder
from broker_core.amqp.v0_9_1.encoder import HEARTBEAT, encode_content, encode_method
from broker_core.amqp.v0_9_1.events import Violation
from broker_core.amqp.v0_9_1.methods import (
    METHODS,
    BasicPublish,
    ConnectionOpen,
    ConnectionStartOk,
    QueueDeclare,
)
from broker_core.core.errors import ConnectionException
from broker_core.message.properties import Properties
from tests.amqp.strategies import STREAM, buffered_bytes, chunked
from tests.gates import examples

FRAME_MAX = 4096
MAX_BODY = 20_000
MAX_PENDING = 50_000


@st.composite
def mutated(draw: st.DrawFn, streams: st.SearchStrategy[bytes]) -> bytes:
    """A stream with octets changed, dropped, doubled or put in."""
    data = bytearray(draw(streams))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        length = draw(st.integers(0, 12))
        match draw(st.sampled_from(["change", "drop", "double", "insert", "lie"])):
            case "change":
                data[at : at + 1] = draw(st.binary(max_size=1))
            case "drop":
                del data[at : at + length]
            case "double":
                data[at:at] = data[at : at + length]
            case "insert":
                data[at:at] = draw(st.binary(max_size=12))
            case "lie":
                data[at : at + 4] = struct.pack(
                    ">I", draw(st.sampled_from([0, 1, 2**31 - 1, 2**31, 2**32 - 1, FRAME_MAX]))
                )
    return bytes(data)


def fed(decoder: Decoder, chunks: list[bytes]) -> None:
    """Feeds all of it and holds the invariants after every chunk."""
    over = False
    for chunk in chunks:
        events = decoder.feed(chunk)
        assert not (over and events)
        violations = [event for event in events if isinstance(event, Violation)]
        assert len(violations) <= 1
        if violations:
            assert events[-1] is violations[0]
            assert isinstance(violations[0].error, ConnectionException)
            assert "\n" not in violations[0].error.message
            over = True
        assert buffered_bytes(decoder) <= MAX_PENDING + FRAME_MAX + 8


def small(*, handshake: bool = False) -> Decoder:
    return Decoder(FRAME_MAX, MAX_BODY, MAX_PENDING, handshake=handshake)


@examples(300)
@given(chunked(st.binary(max_size=300)), st.booleans())
def test_random_bytes_give_events_or_one_violation(stream: tuple[bytes, list[bytes]], handshake: bool):
    fed(small(handshake=handshake), stream[1])


@pytest.mark.slow
@examples(300)
@given(chunked(mutated(STREAM)))
def test_damaged_streams_give_events_or_one_violation(stream: tuple[bytes, list[bytes]]):
    fed(small(), stream[1])


@examples(200)
@given(st.sampled_from(sorted(METHODS)), st.binary(max_size=80))
def test_random_fields_of_every_method_give_a_command_or_one_violation(ids: tuple[int, int], fields: bytes):
    payload = struct.pack(">HH", *ids) + fields
    for channel in (0, 1):
        fed(small(), [struct.pack(">BHI", 1, channel, len(payload)) + payload + b"\xce"])


def conversation() -> bytes:
    """A client's stream with tables, contents of several frames and repeated methods."""
    properties = Properties(
        delivery_mode=2, headers={"a": [1, {"b": None}], "c": "d"}, message_id="m"
    ).encode()
    parts = [
        PROTOCOL_HEADER,
        encode_method(
            0,
            ConnectionStartOk(
                {"capabilities": {"basic.nack": True}, "product": "p"}, "PLAIN", b"\0g\0g", "en_US"
            ),
        ),
        encode_method(0, ConnectionOpen("/")),
        encode_method(1, QueueDeclare("q", durable=True, arguments={"x-max-length": 5})),
    ]
    for number in range(4):
        parts.append(
            encode_content(
                1 + number % 2, BasicPublish("e", f"k{number}"), properties, bytes(number * 3000), FRAME_MAX
            )
        )
        parts += [
            encode_method(1, kind())
            for kind in METHODS.values()
            if not kind.HAS_CONTENT and kind.CLASS_ID != 10
        ]
        parts.append(HEARTBEAT)
    return b"".join(parts)


@pytest.mark.parametrize("seed", range(4))
def test_a_conversation_damaged_at_random_places_gives_events_or_one_violation(seed: int):
    chance = random.Random(seed)
    whole = conversation()
    for _ in range(400):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 3)):
            at = chance.randrange(len(data))
            match chance.randrange(4):
                case 0:
                    data[at] = chance.randrange(256)
                case 1:
                    del data[at : at + chance.randrange(1, 40)]
                case 2:
                    data[at:at] = chance.randbytes(chance.randrange(1, 20))
                case 3:
                    data[at : at + 4] = struct.pack(
                        ">I", chance.choice([0, 1, 2**32 - 1, 5000, chance.randrange(2**32)])
                    )
        size = chance.choice([1 << 20, 1000, 77])
        fed(small(handshake=True), [bytes(data[start : start + size]) for start in range(0, len(data), size)])


@pytest.mark.parametrize("depth", [10, 60, 70, 5000])
def test_tables_nested_without_end_are_refused_and_not_followed(depth: int):
    table = b""
    for _ in range(depth):
        if len(table) > 100_000:
            break
        table = b"\1aF" + struct.pack(">I", len(table)) + table
    sized = struct.pack(">I", len(table)) + table
    declare = b"\0\x32\0\x0a\0\0\1q\0" + sized
    decoder = Decoder(handshake=False)
    (event,) = decoder.feed(struct.pack(">BHI", 1, 1, len(declare)) + declare + b"\xce")
    assert isinstance(event, Violation) == (depth > 64)
    header = struct.pack(">HHQ", 60, 0, 1) + b"\x20\0" + sized
    decoder = Decoder(handshake=False)
    stream = (
        encode_method(1, BasicPublish())
        + struct.pack(">BHI", 2, 1, len(header))
        + header
        + b"\xce"
        + b"\3\0\1\0\0\0\1x\xce"
    )
    (event,) = decoder.feed(stream)
    assert isinstance(event, Violation) == (depth > 64)
