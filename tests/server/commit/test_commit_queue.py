"""Commits of an event loop beside those of threads: one order, nobody blocked, nobody forgotten."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from broker_core.broker.access.users import transaction_key
from broker_core.broker.broker import BrokerState
from broker_core.core import failpoint
from broker_core.core.address import VHOST
from broker_core.core.block import NotLoaded
from broker_core.core.change import Change
from broker_core.core.errors import PreconditionFailed, StoreFailed
from broker_core.core.records import OutcomeRecord
from broker_core.node import committer
from broker_core.node.loaded_blocks import LoadedBlocks
from broker_core.node.local import LocalBroker
from broker_core.server.commit_queue import CommitQueue
from tests.make import GatedStore


def remember(name: str) -> Callable[[BrokerState, Change, int], str]:
    def work(state: BrokerState, change: Change, now: int) -> str:
        if name.startswith("bad"):
            raise PreconditionFailed("no")
        state.names.outcomes.remember(
            change, OutcomeRecord(transaction_key(VHOST, "", name), "committed", now)
        )
        return name

    return work


@pytest.fixture
def store() -> GatedStore:
    return GatedStore()


@pytest.fixture(params=[committer.PLAN_S, 0.0], ids=["enough time", "a work a group"])
def plan_s(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> float:
    monkeypatch.setattr(committer, "PLAN_S", request.param)
    return request.param


@pytest.fixture
def broker(store: GatedStore, plan_s: float) -> Iterator[LocalBroker]:
    broker = LocalBroker(store, upkeep=False)
    yield broker
    broker.close()


def test_what_is_submitted_in_one_tick_is_one_group_commit_answered_in_order(store, broker, plan_s) -> None:
    """Or several, where one would take too long to plan."""

    async def run() -> list[object]:
        commits = CommitQueue(asyncio.get_running_loop(), broker)
        answers: list[object] = []
        done = asyncio.Event()
        for name in ("a", "bad", "b"):
            commits.submit(remember(name), lambda answer, error: answers.append(error or answer))
        commits.submit(remember("last"), lambda _answer, _error: done.set())
        await done.wait()
        assert commits.idle
        return answers

    first, second, third = asyncio.run(run())
    assert (first, third) == ("a", "b") and isinstance(second, PreconditionFailed)
    assert store.groups == ([3] if plan_s else [1, 1, 1])  # the refused one wrote nothing


async def hanging(store: GatedStore, commit: Callable[[], object]) -> threading.Thread:
    """A thread that hangs in the disk with its ``commit``, until ``store.gate`` opens."""
    store.gate.clear()
    store.entered.clear()
    thread = threading.Thread(target=commit)
    thread.start()
    assert await asyncio.get_running_loop().run_in_executor(None, store.entered.wait, 600)
    return thread


def test_the_loop_goes_on_while_a_thread_commits_and_then_leads_itself(store, broker) -> None:
    """A thread hangs in the disk: the loop still runs callbacks, and its own work is committed after that of
    the thread.
    """

    async def run() -> None:
        loop = asyncio.get_running_loop()
        commits = CommitQueue(loop, broker)
        thread = await hanging(store, lambda: broker.run(remember("thread")))
        answered = loop.create_future()
        commits.submit(remember("loop"), lambda answer, error: answered.set_result((answer, error)))
        for _ in range(100):
            await asyncio.sleep(0)  # the loop is free, and nothing is answered before it is durable
        assert not answered.done() and not commits.idle
        store.gate.set()
        assert await asyncio.wait_for(answered, 30) == ("loop", None)
        assert broker.outcome("thread") == broker.outcome("loop") == "committed"
        thread.join()

    asyncio.run(run())


def test_what_another_thread_commits_opens_with_one_call_of_the_loop_and_leaves_no_cycle(
    store, broker
) -> None:
    """A call from another thread is a system call, and each cycle waits for a collection, which stops everybody."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        commits = CommitQueue(loop, broker)
        thread = await hanging(store, lambda: broker.run(remember("thread")))
        answers: list[object] = []
        answered = asyncio.Event()

        def then(answer: object, _error: BaseException | None) -> None:
            answers.append(answer)
            if len(answers) == 64:
                answered.set()

        calls = 0
        threadsafe = loop.call_soon_threadsafe

        def counted(*args: Any, **named: Any) -> asyncio.Handle:
            nonlocal calls
            calls += 1
            return threadsafe(*args, **named)

        for number in range(64):
            commits.submit(remember(f"{number}"), then, number)
        await asyncio.sleep(0)  # the loop's works wait for the thread
        gc.collect()
        gc.disable()
        try:
            loop.call_soon_threadsafe = counted  # type: ignore[method-assign]
            store.gate.set()
            await asyncio.wait_for(answered.wait(), 600)
            await loop.run_in_executor(None, thread.join)
            while not commits.idle:
                await asyncio.sleep(0)
            del loop.call_soon_threadsafe
            assert answers == [f"{number}" for number in range(64)]
            # the lead, what a thread that leads has finished; the thread's own end
            assert calls < 32
            # by its type: ``isinstance`` asks proxies, which may then do anything
            waiting = [each for each in gc.get_objects() if type(each) is committer.Waiting]
            left = [each for each in waiting if isinstance(each.origin, int)]  # of this test
            assert not left
        finally:
            gc.enable()

    asyncio.run(run())


