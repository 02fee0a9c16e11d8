"""What a command prints: aligned tables and lines, or JSON with ``--json``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

Row = dict[str, Any]


def show(options: argparse.Namespace, rows: Iterable[Row]) -> int:
    """A table, or JSON with ``--json``. The exit code."""
    listed = list(rows)
    if options.json:
        print_json(listed)
    elif listed:
        print("\n".join(_table(listed)))
    return 0


def done(options: argparse.Namespace, text: str, **result: Any) -> int:
    """``text``, or ``result`` as JSON with ``--json``. The exit code."""
    if options.json:
        print_json(result)
    else:
        print(text)
    return 0


def print_json(value: Any) -> None:
    print(json.dumps(value, default=_json_default))


def _json_default(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, datetime):
        return value.isoformat()
    return str(value)


def _table(rows: Sequence[Row]) -> list[str]:
    """Aligned columns: numbers right, text left."""
    names = list(rows[0])
    cells = [[_cell(row[name]) for name in names] for row in rows]
    widths = [max(len(name), *(len(line[index]) for line in cells)) for index, name in enumerate(names)]
    right = [
        all(isinstance(row[name], (int, float)) and not isinstance(row[name], bool) for row in rows)
        for name in names
    ]

    def aligned(line: Sequence[str]) -> str:
        return "  ".join(
            text.rjust(width) if to_right else text.ljust(width)
            for text, width, to_right in zip(line, widths, right, strict=True)
        ).rstrip()

    return [aligned(names), *(aligned(line) for line in cells)]


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.1f}"
    if isinstance(value, (tuple, list)):
        return ",".join(_cell(item) for item in value)
    if isinstance(value, dict):
        return ",".join(f"{key}={_cell(item)}" for key, item in value.items())
    return " ".join(str(value).split())
