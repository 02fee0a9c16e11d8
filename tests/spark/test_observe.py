"""``txmq.observe``: what it shows of a real query, that it ends with it, and that it never disturbs it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

import txmq
from broker_core.core import errors
from tests.progress import GUARD_S, wait_until
from txmq.notebook import observe as module
from txmq.notebook.sample import Sample
from txmq.notebook.views import View

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("interpreted")]


def started(rig: Any, **options: Any) -> Any:
    """A query that runs until it is stopped."""
    writer = rig.stream("in", **options).writeStream.format("noop").queryName("of orders")
    return writer.option("checkpointLocation", rig.checkpoint()).start()


def test_an_observation_shows_the_lag_and_ends_with_its_query(
    rig: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    rig.declare("in")
    rig.publish("in", "a", "b", "c")
    query = started(rig)
    seen = txmq.observe(query, rig.broker.url, app_id="app", interval_s=0.05)
    alone = txmq.observe(query, interval_s=0.05)
    try:
        wait_until(lambda: query.lastProgress is not None and query.lastProgress.batchId >= 0)
        rig.publish("in", "d")
        for each in (seen, alone):
            wait_until(lambda each=each: bool(each.samples) and each.samples[-1].batch_id >= 1)
            wait_until(lambda each=each: each.samples[-1].lag == 0)
    finally:
        query.stop()
    for each in (seen, alone):
        assert each.wait(GUARD_S) and each.error is None
        assert not each.samples[-1].running and each.samples[0].running
        assert [one.at_s for one in each.samples] == sorted(one.at_s for one in each.samples)
    assert all(one.lag_s is None for one in alone.samples)
    text = capsys.readouterr().out
    assert "of orders  [" in text and text.rstrip().endswith("ended")


def test_the_broker_says_how_old_the_lag_is_while_a_batch_runs(rig: Any) -> None:
    rig.declare("in")
    rig.publish("in", "a", "b")
    going_on = threading.Event()
    writer = rig.stream("in").writeStream.foreachBatch(
        lambda batch, _id: going_on.wait(GUARD_S) and batch.collect()
    )
    query = writer.option("checkpointLocation", rig.checkpoint()).start()
    seen = txmq.observe(query, rig.broker.url, app_id="app", interval_s=0.05)
    try:
        wait_until(lambda: bool(seen.samples) and seen.samples[-1].lag == 2)
        assert seen.samples[-1].lag_s is not None and seen.samples[-1].batch_id == -1
        going_on.set()
        wait_until(lambda: seen.samples[-1].lag == 0)
        assert seen.samples[-1].lag_s is None
    finally:
        going_on.set()
        query.stop()
    assert seen.wait(GUARD_S) and seen.error is None


def test_a_stopped_observation_leaves_the_query_alone(rig: Any) -> None:
    rig.declare("in")
    query = started(rig)
    seen = txmq.observe(query, interval_s=0.05)
    wait_until(lambda: bool(seen.samples))
    seen.stop()
    assert seen.wait(GUARD_S) and query.isActive
    rig.publish("in", "a")
    wait_until(
        lambda: query.lastProgress is not None and query.lastProgress.sources[0].endOffset == '{"in": 1}'
    )
    query.stop()


class Broken:
    """A view that cannot be drawn."""

    def __enter__(self) -> View:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, samples: Sequence[Sample]) -> None:
        raise RuntimeError("the notebook is gone")


def test_what_fails_while_it_is_shown_ends_the_observation_alone(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "view_here", lambda _name: Broken())
    rig.declare("in")
    query = started(rig)
    seen = txmq.observe(query)
    assert seen.wait(GUARD_S) and str(seen.error) == "the notebook is gone"
    rig.publish("in", "a")
    wait_until(
        lambda: query.lastProgress is not None and query.lastProgress.sources[0].endOffset == '{"in": 1}'
    )
    query.stop()


@pytest.mark.soak
def test_a_broker_that_does_not_answer_is_no_error_of_the_observation(rig: Any) -> None:
    rig.declare("in")
    query = started(rig)
    seen = txmq.observe(query, "txmq://127.0.0.1:1", app_id="app", interval_s=0.05)
    wait_until(lambda: seen.error is not None)
    wait_until(lambda: len(seen.samples) > 1)
    assert isinstance(seen.error, errors.ConnectionFailed) and query.isActive
    query.stop()
    assert seen.wait(GUARD_S) and not seen.samples[-1].running


def test_an_address_without_an_app_is_refused(rig: Any) -> None:
    rig.declare("in")
    query = started(rig)
    try:
        for wrong in ({"url": rig.broker.url}, {"app_id": "app"}, {"interval_s": 0}):
            with pytest.raises(errors.OptionError):
                txmq.observe(query, **wrong)
    finally:
        query.stop()
