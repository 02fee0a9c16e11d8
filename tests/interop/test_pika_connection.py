"""Connections of pika: handshake and its refusals, errors and channels opened again, heartbeats, sizes, many
channels.
"""

from __future__ import annotations

import hashlib
import threading

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel, BlockingConnection
from pika.exceptions import (
    ChannelClosedByBroker,
    ChannelWrongStateError,
    ProbableAccessDeniedError,
    ProbableAuthenticationError,
)

from broker_core import __version__
from tests.interop.asking import (
    PERSISTENT,
    Inbox,
    channel_refuses,
    connection_refuses,
    counts,
    drain,
    get_one,
    publish,
)
from tests.interop.conftest import Connect, Fresh
from tests.progress import wait_until

FRAME_OVERHEAD = 8


# --- handshake --------------------------------------------------------------------------------------------------------


@pytest.mark.txmq_only
def test_the_server_says_what_it_is_and_what_it_can_do(connection: BlockingConnection) -> None:
    properties = connection._impl.server_properties
    assert (properties["product"], properties["version"]) == ("txmq", __version__)


def test_the_server_announces_what_clients_test_for(connection: BlockingConnection) -> None:
    capabilities = connection._impl.server_properties["capabilities"]
    for name in (
        "publisher_confirms", "exchange_exchange_bindings", "basic.nack", "consumer_cancel_notify", "connection.blocked",
        "consumer_priorities", "authentication_failure_close", "per_consumer_qos",
        "direct_reply_to",
    ):  # fmt: skip
        assert capabilities[name] is True
    assert connection.basic_nack_supported
    assert connection.consumer_cancel_notify_supported
    assert connection.exchange_exchange_bindings_supported
    assert connection.publisher_confirms_supported


def test_tuning_takes_the_smaller_of_both_sides(connect: Connect) -> None:
    small = connect(frame_max=8192, channel_max=10, heartbeat=7).channel()
    parameters = small.connection._impl.params
    assert (parameters.frame_max, parameters.channel_max, parameters.heartbeat) == (8192, 10, 7)
    large = connect(channel_max=65535, heartbeat=3600)._impl.params
    assert (large.frame_max, large.channel_max, large.heartbeat) == (131072, 2047, 3600)


@pytest.mark.parametrize("user", ["guest", "nobody"])
def test_a_wrong_password_or_user_is_refused_with_403(connect: Connect, user: str) -> None:
    with pytest.raises(ProbableAuthenticationError) as refusal:
        connect(credentials=pika.PlainCredentials(user, "wrong"), connection_attempts=1)
    assert str(refusal.value.args[0]) == repr(
        pika.exceptions.ConnectionClosedByBroker(
            403,
            "ACCESS_REFUSED - Login was refused using authentication mechanism PLAIN. For details see the "
            "broker logfile.",
        )
    )


def test_a_virtual_host_that_is_not_there_is_refused_with_530(connect: Connect) -> None:
    with pytest.raises(ProbableAccessDeniedError) as refusal:
        connect(virtual_host="elsewhere", connection_attempts=1)
    assert str(refusal.value.args[0]) == repr(
        pika.exceptions.ConnectionClosedByBroker(530, "NOT_ALLOWED - vhost elsewhere not found")
    )


# --- errors -----------------------------------------------------------------------------------------------------------


def test_a_closed_channels_number_can_be_opened_again_at_once_and_starts_afresh(
    connection: BlockingConnection, fresh: Fresh
) -> None:
    queue = fresh("queue")
    connection.channel().queue_declare(queue)
    for _ in range(20):
        channel = connection.channel(channel_number=7)
        publish(channel, queue, "a")
        assert get_one(channel, queue, auto_ack=True).tag == 1
        with pytest.raises(ChannelClosedByBroker) as refusal:
            channel.queue_declare(fresh("missing"), passive=True)
        assert refusal.value.reply_code == 404
        with pytest.raises(ChannelWrongStateError):
            channel.queue_declare(queue)


