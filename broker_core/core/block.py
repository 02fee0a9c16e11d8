"""Blocks of messages and their life: the open block of small commits, stored blocks, and memory-only ones.

Not here: the bytes of stored blocks, which the injected ``read`` returns if they are in memory (``NotLoaded``
otherwise). A block id below 0 is memory-only.
Invariant: a block with no pin that gets no more rows is reported exactly once, in ``Change.forgets`` (stored
ones) or by leaving ``by_id`` (memory-only). A pin is a run of a queue, or a staged part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from broker_core.core.change import Change, InboxRow
from broker_core.core.errors import CorruptCatalog
from broker_core.core.ids import NO_SEQUENCE, BlockId, CommitSequence
from broker_core.core.records import NEVER
from broker_core.core.undo import Undo

Part = Callable[[pa.RecordBatch], pa.RecordBatch]
RowNumbers = range | npt.NDArray[np.int64]  # of a block, rising

OPEN_ROWS = 16_384
OPEN_BYTES = 4 * 1024 * 1024
EXPIRATION = 1  # in the first byte of the property flags


class RowSelection(NamedTuple):
    """Rows of a block, in order: ``row .. row+count``, or the set bits of ``bitmap`` counted from ``row``
    (see RunRecord).
    """

    row: int
    rows: int
    bitmap: bytes  # empty: contiguous


def selected_rows(selection: RowSelection) -> RowNumbers:
    """Returns row numbers, in order."""
    row, rows, bitmap = selection
    if not bitmap:
        return range(row, row + rows)
    return (
        np.flatnonzero(np.unpackbits(np.frombuffer(bitmap, dtype=np.uint8), bitorder="little"))[:rows].astype(
            np.int64
        )
        + row
    )


def row_numbers(selection: RowSelection) -> npt.NDArray[np.int64]:
    """As :func:`selected_rows`, as an array."""
    rows = selected_rows(selection)
    # numpy would ask a range for each of its numbers
    return np.arange(rows.start, rows.stop) if isinstance(rows, range) else rows


def select(mask: npt.NDArray[np.bool_]) -> RowSelection:
    """Returns the set rows of ``mask``, at least one, in the shortest form."""
    count = int(np.count_nonzero(mask))
    first = int(mask.argmax())
    last = len(mask) - 1 - int(mask[::-1].argmax())
    if last - first + 1 == count:
        return RowSelection(first, count, b"")
    row = first & ~7
    return RowSelection(row, count, np.packbits(mask[row : last + 1], bitorder="little").tobytes())


def select_rows(rows: npt.NDArray[np.int64]) -> RowSelection:
    """Returns these rows, at least one and each once, in any order, in the shortest form."""
    first, last, count = int(rows.min()), int(rows.max()), len(rows)
    if last - first + 1 == count:
        return RowSelection(first, count, b"")
    row = first & ~7
    mask = np.zeros(last + 1 - row, dtype=np.bool_)
    mask[rows - row] = True
    return RowSelection(row, count, np.packbits(mask, bitorder="little").tobytes())


class ReadBlock(Protocol):
    """Returns a block, or also only the ``part`` of it that is needed. Raises NotLoaded."""

    def __call__(self, block_id: BlockId, part: Part | None = None, /) -> pa.RecordBatch: ...


class NotLoaded(BaseException):
    """Stored blocks that an operation needs and that are not in memory.

    It is not an error: the caller undoes the operation, loads the blocks without the lock of the state, and
    tries again. ``part``: what the operation needs of a block. ``prepare``: learns from the blocks, under the
    lock, what the operation needs instead of them. It is called until it raises no NotLoaded.
    """

    def __init__(
        self,
        block_ids: Sequence[BlockId],
        *,
        prepare: Callable[[], object] | None = None,
        part: Part | None = None,
    ) -> None:
        super().__init__(block_ids)
        self.block_ids = block_ids
        self.prepare = prepare
        self.part = part


def together(missing: Sequence[NotLoaded]) -> NotLoaded:
    """Returns what asks for the blocks of all, or for those of one that has to ``prepare`` first."""
    for one in missing:
        if one.prepare is not None:
            return one
    block_ids: Iterable[BlockId] = dict.fromkeys(block_id for one in missing for block_id in one.block_ids)
    return NotLoaded(list(block_ids), part=missing[0].part)


class Block:
    __slots__ = (
        "_undo", "block_id", "body_sizes", "closed", "expires_us",
        "inbox", "pins", "rows", "saved", "size_bytes",
    )  # fmt: skip

    def __init__(
        self,
        block_id: BlockId,
        rows: int = 0,
        size_bytes: int = 0,
        inbox: list[InboxRow] | None = None,
        *,
        closed: bool = True,
        undo: Undo | None = None,
    ) -> None:
        self._undo = undo
        self.saved = 0  # ``Undo.work`` when its rows were last saved
        self.block_id = block_id
        self.rows = rows
        self.size_bytes = size_bytes  # of the bodies
        self.inbox = inbox  # the rows, while they are few or memory-only
        self.pins = 0
        self.expires_us = NEVER  # no message expires before, by an expiration of its own
        # of a stored block, row by row; None: nobody has asked
        self.body_sizes: npt.NDArray[np.int32] | None = None
        self.closed = closed  # it gets no more rows

    def add(self, row: InboxRow, expires_us: int = 0) -> None:
        """Adds one row to an open or memory-only block. It expires at ``expires_us`` or later, if it does."""
        inbox, undo = self.inbox, self._undo
        assert inbox is not None
        if undo is not None and self.saved != undo.work:
            self.saved = undo.work
            undo.append((self._remove, len(inbox), self.rows, self.size_bytes))
        inbox.append(row)
        self.rows = row[1] + 1
        self.size_bytes += len(row[7])
        properties = row[6]
        if properties and properties[0] & EXPIRATION and expires_us < self.expires_us:
            self.expires_us = expires_us

    def extend(self, rows: list[InboxRow], size_bytes: int) -> None:
        """Adds rows that follow each other, at least one, whose messages have no expiration. ``size_bytes``:
        of their bodies.
        """
        inbox, undo = self.inbox, self._undo
        assert inbox is not None
        if undo is not None and self.saved != undo.work:
            self.saved = undo.work
            undo.append((self._remove, len(inbox), self.rows, self.size_bytes))
        inbox += rows
        self.rows = rows[-1][1] + 1
        self.size_bytes += size_bytes

    def _remove(self, length: int, rows: int, size_bytes: int) -> None:
        assert self.inbox is not None
        del self.inbox[length:]
        self.rows, self.size_bytes = rows, size_bytes


class Blocks:
    """All blocks that the catalog names or memory holds. ``undo`` is that of the whole state.

    ``read(block_id)`` returns a stored block or raises NotLoaded. ``new_block_id()`` returns an id that
    nothing durable uses.
    """

    def __init__(self, new_block_id: Callable[[], BlockId], read: ReadBlock) -> None:
        self.undo = Undo()
        self.by_id: dict[BlockId, Block] = {}
        self.full: list[BlockId] = []  # closed open blocks that wait for their seal
        self.lost: dict[BlockId, str] = {}  # missing blocks that something names: the reason
        self._new_block_id = new_block_id
        self._stored = read
        self._open: Block | None = None
        self._transient: Block | None = None
        self._next_transient = -1
        self._dead: list[BlockId] = []

    def read(self, block_id: BlockId, part: Part | None = None) -> pa.RecordBatch:
        """Returns a stored block, or a part of it, under the lock. Raises NotLoaded, CorruptCatalog."""
        self.require(block_id)
        return self._stored(block_id) if part is None else self._stored(block_id, part)

    def require(self, block_id: BlockId) -> None:
        """Raises CorruptCatalog for a missing block."""
        if block_id in self.lost:
            raise CorruptCatalog(self.lost[block_id])

    def lose(self, block_id: BlockId, rows: int, why: str) -> Block:
        """While loading: registers a block with a contradiction in the catalog. It can be pinned and dropped,
        not read.
        """
        self.lost[block_id] = (
            f"the catalog contradicts itself, the messages cannot be read: {why}. `txmq broker verify` lists "
            "all of it; stop the broker, and `txmq broker salvage` makes a data directory of what is whole; "
            "or purge the queue"
        )
        block = self.by_id[block_id] = Block(block_id, rows, undo=self.undo)
        return block

    def open(self) -> Block:
        """Returns the block for the rows of the next small commit."""
        block = self._open
        if block is None or block.rows >= OPEN_ROWS or block.size_bytes >= OPEN_BYTES:
            self.close_open()
            block = Block(self._new_block_id(), inbox=[], closed=False, undo=self.undo)
            self.undo.attribute(self, "_open")
            self.undo.item(self.by_id, block.block_id)
            self._open = self.by_id[block.block_id] = block
        return block

    def close_open(self) -> None:
        """Closes the open block: it waits for its seal, or is not needed already."""
        block = self._open
        if block is not None:
            self.undo.attribute(self, "_open")
            self.undo.attribute(block, "closed")
            waiting = self._dead if block.pins == 0 else self.full
            self.undo.growth(waiting)
            self._open = None
            block.closed = True
            waiting.append(block.block_id)

    @property
    def open_rows(self) -> int:
        return self._open.rows if self._open is not None else 0

    @property
    def open_pins(self) -> int:
        return self._open.pins if self._open is not None else 0

    def rows(self, block_id: BlockId) -> int:
        block = self.by_id.get(block_id)
        return block.rows if block is not None else 0

    def transient(self) -> Block:
        """Returns the memory-only block for the next transient messages."""
        block = self._transient
        if block is None or block.closed or block.rows >= OPEN_ROWS or block.size_bytes >= OPEN_BYTES:
            if block is not None and not block.closed:
                self.undo.attribute(block, "closed")
                block.closed = True
                if block.pins == 0:
                    self._drop(block)
            block = Block(BlockId(self._next_transient), inbox=[], closed=False, undo=self.undo)
            self._next_transient -= 1
            self.undo.attribute(self, "_transient")
            self.undo.item(self.by_id, block.block_id)
            self._transient = self.by_id[block.block_id] = block
        return block

    def name(self, block_id: BlockId, rows: int, size_bytes: int) -> Block:
        """Adds a stored block that exists from this commit on."""
        block = self.by_id.get(block_id)
        if block is None:
            block = Block(block_id)
            self.undo.item(self.by_id, block_id)
            self.by_id[block_id] = block
        if rows:
            self.undo.attribute(block, "rows")
            self.undo.attribute(block, "size_bytes")
            block.rows, block.size_bytes = rows, size_bytes
        return block

    def pin(self, block_id: BlockId) -> Block:
        block = self.by_id[block_id]
        self.undo.append((setattr, block, "pins", block.pins))
        block.pins += 1
        return block

    def unpin(self, block_id: BlockId) -> None:
        block = self.by_id[block_id]
        self.undo.append((setattr, block, "pins", block.pins))
        block.pins -= 1
        if block.pins == 0 and block.closed:
            if block_id < 0:
                self._drop(block)
            else:
                self.undo.growth(self._dead)
                self._dead.append(block_id)

    def hold(self, block_id: BlockId, rows: int, size_bytes: int) -> None:
        """Pins a block that a staged part needs."""
        self.name(block_id, rows, size_bytes)
        self.pin(block_id)

    def unhold(self, change: Change, block_id: BlockId) -> None:
        """Unpins a block that a staged part needed."""
        self.unpin(block_id)
        self.record(change)

    def moved(self, change: Change, block_id: BlockId) -> bool:
        """Records that a rewritten block is in another segment; False if nothing needs it."""
        if block_id not in self.by_id:
            change.forgets.append(block_id)
            return False
        change.moves.append(block_id)
        return True

    def _drop(self, block: Block) -> None:
        """Removes a block that nothing needs, and its rows, which a dropped run may still name."""
        self.undo.item(self.by_id, block.block_id)
        self.undo.attribute(block, "inbox")
        self.by_id.pop(block.block_id, None)
        block.inbox = []

    def reopen(self, block_id: BlockId) -> Block:
        """While loading: adds a block whose rows are in the inbox. It gets no more rows and waits for its
        seal.
        """
        block = self.by_id[block_id] = Block(block_id, inbox=[], undo=self.undo)
        self.full.append(block_id)
        return block

    def sealed(self, block_id: BlockId) -> None:
        """Drops the rows of a block that is in a segment now from memory. It may have been forgotten since
        its seal was committed.
        """
        if block_id in self.by_id:
            self.by_id[block_id].inbox = None
        if block_id in self.full:
            self.full.remove(block_id)

    def record(self, change: Change) -> None:
        """Adds the blocks that nothing needs to ``change.forgets``."""
        if not self._dead:
            return
        self.undo.attribute(self, "_dead")
        dead, self._dead = self._dead, []
        for block_id in dead:
            block = self.by_id.get(block_id)
            if block is not None and block.pins == 0:
                self._drop(block)
                change.forgets.append(block_id)
                if block_id in self.full:
                    self.undo.attribute(self, "full")
                    self.full = [full for full in self.full if full != block_id]

    def forget_unpinned(self) -> None:
        """After loading: marks blocks without a pin as not needed."""
        self._dead.extend(
            block.block_id
            for block in self.by_id.values()
            if block.pins == 0 and block.closed and block.block_id > 0
        )

    def decode(
        self, block_id: BlockId, rows: RowNumbers, sequence: CommitSequence, committed_at: int
    ) -> list[InboxRow]:
        """Returns rows of a stored block. ``sequence`` and ``committed_at`` are the run's; NO_SEQUENCE:
        they are in the block.
        """
        stored = self.read(block_id)
        part = stored.slice(rows.start, len(rows)) if isinstance(rows, range) else stored.take(pa.array(rows))
        count = part.num_rows
        sequences: list[CommitSequence] = (
            part.column("commit_sequence").to_pylist() if not sequence else [sequence] * count
        )
        times: list[int] = part.column("committed_at").to_pylist() if not sequence else [committed_at] * count
        columns = [
            part.column(name).to_pylist() for name in ("exchange", "routing_key", "properties", "body")
        ]
        numbers = rows if isinstance(rows, range) else rows.tolist()
        return list(
            map(
                InboxRow._make,
                zip([block_id] * count, numbers, sequences, times, *columns, [b""] * count, strict=True),
            )
        )

    def body_sizes(self, block_id: BlockId) -> npt.NDArray[np.int32]:
        """Returns the body sizes of a stored block, row by row. A known block is read once for that."""
        block = self.by_id.get(block_id)
        if block is not None and block.body_sizes is not None:
            return block.body_sizes
        lengths = pc.binary_length(self.read(block_id).column("body"))
        sizes = np.array(lengths.to_numpy(zero_copy_only=False), np.int32)
        if block is not None:
            block.body_sizes = sizes
        return sizes

    def row(self, block_id: BlockId, row: int) -> InboxRow:
        """Returns one message of a block. NO_SEQUENCE: its sequence is in the run (a block of one commit)."""
        inbox = self.by_id[block_id].inbox
        if inbox is not None:
            return inbox[row]
        stored = self.read(block_id)
        names = stored.schema.names
        values = {name: stored.column(index)[row].as_py() for index, name in enumerate(names)}
        return InboxRow(
            block_id,
            row,
            values.get("commit_sequence", NO_SEQUENCE),
            values.get("committed_at", 0),
            values["exchange"],
            values["routing_key"],
            values["properties"],
            values["body"],
            b"",
        )
