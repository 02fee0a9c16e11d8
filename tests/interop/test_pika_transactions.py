"""tx as pika's blocking connection sees it: what is visible when, which tags are whose, which refusals come
at once.
"""

from __future__ import annotations

from typing import Any

import pytest
from pika.adapters.blocking_connection import BlockingChannel, BlockingConnection
from pika.exceptions import ChannelClosedByBroker

from tests.amqp_server import AmqpServed
from tests.interop.asking import (
    PERSISTENT,
    Inbox,
    channel_refuses,
    counts,
    drain,
    get,
    get_one,
    lose,
    publish,
)
from tests.interop.conftest import Connect, Fresh
from tests.progress import wait_until


@pytest.fixture
def tx(channel: BlockingChannel) -> BlockingChannel:
    channel.tx_select()
    return channel


def test_publishes_of_a_transaction_are_seen_by_nobody_before_commit_ok_and_by_all_after_it_in_order(
    tx: BlockingChannel, other: BlockingChannel, fresh: Fresh
) -> None:
    first, second = fresh("first"), fresh("second")
    for queue in (first, second):
        other.queue_declare(queue, durable=True)
    for number in range(100):
        publish(tx, (first, second)[number % 2], str(number))
    assert (counts(tx, first), counts(other, second)) == ((0, 0), (0, 0))
    tx.tx_commit()
    assert (counts(other, first), counts(other, second)) == ((50, 0), (50, 0))
    assert [int(body) for body in drain(other, first)] == list(range(0, 100, 2))
    assert [int(body) for body in drain(other, second)] == list(range(1, 100, 2))


def test_a_fanout_of_a_transaction_reaches_every_queue_at_its_commit(
    tx: BlockingChannel, other: BlockingChannel, fresh: Fresh
) -> None:
    exchange, queues = fresh("fan"), [fresh(f"q{number}") for number in range(3)]
    other.exchange_declare(exchange, "fanout")
    for queue in queues:
        other.queue_declare(queue)
        other.queue_bind(queue, exchange)
    tx.basic_publish(exchange, "any", b"one")
    tx.basic_publish(exchange, "any", b"two")
    assert [get(other, queue) for queue in queues] == [None] * 3
    tx.tx_commit()
    assert [drain(other, queue) for queue in queues] == [[b"one", b"two"]] * 3


def test_routing_is_that_of_the_publish_and_not_that_of_the_commit(
    tx: BlockingChannel, other: BlockingChannel, fresh: Fresh
) -> None:
    exchange, before, after = fresh("direct"), fresh("before"), fresh("after")
    other.exchange_declare(exchange, "direct")
    for queue in (before, after):
        other.queue_declare(queue)
    other.queue_bind(before, exchange, "key")
    tx.basic_publish(exchange, "key", b"routed")
    counts(tx, before)  # the broker has handled the publish when it answers
    other.queue_bind(after, exchange, "key")
    other.queue_unbind(before, exchange, "key")
    tx.tx_commit()
    assert (drain(other, before), drain(other, after)) == ([b"routed"], [])


def test_rollback_drops_publishes_and_gives_acked_tags_back_without_redelivery(
    tx: BlockingChannel, other: BlockingChannel, fresh: Fresh
) -> None:
    queue, out = fresh("queue"), fresh("out")
    for name in (queue, out):
        other.queue_declare(name)
    publish(other, queue, "a", "b", "c")
    tags = [get_one(tx, queue).tag for _ in range(3)]
    assert tags == [1, 2, 3]
    publish(tx, out, "dropped")
    tx.basic_ack(2, multiple=True)
    tx.tx_rollback()
    assert (counts(other, queue), counts(other, out)) == ((0, 0), (0, 0))
    for tag in tags:  # the same tags, once more
        tx.basic_ack(tag)
    tx.tx_commit()
    tx.close()
    assert (counts(other, queue), counts(other, out)) == ((0, 0), (0, 0))


