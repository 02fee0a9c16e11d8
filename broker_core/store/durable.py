"""DurableStore: Arrow segments for the bytes, one SQLite transaction for their meaning.

Not here: where blocks are (``blocks.py``), file formats (``segment.py``), SQL (``catalog.py``),
``recovery.py``, any rule of the domain.

Invariant: what the catalog does not name does not exist, and what it names is durable. After a failed write,
sync or commit the store accepts no writes until it is reopened: the state of the disk is unknown.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

from broker_core.arrow.part_file import PartFile
from broker_core.core import failpoint
from broker_core.core.change import Change, Damaged, InboxRow
from broker_core.core.errors import DataLoss, OptionError, ResourceShortage, StoreError, StoreFailed
from broker_core.core.ids import NO_SEQUENCE, BlockId, CommitSequence
from broker_core.store.blocks import StoredBlocks
from broker_core.store.codec import Encoded, blank_bodies, encode_change
from broker_core.store.directory import DirectoryLock, prepare
from broker_core.store.failure import store_error, unread_catalog
from broker_core.store.inbox import MAX_ROWS, Packed, pack_group, unpack_all
from broker_core.store.port import BlockInfo, Location, SegmentUsage, StoreImage
from broker_core.store.recovery import recover
from broker_core.store.segment import ROLL_BYTES, BlockPlace

CACHE_BYTES = 32 * 1024 * 1024


Places = Mapping[BlockId, BlockPlace]


class Plan:
    """What one commit does to the files, computed and checked before anything is written: of ``changes``,
    given the blocks of before.

    It is complete, or ValueError is raised. New rows of an open block follow its existing rows.
    """

    __slots__ = (
        "carried", "forgotten", "history", "inbox", "only_messages", "put", "rows", "sealed", "sequence",
    )  # fmt: skip

    def __init__(self, changes: Sequence[Change], blocks: StoredBlocks) -> None:
        self.rows: list[InboxRow] = []
        self.inbox: dict[BlockId, list[InboxRow]] = {}  # the same rows, by block
        self.put: dict[BlockId, BlockPlace] = {}
        self.sealed: list[BlockId] = []
        self.forgotten: list[BlockId] = []
        self.sequence = self.carried = NO_SEQUENCE  # the latest of the changes, and of the rows
        self.only_messages = True
        self.history: tuple[bytes, bytes] | None = None
        for change in changes:
            if change.sequence > self.sequence:
                self.sequence = change.sequence
            if change.rows:
                self.rows += change.rows
            if change.history:
                self.history = change.history
            found = change.journal or change.names or change.seals or change.moves
            if found or change.forgets or change.tidy:
                self._add(change, blocks.staged, blocks.written)
        if self.rows:
            self._check_rows(blocks)
        if self.history and not self.rows:
            raise ValueError("a group has a history to keep beside its rows, and no rows")
        for block_id in self.sealed:
            rows = len(blocks.inbox.get(block_id, ())) + len(self.inbox.get(block_id, ()))
            if rows != self.put[block_id].rows:
                raise ValueError(
                    f"open block {block_id} has {rows} rows, but {self.put[block_id].rows} were sealed"
                )

    def _add(self, change: Change, staged: Places, written: Places) -> None:
        self.only_messages = False
        for block_ids, places in ((change.names, staged), (change.seals, written), (change.moves, written)):
            for block_id in block_ids:
                place = places.get(block_id)
                if place is None:
                    raise ValueError(f"block {block_id} is named but was not written")
                self.put[block_id] = place
        self.sealed += change.seals
        self.forgotten += change.forgets

    def _check_rows(self, blocks: StoredBlocks) -> None:
        rows = self.rows
        self.carried = rows[-1][2]  # rows are in commit order
        block_id = rows[0][0]
        self.inbox[block_id] = rows
        if rows[-1][0] != block_id or [row[0] for row in rows].count(block_id) < len(rows):
            self.inbox = {
                block_id: [row for row in rows if row[0] == block_id] for block_id in {row[0] for row in rows}
            }
        for block_id, rows in self.inbox.items():
            first = len(blocks.inbox.get(block_id, ()))
            end = first + len(rows)
            for row, expected in zip(rows, range(first, end)):
                if row[1] != expected:
                    raise ValueError(f"row {row[1]} of block {block_id} is not the next one, {expected}")
            if end > MAX_ROWS or block_id in blocks.places:
                raise ValueError(f"block {block_id} takes no more rows behind row {first}")


class DurableStore:
    """A :class:`broker_core.store.port.Store` in the directory ``path``, which is created if it is missing.

    Raises DataDirectoryInvalid, DataDirectoryLocked, DataDirectoryFormat, CorruptCatalog, DiskFull,
    StoreFailed.
    """

    def __init__(
        self, path: str | Path, *, roll_bytes: int = ROLL_BYTES, cache_bytes: int = CACHE_BYTES
    ) -> None:
        self._path = Path(path).absolute()
        self._failure: StoreError | None = None
        self._closed = False
        prepare(self._path)
        self._directory_lock = DirectoryLock(self._path)
        try:
            self._catalog, meta, self._segments, places = recover(self._path, roll_bytes)
        except BaseException as error:
            self._directory_lock.release()
            if isinstance(error, (OSError, sqlite3.Error)):
                raise store_error(error, self._path) from error
            raise
        self._blocks = StoredBlocks(self._path, self._segments, places, cache_bytes)
        self._clean, self._sequence = bool(meta.clean), CommitSequence(meta.sequence)
        self._next_block_id = meta.next_block_id

    @property
    def directory(self) -> Path:
        return self._path

    def load(self) -> StoreImage:
        """Returns the durable data, without bodies in segments. Raises CorruptCatalog."""
        try:
            damaged: list[Damaged] = []
            records = list(self._catalog.records(damaged))
            inbox, history = unpack_all(self._catalog.packed_inbox())
        except (sqlite3.Error, ValueError, TypeError) as error:
            raise unread_catalog(error, self._path) from error
        blocks = self._blocks.load(inbox)
        self._sequence = max([self._sequence, *(row.sequence for row in inbox)])
        self._next_block_id = max([self._next_block_id, *(block_id + 1 for block_id in self._blocks.inbox)])
        return StoreImage(records, inbox, blocks, self._sequence, self._clean, history, damaged)

    # Writing

    def new_block_id(self) -> BlockId:
        with self._blocks.lock:
            block_id, self._next_block_id = BlockId(self._next_block_id), self._next_block_id + 1
            return block_id

    def _check_writable(self) -> None:
        if self._closed:
            raise StoreFailed(f"the store {self._path} is closed; open it again")
        if self._failure is not None:
            raise StoreFailed(f"an earlier write failed: {self._failure.message}") from self._failure

    def _fail(self, error: BaseException) -> BaseException:
        """Stops all later writes. Returns what to raise."""
        failure = store_error(error, self._path)
        self._failure = self._failure or failure
        return failure if isinstance(error, Exception) else error

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Raises after an earlier failure, and makes any failure inside the last one."""
        self._check_writable()
        try:
            yield
        except (OptionError, ResourceShortage):  # raised before a byte was written
            raise
        except BaseException as error:
            raise self._fail(error) from error

    def append(self, block: pa.RecordBatch) -> BlockInfo:
        block_id = self.new_block_id()
        with self._writing():
            info = self._blocks.stage(block_id, self._segments.append(block_id, block))
            failpoint.here("store.append.written")
        return info

    def adopt(self, file: PartFile) -> list[tuple[BlockInfo, pa.RecordBatch]]:
        """Makes a writer's file a segment, as if its blocks were appended. Empty, and nothing done, if the
        file is unavailable or damaged.
        """
        self._check_writable()
        block_ids = [self.new_block_id() for _ in file.parts]
        taken = zip(block_ids, self._segments.adopt_file(block_ids, file), strict=False)
        adopted = [(self._blocks.stage(block_id, place), block) for block_id, (place, block) in taken]
        failpoint.here("store.adopt.linked")
        return adopted

    def sync(self) -> None:
        with self._writing():
            self._segments.sync()
            failpoint.here("store.sync.synced")

    def encode(self, change: Change) -> None:
        encode_change(change)

    def commit(self, changes: Sequence[Change]) -> None:
        self._check_writable()
        encoded = [encode_change(change) for change in changes]
        try:
            # 1. nothing is written yet
            plan = Plan(changes, self._blocks)
            failpoint.here("store.commit.begin")
            # 2. the bytes that this commit names
            if plan.put:
                self._segments.sync({place.segment for place in plan.put.values()})
            failpoint.here("store.commit.synced")
            # 3. their meaning, and 4. the commit point
            idle = self._write(encoded, plan)
            failpoint.here("store.commit.committed")
            # 5. readers see it; unneeded files are removed
            self._publish(plan)
            for number in idle:
                self._segments.delete(number)
                failpoint.here("store.forget.unlinked")
        except BaseException as error:
            raise self._fail(error) from error

    def _write(self, encoded: Sequence[Encoded], plan: Plan) -> list[int]:
        """Writes the transaction of one commit. Returns the segments that nothing needs after it."""
        catalog, segments = self._catalog, self._segments
        rows = pack_group(plan.rows, plan.history)
        last = self._sequence if self._sequence > plan.carried else plan.carried
        if (
            plan.only_messages
            and len(rows) == 1
            and plan.sequence <= last
            and not (segments.closed or segments.idle)
        ):
            failpoint.here("store.commit.executed")
            # a single statement is its own transaction, and costs less than with BEGIN and COMMIT
            catalog.put_inbox(rows)
            return []
        catalog.begin()
        idle = self._execute(rows, encoded, plan, last)
        failpoint.here("store.commit.executed")
        catalog.commit()
        return idle

    def _execute(
        self, rows: Sequence[Packed], encoded: Sequence[Encoded], plan: Plan, last: CommitSequence
    ) -> list[int]:
        catalog, segments = self._catalog, self._segments
        catalog.put_inbox(rows)
        catalog.put_records(encoded)
        emptied: list[BlockId] = []
        if plan.put or plan.forgotten:
            inbox = self._blocks.inbox
            emptied = [block_id for block_id in (*plan.sealed, *plan.forgotten) if block_id in inbox]
            self._blocks.name(catalog, plan.put, plan.forgotten, emptied)
        idle = segments.take_idle() if segments.idle else []
        for number in segments.take_closed() if segments.closed else ():
            catalog.close_segment(number)
        for number in idle:
            catalog.drop_segment(number)
        if emptied or plan.sequence > last:
            catalog.set_meta(sequence=max(plan.sequence, last))
        if plan.forgotten or idle:
            catalog.set_meta(next_block_id=self._next_block_id, next_segment=segments.next_number)
        return idle

    def _publish(self, plan: Plan) -> None:
        blocks = self._blocks
        with blocks.lock:
            for block_id, rows in plan.inbox.items():
                blocks.inbox.setdefault(block_id, []).extend(rows)
            self._sequence = max(self._sequence, plan.sequence, plan.carried)
            if plan.put or plan.forgotten:
                blocks.show(plan.put, plan.forgotten)

    def seal(self, block_id: BlockId) -> None:
        block = self._blocks.read_open(block_id)
        if block is None:
            raise DataLoss(f"block {block_id} is not an open block of {self._path}")
        with self._writing():
            segment = self._blocks.rewrite(block_id, block)
            failpoint.here("store.seal.written")
            self._segments.sync({segment})
            failpoint.here("store.seal.synced")

    def rewrite(self, block_id: BlockId, live: bytes | None, block: pa.RecordBatch | None = None) -> None:
        block = self.read(block_id) if block is None else block
        if live is not None:
            block = blank_bodies(block, live)
        with self._writing():
            self._segments.sync({self._blocks.rewrite(block_id, block)})
            failpoint.here("store.rewrite.synced")

    # Reading

    def segment_usage(self) -> list[SegmentUsage]:
        return self._blocks.usage()

    def roll(self, number: int) -> None:
        with self._writing():
            self._segments.roll(number)

    def read(self, block_id: BlockId) -> pa.RecordBatch:
        return self._blocks.read(block_id)

    def peek(self, block_id: BlockId) -> pa.RecordBatch | None:
        return self._blocks.cache.get(block_id)

    def locate(self, block_id: BlockId) -> Location | None:
        return self._blocks.locate(block_id)

    @contextmanager
    def pin_segments(self) -> Iterator[Callable[[Path, Callable[[], None]], None]]:
        """Until its end no segment is deleted. Yields what copies the catalog. Raises ResourceLocked."""
        with self._segments.deletions.pin():
            yield self._catalog.copy_to

    def close(self, *, clean: bool = True) -> None:
        """May be called again; after a failure it never counts as clean. Raises StoreFailed or DiskFull if
        the last commit fails.
        """
        if self._closed:
            return
        try:
            if clean and self._failure is None:
                self._mark_closed()
        finally:
            self._closed = True
            steps: list[Callable[[], None]] = [
                self._segments.release_files,
                self._catalog.close,
                self._directory_lock.release,
            ]
            for step in steps:
                try:
                    step()
                except (OSError, sqlite3.Error) as error:
                    self._failure = self._failure or store_error(error, self._path)

    def _mark_closed(self) -> None:
        with self._writing():
            self._segments.end_all()
            failpoint.here("store.close.synced")
            self._catalog.begin()
            for number in self._segments.take_closed():
                self._catalog.close_segment(number)
            numbers = {"next_block_id": self._next_block_id, "next_segment": self._segments.next_number}
            self._catalog.set_meta(clean=1, sequence=self._sequence, **numbers)
            self._catalog.commit()
            failpoint.here("store.close.committed")
