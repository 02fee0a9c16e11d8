"""The disk follows what queues still need: what pins a file, and what does not."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pytest

from broker_core.broker.broker import BrokerState
from broker_core.core.ids import BlockId
from broker_core.engine import BranchHeader
from broker_core.node import upkeep
from broker_core.node.channel import LocalChannel
from broker_core.node.engine import EmbeddedEngine
from broker_core.node.local import LocalBroker
from broker_core.store.durable import DurableStore
from broker_core.store.salvage.verify import verify

MIB = 1024 * 1024


@pytest.fixture(params=[upkeep.RUNS, 1], autouse=True)
def runs_of_a_look(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """One: each block is looked at by itself."""
    monkeypatch.setattr(upkeep, "RUNS", request.param)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "data"
    assert verify(tmp_path / "data").problems == []


def opened(directory: Path, roll_bytes: int = 4 * MIB) -> LocalBroker:
    return LocalBroker(DurableStore(directory, roll_bytes=roll_bytes), upkeep=False)


def size_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in (directory / "segments").glob("*"))


def send(channel: LocalChannel, queue: str, count: int, body_bytes: int) -> None:
    """A block of its own in a segment."""
    channel.tx_select()
    for _ in range(count):
        channel.publish(os.urandom(body_bytes), routing_key=queue)
    channel.tx_commit()


def compact(broker: LocalBroker) -> None:
    """Until all is idle: what is moved is written to the open segment."""
    for _ in range(3):
        broker.upkeep.compact()


def count(broker: LocalBroker, queue: str) -> int:
    with broker.channel() as channel:
        return sum(1 for _ in iter(lambda: channel.get(queue), None))


def test_a_small_block_of_a_slow_queue_does_not_keep_the_segments_of_a_busy_one(directory: Path) -> None:
    broker = opened(directory)
    with broker.channel() as channel, broker.channel() as other:
        channel.queue_declare("busy")
        channel.queue_declare("slow")
        for _ in range(3):
            send(channel, "slow", 1100, 10)
            for _ in range(6):
                send(channel, "busy", 1100, 1000)
            other.queue_purge("busy")
    assert size_bytes(directory) > 10 * MIB
    compact(broker)
    assert size_bytes(directory) < MIB
    left = size_bytes(directory)
    for _ in range(3):
        broker.upkeep.compact()
    assert size_bytes(directory) == left, "nothing is written again and again"
    broker.close()
    broker = opened(directory)
    assert count(broker, "slow") == 3300
    broker.close()


def test_what_was_rolled_back_gives_its_bytes_back(directory: Path) -> None:
    broker = opened(directory, roll_bytes=128 * MIB)
    with broker.channel() as channel:
        channel.queue_declare("q")
        send(channel, "q", 1100, 10)
        channel.tx_select()
        for _ in range(20_000):
            channel.publish(os.urandom(500), routing_key="q")
        channel.tx_rollback()
    assert size_bytes(directory) > 5 * MIB
    compact(broker)
    assert size_bytes(directory) < MIB
    assert count(broker, "q") == 1100
    broker.close()


def test_an_empty_broker_keeps_no_bytes_in_the_segment_that_is_open(directory: Path) -> None:
    broker = opened(directory, roll_bytes=128 * MIB)
    with broker.channel() as channel:
        channel.queue_declare("q")
        send(channel, "q", 1100, 1000)
        broker.upkeep.compact()
        channel.queue_purge("q")
    assert size_bytes(directory) > MIB
    broker.upkeep.compact()
    assert size_bytes(directory) == 0
    broker.close()


def test_an_open_segment_that_is_written_to_is_left_alone_until_much_of_it_is_dead(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker_core.node.upkeep.ROLL_BYTES", 4 * MIB)
    broker = opened(directory, roll_bytes=128 * MIB)
    sizes = []
    with broker.channel() as channel:
        channel.queue_declare("q")
        for _ in range(8):
            send(channel, "q", 1100, 1000)
            broker.upkeep.compact()
            with broker.channel() as other:
                other.queue_purge("q")
            sizes.append(size_bytes(directory))
    assert 4 * MIB < max(sizes) < 6 * MIB and min(sizes[4:]) < 3 * MIB
    broker.close()


def test_staged_parts_and_branch_rows_move_with_the_rest_and_stay_whole(directory: Path) -> None:
    broker = opened(directory)
    engine = EmbeddedEngine(broker)
    block = pa.RecordBatch.from_pydict(
        {"body": pa.array([b"%d" % number for number in range(3000)], pa.binary())}
    )
    rows = pa.RecordBatch.from_pydict({"id": pa.array(range(3000))})
    with broker.channel() as channel:
        channel.queue_declare("q")
        send(channel, "q", 1100, 3000)
        staged = engine.stage(BranchHeader("t", "b", "publish", {"routing_key": "q"}), [block])
        dead = [
            engine.stage_part(BranchHeader("dead", "d", "append", {"table": "t"}), number, rows)
            for number in range(40)
        ]
        kept = engine.stage(BranchHeader("kept", "k", "append", {"table": "t"}), [rows])
        with broker.channel() as other:
            other.queue_purge("q")
    assert dead and kept.rows == 3000
    engine.rollback_batch("dead")
    before = size_bytes(directory)
    compact(broker)
    assert size_bytes(directory) < before / 10
    engine.commit_branches("t", [staged])
    (part,) = engine.batches.branches.parts("k")
    assert broker.read_block(part.block_id).equals(rows)
    broker.close()
    broker = opened(directory)
    assert [row.body for row in _rows(broker)] == [b"%d" % number for number in range(3000)]
    broker.close()


def _rows(broker: LocalBroker) -> list[object]:
    with broker.channel() as channel:
        return list(iter(lambda: channel.get("q"), None))


def test_an_open_transaction_keeps_its_segment_and_nothing_of_it_is_lost(directory: Path) -> None:
    broker = opened(directory)
    with broker.channel() as channel, broker.channel() as other:
        channel.queue_declare("q")
        send(other, "q", 1100, 1000)
        channel.tx_select()
        for _ in range(20_000):
            channel.publish(b"in hand", routing_key="q")
        other.tx_rollback()
        other.queue_purge("q")
        for _ in range(3):
            broker.upkeep.compact()
        channel.tx_commit()
    assert count(broker, "q") == 20_000
    broker.close()


@pytest.mark.soak
@pytest.mark.slow
def test_a_damaged_block_stays_where_it_is_and_the_other_segments_are_compacted(tmp_path: Path) -> None:
    broker = opened(tmp_path, roll_bytes=1)
    with broker.channel() as channel:
        channel.queue_declare("q")
        for _ in range(3):
            send(channel, "q", 1100, 1000)
        with broker.channel() as other:
            for _ in range(1000):
                other.ack(other.get("q").tag)  # type: ignore[union-attr]
        segment = sorted((tmp_path / "segments").glob("*"))[0]
        content = bytearray(segment.read_bytes())
        content[len(content) // 2] ^= 1
        segment.write_bytes(content)
    broker.close()
    broker = opened(tmp_path, roll_bytes=1)
    segments = set((tmp_path / "segments").glob("*"))
    with broker.channel() as channel:
        channel.queue_declare("other")
        send(channel, "other", 1100, 1000)
        with broker.channel() as second:
            for _ in range(1000):
                second.ack(second.get("other").tag)  # type: ignore[union-attr]
    large = size_bytes(tmp_path)
    compact(broker)
    assert size_bytes(tmp_path) < large - 500_000
    assert segments <= set((tmp_path / "segments").glob("*"))
    broker.close()


def test_a_look_at_what_lives_goes_through_few_runs_at_a_time(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of 8 blocks is in 20 queues."""
    monkeypatch.setattr(upkeep, "RUNS", 50)
    broker = opened(directory)
    asked: list[int] = []
    living_rows = BrokerState.living_rows

    def counted(state: BrokerState, block_ids: Sequence[BlockId]) -> dict[BlockId, tuple[bytes, int]]:
        asked.append(sum(state.blocks.by_id[block_id].pins for block_id in block_ids))
        return living_rows(state, block_ids)

    monkeypatch.setattr(BrokerState, "living_rows", counted)
    with broker.channel() as channel:
        channel.exchange_declare("all", "fanout")
        for number in range(20):
            channel.queue_declare(f"q{number}")
            channel.queue_bind(f"q{number}", "all")
        channel.tx_select()
        for _ in range(8):
            for _ in range(4):
                channel.publish(os.urandom(MIB // 3), "all")
            channel.tx_commit()
        for number in range(20):
            for place in range(32):
                delivery = channel.get(f"q{number}")
                assert delivery is not None
                if place % 4:
                    channel.ack(delivery.tag)
        channel.tx_commit()
    before = size_bytes(directory)
    compact(broker)
    assert size_bytes(directory) < before / 2
    assert max(asked) <= 40 and len(asked) >= 3
    assert [count(broker, f"q{number}") for number in range(20)] == [8] * 20
    broker.close()
