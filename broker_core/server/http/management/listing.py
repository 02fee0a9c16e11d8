"""Lists: chosen columns, order, a pattern of names, pages. Source: RabbitMQ's pagination.

Invariant: only the rows of the page are shown where the order is that of names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from broker_core.broker.topology.topology import Topology
from broker_core.core.pieces import in_order
from broker_core.server.http.call import HttpCall
from broker_core.server.http.gate import Need, visible
from broker_core.server.http.refusal import HttpRefusal, bad_request
from broker_core.server.http.route import Route

T = TypeVar("T")
Row = dict[str, Any]
PAGE, MOST = 100, 500  # rows of a page
COLUMNS, LEVELS = 100, 5  # of a query, whose cost grows with the rows too


def hosts(call: HttpCall) -> list[Topology]:
    """The virtual host of the path, or all that the caller may see."""
    return [call.topology] if "vhost" in call.params else visible(call.backend, call.caller)


def list_of(
    path: str, need: Need, rows: Callable[[HttpCall], Sequence[Row]], text: str, counted: bool = False
) -> Route:
    """The rows as the query asks for them. ``counted``: as in ``Route``."""

    def answer(call: HttpCall) -> object:
        return page_of(call, rows(call), list)

    return Route("GET", path, need, answer, text, counted=counted, often=True)


counted_list = partial(list_of, counted=True)


def one_of(path: str, need: Need, row: Callable[[HttpCall], Row], text: str, *, works: bool = True) -> Route:
    """One row, with the columns that the query asks for. ``works``: as in ``Route``."""

    def answer(call: HttpCall) -> Row:
        return _columns(call.query, [row(call)])[0]

    return Route("GET", path, need, answer, text, works, often=True)


def page_of(call: HttpCall, found: Sequence[T], show: Callable[[Sequence[T]], list[Row]]) -> object:
    """``found``: with a name each, as a key or an attribute, in the order of names. ``show``: makes rows of
    some of them.
    """
    query = call.query
    if "page" not in query and "name" not in query and "sort" not in query:
        return _columns(query, show(found))
    page, size = _number(query, "page", 1), _number(query, "page_size", PAGE)
    if page < 1 or not 1 <= size <= MOST:
        text = f"Invalid pagination parameters: page number {page}, page size {size}"
        raise HttpRefusal(400, "invalid_pagination_parameters", text)
    chosen = _filter_by_name(query, found)
    rows: list[Row] | None = None
    if query.get("sort"):
        rows = _sorted(query["sort"], query.get("sort_reverse") == "true", show(chosen))
    if "page" not in query:
        return _columns(query, show(chosen) if rows is None else rows)
    pages = max(math.ceil(len(chosen) / size), 1)
    if page > pages:
        text = f"Page out of range, page: {page} page size: {size}, len: {len(chosen)}"
        raise HttpRefusal(400, "page_out_of_range", text)
    start = (page - 1) * size
    items = show(chosen[start : start + size]) if rows is None else rows[start : start + size]
    return {
        "filtered_count": len(chosen),
        "item_count": len(items),
        "items": _columns(query, items),
        "page": page,
        "page_count": pages,
        "page_size": size,
        "total_count": len(found),
    }


def _number(query: Mapping[str, str], name: str, default: int) -> int:
    text = query.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise bad_request("Pagination parameters are invalid")
    return int(text)


def _name(row: Any) -> str:
    found = row.get("name", "") if isinstance(row, dict) else row.name
    return str(found)


def _filter_by_name(query: Mapping[str, str], found: Sequence[T]) -> Sequence[T]:
    """Those whose name has the text in it, or matches it (RE2: linear in the length of the names)."""
    text = query.get("name", "")
    if not text:
        return found
    if query.get("use_regex") != "true":
        return [row for row in found if text.lower() in _name(row).lower()]
    try:
        mask = pc.match_substring_regex(pa.array(map(_name, found), pa.string()), text).to_pylist()
    except pa.ArrowInvalid:
        raise bad_request(f"name is {text[:80]!r}, which is no regular expression") from None
    return [row for row, fits in zip(found, mask, strict=True) if fits]


def _at(row: Row, column: str) -> object:
    """``message_stats.publish``: of an object in the row."""
    value: object = row
    for step in column.split("."):
        value = value.get(step) if isinstance(value, dict) else None
    return value


def _sorted(column: str, reverse: bool, rows: list[Row]) -> list[Row]:
    if column.count(".") > LEVELS:
        raise bad_request(f"at most {LEVELS + 1} levels of a column")

    def key(row: Row) -> tuple[int, object]:
        value = _at(row, column)
        if isinstance(value, (bool, int, float)):
            return 1, value
        return (2, value) if isinstance(value, str) else (0, 0)

    return in_order(rows, key, reverse=reverse)


def _columns(query: Mapping[str, str], rows: Iterable[Row]) -> list[Row]:
    names = list(dict.fromkeys(each for each in query.get("columns", "").split(",") if each))
    if not names:
        return list(rows)
    if len(names) > COLUMNS or any(each.count(".") > LEVELS for each in names):
        raise bad_request(f"at most {COLUMNS} columns, of {LEVELS + 1} levels")
    return [_only(row, names) for row in rows]


def _only(row: Row, columns: Sequence[str]) -> Row:
    found: Row = {}
    for column in columns:
        value = _at(row, column)
        if value is None and column not in row:
            continue
        *path, last = column.split(".")
        into = found
        for step in path:
            into = into.setdefault(step, {})
            if not isinstance(into, dict):
                break
        else:
            into[last] = value
    return found
