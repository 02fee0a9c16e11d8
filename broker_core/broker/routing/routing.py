"""Routing of a whole column of messages: each distinct key once, then table look-ups.

Invariant: the result for each row is that of ``Exchange.route``, or ``route_all`` for one with copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from broker_core.broker.routing.carbon_copy import Copies
from broker_core.broker.routing.exchange import Exchange, Queues
from broker_core.broker.state.block import RowNumbers
from broker_core.errors import AccessRefused, ExchangeNotFound
from broker_core.ids import QueueId

_EXAMPLES = 3


class Selection(NamedTuple):
    """Rows of a block, in order: ``row .. row+count``, or the set bits of ``bitmap`` counted from ``row``
    (see RunRecord).
    """

    row: int
    rows: int
    bitmap: bytes  # empty: contiguous


class Routed(NamedTuple):
    """The rows for each queue id, how many reach no queue, and up to three (exchange, routing_key) of
    those.
    """

    selections: dict[QueueId, Selection]
    unroutable: int
    examples: list[tuple[str, str]]


def selected_rows(selection: Selection) -> RowNumbers:
    """Returns row numbers, in order."""
    row, rows, bitmap = selection
    if not bitmap:
        return range(row, row + rows)
    return (
        np.flatnonzero(np.unpackbits(np.frombuffer(bitmap, dtype=np.uint8), bitorder="little"))[:rows].astype(
            np.int64
        )
        + row
    )


def row_numbers(selection: Selection) -> npt.NDArray[np.int64]:
    """As :func:`selected_rows`, as an array."""
    rows = selected_rows(selection)
    # numpy would ask a range for each of its numbers
    return np.arange(rows.start, rows.stop) if isinstance(rows, range) else rows


def find_exchange(exchanges: Mapping[str, Exchange], name: str, vhost: str) -> Exchange:
    """Returns the exchange. Raises ExchangeNotFound; AccessRefused for an internal one."""
    exchange = exchanges.get(name)
    if exchange is None:
        raise ExchangeNotFound(
            f"no exchange '{name}' in vhost '{vhost}'", "declare it before you publish to it"
        )
    if exchange.internal:
        raise AccessRefused(f"cannot publish to internal exchange '{name}' in vhost '{vhost}'")
    return exchange


def select(mask: npt.NDArray[np.bool_]) -> Selection:
    """Returns the set rows of ``mask``, at least one, in the shortest form."""
    count = int(np.count_nonzero(mask))
    first = int(mask.argmax())
    last = len(mask) - 1 - int(mask[::-1].argmax())
    if last - first + 1 == count:
        return Selection(first, count, b"")
    row = first & ~7
    return Selection(row, count, np.packbits(mask[row : last + 1], bitorder="little").tobytes())


def route_column(
    exchanges: Mapping[str, Exchange],
    exchange: str | pa.Array,
    routing_keys: pa.Array,
    properties: pa.Array,
    vhost: str,
    copies: Copies | None = None,
) -> Routed:
    """Routes every row. ``exchanges``: of ``vhost``. Raises ExchangeNotFound, AccessRefused."""
    rows = len(routing_keys)
    masks: dict[QueueId, npt.NDArray[np.bool_]] = {}
    reached = np.zeros(rows, dtype=np.bool_)
    if rows == 0:
        return Routed({}, 0, [])
    if rows > 1 and copies is None and all(map(is_alike, (routing_keys, properties, exchange))):
        name = exchange if isinstance(exchange, str) else exchange.slice(0, 1)
        first = route_column(exchanges, name, routing_keys.slice(0, 1), properties.slice(0, 1), vhost)
        return _widened(first, rows)
    distinct = [exchange] if isinstance(exchange, str) else exchange.unique().to_pylist()
    codes = None if len(distinct) == 1 else _encoded(exchange).indices.to_numpy(zero_copy_only=False)
    others = None if copies is None else copies.others(rows)
    for code, name in enumerate(distinct):
        source = find_exchange(exchanges, name, vhost)
        among = None if codes is None else np.flatnonzero(codes == code)
        if copies is not None and others is not None:
            here = copies if codes is None else copies.chosen(codes[copies.rows] == code)
            _route_copies(source, here, routing_keys, properties, masks, reached)
            among = np.flatnonzero(others) if among is None else among[others[among]]
        if among is None or len(among):
            _route_rows(source, among, routing_keys, properties, masks, reached)
    missed = np.flatnonzero(~reached)
    examples = [
        (
            exchange if isinstance(exchange, str) else exchange[int(row)].as_py(),
            routing_keys[int(row)].as_py(),
        )
        for row in missed[:_EXAMPLES]
    ]
    return Routed({queue_id: select(masks[queue_id]) for queue_id in sorted(masks)}, len(missed), examples)


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
    selections = {queue_id: Selection(0, rows, b"") for queue_id in first.selections}
    return Routed(selections, first.unroutable * rows, first.examples * min(rows, _EXAMPLES))


def route_rows(exchange: Exchange, routing_keys: pa.Array, properties: pa.Array) -> dict[QueueId, Selection]:
    """Routes every row through one exchange, internal or not. Returns the rows for each queue id."""
    masks: dict[QueueId, npt.NDArray[np.bool_]] = {}
    _route_rows(exchange, None, routing_keys, properties, masks, np.zeros(len(routing_keys), dtype=np.bool_))
    return {queue_id: select(masks[queue_id]) for queue_id in sorted(masks)}


def _encoded(column: pa.Array) -> pa.DictionaryArray:
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    return column if isinstance(column, pa.DictionaryArray) else column.dictionary_encode()


def _distinct(
    exchange: Exchange, among: npt.NDArray[np.int64] | None, routing_keys: pa.Array, properties: pa.Array
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
    exchange: Exchange,
    among: npt.NDArray[np.int64] | None,
    routing_keys: pa.Array,
    properties: pa.Array,
    masks: dict[QueueId, npt.NDArray[np.bool_]],
    reached: npt.NDArray[np.bool_],
) -> None:
    """Routes the rows ``among`` (None: all) through one exchange, and sets their bits in ``masks`` and
    ``reached``.
    """
    codes, values = _distinct(exchange, among, routing_keys, properties)
    _mark([exchange.route(*value) for value in values], codes, among, masks, reached)


def _route_copies(
    exchange: Exchange,
    copies: Copies,
    routing_keys: pa.Array,
    properties: pa.Array,
    masks: dict[QueueId, npt.NDArray[np.bool_]],
    reached: npt.NDArray[np.bool_],
) -> None:
    """Like ``_route_rows``, for the rows of ``copies``: by all of their keys."""
    among = copies.rows
    if not len(among):
        return
    codes, values = _distinct(exchange, among, routing_keys, properties)
    width = len(copies.keys)
    pairs, inverse = np.unique(codes.astype(np.int64) * width + copies.places, return_inverse=True)
    found = []
    for pair in pairs.tolist():
        (routing_key, encoded), more = values[pair // width], copies.keys[pair % width]
        found.append(exchange.route_all((routing_key, *more), encoded))
    _mark(found, inverse, among, masks, reached)


def _mark(
    found: Sequence[Queues],
    codes: npt.NDArray[np.int64],
    among: npt.NDArray[np.int64] | None,
    masks: dict[QueueId, npt.NDArray[np.bool_]],
    reached: npt.NDArray[np.bool_],
) -> None:
    """Sets the bits of the rows ``among`` (None: all), whose queues ``codes`` name in ``found``."""
    tables: dict[QueueId, npt.NDArray[np.bool_]] = {}
    any_queue = np.zeros(len(found), dtype=np.bool_)
    for code, queues in enumerate(found):
        for queue in queues:
            table = tables.get(queue.queue_id)
            if table is None:
                table = tables[queue.queue_id] = np.zeros(len(found), dtype=np.bool_)
            table[code] = any_queue[code] = True
    for queue_id, table in tables.items():
        mask = masks.get(queue_id)
        if mask is None:
            mask = masks[queue_id] = np.zeros(len(reached), dtype=np.bool_)
        if among is None:
            mask[:] = True if table.all() else table[codes]
        else:
            mask[among] = table[codes]
    if among is None:
        reached[:] = any_queue[codes]
    else:
        reached[among] = any_queue[codes]
