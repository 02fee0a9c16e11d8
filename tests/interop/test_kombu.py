"""py-amqp by itself, and kombu on top of it: what Celery stands on."""

from __future__ import annotations

import contextlib
import socket
import threading
import uuid
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, urlsplit

import amqp
import kombu
import pytest
from amqp.exceptions import (
    AccessRefused,
    ConsumerCancelled,
    MessageNacked,
    NotFound,
    PreconditionFailed,
    ResourceLocked,
)
from kombu.pidbox import Mailbox
from kombu.pools import producers

from tests.interop.asking import TIMEOUT_S
from tests.interop.conftest import Fresh
from tests.progress import wait_until

# --- py-amqp ----------------------------------------------------------------------------------------------------------


def open_amqp(url: str, **options: Any) -> amqp.Connection:
    parts = urlsplit(url)
    connection = amqp.Connection(
        f"{parts.hostname}:{parts.port}", userid=parts.username or "guest", password=parts.password or "guest",
        virtual_host=unquote(parts.path[1:]) or "/", **options,
    )  # fmt: skip
    connection.connect()
    return connection


@pytest.fixture
def connection(url: str) -> Iterator[amqp.Connection]:
    opened = open_amqp(url)
    yield opened
    with contextlib.suppress(Exception):
        opened.close()


@pytest.fixture
def channel(connection: amqp.Connection) -> amqp.Channel:
    return connection.channel()


def publish(channel: amqp.Channel, queue: str, *bodies: str, **options: Any) -> None:
    for body in bodies:
        channel.basic_publish(amqp.Message(body, delivery_mode=2), "", queue, **options)


def drain(channel: amqp.Channel, queue: str) -> list[str]:
    found = []
    while (message := channel.basic_get(queue, no_ack=True)) is not None:
        found.append(message.body)
    return found


@pytest.mark.parametrize("mechanism", ["PLAIN", "AMQPLAIN"])
def test_both_login_mechanisms_let_in_and_keep_out(url: str, mechanism: str) -> None:
    open_amqp(url, login_method=mechanism).close()
    parts = urlsplit(url)
    wrong = amqp.Connection(
        f"{parts.hostname}:{parts.port}", userid="guest", password="wrong", login_method=mechanism
    )
    with pytest.raises(AccessRefused) as refusal:
        wrong.connect()
    assert refusal.value.reply_text == (
        f"ACCESS_REFUSED - Login was refused using authentication mechanism {mechanism}. For details see the "
        "broker logfile."
    )
    wrong.collect()


def test_a_transaction_of_py_amqp_commits_and_rolls_back(
    connection: amqp.Connection, channel: amqp.Channel, fresh: Fresh
) -> None:
    queue, reader = fresh("queue"), connection.channel()
    channel.queue_declare(queue, durable=True, auto_delete=False)
    channel.tx_select()
    publish(channel, queue, "a", "b")
    assert reader.basic_get(queue) is None
    channel.tx_commit()
    publish(channel, queue, "dropped")
    channel.tx_rollback()
    assert drain(reader, queue) == ["a", "b"]


def test_confirms_return_and_nack(url: str, fresh: Fresh) -> None:
    connection = open_amqp(url, confirm_publish=True)
    channel = connection.channel()
    returned: list[tuple[str, str]] = []
    channel.events["basic_return"].add(
        lambda error, _exchange, key, _message: returned.append((error.reply_text, key))
    )
    full, nowhere = fresh("full"), fresh("nowhere")
    channel.queue_declare(
        full, auto_delete=False, arguments={"x-max-length": 1, "x-overflow": "reject-publish"}
    )
    publish(channel, full, "fits")
    with pytest.raises(MessageNacked):
        publish(channel, full, "does not")
    publish(channel, nowhere, "lost", mandatory=True)
    assert returned == [("NO_ROUTE", nowhere)]
    assert drain(channel, full) == ["fits"]
    connection.close()