def test_acks_without_a_commit_are_undone_when_the_channel_closes_and_all_comes_back_in_order_redelivered(
    tx: BlockingChannel, other: BlockingChannel, fresh: Fresh
) -> None:
    queue, out = fresh("queue"), fresh("out")
    for name in (queue, out):
        other.queue_declare(name)
    publish(other, queue, "a", "b", "c", "d")
    for _ in range(3):
        get_one(tx, queue)
    tx.basic_ack(1)
    publish(tx, out, "dropped")
    tx.close()
    wait_until(lambda: counts(other, queue) == (4, 0))
    again = [get_one(other, queue, auto_ack=True) for _ in range(4)]
    assert [(one.body, one.redelivered) for one in again] == [
        (b"a", True),
        (b"b", True),
        (b"c", True),
        (b"d", False),
    ]
    assert get(other, out) is None


def test_a_transaction_of_a_lost_connection_is_rolled_back(
    connect: Connect, other: BlockingChannel, fresh: Fresh
) -> None:
    queue, out = fresh("queue"), fresh("out")
    for name in (queue, out):
        other.queue_declare(name)
    publish(other, queue, "a", "b")
    lost = connect()
    tx = lost.channel()
    tx.tx_select()
    get_one(tx, queue)
    tx.basic_ack(1)
    publish(tx, out, "dropped")
    tx.queue_declare(queue, passive=True)
    lose(lost)
    wait_until(lambda: counts(other, queue) == (2, 0), "both are ready again")
    assert [get_one(other, queue).redelivered for _ in range(2)] == [True, False]
    assert get(other, out) is None


def test_consume_publish_ack_commit_moves_every_message_once(
    tx: BlockingChannel, other: BlockingChannel, fresh: Fresh
) -> None:
    source, target = fresh("source"), fresh("target")
    for name in (source, target):
        other.queue_declare(name, durable=True)
    publish(other, source, *(str(number) for number in range(200)))
    tx.basic_qos(prefetch_count=50)
    for moved, (method, _properties, body) in enumerate(tx.consume(source, inactivity_timeout=600), start=1):
        assert method is not None, f"{moved - 1} of 200 moved"
        publish(tx, target, body)
        if moved % 20 == 0:
            tx.basic_ack(method.delivery_tag, multiple=True)
            tx.tx_commit()
        if moved == 200:
            break
    tx.cancel()
    assert counts(other, source) == (0, 0)
    assert [int(body) for body in drain(other, target)] == list(range(200))


def test_credit_of_acks_in_a_transaction_comes_back_at_commit_and_not_before(
    tx: BlockingChannel, fresh: Fresh
) -> None:
    queue = fresh("queue")
    tx.queue_declare(queue)
    publish(tx, queue, "a", "b", "c", "d")
    tx.tx_commit()
    tx.basic_qos(prefetch_count=2)
    inbox = Inbox(tx, queue)
    inbox.wait(2)
    tx.basic_ack(2, multiple=True)
    tx.queue_declare(queue, passive=True)
    assert tx.connection.process_data_events(0.2) is None
    assert inbox.bodies == [b"a", b"b"]
    tx.tx_commit()
    assert [one.body for one in inbox.wait(4)] == [b"a", b"b", b"c", b"d"]


def test_a_nack_in_a_transaction_requeues_at_commit(
    tx: BlockingChannel, other: BlockingChannel, fresh: Fresh
) -> None:
    queue = fresh("queue")
    other.queue_declare(queue)
    publish(other, queue, "a", "b")
    for _ in range(2):
        get_one(tx, queue)
    tx.basic_nack(1, requeue=True)
    assert counts(tx, queue) == (0, 0)
    tx.tx_commit()
    again = get_one(other, queue)
    assert (again.body, again.redelivered) == (b"a", True)
    tx.basic_reject(2, requeue=True)
    tx.tx_rollback()
    assert get(other, queue) is None
    tx.basic_ack(2)
    tx.tx_commit()


