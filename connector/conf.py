"""Spark settings that measurably help this connector.

Not here: settings that a job needs to run at all. Invariant: every setting has a figure; what helps nobody is not recommended.
"""

from __future__ import annotations


def recommended_conf() -> dict[str, str]:
    """Spark settings by name, for ``SparkSession.builder.config``; each may be left out or overridden."""
    return {
        # The JVM and its Python workers talk over Unix sockets instead of TCP, whose delayed acknowledgements cost a micro-batch 50 ms.
        "spark.python.unix.domain.socket.enabled": "true",
        # Delta reads the state of a table in 50 tasks by default, which for small tables is the largest part of a commit.
        "spark.databricks.delta.snapshotPartitions": "1",
    }
