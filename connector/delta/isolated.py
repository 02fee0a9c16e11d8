"""A Spark session of its own, for one change of a table.

Delta reads the transaction of a MERGE from the settings of the session. Any other write in that session would
carry it too, and be skipped: so they are set in a session that nobody else has. SQL text means there what it
meant when it was decided: the context is that of the decision, and there are no temporary functions, views
and variables, which another process does not have.

Not here: the settings (``after/make_change.py``), the context (``sql_context.py``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from pyspark.sql import SparkSession

from connector.delta import jvm, sql_context
from connector.tables.table import is_connect

_SESSION = "org.apache.spark.sql.classic.SparkSession"


@contextlib.contextmanager
def isolated(
    spark: SparkSession, settings: Mapping[str, str] | None = None, context: Mapping[str, Any] | None = None
) -> Iterator[SparkSession]:
    """A session with the settings of ``spark``, then ``context`` and ``settings``, for the time of the block.
    It is the active one of the thread: the parser takes its settings from that, and Delta's catalog keeps the
    session that is active when it is first used.

    Without ``context`` it is a clone of ``spark``. On Spark Connect it is one too: it has the temporary
    functions of ``spark``.
    """
    given: Any = spark
    if is_connect(spark):
        session: Any = given.cloneSession()
    elif context is None:
        session = SparkSession(spark.sparkContext, given._jsparkSession.cloneSession())
    else:
        session = _without_temporaries(spark)
    try:
        with _active(session):
            if context is not None:
                sql_context.enter(session, context)
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
    elif sql_context.of(spark) == context:
        with _active(spark):
            yield spark
    else:
        with isolated(spark, None, context) as session:
            yield session


def _without_temporaries(spark: SparkSession) -> SparkSession:
    given: Any = spark
    made = given._jsparkSession.newSession()
    properties = jvm.new(spark, "java.util.Properties")
    properties.putAll(given._jsparkSession.conf().getAllAsJava())
    conf = made.sessionState().conf()
    conf.clear()
    conf.setConf(properties)
    return SparkSession(spark.sparkContext, made)


@contextlib.contextmanager
def _active(session: SparkSession) -> Iterator[None]:
    if is_connect(session):
        yield
        return
    given: Any = session
    before = jvm.call(session, _SESSION, "getActiveSession")
    jvm.call(session, _SESSION, "setActiveSession", given._jsparkSession)
    try:
        yield
    finally:
        if before.isDefined():
            jvm.call(session, _SESSION, "setActiveSession", before.get())
        else:
            jvm.call(session, _SESSION, "clearActiveSession")
