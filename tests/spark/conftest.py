"""A fresh broker per test, beside the Spark session of the test process (``tests/conftest.py``).

Not here: sessions of crash tests, which run in child processes.
Invariant: a test ends the queries it starts.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from broker_core.client.broker import BrokerClient
from broker_core.core import failpoint
from broker_core.launcher import Broker
from connector.delta.resolve import resolve
from connector.delta.table_files import DISK
from tests.spark import classic
from tests.spark.jobs import INTERPRETED, PLANNED_ONCE, to_the_end
from tests.spark.pipelines import delta_rows
from tests.spark.sessions import CONNECT, Notes


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items if CONNECT else ():
        own = isinstance(item, pytest.Function) and item.path.parent == Path(__file__).parent
        if own and (why := classic.reason(item)) is not None:
            item.add_marker(pytest.mark.skip(reason=f"classic: {why}"))


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    failpoint.disarm()


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with Broker.open(tmp_path / "broker") as broker:
        yield broker


@pytest.fixture
def interpreted(spark: SparkSession) -> Iterator[None]:
    """Queries run without being compiled: over a few rows, compiling them is most of what they cost. Those of
    test_batch.py, test_embedded.py and test_secrets.py are compiled.
    """
    with in_every_session(spark, INTERPRETED):
        yield


@pytest.fixture
def planned_once(spark: SparkSession) -> Iterator[None]:
    """As ``interpreted``, and the stages of a query are planned before it runs, all of them."""
    with in_every_session(spark, PLANNED_ONCE):
        yield


@contextlib.contextmanager
def settings(spark: SparkSession, chosen: Mapping[str, str]) -> Iterator[None]:
    for name, value in chosen.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name in chosen:
            spark.conf.unset(name)


@contextlib.contextmanager
def in_every_session(spark: SparkSession, chosen: Mapping[str, str]) -> Iterator[None]:
    """As ``settings``, also in new sessions, such as that of a ledger. A new session has only what its context has."""
    if CONNECT:  # its server has all of them
        yield
        return
    given: Any = spark
    context = given._jsparkSession.sharedState().conf()
    with settings(spark, chosen):
        for name, value in chosen.items():
            context.set(name, value)
        try:
            yield
        finally:
            for name in chosen:
                context.remove(name)


class Rig:
    """A fresh broker, with the few words that most tests need."""

    def __init__(self, broker: Broker, spark: SparkSession, directory: Path) -> None:
        self.broker = broker
        self.spark = spark
        self.directory = directory

    def declare(self, *queues: str) -> None:
        with self.broker.channel() as channel:
            for queue in queues:
                channel.queue_declare(queue)

    def publish(self, queue: str, *bodies: str, properties: bytes = b"") -> None:
        """All of it in one transaction."""
        with self.broker.channel() as channel:
            channel.tx_select()
            for body in bodies:
                channel.publish(body.encode(), routing_key=queue, properties=properties)
            channel.tx_commit()

    def bodies(self, queue: str) -> list[str]:
        """What stands in a queue and is not settled, in order."""
        engine = self.broker.engine
        slices = [(log, one.start, one.end) for log, one in engine.available([queue]).items()]
        return [body.decode() for batch in engine.browse(slices) for body in batch.column("body").to_pylist()]

    def rows_in(self, table: str) -> list[dict[str, Any]]:
        """What a Delta table has, without the two jobs that Spark runs to know it."""
        return delta_rows(Path(resolve(self.spark, table).location.removeprefix(DISK)))

    def stream(self, queue: str, app_id: str = "app", **options: Any) -> DataFrame:
        return (
            self.spark.readStream.format("txmq")
            .options(url=self.broker.url, queue=queue, appId=app_id, **options)
            .load()
        )

    def look(self, queue: str, **options: Any) -> DataFrame:
        return self.spark.read.format("txmq").options(url=self.broker.url, queue=queue, **options).load()

    def checkpoint(self, name: str = "checkpoint") -> str:
        return str(self.directory / name)

    def notes(self) -> Notes:
        """A list that a function of foreachBatch may fill."""
        return Notes(self.directory / f"{uuid.uuid4().hex}.notes")

    def __reduce__(self) -> Any:
        """In another process: what a function of foreachBatch asks."""
        return far, (self.broker.url, self.directory)

    def collect(self, stream: DataFrame, checkpoint: str = "checkpoint", **trigger: Any) -> list[list[Row]]:
        """Run ``stream`` into a list, one item per micro-batch; by default until all that is there has been
        read.
        """
        batches = self.notes()
        writer = stream.writeStream.foreachBatch(lambda batch, _id: batches.append(batch.collect()))
        writer = writer.option("checkpointLocation", self.checkpoint(checkpoint))
        if trigger:
            writer.trigger(**trigger).start().awaitTermination()
        else:
            to_the_end(writer)
        return list(batches)

    def sink(
        self, stream: DataFrame, app_id: str = "app", checkpoint: str = "checkpoint", **options: Any
    ) -> DataStreamWriter:
        writer = stream.writeStream.format("txmq").options(url=self.broker.url, appId=app_id, **options)
        return writer.option("checkpointLocation", self.checkpoint(checkpoint))


class FarBroker:
    def __init__(self, url: str) -> None:
        self.url = url
        self.engine = BrokerClient(url)
        self.channel = self.engine.channel


def far(url: str, directory: Path) -> Rig:
    broker: Any = FarBroker(url)
    none: Any = None  # the session of a batch is another one
    return Rig(broker, none, directory)


@pytest.fixture
def rig(broker: Broker, spark: SparkSession, tmp_path: Path) -> Iterator[Rig]:
    yield Rig(broker, spark, tmp_path)
    for query in spark.streams.active:  # what a failed test leaves running, before its broker goes
        query.stop()
