"""Publisher confirms: an answer for every publish, a return before it, a nack where the queue refuses."""

from __future__ import annotations

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel, BlockingConnection
from pika.exceptions import NackError, UnroutableError

from tests.amqp_server import AmqpServed
from tests.interop.asking import PERSISTENT, channel_refuses, counts, drain, get_one, publish
from tests.interop.conftest import Fresh


@pytest.fixture
def confirming(channel: BlockingChannel) -> BlockingChannel:
    channel.confirm_delivery()
    return channel


def test_every_publish_is_confirmed_and_stands_in_the_queue_in_order(
    confirming: BlockingChannel, other: BlockingChannel, fresh: Fresh
) -> None:
    queue = fresh("queue")
    confirming.queue_declare(queue, durable=True)
    for number in range(100):
        publish(confirming, queue, str(number))  # returns when it is confirmed
        assert counts(other, queue) == (number + 1, 0)
    assert [int(body) for body in drain(other, queue)] == list(range(100))


def test_a_publish_that_reaches_no_queue_is_confirmed_all_the_same(
    confirming: BlockingChannel, fresh: Fresh
) -> None:
    exchange = fresh("fan")
    confirming.exchange_declare(exchange, "fanout")
    publish(confirming, "key", "a", exchange=exchange)
    publish(confirming, fresh("nowhere"), "b")
    assert confirming.is_open


@pytest.mark.parametrize("transient", [False, True])
def test_mandatory_without_a_queue_comes_back_with_312_and_all_it_had(
    confirming: BlockingChannel, fresh: Fresh, transient: bool
) -> None:
    nowhere = fresh("nowhere")
    properties = pika.BasicProperties(message_id="m-1", headers={"k": 1}, delivery_mode=1 if transient else 2)
    with pytest.raises(UnroutableError) as unroutable:
        confirming.basic_publish("", nowhere, b"body", properties, mandatory=True)
    (returned,) = unroutable.value.messages
    method = returned.method
    assert (method.reply_code, method.reply_text, method.exchange, method.routing_key) == (
        312,
        "NO_ROUTE",
        "",
        nowhere,
    )
    assert (returned.body, returned.properties.message_id, returned.properties.headers) == (
        b"body",
        "m-1",
        {"k": 1},
    )


def test_mandatory_with_a_queue_is_not_returned(confirming: BlockingChannel, fresh: Fresh) -> None:
    queue = fresh("queue")
    confirming.queue_declare(queue)
    confirming.basic_publish("", queue, b"a", PERSISTENT, mandatory=True)
    assert drain(confirming, queue) == [b"a"]


def test_a_full_queue_nacks_what_it_refuses_and_confirms_again_when_there_is_room(
    confirming: BlockingChannel, other: BlockingChannel, fresh: Fresh
) -> None:
    queue = fresh("queue")
    confirming.queue_declare(queue, arguments={"x-max-length": 2, "x-overflow": "reject-publish"})
    publish(confirming, queue, "1", "2")
    with pytest.raises(NackError):
        publish(confirming, queue, "3")
    get_one(other, queue, auto_ack=True)
    publish(confirming, queue, "4")
    assert drain(other, queue) == [b"2", b"4"]


def test_a_missing_exchange_closes_the_confirming_channel_with_404(
    confirming: BlockingChannel, fresh: Fresh
) -> None:
    missing = fresh("missing")
    channel_refuses(
        confirming,
        lambda: publish(confirming, "", "x", exchange=missing),
        404,
        f"NOT_FOUND - no exchange '{missing}' in vhost '/'",
    )


def test_immediate_is_not_implemented(connection: BlockingConnection, channel: BlockingChannel) -> None:
    method = pika.spec.Basic.Publish(exchange="", routing_key="any", immediate=True)
    channel._impl._send_method(method, (pika.BasicProperties(), b""))
    with pytest.raises(pika.exceptions.ConnectionClosedByBroker) as refusal:
        connection.process_data_events(20)
    assert (refusal.value.reply_code, refusal.value.reply_text) == (540, "NOT_IMPLEMENTED - immediate=true")


def test_what_was_confirmed_is_there_after_the_broker_was_killed(served: AmqpServed) -> None:
    parameters = pika.URLParameters(served.amqp_url)
    channel = BlockingConnection(parameters).channel()
    channel.queue_declare("durable", durable=True)
    channel.confirm_delivery()
    for number in range(50):
        publish(channel, "durable", str(number))
    publish(channel, "durable", "transient", delivery_mode=1)
    served.restart()
    with BlockingConnection(parameters) as connection:
        assert [int(body) for body in drain(connection.channel(), "durable")] == list(range(50))


@pytest.mark.txmq_only
@pytest.mark.parametrize("transactional", [False, True])
def test_a_duplicate_is_confirmed_or_committed_and_is_not_enqueued(
    channel: BlockingChannel, other: BlockingChannel, fresh: Fresh, transactional: bool
) -> None:
    queue = fresh("queue")
    channel.queue_declare(queue, arguments={"x-message-deduplication": True, "x-cache-size": 10})
    channel.tx_select() if transactional else channel.confirm_delivery()
    for id_ in ("a", "b", "a", "c", "b"):
        properties = pika.BasicProperties(message_id=id_, delivery_mode=2)
        channel.basic_publish("", queue, id_.encode(), properties, mandatory=True)
        if transactional:
            channel.tx_commit()
    assert drain(other, queue) == [b"a", b"b", b"c"]


@pytest.mark.txmq_only
def test_a_duplicate_is_confirmed_also_if_the_queue_is_full_and_what_was_refused_is_none(
    confirming: BlockingChannel, other: BlockingChannel, fresh: Fresh
) -> None:
    queue = fresh("queue")
    arguments = {"x-max-length": 1, "x-overflow": "reject-publish"}
    confirming.queue_declare(
        queue, arguments={**arguments, "x-message-deduplication": True, "x-cache-size": 10}
    )
    properties = [pika.BasicProperties(message_id=id_) for id_ in "ab"]
    confirming.basic_publish("", queue, b"a", properties[0])
    with pytest.raises(NackError):
        confirming.basic_publish("", queue, b"b", properties[1])
    confirming.basic_publish("", queue, b"a", properties[0])
    assert drain(other, queue) == [b"a"]
    confirming.basic_publish("", queue, b"b", properties[1])
    assert drain(other, queue) == [b"b"]
