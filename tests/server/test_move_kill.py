"""``txmq move`` while it, or the broker, is killed: each message is once in one of both queues."""

from __future__ import annotations

import os
from collections import Counter

import pytest

from tests.forked import Forked
from tests.progress import wait_for_end
from tests.server.conftest import Served, bodies, fill
from tests.server.test_kill import patient
from txmq import cli

pytestmark = pytest.mark.crash

COUNT = 2_500  # three transactions


def _all_there_once(served: Served, moved: int) -> None:
    """``moved``: before somebody died. The broker is started again, so nobody holds anything."""
    with patient(served) as client:
        into = bodies(client, "into")
        assert len(into) == moved and len(bodies(client, "from")) == COUNT - moved
    assert cli.main(["move", "from", "--to", "into", "--yes", "--url", served.url]) == 0
    with patient(served) as client:
        assert Counter(bodies(client, "into")) == Counter(str(number).encode() for number in range(COUNT))
        assert bodies(client, "from") == []


def _ended(mover: Forked) -> int:
    with mover.stdout:
        return wait_for_end(mover, "the mover ends")  # type: ignore[arg-type]


def _fill(served: Served) -> None:
    with patient(served) as client:
        fill(client, "from", COUNT)
        fill(client, "into", 0)


@pytest.mark.parametrize(
    ("step", "moved"), [("move.held", 1_000), ("move.published", 1_000), ("move.committed", 2_000)]
)
def test_each_message_is_in_one_of_both_queues_when_the_mover_is_killed(
    served: Served, step: str, moved: int
) -> None:
    served.start()
    _fill(served)
    command = ["move", "from", "--to", "into", "--yes", "--url", served.url]
    mover = Forked("txmq", command, {**os.environ, "TXMQ_FAILPOINTS": f"{step}@2=kill"})
    assert _ended(mover) == -9
    served.terminate()
    served.start()
    _all_there_once(served, moved)


@pytest.mark.parametrize(
    ("point", "moved"),
    [
        ("server.reply.get_at@2", 1_000),
        ("server.reply.tx_commit@2", 2_000),
        ("server.reply.publish_all@3", None),
    ],
)
def test_each_message_is_in_one_of_both_queues_when_the_broker_is_killed(
    served: Served, point: str, moved: int | None
) -> None:
    served.start()
    _fill(served)
    served.terminate()
    served.start(f"{point}=kill")
    mover = Forked("txmq", ["move", "from", "--to", "into", "--yes", "--url", served.url], os.environ)
    assert served.wait() == -9
    served.start()
    assert _ended(mover) in (0, 1)
    with patient(served) as client:
        there = len(bodies(client, "into"))
    assert there in (1_000, 2_000) if moved is None else there == moved
    served.terminate()  # what the mover holds by now is free
    served.start()
    _all_there_once(served, there)
