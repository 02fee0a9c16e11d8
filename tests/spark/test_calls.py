"""What a micro-batch of one row asks of the broker and of the JVM, counted: more is a slower micro-batch.

A time says little on a machine that does other work, and a count is the same on each. Each case is a query of
several batches of one row; the first ones, which look at tables and rehearse, are left out.
"""

from __future__ import annotations

import collections
import itertools
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from py4j.java_gateway import GatewayClient
from pyspark.sql import DataFrame, SparkSession

from broker_core.server.flight.server import FlightServer
from broker_core.store.durable import DurableStore
from connector.batch.foreach_batch import BatchTransaction, transactional

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("planned_once")]

BATCHES = 4
# the ends of the queues, for the progress of a query: at most every second
ENDS = "engine.available"
CONNECTOR = str(Path(__file__).parents[2] / "connector")


class Asked:
    """The calls that the broker of a test got, and how often each made something durable."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.syncs = 0
        self.here = threading.local()  # whether a call is under way in this thread

    def batches(self) -> list[list[str]]:
        """What each batch but the first and the last has asked, which begin and end the query too."""
        begins = [place for place, name in enumerate(self.calls) if name == "engine.claim"]
        found = [self.calls[first:last] for first, last in itertools.pairwise(begins)]
        whole = [batch for batch in found if "engine.commit_batch" in batch][1:-1]
        assert all(batch.count(ENDS) <= 1 for batch in whole), whole
        return [[call for call in batch if call != ENDS] for batch in whole]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    found = Asked()
    do_action, commit = FlightServer.do_action, DurableStore.commit

    def counted(server: FlightServer, context: Any, action: Any) -> Any:
        if action.type not in ("hello", "prove"):  # each process connects once
            found.calls.append(action.type)
        found.here.asked = True
        try:
            return do_action(server, context, action)
        finally:
            found.here.asked = False

    def synced(store: DurableStore, changes: Any) -> None:
        found.syncs += getattr(found.here, "asked", False)
        commit(store, changes)

    monkeypatch.setattr(FlightServer, "do_action", counted)
    monkeypatch.setattr(DurableStore, "commit", synced)
    return found


class Gateway:
    """The round trips of one thread to the JVM, by who asked for them."""

    def __init__(self) -> None:
        self.here = threading.local()
        self.batches: list[collections.Counter[str]] = []

    def note(self) -> None:
        counter: collections.Counter[str] | None = getattr(self.here, "counter", None)
        if counter is not None:
            counter[_asking()] += 1

    def counting(self, function: Callable[[DataFrame, int], None]) -> Callable[[DataFrame, int], None]:
        def counted(batch: DataFrame, batch_id: int) -> None:
            self.here.counter = collections.Counter()
            try:
                function(batch, batch_id)
                self.batches.append(self.here.counter)
            finally:
                self.here.counter = None

        return counted


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Gateway:
    found = Gateway()
    send = GatewayClient.send_command

    def counted(client: GatewayClient, command: str, *more: Any, **named: Any) -> Any:
        if not command.startswith("m\n"):  # Python forgets a Java object when its collector likes
            found.note()
        return send(client, command, *more, **named)

    monkeypatch.setattr(GatewayClient, "send_command", counted)
    return found


def _asking() -> str:
    """The innermost function of the connector that is under way."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(CONNECTOR):
            return f"{code.co_filename.removeprefix(CONNECTOR)}:{code.co_name}"
        frame = frame.f_back
    return "the function of the user"


def _rows(rig: Any) -> DataFrame:
    rig.declare("in", "out")
    for number in range(BATCHES):
        rig.publish("in", str(number))
    stream: DataFrame = rig.stream("in", maxOffsetsPerTrigger=1)
    return stream


def test_a_batch_of_one_row_of_source_and_sink_is_four_calls_of_the_broker_and_four_syncs(
    rig: Any, asked: Asked
) -> None:
    rig.sink(_rows(rig).select("body"), queue="out").trigger(availableNow=True).start().awaitTermination()
    assert rig.bodies("out") == [str(number) for number in range(BATCHES)]
    calls = ["engine.claim", "read", "stage", "engine.commit_batch"]
    assert asked.batches() and all(batch == calls for batch in asked.batches()), asked.batches()
    # a claim, a read, a branch and the decision of each, and the ends of the first and the last
    assert asked.syncs <= 4 * BATCHES + 4


# ``most``: what PySpark asks to select a column and to give Spark a function, or Delta to write and add a file, and what
# is asked to know that the batch was executed as a whole
@pytest.mark.parametrize(
    ("operation", "calls", "most"),
    [
        ("publish", ["engine.claim", "engine.open_batch", "read", "stage", "engine.commit_batch"], 68),
        (
            "append",
            [
                "engine.claim",
                "engine.open_batch",
                "read",
                "stage",
                "engine.commit_batch",
                "engine.mark_applied",
            ],
            64,
        ),
    ],
)
def test_a_batch_of_one_row_in_foreachbatch_asks_the_jvm_and_the_broker_no_more_than_it_did(
    rig: Any,
    spark: SparkSession,
    asked: Asked,
    gateway: Gateway,
    operation: str,
    calls: list[str],
    most: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # PySpark names every package of the session to the JVM with each function: how many is the session's affair
    monkeypatch.setattr(spark.sparkContext, "_python_includes", [])
    table = str(rig.directory / "table")
    spark.createDataFrame([], "body binary").write.format("delta").save(table)

    def function(batch: DataFrame, tx: BatchTransaction) -> None:
        if operation == "publish":
            tx.publish(batch.select("body"), queue="out")
        else:
            tx.append(batch.select("body"), table)

    each = gateway.counting(transactional(function, url=rig.broker.url, app_id="app"))
    writer = _rows(rig).writeStream.foreachBatch(each).option("checkpointLocation", rig.checkpoint())
    writer.trigger(availableNow=True).start().awaitTermination()
    assert asked.batches() and all(batch == calls for batch in asked.batches()), asked.batches()
    assert len(gateway.batches) == BATCHES
    for counter in gateway.batches[1:]:
        assert counter.total() <= most, counter.most_common()
