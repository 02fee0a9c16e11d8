"""The rows that a table refuses, as dead letters in a queue (``txmq app skip --refused --queue QUEUE``).

Not here: which rows these are (``row_by_row.py``), the dead letters of messages (``reject/dead_letters.py``).
Invariant: the ledger entry decides. One transaction of the engine publishes the dead letters and records
which rows they are; whoever comes later takes these.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from broker_core.core import failpoint
from broker_core.engine import BranchHeader, Engine, LedgerEntry, ToApply
from broker_core.message.message import MESSAGE_SCHEMA
from broker_core.message.properties import Properties
from connector.reject.dead_letters import HEADER, LONGEST_REASON
from connector.sql import quoted
from connector.tables import target
from connector.typed.encode import CONTENT_TYPES

# headers beside the reason
APP, TABLE, OPERATION = "x-reject-app", "x-reject-table", "x-reject-operation"
SEQUENCE, QUERY, BATCH, ROW = "x-reject-sequence", "x-reject-query", "x-reject-batch", "x-reject-row"


class RefusedLetters:
    """Of one operation, whose parts these are."""

    def __init__(self, engine: Engine, queue: str, entry: LedgerEntry, parts: Sequence[ToApply]) -> None:
        self._engine = engine
        self._queue = queue
        self._entry = entry
        self._parts = parts

    def numbers(self) -> set[int] | None:
        """The numbers of the rows that were published; None if nothing was."""
        return target.refused_rows(self._parts)

    def keep(self, _rows: pa.Table, refused: dict[int, str], frame: DataFrame | None) -> set[int]:
        """Publishes the rows of ``frame``, unless another driver was first; the numbers of those that are
        published. Raises QueueNotFound, Unroutable.
        """
        entry, token, staged = self._entry, uuid.uuid4().hex, []
        if frame is not None:
            self._engine.logs([self._queue])
            header = BranchHeader(token, uuid.uuid4().hex, "publish", {})
            staged.append(self._engine.stage(header, [self._letters(frame, refused)]))
        failpoint.here("rows.staged")
        branches = [branch for part in self._parts for branch in part.branches]
        numbers = json.dumps(sorted(refused), separators=(",", ":"))
        recorded = self._engine.publish_refused(
            entry.app_id, entry.sequence, branches, numbers, token, staged
        )
        return set(json.loads(recorded))

    def _letters(self, frame: DataFrame, refused: dict[int, str]) -> pa.RecordBatch:
        """A message for each row: the row in JSON, as ``encode`` writes it, and why it is here."""
        row = F.struct(*(F.col(quoted(name)) for name in frame.columns))
        bodies = [found[0].encode() for found in frame.select(F.to_json(row)).collect()]
        properties = [self._properties(number, reason) for number, reason in refused.items()]
        columns = {"exchange": [""] * len(bodies), "routing_key": [self._queue] * len(bodies)}
        return pa.RecordBatch.from_pydict(
            {**columns, "body": bodies, "properties": properties}, schema=MESSAGE_SCHEMA
        )

    def _properties(self, number: int, reason: str) -> bytes:
        entry, part = self._entry, self._parts[0]
        headers: dict[str, object] = {
            APP: entry.app_id,
            TABLE: part.target["table"],
            OPERATION: part.kind,
            SEQUENCE: entry.sequence,
            QUERY: entry.query_id,
            BATCH: entry.batch_id,
            ROW: number,
            HEADER: reason[:LONGEST_REASON],
        }
        return Properties(content_type=CONTENT_TYPES["json"], headers=headers, delivery_mode=2).encode()
