"""Consumers, gets and what is done with deliveries: order, tags, credit, redelivered flags, and who is told
when a queue goes.
"""

from __future__ import annotations

from typing import Any

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel, BlockingConnection
from pika.exceptions import ChannelClosedByBroker

from tests.interop.asking import (
    Inbox,
    channel_refuses,
    connection_refuses,
    counts,
    drain,
    get,
    get_one,
    publish,
)
from tests.interop.conftest import Connect, Fresh
from tests.progress import wait_until


@pytest.fixture
def queue(channel: BlockingChannel, fresh: Fresh) -> str:
    name = fresh("queue")
    channel.queue_declare(name, durable=True)
    return name


def test_deliveries_come_in_order_with_tags_from_1_and_all_that_was_published(
    channel: BlockingChannel, queue: str, fresh: Fresh
) -> None:
    exchange = fresh("topic")
    channel.exchange_declare(exchange, "topic")
    channel.queue_bind(queue, exchange, "a.*")
    inbox = Inbox(channel, queue)
    publish(channel, "a.b", *(str(number) for number in range(50)), exchange=exchange)
    got = inbox.wait(50)
    assert [(one.tag, int(one.body)) for one in got] == [(number + 1, number) for number in range(50)]
    assert {(one.exchange, one.routing_key, one.redelivered) for one in got} == {(exchange, "a.b", False)}
    assert inbox.tag.startswith("ctag1.")
    wait_until(lambda: counts(channel, queue) == (0, 1))


def test_every_property_and_header_type_comes_back_as_it_was(channel: BlockingChannel, queue: str) -> None:
    from datetime import datetime, timezone
    from decimal import Decimal

    headers = {
        "text": "wörd", "int": 7, "long": 2**40, "negative": -1, "yes": True, "no": False, "none": None,
        "decimal": Decimal("1.25"), "bytes": b"\xff\x00", "time": datetime(2024, 2, 29, tzinfo=timezone.utc), "list": [1, "two", [3]],
        "table": {"deep": {"er": 1}}, "empty": {}, "": "empty name",
    }  # fmt: skip
    fields: dict[str, Any] = {
        "content_type": "text/plain", "content_encoding": "utf-8", "headers": headers, "delivery_mode": 2, "priority": 3,
        "correlation_id": "c", "reply_to": "r", "expiration": "60000", "message_id": "m", "timestamp": 1_700_000_000, "type": "t",
        "user_id": "guest", "app_id": "app",
    }  # fmt: skip
    publish(channel, queue, "x", **fields)
    got = get_one(channel, queue, auto_ack=True)
    back = {name: getattr(got.properties, name) for name in fields}
    back["headers"]["time"] = back["headers"]["time"].replace(tzinfo=timezone.utc)
    assert back == fields


def test_a_message_without_properties_has_none_at_its_consumer(channel: BlockingChannel, queue: str) -> None:
    channel.basic_publish("", queue, b"bare")
    assert vars(get_one(channel, queue, auto_ack=True).properties) == vars(pika.BasicProperties())


def test_get_tells_how_many_are_left_and_an_empty_queue_says_so(channel: BlockingChannel, queue: str) -> None:
    assert get(channel, queue) is None
    publish(channel, queue, "a", "b", "c")
    got = [get_one(channel, queue) for _ in range(3)]
    assert [(one.tag, one.body, one.left, one.redelivered) for one in got] == [
        (1, b"a", 2, False), (2, b"b", 1, False), (3, b"c", 0, False)
    ]  # fmt: skip
    assert get(channel, queue) is None


def test_ack_of_several_settles_those_below_the_tag_only(
    channel: BlockingChannel, other: BlockingChannel, queue: str
) -> None:
    publish(channel, queue, *"abcde")
    for _ in range(5):
        get_one(channel, queue)
    channel.basic_ack(2)
    channel.basic_ack(4, multiple=True)
    channel.close()
    wait_until(lambda: counts(other, queue) == (1, 0))
    assert drain(other, queue) == [b"e"]


def test_ack_of_0_settles_all(channel: BlockingChannel, other: BlockingChannel, queue: str) -> None:
    publish(channel, queue, *"abc")
    for _ in range(3):
        get_one(channel, queue)
    channel.basic_ack(0, multiple=True)
    channel.basic_ack(0, multiple=True)  # nothing is left to ack, and that is no error
    channel.close()
    wait_until(lambda: counts(other, queue) == (0, 0))


