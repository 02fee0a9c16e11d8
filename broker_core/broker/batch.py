"""Batches of messages and what keeps them alive: the open batch of small commits, stored batches, and memory-only ones.

Not the bytes of stored batches: those come through the injected ``read``. A batch id below 0 is memory only.
Invariant: a batch with no pin and no more rows to come is reported exactly once, in ``Change.forgets`` (stored ones) or by
leaving ``by_id`` (memory only). A pin is a run of a queue, or a staged part.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from broker_core.broker.change import Change, InboxRow
from broker_core.broker.undo import Undo
from broker_core.errors import CorruptCatalog

OPEN_ROWS = 16_384
OPEN_BYTES = 4 * 1024 * 1024
EXPIRATION = 1  # in the first byte of the property flags


class Batch:
    __slots__ = ("_undo", "batch_id", "closed", "expiring", "inbox", "pins", "rows", "saved", "size_bytes")

    def __init__(
        self,
        batch_id: int,
        rows: int = 0,
        size_bytes: int = 0,
        inbox: list[InboxRow] | None = None,
        *,
        closed: bool = True,
        undo: Undo | None = None,
    ) -> None:
        self._undo = undo
        self.saved = 0  # the last work (``Undo.work``) in which its rows were noted
        self.batch_id = batch_id
        self.rows = rows
        self.size_bytes = size_bytes  # of the bodies
        self.inbox = inbox  # the rows themselves while they are few or memory only
        self.pins = 0
        self.expiring: bool | None = None if inbox is None else False  # some message has an expiration of its own; None: not known
        self.closed = closed  # no more rows will come

    def add(self, row: InboxRow) -> None:
        """One more row of an open or memory-only batch."""
        inbox, undo = self.inbox, self._undo
        assert inbox is not None
        if undo is not None and self.saved != undo.work:
            self.saved = undo.work
            undo.append((self._remove, len(inbox), self.rows, self.size_bytes))
        inbox.append(row)
        self.rows = row[1] + 1
        self.size_bytes += len(row[7])
        properties = row[6]
        if properties and properties[0] & EXPIRATION:
            self.expiring = True

    def _remove(self, length: int, rows: int, size_bytes: int) -> None:
        assert self.inbox is not None
        del self.inbox[length:]
        self.rows, self.size_bytes = rows, size_bytes


class Batches:
    """All batches that the catalog names or memory holds. ``undo`` is the one of the whole state.

    ``read(batch_id)`` gives a stored batch, ``new_batch_id()`` an id that nothing durable uses.
    """

    def __init__(self, new_batch_id: Callable[[], int], read: Callable[[int], pa.RecordBatch]) -> None:
        self.undo = Undo()
        self.by_id: dict[int, Batch] = {}
        self.full: list[int] = []  # closed open batches that wait for their seal
        self.lost: dict[int, str] = {}  # batches that something names and nobody has: why
        self._new_batch_id = new_batch_id
        self._stored = read
        self._open: Batch | None = None
        self._transient: Batch | None = None
        self._next_transient = -1
        self._dead: list[int] = []

    def _read(self, batch_id: int) -> pa.RecordBatch:
        self.require(batch_id)
        return self._stored(batch_id)

    def require(self, batch_id: int) -> None:
        """Raises CorruptCatalog for a batch that nobody has."""
        if batch_id in self.lost:
            raise CorruptCatalog(self.lost[batch_id])

    def lose(self, batch_id: int, rows: int, why: str) -> Batch:
        """While loading: what the catalog says of this batch cannot be. It can be pinned and given up, not read."""
        self.lost[batch_id] = (
            f"the catalog contradicts itself, the messages cannot be read: {why}. `txmq verify` lists all of it; stop the broker, and"
            " `txmq salvage` makes a data directory of what is whole; or purge the queue"
        )
        batch = self.by_id[batch_id] = Batch(batch_id, rows, undo=self.undo)
        return batch

    def open(self) -> Batch:
        """The batch that takes the next small commit's rows."""
        batch = self._open
        if batch is None or batch.rows >= OPEN_ROWS or batch.size_bytes >= OPEN_BYTES:
            self.close_open()
            batch = Batch(self._new_batch_id(), inbox=[], closed=False, undo=self.undo)
            self.undo.attribute(self, "_open")
            self.undo.item(self.by_id, batch.batch_id)
            self._open = self.by_id[batch.batch_id] = batch
        return batch

    def close_open(self) -> None:
        """No more rows for the open batch: it waits for its seal, or is dead already."""
        batch = self._open
        if batch is not None:
            self.undo.attribute(self, "_open")
            self.undo.attribute(batch, "closed")
            waiting = self._dead if batch.pins == 0 else self.full
            self.undo.growth(waiting)
            self._open = None
            batch.closed = True
            waiting.append(batch.batch_id)

    @property
    def open_rows(self) -> int:
        return self._open.rows if self._open is not None else 0

    @property
    def open_pins(self) -> int:
        return self._open.pins if self._open is not None else 0

    def rows(self, batch_id: int) -> int:
        batch = self.by_id.get(batch_id)
        return batch.rows if batch is not None else 0

    def transient(self) -> Batch:
        """The memory-only batch that takes the next transient messages."""
        batch = self._transient
        if batch is None or batch.closed or batch.rows >= OPEN_ROWS or batch.size_bytes >= OPEN_BYTES:
            if batch is not None and not batch.closed:
                self.undo.attribute(batch, "closed")
                batch.closed = True
                if batch.pins == 0:
                    self._drop(batch)
            batch = Batch(self._next_transient, inbox=[], closed=False, undo=self.undo)
            self._next_transient -= 1
            self.undo.attribute(self, "_transient")
            self.undo.item(self.by_id, batch.batch_id)
            self._transient = self.by_id[batch.batch_id] = batch
        return batch

    def name(self, batch_id: int, rows: int, size_bytes: int) -> Batch:
        """A stored batch that exists from this commit on."""
        batch = self.by_id.get(batch_id)
        if batch is None:
            batch = Batch(batch_id)
            self.undo.item(self.by_id, batch_id)
            self.by_id[batch_id] = batch
        if rows:
            self.undo.attribute(batch, "rows")
            self.undo.attribute(batch, "size_bytes")
            batch.rows, batch.size_bytes = rows, size_bytes
        return batch

    def pin(self, batch_id: int) -> Batch:
        batch = self.by_id[batch_id]
        self.undo.append((setattr, batch, "pins", batch.pins))
        batch.pins += 1
        return batch

    def unpin(self, batch_id: int) -> None:
        batch = self.by_id[batch_id]
        self.undo.append((setattr, batch, "pins", batch.pins))
        batch.pins -= 1
        if batch.pins == 0 and batch.closed:
            if batch_id < 0:
                self._drop(batch)
            else:
                self.undo.growth(self._dead)
                self._dead.append(batch_id)

    def _drop(self, batch: Batch) -> None:
        """Nothing needs it any more. Dead runs may name it for a while: they must not keep its rows."""
        self.undo.item(self.by_id, batch.batch_id)
        self.undo.attribute(batch, "inbox")
        self.by_id.pop(batch.batch_id, None)
        batch.inbox = []

    def reopen(self, batch_id: int) -> Batch:
        """While loading: a batch whose rows are in the inbox. It takes no more rows and waits for its seal."""
        batch = self.by_id[batch_id] = Batch(batch_id, inbox=[], undo=self.undo)
        self.full.append(batch_id)
        return batch

    def may_expire(self, batch: Batch) -> bool:
        """Whether some message of it has an expiration of its own; a stored batch is read once to find out."""
        if batch.expiring is None:
            flags = pc.binary_slice(self._read(batch.batch_id).column("properties"), 0, 1)
            batch.expiring = any(flag and flag[0] & EXPIRATION for flag in flags.unique().to_pylist())
        return batch.expiring

    def sealed(self, batch_id: int) -> None:
        """The batch is in a segment now: its rows need no memory. It may have been forgotten since its seal was committed."""
        if batch_id in self.by_id:
            self.by_id[batch_id].inbox = None
        if batch_id in self.full:
            self.full.remove(batch_id)

    def record(self, change: Change) -> None:
        """Put the batches that nothing needs any more into ``change.forgets``."""
        if not self._dead:
            return
        self.undo.attribute(self, "_dead")
        dead, self._dead = self._dead, []
        for batch_id in dead:
            batch = self.by_id.get(batch_id)
            if batch is not None and batch.pins == 0:
                self._drop(batch)
                change.forgets.append(batch_id)
                if batch_id in self.full:
                    self.undo.attribute(self, "full")
                    self.full = [full for full in self.full if full != batch_id]

    def forget_unpinned(self) -> None:
        """After loading: whatever no run and no part needs is dead."""
        self._dead.extend(batch.batch_id for batch in self.by_id.values() if batch.pins == 0 and batch.closed and batch.batch_id > 0)

    def decode(self, batch_id: int, rows: range | npt.NDArray[np.int64], sequence: int, committed_at: int) -> list[InboxRow]:
        """Rows of a stored batch. ``sequence`` and ``committed_at`` are the run's; sequence 0: they stand in the batch."""
        stored = self._read(batch_id)
        part = stored.slice(rows.start, len(rows)) if isinstance(rows, range) else stored.take(pa.array(rows))
        count = part.num_rows
        sequences: list[int] = part.column("commit_sequence").to_pylist() if not sequence else [sequence] * count
        times: list[int] = part.column("committed_at").to_pylist() if not sequence else [committed_at] * count
        columns = [part.column(name).to_pylist() for name in ("exchange", "routing_key", "properties", "body")]
        numbers = rows if isinstance(rows, range) else rows.tolist()
        return list(map(InboxRow._make, zip([batch_id] * count, numbers, sequences, times, *columns, [b""] * count, strict=True)))

    def body_sizes(self, batch_id: int) -> npt.NDArray[np.int64]:
        """Of a stored batch, row by row."""
        lengths = pc.binary_length(self._read(batch_id).column("body"))
        return np.asarray(lengths.to_numpy(zero_copy_only=False), np.int64)

    def row(self, batch_id: int, row: int) -> InboxRow:
        """One message of a batch. ``sequence`` 0: it stands in the run (a batch of one commit)."""
        inbox = self.by_id[batch_id].inbox
        if inbox is not None:
            return inbox[row]
        stored = self._read(batch_id)
        names = stored.schema.names
        values = {name: stored.column(index)[row].as_py() for index, name in enumerate(names)}
        return InboxRow(
            batch_id,
            row,
            values.get("commit_sequence", 0),
            values.get("committed_at", 0),
            values["exchange"],
            values["routing_key"],
            values["properties"],
            values["body"],
            b"",
        )
