"""Rows of the crash table on Spark Connect, where the function of a batch runs in a process of the server: server, client
and that process are killed while each pipeline is at its failpoint, and another server goes on.

Not here: one kill of each kind before a change lands, in the server of ``tests/spark/test_connect.py``.
"""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.spark import shapes
from tests.spark.pipelines import CHANGED, Driver, Pipeline, Served, empty_table

pytestmark = [pytest.mark.spark, pytest.mark.crash, pytest.mark.slow, pytest.mark.soak]

MESSAGES = ["a", "b", "c", "d"]
TWO_BATCHES = {"maxOffsetsPerTrigger": "2"}
# where each pipeline is when the copy is made
COPIED = {
    "claimed": ("connector.latest_offset.claimed", 1),
    "opened": ("foreach.opened", 1),
    "staged": ("foreach.staged", 1),
    "decided": ("foreach.decided", 1),
    "second": ("foreach.opened", 2),
}


def test_row_21_on_connect_a_copy_of_the_directory_from_any_step_of_the_first_batch_loses_nothing(
    tmp_path: Path,
) -> None:
    """The checkpoints are those of a batch later; then a new one goes on, as the error says."""
    served = Served(tmp_path / "broker")
    try:
        runs = [
            Pipeline.create(app, served.url, tmp_path, MESSAGES, tables=[], options=TWO_BATCHES)
            for app in COPIED
        ]
        tables = Pipeline.create("tables", served.url, tmp_path, MESSAGES)
        runs.append(tables)
        connect = {"connect": "true"}
        at = [*COPIED.values(), ("foreach.staged", 1)]
        Driver(tmp_path, runs, at=at, session=connect).require_killed()
        served.stop()
        shutil.copytree(tmp_path / "broker", tmp_path / "copy")
        served.start()
        errors = Driver(tmp_path, runs, session=connect).require_done()
        assert set(errors.values()) == {None}, errors
        served.stop()
        shutil.rmtree(tmp_path / "broker")
        (tmp_path / "copy").rename(tmp_path / "broker")
        served.start()
        new = [
            replace(each, checkpoint=f"{each.checkpoint}-new", on_new_checkpoint="resume") for each in runs
        ]
        stops = Driver(tmp_path, [*runs, *new], session=connect).require_done_each()
        for pipeline, stopped, last in zip(runs, stops, stops[len(runs) :], strict=False):
            assert stopped is not None and "onNewCheckpoint=resume" in stopped, (pipeline.app, stopped)
            if pipeline is tables:  # which has the batch that the copy has not decided, and made the table
                assert last is not None and "older copy of the broker's data was restored" in last, last
                assert sorted(row["body"] for row in pipeline.table("first")) == MESSAGES
                assert pipeline.depth() == len(MESSAGES)
                continue
            assert last is None, (pipeline.app, last)
            assert [body.partition(":")[0] for body in pipeline.published()] == MESSAGES, pipeline.app
            assert pipeline.depth() == 0
    finally:
        served.stop()


# where a random kill may find each of two batches
ANYWHERE = [
    *(("connector.latest_offset.claimed", hit) for hit in (1, 2, 3)),
    ("connector.read.rows", 1),
    *(
        (f"foreach.{step}", hit)
        for step in ("opened", "staged", "executed", "decided", "marked", "mirrored")
        for hit in (1, 2)
    ),
]
ONCE = [(step, hit) for step, hit in ANYWHERE if hit == 1]
KINDS: dict[str, dict[str, Any]] = {
    "effects": {"fn": "effects", "options": TWO_BATCHES},
    "ledger": {"fn": "effects", "options": TWO_BATCHES, "ledger": "auto"},
    "changes": {"fn": "changes", "tables": []},
    "rejects": {"fn": "rejects", "shape": "typed"},
}


def test_soak_random_kills_of_server_and_worker_leave_each_row_once(
    tmp_path: Path, rounds: int, seed: int
) -> None:
    """In each round each kind of function loses the server, or the process of its function and then the server."""
    draw = random.Random(seed)
    served = Served(tmp_path / "broker")
    session = {"connect": "true", "spark.python.worker.reuse": "false"}
    try:
        for number in range(rounds):
            runs = {}
            for kind, special in KINDS.items():
                messages = shapes.MESSAGES["typed"] if kind == "rejects" else MESSAGES
                runs[kind] = Pipeline.create(f"{kind}{number}", served.url, tmp_path, messages, **special)
            dead = replace(runs["rejects"], queue=f"{runs['rejects'].queue}.{shapes.OTHER}")
            dead.declare()
            empty_table(Path(runs["changes"].lake) / "changed", CHANGED)
            at = [draw.choice(ANYWHERE if kind in ("effects", "ledger") else ONCE) for kind in KINDS]
            how = draw.choice(("group", "worker"))
            Driver(tmp_path, list(runs.values()), at=at, how=how, session=session).require_killed()
            errors = Driver(tmp_path, list(runs.values()), session=session).require_done()
            for kind, pipeline in runs.items():
                what = f"{kind}, killed at {at}, {how}"
                assert errors[pipeline.app] is None, (what, errors[pipeline.app])
                pipeline.require_once(shapes.EXPECTED["typed"] if kind == "rejects" else MESSAGES)
            runs["changes"].require_changed(MESSAGES)
            assert replace(dead, out=dead.queue).published() == ["b,b", "d,d"]
    finally:
        served.stop()
