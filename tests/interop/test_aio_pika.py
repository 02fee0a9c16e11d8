"""aio-pika: transactions, confirms, consumers, RPC and robust connections, against one event loop."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from datetime import datetime, timezone
from typing import Any

import aio_pika
import aiormq.exceptions
import pytest
from aio_pika import DeliveryMode, ExchangeType, IncomingMessage, Message
from aio_pika.abc import AbstractConnection, AbstractQueue
from aio_pika.exceptions import ChannelPreconditionFailed, DeliveryError
from aio_pika.patterns import RPC

from tests.amqp_server import AmqpServed
from tests.interop.conftest import REFUSED, Encrypted, Fresh
from tests.progress import GUARD_S


def run(url: str, scenario: Callable[[AbstractConnection], Awaitable[None]]) -> None:
    """``scenario`` on a connection of its own, in an event loop of its own, within the time allowed."""

    async def connected() -> None:
        connection = await aio_pika.connect(url)
        async with connection:
            await scenario(connection)

    asyncio.run(asyncio.wait_for(connected(), GUARD_S))


async def bodies(queue: AbstractQueue) -> list[bytes]:
    found = []
    while (message := await queue.get(no_ack=True, fail=False)) is not None:
        found.append(message.body)
    return found


def persistent(body: bytes, **properties: Any) -> Message:
    return Message(body, delivery_mode=DeliveryMode.PERSISTENT, **properties)


def test_a_transaction_block_commits_at_its_end_and_rolls_back_on_an_error(url: str, fresh: Fresh) -> None:
    async def scenario(connection: AbstractConnection) -> None:
        name = fresh("queue")
        channel, reader = await connection.channel(publisher_confirms=False), await connection.channel()
        await channel.declare_queue(name, durable=True)
        queue = await reader.get_queue(name)
        async with channel.transaction():
            for number in range(10):
                await channel.default_exchange.publish(persistent(str(number).encode()), name)
            assert await queue.get(fail=False) is None
        assert await bodies(queue) == [str(number).encode() for number in range(10)]

        async def fail() -> None:
            async with channel.transaction():
                await channel.default_exchange.publish(persistent(b"dropped"), name)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await fail()
        assert await bodies(queue) == []

    run(url, scenario)


def test_acks_in_a_transaction_follow_its_end(url: str, fresh: Fresh) -> None:
    async def scenario(connection: AbstractConnection) -> None:
        name = fresh("queue")
        channel = await connection.channel(publisher_confirms=False)
        queue = await channel.declare_queue(name)
        for body in (b"a", b"b"):
            await channel.default_exchange.publish(Message(body), name)
        transaction = channel.transaction()
        await transaction.select()
        first, second = await queue.get(), await queue.get()
        await first.ack()
        await transaction.commit()
        await second.ack()
        await transaction.rollback()
        await channel.close()
        again = await (await (await connection.channel()).get_queue(name)).get()
        assert (again.body, again.redelivered) == (b"b", True)
        await again.ack()

    run(url, scenario)


def test_a_channel_with_confirms_refuses_a_transaction_with_406(url: str) -> None:
    async def scenario(connection: AbstractConnection) -> None:
        channel = await connection.channel(publisher_confirms=False)
        underlay = await channel.get_underlay_channel()
        await underlay.confirm_delivery()
        with pytest.raises(ChannelPreconditionFailed) as refusal:
            await channel.transaction().select()
        assert str(refusal.value) == "PRECONDITION_FAILED - cannot switch from confirm to tx mode"

    run(url, scenario)


def test_five_hundred_publishes_at_once_are_each_confirmed(url: str, fresh: Fresh) -> None:
    async def scenario(connection: AbstractConnection) -> None:
        channel = await connection.channel()
        queue = await channel.declare_queue(fresh("queue"), durable=True)
        sends = [
            channel.default_exchange.publish(persistent(str(number).encode()), queue.name)
            for number in range(500)
        ]
        answers = await asyncio.gather(*sends)
        assert {type(answer).__name__ for answer in answers} == {"Ack"}
        assert (await queue.declare()).message_count == 500
        assert [int(body) for body in await bodies(queue)] == list(range(500))

    run(url, scenario)


def test_unroutable_and_refused_publishes_raise_what_the_broker_said(url: str, fresh: Fresh) -> None:
    async def scenario(connection: AbstractConnection) -> None:
        channel = await connection.channel(on_return_raises=True)
        with pytest.raises(aiormq.exceptions.PublishError) as unroutable:
            await channel.default_exchange.publish(
                Message(b"lost", message_id="m"), fresh("nowhere"), mandatory=True
            )
        returned = unroutable.value.message
        assert returned is not None
        assert (returned.delivery.reply_code, returned.delivery.reply_text, returned.body) == (
            312,
            "NO_ROUTE",
            b"lost",
        )
        full = await channel.declare_queue(
            fresh("full"), arguments={"x-max-length": 1, "x-overflow": "reject-publish"}
        )
        await channel.default_exchange.publish(Message(b"fits"), full.name)
        with pytest.raises(DeliveryError) as refused:
            await channel.default_exchange.publish(Message(b"does not"), full.name)
        assert type(refused.value.frame).__name__ == "Nack"
        assert await bodies(full) == [b"fits"]

    run(url, scenario)


def test_properties_and_headers_come_back_with_their_types(url: str, fresh: Fresh) -> None:
    headers = {
        "text": "wörd", "int": 7, "long": 2**40, "negative": -300, "yes": True, "none": None, "double": 1.5,
        "time": datetime(2024, 2, 29, 12, tzinfo=timezone.utc), "list": [1, "two"], "table": {"deep": {"er": [1.25]}},
    }  # fmt: skip

    async def scenario(connection: AbstractConnection) -> None:
        channel = await connection.channel()
        queue = await channel.declare_queue(fresh("queue"))
        sent = persistent(
            b"x", headers=headers, content_type="application/json", content_encoding="gzip", priority=3, correlation_id="c", reply_to="r",
            expiration=60, message_id="m", timestamp=datetime(2024, 1, 1, tzinfo=timezone.utc), type="t", user_id="guest", app_id="app",
        )  # fmt: skip
        await channel.default_exchange.publish(sent, queue.name)
        got = await queue.get(no_ack=True)
        assert isinstance(got, IncomingMessage)
        names = ("content_type", "content_encoding", "delivery_mode", "priority", "correlation_id", "reply_to", "expiration",
                 "message_id", "timestamp", "type", "user_id", "app_id")  # fmt: skip
        assert {name: getattr(got, name) for name in names} == {name: getattr(sent, name) for name in names}
        assert got.headers == headers

    run(url, scenario)


def test_an_iterator_consumes_in_order_within_its_prefetch(url: str, fresh: Fresh) -> None:
    async def scenario(connection: AbstractConnection) -> None:
        channel = await connection.channel()
        await channel.set_qos(prefetch_count=10)
        queue = await channel.declare_queue(fresh("queue"))
        for number in range(100):
            await channel.default_exchange.publish(Message(str(number).encode()), queue.name)
        received = []
        async with queue.iterator() as messages:
            async for message in messages:
                async with message.process():
                    received.append(int(message.body))
                if len(received) == 100:
                    break
        assert received == list(range(100))
        assert (await queue.declare()).message_count == 0

    run(url, scenario)


def test_an_error_in_process_requeues_or_dead_letters(url: str, fresh: Fresh) -> None:
    async def scenario(connection: AbstractConnection) -> None:
        channel = await connection.channel()
        dead = await channel.declare_queue(fresh("dead"))
        arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": dead.name}
        queue = await channel.declare_queue(fresh("queue"), arguments=arguments)
        await channel.default_exchange.publish(Message(b"m"), queue.name)
        for requeue in (True, False):
            message = await queue.get()
            assert message.redelivered is not requeue
            with pytest.raises(ZeroDivisionError):
                async with message.process(requeue=requeue):
                    raise ZeroDivisionError
        while (letter := await dead.get(fail=False)) is None:
            await asyncio.sleep(0.01)
        assert letter.headers["x-death"][0]["reason"] == "rejected"
        await letter.ack()

    run(url, scenario)


def test_exchanges_are_bound_to_exchanges_and_routed_through(url: str, fresh: Fresh) -> None:
    async def scenario(connection: AbstractConnection) -> None:
        channel = await connection.channel()
        outer = await channel.declare_exchange(fresh("outer"), ExchangeType.TOPIC)
        inner = await channel.declare_exchange(fresh("inner"), ExchangeType.FANOUT, internal=True)
        await inner.bind(outer, "log.#")
        queue = await channel.declare_queue(fresh("queue"))
        await queue.bind(inner)
        await outer.publish(Message(b"1"), "log.a.b")
        await outer.publish(Message(b"2"), "other")
        assert await bodies(queue) == [b"1"]
        await inner.unbind(outer, "log.#")
        await outer.publish(Message(b"3"), "log.a.b")
        assert await bodies(queue) == []

    run(url, scenario)


def test_errors_of_a_channel_are_raised_with_the_brokers_text(url: str, fresh: Fresh) -> None:
    async def scenario(connection: AbstractConnection) -> None:
        missing, name = fresh("missing"), fresh("queue")
        with pytest.raises(aiormq.exceptions.ChannelNotFoundEntity) as absent:
            await (await connection.channel()).declare_queue(missing, passive=True)
        assert str(absent.value) == f"NOT_FOUND - no queue '{missing}' in vhost '/'"
        await (await connection.channel()).declare_queue(name, durable=True)
        with pytest.raises(ChannelPreconditionFailed) as other:
            await (await connection.channel()).declare_queue(name, durable=False)
        assert str(other.value) == (
            f"PRECONDITION_FAILED - inequivalent arg 'durable' for queue '{name}' in vhost '/': received "
            "'false' but current is 'true'"
        )

    run(url, scenario)


def test_remote_calls_over_a_server_named_queue_get_results_and_errors(url: str, fresh: Fresh) -> None:
    async def scenario(connection: AbstractConnection) -> None:
        channel = await connection.channel()
        rpc = await RPC.create(channel)

        async def add(*, left: int, right: int) -> int:
            return left + right

        method = fresh("add")
        await rpc.register(method, add, auto_delete=True)
        results = await asyncio.gather(
            *(rpc.call(method, {"left": number, "right": 1}) for number in range(50))
        )
        assert results == list(range(1, 51))
        with pytest.raises(TypeError):
            await rpc.call(method, {"left": "1", "right": 1})
        await rpc.close()

    run(url, scenario)


def test_a_body_of_5_mb_and_an_empty_one_pass(url: str, fresh: Fresh) -> None:
    async def scenario(connection: AbstractConnection) -> None:
        channel = await connection.channel()
        queue = await channel.declare_queue(fresh("queue"))
        large = bytes(range(256)) * (5 * 4096)
        for body in (large, b""):
            await channel.default_exchange.publish(persistent(body), queue.name)
        assert await bodies(queue) == [large, b""]

    run(url, scenario)


def test_a_robust_consumer_goes_on_after_the_broker_was_killed_and_loses_nothing(served: AmqpServed) -> None:
    async def scenario() -> None:
        connection = await aio_pika.connect_robust(served.amqp_url, reconnect_interval=0.2)
        async with connection:
            channel = await connection.channel()
            await channel.set_qos(prefetch_count=5)
            queue = await channel.declare_queue("work", durable=True)
            seen: set[int] = set()
            complete = asyncio.Event()

            async def receive(message: Any) -> None:
                seen.add(int(message.body))
                await message.ack()
                if len(seen) == 40:
                    complete.set()

            await queue.consume(receive)
            for number in range(20):
                await channel.default_exchange.publish(persistent(str(number).encode()), "work")
            await asyncio.get_running_loop().run_in_executor(None, served.restart)
            publisher = await aio_pika.connect(served.amqp_url)
            async with publisher:
                sending = await publisher.channel()
                for number in range(20, 40):
                    await sending.default_exchange.publish(persistent(str(number).encode()), "work")
                await complete.wait()
            assert seen == set(range(40))

    asyncio.run(asyncio.wait_for(scenario(), 60))


@pytest.mark.txmq_only
def test_over_amqps_a_user_does_what_its_permissions_allow(encrypted: Encrypted) -> None:
    async def scenario() -> None:
        context = ssl.create_default_context(cafile=encrypted.ca)
        async with await aio_pika.connect(encrypted.url("clerk"), ssl_context=context) as connection:
            channel = await connection.channel(publisher_confirms=False)
            queue = await channel.get_queue("invoices")
            await queue.purge()
            async with channel.transaction():
                for number in range(3):
                    await channel.default_exchange.publish(persistent(b"%d" % number), "invoices")
            assert await bodies(queue) == [b"0", b"1", b"2"]
            with pytest.raises(aiormq.exceptions.ChannelAccessRefused) as caught:
                await channel.declare_queue("mine")
            assert str(caught.value) == REFUSED.format("queue 'mine'", "clerk")
        other = ssl.create_default_context(cafile=encrypted.other)
        with pytest.raises(aiormq.exceptions.AMQPConnectionError, match="certificate"):
            await aio_pika.connect(encrypted.url("clerk"), ssl_context=other)
        with pytest.raises(aiormq.exceptions.ProbableAuthenticationError):
            await aio_pika.connect(encrypted.url("stranger"), ssl_context=context)

    asyncio.run(asyncio.wait_for(scenario(), GUARD_S))
