"""``python -m tests.operating``: writes the commands of ``txmq`` into ``docs/operating.md``, from the parser."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from txmq.cli import _parser

PAGE = Path(__file__).parents[1] / "docs" / "operating.md"
HEADING = "## Every command\n"
# of every command that needs a broker: described once, above the commands
ADDRESS = ("--url", "--data", "--vhost", "--timeout", "--settings")
LOGIN = ("--user", "--login-password-file", "--token-file", "--tls-ca", "--tls-cert", "--tls-key")


def commands() -> str:
    """The part of the page behind its heading."""
    blocks = ["", *_arguments(_with_address(), ADDRESS + LOGIN, "A command that needs a broker takes these:")]
    for name, parser in sorted(_leaves("txmq", _parser())):
        blocks += ["", f"### {name}", "", parser.description or ""]
        positional = [action for action in parser._actions if not action.option_strings]
        shown = " ".join(_shown(action) for action in positional)
        of_broker = any("--url" in action.option_strings for action in parser._actions)
        blocks += ["", f"`{' '.join([name, shown]).strip()}`" + (" at a broker" if of_broker else "")]
        own = [
            option
            for action in parser._actions
            for option in action.option_strings[-1:]
            if option not in (*(ADDRESS + LOGIN if of_broker else ()), "--json", "--help")
        ]
        if own:
            blocks += _arguments(parser, own, "")
    return "\n".join(blocks).rstrip() + "\n"


def _leaves(name: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    words = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not words:
        yield name, parser
    for action in words:
        for word, child in action.choices.items():
            yield from _leaves(f"{name} {word}", child)


def _with_address() -> argparse.ArgumentParser:
    return next(parser for name, parser in _leaves("txmq", _parser()) if name == "txmq queues")


def _shown(action: argparse.Action) -> str:
    name = str(action.metavar or action.dest)
    if action.nargs in ("?", "*"):
        return f"[{name}]"
    return f"{name}..." if action.nargs == "+" else name


def _arguments(parser: argparse.ArgumentParser, names: tuple[str, ...] | list[str], text: str) -> list[str]:
    lines = ["", text] if text else []
    lines += ["", "| option | meaning |", "|---|---|"]
    for action in parser._actions:
        if action.option_strings and action.option_strings[-1] in names:
            value = "" if action.nargs == 0 else f" {action.metavar or action.dest.upper()}"
            meaning = (action.help or "") % {"default": action.default, "prog": "txmq"}
            lines.append(f"| `{action.option_strings[-1]}{value}` | {meaning.replace('|', chr(92) + '|')} |")
    return lines


def main() -> None:
    before, _, _ = PAGE.read_text().partition(HEADING)
    PAGE.write_text(before + HEADING + commands())


if __name__ == "__main__":
    main()
