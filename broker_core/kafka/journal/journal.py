"""The journal of an app: partition 1 of its topic, in which the first one in the log is right.

Every process has a copy of the state (``history.py``) and reads the tail before it decides. A change is
compare-and-set by order: no lock, no transaction, no fencing.

Invariant: what :meth:`change` returns was accepted, and so every other reader of the log accepts it too. Ends
come from ListOffsets, never from a fetch.
"""

from __future__ import annotations

import hashlib
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from broker_core import failpoint
from broker_core.backoff import Backoff
from broker_core.broker.state.records import ReadRecord, canonical
from broker_core.engine import Ranges
from broker_core.kafka import names
from broker_core.kafka.cluster.client import Client
from broker_core.kafka.journal.history import History, PositionRecord, Proposal, read_key, surviving
from broker_core.kafka.lost import ledger_lost
from broker_core.kafka.protocol.port import LATEST, TopicPartition, Unanswered
from broker_core.kafka.topics import topics
from broker_core.kafka.topics.entry import Entry, Row, batch, dumps, fields_of, replay
from broker_core.micro_batch.claims.claim import Claims

T = TypeVar("T")

LATEST_S = topics.DAY_MS / 1000 / 2  # a reader that comes later may miss tombstones, and begins again


class Journal:
    """Of one app, in one process. Threads may share it."""

    def __init__(self, client: Client, app_id: str) -> None:
        self._client = client
        self._app_id = app_id
        self._topic = topics.app(app_id)
        self.log = TopicPartition(self._topic.name, names.JOURNAL)
        self._history = History(app_id)
        self._position = 0
        self._read_at_s = 0.0  # when the position was an end
        self._id: uuid.UUID | None = None
        self._noted: set[str] = set()  # facts that this process has written
        self._lock = threading.RLock()

    # -- reading ---------------------------------------------------------------------------------------------

    def look(self, question: Callable[[Claims], T]) -> T:
        """Returns the answer of the claims as of the last catch-up."""
        with self._lock:
            return question(self._history.claims)

    @property
    def positions(self) -> Mapping[str, PositionRecord]:
        """By queue."""
        with self._lock:
            return dict(self._history.positions)

    @property
    def facts(self) -> Mapping[str, object]:
        """By key, without the reads."""
        with self._lock:
            return dict(self._history.facts)

    def exists(self) -> bool:
        """Returns whether the app has a topic. Raises LedgerLost where there was one, and now is another one
        or none.
        """
        found = topics.find(self._client, self._topic)
        if found is not None:
            self._require_same(found.id)
        elif self._id is not None:
            raise ledger_lost(self._app_id, "was deleted")
        return found is not None

    def ensure(self) -> None:
        """Makes the topic of the app, unless it exists. Raises AccessRefused, PreconditionFailed."""
        if self._id is None or not self.exists():
            self._require_same(topics.ensure(self._client, self._topic).id)

    def catch_up(self, end: int | None = None) -> set[str]:
        """Reads the log up to ``end``, the default is its end now; returns the ids of accepted changes."""
        with self._lock:
            if not self.exists():
                return set()
            if self._position and time.time() - self._read_at_s > LATEST_S:
                self._history, self._position = History(self._app_id), 0
            if end is None:
                end = self._client.offsets({self.log: LATEST})[self.log]
            self._read_at_s = time.time()
            if end <= self._position:
                return set()
            assert self._id is not None
            # all of it before any of it is applied: a reader that fails in between begins at its position
            rows = list(replay(self._client, self.log, self._position, end, ids={self._topic.name: self._id}))
            return self._apply(rows, end)

    def _apply(self, rows: Sequence[Row], end: int) -> set[str]:
        accepted = self._history.apply(rows if self._position else surviving(rows))
        self._position = end
        return accepted

    def _require_same(self, found: uuid.UUID) -> None:
        if self._id is None:
            self._id = found
        elif self._id != found:
            raise ledger_lost(self._app_id, "was deleted and made again")

    # -- writing ---------------------------------------------------------------------------------------------

    def change(self, compute: Callable[[Claims, Proposal], T], end: int | None = None) -> T:
        """Returns what ``compute`` returns, when the records that it put are accepted.

        ``compute`` is called again where another process was first. ``end``: an end of the log that was taken
        just now. Raises what it raises, ConnectionFailed.
        """
        with self._lock:
            self.ensure()
            self.catch_up(end)
            patience = self._client.patience()
            while True:
                result, proposal = self._history.compute(compute)
                change_id = uuid.uuid4().hex
                entries = self._history.entries(proposal, change_id)
                if not entries or self._won(entries, change_id, patience):
                    return result

    def _won(self, entries: list[Entry], change_id: str, patience: Backoff) -> bool:
        failpoint.here("kafka.journal.append")
        lost: Unanswered | None = None
        timestamp = _now_ms()
        try:
            offset = self._client.produce({self.log: batch(entries, timestamp)})[self.log]
        except Unanswered as unanswered:
            lost, offset = unanswered, -1
        failpoint.here("kafka.journal.appended")
        if offset == self._position:  # nobody came between
            rows = [
                Row(
                    offset + number,
                    timestamp,
                    entry.key.encode(),
                    None if entry.value is None else entry.value.encode(),
                )
                for number, entry in enumerate(entries)
            ]
            return change_id in self._apply(rows, offset + len(rows))
        won = change_id in self.catch_up(offset + len(entries) if lost is None else None)
        if lost is not None and not won:
            patience.wait(lost)  # it may still come, and is void then
        return won

    def note(self, facts: Mapping[str, object]) -> None:
        """Records facts; returns when they are durable. What this process has written or read already is not
        written again.
        """
        with self._lock:
            self.ensure()
            new = {
                key: dumps(value)
                for key, value in facts.items()
                if key not in self._noted and self.facts.get(key) != value
            }
            if new:
                entries = [Entry(key, value) for key, value in new.items()]
                failpoint.here("kafka.journal.note")
                self._client.produce({self.log: batch(entries, _now_ms())}, repeat=True)
                failpoint.here("kafka.journal.noted")
                self._noted |= new.keys()

    def forget(self, keys: Sequence[str]) -> None:
        """Removes facts that nothing needs any more."""
        with self._lock:
            self._noted -= set(keys)
            if keys:
                entries = [Entry(key, None) for key in keys]
                self._client.produce({self.log: batch(entries, _now_ms())}, repeat=True)

    def note_read(self, query_id: str, batch_id: int, ranges: Ranges) -> None:
        """Records that (query, batch) reads ``ranges`` (S4). Every task of the batch writes the same. Raises
        LineageConflict where it is known to have read others.
        """
        self.look(lambda claims: claims.reads.already(self._app_id, query_id, batch_id, ranges))
        spans = {log: [first, last] for log, (first, last) in ranges.items()}
        record = ReadRecord(self._app_id, query_id, batch_id, canonical(sorted(ranges)), spans)
        digest = hashlib.sha256(canonical(spans).encode()).hexdigest()[:16]
        self.note({read_key(record, digest): fields_of(record)})


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