@pytest.mark.parametrize("settle", ["basic_ack", "basic_nack", "basic_reject"])
def test_a_tag_that_was_never_given_or_is_settled_already_closes_the_channel_with_406(
    connection: BlockingConnection, queue: str, settle: str
) -> None:
    never, twice = connection.channel(), connection.channel()
    text = "PRECONDITION_FAILED - unknown delivery tag 1"
    channel_refuses(never, lambda: getattr(never, settle)(1), 406, text)
    publish(twice, queue, "a")
    getattr(twice, settle)(get_one(twice, queue).tag)
    channel_refuses(twice, lambda: getattr(twice, settle)(1), 406, text)


def test_tag_0_without_multiple_is_unknown(channel: BlockingChannel, queue: str) -> None:
    channel_refuses(
        channel, lambda: channel.basic_ack(0), 406, "PRECONDITION_FAILED - unknown delivery tag 0"
    )


def test_a_get_without_ack_has_no_tag_to_ack(channel: BlockingChannel, queue: str) -> None:
    publish(channel, queue, "a")
    tag = get_one(channel, queue, auto_ack=True).tag
    channel_refuses(
        channel, lambda: channel.basic_ack(tag), 406, f"PRECONDITION_FAILED - unknown delivery tag {tag}"
    )


def test_requeued_messages_stand_where_they_were_and_are_redelivered(
    channel: BlockingChannel, other: BlockingChannel, queue: str
) -> None:
    publish(channel, queue, *"abcdef")
    for _ in range(4):
        get_one(channel, queue)
    channel.basic_ack(2)
    channel.basic_reject(1, requeue=True)
    channel.basic_nack(4, multiple=True, requeue=True)
    wait_until(lambda: counts(channel, queue) == (5, 0))
    got = [get_one(other, queue, auto_ack=True) for _ in range(5)]
    assert [(one.body, one.redelivered) for one in got] == [
        (b"a", True), (b"c", True), (b"d", True), (b"e", False), (b"f", False)
    ]  # fmt: skip


def test_a_reject_without_requeue_and_no_dead_letter_exchange_drops(
    channel: BlockingChannel, queue: str
) -> None:
    publish(channel, queue, *"abc")
    for _ in range(3):
        get_one(channel, queue)
    channel.basic_reject(1, requeue=False)
    channel.basic_nack(3, multiple=True, requeue=False)
    channel.close()
    with_other = channel.connection.channel()
    wait_until(lambda: counts(with_other, queue) == (0, 0))


def test_recover_with_requeue_gives_all_back_redelivered_under_new_tags(
    channel: BlockingChannel, queue: str
) -> None:
    publish(channel, queue, *"abc")
    for _ in range(3):
        get_one(channel, queue)
    channel.basic_ack(2)
    channel.basic_recover(requeue=True)
    got = [get_one(channel, queue) for _ in range(2)]
    assert [(one.tag, one.body, one.redelivered) for one in got] == [(4, b"a", True), (5, b"c", True)]


def test_recover_without_requeue_is_not_implemented(
    connection: BlockingConnection, channel: BlockingChannel
) -> None:
    connection_refuses(
        connection, lambda: channel.basic_recover(requeue=False), 540, "NOT_IMPLEMENTED - requeue=false"
    )


def test_a_closed_connection_gives_its_deliveries_back(
    connect: Connect, channel: BlockingChannel, queue: str
) -> None:
    publish(channel, queue, *"abc")
    leaving = connect()
    Inbox(leaving.channel(), queue).wait(3)
    wait_until(lambda: counts(channel, queue) == (0, 1))
    leaving.close()
    wait_until(lambda: counts(channel, queue) == (3, 0))
    got = [get_one(channel, queue) for _ in range(3)]
    assert [(one.body, one.redelivered) for one in got] == [(b"a", True), (b"b", True), (b"c", True)]


# --- consumers --------------------------------------------------------------------------------------------------------


