"""The table of methods is the one of an independent implementation, field by field."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp import commands

from broker_core.amqp.v0_9_1.codec import decode_payload, encode_payload
from broker_core.amqp.v0_9_1.encoder import encode_method
from broker_core.amqp.v0_9_1.methods import METHODS, BasicPublish, ConnectionStartOk, Method, QueueDeclareOk
from broker_core.core.errors import CommandInvalid, FrameError, LocalProtocolError, MethodSyntaxError
from tests.amqp.strategies import METHOD

THEIRS = {divmod(index, 1 << 16): kind for index, kind in commands.INDEX_MAPPING.items()}
RENAMED = {("exchange.declare", "exchange_type"): "type"}
RESERVED = {
    ("connection.open", "capabilities"),
    ("connection.open", "insist"),
    ("connection.open-ok", "known_hosts"),
    ("channel.open", "out_of_band"),
    ("channel.open-ok", "channel_id"),
    ("basic.get-empty", "cluster_id"),
}


def their_name(kind: type) -> str:
    class_name, method_name = kind.name.split(".")
    return f"{class_name.lower()}.{re.sub('(?<!^)(?=[A-Z])', '-', method_name).lower()}"


def test_every_method_of_the_independent_implementation_is_there_and_no_other():
    assert {ids: their_name(kind) for ids, kind in THEIRS.items()} == {
        ids: kind.NAME for ids, kind in METHODS.items()
    }


@pytest.mark.parametrize("ids", sorted(METHODS), ids=lambda ids: METHODS[ids].NAME)
def test_the_fields_of_a_method_are_the_independent_ones_in_order_and_type(ids: tuple[int, int]):
    ours, theirs = METHODS[ids], THEIRS[ids]
    expected = []
    for attribute in theirs.attributes():
        reserved = attribute == "ticket" or (ours.NAME, attribute) in RESERVED
        expected.append(
            (
                None if reserved else RENAMED.get((ours.NAME, attribute), attribute),
                theirs.amqp_type(attribute),
            )
        )
    assert list(ours.LAYOUT) == expected
    assert ids == (ours.CLASS_ID, ours.METHOD_ID)


def test_content_is_carried_by_the_four_methods_of_the_specification():
    carriers = {kind.NAME for kind in METHODS.values() if kind.HAS_CONTENT}
    assert carriers == {"basic.publish", "basic.return", "basic.deliver", "basic.get-ok"}


def test_every_request_has_a_sender_and_every_answer_of_the_independent_table_comes_from_the_other_side():
    by_name = {kind.name: METHODS[ids] for ids, kind in THEIRS.items()}
    for ids, kind in THEIRS.items():
        for answer in kind.valid_responses if kind.synchronous else ():
            sides = {METHODS[ids].SENT_BY, by_name[answer].SENT_BY}
            assert sides == {"client", "server"} or "both" in sides, kind.name


@pytest.mark.parametrize("kind", METHODS.values(), ids=lambda kind: kind.NAME)
def test_a_method_without_arguments_holds_zero_values_and_survives_the_wire(kind: type[Method]):
    method = kind()
    assert not any(getattr(method, name) for name, _ in kind.LAYOUT if name)
    assert decode_payload(encode_payload(method)) == method


@pytest.mark.parametrize("kind", METHODS.values(), ids=lambda kind: kind.NAME)
def test_a_method_cannot_be_changed(kind: type[Method]):
    method = kind()
    assert not hasattr(method, "__dict__")
    for name in (name for name, _ in kind.LAYOUT if name):
        with pytest.raises(AttributeError):
            setattr(method, name, 1)


@given(METHOD)
def test_every_method_survives_the_wire(method: Method):
    assert decode_payload(encode_payload(method)) == method


@given(METHOD, st.data())
def test_a_method_cut_short_or_with_octets_left_over_is_a_frame_error_that_shows_its_fields(
    method: Method, data: st.DataObject
):
    payload = encode_payload(method)
    if len(payload) > 4:
        cut = payload[: data.draw(st.integers(4, len(payload) - 1))]
        with pytest.raises(
            FrameError,
            match=r"^\[TXMQ_AMQP_FRAME\] (cannot decode <<|Malformed UTF-8 in "
            r"shortstr$)",
        ):
            decode_payload(cut)
    with pytest.raises(FrameError, match="cannot decode <<"):
        decode_payload(payload + b"x")


def test_an_unknown_method_is_an_invalid_command():
    with pytest.raises(CommandInvalid, match="unknown method 60,99"):
        decode_payload(b"\x00\x3c\x00\x63")


@pytest.mark.parametrize(
    ("payload", "error", "text"),
    [
        (b"\x00\x32\x00\x0a\x00\x00", FrameError, "cannot decode <<0,0>>"),
        (b"\x00\x5a\x00\x0axx", FrameError, 'cannot decode <<"xx">>'),
        (b"\x00\x3c\x00\x46\x00\x00\x01\xff\x00", FrameError, "Malformed UTF-8 in shortstr"),
        (
            b"\x00\x32\x00\x0a\x00\x00\x01q\x00\x00\x00\x00\x03\x01a?",
            MethodSyntaxError,
            "a field table is damaged: ",
        ),
    ],
    ids=["cut", "left over", "no UTF-8", "table"],
)
def test_damaged_fields_are_refused_with_rabbitmqs_code_and_text(
    payload: bytes, error: type[Exception], text: str
):
    with pytest.raises(error) as raised:
        decode_payload(payload)
    assert (
        raised.value.summary.startswith(text) if error is MethodSyntaxError else raised.value.summary == text
    )


def test_bits_share_octets_in_the_order_of_the_fields_and_reserved_fields_are_zero():
    assert encode_payload(BasicPublish("e", "k", mandatory=True)) == b"\x00\x3c\x00\x28\x00\x00\x01e\x01k\x01"
    assert encode_payload(BasicPublish("e", "k", immediate=True)) == b"\x00\x3c\x00\x28\x00\x00\x01e\x01k\x02"


@pytest.mark.parametrize(
    ("method", "text"),
    [
        (
            QueueDeclareOk("q", 2**32, 0),
            "queue.declare-ok: message_count is 4294967296, allowed is 0 to 4294967295",
        ),
        (QueueDeclareOk("q", -1, 0), "queue.declare-ok: message_count is -1"),
        (QueueDeclareOk("q" * 256, 0, 0), "queue.declare-ok: queue has 256 bytes, at most 255"),
        (QueueDeclareOk("\ud800", 0, 0), "queue.declare-ok: queue must be text that UTF-8 can hold"),
        (ConnectionStartOk({"a": object()}), "which AMQP has no type for"),
    ],
)
def test_a_value_that_its_field_cannot_hold_is_a_local_error_that_names_it(method: Method, text: str):
    with pytest.raises(LocalProtocolError) as raised:
        encode_method(1, method)
    assert text in raised.value.message
