"""Bytes become events: contents are assembled, broken ones are one violation with RabbitMQ's code and text,
memory is bounded.
"""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker_core.amqp.v0_9_1.assembly import ASSEMBLY_BYTES
from broker_core.amqp.v0_9_1.decoder import PROTOCOL_HEADER, Decoder
from broker_core.amqp.v0_9_1.encoder import HEARTBEAT, encode_content, encode_method
from broker_core.amqp.v0_9_1.events import (
    Command,
    ContentHeader,
    ContentTooLarge,
    Decoded,
    Event,
    Heartbeat,
    ProtocolHeader,
    Violation,
)
from broker_core.amqp.v0_9_1.methods import (
    BasicAck,
    BasicPublish,
    ChannelClose,
    ChannelOpen,
    ConnectionOpen,
    TxSelect,
)
from broker_core.core.errors import (
    CommandInvalid,
    ConnectionException,
    FrameError,
    MethodSyntaxError,
    ResourceExhausted,
    UnexpectedFrame,
)
from broker_core.message.properties import Properties
from tests.amqp.strategies import buffered_bytes

PERSISTENT = Properties(delivery_mode=2).encode()
PUBLISH = BasicPublish("e", "k")
PUBLISH_FRAME = encode_method(1, PUBLISH)
SELECT_FRAME = encode_method(1, TxSelect())


def frame(kind: int, channel: int, payload: bytes) -> bytes:
    return struct.pack(">BHI", kind, channel, len(payload)) + payload + b"\xce"


def content_header(
    size: int, channel: int = 1, class_id: int = 60, weight: int = 0, properties: bytes = b"\0\0"
) -> bytes:
    return frame(2, channel, struct.pack(">HHQ", class_id, weight, size) + properties)


def decoder(**limits: int) -> Decoder:
    return Decoder(handshake=False, **limits)


def the_violation(events: Sequence[Event]) -> Violation:
    *before, last = events
    assert isinstance(last, Violation), events
    assert not any(isinstance(event, Violation) for event in before)
    return last


# -- the beginning of a stream -------------------------------------------------------------------------------


def test_the_protocol_header_comes_first_and_then_connection_open_before_any_channel():
    stream = PROTOCOL_HEADER + encode_method(0, ConnectionOpen("/")) + encode_method(1, ChannelOpen())
    expected = [
        ProtocolHeader(True, PROTOCOL_HEADER),
        Command(0, ConnectionOpen("/")),
        Command(1, ChannelOpen()),
    ]
    assert Decoder().feed(stream) == expected
    single = Decoder()
    assert [event for octet in stream for event in single.feed(bytes((octet,)))] == expected


@pytest.mark.parametrize(
    "raw", [b"AMQP\0\1\0\0", b"AMQP\3\1\0\0", b"AMQP\1\1\x09\1", b"GET / HT", b"\x16\x03\x01\0\0\0\0\0"]
)
def test_another_protocol_header_is_refused_and_nothing_follows_it(raw: bytes):
    refused = Decoder()
    assert refused.feed(raw[:5]) == []
    assert refused.feed(raw[5:] + HEARTBEAT) == [ProtocolHeader(False, raw)]
    assert refused.feed(HEARTBEAT * 1000) == []
    assert buffered_bytes(refused) == 0


def test_a_frame_on_a_channel_before_connection_open_is_unexpected():
    early = Decoder()
    violation = the_violation(early.feed(PROTOCOL_HEADER + encode_method(1, ChannelOpen())))
    assert isinstance(violation.error, UnexpectedFrame)
    assert violation.error.summary == "type 1, all octets = <<0,20,0,10,0>>"


# -- contents ------------------------------------------------------------------------------------------------


