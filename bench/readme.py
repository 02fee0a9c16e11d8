"""The figures of the README: a run of the bench, kept in ``docs/figures.json``.

``python -m bench --write docs/figures.json`` measures and writes them; ``python -m bench.readme`` writes the
rows of the README from the file. A test compares the two.
"""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path

import psutil

from bench.report import Figure

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "docs" / "figures.json"
PAGE = ROOT / "README.md"
# figure of the bench: its name for a reader, its unit there, its reference
ROWS = {
    "amqp_relay_100": ("consumed and published in transactions of 100", "messages/s", "RabbitMQ 3.10"),
    "amqp_confirms": ("published with confirms", "messages/s", "RabbitMQ 3.10"),
    "amqp_commit_p99": ("99th percentile of a commit", "us", "RabbitMQ 3.10"),
    "source_rows": ("read by a stream", "rows/s", "a Python source of Arrow batches that does nothing"),
    "append_rows": ("appended to a Delta table in a micro-batch", "rows/s", "the same append without txmq"),
    "micro_batch_overhead_ms": ("added to a micro-batch", "ms", "a Python source and sink that do nothing"),
}  # fmt: skip


def write(figures: Sequence[Figure], path: Path) -> None:
    machine = f"{psutil.cpu_count()} cores, {psutil.virtual_memory().total >> 30} GiB, {platform.machine()}"
    run = {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "machine": machine,
        "figures": {figure.figure: asdict(figure) for figure in figures},
    }
    path.write_text(json.dumps(run, indent=1) + "\n")


def rows() -> list[str]:
    """The table and the line about the machine, as they stand in the README."""
    run = json.loads(FILE.read_text())
    lines = ["| | txmq | beside |", "|---|---|---|"]
    for name, (label, unit, reference) in ROWS.items():
        figure = run["figures"][name]
        lines.append(f"| {label} | {figure['value']:,.0f} {unit} | {figure['ratio']:.2f} times {reference} |")
    return [*lines, "", f"{run['machine']}, {run['date']}."]


def main() -> None:
    text = PAGE.read_text()
    PAGE.write_text(
        re.sub(r"\| \| txmq \| beside \|\n(?:.*\n)*?\n.*\d{4}-\d\d-\d\d\.", lambda _: "\n".join(rows()), text)
    )


if __name__ == "__main__":
    main()
