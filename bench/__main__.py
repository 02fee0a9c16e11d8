"""``python -m bench [--only FIGURE ...]``: one JSON line per figure on stdout, notes on stderr, a table at the end."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

from bench import backlog, commits, streams
from bench.report import Figure, emit, note, table

MEASURES: dict[str, Callable[[Path], list[Figure]]] = {
    "commit_1": commits.commit_1,
    "commit_16": commits.commit_16,
    "source_rows": streams.source_rows,
    "sink_rows": streams.sink_rows,
    "micro_batch_overhead_ms": streams.micro_batch_overhead_ms,
    "small_commit_read": streams.small_commit_read,
    "backlog_rss_mb": backlog.backlog,
    "backlog_open_s": backlog.backlog,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench", description="Every figure beside its reference in the same run.")
    parser.add_argument("--only", action="append", choices=list(MEASURES), help="only this figure (may be repeated)")
    parser.add_argument("--dir", type=Path, help="measure the disk that holds this directory (default: that of the temporary files)")
    options = parser.parse_args()
    wanted = dict.fromkeys(MEASURES[name] for name in options.only or MEASURES)  # two figures may come from one measurement
    figures: list[Figure] = []
    for measure in wanted:
        note(f"{measure.__module__}.{measure.__name__}")
        with tempfile.TemporaryDirectory(prefix="txmq-bench-", dir=options.dir) as folder:
            found = measure(Path(folder))
        for figure in found:
            emit(figure)
        figures += found
    print("\n" + table(figures))


if __name__ == "__main__":
    main()
