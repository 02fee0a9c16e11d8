"""What makes a message a duplicate of an earlier one: its id, and for how long a queue remembers that.

Not here: the ids that a queue has seen (``broker/queue/message_ids.py``).
Invariant: equal ids are of equal values under equal names. Damaged properties, an empty text, a table and an
array are no id: such a message is always new.
Source: the plugin noxdafox/rabbitmq-message-deduplication, whose names these are. ``stays`` and the
``message-id`` are additions: the plugin forgets an id when its message leaves the queue.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

import pyarrow as pa

from broker_core.core.errors import RemoteProtocolError
from broker_core.message.field_table import FieldReader
from broker_core.message.properties import TRANSIENT, delivery_mode, message_id, raw_headers

HEADER = "x-deduplication-header"
SIZE = 10_000  # ids of a queue that does not say how many
MOST = 1_000_000
COST_BYTES = 300  # of an id in memory, about
ID_BYTES = 16
_HEADERS = 0x20  # in the first byte of the property flags
_ID = "id"


class Deduplication(NamedTuple):
    """``header`` has the id of a message. ``size``: how many ids are remembered, the latest ones; ``ttl_us``:
    and for how long, None: without end. ``stays``: even when their messages have left the queue. Then, if
    ``by_message_id``, a message without the header has its ``message-id`` as its id.
    """

    header: str
    size: int
    ttl_us: int | None
    stays: bool
    by_message_id: bool = True

    @classmethod
    def parse(cls, arguments: Mapping[str, object]) -> Deduplication | None:
        """Parses arguments that were checked; None: the queue takes duplicates."""
        if arguments.get("x-message-deduplication") is not True:
            return None
        size, ttl_ms = arguments.get("x-cache-size"), arguments.get("x-cache-ttl")
        return cls(
            str(arguments.get(HEADER, HEADER)),
            size if isinstance(size, int) else SIZE,
            ttl_ms * 1000 if isinstance(ttl_ms, int) else None,
            size is not None or ttl_ms is not None,
        )

    def id_of(self, properties: bytes) -> bytes:
        """Returns ``ID_BYTES`` bytes, or b"" for a message without an id. A transient message has another id
        than a persistent one: it may be lost after it was confirmed, so it makes no duplicate of that.
        """
        if not properties:
            return b""
        try:
            name, value = self.header, None
            if properties[0] & _HEADERS and name.encode() in properties:
                raw = dict(raw_headers(properties)).get(name)
                value = None if raw is None else FieldReader(raw).value(0)
            if value is None and self.stays and self.by_message_id:
                name, value = "", message_id(properties)
            mode = delivery_mode(properties)
        except RemoteProtocolError:
            return b""
        if not value and value != 0:
            return b""
        if isinstance(value, str):
            text = value.encode()
        elif isinstance(value, bytes):
            text = value
        elif isinstance(value, (bool, int, float, Decimal)):
            text = repr(value).encode()
        else:
            return b""
        return blake2b(
            _prefix(name, type(value).__name__, mode == TRANSIENT) + text, digest_size=ID_BYTES
        ).digest()

    def ids_of_rows(self, block: pa.RecordBatch) -> pa.RecordBatch:
        """Returns the ids of the messages of a block."""
        ids = list(map(self.id_of, block.column("properties").to_pylist()))
        return pa.RecordBatch.from_arrays([pa.array(ids, pa.binary())], [_ID])


@lru_cache(maxsize=1024)
def _prefix(name: str, kind: str, transient: bool) -> bytes:
    return f"{name}\0{kind}\0{transient}\0".encode()


def ids_in(found: pa.RecordBatch) -> list[bytes] | None:
    """Returns the ids that ``ids_of_rows`` gave; None: they are messages."""
    return found.column(0).to_pylist() if found.schema.names == [_ID] else None
