"""The records of the broker (``core/records.py``) as records of Kafka: keys and values are JSON text.

Used for every compacted topic of txmq. A natural key, ``["ledger","app",3]``, names the class and the fields
of ``KEY``; the value has all fields.
Not here: which topic and partition, and what a reader does with a record.
A cluster has no virtual hosts, so the field ``vhost`` is not stored.
Invariant: ``parse(*put(record)[:2]) == record``, and equal keys have equal texts, so compaction keeps the
last one.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple
from uuid import UUID

import pyarrow as pa

from broker_core.core import errors
from broker_core.core.address import VHOST
from broker_core.core.records import RECORDS, Record, canonical
from broker_core.core.records import parse as canonical_parse
from broker_core.kafka import names
from broker_core.kafka.cluster.client import Client
from broker_core.kafka.protocol.port import Isolation, TopicPartition
from broker_core.kafka.record.decode import NO_HEADERS, Records, decode, header_pairs
from broker_core.kafka.record.encode import encode, encode_headers
from broker_core.kafka.record.record_batch import Codec

_KINDS: dict[str, type[Record]] = {kind.TABLE: kind for kind in RECORDS}
_VHOST = "vhost"
LARGE = 64 << 10  # bytes of a batch
LOGS = "txmq-logs"  # header of a decision: the logs in which its transaction publishes


def now_ms() -> int:
    return time.time_ns() // 1_000_000


class Entry(NamedTuple):
    """A record of Kafka before it is written. ``value`` None: a tombstone of its key."""

    key: str
    value: str | None
    headers: tuple[tuple[str, bytes | None], ...] = ()


class Row(NamedTuple):
    """A record of Kafka as it was read. ``timestamp`` in milliseconds; ``value`` None: a tombstone."""

    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()


# -- records as entries --------------------------------------------------------------------------------------


def put(record: Record) -> Entry:
    return Entry(key_text(type(record), record.key), dumps(fields_of(record)))


def drop(kind: type[Record], key: Sequence[object]) -> Entry:
    return Entry(key_text(kind, key), None)


def logs_header(logs: Iterable[TopicPartition]) -> tuple[tuple[str, bytes], ...]:
    """The logs of a transaction as headers of its decision."""
    found: dict[str, list[int]] = {}
    for log in sorted(set(logs)):
        found.setdefault(log.topic, []).append(log.partition)
    return ((LOGS, dumps(found).encode()),) if found else ()


def logs_of(row: Row) -> list[TopicPartition]:
    """The logs that :func:`logs_header` has named; none where it has named none."""
    logs = [loads(value) for name, value in row.headers if name == LOGS and value is not None]
    return [TopicPartition(topic, part) for found in logs for topic, parts in found.items() for part in parts]


def parse(key: bytes | str, value: bytes | str) -> Record:
    """Returns the record of an entry with a natural key. Raises KafkaError for one of another version."""
    return record_of(parse_key(key)[0], loads(value))


def key_text(kind: type[Record], key: Sequence[object]) -> str:
    stored = [value for name, value in zip(kind.KEY, key, strict=True) if name != _VHOST]
    return dumps([kind.TABLE, *stored])


def parse_key(key: bytes | str) -> tuple[type[Record], tuple[Any, ...]]:
    """Returns class and key of a natural key. Raises KafkaError."""
    found = loads(key)
    if not isinstance(found, list) or not found or found[0] not in _KINDS:
        raise _other_version(f"a key {found!r}")
    kind = _KINDS[found[0]]
    rest = iter(found[1:])
    return kind, tuple(VHOST if name == _VHOST else next(rest, None) for name in kind.KEY)


def kind_of(table: str) -> type[Record]:
    """Returns the class of a table. Raises KafkaError."""
    if table not in _KINDS:
        raise _other_version(f"a record of the kind {table!r}")
    return _KINDS[table]


def fields_of(record: Record) -> dict[str, object]:
    return {name: getattr(record, name) for name in record.columns() if name != _VHOST}


def record_of(kind: type[Record], values: Any) -> Record:
    """Raises KafkaError where the fields are those of another version."""
    names = {field.name for field in fields(kind)} - {_VHOST}
    if not isinstance(values, dict) or set(values) != names:
        raise _other_version(f"a {kind.TABLE} with the fields {sorted(values) if values else values!r}")
    return kind(**values)


def dumps(value: object) -> str:
    """Returns one text for equal values. Raises OptionError for a value that has no JSON."""
    try:
        return canonical(value)
    except (TypeError, ValueError) as error:
        raise errors.OptionError(f"{value!r} cannot be stored on Kafka: {error}") from None


def loads(text: bytes | str) -> Any:
    """Raises KafkaError for a text that is no JSON."""
    try:
        return canonical_parse(text if isinstance(text, str) else text.decode())
    except ValueError as error:
        raise errors.KafkaError(
            f"a topic of txmq has a record that is not JSON ({error}): {text[:100]!r}",
            "nothing else may write to it: revoke the ACL of the other writer",
        ) from None


def _other_version(what: str) -> errors.KafkaError:
    return errors.KafkaError(
        f"a topic of txmq has {what}, which this version cannot read",
        "use the version that wrote it, or a newer one",
    )


# -- entries in a partition ----------------------------------------------------------------------------------


def batch(entries: Sequence[Entry], timestamp: int, *, transactional: bool = False) -> bytes:
    """Returns one record batch of ``entries``, 1 or more; ``timestamp`` in milliseconds. All of it is
    written, or nothing. A large one is compressed, so that it passes the limit of a topic.
    """
    size = sum(len(entry.value or "") for entry in entries)
    has_headers = any(entry.headers for entry in entries)
    return encode(
        pa.array([None if entry.value is None else entry.value.encode() for entry in entries], pa.binary()),
        timestamp=timestamp,
        keys=pa.array([entry.key.encode() for entry in entries], pa.binary()),
        headers=pa.array([encode_headers(entry.headers) for entry in entries], pa.binary())
        if has_headers
        else None,
        codec=Codec.LZ4 if size > LARGE else Codec.NONE,
        transactional=transactional,
    )


def replay(
    client: Client,
    log: TopicPartition,
    position: int,
    end: int,
    *,
    isolation: Isolation = Isolation.READ_COMMITTED,
    ids: Mapping[str, UUID] | None = None,
) -> Iterator[Row]:
    """Yields the visible records with ``position <= offset < end``.

    ``end`` comes from ListOffsets with the same isolation, never from a fetch: after an election the high
    watermark of a fetch may be below what was acknowledged (KIP-207). Raises DataLoss where ``position`` was
    deleted, ConnectionFailed where a leader does not have the records within the reconnection time.
    """
    patience = client.patience()
    while position < end:
        try:
            fetched = client.fetch({log: position}, ids=ids, isolation=isolation)[log]
        except errors.DataLoss:
            if (app_id := names.app_of(log.topic)) is None:
                raise
            raise errors.DataLoss(
                f"records of {log}, which say where app {app_id!r} is, were deleted by retention",
                f"stop the app, delete topic {log.topic} and let nothing set a retention for it; then "
                "continue as an app whose topic was deleted: after its Delta ledger with "
                "onNewCheckpoint=resume, or with a new checkpoint and startingOffsets where it was",
            ) from None
        decoded = decode(fetched.records, position, end, fetched.aborted, log=str(log))
        yield from _rows(decoded.records)
        if decoded.position == position:  # a leader that is new has not caught up yet
            patience.wait(
                errors.ConnectionFailed(f"the leader of {log} does not show offset {position} yet, of {end}")
            )
        else:
            position = decoded.position
            patience.renew()


def _rows(records: Records) -> Iterator[Row]:
    count = len(records)
    nothing: Iterable[None] = [None] * count
    keys = nothing if records.keys is None else records.keys.to_pylist()
    blocks = [NO_HEADERS] * count if records.headers is None else records.headers.to_pylist()
    for offset, timestamp, key, value, block in zip(
        records.offsets.tolist(), records.timestamps.tolist(), keys, records.values.to_pylist(), blocks
    ):
        yield Row(offset, timestamp, key, value, tuple(header_pairs(block)))
