"""What a client of Spark Connect learns of a query from the plan of its batch, and in no other way.

Not here: what is made of it (``offset_log.py``).
Invariant: what a plan does not say is not known.
"""

from __future__ import annotations

import contextlib
import io
import logging
import re
from typing import TYPE_CHECKING

from pyspark.sql import SparkSession

from connector.errors import error_summary

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

log = logging.getLogger("txmq")

# among the options of the sink, whose order is that of a map
_CHECKPOINT = re.compile(
    r"[\[ ]checkpointLocation=(.*?)(?:, \w[\w.]*=|\], |\]?$)", re.IGNORECASE | re.MULTILINE
)
_TXMQ = re.compile(r"~StreamingDataSourceV2ScanRelation\[.*\] txmq$")

# Active when the function was unpickled. Since Spark 4.3 a batch has a clone of it, in which no query runs.
root: SparkSession | None = None


def running(spark: SparkSession) -> list[StreamingQuery]:
    """The queries of the session."""
    return spark.streams.active or (root.streams.active if root is not None else [])


def plans(spark: SparkSession, query_id: str) -> list[str]:
    """Those of a query; empty if the session does not run it."""
    return [explained(query) for query in running(spark) if query.id == query_id]


def explained(query: StreamingQuery) -> str:
    """The plans of the batch that a query executes; "" where a platform does not show them."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        try:
            query.explain(extended=True)
        except Exception as error:  # of Spark
            log.debug("query %s shows no plan: %s", query.id, error_summary(error))
    return output.getvalue()


def checkpoint_in(plan: str) -> str | None:
    """The option ``checkpointLocation`` of the query, as far as it can be told from the other options."""
    found = _CHECKPOINT.search(plan)
    return found and found[1]


def other_sources(plan: str) -> list[str]:
    """The nodes of a batch whose rows may be of a source that is not txmq, or of one without new rows."""
    # what streams has a mark, but for the scan of a source of the first kind (files)
    lines = plan.partition("== Optimized")[0].splitlines()
    nodes = [(len(line), node) for line in lines if (node := line.lstrip(" :+-")).startswith("~")]
    depths = [length - len(node) for length, node in nodes]
    last = (node for (_, node), at, below in zip(nodes, depths, [*depths[1:], 0]) if below <= at)
    return [node for node in last if not _TXMQ.match(node)] if nodes else [plan]
