"""Where the time of a run is: the seconds of its tests by kind, and the files that take long.

Not here: what a kind is for (CONTRIBUTING.md).
Invariant: a test is of one kind, the first of ``KINDS`` that it is of.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

import pytest

# A file runs in one process. One that takes longer may be all that is left at the end of a run.
FILE_S = 100.0

KINDS: dict[str, Callable[[pytest.TestReport], bool]] = {
    "Spark": lambda report: "spark" in report.keywords,
    "Kafka": lambda report: "kafka" in report.nodeid.partition("::")[0],
    "crash": lambda report: "crash" in report.keywords,
    "interop": lambda report: report.nodeid.startswith("tests/interop/"),
    "rest": lambda report: True,
}


def kind(report: pytest.TestReport) -> str:
    return next(name for name, belongs in KINDS.items() if belongs(report))


def lines(reports: Iterable[pytest.TestReport]) -> Iterator[str]:
    """A table of the kinds, with the share of each, and a line for each long file. Nothing for a run of seconds."""
    kinds: dict[str, float] = defaultdict(float)
    files: dict[str, float] = defaultdict(float)
    tests: dict[str, int] = defaultdict(int)
    for report in reports:
        kinds[kind(report)] += report.duration
        files[report.nodeid.partition("::")[0]] += report.duration
        tests[kind(report)] += report.when == "call"
    whole = sum(kinds.values())
    if whole < FILE_S:
        return
    for name in KINDS:
        yield f"{name:8}{tests[name]:6} tests {kinds[name]:7.0f} s {kinds[name] / whole:5.0%}"
    for name, seconds in sorted(files.items(), key=lambda file: -file[1]):
        if seconds > FILE_S:
            yield f"{seconds:.0f} s in {name}: split it or make it faster (limit {FILE_S:.0f} s)"
