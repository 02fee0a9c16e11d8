"""Messages of AMQP as headers of Kafka and back, and headers of other clients as messages."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from broker_core.core.errors import OptionError, TxmqError
from broker_core.kafka.record import headers
from broker_core.message.field_table import MAX_VALUES, NUMBERS, Long, Timestamp, encode_short_string, sized
from broker_core.message.message import MESSAGE_SCHEMA
from broker_core.message.properties import NAMES, Properties, raw_headers, with_raw_headers
from broker_core.message.x_death import Death
from broker_core.routing.carbon_copy import copies_of_rows
from broker_core.routing.content import check_rows
from connector.reject.dead_letters import dead_lettered

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
short = texts.filter(lambda text: len(text.encode()) <= 255)
of_the_broker = {"x-death", "x-delivery-count", headers.OTHERS}
user_names = st.sampled_from(["CC", "BCC"]) | short.filter(
    lambda text: not text.startswith(headers.PREFIX) and text not in of_the_broker
)


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
    delivery_mode=st.none() | st.sampled_from([1, 2]),  # others are refused before
    priority=st.none() | st.integers(0, 255),
    timestamp=st.none() | st.integers(0, 2**64 - 1),
)


def publishable(encoded: bytes) -> bool:
    """What a publish on Kafka does with properties before it makes headers of them."""
    rows = [{"exchange": "", "routing_key": "q", "body": b"", "properties": encoded}]
    block = pa.RecordBatch.from_pylist(rows, schema=MESSAGE_SCHEMA)
    try:
        check_rows(block, on_kafka=True)
    except TxmqError:
        return False
    return bool(copies_of_rows(block)[1].column("properties")[0].as_py() == encoded)


@pytest.mark.slow
@given(short, properties, st.dictionaries(user_names, values, max_size=4))
def test_a_message_comes_back_byte_by_byte(exchange: str, known: Properties, user: dict[str, bytes]) -> None:
    encoded = with_raw_headers(known.encode(), [*user.items()])
    assume(publishable(encoded))
    found, again = headers.to_message(headers.of_message(exchange, encoded))
    assert (found, again) == (exchange, encoded)


pairs = st.lists(
    st.tuples(
        st.one_of(
            st.sampled_from([headers.EXCHANGE, headers.TYPES, *headers.PROPERTIES, "a", "b", "n" * 300]),
            st.sampled_from(["CC", "BCC", "x-death", "x-delivery-count", headers.OTHERS, "txmq.a"]),
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


def in_order(found: Iterable[headers.Pair]) -> dict[str, list[bytes | None]]:
    """The values of each name; order among names is not kept."""
    by_name: dict[str, list[bytes | None]] = {}
    for name, value in found:
        by_name.setdefault(name, []).append(value)
    return by_name


def many(count: int) -> list[headers.Pair]:
    return [(f"n{number}", b"x") for number in range(count)]


@given(pairs)
@example([(headers.EXCHANGE, b"")])
@example([("BCC", b"x"), ("CC", b"x"), ("h", b"1"), ("h", b"2"), ("h", b"2")])
@example(
    [("txmq.foo", b"1"), ("txmq.expiration", b"5"), ("txmq.delivery_mode", b"3"), ("txmq.priority", b"07")]
)
@example([("n" * 255 + "a", b"1"), ("n" * 255 + "b", b"2"), ("big", b"x" * 300_000), (headers.OTHERS, b"[]")])
@example([("CC", b'["' + b"k" * 300 + b'"]'), (headers.TYPES, b'{"CC":[null]}')])
@example([("BCC", b'["q"]'), (headers.TYPES, b'{"BCC":[null]}')])
@example([("x-death", b"x"), ("x-delivery-count", b"1"), (headers.OTHERS, b'[["h","1"]]')])
@example(many(MAX_VALUES - 100))
@example(
    [*many(MAX_VALUES + 1), ("n0", b"again"), (headers.TYPES, b'{"n1":[null]}'), (headers.EXCHANGE, b"e")]
)
@example(many(3 * MAX_VALUES))
def test_headers_of_any_client_are_relayed_and_rejected_as_they_are(found: list[headers.Pair]) -> None:
    exchange, encoded = headers.to_message(found)
    assert with_raw_headers(encoded, raw_headers(encoded)) == encoded
    assert publishable(encoded)
    wanted, again = in_order(found), in_order(headers.of_message(exchange, encoded))
    types = again.pop(headers.TYPES, [])  # txmq says there which are no text
    assert types[: len(wanted.get(headers.TYPES, []))] == wanted.pop(headers.TYPES, [])
    assert again == wanted
    death = Death("q", "rejected", Timestamp(1), exchange, "key")
    dead = dead_lettered(encoded, death, "why", keeps_key=True)
    assert publishable(dead)
    for _ in range(2):  # also of what is read again
        after = in_order(headers.of_message(exchange, dead))
        for name, values in in_order(found).items():
            if name not in (headers.TYPES, "txmq.user_id"):  # the app publishes it
                assert after[name][: len(values)] == values
        exchange, dead = headers.to_message(headers.of_message(exchange, dead))
        dead = dead_lettered(dead, death, "why", keeps_key=True)


def test_the_list_of_other_headers_survives_a_map_of_strings() -> None:
    found: list[headers.Pair] = [("h", b"1"), ("h", b"\xff"), ("h", None), ("h", b"4"), ("BCC", "é".encode())]
    _, encoded = headers.to_message(found)
    values = Properties.decode(encoded).headers
    assert values == {"h": "4", headers.OTHERS: '[["h","1"],["h",{"hex":"ff"}],["h",null],["BCC","é"]]'}
    assert in_order(headers.of_message("", Properties(headers=values).encode())) == in_order(found)


@pytest.mark.parametrize(
    "value", ["x", "5", "[5]", '[["a",5]]', '[["\\ud800","1"]]', '[["a",{"hex":"x"}]]', 5]
)
def test_a_list_of_other_headers_that_is_none_is_a_header(value: object) -> None:
    pairs = headers.of_message("", Properties(headers={headers.OTHERS: value}).encode())
    assert pairs[0] == (headers.OTHERS, str(value).encode())


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
        Properties(headers={"a": "2", "b": b"\xff", "c": None, headers.OTHERS: '[["a","1"]]'}),
    )
    assert read(("txmq.priority", b"9"), ("txmq.exchange", b"e")) == ("e", Properties(priority=9))
    assert read(("txmq.priority", b"900"), ("txmq.exchange", b"\xff")) == (
        "",
        Properties(headers={headers.OTHERS: '[["txmq.priority","900"],["txmq.exchange",{"hex":"ff"}]]'}),
    )
    assert read(("when", b"5"), ("txmq.types", b'{"when":"T"}')) == (
        "",
        Properties(headers={"when": Timestamp(5)}),
    )
    _, wrong = read(("when", b"5"), ("no", b"x"), ("txmq.types", b'{"when":"T","no":"I"}'))
    assert (wrong.headers["when"], wrong.headers["no"]) == ("5", "x")
    assert read(("txmq.types", b"[]")) == ("", Properties(headers={headers.OTHERS: '[["txmq.types","[]"]]'}))


def test_what_kafka_cannot_keep_is_refused() -> None:
    with pytest.raises(OptionError, match="expiration '60000'"):
        headers.of_message("", Properties(expiration="60000").encode())
    with pytest.raises(OptionError, match=r"header 'txmq\.mine' begins with 'txmq\.'"):
        headers.of_message("", Properties(headers={"txmq.mine": 1}).encode())
