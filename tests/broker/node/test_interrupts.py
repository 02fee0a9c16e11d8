"""Ctrl-C in the process of an embedded broker: a real child process, real signals."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType

import pytest

from broker_core.broker.broker import BrokerState
from broker_core.core.change import Change
from broker_core.node import committer
from broker_core.node.deferred_signals import SIGNALS, deferred_signals
from broker_core.node.local import LocalBroker
from broker_core.store.memory import MemoryStore
from tests.broker.node import interrupted
from tests.broker.node.test_committer import GatedStore, remember

PROGRAM = str(Path(interrupted.__file__))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["random", "failpoints"])
def test_an_interrupt_at_any_moment_leaves_every_commit_whole_and_the_broker_working(
    how: str, tmp_path: Path
) -> None:
    transactions = 3000
    command = [sys.executable, PROGRAM, str(tmp_path / "data"), "7", str(transactions), how]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    copies = Counter(found["out"])
    assert sorted(copies) == list(range(transactions))
    assert set(copies.values()) <= {1, 2, 3}
    assert found["left"] == 0 and found["beside"] == 0 and found["reopened"] and found["handler"]
    assert found["interrupts"] > 100


def test_an_interrupt_in_a_commit_is_raised_after_it_and_the_commit_is_whole() -> None:
    broker = LocalBroker(MemoryStore(), upkeep=False)

    def work(state: BrokerState, change: Change, now: int) -> None:
        remember("before")(state, change, now)
        os.kill(os.getpid(), signal.SIGINT)
        remember("after")(state, change, now)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a run in the background ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            broker.run(work)
    finally:
        signal.signal(signal.SIGINT, before)
    assert list(broker.state.names.outcomes) == ["before", "after"]
    assert broker.run(remember("later")) == "later"
    broker.close()


def test_a_thread_that_is_killed_when_it_gets_the_lead_hands_it_on() -> None:
    """The exception comes between the hand-over and the first step of leading."""

    class Killed(BaseException):
        pass

    store = GatedStore()
    broker = LocalBroker(store, upkeep=False)
    committer = broker.committer
    store.gate.clear()
    store.entered.clear()
    first = threading.Thread(target=broker.run, args=(remember("first"),))
    first.start()
    assert store.entered.wait(600)

    def killed(_mine: object) -> None:
        raise Killed

    failed: list[BaseException] = []

    def second() -> None:
        try:
            broker.run(remember("second"))
        except Killed as error:
            failed.append(error)

    follower = threading.Thread(target=second)
    follower.start()
    waiting = threading.Event()
    while not committer.waiting:
        waiting.wait(0.001)
    committer.lead = killed  # type: ignore[method-assign]
    store.gate.set()
    first.join()
    follower.join()
    del committer.lead  # type: ignore[method-assign]
    assert len(failed) == 1
    assert broker.run(remember("third")) == "third"
    assert "second" not in broker.state.names.outcomes
    broker.close()


@pytest.mark.parametrize("plan_s", [committer.PLAN_S, 0.0], ids=["one group", "a group each"])
@pytest.mark.parametrize("killed", [(2,), (1, 3), (2, 3, 4), (5,), (1, 2, 3, 4, 5)], ids=str)
def test_a_thread_that_is_killed_when_it_is_woken_wakes_the_next_one(
    killed: tuple[int, ...], plan_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thread 0 commits while the others wait; 1 commits for all of them then, or each for itself."""
    monkeypatch.setattr(committer, "PLAN_S", plan_s)

    class Killed(BaseException):
        pass

    store = GatedStore()
    broker = LocalBroker(store, upkeep=False)
    store.gate.clear()
    ended: list[int] = []

    def run(number: int) -> None:
        try:
            broker.run(remember(str(number)))
        except Killed:
            ended.append(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(6)]
    waiting = threading.Event()
    for number, thread in enumerate(threads):
        thread.start()
        if not number:
            assert store.entered.wait(600)
        while len(broker.committer.waiting) < number:
            waiting.wait(0.001)
    for number in killed:  # raised when its gate opens, before the first step behind it
        ident = ctypes.c_ulong(threads[number].ident or 0)
        assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(Killed)) == 1
    store.gate.set()
    for thread in threads:
        thread.join(600)
        assert not thread.is_alive()
    assert sorted(ended) == list(killed)
    assert broker.run(remember("later")) == "later"
    assert {str(number) for number in range(6) if number not in killed} <= set(broker.state.names.outcomes)
    broker.close()


