"""What of a session decides what SQL text means: stored with a decision, and set where that is applied.

The settings are those that Spark stores with a view: each that was set and may be changed, except those of
how a query runs; the time zone and ANSI even if nobody has set them. Of Delta's settings, those in
``_DELTA``. And the current catalog and database, which say where a function is.

Not here: temporary functions, views and variables, which cannot be stored. A text with one of them is refused
(``before/check_change.py``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from pyspark.sql import SparkSession

from connector.delta import jvm
from connector.tables.table import is_connect

_VIEWS = "org.apache.spark.sql.execution.command.ViewHelper$"
_ALWAYS = ("spark.sql.session.timeZone", "spark.sql.ansi.enabled")
# Of how a query runs: what Spark leaves out for a view, and the like.
_RUNS = (
    "spark.sql.adaptive.", "spark.sql.artifact.", "spark.sql.autoBroadcastJoinThreshold",
    "spark.sql.catalog.", "spark.sql.codegen.", "spark.sql.execution.", "spark.sql.files.",
    "spark.sql.hive.convert", "spark.sql.maven.", "spark.sql.optimizer.", "spark.sql.shuffle.",
    "spark.sql.streaming.", "spark.sql.ui.", "spark.sql.view.",
)  # fmt: skip
_DELTA = tuple(
    f"spark.databricks.delta.{name}"
    for name in (
        "constraints.",
        "dynamicPartitionOverwrite.",
        "generatedColumn.",
        "insert.",
        "legacy.",
        "merge.insert.",
        "merge.preserveNullSourceStructs",
        "properties.defaults.",
        "replaceWhere.",
        "resolveMergeUpdateStructsByName.",
        "schema.autoMerge.",
        "schemaEvolution.",
        "typeWidening.allow",
        "write.utcTimestampPartitionValues",
    )
)


def of(spark: SparkSession) -> dict[str, Any]:
    """As JSON."""
    catalog = spark.catalog
    return {
        "settings": _settings(spark),
        "catalog": catalog.currentCatalog(),
        "database": catalog.currentDatabase(),
    }


def enter(session: SparkSession, context: Mapping[str, Any]) -> None:
    """Gives a session the context that ``of`` returned. Raises AnalysisException, for example if the database
    was dropped.
    """
    wanted: Mapping[str, str] = context["settings"]
    there = _settings(session)
    for name in there.keys() - wanted.keys():
        session.conf.unset(name)
    for name, value in wanted.items():
        if there.get(name) != value:
            session.conf.set(name, value)
    catalog = session.catalog
    if catalog.currentCatalog() != context["catalog"]:
        catalog.setCurrentCatalog(context["catalog"])
    if catalog.currentDatabase() != context["database"]:
        catalog.setCurrentDatabase(context["database"])


def _settings(spark: SparkSession) -> dict[str, str]:
    if is_connect(spark):
        found = {
            name: value
            for name, value in spark.conf.getAll.items()
            if _decides(name) and _is_modifiable(spark, name)
        }
        return {**found, **{name: str(spark.conf.get(name)) for name in _ALWAYS}}
    given: Any = spark
    conf = given._jsparkSession.sessionState().conf()
    held = jvm.field(spark, _VIEWS, "MODULE$").sqlConfigsToProps(conf, "")
    text = jvm.json_mapper(spark).writeValueAsString(jvm.call(spark, jvm.CONVERTERS, "asJava", held))
    return {name: value for name, value in json.loads(str(text)).items() if _decides(name)}


def _decides(name: str) -> bool:
    if name.startswith("spark.sql."):
        return not name.startswith(_RUNS)
    return name.startswith(_DELTA)


@lru_cache(maxsize=256)
def _is_modifiable(spark: SparkSession, name: str) -> bool:
    return bool(spark.conf.isModifiable(name))
