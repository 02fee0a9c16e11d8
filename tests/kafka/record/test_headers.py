"""Messages of AMQP as headers of Kafka and back, and headers of other clients as messages."""

from __future__ import annotations

import json
import struct
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker_core.errors import OptionError
from broker_core.kafka.record import headers
from broker_core.message.field_table import NUMBERS, Long, Timestamp, encode_short_string, sized
from broker_core.message.properties import NAMES, Properties, raw_headers, with_raw_headers

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
short = texts.filter(lambda text: len(text.encode()) <= 255)
user_names = short.filter(lambda text: not text.startswith(headers.PREFIX))


def numbers() -> st.SearchStrategy[bytes]:
    """Every number of AMQP, but NaN: its bits do not survive a float of Python."""

    def of(kind: int) -> st.SearchStrategy[bytes]:
        shape = NUMBERS[kind]
        raw = st.binary(min_size=shape.size, max_size=shape.size)
        return raw.filter(lambda data: shape.unpack(data)[0] == shape.unpack(data)[0]).map(
            lambda data: bytes([kind]) + data
        )

    return st.one_of([of(kind) for kind in NUMBERS])


scalars = st.one_of(
    st.just(b"V"),
    st.sampled_from([b"t\0", b"t\1"]),
    numbers(),
    st.binary(max_size=20).map(lambda data: b"S" + sized(data)),
    st.binary(max_size=20).map(lambda data: b"x" + sized(data)),
    st.binary(min_size=8, max_size=8).map(lambda data: b"T" + data),
    st.tuples(st.integers(0, 255), st.integers(-(2**31), 2**31 - 1)).map(
        lambda each: b"D" + struct.pack(">Bi", *each)
    ),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4).map(lambda members: b"A" + sized(b"".join(members))),
        st.dictionaries(short, inner, max_size=4).map(
            lambda table: (
                b"F" + sized(b"".join(encode_short_string(name, "") + each for name, each in table.items()))
            )
        ),
    ),
    max_leaves=12,
)
properties = st.builds(
    Properties,
    **{
        name: st.none() | short
        for name in NAMES
        if name not in ("headers", "delivery_mode", "priority", "timestamp", "expiration")
    },
    delivery_mode=st.none() | st.integers(0, 255),
    priority=st.none() | st.integers(0, 255),
    timestamp=st.none() | st.integers(0, 2**64 - 1),
)


@pytest.mark.slow
@given(short, properties, st.dictionaries(user_names, values, max_size=4))
def test_a_message_comes_back_byte_by_byte(exchange: str, known: Properties, user: dict[str, bytes]) -> None:
    encoded = with_raw_headers(known.encode(), user)
    found, again = headers.to_message(headers.of_message(exchange, encoded))
    assert (found, again) == (exchange, encoded)


pairs = st.lists(
    st.tuples(
        st.one_of(
            st.sampled_from([headers.EXCHANGE, headers.TYPES, *headers.PROPERTIES, "a", "b", "n" * 300]),
            texts,
        ),
        st.one_of(
            st.none(),
            st.binary(max_size=20),
            st.sampled_from(
                [b"7", b"300", b"-1", b"\xff", b"[1]", b"true", b"null", b'{"a":1}', b"x" * 300, b"[" * 5000]
            ),
            st.dictionaries(
                st.sampled_from(["a", "b"]),
                st.recursive(
                    st.sampled_from([None, "I", "l", "t", "x", "S", "D", "T", "V", "q", "", "II", 3]),
                    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.just("a"), inner),
                    max_leaves=4,
                ),
            ).map(lambda types: json.dumps(types).encode()),
        ),
    ),
    max_size=8,
)


@given(pairs)
def test_headers_of_any_client_are_a_message(found: list[headers.Pair]) -> None:
    exchange, encoded = headers.to_message(found)
    known = Properties.decode(encoded)
    assert with_raw_headers(encoded, raw_headers(encoded)) == encoded
    ours = {headers.EXCHANGE, headers.TYPES, *headers.PROPERTIES}
    assert {name.encode()[:255].decode(errors="ignore") for name, _ in found if name not in ours} <= set(
        known.headers
    )
    last = dict(found)
    if (last.get(headers.EXCHANGE) or b"") and not exchange:
        assert headers.EXCHANGE in known.headers


def test_what_other_clients_see() -> None:
    encoded = Properties(
        content_type="text/plain",
        priority=3,
        headers={
            "name": "é",
            "count": Long(7),
            "raw": b"a",
            "none": None,
            "list": [1, "b", {"d": Decimal("1.20")}],
        },
    ).encode()
    assert headers.of_message("events", encoded) == [
        ("txmq.exchange", b"events"),
        ("txmq.content_type", b"text/plain"),
        ("txmq.priority", b"3"),
        ("name", "é".encode()),
        ("count", b"7"),
        ("raw", b"a"),
        ("none", None),
        ("list", b'[1,"b",{"d":"1.20"}]'),
        ("txmq.types", b'{"count":"l","raw":"x","list":["I",null,{"d":"D"}]}'),
    ]
    assert headers.of_message("", b"") == []


def test_what_other_clients_send() -> None:
    def read(*found: headers.Pair) -> tuple[str, Properties]:
        exchange, encoded = headers.to_message(found)
        return exchange, Properties.decode(encoded)

    assert headers.to_message([]) == ("", b"")
    assert read(("a", b"1"), ("a", b"2"), ("b", b"\xff"), ("c", None)) == (
        "",
        Properties(headers={"a": "2", "b": b"\xff", "c": None}),
    )
    assert read(("txmq.priority", b"9"), ("txmq.exchange", b"e")) == ("e", Properties(priority=9))
    assert read(("txmq.priority", b"900"), ("txmq.exchange", b"\xff")) == (
        "",
        Properties(headers={"txmq.priority": "900", "txmq.exchange": b"\xff"}),
    )
    assert read(("when", b"5"), ("no", b"x"), ("txmq.types", b'{"when":"T","no":"I"}')) == (
        "",
        Properties(headers={"when": Timestamp(5), "no": "x"}),
    )
    assert read(("txmq.types", b"[]")) == ("", Properties(headers={"txmq.types": "[]"}))


def test_what_kafka_cannot_keep_is_refused() -> None:
    with pytest.raises(OptionError, match="expiration '60000'"):
        headers.of_message("", Properties(expiration="60000").encode())
    with pytest.raises(OptionError, match=r"header 'txmq\.mine' begins with 'txmq\.'"):
        headers.of_message("", Properties(headers={"txmq.mine": 1}).encode())
