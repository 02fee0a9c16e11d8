"""What the route of one message costs: its parts are read once, and the steps through bindings have a bound."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pytest

from broker_core.broker.topology.topology import Topology
from broker_core.core.change import Change
from broker_core.core.errors import PreconditionFailed
from broker_core.message.message import MESSAGE_SCHEMA
from broker_core.message.properties import Properties
from broker_core.routing import search
from broker_core.routing.carbon_copy import copies_of_rows
from broker_core.routing.search import Search
from broker_core.routing.topic_patterns import TopicPatterns
from tests.routing.test_exchange import topology
from tests.steps import steps

KEY = ".".join(["b"] * 120)
LATE = ".".join(["a"] * 120)
COPIES = Properties(headers={"CC": [f"{KEY}.{number}" for number in range(64)]}).encode()


def chain(count: int, kind: str, key: str, arguments: dict[str, object] | None = None) -> Topology:
    """Exchanges bound to each other, a queue behind the first and one behind the last."""
    found = topology("first", "last")
    for number in range(count):
        found.declare_exchange(Change(), f"x{number}", kind)
    for number in range(count - 1):
        found.bind_exchange(Change(), f"x{number + 1}", f"x{number}", key, arguments)
    found.bind(Change(), "first", "x0", key, arguments)
    found.bind(Change(), "last", f"x{count - 1}", key, arguments)
    return found


def test_headers_are_decoded_once_whatever_number_of_exchanges_looks_at_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = chain(30, "headers", "", {"k": 1, "x-match": "any"})
    decoded: list[bytes] = []
    decode = Properties.decode
    monkeypatch.setattr(Properties, "decode", lambda data: decoded.append(data) or decode(data))
    properties = Properties(headers={"k": 1}).encode()
    assert [queue.name for queue in found.route("x0", "", properties)] == ["first", "last"]
    assert decoded == [properties]


def test_a_pattern_between_any_words_takes_no_steps_for_each_word_of_the_key() -> None:
    patterns: TopicPatterns[int, int] = TopicPatterns()
    patterns.add("#.b.#", 1, 1)
    cost = []
    paid: list[int] = []
    for key in ("b.b", KEY, "a.a.b.c", f"{LATE}.b.c"):
        assert patterns.matching(key, paid.append) == [1]
        cost.append(steps(lambda key=key: patterns.matching(key, int)))
    assert cost[0] == cost[1] and cost[2] == cost[3]
    assert min(paid) > 0, "what is looked at is paid for"


@pytest.mark.parametrize(
    ("kind", "key", "arguments"),
    [
        ("topic", "#.b.#", None),
        ("direct", KEY, None),
        ("fanout", "", None),
        ("headers", "", {"k": 1, "x-match": "any"}),
    ],
)
def test_a_message_that_is_too_dear_costs_the_bound_and_is_refused(
    kind: str, key: str, arguments: dict[str, object] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "MOST", 1_000)
    properties, cost = Properties(headers={"k": 1, "CC": [KEY] * 64}).encode(), []
    for count in (60, 120, 240):
        source = chain(count, kind, key, arguments).exchange("x0")

        def publish(source: object = source) -> None:
            with pytest.raises(PreconditionFailed, match="takes more than 1,000 steps") as raised:
                source.route_copies(KEY, properties)  # type: ignore[attr-defined]
            assert len(str(raised.value)) <= 255

        publish()  # what is done once
        cost.append(steps(publish))
        assert source.cached(KEY) is None
    assert max(cost) < 1.1 * min(cost) < 10_000


def test_a_block_of_rows_is_refused_by_the_same_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "MOST", 1_000)
    found = chain(60, "topic", "#.b.#")
    for properties in (b"", COPIES):
        columns = {"exchange": "x0", "routing_key": KEY, "body": b"", "properties": properties}
        rows = pa.RecordBatch.from_pylist(
            [{name: columns.get(name) for name in MESSAGE_SCHEMA.names}], MESSAGE_SCHEMA
        )
        copies, rows = copies_of_rows(rows)
        with pytest.raises(PreconditionFailed, match="steps through bindings"):
            found.route_block(rows, copies)


def test_one_that_was_accepted_before_goes_as_far_as_the_bound_and_its_route_is_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(search, "MOST", 1_000)
    source, one = chain(60, "topic", "#.b.#").exchange("x0"), Search(refuses=False)
    for number in (1, 2):
        assert [queue.name for queue in source.route(KEY, search=one)] == ["first"]
        assert not one.complete and number * 1_000 < one.steps < number * 1_100
    assert source.cached(KEY) is None
    with pytest.raises(PreconditionFailed):
        source.route(KEY)


def fanned(count: int) -> tuple[Topology, str, Sequence[str]]:
    names = [f"q{number}" for number in range(count)]
    found = topology(*names)
    for name in names:
        found.bind(Change(), name, "amq.fanout", "")
        found.bind(Change(), name, "amq.topic", "#")
    return found, "amq.topic", names


def rooted(count: int) -> tuple[Topology, str, Sequence[str]]:
    found = topology("q")
    found.declare_exchange(Change(), "root", "topic")
    for number in range(count):
        found.declare_exchange(Change(), f"x{number}", "topic")
        found.bind_exchange(Change(), f"x{number}", "root", "#")
        found.bind(Change(), "q", f"x{number}", f"user.{number}.#")
    return found, "root", ["q"]


def chained(count: int) -> tuple[Topology, str, Sequence[str]]:
    return chain(count, "topic", "#"), "x0", ["first", "last"]


@pytest.mark.parametrize(("make", "count"), [(fanned, 4_096), (rooted, 1_000), (chained, 1_000)])
def test_what_people_build_stays_far_from_the_bound(make: object, count: int) -> None:
    found, exchange, names = make(count)  # type: ignore[operator]
    one = Search()
    assert [queue.name for queue in found.exchange(exchange).route("user.7.a", search=one)] == names
    assert one.steps < search.MOST // 3
