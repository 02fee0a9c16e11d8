"""The streaming reader of Spark 4.1, whose Python sources have no admission control: Spark asks for an end
and says neither the start nor a limit.

The calls of Spark 4.1 (``tests/spark/test_unadmitted.py`` compares them with the Spark that runs):

1. A query that finds a checkpoint calls ``partitions(end, end)`` with the newest end of its offset log. A
   new query does not.
2. Each trigger calls ``latestOffset()`` once, when the batch before is in the commit log. If the answer is
   not where that batch ended, Spark logs it.
3. It then calls ``partitions(start, end)`` to plan the batch, before the first one also ``initialOffset()``.
   It leaves ``partitions`` out where its optimizer has left out the source.

So the start is the end that Spark named or was told last, and the limits are those of the options.

Invariant: a start is acknowledged only if Spark has named it. An end that it was only told may not be in its
log: with a wrapper for AvailableNow, it asks more than once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pyspark.sql.datasource import InputPartition

from broker_core.core.errors import CheckpointMismatch, OptionError
from broker_core.core.failpoint import here
from broker_core.engine import START, Vector
from connector.options import ReadOptions
from connector.stream import offset
from connector.stream.source import StreamReader

WRAPPER = "spark.sql.streaming.triggerAvailableNowWrapper.enabled"


class UnadmittedReader(StreamReader):
    def __init__(self, options: ReadOptions) -> None:
        super().__init__(options)
        self._planned: Mapping[str, object] | None = None  # the end that Spark named last; None: no end yet
        self._given_end: Mapping[str, object] | None = None  # the end that Spark got after that one

    def latestOffset(self) -> Vector:  # type: ignore[override]
        here("connector.latest_offset.asked")
        self._require_only()
        planned = offset.symbolic(self._options.queues) if self._planned is None else self._planned
        start = self._vector(planned if self._given_end is None else self._given_end)
        try:
            end = self._end(start, limited=True, acks=self._given_end is None)
        except CheckpointMismatch as error:
            if self._planned is not None:
                raise
            raise CheckpointMismatch(
                f"{error.message}. If the checkpoint is the old one, set {WRAPPER} to false: with it, Spark "
                "4.1 asks for an end before it says where the checkpoint is"
            ) from None
        self._given_end = None if end == self._planned else end
        return end

    def partitions(self, start: dict[str, object], end: dict[str, object]) -> Sequence[InputPartition]:
        asked_first = self._planned is None and self._given_end is not None
        # a new query plans an empty batch 0 from and to its symbolic start
        if start == end and asked_first and (self._given_end != end or START not in end.values()):
            raise OptionError(
                "Spark 4.1 asks for an end before it says where the checkpoint is",
                f"set {WRAPPER} to false; Trigger.AvailableNow is then one micro-batch",
            )
        self._planned, self._given_end = end, None
        return super().partitions(start, end)
