"""Streams whose clients do not read: what they hold of the broker's memory is bounded, and nobody is refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.flight as arrow_flight
import pytest

from bench import broker as bench
from broker_core.client.broker import BrokerClient
from broker_core.core import errors, failpoint
from broker_core.engine import BranchHeader
from broker_core.flight import contract
from broker_core.launcher import Broker
from broker_core.server.flight import calls
from broker_core.server.flight.calls import Calls
from broker_core.server.quotas import Quotas, UserLimit
from tests.server.flight.test_flight import _ticket

MiB = 1024 * 1024
ROWS = 10 * bench.FILL_ROWS  # ten blocks of 8 MiB
STREAMS = 40


def anonymous(pid: int) -> int:
    """MiB."""
    found = re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) // 1024


def test_streams_that_nobody_reads_hold_little_memory_and_give_all_rows_afterwards(tmp_path: Path) -> None:
    with bench.serving(tmp_path / "data") as served, BrokerClient(served.url, map_files=False) as client:
        with client.channel() as channel:
            channel.queue_declare("q")
        bench.fill(client, "", "q", ROWS)
        assert sum(batch.num_rows for batch in client.browse([("q", 0, ROWS)])) == ROWS
        before, url = anonymous(served.pid), served.url.replace("txmq", "grpc")
        clients = [arrow_flight.connect(url) for _ in range(STREAMS)]
        streams, firsts = [], []
        for number, each in enumerate(clients):
            firsts.append(number * ROWS // STREAMS)
            ticket = contract.Ticket(browse=(("q", firsts[-1], ROWS),))
            streams.append(each.do_get(arrow_flight.Ticket(contract.encode(ticket))))
        chunks = [stream.read_chunk().data for stream in streams]  # behind it the next one waits
        peak = 0
        for _ in range(30):  # each is a call that is answered beside them
            assert client.queues()
            peak = max(peak, anonymous(served.pid))
        assert peak - before < 250, (before, peak)
        assert sum(batch.num_rows for batch in client.browse([("q", 0, ROWS)])) == ROWS
        for first, chunk, stream in [*zip(firsts, chunks, streams, strict=True)][::8]:
            offsets = chunk.column("offset").to_pylist()
            for rest in stream:
                offsets += rest.data.column("offset").to_pylist()
            assert offsets == [*range(first, ROWS)]
        for stream in streams:
            stream.cancel()


# -- in pieces -----------------------------------------------------------------------------------------------


@pytest.fixture
def broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Broker]:
    """There is no room, because another stream has it; and a piece is small."""
    monkeypatch.setattr(calls, "STREAMS", UserLimit(1, 1))
    monkeypatch.setattr(calls, "PIECE_BYTES", 4096)
    with Broker.open(tmp_path / "data") as found:
        assert found.server._calls.most(found, "", pa.record_batch({"n": [1]})) == 1
        yield found


def test_whatever_is_read_in_pieces_is_the_same(broker: Broker) -> None:
    """Rows of a claim, with some that were settled before, of a queue, and of branches."""
    with broker.channel() as channel:
        channel.queue_declare("q")
        channel.queue_bind("q", "amq.fanout")
        channel.tx_select()
        for number in range(3_000):
            channel.publish(b"%d " % number * (number % 50), "amq.fanout" if number % 2 else "", "q")
        channel.tx_commit()
        for number in range(200):
            delivery = channel.get("q")
            assert delivery is not None
            if number % 3:
                channel.ack(delivery.tag)
        channel.tx_commit()
    engine = broker.engine
    rows = pa.record_batch({"n": range(20_000), "text": ["x" * (n % 20) for n in range(20_000)]})
    with BrokerClient(broker.url, map_files=False) as client:
        header = BranchHeader("t", "b", "append", {"table": "/lake"})
        client.stage(header, [rows.slice(0, 9_000), rows.slice(9_000)])
        ticket = _ticket(client, "q")
        for read in (
            lambda of: of.browse([("q", 0, 3_000)]),
            lambda of: of.read(ticket),
            lambda of: of.read_branches(["b"]),
        ):
            pieces, whole = [*read(client)], [*read(engine)]
            assert pa.Table.from_batches(pieces) == pa.Table.from_batches(whole)
            assert len(pieces) > 10 * len(whole)
            assert all(each.nbytes <= calls.PIECE_BYTES or each.num_rows == 1 for each in pieces)


def test_branches_go_on_behind_the_rows_that_came_however_they_are_cut(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = pa.record_batch({"n": range(5_000)})
    with BrokerClient(broker.url, map_files=False) as client:
        client.stage(BranchHeader("t", "b", "append", {"table": "/lake"}), [rows])
        failpoint.arm("server.read.batch", lambda _name: dropped(monkeypatch), hit=4)
        try:
            found = [*client.read_branches(["b"])]
        finally:
            failpoint.disarm()
    assert pa.Table.from_batches(found) == pa.Table.from_batches([rows])


def dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "PIECE_BYTES", 1_000)
    raise ConnectionResetError


def test_a_row_that_is_too_large_for_a_piece_waits_for_room() -> None:
    room, rows = Calls(Quotas().calls), pa.record_batch({"body": [bytes(10 * MiB)] * 8 + [b""]})

    def most(stream: str, first: int, end: int = 9) -> int:
        return room.most(stream, stream.split()[0], rows.slice(first, end - first))

    assert most("ann 1", 0) == 9  # one that is larger than the limit is let in where nothing else is
    with pytest.raises(errors.Busy, match="of user 'ann' are not read yet"):
        most("ann 2", 0)
    assert most("ann 2", 8) == 1
    assert most("bob", 0, 3) == 3
    assert most("ann 1", 8) == 1
    assert most("ann 2", 0, 3) == 3
    room.streams.leave("ann 2")
    assert most("ann 1", 0, 3) == 3
