"""The protocol under every interleaving that Hypothesis finds: two drivers, zombies, crashes at every step,
lost replies, lost checkpoints.

``TXMQ_SOAK_ROUNDS=n`` (or ``--soak-rounds n``) runs n times ``SOAKED`` histories, from other seeds each time.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.model.machine import MicroBatches, OneLineage

EXAMPLES = 25  # as of any other property before a change lands
SOAKED = 300
QUIET = (
    HealthCheck.too_slow,
    HealthCheck.data_too_large,
    HealthCheck.filter_too_much,
    HealthCheck.large_base_example,
)


@pytest.mark.parametrize("machine", [OneLineage, MicroBatches])
def test_every_history_ends_exactly_once(machine: type[MicroBatches], rounds: int) -> None:
    """``print_blob`` gives the line that repeats a failure; without soak the histories are the same in every
    run.
    """
    soak = rounds or int(os.environ.get("TXMQ_SOAK_ROUNDS", "0"))
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=SOAKED * soak or EXAMPLES,
            stateful_step_count=30,
            deadline=None,
            derandomize=not soak,
            database=None,
            print_blob=True,
            suppress_health_check=QUIET,
        ),
    )
