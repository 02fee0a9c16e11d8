"""A batch of Spark Connect as Spark 4.3 gives it to foreachBatch: its session, which is then the active one, is a clone of the
root, which was active when the function was unpickled. The root knows the queries, and the clone does not; no plan may go
to the root.

Here both are one session on the server, which is what an older Spark has.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from pyspark.sql import DataFrame

_of_batches: list[Any] = []  # the session, made at the first batch


class OnlyQueries:
    """What the root may be asked: about queries, and what a text of DDL means."""

    def __init__(self, stub: Any) -> None:
        self._stub = stub

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._stub, name)

        def call(request: Any, *more: Any, **named: Any) -> Any:
            if name == "ExecutePlan":
                kind = request.plan.command.WhichOneof("command_type") or "a relation"
                allowed = kind.startswith("streaming_query")
            else:
                kind = request.WhichOneof("analyze") if name == "AnalyzePlan" else name
                allowed = kind in ("ddl_parse", "ReattachExecute", "ReleaseExecute")
            assert allowed, f"the root session was asked for {kind}"
            return method(request, *more, **named)

        return call


def beside_the_root(
    each: Callable[[DataFrame, int], None], pipeline: dict[str, Any]
) -> Callable[[DataFrame, int], None]:
    del pipeline

    def call(batch: DataFrame, number: int) -> None:
        each(_of_another_session(batch), number)

    return call


def _of_another_session(batch: Any) -> DataFrame:
    from pyspark.sql.connect.session import SparkSession
    from pyspark.sql.connect.streaming.query import StreamingQueryManager

    root = batch.sparkSession
    if not _of_batches:
        assert SparkSession.active() is root
        url = f"{os.environ['SPARK_CONNECT_LOCAL_URL']};session_id={root.session_id}"
        made: Any = SparkSession.builder.remote(url).create()
        SparkSession._default_session = SparkSession._active_session.session = made
        of_all: Any = StreamingQueryManager.active.fget  # type: ignore[attr-defined]
        active = property(lambda manager: [] if manager._session is made else of_all(manager))
        StreamingQueryManager.active = active  # type: ignore[method-assign, assignment]
        root.client._stub = OnlyQueries(root.client._stub)
        _of_batches.append(made)
    return _of_batches[0]._create_remote_dataframe(batch._plan._relation_id)  # type: ignore[no-any-return]
