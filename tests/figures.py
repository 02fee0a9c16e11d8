"""What a figure of a notebook shows: matplotlib draws with this module where ``MPLBACKEND=module://tests.figures``.

Beside each picture that is saved, NAME.json has the label of each axes, and the heights of its bars or the points of its
lines.
"""

from __future__ import annotations

import json
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg


class FigureCanvas(FigureCanvasAgg):
    """As matplotlib's own for files."""

    def print_figure(self, filename: Any, *arguments: Any, **named: Any) -> Any:
        answer = super().print_figure(filename, *arguments, **named)
        with open(f"{filename}.json", "w") as file:
            json.dump([_shown(axes) for axes in self.figure.axes], file)
        return answer


def _shown(axes: Axes) -> dict[str, Any]:
    bars = [[float(bar.get_height()) for bar in series.patches] for series in axes.containers]
    lines = [line.get_xydata().tolist() for line in axes.lines]
    return {"label": axes.get_ylabel(), "bars": bars, "lines": lines}
