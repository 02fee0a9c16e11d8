"""Spark settings that measurably help this connector.

Not here: settings that a job requires.
Invariant: the benefit of every setting was measured.
"""

from __future__ import annotations

from connector import workers


def recommended_conf() -> dict[str, str]:
    """Spark settings by name, for ``SparkSession.builder.config``; each may be left out or overridden.

    Call it before the session starts. If PYSPARK_PYTHON is not set, and the ``python3`` that Spark would run
    then cannot load txmq, this sets it to the Python of this process.
    """
    workers.choose()  # no setting of a session does that
    return {
        # The JVM and its Python workers use Unix sockets: with TCP, delayed acknowledgements add 50 ms to a
        # micro-batch.
        "spark.python.unix.domain.socket.enabled": "true",
        # By default, Delta reads the state of a table in 50 tasks, which is the largest part of a small
        # table's commit.
        "spark.databricks.delta.snapshotPartitions": "1",
        # Spark refuses for ever to start a query whose driver was killed in the first write of offsets,
        # because of the temporary file that it leaves.
        "spark.sql.streaming.verifyCheckpointDirectoryEmptyOnStart": "false",
    }
