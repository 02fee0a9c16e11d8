"""pika's SelectConnection: commands are sent without waiting, answers come in order, callbacks are told codes
and texts.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import pika
import pytest
from pika.channel import Channel

from tests.interop.asking import PERSISTENT, TIMEOUT_S
from tests.interop.conftest import Fresh

Step = Generator[None, None, None]


class Loop:
    """Runs a SelectConnection until ``done`` is set, or an error or the time is up."""

    def __init__(self, url: str) -> None:
        self.closed: list[BaseException] = []
        self.late = False
        self.connection = pika.SelectConnection(
            pika.URLParameters(url),
            on_open_callback=self._opened,
            on_open_error_callback=self._ended,
            on_close_callback=self._ended,
        )
        self._start: Callable[[pika.SelectConnection], None] = lambda _connection: None

    def run(self, start: Callable[[pika.SelectConnection], None]) -> list[BaseException]:
        """Calls ``start`` when the connection is open; why it was closed afterwards."""
        self._start = start
        timer = self.connection.ioloop.call_later(TIMEOUT_S, self._give_up)
        self.connection.ioloop.start()
        assert not self.late, f"nothing ended the connection within {TIMEOUT_S} s"
        self.connection.ioloop.remove_timeout(timer)
        self.connection.ioloop.close()
        return self.closed

    def _opened(self, connection: pika.SelectConnection) -> None:
        self._start(connection)

    def _ended(self, _connection: Any, reason: BaseException) -> None:
        self.closed.append(reason)
        self.connection.ioloop.stop()

    def _give_up(self) -> None:
        self.late = True
        self.connection.ioloop.stop()


@pytest.fixture
def loop(url: str) -> Loop:
    return Loop(url)


def test_a_thousand_publishes_without_waiting_are_confirmed_each_once_and_consumed_in_order(
    loop: Loop, fresh: Fresh
) -> None:
    queue, count = fresh("queue"), 1000
    confirmed: list[int] = []
    received: list[int] = []

    def on_confirm(frame: Any) -> None:
        assert isinstance(frame.method, pika.spec.Basic.Ack)
        last = frame.method.delivery_tag
        confirmed.extend(
            range(confirmed[-1] + 1 if confirmed else 1, last + 1) if frame.method.multiple else [last]
        )
        end_when_complete()

    def on_message(channel: Channel, method: Any, _properties: Any, body: bytes) -> None:
        assert method.delivery_tag == len(received) + 1
        received.append(int(body))
        if len(received) % 50 == 0:
            channel.basic_ack(method.delivery_tag, multiple=True)
        end_when_complete()

    def end_when_complete() -> None:
        if len(received) == count and len(set(confirmed)) == count:
            loop.connection.close()

    def on_channel(channel: Channel) -> None:
        channel.queue_declare(queue, durable=True)
        channel.basic_qos(prefetch_count=100)
        channel.confirm_delivery(on_confirm)
        channel.basic_consume(queue, on_message, callback=lambda _frame: publish_all(channel))

    def publish_all(channel: Channel) -> None:
        for number in range(count):
            channel.basic_publish("", queue, str(number).encode(), PERSISTENT)

    loop.run(lambda connection: connection.channel(on_open_callback=on_channel))
    assert received == list(range(count))
    assert sorted(confirmed) == list(range(1, count + 1))


@pytest.mark.txmq_only  # RabbitMQ 3.10 refuses them: 504, unexpected command while processing 'tx.commit'
def test_commands_sent_behind_a_commit_without_waiting_are_carried_out_in_order(
    loop: Loop, fresh: Fresh
) -> None:
    queue = fresh("queue")
    answers: list[str] = []

    def on_channel(channel: Channel) -> None:
        def answered(frame: Any) -> None:
            answers.append(type(frame.method).__name__)
            if isinstance(frame.method, pika.spec.Queue.PurgeOk):
                answers.append(f"{frame.method.message_count} messages")
                channel.connection.close()

        def rpc(method: Any, answer: type) -> None:
            channel.callbacks.add(channel.channel_number, answer, answered)
            channel._send_method(method)

        def publish(body: bytes) -> None:
            channel._send_method(pika.spec.Basic.Publish(exchange="", routing_key=queue), (PERSISTENT, body))

        # Past the one-at-a-time queue of pika: everything goes out at once.
        channel._send_method(pika.spec.Queue.Declare(queue=queue, nowait=True))
        rpc(pika.spec.Tx.Select(), pika.spec.Tx.SelectOk)
        publish(b"1")
        rpc(pika.spec.Tx.Commit(), pika.spec.Tx.CommitOk)
        publish(b"dropped")
        rpc(pika.spec.Tx.Rollback(), pika.spec.Tx.RollbackOk)
        publish(b"2")
        rpc(pika.spec.Tx.Commit(), pika.spec.Tx.CommitOk)
        rpc(pika.spec.Queue.Purge(queue=queue), pika.spec.Queue.PurgeOk)

    ended = loop.run(lambda connection: connection.channel(on_open_callback=on_channel))
    assert [type(reason).__name__ for reason in ended] == ["ConnectionClosedByClient"], ended
    assert answers == ["SelectOk", "CommitOk", "RollbackOk", "CommitOk", "PurgeOk", "2 messages"]


def test_the_callbacks_of_a_channel_and_of_the_connection_are_told_code_and_text(
    loop: Loop, fresh: Fresh
) -> None:
    missing = fresh("missing")
    told: list[tuple[int, str]] = []

    def channel_closed(_channel: Channel, reason: Any) -> None:
        told.append((reason.reply_code, reason.reply_text))
        loop.connection.channel(on_open_callback=lambda again: again.basic_recover(requeue=False))

    def on_channel(channel: Channel) -> None:
        channel.add_on_close_callback(channel_closed)
        channel.basic_consume(missing, lambda *_: None)

    (reason,) = loop.run(lambda connection: connection.channel(on_open_callback=on_channel))
    assert told == [(404, f"NOT_FOUND - no queue '{missing}' in vhost '/'")]
    assert (reason.reply_code, reason.reply_text) == (540, "NOT_IMPLEMENTED - requeue=false")  # type: ignore[attr-defined]


def test_a_clean_close_is_answered_with_the_clients_own_code(loop: Loop) -> None:
    (reason,) = loop.run(lambda connection: connection.close(200, "done"))
    assert (type(reason).__name__, reason.args) == ("ConnectionClosedByClient", (200, "done"))


def test_returns_and_acks_of_a_confirming_channel_come_in_the_order_of_the_specification(
    loop: Loop, fresh: Fresh
) -> None:
    queue, nowhere = fresh("queue"), fresh("nowhere")
    events: list[tuple[str, int | bytes]] = []

    def on_confirm(frame: Any) -> None:
        events.append((type(frame.method).__name__, frame.method.delivery_tag))
        if frame.method.delivery_tag == 2:
            loop.connection.close()

    def on_channel(channel: Channel) -> None:
        channel.add_on_return_callback(
            lambda _channel, _method, _properties, body: events.append(("Return", body))
        )
        channel.confirm_delivery(on_confirm)
        channel.basic_publish("", nowhere, b"lost", PERSISTENT, mandatory=True)
        channel.queue_declare(
            queue, callback=lambda _: channel.basic_publish("", queue, b"kept", PERSISTENT, mandatory=True)
        )

    loop.run(lambda connection: connection.channel(on_open_callback=on_channel))
    assert events == [("Return", b"lost"), ("Ack", 1), ("Ack", 2)]


def test_a_queue_that_goes_cancels_its_consumer_and_the_channel_goes_on(loop: Loop, fresh: Fresh) -> None:
    queue = fresh("queue")
    events: list[str] = []

    def on_channel(channel: Channel) -> None:
        def cancelled(frame: Any) -> None:
            events.append(frame.method.consumer_tag)
            channel.queue_declare(queue, callback=declared)

        def declared(frame: Any) -> None:
            events.append(frame.method.queue)
            loop.connection.close()

        channel.add_on_cancel_callback(cancelled)
        channel.queue_declare(queue)
        channel.basic_consume(
            queue, lambda *_: None, consumer_tag="mine", callback=lambda _: channel.queue_delete(queue)
        )

    loop.run(lambda connection: connection.channel(on_open_callback=on_channel))
    assert events == ["mine", queue]


def test_a_slow_reader_is_held_back_by_prefetch_while_others_read_on(loop: Loop, fresh: Fresh) -> None:
    queue, count = fresh("queue"), 300
    slow: list[int] = []
    fast: list[int] = []

    def on_fast(channel: Channel, method: Any, _properties: Any, body: bytes) -> None:
        fast.append(int(body))
        channel.basic_ack(method.delivery_tag)
        if len(fast) + len(slow) == count:
            loop.connection.close()

    def on_slow(_channel: Channel, _method: Any, _properties: Any, body: bytes) -> None:
        slow.append(int(body))  # and never acked

    def on_channel(channel: Channel) -> None:
        channel.queue_declare(queue)
        channel.basic_qos(prefetch_count=10)
        channel.basic_consume(queue, on_slow)
        channel.basic_consume(queue, on_fast, callback=lambda _: [
            channel.basic_publish("", queue, str(number).encode()) for number in range(count)
        ])  # fmt: skip

    loop.run(lambda connection: connection.channel(on_open_callback=on_channel))
    assert (len(slow), len(fast)) == (10, count - 10)
    assert sorted(slow + fast) == list(range(count))
