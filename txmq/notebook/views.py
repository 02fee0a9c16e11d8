"""Where an observation is shown: HTML in a notebook, a live line on a terminal with rich, or lines of text.

Not here: what is looked at (``observe.py``).
Invariant: names of queries are text, whatever they hold: escaped in HTML, printable elsewhere.
"""

from __future__ import annotations

import html
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from types import TracebackType
from typing import Any, Protocol

from broker_core.core.errors import printable
from txmq.notebook.sample import Sample

_BAR = 24  # characters
_SPARK = "▁▂▃▄▅▆▇█"
_PLOTTED = 60  # samples
_WIDTH, _HEIGHT = 360, 60  # of the plot in HTML


class View(Protocol):
    def __enter__(self) -> View: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def show(self, samples: Sequence[Sample]) -> None:
        """Shows the newest sample, and the lag of those before it."""


def view_here(name: str) -> View:
    """The view that fits this process."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is not None and hasattr(shell, "kernel"):
        return NotebookView(name)
    if sys.stdout.isatty() and find_spec("rich") is not None:
        return LiveView(name)
    return TextView(name)


# -- text ----------------------------------------------------------------------------------------------------


def fraction(sample: Sample) -> float | None:
    """How much of what was there is consumed, from 0 to 1; None: not known."""
    if sample.lag is None:
        return None
    whole = sample.consumed + sample.lag
    return sample.consumed / whole if whole else 1.0


def line(name: str, sample: Sample, *, bar: bool = True) -> str:
    """Returns a sample as a line of text."""
    done = fraction(sample)
    words = [printable(name)]
    if done is not None and bar:
        full = int(done * _BAR)
        words.append(f"[{'#' * full}{'-' * (_BAR - full)}] {done:4.0%}")
    words.append(f"batch {sample.batch_id}" if sample.batch_id >= 0 else "no batch yet")
    words += [f"{sample.rows_per_s:,.0f} rows/s"] if sample.batch_id >= 0 else []
    words += [f"lag {sample.lag:,}"] if sample.lag is not None else []
    words += [f"{sample.lag_s:,.1f} s behind"] if sample.lag_s is not None else []
    return "  ".join(words if sample.running else [*words, "ended"])


def plot(samples: Sequence[Sample]) -> str:
    """Returns the lag of the last samples as one line of small bars; a space where it is not known."""
    lags = [sample.lag for sample in samples[-_PLOTTED:]]
    most = max((lag for lag in lags if lag is not None), default=0)
    steps = len(_SPARK) - 1
    return "".join(" " if lag is None else _SPARK[-(-lag * steps // most) if most else 0] for lag in lags)


class TextView:
    """A line where a batch has ended, and at the end."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._batch = -2

    def __enter__(self) -> View:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, samples: Sequence[Sample]) -> None:
        newest = samples[-1]
        if newest.batch_id != self._batch or not newest.running:
            self._batch = newest.batch_id
            print(line(self._name, newest), flush=True)


class LiveView:
    """Two lines of a terminal, which rich keeps in place."""

    def __init__(self, name: str) -> None:
        from rich.live import Live

        self._name = name
        self._live = Live(auto_refresh=False)

    def __enter__(self) -> View:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, samples: Sequence[Sample]) -> None:
        from rich.text import Text  # so that nothing in a name is markup

        self._live.update(Text(f"{line(self._name, samples[-1])}\n{plot(samples)}"), refresh=True)


# -- HTML ----------------------------------------------------------------------------------------------------


def picture(name: str, samples: Sequence[Sample]) -> str:
    """Returns the bar and the plot as HTML that needs nothing else."""
    newest, done = samples[-1], fraction(samples[-1])
    bar = "" if done is None else f'<progress max="1" value="{done:.4f}" style="width:{_WIDTH}px"></progress>'
    return (
        f'<div style="font-family:monospace"><div>{html.escape(line(name, newest, bar=False))}</div>'
        f"{bar}{_curve(samples)}</div>"
    )


def _curve(samples: Sequence[Sample]) -> str:
    """The lag over time, from 0 at the bottom to the largest value, which is written above it."""
    lags = [(sample.at_s, sample.lag) for sample in samples if sample.lag is not None]
    if len(lags) < 2:
        return ""
    (first, _), (last, _) = lags[0], lags[-1]
    most, span = max(lag for _, lag in lags), max(last - first, 1e-9)
    across, down = _WIDTH / span, _HEIGHT / max(most, 1)
    points = " ".join(f"{(at - first) * across:.1f},{_HEIGHT - lag * down:.1f}" for at, lag in lags)
    return (
        f"<div>lag, at most {most:,}</div>"
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="lag over time"><polyline fill="none" stroke="currentColor" stroke-width="1.5" '
        f'points="{points}"/></svg>'
    )


class NotebookView:
    """One output of the cell that called ``observe``, replaced by each look."""

    def __init__(self, name: str) -> None:
        from IPython.display import HTML, display

        self._name = name
        self._html: Any = HTML
        # made in the thread of the cell, so that the output is that of the cell
        self._handle: Any = display(HTML(html.escape(name)), display_id=True)

    def __enter__(self) -> View:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, samples: Sequence[Sample]) -> None:
        self._handle.update(self._html(picture(self._name, samples)))
