"""Every Flight call with a value of a wrong type, size or form: it is refused with one clear error, and
nothing has changed.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from broker_core.core import errors
from broker_core.engine import Limit, Origin
from broker_core.flight import contract
from broker_core.launcher import Broker
from tests.amqp import strategies
from tests.server.flight.flight_calls import CALLS, TICKETS, Call, Raw, leaves, replaced
from tests.server.picture import picture

WRONG: list[Any] = [
    None,
    True,
    1.5,
    "x",
    [],
    {},
    [None],
    {"a": None},
    "a\ud800",
    2**70,
    -(2**63) - 1,
    {"$bytes": "AA=="},
    {"$bytes": 5},
    {"$bytes": [0, 1]},
]
ODD: list[Any] = [
    *WRONG,
    0,
    -1,
    2**63 - 1,
    "",
    "x" * 300,
    "x" * 2_000_000,
    float("nan"),
    float("inf"),
    [[[[]]]],
    {"": ""},
    "\0",
    "start",
]


LONG = contract.LONG_BYTES


@given(st.lists(st.sampled_from([0, 1, LONG - 1, LONG, LONG + 1, 3 * LONG])))
def test_bytes_of_any_length_cross_as_they_are(sizes: list[int]) -> None:
    values = [bytes([number]) * size for number, size in enumerate(sizes)]
    call = contract.ChannelCall("c", 1, {"bodies": values, "more": {"body": values[:1]}})
    assert contract.decode_checked(contract.ChannelCall, contract.encode(call), "call") == call


@given(strategies.TABLE)
@example(
    {"d": Decimal("-1.50"), "$decimal": [1, 2], "marked": {"$decimal": [1, 2]}, "zero": Decimal("0E-255")}
)
def test_arguments_of_every_type_of_amqp_cross_as_they_are(table: dict[str, Any]) -> None:
    found = contract.decode(dict[str, object], contract.encode(table))
    assert found == table and str(found) == str(table).replace("Timestamp", "")


@pytest.mark.parametrize(
    "decimal", [[1], [2**31, 0], [1, 256], [1, -1], [1.5, 0], ["1", 0], "1", [1, True, 1]], ids=str
)
def test_a_decimal_that_amqp_does_not_have_is_refused(raw: Raw, decimal: object) -> None:
    call = {"channel": "c", "number": 1, "arguments": {"body": {"$decimal": decimal}}}
    with pytest.raises(errors.RemoteProtocolError, match="cannot read"):
        contract.decode_checked(contract.ChannelCall, json.dumps(call).encode(), "call")


@pytest.mark.parametrize(
    "places",
    [
        [[0, 11]],
        [[11, 0], [5, 6]],
        [[-1, 1]],
        [[0, -1]],
        [[0, 2**70]],
        [[0, True]],
        [[0, 1.0]],
        [["0", 1]],
        [[0]],
        [[0, 1, 2]],
        [[0, 10], [0, 1]],  # or a short text would become any number of bytes
        [[0, 4]] * 3,
    ],
    ids=str,
)
def test_a_place_behind_the_json_is_within_it_and_taken_once(raw: Raw, places: list[Any]) -> None:
    body = {"$bytes": places[0]} if len(places) == 1 else [{"$bytes": place} for place in places]
    call = {"channel": "c", "number": 1, "arguments": {"body": body}}
    data = json.dumps(call).encode() + b"\0" + bytes(10)
    with pytest.raises(errors.RemoteProtocolError, match="cannot read"):
        contract.decode_checked(contract.ChannelCall, data, "call")
    assert isinstance(raw.action("channel.publish", data), errors.TxmqError)


def test_a_long_body_crosses_as_it_is_and_not_as_text() -> None:
    body = bytes(32 << 20)
    text = contract.encode(contract.ChannelCall("c", 1, {"body": body}))
    assert len(text) < len(body) + 200
    found: contract.ChannelCall = contract.decode_checked(contract.ChannelCall, text, "call")
    assert found.arguments["body"] == body


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with Broker.memory() as found:
        found.local.upkeep.stop()
        with found.channel() as channel:
            channel.queue_declare("in")
            channel.queue_declare("other")
            for number in range(3):
                channel.publish(str(number).encode(), routing_key="in")
        end = found.engine.claim("app", ["in"], {"in": "start"}, Limit(max_rows=1), Origin(), "fail")
        found.engine.open_batch("app", "q", 0, "fail", token="t")
        found.engine.resolve("app", {"in": "start"}, end)
        yield found


@pytest.fixture
def raw(broker: Broker) -> Iterator[Raw]:
    found = Raw(broker.url)
    yield found
    found.close_channel()


def wrong_for(value: Any) -> list[Any]:
    """Values of another type than ``value`` has."""
    if isinstance(value, dict) and "$bytes" in value:
        return [None, 5, "text", [], True]
    if isinstance(value, dict):
        return [5, "text", [1], True]
    if isinstance(value, list):
        return [5, "text", {"a": 1}, True]
    if isinstance(value, bool):
        return [0, 1, "true", []]
    if isinstance(value, int):
        return [True, "1", 1.5, [], 2**70]
    if isinstance(value, float):
        return ["1.0", True, []]
    return [5, True, [], {}, "lone \ud800"]


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        value = value[step]
    return value


def refusals() -> Iterator[tuple[Call, tuple[Any, ...], Any]]:
    for name, arguments in CALLS:
        for path in leaves(arguments):
            free = "arguments" in path[:-1] or "target" in path[:-1]  # tables take values of many types
            for by in [] if free else wrong_for(at(arguments, path)):
                if not (path == ("start", "in") and by == 5) and not (
                    path == ("end", "in") and by in ("1", "text")
                ):
                    yield (name, arguments), path, by


@pytest.mark.parametrize("call", [name for name, _ in CALLS])
def test_an_argument_of_a_wrong_type_is_refused_by_name_and_changes_nothing(
    call: str, broker: Broker, raw: Raw
) -> None:
    raw.close_channel()
    raw.call("channel.recover", {})
    before = picture(broker)
    for (name, arguments), path, by in refusals():
        if name == call:
            answer = raw.call(name, replaced(arguments, path, by))
            assert isinstance(answer, (errors.OptionError, errors.RemoteProtocolError)), (path, by, answer)
            assert str(path[0]) in answer.message and name.rpartition(".")[2] in answer.message, answer
    arguments = dict(CALLS)[call]
    assert isinstance(raw.call(call, {**arguments, "unheard of": 1}), (errors.OptionError, list))
    for bad in (None, [], 5, "text"):
        raw.close_channel()
        assert isinstance(raw.call(call, bad), errors.RemoteProtocolError) or (
            bad is None and not arguments
        ), bad
    assert picture(broker) == before or call in ("read", "stage", "adopt")
    assert broker.failure is None


@pytest.mark.parametrize(
    "call",
    [
        lambda broker: broker.engine.open_batch("app", "q", "0", "fail"),
        lambda broker: broker.engine.claim("app", ["in"], {"in": None}, Limit(), Origin(), "fail"),
        lambda broker: broker.engine.claim("app", ["in"], {"in": 0}, Limit(max_rows="1"), Origin(), "fail"),  # type: ignore[arg-type]
        lambda broker: broker.engine.claim("app", ["in"], {"in": 0}, Limit(), Origin(at="first"), "fail"),  # type: ignore[arg-type]
        lambda broker: broker.engine.commit_batch("app", "q", 0, "t", [("b", 0, 0, 1, 0)]),
        lambda broker: broker.commit(5),
        lambda broker: broker.committed(["t"]),
        lambda broker: broker.channel().queue_declare("q", durable="yes"),
        lambda broker: broker.channel().queue_bind("in", "amq.topic", "k", [1]),
        lambda broker: broker.channel().queue_bind("in", "amq.headers", "k", {1: 2}),
        lambda broker: broker.channel().publish(b"", "", "in", mandatory="yes"),
        lambda broker: broker.channel().publish(b"", ["amq.topic"], "in"),
        lambda broker: broker.channel().publish("text", "", "in"),
        lambda broker: broker.channel().get(["in"]),
        lambda broker: broker.channel().ack("1"),
        lambda broker: broker.channel().nack(True),
        lambda broker: broker.channel().reject(1, requeue="no"),
        lambda broker: broker.channel().prepare(7),
        lambda broker: broker.channel().exchange_declare("e" * 300),
    ],
)
def test_an_argument_of_a_wrong_type_is_refused_in_process_and_changes_nothing(
    call: Callable[[Any], Any], broker: Broker
) -> None:
    before = picture(broker)
    with pytest.raises(errors.OptionError, match=r"must be|allowed are"):
        call(broker)
    assert picture(broker) == before
    assert broker.failure is None


IDS = {"app_id", "query_id", "token", "branch", "channel", "xid", "user", "vhost", "queue", "exchange"}


def test_an_id_is_at_most_255_bytes_at_every_call_and_nothing_keeps_a_longer_one(broker: Broker) -> None:
    raw = Raw(broker.url)
    before, asked = picture(broker), 0
    for name, arguments in CALLS:
        for path in leaves(arguments):
            if path[-1] in IDS and "arguments" not in path and "target" not in path:
                asked += 1
                answer = raw.call(name, replaced(arguments, path, "x" * 256))
                assert isinstance(answer, (errors.OptionError, errors.RemoteProtocolError)), (name, path)
                assert "must be text of at most 255 bytes" in answer.message, (name, path, answer)
    for ticket in TICKETS:
        for path in (path for path in leaves(ticket) if path[-1] in IDS):
            wrong = raw.get(json.dumps(replaced(ticket, path, "x" * 256)).encode())
            assert isinstance(wrong, errors.RemoteProtocolError), path
    opened = raw.action(
        "channel.open", json.dumps({"channel": "x" * 256, "number": 0, "arguments": {}}).encode()
    )
    assert isinstance(opened, errors.RemoteProtocolError)
    raw.close_channel()
    assert asked > 40
    assert picture(broker) == before


def odd(source: random.Random, value: Any) -> Any:
    """``value`` with something in it left out or replaced."""
    for _ in range(source.choice((1, 1, 1, 2, 3))):
        paths = list(leaves(value))
        if not paths:
            return source.choice(ODD)
        path = source.choice(paths)
        if source.random() < 0.1:
            parent = at(value, path[:-1])
            copy = dict(parent) if isinstance(parent, dict) else list(parent)
            del copy[path[-1]]
            value = replaced(value, path[:-1], copy)
        else:
            value = replaced(value, path, source.choice(ODD))
    return value


def attacked(broker: Broker, seed: int, rounds: int) -> int:
    """``rounds`` calls, odd or in an odd order; how many were refused."""
    source = random.Random(seed)
    raw = Raw(broker.url)
    refused = 0
    for number in range(rounds):
        name, arguments = source.choice(CALLS)
        before = (
            picture(broker)
            if number % 5 == 0 and not name.startswith(("channel", "engine.claim", "read"))
            else None
        )
        if source.random() < 0.1:
            answer: Any = raw.get(json.dumps(odd(source, source.choice(TICKETS))).encode())
        else:
            answer = raw.call(name, odd(source, arguments) if source.random() < 0.8 else arguments)
        if isinstance(answer, errors.TxmqError):
            refused += 1
            assert type(answer) is not errors.TxmqError and not isinstance(answer, errors.InternalFault), (
                name,
                arguments,
                answer,
            )
            assert before is None or before == picture(broker), (name, answer)
            if isinstance(
                answer, (errors.TransactionState, errors.ConnectionFailed, errors.RemoteProtocolError)
            ):
                raw.close_channel()
        assert broker.failure is None, (name, arguments, answer)
    raw.close_channel()
    return refused


def attack(seed: int, rounds: int) -> None:
    with Broker.memory() as broker:
        broker.local.upkeep.stop()
        with broker.channel() as channel:
            for name in ("in", "other"):
                channel.queue_declare(name)
        assert attacked(broker, seed, rounds) > rounds / 4
        with broker.channel() as channel:
            channel.queue_declare("after")
            channel.publish(b"1", routing_key="after")
            assert channel.get("after") is not None


def test_no_odd_value_of_any_flight_call_stops_the_broker_or_changes_what_it_is_refused(seed: int) -> None:
    attack(seed, 1_500)


@pytest.mark.soak
def test_odd_values_of_flight_calls_for_long(seed: int, rounds: int) -> None:
    for number in range(rounds):
        attack(seed + number, 3_000)
