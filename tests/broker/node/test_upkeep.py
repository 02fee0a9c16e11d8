"""What the broker does by itself, over a real store: the same messages before and after, in less space."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pyarrow as pa
import pytest

from broker_core.broker.message.messages import StoredMessages
from broker_core.broker.transaction.spilled import Spilled
from broker_core.core import errors, failpoint
from broker_core.core.block import RowSelection
from broker_core.core.change import Change
from broker_core.core.records import NEVER
from broker_core.message.message import MESSAGE_SCHEMA
from broker_core.node.local import LocalBroker
from broker_core.store.durable import DurableStore
from tests.reading import bodies

BODY = b"x" * 1000


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "data"
    failpoint.disarm()


def opened(directory: Path, *, roll_bytes: int | None = None) -> LocalBroker:
    store = DurableStore(directory) if roll_bytes is None else DurableStore(directory, roll_bytes=roll_bytes)
    return LocalBroker(store, upkeep=False)


def crash(broker: LocalBroker) -> None:
    broker.committer.stop(errors.StoreFailed("crash"))
    broker.close()


def size_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in (directory / "segments").glob("*"))


def fill(broker: LocalBroker, count: int, first: int = 0) -> None:
    with broker.channel() as channel:
        channel.queue_declare("q")
        channel.tx_select()
        for number in range(first, first + count):
            channel.publish(b"%d " % number + BODY, routing_key="q")
        channel.tx_commit()


@pytest.mark.parametrize(
    "step",
    [
        "store.seal.written",
        "upkeep.seal.written",
        "committer.planned",
        "store.commit.begin",
        "store.commit.committed",
    ],
)
def test_a_crash_at_any_step_of_a_seal_loses_and_doubles_nothing(directory: Path, step: str) -> None:
    broker = opened(directory)
    fill(broker, 100)
    with broker.channel() as channel:
        for _ in range(10):
            channel.get("q", no_ack=True)
    before = bodies(broker, "q")
    broker.upkeep.close_open()
    failpoint.arm(step, "raise", hit=2 if step.startswith("committer") else 1)
    with pytest.raises((errors.StoreError, OSError)):
        broker.upkeep.seal()
    failpoint.disarm()
    crash(broker)
    again = opened(directory)
    assert bodies(again, "q") == before
    again.upkeep.seal()
    assert bodies(again, "q") == before
    fill(again, 1, 100)
    assert len(bodies(again, "q")) == len(before) + 1
    again.close()


def test_a_mostly_dead_segment_is_compacted_and_its_living_messages_stay(directory: Path) -> None:
    broker = opened(directory, roll_bytes=1)
    fill(broker, 3000)
    fill(broker, 1001)  # closes the segment of the first
    with broker.channel() as channel:
        channel.tx_select()
        for number in range(3000):
            delivery = channel.get("q")
            assert delivery
            if number % 1000:
                channel.ack(delivery.tag)
        channel.tx_commit()
    before, large = bodies(broker, "q"), size_bytes(directory)
    broker.upkeep.compact()
    assert bodies(broker, "q") == before
    assert size_bytes(directory) < large / 3
    small = size_bytes(directory)
    broker.upkeep.compact()
    assert size_bytes(directory) == small, "what is compacted is not compacted again and again"
    broker.close()
    again = opened(directory)
    assert bodies(again, "q") == before
    again.close()


def test_segments_whose_messages_are_all_settled_are_deleted(directory: Path) -> None:
    broker = opened(directory, roll_bytes=1)
    for first in range(3):
        fill(broker, 2000, first)
    assert size_bytes(directory) > 6_000_000
    with broker.channel() as channel:
        assert channel.queue_purge("q") == 6000
    fill(broker, 2000)
    assert size_bytes(directory) < 3_000_000
    assert len(bodies(broker, "q")) == 2000
    broker.close()


def test_a_block_that_a_staged_part_holds_is_neither_forgotten_nor_compacted(directory: Path) -> None:
    broker = opened(directory)
    fill(broker, 1)
    info = broker.append(
        pa.RecordBatch.from_pydict(
            {
                name: ["q"] if name == "routing_key" else [b""]
                for name in ("exchange", "routing_key", "body", "properties")
            },
            MESSAGE_SCHEMA,
        )
    )

    def stage(state: object, change: Change, _now: int) -> None:
        change.names.append(info.block_id)
        broker.state.blocks.hold(info.block_id, info.rows, info.size_bytes)

    broker.run(stage)
    broker.upkeep.tick()
    assert broker.read_block(info.block_id).num_rows == 1
    assert broker.state.living_rows([info.block_id]) == {}

    def publish(_state: object, change: Change, now: int) -> None:
        queue = broker.state.topology.queue("q")
        change.sequence = broker.state.numbers.next_sequence()
        piece = Spilled(info.block_id, 1, 0, [(queue, RowSelection(0, 1, b""))], NEVER)
        StoredMessages(broker.state.messages).enqueue_spilled(change, piece, now, None)
        broker.state.blocks.unhold(change, info.block_id)

    broker.run(publish)
    assert bodies(broker, "q")[-1] == b""
    broker.close()
    again = opened(directory)
    assert bodies(again, "q")[-1] == b""
    again.close()


def test_a_damaged_segment_is_named_at_get_and_the_message_is_not_lost(directory: Path) -> None:
    broker = opened(directory)
    fill(broker, 2000)
    broker.close()
    (segment,) = (directory / "segments").glob("*.arrow")
    content = bytearray(segment.read_bytes())
    content[len(content) // 2] ^= 1
    segment.write_bytes(content)
    again = opened(directory)
    with again.channel() as channel, pytest.raises(errors.CorruptSegment, match=segment.name):
        channel.get("q")
    assert [(info.messages, info.unacknowledged) for info in again.queues()] == [(2000, 0)]
    again.close()


class Alarm(Exception):
    pass


def test_a_caller_whose_wait_is_interrupted_by_a_signal_does_not_hold_up_the_others(directory: Path) -> None:
    broker = opened(directory)
    entered, gate = threading.Event(), threading.Event()

    def slow(_name: str) -> None:
        entered.set()
        assert gate.wait(600)

    def ring(_signal: int, _frame: FrameType | None) -> None:
        raise Alarm

    failpoint.arm("store.commit.begin", slow)
    first = threading.Thread(target=fill, args=(broker, 1))
    first.start()
    assert entered.wait(600)
    before = signal.signal(signal.SIGUSR1, ring)
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        waiting = threading.Event()
        while not broker.committer.waiting:
            waiting.wait(0.001)
        signal.pthread_kill(main, signal.SIGUSR1)
        gate.set()  # the signal is handled when the commit is done

    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    try:
        with pytest.raises(Alarm):
            broker.run(lambda _state, _change, _now: None)
    finally:
        signal.signal(signal.SIGUSR1, before)
    interrupter.join()
    first.join(600)
    assert broker.run(lambda _state, _change, now: now) > 0
    assert bodies(broker, "q") == [b"0 " + BODY]
    broker.close()


def test_growth_wakes_whoever_waits(directory: Path) -> None:
    broker = opened(directory)
    fill(broker, 1)
    assert not broker.wait(lambda state: {state.topology.queue("q"): 1}, 0.01)
    writer = threading.Thread(target=fill, args=(broker, 1))
    writer.start()
    assert broker.wait(lambda state: {state.topology.queue("q"): 1}, 30)
    writer.join()
    broker.close()
    with pytest.raises(errors.StoreFailed, match="the broker is closed"):
        broker.wait(lambda state: {}, 30)
    assert os.path.isdir(directory)
