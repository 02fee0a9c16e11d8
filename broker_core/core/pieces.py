"""JSON and sorting of large values, in pieces between which other threads run.

All other threads wait until a call into C returns: the JSON of 50,000 bindings is 100 ms of silence for every
client. Here no call has more than a piece.

Not here: how large a value may be at a listener.
Invariant: the text, the value and the order are those of ``json`` and ``sorted``.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from json import decoder, scanner
from typing import Any, TypeVar

T = TypeVar("T")
Pairs = Callable[[list[tuple[str, object]]], object]
ROWS = 100  # of a list, in one call
SORTED = 2_000  # in one call
SMALL_BYTES = 64 * 1024  # of a text, whatever is in it
FEW, MOST = 50_000, 1_000_000  # values of a text: read by one call, and at all
_COUNTED = 1024 * 1024  # bytes of a text in one call
_MARKS = (b",", b"[", b"{")  # each value but one has one of these before it


class TooManyValues(ValueError):
    """A text of JSON has more than MOST values."""


class GivenTwice(ValueError):
    """An object has a key twice: readers differ in which of them counts."""


def once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """An object of these keys and values. Raises GivenTwice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        key = next(key for key in found if keys.count(key) > 1)
        raise GivenTwice(f"the key {key[:80]!r} is given twice")
    return found


def dumps(value: object, **options: Any) -> str:
    """``json.dumps`` without blanks."""
    options.setdefault("separators", (",", ":"))
    if isinstance(value, (list, tuple)) and len(value) > ROWS:
        pieces = (value[start : start + ROWS] for start in range(0, len(value), ROWS))
        return f"[{','.join([dumps(list(piece), **options)[1:-1] for piece in pieces])}]"
    if isinstance(value, dict) and any(map(_is_large, value.values())) and all(type(n) is str for n in value):
        return f"{{{','.join([f'{json.dumps(n)}:{dumps(each, **options)}' for n, each in value.items()])}}}"
    return json.dumps(value, **options)


def _is_large(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return len(value) > ROWS
    return isinstance(value, dict) and any(map(_is_large, value.values()))


def loads(
    text: bytes, parse_constant: Callable[[str], object] | None = None, object_pairs_hook: Pairs | None = None
) -> Any:
    """``json.loads``. Raises ValueError, also TooManyValues."""
    if len(text) <= SMALL_BYTES:
        return json.loads(text, parse_constant=parse_constant, object_pairs_hook=object_pairs_hook)
    found = 1
    for start in range(0, len(text), _COUNTED):
        found += sum(text.count(mark, start, start + _COUNTED) for mark in _MARKS)
        if found > MOST:
            raise TooManyValues(
                f"JSON of {len(text)} bytes has more than {MOST} values: send it in several calls"
            )
    if found <= FEW:
        return json.loads(text, parse_constant=parse_constant, object_pairs_hook=object_pairs_hook)
    slow = _slow(parse_constant, object_pairs_hook)
    return slow.decode(text.decode(json.detect_encoding(text), "surrogatepass"))


def _slow(
    parse_constant: Callable[[str], object] | None, object_pairs_hook: Pairs | None
) -> json.JSONDecoder:
    """The same decoder in Python: between two values, other threads run."""
    found: Any = json.JSONDecoder(parse_constant=parse_constant, object_pairs_hook=object_pairs_hook)
    found.parse_object, found.parse_array = decoder.JSONObject, decoder.JSONArray  # type: ignore[attr-defined]
    found.scan_once = scanner.py_make_scanner(found)  # type: ignore[attr-defined]
    return found  # type: ignore[no-any-return]


def in_order(rows: Iterable[T], key: Callable[[T], Any], *, reverse: bool = False) -> list[T]:
    """``sorted``."""
    remaining = iter(rows)
    runs: list[Sequence[T]] = []
    while some := list(islice(remaining, SORTED)):
        runs.append(sorted(some, key=key, reverse=reverse))
    return list(runs[0]) if len(runs) == 1 else list(heapq.merge(*runs, key=key, reverse=reverse))
