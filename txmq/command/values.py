"""Values on the command line: what each option accepts."""

from __future__ import annotations

from collections.abc import Callable

import click

LEAST_HOURS = 1.0  # times of attempts are as coarse
MOST_HOURS = 1_000_000  # more than a century
MOST = 1_000_000_000  # of seconds 31 years: a clock and a wait take them
MOST_BYTES = 1 << 53  # JSON has such numbers


def _number(
    read: Callable[[str], float], holds: Callable[[float], bool], text: str, unit: int
) -> Callable[[str], float]:
    def value(given: str) -> float:
        try:
            number = read(given)
        except ValueError:
            raise click.BadParameter(f"{given!r} is not a number") from None
        if not holds(number):
            raise click.BadParameter(text)
        return number * unit

    return value


def _within(
    read: Callable[[str], float], least: float, most: float, unit: int = 1, *, above: bool = False
) -> Callable[[str], float]:
    """``above``: more than ``least``. What is no number (nan) is within nothing."""
    text = f"must be {'above' if above else 'at least'} {least:g} and at most {most}"
    holds = (lambda number: least < number <= most) if above else (lambda number: least <= number <= most)
    return _number(read, holds, text, unit)


above_zero = _within(float, 0, MOST, above=True)
seconds = _within(float, 0, MOST)
part = _within(float, 0, 1, above=True)
seconds_of_hours = _within(float, 0, MOST_HOURS, 3600, above=True)
staged_seconds = _within(float, LEAST_HOURS, MOST_HOURS, 3600)
positive = _within(int, 1, MOST_BYTES)
count = _within(int, 0, MOST_BYTES)


def key_and_value(text: str) -> tuple[str, object]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise click.BadParameter(f"{text!r} is not KEY=VALUE")
    try:
        return key, int(value)
    except ValueError:
        return key, value
