"""A change: all that one commit makes durable, as plain data. The domain fills it, the store writes it, whole or not at all."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from broker_core.broker.records import Record


class InboxRow(NamedTuple):
    """A message of a small commit, on its way into the open batch. (batch_id, row) is its place there for good."""

    batch_id: int
    row: int
    sequence: int
    committed_at: int
    exchange: str
    routing_key: str
    properties: bytes
    body: bytes
    routes: bytes  # pairs of little-endian int64: queue_id, offset


@dataclass(slots=True)
class Change:
    """What one commit writes. ``sequence`` 0: no commit sequence number is taken (bookkeeping only).

    ``drops`` are carried out before ``puts``. An appended batch that nothing will name goes to ``forgets``.
    """

    sequence: int = 0
    rows: list[InboxRow] = field(default_factory=list)
    puts: list[Record] = field(default_factory=list)
    drops: list[tuple[type[Record], tuple[Any, ...]]] = field(default_factory=list)
    names: list[int] = field(default_factory=list)  # appended batches that exist from this commit on
    seals: list[int] = field(default_factory=list)  # open batches that move from the inbox into their segment
    moves: list[int] = field(default_factory=list)  # batches that a rewrite has put into another segment
    forgets: list[int] = field(default_factory=list)  # batches that no queue needs any more
