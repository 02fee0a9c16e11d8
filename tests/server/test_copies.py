"""CC and BCC, the same at every listener: more routing keys, and no BCC in what is delivered.

Not here: what a header may contain (``routing/test_carbon_copy.py``), the topic permissions that each
key needs (``flight/test_flight_permissions.py``), Kafka (``kafka/sink/test_staging.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pamqp import commands as c

from broker_core.client.broker import BrokerClient
from broker_core.engine import BranchHeader, Engine
from broker_core.launcher import Broker
from broker_core.message.message import MESSAGE_SCHEMA, Message
from broker_core.message.properties import Properties
from broker_core.store.salvage.verify import verify
from tests.amqp_peer import Peer

QUEUES = ("to", "cc", "bcc", "topic", "lost")
Publish = Callable[[Broker, list[Message]], None]


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with Broker.open(tmp_path / "data", amqp=["127.0.0.1:0"]) as made:
        with made.channel() as channel:
            for queue in QUEUES:
                channel.queue_declare(queue)
            channel.exchange_declare("rest", type="fanout")
            channel.exchange_declare("t", type="topic", arguments={"alternate-exchange": "rest"})
            channel.queue_bind("topic", "t", "*.b")
            channel.queue_bind("lost", "rest")
        yield made


def by_amqp(broker: Broker, messages: list[Message]) -> None:
    with Peer(broker.amqp_urls[0]) as peer:
        peer.opened(1)
        peer.call(1, c.Confirm.Select(), c.Confirm.SelectOk)
        for body, routing_key, exchange, properties in messages:
            peer.publish(1, exchange, routing_key, body, headers=Properties.decode(properties).headers)
            assert isinstance(peer.receive()[1], c.Basic.Ack)


def by_channel(broker: Broker, messages: list[Message]) -> None:
    with broker.channel() as channel:
        for body, routing_key, exchange, properties in messages:
            channel.publish(body, exchange, routing_key, properties)


def by_flight(broker: Broker, messages: list[Message]) -> None:
    with BrokerClient(broker.url) as client, client.channel() as channel:
        for body, routing_key, exchange, properties in messages:
            channel.publish(body, exchange, routing_key, properties)


def by_flight_in_a_transaction(broker: Broker, messages: list[Message]) -> None:
    with BrokerClient(broker.url) as client, client.channel() as channel:
        channel.tx_select()
        for body, routing_key, exchange, properties in messages:
            channel.publish(body, exchange, routing_key, properties)
        channel.tx_commit()


def stage(engine: Engine, messages: list[Message], more: int = 0) -> None:
    """``more`` messages that reach no queue, so that there are parts in segments."""
    rows = [
        *((each.exchange, each.routing_key, each.body, each.properties) for each in messages),
        *([("", "", b"x", b"")] * more),
    ]
    columns = dict(zip(MESSAGE_SCHEMA.names, zip(*rows, strict=True), strict=True))
    batch = pa.RecordBatch.from_pydict({name: list(each) for name, each in columns.items()}, MESSAGE_SCHEMA)
    staged = engine.stage(BranchHeader("token", "branch", "publish", {}), [batch])
    assert engine.commit_branches("token", [staged], on_unroutable="drop") == len(rows)


def by_rows(broker: Broker, messages: list[Message]) -> None:
    stage(broker.engine, messages)


def by_many_rows(broker: Broker, messages: list[Message]) -> None:
    stage(broker.engine, messages, 70_000)


def by_rows_over_flight(broker: Broker, messages: list[Message]) -> None:
    with BrokerClient(broker.url) as client:
        stage(client, messages)


def by_many_rows_over_flight(broker: Broker, messages: list[Message]) -> None:
    with BrokerClient(broker.url, map_files=False) as client:
        stage(client, messages, 70_000)


def by_a_file(broker: Broker, messages: list[Message]) -> None:
    with BrokerClient(broker.url) as client:
        assert client._connection.live().takes_files
        stage(client, messages, 70_000)
        assert client._connection.live().takes_files


LISTENERS: tuple[Publish, ...] = (
    by_amqp,
    by_channel,
    by_flight,
    by_flight_in_a_transaction,
    by_rows,
    by_many_rows,
    by_rows_over_flight,
    by_many_rows_over_flight,
    by_a_file,
)


def delivered(broker: Broker) -> dict[str, list[tuple[bytes, str, object]]]:
    found: dict[str, list[tuple[bytes, str, object]]] = {}
    with broker.channel() as channel:
        for queue in QUEUES:
            while (one := channel.get(queue, no_ack=True)) is not None:
                message = one.message
                found.setdefault(queue, []).append(
                    (message.body, message.routing_key, Properties.decode(message.properties).headers)
                )
    return found


@pytest.mark.parametrize("listener", LISTENERS, ids=lambda listener: listener.__name__)
def test_copies_go_to_more_queues_at_every_listener_and_bcc_is_taken_off(
    broker: Broker, listener: Publish, tmp_path: Path
) -> None:
    copied = Properties(headers={"CC": ["cc", "to"], "BCC": ["bcc"], "kept": 1}).encode()
    matched = Properties(headers={"CC": ["a.b"], "BCC": ["c"]}).encode()
    unmatched = Properties(headers={"CC": ["c"], "BCC": []}).encode()
    listener(
        broker,
        [
            Message(b"plain", "to"),
            Message(b"copied", "to", "", copied),
            Message(b"to nobody but", "gone", "", copied),
            Message(b"matched", "x", "t", matched),
            Message(b"unmatched", "x", "t", unmatched),
        ],
    )
    headers = {"CC": ["cc", "to"], "kept": 1}
    both = [(b"copied", "to", headers), (b"to nobody but", "gone", headers)]
    assert delivered(broker) == {
        "to": [(b"plain", "to", {}), *both],
        "cc": both,
        "bcc": both,
        "topic": [(b"matched", "x", {"CC": ["a.b"]})],
        "lost": [(b"unmatched", "x", {"CC": ["c"]})],
    }
    broker.close()
    assert verify(tmp_path / "data").problems == []
