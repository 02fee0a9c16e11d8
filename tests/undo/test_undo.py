"""Whatever raises inside a work: its caller gets the error, and the state of the broker is what it was
before.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from functools import partial
from operator import attrgetter
from typing import Any, Literal

import pytest

from broker_core.broker.access.users import transaction_key
from broker_core.broker.batch.branch import StagedLimits
from broker_core.broker.channel import Channel
from broker_core.broker.message.purge import Purge
from broker_core.broker.transaction import heuristics
from broker_core.broker.transaction.transaction import Limits, Transaction
from broker_core.core.records import PolicyRecord
from broker_core.engine import START, Limit, Origin, ReadTicket
from broker_core.message.deduplication import HEADER
from broker_core.message.message import Message
from broker_core.message.properties import Properties
from broker_core.node.engine import EmbeddedEngine
from broker_core.node.local import LocalBroker
from broker_core.store.memory import MemoryStore
from tests.broker.conftest import Clock
from tests.engine.bench import Bench
from tests.make import beneath
from tests.undo.faults import Faults
from tests.undo.snapshot import difference, snapshot

pytestmark = pytest.mark.slow

TRANSIENT = Properties(delivery_mode=1).encode()
EXPIRING = Properties(delivery_mode=2, expiration="1000").encode()


class Life:
    """A broker whose every work is tried with an exception out of every call, until it succeeds."""

    def __init__(self, moment: Literal["call", "return"], most: float) -> None:
        self.clock = Clock()
        self.broker = LocalBroker(MemoryStore(), self.clock, upkeep=False)
        self.state = self.broker.state
        self.engine = EmbeddedEngine(self.broker)
        engine = self.engine
        self.faults = Faults(
            self.broker, moment, most, engine.batches.claims, engine.batches.ledger, engine.batches.branches
        )
        self.channel = self.broker.channel()

    def do(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """A method of the state that fills a change."""
        return self.faults.exhaust(
            lambda: self.broker.run(
                lambda state, change, _now: attrgetter(method)(state)(change, *args, **kwargs)
            )
        )

    def do_now(self, method: str, *args: Any) -> Any:
        """One that also asks for the time."""
        return self.faults.exhaust(
            lambda: self.broker.run(lambda state, change, now: attrgetter(method)(state)(change, *args, now))
        )

    def purge(self, name: str) -> None:
        self.faults.exhaust(
            lambda: self.broker.run(
                lambda state, change, now: Purge(state.topology, name).step(state, change, now)
            )
        )

    def transaction(self, *publishes: tuple[str, str, bytes], xid: str = "") -> Transaction:
        """Exchange, routing key and properties of each message."""
        made = Transaction(Limits(), 0, xid)
        for number, (exchange, key, properties) in enumerate(publishes):
            message = Message(b"body %d" % number, key, exchange, properties)
            made.publish(message, self.state.topology.route(exchange, key, properties), True)
        return made

    def commit(self, *publishes: tuple[str, str, bytes]) -> None:
        self.do_now("transactions.commit", self.transaction(*publishes))

    def hold(self, queue: str, count: int = 1) -> list[int]:
        """Deliveries to the channel, which acknowledges them in a transaction of its own."""
        tags = []
        for _ in range(count):
            delivery = self.channel.get(queue)
            assert delivery is not None
            tags.append(delivery.tag)
        return tags

    def settle(self, outcome: Any, tags: list[int], xid: str = "") -> Transaction:
        made = self.transaction(xid=xid)
        channel = beneath(self.channel)
        for tag in tags:
            channel.settle(tag, outcome, False, 0)
        made.settles, channel.transaction.settles = channel.transaction.settles, []
        return made


@pytest.fixture(params=["call", pytest.param("return", marks=pytest.mark.soak)])
def life(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture, rounds: int) -> Iterator[Life]:
    """Out of every call in ``make soak``; before a change lands, out of two of those of a line in a work."""
    caplog.set_level(logging.CRITICAL, "txmq")  # thousands of traces, a quarter of the time
    made = Life(request.param, math.inf if rounds else 2)
    yield made
    assert made.faults.raised > 20, "hardly an exception was thrown"
    made.broker.close()


def test_an_exception_in_topology_work_changes_nothing(life: Life) -> None:
    consumer: list[Any] = []
    life.do("topology.declare_exchange", "other", "fanout")
    life.do(
        "topology.declare_exchange",
        "topics",
        "topic",
        auto_delete=True,
        arguments={"alternate-exchange": "other"},
    )
    life.do("topology.declare_exchange", "headers", "headers")
    life.do("topology.declare_exchange", "shares", "x-consistent-hash")
    life.do("topology.declare_queue", "orders", arguments={"x-max-priority": 5, "x-expires": 60_000})
    life.do("topology.declare_queue", "mine", exclusive=True, connection="me")
    life.do("topology.declare_queue", "abandoned", auto_delete=True)
    life.do("topology.bind", "orders", "topics", "a.#")
    life.do("topology.bind", "orders", "topics", "b.*")
    life.do("topology.bind", "abandoned", "amq.direct", "x")
    life.do("topology.bind", "abandoned", "headers", "", {"x-match": "all", "a": 1})
    life.do("topology.bind", "orders", "shares", "1")
    life.do("topology.bind", "abandoned", "shares", "30")
    life.do("topology.bind", "abandoned", "shares", "2")  # which becomes its weight
    life.do("topology.unbind", "abandoned", "shares", "2")
    life.do("topology.bind_exchange", "other", "topics", "c")
    life.do("topology.unbind", "orders", "topics", "b.*")
    life.do("topology.unbind_exchange", "other", "topics", "c")
    life.do("topology.bind_exchange", "topics", "headers", "")
    life.commit(
        ("topics", "a.b", b""),
        ("topics", "a", Properties(priority=3).encode()),
        ("", "abandoned", b""),
        ("", "mine", b""),
    )
    channel = Channel(life.state, connection="me")
    channel.consume(life.state.topology.queue("abandoned"), "tag", lambda *_: None, consumer.append)
    life.do("topology.delete_queue", "mine", connection="me")
    life.purge("orders")
    life.do("topology.delete_unused", [life.state.topology.queue("orders")])
    assert "topics" not in life.state.topology.exchanges
    life.do("topology.delete_exchange", "other")
    channel.cancel("tag")
    life.do("topology.delete_abandoned")
    assert "abandoned" not in life.state.topology.queues
    channel.consume(
        life.state.topology.queue(life.channel.queue_declare("late")), "tag", lambda *_: None, consumer.append
    )
    life.do("topology.delete_queue", "late")


def test_an_exception_in_a_commit_changes_nothing(life: Life) -> None:
    life.channel.queue_declare("dead")
    life.channel.exchange_declare("dlx", "fanout")
    life.channel.queue_bind("dead", "dlx")
    dlx = {"x-dead-letter-exchange": "dlx"}
    life.channel.queue_declare("a", arguments=dlx)
    life.channel.queue_declare("short", arguments={**dlx, "x-max-length": 2})
    life.channel.queue_declare("small", arguments={**dlx, "x-max-length-bytes": 15})
    life.channel.queue_declare("ranked", arguments={"x-max-priority": 3, **dlx})
    life.channel.queue_declare("counted", arguments={"x-delivery-limit": 1, **dlx})
    life.channel.queue_declare("memory", durable=False)
    everywhere = ("a", "short", "small", "ranked", "counted", "memory")
    life.channel.exchange_declare("all", "fanout")
    for queue in everywhere:
        life.channel.queue_bind(queue, "all")
    life.commit(("all", "", b""), ("all", "", TRANSIENT), ("", "nowhere", b""))
    for queue in ("a", "counted", "a"):  # the run of a queue has gaps then
        life.commit(*[("", queue, b"")] * 3)
    for properties in (EXPIRING, Properties(priority=2).encode()):
        life.commit(("all", "", properties))
    for outcome in ("ack", "requeue", "requeue", "reject"):
        for queue in everywhere:
            if (delivery := life.channel.get(queue)) is not None:
                life.do_now("transactions.commit", life.settle(outcome, [delivery.tag]))
    for outcome in ("ack", "requeue"):  # every second one, and then those between
        for queue in everywhere:
            life.commit(*[("", queue, b"")] * 5)
            tags = life.hold(queue, 2 if queue in ("short", "small") else 5)
            for some in (tags[::2], tags[1::2]):
                life.do_now("transactions.commit", life.settle(outcome, some))
    life.do_now("transactions.commit", life.transaction(("all", "", b""), xid="named"))
    life.clock.advance(10)
    life.do("expiry.expire", life.clock.now_us)
    life.commit(*[("", "ranked", b"")] * 3)
    life.purge("ranked")
    life.do("expiry.expire", life.clock.now_us)
    life.purge("dead")
    life.do("topology.delete_queue", "counted")


def test_an_exception_on_the_way_through_an_exchange_that_drops_duplicates_changes_nothing(
    life: Life,
) -> None:
    life.do("topology.declare_exchange", "once", "x-message-deduplication", arguments={"x-cache-size": 1})
    life.channel.queue_declare("q")
    life.channel.queue_bind("q", "once")
    ids = [Properties(headers={HEADER: id_}).encode() for id_ in ("a", "a", "b")]
    life.commit(*[("once", "", each) for each in ids])
    life.do("expiry.expire", life.clock.now_us)
    assert life.state.topology.queue("q").messages == 2
    life.do("topology.delete_exchange", "once")


def test_an_exception_in_a_commit_of_ids_changes_nothing(life: Life) -> None:
    once = {"x-message-deduplication": True, "x-cache-size": 3}
    life.do("topology.declare_queue", "window", arguments=once)
    life.do("topology.declare_queue", "pending", arguments={"x-message-deduplication": True})

    def commit(*ids: str) -> None:
        """Each message to both queues; first what is alike, and then beside a transient one."""
        properties = [Properties(headers={HEADER: id_}).encode() for id_ in ids]
        for queue in ("window", "pending"):
            life.commit(*[("", queue, each) for each in properties])
            life.commit(*[("", queue, each) for each in (*properties, TRANSIENT)])

    commit("a", "b")
    commit("c", "d")  # the oldest ones leave the window
    for queue in ("window", "pending"):
        life.do_now("transactions.commit", life.settle("ack", life.hold(queue, 2)))
    commit("a", "d")
    policy = PolicyRecord(
        "/", "policy", "p", "^window$", "all", 0, {"x-message-deduplication": True, "x-cache-ttl": 1_000}
    )
    life.do("topology.policies.put", policy)
    life.clock.advance(5)
    commit("e")
    life.do("topology.policies.delete", "policy", "p")
    life.do("topology.delete_queue", "window")


def test_an_exception_in_work_on_virtual_hosts_changes_nothing(life: Life) -> None:
    life.do("virtual_hosts.add", "sales", max_queues=3, max_messages=5)
    life.do("virtual_hosts.limit", "sales", {"max_messages": 4, "max_queues": 9})
    with life.broker.channel(vhost="sales") as channel:
        for name in ("a", "b"):
            channel.queue_declare(name)
            channel.exchange_declare(f"to {name}", "fanout")
            channel.queue_bind(name, f"to {name}")
            channel.publish(b"1", f"to {name}")
        channel.tx_select()
        channel.publish(b"2", routing_key="a")
        channel.prepare("one")
    life.do("users.add", "ann", "")
    life.do("users.permit", "ann", "", "", ".*", "sales")
    life.do("users.permit_topic", "ann", "amq.topic", "", ".*", "sales")
    life.do("users.own_app", "app", "ann", "sales")
    engine = EmbeddedEngine(life.broker, vhost="sales")
    engine.claim("app", ["a"], {"a": "start"}, Limit(max_rows=1), Origin(at="earliest"), "fail")
    engine.open_batch("app", "query", 0, "fail", token="t")
    life.do("prepared.rollback", transaction_key("sales", "", "one"), life.clock.now_us)
    life.do("users.forget_vhost", "sales")
    life.do("virtual_hosts.delete", "sales")
    assert list(life.state.virtual_hosts.by_name) == ["/"] and not life.state.users.permissions


def test_an_exception_in_a_prepared_transaction_changes_nothing(life: Life) -> None:
    life.channel.queue_declare("in")
    life.channel.queue_declare("out")
    life.commit(*[("", "in", b"")] * 4, ("", "in", TRANSIENT))
    life.do_now("prepared.prepare", life.transaction(("", "out", b"")), "one")
    life.do_now("prepared.prepare", life.settle("ack", life.hold("in", 2)), "two")
    life.do_now("prepared.prepare", life.settle("reject", life.hold("in")), "three")
    life.do("prepared.disown", "")
    one, two, three = life.state.prepared.by_key
    life.do_now("prepared.commit", one)
    life.do_now("prepared.commit", two)
    life.do_now("prepared.rollback", three)


def test_an_exception_in_a_decision_by_hand_changes_nothing(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heuristics, "MOST_HEURISTIC", 2)
    life.channel.queue_declare("in")
    life.channel.queue_declare("out")
    life.commit(*[("", "in", b"")] * 2)
    for name in ("one", "two", "three", "four"):
        life.do_now("prepared.prepare", life.transaction(("", "out", b"")), name)
    one, two, three, four = life.state.prepared.by_key

    def decide(verb: str, key: str) -> None:
        life.faults.exhaust(
            lambda: life.broker.run(
                lambda state, change, now: getattr(state.prepared, verb)(change, key, now, True)
            )
        )

    decide("commit", one)
    decide("rollback", two)
    decide("commit", three)  # the oldest makes room
    assert [*life.state.names.heuristics.by_key] == [two, three] and one in life.state.names.outcomes
    life.do("names.forget", three)
    life.do("names.forget", three)
    decide("rollback", four)
    life.do("prepared.disown", "")
    assert not life.state.names.heuristics.by_key and not life.state.names.heuristics.keys_of


def test_an_exception_in_upkeep_changes_nothing(life: Life) -> None:
    life.channel.queue_declare("q")
    life.commit(*[("", "q", b"")] * 3)
    life.faults.exhaust(life.broker.upkeep.close_open)
    life.faults.exhaust(life.broker.upkeep.seal)
    life.commit(("", "q", b""))
    life.do_now("transactions.commit", life.settle("ack", life.hold("q", 4)))
    life.faults.exhaust(life.broker.upkeep.close_open)
    life.commit(("", "q", b""), ("", "q", TRANSIENT))
    life.hold("q", 2)
    life.faults.exhaust(
        lambda: life.broker.run(lambda _state, change, _now: beneath(life.channel).recover(change))
    )
    life.do("closing")


def test_an_exception_while_messages_expire_loses_and_doubles_none(life: Life) -> None:
    """At the head of a queue, behind one that stays, and once they are given back."""
    letters = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}
    life.channel.queue_declare("dead")
    for name in ("q", "r"):
        life.channel.queue_declare(name, arguments=letters)
        life.commit(("", name, EXPIRING), ("", name, b""), *[("", name, EXPIRING)] * 2)
    held = life.hold("r")
    life.clock.advance(5)
    life.do_now("expiry.expire")
    life.do_now("transactions.commit", life.settle("requeue", held))
    life.do_now("expiry.expire")
    assert {queue.name: queue.messages for queue in life.broker.queues()} == {"dead": 6, "q": 1, "r": 1}


def test_an_exception_in_a_micro_batch_changes_nothing(life: Life) -> None:
    bench = Bench.over(life.broker, life.engine)
    room = life.engine.batches.branches.room
    empty = snapshot(room)
    exhaust = life.faults.exhaust
    engine = life.engine
    life.commit(*[("", "in", b"")] * 3, ("", "in", TRANSIENT), ("", "in", b""))
    start: Any = {"in": START}
    for batch in range(3):
        end = exhaust(
            lambda start=start: engine.claim("app", list(start), start, Limit(max_rows=2), Origin(), "fail")
        )
        ranges = exhaust(lambda start=start, end=end: engine.resolve("app", start, end))
        slices = tuple((log, first, last) for log, (first, last) in ranges.items())
        opened = exhaust(lambda batch=batch: engine.open_batch("app", "query", batch, "fail"))
        exhaust(
            lambda batch=batch, ranges=ranges, slices=slices: engine.open_read(
                ReadTicket("app", "query", batch, ranges, slices)
            )
        )
        words = {"query": "query", "batch": batch, "app": "app"}
        late = exhaust(
            lambda words=words: bench.stage("late", b"late", branch=f"late {words['batch']}", **words)
        )
        assert late.rows == 1
        published = bench.stage(opened.token, b"out", branch=f"p{batch}", **words)
        appended = bench.stage(
            opened.token, b"row", kind="append", target={"table": "t"}, branch=f"a{batch}", **words
        )
        done = exhaust(
            partial(engine.commit_batch, "app", "query", batch, opened.token, [published, appended])
        )
        exhaust(lambda done=done: engine.mark_applied("app", done.entry.sequence))
        exhaust(lambda done=done: engine.mark_mirrored("app", done.entry.sequence))
        start = end
    exhaust(lambda: engine.ack("app", start))
    dropped = exhaust(lambda: engine.open_batch("app", "query", 3, "fail"))
    bench.stage(dropped.token, b"dropped", query="query", batch=3, app="app")
    exhaust(lambda: engine.rollback_batch(dropped.token))
    token = "a batch write"
    branch = bench.write(token, b"written")
    exhaust(lambda: engine.commit_branches(token, [branch]))
    exhaust(lambda: engine.release("app", "in", force=True))
    limits, room.limits = room.limits, StagedLimits(user_bytes=1600)
    words = {"query": "query", "batch": 3, "app": "app"}
    older = engine.open_batch("app", "query", 3, "fail").token
    bench.stage(older, b"x" * 700, branch="older", **words)
    newer = engine.open_batch("app", "query", 3, "fail").token
    exhaust(lambda: bench.stage(newer, b"y" * 700, branch="newer", **words))
    assert [attempt.token for attempt in engine.staged_batches()] == [newer], "the older one made room"
    life.clock.now_us += int(room.limits.idle_s) * 2_000_000
    exhaust(engine.drop_abandoned)
    assert engine.staged_batches() == []
    room.limits = limits
    assert difference(empty, snapshot(room)) == []


def test_an_exception_while_a_channel_ends_changes_nothing(life: Life) -> None:
    life.channel.queue_declare("q")
    life.commit(*[("", "q", b"")] * 3)
    channel = Channel(life.state)
    channel.tx_select()
    channel.consume(
        life.state.topology.queue("q"), "tag", lambda *sent: len(sent[-1]), lambda _: None, prefetch=2
    )
    life.state.dispatch.send(life.clock.now_us)
    channel.settle(1, "ack", False, 0)
    channel.publish(Message(b"dropped", "q", "", b""), life.state.topology.route("", "q"), False, 0)
    life.faults.exhaust(
        lambda: life.broker.run(lambda _state, change, _now: channel.close("it was closed", change))
    )
    assert life.state.topology.queue("q").unacknowledged == 0
    for _ in range(10):
        life.do_now("transactions.commit", life.transaction(("", "q", b"")))


def test_an_exception_in_a_change_of_users_changes_nothing(life: Life) -> None:
    life.do("users.add", "ann", "hash", ["monitoring"])
    life.do("users.add", "bob", "hash")
    life.do("users.set_password", "ann", "another")
    life.do("users.set_tags", "ann", ["administrator"])
    for user in ("ann", "bob"):
        life.do("users.permit", user, "a", "b", "c")
        life.do("users.permit_topic", user, "amq.topic", "w", "r")
        life.do("users.permit_topic", user, "other", "w", "r")
        life.do("users.give_app", f"app of {user}", user)
    life.do("users.forbid_topic", "ann", "other")
    life.do("users.forbid_topic", "ann")
    life.do("users.forbid", "ann")
    life.do("users.delete", "bob")
    assert life.faults.raised
    users = life.broker.state.users
    assert list(users.by_name) == ["ann"] and not users.permissions and list(users.apps.values()) == ["ann"]
