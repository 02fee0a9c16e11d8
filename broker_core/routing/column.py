"""Routing of a whole column of messages: each distinct key once, then table look-ups.

Invariant: the result for each row is that of ``Exchange.route``, or ``route_all`` for one with copies, at one
moment of the call: bindings are looked at in pieces, each under ``lock``. What is kept grows with
the rows and with what they reach, and is bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from broker_core.core.block import RowSelection, select_rows
from broker_core.core.errors import AccessRefused, ExchangeNotFound, TransactionTooLarge
from broker_core.core.ids import QueueId
from broker_core.core.records import NEVER
from broker_core.routing.carbon_copy import Copies
from broker_core.routing.exchange import Exchange, Q, RoutedQueue
from broker_core.routing.search import MOST, Search

T = TypeVar("T")

AnyExchange = Exchange[Any]  # whatever its queues are
RoutedQueues = tuple[RoutedQueue, ...]

_EXAMPLES = 3
PIECE = 64  # routing keys that are looked up while the bindings are held
REACHED = 4_000_000  # queues of all distinct keys of a column
SELECTED_BYTES = 64 * 1024 * 1024  # of all bitmaps
Lock = AbstractContextManager[object]
FREE: Lock = nullcontext()  # nobody changes the bindings meanwhile


class Routed(NamedTuple):
    """The rows for each queue id, how many reach no queue, and up to three (exchange, routing_key) of
    those. ``expiration_us``: the shortest that a message has of its own.
    """

    selections: dict[QueueId, RowSelection]
    unroutable: int
    examples: list[tuple[str, str]]
    expiration_us: int = NEVER


def find_exchange(exchanges: Mapping[str, Exchange[Q]], name: str, vhost: str) -> Exchange[Q]:
    """Returns the exchange. Raises ExchangeNotFound; AccessRefused for an internal one."""
    exchange = exchanges.get(name)
    if exchange is None:
        raise ExchangeNotFound(
            f"no exchange '{name}' in vhost '{vhost}'", "declare it before you publish to it"
        )
    if exchange.internal:
        raise AccessRefused(f"cannot publish to internal exchange '{name}' in vhost '{vhost}'")
    return exchange


def route_column(
    exchanges: Mapping[str, AnyExchange],
    exchange: str | pa.Array,
    routing_keys: pa.Array,
    properties: pa.Array,
    vhost: str,
    copies: Copies | None = None,
    lock: Lock = FREE,
) -> Routed:
    """Routes every row. ``exchanges``: of ``vhost``, which change only while others hold ``lock``. Raises
    ExchangeNotFound, AccessRefused, TransactionTooLarge.
    """
    rows = len(routing_keys)
    if rows == 0:
        return Routed({}, 0, [])
    if rows > 1 and copies is None and all(map(is_alike, (routing_keys, properties, exchange))):
        name = exchange if isinstance(exchange, str) else exchange.slice(0, 1)
        alike = routing_keys.slice(0, 1), properties.slice(0, 1)
        return _widened(route_column(exchanges, name, *alike, vhost, lock=lock), rows)
    reached = _Reached(rows)
    distinct = [exchange] if isinstance(exchange, str) else exchange.unique().to_pylist()
    codes = None if len(distinct) == 1 else _encoded(exchange).indices.to_numpy(zero_copy_only=False)
    others = None if copies is None else copies.others(rows)
    for code, name in enumerate(distinct):
        with lock:
            source = _Source(find_exchange(exchanges, name, vhost), exchanges, vhost, lock)
        among = None if codes is None else np.flatnonzero(codes == code)
        if copies is not None and others is not None:
            here = copies if codes is None else copies.chosen(codes[copies.rows] == code)
            _route_copies(source, here, routing_keys, properties, reached)
            among = np.flatnonzero(others) if among is None else among[others[among]]
        if among is None or len(among):
            _route_rows(source, among, routing_keys, properties, reached)
    missed = np.flatnonzero(~reached.any)
    examples = [
        (
            exchange if isinstance(exchange, str) else exchange[int(row)].as_py(),
            routing_keys[int(row)].as_py(),
        )
        for row in missed[:_EXAMPLES]
    ]
    return Routed(reached.selections(), len(missed), examples)


class _Source:
    """An exchange from which keys are routed, while it is there."""

    def __init__(
        self, exchange: AnyExchange, exchanges: Mapping[str, AnyExchange], vhost: str, lock: Lock
    ) -> None:
        self._exchange, self._exchanges, self._vhost, self._lock = exchange, exchanges, vhost, lock
        self.by_key, self.by_headers = exchange.by_key, exchange.by_headers
        self._interned: dict[RoutedQueues, RoutedQueues] = {}  # each result once
        self._entries = 0

    def route(self, values: Sequence[tuple[str, bytes]]) -> list[RoutedQueues]:
        return self._in_pieces(values, lambda value, search: self._exchange.route(*value, search), PIECE)

    def route_all(self, values: Sequence[tuple[tuple[str, ...], bytes]]) -> list[RoutedQueues]:
        return self._in_pieces(values, lambda value, search: self._exchange.route_all(*value, search), 1)

    def _in_pieces(
        self, values: Sequence[T], route: Callable[[T, Search], RoutedQueues], piece: int
    ) -> list[RoutedQueues]:
        found: list[RoutedQueues] = []
        while len(found) < len(values):
            with self._lock:
                if find_exchange(self._exchanges, self._exchange.name, self._vhost) is not self._exchange:
                    raise ExchangeNotFound(
                        f"exchange '{self._exchange.name}' in vhost '{self._vhost}' was declared anew: "
                        "publish again"
                    )
                search = Search()
                for value in values[len(found) : len(found) + piece]:
                    found.append(self._once(route(value, search)))
                    if search.steps > MOST:  # others have the bindings in between
                        break
        return found

    def _once(self, queues: RoutedQueues) -> RoutedQueues:
        first = self._interned.setdefault(queues, queues)
        if first is queues:
            self._entries += len(queues)
            if self._entries > REACHED:
                raise _too_large(f"{self._entries} queues by different keys")
        return first


class _Reached:
    """The rows of a column that reach each queue. ``any``: which rows reach one."""

    def __init__(self, rows: int) -> None:
        self.any = np.zeros(rows, dtype=np.bool_)
        # of each exchange: the rows by group of keys with the same queues, where the groups end, and the
        # groups of each queue
        self._grouped: list[
            tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], dict[QueueId, list[int]]]
        ] = []

    def add(
        self, found: Sequence[RoutedQueues], codes: npt.NDArray[np.int64], among: npt.NDArray[np.int64] | None
    ) -> None:
        """``codes`` say which of ``found`` the rows ``among`` (None: all) reach."""
        numbers: dict[RoutedQueues, int] = {}
        group_of = np.array([numbers.setdefault(queues, len(numbers)) for queues in found], np.int64)
        if len(numbers) < 1 << 16:
            group_of = group_of.astype(np.uint16)  # numpy sorts these in linear time
        groups = group_of[codes]
        order = np.argsort(groups, kind="stable")
        ends = np.searchsorted(groups[order], np.arange(len(numbers) + 1))
        groups_of: dict[QueueId, list[int]] = {}
        for queues, group in numbers.items():
            for queue in queues:
                groups_of.setdefault(queue.queue_id, []).append(group)
        reaches = np.array([bool(queues) for queues in numbers], np.bool_)[groups]
        self.any[slice(None) if among is None else among] = reaches
        self._grouped.append((order if among is None else among[order], ends, groups_of))

    def selections(self) -> dict[QueueId, RowSelection]:
        """By queue id, in order. Raises TransactionTooLarge."""
        found: dict[QueueId, RowSelection] = {}
        size = 0
        for queue_id in sorted({each for _, _, groups_of in self._grouped for each in groups_of}):
            selection = select_rows(np.concatenate(list(self._rows(queue_id))))
            size += len(selection.bitmap)
            if size > SELECTED_BYTES:
                raise _too_large(f"{len(found) + 1} queues")
            found[queue_id] = selection
        return found

    def _rows(self, queue_id: QueueId) -> Iterator[npt.NDArray[np.int64]]:
        for rows, ends, groups_of in self._grouped:
            for group in groups_of.get(queue_id, ()):
                yield rows[ends[group] : ends[group + 1]]


def _too_large(what: str) -> TransactionTooLarge:
    return TransactionTooLarge(
        f"the rows of one part reach {what}, which is more than a part may",
        "bind fewer queues to what they match, or publish fewer different rows at a time",
    )


def is_alike(column: str | pa.Array) -> bool:
    """Whether all values are seen to be equal, which costs less than finding the distinct ones."""
    if isinstance(column, str):
        return True
    if not isinstance(column, pa.StringArray | pa.BinaryArray) or column.null_count or not len(column):
        return False
    _, offsets, data = column.buffers()
    bounds = np.frombuffer(offsets, np.int32)[column.offset : column.offset + len(column) + 1]
    begin, second, end = int(bounds[0]), int(bounds[1]), int(bounds[-1])
    if begin == end:
        return True
    if end - begin != (second - begin) * len(column) or (np.diff(bounds) != second - begin).any():
        return False
    values = memoryview(data)[begin:end].tobytes()
    return values == values[: second - begin] * len(column)


def _widened(first: Routed, rows: int) -> Routed:
    """Returns what holds for ``rows`` rows that are as the first one."""
    selections = {queue_id: RowSelection(0, rows, b"") for queue_id in first.selections}
    return Routed(selections, first.unroutable * rows, first.examples * min(rows, _EXAMPLES))


def _encoded(column: pa.Array) -> pa.DictionaryArray:
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    return column if isinstance(column, pa.DictionaryArray) else column.dictionary_encode()


def _distinct(
    exchange: AnyExchange | _Source,
    among: npt.NDArray[np.int64] | None,
    routing_keys: pa.Array,
    properties: pa.Array,
) -> tuple[npt.NDArray[np.int64], list[tuple[str, bytes]]]:
    """Returns what ``exchange`` uses of the rows ``among``: each distinct (routing key, properties), and for
    each row its index.
    """
    by_key, by_headers = exchange.by_key, exchange.by_headers
    columns = ([routing_keys] if by_key else []) + ([properties] if by_headers else [])
    encoded = [_encoded(column if among is None else column.take(pa.array(among))) for column in columns]
    codes = [column.indices.to_numpy(zero_copy_only=False) for column in encoded]
    values = [column.dictionary.to_pylist() for column in encoded]
    if not by_headers:
        return codes[0], [(key, b"") for key in values[0]]
    if not by_key:
        return codes[0], [("", value) for value in values[0]]
    width = len(values[1])
    pairs, inverse = np.unique(codes[0].astype(np.int64) * width + codes[1], return_inverse=True)
    return inverse, [(values[0][pair // width], values[1][pair % width]) for pair in pairs.tolist()]


def _route_rows(
    source: _Source,
    among: npt.NDArray[np.int64] | None,
    routing_keys: pa.Array,
    properties: pa.Array,
    reached: _Reached,
) -> None:
    """Routes the rows ``among`` (None: all) through one exchange."""
    codes, values = _distinct(source, among, routing_keys, properties)
    reached.add(source.route(values), codes, among)


def _route_copies(
    source: _Source, copies: Copies, routing_keys: pa.Array, properties: pa.Array, reached: _Reached
) -> None:
    """Like ``_route_rows``, for the rows of ``copies``: by all of their keys."""
    if not len(copies.rows):
        return
    codes, values = _distinct(source, copies.rows, routing_keys, properties)
    width = len(copies.keys)
    pairs, inverse = np.unique(codes.astype(np.int64) * width + copies.places, return_inverse=True)
    needed = []
    for pair in pairs.tolist():
        (routing_key, encoded), more = values[pair // width], copies.keys[pair % width]
        needed.append(((routing_key, *more), encoded))
    reached.add(source.route_all(needed), inverse, copies.rows)
