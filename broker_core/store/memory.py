"""MemoryStore: the port over plain dicts, for tests and for a broker that need not outlive its process.

It is not durable. It keeps what is committed apart from what is only appended or sealed, so ``reopened`` shows what a crash leaves.

Invariant: ``_kept`` changes in ``commit`` only, and only as a whole.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import pyarrow as pa
import xxhash

from broker_core import failpoint
from broker_core.broker.change import Change, InboxRow
from broker_core.broker.records import Record
from broker_core.errors import DataLoss, StoreFailed
from broker_core.store.codec import Value, blank_bodies, body_bytes, decode, encode_change, merged, merged_batch
from broker_core.store.port import BatchInfo, Location, SegmentUsage, StoreImage

Rows = dict[tuple[Value, ...], tuple[Value, ...]]


@dataclass(slots=True)
class _Kept:
    """All that is committed."""

    records: dict[type[Record], Rows] = field(default_factory=dict)
    inbox: dict[int, list[InboxRow]] = field(default_factory=dict)
    batches: dict[int, pa.RecordBatch] = field(default_factory=dict)
    sequence: int = 0
    last_batch_id: int = 0
    clean: bool = True

    def branch(self) -> _Kept:
        return _Kept(
            {cls: dict(rows) for cls, rows in self.records.items()},
            {batch_id: list(rows) for batch_id, rows in self.inbox.items()},
            dict(self.batches),
            self.sequence,
            self.last_batch_id,
            self.clean,
        )


class MemoryStore:
    """A :class:`broker_core.store.port.Store` that forgets everything with its process."""

    def __init__(self) -> None:
        self._kept = _Kept()
        self._staged: dict[int, pa.RecordBatch] = {}  # appended, not named yet
        self._written: dict[int, pa.RecordBatch] = {}  # sealed or rewritten, the commit that says so is to come
        self._last_batch_id = 0
        self._lock = threading.Lock()
        self._failure: Exception | None = None
        self._closed = False

    def reopened(self) -> MemoryStore:
        """A new store that holds what this one had committed: this process crashed, or closed, here."""
        other = MemoryStore()
        with self._lock:
            other._kept = self._kept.branch()
        other._last_batch_id = other._kept.last_batch_id
        return other

    def load(self) -> StoreImage:
        kept = self._kept
        records = [decode(cls, row) for cls, rows in kept.records.items() for row in rows.values()]
        inbox = [row for batch_id in sorted(kept.inbox) for row in kept.inbox[batch_id]]
        batches = [_info(batch_id, batch) for batch_id, batch in sorted(kept.batches.items())]
        image = StoreImage(records, inbox, batches, kept.sequence, kept.clean)
        kept.clean = False
        return image

    def new_batch_id(self) -> int:
        with self._lock:
            self._last_batch_id += 1
            return self._last_batch_id

    def append(self, batch: pa.RecordBatch) -> BatchInfo:
        self._check_writable()
        batch_id = self.new_batch_id()
        with self._lock:
            self._staged[batch_id] = batch
        failpoint.here("store.append.written")
        return _info(batch_id, batch)

    def sync(self) -> None:
        self._check_writable()

    def encode(self, change: Change) -> None:
        encode_change(change)

    def commit(self, changes: Sequence[Change]) -> None:
        self._check_writable()
        encoded = [encode_change(change) for change in changes]
        try:
            failpoint.here("store.commit.begin")  # 1.
            failpoint.here("store.commit.synced")  # 2. nothing to sync
            self._check(changes)
            records = merged(encoded)
            failpoint.here("store.commit.executed")  # 3. all that can fail has been done
            with self._lock:
                for change in changes:
                    self._apply(change)
                for cls, rows in records.items():
                    table = self._kept.records.setdefault(cls, {})
                    for key, values in rows.items():
                        if values is None:
                            table.pop(key, None)
                        else:
                            table[key] = values
            failpoint.here("store.commit.committed")  # 4.
        except Exception as error:
            self._failure = error
            raise StoreFailed(f"the commit failed: {error}; open the store again") from error

    def _check(self, changes: Sequence[Change]) -> None:
        lengths: dict[int, int] = {}
        for change in changes:
            for row in change.rows:
                batch_id = row[0]
                expected = lengths.get(batch_id)
                if expected is None:
                    expected = len(self._kept.inbox.get(batch_id, ()))
                if row[1] != expected:
                    raise ValueError(f"row {row[1]} of batch {batch_id} is not the next one, {expected}")
                lengths[batch_id] = expected + 1
            for batch_id in change.names:
                if batch_id not in self._staged:
                    raise ValueError(f"batch {batch_id} was not appended")
            for batch_ids in (change.seals, change.moves):
                for batch_id in batch_ids:
                    if batch_id not in self._written:
                        raise ValueError(f"batch {batch_id} was neither sealed nor rewritten")

    def _apply(self, change: Change) -> None:
        kept = self._kept
        if change.sequence > kept.sequence:
            kept.sequence = change.sequence
        for row in change.rows:
            batch_id, sequence = row[0], row[2]
            rows = kept.inbox.get(batch_id)
            if rows is None:
                rows = kept.inbox[batch_id] = []
            rows.append(row)
            if sequence > kept.sequence:
                kept.sequence = sequence
            if batch_id > kept.last_batch_id:
                kept.last_batch_id = batch_id
        for batch_id in change.names:
            kept.batches[batch_id] = self._staged.pop(batch_id)
            kept.last_batch_id = max(kept.last_batch_id, batch_id)
        for batch_ids in (change.seals, change.moves):
            for batch_id in batch_ids:
                kept.batches[batch_id] = self._written.pop(batch_id)
                kept.inbox.pop(batch_id, None)
        for batch_id in change.forgets:
            for place in (kept.batches, kept.inbox, self._staged, self._written):
                place.pop(batch_id, None)

    def seal(self, batch_id: int) -> None:
        self._check_writable()
        with self._lock:
            self._written[batch_id] = merged_batch(self._inbox_rows(batch_id))
        failpoint.here("store.seal.written")
        failpoint.here("store.seal.synced")

    def rewrite(self, batch_id: int, live: bytes | None) -> None:
        self._check_writable()
        batch = self.read(batch_id)
        if live is not None:
            batch = blank_bodies(batch, live)
        with self._lock:
            self._written[batch_id] = batch
        failpoint.here("store.rewrite.synced")

    def segment_usage(self) -> list[SegmentUsage]:
        return []

    def roll(self, number: int) -> None:
        """There are no files."""

    def read(self, batch_id: int) -> pa.RecordBatch:
        with self._lock:
            batch = self._kept.batches.get(batch_id)
            batch = self._staged.get(batch_id) if batch is None else batch
            return batch if batch is not None else merged_batch(self._inbox_rows(batch_id))

    def locate(self, batch_id: int) -> Location | None:
        return None

    def close(self, *, clean: bool = True) -> None:
        with self._lock:
            self._kept = copy.copy(self._kept)
            self._kept.clean = clean
            self._closed = True

    def _inbox_rows(self, batch_id: int) -> list[InboxRow]:
        rows = self._kept.inbox.get(batch_id)
        if rows is None:
            raise DataLoss(f"batch {batch_id} is not in the store: its messages were forgotten or never committed")
        return rows

    def _check_writable(self) -> None:
        if self._closed:
            raise StoreFailed("the store is closed; open it again")
        if self._failure is not None:
            raise StoreFailed(f"an earlier write failed: {self._failure}; open the store again")


def _info(batch_id: int, batch: pa.RecordBatch) -> BatchInfo:
    return BatchInfo(batch_id, batch.num_rows, body_bytes(batch), xxhash.xxh3_64_intdigest(batch.serialize()))
