"""onUnroutable at the decision: routing was done when a part was staged, and queues may have gone since."""

from __future__ import annotations

from typing import Any

import pytest

from broker_core.core.errors import Unroutable
from broker_core.engine import START, StagedBranch
from broker_core.node.engine import INLINE_ROWS
from tests.engine.bench import APP, Bench

SIZES = pytest.mark.parametrize("rows", [2, INLINE_ROWS + 2], ids=["inline", "batch"])


def staged(bench: Bench, rows: int, target: Any = None) -> tuple[str, StagedBranch]:
    bench.produce(b"x")
    end = bench.claim()
    token = bench.engine.open_batch(APP, "q", 0, "fail").token
    bench.read("q", 0, bench.ranges({"in": START}, end))
    bodies = [b"alert %d" % number for number in range(rows)]
    return token, bench.stage(token, *bodies, target=target)


def gone(bench: Bench, how: str) -> None:
    with bench.local.channel() as channel:
        channel.queue_delete("out")
        if how == "declared again":
            channel.queue_declare("out")


@SIZES
@pytest.mark.parametrize("how", ["deleted", "declared again"])
def test_c4_a_queue_that_goes_between_stage_and_decision_fails_it_with_count_and_examples(
    bench: Bench, rows: int, how: str
) -> None:
    token, branch = staged(bench, rows)
    gone(bench, how)
    with pytest.raises(
        Unroutable,
        match=rf"\] {rows} messages .*exchange '' routing key 'out'.*nothing was "
        rf"published",
    ) as raised:
        bench.engine.commit_batch(APP, "q", 0, token, [branch])
    assert str(raised.value).count("routing key") == min(rows, 3)
    assert bench.engine.last_entry(APP) is None
    assert bench.visible("in") == [b"x"], "and nothing was consumed"


@SIZES
def test_c4_messages_whose_queue_has_gone_are_dropped_and_not_counted_as_published(
    bench: Bench, rows: int
) -> None:
    token, branch = staged(bench, rows)
    gone(bench, "deleted")
    entry = bench.engine.commit_batch(APP, "q", 0, token, [branch], on_unroutable="drop").entry
    assert (entry.published, entry.messages) == (0, 1)


@SIZES
def test_c4_a_message_that_reaches_another_queue_still_is_published_there(bench: Bench, rows: int) -> None:
    with bench.local.channel() as channel:
        channel.exchange_declare("both", "topic")
        channel.queue_bind("out", "both", "#")
        channel.queue_bind("in2", "both", "all.#")
    token, branch = staged(bench, rows, {"exchange": "both", "routing_key": "all.x"})
    lost = bench.stage(token, b"only out", target={"exchange": "both", "routing_key": "some"})
    gone(bench, "deleted")
    with pytest.raises(Unroutable, match=r"\] 1 messages .*exchange 'both' routing key 'some'\)"):
        bench.engine.commit_batch(APP, "q", 0, token, [branch, lost])
    entry = bench.engine.commit_batch(APP, "q", 0, token, [branch], on_unroutable="fail").entry
    assert entry.published == rows == len(bench.visible("in2"))


@SIZES
def test_a_batch_write_fails_where_its_queue_goes_before_the_commit(bench: Bench, rows: int) -> None:
    branch = bench.write("token", *(b"%d" % number for number in range(rows)))
    gone(bench, "declared again")
    with pytest.raises(Unroutable, match=rf"\] {rows} messages"):
        bench.engine.commit_branches("token", [branch])
    assert bench.visible("out") == []
