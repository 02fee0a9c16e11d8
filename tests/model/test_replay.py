"""What a driver does with a batch that an earlier driver has decided."""

from __future__ import annotations

from typing import Literal

import pytest

from tests.model.world import world


@pytest.mark.parametrize("sink", ["foreach", "native"])
def test_c4_a_decided_batch_is_executed_and_committed_once_more(sink: Literal["foreach", "native"]) -> None:
    """So that an engine that only records what a batch reads can compare it with what was consumed."""
    with world(sink=sink) as w:
        w.produce(3)
        w.until(w.start_driver(), "commit log write")
        w.kill_all()
        w.crash_engine()
        replaying = w.start_driver()
        for label in ("open_read",) if sink == "native" else ("open_batch", "open_read"):
            assert w.until(replaying, label).pending == label
        assert w.until(replaying, "commit_batch", "commit log write").pending == "commit_batch"
        w.finish()
