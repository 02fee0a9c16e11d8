"""Blocks that are not in memory: who needs one waits for it without the lock, all others go on, and the
result is the same.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from broker_core.broker.broker import BrokerState
from broker_core.broker.queue.rank import Ranks
from broker_core.broker.transaction.publish import Publish
from broker_core.broker.transaction.transaction import Settle, Transaction
from broker_core.core import failpoint
from broker_core.core.block import NotLoaded
from broker_core.core.change import Change
from broker_core.core.errors import CorruptSegment, StoreFailed
from broker_core.engine import START, Limit, Origin
from broker_core.message.message import Message
from broker_core.message.properties import Properties
from broker_core.node.engine import EmbeddedEngine
from broker_core.node.local import LocalBroker
from broker_core.server.commit_queue import CommitQueue
from tests.broker.conftest import Clock
from tests.make import beneath
from tests.progress import GUARD_S
from tests.reading import SlowDisk

DLX = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}


@pytest.fixture
def store() -> Iterator[SlowDisk]:
    found = SlowDisk()
    yield found
    found.gate.set()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def broker(store: SlowDisk, clock: Clock) -> Iterator[LocalBroker]:
    found = LocalBroker(store, clock, upkeep=False)
    with found.channel() as channel:
        channel.queue_declare("dead")
        channel.queue_declare("disk", arguments=DLX)
        channel.queue_declare("memory")
    yield found
    failpoint.disarm()
    store.gate.set()
    found.close()


def publish(broker: LocalBroker, queue: str, *bodies: bytes, properties: bytes = b"") -> None:
    with broker.channel() as channel:
        channel.tx_select()
        for body in bodies:
            channel.publish(body, routing_key=queue, properties=properties)
        channel.tx_commit()


def seal(broker: LocalBroker) -> None:
    broker.upkeep.close_open()
    broker.upkeep.seal()


def on_disk(broker: LocalBroker, queue: str, *bodies: bytes, properties: bytes = b"") -> None:
    """Each body in a block of its own."""
    for body in bodies:
        publish(broker, queue, body, properties=properties)
        seal(broker)


def drained(broker: LocalBroker, queue: str) -> list[bytes]:
    with broker.channel() as channel:
        found = []
        while (delivery := channel.get(queue, no_ack=True)) is not None:
            found.append(delivery.body)
        return found


def in_thread(operation: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    answers: list[Any] = []

    def run() -> None:
        try:
            answers.append(operation())
        except Exception as error:
            answers.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, answers


# -- threads -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["get", "reject", "expire", "overflow"])
def test_while_one_caller_waits_for_the_disk_all_others_go_on(
    how: str, store: SlowDisk, broker: LocalBroker
) -> None:
    with broker.channel() as channel:
        channel.queue_declare("short", arguments={**DLX, "x-max-length": 1})
        channel.queue_declare("timed", arguments={**DLX, "x-message-ttl": 1_000})
    on_disk(broker, "disk", b"1")
    on_disk(broker, "short", b"2")
    on_disk(broker, "timed", b"3")
    holding = broker.channel()
    assert how != "reject" or holding.get("disk") is not None
    broker.clock._wall.advance(2)  # type: ignore[attr-defined]
    store.stop()
    operation = {
        "get": lambda: drained(broker, "disk"),
        "reject": lambda: holding.reject(1, requeue=False),
        "expire": broker.upkeep.expire,
        "overflow": lambda: publish(broker, "short", b"4"),
    }[how]
    thread, answers = in_thread(operation)
    assert store.entered.wait(GUARD_S)
    publish(broker, "memory", b"a", b"b")
    assert drained(broker, "memory") == [b"a", b"b"]
    assert not answers
    store.gate.set()
    thread.join()
    assert answers == ([[b"1"]] if how == "get" else [None])
    expected = {"get": [], "reject": [b"1"], "expire": [b"3"], "overflow": [b"2"]}
    assert drained(broker, "dead") == expected[how]


def test_rejects_ask_for_all_their_blocks_together(store: SlowDisk, broker: LocalBroker) -> None:
    bodies = [b"%d" % number for number in range(20)]
    on_disk(broker, "disk", *bodies)
    runs: list[int] = []
    with broker.channel() as channel:
        channel.tx_select()
        while (delivery := channel.get("disk")) is not None:
            channel.reject(delivery.tag, requeue=False)
        transaction, commit = beneath(channel).transaction, broker.state.transactions.commit

        def work(state: BrokerState, change: Change, now: int) -> None:
            runs.append(now)
            commit(change, transaction, now)

        broker.run(work)
        beneath(channel).finish()
    assert len(runs) == 2
    assert drained(broker, "dead") == bodies


def test_many_queues_expire_in_few_commits_that_never_wait_for_the_disk(
    store: SlowDisk, broker: LocalBroker
) -> None:
    """A queue whose next message is not in memory does not stop those behind it."""
    names = [f"timed-{number}" for number in range(40)]
    with broker.channel() as channel:
        for name in names:
            channel.queue_declare(name, arguments={**DLX, "x-message-ttl": 1_000})
    for name in names:
        on_disk(broker, name, name.encode())
        publish(broker, name, name.encode() + b"+")
    broker.clock._wall.advance(2)  # type: ignore[attr-defined]
    before = store.reads
    broker.upkeep.expire()
    assert sorted(drained(broker, "dead")) == sorted(
        name.encode() + end for name in names for end in (b"", b"+")
    )
    assert store.reads - before < 4 * len(names)


def test_a_deadline_that_is_known_is_not_read_again(store: SlowDisk, broker: LocalBroker) -> None:
    with broker.channel() as channel:
        channel.queue_declare("timed", arguments={**DLX, "x-message-ttl": 3_600_000})
    own = Properties(expiration="3000000").encode()
    on_disk(broker, "timed", b"1", properties=own)
    broker.upkeep.expire()
    before = store.reads
    for _ in range(5):
        publish(broker, "timed", b"2")
        broker.upkeep.expire()
    assert store.reads == before
    assert broker.state.pending_checks.next_deadline > broker.clock(), "nobody looks again before"


def test_nobody_looks_again_for_the_next_message_before_it_expires(clock: Clock, broker: LocalBroker) -> None:
    """Its block is no longer in memory when the one before it has expired; what was decoded of it is."""
    published_us = clock()
    with broker.channel() as channel:
        arguments = {**DLX, "x-max-priority": 2, "x-message-ttl": 10_000}
        channel.queue_declare("timed", arguments=arguments)
        for number in range(6):
            channel.publish(b"%d" % number, routing_key="timed")
            clock.advance(1)
        for delivery in [channel.get("timed") for _ in range(6)]:
            assert delivery is not None
            if int(delivery.body) % 2:  # entries beside each other are decoded together, and not kept
                channel.ack(delivery.tag)
    seal(broker)
    for expired, number in enumerate((0, 2, 4), 1):
        clock.now_us = published_us + (10 + number) * 1_000_000 + 500_000
        for _ in range(2):  # the second time, nothing is due
            broker.upkeep.expire_due()
            assert broker.state.pending_checks.next_deadline > clock(), "nobody looks again before"
            assert broker.state.topology.queue("dead").log.visible_end == expired
    assert drained(broker, "dead") == [b"0", b"2", b"4"]


def test_a_damaged_block_gives_its_error_to_the_one_who_needs_it(
    store: SlowDisk, broker: LocalBroker
) -> None:
    on_disk(broker, "disk", b"1", b"2")
    damaged = broker.state.topology.queue("disk").log.runs[0].block_id
    store.damaged.add(damaged)
    with broker.channel() as channel, pytest.raises(CorruptSegment):
        channel.get("disk")
    publish(broker, "memory", b"a")
    assert drained(broker, "memory") == [b"a"]
    store.damaged.clear()
    assert drained(broker, "disk") == [b"1", b"2"]


def test_a_block_that_is_forgotten_while_it_is_loaded_does_no_harm(
    store: SlowDisk, broker: LocalBroker
) -> None:
    on_disk(broker, "disk", b"1", b"2")
    store.stop()
    thread, answers = in_thread(lambda: drained(broker, "disk"))
    assert store.entered.wait(GUARD_S)
    with broker.channel() as channel:
        assert channel.queue_purge("disk") == 2
    broker.upkeep.tick()
    publish(broker, "disk", b"3")
    store.gate.set()
    thread.join()
    assert answers == [[b"3"]]


def test_an_order_by_priority_is_learnt_block_by_block(store: SlowDisk, broker: LocalBroker) -> None:
    with broker.channel() as channel:
        channel.queue_declare("ranked", arguments={"x-max-priority": 9})
    for number in range(30):
        rank = number * 7 % 10
        publish(broker, "ranked", b"%d.%02d" % (rank, number), properties=Properties(priority=rank).encode())
        seal(broker)
    again = LocalBroker(store.reopened(), Clock(), upkeep=False)
    found = drained(again, "ranked")
    again.close()
    assert found == sorted(found, key=lambda body: (-int(body[:1]), body)) and len(found) == 30


def test_an_order_that_was_learnt_for_a_work_that_is_undone_stays_known(
    clock: Clock, store: SlowDisk, broker: LocalBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two queues expire together. The order of the first one was forgotten when the work had to wait for that
    of the second one, and the other way round, for ever.
    """
    names = ("one", "two")
    for name in names:
        with broker.channel() as channel:
            arguments = {**DLX, "x-max-priority": 2, "x-message-ttl": 1_000}
            channel.queue_declare(name, arguments=arguments)
        on_disk(broker, name, *(b"%d" % number for number in range(10)))
    again = LocalBroker(store.reopened(), clock, upkeep=False)
    learnt: list[Ranks] = []
    best = Ranks.best

    def noted(self: Ranks) -> int | None:
        assert len(learnt) < 10, "again and again"
        before = self.below
        found = best(self)
        if self.below > before:
            learnt.append(self)
        return found

    monkeypatch.setattr(Ranks, "best", noted)
    clock.advance(2)
    again.upkeep.expire()
    assert sorted(drained(again, "dead")) == sorted(2 * [b"%d" % number for number in range(10)])
    assert len(learnt) == len(set(map(id, learnt))) == len(names)
    again.close()


