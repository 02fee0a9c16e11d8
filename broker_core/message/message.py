"""Published and delivered messages, and the Arrow schemas for many messages.

Not here: the encoding of properties (``properties.py``) and anything about queues.

Invariant: messages enter a segment only as ``MESSAGE_SCHEMA``; ``MERGED_SCHEMA`` adds, row by row, the commit
sequence and commit time in blocks that were merged from many small commits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import pyarrow as pa

TIMESTAMP = pa.timestamp("us", tz="UTC")

MESSAGE_SCHEMA = pa.schema(
    [
        pa.field("exchange", pa.string(), nullable=False),
        pa.field("routing_key", pa.string(), nullable=False),
        pa.field("body", pa.binary(), nullable=False),
        # AMQP 0-9-1 property flags and list (4.2.6.1) as received; empty if a message has none
        pa.field("properties", pa.binary(), nullable=False),
    ]
)

MERGED_SCHEMA = MESSAGE_SCHEMA.append(pa.field("commit_sequence", pa.int64(), nullable=False)).append(
    pa.field("committed_at", pa.int64(), nullable=False)  # microseconds since the epoch
)

# What a reader of a queue gets, in this order, from every engine.
READ_SCHEMA = pa.schema(
    [
        pa.field("queue", pa.string()),
        pa.field(
            "partition", pa.int32()
        ),  # of the queue; offsets count in it. 0: the queue has no partitions
        pa.field("offset", pa.int64()),
        pa.field("exchange", pa.string()),
        pa.field("routing_key", pa.string()),
        pa.field("body", pa.binary()),
        pa.field("timestamp", TIMESTAMP),
        pa.field("redelivered", pa.bool_()),
        pa.field("properties", pa.binary()),
    ]
)

# ... if it asks for it, and the commits of the engine have numbers: that of the commit that published the row
READ_WITH_TRANSACTION = READ_SCHEMA.append(pa.field("transaction", pa.int64()))

# ... if it asks for it, and the messages of the engine are records of Kafka: what they have, as it is
HEADERS = pa.list_(pa.field("element", pa.struct([("key", pa.string()), ("value", pa.binary())])))
READ_WITH_RECORD = READ_SCHEMA.append(pa.field("key", pa.binary())).append(pa.field("headers", HEADERS))

DELAY, MAX_DELAY_MS = "x-delay", (1 << 32) - 1  # the header of a message that waits in an exchange
MAX_BODY_BYTES = 128 * 1024 * 1024


class Message(NamedTuple):
    """One published message; ``properties`` are AMQP-encoded bytes, empty for none."""

    body: bytes
    routing_key: str
    exchange: str = ""
    properties: bytes = b""


@dataclass(frozen=True, slots=True)
class Delivery:
    """A message for a consumer. ``tag`` counts from 1 in each channel and is never used twice."""

    tag: int
    queue: str
    offset: int
    redelivered: bool
    committed_at: int  # microseconds since the epoch
    message: Message

    @property
    def body(self) -> bytes:
        """Returns the body of the message."""
        return self.message.body


@dataclass(frozen=True, slots=True)
class Location:
    """Where a reader on the same host finds a block: one encapsulated IPC message in an Arrow stream file."""

    path: str
    position: int
    length: int
    checksum: int  # xxh3_64 of those bytes
    rows: int
