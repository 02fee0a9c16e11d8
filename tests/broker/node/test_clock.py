"""What happens when somebody sets the time of day: nothing stands still."""

from __future__ import annotations

import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest

from broker_core.broker.broker import BrokerState
from broker_core.core.change import Change
from broker_core.node.committer import SteadyClock, now_us
from broker_core.node.local import LocalBroker
from broker_core.store.durable import DurableStore
from broker_core.store.memory import MemoryStore
from tests.reading import fetched

HOUR_US = 3_600_000_000
S_US = 1_000_000


class Times:
    """A time of day and a monotonic time that only a test moves."""

    def __init__(self) -> None:
        self.wall_us = 1_700_000_000 * S_US
        self.monotonic_ns = 5

    def advance(self, us: int) -> None:
        self.wall_us += us
        self.monotonic_ns += us * 1000

    def steady(self, latest_us: int = 0) -> SteadyClock:
        return SteadyClock(lambda: self.wall_us, monotonic=lambda: self.monotonic_ns, latest_us=latest_us)


def test_the_clock_is_the_time_of_day_and_follows_it_ahead() -> None:
    times = Times()
    clock = times.steady()
    for step in (0, 1, S_US, HOUR_US):
        times.advance(step)
        assert clock() == times.wall_us
    times.wall_us += HOUR_US
    assert clock() == times.wall_us


def test_a_clock_that_is_set_back_goes_on_at_half_speed_until_the_time_of_day_has_caught_up() -> None:
    times = Times()
    clock = times.steady()
    before = clock()
    times.wall_us -= HOUR_US
    assert clock() == before
    seen = [before]
    for _ in range(120):
        times.advance(60 * S_US)
        seen.append(clock())
    steps = {later - earlier for earlier, later in pairwise(seen)}
    assert steps == {30 * S_US}
    times.advance(60 * S_US)
    assert clock() == times.wall_us


def test_after_a_restart_before_the_latest_commit_the_clock_does_not_stand_still() -> None:
    times = Times()
    clock = times.steady(latest_us=times.wall_us + HOUR_US)
    first = clock()
    assert first == times.wall_us + HOUR_US
    times.advance(10 * S_US)
    assert clock() == first + 5 * S_US


class Stepped:
    """The real time of day, moved."""

    def __init__(self) -> None:
        self.shift_us = 0

    def __call__(self) -> int:
        return now_us() + self.shift_us


def _wait(condition: object) -> None:
    woken = threading.Event()
    while not condition():  # type: ignore[operator]
        woken.wait(0.01)


def test_messages_expire_and_upkeep_goes_on_when_the_clock_is_set_back_by_an_hour() -> None:
    clock = Stepped()
    broker = LocalBroker(MemoryStore(), clock)
    with broker.channel() as channel:
        channel.queue_declare("q", arguments={"x-message-ttl": 200})
        channel.queue_declare("unused", arguments={"x-expires": 200})
        channel.publish(b"before", routing_key="q")
        clock.shift_us = -HOUR_US
        channel.publish(b"after", routing_key="q")
        _wait(lambda: broker.state.topology.queue("q").messages == 0)
        _wait(lambda: "unused" not in broker.state.topology.queues)
        channel.publish(b"later", routing_key="q")
        _wait(lambda: broker.state.topology.queue("q").messages == 0)
    broker.close()


def test_a_broker_that_is_restarted_an_hour_before_its_latest_commit_expires_its_messages() -> None:
    clock = Stepped()
    store = MemoryStore()
    broker = LocalBroker(store, clock, upkeep=False)
    with broker.channel() as channel:
        channel.queue_declare("q", arguments={"x-message-ttl": 200})
        channel.publish(b"before", routing_key="q")
    broker.close()
    clock.shift_us = -HOUR_US
    again = LocalBroker(store.reopened(), clock)
    started = time.monotonic()
    _wait(lambda: again.state.topology.queue("q").messages == 0)
    assert time.monotonic() - started < 600
    again.close()


@pytest.mark.parametrize("sealed", [False, True])
def test_after_a_restart_the_clock_knows_the_latest_commit_wherever_it_lies(
    tmp_path: Path, sealed: bool
) -> None:
    clock = Stepped()
    broker = LocalBroker(DurableStore(tmp_path), clock, upkeep=False)
    with broker.channel() as channel:
        channel.queue_declare("q")
        channel.publish(b"1", routing_key="q")
        channel.publish(b"2", routing_key="q")
    if sealed:
        broker.upkeep.close_open()
        broker.upkeep.seal()
    queue = broker.state.topology.queue("q")
    latest = fetched(broker, queue, 1).committed_at
    broker.close()
    clock.shift_us = -HOUR_US
    again = LocalBroker(DurableStore(tmp_path), clock, upkeep=False)
    assert latest <= again.clock() < latest + HOUR_US // 2
    queue = again.state.topology.queue("q")
    times = [fetched(again, queue, offset).committed_at for offset in (0, 1)]
    assert times[0] < times[1] == latest, "each message keeps its own time"
    again.close()


def test_commit_times_rise_while_the_clock_falls() -> None:
    clock = Stepped()
    broker = LocalBroker(MemoryStore(), clock, upkeep=False)
    times: list[int] = []

    def work(_state: BrokerState, _change: Change, now: int) -> None:
        times.append(now)

    for _ in range(20):
        broker.run(work)
        clock.shift_us -= 10 * S_US
    assert times == sorted(set(times))
    broker.close()
