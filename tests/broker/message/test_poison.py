"""Messages that hold anything: every listener refuses what means nothing, and what is in a queue already can
leave it in every way.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from broker_core.broker.message.dead_letter import DAMAGED
from broker_core.broker.transaction.publish import Publish
from broker_core.core import errors
from broker_core.message.field_table import Long, Timestamp
from broker_core.message.message import MESSAGE_SCHEMA, Message
from broker_core.message.properties import Properties
from broker_core.routing.content import PROPERTIES_BYTES, check_rows
from tests.broker.conftest import Node, declared, publish
from tests.reading import fetched

LARGEST = 2**63 - 1
DEATH = {"count": Long(1), "queue": "q", "reason": "rejected", "exchange": "", "routing-keys": ["q"]}


def headers(**values: Any) -> bytes:
    return Properties(
        headers={name.replace("_", "-"): value for name, value in values.items()}, delivery_mode=2
    ).encode()


def nested(depth: int, value: Any = 1) -> Any:
    for _ in range(depth):
        value = [value]
    return value


# Properties that do not decode: no listener lets them in.
DAMAGED_ONES = {
    "a table longer than its bytes": b"\x20\x00\x00\x00\x00\xff",
    "one byte": b"\x20",
    "a delivery mode that is not there": b"\x10\x00",
    "an unknown flag": b"\x00\x01",
    "bytes behind the end": b"\x10\x00\x02\x02",
    "an unknown type": b"\x20\x00\x00\x00\x00\x03\x01kZ",
    "a header that is nothing": b"\x20\x00\x00\x00\x00\x02\x01k",
    "an expiration behind a damaged table": b"\x21\x00\x00\x00\x00\x02\x01k\x010",
    "an expiration that is not there": b"\x01\x00",
    "an application id that is not UTF-8, behind deaths": b"\x20\x08\x00\x00\x00\x09\x07x-deathV\x01\xff",
    "an application id that is not UTF-8": b"\x00\x08\x01\xff",
}
# Properties that decode, and hold what nobody expects.
ODD_ONES = {
    "the largest count": headers(x_death=[{**DEATH, "count": Long(LARGEST)}]),
    "the largest count of another queue": headers(
        x_death=[{**DEATH, "queue": "other", "count": Long(LARGEST)}]
    ),
    "a time as a count": headers(x_death=[{**DEATH, "count": Timestamp(2**64 - 1)}]),
    "a text as a count": headers(x_death=[{**DEATH, "count": "many"}]),
    "deaths that are a text": headers(x_death="yesterday"),
    "deaths that are a table": headers(x_death=DEATH),
    "deaths of every shape": headers(x_death=[1, None, [], {}, {"queue": ["q"], "reason": 7}, DEATH, "x"]),
    "first deaths of other types": headers(
        x_first_death_queue=1, x_first_death_reason=[None], x_first_death_exchange=b"\xff"
    ),
    "a transaction that is a table": headers(x_original_transaction={"a": {}}),
    "CC that is a text": headers(CC="boss@example.com"),
    "CC and BCC that are tables": headers(CC={"a": 1}, BCC={}),
    "keys of every type in CC": headers(CC=[1, None, "dead", b"\xff", {}, "k" * 255]),
    "CC nested as deep as may be": headers(CC=nested(63)),
    "deaths nested as deep as may be": headers(x_death=[{"queue": nested(61)}]),
    "text that is not UTF-8": b"\x20\x00\x00\x00\x00\x0f\x07x-death"
    + b"S"
    + struct.pack(">I", 2)
    + b"\xff\xfe",
    "the longest key of a header": headers(**{"k" * 255: "v"}),
    "an expiration that is no number": Properties(expiration="soon", delivery_mode=2).encode(),
    "an expiration below zero": Properties(expiration="-1", delivery_mode=2).encode(),
    "an expiration of 255 digits": Properties(expiration="9" * 255, delivery_mode=2).encode(),
    "an expiration with headers": Properties(expiration="0", headers={"a": 1}, delivery_mode=2).encode(),
    "every property": Properties(
        "a", "b", {"c": 1}, 2, 9, "d", "e", "60000", "f", 2**64 - 1, "g", "h", "i", "j"
    ).encode(),
}
ALL = DAMAGED_ONES | ODD_ONES
AT_ONCE = {"an expiration behind a damaged table", "an expiration below zero", "an expiration with headers"}
STAYING = [name for name in ALL if name not in AT_ONCE]


def put_in(node: Node, queue: str, body: bytes, properties: bytes) -> None:
    """As it may stand in a data directory, past every listener."""
    message = Message(body, queue, "", properties)
    node.broker.run(
        lambda state, change, now: state.messages.enqueue(
            change, [Publish(message, (state.topology.queue(queue),))], now
        )
    )


def dead_end(node: Node, **arguments: Any) -> None:
    """``q`` dead-letters to a fanout exchange with the queue ``dead``, so that messages keep their keys and
    their CC.
    """
    declared(node, "dead", "out")
    with node.channel() as channel:
        channel.exchange_declare("dlx", "fanout")
        channel.queue_bind("dead", "dlx")
    declared(node, "q", **{"x-dead-letter-exchange": "dlx", **arguments})


def reject(node: Node) -> None:
    with node.channel() as channel:
        found = channel.get("q")
        assert found is not None
        channel.reject(found.tag, requeue=False)


def expire(node: Node) -> None:
    node.clock.advance(2)
    left = node.broker.run(lambda state, change, now: state.expiry.expire(change, now, state.expiry.due(now)))
    assert left == []


def overflow(node: Node) -> None:
    publish(node, "q", b"another")


def come_back_too_often(node: Node) -> None:
    with node.channel() as channel:
        for _ in range(2):
            found = channel.get("q")
            assert found is not None
            channel.reject(found.tag, requeue=True)
    expire(node)


WAYS: dict[str, tuple[Callable[[Node], None], dict[str, Any]]] = {
    "rejected": (reject, {}),
    "expired": (expire, {"x-message-ttl": 1000}),
    "maxlen": (overflow, {"x-max-length": 1}),
    "delivery_limit": (come_back_too_often, {"x-delivery-limit": 1, "x-queue-type": "quorum"}),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ALL)
def test_whatever_a_message_holds_it_is_dead_lettered_once_and_can_be_read(
    node: Node, name: str, way: str
) -> None:
    if name in AT_ONCE:
        way = "expired"
    leave, arguments = WAYS[way]
    dead_end(node, **arguments)
    put_in(node, "q", b"poison", ALL[name])
    leave(node)
    assert node.browse("dead") == [b"poison"]
    node.restart()
    assert (node.browse("dead"), b"poison" in node.browse("q")) == ([b"poison"], False)
    queue = node.broker.state.topology.queue("dead")
    found = Properties.decode(fetched(node.broker, queue, queue.progress.floor).properties)
    death = found.headers["x-death"][0]
    assert (death["queue"], death["reason"], found.expiration) == ("q", way, None)
    assert 1 <= death["count"] <= LARGEST or name == "a text as a count"
    if name in DAMAGED_ONES:
        assert found.headers[DAMAGED] == ALL[name]
    else:
        assert DAMAGED not in found.headers


@pytest.mark.parametrize("name", STAYING)
def test_a_commit_that_rejects_any_message_is_whole(node: Node, name: str) -> None:
    dead_end(node)
    put_in(node, "q", b"poison", ALL[name])
    publish(node, "q", b"good")
    with node.channel() as channel:
        channel.tx_select()
        for settle in (lambda tag: channel.reject(tag, requeue=False), channel.ack):
            found = channel.get("q")
            assert found is not None
            settle(found.tag)
        channel.publish(b"effect", routing_key="out")
        channel.prepare("x1")
    node.restart()
    node.broker.commit("x1")
    assert [node.browse(queue) for queue in ("q", "out", "dead")] == [[], [b"effect"], [b"poison"]]


@pytest.mark.parametrize("name", STAYING)
@pytest.mark.parametrize("kind", ["direct", "fanout", "topic", "headers"])
def test_every_type_of_exchange_takes_any_dead_letter(node: Node, kind: str, name: str) -> None:
    declared(node, "dead")
    with node.channel() as channel:
        channel.exchange_declare("dlx", kind)
        channel.queue_bind("dead", "dlx", "q", {"x-match": "any", "x-death": None, "c": 1})
    declared(node, "q", **{"x-dead-letter-exchange": "dlx"})
    put_in(node, "q", b"poison", ALL[name])
    reject(node)
    assert node.browse("q") == []
    assert kind == "headers" or node.browse("dead") == [b"poison"]


def test_a_message_whose_properties_are_damaged_does_not_go_round_for_ever(node: Node) -> None:
    declared(
        node, "q", **{"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "q", "x-message-ttl": 0}
    )
    put_in(node, "q", b"poison", b"\x21\x00\x00\x00\x00\x02\x01k\x010")
    for _ in range(3):
        expire(node)
    assert node.browse("q") == []


@pytest.mark.parametrize("name", STAYING)
def test_a_queue_that_counts_deliveries_delivers_any_message(node: Node, name: str) -> None:
    declared(node, "q", **{"x-queue-type": "quorum"})
    put_in(node, "q", b"poison", ALL[name])
    with node.channel() as channel:
        for _ in range(2):
            found = channel.get("q")
            assert found is not None and found.body == b"poison"
            channel.reject(found.tag, requeue=True)


# -- the listeners -----------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[bytes, type[errors.TxmqError]]] = {
    **{name: (properties, errors.RemoteProtocolError) for name, properties in DAMAGED_ONES.items()},
    "CC that is a text": (headers(CC="boss@example.com"), errors.PreconditionFailed),
    "BCC that is a table": (headers(BCC={}), errors.PreconditionFailed),
    "a delivery mode of 3": (Properties(delivery_mode=3).encode(), errors.PreconditionFailed),
    "an expiration that is no number": (Properties(expiration="soon").encode(), errors.PreconditionFailed),
    "an expiration below zero": (Properties(expiration="-1").encode(), errors.PreconditionFailed),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_publish_in_process_and_a_staged_row_are_refused_as_basic_publish_is(node: Node, name: str) -> None:
    properties, kind = REFUSED[name]
    declared(node, "q")
    with node.channel() as channel, pytest.raises(kind):
        channel.publish(b"x", routing_key="q", properties=properties)
    assert node.browse("q") == []
    with pytest.raises(kind, match="row 1"):
        check_rows(block(properties=[b"", properties]))


def block(**columns: list[Any]) -> pa.RecordBatch:
    rows = len(next(iter(columns.values())))
    given = {
        "exchange": [""] * rows,
        "routing_key": ["q"] * rows,
        "body": [b"x"] * rows,
        "properties": [b""] * rows,
        **columns,
    }
    return pa.RecordBatch.from_pydict(
        given, schema=pa.schema([field.with_nullable(True) for field in MESSAGE_SCHEMA])
    )


@pytest.mark.parametrize("column", MESSAGE_SCHEMA.names)
def test_a_staged_row_without_a_value_is_refused_with_its_number(column: str) -> None:
    value = b"" if column in ("body", "properties") else ""
    with pytest.raises(errors.OptionError, match=f"row 1 has no {column}"):
        check_rows(block(**{column: [value, None]}))


def test_a_staged_routing_key_is_text_of_255_bytes_at_most() -> None:
    check_rows(block(routing_key=["k" * 255]))
    with pytest.raises(errors.OptionError, match="row 1"):
        check_rows(block(routing_key=["k", "é" * 128]))
    damaged = pa.StringArray.from_buffers(1, pa.py_buffer(struct.pack("<ii", 0, 1)), pa.py_buffer(b"\xff"))
    with pytest.raises(errors.OptionError, match="damaged"):
        check_rows(block(body=[b"x"]).set_column(1, "routing_key", damaged))


def test_staged_rows_whose_lengths_lie_are_refused_before_anybody_looks_at_them() -> None:
    damaged = pa.Array.from_buffers(
        pa.binary(), 2, [None, pa.py_buffer(struct.pack("<iii", 0, 1 << 30, 3)), pa.py_buffer(b"abc")]
    )
    with pytest.raises(errors.OptionError, match="damaged"):
        check_rows(block(body=[b"x", b"y"]).set_column(2, "body", damaged))


def test_a_routing_key_that_is_no_text_is_refused_wherever_it_leads(node: Node) -> None:
    with node.channel() as channel:
        channel.tx_select()
        for key in ("\ud800", "k" * 256):
            with pytest.raises(errors.OptionError):
                channel.publish(b"x", routing_key=key, mandatory=True)
        channel.prepare("x1")


@pytest.mark.parametrize("argument", ["x-dead-letter-exchange", "x-dead-letter-routing-key"])
@pytest.mark.parametrize("value", ["k" * 256, "\ud800"])
def test_a_queue_is_refused_whose_dead_letters_could_not_be_delivered(
    node: Node, argument: str, value: str
) -> None:
    with pytest.raises((errors.PreconditionFailed, errors.OptionError), match=argument):
        declared(node, "q", **{"x-dead-letter-exchange": "", argument: value})


def test_properties_are_no_larger_than_a_frame_at_any_listener(node: Node) -> None:
    """A consumer of AMQP would lose its connection with each message that is delivered."""
    node.channel().queue_declare("q")
    fits = Properties(headers={"x": "x" * (PROPERTIES_BYTES - 13)}).encode()
    assert len(fits) == PROPERTIES_BYTES
    larger = Properties(headers={"x": "x" * (PROPERTIES_BYTES - 12)}).encode()
    channel = node.channel()
    assert channel.publish(b"x", routing_key="q", properties=fits)
    with pytest.raises(errors.PreconditionFailed, match="at most 131052 may be"):
        channel.publish(b"x", routing_key="q", properties=larger)
    rows = pa.record_batch([[""], ["q"], [b"x"], [larger]], schema=MESSAGE_SCHEMA)
    with pytest.raises(
        errors.PreconditionFailed, match="row 0: the properties of a message have 131053 bytes"
    ):
        check_rows(rows)
    assert node.queue("q").messages == 1
