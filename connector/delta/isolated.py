"""A Spark session of its own, with the settings, views and functions of another one.

Delta reads the transaction of a MERGE from the settings of the session. Any other write in that session would
carry it too, and be skipped: so they are set in a clone, which nobody else has.

Not here: the settings (``changing.py``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from pyspark.sql import SparkSession

from connector.table import is_connect


@contextlib.contextmanager
def isolated(spark: SparkSession, settings: Mapping[str, str] | None = None) -> Iterator[SparkSession]:
    """A clone of ``spark`` with ``settings``, for the time of the context."""
    given: Any = spark
    if is_connect(spark):
        clone: Any = given.cloneSession()
    else:
        clone = SparkSession(spark.sparkContext, given._jsparkSession.cloneSession())
    try:
        for name, value in (settings or {}).items():
            clone.conf.set(name, value)
        yield clone
    finally:
        if is_connect(spark):
            with contextlib.suppress(Exception):  # the server forgets an idle session
                clone.client.release_session()
