"""Every frame of ours is read by an independent codec as what it is, and every frame of that codec by
ours.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp import body, commands, frame, header, heartbeat

from broker_core.amqp.v0_9_1.decoder import PROTOCOL_HEADER, Decoder
from broker_core.amqp.v0_9_1.encoder import HEARTBEAT, encode_content, encode_method
from broker_core.amqp.v0_9_1.events import Command, Heartbeat
from broker_core.amqp.v0_9_1.methods import METHODS, BasicDeliver, BasicPublish, Method
from broker_core.message.field_table import Timestamp
from broker_core.message.properties import NAMES, Properties
from tests.amqp.strategies import (
    BODY,
    CHANNEL,
    FRAME_MAX,
    METHOD,
    PROPERTIES,
    as_pamqp,
    buffered_bytes,
    chunked,
    method_of,
)

# pamqp warns of basic.recover-async, which the specification deprecates and clients still send
pytestmark = pytest.mark.filterwarnings("ignore:This command is deprecated:DeprecationWarning")

PYTHON_KEYWORDS = {"type": "exchange_type"}
# pamqp takes larger timestamps for milliseconds
DATED = PROPERTIES.filter(lambda properties: properties.timestamp is None or properties.timestamp < 2**32)
CONTENT_METHODS = st.one_of([method_of(kind) for kind in METHODS.values() if kind.HAS_CONTENT])


def to_theirs(method: Method) -> Any:
    values: dict[str, Any] = {}
    for name, of in method.LAYOUT:
        if name is not None:
            value = getattr(method, name)
            values[PYTHON_KEYWORDS.get(name, name)] = value.decode() if of == "longstr" else as_pamqp(value)
    return commands.INDEX_MAPPING[method.CLASS_ID << 16 | method.METHOD_ID](**values)


def assert_is(theirs: Any, method: Method) -> None:
    assert type(theirs) is commands.INDEX_MAPPING[method.CLASS_ID << 16 | method.METHOD_ID]
    for name, of in method.LAYOUT:
        if name is None:
            continue
        ours, value = getattr(method, name), getattr(theirs, PYTHON_KEYWORDS.get(name, name))
        if of == "longstr":
            assert (value.encode() if isinstance(value, str) else value) == ours
        else:
            assert value == as_pamqp(ours)


def their_frames(data: bytes) -> list[tuple[int, Any]]:
    frames = []
    while data:
        if data[:1] == b"\x03" and data[3:7] == b"\0\0\0\0":
            raise AssertionError("an empty body frame")
        used, channel, value = frame.unmarshal(data)
        frames.append((channel, value))
        data = data[used:]
    return frames


def their_properties(properties: Properties) -> Any:
    values = {name: getattr(properties, name) for name in NAMES}
    if properties.timestamp is not None:
        values["timestamp"] = as_pamqp(Timestamp(properties.timestamp))
    values["headers"] = as_pamqp(dict(properties.headers)) or None
    values["message_type"] = values.pop("type")
    return values


@pytest.mark.slow
@given(METHOD, CHANNEL)
def test_pamqp_reads_every_method_that_is_written(method: Method, channel: int):
    ((read_channel, theirs),) = their_frames(encode_method(channel, method))
    assert read_channel == channel
    assert_is(theirs, method)


@given(METHOD.filter(lambda method: not method.HAS_CONTENT), CHANNEL)
def test_every_method_that_pamqp_writes_is_read(method: Method, channel: int):
    assert Decoder(handshake=False).feed(frame.marshal(to_theirs(method), channel)) == [
        Command(channel, method)
    ]


@pytest.mark.slow
@given(CONTENT_METHODS, CHANNEL, DATED, BODY, FRAME_MAX)
def test_pamqp_reads_every_content_that_is_written(
    method: Method, channel: int, properties: Properties, content: bytes, frame_max: int
):
    data = encode_content(channel, method, properties.encode(), content, frame_max)
    (first, theirs), (second, head), *rest = their_frames(data)
    assert {first, second, *(number for number, _ in rest)} == {channel}
    assert_is(theirs, method)
    assert isinstance(head, header.ContentHeader)
    assert (head.class_id, head.weight, head.body_size) == (60, 0, len(content))
    decoded = {name: getattr(head.properties, name) for name in head.properties.attributes()}
    expected = their_properties(properties)
    for name, value in expected.items():
        assert decoded[name] == value or (value is None and decoded[name] == "")
    assert b"".join(part.value for _, part in rest) == content
    assert all(
        isinstance(part, body.ContentBody) and 0 < len(part.value) <= frame_max - 8 for _, part in rest
    )


@given(CONTENT_METHODS, CHANNEL, st.data())
def test_every_content_that_pamqp_writes_is_read_however_the_bytes_are_cut(
    method: Method, channel: int, data: st.DataObject
):
    content = data.draw(BODY)
    head = header.ContentHeader(
        body_size=len(content), properties=commands.Basic.Properties(content_type="a/b", headers={"n": 1})
    )
    parts = data.draw(st.integers(200, 5000)) if len(content) > 1000 else max(1, len(content) // 3)
    stream = frame.marshal(to_theirs(method), channel) + frame.marshal(head, channel)
    for start in range(0, len(content), parts):
        stream += frame.marshal(body.ContentBody(content[start : start + parts]), channel)
    _, chunks = data.draw(chunked(st.just(stream)))
    decoder = Decoder(handshake=False)
    events = [event for chunk in chunks for event in decoder.feed(chunk)]
    (command,) = events
    assert isinstance(command, Command)
    assert (command.channel, command.method, command.body) == (channel, method, content)
    assert Properties.decode(command.properties) == Properties(content_type="a/b", headers={"n": 1})
    assert buffered_bytes(decoder) == 0


@pytest.mark.parametrize(
    "method", [BasicPublish("e", "k"), BasicDeliver("t", 1, True, "e", "k")], ids=lambda method: method.NAME
)
def test_a_content_without_properties_or_body_is_two_frames_for_pamqp(method: Method):
    (_, theirs), (_, head) = their_frames(encode_content(7, method, b"", b"", 0))
    assert_is(theirs, method)
    assert head.body_size == 0
    assert all(getattr(head.properties, name) in (None, "") for name in head.properties.attributes())


def test_heartbeat_and_protocol_header_are_pamqps():
    assert heartbeat.Heartbeat().marshal() == HEARTBEAT
    assert header.ProtocolHeader().marshal() == PROTOCOL_HEADER
    assert Decoder(handshake=False).feed(heartbeat.Heartbeat().marshal()) == [Heartbeat()]
