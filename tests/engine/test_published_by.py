"""The column ``transaction`` of a read: the number of the commit that put the message into its queue, wherever
the row is stored and whichever way it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest

from broker_core.client.admin import RemoteAdmin
from broker_core.client.broker import BrokerClient
from broker_core.engine import Engine, Limit, Origin, ReadTicket
from broker_core.launcher import Broker
from broker_core.message.message import READ_SCHEMA, READ_WITH_TRANSACTION

LARGE = 3_000  # rows of a commit that has a block of its own
MANY = 40  # small commits


@contextmanager
def in_process(broker: Broker) -> Iterator[Engine]:
    yield broker.engine


@contextmanager
def mapped(broker: Broker) -> Iterator[Engine]:
    with BrokerClient(data=broker.directory) as client:
        yield client


@contextmanager
def served(broker: Broker) -> Iterator[Engine]:
    with BrokerClient(data=broker.directory, map_files=False) as client:
        yield client


WAYS = (in_process, mapped, served)
Way = Callable[[Broker], "contextmanager[Engine]"]


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with Broker.open(tmp_path / "data") as found:
        with found.channel() as channel:
            channel.queue_declare(
                "q", arguments={"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "d"}
            )
            channel.queue_declare("d")
            for number in range(MANY):
                channel.publish(b"%d" % number, routing_key="q")
            channel.tx_select()
            for number in range(LARGE):
                channel.publish(b"%d" % number, routing_key="q")
            channel.tx_commit()
        yield found


def history(broker: Broker, queue: str) -> dict[int, int]:
    """The transaction of each offset, as the history says it."""
    with BrokerClient(data=broker.directory) as client:
        return {
            offset: each.sequence
            for each in RemoteAdmin(client).history(1000)
            for effect in each.effects
            if effect.effect in ("published", "dead_lettered") and effect.queue == queue
            for first, end in effect.ranges
            for offset in range(first, end)
        }


def seen(batches: Iterator[pa.RecordBatch]) -> dict[int, int]:
    table = pa.Table.from_batches(batches, READ_WITH_TRANSACTION)
    return dict(zip(table["offset"].to_pylist(), table["transaction"].to_pylist(), strict=True))


def seal(broker: Broker) -> None:
    broker.local.upkeep.close_open()
    broker.local.upkeep.seal()


@pytest.mark.parametrize("sealed", [False, True], ids=["in memory", "in a segment"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_read_says_the_commit_that_published_each_row(broker: Broker, way: Way, sealed: bool) -> None:
    wanted, end = history(broker, "q"), MANY + LARGE
    assert len(wanted) == end and len(set(wanted.values())) == MANY + 1
    if sealed:
        seal(broker)
    with way(broker) as engine:
        assert seen(engine.browse([("q", 0, end)], transaction=True)) == wanted
        assert seen(engine.browse([("q", 5, 9)], transaction=True)) == {at: wanted[at] for at in range(5, 9)}
        (plain,) = {batch.schema for batch in engine.browse([("q", 0, end)])}
        assert plain.equals(READ_SCHEMA)
        claimed = engine.claim("app", ["q"], {"q": "start"}, Limit(), Origin(), "fail")
        ranges = engine.resolve("app", {"q": "start"}, claimed)
        for first, last in ((0, 10), (0, end)):  # few rows come with the answer
            ticket = ReadTicket("app", "query", 0, ranges, (("q", first, last),), transaction=True)
            assert seen(engine.read(ticket)) == {at: wanted[at] for at in range(first, last)}


def test_it_is_the_same_after_a_restart_and_without_a_history(tmp_path: Path, broker: Broker) -> None:
    wanted = history(broker, "q")
    seal(broker)
    directory = broker.directory
    broker.close()
    with Broker.open(directory) as again:
        assert seen(again.engine.browse([("q", 0, MANY + LARGE)], transaction=True)) == wanted


def test_of_a_dead_letter_it_is_the_commit_that_put_it_there(broker: Broker) -> None:
    with broker.channel() as channel:
        delivery = channel.get("q")
        assert delivery is not None
        channel.reject(delivery.tag, requeue=False)
    found = seen(broker.engine.browse([("d", 0, 1)], transaction=True))
    assert found == history(broker, "d") and found[0] > history(broker, "q")[0]
