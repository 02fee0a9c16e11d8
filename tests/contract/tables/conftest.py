"""One bench per test and table format. A second format adds its bench to ``BENCHES``, and passes the same tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from connector.delta.format import Delta
from tests.contract.tables.bench import COLUMNS, TableBench
from tests.spark.conftest import in_every_session
from tests.spark.jobs import PLANNED_ONCE


class DeltaBench(TableBench):
    def __init__(self, spark: SparkSession, place: Path) -> None:
        super().__init__(spark, place)
        self.tables = Delta()

    def another(self) -> Delta:
        return Delta()

    def create(self, name: str, columns: str = COLUMNS, *, append_only: bool = False) -> str:
        table = str(self.place / name)
        properties = f"TBLPROPERTIES ('delta.appendOnly' = '{str(append_only).lower()}')"
        self.spark.sql(f"CREATE TABLE delta.`{table}` ({columns}) USING delta {properties}")
        return table

    def versions(self, table: str) -> int:
        place = self.found(table).location.removeprefix("file:")
        return len(list(Path(place, "_delta_log").glob("*.json")))


BENCHES: dict[str, Callable[[SparkSession, Path], TableBench]] = {"delta": DeltaBench}


@pytest.fixture(params=list(BENCHES))
def bench(request: pytest.FixtureRequest, spark: SparkSession, tmp_path: Path) -> Iterator[TableBench]:
    with in_every_session(spark, PLANNED_ONCE):
        yield BENCHES[request.param](spark, tmp_path)
