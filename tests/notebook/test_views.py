"""How an observation is drawn: as text, as HTML, and on a terminal with rich."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from txmq.notebook.sample import Sample
from txmq.notebook.views import TextView, line, picture, plot, view_here


def sample(
    lag: int | None = 5,
    *,
    batch: int = 3,
    consumed: int = 15,
    lag_s: float | None = 2.5,
    running: bool = True,
    at: float = 0,
) -> Sample:
    return Sample(at, batch, consumed, 1234.0, 0.5, lag, lag_s, running)


def test_a_line_says_how_far_a_query_is() -> None:
    text = line("orders", sample())
    assert text == "orders  [##################------]  75%  batch 3  1,234 rows/s  lag 5  2.5 s behind"
    assert line("orders", sample(None, batch=-1, lag_s=None)) == "orders  no batch yet"
    assert line("orders", sample(0, consumed=0, lag_s=None, running=False)).endswith(
        "100%  batch 3  1,234 rows/s  lag 0  ended"
    )
    assert "\x1b" not in line("\x1b[31mred", sample())


def test_the_plot_is_the_lag_over_time() -> None:
    assert plot([sample(lag) for lag in (0, 1, 50, 100, None, 0)]) == "▁▂▅█ ▁"
    assert plot([sample(0)] * 3) == "▁▁▁" and plot([sample(None)]) == " "
    assert len(plot([sample(1)] * 500)) == 60


def test_the_picture_is_well_formed_and_a_name_is_text() -> None:
    name = "<script>alert('1')</script>&"
    looks = [sample(lag, at=float(at)) for at, lag in enumerate((100, 40, None, 0))]
    tree = ElementTree.fromstring(picture(name, looks))
    assert name in "".join(tree.itertext()) and tree.find(".//script") is None
    bar = tree.find(".//progress")
    assert bar is not None and float(bar.attrib["value"]) == 1.0
    (curve,) = tree.iter("polyline")
    points = [tuple(map(float, point.split(","))) for point in curve.attrib["points"].split()]
    assert points == [(0.0, 0.0), (120.0, 36.0), (360.0, 60.0)]
    assert "lag, at most 100" in "".join(tree.itertext())
    bare = ElementTree.fromstring(picture("q", [sample(None)]))
    assert bare.find(".//progress") is None and bare.find(".//svg") is None


def test_text_has_a_line_for_each_batch_and_one_for_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    view = view_here("q")
    assert isinstance(view, TextView)  # the output is captured, so it is no terminal
    with view:
        for batch, running in ((-1, True), (-1, True), (0, True), (0, True), (1, True), (1, False)):
            view.show([sample(batch=batch, running=running)])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and "no batch yet" in lines[0] and lines[-1].endswith("ended")


def test_a_terminal_with_rich_keeps_two_lines_in_place() -> None:
    pytest.importorskip("rich")
    script = (
        "from txmq.notebook.sample import Sample\n"
        "from txmq.notebook.views import view_here\n"
        "looks = [Sample(float(n), n, n, 1.0, 0.1, 9 - n, 1.0, n < 9) for n in range(10)]\n"
        "with view_here('[bold]orders') as view:\n"
        "    for n in range(10): view.show(looks[:n + 1])\n"
    )
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "30"}
    with subprocess.Popen([sys.executable, "-c", script], stdout=theirs, stdin=theirs, env=environment):
        os.close(theirs)
        seen = b""
        try:
            while piece := os.read(ours, 65536):
                seen += piece
        except OSError:  # Linux: nobody has the other end any more
            pass
    os.close(ours)
    text = seen.decode()
    assert "[bold]orders" in text and "batch 9" in text and "ended" in text and "█▇" in text
    assert "\x1b[1A" in text or "\x1b[A" in text  # a line is drawn over
