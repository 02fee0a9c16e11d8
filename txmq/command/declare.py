"""Declares commands with click. A command is a function of :class:`Options` that returns the exit code.

Not here: what a command does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import click
from click.core import ParameterSource

from txmq.command.values import above_zero

COMPLETE_VARIABLE = "_TXMQ_COMPLETE"  # set by the script of a shell that asks for completions


class Options(SimpleNamespace):
    """What a command line says, by the names of its parameters; ``command``: the function."""


Run = Callable[[Options], int]


class CommandOption(click.Option):
    """``rivals``: at most one of them may be given, and, where they are ``needed``, one must be."""

    rivals: Sequence[CommandOption] = ()
    needed = False


class Argument(click.Argument):
    """An argument with a line in the help."""

    text = ""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        return str(self.metavar), self.text


class DeclaredCommand(click.Command):
    """Its call returns the options; nothing is done yet."""

    def __init__(self, name: str, function: Run, text: str, params: Sequence[Any]) -> None:
        super().__init__(name, help=_sentence(text), short_help=text, params=list(params))
        self._function = function

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        rest = super().parse_args(ctx, args)
        if not ctx.resilient_parsing:
            for param in self.params:
                if isinstance(param, CommandOption) and param.rivals and param is param.rivals[0]:
                    _choose(ctx, param.rivals)
        return rest

    def invoke(self, ctx: click.Context) -> Options:
        values = {name: list(value) if type(value) is tuple else value for name, value in ctx.params.items()}
        return Options(command=self._function, **values)


def _choose(ctx: click.Context, rivals: Sequence[CommandOption]) -> None:
    """What the command line names replaces what the environment names. Raises UsageError."""
    present = [
        each for each in rivals if ctx.get_parameter_source(str(each.name)) is ParameterSource.COMMANDLINE
    ]
    if len(present) > 1:
        raise click.UsageError(f"{present[1].opts[0]} is not allowed with {present[0].opts[0]}", ctx)
    if rivals[0].needed and not any(ctx.params[str(each.name)] for each in rivals):
        raise click.UsageError(f"one of {' and '.join(each.opts[0] for each in rivals)} is needed", ctx)
    if present:
        ctx.params.update(
            {str(each.name): False if each.is_flag else None for each in rivals if each not in present}
        )


def option(name: str, value: str = "", text: str = "", **more: Any) -> CommandOption:
    """``value``: its name in the help; without one the option is a switch. ``more``: for click."""
    defaults: dict[str, Any] = {"metavar": value, "type": str} if value else {"is_flag": True}
    return CommandOption([name], help=text, **{**defaults, **more})


def one_of(*options: CommandOption, needed: bool = False) -> tuple[CommandOption, ...]:
    for each in options:
        each.rivals, each.needed = options, needed
    return options


def argument(name: str, text: str = "", value: str = "", **more: Any) -> Argument:
    parameter = Argument([name.lower()], metavar=value or name, **{"type": str, **more})
    parameter.text = text
    return parameter


JSON = option("--json", text="print JSON")
YES = option("--yes", text="do it without asking, for scripts")
WATCH = option(
    "--watch",
    "[SECONDS]",
    "show it again and again; default every 2 seconds; Ctrl-C or q ends",
    type=above_zero,
    is_flag=False,
    flag_value="2",
)
# the first word of most commands: an object, before what is done to it
GROUPS = {
    "queue": "manage queues",
    "exchange": "manage exchanges and bindings",
    "message": "publish, move and trace messages",
    "connection": "inspect and close connections, channels and consumers",
    "tx": "decide prepared transactions",
    "history": "inspect committed transactions",
    "app": "manage Spark apps and their batches",
    "user": "manage users and their tags",
    "permission": "manage permissions of users",
    "vhost": "manage virtual hosts and their limits",
    "policy": "manage limits and dead letters of many queues by a pattern",
    "broker": "back up, check, repair and set up a broker",
}


class Words(click.Group):
    """Lists words as they are declared, commands before groups, and a group with its own words."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self.commands, key=lambda word: (word in GROUPS, word != "list"))

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [" | ".join(self.list_commands(ctx)), "..."]

    def get_short_help_str(self, limit: int = 45) -> str:
        return f"{self.short_help}: {', '.join(self.list_commands(click.Context(self)))}"


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


ROOT = Words(
    "txmq",
    {
        name: Words(name, help=_sentence(text), short_help=text, no_args_is_help=False)
        for name, text in GROUPS.items()
    },
    help="Run, inspect and operate a txmq broker.",
    no_args_is_help=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def command(words: str, text: str, *params: click.Parameter, json: bool = True) -> Callable[[Run], Run]:
    """Declares the function as the command of these words: of one word, or of a group and one. ``json``: it
    takes ``--json``.
    """

    def declared(function: Run) -> Run:
        *above, name = words.split()
        parent = ROOT.commands[above[0]] if above else ROOT
        assert isinstance(parent, Words)
        parent.add_command(DeclaredCommand(name, function, text, [*[JSON] * json, *params]))
        return function

    return declared
