"""Values on the command line: what each option accepts."""

from __future__ import annotations

from collections.abc import Callable

import click

LEAST_HOURS = 1.0  # times of attempts are as coarse


def _number(
    read: Callable[[str], float], holds: Callable[[float], bool], text: str, unit: int = 1
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


above_zero = _number(float, lambda number: number > 0, "must be above 0")
seconds = _number(float, lambda number: 0 <= number < float("inf"), "must be 0 or more")
seconds_of_hours = _number(float, lambda number: number > 0, "must be above 0", 3600)
staged_seconds = _number(
    float, lambda number: number >= LEAST_HOURS, f"must be at least {LEAST_HOURS:g}", 3600
)
positive = _number(int, lambda number: number > 0, "must be above 0")
count = _number(int, lambda number: number >= 0, "must not be below 0")


def key_and_value(text: str) -> tuple[str, object]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise click.BadParameter(f"{text!r} is not KEY=VALUE")
    try:
        return key, int(value)
    except ValueError:
        return key, value
