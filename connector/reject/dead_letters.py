"""The messages that an app rejects, as dead letters: copies with ``x-death``, as RabbitMQ writes it.

A task gets the offsets of the messages and reads the messages themselves from their queues, so body and
properties are those that were published, whatever columns the rows have.
Not here: staging (``stream/staging.py``), the header (``message/x_death.py``).
Invariant: a row becomes exactly one dead letter, or the task fails.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import BinaryType, StringType, StructType

from broker_core.core.errors import DataLoss, OptionError, ProtocolError
from broker_core.engine import DeadLetterRoute, Engine, Slice
from broker_core.message.field_table import Long, Timestamp
from broker_core.message.message import DELAY, MAX_DELAY_MS, MESSAGE_SCHEMA
from broker_core.message.properties import Properties, append_headers, encode_headers, expiration, rewrite_of
from broker_core.message.x_death import DAMAGED, READ, Death, count_of, headers_after

REASON = "reason"  # the column
HEADER = "x-reject-reason"
ATTEMPTS = 5
LONGEST_REASON = 1_000  # characters: the properties of a message must fit into one frame
PLACE = {"queue": "string", "partition": "int", "offset": "bigint"}
CHECKED_COLUMNS = pa.schema(
    [
        ("queue", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("reason", pa.string()),
        ("checksum", pa.int64()),
    ]
)
_ROWS, _BYTES = 1_000, 1 << 20  # of a batch of dead letters, at most so many and about so much
_GAP = 64  # messages between two rejected ones that are read too, and left out


def rejected_rows(rows: DataFrame, reason: str | None) -> DataFrame:
    """The columns of ``rows`` that a task needs. Raises OptionError."""
    _check(rows.schema, reason)
    column = F.col(REASON) if reason is None else F.lit(reason)
    sum_of = F.crc32(F.col("body")) if "body" in rows.columns else F.lit(None)
    return rows.select(
        *PLACE, F.substring(column, 1, LONGEST_REASON).alias(REASON), sum_of.cast("bigint").alias("checksum")
    )


def with_reason(broken: pa.RecordBatch, reason: str | None) -> pa.RecordBatch:
    """Rows of CHECKED_COLUMNS, with the reason of ``tx.reject`` if it has one; none is too long. Raises
    OptionError.
    """
    _check_reason(reason)
    reasons = broken.column(REASON).to_pylist() if reason is None else [reason] * broken.num_rows
    column = pa.array([each[:LONGEST_REASON] for each in reasons], pa.string())
    return broken.set_column(CHECKED_COLUMNS.get_field_index(REASON), CHECKED_COLUMNS.field(REASON), column)


def _check(schema: StructType, reason: str | None) -> None:
    types = {field.name: field.dataType for field in schema.fields}
    for name, kind in PLACE.items():
        if name not in types or types[name].simpleString() != kind:
            found = types[name].simpleString() if name in types else "none"
            raise OptionError(
                f"reject needs the column {name!r} ({kind}) of the messages, and the rows have {found}",
                "keep queue, partition and offset of format txmq, or use tx.publish",
            )
    if reason is None and not isinstance(types.get(REASON), StringType):
        raise OptionError(
            "reject got no reason: no argument, and no column 'reason' (string)", "give one of them"
        )
    _check_reason(reason)
    if "body" in types and not isinstance(types["body"], (BinaryType, StringType)):
        raise OptionError(
            f"column 'body' has the type {types['body'].simpleString()}, so it is not that of the messages",
            "keep the body of format txmq, or leave it out",
        )


def _check_reason(reason: str | None) -> None:
    if reason is not None and not isinstance(reason, str):
        raise OptionError(f"reject got the reason {reason!r}, which is not text", "give a str")


class _Row(NamedTuple):
    reason: str | None
    checksum: int | None


_Place = tuple[str, int, int]  # queue, partition, offset


@dataclass(frozen=True)
class Rejection:
    """What the tasks of one ``tx.reject`` do. ``exchange`` and ``routing_key`` None: those of the queue.
    ``delay_ms``: after which a message comes again, at most ``attempts`` times; 0: it is a dead letter at
    once.
    """

    app_id: str
    exchange: str | None
    routing_key: str | None
    delay_ms: int = 0
    attempts: int = 0

    @classmethod
    def to(
        cls, app_id: str, exchange: str | None, routing_key: str | None, queue: str | None,
        delay: float | None = None, attempts: int = ATTEMPTS,
    ) -> Rejection:  # fmt: skip
        """``queue`` means exchange "" and this routing key. ``delay``: in seconds. Raises OptionError."""
        valid = type(delay) in (int, float) and 0.001 <= delay <= MAX_DELAY_MS / 1000  # type: ignore[operator]
        if delay is not None and not valid:
            raise OptionError(
                f"reject has delay={delay!r}",
                f"give seconds, at least 0.001 and at most {MAX_DELAY_MS // 1000}",
            )
        again = int((delay or 0) * 1000), attempts
        if type(attempts) is not int or attempts < 1:
            raise OptionError(f"reject has attempts={attempts!r}", "give how often a message comes again")
        destination = {"exchange": exchange, "routing_key": routing_key, "queue": queue}
        for name, value in destination.items():
            if value is not None and not isinstance(value, str):
                raise OptionError(f"reject has {name}={value!r}, which is not text", "give a str")
        if queue is None:
            return cls(app_id, exchange, routing_key, *again)
        if exchange is not None or routing_key is not None:
            raise OptionError(
                f"reject has queue={queue!r} and also exchange or routing_key",
                f"queue means exchange='' and routing_key={queue!r}, so give one of them",
            )
        return cls(app_id, "", queue, *again)

    @property
    def target(self) -> dict[str, str]:
        return {"exchange": "", "routing_key": ""}  # each dead letter has its own

    def messages(self, engine: Engine, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The dead letters of rows of :func:`rejected_rows`, as MESSAGE_SCHEMA. Raises OptionError,
        DataLoss.
        """
        task = _Task(self, engine)
        for batch in batches:
            places: dict[_Place, list[_Row]] = {}
            for queue, partition, offset, reason, checksum in zip(
                *(column.to_pylist() for column in batch.columns), strict=True
            ):
                if queue is None or partition is None or offset is None:
                    raise OptionError(
                        f"a rejected row has no place (queue {queue!r}, partition {partition}, offset "
                        f"{offset}), so it is not a message of a queue",
                        "keep queue, partition and offset of format txmq",
                    )
                places.setdefault((queue, partition, offset), []).append(_Row(reason, checksum))
            yield from task.messages(places)


