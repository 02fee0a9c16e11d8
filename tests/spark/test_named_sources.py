"""Sources with names (Spark 4.2, offset log of version 2): queues are added, moved and dropped in a running app, each
message once, and what does not fit is one clear stop. What Spark does with the checkpoint of version 1 is Spark's.
"""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import DataFrame

from broker_core.core.errors import CheckpointMismatch, cause
from connector.batch.batch_transaction import BatchTransaction
from connector.batch.foreach_batch import transactional
from tests.spark.conftest import settings
from tests.spark.pipelines import delta_rows

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.usefixtures("planned_once")]

NAMED = {
    "spark.sql.streaming.queryEvolution.enableSourceEvolution": "true",
    "spark.sql.streaming.offsetLog.formatVersion": "2",
}


def test_queues_are_added_moved_and_dropped_by_name_and_each_message_comes_once(rig: Any) -> None:
    table, sent = rig.directory / "table", 0
    rig.declare("a", "b")

    def each(batch: DataFrame, tx: BatchTransaction) -> None:
        tx.append(batch.selectExpr("CAST(body AS STRING) AS v"), str(table))

    def send() -> None:
        nonlocal sent
        sent += 1
        for queue in "ab":
            rig.publish(queue, f"{queue}{sent}")

    def run(*sources: tuple[str, str], checkpoint: str = "named", **more: Any) -> None:
        frames = [
            rig.spark.readStream.name(name).format("txmq").options(url=rig.broker.url, queue=queue, appId="app", **more).load()
            for name, queue in sources
        ]  # fmt: skip
        frame = frames[0] if len(frames) == 1 else frames[0].union(frames[1])
        done = transactional(
            each, url=rig.broker.url, app_id="app", on_new_checkpoint=more.get("onNewCheckpoint", "fail")
        )
        writer = frame.writeStream.foreachBatch(done).option(
            "checkpointLocation", str(rig.directory / checkpoint)
        )
        query = writer.trigger(availableNow=True).start()
        query.awaitTermination()

    def values() -> list[str]:
        return sorted(row["v"] for row in delta_rows(table))

    def stopped(text: str, *sources: tuple[str, str]) -> None:
        before = values()
        with pytest.raises(Exception) as raised:
            run(*sources)
        error = cause(raised.value)
        assert isinstance(error, CheckpointMismatch) and text in str(error), raised.value
        assert values() == before

    with settings(rig.spark, NAMED):
        send()
        run(("one", "a"))
        assert values() == ["a1"]
        send()
        run(("two", "b"), ("one", "a"))  # one more, in front
        assert values() == ["a1", "a2", "b1", "b2"]
        send()
        stopped(
            "a new checkpoint starts under appId", ("one", "a"), ("three", "b")
        )  # another name of the queue
        stopped("the checkpoint holds offsets of a", ("one", "b"), ("two", "a"))  # the names change places
        run(("one", "a"))  # one less
        assert values() == ["a1", "a2", "a3", "b1", "b2"]
        send()
        again = (("one", "a"), ("three", "b"))
        run(*again, checkpoint="again", onNewCheckpoint="resume")  # as both errors say
    assert values() == [f"{queue}{number}" for queue in "ab" for number in range(1, 5)]
    assert rig.bodies("a") == rig.bodies("b") == []


def test_a_batch_that_did_not_end_goes_on_with_a_new_checkpoint(rig: Any) -> None:
    """Spark 4.2.0 looks for the shuffle partitions of the entry before, which version 2 does not have."""
    table, dies = rig.directory / "table", rig.notes()
    rig.declare("a")

    def each(batch: DataFrame, tx: BatchTransaction) -> None:
        tx.append(batch.selectExpr("CAST(body AS STRING) AS v"), str(table))
        if len(dies) == 1:
            raise RuntimeError("dies")

    def run(checkpoint: str, on_new_checkpoint: str = "fail") -> None:
        options = {"queue": "a", "appId": "app", "onNewCheckpoint": on_new_checkpoint}
        frame = rig.spark.readStream.name("one").format("txmq").options(url=rig.broker.url, **options).load()
        done = transactional(each, url=rig.broker.url, app_id="app", on_new_checkpoint=on_new_checkpoint)
        writer = frame.writeStream.foreachBatch(done)
        writer = writer.option("checkpointLocation", str(rig.directory / checkpoint))
        writer.trigger(availableNow=True).start().awaitTermination()

    with settings(rig.spark, NAMED):
        rig.publish("a", "1")
        run("named")
        rig.publish("a", "2")
        dies.append(True)
        with pytest.raises(Exception, match="dies"):
            run("named")
        dies.append(True)
        with pytest.raises(Exception, match=r"None\.get"):
            run("named")
        assert rig.bodies("a") == ["2"]
        run("again", "resume")
    assert sorted(row["v"] for row in delta_rows(table)) == ["1", "2"]
    assert rig.bodies("a") == []
