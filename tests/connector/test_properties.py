"""AMQP 0-9-1 properties: every value survives encoding, every damaged byte string is one clear error."""

from __future__ import annotations

import struct
from collections.abc import Callable
from datetime import datetime
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker_core.core.errors import LocalProtocolError, RemoteProtocolError
from broker_core.launcher import Broker
from broker_core.message.field_table import MAX_VALUES, Long, Timestamp, decode_table, encode_table
from broker_core.message.properties import NAMES, Properties, check, delivery_mode, expiration

SHORT = st.text(max_size=60).filter(lambda text: len(text.encode()) <= 255)
SCALAR = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(0, 2**64 - 1).map(Timestamp),
    st.floats(allow_nan=False),
    st.text(max_size=20),
    st.binary(max_size=20),
    st.builds(
        lambda unscaled, scale: Decimal(unscaled).scaleb(-scale),
        st.integers(-(2**31), 2**31 - 1),
        st.integers(0, 20),
    ),
)
VALUE: st.SearchStrategy[Any] = st.recursive(
    SCALAR,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(SHORT, inner, max_size=3),
    max_leaves=8,
)
PROPERTIES = st.builds(
    Properties,
    **{
        name: st.none() | SHORT
        for name in NAMES
        if name not in ("headers", "delivery_mode", "priority", "timestamp")
    },
    headers=st.dictionaries(SHORT, VALUE, max_size=4),
    delivery_mode=st.none() | st.integers(0, 255),
    priority=st.none() | st.integers(0, 255),
    timestamp=st.none() | st.integers(0, 2**64 - 1),
)


def types_of(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: types_of(item) for name, item in value.items()}
    if isinstance(value, list):
        return [types_of(item) for item in value]
    return type(value)


@given(PROPERTIES)
def test_properties_survive_encoding_with_values_and_types(properties: Properties) -> None:
    decoded = Properties.decode(properties.encode())
    assert decoded == properties
    assert types_of(dict(decoded.headers)) == types_of(dict(properties.headers))


@given(PROPERTIES)
def test_one_property_is_found_without_decoding_the_rest(properties: Properties) -> None:
    data = properties.encode()
    assert delivery_mode(data) == properties.delivery_mode
    assert expiration(data) == properties.expiration


@given(PROPERTIES.filter(lambda p: p != Properties()), st.data())
def test_properties_cut_short_are_refused(properties: Properties, data: st.DataObject) -> None:
    whole = properties.encode()
    cut = data.draw(st.integers(1, len(whole) - 1))
    with pytest.raises(RemoteProtocolError, match="damaged"):
        Properties.decode(whole[:cut])


@given(PROPERTIES.filter(lambda p: p != Properties()), st.binary(min_size=1, max_size=3))
def test_bytes_left_over_are_refused(properties: Properties, extra: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="left over"):
        Properties.decode(properties.encode() + extra)


@given(st.binary(max_size=200))
def test_any_bytes_decode_or_raise_remote_protocol_error(data: bytes) -> None:
    for read in (Properties.decode, delivery_mode, expiration):
        try:
            read(data)
        except RemoteProtocolError as error:
            assert "damaged" in str(error)  # noqa: PT017


def test_no_properties_are_no_bytes() -> None:
    assert Properties().encode() == b""
    assert Properties.decode(b"") == Properties()
    assert Properties.decode(b"\0\0") == Properties()


def test_the_bytes_are_those_of_the_specification() -> None:
    properties = Properties(content_type="text/plain", delivery_mode=2, headers={"n": 1})
    assert (
        properties.encode()
        == b"\xb0\x00" + b"\x0atext/plain" + b"\x00\x00\x00\x07\x01nI\x00\x00\x00\x01" + b"\x02"
    )


