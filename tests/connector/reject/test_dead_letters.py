"""Dead letters that tasks make: the same as those of the broker, and nothing is left out in silence."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker_core.broker.message.dead_letter import DeadLetters
from broker_core.core import errors
from broker_core.core.change import InboxRow
from broker_core.core.ids import BlockId, CommitSequence
from broker_core.engine import DeadLetterRoute
from broker_core.message.field_table import Long, Timestamp
from broker_core.message.message import MESSAGE_SCHEMA
from broker_core.message.properties import Properties
from broker_core.message.x_death import Death
from broker_core.routing.exchange import DirectExchange
from broker_core.routing.exchange_types import after_delay
from connector.reject.dead_letters import HEADER, Rejection, dead_lettered
from tests.engine.bench import APP, Bench


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.local.close()


_ASKED = pa.schema(
    [
        ("queue", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("reason", pa.string()),
        ("checksum", pa.int64()),
    ]
)
NOW_US = 7_000_000

# -- the properties ------------------------------------------------------------------------------------------

short = st.none() | st.text(max_size=9)
deaths = st.fixed_dictionaries(
    {"queue": st.sampled_from(["q", "other"]), "reason": st.sampled_from(["rejected", "expired"])},
    optional={"count": st.integers(-3, 2**63 - 1) | st.text(max_size=3), "time": st.just(Timestamp(1))},
)
headers = st.fixed_dictionaries(
    {},
    optional={
        "x-death": st.lists(deaths | st.integers(0, 3), max_size=3) | st.text(max_size=3),
        "x-first-death-queue": st.text(max_size=3),
        "x-first-death-reason": st.just("maxlen"),
        "x-delivery-count": st.integers(0, 5),
        "x-reject-reason": st.text(max_size=3),
        "CC": st.lists(st.text(max_size=3) | st.integers(0, 3), max_size=3) | st.integers(0, 3),
        "user": st.none() | st.booleans() | st.binary(max_size=3) | st.just(Long(4)),
    },
)
encoded = st.one_of(
    st.just(b""),
    st.builds(
        Properties,
        content_type=short,
        headers=headers,
        delivery_mode=st.none() | st.integers(1, 2),
        expiration=st.none() | st.just("60000"),
        message_id=short,
    ).map(Properties.encode),
    st.binary(max_size=12),  # of an old data directory
)


@given(properties=encoded, exchange=st.text(max_size=3), key=st.text(max_size=3), keeps_key=st.booleans())
def test_a_rejected_message_has_the_properties_that_the_broker_gives_its_dead_letters(
    properties: bytes, exchange: str, key: str, keeps_key: bool
) -> None:
    row = InboxRow(BlockId(1), 0, CommitSequence(1), 0, exchange, key, properties, b"body", b"")
    broker = DeadLetters(
        "q", "rejected", DirectExchange("dlx"), None if keeps_key else "dead", NOW_US, lambda _row: ""
    )
    expected = Properties.decode(broker.copy(row).message.properties)
    death = Death("q", "rejected", Timestamp(NOW_US // 1_000_000), exchange, key, _expiration(properties))
    found = Properties.decode(dead_lettered(properties, death, "why", keeps_key=keeps_key))
    assert found.headers[HEADER] == "why"
    assert _without(found) == _without(expected)


def _without(found: Properties) -> Properties:
    return replace(found, headers={name: value for name, value in found.headers.items() if name != HEADER})


def _expiration(properties: bytes) -> str | None:
    try:
        return Properties.decode(properties).expiration
    except errors.ProtocolError:
        return None


# -- the messages --------------------------------------------------------------------------------------------


@pytest.fixture
def claimed(bench: Bench) -> Bench:
    """The queue "orders", whose messages 0 to 9 an app has claimed."""
    with bench.local.channel() as channel:
        channel.exchange_declare("dlx", "topic")
        channel.queue_declare("orders", arguments={"x-dead-letter-exchange": "dlx"})
        for number in range(10):
            channel.publish(b"%d" % number, routing_key="orders", properties=PROPERTIES)
    bench.claim({"orders": "start"})
    return bench


PROPERTIES = Properties(content_type="text/plain", headers={"n": Long(3)}, priority=200).encode()


def letters(bench: Bench, rows: Sequence[tuple[Any, ...]], **given: Any) -> list[dict[str, Any]]:
    columns = [
        pa.array(values, field.type) for values, field in zip(zip(*rows, strict=True), _ASKED, strict=True)
    ]
    rejection = Rejection(**{"app_id": APP, "exchange": None, "routing_key": None, **given})
    found = list(rejection.messages(bench.engine, [pa.RecordBatch.from_arrays(columns, schema=_ASKED)]))
    assert all(batch.schema.equals(MESSAGE_SCHEMA) for batch in found)
    return [row for batch in found for row in batch.to_pylist()]


def test_body_and_properties_of_a_rejected_message_are_those_that_were_published(claimed: Bench) -> None:
    rows = [("orders", 0, offset, f"reason {offset}", zlib.crc32(b"%d" % offset)) for offset in (7, 2, 3)]
    found = letters(claimed, rows)
    assert [(row["exchange"], row["routing_key"], row["body"]) for row in found] == [
        ("dlx", "orders", b"2"),
        ("dlx", "orders", b"3"),
        ("dlx", "orders", b"7"),
    ]
    for row in found:
        properties = Properties.decode(row["properties"])
        (death,) = properties.headers["x-death"]
        assert death.pop("time") > 0
        assert death == {
            "count": 1, "reason": "rejected", "queue": "orders", "exchange": "", "routing-keys": ["orders"],
        }  # fmt: skip
        assert properties.headers[HEADER] == f"reason {row['body'].decode()}"
        assert (properties.content_type, properties.priority) == ("text/plain", 200)
        assert b"\x01nl\x00\x00\x00\x00\x00\x00\x00\x03" in row["properties"], "a header keeps its type"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ("dlx", "orders")),
        ({"routing_key": "bad"}, ("dlx", "bad")),
        ({"exchange": "amq.topic"}, ("amq.topic", "orders")),
        ({"exchange": "", "routing_key": "bin"}, ("", "bin")),
    ],
)
def test_where_a_dead_letter_goes(claimed: Bench, given: dict[str, Any], expected: tuple[str, str]) -> None:
    (found,) = letters(claimed, [("orders", 0, 1, None, None)], **given)
    assert (found["exchange"], found["routing_key"]) == expected
    assert HEADER not in Properties.decode(found["properties"]).headers


def test_a_row_that_comes_twice_is_two_dead_letters(claimed: Bench) -> None:
    found = letters(claimed, [("orders", 0, 1, "a", None), ("orders", 0, 1, "b", None)])
    assert sorted(Properties.decode(row["properties"]).headers[HEADER] for row in found) == ["a", "b"]


# -- again after a delay -------------------------------------------------------------------------------------
def test_a_message_comes_again_after_a_delay_so_many_times_and_then_is_a_dead_letter(claimed: Bench) -> None:
    with claimed.local.channel() as channel:
        channel.exchange_declare("later", "x-delayed-message", arguments={"x-delayed-type": "direct"})
        channel.queue_bind("orders", "later", "orders")
        offset = 9
        for attempt in range(1, 4):
            (found,) = letters(claimed, [("orders", 0, offset, "why", None)], delay_ms=60_000, attempts=3)
            headers: Any = Properties.decode(found["properties"]).headers
            assert (headers["x-death"][0]["count"], headers["x-delay"]) == (attempt, 60_000)
            assert headers[HEADER] == "why" and headers["n"] == 3
            assert (found["exchange"], found["routing_key"]) == ("later", "orders")
            properties = after_delay(found["properties"])
            channel.publish(found["body"], "later", "orders", properties)  # as when it is due
            claimed.claim({"orders": offset + 1})
            offset += 1
    (found,) = letters(claimed, [("orders", 0, offset, "why", None)], delay_ms=60_000, attempts=3)
    headers = Properties.decode(found["properties"]).headers
    assert (headers["x-death"][0]["count"], headers["x-delay"]) == (4, -60_000)
    assert (found["exchange"], found["routing_key"], found["body"]) == ("dlx", "orders", b"9")
    (elsewhere,) = letters(
        claimed, [("orders", 0, offset, "why", None)], delay_ms=1, attempts=3, exchange="", routing_key="bin"
    )
    assert (elsewhere["exchange"], elsewhere["routing_key"]) == ("", "bin")


@pytest.mark.parametrize(
    ("type", "key", "internal"),
    [("direct", "other", False), ("fanout", "", False), ("direct", "orders", True)],
)
def test_without_an_exchange_that_leads_back_a_delay_is_one_clear_error(
    claimed: Bench, type: str, key: str, internal: bool
) -> None:
    """A fanout exchange that is bound to another queue too leads to both."""
    with claimed.local.channel() as channel:
        channel.exchange_declare(
            "later", "x-delayed-message", internal=internal, arguments={"x-delayed-type": type}
        )
        channel.queue_bind("orders", "later", key)
        channel.queue_bind("in", "later", key)
    with pytest.raises(errors.OptionError, match=r"bind the queue to it by the key 'orders'"):
        letters(claimed, [("orders", 0, 1, "why", None)], delay_ms=1, attempts=1)


@pytest.mark.parametrize("delay", [0, -1, 0.0001, 1 << 32, float("nan"), "60", True])
def test_a_delay_is_a_number_of_seconds(delay: Any) -> None:
    with pytest.raises(errors.OptionError, match="give seconds"):
        Rejection.to(APP, None, None, None, delay)


@pytest.mark.parametrize("attempts", [0, -1, 1.5, True, "5"])
def test_attempts_are_a_number(attempts: Any) -> None:
    with pytest.raises(errors.OptionError, match="how often a message comes again"):
        Rejection.to(APP, None, None, None, 1.5, attempts)


def test_a_queue_without_a_dead_letter_exchange_is_one_clear_error(claimed: Bench) -> None:
    claimed.produce(b"x")
    claimed.claim({"orders": 10, "in": "start"})
    with pytest.raises(
        errors.OptionError, match=r"queue 'in' has no dead-letter exchange.*x-dead-letter-exchange"
    ):
        letters(claimed, [("in", 0, 0, "why", None)])


@pytest.mark.parametrize(
    ("row", "error", "text"),
    [
        (("orders", 0, 99, "", None), errors.DataLoss, "message 99 of queue 'orders'"),
        (("orders", 0, 1, "", 5), errors.OptionError, "not that of message 1 of queue 'orders'"),
        (("orders", 0, None, "", None), errors.OptionError, "not a message of a queue"),
        (("out", 0, 0, "", None), errors.OptionError, "queue 'out', which app 'alerts' does not consume"),
        (("gone", 0, 0, "", None), errors.OptionError, "queue 'gone', which app 'alerts' does not consume"),
    ],
)
def test_a_row_that_is_no_message_of_the_app_is_refused(
    claimed: Bench, row: tuple[Any, ...], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        letters(claimed, [("orders", 0, 0, "", None), row])


# -- the port ------------------------------------------------------------------------------------------------


def test_the_port_knows_where_a_queue_sends_its_dead_letters(bench: Bench) -> None:
    with bench.local.channel() as channel:
        for name, more in {"own-key": {}, "new-key": {"x-dead-letter-routing-key": "k"}}.items():
            channel.queue_declare(name, arguments={"x-dead-letter-exchange": "", **more})
    route = bench.engine.dead_letter_route
    assert (route("own-key"), route("new-key")) == (DeadLetterRoute("", None), DeadLetterRoute("", "k"))
    assert route("in") is None
    with pytest.raises(errors.QueueNotFound):
        route("gone")
