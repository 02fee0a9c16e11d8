"""What a command costs: it grows with what the command itself names and moves, and not with what others have
declared (``tests/steps.py`` counts).

Not here: what a pattern of a permission costs (``test_users.py``), rows of Arrow
(``tests/server/flight/test_staging.py``).
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pytest

from broker_core.arrow.parts import stream_of
from broker_core.broker import channel as broker_channel
from broker_core.broker.channel import Channel
from broker_core.broker.topology.topology import Topology
from broker_core.core.change import Author, Change
from broker_core.core.errors import NotAllowed, PreconditionFailed
from broker_core.core.records import BindingRecord
from broker_core.engine import Engine, ReadTicket
from broker_core.flight import contract
from broker_core.message.properties import Properties
from broker_core.node import channel as channel_module
from broker_core.node.channel import LocalChannel
from broker_core.routing import refusals, route_cache
from broker_core.routing.header_index import MATCHES
from broker_core.routing.memory import bytes_of
from broker_core.routing.topic_patterns import TopicPatterns
from tests.broker.conftest import Node
from tests.steps import steps

FEW, MANY = 40, 640
HEADERS = Properties(headers={"kind": "order", "number": "n7", "other": 1}).encode()

Prepare = Callable[[LocalChannel, int], None]
Command = Callable[[LocalChannel], object]


def queues(channel: LocalChannel, count: int) -> None:
    for number in range(count):
        channel.queue_declare(f"q{number}")


def topic_bindings(channel: LocalChannel, count: int) -> None:
    channel.exchange_declare("x", "topic")
    queues(channel, 10)
    for number in range(count):
        channel.queue_bind(f"q{number % 10}", "x", f"user.{number}.#")


def headers_bindings(channel: LocalChannel, count: int) -> None:
    channel.exchange_declare("x", "headers")
    queues(channel, 10)
    for number in range(count):
        wanted = {"kind": "order", "number": f"n{number}", "x-match": "any" if number % 2 else "all"}
        if number % 2:
            del wanted["kind"]
        channel.queue_bind(f"q{number % 10}", "x", "", wanted)


def exchanges(channel: LocalChannel, count: int) -> None:
    for number in range(count):
        channel.exchange_declare(f"x{number}", "fanout")


def exchanges_before(channel: LocalChannel, count: int) -> None:
    """Messages that nothing else matches in one of these go to ``x``, but none came."""
    channel.exchange_declare("x", "topic")
    queues(channel, 1)
    for number in range(count):
        channel.exchange_declare(f"x{number}", "direct", arguments={"alternate-exchange": "x"})


def bind_and_publish(channel: LocalChannel) -> None:
    channel.queue_bind("q0", "x", "new.#")
    channel.publish(b"x", "x", "user.7.a")
    channel.queue_unbind("q0", "x", "new.#")
    channel.publish(b"x", "x", "user.7.b")


def delete_a_bound_queue(channel: LocalChannel) -> None:
    channel.queue_declare("new")
    channel.queue_bind("new", "x", "new")
    channel.queue_delete("new")
    channel.publish(b"x", "x", "user.7.c")


def publish_with_headers(channel: LocalChannel) -> None:
    channel.publish(b"x", "x", "", HEADERS)


def declare_and_delete(channel: LocalChannel) -> None:
    channel.queue_declare("new")
    channel.publish(b"x", "", "new")
    channel.queue_delete("new")


def bind_and_delete(channel: LocalChannel) -> None:
    channel.queue_declare("new")
    channel.queue_bind("new", "x1")
    channel.queue_delete("new")


def end_with_exclusive_queues(channel: LocalChannel) -> None:
    for number in range(5):
        channel.queue_declare(f"mine{number}", exclusive=True, durable=False)
    channel.close()


def timed_queues(channel: LocalChannel, count: int) -> None:
    for number in range(count):
        channel.queue_declare(f"q{number}", arguments={"x-message-ttl": 10_000})
        channel.publish(b"x", "", f"q{number}")


@pytest.mark.parametrize(
    ("prepare", "command"),
    [
        (topic_bindings, bind_and_publish),
        (topic_bindings, delete_a_bound_queue),
        (headers_bindings, publish_with_headers),
        (exchanges, bind_and_delete),
        (exchanges, end_with_exclusive_queues),
        (exchanges, declare_and_delete),
        (exchanges_before, bind_and_publish),
        (queues, declare_and_delete),
    ],
)
def test_a_command_does_not_cost_more_beside_what_others_have_declared(
    prepare: Prepare, command: Command
) -> None:
    found = []
    for count in (FEW, MANY):
        node = Node()
        with node.channel() as channel:
            prepare(channel, count)
        command(node.channel())  # what is done once
        found.append(steps(lambda node=node: command(node.channel())))
        node.broker.close()
    few, many = found
    assert many < few * 1.2 + 50, f"{few} steps beside {FEW}, {many} beside {MANY}"


def test_what_expires_is_found_without_a_look_at_other_queues() -> None:
    found = []
    for count in (FEW, MANY):
        node = Node()
        with node.channel() as channel:
            timed_queues(channel, count)
            node.clock.advance(1)
            channel.queue_declare("soon", arguments={"x-message-ttl": 100})
            for _ in range(2):
                channel.publish(b"x", "", "soon")
                node.clock.advance(1)
                cost = steps(node.broker.upkeep.expire_due)
                assert node.queue("soon").messages == 0
        found.append(cost)
        node.broker.close()
    few, many = found
    assert many < few * 1.2 + 50, f"{few} steps beside {FEW}, {many} beside {MANY}"


def test_times_that_are_planned_anew_do_not_pile_up(node: Node) -> None:
    """Each message expires before the one that is gone would have, in years."""
    pending_checks = node.broker.state.pending_checks
    with node.channel() as channel:
        for number in range(500):
            name = f"q{number % 3}"
            channel.queue_declare(name)
            late = Properties(expiration=str(300_000_000_000 - number)).encode()
            channel.publish(b"x", "", name, late)
            assert channel.get(name, no_ack=True) is not None
            if number % 3 == 2:
                channel.queue_delete(name)
    assert len(pending_checks._deadlines) <= 130


def test_cached_routes_of_all_exchanges_together_are_bounded(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = node.broker.state.virtual_hosts.registry.routes
    monkeypatch.setattr(route_cache, "ROUTE_BYTES", 100_000)
    with node.channel() as channel:
        channel.queue_declare("q")
        for name in ("x", "y", "z"):
            channel.exchange_declare(name, "direct")
            channel.queue_bind("q", name, "k")
            for number in range(300):
                channel.publish(b"", name, f"{number:0245d}")
            assert room.used <= route_cache.ROUTE_BYTES
    exchanges = node.broker.state.topology.exchanges
    assert sum(len(exchange.cache.by_key) for exchange in exchanges.values()) < 300
    assert room.used > 0
    with node.channel() as channel:
        for name in ("x", "y", "z"):
            channel.publish(b"", name, "k")
            channel.exchange_delete(name)
    assert node.queue("q").messages == 3 and room.used == 0


def table(size: int) -> dict[str, Any]:
    return {f"name{number}": {"a": [number, "text"]} for number in range(size)}


def declare_with_arguments(channel: LocalChannel, size: int) -> None:
    channel.queue_declare("argued", arguments=table(size))
    channel.queue_declare("argued", arguments=table(size))


def bind_with_arguments(channel: LocalChannel, size: int) -> None:
    for match in MATCHES:
        channel.queue_bind("q", "h", "", {**table(size), "x-match": match})
        channel.queue_unbind("q", "h", "", {**table(size), "x-match": match})


def publish_with_many_headers(channel: LocalChannel, size: int) -> None:
    channel.publish(b"x", "h", "", Properties(headers=table(size)).encode())


def publish_with_copies(channel: LocalChannel, size: int) -> None:
    copies = Properties(headers={"CC": [f"k.{number}" for number in range(size)]})
    channel.publish(b"x", "t", "k", copies.encode())


def publish_with_a_long_key(channel: LocalChannel, size: int) -> None:
    channel.publish(b"x", "t", ".".join(["a"] * size))


def publish_and_commit(channel: LocalChannel, size: int) -> None:
    channel.tx_select()
    for number in range(size):
        channel.publish(b"x", "t", f"k.{number}")
    channel.tx_commit()


def ask_for_many_logs(_channel: LocalChannel, size: int) -> None:
    given = {"logs": [f"q{number}" for number in range(size)], "starts": {f"q{n}": 1 for n in range(size)}}
    contract.decode_arguments("engine.available", Engine.available, json.dumps(given).encode())


def read_many_slices(_channel: LocalChannel, size: int) -> None:
    ranges = {f"q{number}": (0, 1) for number in range(size)}
    slices = tuple((f"q{number}", 0, 1) for number in range(size))
    ticket = contract.encode(ReadTicket("app", "q", 0, ranges, slices))
    contract.decode_checked(ReadTicket, ticket, "read")


def state_many_columns(_channel: LocalChannel, size: int) -> None:
    rows = pa.record_batch({f"c{number}": pa.array([number]) for number in range(size)})
    contract.part_bytes(stream_of([rows], rows.schema))


@pytest.mark.parametrize(
    "command",
    [
        declare_with_arguments,
        bind_with_arguments,
        publish_with_many_headers,
        publish_with_copies,
        publish_with_a_long_key,
        publish_and_commit,
        ask_for_many_logs,
        read_many_slices,
        state_many_columns,
    ],
)
def test_a_command_costs_no_more_than_its_own_size(
    command: Callable[[LocalChannel, int], None], node: Node
) -> None:
    with node.channel() as channel:
        channel.queue_declare("q")
        channel.exchange_declare("h", "headers")
        channel.exchange_declare("t", "topic")
        channel.queue_bind("q", "h", "", {"name1": {"a": [1, "text"]}, "name2": None})
        for pattern in ("#", "*.#", "#.a.*.#.z", "k.*", "a.a.#.b"):
            channel.queue_bind("q", "t", pattern)
    command(node.channel(), 3)  # what is done once
    cost = [steps(lambda size=size: command(node.channel(), size)) for size in (8, 16, 32, 64)]
    for smaller, larger in itertools.pairwise(cost):
        assert larger < 2.2 * smaller, f"{cost} steps for sizes that double"


def test_a_topic_pattern_of_many_wildcards_costs_at_most_its_words_for_each_word_of_the_key() -> None:
    words = 124
    key = ".".join(["a"] * words) + ".y"
    for pattern in (["#", "a"], ["#", "*"], ["#"], ["*", "#"], ["#", "#", "a", "*"]):
        patterns: TopicPatterns[int, int] = TopicPatterns()
        for repeated in range(1, words // len(pattern)):
            patterns.add(".".join(pattern * repeated) + ".z", repeated, repeated)
        cost = steps(lambda patterns=patterns: patterns.matching(key, int))
        assert cost < 3 * words * words, f"{pattern}: {cost} steps"


@pytest.mark.parametrize("others", ["a*", ["a", "a.#"], ["a", "*.a"]])
def test_patterns_that_a_key_matches_in_countless_ways_cost_little_more_than_one(
    others: Sequence[str],
) -> None:
    source, key = random.Random(1), ".".join(["a"] * 127)
    found = []
    for count in (2, 200):
        patterns: TopicPatterns[int, int] = TopicPatterns()
        for number in range(count):
            for start in ("#.", "", "a.*.#."):
                patterns.add(start + ".".join(source.choices(others, k=60)) + ".z", number, number)
        found.append(steps(lambda patterns=patterns: patterns.matching(key, int)))
    assert found[1] < 20 * found[0], f"{found[0]} steps for 6 patterns, {found[1]} for 600"


def test_a_trie_from_which_all_patterns_are_removed_is_empty() -> None:
    patterns: TopicPatterns[str, int] = TopicPatterns()
    empty = vars_of(patterns)
    given = [".".join(words) for words in itertools.product("ab*#", repeat=3)]
    for pattern in given:
        patterns.add(pattern, pattern, 1)
    for pattern in reversed(given):
        patterns.remove(pattern, pattern)
        patterns.remove(pattern, pattern)
    assert vars_of(patterns) == empty


def vars_of(patterns: TopicPatterns[str, int]) -> tuple[object, ...]:
    root = patterns._root
    wild = patterns._wild
    bits = [(page.by_word, page.any_word, page.staying, page.first, page.final) for page in wild._pages]
    assert all(not any(page) for page in bits)
    return root.words, root.one, root.any, root.entries, wild._slots


def test_so_many_exchanges_lead_to_a_queue_or_an_exchange_as_can_be_left_in_one_piece(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusals, "SOURCES", 3)
    with node.channel() as channel:
        channel.queue_declare("q")
        for number in range(5):
            channel.exchange_declare(f"x{number}", "fanout")
        for number in range(3):
            channel.queue_bind("q", f"x{number}")
            channel.exchange_declare(f"y{number}", "fanout", arguments={"alternate-exchange": "z"})
        with pytest.raises(
            PreconditionFailed, match="queue 'q' has bindings or an alternate from 3 exchanges"
        ):
            node.channel().queue_bind("q", "x3")
        with pytest.raises(PreconditionFailed, match="exchange 'z' has bindings or an alternate from 3"):
            node.channel().exchange_declare("y3", "fanout", arguments={"alternate-exchange": "z"})
        channel.queue_bind("q", "x2", "another of the same")
        channel.queue_bind("q", "x0")
        channel.queue_unbind("q", "x0")
        channel.queue_bind("q", "x3")


def test_the_bytes_of_bindings_are_counted_as_they_come_and_go(node: Node) -> None:
    def counted() -> int:
        topology = node.broker.state.topology
        named = [(each.name, each.arguments) for each in topology.exchanges.values() if each.name]
        named += [(each.name, each.arguments.declared) for each in topology.queues.values()]
        total = sum(exchange.size_bytes for exchange in topology.exchanges.values())
        names = sum(bytes_of(*each) for each in named)
        assert topology.memory.total == node.broker.state.virtual_hosts.registry.memory.total == total + names
        return total

    with node.channel() as channel:
        channel.queue_declare("q")
        for kind in ("direct", "fanout", "topic", "headers"):
            channel.exchange_declare(kind, kind)
            before = counted()
            for number in range(3):
                channel.queue_bind("q", kind, f"{number}", {"n": number})
                channel.queue_bind("q", kind, f"{number}", {"n": number})
            assert counted() >= before + 3 * 1000
        node.restart()
    with node.channel() as channel:
        assert counted() >= 4 * 3 * 1000
        channel.queue_unbind("q", "direct", "1", {"n": 1})
        channel.queue_unbind("q", "direct", "1", {"n": 1})
        channel.exchange_delete("fanout")
        assert counted() >= (4 * 3 - 4) * 1000
        channel.queue_delete("q")
        assert counted() == 0


def test_the_exclusive_queues_of_a_channel_end_in_pieces(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "DELETED", 4)
    own = node.channel()
    for number in range(10):
        own.queue_declare(f"mine{number}", exclusive=True, durable=False)
    deleted: list[int] = []
    run = node.broker.run

    def counted(work: Callable[..., Any]) -> object:
        before = len(node.broker.queues())
        answer = run(work)
        deleted.append(before - len(node.broker.queues()))
        return answer

    monkeypatch.setattr(node.broker, "run", counted)
    own.close()
    assert [count for count in deleted if count] == [4, 4, 2]


def one_exchange(kind: str) -> Prepare:
    def bindings(channel: LocalChannel, count: int) -> None:
        channel.exchange_declare("x", kind)
        channel.queue_declare("q")
        for number in range(count):
            channel.queue_bind("q", "x", f"user.{number}.#", {"number": number})

    return bindings


def delete_the_queue(topology: Topology, change: Change) -> None:
    topology.delete_queue(change, "q")


def delete_the_exchange(topology: Topology, change: Change) -> None:
    topology.delete_exchange(change, "x")


@pytest.mark.parametrize("kind", ["direct", "fanout", "topic", "headers"])
@pytest.mark.parametrize("command", [delete_the_queue, delete_the_exchange])
def test_to_delete_a_queue_or_an_exchange_costs_the_same_whatever_is_bound(
    kind: str, command: Callable[[Topology, Change], None]
) -> None:
    """Its bindings are gone at once, and for good. The indexes are tidied in pieces."""
    found = []
    for count in (2 * FEW, MANY):
        node = Node()
        one_exchange(kind)(node.channel(), count)
        state = node.broker.state
        found.append(
            node.broker.run(lambda state, change, _now: steps(lambda: command(state.topology, change)))
        )
        assert command is delete_the_exchange or not state.topology.exchanges["x"].bindings
        assert not [
            record for record in node.store.reopened().load().records if isinstance(record, BindingRecord)
        ]
        stale_bindings = state.virtual_hosts.registry.stale_bindings
        assert len(stale_bindings) == (count if command is delete_the_queue else 0)
        with node.channel() as channel:
            channel.queue_declare("q")
            channel.exchange_declare("x", kind)
            channel.publish(b"lost", "x", "user.7.a", Properties(headers={"number": 7}).encode())
            channel.queue_bind("q", "x", "user.7.#", {"number": 7})
            channel.publish(b"kept", "x", "user.7.#", Properties(headers={"number": 7}).encode())
            node.broker.upkeep.tick()
            assert not stale_bindings
            channel.publish(b"kept too", "x", "user.7.#", Properties(headers={"number": 7}).encode())
        assert node.drain("q") == [b"kept", b"kept too"]
        node.restart()
        assert len(node.broker.state.topology.exchanges["x"].bindings) == 1
        node.broker.close()
    few, many = found
    assert many < few * 1.2 + 50, f"{few} steps for {2 * FEW} bindings, {many} for {MANY}"


def consumers(node: Node, count: int, user: str, channel: Channel | None = None) -> Channel:
    """Of the queue ``q``, on one channel."""
    state = node.broker.state
    made = Channel(state) if channel is None else channel
    made.who = Author(user=user)
    for number in range(count):
        tag = f"{len(made.consumers)}-{number}"
        made.consume(state.topology.queue("q"), tag, lambda *_: 0, lambda _: None)
    return made


def test_consumers_of_a_queue_and_of_a_channel_are_bounded(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_channel, "QUEUE_CONSUMERS", 40)
    monkeypatch.setattr(broker_channel, "CHANNEL_CONSUMERS", 30)
    for user in ("man", "ann"):
        node.broker.run(lambda state, change, _, user=user: state.users.add(change, user, ""))
    with node.channel() as own:
        own.queue_declare("q")
    assert len(consumers(node, 4, "man").consumers) == 4
    with pytest.raises(
        PreconditionFailed, match="'man' has 4 consumers of one queue in vhost '/', which is its share"
    ):
        consumers(node, 1, "man")
    ann = consumers(node, 4, "ann")
    ann.cancel("0-0")
    consumers(node, 1, "ann")
    node.broker.run(lambda state, change, _: state.users.delete(change, "man"))
    ann = consumers(node, 27, "ann", ann)
    with pytest.raises(NotAllowed, match=r"reached maximum \(30\) of consumers per channel"):
        consumers(node, 1, "ann", ann)
    consumers(node, 5, "ann")
    with pytest.raises(PreconditionFailed, match="40 consumers of one queue are there, which is the limit"):
        consumers(node, 1, "ann")


def test_a_channel_leaves_a_queue_in_one_pass(node: Node) -> None:
    """Whatever the number of its consumers is: in steps, for each of them, with two hundred and two thousand."""
    with node.channel() as own:
        own.queue_declare("q")
    counted = []
    for count in (200, 2_000):
        gone, stays = consumers(node, count, ""), consumers(node, 3, "")
        counted.append(steps(gone.close) / count)
        queue = node.broker.state.topology.queue("q")
        assert list(queue.consumers) == list(stays.consumers.values())
        stays.close()
        assert not queue.consumers
    assert counted[1] < 2 * counted[0], counted
