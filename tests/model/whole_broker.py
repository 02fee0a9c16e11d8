"""Any history of a whole broker against the naive one: channels, transactions, prepared ones, dead letters,
limits, time to live, exclusive and transient queues, a Spark app beside them, upkeep, clock steps, and
crashes before, within and after each commit.

After every step the queues hold the same copies in the same order and state, and what is counted agrees with
what is there. A step that is cut off by a crash has happened or not, as a whole. At the end everything is
consumed, and the store holds nothing any more.
"""

from __future__ import annotations

import copy
import itertools
import random
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from broker_core.broker.access.rights import OWNER
from broker_core.broker.decision import Decision
from broker_core.core import errors, failpoint
from broker_core.engine import START, Limit, Origin, ReadTicket
from broker_core.message.deduplication import HEADER
from broker_core.message.properties import Properties
from broker_core.node.channel import LocalChannel
from broker_core.node.committer import changes
from broker_core.node.engine import EmbeddedEngine
from broker_core.node.local import LocalBroker
from broker_core.node.vhost_engines import VhostEngines
from broker_core.routing.exchange_types import DEDUPLICATING
from broker_core.server.access.vhosts import Vhosts
from broker_core.store.durable import DurableStore
from broker_core.store.memory import MemoryStore
from broker_core.store.port import Store
from tests.broker.conftest import Clock
from tests.crash.test_store_crash import tear
from tests.engine.bench import Bench
from tests.make import beneath, spill
from tests.model.naive_broker import (
    DEAD,
    EXPIRE,
    LATER,
    LENGTH,
    NEWS,
    ONCE,
    PENDING,
    TTL_US,
    WAITING,
    Copy,
    NaiveBroker,
    Outcome,
    Refused,
    Work,
    delay_ms,
    expiration_ms,
)
from tests.reading import NothingCached, fetched, oldest, purgeable, unsettled

