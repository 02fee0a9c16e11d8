"""Bindings from exchange to exchange, and alternate exchanges: where a message goes, also from the cache and
by columns.
"""

from __future__ import annotations

import time

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from broker_core.broker.topology.topology import Topology
from broker_core.core.block import selected_rows
from broker_core.core.change import Change
from broker_core.message.properties import Properties
from tests.routing.test_exchange import names, topology


def test_a_message_reaches_a_queue_over_exchanges_once_and_by_the_key_it_was_published_with() -> None:
    found = topology("q", "r")
    for name, kind in (("middle", "direct"), ("end", "topic")):
        found.declare_exchange(Change(), name, kind, internal=True)
    found.bind_exchange(Change(), "middle", "amq.topic", "a.*")
    found.bind_exchange(Change(), "end", "amq.topic", "#")
    found.bind(Change(), "q", "middle", "a.b")
    found.bind(Change(), "q", "end", "#.b")
    found.bind(Change(), "r", "end", "x.#")
    assert names(found, "amq.topic", "a.b") == ["q"]
    assert names(found, "amq.topic", "x.b") == ["q", "r"]
    assert names(found, "amq.topic", "a.c") == []


def test_a_cycle_of_exchanges_ends_and_each_queue_gets_the_message_once() -> None:
    found = topology("a", "b")
    for name in ("one", "two"):
        found.declare_exchange(Change(), name, "fanout")
    found.bind_exchange(Change(), "two", "one")
    found.bind_exchange(Change(), "one", "two")
    found.bind_exchange(Change(), "one", "one")
    found.bind(Change(), "a", "one")
    found.bind(Change(), "b", "two")
    assert names(found, "one") == names(found, "two") == ["a", "b"]
    found.delete_exchange(Change(), "one")
    assert names(found, "two") == ["b"]


def test_a_change_far_down_is_seen_at_once_by_routes_that_were_cached_before() -> None:
    found = topology("q", "r")
    for name in ("one", "two"):
        found.declare_exchange(Change(), name, "direct")
    source = found.exchange("amq.direct")
    found.bind_exchange(Change(), "one", "amq.direct", "k")
    found.bind_exchange(Change(), "two", "one", "k")
    assert names(found, "amq.direct", "k") == [] and source.cached("k") == ()
    found.bind(Change(), "q", "two", "k")
    assert source.cached("k") is None and names(found, "amq.direct", "k") == ["q"]
    assert source.cached("k") == (found.queue("q"),)
    found.declare_queue(Change(), "s")
    assert source.cached("k") is not None, "what has nothing to do with it empties nothing"
    found.unbind_exchange(Change(), "two", "one", "k")
    assert source.cached("k") is None and names(found, "amq.direct", "k") == []
    found.bind(Change(), "r", "two", "k")
    assert source.cached("k") == (), "it leads there no more"


def test_an_alternate_exchange_gets_what_no_binding_matched_and_only_that() -> None:
    found = topology("q", "rest")
    found.declare_exchange(Change(), "main", "direct", arguments={"alternate-exchange": "rest"})
    found.bind(Change(), "q", "main", "k")
    assert (names(found, "main", "k"), names(found, "main", "other")) == (["q"], []), (
        "an alternate that does not exist takes nothing"
    )
    found.declare_exchange(Change(), "rest", "fanout")
    found.bind(Change(), "rest", "rest")
    assert (names(found, "main", "k"), names(found, "main", "other")) == (["q"], ["rest"])
    found.unbind(Change(), "q", "main", "k")
    assert names(found, "main", "k") == ["rest"]
    found.delete_exchange(Change(), "rest")
    assert names(found, "main", "k") == []
    found.declare_exchange(Change(), "rest", "direct")
    found.bind(Change(), "q", "rest", "k")
    assert names(found, "main", "k") == ["q"], "a new exchange of that name takes its place"
    found.delete_exchange(Change(), "main")
    assert not found.exchange("rest").upstream


def test_a_binding_that_matches_counts_though_the_exchange_behind_it_leads_nowhere_and_each_exchange_has_its_own_alternate() -> (
    None
):
    found = topology("first", "second")
    found.declare_exchange(Change(), "main", "direct", arguments={"alternate-exchange": "rest-1"})
    found.declare_exchange(Change(), "behind", "direct", arguments={"alternate-exchange": "rest-2"})
    for name, queue in (("rest-1", "first"), ("rest-2", "second")):
        found.declare_exchange(Change(), name, "fanout")
        found.bind(Change(), queue, name)
    found.bind_exchange(Change(), "behind", "main", "k")
    assert names(found, "main", "k") == ["second"]
    assert names(found, "main", "other") == ["first"]


def test_an_exchange_that_is_bound_and_alternate_stays_the_one_when_it_ceases_to_be_the_other() -> None:
    found = topology("q")
    found.declare_exchange(Change(), "rest", "fanout")
    found.declare_exchange(Change(), "main", "direct", arguments={"alternate-exchange": "rest"})
    found.bind_exchange(Change(), "rest", "main", "k")
    found.unbind_exchange(Change(), "rest", "main", "k")
    assert names(found, "main", "k") == []
    found.bind(Change(), "q", "rest")
    assert names(found, "main", "k") == ["q"]
    found.bind_exchange(Change(), "rest", "main", "k")
    found.exchange("main").divert(None)
    assert (names(found, "main", "k"), names(found, "main", "other")) == (["q"], [])
    found.unbind(Change(), "q", "rest")
    assert names(found, "main", "k") == []


