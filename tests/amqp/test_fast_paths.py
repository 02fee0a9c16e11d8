"""Every fast path gives what the plain path gives: events of the decoder, bytes of the encoders, verdicts on
properties.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker_core.amqp.v0_9_1 import method_cache
from broker_core.amqp.v0_9_1.codec import encode_payload
from broker_core.amqp.v0_9_1.decoder import Decoder
from broker_core.amqp.v0_9_1.encoder import (
    DeliverEncoder,
    encode_ack,
    encode_content,
    encode_method,
    encode_nack,
)
from broker_core.amqp.v0_9_1.events import Decoded, Publishes, Violation
from broker_core.amqp.v0_9_1.methods import (
    METHODS,
    BasicAck,
    BasicDeliver,
    BasicNack,
    BasicPublish,
    Method,
    TxCommit,
)
from broker_core.amqp.v0_9_1.publish_template import MOST_CHANNELS
from broker_core.core.errors import LocalProtocolError, RemoteProtocolError
from broker_core.message.properties import Properties, check
from tests.amqp.strategies import (
    BODY,
    CHANNEL,
    ENCODED_PROPERTIES,
    FRAME_MAX,
    PROPERTIES,
    REPEATED,
    SHORT,
    STREAM,
    buffered_bytes,
    chunked,
)
from tests.amqp.test_fuzz import mutated
from tests.gates import examples

TAG = st.integers(0, 2**64 - 1)


class PlainDecoder(Decoder):
    """The decoder without its fast path."""

    def _fast(self, data: bytes, position: int, last: int, events: list[Decoded]) -> int:
        return position


def comparable(events: list[Decoded]) -> list[Any]:
    return [
        (type(event.error), event.error.message, event.channel, event.method)
        if isinstance(event, Violation)
        else (type(event), event)
        for decoded in events
        for event in (decoded.commands() if isinstance(decoded, Publishes) else [decoded])
    ]


LIMITS = st.fixed_dictionaries(
    {
        "frame_max": st.sampled_from([12, 64, 4096, 131072]),
        "max_body_bytes": st.sampled_from([0, 50, 5000, 1 << 20]),
        "max_pending_bytes": st.sampled_from([0, 600, 2000, 20_000, 1 << 22]),
    }
)


@pytest.mark.slow
@examples(300)
@given(chunked(STREAM | mutated(STREAM) | REPEATED | mutated(REPEATED)), LIMITS)
def test_the_fast_path_the_plain_path_and_every_way_to_cut_the_stream_give_the_same_events(
    stream: tuple[bytes, list[bytes]], limits: dict[str, int]
):
    whole, chunks = stream
    expected = comparable(PlainDecoder(handshake=False, **limits).feed(whole))
    for kind in (PlainDecoder, Decoder):
        for pieces in ([whole], chunks):
            fed = kind(handshake=False, **limits)
            assert comparable([event for piece in pieces for event in fed.feed(piece)]) == expected


ORDINARY = b"".join(
    [
        encode_content(1, BasicPublish("e", "k"), Properties(delivery_mode=2).encode(), b"0123456789", 0),
        encode_method(1, BasicAck(7)),
        encode_content(1, BasicPublish("e", "k"), b"", b"", 0),
        encode_method(1, TxCommit()),
    ]
)


@pytest.mark.parametrize("max_body_bytes", [9, 10])
@pytest.mark.parametrize("channel", [0, 1, 2])
@pytest.mark.parametrize(
    "before", [b"", encode_method(2, BasicPublish("x", "y")), encode_method(1, BasicPublish("x", "y"))]
)
def test_any_single_octet_changed_in_ordinary_frames_has_the_same_outcome_on_the_fast_path(
    max_body_bytes: int, channel: int, before: bytes
):
    stream = before + ORDINARY.replace(b"\0\1\0\0\0", bytes((0, channel, 0, 0, 0)))
    for at, octet in enumerate(stream):
        for other in {
            octet,
            octet ^ 1,
            octet ^ 0x80,
            (octet + 1) % 256,
            (octet - 1) % 256,
            0,
            1,
            2,
            3,
            13,
            60,
            0xCE,
            0xFF,
        }:
            changed = stream[:at] + bytes((other,)) + stream[at + 1 :]
            method_cache.METHODS_SEEN.clear()
            method_cache.SOUND_PROPERTIES.clear()
            fast, plain, again = (
                kind(max_body_bytes=max_body_bytes, handshake=False)
                for kind in (Decoder, PlainDecoder, Decoder)
            )
            expected = comparable(fast.feed(changed))
            assert expected == comparable(plain.feed(changed)), (at, other)
            # what is remembered now is the same as what was decoded
            assert expected == comparable(again.feed(changed)), (at, other)
            assert buffered_bytes(fast) == buffered_bytes(plain) == buffered_bytes(again)


@pytest.mark.parametrize(
    "limits", [{}, {"max_body_bytes": 9}, {"max_pending_bytes": 3000}, {"frame_max": 40}]
)
def test_any_single_octet_changed_in_a_repeated_publish_has_the_same_outcome_on_the_fast_path(
    limits: dict[str, int],
):
    publish = encode_content(1, BasicPublish("e", "k"), Properties(delivery_mode=2).encode(), bytes(10), 0)
    begun = encode_method(1, BasicPublish("x", "y"))
    for before in (publish * 2, publish * 2 + begun, publish * 2 + begun.replace(b"\0\1", b"\0\2", 1)):
        for at, octet in enumerate(publish):
            for other in {octet ^ 1, octet ^ 0x80, (octet + 1) % 256, (octet - 1) % 256, 0, 1, 3, 0xCE, 0xFF}:
                changed = before + publish[:at] + bytes((other,)) + publish[at + 1 :] + publish
                fast, plain = (kind(handshake=False, **limits) for kind in (Decoder, PlainDecoder))
                assert comparable(fast.feed(changed)) == comparable(plain.feed(changed)), (at, other)
                assert buffered_bytes(fast) == buffered_bytes(plain)


def test_the_fast_path_is_the_one_taken_for_publishes_acks_and_repeated_methods():
    class OnlyFast(Decoder):
        def _frame(self, *_: Any) -> None:
            raise AssertionError("the plain path was taken")

    properties = Properties(delivery_mode=2).encode()
    stream = encode_content(1, BasicPublish("e", "k"), properties, b"x" * 100, 0) + encode_content(
        1, BasicPublish("e", "k"), b"", b"", 0
    )
    commit = encode_method(1, TxCommit())  # the smallest frame, at the end of what was read
    Decoder(handshake=False).feed(commit)
    stream = (stream + encode_method(1, BasicAck(7, True))) * 3 + commit
    assert comparable(OnlyFast(handshake=False).feed(stream)) == comparable(
        PlainDecoder(handshake=False).feed(stream)
    )


def test_publishes_like_the_two_before_them_are_known_by_their_bytes_and_are_one_event():
    properties = Properties(delivery_mode=2).encode()
    first, last = (
        b"".join(
            encode_content(channel, BasicPublish("e", "k"), properties, bytes(size), 0)
            for size in (5, 5, 6, 7, 4000, 4000, 1)
        )
        for channel in (1, 2)
    )
    fed = Decoder(handshake=False)
    fed.feed(first + last)
    events = fed.feed(first + last)
    assert [(event.channel, len(event.bodies)) for event in events if isinstance(event, Publishes)] == [
        (1, 7),
        (2, 7),
    ]
    assert comparable(events) == comparable(PlainDecoder(handshake=False).feed(first + last))


def test_a_client_that_publishes_on_very_many_channels_is_remembered_within_bounds():
    publishes = [encode_content(channel, BasicPublish("e", "k"), b"", b"x", 0) for channel in range(1, 300)]
    fed = Decoder(handshake=False)
    for _ in range(3):
        expected = comparable(PlainDecoder(handshake=False).feed(b"".join(publishes)))
        assert comparable(fed.feed(b"".join(publishes))) == expected
        assert len(fed._repeated) <= MOST_CHANNELS


@given(
    CHANNEL,
    SHORT,
    FRAME_MAX,
    st.lists(st.tuples(TAG, st.booleans(), SHORT, SHORT, ENCODED_PROPERTIES, BODY), max_size=5),
)
def test_a_delivery_has_the_bytes_of_the_plain_encoder(
    channel: int, tag: str, frame_max: int, deliveries: list[tuple[int, bool, str, str, bytes, bytes]]
):
    encoder = DeliverEncoder(channel, tag, frame_max)
    for delivery_tag, redelivered, exchange, routing_key, properties, body in [*deliveries, *deliveries]:
        method = BasicDeliver(tag, delivery_tag, redelivered, exchange, routing_key)
        fast = encoder.encode(delivery_tag, redelivered, exchange, routing_key, properties, body)
        assert fast == encode_content(channel, method, properties, body, frame_max)


@pytest.mark.slow
@given(
    CHANNEL,
    SHORT,
    FRAME_MAX,
    st.sampled_from([1, 2**64 - 4, 2**64 - 2]),
    st.lists(
        st.tuples(st.booleans(), st.sampled_from("ef"), SHORT | st.just("k"), ENCODED_PROPERTIES, BODY),
        min_size=1,
        max_size=8,
    ),
    st.sampled_from([-1, 0, 300, 10_000, 1 << 20]),
)
def test_many_deliveries_have_the_bytes_of_the_plain_encoder_and_end_where_they_are_too_many(
    channel: int,
    tag: str,
    frame_max: int,
    first_tag: int,
    deliveries: list[tuple[bool, str, str, bytes, bytes]],
    most_bytes: int,
):
    encoder = DeliverEncoder(channel, tag, frame_max)
    redelivered = [again for again, *_ in deliveries]
    messages = [(exchange, key, properties, body) for _, exchange, key, properties, body in deliveries]
    try:
        data, count = encoder.encode_many(first_tag, redelivered, messages, most_bytes)
    except LocalProtocolError:
        assert first_tag + len(messages) > 2**64
        return
    one_by_one = [
        encode_content(
            channel, BasicDeliver(tag, first_tag + at, again, exchange, key), properties, body, frame_max
        )
        for at, (again, exchange, key, properties, body) in enumerate(deliveries[:count])
    ]
    assert data == b"".join(one_by_one)
    assert len(data) - len(one_by_one[-1]) <= max(0, most_bytes)
    assert count == len(deliveries) or len(data) > most_bytes or first_tag > 1


def test_a_delivery_is_right_however_many_routing_keys_came_before():
    encoder = DeliverEncoder(1, "tag", 0)
    for number in [*range(1000), *range(1000)]:
        method = BasicDeliver("tag", number, False, "e", f"k{number}")
        assert encoder.encode(number, False, "e", f"k{number}", b"\x10\0\2", b"x") == encode_content(
            1, method, b"\x10\0\2", b"x", 0
        )


@given(CHANNEL, TAG, st.booleans())
def test_confirms_have_the_bytes_of_the_plain_encoder(channel: int, tag: int, multiple: bool):
    assert encode_ack(channel, tag, multiple) == encode_method(channel, BasicAck(tag, multiple))
    assert encode_nack(channel, tag) == encode_method(channel, BasicNack(tag))


@pytest.mark.parametrize("kind", [kind for kind in METHODS.values() if not kind.LAYOUT])
@given(CHANNEL)
def test_a_method_without_fields_has_the_bytes_of_the_plain_encoder(kind: type[Method], channel: int):
    payload = encode_payload(kind())
    assert encode_method(channel, kind()) == struct.pack(">BHI", 1, channel, len(payload)) + payload + b"\xce"


@pytest.mark.parametrize("tag", [-1, 2**64])
def test_a_delivery_tag_that_does_not_fit_is_the_same_error_on_every_path(tag: int):
    encoders = (
        lambda: DeliverEncoder(1, "t", 0).encode(tag, False, "e", "k", b"\x10\0\2", b"x"),
        lambda: encode_ack(1, tag, False),
        lambda: encode_nack(1, tag),
    )
    for encode in encoders:
        with pytest.raises(LocalProtocolError, match="delivery_tag is"):
            encode()


@pytest.mark.slow
@examples(300)
@given(
    PROPERTIES.map(Properties.encode) | mutated(PROPERTIES.map(Properties.encode)) | st.binary(max_size=30)
)
def test_properties_are_refused_by_the_quick_check_exactly_where_they_do_not_decode(data: bytes):
    assert verdict(check, data) == verdict(Properties.decode, data)


def verdict(judge: Callable[[bytes], object], data: bytes) -> str | None:
    try:
        judge(data)
    except RemoteProtocolError as damaged:
        return damaged.message
    return None
