"""Compaction: segments that are mostly dead bytes are rewritten, so that disk usage follows what queues need.
The history of commits is packed.

Not here: which rows are needed (``broker/``), how files are written and deleted (``store/``). The file is
measured, not its remaining blocks, because forgotten and rolled back bytes are dead too. An open segment that
is mostly dead is closed first, if nothing was written to it since the last check, or if much of it is dead.
Invariant: a block keeps its rows and their numbers; only bodies that no queue needs are blanked. A block that
cannot be read stays where it is, and does not prevent the compaction of others.
"""

from __future__ import annotations

from functools import partial

from broker_core import failpoint
from broker_core.broker.broker import BrokerState
from broker_core.broker.history.history import CommitHistory, Single
from broker_core.broker.history.rows import compressed
from broker_core.broker.state.change import Change
from broker_core.broker.state.records import HistoryRecord
from broker_core.errors import CorruptCatalog, CorruptSegment, DataLoss
from broker_core.ids import BlockId
from broker_core.node.committer import Committer, changes
from broker_core.store.port import BlockUsage, SegmentUsage, Store

ALIVE = 0.3  # a segment with a smaller share of living bytes is compacted
OPEN_BYTES = 64 * 1024  # a smaller open segment is not compacted
# an open segment that is mostly dead is closed at once with so many dead bytes, else when it is idle
ROLL_BYTES = 16 * 1024 * 1024


class Compaction:
    def __init__(self, committer: Committer, state: BrokerState, store: Store) -> None:
        self._committer = committer
        self._state = state
        self._store = store
        self._written: dict[
            BlockId, int
        ] = {}  # block -> rows whose bodies were alive when it was last written
        self._sizes: dict[int, int] = {}  # of open segments at the last check

    def run(self) -> None:
        """Checks every segment once."""
        usage = self._store.segment_usage()
        for segment in usage:
            self._look_at(segment)
        known = self._state.blocks.by_id
        self._written = {block_id: count for block_id, count in self._written.items() if block_id in known}
        self._sizes = {segment.number: segment.size_bytes for segment in usage if segment.open}

    def _look_at(self, segment: SegmentUsage) -> None:
        if segment.open and segment.size_bytes < OPEN_BYTES:
            return
        living = self._living(segment)
        if living is None:
            return
        alive = sum(self._alive(block, living[block.block_id][1]) for block in segment.blocks)
        if alive >= ALIVE * segment.size_bytes:
            return
        if segment.open:
            idle = self._sizes.get(segment.number) == segment.size_bytes
            if not idle and segment.size_bytes - alive < ROLL_BYTES:
                return
            self._store.roll(segment.number)
            failpoint.here("upkeep.compact.rolled")
        for block_id, (live, count) in living.items():
            self._rewrite(block_id, live, count)
        self._committer.run(_tidy)  # removes the file, which nothing needs now

    def _living(self, segment: SegmentUsage) -> dict[BlockId, tuple[bytes | None, int]] | None:
        """Returns per block the needed rows (None: all) and their number; None if some block of the segment
        cannot be moved.
        """
        if not all(block.named for block in segment.blocks):
            return None  # an open transaction, or a commit in progress
        ids = [block.block_id for block in segment.blocks]

        def look(state: BrokerState, _change: Change, _now: int) -> dict[BlockId, tuple[bytes | None, int]]:
            known = [block_id for block_id in ids if block_id in state.blocks.by_id]
            needed: dict[BlockId, tuple[bytes | None, int]] = {
                block_id: (None, state.blocks.rows(block_id)) for block_id in known
            }
            if segment.kind != "branch":
                needed.update(state.living_rows(known))
            return needed

        found = self._committer.run(look)
        # otherwise a coming commit forgets one
        return found if all(block_id in found for block_id in ids) else None

    def _alive(self, block: BlockUsage, count: int) -> int:
        """Returns about how many bytes the rewritten block has: bodies are removed, other columns stay."""
        rows = self._written.get(block.block_id, self._state.blocks.rows(block.block_id))
        bodies = min(block.size_bytes, block.length)
        return block.length - bodies + bodies * min(count, rows) // max(1, rows)

    def _rewrite(self, block_id: BlockId, live: bytes | None, count: int) -> None:
        try:
            self._store.rewrite(block_id, live)
        except (DataLoss, CorruptSegment, CorruptCatalog):
            return  # forgotten meanwhile, or reading it raises the error
        failpoint.here("upkeep.compact.written")
        if self._committer.run(changes(self._state.blocks.moved, block_id)):
            self._written[block_id] = count


def _tidy(_state: BrokerState, change: Change, _now: int) -> None:
    change.tidy = True


def compact_history(committer: Committer, now_us: int) -> None:
    """Packs the rows of the history of commits, and drops what is too old."""
    while True:
        with committer.look as state:
            history = state.transactions.history
            found, due = history.to_pack(), history.is_due(now_us)
        if found is not None:
            first, rows = found
            into = compressed(rows)  # without the lock
            failpoint.here("upkeep.history.packed")
            committer.run(partial(_pack, history, first, into))
        if due:
            committer.run(lambda state, change, now: state.transactions.history.trim(change, now))
            failpoint.here("upkeep.history.trimmed")
        if found is None and not due:
            return


def _pack(
    history: CommitHistory,
    first: Single,
    into: HistoryRecord,
    _state: BrokerState,
    change: Change,
    _now: int,
) -> None:
    history.pack(change, first, into)