def test_a_loop_and_threads_commit_side_by_side_and_each_is_answered_once(broker) -> None:
    names = [[f"{who}-{number}" for number in range(300)] for who in range(4)]

    async def run() -> list[str]:
        loop = asyncio.get_running_loop()
        commits = CommitQueue(loop, broker)
        answers: list[str] = []
        threads = [
            threading.Thread(target=lambda own=own: [broker.run(remember(name)) for name in own])
            for own in names[1:]
        ]
        for thread in threads:
            thread.start()
        for name in names[0]:
            answered = asyncio.Event()

            def then(answer: str, error: BaseException | None, answered: asyncio.Event = answered) -> None:
                assert error is None
                answers.append(answer)
                answered.set()

            commits.submit(remember(name), then)
            await asyncio.wait_for(answered.wait(), 30)
        await loop.run_in_executor(None, lambda: [thread.join(600) for thread in threads])
        return answers

    assert asyncio.run(run()) == names[0]
    assert all(broker.outcome(name) == "committed" for own in names for name in own)


def test_a_failed_disk_answers_everybody_who_waits_in_the_loop(store, broker) -> None:
    async def run() -> list[tuple[object, BaseException | None]]:
        loop = asyncio.get_running_loop()
        commits = CommitQueue(loop, broker)
        store.broken = True

        def fails() -> None:
            with pytest.raises(StoreFailed):
                broker.run(remember("thread"))

        thread = await hanging(store, fails)
        answers: list[tuple[object, BaseException | None]] = []
        done = asyncio.Event()
        commits.submit(remember("one"), lambda answer, error: answers.append((answer, error)))
        commits.submit(remember("two"), lambda answer, error: (answers.append((answer, error)), done.set()))
        await asyncio.sleep(0)
        store.gate.set()
        await asyncio.wait_for(done.wait(), 30)
        thread.join()
        return answers

    assert [(answer, type(error)) for answer, error in asyncio.run(run())] == [(None, StoreFailed)] * 2


def test_a_work_whose_commit_fails_has_no_answer(store, broker) -> None:
    """It had one when the commit was planned."""

    async def run() -> list[tuple[object, BaseException | None]]:
        commits = CommitQueue(asyncio.get_running_loop(), broker)
        store.broken = True
        answers: list[tuple[object, BaseException | None]] = []
        done = asyncio.Event()
        commits.submit(remember("one"), lambda answer, error: answers.append((answer, error)))
        commits.submit(remember("two"), lambda answer, error: (answers.append((answer, error)), done.set()))
        await asyncio.wait_for(done.wait(), 600)
        return answers

    assert [(answer, type(error)) for answer, error in asyncio.run(run())] == [(None, StoreFailed)] * 2