def test_a_cancelled_consumer_gets_nothing_more_and_its_deliveries_stay_its_channels(
    channel: BlockingChannel, other: BlockingChannel, queue: str
) -> None:
    publish(channel, queue, "a", "b")
    inbox = Inbox(channel, queue)
    inbox.wait(2)
    channel.basic_cancel(inbox.tag)
    wait_until(lambda: counts(other, queue) == (0, 0))
    publish(channel, queue, "c")
    wait_until(lambda: counts(channel, queue) == (1, 0))
    channel.basic_ack(1)
    channel.basic_nack(2, requeue=True)
    wait_until(lambda: counts(channel, queue) == (2, 0))
    assert [get_one(other, queue).body for _ in range(2)] == [b"b", b"c"]
    assert len(inbox.received) == 2


def test_a_consumer_is_told_when_its_queue_is_deleted(
    channel: BlockingChannel, other: BlockingChannel, queue: str
) -> None:
    told: list[str] = []
    channel.add_on_cancel_callback(lambda frame: told.append(frame.method.consumer_tag))
    channel.basic_consume(queue, lambda *_: None, consumer_tag="mine")
    other.queue_delete(queue)
    wait_until(lambda: channel.connection.process_data_events(0.05) or told)
    assert told == ["mine"]
    assert channel.consumer_tags == []
    assert channel.is_open


def test_the_generator_of_pika_ends_when_the_queue_is_deleted(
    channel: BlockingChannel, other: BlockingChannel, queue: str
) -> None:
    publish(channel, queue, "a")
    received = []
    for method, _properties, body in channel.consume(queue):
        received.append(body)
        channel.basic_ack(method.delivery_tag)
        other.queue_delete(queue)
    assert received == [b"a"]


def test_a_consumer_tag_of_the_servers_making(
    connection: BlockingConnection, channel: BlockingChannel, queue: str
) -> None:
    answers: list[Any] = []
    channel._impl._rpc(pika.spec.Basic.Consume(queue=queue), answers.append, [pika.spec.Basic.ConsumeOk])
    wait_until(lambda: connection.process_data_events(0.05) or answers)
    tag = answers[0].method.consumer_tag
    assert tag.startswith("amq.ctag-")
    wait_until(lambda: counts(channel, queue) == (0, 1))
    channel._impl._rpc(pika.spec.Basic.Cancel(consumer_tag=tag), answers.append, [pika.spec.Basic.CancelOk])
    wait_until(lambda: connection.process_data_events(0.05) or len(answers) == 2)
    wait_until(lambda: counts(channel, queue) == (0, 0))


def test_a_tag_used_twice_on_a_channel_closes_the_connection_with_530(
    connection: BlockingConnection, channel: BlockingChannel, queue: str
) -> None:
    channel.basic_consume(queue, lambda *_: None, consumer_tag="t")
    again = pika.spec.Basic.Consume(queue=queue, consumer_tag="t")
    connection_refuses(
        connection,
        lambda: channel._impl._rpc(again, lambda _: None, [pika.spec.Basic.ConsumeOk]),
        530,
        "NOT_ALLOWED - attempt to reuse consumer tag 't'",
    )


def test_the_same_tag_on_two_channels_is_two_consumers(
    connection: BlockingConnection, channel: BlockingChannel, queue: str
) -> None:
    second = connection.channel()
    for one in (channel, second):
        one.basic_consume(queue, lambda *_: None, consumer_tag="t")
    wait_until(lambda: counts(channel, queue) == (0, 2))


def test_consume_and_get_of_a_missing_queue_are_404(connection: BlockingConnection, fresh: Fresh) -> None:
    missing = fresh("missing")
    text = f"NOT_FOUND - no queue '{missing}' in vhost '/'"
    getting, consuming = connection.channel(), connection.channel()
    channel_refuses(getting, lambda: getting.basic_get(missing), 404, text)
    channel_refuses(consuming, lambda: consuming.basic_consume(missing, lambda *_: None), 404, text)


