"""Records of Kafka as the rows of a read: READ_SCHEMA.

A record of another client is a row too: its key is the routing key (no key: the queue's name; a key that is
no UTF-8: ``0x`` and its bytes in hex), its headers are the headers of a message.
Not here: fetching and decoding.
Invariant: every record is a row, whatever its key, value and headers hold.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from broker_core.kafka.protocol.port import TopicPartition
from broker_core.kafka.record.decode import Records, header_pairs
from broker_core.kafka.record.headers import to_message
from broker_core.message.message import HEADERS, READ_SCHEMA, READ_WITH_RECORD, TIMESTAMP

_NO_TIMESTAMP = -1
_MAX_MS = (2**63 - 1) // 1000  # that fit into microseconds


def rows_of(records: Records, log: TopicPartition, *, record: bool = False) -> pa.RecordBatch:
    size = len(records)
    exchanges, properties = _messages(records.headers, size)
    columns = {
        "queue": pa.repeat(pa.scalar(log.topic, pa.string()), size),
        "partition": pa.repeat(pa.scalar(log.partition, pa.int32()), size),
        "offset": pa.array(records.offsets),
        "exchange": exchanges,
        "routing_key": _routing_keys(records.keys, log.topic, size),
        "body": records.values,
        "timestamp": _timestamps(records.timestamps),
        "redelivered": pa.repeat(pa.scalar(False), size),
        "properties": properties,
    }
    if record:
        columns["key"] = pa.nulls(size, pa.binary()) if records.keys is None else records.keys
        columns["headers"] = _headers(records.headers, size)
    schema = READ_WITH_RECORD if record else READ_SCHEMA
    return pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema)


def _timestamps(milliseconds: np.ndarray[tuple[int], np.dtype[np.int64]]) -> pa.Array:
    """Null where a record has none."""
    microseconds = np.clip(milliseconds, -_MAX_MS, _MAX_MS) * 1000
    missing = milliseconds == _NO_TIMESTAMP
    return pa.array(microseconds, pa.int64(), mask=missing if missing.any() else None).cast(TIMESTAMP)


def _routing_keys(keys: pa.BinaryArray | None, queue: str, size: int) -> pa.StringArray:
    if keys is None:
        return pa.repeat(pa.scalar(queue, pa.string()), size)
    try:
        texts = keys.cast(pa.string())
    except pa.ArrowInvalid:  # some key is no UTF-8
        texts = pa.array([None if key is None else _text(key) for key in keys.to_pylist()], pa.string())
    return texts.fill_null(queue) if texts.null_count else texts


def _text(key: bytes) -> str:
    try:
        return key.decode()
    except UnicodeDecodeError:
        return f"0x{key.hex()}"


def _headers(headers: pa.DictionaryArray | None, size: int) -> pa.ListArray:
    if headers is None:
        return pa.nulls(size, HEADERS)
    found = [header_pairs(block) or None for block in headers.dictionary.to_pylist()]
    return pa.array(found, HEADERS).take(headers.indices)


def _messages(headers: pa.DictionaryArray | None, size: int) -> tuple[pa.StringArray, pa.BinaryArray]:
    """Exchanges and encoded properties. Equal headers are converted once."""
    if headers is None:
        return pa.repeat(pa.scalar("", pa.string()), size), pa.repeat(pa.scalar(b"", pa.binary()), size)
    found = [to_message(header_pairs(block)) for block in headers.dictionary.to_pylist()]
    exchanges = pa.array([exchange for exchange, _ in found], pa.string())
    properties = pa.array([encoded for _, encoded in found], pa.binary())
    return exchanges.take(headers.indices), properties.take(headers.indices)
