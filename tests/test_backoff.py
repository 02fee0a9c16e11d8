"""When a client gives up, and how long it waits until then.

Not here: what it tries (``tests/kafka/cluster``, ``tests/server/flight``).
"""

from __future__ import annotations

import random

import pytest

from broker_core.core import errors
from broker_core.core.backoff import Backoff, Time

PAUSES_S = (1.0, 2.0)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []
        self.time = Time(lambda: self.now, self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def test_the_time_begins_with_the_first_failure() -> None:
    clock = Clock()
    backoff = Backoff(4.0, clock.time, PAUSES_S)
    for _ in range(2):
        clock.now += 1000.0  # a call that went well takes none of the time
        while backoff.failed():
            pass
        backoff.renew()
    assert clock.slept == [1.0, 2.0, 1.0] * 2, "the last pause ends with the time"


def test_no_time_is_no_second_try() -> None:
    clock = Clock()
    assert not Backoff(0.0, clock.time, PAUSES_S).failed()
    assert clock.slept == []


def test_who_waited_too_long_for_the_first_answer_asks_once_more() -> None:
    clock = Clock()
    backoff = Backoff(30.0, clock.time, PAUSES_S, from_start=True)
    error = errors.ConnectionFailed("silent")
    for _ in range(2):
        clock.now += 100.0
        backoff.wait(error)
        with pytest.raises(errors.ConnectionFailed, match="silent"):
            backoff.wait(error)
        backoff.renew()
    assert clock.slept == [0.0, 0.0]


def test_the_time_begins_at_the_start() -> None:
    clock = Clock()
    backoff = Backoff(4.0, clock.time, PAUSES_S, from_start=True)
    clock.now += 2.5
    assert backoff.failed() and backoff.failed() and not backoff.failed()
    assert clock.slept == [1.0, 0.5]


def test_a_pause_leaves_the_random_numbers_of_the_program_alone() -> None:
    """A thread that shows the lag may pause while a program that has set a seed draws its numbers."""
    clock = Clock()
    backoff = Backoff(30.0, clock.time, (1.0,), spread=0.5)
    before = random.getstate()
    for _ in range(5):
        backoff.wait(errors.ConnectionFailed("silent"))
    assert random.getstate() == before and len(set(clock.slept)) > 1
    assert all(0.5 <= pause_s <= 1.5 for pause_s in clock.slept)
