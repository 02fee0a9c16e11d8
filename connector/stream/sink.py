"""The native sink: every micro-batch and every batch write is one transaction of the broker.

Not here: staging, the decision and its idempotence (the engine; rules C1, C2, C4).

Invariant: the identity is (app_id, query_id, batch_id). The tasks send it with their messages, because a
commit runs in a process that knows neither the query nor the writer that staged. A token names one attempt:
for every attempt, Spark builds a new writer, in the process that pickles it to the tasks.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from broker_core.core.errors import BatchDecided, LocalProtocolError
from broker_core.core.failpoint import here
from broker_core.engine import BranchHeader, StagedBranch
from connector.options import WriteOptions
from connector.stream.offset_log import OffsetLog
from connector.stream.schema import to_messages
from connector.stream.task_identity import task_identity


@dataclass(frozen=True)
class TaskResult(WriterCommitMessage):
    """The result of one task; the driver's commit gets nothing else."""

    query_id: str
    batch_id: int
    token: str
    branch: StagedBranch


class _Writer:
    def __init__(self, options: WriteOptions) -> None:
        self._options = options
        self._token = uuid.uuid4().hex  # reaches commit and abort only through the messages

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """C2, in a task: the rows are durable and invisible when this returns."""
        options, context = self._options, TaskContext.get()
        query_id, batch_id = task_identity()
        header = BranchHeader(
            token=self._token,
            branch=uuid.uuid4().hex,
            kind="publish",
            target={"exchange": options.exchange, "routing_key": options.routing_key},
            app_id=options.app_id,
            query_id=query_id,
            batch_id=batch_id,
            partition=context.partitionId() if context else 0,
            attempt=context.attemptNumber() if context else 0,
        )
        filled = (batch for batch in iterator if batch.num_rows)
        first = next(filled, None)
        rows = filled if first is None else chain((first,), filled)
        try:
            branch = options.address.engine().stage(header, map(to_messages, rows))
        except BatchDecided:
            if not options.app_id:
                raise
            # An earlier attempt of this micro-batch is committed, and Spark replays it. Nothing is staged,
            # but all rows are read, because a stateful query must write its state. The commit is answered
            # ALREADY. An engine that stages them all the same drops them with that answer.
            for _ in rows:
                pass
            some = int(first is not None)
            branch = StagedBranch(header.branch, header.partition, header.attempt, rows=some, checksum=0)
        here("connector.write.staged")
        return TaskResult(query_id, batch_id, self._token, branch)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int = -1) -> None:
        """Drop the attempt. Branches of tasks that still write are dropped by a later decision."""
        for token in {message.token for message in messages if isinstance(message, TaskResult)}:
            # where commit had committed, and its answer was lost: the decision is kept, and the replay is
            # answered ALREADY
            with contextlib.suppress(BatchDecided):
                self._options.address.engine().rollback_batch(token)


def _staged(messages: Sequence[WriterCommitMessage | None]) -> list[TaskResult]:
    """The messages of the tasks, without None; all of one attempt."""
    staged = [message for message in messages if isinstance(message, TaskResult)]
    if len({message.token for message in staged}) > 1:
        raise LocalProtocolError("the tasks sent messages of several staged batches", "restart the query")
    return staged


class TxmqStreamWriter(_Writer, DataSourceStreamArrowWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Raises LocalProtocolError if the task does not know its query: the batch then has no identity."""
        if not task_identity()[0]:
            raise LocalProtocolError(
                "Spark did not tell this task the id of its query", "use Spark 4.1 or newer"
            )
        return super().write(iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """C1, C4: decide the batch. Raises CheckpointMismatch, BatchGap, MissingBranch, Unroutable,
        OptionError.
        """
        staged = _staged(messages)
        if not staged:
            # No task ran, so nothing was read or staged, and there is nothing to decide.
            return
        options, query_id = self._options, staged[0].query_id
        offset_log = OffsetLog(options.address, options.app_id, options.checkpoint)
        # Open and decide in one call. If an earlier attempt, whose answer was lost, has decided the batch,
        # this checks that it consumed the same ranges and answers ALREADY.
        options.address.engine().commit_batch(
            options.app_id,
            query_id,
            batchId,
            staged[0].token,
            [message.branch for message in staged],
            on_unroutable=options.on_unroutable,
            opens=options.on_new_checkpoint,
            offset_log=offset_log.digest(batchId, query_id),
        )
        here("connector.commit.decided")


class TxmqBatchWriter(_Writer, DataSourceArrowWriter):
    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        if staged := _staged(messages):
            branches = [message.branch for message in staged]
            self._options.address.engine().commit_branches(
                staged[0].token, branches, on_unroutable=self._options.on_unroutable
            )
