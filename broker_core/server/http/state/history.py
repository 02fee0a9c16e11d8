"""The last half an hour of numbers, for plots: a ring for each series, with one bound over all of them.

Not here: what the numbers are (``sampling.py``).
Invariant: memory does not grow: SERIES rings of POINTS are made once. A series that is not in a sample is
forgotten. Where all rings are in use, a new series gets the one that has not changed for the longest, or none
while all have changed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

POINTS = 360  # of a ring: half an hour
SERIES = 2_000
WIDTH = 3  # numbers of a series at one time

Key = tuple[str, ...]  # a kind, and names
Numbers = tuple[float, float, float]
Curve = list[float | None]


class Plot(NamedTuple):
    """Oldest first. ``times``: seconds since the epoch; ``curves``: WIDTH of each, None: unknown."""

    times: list[float]
    curves: list[Curve]


class PlotHistory:
    """One thread samples; any thread reads."""

    def __init__(self, series: int = SERIES, points: int = POINTS) -> None:
        self._points = points
        self._times = np.zeros(points)
        self._values = np.full((series, WIDTH, points), np.nan, np.float32)
        self._changed = np.zeros(series, np.int64)  # by ring: the last sample that was another one
        self._last: dict[int, Numbers] = {}
        self._rings: dict[Key, int] = {}
        self._free = list(range(series))
        self._samples = 0
        self._full_at = -1  # the last sample that found no idle ring

    def __len__(self) -> int:
        return len(self._rings)

    @property
    def size_bytes(self) -> int:
        return int(self._values.nbytes + self._times.nbytes + self._changed.nbytes)

    def begin(self, now_s: float) -> None:
        """A new sample, in place of the oldest."""
        at = self._samples % self._points
        self._values[:, :, at] = np.nan
        self._times[at] = now_s
        self._samples += 1

    def add(self, rows: Iterable[tuple[Key, Numbers]]) -> None:
        """Into the sample that was begun; the first ones get their rings first."""
        at = (self._samples - 1) % self._points
        for key, numbers in rows:
            ring = self._rings.get(key)
            if ring is None:
                ring = self._ring() if any(numbers) else None  # what is idle and empty needs no plot
                if ring is None:
                    continue
                self._rings[key] = ring
            if self._last.get(ring) != numbers:
                self._last[ring] = numbers
                self._changed[ring] = self._samples
            self._values[ring, :, at] = numbers

    def end(self) -> None:
        """What the sample does not have is forgotten."""
        at = (self._samples - 1) % self._points
        missing = np.isnan(self._values[:, 0, at])
        gone = [key for key, ring in self._rings.items() if missing[ring]]
        for key in gone:
            self._clear(self._rings.pop(key))

    def _ring(self) -> int | None:
        if not self._free:
            self._forget_the_idle()
        return self._free.pop() if self._free else None

    def _forget_the_idle(self) -> None:
        if self._full_at == self._samples:
            return
        oldest = int(np.argmin(self._changed))
        if self._samples - int(self._changed[oldest]) < self._points:
            self._full_at = self._samples
            return
        key = next(key for key, ring in self._rings.items() if ring == oldest)
        self._clear(self._rings.pop(key))

    def _clear(self, ring: int) -> None:
        self._values[ring] = np.nan
        self._changed[ring] = self._samples
        self._last.pop(ring, None)
        self._free.append(ring)

    def of(self, *keys: Key) -> Plot:
        """The sum of these series; an empty plot if none of them is known."""
        rings = [ring for ring in map(self._rings.get, keys) if ring is not None]
        if not rings:
            return Plot([], [[] for _ in range(WIDTH)])
        end = self._samples % self._points
        order = np.r_[end : self._points, 0:end]
        found = self._values[rings][:, :, order].astype(np.float64)
        there = ~np.isnan(found).all(axis=0)
        summed = np.where(there, np.nansum(found, axis=0), np.nan)
        first = int(np.argmax(there.any(axis=0)))
        curves = [[None if value != value else value for value in row[first:].tolist()] for row in summed]
        return Plot(self._times[order][first:].tolist(), curves)
