"""What a command costs: it grows with what the command itself names and moves, and not with what others have
declared (``tests/steps.py`` counts).

Not here: what a pattern of a permission costs (``test_users.py``), rows of Arrow (``test_staging.py``).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import product

import pytest

from broker_core.broker.topic_patterns import TopicPatterns
from broker_core.node.channel import LocalChannel
from broker_core.properties import Properties
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
    agenda = node.broker.state.agenda
    with node.channel() as channel:
        for number in range(500):
            name = f"q{number % 3}"
            channel.queue_declare(name)
            late = Properties(expiration=str(300_000_000_000 - number)).encode()
            channel.publish(b"x", "", name, late)
            assert channel.get(name, no_ack=True) is not None
            if number % 3 == 2:
                channel.queue_delete(name)
    assert len(agenda._deadlines) <= 130


def test_cached_routes_of_all_exchanges_together_are_bounded(node: Node) -> None:
    room = node.broker.state.hosts.registry.routes
    room._limit = 100_000
    with node.channel() as channel:
        channel.queue_declare("q")
        for name in ("x", "y", "z"):
            channel.exchange_declare(name, "direct")
            channel.queue_bind("q", name, "k")
            for number in range(300):
                channel.publish(b"", name, f"{number:0245d}")
            assert room._used <= room._limit
    exchanges = node.broker.state.topology.exchanges
    assert sum(len(exchange.cache) for exchange in exchanges.values()) < 300
    assert room._used == sum(room._by_user.values()) > 0
    with node.channel() as channel:
        for name in ("x", "y", "z"):
            channel.publish(b"", name, "k")
            channel.exchange_delete(name)
    assert node.queue("q").messages == 3 and room._used == 0


def test_a_topic_pattern_of_many_wildcards_costs_at_most_its_words_for_each_word_of_the_key() -> None:
    words = 124
    key = ".".join(["a"] * words) + ".y"
    for pattern in (["#", "a"], ["#", "*"], ["#"], ["*", "#"], ["#", "#", "a", "*"]):
        patterns: TopicPatterns[int, int] = TopicPatterns()
        for repeated in range(1, words // len(pattern)):
            patterns.add(".".join(pattern * repeated) + ".z", repeated, repeated)
        cost = steps(lambda patterns=patterns: patterns.matching(key))
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
        found.append(steps(lambda patterns=patterns: patterns.matching(key)))
    assert found[1] < 20 * found[0], f"{found[0]} steps for 6 patterns, {found[1]} for 600"


def test_a_trie_from_which_all_patterns_are_removed_is_empty() -> None:
    patterns: TopicPatterns[str, int] = TopicPatterns()
    empty = vars_of(patterns)
    given = [".".join(words) for words in product("ab*#", repeat=3)]
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
