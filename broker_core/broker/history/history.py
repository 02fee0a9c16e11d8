"""The history of commits, as the broker keeps it: rows, oldest first.

The works of one group commit share a row. The group itself makes it durable, so the history is neither behind
the commits nor ahead of them: beside the messages of the group in the inbox (``Change.history``), where it
costs nothing; or, without messages, as a record. Rows beside messages become a record before these leave the
inbox. Many rows become one (``upkeep.py``).

Not here: what a row says (``rows.py``), who may see it (``lookup.py``). A commit that makes nothing durable,
as of transient messages, has no row.
Invariant: after each commit the rows take at most ``size_bytes``. None is older than ``age_s`` but those of
the next turn of the upkeep; a row is as old as its last commit. Numbers of commits rise from row to row; a
record that is packed has all of them up to its last one, so what is beside messages up to there is not read
again.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from operator import attrgetter
from typing import Any, NamedTuple

from broker_core.broker.history.rows import LINES, NAMES_BYTES, PLAIN_BYTES, Entries, Names, commits, written
from broker_core.core.change import Change, Damaged, Effects, HistoryBeside, InboxRow, Numbers
from broker_core.core.errors import OptionError
from broker_core.core.ids import NO_BLOCK, NO_SEQUENCE, BlockId, CommitSequence
from broker_core.core.records import ForgottenRecord, HistoryRecord, LedgerRecord, Record
from broker_core.core.undo import Undo

TOGETHER = 256  # commits whose rows are packed into one
TOGETHER_BYTES = 256 * 1024
AT_ONCE = 4  # that are packed in one commit: each commit lets others wait, and so does the lock
# a row takes the commits that follow, because each one is four objects for the garbage collector to see;
GROWN_BYTES = 64 * PLAIN_BYTES  # not one with so much, or with much of what is kept,
GAP_US = 10_000  # nor one whose last commit is so long ago: its commits leave together
TRIMMED = 256  # rows that one commit drops because of their age
_HIDDEN = "history@"  # before the name of a virtual host, as the kind of a horizon
_GONE = "history"  # the kind of the horizon up to which rows beside messages were dropped
_ROW_BYTES = 400  # of a row in memory and in the catalog, beside its text


@dataclass(frozen=True, slots=True)
class HistoryLimits:
    """How much of the history is kept, and for how long; 0 bytes: none."""

    size_bytes: int = 16 * 1024 * 1024
    age_s: float = 24 * 3600.0

    def __post_init__(self) -> None:
        if self.size_bytes < 0 or not self.age_s > 0:
            raise OptionError(
                "the history of commits must have at least 0 bytes and more than 0 seconds, not "
                f"{self.size_bytes} and {self.age_s} s"
            )


HISTORY = HistoryLimits()
_new = tuple.__new__  # takes a third of the time of a NamedTuple's own


class Single(NamedTuple):
    """A row that is not packed: its ``entries`` are read with ``names``. ``block_id``: it is beside messages
    of this block. Otherwise ``number`` is that of its record.
    """

    number: int
    entries: Entries
    names: Names
    size_bytes: int  # with the names that it was the first to have
    block_id: BlockId = NO_BLOCK


class Pack(NamedTuple):
    """A record in the place of rows, of which ``first`` is the first."""

    first: Single
    into: HistoryRecord


class CommitHistory:
    """Under the lock of the state. Works that only look see the rows of durable commits."""

    def __init__(self, undo: Undo, numbers: Numbers) -> None:
        self.limits = HISTORY
        self.size_bytes = 0
        # up to these times a virtual host was another one of its name, which was deleted
        self.hidden: dict[str, int] = {}
        self._gone_us = 0  # what is beside messages up to this time is not read again
        self._dropped_us = 0  # the last commit of the last row that was dropped: all others are as late
        self._undo = undo
        self._numbers = numbers
        self._packed: deque[HistoryRecord] = deque()
        self._single: deque[Single] = deque()  # later than those
        self._grows = False  # the last of them takes more commits
        self._beside: dict[BlockId, Names] = {}  # of blocks that have, or had, rows beside their messages
        self._next = 1
        self._group: list[tuple[CommitSequence, int, Effects]] = []

    def restore(
        self,
        records: Iterable[HistoryRecord],
        history: Iterable[HistoryBeside],
        horizons: Iterable[ForgottenRecord],
    ) -> list[Damaged]:
        """Restores the rows while loading. Returns those that cannot be read, and goes on without them."""
        damaged: list[Damaged] = []
        single: list[Single] = []
        for horizon in horizons:
            if horizon.kind == _GONE:
                self._gone_us = horizon.decided_at
            elif horizon.kind.startswith(_HIDDEN):
                self.hidden[horizon.kind.removeprefix(_HIDDEN)] = horizon.decided_at
        for record in sorted(records, key=lambda record: record.number):
            self._next = max(self._next, record.number + 1)
            if record.packed:
                self._packed.append(record)
                continue
            try:
                single.append(_restored(record.number, _read(record.commits), Names()))
            except ValueError as error:
                damaged.append(Damaged(record.number, f"row {record.number} of table history: {error}"))
        covered = self._packed[-1].last if self._packed else 0
        beside, unread = _restored_beside(history, self._beside)
        single += [
            row for row in beside if row.entries.last > covered and row.entries.ended_at > self._gone_us
        ]
        self._single.extend(sorted(single, key=attrgetter("entries.first")))
        self.size_bytes = sum(map(_size, self._packed)) + sum(each.size_bytes for each in self._single)
        return damaged + unread

    @property
    def latest_us(self) -> int:
        """Returns the time of the last commit that is known."""
        last = self._single or self._packed
        return _ended_at(last[-1]) if last else 0

    def rows(self) -> list[HistoryRecord]:
        """Returns all rows, oldest first, each with its names."""
        return [*self._packed, *([_together(self._single)] if self._single else [])]

    # -- with each commit ------------------------------------------------------------------------------------
    def add(self, change: Change, now_us: int) -> None:
        """Adds a work that has succeeded, and gives it a commit sequence number if it has none."""
        if change.sequence == NO_SEQUENCE:
            change.sequence = self._numbers.next_sequence()
        if not change.effects.is_plain:
            for record in change.journal:
                if isinstance(record, LedgerRecord) and record.commit_sequence == change.sequence:
                    change.effects.xid = ""
                    change.effects.batch = (
                        record.app_id, record.query_id, record.batch_id, record.sequence
                    )  # fmt: skip
        self._group.append((change.sequence, now_us, change.effects))

    def keep(self, changes: Sequence[Change], now_us: int) -> Change | None:
        """Makes the history of the group a part of its last change with rows; what else must be written is
        returned.
        """
        if len(changes) == len(self._group) == 1 and self._keep_published(changes[0]):
            return None
        beside: Change | None = None
        messages = 0
        leaves = False  # blocks leave the inbox
        for each in changes:
            if each.rows:
                beside = each
                messages += len(each.rows)
            if each.seals or each.forgets:
                leaves = True
        change = self._save_leaving(changes) if leaves and self._beside else None
        group, self._group = self._group, []
        if not group or not self.limits.size_bytes:
            return change
        block_id = NO_BLOCK if beside is None or leaves else beside.rows[-1][0]
        names = self._beside.get(block_id) if block_id else None
        if names is None or names.size_bytes > NAMES_BYTES:
            names = Names()
        known_bytes = names.size_bytes
        found = written(group, names)
        if found is None:
            return change
        entries, places = found
        number = 0
        if block_id:
            assert beside is not None
            self._beside[block_id] = names
            are_own = len(places) == messages == len(group) and _are_of(changes, group)
            beside.history = names.new_texts(entries, places if are_own else [])
        else:
            number, self._next = self._next, self._next + 1
        size_bytes = len(entries.plain) + len(entries.texts) + names.size_bytes - known_bytes + _ROW_BYTES
        if number:
            change = change or Change()
            text = names.text((entries,)).encode()
            change.put(HistoryRecord(number, entries.first, entries.last, entries.ended_at, 0, text))
        self._single.append(_new(Single, (number, entries, names, size_bytes, block_id)))
        self.size_bytes += size_bytes
        if self.size_bytes > self.limits.size_bytes:  # what is too old leaves with the upkeep
            change = change or Change()
            self._trim(change, now_us)
        return change

    def _keep_published(self, change: Change) -> bool:
        """The same in half the time, for one that has published one message: in the last row, if that can."""
        if len(change.rows) != 1 or change.seals or change.forgets:
            return False
        ((sequence, now_us, effects),) = self._group
        ((block_id, _, of, *_),) = change.rows
        names = self._beside.get(block_id)
        found = names.published(sequence, now_us, effects) if names is not None and of == sequence else None
        size_bytes = PLAIN_BYTES + _ROW_BYTES
        if found is None or self.size_bytes + size_bytes > self.limits.size_bytes:
            return False
        self._group.clear()
        plain, text = found
        change.history = text, text
        self.size_bytes += size_bytes
        first: int = sequence
        single = self._single
        if self._grows and single:
            _, last, last_names, last_bytes, last_block = single[-1]
            if (
                last_names is names
                and last_block == block_id
                and not last.texts
                and len(last.plain) < GROWN_BYTES
                and last_bytes < self.limits.size_bytes >> 4
                and now_us - last.ended_at < GAP_US
            ):
                first, plain, size_bytes = last.first, last.plain + plain, last_bytes + size_bytes
                single.pop()
        self._grows = True
        entries = _new(Entries, (first, sequence, now_us, plain, ""))
        single.append(_new(Single, (0, entries, names, size_bytes, block_id)))
        return True

    def _save_leaving(self, changes: Sequence[Change]) -> Change | None:
        """Makes a record of the rows up to the last one beside messages of blocks that leave the inbox."""
        gone = {block_id for each in changes for block_id in (*each.seals, *each.forgets)}
        gone &= self._beside.keys()
        last = max((at for at, each in enumerate(self._single) if each.block_id in gone), default=-1)
        for block_id in gone:
            del self._beside[block_id]
        if last < 0:
            return None
        change = Change()
        rows = list(islice(self._single, last + 1))
        self._replace(change, rows, _together(rows))
        return change

    def _replace(self, change: Change, rows: Sequence[Single], into: HistoryRecord) -> None:
        for row in rows:
            self._single.popleft()
            self.size_bytes -= row.size_bytes
            if row.number:
                change.drop(HistoryRecord, (row.number,))
        number, self._next = self._next, self._next + 1
        into = replace(into, number=number)
        self._packed.append(into)
        self.size_bytes += _size(into)
        change.put(into)

    def hide(self, change: Change, vhost: str, now_us: int) -> None:
        """The virtual host is deleted: a later one of its name does not see its history."""
        self._undo.item(self.hidden, vhost)
        self.hidden[vhost] = now_us
        change.put(ForgottenRecord(f"{_HIDDEN}{vhost}", now_us))

    # -- bounds ----------------------------------------------------------------------------------------------
    def is_due(self, now_us: int) -> bool:
        """Returns whether a row is too old, or too much is kept."""
        if self.size_bytes > self.limits.size_bytes:
            return True
        oldest = self._packed or self._single
        return bool(oldest) and _ended_at(oldest[0]) < now_us - int(self.limits.age_s * 1_000_000)

    def trim(self, change: Change, now_us: int) -> None:
        """Drops rows that are too old or too many, in a work of their own."""
        self._keep_for_undo()
        self._trim(change, now_us)
        _show_again(self, change)

    def _trim(self, change: Change, now_us: int) -> None:
        limits, old_us = self.limits, now_us - int(self.limits.age_s * 1_000_000)
        dropped = 0
        while oldest := self._packed or self._single:
            if self.size_bytes <= limits.size_bytes and (
                dropped >= TRIMMED or _ended_at(oldest[0]) >= old_us
            ):
                break
            row = oldest.popleft()
            self._dropped_us = _ended_at(row)
            self.size_bytes -= row.size_bytes if isinstance(row, Single) else _size(row)
            if row.number:
                change.drop(HistoryRecord, (row.number,))
            elif not limits.size_bytes:  # with a limit, the oldest leave again at once
                self._gone_us = _ended_at(row)
            dropped += 1
        if dropped and self._gone_us and not limits.size_bytes:
            change.put(ForgottenRecord(_GONE, self._gone_us))

    # -- packing ---------------------------------------------------------------------------------------------
    def to_pack(self) -> list[Pack]:
        """Returns the oldest rows that are not packed, a record of each ``TOGETHER``, once they are enough.
        These take no more commits.
        """
        packs = [Pack(rows[0], _together(rows)) for rows in islice(_full(self._single), AT_ONCE)]
        self._grows = self._grows and not packs
        return packs

    def pack(self, change: Change, packs: Iterable[Pack]) -> None:
        """Puts records in the place of their rows, unless some left meanwhile."""
        self._keep_for_undo()
        for first, into in packs:
            if not self._single or self._single[0] is not first:
                return
            rows = [each for each in islice(self._single, TOGETHER) if each.entries.last <= into.last]
            self._replace(change, rows, into)

    def _keep_for_undo(self) -> None:
        self._undo.attribute(self, "_gone_us")
        self._undo.attribute(self, "_dropped_us")
        self._undo.append((self._put_back, self._packed.copy(), self._single.copy(), self.size_bytes))

    def _put_back(self, packed: deque[HistoryRecord], single: deque[Single], size_bytes: int) -> None:
        self._packed, self._single, self.size_bytes = packed, single, size_bytes


def _show_again(history: CommitHistory, change: Change) -> None:
    """Nothing is left of what is hidden. A row that ended later may have begun before."""
    is_empty = not history._packed and not history._single
    for vhost, until in list(history.hidden.items()):
        if is_empty or history._dropped_us > until:
            history._undo.item(history.hidden, vhost)
            del history.hidden[vhost]
            change.drop(ForgottenRecord, (f"{_HIDDEN}{vhost}",))
            history._gone_us = max(history._gone_us, until)  # also for what is still beside messages
            change.put(ForgottenRecord(_GONE, history._gone_us))


def _are_of(changes: Sequence[Change], group: Sequence[tuple[CommitSequence, int, Effects]]) -> bool:
    """Returns whether each work of the group has one of the messages in the inbox, in their order: a large
    message is in a block.
    """
    rows = (row for each in changes for row in each.rows)
    return all(row.sequence == sequence for row, (sequence, _, _) in zip(rows, group, strict=True))


def unreadable(records: Iterable[Record], beside: Iterable[HistoryBeside]) -> tuple[list[Damaged], list[str]]:
    """Returns what a start leaves out, because it cannot be read, and the packed rows that only a reader
    would find so.
    """
    rows: list[HistoryRecord] = []
    horizons: list[ForgottenRecord] = []
    for record in records:
        if isinstance(record, HistoryRecord):
            rows.append(record)
        elif isinstance(record, ForgottenRecord):
            horizons.append(record)
    undo = Undo()
    left_out = CommitHistory(undo, Numbers(undo)).restore(rows, beside, horizons)
    found = []
    for row in rows:
        try:
            for _ in commits(row) if row.packed else ():
                pass
        except ValueError as error:
            found.append(
                f"row {row.number} of table history cannot be read: {error}; no message needs it, and it "
                "leaves with its age, or with a start with --history-bytes 0"
            )
    return left_out, found


def _restored(
    number: int,
    row: dict[str, Any],
    names: Names,
    block_id: BlockId = NO_BLOCK,
    messages: Sequence[InboxRow] = (),
) -> Single:
    known_bytes = names.size_bytes
    entries = names.learn(row, messages)
    size_bytes = entries.size_bytes + names.size_bytes - known_bytes + _ROW_BYTES
    return Single(number, entries, names, size_bytes, block_id)


def _restored_beside(
    history: Iterable[HistoryBeside], names: dict[BlockId, Names]
) -> tuple[list[Single], list[Damaged]]:
    """``names``: of each block. After one that cannot be read, those of its block cannot either, up to one
    that says all names.
    """
    rows: list[Single] = []
    damaged: list[Damaged] = []
    broken: set[BlockId] = set()
    for block_id, text, messages in history:
        try:
            found = _read(text)
            if block_id not in names or "fresh" in found:
                names[block_id] = Names()
                broken.discard(block_id)
            if block_id in broken:
                raise ValueError("it follows one that cannot be read")
            rows.append(_restored(0, found, names[block_id], block_id, messages))
        except ValueError as error:
            broken.add(block_id)
            names[block_id] = Names()
            damaged.append(Damaged(0, f"a history beside messages of block {block_id}: {error}"))
    return rows, damaged


def _read(text: bytes) -> dict[str, Any]:
    """Raises ValueError."""
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError("it is no object of JSON")
    return found


def _full(single: Iterable[Single]) -> Iterator[list[Single]]:
    """Yields the first rows that are enough to be packed, and so on; nothing if all are too few."""
    rows: list[Single] = []
    count = size_bytes = 0
    for row in single:
        rows.append(row)
        count += max(len(row.entries.plain) // PLAIN_BYTES, 1)
        size_bytes += row.entries.size_bytes
        if count >= TOGETHER or size_bytes >= TOGETHER_BYTES:
            yield rows
            rows, count, size_bytes = [], 0, 0


def _ended_at(row: Single | HistoryRecord) -> int:
    return row.entries.ended_at if isinstance(row, Single) else row.ended_at


def _together(rows: Iterable[Single]) -> HistoryRecord:
    """Returns rows as one, without a number: a line for all that share their names, even where others are
    between them, so that each name is in it once.
    """
    singles = list(rows)
    sharing: dict[Names, list[Entries]] = {}
    for row in singles:
        sharing.setdefault(row.names, []).append(row.entries)
    lines = [names.text(entries) for names, entries in sharing.items()]
    first, last = singles[0].entries, singles[-1].entries
    return HistoryRecord(0, first.first, last.last, last.ended_at, LINES, "\n".join(lines).encode())


def _size(record: HistoryRecord) -> int:
    return len(record.commits) + _ROW_BYTES
