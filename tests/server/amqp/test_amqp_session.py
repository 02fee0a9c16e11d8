"""One channel over a raw socket: the order of replies, pipelining during a commit, and clients that leave in
the middle of one.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pamqp import base, commands
from pamqp.commands import Basic, Channel, Confirm, Connection, Exchange, Queue, Tx

from broker_core.node.local import LocalBroker
from broker_core.server.amqp.server import AmqpServer
from tests.amqp_peer import Closed, Peer, content, encoded
from tests.amqp_server import AmqpServed, serving
from tests.make import GatedStore
from tests.progress import wait_until

ROWS = 20_000


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[AmqpServed]:
    with serving(tmp_path / "data") as broker:
        yield broker


@pytest.fixture
def peer(broker: AmqpServed) -> Iterator[Peer]:
    with Peer(broker.amqp_url) as peer:
        peer.opened(1)
        yield peer


def published(queue: str, body: bytes, *, exchange: str = "", mandatory: bool = False) -> bytes:
    return content(
        1, Basic.Publish(exchange=exchange, routing_key=queue, mandatory=mandatory), body, delivery_mode=2
    )


def asked(*frames: base.Frame | bytes) -> bytes:
    return b"".join(frame if isinstance(frame, bytes) else encoded(1, frame) for frame in frames)


def replies(peer: Peer, count: int) -> list[str]:
    """The names of the next methods, contents left out."""
    names: list[str] = []
    while len(names) < count:
        _, frame = peer.receive()
        if isinstance(frame, base.Frame):
            names.append(frame.name)
    return names


def test_replies_come_in_the_order_of_the_commands_whatever_each_of_them_waits_for(peer: Peer) -> None:
    """All in one segment: some answers come from memory, some after a commit, some after the commit of what
    was gathered before.
    """
    for _ in range(20):
        peer.write(
            asked(
                Queue.Declare(queue="q"),
                published("q", b"a"),
                Queue.Bind(queue="q", exchange="amq.direct", routing_key="k"),
                Queue.Bind(queue="q", exchange="amq.direct", routing_key="l"),
                Basic.Qos(prefetch_count=3),
                published("k", b"b", exchange="amq.direct"),
                Exchange.Declare(exchange="e"),
                Basic.Qos(prefetch_count=0),
                Basic.Get(queue="q", no_ack=True),
                published("nowhere", b"c", mandatory=True),
                Basic.Get(queue="q", no_ack=True),
                Queue.Unbind(queue="q", exchange="amq.direct", routing_key="k"),
                Queue.Declare(queue="q", passive=True),
                Queue.Delete(queue="q"),
                Exchange.Delete(exchange="e"),
                Basic.Get(queue="q", no_ack=True),
            )
        )
        assert replies(peer, 14) == [
            "Queue.DeclareOk",
            "Queue.BindOk",
            "Queue.BindOk",
            "Basic.QosOk",
            "Exchange.DeclareOk",
            "Basic.QosOk",
            "Basic.GetOk",
            "Basic.Return",
            "Basic.GetOk",
            "Queue.UnbindOk",
            "Queue.DeclareOk",
            "Queue.DeleteOk",
            "Exchange.DeleteOk",
            "Channel.Close",
        ]
        peer.write(asked(Channel.CloseOk(), Channel.Open()))
        assert replies(peer, 1) == ["Channel.OpenOk"]


def test_commands_behind_a_commit_wait_for_it_and_are_answered_in_order(peer: Peer) -> None:
    peer.write(
        asked(
            Queue.Declare(queue="q", durable=True),
            Tx.Select(),
            published("q", b"a"),
            Tx.Commit(),
            published("q", b"b"),
            Queue.Declare(queue="q", passive=True),
            Tx.Commit(),
            Queue.Declare(queue="q", passive=True),
            published("q", b"c"),
            Tx.Rollback(),
            Tx.Commit(),
            Queue.Declare(queue="q", passive=True),
        )
    )
    counts = []
    names = []
    while len(names) < 9:
        _, frame = peer.receive()
        assert isinstance(frame, base.Frame)
        names.append(frame.name)
        if isinstance(frame, commands.Queue.DeclareOk):
            counts.append(frame.message_count)
    assert names == [
        "Queue.DeclareOk",
        "Tx.SelectOk",
        "Tx.CommitOk",
        "Queue.DeclareOk",
        "Tx.CommitOk",
        "Queue.DeclareOk",
        "Tx.RollbackOk",
        "Tx.CommitOk",
        "Queue.DeclareOk",
    ]
    assert counts == [0, 1, 2, 2]


def test_a_mandatory_message_without_a_queue_comes_back_before_its_confirm(peer: Peer) -> None:
    peer.write(asked(Confirm.Select(), Queue.Declare(queue="q")))
    replies(peer, 2)
    peer.write(asked(published("q", b"a"), published("nowhere", b"b", mandatory=True), published("q", b"c")))
    found: list[tuple[str, int]] = []
    while not found or found[-1][1] != 3:
        _, frame = peer.receive()
        if isinstance(frame, base.Frame):
            found.append((frame.name, getattr(frame, "delivery_tag", 0)))
    assert ("Basic.Return", 0) in found[:-1]
    assert [tag for name, tag in found if name == "Basic.Ack"][-1] == 3


@pytest.mark.parametrize("left", ["at once", "after close was said"])
def test_a_client_that_leaves_during_its_commit_leaves_all_or_nothing_and_what_is_left_can_be_read(
    broker: AmqpServed, left: str
) -> None:
    """The bytes of a large transaction are in a segment before its commit: ending the channel must not take
    them away again.
    """
    for number in range(3):
        queue = f"q-{number}"
        with Peer(broker.amqp_url) as peer:
            peer.opened(1)
            peer.write(asked(Queue.Declare(queue=queue, durable=True), Tx.Select()))
            replies(peer, 2)
            rows = b"".join(published(queue, b"%06d" % row) for row in range(ROWS))
            ending = (
                asked(Tx.Commit()) if left == "at once" else asked(Tx.Commit(), Channel.Close(0, "", 0, 0))
            )
            peer.write(rows + ending)
            if left != "at once":
                peer.write(encoded(0, Connection.Close(0, "", 0, 0)))
                names = replies(peer, 3)
                assert names == ["Tx.CommitOk", "Channel.CloseOk", "Connection.CloseOk"]
    broker.restart()
    with Peer(broker.amqp_url) as peer:
        peer.opened(1)
        for number in range(3):
            count = peer.count(1, f"q-{number}")
            assert count in ((0, ROWS) if left == "at once" else (ROWS,))
            assert [body for _, body in peer.drain(1, f"q-{number}")] == [
                b"%06d" % row for row in range(count)
            ]


@pytest.mark.parametrize(
    "given_back", ["nack", "recover", "close", "rollback of a prepared transaction", "publish"]
)
def test_an_amqp_consumer_gets_what_a_client_of_the_other_listener_gives_back_or_publishes(
    broker: AmqpServed, peer: Peer, given_back: str
) -> None:
    peer.write(
        asked(
            Queue.Declare(queue="q", durable=True),
            published("q", b"a"),
            Queue.Declare(queue="q", passive=True),
        )
    )
    replies(peer, 2)
    with broker.client() as client, client.channel() as channel:
        delivery = channel.get("q")
        assert delivery is not None
        peer.call(1, Basic.Consume(queue="q", consumer_tag="c"), Basic.ConsumeOk)
        if given_back == "nack":
            channel.nack(delivery.tag)
        elif given_back == "recover":
            channel.recover()
        elif given_back == "close":
            channel.close()
        elif given_back == "publish":
            channel.publish(b"a", routing_key="q")
        else:
            channel.tx_select()
            channel.ack(delivery.tag)
            channel.prepare("xid")
            client.rollback("xid")
        found = peer.expect(Basic.Deliver, 1)
        assert (found.redelivered, peer.content(1)[1]) == (given_back != "publish", b"a")


def test_an_amqp_consumer_is_told_when_a_client_of_the_other_listener_deletes_its_queue(
    broker: AmqpServed, peer: Peer
) -> None:
    peer.call(1, Queue.Declare(queue="q"), Queue.DeclareOk)
    peer.call(1, Basic.Consume(queue="q", consumer_tag="c"), Basic.ConsumeOk)
    with broker.client() as client, client.channel() as channel:
        channel.queue_delete("q")
        assert peer.expect(Basic.Cancel, 1).consumer_tag == "c"


def test_a_connection_that_is_lost_while_its_commit_waits_for_another_thread_loses_nothing_of_it() -> None:
    """What is in a segment already is forgotten when a channel ends with an open transaction, but not with
    one that is on its way.
    """
    store = GatedStore()
    local = LocalBroker(store, upkeep=False)
    server = AmqpServer(local, ["127.0.0.1:0"])
    server.start()
    with Peer(f"amqp://{server.addresses[0]}") as peer:
        peer.opened(1)
        peer.write(
            asked(
                Queue.Declare(queue="q", durable=True),
                Tx.Select(),
                *(published("q", b"%d" % row) for row in range(2_000)),
            )
        )
        replies(peer, 2)
        store.gate.clear()
        store.entered.clear()
        other = threading.Thread(
            target=local.run, args=(lambda state, change, now: state.topology.declare_queue(change, "other"),)
        )
        other.start()
        assert store.entered.wait(600)
        peer.write(asked(Tx.Commit()))
        wait_until(lambda: not server.commits.idle)
    wait_until(lambda: not server.connections)
    store.gate.set()
    other.join()
    wait_until(lambda: server.commits.idle)
    with local.channel() as channel:
        assert [channel.get("q", no_ack=True).body for _ in range(2_000)] == [
            b"%d" % row for row in range(2_000)
        ]
    server.stop()
    local.close()


@pytest.mark.parametrize("transactional", [False, True])
def test_a_publisher_is_not_read_without_end_while_another_threads_commit_takes_its_time(
    transactional: bool,
) -> None:
    """What has been read waits in memory: so the client has to wait, and nothing of it is lost."""
    store = GatedStore()
    local = LocalBroker(store, upkeep=False)
    server = AmqpServer(local, ["127.0.0.1:0"])
    server.start()
    with Peer(f"amqp://{server.addresses[0]}") as peer:
        peer.opened(1)
        peer.write(
            asked(Queue.Declare(queue="q", durable=True))
            + (asked(Tx.Select(), published("q", b"x"), Tx.Commit()) if transactional else b"")
        )
        replies(peer, 3 if transactional else 1)
        store.gate.clear()
        store.entered.clear()
        other = threading.Thread(
            target=local.run, args=(lambda state, change, now: state.topology.declare_queue(change, "other"),)
        )
        other.start()
        assert store.entered.wait(600)
        if transactional:
            peer.write(asked(published("q", b"x"), Tx.Commit()))
        one = published("q", b"m" * 1024 * 1024)
        with socket.socket(fileno=os.dup(peer.fileno())) as out:
            out.settimeout(1)
            sent, left = 0, one
            with contextlib.suppress(TimeoutError):
                while sent < 200:
                    left = left[out.send(left) :]
                    if not left:
                        sent, left = sent + 1, one
        assert sent < 100
        store.gate.set()
        other.join()
        peer.write(left)
        if transactional:
            peer.write(asked(Tx.Commit()))
            assert replies(peer, 2) == ["Tx.CommitOk", "Tx.CommitOk"]
        assert peer.count(1, "q") == sent + (3 if transactional else 1)
    server.stop()
    local.close()


def test_close_ok_behind_what_is_dropped_ends_the_socket_at_once(broker: AmqpServed) -> None:
    with Peer(broker.amqp_url) as peer:
        peer.tuned()
        peer.send(0, Connection.TuneOk(2047, 999_999, 0))  # more than was offered
        assert peer.expect(Connection.Close, 0).reply_code == 530
        peer.write(encoded(1, Queue.Declare(queue="q")) + encoded(0, Connection.CloseOk()))
        started = time.monotonic()
        with pytest.raises(Closed):
            peer.receive()
        assert time.monotonic() - started < 5  # the broker would wait 10 s for an answer


def test_publishes_before_a_close_are_there_when_it_is_answered(broker: AmqpServed) -> None:
    with Peer(broker.amqp_url) as peer:
        peer.opened(1)
        peer.write(
            asked(
                Queue.Declare(queue="q", durable=True), *(published("q", b"%d" % row) for row in range(1_500))
            )
        )
        peer.write(encoded(0, Connection.Close(0, "", 0, 0)))
        assert replies(peer, 2) == ["Queue.DeclareOk", "Connection.CloseOk"]
    broker.restart()
    with broker.client() as client:
        assert [info.messages for info in client.queues()] == [1_500]
