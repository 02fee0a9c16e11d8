"""What a command prints: aligned tables and lines, or JSON with ``--json``.

Invariant: only this module writes to the terminal, and nothing that it writes is an escape sequence.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from itertools import groupby
from shutil import get_terminal_size
from typing import Any
from unicodedata import combining, east_asian_width

import click

from broker_core.admin import NOBODY, Preparation
from broker_core.core.errors import OptionError, printable, visible
from txmq.command.declare import Options, command

Row = dict[str, Any]
LEAST_WIDTH = 5  # of a column that is cut for a narrow terminal


def list_command(
    words: str, text: str, rows: Callable[[Options], Iterable[object]], *params: click.Parameter
) -> None:
    """Declares a command that shows records or rows."""
    command(words, text, *params)(lambda options: show(options, rows(options)))


def show(options: Options, rows: Iterable[object]) -> int:
    """Prints a table of records or rows, or JSON with ``--json``. Returns the exit code."""
    listed = list(map(_row, rows))
    return report(options, listed, () if options.json else table(listed))


def _row(item: object) -> Row:
    if isinstance(item, dict):
        return item
    assert dataclasses.is_dataclass(item) and not isinstance(item, type)
    return dataclasses.asdict(item)


def done(options: Options, text: str, **result: object) -> int:
    """Prints ``text``, or ``result`` as JSON with ``--json``. Returns the exit code."""
    return report(options, result, [text])


def report(options: Options, facts: object, lines: Iterable[str]) -> int:
    """Prints ``lines``, or ``facts`` (a record too) as JSON with ``--json``. Returns the exit code."""
    if options.json:
        print(json.dumps(facts, default=_json_default))
    else:
        print_lines(*lines)
    return 0


def confirm(options: Options, text: str) -> None:
    """Returns if ``--yes`` was given, or if a person reads ``text`` and agrees. Raises OptionError."""
    if options.yes:
        return
    if not sys.stdin.isatty():
        raise OptionError(f"{text}, which needs --yes", "add --yes if you mean it")
    print(printable(f"{text}. Continue? [y/N] "), end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise OptionError(f"{text}, and you did not agree", "nothing was changed")


def print_lines(*lines: str, error: bool = False) -> None:
    """Writes lines; ``error``: to standard error."""
    for line in lines:
        print(printable(line), file=sys.stderr if error else sys.stdout)


def cut(text: str, columns: int) -> str:
    """``text`` without what is beyond ``columns`` of a terminal, where some letters take two."""
    wide, at = 0, 0
    for at, letter in enumerate(text):
        wide += 2 if east_asian_width(letter) in "WF" else not combining(letter)
        if wide > columns:
            return text[: max(0, at - (wide - columns > 1))]
    return text


def script(prepared: Sequence[Preparation]) -> list[str]:
    """Lines for a shell: what is there or optional is a comment."""
    if not prepared:
        return ["# nothing to prepare: the embedded broker makes what it needs"]
    lines = [
        "# kafka-*.sh are Kafka's tools; give them --command-config FILE where the cluster needs a login"
    ]
    if any(NOBODY in each.command for each in prepared):
        lines.append(f"# put the user of the role in place of {NOBODY}")
    for part, group in groupby(prepared, lambda each: each.part):
        lines += ["", f"# {part}" if part == "topics" else f"# rights of the {part}"]
        for each in group:
            lines.append(f"# {each.state}: {each.why}".removesuffix(": "))
            lines.append(each.command if each.due else f"#   {each.command}")
    return lines


def _json_default(value: object) -> object:
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, datetime):
        return value.isoformat()
    return str(value)


def table(rows: Sequence[Row]) -> list[str]:
    """Aligned columns: numbers right, text left. On a terminal each line fits: long texts are cut."""
    if not rows:
        return []
    names = list(rows[0])
    cells = [[_cell(row[name]) for name in names] for row in rows]
    widths = [max(len(name), *(len(line[index]) for line in cells)) for index, name in enumerate(names)]
    if sys.stdout.isatty():
        over = sum(widths) + 2 * (len(widths) - 1) - get_terminal_size().columns
        while over > 0 and max(widths) > LEAST_WIDTH:
            widest = widths.index(max(widths))
            widths[widest] -= 1
            over -= 1
        names, *cells = [list(map(_shorten, line, widths)) for line in (names, *cells)]
    number = (int, float, type(None))
    right = [
        all(isinstance(row[name], number) and not isinstance(row[name], bool) for row in rows)
        for name in rows[0]
    ]

    def aligned(line: Sequence[str]) -> str:
        return "  ".join(
            text.rjust(width) if to_right else text.ljust(width)
            for text, width, to_right in zip(line, widths, right, strict=True)
        ).rstrip()

    return [aligned(names), *(aligned(line) for line in cells)]


def _shorten(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.1f}"
    if isinstance(value, (tuple, list)):
        return ",".join(_cell(item) for item in value)
    if isinstance(value, dict):
        return ",".join(f"{_cell(key)}={_cell(item)}" for key, item in value.items())
    return visible(str(value))
