"""Values on the command line: what each option accepts."""

from __future__ import annotations

import json
from collections.abc import Callable

import click

from broker_core.core.errors import OptionError

LEAST_HOURS = 1.0  # times of attempts are as coarse
MOST_HOURS = 1_000_000  # more than a century
MOST = 1_000_000_000  # of seconds 31 years: a clock and a wait take them
MOST_BYTES = 1 << 53  # JSON has such numbers


class Misuse(OptionError):
    """The command line alone is wrong: exit code 2."""


def _within(
    read: Callable[[str], float], least: float, most: float, unit: int = 1, *, above: bool = False
) -> Callable[[str], float]:
    """``above``: more than ``least``. What is no number (nan) is within nothing."""

    def value(text: str) -> float:
        try:
            number = read(text)
        except ValueError:
            raise click.BadParameter(f"{text!r} is not a number") from None
        if not (least < number <= most if above else least <= number <= most):
            bound = "above" if above else "at least"
            raise click.BadParameter(f"must be {bound} {least:g} and at most {most}")
        return number * unit

    return value


above_zero = _within(float, 0, MOST, above=True)
seconds = _within(float, 0, MOST)
part = _within(float, 0, 1, above=True)
seconds_of_hours = _within(float, 0, MOST_HOURS, 3600, above=True)
staged_seconds = _within(float, LEAST_HOURS, MOST_HOURS, 3600)
positive = _within(int, 1, MOST_BYTES)
count = _within(int, 0, MOST_BYTES)


def key_and_value(text: str) -> tuple[str, object]:
    """A value is a whole number, a boolean, or a list in JSON; all else is text."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise click.BadParameter(f"{text!r} is not KEY=VALUE")
    of_json = value in ("true", "false") or value.startswith("[")
    try:
        return key, json.loads(value) if of_json else int(value)
    except (ValueError, RecursionError):
        return key, value
