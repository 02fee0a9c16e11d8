"""What the demo shows at its end; the demo itself is ``make demo``."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

FLIGHTS = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "flights.py"))


def test_the_plot_shows_how_far_each_side_was_and_what_was_killed_when() -> None:
    demo = SimpleNamespace(
        flights=SimpleNamespace(rows=800),
        samples=[(0.0, 0, 0), (2.5, 400, 0), (5.0, 800, 100), (7.5, 800, 500), (10.0, 800, 800)],
        killed=[(2.6, "broker"), (5.1, "job 1"), (10.0, "job 2")],
    )
    published, applied, kills, axis, _ = FLIGHTS["plot"](demo, columns=8)
    assert published == "published ▁▁▅▅████"
    assert applied == "in Delta  ▁▁▁▁▂▂▆█"
    assert kills == "SIGKILL     B 1  2"
    assert axis == "          0 s 10 s"


def test_a_demo_of_no_time_has_a_plot() -> None:
    demo = SimpleNamespace(flights=SimpleNamespace(rows=1), samples=[(0.0, 1, 1)], killed=[])
    assert FLIGHTS["plot"](demo, columns=4)[0] == "published ████"