def test_a_reject_in_a_transaction_dead_letters_at_commit(
    tx: BlockingChannel, other: BlockingChannel, fresh: Fresh
) -> None:
    queue, dead = fresh("queue"), fresh("dead")
    other.queue_declare(dead)
    other.queue_declare(queue, arguments={"x-dead-letter-exchange": "", "x-dead-letter-routing-key": dead})
    publish(other, queue, "a")
    get_one(tx, queue)
    tx.basic_reject(1, requeue=False)
    assert counts(tx, dead) == (0, 0)
    tx.tx_commit()
    letter = get_one(other, dead)
    assert letter.body == b"a"
    assert letter.properties.headers["x-death"][0]["reason"] == "rejected"
    assert counts(other, queue) == (0, 0)


def test_recover_requeues_what_the_transaction_has_not_acked(
    tx: BlockingChannel, other: BlockingChannel, fresh: Fresh
) -> None:
    queue = fresh("queue")
    other.queue_declare(queue)
    publish(other, queue, "a", "b")
    for _ in range(2):
        get_one(tx, queue)
    tx.basic_ack(1)
    tx.basic_recover(requeue=True)
    again = get_one(other, queue)
    assert (again.body, again.redelivered) == (b"b", True)
    tx.tx_commit()
    tx.close()
    assert get(other, queue) is None


@pytest.mark.parametrize("action", ["tx_commit", "tx_rollback"])
def test_commit_and_rollback_on_a_channel_without_tx_close_it_with_406(
    channel: BlockingChannel, action: str
) -> None:
    channel_refuses(
        channel, getattr(channel, action), 406, "PRECONDITION_FAILED - channel is not transactional"
    )


def test_confirm_and_tx_exclude_each_other_on_a_channel_both_ways(connection: BlockingConnection) -> None:
    tx, confirm = connection.channel(), connection.channel()
    tx.tx_select()
    confirm.confirm_delivery()
    channel_refuses(
        tx, tx.confirm_delivery, 406, "PRECONDITION_FAILED - cannot switch from tx to confirm mode"
    )
    channel_refuses(
        confirm, confirm.tx_select, 406, "PRECONDITION_FAILED - cannot switch from confirm to tx mode"
    )


def test_select_may_be_repeated_and_changes_nothing_of_the_open_transaction(
    tx: BlockingChannel, fresh: Fresh
) -> None:
    queue = fresh("queue")
    tx.queue_declare(queue)
    publish(tx, queue, "a")
    tx.tx_select()
    assert counts(tx, queue) == (0, 0)
    tx.tx_commit()
    assert drain(tx, queue) == [b"a"]


def test_an_empty_commit_and_an_empty_rollback_are_answered(tx: BlockingChannel) -> None:
    for _ in range(3):
        tx.tx_commit()
        tx.tx_rollback()
    assert tx.is_open


@pytest.mark.parametrize("tag", [1, 99])
def test_an_unknown_or_repeated_tag_is_refused_at_once_and_the_transaction_is_rolled_back(
    tx: BlockingChannel, other: BlockingChannel, fresh: Fresh, tag: int
) -> None:
    queue, out = fresh("queue"), fresh("out")
    for name in (queue, out):
        other.queue_declare(name)
    publish(other, queue, "a")
    get_one(tx, queue)
    publish(tx, out, "dropped")
    tx.basic_ack(1)
    channel_refuses(tx, lambda: tx.basic_ack(tag), 406, f"PRECONDITION_FAILED - unknown delivery tag {tag}")
    wait_until(lambda: counts(other, queue) == (1, 0), "the acked message is ready again")
    assert get(other, out) is None


def test_mandatory_without_a_queue_is_returned_before_commit_ok_and_the_rest_is_committed(
    tx: BlockingChannel, fresh: Fresh
) -> None:
    queue, nowhere = fresh("queue"), fresh("nowhere")
    tx.queue_declare(queue)
    returned: list[tuple[int, str, str, str, bytes]] = []
    tx.add_on_return_callback(
        lambda _channel, method, _properties, body: returned.append(
            (method.reply_code, method.reply_text, method.exchange, method.routing_key, body)
        )
    )
    publish(tx, queue, "kept")
    tx.basic_publish("", nowhere, b"lost", PERSISTENT, mandatory=True)
    tx.basic_publish("", nowhere, b"not mandatory", PERSISTENT)
    tx.tx_commit()
    tx.connection.process_data_events(0)
    assert returned == [(312, "NO_ROUTE", "", nowhere, b"lost")]
    assert drain(tx, queue) == [b"kept"]


