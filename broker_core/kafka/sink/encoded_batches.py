"""Rows to publish as Kafka record batches: where each row goes, and what they are sent as.

Not here: staging the batches (``staging.py``), exchanges and bindings (``topics/routing.py``), headers
(``record/headers.py``).
Invariant: a batch fits into its topic and into a staged record, so what is staged can be published.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from broker_core.core.block import row_numbers
from broker_core.core.errors import TransactionTooLarge
from broker_core.core.ids import QueueId
from broker_core.kafka.protocol.port import TopicPartition
from broker_core.kafka.record.encode import MAX_ROWS, encode, encode_headers
from broker_core.kafka.record.headers import of_message
from broker_core.kafka.record.partitioner import partitions_of
from broker_core.kafka.record.record_batch import HEAD, Codec, Integers
from broker_core.kafka.topics.routing import Target
from broker_core.routing.column import Routed

BATCH_BYTES = 900_000  # of the records of one batch
RECORD_BYTES = 30  # of a record beside key, value and headers, at most


class Batch(NamedTuple):
    """An encoded record batch for one log, with its transactional bit set."""

    log: TopicPartition
    rows: int
    data: bytes


class Publisher:
    """Encodes the rows of one branch. ``turn`` is the partition of the first batch without keys."""

    def __init__(self, turn: int, *, staged_bytes: int, codec: Codec = Codec.NONE) -> None:
        """``staged_bytes``: what a staged record may hold."""
        self._turn = turn
        self._staged_bytes = staged_bytes
        self._codec = codec

    def batches(
        self, rows: pa.RecordBatch, routed: Routed, target: Callable[[QueueId], Target], now_ms: int
    ) -> Iterator[Batch]:
        """Yields batches of MESSAGE_SCHEMA rows. ``routed`` are the rows of each queue id.

        Raises OptionError for a message that Kafka cannot carry, TransactionTooLarge for a row that is larger
        than its topic takes.
        """
        keys = _keys(rows)
        headers = _headers(rows)
        for queue_id, selection in routed.selections.items():
            queue, chosen = target(queue_id), row_numbers(selection)
            for partition, among in self._spread(queue, chosen, keys):
                columns = _Columns(rows.column("body"), keys, headers).take(among)
                largest = min(queue.largest, self._staged_bytes)
                for count, data in self._cut(queue.topic, columns, largest, now_ms):
                    number = self._next(queue) if keys is None else partition
                    yield Batch(TopicPartition(queue.topic, number), count, data)
        if keys is not None:
            self._turn += 1

    def _next(self, queue: Target) -> int:
        """Returns the partition of the next batch. Neighbours differ, because a decision sends one batch of
        each partition at once.
        """
        self._turn += 1
        return (self._turn - 1) % queue.partitions

    def _spread(
        self, queue: Target, rows: Integers, keys: pa.BinaryArray | None
    ) -> Iterator[tuple[int, Integers]]:
        """Yields the partitions of a queue with their rows, all of them once where there are no keys. Rows
        without a key among others go to one partition, those of the next part to the next one: a batch for
        each partition would cost more than it balances.
        """
        if keys is None:
            yield 0, rows
            return
        encoded = keys.take(pa.array(rows)).dictionary_encode()
        codes = encoded.indices.fill_null(len(encoded.dictionary)).to_numpy(zero_copy_only=False)
        # null, of the default exchange, stands behind the distinct keys
        partitions = np.append(
            partitions_of(encoded.dictionary, queue.partitions), self._turn % queue.partitions
        )[codes]
        for partition in np.unique(partitions).tolist():
            yield partition, rows[partitions == partition]

    def _cut(self, topic: str, columns: _Columns, largest: int, now_ms: int) -> Iterator[tuple[int, bytes]]:
        limit = min(BATCH_BYTES, largest - HEAD.size)
        ends = np.cumsum(columns.sizes())
        first, total = 0, len(ends)
        while first < total:
            before = int(ends[first - 1]) if first else 0
            fitting = int(np.searchsorted(ends, before + limit, side="right"))
            end = min(max(fitting, first + 1), first + MAX_ROWS, total)
            rows = columns.slice(first, end - first)
            data = rows.encoded(self._codec, now_ms)
            if len(data) > largest and self._codec is not Codec.NONE:
                data = rows.encoded(Codec.NONE, now_ms)  # what does not shrink grows a little
            if len(data) > largest:
                raise TransactionTooLarge(
                    f"a message of {len(data)} bytes for topic {topic}, which takes at most {largest} "
                    "bytes in a record batch",
                    f"raise max.message.bytes of {topic} and of the stage topic above the size of the "
                    "message, or publish a reference",
                )
            yield end - first, data
            first = end


class _Columns(NamedTuple):
    values: pa.BinaryArray
    keys: pa.BinaryArray | None
    headers: pa.DictionaryArray | None

    def take(self, rows: Integers) -> _Columns:
        if len(rows) and int(rows[-1]) - int(rows[0]) + 1 == len(rows):
            return self.slice(int(rows[0]), len(rows))
        index = pa.array(rows)
        return _Columns(*(None if column is None else column.take(index) for column in self))

    def slice(self, first: int, count: int) -> _Columns:
        return _Columns(*(None if column is None else column.slice(first, count) for column in self))

    def sizes(self) -> Integers:
        """Returns the bytes of each record, or a little more."""
        size = np.full(len(self.values), RECORD_BYTES, np.int64)
        size += pc.binary_length(self.values).fill_null(0).to_numpy(zero_copy_only=False)
        if self.keys is not None:
            size += pc.binary_length(self.keys).fill_null(0).to_numpy(zero_copy_only=False)
        if self.headers is not None:
            lengths = pc.binary_length(self.headers.dictionary).to_numpy(zero_copy_only=False)
            size += lengths[self.headers.indices.to_numpy(zero_copy_only=False)]
        return size

    def encoded(self, codec: Codec, now_ms: int) -> bytes:
        blocks = None
        if self.headers is not None:
            blocks = self.headers.dictionary.take(self.headers.indices)
        return encode(
            self.values, keys=self.keys, headers=blocks, timestamp=now_ms, codec=codec, transactional=True
        )


def _keys(rows: pa.RecordBatch) -> pa.BinaryArray | None:
    """Returns the keys of records: the routing key, null where the exchange is the default one. Its routing
    key is the name of the queue, with which all rows would be in one partition.
    """
    exchanges = rows.column("exchange")
    by_name = pc.not_equal(exchanges, "")
    if not pc.any(by_name).as_py():
        return None
    keys = rows.column("routing_key").cast(pa.binary())
    return pc.if_else(by_name, keys, pa.scalar(None, pa.binary()))


def _headers(rows: pa.RecordBatch) -> pa.DictionaryArray | None:
    """Returns the header blocks of the rows; None where no message has a property or a named exchange."""
    columns = rows.column("exchange"), rows.column("properties")
    if not any(pc.max(pc.binary_length(column)).as_py() for column in columns):
        return None
    exchanges, properties = (column.dictionary_encode() for column in columns)
    width = len(properties.dictionary)
    codes = exchanges.indices.to_numpy(zero_copy_only=False).astype(np.int64) * width
    codes += properties.indices.to_numpy(zero_copy_only=False)
    pairs, index = np.unique(codes, return_inverse=True)
    names, encoded = exchanges.dictionary.to_pylist(), properties.dictionary.to_pylist()
    blocks = [
        encode_headers(of_message(names[pair // width], encoded[pair % width])) for pair in pairs.tolist()
    ]
    return pa.DictionaryArray.from_arrays(
        pa.array(index.reshape(-1).astype(np.int32)), pa.array(blocks, pa.binary())
    )
