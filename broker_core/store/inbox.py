"""Messages of small commits as rows of the table ``inbox``. Consecutive messages of a block share a row.

A row is ``(id, count, messages)``: block id << 20 | row of the first message, their number, and one blob,
little-endian:

    stamps        uint32              1: all messages have one commit sequence and time; otherwise ``count``
    sequences     int64 x stamps
    times         int64 x stamps
    lengths       uint32 x 5 x count  of all exchanges, then all routing keys, properties, bodies, routes
    the bytes of all these, in the same order

If the highest bit of ``stamps`` is set, the history of a group commit (``broker/history``) and its length
(uint32) follow.

Not here: SQL (``catalog.py``), records, and which values are valid (``codec.py``).
Invariant: ``unpack`` returns what was passed to ``pack``. For any other bytes it raises ValueError, or
returns messages made of these bytes: it never reads past their end, and the memory it allocates is in
proportion to them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, pairwise, repeat
from typing import Any

import xxhash

from broker_core.core.change import HistoryBeside, InboxRow
from broker_core.core.ids import BlockId

ROW_BITS = 20
MAX_ROWS = 1 << ROW_BITS  # of an open block
GROUP_BYTES = 128 * 1024  # of a row with more than one message; limits the loss if it is damaged

Packed = tuple[int, int, bytes]  # id, count, messages

_ONE = struct.Struct("<I2q5I")
_STAMPS = struct.Struct("<I")
_HISTORY = 1 << 31
_STAMP_BYTES, _LENGTHS_BYTES = 16, 20  # of a message
_ROW_MASK = MAX_ROWS - 1


def pack(rows: Sequence[InboxRow]) -> list[Packed]:
    """Packs ``rows``, in order for each block. Consecutive ones of at most ``GROUP_BYTES`` share a row."""
    if len(rows) == 1:
        return [_pack_one(rows[0], 1)]
    if not rows:
        return []
    (first, number, *_), (last, end, *_) = rows[0], rows[-1]
    if first == last and end - number == len(rows) - 1:
        return list(_pack(rows))
    return list(chain.from_iterable(map(_pack, _consecutive(rows))))


def pack_group(rows: Sequence[InboxRow], history: tuple[bytes, bytes] | None) -> list[Packed]:
    """Packs the rows of a group commit, the last one with its ``history`` (``Change.history``)."""
    if history is None:
        return pack(rows)
    full, own = history
    if len(rows) == 1:  # like the rest, in a third of the time
        text = own or full
        return [_pack_one(rows[0], 1 | _HISTORY, text, _STAMPS.pack(len(text)))]
    packed = pack(rows)
    packed[-1] = with_history(packed[-1], own if own and len(packed) == 1 else full)
    return packed


def _pack_one(row: InboxRow, stamps: int, *behind: bytes) -> Packed:
    """Packs one message like ``_pack``, with fewer steps."""
    block_id, number, sequence, committed_at, exchange, routing_key, properties, body, routes = row
    name, key = exchange.encode(), routing_key.encode()
    head = _ONE.pack(
        stamps, sequence, committed_at, len(name), len(key), len(properties), len(body), len(routes)
    )
    return block_id << ROW_BITS | number, 1, b"".join((head, name, key, properties, body, routes, *behind))


def with_history(row: Packed, history: bytes) -> Packed:
    """Returns ``row`` with the history of a group commit."""
    key, count, messages = row
    (stamps,) = _STAMPS.unpack_from(messages)
    head = _STAMPS.pack(stamps | _HISTORY)
    return key, count, b"".join((head, messages[_STAMPS.size :], history, _STAMPS.pack(len(history))))


def history_of(messages: bytes) -> bytes:
    """Returns the history that a row has, b"" for none. Raises ValueError for what nobody has written."""
    if len(messages) < 2 * _STAMPS.size or not messages[_STAMPS.size - 1] & 0x80:
        return b""
    (size,) = _STAMPS.unpack_from(messages, len(messages) - _STAMPS.size)
    end = len(messages) - _STAMPS.size
    if size > end - _STAMPS.size:
        raise ValueError(f"a row of table inbox has {size} bytes of history in {len(messages)}")
    return messages[end - size : end]


def _consecutive(rows: Sequence[InboxRow]) -> list[list[InboxRow]]:
    """Splits ``rows`` where the next one is not the next row of the same block."""
    groups: list[list[InboxRow]] = []
    block_id, number = None, 0
    for row in rows:
        if row[0] != block_id or row[1] != number:
            block_id, number = row[0], row[1]
            groups.append([])
        groups[-1].append(row)
        number += 1
    return groups


def _pack(rows: Sequence[InboxRow]) -> Iterator[Packed]:
    count = len(rows)
    _, _, sequences, times, exchanges, keys, properties, bodies, routes = zip(*rows, strict=True)
    values = [*_encoded(exchanges), *_encoded(keys), *properties, *bodies, *routes]
    lengths = list(map(len, values))
    if count > 1 and sum(lengths) > GROUP_BYTES:
        half = count // 2
        yield from _pack(rows[:half])
        yield from _pack(rows[half:])
        return
    if sequences.count(sequences[0]) == times.count(times[0]) == count:
        sequences, times = sequences[:1], times[:1]
    stamps = len(sequences)
    head = struct.pack(f"<I{2 * stamps}q{5 * count}I", stamps, *sequences, *times, *lengths)
    yield rows[0][0] << ROW_BITS | rows[0][1], count, b"".join((head, *values))


def _encoded(texts: Sequence[str]) -> Iterable[bytes]:
    """Returns the texts as bytes; often all are the same one."""
    count = len(texts)
    return [texts[0].encode()] * count if texts.count(texts[0]) == count else map(str.encode, texts)


def guarded(row: Packed) -> tuple[int, int, bytes, int]:
    """Returns ``row`` with its checksum, like ``codec.guard`` with fewer steps."""
    key, count, messages = row
    text = b"[%d, %d, %d]" % (key, count, len(messages))
    checksum = xxhash.xxh3_64_digest(text, xxhash.xxh3_64_intdigest(messages))
    return key, count, messages, int.from_bytes(checksum, "big", signed=True)


def unpack_all(rows: Iterable[tuple[Any, ...]]) -> tuple[list[InboxRow], list[HistoryBeside]]:
    """Returns the messages of all rows, and the histories beside them."""
    inbox: list[InboxRow] = []
    history: list[HistoryBeside] = []
    for key, count, messages in rows:
        unpacked = unpack(key, count, messages)
        inbox += unpacked
        if found := history_of(messages):
            history.append(HistoryBeside(BlockId(key >> ROW_BITS), found, unpacked))
    return inbox, history


def unpack(key: object, count: object, messages: object, *, errors: str = "strict") -> list[InboxRow]:
    """Returns the messages of a row. ``errors``: how to decode invalid UTF-8. Raises ValueError for what
    :func:`pack` did not make.
    """
    if type(key) is not int or type(count) is not int or type(messages) is not bytes:
        raise ValueError("a row of table inbox has values of wrong types")
    first, size = key & _ROW_MASK, len(messages)
    if not 0 < count <= MAX_ROWS - first or size < _STAMPS.size:
        raise ValueError(f"a row of table inbox has {count} messages from row {first} on in {size} bytes")
    (stamps,) = _STAMPS.unpack_from(messages)
    if stamps & _HISTORY:
        stamps &= ~_HISTORY
        size -= len(history_of(messages)) + _STAMPS.size
    start = _STAMPS.size + _STAMP_BYTES * stamps + _LENGTHS_BYTES * count
    if stamps not in (1, count) or start > size:
        raise ValueError(f"{stamps} commit times of {count} messages do not fit into {size} bytes")
    head = struct.unpack_from(f"<{2 * stamps}q{5 * count}I", messages, _STAMPS.size)
    lengths = head[2 * stamps :]
    if sum(lengths) != size - start:
        raise ValueError(
            f"{count} messages of {sum(lengths)} bytes are not the {size - start} bytes that are there"
        )
    values = [messages[begin:end] for begin, end in pairwise(accumulate(lengths, initial=start))]
    same = count if stamps == 1 else 1
    sequences, times = head[:stamps] * same, head[stamps : 2 * stamps] * same
    texts = [value.decode("utf-8", errors) for value in values[: 2 * count]]
    columns = [
        texts[:count],
        texts[count:],
        *(values[part * count : (part + 1) * count] for part in (2, 3, 4)),
    ]
    numbers = range(first, first + count)
    rows = zip(repeat(key >> ROW_BITS, count), numbers, sequences, times, *columns, strict=True)
    return list(map(InboxRow._make, rows))
