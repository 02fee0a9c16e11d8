"""Two clusters run the same app on the same queue, each with a checkpoint of its own: the one that comes later is refused
unless it is told to resume, and then the first one is.
"""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from tests.spark.pipelines import Driver, Pipeline, Served, run_once

pytestmark = [pytest.mark.spark, pytest.mark.crash, pytest.mark.slow, pytest.mark.xdist_group("spark-crash")]

MESSAGES = ["a", "b", "c", "d", "e", "f"]


def test_of_two_clusters_with_one_app_one_goes_on_and_everything_is_there_once(tmp_path: Path) -> None:
    served = Served(tmp_path / "broker")
    first = None
    try:
        one = Pipeline.create("app", served.url, tmp_path, MESSAGES, options={"maxOffsetsPerTrigger": "2"})
        other = replace(one, checkpoint=f"{one.checkpoint}.other")
        first = Driver(tmp_path, [one], at=[("foreach.decided", 1)], how="stop")
        first.wait_stopped()
        error = run_once(tmp_path, [other])["app"]
        assert error is not None and "[TXMQ_LINEAGE]" in error and "onNewCheckpoint=resume" in error
        assert one.entries() == 1, "who is refused has done nothing"
        resumed = replace(other, checkpoint=f"{one.checkpoint}.resumed", on_new_checkpoint="resume")
        assert run_once(tmp_path, [resumed]) == {"app": None}
        os.kill(first.process.pid, signal.SIGCONT)
        error = first.require_done()["app"]
        assert error is not None and "[TXMQ_LINEAGE]" in error
        resumed.require_once(MESSAGES)
    finally:
        if first is not None:
            first.end()
        served.stop()
