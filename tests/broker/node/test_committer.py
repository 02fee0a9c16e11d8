from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence

import pytest

from broker_core.broker.broker import BrokerState
from broker_core.broker.queue import Queues
from broker_core.broker.queue.queue import Queue
from broker_core.broker.transaction.publish import Publish
from broker_core.core import errors, failpoint
from broker_core.core.change import Change
from broker_core.core.records import OutcomeRecord
from broker_core.message.message import Message
from broker_core.node import committer
from broker_core.node.local import LocalBroker
from broker_core.store.memory import MemoryStore
from tests.make import GatedStore
from tests.progress import wait_until
from tests.reading import fetched


def remember(name: str) -> Callable[[BrokerState, Change, int], str]:
    def work(state: BrokerState, change: Change, now: int) -> str:
        if name == "bad":
            raise errors.PreconditionFailed("no")
        state.names.outcomes.remember(change, OutcomeRecord(name, "committed", now))
        return name

    return work


def together(store: GatedStore, broker: LocalBroker, names: Sequence[str]) -> dict[str, object]:
    """Run one work, and while it is on the disk all the others; the answers."""
    answers: dict[str, object] = {}

    def go(name: str) -> None:
        try:
            answers[name] = broker.run(remember(name))
        except errors.TxmqError as error:
            answers[name] = error

    store.gate.clear()
    store.entered.clear()
    threads = [threading.Thread(target=go, args=(name,)) for name in names]
    threads[0].start()
    assert store.entered.wait(600)
    for thread in threads[1:]:
        thread.start()
    waiting = threading.Event()
    while len(broker.committer.waiting) < len(names) - 1:
        waiting.wait(0.001)
    store.gate.set()
    for thread in threads:
        thread.join(600)
    return answers


def test_commits_that_wait_share_one_write() -> None:
    store = GatedStore()
    broker = LocalBroker(store, upkeep=False)
    names = [f"t{number}" for number in range(8)]
    assert together(store, broker, names) == {name: name for name in names}
    assert store.groups == [1, 7]
    assert set(broker.state.names.outcomes) == set(names)
    broker.close()