def test_alternates_in_a_cycle_end() -> None:
    found = topology("q")
    for name, alternate in (("one", "two"), ("two", "one"), ("self", "self")):
        found.declare_exchange(Change(), name, "direct", arguments={"alternate-exchange": alternate})
    assert names(found, "one", "k") == names(found, "self", "k") == []
    found.bind(Change(), "q", "two", "k")
    assert names(found, "one", "k") == ["q"]
    found.delete_exchange(Change(), "self")
    found.delete_exchange(Change(), "two")
    assert names(found, "one", "k") == []


def test_the_default_exchange_as_an_alternate_finds_the_queue_of_that_name_as_it_is_now() -> None:
    found = topology()
    found.declare_exchange(Change(), "main", "direct", arguments={"alternate-exchange": ""})
    assert names(found, "main", "q") == []
    found.declare_queue(Change(), "q")
    assert names(found, "main", "q") == ["q"]
    found.delete_queue(Change(), "q")
    assert names(found, "main", "q") == []


def test_routes_that_reach_a_headers_exchange_are_never_cached_by_key() -> None:
    found = topology("q")
    found.bind_exchange(Change(), "amq.headers", "amq.topic", "a.#", {"h": 1})
    found.bind(Change(), "q", "amq.headers", "", {"h": 1})
    marked = Properties(headers={"h": 1}).encode()
    topic = found.exchange("amq.topic")
    assert names(found, "amq.topic", "a.b") == [] and names(found, "amq.topic", "a.b", marked) == ["q"]
    assert topic.cached("a.b") is None and topic.by_headers
    found.unbind_exchange(Change(), "amq.headers", "amq.topic", "a.#", {"h": 1})
    assert (
        names(found, "amq.topic", "a.b", marked) == [] and topic.cached("a.b") == () and not topic.by_headers
    )


EXCHANGES = {"d": "direct", "f": "fanout", "t": "topic", "h": "headers", "e": "direct"}
KEYS = ["a", "b", "a.b"]
EDGE = st.tuples(
    st.sampled_from(list(EXCHANGES)),
    st.sampled_from([*EXCHANGES, "q0", "q1", "q2"]),
    st.sampled_from([*KEYS, "a.#", "*"]),
)
ALTERNATES = st.dictionaries(
    st.sampled_from(list(EXCHANGES)), st.sampled_from([*EXCHANGES, "", "none"]), max_size=3
)
MARKS = [b"", Properties(headers={"h": 1}).encode(), Properties(headers={"h": 2}).encode()]


def matches(kind: str, pattern: str, key: str, properties: bytes) -> bool:
    if kind == "topic":
        return (
            pattern == key
            or (pattern == "a.#" and key.startswith("a"))
            or (pattern == "*" and "." not in key)
        )
    return (
        kind == "fanout"
        or (kind == "direct" and pattern == key)
        or (kind == "headers" and properties == MARKS[1])
    )


def naive(
    edges: list[tuple[str, str, str]], alternates: dict[str, str], start: str, key: str, properties: bytes
) -> set[str]:
    """Where a message goes, from the definition, without caches or indexes."""
    reached, seen, pending = set(), {start}, [start]
    while pending:
        name = pending.pop()
        if name == "":
            found = [key] if key.startswith("q") else []
        else:
            found = [
                to
                for source, to, pattern in edges
                if source == name and matches(EXCHANGES[name], pattern, key, properties)
            ]
            if not found and name in alternates:
                found = [alternates[name]]
        for to in found:
            if to.startswith("q"):
                reached.add(to)
            elif to != "none" and to not in seen:
                seen.add(to)
                pending.append(to)
    return reached


def declared(alternates: dict[str, str]) -> Topology:
    found = topology("q0", "q1", "q2")
    for name, kind in EXCHANGES.items():
        arguments = {"alternate-exchange": alternates[name]} if name in alternates else {}
        found.declare_exchange(Change(), name, kind, arguments=arguments)
    return found


@given(st.lists(st.tuples(st.booleans(), EDGE), max_size=25), ALTERNATES)
def test_after_any_binds_and_unbinds_every_route_is_what_the_definition_says(
    steps: list[tuple[bool, tuple[str, str, str]]], alternates: dict[str, str]
) -> None:
    found = declared(alternates)
    edges: list[tuple[str, str, str]] = []
    rows = [(name, key, mark) for name in EXCHANGES for key in [*KEYS, "q0"] for mark in MARKS]
    for binds, edge in steps:
        source, to, pattern = edge
        act = (
            (found.bind if binds else found.unbind)
            if to.startswith("q")
            else (found.bind_exchange if binds else found.unbind_exchange)
        )
        act(Change(), to, source, pattern, {"h": 1})
        if binds and edge not in edges:
            edges.append(edge)
        elif not binds and edge in edges:
            edges.remove(edge)
        for name, key, mark in rows:
            assert set(names(found, name, key, mark)) == naive(edges, alternates, name, key, mark)
    exchanges, keys, marks = (pa.array(list(column)) for column in zip(*rows, strict=True))
    routed = found.route_column(exchanges, keys, marks)
    for queue in found.queues.values():
        selection = routed.selections.get(queue.queue_id)
        expected = [row for row, one in enumerate(rows) if queue.name in naive(edges, alternates, *one)]
        assert ([] if selection is None else list(map(int, selected_rows(selection)))) == expected


def test_binding_thousands_of_queues_with_a_publish_in_between_stays_fast() -> None:
    count = 3000
    found = topology(*(f"q{number}" for number in range(count)))
    started = time.thread_time()
    for number in range(count):
        found.bind(Change(), f"q{number}", "amq.direct", f"k{number}")
        assert names(found, "amq.direct", f"k{number}") == [f"q{number}"]
    assert time.thread_time() - started < 2.0  # measured below 0.1 s alone on one core