def test_prefetch_holds_a_consumer_back_until_it_acks(channel: BlockingChannel, queue: str) -> None:
    channel.basic_qos(prefetch_count=3)
    inbox = Inbox(channel, queue)
    publish(channel, queue, *(str(number) for number in range(10)))
    inbox.wait(3)
    wait_until(lambda: counts(channel, queue) == (7, 1))
    channel.basic_ack(2, multiple=True)
    inbox.wait(5)
    wait_until(lambda: counts(channel, queue) == (5, 1))
    channel.basic_nack(5, multiple=True, requeue=True)
    inbox.wait(8)
    assert inbox.bodies == [b"0", b"1", b"2", b"3", b"4", b"2", b"3", b"4"]
    assert [one.redelivered for one in inbox.received] == [False] * 5 + [True] * 3


def test_prefetch_is_each_consumers_own_and_a_later_one_does_not_change_it(
    connection: BlockingConnection, channel: BlockingChannel, queue: str
) -> None:
    channel.basic_qos(prefetch_count=1)
    first = Inbox(channel, queue)
    channel.basic_qos(prefetch_count=2)
    second = Inbox(channel, queue)
    publish(channel, queue, *"abcdefgh")
    wait_until(
        lambda: connection.process_data_events(0.05) or len(first.received) + len(second.received) == 3
    )
    wait_until(lambda: counts(channel, queue) == (5, 2))
    assert (len(first.received), len(second.received)) == (1, 2)


def test_a_global_prefetch_is_shared_by_the_consumers_of_a_channel(
    connection: BlockingConnection, channel: BlockingChannel, queue: str
) -> None:
    channel.basic_qos(prefetch_count=3, global_qos=True)
    first, second = Inbox(channel, queue), Inbox(channel, queue)
    publish(channel, queue, *"abcdefgh")
    wait_until(
        lambda: connection.process_data_events(0.05) or len(first.received) + len(second.received) == 3
    )
    wait_until(lambda: counts(channel, queue) == (5, 2))
    channel.basic_ack(0, multiple=True)
    wait_until(
        lambda: connection.process_data_events(0.05) or len(first.received) + len(second.received) == 6
    )
    wait_until(lambda: counts(channel, queue) == (2, 2))


def test_a_prefetch_for_consumers_lifts_the_one_of_the_channel(channel: BlockingChannel, queue: str) -> None:
    channel.basic_qos(prefetch_count=1, global_qos=True)
    inbox = Inbox(channel, queue)
    publish(channel, queue, *"abcd")
    inbox.wait(1)
    wait_until(lambda: counts(channel, queue) == (3, 1))
    channel.basic_qos(prefetch_count=2)  # of consumers that are still to come
    assert [one.body for one in inbox.wait(4)] == [b"a", b"b", b"c", b"d"]


def test_prefetch_says_nothing_to_a_consumer_without_acks_and_to_get(
    channel: BlockingChannel, queue: str
) -> None:
    channel.basic_qos(prefetch_count=1)
    publish(channel, queue, "a", "b", "c", "d", "e")
    assert [get_one(channel, queue).body for _ in range(2)] == [b"a", b"b"]
    inbox = Inbox(channel, queue, auto_ack=True)
    assert [one.body for one in inbox.wait(3)] == [b"c", b"d", b"e"]
    wait_until(lambda: counts(channel, queue) == (0, 1))


def test_prefetch_size_is_not_implemented(connection: BlockingConnection, channel: BlockingChannel) -> None:
    connection_refuses(
        connection,
        lambda: channel.basic_qos(prefetch_size=10),
        540,
        "NOT_IMPLEMENTED - prefetch_size!=0 (10)",
    )


def test_consumers_of_one_queue_take_turns(connection: BlockingConnection, queue: str) -> None:
    channels = [connection.channel() for _ in range(3)]
    inboxes = [Inbox(one, queue) for one in channels]
    publish(channels[0], queue, *(str(number) for number in range(30)))
    wait_until(
        lambda: connection.process_data_events(0.05) or sum(len(one.received) for one in inboxes) == 30
    )
    assert [len(one.received) for one in inboxes] == [10, 10, 10]
    for inbox in inboxes:
        assert [int(body) for body in inbox.bodies] == sorted(int(body) for body in inbox.bodies)


def test_a_consumer_of_higher_priority_gets_all_while_it_has_credit(
    connection: BlockingConnection, channel: BlockingChannel, queue: str
) -> None:
    channel.basic_qos(prefetch_count=2)
    low = Inbox(channel, queue)
    high = Inbox(channel, queue, arguments={"x-priority": 10})
    publish(channel, queue, *"abcde")
    wait_until(lambda: connection.process_data_events(0.05) or len(low.received) + len(high.received) == 4)
    assert (high.bodies, low.bodies) == ([b"a", b"b"], [b"c", b"d"])