def test_a_length_in_bytes_is_measured_block_by_block(store: SlowDisk, broker: LocalBroker) -> None:
    arguments = {"x-max-length-bytes": 100, "x-overflow": "reject-publish"}
    with broker.channel() as channel:
        channel.queue_declare("heavy", arguments=arguments)
    on_disk(broker, "heavy", *(b"x" * 9 for _ in range(10)))
    again = LocalBroker(store.reopened(), Clock(), upkeep=False)
    publish(again, "heavy", b"x" * 10)
    with pytest.raises(Exception, match="is full"):
        publish(again, "heavy", b"x")
    assert len(drained(again, "heavy")) == 11
    again.close()


def test_a_claim_of_many_sealed_blocks_asks_for_them_together(store: SlowDisk, broker: LocalBroker) -> None:
    for _ in range(12):
        publish(broker, "memory", b"1")
        publish(broker, "memory", b"2")
        seal(broker)
    before = store.reads
    engine = EmbeddedEngine(broker)
    end = engine.claim("app", ["memory"], {"memory": START}, Limit(max_rows=21), Origin(), "fail")
    assert end == {"memory": 21}
    assert store.reads - before <= 12


# -- an event loop -------------------------------------------------------------------------------------------


def rejecting(broker: LocalBroker, log: list[str], name: str, queue: str) -> Callable[..., str]:
    """A work that needs the first message of ``queue``."""
    found = broker.state.topology.queue(queue)

    def work(state: BrokerState, change: Change, now: int) -> str:
        transaction = Transaction(broker.limits, 0)
        transaction.settles.append(Settle(found, found.progress.floor, "reject"))
        state.transactions.commit(change, transaction, now)
        log.append(name)
        return name

    return work


