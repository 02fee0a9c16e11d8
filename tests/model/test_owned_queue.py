"""One queue under every history that Hypothesis finds: see ``owned_queue.py``. Each rule, switched off, is
found.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from broker_core.broker.message import messages
from broker_core.broker.queue import Queue
from broker_core.broker.queue.due_index import DueIndex
from broker_core.broker.queue.log import Run
from broker_core.broker.queue.progress import Progress
from broker_core.broker.queue.queue import Marks
from broker_core.core.errors import DataLoss
from broker_core.core.records import NEVER
from broker_core.micro_batch.claims.claim import Below, Claims
from tests.make import around
from tests.model.owned_queue import OwnedQueue
from tests.model.test_machine import QUIET

Patch = pytest.MonkeyPatch


class OfAnApp(OwnedQueue):
    """Only what concerns an app: a rule of claims shows sooner."""

    get = settle = close_channel = purge = time = sweep = compact = forget = None  # type: ignore[assignment]
    browser = browse_on = None  # type: ignore[assignment]


def histories(machine: type[OwnedQueue], examples: int, steps: int = 40, **given: Any) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            print_blob=True,
            suppress_health_check=QUIET,
            **given,
        ),
    )


def test_a_claim_reads_the_same_rows_whatever_else_happens_to_its_queue(rounds: int) -> None:
    soak = rounds or int(os.environ.get("TXMQ_SOAK_ROUNDS", "0"))
    histories(OwnedQueue, 40 * max(1, soak), derandomize=not soak)


# -- rules switched off --------------------------------------------------------------------------------------


def rows_need_not_rise(patch: Patch) -> None:
    """As a run would take any row of its block."""
    patch.setattr(Run, "last_row", -1)


def transient_messages_are_not_written_by_a_claim(patch: Patch) -> None:
    patch.setattr(messages.Messages, "persist", lambda *_: None)


def claims_freeze_nothing(patch: Patch) -> None:
    patch.setattr(Queue, "claim", lambda *_: None)


def claims_are_not_frozen_after_a_restart(patch: Patch) -> None:
    patch.setattr(Progress, "restore_claim", lambda *_: None)


def acks_settle_from_the_floor(patch: Patch) -> None:
    patch.setattr(Queue, "settle_claimed", lambda self, end: self.settle(self.progress.floor, end))


def acks_delete_the_last_range(patch: Patch) -> None:
    def without(ack: Any, self: Claims, logs: Any, change: Any, below: Below) -> None:
        ack(self, logs, change, below)
        for log, offset in below.vector.items():
            logs.ack(log, below.app_id, offset, offset)

    around(patch, Claims, "ack_below", without)


def test_a_rule_that_is_switched_off_is_found(monkeypatch: Patch) -> None:
    claims_freeze_nothing(monkeypatch)
    with pytest.raises(BaseException) as found:
        histories(
            OfAnApp, 1_000, steps=150, derandomize=True, phases=[Phase.generate], report_multiple_bugs=False
        )
    assert not isinstance(found.value, (KeyboardInterrupt, SystemExit))


def published(queue: OwnedQueue, *transient: bool) -> None:
    queue.publish(len(transient), [*transient, *[False] * 9], None, [0] * 9, 20)


def an_ack(queue: OwnedQueue) -> None:
    """Of a range behind messages that the app skips; its rows can be read until the next range is claimed."""
    published(queue, False, False)
    queue.start(ledger=False, at="latest", part=0)
    published(queue, False)
    queue.claim(None)
    queue.ack()
    queue.read_again(0)


def a_crash(queue: OwnedQueue) -> None:
    """After a claim has written a transient message, later than those beside it."""
    queue.start(ledger=False, at="earliest", part=0)
    published(queue, False, True, False)
    queue.claim(None)
    queue.reopen(clean=False)


def a_full_queue(queue: OwnedQueue) -> None:
    """An app has claimed as much as the queue may hold, and after a restart more comes."""
    published(queue, False, False, False, False)
    queue.start(ledger=True, at="earliest", part=0)
    queue.reopen(clean=True)
    published(queue, False)
    queue.read_again(0)


def an_expiry_behind_the_head(queue: OwnedQueue) -> None:
    """Of a message that was held when its time came, and of one in a segment after a restart."""
    published(queue, False)
    queue.publish(1, [False] * 9, 2, [0] * 9, 20)
    queue.get()
    queue.get()
    queue.time(3)
    queue.sweep()
    queue.settle(0, "requeue")
    queue.settle(0, "requeue")
    queue.sweep()
    queue.shows_what_the_model_holds()
    queue.publish(1, [False] * 9, 2, [0] * 9, 20)
    queue.seal()
    queue.reopen(clean=False)
    queue.time(3)
    queue.sweep()


def expirations_are_of_the_head_alone(patch: Patch) -> None:
    patch.setattr(Marks, "expire_at", lambda *_: None)


def what_comes_back_is_not_looked_at_again(patch: Patch) -> None:
    patch.setattr(DueIndex, "look_again", lambda *_: None)


def no_expiration_is_known_after_a_restart(patch: Patch) -> None:
    record = Run.record
    patch.setattr(Run, "record", lambda self, queue: replace(record(self, queue), expires_us=NEVER))


@pytest.mark.parametrize(
    ("history", "switched_off"),
    [
        (an_ack, None),
        (an_ack, acks_settle_from_the_floor),
        (an_ack, acks_delete_the_last_range),
        (a_crash, None),
        (a_crash, rows_need_not_rise),
        (a_crash, transient_messages_are_not_written_by_a_claim),
        (a_full_queue, None),
        (a_full_queue, claims_are_not_frozen_after_a_restart),
        (an_expiry_behind_the_head, None),
        (an_expiry_behind_the_head, expirations_are_of_the_head_alone),
        (an_expiry_behind_the_head, what_comes_back_is_not_looked_at_again),
        (an_expiry_behind_the_head, no_expiration_is_known_after_a_restart),
    ],
)
def test_a_rule_that_is_switched_off_is_found_in_a_history_that_random_ones_take_long_to_reach(
    history: Callable[[OwnedQueue], None], switched_off: Callable[[Patch], None] | None, monkeypatch: Patch
) -> None:
    if switched_off is not None:
        switched_off(monkeypatch)
    queue = OwnedQueue()
    try:
        queue.declare({"x-max-length": 4} if history is a_full_queue else {})
        with contextlib.nullcontext() if switched_off is None else pytest.raises((AssertionError, DataLoss)):
            history(queue)
            queue.shows_what_the_model_holds()
    finally:
        queue.teardown()
