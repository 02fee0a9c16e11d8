"""A Spark session of its own, for one change of a table, with the context in which it was decided.

Delta reads the transaction of a MERGE from the settings of the session. Any other write in that session would
carry it too, and be skipped: so they are set in a session that nobody else has. What decides the meaning of
text is stored with a decision, as its context: the settings that Spark stores with a view (each that was set
and may be changed, except those of how a query runs; the time zone and ANSI even if nobody has set them),
those of Delta's in ``_DELTA``, and the current catalog and database, which say where a function is. There are
no temporary functions, views and variables, which cannot be stored: a text with one of them is refused
(``before/check_change.py``).

Not here: the settings of a transaction (``commits.py``).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from pyspark.sql import SparkSession

from connector.delta import jvm
from connector.tables.table import is_connect

_SESSION = "org.apache.spark.sql.classic.SparkSession"
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


@contextlib.contextmanager
def isolated_session(
    spark: SparkSession, settings: Mapping[str, str] | None = None, context: Mapping[str, Any] | None = None
) -> Iterator[SparkSession]:
    """A session with the settings of ``spark``, then ``context`` and ``settings``, for the time of the block.
    It is the active one of the thread: the parser takes its settings from that, and Delta's catalog keeps the
    session that is active when it is first used.

    Without ``context`` it is a clone of ``spark``. On Spark Connect it is one too: it has the temporary
    functions of ``spark``.
    """
    if is_connect(spark):
        session: Any = spark.cloneSession()  # type: ignore[attr-defined]
    elif context is None:
        session = SparkSession(spark.sparkContext, spark._jsparkSession.cloneSession())
    else:
        session = _without_temporaries(spark)
    try:
        with _active(session):
            if context is not None:
                _enter(session, context)
            for name, value in (settings or {}).items():
                session.conf.set(name, value)
            yield session
    finally:
        if is_connect(spark):
            with contextlib.suppress(Exception):  # the server forgets an idle session
                session.client.release_session()


@contextlib.contextmanager
def decided(spark: SparkSession, context: Mapping[str, object] | None) -> Iterator[SparkSession]:
    """An active session with ``context``: ``spark`` itself if it has that. ``spark`` if there is none."""
    if context is None:
        yield spark
    elif context_of(spark) == context:
        with _active(spark):
            yield spark
    else:
        with isolated_session(spark, None, context) as session:
            yield session


def _without_temporaries(spark: SparkSession) -> SparkSession:
    session = spark._jsparkSession.newSession()
    properties = jvm.new(spark, "java.util.Properties")
    properties.putAll(spark._jsparkSession.conf().getAllAsJava())
    conf = session.sessionState().conf()
    conf.clear()
    conf.setConf(properties)
    return SparkSession(spark.sparkContext, session)


@contextlib.contextmanager
def _active(session: SparkSession) -> Iterator[None]:
    if is_connect(session):
        yield
        return
    before = jvm.call(session, _SESSION, "getActiveSession")
    jvm.call(session, _SESSION, "setActiveSession", session._jsparkSession)
    try:
        yield
    finally:
        if before.isDefined():
            jvm.call(session, _SESSION, "setActiveSession", before.get())
        else:
            jvm.call(session, _SESSION, "clearActiveSession")


def context_of(spark: SparkSession) -> dict[str, Any]:
    """What of a session decides what SQL text means, as JSON."""
    catalog = spark.catalog
    return {
        "settings": _settings(spark),
        "catalog": catalog.currentCatalog(),
        "database": catalog.currentDatabase(),
    }


def _enter(session: SparkSession, context: Mapping[str, Any]) -> None:
    """Gives a session what ``context_of`` returned. Raises AnalysisException, for example if the database was
    dropped.
    """
    settings: Mapping[str, str] = context["settings"]
    there = _settings(session)
    for name in there.keys() - settings.keys():
        session.conf.unset(name)
    for name, value in settings.items():
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
    conf = spark._jsparkSession.sessionState().conf()
    props = jvm.field(spark, _VIEWS, "MODULE$").sqlConfigsToProps(conf, "")
    text = jvm.json_mapper(spark).writeValueAsString(jvm.call(spark, jvm.CONVERTERS, "asJava", props))
    return {name: value for name, value in json.loads(str(text)).items() if _decides(name)}


def _decides(name: str) -> bool:
    if name.startswith("spark.sql."):
        return not name.startswith(_RUNS)
    return name.startswith(_DELTA)


@lru_cache(maxsize=256)
def _is_modifiable(spark: SparkSession, name: str) -> bool:
    return bool(spark.conf.isModifiable(name))