def test_errors_are_the_exceptions_of_their_code_with_the_method_that_caused_them(
    connection: amqp.Connection, fresh: Fresh
) -> None:
    missing, queue = fresh("missing"), fresh("queue")
    connection.channel().queue_declare(queue, durable=True, auto_delete=False)
    with pytest.raises(NotFound) as absent:
        connection.channel().queue_declare(missing, passive=True)
    assert (absent.value.reply_code, absent.value.reply_text) == (
        404,
        f"NOT_FOUND - no queue '{missing}' in vhost '/'",
    )
    assert absent.value.method_sig == (50, 10)
    with pytest.raises(PreconditionFailed) as different:
        connection.channel().queue_declare(queue, durable=False, auto_delete=False)
    assert (different.value.reply_code, different.value.method_sig) == (406, (50, 10))
    with pytest.raises(AccessRefused) as reserved:
        connection.channel().exchange_declare("amq.mine", "direct")
    assert (reserved.value.reply_code, reserved.value.method_sig) == (403, (40, 10))


def test_an_exclusive_queue_is_locked_for_another_connection(url: str, channel: amqp.Channel) -> None:
    queue = channel.queue_declare(exclusive=True).queue
    second = open_amqp(url)
    with pytest.raises(ResourceLocked) as refusal:
        second.channel().queue_declare(queue, passive=True)
    assert refusal.value.reply_code == 405
    second.close()


def test_consume_qos_ack_and_redelivery(
    connection: amqp.Connection, channel: amqp.Channel, fresh: Fresh
) -> None:
    queue = fresh("queue")
    received: list[tuple[str, bool, int]] = []
    channel.queue_declare(queue, auto_delete=False)
    channel.basic_qos(0, 2, False)
    publish(channel, queue, *"abc")
    channel.basic_consume(
        queue,
        callback=lambda message: received.append(
            (message.body, message.delivery_info["redelivered"], message.delivery_tag)
        ),
    )
    wait(connection, lambda: len(received) == 2)
    channel.basic_reject(1, requeue=True)
    wait(connection, lambda: len(received) == 3)
    assert received == [("a", False, 1), ("b", False, 2), ("a", True, 3)]
    channel.basic_ack(3, multiple=True)
    wait(connection, lambda: len(received) == 4)
    assert received[3] == ("c", False, 4)
    channel.basic_recover(requeue=True)
    wait(connection, lambda: len(received) == 5)
    assert received[4] == ("c", True, 5)


def wait(connection: amqp.Connection, condition: Any) -> None:
    def came() -> bool:
        if not condition():
            with contextlib.suppress(socket.timeout):
                connection.drain_events(timeout=0.1)
        return bool(condition())

    wait_until(came)


def test_a_deleted_queue_cancels_its_consumer(
    connection: amqp.Connection, channel: amqp.Channel, fresh: Fresh
) -> None:
    queue = fresh("queue")
    channel.queue_declare(queue, auto_delete=False)
    cancelled: list[str] = []
    channel.basic_consume(queue, consumer_tag="mine", callback=print, on_cancel=cancelled.append)
    connection.channel().queue_delete(queue)
    wait(connection, lambda: cancelled)
    assert cancelled == ["mine"]
    assert channel.is_open


def test_heartbeats_keep_an_idle_connection_of_py_amqp(url: str) -> None:
    connection = open_amqp(url, heartbeat=1)
    assert connection.heartbeat == 1
    received_before = connection.bytes_recv
    wait_until(
        lambda: connection.send_heartbeat() or beats(connection) > received_before + 1,
        "two heartbeats of the server came",
    )
    assert connection.connected
    connection.close()


def beats(connection: amqp.Connection) -> int:
    with contextlib.suppress(socket.timeout):
        connection.drain_events(timeout=0.2)
    return int(connection.bytes_recv)


# --- kombu ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def broker(url: str) -> Iterator[kombu.Connection]:
    with kombu.Connection(url, transport_options={"confirm_publish": True}) as opened:
        yield opened


def test_a_simple_queue_puts_and_gets_in_order(broker: kombu.Connection, fresh: Fresh) -> None:
    with broker.SimpleQueue(fresh("simple")) as queue:
        for number in range(20):
            queue.put({"number": number})
        assert queue.qsize() == 20
        received = []
        for _ in range(20):
            message = queue.get(timeout=TIMEOUT_S)
            received.append(message.payload["number"])
            message.ack()
        assert received == list(range(20))
        with pytest.raises(queue.Empty):
            queue.get(block=False)


