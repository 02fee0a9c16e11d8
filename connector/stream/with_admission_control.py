"""The streaming reader of Spark 4.2 and later, which says where a micro-batch starts and its limit.

Not here: everything else that a reader does (``source.py``).
"""

from __future__ import annotations

from pyspark.sql.streaming import datasource as spark

from broker_core.core.failpoint import here
from broker_core.engine import Vector
from connector.stream.source import StreamReader


class AdmittedReader(StreamReader, spark.SupportsTriggerAvailableNow):
    def getDefaultReadLimit(self) -> spark.ReadLimit:
        """The limits of the options. Trigger.Once passes ReadAllAvailable instead, and they do not apply."""
        options = self._options
        if options.max_rows is not None:
            return spark.ReadMaxRows(options.max_rows)
        if options.max_bytes is not None:
            return spark.ReadMaxBytes(options.max_bytes)
        if options.min_rows is not None:
            return spark.ReadMinRows(options.min_rows)
        return spark.ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        self._final = self._ends()

    def latestOffset(self, start: dict[str, object], limit: spark.ReadLimit) -> Vector:
        here("connector.latest_offset.asked")
        vector = self._vector(start)
        self._require_only()
        return self._end(vector, limited=not isinstance(limit, spark.ReadAllAvailable))

    def reportLatestOffset(self) -> dict[str, int]:
        """For the progress of the query."""
        return self._latest_ends()