# exchange, routing key, body (null for a record of Kafka without a value), properties
_Letter = tuple[str, str, bytes | None, bytes]


class _Task:
    def __init__(self, rejection: Rejection, engine: Engine) -> None:
        self._rejection = rejection
        self._engine = engine
        self._time = Timestamp(int(time.time()))
        self._logs: dict[str, list[str]] = {}
        self._routes: dict[str, DeadLetterRoute] = {}

    def messages(self, places: dict[_Place, list[_Row]]) -> Iterator[pa.RecordBatch]:
        for queue in sorted({queue for queue, _, _ in places} - self._routes.keys()):
            self._require_read(queue)
            self._logs[queue] = self._engine.logs([queue])
            self._routes[queue] = self._route(queue)
        left = dict(places)
        rows: list[_Letter] = []
        size = 0
        for found in self._engine.browse(self._slices(sorted(places))):
            for row in self._copies(found, left):
                rows.append(row)
                size += len(row[2] or b"") + len(row[3])
                if len(rows) == _ROWS or size >= _BYTES:
                    yield _batch(rows)
                    rows, size = [], 0
        if rows:
            yield _batch(rows)
        if left:
            queue, partition, offset = min(left)
            raise DataLoss(
                f"{len(left)} rejected messages are not in their queues any more (message {offset} of "
                f"{_log_name(queue, partition)}), so they cannot become dead letters",
                "nothing is decided: reject messages of this batch; for rows of an earlier batch, which the "
                "state of a query keeps, use tx.publish",
            )

    def _require_read(self, queue: str) -> None:
        """Another broker, or a batch read, may have a queue of the same name."""
        app = self._engine.app(self._rejection.app_id)
        if app is None or queue not in app.queues:
            raise OptionError(
                f"a rejected message is from queue {queue!r}, which app {self._rejection.app_id!r} does not "
                "consume",
                "reject what a txmq source with this appId has read; use tx.publish for other rows",
            )

    def _route(self, queue: str) -> DeadLetterRoute:
        rejection = self._rejection
        if rejection.exchange is not None and not rejection.delay_ms:
            return DeadLetterRoute(rejection.exchange, rejection.routing_key)
        found = self._engine.dead_letter_route(queue)
        if found is None:
            raise OptionError(
                f"queue {queue!r} has no dead-letter exchange for its rejected messages",
                "declare it with x-dead-letter-exchange, or give reject an exchange or a queue",
            )
        if rejection.delay_ms and not found.later:
            raise OptionError(
                f"queue {queue!r} has no exchange by which its rejected messages come again after a delay",
                f"declare one of type x-delayed-message, and bind the queue to it by the key {queue!r}",
            )
        if rejection.exchange is not None:
            return replace(found, exchange=rejection.exchange, routing_key=rejection.routing_key)
        return found if rejection.routing_key is None else replace(found, routing_key=rejection.routing_key)

    def _slices(self, places: list[_Place]) -> list[Slice]:
        """Few slices that hold the places, which are sorted."""
        slices: list[Slice] = []
        for queue, partition, offset in places:
            log = queue if self._logs[queue] == [queue] else f"{queue}/{partition}"
            if slices and slices[-1][0] == log and offset - slices[-1][2] <= _GAP:
                slices[-1] = (log, slices[-1][1], offset + 1)
            else:
                slices.append((log, offset, offset + 1))
        return slices

    def _copies(self, found: pa.RecordBatch, left: dict[_Place, list[_Row]]) -> Iterator[_Letter]:
        names = ("queue", "partition", "offset")
        places = zip(*(found.column(name).to_pylist() for name in names), strict=True)
        for index, place in enumerate(places):
            rows = left.pop(place, None)
            if rows is None:
                continue
            exchange, key, body, properties = (
                found.column(name)[index].as_py()
                for name in ("exchange", "routing_key", "body", "properties")
            )
            route = self._routes[place[0]]
            death = Death(place[0], "rejected", self._time, exchange, key, _expiration(properties))
            delay_ms = self._rejection.delay_ms
            if delay_ms and rejections(properties, place[0]) < self._rejection.attempts:
                route = DeadLetterRoute(route.later, place[0])
            else:
                delay_ms = 0
            keeps_key = route.routing_key is None
            to: tuple[str, Any, Any] = route.exchange, key if keeps_key else route.routing_key, body
            for row in rows:
                if row.checksum is not None and row.checksum != zlib.crc32(body or b""):
                    raise OptionError(
                        f"the body of a rejected row is not that of message {place[2]} of "
                        f"{_log_name(*place[:2])}",
                        "reject publishes messages as they are; use tx.publish for changed ones",
                    )
                changed = dead_lettered(properties, death, row.reason, keeps_key=keeps_key, delay_ms=delay_ms)
                yield (*to, changed)


