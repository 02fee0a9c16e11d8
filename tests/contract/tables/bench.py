"""Tables of one format, and the words of an app that writes to them, for the contract of all formats."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from connector.sql import nullable
from connector.tables.change import Change
from connector.tables.commit_id import CommitId, txn_app_id
from connector.tables.table import Table, in_sql
from connector.tables.table_format import Attempt, CheckResult, TableFormat, Writing

APP = "alerts"
COLUMNS = "id STRING, n INT"

Row = tuple[str | None, int | None]


class TableBench(ABC):
    """Tables have the columns id and n."""

    tables: TableFormat

    def __init__(self, spark: SparkSession, place: Path) -> None:
        self.spark = spark
        self.place = place

    # -- of each format --------------------------------------------------------------------------------------
    @abstractmethod
    def another(self) -> TableFormat:
        """The format in another process."""

    @abstractmethod
    def create(self, name: str, columns: str = COLUMNS, *, append_only: bool = False) -> str:
        """An empty table, and its spelling."""

    @abstractmethod
    def versions(self, table: str) -> int:
        """How many commits the table has had."""

    # -- other programs --------------------------------------------------------------------------------------
    def sql(self, statement: str, table: str) -> None:
        self.spark.sql(statement.format(table=in_sql(table)))

    def insert(self, table: str, *rows: Row) -> None:
        values = ", ".join(str(row) for row in rows)
        self.sql(f"INSERT INTO {{table}} (id, n) VALUES {values}", table)

    # -- an app ----------------------------------------------------------------------------------------------
    def found(self, table: str) -> Table:
        return self.tables.resolve(self.spark, table)

    def rows(self, table: str) -> list[Row]:
        """What a reader sees, in order."""
        seen = self.tables.read(self.spark, self.found(table)).select("id", "n").collect()
        return sorted((row["id"], row["n"]) for row in seen)

    def given(self, *rows: Row) -> Callable[[SparkSession], DataFrame]:
        return lambda session: session.createDataFrame(list(rows), COLUMNS).coalesce(1)

    def once(self, table: str, sequence: int, step: int = 0, token: str = "", app: str = APP) -> CommitId:
        """A step of a batch that was decided now."""
        txn = txn_app_id(app, "broker", self.found(table).location, step)
        batch = {"app_id": app, "sequence": sequence, "token": token or f"t{sequence}", "txn_app_id": txn}
        return CommitId(
            txn, sequence, {**batch, "query_id": "q", "batch_id": sequence}, int(time.time() * 1e6)
        )

    def attempt(self, table: str, sequence: int, token: str) -> Attempt:
        return Attempt(APP, self.once(table, sequence).txn_app_id, sequence, token)

    def append(self, table: str, once: CommitId, *rows: Row, **more: Any) -> int | None:
        return self.tables.append(self.spark, self.found(table), self.given(*rows), once, **more)

    def change(self, table: str, change: Change, once: CommitId, *rows: Row) -> int | None:
        return self.tables.change(self.spark, self.found(table), change, self.given(*rows), once)

    def check(self, table: str, rows: DataFrame, change: Change | None = None, **options: str) -> CheckResult:
        """Of an append, or a change."""
        schema = nullable(rows.schema)
        if change is None:
            return self.tables.check_append(self.spark, self.found(table), schema, Writing(options))
        return self.tables.check_change(self.spark, self.found(table), schema, change)