def test_contents_of_several_channels_are_assembled_side_by_side():
    first = encode_content(1, PUBLISH, PERSISTENT, b"a" * 5000, 4096)
    second = encode_content(2, BasicPublish("f", "l"), b"", b"b" * 5000, 4096)
    frames = [*split_frames(first), *split_frames(second)]
    mixed = b"".join(
        part for pair in zip(split_frames(first), split_frames(second), strict=True) for part in pair
    )
    assert len(frames) == 8
    both = decoder()
    assert both.feed(mixed) == [
        Command(1, PUBLISH, PERSISTENT, b"a" * 5000),
        Command(2, BasicPublish("f", "l"), b"", b"b" * 5000),
    ]
    assert buffered_bytes(both) == 0


def split_frames(data: bytes) -> list[bytes]:
    frames = []
    while data:
        end = 8 + struct.unpack_from(">I", data, 3)[0]
        frames.append(data[:end])
        data = data[end:]
    return frames


@pytest.mark.parametrize("size", [0, 1, 100, 4088, 4089, 131064, 131065, 1_000_000])
@pytest.mark.parametrize("chunk", [1024, 65536, 10_000_000])
def test_a_body_of_any_size_comes_out_whole_whatever_the_chunks(size: int, chunk: int):
    body = bytes(range(256)) * (size // 256) + bytes(size % 256)
    stream = encode_content(3, PUBLISH, PERSISTENT, body, 131072) + HEARTBEAT
    whole = decoder()
    events = [
        event for start in range(0, len(stream), chunk) for event in whole.feed(stream[start : start + chunk])
    ]
    assert events == [Command(3, PUBLISH, PERSISTENT, body), Heartbeat()]


def test_empty_body_frames_are_allowed_and_cost_nothing_however_many_they_are():
    patient = decoder()
    patient.feed(PUBLISH_FRAME + content_header(3))
    before = buffered_bytes(patient)
    assert patient.feed(frame(3, 1, b"") * 10_000) == []
    assert buffered_bytes(patient) == before
    assert patient.feed(frame(3, 1, b"abc")) == [Command(1, PUBLISH, b"", b"abc")]


@pytest.mark.slow
def test_a_body_in_frames_of_two_bytes_takes_no_more_memory_than_its_bytes():
    size = 1 << 17
    stream = PUBLISH_FRAME + content_header(size) + frame(3, 1, b"ab") * (size // 2 - 1)
    fed = decoder()
    tracemalloc.start()
    try:
        for start in range(0, len(stream), 65536):
            fed.feed(stream[start : start + 65536])
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert fed.pending_bytes >= size - 2
    assert held < 2 * size + 65536


def test_a_content_above_the_limit_is_announced_once_and_skipped_while_other_channels_go_on():
    small = decoder(max_body_bytes=100)
    stream = encode_content(1, PUBLISH, PERSISTENT, bytes(10_000), 4096)
    frames = split_frames(stream)
    assert small.feed(frames[0] + frames[1] + frames[2]) == [ContentTooLarge(1, 10_000)]
    assert buffered_bytes(small) < 1000
    assert small.feed(encode_content(2, PUBLISH, b"", b"x", 0)) == [Command(2, PUBLISH, b"", b"x")]
    assert small.feed(frames[3] + frames[4]) == []
    assert small.feed(encode_content(1, PUBLISH, b"", bytes(100), 0)) == [
        Command(1, PUBLISH, b"", bytes(100))
    ]
    assert buffered_bytes(small) == 0


def test_a_body_size_that_no_machine_has_costs_no_memory():
    assert decoder().feed(PUBLISH_FRAME + content_header(2**64 - 1)) == [ContentTooLarge(1, 2**64 - 1)]


PROPERTIES = st.sampled_from([b"", PERSISTENT])
CONTENTS = st.lists(
    st.tuples(st.sampled_from([1, 2]), st.sampled_from([0, 1, 5000, 9000]), PROPERTIES, st.booleans()),
    max_size=6,
)


@given(CONTENTS, st.integers(1, 20_000))
def test_an_announced_content_comes_as_it_was_decided_and_a_dropped_one_never(
    contents: list[tuple[int, int, bytes, bool]], chunk: int
) -> None:
    """Those that come whole are not announced: the fast path, and bodies of 0 bytes."""
    announcing = decoder()
    announcing.announces = True
    stream = b"".join(
        encode_content(channel, BasicPublish("e", str(number)), properties, bytes(size), 4096)
        for number, (channel, size, properties, _) in enumerate(contents)
    )
    events: list[Decoded] = []
    announced: list[int] = []
    for at in range(0, len(stream), chunk):
        announcing.add(stream[at : at + chunk])
        while announcing.undecoded:
            events += announcing.piece()
            if events and isinstance(events[-1], ContentHeader):
                header = events.pop()
                number = int(header.method.routing_key)
                channel, size, properties, passes = contents[number]
                assert header == ContentHeader(channel, BasicPublish("e", str(number)), properties, size)
                changed = header._replace(method=BasicPublish("else", str(number)), properties=b"")
                announcing.decide(header, changed if passes else None)
                announced.append(number)
                assert passes or announcing.pending_bytes <= ASSEMBLY_BYTES
    assert len(set(announced)) == len(announced) and all(contents[number][1] for number in announced)
    expected = []
    for number, (channel, size, properties, passes) in enumerate(contents):
        method = BasicPublish("e", str(number))
        if number not in announced:
            expected.append(Command(channel, method, properties, bytes(size)))
        elif passes:
            expected.append(Command(channel, BasicPublish("else", str(number)), b"", bytes(size)))
    assert events == expected and announcing.pending_bytes == 0


@pytest.mark.parametrize("sent", [1, 2, 3])
def test_a_discarded_content_is_dropped_with_all_that_is_still_to_come_of_it(sent: int):
    frames = split_frames(encode_content(1, PUBLISH, PERSISTENT, bytes(10_000), 4096))
    closing = decoder()
    assert closing.feed(b"".join(frames[:sent])) == []
    closing.discard(1)
    assert buffered_bytes(closing) < 1000
    assert closing.feed(b"".join(frames[sent:])) == []
    assert buffered_bytes(closing) == 0
    assert closing.feed(SELECT_FRAME) == [Command(1, TxSelect())]


def test_a_method_may_follow_a_content_that_was_discarded_half_way():
    closing = decoder()
    closing.feed(PUBLISH_FRAME + content_header(100))
    closing.discard(1)
    assert closing.feed(encode_method(1, ChannelClose())) == [Command(1, ChannelClose())]
    assert buffered_bytes(closing) == 0


def test_discarding_where_nothing_is_in_assembly_changes_nothing():
    idle = decoder()
    idle.discard(1)
    assert idle.feed(encode_content(1, PUBLISH, b"", b"x", 0)) == [Command(1, PUBLISH, b"", b"x")]


def test_contents_in_assembly_above_the_limit_of_the_connection_are_a_resource_error():
    crowded = decoder(max_pending_bytes=1 << 20)
    events: list[Event] = []
    most = 0
    for channel in range(1, 1000):
        events += crowded.feed(
            encode_method(channel, PUBLISH)
            + content_header(100_000, channel)
            + frame(3, channel, bytes(50_000))
        )
        most = max(most, buffered_bytes(crowded))
        if events:
            break
    violation = the_violation(events)
    assert isinstance(violation.error, ResourceExhausted)
    assert 15 <= violation.channel <= 21
    assert most <= 1 << 20
    assert buffered_bytes(crowded) == 0


def test_methods_that_wait_for_their_content_count_as_memory():
    crowded = decoder(max_pending_bytes=1 << 20)
    events = [event for channel in range(1, 65536) for event in crowded.feed(encode_method(channel, PUBLISH))]
    assert isinstance(the_violation(events).error, ResourceExhausted)


def test_a_message_with_content_on_channel_0_is_given_on_at_once_for_the_state_table_to_refuse():
    assert decoder().feed(encode_method(0, PUBLISH)) == [Command(0, PUBLISH)]


# -- violations ----------------------------------------------------------------------------------------------

IN_HEADER = PUBLISH_FRAME
IN_BODY = PUBLISH_FRAME + content_header(3)
NO_HEADER = "expected content header for class 60, got non content header frame instead"
NO_BODY = "expected content body, got non content body frame instead"
NO_METHOD = "expected method frame, got non method frame instead"


class Broken(NamedTuple):
    stream: bytes
    error: type[ConnectionException]
    text: str
    method: tuple[int, int] = (0, 0)


VIOLATIONS = {
    "unknown frame type": Broken(
        frame(9, 1, b"hello"), FrameError, 'type 9, all octets = <<"hello">>: unknown_frame'
    ),
    "long unknown frame": Broken(
        frame(9, 0, bytes(range(40))),
        FrameError,
        "type 9, first 16 octets = <<0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15>>: unknown_frame",
    ),
    "method of 3 octets": Broken(
        frame(1, 1, b"abc"), FrameError, 'type 1, all octets = <<"abc">>: unknown_frame'
    ),
    "header of 3 octets": Broken(
        frame(2, 1, b"abc"), FrameError, 'type 2, all octets = <<"abc">>: unknown_frame'
    ),
    "heartbeat with payload": Broken(
        frame(8, 0, b"x"), FrameError, 'type 8, all octets = <<"x">>: unknown_frame'
    ),
    "heartbeat on a channel": Broken(frame(8, 1, b""), UnexpectedFrame, "type 8, all octets = <<>>"),
    "body on channel 0": Broken(frame(3, 0, b"abc"), UnexpectedFrame, 'type 3, all octets = <<"abc">>'),
    "end octet": Broken(
        SELECT_FRAME[:-1] + b"\xcd",
        FrameError,
        "type 1, all octets = <<0,90,0,10>>: {invalid_frame_end_marker,205}",
    ),
    "end octet of a publish": Broken(
        PUBLISH_FRAME[:-1] + b"\0",
        FrameError,
        "type 1, all octets = <<0,60,0,40,0,0,1,101,1,107,0>>: {invalid_frame_end_marker,0}",
    ),
    "too large": Broken(
        struct.pack(">BHI", 1, 1, 131073),
        FrameError,
        "type 1, all octets = <<>>: {frame_too_large,131073,131064}",
    ),
    "header without method": Broken(content_header(0), UnexpectedFrame, NO_METHOD),
    "body without method": Broken(frame(3, 1, b"abc"), UnexpectedFrame, NO_METHOD),
    "method instead of header": Broken(IN_HEADER + SELECT_FRAME, UnexpectedFrame, NO_HEADER, (60, 40)),
    "publish instead of header": Broken(IN_HEADER + PUBLISH_FRAME, UnexpectedFrame, NO_HEADER, (60, 40)),
    "ack instead of header": Broken(
        IN_HEADER + encode_method(1, BasicAck(1)), UnexpectedFrame, NO_HEADER, (60, 40)
    ),
    "body instead of header": Broken(IN_HEADER + frame(3, 1, b"a"), UnexpectedFrame, NO_HEADER, (60, 40)),
    "header of another class": Broken(
        IN_HEADER + content_header(3, class_id=50),
        UnexpectedFrame,
        "expected content header for class 60, got one for class 50 instead",
        (60, 40),
    ),
    "header with weight": Broken(
        IN_HEADER + content_header(3, weight=1), UnexpectedFrame, NO_HEADER, (60, 40)
    ),
    "method instead of body": Broken(IN_BODY + SELECT_FRAME, UnexpectedFrame, NO_BODY, (60, 40)),
    "header instead of body": Broken(IN_BODY + content_header(3), UnexpectedFrame, NO_BODY, (60, 40)),
    "body behind an empty content": Broken(
        PUBLISH_FRAME + content_header(0) + frame(3, 1, b""), UnexpectedFrame, NO_METHOD
    ),
    "too much body": Broken(
        IN_BODY + frame(3, 1, b"abcd"),
        UnexpectedFrame,
        "a content body frame has 4 bytes, at most 3 are left of the size in the content header",
        (60, 40),
    ),
    "no property flags": Broken(
        IN_HEADER + content_header(0, properties=b""),
        MethodSyntaxError,
        "a content header has no property flags",
        (60, 40),
    ),
    "unknown method": Broken(
        encode_method(1, TxSelect())[:9] + b"\0\x63\xce", CommandInvalid, "unknown method 90,99"
    ),
    "fields cut short": Broken(
        frame(1, 1, b"\0\x32\0\x0a\0\0"), FrameError, "cannot decode <<0,0>>", (50, 10)
    ),
    "fields left over": Broken(
        frame(1, 1, b"\0\x5a\0\x0axx"), FrameError, 'cannot decode <<"xx">>', (90, 10)
    ),
    "ack left over": Broken(
        frame(1, 1, b"\0\x3c\0\x50" + bytes(8) + b"\0xx"),
        FrameError,
        "cannot decode <<0,0,0,0,0,0,0,0,0,120,120>>",
        (60, 80),
    ),
    "routing key no UTF-8": Broken(
        frame(1, 1, b"\0\x3c\0\x28\0\0\0\1\xff\0"), FrameError, "Malformed UTF-8 in shortstr", (60, 40)
    ),
}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_a_violation_has_rabbitmqs_code_text_and_method_and_is_the_last_event(name: str):
    stream, error, text, method = VIOLATIONS[name]
    for chunk in (len(stream), 1):
        broken = decoder()
        events = [
            event
            for start in range(0, len(stream), chunk)
            for event in broken.feed(stream[start : start + chunk])
        ]
        violation = the_violation(events)
        assert type(violation.error) is error
        assert violation.error.summary == text
        assert violation.method == method
        assert broken.feed(SELECT_FRAME) == []
        assert buffered_bytes(broken) == 0


@pytest.mark.parametrize(
    "properties",
    [
        b"\0\0z",
        b"\x80\0",
        b"\x80\0\1\xff",
        b"\0\2",
        b"\0\1\0\0",
        b"\x20\0\0\0\0\3\1a?",
        b"\x20\0\0\0\0\xff\1aV",
    ],
    ids=["left over", "cut", "no UTF-8", "unknown flag", "second flag word", "unknown type", "length lies"],
)
def test_damaged_properties_are_a_syntax_error_of_the_publish(properties: bytes):
    for rest in (b"", frame(3, 1, b"a")):
        violation = the_violation(
            decoder().feed(PUBLISH_FRAME + content_header(len(rest) and 1, properties=properties) + rest)
        )
        assert type(violation.error) is MethodSyntaxError
        assert violation.method == (60, 40)


def test_a_frame_as_large_as_frame_max_without_its_8_bytes_is_tolerated_as_rabbitmq_does_and_no_larger_one():
    large = BasicPublish("e", "k")
    body = bytes(4096)
    stream = encode_method(1, large) + content_header(4096) + frame(3, 1, body)
    assert decoder(frame_max=4096).feed(stream) == [Command(1, large, b"", body)]
    stream = encode_method(1, large) + content_header(4097) + frame(3, 1, bytes(4097))
    assert isinstance(the_violation(decoder(frame_max=4096).feed(stream)).error, FrameError)


def test_frame_max_can_be_lowered_after_tune_and_0_is_the_default():
    tuned = decoder()
    tuned.tune(4096)
    assert isinstance(the_violation(tuned.feed(struct.pack(">BHI", 3, 1, 5000))).error, FrameError)
    tuned = decoder(frame_max=0)
    assert tuned.frame_max == 131072


def test_a_frame_that_announces_its_end_and_never_comes_keeps_no_more_than_was_sent():
    waiting = decoder()
    assert waiting.feed(struct.pack(">BHI", 1, 1, 131064)) == []
    for _ in range(1000):
        assert waiting.feed(b"x" * 100) == []
    assert buffered_bytes(waiting) == 100_007
