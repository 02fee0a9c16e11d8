"""The figures of the README and the plots of ``docs/performance.md``: runs of the bench, in ``docs/*.json``.

``python -m bench --write docs/figures.json`` and ``python -m bench.kafka --only table_latency --write
docs/latency.json`` measure; ``python -m bench.readme`` writes the rows of the README and the plots from these
files. A test compares them.
"""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path

import psutil

from bench.report import PERCENTS, RATES, Figure

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "docs" / "figures.json"
PAGE = ROOT / "README.md"
PICTURES = ROOT / "docs" / "pictures"
LATENCY = ROOT / "docs" / "latency.json"
# figure of the bench: its name for a reader, its unit there, its reference
ROWS = {
    "amqp_relay_100": ("consumed and published in transactions of 100", "messages/s", "RabbitMQ 3.10"),
    "amqp_confirms": ("published with confirms", "messages/s", "RabbitMQ 3.10"),
    "amqp_commit_p99": ("99th percentile of a commit", "us", "RabbitMQ 3.10"),
    "source_rows": ("read by a stream", "rows/s", "a Python source of Arrow batches that does nothing else"),
    "append_rows": ("appended to a Delta table in a micro-batch", "rows/s", "the same append without txmq"),
    "micro_batch_overhead_ms": (
        "added to a micro-batch of one message", "ms", "a Python source and sink that do nothing",
    ),
}  # fmt: skip
LATENCIES = {
    f"table_latency_{rate}_p{percent}_ms": (
        f"{rate:,} rows a second, {percent}th percentile", "ms", "Spark's Kafka source, Delta's sink",
    )
    for rate in RATES
    for percent in PERCENTS
}  # fmt: skip
ADDED = {"micro_batch_overhead_ms"}  # what is above the reference
HEAD = "| | txmq | compared |"


def write(figures: Sequence[Figure], path: Path) -> None:
    machine = f"{psutil.cpu_count()} cores, {psutil.virtual_memory().total >> 30} GiB, {platform.machine()}"
    run = {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "machine": machine,
        "figures": {figure.figure: asdict(figure) for figure in figures},
    }
    path.write_text(json.dumps(run, indent=1) + "\n")


def _less(unit: str) -> str:
    return ", less is better" if unit in ("us", "ms") else ""


def rows() -> list[str]:
    """The table and the line about the machine, as they stand in the README."""
    run = json.loads(FILE.read_text())
    lines = [HEAD, "|---|---|---|"]
    for name, (label, unit, reference) in ROWS.items():
        figure, whole = run["figures"][name], "the whole takes " if name in ADDED else ""
        value, times = f"{figure['value']:,.0f} {unit}", f"{figure['ratio']:.2f} times {reference}"
        lines.append(f"| {label}{_less(unit)} | {value} | {whole}{times} |")
    return [*lines, "", f"{run['machine']}, {run['date']}."]


WIDTH, ROW, BAR = 800, 62, 330  # of the plot, of a figure in it, of the longest bar
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #57606a } .title { font-weight: 600 } .txmq { fill: #2f6fd0 } .beside { fill: #9aa5b1 }
@media (prefers-color-scheme: dark) { text { fill: #b6bec8 } .txmq { fill: #5b95ea } .beside { fill: #6b7683 } }
"""  # noqa: E501


def plot(file: Path, rows: Mapping[str, tuple[str, str, str]]) -> str:
    """A figure and its reference as two bars, the longer of which has the full length; as SVG."""
    run = json.loads(file.read_text())
    parts = []
    for number, (name, (label, unit, reference)) in enumerate(rows.items()):
        figure, top = run["figures"][name], number * ROW
        title = f"{label.removeprefix('added to ')}, {unit}{_less(unit)}"
        parts.append(f'<text class="title" x="0" y="{top + 14}">{title}</text>')
        whole = figure["value"] + figure["reference"] if name in ADDED else figure["value"]
        bars = (("txmq", "txmq", whole), ("beside", reference, figure["reference"]))
        longest = max(value for _, _, value in bars)
        for line, (kind, who, value) in enumerate(bars):
            y, length = top + 20 + line * 17, max(1, round(BAR * value / longest))
            parts.append(f'<rect class="{kind}" x="0" y="{y}" width="{length}" height="13" rx="2"/>')
            parts.append(f'<text x="{length + 8}" y="{y + 11}">{value:,.0f} {who}</text>')
    size = f'width="{WIDTH}" height="{ROW * len(rows)}" viewBox="0 0 {WIDTH} {ROW * len(rows)}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size}>'
    return "\n".join([head, f"<style>{STYLE}</style>", *parts, "</svg>", ""])


def plots() -> dict[Path, str]:
    return {
        PICTURES / "performance.svg": plot(FILE, ROWS),
        PICTURES / "latency.svg": plot(LATENCY, LATENCIES),
    }


def main() -> None:
    for path, text in plots().items():
        path.write_text(text)
    table = re.escape(HEAD) + r"\n(?:.*\n)*?\n.*?\d{4}-\d\d-\d\d\."
    text, found = re.subn(table, lambda _: "\n".join(rows()), PAGE.read_text())
    assert found == 1, HEAD
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
