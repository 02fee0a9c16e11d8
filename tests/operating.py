"""``python -m tests.operating``: writes the commands of ``txmq`` into ``docs/commands.md``, as they are declared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import click

from txmq import cli
from txmq.address import BROKER
from txmq.command.declare import JSON, ROOT, Argument

PAGE = Path(__file__).parents[1] / "docs" / "commands.md"
HEADING = "## Options for the broker\n"
assert cli  # it declares them


def commands() -> str:
    """The part of the page behind its heading."""
    blocks = ["", "A command that needs a broker takes these:", *_table(BROKER)]
    for name, command in _leaves("txmq", ROOT):
        if isinstance(command, click.Group):
            blocks += ["", f"## {name}", "", str(command.help)]
            continue
        shown = [str(param.metavar) for param in command.params if isinstance(param, Argument)]
        of_broker = " at a broker" if any("--timeout" in param.opts for param in command.params) else ""
        blocks += ["", f"### {name}", "", str(command.help), ""]
        blocks += [f"`{' '.join([name, *shown])}`{of_broker}"]
        common = {option for param in BROKER if of_broker for option in param.opts}
        own = [
            param
            for param in command.params
            if isinstance(param, click.Option) and not common & set(param.opts)
        ]
        blocks += _table(param for param in own if param is not JSON)
    return "\n".join(blocks).rstrip() + "\n"


def _leaves(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    """Each group, and behind it its commands."""
    yield name, command
    if isinstance(command, click.Group):
        for word in command.list_commands(click.Context(command)):
            yield from _leaves(f"{name} {word}", command.commands[word])


def _table(options: Iterable[click.Option]) -> list[str]:
    lines = []
    for option in options:
        value = "" if option.is_flag else f" {option.metavar}"
        lines.append(f"| `{option.opts[0]}{value}` | {(option.help or '').replace('|', chr(92) + '|')} |")
    return ["", "| option | meaning |", "|---|---|", *lines] if lines else []


def main() -> None:
    before, _, _ = PAGE.read_text().partition(HEADING)
    PAGE.write_text(before + HEADING + commands())


if __name__ == "__main__":
    main()
