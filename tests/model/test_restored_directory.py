"""An older copy of the data directory is put in the place of a lost one, at each step of a batch, under each state
of the checkpoint: nothing is lost, or the query stops before anything is consumed (crash row 21).

The real source, sinks and engine over Spark's loop (``driver.py``). After each step the world checks that nothing
is consumed that is not decided (``world.py``). A real backup: tests/server/test_backup_restored.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from itertools import product
from typing import Any

import pytest

from tests.model.fake_spark import Checkpoint
from tests.model.world import Copy, World, require, world

SINKS: dict[str, dict[str, Any]] = {
    "native": {"sink": "native"},
    "foreach": {"sink": "foreach", "shape": ("publish",), "ledger": ""},
    "unadmitted": {"sink": "native", "unadmitted": True},
    "two queues": {"sink": "foreach", "shape": ("publish",), "ledger": "", "queues": ("in", "in2")},
    "tables": {"sink": "foreach", "shape": ("append", "publish"), "ledger": ""},
    "other": {"sink": "other"},
}
SELDOM = ("unadmitted", "two queues")
# which checkpoints are started on the copy, one after another
CHECKPOINTS = ("committed", "planned", "of the copy", "of the copy, killed, and then committed", "new")


def copies(w: World, before: int) -> list[tuple[str, Copy, Checkpoint]]:
    """Copies before each step of batch ``before``, with the checkpoint of that moment; the batch is committed."""
    for _ in range(before):
        w.produce(2, 1)
        w.until(w.start_driver(), "idle")
        w.kill_all()
    w.produce(2, 1)
    driver = w.start_driver()
    found = []
    while driver.pending != "idle":
        found.append((driver.pending, w.copy_engine(), w.checkpoint.copy()))
        w.step(driver)
    found.append((driver.pending, w.copy_engine(), w.checkpoint.copy()))
    w.kill_all()
    return found


def start(w: World, checkpoint: Checkpoint, on_new: str, *until: str) -> BaseException | None:
    w.checkpoint = checkpoint
    driver = w.until(w.start_driver(on_new=on_new), "idle", *until)
    w.kill_all()
    return driver.error


def started(w: World, which: str, at_copy: Checkpoint, newest: Checkpoint, on_new: str) -> None:
    if which.startswith("of the copy"):
        killed = ("open_batch", "commit_batch") if "killed" in which else ()
        start(w, at_copy.copy(), on_new, *killed)
    if which == "planned":
        newest.commits.discard(max(newest.commits))
    if which == "new":
        w.lose_checkpoint()
    elif which != "of the copy":
        w.checkpoint = newest
    start(w, w.checkpoint, on_new)


def nothing_is_lost(w: World) -> None:
    """Each message of the copy waits in its queue, or has left with a decision, or is where another system has
    it.
    """
    waiting = {
        body.decode()
        for log, found in w.engine.available(list(w.queues)).items()
        for batch in w.engine.browse([(log, 0, found.end)])
        for body in batch.column("body").to_pylist()
    }
    decided = {body.split("|")[0] for bodies in w.batches.values() for body in bodies}
    elsewhere = {body for bodies in w.other_sink.values() for body in bodies}
    produced = {name for names in w.produced.values() for name in names}
    require(produced <= waiting | decided | elsewhere, f"lost: {produced - waiting - decided - elsewhere}")


CHANGED_BY_A_RUN = (
    "acked", "batches", "checkpoint", "delta", "drivers", "entries", "first_offset", "forgotten", "other_sink", "passed", "resuming", "tokens", "unread",
)  # fmt: skip


@pytest.mark.product
@pytest.mark.slow
@pytest.mark.parametrize("which", CHECKPOINTS)
@pytest.mark.parametrize("sink", SINKS)
def test_row_21_a_copy_of_each_step_of_a_batch_loses_nothing_under_any_checkpoint(
    sink: str, which: str, rounds: int
) -> None:
    if not rounds and sink in SELDOM:
        pytest.skip("in a soak")
    ends = list(product((False, True), ("fail", "resume")))  # new messages, onNewCheckpoint
    for before, later in product((0, 1), (False, True) if rounds else (False,)):
        with world(**SINKS[sink]) as w:
            made = copies(w, before)
            if later and sink != "other":
                w.produce(1, 1)
                w.until(w.start_driver(), "idle")
                w.kill_all()
            left = deepcopy({name: getattr(w, name) for name in CHANGED_BY_A_RUN if name != "drivers"})
            for at, (label, copy, at_copy) in enumerate(made):
                for arrive, on_new in ends if rounds else ends[at % 4 :][:1]:
                    w.__dict__ |= deepcopy(left) | {"drivers": {}}
                    w.history[:] = [f"{before=} {later=} {label=} {arrive=} {on_new=}"]
                    w.restore_engine(copy)
                    if arrive:
                        w.produce(1, 1)
                    with telling(w):
                        started(w, which, at_copy, w.checkpoint, on_new)
                        nothing_is_lost(w)
                        if sink not in ("tables", "other"):
                            w.produce(1, 1)
                            w.finish(on_new=on_new)


@contextmanager
def telling(w: World) -> Iterator[None]:
    try:
        yield
    except AssertionError as error:
        raise AssertionError("\n".join([str(error), *w.history])) from error
