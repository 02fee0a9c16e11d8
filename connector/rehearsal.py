"""A rehearsal of an append on a temporary table, to test whether Delta accepts the schema and the options.

Not here: the values (fit.py). Not on Spark Connect, where a client cannot write the log of a table.

Invariant: the real table is not changed, and the temporary table is deleted.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from broker_core.errors import OptionError
from connector.table import Table, is_connect, snapshot_at

# Tables whose commits go through a catalog: a copy of their log is not a table.
_COORDINATED = ("catalogManaged", "catalogOwned", "coordinatedCommits")


def rehearse(
    spark: SparkSession,
    table: Table,
    schema: StructType,
    options: Mapping[str, str],
    partition_by: Sequence[str],
) -> None:
    """Append no rows to a new table with the protocol and metadata of ``table``. Raises OptionError with
    Delta's error.
    """
    if is_connect(spark):
        return
    log: list[str] = []
    if table.exists:
        snapshot = snapshot_at(spark, table.location)
        actions: list[Any] = [snapshot.protocol(), snapshot.metadata()]
        domains = snapshot.domainMetadata().iterator()
        while domains.hasNext():
            actions.append(domains.next())
        log = [str(action.json()) for action in actions]
        if any(word in log[0] for word in _COORDINATED):
            return
    place = Path(tempfile.mkdtemp(prefix="txmq-rehearsal-"))
    try:
        if log:
            told = json.dumps(
                {"commitInfo": {"timestamp": 0, "operation": "REHEARSAL", "operationParameters": {}}}
            )
            (place / "_delta_log").mkdir()
            (place / "_delta_log" / f"{0:020d}.json").write_text("\n".join([told, *log]) + "\n")
        writer = (
            spark.createDataFrame([], schema).write.format("delta").mode("append").options(**dict(options))
        )
        if partition_by:
            writer = writer.partitionBy(*partition_by)
        writer.save(f"file:{place}")
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        told = next(
            (line for line in lines if "[" in line and "]" in line),
            lines[0] if lines else type(error).__name__,
        )
        told = told.replace(f"file:{place}", table.name).replace(str(place), table.name)
        raise OptionError(
            f"append to {table.name!r}: Delta would refuse it after the decision: {told[:500]}"
        ) from error
    finally:
        shutil.rmtree(place, ignore_errors=True)