def _batch(rows: list[_Letter]) -> pa.RecordBatch:
    columns = zip(*rows, strict=True)
    arrays = [pa.array(values, field.type) for values, field in zip(columns, MESSAGE_SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=MESSAGE_SCHEMA)


def _log_name(queue: str, partition: int) -> str:
    return f"queue {queue!r}" + (f", partition {partition}" if partition else "")


def rejections(properties: bytes, queue: str) -> int:
    """Returns how often a message was rejected from ``queue``."""
    try:
        deaths = Properties.decode(properties).headers.get("x-death")
    except ProtocolError:
        return 0
    return count_of(deaths, queue, "rejected")


@lru_cache(maxsize=1024)  # messages of a stream share a few sets of properties
def dead_lettered(
    properties: bytes, death: Death, reason: str | None, *, keeps_key: bool, delay_ms: int = 0
) -> bytes:
    """Properties after ``death``: with ``x-death`` and the reason, without expiration, and without user_id,
    because the app publishes them; otherwise unchanged. ``delay_ms``: with the header for it.
    """
    delay = {DELAY: Long(delay_ms)} if delay_ms else {}

    def changed(headers: dict[str, object]) -> dict[str, Any]:
        return {**headers_after(headers, death, keeps_key=keeps_key)[0], HEADER: reason, **delay}

    try:
        return rewrite_of(properties, changed, READ, ("expiration", "user_id"))
    except ProtocolError:  # in old data directories, or with very many values
        headers = {DAMAGED: properties, **changed({})}
        return append_headers(
            b"", encode_headers({name: value for name, value in headers.items() if value is not None})
        )


def _expiration(properties: bytes) -> str | None:
    try:
        return expiration(properties)
    except ProtocolError:
        return None
