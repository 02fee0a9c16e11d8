"""How much work a call is, counted and not timed: a machine that is busy does not change it.

A step is a line that Python executes, and each item of a comprehension. Loops inside C functions are not
counted (a copy of a table, a search in a text); what they cost, a test must see in another way.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def steps(work: Callable[[], object]) -> int:
    """Returns the steps of ``work`` in this thread."""
    count = 0

    def line(_frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return line

    before = sys.gettrace()
    sys.settrace(line)
    try:
        work()
    finally:
        sys.settrace(before)
    return count