def test_every_header_type_of_rabbitmq_is_read() -> None:
    fields = {
        "t": (b"t\x01", True),
        "b": (b"b\xff", -1),
        "B": (b"B\xff", 255),
        "s": (b"s\xff\xfe", -2),
        "u": (b"u\xff\xfe", 65534),
        "I": (b"I" + struct.pack(">i", -5), -5),
        "i": (b"i" + struct.pack(">I", 4_000_000_000), 4_000_000_000),
        "l": (b"l" + struct.pack(">q", -6), -6),
        "L": (b"L" + struct.pack(">q", -7), -7),
        "f": (b"f" + struct.pack(">f", 0.5), 0.5),
        "d": (b"d" + struct.pack(">d", 0.1), 0.1),
        "D": (b"D\x02" + struct.pack(">i", 314), Decimal("3.14")),
        "S": (b"S" + struct.pack(">I", 2) + b"hi", "hi"),
        "S8": (b"S" + struct.pack(">I", 1) + b"\xff", b"\xff"),
        "A": (b"A" + struct.pack(">I", 3) + b"t\x00V", [False, None]),
        "T": (b"T" + struct.pack(">Q", 1_700_000_000), Timestamp(1_700_000_000)),
        "F": (b"F" + struct.pack(">I", 3) + b"\x01aV", {"a": None}),
        "V": (b"V", None),
        "x": (b"x" + struct.pack(">I", 2) + b"\x00\x01", b"\x00\x01"),
    }
    raw = b"".join(bytes([len(name)]) + name.encode() + data for name, (data, _) in fields.items())
    table = decode_table(struct.pack(">I", len(raw)) + raw)
    assert table == {name: value for name, (_, value) in fields.items()}
    assert decode_table(encode_table(table)) == table


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\x00\x01", "unknown property flags"),
        (b"\x00\x02", "unknown property flags"),
        (b"\x80\x00\x05ab", "goes beyond their end"),
        (b"\x80\x00\x01\xff", "not UTF-8"),
        (b"\x20\x00\x00\x00\x00\x03\x01aZ", "unknown header type 'Z'"),
        (b"\x20\x00\x00\x00\x00\x04\x01aI\x00\x00\x00\x00", "continues to byte"),
        (b"\x20\x00\xff\xff\xff\xff", "goes beyond their end"),
        (b"\x00", "in the middle of a value"),
    ],
)
def test_damaged_properties_are_refused_with_the_reason(data: bytes, text: str) -> None:
    with pytest.raises(RemoteProtocolError, match=text):
        Properties.decode(data)


def test_deep_nesting_is_refused_instead_of_exhausting_the_stack() -> None:
    raw = b""
    for _ in range(5000):
        raw = b"\x01aF" + struct.pack(">I", len(raw)) + raw
    with pytest.raises(RemoteProtocolError, match="nested deeper"):
        decode_table(struct.pack(">I", len(raw)) + raw)
    nested: Any = 1
    for _ in range(5000):
        nested = [nested]
    with pytest.raises(LocalProtocolError, match="nested deeper"):
        encode_table({"a": nested})


@pytest.mark.parametrize("over", [0, 1])
@pytest.mark.parametrize(
    "table",
    [
        lambda count: {"a": [None] * (count - 1)},
        lambda count: {str(number): 1 for number in range(count)},
        lambda count: {"a": {"b": [[], {}] * ((count - 2) // 2), **({"c": 1} if count % 2 else {})}},
    ],
)
def test_a_table_of_very_many_values_is_refused_however_they_nest(
    table: Callable[[int], dict[str, object]], over: int
) -> None:
    """A value takes hundreds of times as long as its byte, for everybody."""
    data = Properties(headers=table(MAX_VALUES + over)).encode()
    if not over:
        check(data)
        assert Properties.decode(data).encode() == data
        return
    for refuse in (check, Properties.decode):
        with pytest.raises(RemoteProtocolError, match="more than 5000 values: send fewer, or put them into"):
            refuse(data)


@pytest.mark.parametrize(
    ("properties", "text"),
    [
        (Properties(priority=256), "'priority' is 256, allowed is 0 to 255"),
        (Properties(type="x" * 256), "at most 255"),
        (Properties(headers={"h": object()}), "no type for"),
        (Properties(headers={"h": 2**63}), "64 bits"),
        (Properties(headers={"h": Decimal("1e5")}), "does not fit"),
        (Properties(timestamp=-1), "'timestamp' is -1"),
    ],
)
def test_values_that_amqp_cannot_hold_are_refused(properties: Properties, text: str) -> None:
    with pytest.raises(LocalProtocolError, match=text):
        properties.encode()


LONE = "\ud800"
UNFIT: dict[str, Properties] = {
    "a property": Properties(type=LONE),
    "the name of a header": Properties(headers={LONE: 1}),
    "a header": Properties(headers={"a": LONE}),
    "a header inside another": Properties(headers={"a": [{"b": LONE}]}),
    "a long that is none": Properties(headers={"a": Long(2**70)}),
    "a number of ten thousand digits": Properties(headers={"a": 10**10_000}),
    "a priority of ten thousand digits": Properties(priority=10**10_000),
    "a decimal of ten thousand digits": Properties(headers={"a": Decimal("9" * 10_000)}),
    "a decimal that is no number": Properties(headers={"a": Decimal("sNaN")}),
    "the first year": Properties(headers={"a": datetime(1, 1, 1)}),
    "headers that are a list": Properties(headers=[1]),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("what", UNFIT)
def test_a_value_that_amqp_has_no_form_for_is_one_clear_error(what: str) -> None:
    with pytest.raises(LocalProtocolError) as refused:
        UNFIT[what].encode()
    assert len(str(refused.value)) < 300 and str(refused.value).isprintable()


@pytest.mark.parametrize("what", UNFIT)
def test_a_channel_refuses_it_with_that_error_and_goes_on(what: str) -> None:
    with Broker.memory() as broker, broker.channel() as channel:
        channel.queue_declare("q")
        with pytest.raises(LocalProtocolError):
            channel.publish(b"", routing_key="q", properties=UNFIT[what])
        assert channel.publish(b"", routing_key="q", properties=Properties(type="t"))