def test_a_publish_to_a_missing_exchange_closes_the_channel_at_once_and_drops_the_transaction(
    tx: BlockingChannel, other: BlockingChannel, fresh: Fresh
) -> None:
    queue, missing = fresh("queue"), fresh("missing")
    other.queue_declare(queue)
    publish(tx, queue, "dropped")
    channel_refuses(
        tx,
        lambda: publish(tx, "", "x", exchange=missing),
        404,
        f"NOT_FOUND - no exchange '{missing}' in vhost '/'",
    )
    assert get(other, queue) is None


def test_a_queue_deleted_before_the_commit_drops_out_and_the_others_get_their_messages(
    tx: BlockingChannel, other: BlockingChannel, fresh: Fresh
) -> None:
    kept, gone = fresh("kept"), fresh("gone")
    for name in (kept, gone):
        other.queue_declare(name)
    publish(tx, gone, "a")
    publish(tx, kept, "b")
    counts(tx, kept)
    other.queue_delete(gone)
    tx.tx_commit()
    assert drain(other, kept) == [b"b"]


def test_transactions_of_many_channels_do_not_touch_each_other(
    connection: BlockingConnection, fresh: Fresh
) -> None:
    queue = fresh("queue")
    channels = [connection.channel() for _ in range(8)]
    channels[0].queue_declare(queue)
    for number, one in enumerate(channels):
        one.tx_select()
        publish(one, queue, str(number), str(number))
    for number, one in enumerate(channels):
        (one.tx_commit if number % 2 else one.tx_rollback)()
    assert drain(connection.channel(), queue) == [b"1", b"1", b"3", b"3", b"5", b"5", b"7", b"7"]


@pytest.mark.txmq_only
def test_a_full_queue_fails_the_whole_commit_with_406_and_nothing_is_enqueued_anywhere(
    tx: BlockingChannel, other: BlockingChannel, fresh: Fresh
) -> None:
    full, wide = fresh("full"), fresh("wide")
    other.queue_declare(full, arguments={"x-max-length": 2, "x-overflow": "reject-publish"})
    other.queue_declare(wide)
    publish(tx, wide, "a")
    publish(tx, full, "1", "2", "3")
    with pytest.raises(ChannelClosedByBroker) as refusal:
        tx.tx_commit()
    assert refusal.value.reply_code == 406
    assert full in refusal.value.reply_text
    assert (counts(other, full), counts(other, wide)) == ((0, 0), (0, 0))


def test_after_commit_ok_a_broker_that_is_killed_has_every_message_and_no_acked_one(
    served: AmqpServed, fresh: Fresh
) -> None:
    import pika

    def connected() -> Any:
        return BlockingConnection(pika.URLParameters(served.amqp_url))

    connection = connected()
    tx = connection.channel()
    for queue in ("in", "out"):
        tx.queue_declare(queue, durable=True)
    tx.tx_select()
    publish(tx, "in", *(str(number) for number in range(500)))
    tx.tx_commit()
    for _ in range(200):
        publish(tx, "out", get_one(tx, "in").body)
    tx.basic_ack(200, multiple=True)
    tx.tx_commit()
    publish(tx, "out", "not committed")
    get_one(tx, "in")
    served.restart()
    with connected() as connection:
        channel = connection.channel()
        again = [get_one(channel, "in", auto_ack=True) for _ in range(300)]
        assert [int(one.body) for one in again] == list(range(200, 500))
        assert again[0].redelivered is True
        assert [int(body) for body in drain(channel, "out")] == list(range(200))
        assert drain(channel, "in") == []
