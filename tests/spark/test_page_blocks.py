"""The blocks of the pages that need a session, as they stand there, with what they take for granted."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from broker_core.launcher import Broker
from tests.page_blocks import code
from tests.spark.conftest import Rig
from tests.spark.pipelines import delta_rows
from tests.spark.test_tables_changed import Driver

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.usefixtures("planned_once")]


@pytest.fixture
def page(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """A directory in which ``data`` is a broker; the JVM has another working directory, so tables get a place."""
    monkeypatch.chdir(tmp_path)
    with Broker.open("data") as broker:
        yield Rig(broker, spark, tmp_path)
        for query in spark.streams.active:
            query.stop()


def run(page: Rig, block: str, **names: Any) -> dict[str, Any]:
    block = re.sub(r'"(lake/\w+|checkpoint[-\w]*(?<!Location))"', rf'"{page.directory}/\1"', block)
    for address in ("txmq://127.0.0.1:5673", "txmq://localhost:5673"):
        block = block.replace(address, page.broker.url)
    found: dict[str, Any] = {"spark": page.spark, **names}
    exec(block, found)
    for query in page.spark.streams.active:
        query.processAllAvailable()
        query.stop()
    return found


def test_the_merges_of_the_page(page: Rig) -> None:
    spark, lake = page.spark, page.directory / "lake"
    columns = "id INT, name STRING, visits INT, gone BOOLEAN, day DATE"
    for table, held in (("customers", columns), ("letters", "customer INT"), ("days", columns)):
        spark.sql(f"CREATE TABLE delta.`{lake / table}` ({held}) USING delta")
    spark.sql(f"INSERT INTO delta.`{lake / 'letters'}` VALUES (1), (2)")
    customers = run(page, code("docs/merge.md", "def customers("))["customers"]
    bodies = [
        '{"id": 1, "name": "a", "visits": 3, "day": "2026-01-01"}',
        '{"id": 2, "gone": true, "visits": 1}',
    ]
    rows = spark.createDataFrame([(body,) for body in bodies], "body STRING")
    assert Driver(page, "customers", customers).batch(0, rows) is None
    assert sorted(row["id"] for row in delta_rows(lake / "customers")) == [1, 2]
    assert [row["customer"] for row in spark.read.format("delta").load(str(lake / "letters")).collect()] == [
        1
    ]
    assert [row["id"] for row in delta_rows(lake / "days")] == [1]
