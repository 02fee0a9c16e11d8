"""What a small micro-batch asks of the broker, the JVM, Spark and the disk, counted: more is a slower micro-batch.

A time says little on a machine that does other work, and a count is the same on each. Each case is a query of
several batches; the first one, which looks at tables and rehearses, is left out.
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
from weakref import WeakSet

import pytest
from py4j.java_gateway import GatewayClient
from pyspark.sql import DataFrame, SparkSession

from broker_core.server.flight.server import FlightServer
from broker_core.store.durable import DurableStore
from connector.batch.foreach_batch import BatchTransaction, transactional
from connector.delta import table_files
from connector.delta.table_files import TableFiles
from connector.reject import rejected_metrics
from tests.spark.test_source import ADMITTED

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

    def batches(self, first: str = "engine.claim") -> list[list[str]]:
        """What each batch but the first and the last has asked, which begin and end the query too; ``first``: call of a
        batch.
        """
        begins = [place for place, name in enumerate(self.calls) if name == first]
        found = [self.calls[begin:end] for begin, end in itertools.pairwise(begins)]
        whole = [batch for batch in found if "engine.commit_batch" in batch][1:-1]
        assert all(batch.count(ENDS) <= 1 for batch in whole), whole
        return [[call for call in batch if call != ENDS] for batch in whole]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    found = Asked()
    answer, commit = FlightServer._answer, DurableStore.commit

    def counted(server: FlightServer, caller: Any, kind: str, word: str, body: Any) -> bytes:
        if word != "hello":  # each process connects once
            found.calls.append(f"{kind}.{word}" if kind else word)
        found.here.asked = True
        try:
            return answer(server, caller, kind, word, body)
        finally:
            found.here.asked = False

    def synced(store: DurableStore, changes: Any) -> None:
        found.syncs += getattr(found.here, "asked", False)
        commit(store, changes)

    monkeypatch.setattr(FlightServer, "_answer", counted)
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


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> collections.Counter[str]:
    """What this process does with the files of a table, by the name of the operation; Delta's own is in the JVM."""
    found: collections.Counter[str] = collections.Counter()

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def count(*arguments: Any) -> Any:
            found[name] += 1
            return call(*arguments)

        return count

    for name in ("missing", "read", "stamp"):
        monkeypatch.setattr(TableFiles, name, counted(name, getattr(TableFiles, name)))
    monkeypatch.setattr(table_files, "sync", counted("fsync", table_files.sync))
    return found


def _rows(rig: Any, rows: int = 1) -> DataFrame:
    rig.declare("in", "out")
    for number in range(BATCHES):
        rig.publish("in", *[str(number)] * rows)
    stream: DataFrame = rig.stream("in", maxOffsetsPerTrigger=rows)
    return stream


def _lines(rig: Any, rows: int) -> DataFrame:
    """Those of files, one file a batch."""
    (rig.directory / "in").mkdir()
    for number in range(BATCHES):
        (rig.directory / "in" / str(number)).write_text("line\n" * rows)
    reader = rig.spark.readStream.format("text").option("maxFilesPerTrigger", 1)
    lines: DataFrame = reader.load(str(rig.directory / "in")).selectExpr("CAST(value AS binary) AS body")
    return lines


@ADMITTED
def test_a_batch_of_one_row_of_source_and_sink_is_four_calls_of_the_broker_and_four_syncs(
    rig: Any, asked: Asked
) -> None:
    rig.sink(_rows(rig).select("body"), queue="out").trigger(availableNow=True).start().awaitTermination()
    assert rig.bodies("out") == [str(number) for number in range(BATCHES)]
    calls = ["engine.claim", "read", "stage", "engine.commit_batch"]
    assert asked.batches() and all(batch == calls for batch in asked.batches()), asked.batches()
    # a claim, a read, a branch and the decision of each, and the ends of the first and the last
    assert asked.syncs <= 4 * BATCHES + 4


OPENED = "engine.open_batch"
PUBLISHED = ["engine.claim", OPENED, "read", "stage", "engine.commit_batch"]
APPENDED = [*PUBLISHED, "engine.mark_applied"]
# of a source that is not txmq: nothing asks what the app has there
OF_FILES = [OPENED, "stage", "engine.commit_batch", "engine.mark_applied"]


# ``most``: what PySpark asks to select a column and to give Spark a function, or Delta to write and add a file, and what
# is asked to know that the batch was executed as a whole
@pytest.mark.parametrize(
    ("source", "operation", "calls", "most"),
    [
        pytest.param("queue", "publish", PUBLISHED, 68, marks=ADMITTED),
        pytest.param("queue", "append", APPENDED, 64, marks=ADMITTED),
        ("files", "append", OF_FILES, 64),
    ],
)
def test_a_small_batch_in_foreachbatch_asks_the_jvm_the_broker_spark_and_the_disk_no_more_than_it_did(
    rig: Any,
    spark: SparkSession,
    asked: Asked,
    gateway: Gateway,
    files: collections.Counter[str],
    source: str,
    operation: str,
    calls: list[str],
    most: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # PySpark names every package of the session to the JVM with each function: how many is the session's affair
    monkeypatch.setattr(spark.sparkContext, "_python_includes", [])
    # while a frame of another test that counts its broken rows is alive, the plan of each batch is searched for it
    monkeypatch.setattr(rejected_metrics, "_open", WeakSet())
    table, rows = str(rig.directory / "table"), 1 if operation == "publish" else 10
    spark.createDataFrame([], "body binary").write.format("delta").save(table)

    def function(batch: DataFrame, tx: BatchTransaction) -> None:
        if operation == "publish":
            tx.publish(batch.select("body"), queue="out")
        else:
            tx.append(batch.select("body"), table)

    each = gateway.counting(transactional(function, url=rig.broker.url, app_id="app"))
    stream = _rows(rig, rows) if source == "queue" else _lines(rig, rows)
    writer = stream.writeStream.foreachBatch(each).option("checkpointLocation", rig.checkpoint())
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()
    batches = asked.batches(calls[0])
    assert batches and all(batch == calls for batch in batches), batches
    assert len(gateway.batches) == BATCHES
    for counter in gateway.batches[1:]:
        assert counter.total() <= most, counter.most_common()
    tracker = spark.sparkContext.statusTracker()
    jobs = sorted(tracker.getJobIdsForGroup(str(query.runId)))
    assert len(jobs) <= BATCHES + 1  # the first batch looks at the table
    assert [len(tracker.getJobInfo(job).stageIds) for job in jobs[1 - BATCHES :]] == [1] * (BATCHES - 1)
    assert asked.syncs <= BATCHES * len(calls) + 4  # each call is one
    # of an append: the file, its directory and those above that nobody else has made; the commit is read back
    assert files["fsync"] <= 4 * BATCHES + 2 and files["read"] <= BATCHES, files
    assert files["stamp"] <= 8 * BATCHES and files["missing"] <= 2 * BATCHES, files
