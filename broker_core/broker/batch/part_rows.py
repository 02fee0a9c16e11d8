"""Rows that are given to be staged as one part. Not here: the part that is kept (``branch.py``)."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import pyarrow as pa

from broker_core.core.ids import BlockId
from broker_core.routing.column import Routed

NOWHERE = Routed({}, 0, [])


class StoredBytes(Protocol):
    """The bytes of a part that are in a segment already (``store.port.BlockInfo``)."""

    @property
    def block_id(self) -> BlockId: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def checksum(self) -> int: ...


class PartRows(NamedTuple):
    """Rows to stage as one part, in a segment already or few. ``routed``: of messages."""

    stored: StoredBytes | None
    rows: pa.RecordBatch
    routed: Routed = NOWHERE
