"""Numbers on the command line: what each option accepts."""

from __future__ import annotations

import argparse

LEAST_HOURS = 1.0  # times of attempts are as coarse


def above_zero(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError("must be above 0")
    return value


def seconds_of_hours(text: str) -> float:
    return above_zero(text) * 3600


def staged_seconds(text: str) -> float:
    value = float(text)
    if not value >= LEAST_HOURS:
        raise argparse.ArgumentTypeError(f"must be at least {LEAST_HOURS:g}")
    return value * 3600


def positive(text: str) -> int:
    value = int(text)
    if not value > 0:
        raise argparse.ArgumentTypeError("must be above 0")
    return value


def seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError("must be 0 or more")
    return value


def count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError("must not be below 0")
    return value
