from __future__ import annotations

import re
import sys
import time
import tracemalloc
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from broker_core.broker.topology.topology import Topology
from broker_core.core import errors
from broker_core.core.block import Blocks, selected_rows
from broker_core.core.change import Change, Numbers
from broker_core.message.message import MESSAGE_SCHEMA
from broker_core.message.properties import Properties
from broker_core.routing import column
from broker_core.routing.carbon_copy import copies_of_rows


def no_block(block_id: int) -> pa.RecordBatch:
    raise AssertionError(block_id)


def topology(*queues: str) -> Topology:
    blocks = Blocks(lambda: 1, no_block)
    found = Topology(blocks, Numbers(blocks.undo))
    for name in queues:
        found.declare_queue(Change(), name)
    return found


def names(found: Topology, exchange: str, key: str = "", properties: bytes = b"") -> list[str]:
    return [queue.name for queue in found.route(exchange, key, properties)]


def test_default_exchange_routes_to_the_queue_of_that_name() -> None:
    found = topology("a", "b")
    assert names(found, "", "b") == ["b"]
    assert names(found, "", "nowhere") == []


def test_direct_exchange_routes_by_the_equal_key_and_each_queue_once() -> None:
    found = topology("a", "b")
    for queue, key in (("a", "red"), ("a", "blue"), ("b", "red")):
        found.bind(Change(), queue, "amq.direct", key)
    found.bind(Change(), "a", "amq.direct", "red", {"other": 1})
    assert names(found, "amq.direct", "red") == ["a", "b"]
    assert names(found, "amq.direct", "blue") == ["a"]
    found.unbind(Change(), "b", "amq.direct", "red")
    assert names(found, "amq.direct", "red") == ["a"], "the cached route is gone with its binding"


def test_fanout_exchange_routes_to_every_bound_queue() -> None:
    found = topology("a", "b", "c")
    found.bind(Change(), "a", "amq.fanout", "x")
    found.bind(Change(), "c", "amq.fanout")
    assert names(found, "amq.fanout", "any") == ["a", "c"]


WORD = st.sampled_from(["a", "b", "cc", ""])
PATTERN = st.lists(st.one_of(WORD, st.sampled_from(["*", "#"])), min_size=1, max_size=5).map(".".join)
KEY = st.lists(WORD, min_size=1, max_size=5).map(".".join)


def naive(pattern: str, key: str) -> bool:
    """Topic matching by a regular expression over "word." repeated; an empty key or pattern has no words, as
    in RabbitMQ.
    """
    parts = {"*": r"[^.]*\.", "#": r"(?:[^.]*\.)*"}
    words = pattern.split(".") if pattern else []
    return (
        re.fullmatch(
            "".join(parts.get(word, re.escape(word) + r"\.") for word in words), key + "." if key else ""
        )
        is not None
    )


@given(st.lists(PATTERN, max_size=6), KEY)
@example(["*", "#", "", "#.#", "a.#", "#.*"], "")
def test_topic_exchange_agrees_with_a_regular_expression(patterns: list[str], key: str) -> None:
    found = topology(*(f"q{number}" for number in range(len(patterns))))
    for number, pattern in enumerate(patterns):
        found.bind(Change(), f"q{number}", "amq.topic", pattern)
    expected = [f"q{number}" for number, pattern in enumerate(patterns) if naive(pattern, key)]
    assert names(found, "amq.topic", key) == expected
    assert names(found, "amq.topic", key) == expected, "from the cache too"


@pytest.mark.parametrize(
    ("arguments", "headers", "matches"),
    [
        ({"a": 1, "b": "x"}, {"a": 1, "b": "x", "c": 2}, True),
        ({"a": 1, "b": "x"}, {"a": 1}, False),
        ({"x-match": "any", "a": 1, "b": "x"}, {"a": 1}, True),
        ({"x-match": "any", "a": 1}, {"a": 2}, False),
        ({"x-match": "all", "x-kind": "k", "a": 1}, {"a": 1}, True),
        ({"x-match": "all-with-x", "x-kind": "k", "a": 1}, {"a": 1}, False),
        ({"x-match": "all-with-x", "x-kind": "k"}, {"x-kind": "k"}, True),
        ({"x-match": "any-with-x", "x-kind": "k", "a": 1}, {"x-kind": "k"}, True),
        ({"x-match": "any", "x-kind": "k"}, {"x-kind": "k"}, False),
        ({"a": None}, {"a": "whatever"}, True),
        ({}, {"a": 1}, True),
        ({"a": 1}, {"a": True}, False),
        ({"a": True}, {"a": 1}, False),
        ({"a": 1}, {"a": "1"}, False),
        ({"a": {"b": [1]}}, {"a": {"b": [1]}}, True),
        ({"a": None}, {}, False),
        ({"x-match": "any"}, {"a": 1}, False),
    ],
)
def test_headers_exchange_matches_by_x_match(
    arguments: dict[str, object], headers: dict[str, object], matches: bool
) -> None:
    found = topology("q")
    found.bind(Change(), "q", "amq.match", "", arguments)
    assert names(found, "amq.match", "", Properties(headers=headers).encode()) == (["q"] if matches else [])


