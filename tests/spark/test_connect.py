"""The same function on Spark Connect: a local Connect server, and a client that has no JVM."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.spark import shapes
from tests.spark.pipelines import CHANGED, Pipeline, Served, empty_table, run_once

pytestmark = [pytest.mark.spark, pytest.mark.slow]

MESSAGES = ["a", "b", "c", "d"]


def test_on_connect_publishes_tables_and_the_ledger_are_exactly_once_and_a_missing_lineage_is_refused(
    tmp_path: Path,
) -> None:
    served = Served(tmp_path / "broker")
    try:
        pipeline = Pipeline.create(
            "app",
            served.url,
            tmp_path,
            MESSAGES,
            ledger=str(tmp_path / "ledger"),
            options={"maxOffsetsPerTrigger": "2"},
        )
        rate = Pipeline.create(
            "rate", served.url, tmp_path, source="rate", batches=1, lineage="first checkpoint"
        )
        messages = shapes.MESSAGES["typed"]
        typed = Pipeline.create("typed", served.url, tmp_path, messages, shape="typed", fn="rejects")
        dead = replace(typed, queue=f"{typed.queue}.{shapes.OTHER}", out=f"{typed.queue}.{shapes.OTHER}")
        dead.declare()
        unnamed = Pipeline.create("unnamed", served.url, tmp_path, source="rate", batches=1)
        changes = Pipeline.create("changes", served.url, tmp_path, MESSAGES, fn="changes", tables=[])
        empty_table(Path(changes.lake) / "changed", CHANGED)
        errors = run_once(tmp_path, [pipeline, rate, typed, unnamed, changes], session={"connect": "true"})
        assert all(errors[name] is None for name in ("app", "rate", "typed", "changes")), errors
        assert "pass lineage=" in str(errors["unnamed"])
        pipeline.require_once(MESSAGES)
        typed.require_once(shapes.EXPECTED["typed"])
        assert dead.published() == ["b,b", "d,d"]
        changes.require_once(MESSAGES)
        changes.require_changed(MESSAGES)
        rate.require_once([str(number) for number in range(2 * rate.entries())])
        told = [(row["batch_id"], row["log"], row["published"]) for row in pipeline.ledger_rows()]
        assert sorted(told) == [(0, None, 2), (1, None, 2)], (
            "the commit consumes nothing on Connect, the source acks"
        )
    finally:
        served.stop()
