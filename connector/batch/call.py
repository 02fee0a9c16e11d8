"""Calls: one of a function of the user has ended when it returns; a transactional function has one a batch.

Not here: what the function does (``batch_transaction.py``), replays of a batch (``foreach_batch.py``).
Invariant: what a function has left to do later is never taken for done.
"""

from __future__ import annotations

import inspect
from concurrent.futures import Future
from dataclasses import dataclass
from typing import ClassVar

from pyspark.sql import SparkSession

from broker_core.errors import OptionError
from connector.tables.table import is_connect


def require_ended(returned: object, function: str) -> None:
    """Raises OptionError if ``function`` has returned something that would do its work later, or never."""
    if not (
        inspect.isawaitable(returned)
        or inspect.isgenerator(returned)
        or inspect.isasyncgen(returned)
        or isinstance(returned, Future)
    ):
        return
    if inspect.iscoroutine(returned):
        returned.close()  # otherwise Python warns that it was never awaited
    raise OptionError(
        f"{function} returned a {type(returned).__name__}, so what it does is not done",
        "give a function that ends when its work is done: use asyncio.run or .result() in it, and no yield",
    )


@dataclass(frozen=True)
class Call:
    """Of a transactional function for a batch, in one run of a query."""

    broker: str
    app_id: str
    batch: tuple[str, str, int]  # the run, the query and the number; the run is "" where it is not known

    _done: ClassVar[dict[tuple[str, str], tuple[str, str, int]]] = {}

    @classmethod
    def of(cls, spark: SparkSession, broker: str, app_id: str, query_id: str, batch_id: int) -> Call:
        run = None if is_connect(spark) else spark.sparkContext.getLocalProperty("spark.jobGroup.id")
        return cls(broker, app_id, (run or "", query_id, batch_id))

    def require_first(self) -> None:
        """Raises OptionError if this batch has had its call, and is decided."""
        if self.batch[0] and self._done.get((self.broker, self.app_id)) == self.batch:
            raise OptionError(
                f"transactional of app {self.app_id!r} was called twice for batch {self.batch[2]}, "
                "and the first call has decided it: the second one would do nothing",
                "do everything in one function, or filter the batch within it",
            )

    def done(self) -> None:
        self._done[(self.broker, self.app_id)] = self.batch
