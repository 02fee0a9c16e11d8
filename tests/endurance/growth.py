"""What a run of hours has used: its samples, how fast each figure grows, and the picture.

A sample is a line of JSON: ``at``, the seconds of the run, ``lives``, the process that has each name, and the figures by
kind and name: ``{"memory": {"broker": 101.5}}``. Other lines have ``event``. Not here: who takes them (``__main__.py``).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

Row = Mapping[str, Any]
Points = list[tuple[float, float]]  # seconds, value

# The unit of a kind of figure, and how much of it an hour may add.
KINDS = {
    "memory": ("MB", 10.0),
    "heap": ("MB", 15.0),
    "files": ("files", 3.0),
    "threads": ("threads", 3.0),
    "disk": ("MB", 20.0),
    "confirm": ("ms", 5.0),
    "age": ("s", np.inf),
}
OF_PROCESSES = ("memory", "heap", "files", "threads")
JVM_MB = 40.0  # of memory: a JVM takes what it may have, step by step; ``heap`` is what it needs
TABLES_MB = 60.0  # of disk: they keep each of some 600,000 rows
WARM_S = 900.0  # a process loads code, fills caches and reaches the limits of what it keeps
LEAST_S = 1800.0  # of a life after that; in a shorter one a step is steeper than any leak
MINUTE_S, HOUR_S = 60.0, 3600.0


def read(path: Path) -> list[Row]:
    """The lines of a file of samples; a last one that was cut is left out."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def names(rows: Iterable[Row], kind: str) -> list[str]:
    return sorted({name for row in rows for name in row.get(kind, {})})


def lives(rows: Iterable[Row], kind: str, name: str) -> list[Points]:
    """The values of a figure, for each process that had the name. Disks and latencies live as long as the run."""
    found: list[Points] = []
    last: object = None
    for row in rows:
        if name in row.get(kind, {}):
            life = row["lives"].get(name) if kind in OF_PROCESSES else None
            if life != last or not found:
                found.append([])
            last = life
            found[-1].append((row["at"], row[kind][name]))
    return found


def per_hour(lives: Iterable[Points], warm_s: float = WARM_S, least_s: float = LEAST_S) -> float | None:
    """The median of the slopes between any two minutes of one life (Theil and Sen): neither a restart nor a peak is
    growth. None: no life was long enough.
    """
    slopes: list[Any] = []
    for life in lives:
        warm = [(at, value) for at, value in life if at >= life[0][0] + warm_s]
        if warm and warm[-1][0] - warm[0][0] >= least_s:
            minutes: dict[int, list[float]] = {}
            for at, value in warm:
                minutes.setdefault(int(at / MINUTE_S), []).append(value)
            values = np.array([[minute * MINUTE_S, np.median(each)] for minute, each in minutes.items()])
            first, second = np.triu_indices(len(values), 1)
            step = values[second] - values[first]
            slopes.append(step[:, 1] / step[:, 0])
    return float(np.median(np.concatenate(slopes))) * HOUR_S if slopes else None


def growth(rows: Sequence[Row], **warm: float) -> dict[tuple[str, str], float]:
    """What an hour adds, by kind and name."""
    figures = [(kind, name) for kind in KINDS for name in names(rows, kind)]
    found = {figure: per_hour(lives(rows, *figure), **warm) for figure in figures}
    return {figure: slope for figure, slope in found.items() if slope is not None}


def too_fast(rows: Sequence[Row], **warm: float) -> list[str]:
    """A line for each figure that grows faster than its bound."""
    lines = []
    for (kind, name), slope in growth(rows, **warm).items():
        unit, bound = KINDS[kind]
        if kind == "memory" and (name == "kafka" or "driver." in name):
            bound = JVM_MB
        if (kind, name) == ("disk", "tables"):
            bound = TABLES_MB
        if slope > bound:
            lines.append(f"{kind} of {name} grows by {slope:.1f} {unit} an hour; its bound is {bound:g}")
    return lines


def draw(rows: Sequence[Row], path: Path) -> None:
    """A panel for each kind of figure over the hours; a grey line is a kill."""
    figure = Figure(figsize=(11, 2.0 * len(KINDS)), dpi=80, layout="constrained")
    kills = [row["at"] / HOUR_S for row in rows if row.get("event", "").startswith("kill ")]
    axes = figure.subplots(len(KINDS), 1, sharex=True)
    for axis, (kind, (unit, _)) in zip(axes, KINDS.items(), strict=True):
        for at in kills:
            axis.axvline(at, color="0.85", linewidth=0.6, zorder=0)
        for number, name in enumerate(names(rows, kind)):
            look = {
                "color": f"C{number % 10}",
                "linestyle": ("-", "--", ":")[number // 10 % 3],
                "linewidth": 0.9,
            }
            for index, life in enumerate(lives(rows, kind, name)):
                at, values = np.array(life).T
                axis.plot(at / HOUR_S, values, label=None if index else name, **look)
        look = {"fontsize": "xx-small", "frameon": False, "ncols": 1 + len(names(rows, kind)) // 10}
        axis.legend(*axis.get_legend_handles_labels(), loc="center left", bbox_to_anchor=(1.0, 0.5), **look)
        axis.set_ylabel(kind if kind == unit else f"{kind} ({unit})")
        axis.set_yscale("log" if kind == "confirm" else "linear")
    axes[-1].set_xlabel("hours")
    figure.savefig(path)
