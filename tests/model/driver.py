"""Spark's micro-batch loop over the real source, the real native sink and the real ``transactional``.

Not here: what is right (world.py). What it does and in which order is Spark 4.2.0's: the offset log is
written before the source hears ``commit`` of the batch before; ``initialOffset`` is asked again when batch 0
is replayed; ``latestOffset`` when nothing was logged. Spark 4.1.1 differs as
``connector/stream/without_admission_control.py`` says.
"""

from __future__ import annotations

import json
import pickle
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
from pyspark.sql.types import StructType

from broker_core.core.errors import TxmqError
from connector.batch.foreach_batch import transactional
from connector.datasource import TxmqDataSource
from connector.stream.without_admission_control import WRAPPER
from tests.model.actors import point
from tests.model.fake_spark import Checkpoint, Frame, Query, Session, struct_type

URL = "txmq://model:5673"
ROW = struct_type("body string")


class Driver:
    """One driver process of the query, on the checkpoint that it finds. ``on_new``: its onNewCheckpoint."""

    def __init__(
        self,
        world: Any,
        checkpoint: Checkpoint,
        *,
        on_new: str = "fail",
        limit: int | None = None,
        sink_on_new: str = "fail",
    ) -> None:
        self.world = world
        self.checkpoint = checkpoint
        self.on_new = on_new
        self.limit = limit
        self.sink_on_new = sink_on_new
        self.executed: set[int] = set()  # partitions of the batch in hand that were read to their end
        self.batch_id = -1
        self.run_id = uuid.uuid4().hex  # the connector remembers queries by their session

    # -- Spark -----------------------------------------------------------------------------------------------
    def run(self) -> None:
        checkpoint = self.checkpoint
        readers = [self._reader(number, queues) for number, queues in enumerate(self.world.streams)]
        sink = self._sink()
        point("offset log read")
        batch_id = max(checkpoint.offsets, default=-1)
        planned = batch_id >= 0 and batch_id not in checkpoint.commits
        if not planned:
            batch_id += 1
        with self._wrapper_is_switched_off():
            fetched = [self._json(reader.latestOffset()) for reader, _ in readers if self.world.reports]
            if self.world.unadmitted and checkpoint.offsets:
                for reader, named in readers:
                    newest = self._part(checkpoint.end(max(checkpoint.offsets)), named)
                    reader.partitions(newest, newest)
        while True:
            start = checkpoint.end(batch_id - 1) if batch_id else None
            if not planned:
                end = {}
                for number, (reader, named) in enumerate(readers):
                    answer = self._latest(reader, start, named, fetched[number : number + 1])
                    end |= {name: answer[queue] for name, queue in named.items()}
                    self.world.on_answer(named.values())
                if start == end:
                    point("idle")
                    if fetched:
                        return  # all that the wrapper has fetched is there
                    continue
                point("offset log write")
                checkpoint.add_offsets(batch_id, end)
                if batch_id:
                    for reader, named in readers:
                        reader.commit(self._part(checkpoint.end(batch_id - 1), named))
            end = checkpoint.end(batch_id)
            tasks: list[tuple[Any, Any]] = []
            for reader, named in readers:
                begin = self._part(start, named) or self._json(reader.initialOffset())
                if self.world.unadmitted and self.world.is_unread(checkpoint.query_id, batch_id):
                    continue
                tasks += [
                    (reader, partition) for partition in reader.partitions(begin, self._part(end, named))
                ]
            if self.world.is_unread(checkpoint.query_id, batch_id):
                tasks = []  # the optimizer has found that the rows change nothing
            self._execute(tasks, batch_id, sink)
            point("commit log write")
            checkpoint.add_commit(batch_id)
            self.world.on_spark_commit(checkpoint.query_id, batch_id, start, end)
            batch_id, planned = batch_id + 1, False

    @contextmanager
    def _wrapper_is_switched_off(self) -> Iterator[None]:
        """By the user, as the error says that is raised where the wrapper cannot work."""
        try:
            yield
        except TxmqError as error:
            if self.world.reports and WRAPPER in str(error):
                self.world.reports = 0
            raise

    def _latest(
        self, reader: Any, start: dict[str, Any] | None, named: dict[str, str], fetched: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """``fetched``: by the wrapper for AvailableNow, which plans that end alone and asks for others to report
        them.
        """
        if not self.world.unadmitted:
            begin = self._part(start, named) or self._json(reader.initialOffset())
            return self._json(reader.latestOffset(begin, reader.getDefaultReadLimit()))
        answer = fetched[0] if fetched else self._json(reader.latestOffset())
        for _ in range(self.world.reports):
            reader.latestOffset()
        return answer

    def _reader(self, number: int, queues: tuple[str, ...]) -> tuple[Any, dict[str, str]]:
        """A source, and the names of its queues in the offset log; a queue that an earlier source reads too
        has another one.
        """
        source = TxmqDataSource(self._source_options(queues))
        earlier = {queue for other in self.world.streams[:number] for queue in other}
        return source.streamReader(source.schema()), {
            queue + " again" * (queue in earlier): queue for queue in queues
        }

    @staticmethod
    def _part(offsets: dict[str, Any] | None, named: dict[str, str]) -> dict[str, Any]:
        """The offset of one of the query's sources; empty before batch 0."""
        return {queue: offsets[name] for name, queue in named.items()} if offsets is not None else {}

    @staticmethod
    def _json(offset: dict[str, Any]) -> dict[str, Any]:
        logged: dict[str, Any] = json.loads(json.dumps(offset))
        return logged

    def _source_options(self, queues: tuple[str, ...]) -> dict[str, str]:
        options = {
            "url": URL,
            "queue": ",".join(queues),
            "appId": self.world.app,
            "onNewCheckpoint": self.on_new,
            "minPartitions": "2",
        }
        if self.limit is not None:
            options["maxOffsetsPerTrigger"] = str(self.limit)
        return options | self.world.source_options

    def _execute(self, found: list[tuple[Any, Any]], batch_id: int, sink: Any) -> None:
        properties = {
            "sql.streaming.queryId": self.checkpoint.query_id,
            "spark.jobGroup.id": self.run_id,
            "streaming.sql.batchId": str(batch_id),
        }
        active = [Query(self.checkpoint.query_id, self.run_id)]
        session = Session(self.world, properties, active=active)
        if self.world.sink == "connect":
            session = Session(self.world, session_id=self.run_id, active=active)
        self.executed = set()
        self.batch_id = batch_id

        def rows(number: int, pickled: bytes) -> Iterator[pa.RecordBatch]:
            remote, partition = pickle.loads(pickled)
            yield from remote.read(partition)
            self.executed.add(number)

        sent = [pickle.dumps(one) for one in found]
        tasks = [lambda number=number: rows(number, sent[number]) for number in range(len(sent))]
        schema = TxmqDataSource(self._source_options(self.world.queues)).schema()
        sink(Frame(session, tasks, schema, [partition for _, partition in found]), batch_id)
        missing = set(range(len(found))) - self.executed
        assert not missing, (
            f"C3: batch {batch_id} ended, and partitions {missing} were not executed: a stateful query has "
            "lost its state"
        )

    # -- what the user wrote ---------------------------------------------------------------------------------
    def _sink(self) -> Any:
        if self.world.sink == "native":
            return self._write_native
        if self.world.sink == "other":
            return self._write_elsewhere
        return transactional(
            self.world.user_function,
            url=URL,
            app_id=self.world.app,
            ledger=self.world.ledger or None,
            ledger_sync=bool(self.world.ledger) and self.world.ledger_sync,
            after_commit={"upsert": self.world.upsert},
            on_new_checkpoint=self.sink_on_new,  # type: ignore[arg-type]
            resume_from=self.world.resume_from,
        )

    def _write_native(self, batch: Frame, batch_id: int) -> None:
        options = {
            "url": URL,
            "queue": "out",
            "appId": self.world.app,
            "onNewCheckpoint": self.sink_on_new,
            "checkpointlocation": "/c",
            "queryname": "q",
        }
        source = TxmqDataSource(options)
        schema = StructType(list(ROW.fields))
        # in one process, for the tasks
        remote = pickle.loads(pickle.dumps(source.streamWriter(schema, False)))
        local = TxmqDataSource(options).streamWriter(schema, False)  # in another, for commit and abort
        messages: list[Any] = []
        try:
            messages = self.world.marked(batch).execute(remote.write)
        except Exception:
            local.abort([None], batch_id)
            raise
        messages = pickle.loads(pickle.dumps(messages))
        try:
            local.commit(messages, batch_id)
        except Exception:
            local.abort(messages, batch_id)
            raise

    def _write_elsewhere(self, batch: Frame, batch_id: int) -> None:
        """A sink of another system, idempotent by (query, batch) as Spark's file sink is."""
        rows = batch.collect()
        point("other sink")
        self.world.other_sink[(self.checkpoint.query_id, batch_id)] = [row["body"].decode() for row in rows]
