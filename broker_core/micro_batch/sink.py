"""The sink of records: where the rules of a micro-batch put what must be durable.

The embedded broker collects it in the change of a commit (``core/change.py``), a Kafka engine in a
record batch. Nothing is durable before the sink's owner has written it; ``Undo`` takes back what is not.
"""

from __future__ import annotations

from typing import Protocol

from broker_core.core.records import Record


class RecordSink(Protocol):
    def put(self, record: Record) -> None:
        """Writes ``record`` in place of the one with the same key."""

    def drop(self, kind: type[Record], key: tuple[object, ...]) -> None:
        """Removes a record, if it exists."""