def test_an_error_on_one_channel_leaves_the_others_and_their_consumers_alone(
    connection: BlockingConnection, fresh: Fresh
) -> None:
    queue = fresh("queue")
    working, failing = connection.channel(), connection.channel()
    working.queue_declare(queue)
    inbox = Inbox(working, queue)
    channel_refuses(
        failing, lambda: failing.basic_ack(5), 406, "PRECONDITION_FAILED - unknown delivery tag 5"
    )
    publish(working, queue, "a")
    assert [one.body for one in inbox.wait(1)] == [b"a"]
    working.basic_ack(1)
    assert counts(working, queue) == (0, 1)


def test_what_was_published_before_an_error_is_there_and_what_came_after_it_is_not(
    connection: BlockingConnection, other: BlockingChannel, fresh: Fresh
) -> None:
    queue, missing = fresh("queue"), fresh("missing")
    other.queue_declare(queue)
    channel = connection.channel()
    for exchange, body in (("", b"before"), (missing, b"error"), ("", b"after")):
        method = pika.spec.Basic.Publish(exchange=exchange, routing_key=queue)
        channel._impl._send_method(method, (PERSISTENT, body))
    with pytest.raises(ChannelClosedByBroker):
        channel.queue_declare(queue)
    wait_until(lambda: counts(other, queue) == (1, 0))
    assert drain(other, queue) == [b"before"]


def test_an_error_of_the_connection_closes_all_its_channels_and_requeues(
    connect: Connect, other: BlockingChannel, fresh: Fresh
) -> None:
    queue = fresh("queue")
    other.queue_declare(queue)
    publish(other, queue, "a")
    connection = connect()
    channels = [connection.channel() for _ in range(3)]
    get_one(channels[0], queue)
    connection_refuses(
        connection, lambda: channels[1].basic_recover(requeue=False), 540, "NOT_IMPLEMENTED - requeue=false"
    )
    assert [one.is_open for one in channels] == [False] * 3
    assert get_one(other, queue).redelivered is True


def test_flow_off_is_refused_and_flow_on_is_answered(
    connection: BlockingConnection, channel: BlockingChannel
) -> None:
    assert channel.flow(True) is True
    connection_refuses(connection, lambda: channel.flow(False), 540, "NOT_IMPLEMENTED - active=false")


# --- bodies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("frame_max", [4096, 131072])
def test_bodies_around_the_frame_size_come_back_byte_for_byte(
    connect: Connect, fresh: Fresh, frame_max: int
) -> None:
    queue, channel = fresh("queue"), connect(frame_max=frame_max).channel()
    channel.queue_declare(queue)
    fits = frame_max - FRAME_OVERHEAD
    sizes = [0, 1, fits - 1, fits, fits + 1, frame_max, 2 * fits, 2 * fits + 1]
    bodies = [bytes(number % 251 for number in range(size)) for size in sizes]
    publish(channel, queue, *bodies)
    assert [get_one(channel, queue).body for _ in sizes] == bodies
    channel.basic_recover(requeue=True)
    assert [one.body for one in Inbox(channel, queue).wait(len(sizes))] == bodies


