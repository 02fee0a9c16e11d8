"""``txmq message move``: what it changes of a message, over all that AMQP lets a client send."""

from __future__ import annotations

import operator
from functools import partial

from hypothesis import example, given
from hypothesis import strategies as st

from broker_core.launcher import Broker
from broker_core.message.field_table import MAX_NESTING, sized
from broker_core.message.properties import NAMES, Properties, raw_headers, with_raw_headers
from tests.gates import examples
from txmq import cli
from txmq.move import without_deaths

REMOVED = ("x-first-death-queue", "x-first-death-reason", "x-first-death-exchange", "CC")
SIZES = {
    b"b": 1, b"B": 1, b"t": 1, b"s": 2, b"u": 2, b"I": 4, b"i": 4, b"f": 4, b"l": 8, b"L": 8, b"d": 8, b"T": 8,
    b"D": 5, b"V": 0,
}  # fmt: skip
SCALARS = [
    st.binary(min_size=size, max_size=size).map(partial(operator.add, kind)) for kind, size in SIZES.items()
]
LONG = st.builds(lambda kind, raw: kind + sized(raw), st.sampled_from([b"S", b"x"]), st.binary(max_size=9))
NAME = st.sampled_from(["k", "x-death", "x-previous-death", *REMOVED, "x-delay", "Ä" * 100, ""])


def short(name: str) -> bytes:
    return bytes([len(name.encode())]) + name.encode()


def table(pairs: list[tuple[str, bytes]]) -> bytes:
    return sized(b"".join(short(name) + value for name, value in pairs))


def array(values: list[bytes]) -> bytes:
    return b"A" + sized(b"".join(values))


VALUE = st.recursive(
    st.one_of(*SCALARS, LONG),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(array),
        st.lists(st.tuples(NAME, inner), max_size=3).map(lambda pairs: b"F" + table(pairs)),
    ),
    max_leaves=8,
)
HEADERS = st.lists(st.tuples(NAME, VALUE), max_size=6)
OTHERS = st.builds(
    Properties, content_type=st.sampled_from([None, "", "ü"]), priority=st.sampled_from([None, 0, 255]),
    expiration=st.sampled_from([None, "60000"]), user_id=st.sampled_from([None, "guest"]), timestamp=st.sampled_from([None, 0]),
)  # fmt: skip


def items(raw: bytes) -> bytes:
    """What a value is in a list: those of an array, or itself."""
    return raw[5:] if raw[:1] == b"A" else raw


@examples(200)
@given(HEADERS, OTHERS)
@example([("k", b"I\0\0\0\1"), ("k", b"l" + bytes(8))], Properties())
@example(
    [("x-death", array([b"I\0\0\0\1", b"f\0\0\0\0"])), ("x-previous-death", array([b"u\0\7"]))], Properties()
)
@example([("x-previous-death", b"S" + sized(b"of another")), ("k", b"V")], Properties())
@example([("x-death", b"B\1"), ("x-death", array([]))], Properties(content_type="x"))
def test_all_but_the_deaths_and_cc_stays_byte_for_byte(
    headers: list[tuple[str, bytes]], others: Properties
) -> None:
    moved = without_deaths(with_raw_headers(others.encode(), headers))
    died = any(name == "x-death" for name, _ in headers)
    expected = [
        (name, raw)
        for name, raw in headers
        if name not in (*REMOVED, "x-death") and not (died and name == "x-previous-death")
    ]
    if died:
        deaths = [
            raw for wanted in ("x-death", "x-previous-death") for name, raw in headers if name == wanted
        ]
        expected.append(("x-previous-death", b"A" + sized(b"".join(map(items, deaths)))))
    assert moved == with_raw_headers(others.encode(), expected)
    assert raw_headers(moved) == expected
    for name in NAMES:
        if name != "headers":
            assert getattr(Properties.decode(moved), name) == getattr(others, name)


def test_deaths_that_are_nested_too_deeply_for_a_list_stay_where_they_are() -> None:
    deep = b"V"
    for _ in range(MAX_NESTING):
        deep = b"F" + table([("k", deep)])
    properties = with_raw_headers(b"", [("x-death", deep)])
    Properties.decode(properties)  # a client may send it
    assert without_deaths(properties) == properties


def test_a_message_moves_with_each_of_its_headers(broker: Broker, url: str) -> None:
    headers = [
        ("k", b"S" + sized(b"first")),
        ("k", b"S" + sized(b"second")),
        ("x-death", array([b"F" + table([("count", b"I\0\0\0\7"), ("queue", b"x" + sized(b"q"))])])),
    ]
    with broker.channel() as channel:
        for queue in ("dead", "other"):
            channel.queue_declare(queue)
        channel.publish(b"body", routing_key="dead", properties=with_raw_headers(b"", headers))
    assert cli.main(["message", "move", "dead", "--to", "other", "--yes", "--url", url]) == 0
    with broker.channel() as channel:
        delivery = channel.get("other")
        assert delivery is not None
        moved = raw_headers(delivery.message.properties)
    assert moved == [*headers[:2], ("x-previous-death", headers[2][1])]