def noting(log: list[str], name: str) -> Callable[..., str]:
    def work(_state: BrokerState, _change: Change, _now: int) -> str:
        log.append(name)
        return name

    return work


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("led", [False, True], ids=["it leads", "a thread leads"])
def test_works_of_one_origin_stay_in_order_and_those_of_others_go_on(
    led: bool, store: SlowDisk, broker: LocalBroker
) -> None:
    on_disk(broker, "disk", b"1", b"2")
    log: list[str] = []
    answers: list[str] = []

    async def run() -> None:
        loop = asyncio.get_running_loop()
        commits = CommitQueue(loop, broker)
        held, go_on = threading.Event(), threading.Event()

        def hold(_name: str) -> None:
            held.set()
            go_on.wait(GUARD_S)

        thread: threading.Thread | None = None
        if led:
            failpoint.arm("committer.planned", hold)
            thread, _ = in_thread(lambda: broker.run(noting([], "thread")))
            await loop.run_in_executor(None, held.wait, GUARD_S)
        store.stop()

        def ask(work: Callable[..., str], origin: object) -> None:
            commits.submit(work, lambda answer, error: answers.append(error or answer), origin)

        ask(rejecting(broker, log, "a1", "disk"), "a")
        ask(noting(log, "a2"), "a")
        ask(noting(log, "b1"), "b")
        await asyncio.sleep(0.01)  # another tick
        ask(rejecting(broker, log, "a3", "disk"), "a")
        ask(noting(log, "a4"), "a")
        go_on.set()
        await loop.run_in_executor(None, store.entered.wait, GUARD_S)
        ask(noting(log, "a5"), "a")
        ask(noting(log, "b2"), "b")
        await until(lambda: "b2" in answers)
        assert log == answers == ["b1", "b2"] and not commits.idle
        store.gate.set()
        await until(lambda: commits.idle)
        if thread is not None:
            await loop.run_in_executor(None, thread.join)

    asyncio.run(run())
    assert log == answers == ["b1", "b2", "a1", "a2", "a3", "a4", "a5"]
    assert drained(broker, "dead") == [b"1", b"2"]
    assert not broker.committer._held_up