def test_works_for_which_there_is_no_time_left_are_the_first_of_the_next_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Few dear works hold the lock as long as one of them, not as long as all together."""
    store = GatedStore()
    broker = LocalBroker(store, upkeep=False)
    begin, order = threading.Event(), []

    def busy(name: str) -> Callable[[BrokerState, Change, int], str]:
        def work(state: BrokerState, change: Change, now: int) -> str:
            order.append(name)
            ends = time.thread_time() + (1.5 * committer.PLAN_S if name == "dear" else 0.0)
            while time.thread_time() < ends:
                pass
            return remember(name)(state, change, now)

        return work

    store.gate.clear()
    threads = []
    for number, name in enumerate(("leader", "cheap", "dear", "later", "last")):
        threads.append(threading.Thread(target=broker.run, args=(busy(name),)))
        threads[-1].start()
        if not number:
            assert store.entered.wait(600)
        while len(broker.committer.waiting) < number:
            begin.wait(0.001)
    store.gate.set()
    for thread in threads:
        thread.join(600)
    assert order == ["leader", "cheap", "dear", "later", "last"] == list(broker.state.names.outcomes)
    assert store.groups == [1, 2, 2]
    broker.close()


def test_who_looks_again_at_once_comes_behind_the_commit_that_waits() -> None:
    broker = LocalBroker(MemoryStore(), upkeep=False)
    planned: list[int] = []
    committing = threading.Thread(target=broker.run, args=(lambda _state, _change, now: planned.append(now),))
    with broker.look:
        committing.start()
        wait_until(broker.look.turn.locked, "the commit waits for the lock")
        assert not planned
    with broker.look:
        assert planned
    committing.join(600)
    broker.close()


def test_one_refused_commit_does_not_fail_its_group() -> None:
    store = GatedStore()
    broker = LocalBroker(store, upkeep=False)
    answers = together(store, broker, ["first", "bad", "third"])
    assert isinstance(answers.pop("bad"), errors.PreconditionFailed)
    assert answers == {"first": "first", "third": "third"}
    assert {
        record.xid for record in store.reopened().load().records if isinstance(record, OutcomeRecord)
    } == {"first", "third"}
    broker.close()


@pytest.mark.parametrize("step", ["store.commit.begin", "store.commit.executed"])
def test_a_failed_write_stops_everything_with_store_failed_and_nothing_is_retried(step: str) -> None:
    store = GatedStore()
    broker = LocalBroker(store, upkeep=False)
    with broker.channel() as channel:
        channel.queue_declare("q")
    failpoint.arm(step, "enospc")
    try:
        answers = together(store, broker, ["first", "second", "third"])
    finally:
        failpoint.disarm()
    assert all(isinstance(answer, errors.StoreFailed) for answer in answers.values()), answers
    assert "Errno 28" in str(answers["third"])
    with pytest.raises(errors.StoreFailed, match="Errno 28"):
        broker.run(remember("later"))
    with pytest.raises(errors.StoreFailed):
        broker.channel()
    with pytest.raises(errors.StoreFailed):
        broker.wait(lambda state: {}, 10)
    broker.close()
    reopened = LocalBroker(store.reopened(), upkeep=False)
    assert list(reopened.state.names.outcomes) == []
    reopened.close()


def test_a_defect_in_a_work_fails_its_caller_alone_and_changes_nothing() -> None:
    store = MemoryStore()
    broker = LocalBroker(store, upkeep=False)

    def faulty(state: BrokerState, change: Change, now: int) -> None:
        state.numbers.next_sequence()
        state.names.outcomes.remember(change, OutcomeRecord("half", "committed", now))
        raise ZeroDivisionError("a fault")

    with pytest.raises(errors.InternalFault, match="a fault"):
        broker.run(faulty)
    assert (broker.state.numbers.sequence, list(broker.state.names.outcomes)) == (0, [])
    assert broker.run(remember("later")) == "later"
    assert [
        record.xid for record in store.reopened().load().records if isinstance(record, OutcomeRecord)
    ] == ["later"]
    broker.close()


def test_what_a_work_had_done_before_it_was_refused_is_undone() -> None:
    store = MemoryStore()
    broker = LocalBroker(store, upkeep=False)

    def work(state: BrokerState, change: Change, now: int) -> None:
        state.names.outcomes.remember(change, OutcomeRecord("acked below", "committed", now))
        raise errors.CheckpointMismatch("and then refused")

    with pytest.raises(errors.CheckpointMismatch):
        broker.run(work)
    assert list(broker.state.names.outcomes) == []
    assert [
        record.xid for record in store.reopened().load().records if isinstance(record, OutcomeRecord)
    ] == []
    broker.close()


def test_nobody_sees_part_of_a_commit_over_several_queues() -> None:
    broker = LocalBroker(MemoryStore(), upkeep=False)
    with broker.channel() as channel:
        for name in ("a", "b", "c"):
            channel.queue_declare(name)
    done = threading.Event()
    torn: list[list[int]] = []

    def watch() -> None:
        while not done.is_set():
            counts = [info.messages for info in broker.queues()]
            if len(set(counts)) != 1 or counts[0] % 10:
                torn.append(counts)

    def write() -> None:
        with broker.channel() as channel:
            channel.tx_select()
            for _ in range(60):
                for _ in range(10):
                    for name in ("a", "b", "c"):
                        channel.publish(b"x", routing_key=name)
                channel.tx_commit()

    watcher = threading.Thread(target=watch)
    writers = [threading.Thread(target=write) for _ in range(4)]
    for thread in (watcher, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    watcher.join()
    assert torn == []
    assert [info.messages for info in broker.queues()] == [2400] * 3
    broker.close()


def test_messages_are_invisible_while_their_commit_is_on_its_way_to_the_disk() -> None:
    store = GatedStore()
    broker = LocalBroker(store, upkeep=False)
    reader = broker.channel()
    reader.queue_declare("q")
    queues: Queues = (broker.state.topology.queue("q"),)

    def work(state: BrokerState, change: Change, now: int) -> None:
        state.messages.enqueue(change, [Publish(Message(b"x", "q"), queues)], now)

    store.gate.clear()
    store.entered.clear()
    writer = threading.Thread(target=broker.run, args=(work,))
    writer.start()
    assert store.entered.wait(600)
    assert reader.get("q") is None
    assert broker.queues()[0].messages == 0
    assert not broker.wait(lambda state: {state.topology.queue("q"): 0}, 0)
    store.gate.set()
    assert broker.wait(lambda state: {state.topology.queue("q"): 0}, 30)
    writer.join()
    assert reader.get("q") is not None
    broker.close()


def test_a_commit_wakes_those_alone_who_wait_for_its_queues() -> None:
    """One client may wait in a thousand calls, and every commit of the others would wake them all."""
    broker = LocalBroker(MemoryStore(), upkeep=False)
    channel = broker.channel()
    for name in ("q", "r", "other"):
        channel.queue_declare(name)
    looks: list[str] = []
    answers: list[bool] = []

    def ends(state: BrokerState) -> dict[Queue, int]:
        looks.append("")
        return {state.topology.queue(name): 0 for name in ("q", "r")}

    waiting = [threading.Thread(target=lambda: answers.append(broker.wait(ends, 600))) for _ in range(3)]
    for thread in waiting:
        thread.start()
    wait_until(lambda: len(looks) == len(waiting))
    for _ in range(50):
        channel.publish(b"", routing_key="other")
    assert (len(looks), answers) == (len(waiting), [])
    channel.tx_select()
    channel.publish(b"", routing_key="q")
    channel.publish(b"", routing_key="r")
    channel.tx_commit()  # one commit for two queues of each: a gate opens once
    for thread in waiting:
        thread.join()
    assert answers == [True] * len(waiting) and len(looks) == 2 * len(waiting)
    assert not broker.committer.listeners._readers
    broker.close()


def test_commit_times_and_sequences_never_fall_even_when_the_clock_does() -> None:
    times = itertools.chain([100, 50, 10], itertools.repeat(0))
    broker = LocalBroker(MemoryStore(), lambda: next(times), upkeep=False)
    seen = [broker.run(lambda state, _change, now: (now, state.numbers.next_sequence())) for _ in range(3)]
    assert seen == sorted(set(seen))
    broker.close()


def test_commit_times_do_not_fall_over_a_restart_with_a_clock_that_was_set_back() -> None:
    store = MemoryStore()
    broker = LocalBroker(store, lambda: 1000, upkeep=False)
    with broker.channel() as channel:
        channel.queue_declare("q")
        channel.publish(b"1", routing_key="q")
    committed_at = fetched(broker, broker.state.topology.queue("q"), 0).committed_at
    broker.close()
    again = LocalBroker(store.reopened(), lambda: 5, upkeep=False)
    with again.channel() as channel:
        channel.publish(b"2", routing_key="q")
    assert fetched(again, again.state.topology.queue("q"), 1).committed_at > committed_at
    again.close()


def test_a_work_that_cannot_be_encoded_fails_alone_in_its_group_and_the_broker_goes_on() -> None:
    store = GatedStore()
    broker = LocalBroker(store, upkeep=False)
    answers = together(store, broker, ["first", "before", "lone \ud800 surrogate", "after"])
    failed = answers.pop("lone \ud800 surrogate")
    assert isinstance(failed, errors.OptionError) and "outcome.xid" in failed.message
    assert answers == {name: name for name in ("first", "before", "after")}
    assert store.groups == [1, 2]
    assert broker.run(remember("later")) == "later"
    found = LocalBroker(store.reopened(), upkeep=False)
    assert set(found.state.names.outcomes) == {"first", "before", "after", "later"}
    found.close()
    broker.close()
