"""``txmq message move`` while it, or the broker, is killed: each message is once in the queue that it leaves, or in that
to which it goes.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import NamedTuple

import pytest

from broker_core.client.broker import BrokerClient
from broker_core.message.properties import Properties
from tests.forked import Forked
from tests.progress import wait_for_end, wait_until
from tests.server.conftest import Served, bodies, fill
from tests.server.test_kill import patient
from txmq import cli

pytestmark = [pytest.mark.crash, pytest.mark.product]

COUNT = 2_500  # three transactions


class Way(NamedTuple):
    """Where the messages of queue ``from`` go."""

    option: tuple[str, ...]
    targets: tuple[str, ...]


TO = Way(("--to", "into"), ("into",))
BACK = Way(("--back",), ("even", "odd"))  # where each died first
WAYS = pytest.mark.parametrize("way", [TO, BACK], ids=["to", "back"])


def _command(served: Served, way: Way) -> list[str]:
    return ["message", "move", "from", *way.option, "--yes", "--url", served.url]


def _moved(client: BrokerClient, way: Way) -> list[bytes]:
    found = {queue: bodies(client, queue) for queue in way.targets}
    if way is BACK:
        assert all(int(body) % 2 == (queue == "odd") for queue in found for body in found[queue])
    return [body for queue in found for body in found[queue]]


def _all_there_once(served: Served, way: Way, moved: int) -> None:
    """``moved``: before somebody died. The broker is started again, so nobody holds anything."""
    everything = Counter(str(number).encode() for number in range(COUNT))
    with patient(served) as client:
        there, left = _moved(client, way), bodies(client, "from")
        assert len(there) == moved and Counter(there + left) == everything
    assert cli.main(_command(served, way)) == 0
    with patient(served) as client:
        assert Counter(_moved(client, way)) == everything
        assert bodies(client, "from") == []


def _ended(mover: Forked) -> int:
    with mover.stdout:
        return wait_for_end(mover, "the mover ends")  # type: ignore[arg-type]


def _fill(served: Served, way: Way) -> None:
    with patient(served) as client:
        if way is TO:
            fill(client, "from", COUNT)
            fill(client, "into", 0)
            return
        fill(client, "from", 0)
        with client.channel() as channel:
            for queue in way.targets:
                route = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "from"}
                channel.queue_declare(queue, arguments=route)
            channel.tx_select()
            for number in range(COUNT):
                channel.publish(
                    str(number).encode(),
                    routing_key=way.targets[number % 2],
                    properties=Properties(delivery_mode=2, expiration="1").encode(),
                )
            channel.tx_commit()
        wait_until(lambda: len(bodies(client, "from")) == COUNT, "all have expired")


@WAYS
@pytest.mark.parametrize(
    ("step", "moved"), [("move.held", 1_000), ("move.published", 1_000), ("move.committed", 2_000)]
)
def test_each_message_is_in_one_of_both_queues_when_the_mover_is_killed(
    served: Served, way: Way, step: str, moved: int
) -> None:
    served.start()
    _fill(served, way)
    mover = Forked("txmq", _command(served, way), {**os.environ, "TXMQ_FAILPOINTS": f"{step}@2=kill"})
    assert _ended(mover) == -9
    served.terminate()
    served.start()
    _all_there_once(served, way, moved)


@WAYS
@pytest.mark.parametrize(
    ("point", "moved"),
    [
        ("server.reply.get_at@2", 1_000),
        ("store.commit.synced@2", None),
        ("store.commit.committed@2", None),
        ("server.reply.tx_commit@2", 2_000),
        ("server.reply.publish_all@3", None),
    ],
)
def test_each_message_is_in_one_of_both_queues_when_the_broker_is_killed(
    served: Served, way: Way, point: str, moved: int | None
) -> None:
    served.start()
    _fill(served, way)
    served.terminate()
    served.start(f"{point}=kill")
    mover = Forked("txmq", _command(served, way), os.environ)
    assert served.wait() == -9
    served.start()
    assert _ended(mover) in (0, 1)
    with patient(served) as client:
        there = len(_moved(client, way))
    assert there % 1_000 in (0, COUNT % 1_000) if moved is None else there == moved
    served.terminate()  # what the mover holds by now is free
    served.start()
    _all_there_once(served, way, there)
