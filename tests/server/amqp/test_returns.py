"""Mandatory messages of a transaction that no queue has: all of them come back before its commit-ok, and a client
that does not read them has little of the broker's memory.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from pamqp.commands import Basic, Connection, Queue, Tx

from broker_core.node import channel_commit
from tests.amqp_in_process import Served, ended, serving
from tests.amqp_peer import Closed, Peer, content, peer
from tests.amqp_server import serving as process
from tests.progress import wait_until

MiB = 1024 * 1024
BODY = b"z" * 100_000
COUNT = 300  # more than sockets take
LOST = Basic.Publish(routing_key="nowhere", mandatory=True)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(channel_commit, "SPILL_BYTES", MiB // 2)  # of an open transaction, then a segment
    with serving() as found:
        yield found


def committed(served: Served, client: Peer, count: int = COUNT, channel: int = 1) -> None:
    """A transaction of messages that reach no queue, and of the last one, which reaches one. It is visible."""
    client.call(channel, Queue.Declare(queue="q"), Queue.DeclareOk)
    client.call(channel, Tx.Select(), Tx.SelectOk)
    for number in range(count):
        client.write(content(channel, LOST, b"%d " % number + BODY))
    client.publish(channel, "", "q", b"kept", mandatory=True)
    client.send(channel, Tx.Commit())
    wait_until(lambda: served.counts()["q"] == 1)


def returned(client: Peer, channel: int = 1) -> list[int]:
    """The numbers of what comes back before the commit-ok."""
    found = []
    while not isinstance(frame := client.receive()[1], Tx.CommitOk):
        assert isinstance(frame, Basic.Return) and frame.reply_text == "NO_ROUTE"
        number, body = client.content(channel)[1].split()
        assert body == BODY
        found.append(int(number))
    return found


def blocks(served: Served) -> int:
    with served.broker.look as state:
        return sum(block.inbox is None for block in state.blocks.by_id.values())


def test_what_a_client_does_not_read_is_not_in_memory(tmp_path: Path) -> None:
    count = 3_000  # 300 MB
    with (
        process(tmp_path / "data") as broker,
        peer(broker.amqp_url, 1) as client,
        peer(broker.amqp_url, 1) as other,
    ):

        def anonymous() -> int:
            status = Path(f"/proc/{broker.pid}/status").read_text()
            found = re.search(r"RssAnon:\s+(\d+)", status)
            assert found is not None
            return int(found[1]) // 1024

        other.call(1, Queue.Declare(queue="q"), Queue.DeclareOk)
        client.call(1, Tx.Select(), Tx.SelectOk)
        for number in range(count):
            client.write(content(1, LOST, b"%d " % number + BODY))
        client.publish(1, "", "q", b"kept")
        before = anonymous()
        client.send(1, Tx.Commit())
        wait_until(lambda: other.count(1, "q"))
        for _ in range(100):  # each is a look of the loop
            other.count(1, "q")
            assert anonymous() - before < 60, (before, anonymous())
        assert returned(client) == [*range(count)]


def test_all_come_back_in_order_before_commit_ok_and_their_blocks_are_forgotten(served: Served) -> None:
    with peer(served.url, 1) as client:
        committed(served, client)
        assert blocks(served) > 1
        client.send(1, Basic.Qos(prefetch_count=1))  # behind the commit
        assert returned(client) == [*range(COUNT)]
        client.expect(Basic.QosOk, 1)
        wait_until(lambda: not blocks(served))
    assert served.broker.committer.counts.returned["/"] == COUNT


def test_many_channels_that_do_not_read_have_one_block_in_memory(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    transactions = served.broker.state.transactions
    take_back = transactions.take_back
    monkeypatch.setattr(transactions, "take_back", lambda *args: taken.append(1) or take_back(*args))
    channels = range(1, 9)
    with peer(served.url, *channels) as client:
        for channel in channels[1:]:
            client.call(channel, Tx.Select(), Tx.SelectOk)
        committed(served, client)
        for channel in channels[1:]:
            client.write(b"".join(content(channel, LOST, b"%d " % number + BODY) for number in range(6)))
            client.send(channel, Tx.Commit())
        with peer(served.url, 1) as other:
            for _ in range(100):
                other.count(1, "q")
        assert len(taken) < COUNT * len(BODY) // MiB  # half of the blocks: what sockets take
        assert len(returned(client)) == COUNT


@pytest.mark.parametrize("way", ["lost", "operator", "stop"])
def test_a_connection_that_ends_before_it_has_read_them_leaves_no_block(way: str, served: Served) -> None:
    with peer(served.url, 1) as client:
        committed(served, client)
        if way == "lost":
            client.abort()
        elif way == "operator":
            object.__setattr__(served.server.options, "close_timeout_s", 0.1)
            (connection,) = served.server.connections
            assert served.broker.open_channels.close(connection.name)
        else:
            threading.Thread(target=served.server.stop).start()
        wait_until(lambda: not served.server.connections)
        wait_until(lambda: not blocks(served))


def test_an_operator_who_closes_the_connection_waits_for_a_client_that_reads(served: Served) -> None:
    with peer(served.url, 1) as client:
        committed(served, client)
        (connection,) = served.server.connections
        assert served.broker.open_channels.close(connection.name)
        assert len(returned(client)) == COUNT
        assert client.expect(Connection.Close, 0).reply_code == 320


def test_messages_whose_queue_is_gone_come_back_too(served: Served) -> None:
    with peer(served.url, 1, 2) as client:
        client.call(1, Queue.Declare(queue="gone"), Queue.DeclareOk)
        client.call(1, Tx.Select(), Tx.SelectOk)
        for number in range(30):
            client.publish(1, "", ("gone", "nowhere")[number % 2], b"%d " % number + BODY, mandatory=True)
        client.call(2, Queue.Delete(queue="gone"), Queue.DeleteOk)
        client.send(1, Tx.Commit())
        assert returned(client) == [*range(30)]


def test_a_block_that_cannot_be_read_closes_the_channel_or_the_connection_and_nothing_stays(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError("damaged")

    with peer(served.url, 1) as client:
        monkeypatch.setattr(served.broker.state.transactions, "take_back", fails)
        committed(served, client, 20)
        with pytest.raises((Closed, AssertionError)):
            returned(client)
        client.abort()
        ended(served)
        wait_until(lambda: not blocks(served))