def test_works_of_one_origin_are_answered_in_the_order_of_asking(store, broker) -> None:
    """The first two are handed to a thread's group, and the third is committed by the loop before the answer
    of the second comes from there.
    """

    async def run() -> list[object]:
        loop = asyncio.get_running_loop()
        commits = CommitQueue(loop, broker)
        answers: list[object] = []
        done = asyncio.Event()

        def ask(name: str, origin: str = "channel") -> None:
            commits.submit(remember(name), lambda answer, error: answers.append(error or answer), origin)

        thread = await hanging(store, lambda: broker.run(remember("thread")))
        for name in ("first", "second"):
            ask(name)
            await asyncio.sleep(0)  # a tick each
        store.gate.set()
        thread.join()  # now the first work leads: its callback waits in the loop
        ask("third")
        commits.submit(remember("last"), lambda _answer, _error: done.set())
        await asyncio.wait_for(done.wait(), 30)
        while not commits.idle:
            await asyncio.sleep(0)
        return answers

    assert asyncio.run(run()) == ["first", "second", "third"]


def test_a_thread_whose_group_is_led_by_a_work_that_is_held_up_is_answered(broker, monkeypatch) -> None:
    """A work of a channel waits for the disk. The next one gets the lead, and stays behind it."""
    disk, held, go = threading.Event(), threading.Event(), threading.Event()
    tries: list[str] = []

    def waits(state: BrokerState, change: Change, now: int) -> str:
        tries.append("once")
        if len(tries) == 1:
            raise NotLoaded([])
        return "first"

    def planned(_name: object) -> None:
        held.set()
        assert go.wait(600)

    monkeypatch.setattr(LoadedBlocks, "load", lambda *_: disk.wait(600))

    async def run() -> list[object]:
        loop = asyncio.get_running_loop()
        commits = CommitQueue(loop, broker)
        answers: list[object] = []
        commits.submit(waits, lambda answer, _error: answers.append(answer), "channel")
        while not tries:
            await asyncio.sleep(0)
        failpoint.arm("committer.planned", planned)
        leader = threading.Thread(target=broker.run, args=(remember("leader"),))
        leader.start()
        await loop.run_in_executor(None, held.wait, 600)
        commits.submit(remember("second"), lambda answer, _error: answers.append(answer), "channel")
        while not broker.committer.waiting:
            await asyncio.sleep(0)
        follower = loop.run_in_executor(None, broker.run, remember("thread"))
        while len(broker.committer.waiting) < 2:
            await asyncio.sleep(0.001)
        failpoint.disarm()
        go.set()
        assert await asyncio.wait_for(follower, 600) == "thread"
        assert answers == []
        disk.set()
        while not commits.idle:
            await asyncio.sleep(0.001)
        leader.join()
        return answers

    assert asyncio.run(run()) == ["first", "second"]


def test_works_behind_one_that_waited_are_several_groups(store, broker, plan_s, monkeypatch) -> None:
    """They are no more in one group than those of others, where they take too long."""
    disk, tries = threading.Event(), list[str]()

    def waits(state: BrokerState, change: Change, now: int) -> str:
        tries.append("once")
        if len(tries) == 1:
            raise NotLoaded([])
        return remember("first")(state, change, now)

    monkeypatch.setattr(LoadedBlocks, "load", lambda *_: disk.wait(600))

    async def run() -> list[object]:
        commits = CommitQueue(asyncio.get_running_loop(), broker)
        answers: list[object] = []
        commits.submit(waits, lambda answer, _error: answers.append(answer), "channel")
        for name in ("second", "third"):
            commits.submit(remember(name), lambda answer, _error: answers.append(answer), "channel")
        commits.submit(remember("other"), lambda answer, _error: answers.append(answer))
        while "other" not in answers:
            await asyncio.sleep(0)
        disk.set()
        while not commits.idle:
            await asyncio.sleep(0.001)
        return answers

    assert asyncio.run(run()) == ["other", "first", "second", "third"]
    assert store.groups == ([1, 3] if plan_s else [1, 1, 1, 1])