def test_the_lead_never_goes_to_a_thread_that_left_while_others_of_its_group_had_their_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(committer, "PLAN_S", 0.0)
    store = GatedStore()
    broker = LocalBroker(store, upkeep=False)
    left: list[committer.Waiting] = []

    def leaves(state: BrokerState, change: Change, now: int) -> str:
        broker.committer._leave(left[0])  # as if something was raised there before it waits at its gate
        return "leaves"

    store.gate.clear()
    threads = [threading.Thread(target=broker.run, args=(remember("leader"),))]
    threads[0].start()
    assert store.entered.wait(600)
    waiting = threading.Event()
    for number, work in enumerate((leaves, remember("left"), remember("last")), 1):
        # the second one never ends
        threads.append(threading.Thread(target=broker.run, args=(work,), daemon=number == 2))
        threads[-1].start()
        while len(broker.committer.waiting) < number:
            waiting.wait(0.001)
    left.append(broker.committer.waiting[1])
    store.gate.set()
    for number in (0, 1, 3):
        threads[number].join(600)
        assert not threads[number].is_alive()
    assert set(broker.state.names.outcomes) == {"leader", "last"}
    broker.close()


def test_close_waits_for_a_commit_that_another_thread_leads() -> None:
    store = GatedStore()
    broker = LocalBroker(store, upkeep=False)
    order: list[str] = []
    close = store.close

    def closed(*, clean: bool = True) -> None:
        order.append("closed")
        close(clean=clean)

    store.close = closed  # type: ignore[method-assign]
    store.gate.clear()
    store.entered.clear()
    answers: list[object] = []
    leader = threading.Thread(
        target=lambda: (answers.append(broker.run(remember("led"))), order.append("committed"))
    )
    leader.start()
    assert store.entered.wait(600)
    closer = threading.Thread(target=broker.close)
    closer.start()
    waiting = threading.Event()
    while not broker.committer.waiting:
        waiting.wait(0.001)
    assert order == []
    store.gate.set()
    leader.join()
    closer.join()
    assert answers == ["led"] and sorted(order) == ["closed", "committed"]
    assert "led" in {getattr(record, "xid", "") for record in store.reopened().load().records}


def test_close_waits_for_a_block_on_its_way_into_a_segment() -> None:
    store = MemoryStore()
    broker = LocalBroker(store, upkeep=False)
    entered, leave = threading.Event(), threading.Event()

    def write() -> None:
        with broker.writing():
            entered.set()
            leave.wait()

    writer, closer = threading.Thread(target=write), threading.Thread(target=broker.close)
    writer.start()
    assert entered.wait(600)
    closer.start()
    closer.join(0.2)
    assert closer.is_alive()
    leave.set()
    closer.join()
    writer.join()


def test_every_handler_that_raises_waits_and_comes_back_in_its_place() -> None:
    raised: list[int] = []

    class Stop(Exception):
        pass

    def handle(number: int, _frame: FrameType | None) -> None:
        raised.append(number)
        raise Stop

    before = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        inside: list[int] = []

        def shielded() -> None:
            with deferred_signals, deferred_signals:
                for number in SIGNALS:
                    os.kill(os.getpid(), number)
                    inside.append(number)

        with pytest.raises(Stop):
            shielded()
        assert inside == list(SIGNALS)
        assert sorted(raised) == sorted(SIGNALS)
        assert all(signal.getsignal(number) is handle for number in SIGNALS)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
