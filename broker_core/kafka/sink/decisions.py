"""The decisions of an app: partition 0 of its topic, replayed into the ledger, and when memory is believed.

Records are written only inside transactions of the app's transactional id, so the newest owner alone adds to
them, and reads what is committed.
Not here: the rules (``micro_batch/ledger.py``), how Kafka fences the owner before (``producer.py``), what is
applied (``journal/journal.py``). An owner that was fenced is not ended: it fences in its turn, and the ledger
answers what is decided.
Invariant: memory holds only what is committed. A question that would change it is asked on trial, and taken
in when its transaction is committed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

from broker_core.core import errors
from broker_core.core.failpoint import here
from broker_core.core.records import LedgerRecord, LineageRecord, Record, ReleaseRecord
from broker_core.core.undo import Undo
from broker_core.kafka import names
from broker_core.kafka.cluster.client import Client
from broker_core.kafka.journal.journal import AppProgress
from broker_core.kafka.protocol.port import LATEST, Isolation, TopicPartition
from broker_core.kafka.sink.producer import (
    ENDING,
    OPEN,
    TIMEOUT_MS,
    LostEnds,
    ProducerEpoch,
    ReadyBatch,
    hanging_for_ever,
)
from broker_core.kafka.topics import entry
from broker_core.kafka.topics.entry import Entry
from broker_core.micro_batch.ledger import Ledger
from broker_core.micro_batch.unapplied import mark_applied, mark_mirrored, note, skip

T = TypeVar("T")

ENTRY_BYTES = 900_000  # of one record batch of decisions


class Changes:
    """What a question would change, as records of Kafka: the last one of each key."""

    def __init__(self) -> None:
        self.records: dict[str, Record | None] = {}
        self.pruned: list[int] = []  # sequences of ledger entries
        self.logs: tuple[TopicPartition, ...] = ()  # in which the same transaction publishes

    def __bool__(self) -> bool:
        return bool(self.records)

    def put(self, record: Record) -> None:
        self.records[entry.key_text(type(record), record.key)] = record

    def drop(self, kind: type[Record], key: tuple[Any, ...]) -> None:
        self.records[entry.key_text(kind, key)] = None
        if kind is LedgerRecord:
            self.pruned.append(int(key[1]))

    def encoded(self) -> ReadyBatch:
        """Returns one record batch of all. Raises TransactionTooLarge."""
        entries = [
            Entry(key, None) if record is None else entry.put(record) for key, record in self.records.items()
        ]
        entries[-1] = entries[-1]._replace(headers=entry.logs_header(self.logs))
        batch = entry.batch(entries, entry.now_ms(), transactional=True)
        if len(batch) > ENTRY_BYTES:
            raise errors.TransactionTooLarge(
                f"the ledger entry of this micro-batch takes {len(batch)} bytes, and at most {ENTRY_BYTES} "
                "fit into a record of Kafka",
                "let fewer tasks stage rows for tables: coalesce the frame before it is appended",
            )
        return ReadyBatch(batch, len(entries))


class Decisions:
    def __init__(self, client: Client, app_id: str) -> None:
        self._client = client
        self._undo = Undo()
        self._records: dict[str, Record] = {}  # by key
        self._position = 0
        self.logs: tuple[TopicPartition, ...] = ()  # in which the last decision that names them published
        self.log = TopicPartition(names.app_topic(app_id), names.DECISIONS)
        self.ledger = Ledger((), self._undo)
        self.app_id = app_id

    def has_open(self) -> bool:
        """Returns whether more stands in the log than was replayed, which an open transaction holds back."""
        return self._client.offsets({self.log: LATEST}, Isolation.READ_UNCOMMITTED)[self.log] > self._position

    def replay(self, *, fenced: bool = False) -> None:
        """Takes in what is committed. ``fenced``: no transaction is open, so up to the very end; else what
        stands behind an open one is left for later.
        """
        isolation = Isolation.READ_UNCOMMITTED if fenced else Isolation.READ_COMMITTED
        end = self._client.offsets({self.log: LATEST}, isolation)[self.log]
        try:
            for row in entry.replay(self._client, self.log, self._position, end):
                key = (row.key or b"").decode()
                self._take(key, None if row.value is None else entry.parse(key, row.value))
                self.logs = tuple(entry.logs_of(row)) or self.logs
        except errors.ConnectionFailed:
            if fenced:
                self._require_no_hanging(end)
            raise
        self._position = max(self._position, end)
        self._undo.begin()

    def _require_no_hanging(self, end: int) -> None:
        """Raises KafkaError where the log has an open transaction that its coordinator has ended: the end is
        missing in the log, and no fence brings it.
        """
        producer = names.producer_of(self.app_id)
        begin = self._client.offsets({self.log: LATEST})[self.log]
        answer = self._client.transaction(producer)
        if begin < end and (answer is None or answer.state not in (OPEN, *ENDING)):
            raise hanging_for_ever(producer, self.log, begin)

    def consumed(self) -> dict[str, int]:
        """Returns by log where its last decided range ended."""
        entries = (record for record in self._records.values() if isinstance(record, LedgerRecord))
        return self.ledger.consumed({log for record in entries for log in record.ranges})

    def trial(self, ask: Callable[[Changes], T]) -> tuple[T, Changes]:
        """Returns what ``ask`` answers, or raises, and what would change by it; nothing has changed."""
        changes = Changes()
        self._undo.begin()
        try:
            return ask(changes), changes
        finally:
            self._undo.roll_back()

    def take(self, changes: Changes) -> None:
        """Takes in what this process has committed."""
        for key, record in changes.records.items():
            self._take(key, record)
        self.logs = changes.logs or self.logs
        self._undo.begin()

    def _take(self, key: str, record: Record | None) -> None:
        before = self._records.get(key)
        if record is None:
            if isinstance(before, LedgerRecord | LineageRecord):
                self.ledger.remove(before)
            self._records.pop(key, None)
        elif isinstance(record, LedgerRecord | LineageRecord | ReleaseRecord) and record != before:
            # an entry that is known may be applied or mirrored in memory: the same one does not come again
            self._records[key] = record
            self.ledger.apply(record)

    def learn(self, progress: AppProgress) -> None:
        """Lets the ledger know what is applied, skipped and mirrored."""
        ledger, app_id, nowhere = self.ledger, self.app_id, Changes()
        applied, skipped, notes = progress.applied(), progress.skipped(), progress.notes()
        versions = progress.versions() if applied else {}
        for record in ledger.unapplied(app_id):
            if record.sequence in applied:
                mark_applied(ledger, nowhere, app_id, record.sequence, versions.get(record.sequence, {}))
                continue
            names = {branch for _, _, branch, _ in record.branches}
            for branch, to in skipped.get(record.sequence, {}).items():
                if branch in names:
                    skip(ledger, nowhere, app_id, record.sequence, {branch}, to)
            for branch, name, at_us, text in notes.get(record.sequence, ()):
                with contextlib.suppress(errors.UnknownTransaction):  # all of it is skipped
                    note(ledger, nowhere, app_id, record.sequence, {branch}, name, at_us, text)
        if mirrored := progress.mirrored():  # else the app has no Delta ledger
            mark_mirrored(ledger, nowhere, app_id, mirrored)
        self._undo.begin()


class FencedApp:
    """An app that this process decides for: fenced, its decisions replayed.

    Every refusal, and every "already", was decided after a fence of the same call. An epoch that was kept may
    have been overtaken, so memory alone only answers "not decided, and the next one", which the transaction
    then proves.
    """

    def __init__(self, client: Client, decisions: Decisions) -> None:
        self._client = client
        self._decisions = decisions
        self.epoch = ProducerEpoch(client, names.producer_of(decisions.app_id))
        self.lost_ends = LostEnds(client, decisions.log, self.epoch)

    def fence(self, lasting_ms: int = TIMEOUT_MS) -> None:
        """Takes over the app, for transactions of at most ``lasting_ms``."""
        # 1. of what a fence would let Kafka forget
        self.lost_ends.end_decision()
        try:
            self._take_over(lasting_ms)
            # 2. where readers of the last decision would wait
            if self.lost_ends.end_in(self._decisions.logs):
                self._take_over(lasting_ms)
        except BaseException:
            self.epoch.release()  # an epoch decides only with a memory that is as new
            raise
        here("kafka.owned.replayed")

    def _take_over(self, lasting_ms: int) -> None:
        self.epoch.fence(lasting_ms)
        self._decisions.replay(fenced=True)

    def answer(
        self, ask: Callable[[], LedgerRecord | None], lasting_ms: int = TIMEOUT_MS
    ) -> LedgerRecord | None:
        """Returns the answer of ``ask``: None, of a batch that is new, also from an epoch that was kept; an
        entry or an error only behind a fence of this call.
        """
        fenced = not self.epoch.is_held or self.epoch.timeout_ms < lasting_ms
        if fenced:
            self.fence(lasting_ms)
        try:
            found = ask()
        except (errors.CheckpointMismatch, errors.BatchGap):
            if fenced:
                raise
        else:
            if found is None or fenced:
                return found
        self.fence(lasting_ms)
        return ask()

    def patiently(self, attempt: Callable[[], T]) -> T:
        """Returns what ``attempt`` does; again from the fence, after a pause, where an answer was lost or
        another driver took over.
        """
        return self._client.patiently(attempt, self.epoch.release)

    def write(self, changes: Changes) -> None:
        """Writes decisions that publish nothing."""
        log = self._decisions.log
        self.lost_ends.require_none([])
        transaction = self.epoch.begin()
        transaction.join([log])
        transaction.append({log: changes.encoded()})
        here("kafka.owned.entered")
        transaction.commit()
        here("kafka.owned.committed")