DLX = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": DEAD}
QUEUES: dict[str, dict[str, Any]] = {
    DEAD: {},
    "plain": DLX,
    "short": {**DLX, "x-max-length": LENGTH},
    "timed": {**DLX, "x-message-ttl": TTL_US // 1000},
    "refusing": {"x-max-length": LENGTH, "x-overflow": "reject-publish"},
    "in": {},
    "out": {},
    "memory": {},
    ONCE: {"x-message-deduplication": True, "x-cache-size": 1_000},
    PENDING: {"x-message-deduplication": True},
}
ROUTES: list[tuple[str, ...]] = [
    ("plain",), ("short",), ("timed",), ("refusing",), ("in",), ("memory",),
    ("plain", "short", "timed"), ("memory", "plain"), ("short", "refusing"), (ONCE,), (PENDING, ONCE),
    (LATER,), (LATER, "plain"), (NEWS,), (NEWS, ONCE),
]  # fmt: skip


def properties_of(body: bytes, queues: tuple[str, ...], persistent: bool) -> bytes:
    """With an id where duplicates are dropped, or that delays lead to, and the delay and the expiration that the
    body has there; most persistent messages have none at all.
    """
    headers: dict[str, object] = {HEADER: body} if {ONCE, NEWS, LATER}.intersection(queues) else {}
    if LATER in queues:
        headers["x-delay"] = delay_ms(body)
    own_ms = expiration_ms(body, queues)
    if persistent and not headers and own_ms is None:
        return b""
    expiration = None if own_ms is None else str(own_ms)
    return Properties(headers=headers, expiration=expiration, delivery_mode=2 if persistent else 1).encode()


STEPS = [
    "store.commit.begin",
    "store.commit.synced",
    "store.commit.executed",
    "store.commit.committed",
    "committer.durable",
]
UPKEEP_STEPS = [
    "store.seal.written",
    "store.seal.synced",
    "upkeep.seal.written",
    "upkeep.seal.committed",
    "upkeep.compact.written",
]
CRASH = st.sampled_from([""] * 30 + STEPS)
APP, QUERY = "app", "query"


@dataclass
class Peer:
    """A channel, and what it has gathered and holds in the model."""

    channel: LocalChannel
    transactional: bool
    held: dict[int, tuple[str, Copy]] = field(default_factory=dict)
    marked: dict[int, tuple[str, Copy]] = field(default_factory=dict)
    work: Work = field(default_factory=Work)


class WholeBroker(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.store: Store = self.new_store()
        self.naive = NaiveBroker()
        self.peers: list[Peer] = []
        self.numbers = itertools.count()
        self.batch = 0
        self.source: Any = {"in": START}
        self.sent: list[tuple[bytes, bool]] = []  # to queues that drop duplicates: body, persistent

    # -- the store: another machine may have another ---------------------------------------------------------
    def new_store(self) -> Store:
        return MemoryStore()

    def reopened(self) -> Store:
        assert isinstance(self.store, MemoryStore)
        return self.store.reopened()

    def open(self) -> None:
        self.broker = LocalBroker(self.store, self.clock, monotonic=self.clock.monotonic, upkeep=False)
        self.engine = EmbeddedEngine(self.broker)
        self.bench = Bench.__new__(Bench)
        self.bench.engine, self.bench.local = self.engine, self.broker

    @initialize()
    def start(self) -> None:
        self.open()
        with self.broker.channel() as channel:
            for number in range(len(ROUTES)):
                channel.exchange_declare(f"route{number}", "fanout")
            channel.exchange_declare(LATER, "x-delayed-message", arguments={"x-delayed-type": "fanout"})
            channel.exchange_declare(NEWS, DEDUPLICATING, arguments={"x-cache-size": 1_000})
            for number, route in enumerate(ROUTES):
                for exchange in WAITING.keys() & route:
                    topology = self.broker.state.topology
                    self.broker.run(changes(topology.bind_exchange, exchange, f"route{number}"))
        for exchange in WAITING:
            self.naive.declare(exchange, durable=True)
        for name in QUEUES:
            self.naive.declare(name, durable=name != "memory")
            self.declare(name)
        self.add_peer(True)
        self.add_peer(False)

    def teardown(self) -> None:
        failpoint.disarm()
        if hasattr(self, "broker"):
            self.consume_everything()
            self.broker.close()

    # -- a step that a crash may cut off ---------------------------------------------------------------------
    def do(self, operation: Callable[[], Any], model: Callable[[NaiveBroker], Any], crash: str = "") -> bool:
        """Both brokers do it, or with ``crash`` perhaps. False where the real one crashed and was opened
        again.
        """
        if not crash:
            answer = operation()
            assert model(self.naive) == answer
            return True
        failpoint.arm(crash, "raise")
        try:
            operation()
        except (errors.StoreFailed, OSError):
            pass
        finally:
            failpoint.disarm()
        if self.broker.committer.failure is None:  # it did not come by
            model(self.naive)
            return True
        done = copy.deepcopy(self.naive)
        model(done)
        self.reopen()
        found = self.contents()
        done.crash(self.left())
        self.naive.crash(self.left())
        assert found in (done.contents(), self.naive.contents()), (
            "a commit that was cut off has happened whole, or not at all"
        )
        if found != self.naive.contents():
            self.naive = done
        return False

    def reopen(self) -> None:
        for peer in self.peers:
            beneath(peer.channel).closed = "the broker crashed"
        self.peers.clear()
        store = self.reopened()
        self.broker.committer.stop(errors.StoreFailed("crash"))
        self.broker.close()
        self.store = store
        self.open()
        self.declare("memory")
        self.add_peer(True)
        self.add_peer(False)

    def declare(self, name: str) -> None:
        with self.broker.channel() as channel:
            channel.queue_declare(name, durable=name != "memory", arguments=QUEUES[name] or None)
            for number, route in enumerate(ROUTES):
                if name in route:
                    channel.queue_bind(name, f"route{number}")
            for exchange, (_, queues) in WAITING.items():
                if name in queues:
                    channel.queue_bind(name, exchange)

    def left(self) -> set[bytes]:
        return {body for body, _ in self.contents()["in"]}

    # -- looking ---------------------------------------------------------------------------------------------
    def contents(self) -> dict[str, list[Any]]:
        state = self.broker.state
        found: dict[str, list[Any]] = {
            "(in doubt)": sorted((row.xid, row.state) for row in self.broker.recover())
        }
        waiting = dict(state.topology.delayed())
        for name, queue in (*state.topology.queues.items(), *waiting.items()):
            found[name] = [
                (
                    fetched(self.broker, queue, offset).body,
                    "taken"
                    if offset in queue.ready.unacked or queue.progress.claimed.contains(offset)
                    else "ready",
                )
                for offset in unsettled(queue)
            ]
        return {**found, DEAD: sorted(found[DEAD])}

    @invariant()
    def both_hold_the_same(self) -> None:
        if not hasattr(self, "broker") or not self.naive.queues:
            return
        contents = self.contents()
        assert contents == self.naive.contents()
        for queue in self.broker.state.topology.queues.values():
            assert oldest(queue) == purgeable(queue), queue.name
        for info in self.broker.queues():
            assert info.messages == len(contents[info.name]), info
        assert [info.xid for info in self.broker.prepared()] == list(self.naive.prepared), "oldest first"

    # -- channels --------------------------------------------------------------------------------------------
    def add_peer(self, transactional: bool) -> None:
        channel = self.broker.channel()
        if transactional:
            channel.tx_select()
        self.peers.append(Peer(channel, transactional))

    @precondition(lambda self: len(self.peers) < 4)
    @rule(transactional=st.booleans())
    def open_channel(self, transactional: bool) -> None:
        self.add_peer(transactional)

    def now_us(self) -> int:
        return self.broker.committer._last_us

    @precondition(lambda self: self.peers)
    @rule(
        data=st.data(),
        route=st.integers(0, len(ROUTES) - 1),
        count=st.integers(1, 4),
        persistent=st.booleans(),
        crash=CRASH,
        again=st.integers(0, 4),
    )
    def publish(
        self, data: st.DataObject, route: int, count: int, persistent: bool, crash: str, again: int
    ) -> None:
        """``again``: one of the last messages that went to a queue that drops duplicates is sent again."""
        peer = data.draw(st.sampled_from(self.peers))
        for _ in range(count):
            if peer in self.peers:  # no crash yet
                self.publish_one(peer, route, persistent, crash, again)

    def publish_one(self, peer: Peer, route: int, persistent: bool, crash: str, again: int = 0) -> None:
        body = b"%d" % next(self.numbers)
        if {ONCE, NEWS, LATER} & set(ROUTES[route]):
            if LATER not in ROUTES[route] and 0 < again <= len(self.sent):
                body, persistent = self.sent[-again]
            self.sent.append((body, persistent))
        properties = properties_of(body, ROUTES[route], persistent)
        one = (ROUTES[route], body, persistent)
        if peer.transactional:
            peer.channel.publish(body, f"route{route}", "", properties)
            peer.work.publishes.append(one)
            return
        self.do(
            lambda: refused(lambda: peer.channel.publish(body, f"route{route}", "", properties)),
            lambda naive: refused(lambda: naive.commit(Work([one]), self.now_us())),
            crash,
        )

    @precondition(lambda self: self.peers)
    @rule(data=st.data(), name=st.sampled_from(sorted(QUEUES)), count=st.integers(1, 3))
    def get(self, data: st.DataObject, name: str, count: int) -> None:
        for _ in range(count):
            self.get_one(data.draw(st.sampled_from(self.peers)), name)

    def get_one(self, peer: Peer, name: str) -> None:
        if name == "in" and self.naive.owned:
            try:
                peer.channel.get(name)
            except errors.ResourceLocked:
                return
            raise AssertionError("an owned queue gives to nobody but its app")
        if name in EXPIRE:
            self.naive.expire(self.broker.clock(), name, sweep=False)
        if name == DEAD:
            delivery = peer.channel.get(name)
            expected = next(
                (
                    c
                    for c in self.naive.queues[DEAD]
                    if delivery and c.body == delivery.body and c.state == "ready"
                ),
                None,
            )
            if expected is not None:
                expected.state = "held"
        else:
            delivery, expected = peer.channel.get(name), self.naive.take(name)
        assert (delivery is None) == (expected is None), (delivery, expected)
        if delivery is not None and expected is not None:
            assert delivery.body == expected.body
            assert expected.redelivered in (None, delivery.redelivered)
            peer.held[delivery.tag] = (name, expected)

    @precondition(lambda self: self.peers)
    @rule(data=st.data(), name=st.sampled_from(sorted(QUEUES)), step=st.integers(1, 3))
    def get_at(self, data: st.DataObject, name: str, step: int) -> None:
        peer = data.draw(st.sampled_from(self.peers))
        if name in EXPIRE:
            self.expire()
        end = self.engine.available([name])[name].end
        offsets = range(max(0, end - 1_000), end)
        try:
            deliveries = peer.channel.get_at(name, offsets[::step])
        except errors.ResourceLocked:
            assert name == "in" and self.naive.owned
            return
        ready = {copy.body: copy for copy in self.naive.queues[name] if copy.state == "ready"}
        if step == 1 and name != DEAD:
            assert [delivery.body for delivery in deliveries] == list(ready)
        for delivery in deliveries:
            copy = ready.pop(delivery.body)
            copy.state = "held"
            assert copy.redelivered in (None, delivery.redelivered)
            peer.held[delivery.tag] = (name, copy)

    @precondition(lambda self: any(peer.held for peer in self.peers))
    @rule(data=st.data(), outcome=st.sampled_from(["ack", "reject", "requeue"]), crash=CRASH)
    def settle(self, data: st.DataObject, outcome: Outcome, crash: str) -> None:
        peer = data.draw(st.sampled_from([peer for peer in self.peers if peer.held]))
        tag = data.draw(st.sampled_from(sorted(peer.held)))
        name, held = peer.held.pop(tag)

        def call() -> None:
            if outcome == "ack":
                peer.channel.ack(tag)
            else:
                peer.channel.nack(tag, requeue=outcome == "requeue")

        if peer.transactional:
            call()
            peer.marked[tag] = (name, held)
            peer.work.settles.append((name, held, outcome))
            return
        at = self.place(name, held)

        def model(naive: NaiveBroker) -> None:
            settles = [(name, naive.queues[name][at], outcome)] if at is not None else []
            naive.commit(Work(settles=settles), self.now_us())

        self.do(call, model, crash)

    def place(self, name: str, held: Copy) -> int | None:
        """None: its queue was deleted."""
        return next((number for number, other in enumerate(self.naive.queues[name]) if other is held), None)

    @precondition(lambda self: any(peer.transactional for peer in self.peers))
    @rule(
        data=st.data(),
        how=st.sampled_from(["commit", "token", "prepare", "rollback"]),
        crash=CRASH,
        spilled=st.booleans(),
    )
    def end_transaction(self, data: st.DataObject, how: str, crash: str, spilled: bool) -> None:
        peer = data.draw(st.sampled_from([peer for peer in self.peers if peer.transactional]))
        work, peer.work, marked, peer.marked = peer.work, Work(), peer.marked, {}
        if how == "rollback":
            peer.channel.tx_rollback()
            peer.held |= marked
            return
        if spilled:
            spill(self.broker, peer.channel)
        xid = f"x{next(self.numbers)}" if how != "commit" else ""
        places = [(name, self.place(name, held), outcome) for name, held, outcome in work.settles]

        def model(naive: NaiveBroker) -> Any:
            same = Work(
                work.publishes,
                [(name, naive.queues[name][at], outcome) for name, at, outcome in places if at is not None],
            )
            if how != "prepare":
                return refused(lambda: naive.commit(same, self.now_us(), xid=xid))
            return refused(lambda: naive.prepare(same, xid) if same.publishes or same.settles else None)

        def real() -> Any:
            if how == "prepare":
                return refused(lambda: peer.channel.prepare(xid))
            return refused(lambda: peer.channel.tx_commit(xid))

        if not self.do(real, model, crash):
            return
        if peer.channel.closed:  # refused: the channel has ended, and gave back what it held
            self.naive.give_back(held for _, held in (*peer.held.values(), *marked.values()))
            self.peers.remove(peer)
        elif how == "prepare" and (work.publishes or work.settles) and xid not in self.naive.prepared:
            peer.work, peer.marked = work, marked  # refused: the channel goes on with its transaction

    @precondition(lambda self: self.naive.prepared)
    @rule(data=st.data(), commit=st.booleans(), by_hand=st.booleans(), crash=CRASH)
    def decide(self, data: st.DataObject, commit: bool, by_hand: bool, crash: str) -> None:
        xid = data.draw(st.sampled_from(sorted(self.naive.prepared)))
        self.decide_one(xid, commit, by_hand, crash)

    def decide_one(self, xid: str, commit: bool, by_hand: bool = False, crash: str = "") -> None:
        verb: Decision = "commit" if commit else "rollback"
        if self.do(
            lambda: nothing(self.broker.decide(verb, xid, OWNER, None, None, by_hand=by_hand)),
            lambda naive: naive.decide(xid, commit, self.now_us(), by_hand),
            crash,
        ):
            assert self.broker.outcome(xid) == self.naive.outcomes[xid]

    @precondition(lambda self: len(self.naive.in_doubt()) > len(self.naive.prepared))
    @rule(data=st.data(), commit=st.booleans(), crash=CRASH)
    def hear_and_forget(self, data: st.DataObject, commit: bool, crash: str) -> None:
        """Who named a transaction decides it behind an operator."""
        found = [xid for xid, state in self.naive.in_doubt() if state != "prepared"]
        xid = data.draw(st.sampled_from(found))
        with pytest.raises(errors.HeuristicOutcome):
            self.broker.commit(xid) if commit else self.broker.rollback(xid)
        self.do(
            lambda: nothing(self.broker.decide("forget", xid, OWNER, None, None)),
            lambda naive: naive.forget(xid),
            crash,
        )

    @precondition(lambda self: self.peers)
    @rule(data=st.data())
    def close_channel(self, data: st.DataObject) -> None:
        self.close_one(data.draw(st.sampled_from(self.peers)))

    def close_one(self, peer: Peer) -> None:
        self.peers.remove(peer)
        peer.channel.close()
        self.naive.give_back(held for _, held in (*peer.held.values(), *peer.marked.values()))

    @rule(name=st.sampled_from(["plain", "timed", DEAD, "memory", ONCE, PENDING]))
    def purge(self, name: str) -> None:
        with self.broker.channel() as channel:
            self.expire()  # what is too old may go either way
            assert channel.queue_purge(name) == self.naive.purge(name)

    @rule(name=st.sampled_from(["plain", "short", "timed", "memory", DEAD, ONCE, PENDING]))
    def delete_and_declare_again(self, name: str) -> None:
        with self.broker.channel() as channel:
            channel.queue_delete(name)
        self.declare(name)
        self.naive.delete(name)
        for peer in self.peers:
            peer.work.forget(name)

    @rule(bound=st.booleans(), crash=CRASH)
    def policy(self, bound: bool, crash: str) -> None:
        """Of the queue ``plain``; what it has too much leaves soon after the commit of the policy."""
        vhosts = Vhosts(self.broker, VhostEngines(self.broker))
        if bound:
            self.do(
                lambda: nothing(vhosts.set_policy("p", "^plain$", {"max-length": LENGTH})),
                lambda naive: naive.bound("plain", True),
                crash,
            )
        elif self.is_bound():
            self.do(
                lambda: nothing(vhosts.delete_policy("p")), lambda naive: naive.bound("plain", False), crash
            )
        self.naive.bound("plain", self.is_bound())  # a crash shows no difference in what is there
        self.expire()
        self.naive.overflow("plain", self.now_us())

    def is_bound(self) -> bool:
        return bool(self.broker.state.topology.policies.by_key)

    # -- what the broker does by itself ----------------------------------------------------------------------
    def expire(self) -> None:
        self.broker.upkeep.expire()
        self.naive.expire(self.broker.clock())
        self.naive.arrive(self.broker.clock())

    @rule(
        what=st.sampled_from(["expire", "tick", "seal", "compact"]),
        crash=st.sampled_from([""] * 15 + UPKEEP_STEPS),
    )
    def upkeep(self, what: Literal["expire", "tick", "seal", "compact"], crash: str) -> None:
        if what in ("expire", "tick"):
            self.naive.expire(self.broker.clock())
            self.naive.arrive(self.broker.clock())
            getattr(self.broker.upkeep, what)()
            return
        self.broker.upkeep.close_open()
        if crash:
            failpoint.arm(crash, "raise")
        try:
            self.broker.upkeep.seal()
            if what == "compact":
                self.broker.upkeep.compact()
        except (errors.StoreFailed, OSError):
            failpoint.disarm()
            self.reopen()
            self.naive.crash(self.left())
        finally:
            failpoint.disarm()

    @rule(seconds=st.sampled_from([0.3, 1.1, 5, -2, -3600]))
    def clock_step(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(how=st.sampled_from(["not now"] * 6 + ["killed", "closed"]))
    def restart(self, how: str) -> None:
        if how == "not now":
            return
        if how == "closed":
            self.broker.close()
        self.reopen()
        self.naive.crash(self.left())

    # -- a Spark app -----------------------------------------------------------------------------------------
    @rule(stop=st.sampled_from([""] * 15 + ["claim", "read", "stage", *STEPS]), rows=st.integers(1, 4))
    def micro_batch(self, stop: str, rows: int) -> None:
        """One micro-batch that copies ``in`` to ``out``; a driver that dies at ``stop`` is followed by
        another one later.
        """
        if any(c.state in ("held", "prepared") for c in self.naive.queues["in"]) and not self.naive.owned:
            return
        engine = self.engine
        end = engine.claim(APP, list(self.source), self.source, Limit(max_rows=rows), Origin(), "fail")
        self.naive.owned = True
        if end == self.source:
            return
        ranges = engine.resolve(APP, self.source, end)
        ((first, last),) = ranges.values()
        claimed = [c for c in self.naive.queues["in"] if c.state in ("ready", "claimed")][: last - first]
        for one in claimed:
            one.state, one.durable = "claimed", True
        if stop == "claim":
            return
        opened = engine.open_batch(APP, QUERY, self.batch, "fail")
        ticket = ReadTicket(APP, QUERY, self.batch, ranges, (("in", first, last),))
        bodies = [body for found in engine.read(ticket) for body in found.column("body").to_pylist()]
        assert bodies == [one.body for one in claimed], "a claimed range is the same rows, always"
        if stop == "read":
            return
        words = {"query": QUERY, "batch": self.batch, "app": APP}
        branches = [self.bench.stage(opened.token, *bodies, branch=f"b{next(self.numbers)}", **words)]
        if stop == "stage":
            return

        def model(naive: NaiveBroker) -> bool:
            naive.queues["in"] = [c for c in naive.queues["in"] if c.state != "claimed"]
            naive.commit(Work([(("out",), body, True) for body in bodies]), self.now_us())
            return False

        batch = self.batch
        done = self.do(
            lambda: engine.commit_batch(APP, QUERY, batch, opened.token, branches).already and "again",
            model,
            stop,
        )
        if not done and any(c.state == "claimed" for c in self.naive.queues["in"]):
            return  # it was not decided
        self.batch += 1
        self.source = end

    # -- the end ---------------------------------------------------------------------------------------------
    def consume_everything(self) -> None:
        """What is left when all is consumed: nothing, neither in memory nor in the store."""
        for peer in self.peers:
            peer.channel.close()
        for xid in sorted(self.naive.prepared):
            self.broker.rollback(xid)
        if self.naive.owned:
            if self.source != {"in": START}:
                self.engine.ack(APP, self.source)
            self.engine.release(APP, "in", force=True)
        with self.broker.channel() as channel:
            for name in (*QUEUES, DEAD):  # dead letters come while the others are emptied
                while (delivery := channel.get(name)) is not None:
                    channel.ack(delivery.tag)
            for exchange in WAITING:
                channel.exchange_delete(exchange)
        self.broker.upkeep.close_open()
        self.broker.upkeep.tick()
        state = self.broker.state
        for queue in state.topology.queues.values():
            assert (queue.messages, queue.unacknowledged, queue.log.runs) == (0, 0, []), queue.name
        kept = {
            batch_id: batch.pins
            for batch_id, batch in state.blocks.by_id.items()
            if batch_id > 0 and batch.pins
        }
        assert not kept or self.naive.owned, f"batches that nothing needs: {kept}"


def nothing(_answer: object) -> None:
    """What both give where only one of them has something to tell."""


def refused(call: Callable[[], Any]) -> str:
    """Whether a full queue refused it."""
    try:
        call()
    except (Refused, errors.PreconditionFailed):
        return "refused"
    return "done"


class NothingInMemory(WholeBroker):
    """The same where every operation on a sealed block must wait for it."""

    def new_store(self) -> Store:
        return NothingCached()


class OnDisk(WholeBroker):
    """The same over SQLite and segments, small ones. A crash is a power cut: what was never synced is
    missing, or garbage.
    """

    def new_store(self) -> Store:
        self._folder = Path(tempfile.mkdtemp(prefix="txmq-history-"))
        self._opened = 0
        return self._open(self._folder / "0")

    def _open(self, path: Path) -> Store:
        self._path = path
        return DurableStore(path, roll_bytes=4_000, cache_bytes=0)  # what is sealed is only on disk

    def reopened(self) -> Store:
        self._opened += 1
        after = self._folder / str(self._opened)
        shutil.copytree(self._path, after, ignore=shutil.ignore_patterns("lock", "endpoint.json"))
        tear(after, random.Random(self._opened))
        return self._open(after)

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)
