"""Where the records of inflated batches begin: many walkers step through the bytes together.

A record begins with its length, so one walker goes from start to start. Each batch has a walker at its begin,
which is known. Inside a long batch more of them begin at guessed places.
Not here: what a record holds.
Invariant: a guess never makes a wrong start. It counts only if the walker before it arrives exactly there; by
induction from the begin of the batch, every start is then proven. A batch with a wrong guess is walked again
from its begin alone.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from broker_core.kafka.record.record_batch import WINDOW, Integers, read_unsigned, word_unsigned

Bytes = npt.NDArray[np.uint8]

PADDING = 64  # bytes behind the content that may be looked at: eight windows
STRIDE = 16_384  # bytes between guesses
LARGE = 1024  # mean size of a record from which guesses are not worth their search
# candidates of one search, of which the true one is not told cheaply: bodies of zeros; a record has four or
# so
MANY = 32
FEW = 48  # walkers; fewer step faster one by one


class Section(NamedTuple):
    """The content of one batch: bytes ``begin`` to ``end`` of a buffer."""

    begin: int
    end: int
    records: int


def _jumps() -> Integers:
    """By the first two bytes of a record (little-endian): bytes to the next record; 0 where more bytes tell,
    or none can.
    """
    first, second = np.arange(1 << 16) & 0xFF, np.arange(1 << 16) >> 8
    one = (first >> 1) + 1
    two = (((first & 0x7F) | second << 7) >> 1) + 2
    jumps = np.where(first < 0x80, one, np.where(second < 0x80, two, 0))
    return np.where(first & 1, 0, jumps).astype(np.int64)


_JUMP = _jumps()
_JUMP_LIST: list[int] = _JUMP.tolist()


def find_starts(data: Bytes, words: Integers, sections: list[Section]) -> Integers:
    """Begins of all records, in order. Raises ValueError where the records of a section do not fill it, or
    are not ``records``.

    ``data`` has PADDING bytes behind its last section, and ``words`` are its windows.
    """
    if len(sections) < FEW and sum(section.records for section in sections) < 4 * FEW:
        return np.concatenate([_walk_whole(data, section) for section in sections])
    begins, owners = _walkers(data, words, sections)
    ends = np.array([section.end for section in sections], np.int64)[owners]
    inner = owners[1:] == owners[:-1]
    ends[:-1][inner] = begins[1:][inner]
    starts, counts, arrived = _walk_together(data, begins, ends)
    wrong = np.unique(owners[arrived != ends])
    found = np.bincount(owners, counts, len(sections)).astype(np.int64)
    if not len(wrong) and (found == [section.records for section in sections]).all():
        return starts
    # a guess or the data is wrong; what holds without guesses is decided section by section
    bounds = np.concatenate(([0], np.cumsum(found)))
    again = set(wrong.tolist())
    return np.concatenate(
        [
            _walk_whole(data, section)
            if number in again or section.records != found[number]
            else starts[bounds[number] : bounds[number + 1]]
            for number, section in enumerate(sections)
        ]
    )


def _walk_whole(data: Bytes, section: Section) -> Integers:
    starts: list[int] = []
    if (
        _walk_alone(data.data, section.begin, section.end, starts) != section.end
        or len(starts) != section.records
    ):
        raise ValueError("the records do not fill their batch")
    return np.array(starts, np.int64)


def _walk_alone(data: memoryview, position: int, end: int, starts: list[int]) -> int:
    """Appends the starts from ``position`` up to ``end``; the position where the walk ends: ``end``, or
    beyond it.
    """
    jump = _JUMP_LIST
    append = starts.append
    while position < end:
        append(position)
        position += jump[data[position] | data[position + 1] << 8] or _long_jump(data, position, end)
    return position


def _long_jump(data: memoryview, position: int, end: int) -> int:
    """Bytes to the next record where the length takes more than two bytes; beyond ``end`` where it is
    none.
    """
    try:
        length, behind = read_unsigned(data, position, end)
    except ValueError:
        length, behind = 1, position
    return (
        behind + (length >> 1) - position
        if not length & 1 and behind + (length >> 1) <= end
        else end + 1 - position
    )


def _walk_together(data: Bytes, begins: Integers, ends: Integers) -> tuple[Integers, Integers, Integers]:
    """Starts of all walkers, walker by walker; how many each found; where each arrived."""
    view = data.data
    pairs = np.ndarray((len(data) - 1,), np.dtype("<u2"), buffer=data, strides=(1,))
    arrived = np.empty(len(begins), np.int64)
    live, at, stop = np.arange(len(begins)), begins, ends
    steps: list[tuple[Integers, Integers]] = []
    while len(live) >= FEW:
        steps.append((live, at))
        jump = _JUMP[pairs[at]]
        if not jump.all():
            for walker in np.flatnonzero(jump == 0).tolist():
                jump[walker] = _long_jump(view, int(at[walker]), int(stop[walker]))
        at = at + jump
        going = at < stop
        if not going.all():
            arrived[live[~going]] = at[~going]
            live, at, stop = live[going], at[going], stop[going]
    rest: list[list[int]] = []
    for walker, position, end in zip(live.tolist(), at.tolist(), stop.tolist()):
        rest.append([])
        arrived[walker] = _walk_alone(view, position, end, rest[-1])

    counts = (
        np.bincount(np.concatenate([walkers for walkers, _ in steps]), minlength=len(begins))
        if steps
        else np.zeros_like(begins)
    )
    stepped = counts[live]
    counts[live] += np.array([len(found) for found in rest], np.int64)
    first = np.cumsum(counts) - counts
    starts = np.empty(int(counts.sum()), np.int64)
    for number, (walkers, positions) in enumerate(steps):
        starts[first[walkers] + number] = positions
    for walker, done, found in zip(live.tolist(), stepped.tolist(), rest):
        starts[first[walker] + done : first[walker] + done + len(found)] = found
    return starts, counts, arrived


# -- guesses -------------------------------------------------------------------------------------------------


def _walkers(data: Bytes, words: Integers, sections: list[Section]) -> tuple[Integers, Integers]:
    """Where walkers begin, in order, and the section of each."""
    begins = np.array([section.begin for section in sections], np.int64)
    owners = np.arange(len(sections))
    long = [number for number, section in enumerate(sections) if section.end - section.begin > 2 * STRIDE]
    size = sum(sections[number].end - sections[number].begin for number in long)
    count = sum(sections[number].records for number in long)
    if not long or size > LARGE * count:
        return begins, owners
    guesses, guessed = _guess(data, words, sections, long, width=min(int(1.6 * size / count) + 32, STRIDE))
    order = np.argsort(np.concatenate((begins, guesses)), kind="stable")
    return np.concatenate((begins, guesses))[order], np.concatenate((owners, guessed))[order]


def _guess(
    data: Bytes, words: Integers, sections: list[Section], long: list[int], width: int
) -> tuple[Integers, Integers]:
    """Places about STRIDE apart that look like starts, and the section of each.

    A candidate is two records in a row: each a length, zero attributes and an offset delta, and the second
    delta one above the first.
    """
    places = [
        np.arange(sections[number].begin + STRIDE, sections[number].end - width - WINDOW, STRIDE)
        for number in long
    ]
    owners = np.repeat(np.array(long), [len(each) for each in places])
    place = np.concatenate(places)
    if not len(place):
        return place, owners
    seen = sliding_window_view(data, width + 3)[place]
    more, zero = seen > 0x7F, seen == 0
    end1 = ~more[:, :width] & zero[:, 1 : width + 1]
    end2 = more[:, :width] & ~more[:, 1 : width + 1] & zero[:, 2 : width + 2]
    end3 = more[:, :width] & more[:, 1 : width + 1] & zero[:, 3:]
    likely = (end1 | end2 | end3) & (seen[:, :width] & 1 == 0)
    likely[likely.sum(axis=1) > MANY] = False
    search, column = np.nonzero(likely)
    at = place[search] + column
    end = np.array([section.end for section in sections])[owners[search]]
    fits, delta, following = _look(words, at, end)
    search, at, end, delta, following = search[fits], at[fits], end[fits], delta[fits], following[fits]
    fits, next_delta, _ = _look(words, following, end)
    fits &= next_delta == delta + 1
    search, first = np.unique(search[fits], return_index=True)
    return at[fits][first], owners[search]


def _look(words: Integers, at: Integers, end: Integers) -> tuple[npt.NDArray[np.bool_], Integers, Integers]:
    """Of possible starts: whether a record may begin there, its offset delta, and where the next one would
    begin.
    """
    fits = np.ones(len(at), bool)

    def number(position: Integers) -> tuple[Integers, Integers]:
        value, size, more = word_unsigned(words[position], 4)
        if more is not None:
            np.logical_and(fits, more == 0, out=fits)
        return value, position + size

    length, inside = number(at)
    following = inside + (length >> 1)
    fits &= (length & 1 == 0) & (words[inside] & 0xFF == 0) & (following < end)
    _, behind = number(inside + 1)
    delta, _ = number(behind)
    fits &= delta & 1 == 0
    return fits, delta >> 1, np.where(fits, following, at)
