"""A wait ends when nothing moves any more, whatever the clock of the machine has done."""

from __future__ import annotations

import pytest

from tests import progress


class Machine:
    """A clock, and the CPU time of the test and what it has started."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = self.cpu_s = 0.0
        patch.setattr(progress.time, "monotonic", lambda: self.now)
        patch.setattr(progress, "_cpu_s", lambda: self.cpu_s)
        self.meter = progress.Meter()

    def run(self, seconds: float, *, busy: float = 0.0, step: float = 1.0) -> None:
        """``busy``: the part of a core that computes."""
        for _ in range(int(seconds / step)):
            self.now += step
            self.cpu_s += busy * step
            self.meter.check("it is done")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_what_does_not_move_ends_the_wait(machine: Machine) -> None:
    machine.run(progress.STILL_S - 10)
    with pytest.raises(AssertionError, match=r"nothing has moved for .* it is done"):
        machine.run(10)


def test_what_moves_is_waited_for_until_it_gets_nowhere(machine: Machine) -> None:
    machine.run(progress.LIVELOCK_S - 10, busy=0.5)
    with pytest.raises(AssertionError, match="not within"):
        machine.run(10, busy=0.5)


def test_a_machine_that_was_suspended_is_no_hang(machine: Machine) -> None:
    """The clock goes on, and nothing has computed; what hangs afterwards is still found."""
    machine.run(10, busy=0.5)
    machine.run(3600, step=3600)
    machine.run(progress.STILL_S / 2)
    machine.run(10, busy=0.5)
    with pytest.raises(AssertionError, match="nothing has moved"):
        machine.run(progress.STILL_S)


def test_what_looks_seldom_is_found_too(machine: Machine) -> None:
    """A condition that itself waits for a minute."""
    with pytest.raises(AssertionError, match="nothing has moved"):
        machine.run(20 * progress.STILL_S, step=60)
