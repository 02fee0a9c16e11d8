"""The extent of a claim: the offsets of symbolic starts and times in a queue, and the end set by a limit.

Pure: blocks are read through a function, which raises NotLoaded for a block that is not in memory.
Invariant: a range ends between two transactions, unless one transaction alone is over the limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from broker_core.broker.broker import BrokerState
from broker_core.broker.queue import Queue
from broker_core.broker.queue.log import committed_at as noted_time
from broker_core.core.block import NotLoaded, ReadBlock, together
from broker_core.core.errors import OptionError, StoreError
from broker_core.engine import EARLIEST, LATEST, Limit, Origin


def offsets(
    state: BrokerState, queues: Iterable[str], origin: Origin, read_block: ReadBlock
) -> dict[str, int]:
    """Returns ``origin`` as a concrete vector, as of now. Raises OptionError for an offset past the end of
    its queue.
    """
    vector: dict[str, int] = {}
    for log in queues:
        queue = state.topology.shared(log)
        at = origin.offset(log, log)
        if origin.timestamp_us is not None:
            vector[log] = offset_at(queue, origin.timestamp_us, read_block)
        elif at == EARLIEST:
            vector[log] = queue.progress.floor
        elif at == LATEST:
            vector[log] = queue.log.visible_end
        elif 0 <= at <= queue.log.visible_end:
            vector[log] = at
        else:
            raise OptionError(
                f"startingOffsets names offset {at} of queue {log!r}, which ends at {queue.log.visible_end}; "
                f"give 0 to {queue.log.visible_end}, -2 or -1"
            )
    return vector


def offset_at(queue: Queue, timestamp_us: int, read_block: ReadBlock) -> int:
    """Returns the first unsettled offset committed at or after ``timestamp_us``; the queue's end if there is
    none.
    """
    runs = queue.log.runs_between(queue.progress.floor, queue.log.visible_end)

    def times(index: int) -> np.ndarray[Any, Any]:
        run = runs[index]
        if run.sequence:
            return np.array([run.committed_at])
        return np.asarray(read_block(run.block_id).column("committed_at").take(pa.array(run.rows())))

    low, high = 0, len(runs)
    while low < high:  # find the first run whose last message is late enough; commit times rise with offsets
        middle = (low + high) // 2
        if times(middle)[-1] >= timestamp_us:
            high = middle
        else:
            low = middle + 1
    if low == len(runs):
        return queue.log.visible_end
    return int(runs[low].first) + int(np.searchsorted(times(low), timestamp_us))


def too_few(
    queues: Mapping[str, Queue], begin: Mapping[str, int], limit: Limit, read_block: ReadBlock, now_us: int
) -> bool:
    """Returns whether fewer than ``limit.min_rows`` messages follow ``begin``, and the oldest is younger than
    ``limit.max_delay_s``.

    The delay counts from the oldest commit, so a restart does not reset it.
    """
    if limit.min_rows is None:
        return False
    ends = {log: queue.log.visible_end for log, queue in queues.items()}
    if (
        sum(queue.progress.unsettled_count(begin[log], ends[log]) for log, queue in queues.items())
        >= limit.min_rows
    ):
        return False
    if limit.max_delay_s is None:
        return True
    due_us = now_us - int(limit.max_delay_s * 1_000_000)
    first = {log: queue.progress.first_unsettled(begin[log]) for log, queue in queues.items()}
    return all(
        committed_at(queues[log], at, read_block) > due_us for log, at in first.items() if at < ends[log]
    )


def committed_at(queue: Queue, offset: int, read_block: ReadBlock) -> int:
    """Returns when the message at ``offset``, which is visible and unsettled, was committed."""
    run = queue.log.runs_between(offset, offset + 1)[0]
    return (
        run.committed_at
        if run.sequence
        else int(read_block(run.block_id).column("committed_at")[run.rows()[0]].as_py())
    )


def waiting_since(queue: Queue, read_block: ReadBlock | None = None) -> int | None:
    """Returns when the first message that the owner of a queue has to read was committed; None if there is
    none, or it is damaged. Without ``read_block`` it may be the time of a later commit of the same block.
    """
    offset = queue.progress.first_to_read()
    if offset >= queue.log.visible_end:
        return None
    try:
        at, exact = noted_time(queue.log, offset)
        return at if exact or read_block is None else committed_at(queue, offset, read_block)
    except StoreError:
        return None


def cut(
    queues: Mapping[str, Queue], begin: Mapping[str, int], limit: Limit, read_block: ReadBlock
) -> dict[str, int]:
    """Returns the end vector of a micro-batch: at one commit sequence over all queues, within the limits.

    Only a transaction that alone is larger than the limit is split, in the order of the queues.
    """
    ends = {
        log: max(
            begin[log],
            queue.log.visible_end if limit.end is None else min(queue.log.visible_end, limit.end.get(log, 0)),
        )
        for log, queue in queues.items()
    }
    max_rows = limit.max_rows if limit.max_rows is not None else sum(ends.values()) + 1
    if limit.max_bytes is None and sum(ends[log] - begin[log] for log in ends) <= max_rows:
        return ends
    commits = {
        log: _commits(queue, begin[log], ends[log], max_rows, limit.max_bytes, read_block)
        for log, queue in queues.items()
    }
    sequences = np.concatenate([found[0] for found in commits.values()])
    if len(sequences) == 0:
        return ends
    order = np.argsort(sequences, kind="stable")
    distinct, first = np.unique(sequences[order], return_index=True)
    rows = np.cumsum(np.add.reduceat(np.concatenate([found[1] for found in commits.values()])[order], first))
    size = np.cumsum(np.add.reduceat(np.concatenate([found[2] for found in commits.values()])[order], first))
    fits = rows <= max_rows
    if limit.max_bytes is not None:
        fits &= size <= limit.max_bytes
    whole = int(np.count_nonzero(fits))
    if whole:
        last = distinct[whole - 1]
        return {
            log: max([begin[log], *found[3][found[0] <= last].tolist()]) for log, found in commits.items()
        }
    # the first transaction alone is over the limit: split it
    room = max_rows
    if limit.max_bytes is not None and size[0] > 0:
        room = min(room, max(1, int(limit.max_bytes * rows[0] / size[0])))
    split: dict[str, int] = {}
    for log, found in commits.items():
        split[log] = begin[log]
        for count, end in zip(
            found[1][found[0] == distinct[0]].tolist(),
            found[3][found[0] == distinct[0]].tolist(),
            strict=True,
        ):
            if room:
                split[log] = end - max(0, count - room)
                room -= min(room, count)
    return split


def _commits(
    queue: Queue, begin: int, end: int, max_rows: int, max_bytes: int | None, read_block: ReadBlock
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Returns commit sequence, rows, bytes and end of each commit in ``begin .. end``, as far as the limits
    could reach.

    The offsets of deleted rows are between ends.
    """
    sequences: list[np.ndarray[Any, Any]] = []
    counts: list[np.ndarray[Any, Any]] = []
    sizes: list[np.ndarray[Any, Any]] = []
    ends: list[np.ndarray[Any, Any]] = []
    empty = np.array([], dtype=np.int64)
    missing: list[NotLoaded] = []
    rows = size = 0
    for run in queue.log.runs_between(begin, end):
        if run.sequence:
            found, count = np.array([run.sequence]), np.array([run.count])
        else:
            try:
                block = read_block(run.block_id)
            except NotLoaded as error:
                missing.append(error)
                found = count = empty
            else:
                column = np.asarray(block.column("commit_sequence").take(pa.array(run.rows())))
                found, count = np.unique(column, return_counts=True)
        sequences.append(found)
        counts.append(count)
        sizes.append(count * (run.size_bytes / max(run.count, 1)))
        ends.append(run.first + np.cumsum(count))
        rows += run.count
        size += run.size_bytes
        # the rows of this queue alone are over the limit, so the limit is inside them
        if rows > max_rows or (max_bytes is not None and size > max_bytes):
            break
    if missing:
        raise together(missing)
    return (
        np.concatenate(sequences) if sequences else empty,
        np.concatenate(counts) if counts else empty,
        np.concatenate(sizes) if sizes else empty,
        np.concatenate(ends) if ends else empty,
    )
