"""What one commit does to the files, computed and checked before anything is written.

Not here: doing it (``durable.py``).
Invariant: a plan is complete, or ValueError is raised. New rows of an open block follow its existing rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from broker_core.broker.state.change import Change, InboxRow
from broker_core.ids import NO_SEQUENCE, BlockId
from broker_core.store.inbox import MAX_ROWS
from broker_core.store.segment import BlockPlace

Inbox = Mapping[BlockId, list[InboxRow]]
Places = Mapping[BlockId, BlockPlace]


class Plan:
    """The plan of ``changes``, given the rows of open blocks (``inbox``), and the blocks that are named,
    appended, and sealed or rewritten.
    """

    __slots__ = (
        "carried",
        "forgotten",
        "inbox",
        "only_messages",
        "put",
        "rows",
        "sealed",
        "sequence",
        "told",
    )

    def __init__(
        self, changes: Sequence[Change], inbox: Inbox, named: Places, staged: Places, written: Places
    ) -> None:
        self.rows: list[InboxRow] = []
        self.inbox: dict[BlockId, list[InboxRow]] = {}  # the same rows, by block
        self.put: dict[BlockId, BlockPlace] = {}
        self.sealed: list[BlockId] = []
        self.forgotten: list[BlockId] = []
        self.sequence = self.carried = NO_SEQUENCE  # the latest of the changes, and of the rows
        self.only_messages = True
        self.told = b""
        for change in changes:
            if change.sequence > self.sequence:
                self.sequence = change.sequence
            if change.rows:
                self.rows += change.rows
            if change.told:
                self.told = change.told
            if (
                change.journal
                or change.names
                or change.seals
                or change.moves
                or change.forgets
                or change.tidy
            ):
                self._add(change, staged, written)
        if self.rows:
            self._check_rows(inbox, named)
        if self.told and not self.rows:
            raise ValueError("a group has a history to keep beside its rows, and no rows")
        for block_id in self.sealed:
            rows = len(inbox.get(block_id, ())) + len(self.inbox.get(block_id, ()))
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

    def _check_rows(self, inbox: Inbox, named: Places) -> None:
        rows = self.rows
        self.carried = rows[-1][2]  # rows are in commit order
        block_id = rows[0][0]
        self.inbox[block_id] = rows
        if rows[-1][0] != block_id or [row[0] for row in rows].count(block_id) < len(rows):
            self.inbox = {
                block_id: [row for row in rows if row[0] == block_id] for block_id in {row[0] for row in rows}
            }
        for block_id, rows in self.inbox.items():
            first = len(inbox.get(block_id, ()))
            end = first + len(rows)
            for row, expected in zip(rows, range(first, end)):
                if row[1] != expected:
                    raise ValueError(f"row {row[1]} of block {block_id} is not the next one, {expected}")
            if end > MAX_ROWS or block_id in named:
                raise ValueError(f"block {block_id} takes no more rows behind row {first}")