def test_bodies_of_10_mb_pass_in_a_transaction_with_confirms_and_to_a_reader_of_small_frames(
    connect: Connect, fresh: Fresh
) -> None:
    queue = fresh("queue")
    body = hashlib.sha256(b"seed").digest() * (10 * 1024 * 1024 // 32)
    tx, confirming, small = connect().channel(), connect().channel(), connect(frame_max=4096).channel()
    tx.queue_declare(queue)
    tx.tx_select()
    publish(tx, queue, body)
    tx.tx_commit()
    confirming.confirm_delivery()
    publish(confirming, queue, body)
    first, second = Inbox(small, queue, auto_ack=True).wait(2)
    assert (first.body == body, second.body == body) == (True, True)


def test_bodies_of_several_channels_may_be_interleaved_frame_by_frame(
    connection: BlockingConnection, fresh: Fresh
) -> None:
    queue = fresh("queue")
    channels = [connection.channel() for _ in range(3)]
    channels[0].queue_declare(queue)
    frames = []
    for one in channels:
        number = one.channel_number
        body = bytes([number]) * 20
        method = pika.spec.Basic.Publish(exchange="", routing_key=queue)
        frames.append([
            pika.frame.Method(number, method), pika.frame.Header(number, len(body), pika.BasicProperties()),
            pika.frame.Body(number, body[:7]), pika.frame.Body(number, b""), pika.frame.Body(number, body[7:]),
        ])  # fmt: skip
    for step in zip(*frames, strict=True):
        for frame in step:
            connection._impl._output_marshaled_frames([frame.marshal()])
    got = sorted(get_one(channels[0], queue).body for _ in channels)
    assert got == [bytes([one.channel_number]) * 20 for one in channels]


# --- many, idle, blocked ----------------------------------------------------------------------------------------------


def test_two_hundred_channels_of_one_connection_work_side_by_side(
    connection: BlockingConnection, fresh: Fresh
) -> None:
    queue = fresh("queue")
    channels = [connection.channel() for _ in range(200)]
    channels[0].queue_declare(queue)
    inboxes = [Inbox(one, queue, auto_ack=True) for one in channels]
    for number, one in enumerate(channels):
        publish(one, queue, str(number))
    wait_until(
        lambda: connection.process_data_events(0.05) or sum(len(one.received) for one in inboxes) == 200
    )
    assert sorted(int(body) for inbox in inboxes for body in inbox.bodies) == list(range(200))
    assert [len(inbox.received) for inbox in inboxes] == [1] * 200  # in turn


def test_an_idle_connection_lives_by_heartbeats_and_a_dead_one_loses_its_consumers(
    connect: Connect, other: BlockingChannel, fresh: Fresh
) -> None:
    queue = fresh("queue")
    other.queue_declare(queue)
    idle, dead = connect(heartbeat=2), connect(heartbeat=1)
    for one in (idle, dead):
        one.channel().basic_consume(queue, lambda *_: None)
    assert counts(other, queue) == (0, 2)
    # pika sends heartbeats only while it is called: one of the two is.
    wait_until(
        lambda: idle.process_data_events(0.05) or counts(other, queue) == (0, 1),
        "the silent connection is gone",
    )
    idle.process_data_events(3)
    assert idle.is_open
    assert counts(other, queue) == (0, 1)


def test_an_ordinary_load_never_blocks_the_connection(connect: Connect, fresh: Fresh) -> None:
    queue, connection = fresh("queue"), connect()
    blocked: list[object] = []
    connection.add_on_connection_blocked_callback(lambda *frame: blocked.append(frame))
    channel = connection.channel()
    channel.queue_declare(queue)
    channel.tx_select()
    for _ in range(5):
        publish(channel, queue, *([bytes(10_000)] * 100))
        channel.tx_commit()
    connection.process_data_events(0)
    assert counts(channel, queue) == (500, 0)
    assert blocked == []


def test_connections_of_many_threads_publish_and_consume_at_once(url: str, fresh: Fresh) -> None:
    queue, failures, taken = fresh("queue"), [], []

    def work(number: int) -> None:
        try:
            with BlockingConnection(pika.URLParameters(url)) as connection:
                channel = connection.channel()
                channel.confirm_delivery()
                for index in range(20):
                    publish(channel, queue, f"{number}.{index}")
                for _ in range(20):
                    taken.append(get_one(channel, queue, auto_ack=True).body.decode())
        except BaseException as failure:
            failures.append(failure)

    with BlockingConnection(pika.URLParameters(url)) as connection:
        connection.channel().queue_declare(queue)
    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert failures == []
    assert sorted(taken) == sorted(f"{number}.{index}" for number in range(8) for index in range(20))