@pytest.mark.parametrize(
    ("match", "text"),
    [
        ("some", 'Invalid x-match field value <<"some">>; expected all, any, all-with-x, or any-with-x'),
        (5, "Invalid x-match field type signedint (value 5); expected longstr"),
    ],
)
def test_an_unknown_x_match_is_refused_in_rabbitmqs_words_and_binds_nothing(match: object, text: str) -> None:
    found = topology("q")
    with pytest.raises(errors.PreconditionFailed) as caught:
        found.bind(Change(), "q", "amq.headers", "", {"x-match": match})
    assert caught.value.summary == text
    assert not found.exchange("amq.headers").bindings
    found.bind(Change(), "q", "amq.direct", "", {"x-match": match})  # only a headers exchange looks at it


def test_a_routed_column_says_row_by_row_what_a_single_message_would_get() -> None:
    found = topology("all", "some", "head", "by-header")
    found.bind(Change(), "all", "amq.topic", "#")
    found.bind(Change(), "some", "amq.topic", "*.b")
    found.bind(Change(), "head", "amq.direct", "first")
    found.bind(Change(), "by-header", "amq.headers", "", {"h": 1})
    marked = Properties(headers={"h": 1}).encode()
    rows = [("amq.direct", "first", b"")] * 3
    rows += [("amq.topic", key, b"") for key in ("a.b", "a.c", "x.b", "b")] * 5
    rows += [
        ("amq.headers", "k", marked),
        ("amq.headers", "k", b""),
        ("", "all", b""),
        ("", "lost", b""),
        ("amq.direct", "none", b""),
    ]
    exchanges, keys, properties = (pa.array(list(column)) for column in zip(*rows, strict=True))
    routed = found.route_column(exchanges, keys, properties)
    expected: dict[int, list[int]] = {}
    lost = []
    for row, (exchange, key, encoded) in enumerate(rows):
        queues = found.route(exchange, key, encoded)
        for queue in queues:
            expected.setdefault(queue.queue_id, []).append(row)
        if not queues:
            lost.append((exchange, key))
    assert {
        queue_id: list(map(int, selected_rows(selection)))
        for queue_id, selection in routed.selections.items()
    } == expected
    assert {queue_id: selection.rows for queue_id, selection in routed.selections.items()} == {
        key: len(value) for key, value in expected.items()
    }
    assert (routed.unroutable, routed.examples) == (len(lost), lost[:3])
    assert routed.selections[found.queue("head").queue_id] == (0, 3, b"")


COPIED: tuple[dict[str, Any], ...] = (
    {},
    {"CC": ["first"]},
    {"CC": ["a.b", "all"], "BCC": ["lost"]},
    {"BCC": ["x.b", 7]},
    {"CC": []},
    {"CC": ["none"], "h": 1},
    {"h": 1},
)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["amq.direct", "amq.topic", "amq.headers", "", "other"]),
            st.sampled_from(["first", "a.b", "all", "none"]),
            st.sampled_from(COPIED),
        ),
        max_size=20,
    )
)
def test_rows_with_copies_are_routed_and_delivered_as_single_messages_are(rows: list[Any]) -> None:
    found = topology("all", "some", "head", "by-header", "rest")
    found.declare_exchange(Change(), "last", "fanout")
    found.declare_exchange(Change(), "other", "direct", arguments={"alternate-exchange": "last"})
    found.bind(Change(), "rest", "last", "")
    found.bind(Change(), "all", "amq.topic", "#.all")
    found.bind(Change(), "some", "amq.topic", "*.b")
    found.bind(Change(), "some", "other", "first")
    found.bind(Change(), "head", "amq.direct", "first")
    found.bind(Change(), "by-header", "amq.headers", "", {"h": 1})
    given_rows = [
        (exchange, key, b"", Properties(headers=headers).encode()) for exchange, key, headers in rows
    ]
    columns = list(zip(*given_rows, strict=True)) or [()] * 4
    block = pa.RecordBatch.from_arrays(
        [pa.array(list(column), field.type) for column, field in zip(columns, MESSAGE_SCHEMA, strict=True)],
        schema=MESSAGE_SCHEMA,
    )
    copies, kept = copies_of_rows(block)
    routed = found.route_block(kept, copies)
    expected: dict[int, list[int]] = {}
    lost, delivered = [], []
    for row, (exchange, key, _, encoded) in enumerate(given_rows):
        queues, properties = found.route_copies(exchange, key, encoded)
        delivered.append(properties)
        for queue in queues:
            expected.setdefault(queue.queue_id, []).append(row)
        if not queues:
            lost.append((exchange, key))
    assert {
        number: list(map(int, selected_rows(rows))) for number, rows in routed.selections.items()
    } == expected
    assert (routed.unroutable, routed.examples) == (len(lost), lost[:3])
    assert kept.column("properties").to_pylist() == delivered


