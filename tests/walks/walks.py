"""Pieces of work whose way through the code is walked: each is done several times.

What is due by time (timers, upkeep) may run meanwhile. It is not part of the work, so only files count that
every round has passed. Not here: limits (``test_walks.py``), the command (``__main__.py``).
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pika
import pyarrow as pa
from pamqp import commands

from broker_core.core import password
from broker_core.engine import START, BranchHeader, Engine, Limit, Origin, ReadTicket, Vector
from broker_core.kafka.cluster.client import Client
from broker_core.kafka.engine import KafkaEngine
from broker_core.kafka.protocol.port import TopicPartition
from broker_core.kafka.record.encode import encode
from broker_core.launcher import Broker
from tests.amqp_peer import Peer, peer
from tests.kafka.bench.fake_kafka import FakeKafka
from tests.progress import GUARD_S
from tests.walks.recorder import Recorder, Walk

WARM, ROUNDS = 2, 8  # rounds that fill caches, and rounds that count
DURABLE = pika.BasicProperties(delivery_mode=2)


def common(
    recorder: Recorder, work: Callable[[], object], before: Callable[[], object] | None = None
) -> Walk:
    """Returns the shortest round, without the files that another one did not need. ``before`` is not
    recorded.
    """
    walks = []
    for _ in range(WARM + ROUNDS):
        if before is not None:
            before()
        walks.append(recorder.walk(work))
    files = set.intersection(*(set(walk.files) for walk in walks[WARM:]))
    shortest = min(walks[WARM:], key=lambda walk: len(walk.calls))
    return Walk(tuple(call for call in shortest.calls if call.file in files))


# -- AMQP ----------------------------------------------------------------------------------------------------
@contextmanager
def _broker(directory: Path) -> Iterator[Broker]:
    with Broker.open(str(directory), amqp=["127.0.0.1:0"]) as broker:
        yield broker


@contextmanager
def _client(url: str, user: str = "guest", secret: str = "guest") -> Iterator[Any]:
    host, _, port = url.removeprefix("amqp://").rpartition(":")
    parameters = pika.ConnectionParameters(host, int(port), credentials=pika.PlainCredentials(user, secret))
    with closing(pika.BlockingConnection(parameters)) as connection:
        yield connection


@contextmanager
def _publisher(broker: Broker) -> Iterator[Peer]:
    """A client with channel 1 and a queue, whose publish arrives in one piece: what decodes it depends on that."""
    with peer(broker.amqp_urls[0], 1) as client:
        client.call(1, commands.Queue.Declare(queue="q", durable=True), commands.Queue.DeclareOk)
        yield client


def commit(recorder: Recorder, directory: Path) -> Walk:
    """AMQP ``tx.commit`` of one message: from the socket to the disk and back."""
    with _broker(directory) as broker, _client(broker.amqp_urls[0]) as client:
        channel = client.channel()
        channel.queue_declare("q", durable=True)
        channel.tx_select()

        def publish() -> None:
            channel.basic_publish("", "q", b"body", DURABLE)
            channel.queue_declare("q", passive=True)  # the publish has been carried out when this is answered

        return common(recorder, channel.tx_commit, publish)


def confirm(recorder: Recorder, directory: Path) -> Walk:
    """AMQP ``basic.publish`` with a publisher confirm: from the socket to the disk and back."""
    with _broker(directory) as broker, _publisher(broker) as client:
        client.call(1, commands.Confirm.Select(), commands.Confirm.SelectOk)

        def work() -> None:
            client.publish(1, "", "q", b"body", delivery_mode=2)
            client.expect(commands.Basic.Ack, 1)

        return common(recorder, work)


def publish(recorder: Recorder, directory: Path) -> Walk:
    """AMQP ``basic.publish`` in a transaction: from the socket into the transaction."""
    with _broker(directory) as broker, _publisher(broker) as client:
        client.call(1, commands.Tx.Select(), commands.Tx.SelectOk)

        def work() -> None:
            client.publish(1, "", "q", b"body", delivery_mode=2)
            deadline = time.monotonic() + GUARD_S
            while not any(call.function.endswith("publish") for call in recorder.calls):
                assert time.monotonic() < deadline, "the publish never arrived"
                time.sleep(0.001)
            server = broker.amqp
            assert server is not None
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), server.loop).result(
                GUARD_S
            )  # it has ended its turn

        return common(recorder, work)


def login(recorder: Recorder, directory: Path) -> Walk:
    """The first AMQP login of a user: from the socket to ``connection.open-ok``."""
    with _broker(directory) as broker:
        url = broker.amqp_urls[0]
        hashed = password.hashed("secret")
        names = iter(f"user-{number}" for number in range(WARM + ROUNDS))
        name = ""

        def add() -> None:
            nonlocal name
            name = next(names)
            broker.accounts.add_user(name, hashed, ["administrator"])
            broker.accounts.set_permissions(name, ".*", ".*", ".*")

        clients: list[Any] = []

        def work() -> None:
            opened = _client(url, name, "secret")
            opened.__enter__()
            clients.append(opened)

        try:
            return common(recorder, work, add)
        finally:
            for each in clients:
                each.__exit__(None, None, None)


# -- in process ----------------------------------------------------------------------------------------------
def channel(recorder: Recorder, directory: Path) -> Walk:
    """``LocalChannel.tx_commit`` of one message, in the process of the broker."""
    with Broker.open(str(directory), amqp=()) as broker, broker.channel() as opened:
        opened.queue_declare("q")
        opened.tx_select()
        return common(recorder, opened.tx_commit, lambda: opened.publish(b"body", routing_key="q"))


def batch(recorder: Recorder, directory: Path) -> Walk:
    """``commit_batch`` of the embedded engine: the decision of a micro-batch that read and published."""
    with Broker.open(str(directory), amqp=()) as broker, broker.channel() as opened:
        for queue in ("in", "out"):
            opened.queue_declare(queue)
        return _batches(recorder, broker.engines.of("/"), lambda: opened.publish(b"body", routing_key="in"))


def kafka_batch(recorder: Recorder, directory: Path) -> Walk:
    """``commit_batch`` of the Kafka engine, on a cluster in memory."""
    kafka = FakeKafka()
    client = Client(kafka.wire(), list(kafka.nodes.values()))
    for queue in ("in", "out"):
        client.create_topic(queue, 2)
    batch = encode(pa.array([b"body"], pa.binary()), timestamp=1)
    with closing(KafkaEngine("kafka://fake:1,fake:2,fake:3", None, lambda _: kafka.wire())) as engine:
        return _batches(
            recorder,
            engine,
            lambda: client.produce({TopicPartition("in", 0): batch, TopicPartition("in", 1): batch}),
        )


def _batches(recorder: Recorder, engine: Engine, produce: Callable[[], object]) -> Walk:
    start: Vector = {"in": START}
    number, token, branches = -1, "", []

    def before() -> None:
        nonlocal start, number, token, branches
        number += 1
        produce()
        end = engine.claim("app", ["in"], start, Limit(), Origin(), "fail")
        ranges = engine.resolve("app", start, end)
        engine.count("app", ranges)
        slices = tuple((log, first, last) for log, (first, last) in ranges.items())
        for _ in engine.read(ReadTicket("app", "query", number, ranges, slices)):
            pass
        token = engine.open_batch("app", "query", number, "fail").token
        header = BranchHeader(
            token, uuid.uuid4().hex, "publish", {"exchange": "", "routing_key": "out"}, "app", "query", number
        )
        rows = pa.record_batch({"body": pa.array([b"body"], pa.binary())})
        branches = [engine.stage(header, iter([rows]))]
        start = end

    return common(recorder, lambda: engine.commit_batch("app", "query", number, token, branches), before)


WALKS: dict[str, Callable[[Recorder, Path], Walk]] = {
    "commit": commit,
    "confirm": confirm,
    "publish": publish,
    "login": login,
    "channel": channel,
    "batch": batch,
    "kafka-batch": kafka_batch,
}