def test_an_exclusive_consumer_shuts_others_out_both_ways(connection: BlockingConnection, queue: str) -> None:
    text = f"ACCESS_REFUSED - queue '{queue}' in vhost '/' in exclusive use"
    holder, second, third = connection.channel(), connection.channel(), connection.channel()
    tag = holder.basic_consume(queue, lambda *_: None, exclusive=True)
    channel_refuses(second, lambda: second.basic_consume(queue, lambda *_: None), 403, text)
    holder.basic_cancel(tag)
    holder.basic_consume(queue, lambda *_: None)
    channel_refuses(third, lambda: third.basic_consume(queue, lambda *_: None, exclusive=True), 403, text)


def test_a_single_active_consumer_gets_everything_and_the_next_takes_over_when_it_goes(
    connect: Connect, fresh: Fresh
) -> None:
    connection, queue = connect(), fresh("single")
    channel = connection.channel()
    channel.queue_declare(queue, arguments={"x-single-active-consumer": True})
    leaving = connect()
    active, waiting = Inbox(leaving.channel(), queue), Inbox(channel, queue)
    wait_until(lambda: counts(channel, queue)[1] == 2)
    publish(channel, queue, *"abcd")
    active.wait(4)
    assert waiting.settled() == []
    active.channel.basic_ack(2, multiple=True)
    counts(active.channel, queue)
    leaving.close()
    got = waiting.wait(2)
    assert [(one.body, one.redelivered) for one in got] == [(b"c", True), (b"d", True)]
    publish(channel, queue, "e")
    assert waiting.wait(3)[2].body == b"e"


def test_a_single_active_consumer_queue_takes_no_exclusive_consumer(
    channel: BlockingChannel, fresh: Fresh
) -> None:
    queue = fresh("single")
    channel.queue_declare(queue, arguments={"x-single-active-consumer": True})
    channel_refuses(
        channel,
        lambda: channel.basic_consume(queue, lambda *_: None, exclusive=True),
        403,
        f"ACCESS_REFUSED - queue '{queue}' in vhost '/' in exclusive use",
    )


@pytest.mark.txmq_only
def test_no_local_keeps_a_connections_own_messages_from_it_and_gives_it_the_others(
    channel: BlockingChannel, other: BlockingChannel, queue: str
) -> None:
    received: list[bytes] = []
    consume = pika.spec.Basic.Consume(queue=queue, consumer_tag="deaf", no_local=True, no_ack=True)
    channel._impl._consumers["deaf"] = lambda _channel, _method, _properties, body: received.append(body)
    channel._impl._rpc(consume, lambda _: None, [pika.spec.Basic.ConsumeOk])
    publish(channel, queue, "own")
    counts(channel, queue)
    publish(other, queue, "foreign")
    wait_until(lambda: channel.connection.process_data_events(0.05) or received)
    assert received == [b"foreign"]
    assert drain(other, queue) == [b"own"]
    channel._impl._rpc(
        pika.spec.Basic.Cancel(consumer_tag="deaf"), lambda _: None, [pika.spec.Basic.CancelOk]
    )
    wait_until(lambda: counts(channel, queue) == (0, 0))


def test_a_channel_that_the_broker_closes_takes_its_consumers_along(
    connection: BlockingConnection, channel: BlockingChannel, queue: str, fresh: Fresh
) -> None:
    failing = connection.channel()
    Inbox(failing, queue)
    with pytest.raises(ChannelClosedByBroker):
        failing.queue_declare(fresh("missing"), passive=True)
    wait_until(lambda: counts(channel, queue) == (0, 0))


def test_cancelling_an_unknown_tag_is_answered(
    connection: BlockingConnection, channel: BlockingChannel
) -> None:
    answers: list[Any] = []
    channel._impl._rpc(
        pika.spec.Basic.Cancel(consumer_tag="unknown"), answers.append, [pika.spec.Basic.CancelOk]
    )
    wait_until(lambda: connection.process_data_events(0.05) or answers)
    assert answers[0].method.consumer_tag == "unknown"