ALIKE = (["first"] * 9, ["first"] * 8 + ["thirs"], ["first", "", "firstfirst"], ["", "all", ""], [""] * 9)


@given(st.sampled_from(["amq.direct", "amq.topic", ""]), st.sampled_from(ALIKE), st.integers(0, 9))
def test_rows_that_are_alike_are_routed_as_others_are(exchange: str, keys: list[str], skipped: int) -> None:
    found = topology("all", "first")
    found.bind(Change(), "all", "amq.topic", "#")
    found.bind(Change(), "first", "amq.direct", "first")
    exchanges, properties = pa.array([exchange] * len(keys)), pa.array([b""] * len(keys), pa.binary())
    routed = found.route_column(*(each.slice(skipped) for each in (exchanges, pa.array(keys), properties)))
    expected: dict[int, list[int]] = {}
    for row, key in enumerate(keys[skipped:]):
        for queue in found.route(exchange, key, b""):
            expected.setdefault(queue.queue_id, []).append(row)
    assert {
        number: list(map(int, selected_rows(rows))) for number, rows in routed.selections.items()
    } == expected
    lost = [(exchange, key) for key in keys[skipped:] if not found.route(exchange, key, b"")]
    assert (routed.unroutable, routed.examples) == (len(lost), lost[:3])


class Counted:
    """A lock that counts the steps that are made while it is held."""

    def __init__(self) -> None:
        self.longest = self.times = 0
        self._steps = 0

    def __enter__(self) -> None:
        self._steps = 0
        self.times += 1
        sys.settrace(self._line)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        self.longest = max(self.longest, self._steps)

    def _line(self, _frame: object, event: str, _argument: object) -> Any:
        self._steps += event == "line"
        return self._line


@pytest.mark.parametrize("copied", [False, True])
def test_many_different_keys_of_a_part_are_looked_up_in_pieces(copied: bool) -> None:
    """Others are served between them."""
    found = topology("a", "b")
    found.bind(Change(), "a", "amq.topic", "#.a.#")
    found.bind(Change(), "b", "amq.topic", "*.3")
    longest = []
    for rows in (500, 2_000):
        keys = [f"k.{number}" for number in range(rows)]
        headers = [{"CC": [f"{key}.{each}" for each in range(5)]} if copied else {} for key in keys]
        block = pa.RecordBatch.from_arrays(
            [
                pa.array(["amq.topic"] * rows),
                pa.array(keys),
                pa.array([b""] * rows, pa.binary()),
                pa.array([Properties(headers=each).encode() for each in headers], pa.binary()),
            ],
            schema=MESSAGE_SCHEMA,
        )
        copies, kept = copies_of_rows(block)
        assert (copies is not None) is copied
        held = Counted()
        routed = found.route_block(kept, copies, held)
        assert routed.unroutable == rows - 1 and held.times > rows // 100
        longest.append(held.longest)
    assert longest[1] < longest[0] * 1.2 + 50, f"{longest} steps for 500 and 2,000 keys"


def test_rows_that_reach_very_many_queues_take_room_for_what_they_reach_and_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queues = [f"q{number}" for number in range(300)]
    found = topology(*queues)
    found.declare_exchange(Change(), "all", "topic")
    for queue in queues:
        found.bind(Change(), queue, "all", "#")
    rows = 20_000
    properties = pa.nulls(rows, pa.binary())
    keys = pa.array([f"q{number % 300}" for number in range(rows)])
    tracemalloc.start()
    routed = found.route_column("", keys, properties)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sum(each.rows for each in routed.selections.values()) == rows
    assert peak < 3_000_000  # a table of queues and rows would take 6 MB
    assert all(
        each == (0, rows, b"") for each in found.route_column("all", keys, properties).selections.values()
    )
    monkeypatch.setattr(column, "SELECTED_BYTES", 100_000)
    with pytest.raises(errors.TransactionTooLarge, match="the rows of one part reach 41 queues"):
        found.route_column("", keys, properties)
    for number in range(20):
        found.unbind(Change(), queues[number], "all", "#")
        found.bind(Change(), queues[number], "all", queues[number])
    monkeypatch.setattr(column, "REACHED", 2_000)
    with pytest.raises(errors.TransactionTooLarge, match="queues by different keys"):
        found.route_column("all", keys, properties)


def test_a_million_rows_with_few_keys_are_routed_in_a_fraction_of_a_second() -> None:
    found = topology("a", "b", "c")
    for queue, key in (("a", "k.#"), ("b", "*.3"), ("c", "k.7")):
        found.bind(Change(), queue, "amq.topic", key)
    rows = 1_000_000
    keys = pa.array([f"k.{number}" for number in range(10)]).take(pa.array(np.arange(rows) % 10))
    started = time.perf_counter()
    routed = found.route_column("amq.topic", keys, pa.nulls(rows, pa.binary()))
    assert time.perf_counter() - started < 1.0  # measured 0.03 s alone on one core
    assert sorted(selection.rows for selection in routed.selections.values()) == [
        rows // 10,
        rows // 10,
        rows,
    ]
