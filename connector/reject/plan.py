"""What Spark's physical plan of a frame says about the batch that it was made from.

Not here: executing it (``stream/staging.py``).
Invariant: the plan is private to Spark, so whatever is not certain is answered with no.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame

from connector.tables.table import is_connect

if TYPE_CHECKING:
    from py4j.java_gateway import JavaObject

# Plan nodes that read every row of their child (not: limits, joins, functions over partitions).
_NARROW = {
    "ProjectExec",
    "FilterExec",
    "GenerateExec",
    "WholeStageCodegenExec",
    "InputAdapter",
    "ColumnarToRowExec",
    "RowToColumnarExec",
    "MapInArrowExec",
    "CollectMetricsExec",
    "InMemoryTableScanExec",  # whole partitions are cached, whatever is taken from them
    "ShuffleExchangeExec",
    "ShuffleQueryStageExec",
    "ResultQueryStageExec",
    "AQEShuffleReadExec",
    "AdaptiveSparkPlanExec",
    "SortExec",
    "WindowExec",
}
# Plan nodes whose partitions are those of their child.
_IN_PLACE = {
    "ProjectExec", "FilterExec", "WholeStageCodegenExec", "InputAdapter", "ColumnarToRowExec",
    "RowToColumnarExec", "InMemoryTableScanExec", "RDDScanExec",
}  # fmt: skip
# What a client of Spark Connect asks for that has a row for each row.
_CHOOSES = {"Project", "WithColumns", "WithColumnsRenamed", "Drop", "ToDF", "ToSchema"}
# Nodes that hold another plan, which is not among their children: name -> method.
_HOLDS = {
    "AdaptiveSparkPlanExec": "executedPlan",
    "ShuffleQueryStageExec": "plan",
    "ResultQueryStageExec": "plan",
}


def executed_whole(frame: DataFrame, batch: DataFrame, *, stages: bool, rdd_id: int | None = None) -> bool:
    """Returns whether executing ``frame`` executes every row of ``batch``; False if that is not certain.
    ``stages``: it is a frame that stages rows, and not the rows themselves, which Delta writes. ``rdd_id``:
    of the rows of the batch, if it is known.
    """
    with suppress(Exception):  # False executes the batch once more
        if is_connect(frame):
            return _projects(frame, batch, stages)
        if _has_columns_of(frame, batch, stages, rdd_id):
            return True
        nodes = _plan_nodes(frame._jdf.queryExecution().executedPlan())
        own = [
            node.rdd().id()
            for name, node in _plan_nodes(batch._jdf.queryExecution().executedPlan())
            if name == "RDDScanExec"
        ]
        leaves = [node for name, node in nodes if name == "RDDScanExec"]
        inner = [name for name, _ in nodes if name != "RDDScanExec"]
        # the staging is one MapInArrowExec; another one belongs to the user
        return (
            len(own) == 1
            and [leaf.rdd().id() for leaf in leaves] == own
            and set(inner) <= _NARROW
            and inner.count("MapInArrowExec") == int(stages)
        )
    return False


def _has_columns_of(frame: DataFrame, batch: DataFrame, stages: bool, rdd_id: int | None) -> bool:
    """Returns whether ``frame``, or what it stages, has a row for each row of ``batch``, by its analysed
    plan. No optimization leaves out rows of an RDD that are only projected, so nothing has to be planned to
    know, and the physical plan, which takes many more calls of the JVM, is not looked at.
    """
    node = frame._jdf.queryExecution().analyzed()
    if stages:
        if node.nodeName() != "MapInArrow":
            return False
        node = node.child()
    while (kind := node.nodeName()) == "Project":
        node = node.child()
    if kind != "LogicalRDD":
        return False
    if rdd_id is None:
        own = batch._jdf.queryExecution().analyzed()
        if own.nodeName() != kind:
            return False
        rdd_id = own.rdd().id()
    return bool(node.rdd().id() == rdd_id)


def _projects(frame: DataFrame, batch: DataFrame, stages: bool) -> bool:
    """As :func:`_has_columns_of`, on Spark Connect, by what the client asks for: the server is not asked."""
    plan, own = vars(frame)["_plan"], vars(batch)["_plan"]
    if stages:
        if type(plan).__name__ != "MapPartitions":
            return False
        plan = plan._child
    while type(plan).__name__ in _CHOOSES:
        plan = plan._child
    rows = [each._relation_id for each in (plan, own) if type(each).__name__ == "CachedRemoteRelation"]
    return len(rows) == 2 and rows[0] == rows[1]


def partitions(frame: DataFrame) -> int | None:
    """Of a micro-batch from which columns and rows were chosen; None if that is not certain."""
    with suppress(Exception):
        node = frame._jdf.queryExecution().analyzed()
        while (kind := node.nodeName()) in ("Project", "Filter"):
            node = node.child()
        if kind == "LogicalRDD":
            return int(node.rdd().getNumPartitions())
    return None


def task_metrics(frame: DataFrame, prefix: str) -> Iterator[tuple[str, int, JavaObject]]:
    """The metrics whose name begins with ``prefix`` that the execution of ``frame`` has collected in each
    partition of the batch: (name, number of partitions, JVM row). ``frame`` holds all rows of the batch
    (:func:`executed_whole`).
    """
    nodes = _plan_nodes(frame._jdf.queryExecution().executedPlan())
    (partitions,) = [node.rdd().getNumPartitions() for name, node in nodes if name == "RDDScanExec"]
    for number, (kind, node) in enumerate(nodes):
        if kind == "CollectMetricsExec" and node.name().startswith(prefix):
            above = {name for name, _ in nodes[:number]}
            below = {name for name, _ in nodes[number + 1 :]}
            # what another execution has put into a cache was not met by this one
            if "InMemoryTableScanExec" not in above and below <= _IN_PLACE:
                yield node.name(), partitions, node.collectedMetrics()


def _plan_nodes(root: JavaObject) -> list[tuple[str, Any]]:
    """Returns (class name, node) of the plan, from the root on, and through what it has persisted."""
    found: list[tuple[str, Any]] = []
    pending = [root]
    while pending:
        node = pending.pop()
        found.append((node.getClass().getSimpleName(), node))
        if found[-1][0] == "InMemoryTableScanExec":
            pending.append(node.relation().cachedPlan())
        if found[-1][0] in _HOLDS:
            pending.append(getattr(node, _HOLDS[found[-1][0]])())
        children = node.children()
        pending += [children.apply(position) for position in range(children.length())]
    return found
