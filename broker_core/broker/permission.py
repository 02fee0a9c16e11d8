"""Permissions: patterns for the names that a user may configure, write and read, as RabbitMQ has them.

A pattern runs on RE2, which pyarrow brings along: its time is linear in the text, whatever the pattern.
Python's ``re`` goes back, and one search of ``(a+)+$`` in a name of 30 letters takes minutes, in which it
holds up every other thread. A limit on the text does not bound that, and to find such patterns by their form
is guesswork. So what RE2 does not have, look-around and references back, is refused where it is given.
A pattern of an older catalog that is refused today permits nothing; ``Users.refused`` names them.

Not here: what a user may do (``rights.py``), and how users are kept (``users.py``).
"""

from __future__ import annotations

import re
from typing import Literal, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from broker_core.checks import MAX_NAME_BYTES
from broker_core.errors import OptionError

EVERYTHING = ".*"

Permission: TypeAlias = Literal["configure", "write", "read"]


def check_pattern(pattern: str) -> None:
    """Raises OptionError for a text that is no regular expression of RE2."""
    try:
        _search(pattern, "")
    except (pa.ArrowException, UnicodeError) as error:
        reason = " ".join(str(error).removeprefix("Invalid regular expression: ").split())
        raise OptionError(f"{pattern!r} is no regular expression: {reason}", _advice(pattern)) from None


def _advice(pattern: str) -> str:
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError):
        return "give one in the syntax of RE2"
    return "look-around and references back have no bound on their time; list what is permitted instead"


def matches(pattern: str, text: str) -> bool:
    """Whether ``pattern`` is found anywhere in ``text``; the empty pattern permits the empty text alone. A
    text that is longer than a name matches nothing but ``.*``.
    """
    if pattern == EVERYTHING:
        return True
    if not pattern:
        return not text
    if len(text) > MAX_NAME_BYTES:
        return False
    try:
        return _search(pattern, text)
    except (pa.ArrowException, UnicodeError):
        return False


def _search(pattern: str, text: str) -> bool:
    return bool(pc.match_substring_regex(pa.scalar(text, pa.string()), pattern).as_py())
