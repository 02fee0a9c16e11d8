"""What a check found, and how it is shown."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "hint", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """``problem``: something will not work; ``hint``: it may not be what the user means."""

    check: str
    state: State
    found: str
    advice: str = ""


def ok(check: str, found: str) -> Finding:
    return Finding(check, "ok", found)


def hint(check: str, found: str, advice: str) -> Finding:
    return Finding(check, "hint", found, advice)


def problem(check: str, found: str, advice: str) -> Finding:
    return Finding(check, "problem", found, advice)


def lines(findings: Iterable[Finding]) -> list[str]:
    """A line for each finding, and one below it for what to do."""
    texts = []
    for each in findings:
        texts.append(f"{each.state:8} {each.check:10} {each.found}")
        if each.advice:
            texts.append(f"{'':8} {'':10} -> {each.advice}")
    return texts