@pytest.mark.parametrize("compression", [None, "gzip"])
@pytest.mark.parametrize("serializer", ["json", "pickle"])
def test_a_producer_declares_publishes_and_a_consumer_gets_the_same(
    broker: kombu.Connection, fresh: Fresh, serializer: str, compression: str | None
) -> None:
    exchange = kombu.Exchange(fresh("exchange"), "topic", durable=True)
    queue = kombu.Queue(fresh("queue"), exchange, routing_key="task.#", durable=True, max_priority=5)
    received: list[Any] = []

    def receive(body: Any, message: kombu.Message) -> None:
        received.append(
            (
                body,
                message.delivery_info["routing_key"],
                message.headers["id"],
                message.properties["priority"],
            )
        )
        message.ack()

    with producers[broker].acquire(block=True) as producer:
        for priority in (0, 5):
            producer.publish(
                {"values": [1, 2.5, "drei", None]}, exchange=exchange, routing_key="task.new", declare=[queue], serializer=serializer,
                compression=compression, headers={"id": priority}, priority=priority, retry=True,
            )  # fmt: skip
    with broker.Consumer(queue, callbacks=[receive], accept=["json", "pickle"]):
        wait_until(lambda: _drain(broker) or len(received) == 2)
    assert received == [
        ({"values": [1, 2.5, "drei", None]}, "task.new", priority, priority) for priority in (5, 0)
    ]


def _drain(broker: kombu.Connection) -> None:
    with contextlib.suppress(socket.timeout):
        broker.drain_events(timeout=0.1)


def test_a_consumer_that_requeues_and_one_that_rejects(broker: kombu.Connection, fresh: Fresh) -> None:
    dead = kombu.Queue(fresh("dead"), durable=False)
    queue = kombu.Queue(
        fresh("queue"), queue_arguments={"x-dead-letter-exchange": "", "x-dead-letter-routing-key": dead.name}
    )
    seen: list[bool] = []

    def receive(_body: Any, message: kombu.Message) -> None:
        seen.append(message.delivery_info["redelivered"])
        (message.reject if message.delivery_info["redelivered"] else message.requeue)()

    with broker.channel() as channel:
        bound_dead = dead(channel)
        bound_dead.declare()
        broker.Producer(channel).publish("poison", routing_key=queue.name, declare=[queue])
        with broker.Consumer(queue, callbacks=[receive], channel=channel):
            wait_until(lambda: _drain(broker) or len(seen) == 2)
        letter = wait_until(bound_dead.get)
        assert (seen, letter.payload) == ([False, True], "poison")
        assert letter.headers["x-death"][0]["reason"] == "rejected"
        letter.ack()


def test_a_mailbox_of_kombu_asks_and_is_answered(broker: kombu.Connection, url: str) -> None:
    """Broadcast over a fanout exchange, answers over an exclusive queue: the remote control of Celery."""
    namespace, asked, stop = f"mail-{uuid.uuid4().hex[:8]}", threading.Event(), threading.Event()

    def serve() -> None:
        with kombu.Connection(url) as connection, connection.channel() as channel:
            handlers = {"double": lambda _state, number: 2 * number}
            node = Mailbox(namespace, type="fanout", connection=connection).Node(
                "node", channel=channel, handlers=handlers
            )
            with node.listen(channel=channel):
                asked.set()
                while not stop.is_set():
                    _drain(connection)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        assert asked.wait(TIMEOUT_S)
        mailbox = Mailbox(namespace, type="fanout", connection=broker)
        assert mailbox.multi_call("double", {"number": 21}, timeout=TIMEOUT_S, limit=1) == [{"node": 42}]
        assert mailbox.call(["node"], "double", {"number": 4}, timeout=TIMEOUT_S) == [{"node": 8}]
    finally:
        stop.set()
        thread.join(TIMEOUT_S)


def test_a_consumer_of_kombu_learns_that_its_queue_was_deleted(
    broker: kombu.Connection, url: str, fresh: Fresh
) -> None:
    queue = kombu.Queue(fresh("queue"))
    with broker.channel() as channel:
        consumer = broker.Consumer(queue, callbacks=[print], channel=channel)
        consumer.consume()
        with kombu.Connection(url) as other:
            queue(other.channel()).delete()
        with pytest.raises(ConsumerCancelled):
            wait_until(lambda: _drain(broker))
