"""How long the lock is held beside very many queues and bindings, by the processor's clock of the thread that holds
it: a machine that is busy does not change it.

Not here: counted steps (``test_cost.py``).
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sized
from pathlib import Path
from typing import Any

import pytest

from broker_core.broker.broker import BrokerState
from broker_core.core import password
from broker_core.core.change import Change
from broker_core.launcher import Broker
from broker_core.node.vhost_engines import VhostEngines
from broker_core.server.access.accounts import Accounts
from broker_core.server.access.vhosts import Vhosts
from broker_core.server.status import StatusReader
from tests.broker.conftest import Node

HELD_MS = 50.0
LISTED_MS = 8.0  # to copy what is there; to show it takes ten times as long
HASH = password.unmatched(password.Cost(2, 1, 1))
TTL_MS = 600_000


class Held:
    """A lock, and the longest time for which it was held."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self._since = 0.0
        self.longest_ms = 0.0

    def acquire(self, *given: Any) -> bool:
        taken = bool(self._lock.acquire(*given))
        self._since = time.thread_time()
        return taken

    def release(self) -> None:
        self.longest_ms = max(self.longest_ms, (time.thread_time() - self._since) * 1000)
        self._lock.release()

    def locked(self) -> bool:
        return bool(self._lock.locked())

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


def in_pieces(node: Node, count: int, make: Callable[[BrokerState, Change, int], None]) -> None:
    for start in range(0, count, 500):

        def work(state: BrokerState, change: Change, _now: int, start: int = start) -> None:
            for number in range(start, min(start + 500, count)):
                make(state, change, number)

        node.broker.run(work)


def declared(node: Node, queues: int) -> Held:
    """Half of the queues have a time to live; five times as many bindings, of topic and of direct exchanges."""
    with node.channel() as channel:
        channel.exchange_declare("t", "topic")
        channel.exchange_declare("d", "direct")
        channel.queue_declare("soon", arguments={"x-message-ttl": 100})

    def declare(state: BrokerState, change: Change, number: int) -> None:
        arguments = {"x-message-ttl": TTL_MS} if number % 2 else None
        state.topology.declare_queue(change, f"q{number}", arguments=arguments)

    def bind(state: BrokerState, change: Change, number: int) -> None:
        exchange, key = ("t", f"user.{number}.#") if number % 2 else ("d", f"k{number}")
        state.topology.bind(change, f"q{number % queues}", exchange, key)

    in_pieces(node, queues, declare)
    in_pieces(node, 5 * queues, bind)
    committer = node.broker.committer
    held = Held(committer._lock)
    committer._lock = committer.look._lock = held  # type: ignore[assignment]
    return held


def commands(node: Node) -> Iterator[tuple[str, Callable[[], object]]]:
    channel = node.channel()

    def expire() -> None:
        for _ in range(5):
            channel.publish(b"x", "", "soon")
            node.clock.advance(1)
            node.broker.upkeep.expire_due()
        assert node.queue("soon").messages == 0

    yield "a publish", lambda: channel.publish(b"x", "t", "user.7.a")
    yield "a message that expires", expire
    yield "the upkeep of a second", node.broker.upkeep.tick
    yield "a queue", lambda: channel.queue_declare("new")
    yield "a binding", lambda: channel.queue_bind("new", "t", "new.*")
    yield "a binding less", lambda: channel.queue_unbind("new", "t", "new.*")
    yield "a queue less", lambda: channel.queue_delete("q9")
    yield "an exchange less", lambda: channel.exchange_delete("d")
    yield "what it leaves", node.broker.upkeep.tick


@pytest.mark.slow
def test_no_command_holds_the_lock_for_long_beside_a_thousand_queues(node: Node) -> None:
    held = declared(node, 1_000)
    gc.collect()  # of what the preparation has left; a broker puts what it has loaded aside
    gc.freeze()
    found = {}
    for name, command in commands(node):
        held.longest_ms = 0.0
        command()
        found[name] = round(held.longest_ms, 1)
    gc.unfreeze()
    assert max(found.values()) < HELD_MS, found


@pytest.mark.slow
def test_an_import_of_definitions_holds_the_lock_for_a_piece_at_a_time(node: Node) -> None:
    held = declared(node, 200)
    names = range(600)
    document: dict[str, object] = {
        "queues": [{"name": f"new{number}", "vhost": "/", "durable": True} for number in names],
        "bindings": [
            {"source": "t", "vhost": "/", "destination": f"new{number}", "destination_type": "queue"}
            | {"routing_key": f"{number}.{each}.*"}
            for number in names
            for each in range(5)
        ],
    }
    gc.collect()
    gc.freeze()
    held.longest_ms = 0.0
    done = Accounts(node.broker).import_definitions(document)
    found = held.longest_ms
    gc.unfreeze()
    assert (done.counts["queues"], done.counts["bindings"]) == (600, 3000)
    assert len(node.broker.state.topology.queues) == 200 + 1 + 600
    assert found < HELD_MS, found


def test_a_broker_in_the_process_of_others_leaves_its_collector_alone(tmp_path: Path) -> None:
    """``txmq serve`` has a process of its own, and sets it."""

    def settings() -> tuple[object, ...]:
        return gc.isenabled(), gc.get_threshold(), gc.get_freeze_count(), tuple(gc.callbacks)

    before = settings()
    with Broker.open(tmp_path / "data") as broker, broker.channel() as channel:
        channel.queue_declare("q")
        assert settings() == before
    assert settings() == before


@pytest.mark.slow
def test_no_list_holds_the_lock_for_long_beside_very_many_queues_and_bindings(node: Node) -> None:
    held = declared(node, 4_000)
    users, hosts = Accounts(node.broker), Vhosts(node.broker, VhostEngines(node.broker))
    in_pieces(node, 3_000, lambda state, change, number: state.users.add(change, f"u{number}", HASH))
    in_pieces(
        node, 3_000, lambda state, change, number: state.users.permit(change, f"u{number}", "", "", ".*")
    )
    status = StatusReader(node.broker, VhostEngines(node.broker), None, "", list, hosts)
    lists: dict[str, tuple[Callable[[], Sized], int]] = {
        "queues": (node.broker.queues, 4_001),
        "exchanges": (node.broker.exchanges, 9),
        "bindings": (node.broker.bindings, 20_000),
        "users": (users.users, 3_000),
        "permissions": (users.permissions, 3_000),
        "virtual hosts": (hosts.vhosts, 1),
        "definitions": (lambda: users.export_definitions().definitions["bindings"], 20_000),
        "status": (lambda: range(status.now().queues), 4_001),
    }
    found = {}
    gc.collect()
    gc.disable()
    try:
        for name, (rows, count) in lists.items():
            held.longest_ms = 0.0
            assert len(rows()) == count, name
            found[name] = round(held.longest_ms, 1)
    finally:
        gc.enable()
    assert max(found.values()) < LISTED_MS, found