def test_when_the_disk_fails_everybody_behind_a_work_that_waits_is_answered(
    store: SlowDisk, broker: LocalBroker
) -> None:
    on_disk(broker, "disk", b"1")
    answers: list[object] = []

    async def run() -> None:
        commits = CommitQueue(asyncio.get_running_loop(), broker)
        store.stop()
        for name in ("a1", "a2", "a3"):
            work = rejecting(broker, [], name, "disk") if name == "a1" else noting([], name)
            commits.submit(work, lambda answer, error: answers.append(error or answer), "a")
        await asyncio.get_running_loop().run_in_executor(None, store.entered.wait, GUARD_S)
        broker.committer.stop(StoreFailed("the disk failed"))
        store.gate.set()
        await until(lambda: commits.idle)

    asyncio.run(run())
    assert [type(answer) for answer in answers] == [StoreFailed] * 3


def test_a_work_is_undone_before_it_waits(store: SlowDisk, broker: LocalBroker) -> None:
    on_disk(broker, "disk", b"1")
    queue = broker.state.topology.queue("memory")
    seen: list[int] = []

    def work(state: BrokerState, change: Change, now: int) -> bytes:
        seen.append(queue.log.next_offset)
        message = Message(b"new", "memory", "", b"")
        state.messages.enqueue(change, [Publish(message, (queue,), False)], now)
        return state.messages.fetch(state.topology.queue("disk"), 0).body

    with pytest.raises(NotLoaded), broker.look as state:
        state.messages.fetch(state.topology.queue("disk"), 0)
    assert broker.run(work) == b"1"
    assert seen == [0, 0]
    assert drained(broker, "memory") == [b"new"]
