"""Permissions: patterns for the names that a user may configure, write and read, as RabbitMQ has them.

Not here: what a user may do (``rights.py``), and how users are kept (``users.py``).
"""

from __future__ import annotations

import re
from typing import Literal, TypeAlias

from broker_core.errors import OptionError

EVERYTHING = ".*"

Permission: TypeAlias = Literal["configure", "write", "read"]


def check_pattern(pattern: str) -> None:
    """Raises OptionError for a text that is no regular expression."""
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise OptionError(f"{pattern!r} is no regular expression: {error}") from None


def matches(pattern: str, text: str) -> bool:
    """Whether ``pattern`` is found anywhere in ``text``; the empty pattern permits the empty text alone."""
    if pattern == EVERYTHING:
        return True
    return re.search(pattern, text) is not None if pattern else not text
