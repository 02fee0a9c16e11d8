"""Commands behind a channel.close, and what is under way when a channel closes: the same by RabbitMQ."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pamqp import base, commands

from tests.amqp_peer import AnyFrame, Peer, content, encoded, peer
from tests.amqp_server import endpoint
from tests.interop.rabbitmq_node import rabbit

B, C, H, Q, T = commands.Basic, commands.Connection, commands.Channel, commands.Queue, commands.Tx
CLOSE = encoded(1, H.Close(200, "", 0, 0))
COUNT = 200


# a change here does not alter what a node of RabbitMQ answers
@pytest.fixture(scope="module", params=["txmq", pytest.param("rabbitmq", marks=pytest.mark.soak)])
def either(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder: Path = tmp_path_factory.mktemp(request.param)
    if request.param == "txmq":
        with endpoint(folder) as found:
            yield found
    else:
        with rabbit(folder) as node:
            node.ctl("await_startup")
            yield node.uri


@pytest.fixture
def client(either: str) -> Iterator[Peer]:
    """Channel 1 is the one that closes; channel 2 has emptied ``q``."""
    with peer(either, 1, 2) as opened:
        opened.call(2, Q.Declare(queue="q"), Q.DeclareOk)
        opened.call(2, Q.Purge(queue="q"), Q.PurgeOk)
        yield opened


def publish(data: bytes = b"x", channel: int = 1) -> bytes:
    return content(channel, B.Publish(routing_key="q"), data)


def filled(client: Peer) -> None:
    client.call(2, commands.Confirm.Select(), commands.Confirm.SelectOk)
    client.write(b"".join(publish(b"%d" % number, 2) for number in range(COUNT)))
    while client.expect(B.Ack, 2).delivery_tag < COUNT:
        pass


def until(client: Peer, last: type[base.Frame]) -> list[AnyFrame]:
    """What comes on channel 1, up to this answer."""
    found: list[AnyFrame] = []
    while not (found and isinstance(found[-1], last)):
        channel, frame = client.receive()
        assert channel == 1, (channel, frame)
        found.append(frame)
    return found


def bodies(client: Peer) -> list[bytes]:
    """Of ``q``, which a requeue may reach a moment behind close-ok in RabbitMQ."""
    found: list[bytes] = []
    while len(found) < COUNT:
        got = client.get(2, "q")
        if got is not None:
            found.append(got[1])
    assert client.get(2, "q") is None
    return found


def test_nothing_behind_a_close_in_the_same_write_is_carried_out(client: Peer) -> None:
    filled(client)
    work = [B.Ack(0, multiple=True), Q.Purge(queue="q"), Q.Declare(queue="behind"), Q.Delete(queue="q")]
    client.send(1, B.Get(queue="q"))
    client.expect(B.GetOk, 1)
    assert client.content(1)[1] == b"0"
    client.write(CLOSE + b"".join(encoded(1, each) for each in work) + publish(b"late"))
    assert [frame.name for frame in until(client, H.CloseOk)] == ["Channel.CloseOk"]
    assert bodies(client) == [b"%d" % number for number in range(COUNT)]
    client.send(2, Q.Declare(queue="behind", passive=True))
    assert client.expect(H.Close, 2).reply_code == 404


@pytest.mark.parametrize("late", [publish(), encoded(1, Q.Declare(queue="late")), CLOSE])
def test_a_command_behind_close_ok_closes_the_connection(client: Peer, late: bytes) -> None:
    client.write(CLOSE)
    client.expect(H.CloseOk, 1)
    client.write(late)
    assert client.expect(C.Close, 0).reply_code == 504


def test_a_channel_that_is_opened_before_close_ok_closes_the_connection(client: Peer) -> None:
    """Else its client would wait for open-ok."""
    client.write(CLOSE + encoded(1, H.Open()) + encoded(1, Q.Declare(queue="late")))
    found = client.receive()[1]
    if isinstance(found, H.CloseOk):
        found = client.receive()[1]
    assert isinstance(found, C.Close) and found.reply_code == 504


def test_a_transaction_whose_commit_comes_behind_the_close_is_rolled_back(client: Peer) -> None:
    client.call(1, T.Select(), T.SelectOk)
    client.write(publish() + CLOSE + encoded(1, T.Commit()))
    assert [frame.name for frame in until(client, H.CloseOk)] == ["Channel.CloseOk"]
    assert client.count(2, "q") == 0


def test_a_publish_before_the_close_is_there_at_close_ok(client: Peer) -> None:
    client.write(publish() + CLOSE)
    until(client, H.CloseOk)
    while client.count(2, "q") != 1:  # in RabbitMQ a moment later
        pass


def test_deliveries_under_way_when_a_channel_closes_come_back_in_order(client: Peer) -> None:
    filled(client)
    client.write(encoded(1, B.Consume(queue="q")) + CLOSE)
    until(client, H.CloseOk)
    assert bodies(client) == [b"%d" % number for number in range(COUNT)]


def test_nothing_is_delivered_behind_cancel_ok_and_what_follows_it_is_carried_out(client: Peer) -> None:
    filled(client)
    client.write(encoded(1, B.Consume(queue="q", consumer_tag="c")))
    client.expect(B.ConsumeOk, 1)
    client.write(encoded(1, B.Cancel("c")) + publish(b"last") + encoded(1, B.Recover(True)))
    answers = {B.CancelOk, B.RecoverOk}  # in RabbitMQ in any order
    while answers:
        found = type(client.receive()[1])
        answers.discard(found)
        assert B.CancelOk in answers or found is not B.Deliver
    client.call(1, H.Close(200, "", 0, 0), H.CloseOk)
    while client.count(2, "q") != COUNT + 1:
        pass
    assert [body for _, body in client.drain(2, "q")] == [b"%d" % number for number in range(COUNT)] + [
        b"last"
    ]


@pytest.mark.parametrize("end", ["cancel", "close"])
def test_no_message_is_lost_on_its_way_to_a_consumer_without_acks(url: str, end: str) -> None:
    """In RabbitMQ one may be: the queue has sent it when the channel closes."""
    with peer(url, 1, 2) as client:
        client.declare_exclusive(2, "q")
        filled(client)
        last = encoded(1, B.Cancel("c")) if end == "cancel" else CLOSE
        client.write(encoded(1, B.Consume(queue="q", consumer_tag="c", no_ack=True)) + last)
        found = until(client, B.CancelOk if end == "cancel" else H.CloseOk)
        delivered = sum(isinstance(frame, B.Deliver) for frame in found)
        assert client.count(2, "q") == COUNT - delivered
