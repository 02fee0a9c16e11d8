"""Deleting staged records that no decision can name any more.

Not here: when a batch is decided or applied.
Invariant: only records that stand before the last winner of a decided batch are deleted, and none from the
first row on that is still to be applied. A later batch stages behind the winners of the one before, so what
stands before them belongs to attempts that can never be decided.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from broker_core import errors
from broker_core.broker.state.records import LedgerRecord
from broker_core.kafka.cluster.client import Client
from broker_core.kafka.protocol.port import TopicPartition
from broker_core.kafka.sink.receipt import BranchPlace

log = logging.getLogger(__name__)

EVERY_BYTES = 64 << 20  # of staged rows; Kafka frees whole segments anyway, of 128 MiB


class Cleaner:
    """Cleans the stage topic of one app, now and then. A failure is left to the next time."""

    def __init__(self, client: Client, topic: str, every_bytes: int = EVERY_BYTES) -> None:
        self._client = client
        self._topic = topic
        self._every_bytes = every_bytes
        self._bytes = every_bytes  # decided and not cleaned; so a driver begins with cleaning
        self._ends: dict[TopicPartition, int] = {}  # below: no winner of a later batch
        self._may = False  # delete, as far as is known

    def require_right(self) -> None:
        """Raises AccessRefused where this user may not free staged rows: they would fill the disks."""
        if not self._may:
            self._client.delete_records({TopicPartition(self._topic, 0): 0})  # nothing stands there
            self._may = True

    def decided(self, won: Iterable[BranchPlace], unapplied: Iterable[LedgerRecord], size_bytes: int) -> None:
        """After a decision: its winners are published, or in ``unapplied``, which are all that are not
        applied.
        """
        self._note(won)
        self._bytes += size_bytes
        if self._bytes >= self._every_bytes:
            self.clean(unapplied)

    def applied(self, record: LedgerRecord, unapplied: Iterable[LedgerRecord]) -> None:
        """After a batch has reached its tables."""
        self._note(places_of(record))
        if self._bytes >= self._every_bytes:
            self.clean(unapplied)

    def _note(self, places: Iterable[BranchPlace]) -> None:
        for place in places:
            if place.log.topic == self._topic and place.spans:
                end = place.spans[-1].last + 1
                self._ends[place.log] = max(end, self._ends.get(place.log, 0))

    def clean(self, unapplied: Iterable[LedgerRecord]) -> None:
        before = dict(self._ends)
        for record in unapplied:
            for place in places_of(record):
                if place.log in before and place.spans:
                    before[place.log] = min(before[place.log], place.spans[0].first)
        before = {log: offset for log, offset in before.items() if offset}
        try:
            if before:
                self._client.delete_records(before)
        except errors.AccessRefused as refused:
            log.warning("staged rows are not freed: %s", refused)
            return
        except (errors.ConnectionFailed, errors.KafkaError, errors.ChannelError):
            return
        except errors.DataLoss:
            pass  # the topic begins behind it already
        # what an unapplied row has held back is deleted another time
        self._ends = {log: end for log, end in self._ends.items() if before.get(log, end) != end}
        self._bytes = 0


def places_of(record: LedgerRecord) -> list[BranchPlace]:
    """Returns where the rows stand that are applied later, without those an operator has skipped."""
    return [BranchPlace.parse(name) for _, target, name, _ in record.branches if "skipped" not in target]
