"""Permissions: patterns for the names that a user may configure, write and read, as RabbitMQ has them.

A pattern runs on RE2, which pyarrow brings along: its time is linear in the text, whatever the pattern.
Python's ``re`` backtracks: one search of ``(a+)+$`` in a name of 30 letters takes minutes, in which it
holds up every other thread. A limit on the text does not bound that, and to find such patterns by their form
is guesswork. So what RE2 does not have, look-around and references back, is refused where it is given, but
for the usual way to except names: ``^(?!X)Y`` is matched as two patterns.

Not here: what a user may do (``rights.py``), and how users are kept (``users.py``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from broker_core.core.checks import MAX_NAME_BYTES
from broker_core.core.errors import OptionError

EVERYTHING = ".*"
_EXCEPT = "^(?!"
_ATOM = re.compile(r"\\.|\[\^?\]?(?:\\.|\[:\^?\w+:\]|[^\]\\])*\]", re.DOTALL)  # an escape, or a class

Permission: TypeAlias = Literal["configure", "write", "read"]


def check_pattern(pattern: str) -> None:
    """Raises OptionError for a text that is not a regular expression of RE2."""
    try:
        _search(pattern, "")
    except (pa.ArrowException, UnicodeError, RecursionError) as error:
        reason = " ".join(str(error).removeprefix("Invalid regular expression: ").split())
        raise OptionError(f"{pattern!r} is not a regular expression: {reason}", _advice(pattern)) from None


def _advice(pattern: str) -> str:
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError):
        return "give one in the syntax of RE2"
    return "look-around and references back have no bound on their time; ^(?!X)Y is taken, to except names"


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
    except (pa.ArrowException, UnicodeError, RecursionError):
        return False


def matching(pattern: str, texts: Sequence[str]) -> list[bool]:
    """Whether ``pattern``, which ``check_pattern`` accepted, is found anywhere in each text."""
    parts = _excepting(pattern)
    if parts is None:
        found = pc.match_substring_regex(pa.array(texts, pa.string()), pattern).to_pylist()
        return [bool(each) for each in found]
    excepted, permitted = (matching(part, texts) for part in parts)
    return [does and not excepts for does, excepts in zip(permitted, excepted, strict=True)]


def _search(pattern: str, text: str) -> bool:
    """Raises ArrowException, UnicodeError for an invalid pattern."""
    return matching(pattern, [text])[0]


def _excepting(pattern: str) -> tuple[str, str] | None:
    """Returns ``^(?:X)`` and ``^Y`` for ``^(?!X)Y``; None for another form, even if Y has alternatives, which
    the exception would not be for.
    """
    if not pattern.startswith(_EXCEPT) or "\\Q" in pattern:
        return None
    depth, at, end = 1, len(_EXCEPT), 0
    while at < len(pattern):
        skipped = _ATOM.match(pattern, at)
        if skipped is not None:
            at = skipped.end()
            continue
        depth += {"(": 1, ")": -1}.get(pattern[at], 0)
        if not depth and not end:
            end = at
        elif not depth and pattern[at] == "|":
            return None
        at += 1
    return (f"^(?:{pattern[len(_EXCEPT) : end]})", f"^{pattern[end + 1 :]}") if end else None
