"""Direct reply-to, as RPC clients use it: an answer reaches its requester without a queue, and nobody
else.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pamqp import base, commands

from tests.amqp_peer import Peer, changed, content, encoded, peer
from tests.interop.conftest import Fresh

B, C, E, H, Q, T = (
    commands.Basic,
    commands.Connection,
    commands.Exchange,
    commands.Channel,
    commands.Queue,
    commands.Tx,
)
REPLIES = "amq.rabbitmq.reply-to"


@pytest.fixture
def asker(url: str) -> Iterator[Peer]:
    with peer(url, 1, 2) as found:
        yield found


@pytest.fixture
def server(url: str) -> Iterator[Peer]:
    with peer(url, 1, 2) as found:
        yield found


@pytest.fixture
def rpc(server: Peer, fresh: Fresh) -> str:
    name = fresh("rpc")
    server.call(1, Q.Declare(queue=name), Q.DeclareOk)
    return name


def consume(asker: Peer, tag: str = "me") -> None:
    asker.call(1, B.Consume(queue=REPLIES, no_ack=True, consumer_tag=tag), B.ConsumeOk)


def asked(asker: Peer, server: Peer, rpc: str, **properties: object) -> str:
    """The name to which the request says that the answer goes."""
    asker.publish(1, "", rpc, b"question", reply_to=REPLIES, **properties)
    return received(asker, server, rpc).reply_to or ""


def received(asker: Peer, server: Peer, rpc: str) -> commands.Basic.Properties:
    asker.call(1, B.Qos(prefetch_count=0), B.QosOk)
    while True:
        server.send(1, B.Get(queue=rpc, no_ack=True))
        if isinstance(server.receive()[1], B.GetOk):
            properties, body = server.content()
            assert body == b"question"
            return properties


def closed(client: Peer, channel: int, *frames: base.Frame | bytes) -> tuple[int, str]:
    client.write(b"".join(frame if isinstance(frame, bytes) else encoded(channel, frame) for frame in frames))
    close = client.expect(H.Close, channel)
    client.send(channel, H.CloseOk())
    client.open(channel)
    return close.reply_code, close.reply_text


def there(client: Peer, name: str) -> bool:
    """Whether a declaration says that the requester is still there."""
    # a name of RabbitMQ has letters that queues should not have
    client.send(2, changed(Q.Declare(passive=True), queue=name))
    frame = client.receive()[1]
    if isinstance(frame, Q.DeclareOk):
        assert (frame.queue, frame.message_count, frame.consumer_count) == (name, 0, 1)
        return True
    assert isinstance(frame, H.Close) and frame.reply_code == 404
    assert frame.reply_text == f"NOT_FOUND - no queue '{name}' in vhost '/'"
    client.send(2, H.CloseOk())
    client.open(2)
    return False


def test_an_answer_reaches_its_requester_with_its_properties_and_no_other_channel(
    asker: Peer, server: Peer, rpc: str
) -> None:
    consume(asker)
    asker.call(2, B.Consume(queue=REPLIES, no_ack=True, consumer_tag="other"), B.ConsumeOk)
    name = asked(
        asker, server, rpc, correlation_id="7", headers={"a": [1, {"b": "c"}]}, content_type="text/plain"
    )
    assert name.startswith(REPLIES + ".") and len(name) < 256
    server.publish(1, "", name, b"answer", correlation_id="7")
    deliver = asker.expect(B.Deliver, 1)
    assert (deliver.consumer_tag, deliver.redelivered, deliver.exchange, deliver.routing_key) == (
        "me",
        False,
        "",
        name,
    )
    properties, body = asker.content(1)
    assert (properties.correlation_id, body) == ("7", b"answer")


def test_a_request_keeps_all_else_that_it_says(asker: Peer, server: Peer, rpc: str) -> None:
    consume(asker)
    asker.publish(
        1,
        "",
        rpc,
        b"question",
        reply_to=REPLIES,
        correlation_id="7",
        headers={"a": 1},
        expiration="60000",
        message_id="m",
        priority=3,
    )
    found = received(asker, server, rpc)
    assert (found.correlation_id, found.headers, found.expiration, found.message_id, found.priority) == (
        "7",
        {"a": 1},
        "60000",
        "m",
        3,
    )


def test_a_reply_to_that_is_another_ones_name_passes_as_it_is(asker: Peer, server: Peer, rpc: str) -> None:
    for reply_to in ("elsewhere", REPLIES + ".someone"):
        asker.publish(1, "", rpc, b"question", reply_to=reply_to)
        assert received(asker, server, rpc).reply_to == reply_to


def test_a_request_without_its_consumer_on_the_channel_is_refused(asker: Peer, rpc: str) -> None:
    consume(asker)
    request = content(2, B.Publish(routing_key=rpc), b"question", reply_to=REPLIES)
    assert closed(asker, 2, request) == (406, "PRECONDITION_FAILED - fast reply consumer does not exist")
    asker.call(1, B.Cancel(consumer_tag="me"), B.CancelOk)
    request = content(1, B.Publish(routing_key=rpc), b"question", reply_to=REPLIES)
    assert closed(asker, 1, request) == (406, "PRECONDITION_FAILED - fast reply consumer does not exist")


def test_a_reply_consumer_that_would_ack_or_is_the_second_one_is_refused(asker: Peer) -> None:
    cannot = (406, "PRECONDITION_FAILED - reply consumer cannot acknowledge")
    assert closed(asker, 1, B.Consume(queue=REPLIES)) == cannot
    consume(asker)
    second = B.Consume(queue=REPLIES, no_ack=True, consumer_tag="second")
    assert closed(asker, 1, second) == (406, "PRECONDITION_FAILED - reply consumer already set")
    consume(asker)
    assert closed(asker, 1, B.Consume(queue=REPLIES, no_ack=False, consumer_tag="second")) == cannot


def test_a_cancelled_reply_consumer_can_be_set_again_under_another_name(
    asker: Peer, server: Peer, rpc: str
) -> None:
    consume(asker)
    first = asked(asker, server, rpc)
    asker.call(1, B.Cancel(consumer_tag="me"), B.CancelOk)
    consume(asker)
    second = asked(asker, server, rpc)
    assert first != second
    server.publish(1, "", first, b"late")
    server.publish(1, "", second, b"answer")
    asker.expect(B.Deliver, 1)
    assert asker.content(1)[1] == b"answer"


def test_a_declaration_tells_whether_the_requester_is_still_there(
    asker: Peer, server: Peer, rpc: str
) -> None:
    assert there(server, REPLIES)
    assert not there(server, REPLIES + ".nobody")
    consume(asker)
    name = asked(asker, server, rpc)
    assert there(server, name)
    server.call(2, changed(Q.Declare(), queue=name), Q.DeclareOk)  # also where it is not passive
    assert there(asker, name)
    asker.call(1, B.Cancel(consumer_tag="me"), B.CancelOk)
    assert not there(server, name)
    consume(asker)
    name = asked(asker, server, rpc)
    asker.call(1, H.Close(200, "", 0, 0), H.CloseOk)
    assert not there(server, name)


def test_a_name_is_no_queue_to_get_from_bind_consume_or_purge(asker: Peer, server: Peer, rpc: str) -> None:
    consume(asker)
    name = asked(asker, server, rpc)
    for client in (server, asker):
        for queue in (REPLIES, name):
            for command in (
                changed(B.Get(), queue=queue),
                changed(Q.Purge(), queue=queue),
                changed(Q.Bind(exchange="amq.direct", routing_key="x"), queue=queue),
            ):
                assert closed(client, 2, command) == (404, f"NOT_FOUND - no queue '{queue}' in vhost '/'")
            assert client.call(2, changed(Q.Delete(), queue=queue), Q.DeleteOk).message_count == 0
        assert closed(client, 2, changed(B.Consume(), queue=name)) == (
            404,
            f"NOT_FOUND - no queue '{name}' in vhost '/'",
        )
    server.publish(1, "", name, b"answer")
    asker.expect(B.Deliver, 1)
    assert asker.content(1)[1] == b"answer"


def test_a_mandatory_answer_is_delivered_and_returned_as_one_that_no_queue_has(
    asker: Peer, server: Peer, rpc: str
) -> None:
    consume(asker)
    name = asked(asker, server, rpc)
    for transactional in (False, True):
        if transactional:
            server.call(1, T.Select(), T.SelectOk)
        server.publish(1, "", name, b"answer", mandatory=True)
        if transactional:
            server.send(1, T.Commit())
        returned = server.expect(B.Return, 1)
        assert (returned.reply_code, returned.reply_text, returned.routing_key) == (312, "NO_ROUTE", name)
        assert server.content(1)[1] == b"answer"
        if transactional:
            server.expect(T.CommitOk, 1)
        asker.expect(B.Deliver, 1)
        assert asker.content(1)[1] == b"answer"


@pytest.mark.parametrize("routing_key", [REPLIES, REPLIES + ".nobody"])
def test_an_answer_to_nobody_is_dropped_and_returned_where_it_is_mandatory(
    server: Peer, routing_key: str
) -> None:
    server.publish(1, "", routing_key, b"dropped")
    server.publish(1, "", routing_key, b"answer", mandatory=True)
    assert server.expect(B.Return, 1).routing_key == routing_key
    assert server.content(1)[1] == b"answer"


def test_answers_are_confirmed_also_those_to_nobody(asker: Peer, server: Peer, rpc: str) -> None:
    consume(asker)
    name = asked(asker, server, rpc)
    server.call(1, commands.Confirm.Select(), commands.Confirm.SelectOk)
    for number, to in enumerate((name, REPLIES + ".nobody", name), 1):
        server.publish(1, "", to, b"answer")
        assert server.expect(B.Ack, 1).delivery_tag == number
    for _ in range(2):
        asker.expect(B.Deliver, 1)
        assert asker.content(1)[1] == b"answer"


@pytest.mark.txmq_only  # RabbitMQ sends it at once, whatever becomes of the transaction
def test_an_answer_in_a_transaction_is_sent_by_its_commit_and_never_after_a_rollback(
    asker: Peer, server: Peer, rpc: str
) -> None:
    consume(asker)
    name = asked(asker, server, rpc)
    server.call(1, T.Select(), T.SelectOk)
    server.publish(1, "", name, b"rolled back")
    server.call(1, T.Rollback(), T.RollbackOk)
    server.publish(1, "", name, b"committed")
    asker.call(2, B.Qos(prefetch_count=0), B.QosOk)  # nothing came before it
    server.call(1, T.Commit(), T.CommitOk)
    asker.expect(B.Deliver, 1)
    assert asker.content(1)[1] == b"committed"


def test_requests_in_a_transaction_carry_the_name_too(asker: Peer, server: Peer, rpc: str) -> None:
    consume(asker)
    asker.call(1, T.Select(), T.SelectOk)
    asker.publish(1, "", rpc, b"question", reply_to=REPLIES)
    asker.call(1, T.Commit(), T.CommitOk)
    name = received(asker, server, rpc).reply_to
    assert name is not None and name.startswith(REPLIES + ".")
    server.publish(1, "", name, b"answer")
    asker.expect(B.Deliver, 1)


def test_the_limit_of_a_channel_does_not_keep_answers_from_it(
    asker: Peer, server: Peer, rpc: str, fresh: Fresh
) -> None:
    work = fresh("work")
    asker.call(1, Q.Declare(queue=work), Q.DeclareOk)
    asker.call(1, B.Qos(prefetch_count=1, global_=True), B.QosOk)
    asker.call(1, B.Consume(queue=work, consumer_tag="work"), B.ConsumeOk)
    server.publish(1, "", work, b"job")
    asker.expect(B.Deliver, 1)
    asker.content(1)
    consume(asker)
    asker.publish(1, "", rpc, b"question", reply_to=REPLIES)
    while True:
        server.send(1, B.Get(queue=rpc, no_ack=True))
        if isinstance(server.receive()[1], B.GetOk):
            name = server.content()[0].reply_to
            break
    server.publish(1, "", name or "", b"answer")
    assert asker.expect(B.Deliver, 1).consumer_tag == "me"


def test_a_consumer_tag_of_a_reply_consumer_cannot_be_one_that_is_in_use(asker: Peer, fresh: Fresh) -> None:
    queue = fresh("q")
    asker.call(1, Q.Declare(queue=queue), Q.DeclareOk)
    asker.call(1, B.Consume(queue=queue, consumer_tag="me"), B.ConsumeOk)
    asker.send(1, B.Consume(queue=REPLIES, no_ack=True, consumer_tag="me"))
    close = asker.expect(C.Close, 0)
    assert (close.reply_code, close.reply_text) == (530, "NOT_ALLOWED - attempt to reuse consumer tag 'me'")


@pytest.mark.txmq_only
def test_a_large_transaction_of_answers_delivers_each_and_returns_the_mandatory_ones(
    asker: Peer, server: Peer, rpc: str
) -> None:
    consume(asker)
    name = asked(asker, server, rpc)
    server.call(1, T.Select(), T.SelectOk)
    count = 1_500  # more than is kept in memory until the commit
    for number in range(count):
        server.publish(1, "", name, str(number).encode(), mandatory=number % 500 == 0)
    server.send(1, T.Commit())
    returned = []
    for _ in range(3):
        server.expect(B.Return, 1)
        returned.append(server.content(1)[1])
    server.expect(T.CommitOk, 1)
    assert sorted(returned) == [b"0", b"1000", b"500"]
    for number in range(count):
        asker.expect(B.Deliver, 1)
        assert asker.content(1)[1] == str(number).encode()
