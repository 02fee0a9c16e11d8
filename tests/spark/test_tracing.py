"""Trace context through Spark: kept in the headers of messages, and linked to the span of their micro-batch."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import DataFrame

from broker_core.message.properties import Properties
from connector.batch.foreach_batch import BatchTransaction, transactional
from tests.progress import GUARD_S
from tests.spark.jobs import to_the_end
from tests.spark.sessions import CONNECT
from tests.tracing import PARENT, named, spans_kept

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("interpreted")]
TRACED = Properties(headers={"traceparent": PARENT}).encode()


def contexts(rig: Any, queue: str) -> dict[str, object]:
    """The trace context of each message of a queue, by its body."""
    engine = rig.broker.engine
    slices = [(log, one.start, one.end) for log, one in engine.available([queue]).items()]
    return {
        row["body"].decode(): Properties.decode(row["properties"]).headers.get("traceparent")
        if row["properties"]
        else None
        for batch in engine.browse(slices)
        for row in batch.to_pylist()
    }


def run(rig: Any) -> None:
    """Relays "in" with its properties to "kept", its bodies alone to "made", and rejects it to "dead"."""
    rig.declare("in", "kept", "made", "dead")
    rig.publish("in", "traced", properties=TRACED)
    rig.publish("in", "plain")

    def fn(batch: DataFrame, tx: BatchTransaction) -> None:
        tx.publish(batch.select("body", "properties"), queue="kept")
        tx.publish(batch.select("body"), queue="made")
        tx.reject(batch, "no", queue="dead")

    each = transactional(fn, url=rig.broker.url, app_id="app")
    writer = rig.stream("in", includeProperties=True).writeStream.foreachBatch(each)
    to_the_end(writer.option("checkpointLocation", rig.checkpoint()))
    each.flush(GUARD_S)


def test_a_micro_batch_is_a_span_with_links_to_what_it_consumed_and_is_told_to_what_it_publishes(
    rig: Any,
) -> None:
    with spans_kept() as kept:
        run(rig)
        (batch,) = named(kept, "txmq.micro_batch")
        commits = [each for each in named(kept, "txmq.commit") if "txmq.branches" in each.attributes]
    assert (batch.attributes["txmq.app_id"], batch.attributes["txmq.batch_id"]) == ("app", 0)
    assert [f"{each.context.trace_id:032x}" for each in batch.links] == [PARENT[3:35]]
    assert [(each.parent.span_id, each.attributes["txmq.branches"]) for each in commits] == [
        (batch.context.span_id, commits[0].attributes["txmq.branches"])
    ]
    flags = f"{int(batch.context.trace_flags):02x}"
    own = f"00-{batch.context.trace_id:032x}-{batch.context.span_id:016x}-{flags}"
    assert contexts(rig, "kept") == {"traced": PARENT, "plain": own}
    assert contexts(rig, "made") == {"traced": own, "plain": own}
    assert contexts(rig, "dead") == {"traced": PARENT, "plain": None}  # as they are


def recorded(rig: Any) -> set[str]:
    """The spans of a run, of a provider of this process."""
    with spans_kept() as kept:
        run(rig)
        return {each.name for each in kept.get_finished_spans()}


def test_a_provider_of_the_client_records_no_batch_over_connect_and_headers_are_what_they_were(
    rig: Any,
) -> None:
    assert ("txmq.micro_batch" in recorded(rig)) == (not CONNECT)
    assert contexts(rig, "kept")["traced"] == PARENT
    assert (contexts(rig, "made")["plain"] is None) == CONNECT


def test_without_a_tracer_headers_are_what_they_were(rig: Any) -> None:
    run(rig)
    assert contexts(rig, "kept") == {"traced": PARENT, "plain": None}
    assert contexts(rig, "made") == {"traced": None, "plain": None}
    assert contexts(rig, "dead") == {"traced": PARENT, "plain": None}


def test_the_native_sink_keeps_the_context_of_each_row(rig: Any) -> None:
    rig.declare("in", "out")
    rig.publish("in", "traced", properties=TRACED)
    rows = rig.stream("in", includeProperties=True).select("body", "properties")
    to_the_end(rig.sink(rows, routingKey="out"))
    assert contexts(rig, "out") == {"traced": PARENT}


def test_a_function_that_raises_ends_its_span_with_the_error(rig: Any) -> None:
    rig.declare("in")
    rig.publish("in", "a")

    def fn(batch: DataFrame, tx: BatchTransaction) -> None:
        raise ValueError("no")

    each = transactional(fn, url=rig.broker.url, app_id="app")
    writer = rig.stream("in").writeStream.foreachBatch(each).option("checkpointLocation", rig.checkpoint())
    with spans_kept() as kept:
        with pytest.raises(Exception, match="no"):
            to_the_end(writer)
        (batch,) = named(kept, "txmq.micro_batch")
    assert not batch.status.is_ok and batch.events[0].attributes["exception.type"] == "ValueError"
