"""The decisions of an app: partition 0 of its topic, replayed into the ledger, and when memory is believed.

Records are written only inside transactions of the app's transactional id, so the process that has its newest
epoch (KIP-98, KIP-890) alone adds to them, and reads what is committed.
Not here: the rules (``micro_batch/ledger.py``), in which order a decision is made (``decide.py``), what is
applied (``journal/app_progress.py``).
Invariant: memory holds only what is committed. A question that would change it is asked on trial, and taken
in when its transaction is committed.
Invariant: an epoch serves one transaction. ``begin`` takes it away from the owner, and only a commit whose
answer names the next epoch (transaction.version 2) gives one back. So every error and every lost answer leads
to a fence.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from typing import Any, NamedTuple, TypeVar

from broker_core import errors
from broker_core.broker.state.records import LedgerRecord, LineageRecord, Record, ReleaseRecord
from broker_core.broker.state.undo import Undo
from broker_core.errors import ConnectionFailed, QueueNotFound, TxmqError
from broker_core.failpoint import here
from broker_core.kafka import names
from broker_core.kafka.cluster.client import Client
from broker_core.kafka.journal.app_progress import AppProgress
from broker_core.kafka.protocol.port import LATEST, Isolation, Producer, TopicPartition, TransactionAnswer
from broker_core.kafka.record.encode import stamp
from broker_core.kafka.record.record_batch import PRODUCER, PRODUCER_AT, read_head
from broker_core.kafka.topics import entry
from broker_core.kafka.topics.entry import Entry, now_ms
from broker_core.micro_batch.ledger import Ledger

TIMEOUT_MS = 60_000  # Kafka aborts a transaction that is open for longer
EPOCH_PER_TRANSACTION = 2  # this transaction.version: EndTxn answers with the next epoch, Produce adds logs
LANES = 2  # connections to a node for what follows the first batches of a transaction


class ReadyBatch(NamedTuple):
    """An encoded record batch with its transactional bit set, and how many records it has."""

    batch: bytes | memoryview
    rows: int


class ProducerEpoch:
    def __init__(self, client: Client, transactional_id: str, *, now: Callable[[], int] = now_ms) -> None:
        """``now``: milliseconds since the epoch, for the timestamps of published records."""
        self.client = client
        self.id = transactional_id
        self.now = now
        self.timeout_ms = 0  # of the epoch that is held
        self._producer: Producer | None = None

    @property
    def is_held(self) -> bool:
        """Whether it has an epoch that is not used. It may have been overtaken meanwhile."""
        return self._producer is not None

    @property
    def renews(self) -> bool:
        """Whether a commit answers with the next epoch."""
        return self.client.transaction_version() >= EPOCH_PER_TRANSACTION

    def fence(self, timeout_ms: int = TIMEOUT_MS) -> None:
        """Takes the newest epoch. No other process can decide any more; an open transaction of the one before
        is aborted.
        """
        self._producer = None
        self._producer = self.client.fence(self.id, timeout_ms)
        self.timeout_ms = timeout_ms
        here("kafka.owner.fenced")

    def release(self) -> None:
        self._producer = None

    def begin(self) -> ProducerTransaction:
        """Begins the one transaction of the epoch that is held."""
        producer, self._producer = self._producer, None
        assert producer is not None, "fence first"
        return ProducerTransaction(self, producer)

    def end_again(self, logs: Collection[TopicPartition], *, commit: bool) -> bool:
        """Ends what the producer has open in the logs, though its coordinator has ended it: they join a
        transaction without a record. Uses up the epoch that is held.
        """
        producer, self._producer = self._producer, None
        assert producer is not None, "fence first"
        self.client.add_partitions(self.id, producer, sorted(logs))
        here("kafka.owner.joined_again")
        self.client.end_transaction(self.id, producer, commit=commit, bump=False)
        here("kafka.owner.ended_again")
        return True

    def renew(self, producer: Producer) -> None:
        """Takes the epoch that a commit answered."""
        self._producer = producer


class ProducerTransaction:
    """Record batches in any number of logs, which become visible together."""

    def __init__(self, epoch: ProducerEpoch, producer: Producer) -> None:
        self._epoch = epoch
        self._producer = producer
        self._implicit = epoch.renews
        self._sequences: Counter[TopicPartition] = Counter()  # the next one of each log
        # the logs of each request that is under way, and the call that waits for its answer
        self._sent: list[tuple[Set[TopicPartition], Callable[[], object]]] = []

    def join(self, logs: Iterable[TopicPartition]) -> None:
        """Lets all logs join before the first batch, where Kafka needs it (transaction.version 1)."""
        if self._implicit:
            return
        joining = sorted(set(logs))
        try:
            self._epoch.client.add_partitions(self._epoch.id, self._producer, joining)
        except QueueNotFound as error:
            topics = ", ".join(sorted({log.topic for log in joining}))
            raise QueueNotFound(
                f"one of the topics {topics} was deleted since rows were staged for it ({error.summary})",
                "create it again, and let Spark run the batch again",
            ) from None

    def append(self, batches: Mapping[TopicPartition, ReadyBatch]) -> None:
        """Sends one batch to each log, stamped with producer, sequence and the time of now. The next one of a
        log waits until it is appended, and raises what that raises.
        """
        now = self._epoch.now()
        lanes: dict[str, dict[TopicPartition, bytearray | memoryview]] = {}
        for log, (batch, _) in batches.items():
            # what was fetched for this transaction alone is stamped where it is
            data = batch if isinstance(batch, memoryview) and not batch.readonly else bytearray(batch)
            lanes.setdefault(self._lane(log), {})[log] = data
            stamp(
                data,
                producer_id=self._producer.id,
                epoch=self._producer.epoch,
                sequence=self._sequences[log],
                timestamp=now,
            )
        for lane, stamped in lanes.items():
            self.wait(stamped)  # in their order: Kafka counts sequences
            appended = self._epoch.client.producing(
                stamped, transactional_id=self._epoch.id, implicit=self._implicit, lane=lane
            )
            self._sent.append((stamped.keys(), appended))
        for log, (_, rows) in batches.items():
            self._sequences[log] += rows

    def _lane(self, log: TopicPartition) -> str:
        """A node reads no request while it appends the one before it on the same connection, so logs take
        turns in several. Their first batches go together: with them the logs join the transaction.
        """
        return f"published {log.partition % LANES}" if self._sequences[log] else ""

    def wait(self, logs: Collection[TopicPartition] | None = None) -> None:
        """Waits until everything that was sent to one of these logs is appended; None: to any."""
        for each in [each for each in self._sent if logs is None or not each[0].isdisjoint(logs)]:
            self._sent.remove(each)
            each[1]()

    def commit(self) -> None:
        """Raises Unanswered: it may be committed; TransactionState: it is not, by this owner."""
        self.wait()
        following = self._end(commit=True)
        if self._implicit:
            self._epoch.renew(following)

    def abort(self) -> None:
        """Aborts, so that readers of the logs need not wait for the next fence. Raises as ``commit``, and
        Unanswered where a batch may still be appended: behind the end it would be of no transaction.
        """
        while self._sent:
            try:
                self.wait()
            except ConnectionFailed:
                raise
            except TxmqError:
                pass  # of what is aborted
        self._end(commit=False)

    def _end(self, *, commit: bool) -> Producer:
        return self._epoch.client.end_transaction(
            self._epoch.id, self._producer, commit=commit, bump=self._implicit
        )


_OUTCOMES = {"PrepareCommit": True, "CompleteCommit": True, "PrepareAbort": False, "CompleteAbort": False}


def end_again(
    client: Client, decisions: TopicPartition, epoch: ProducerEpoch, known: TransactionAnswer | None
) -> bool:
    """Ends a transaction whose end Kafka has lost, as its coordinator has ended it, in all its logs; or does
    nothing.

    A node that was killed and comes back takes logs that have no leader yet for deleted ones, and ends a
    transaction there without a marker (Kafka 4.3.1). It stays open in these logs. But a marker ends whatever
    its producer has open in a log, so a transaction without a record ends it.

    Returns whether something hung in ``decisions`` and was ended; another fence has to follow then.
    ``known``: what the coordinator had of the app before the fence that ``epoch`` holds.
    """
    # 1. how the coordinator has ended it
    if known is None or known.state not in _OUTCOMES:
        return False
    # 2. what is open behind a fence is of that transaction alone
    begin = client.offsets({decisions: LATEST})[decisions]
    end = client.offsets({decisions: LATEST}, Isolation.READ_UNCOMMITTED)[decisions]
    ended = known.producer._replace(epoch=known.producer.epoch - 1) if epoch.renews else known.producer
    if begin >= end or _producers(client, decisions, begin, end) != {ended}:
        return False
    # 3. its end again, in all its logs
    rows = entry.replay(client, decisions, begin, end, isolation=Isolation.READ_UNCOMMITTED)
    told = [value for row in rows for name, value in row.headers if name == entry.LOGS and value is not None]
    if not told:  # a version that did not name them
        return False
    named_logs = (each for value in told for each in json.loads(value).items())
    logs = {TopicPartition(topic, part) for topic, parts in named_logs for part in parts}
    return epoch.end_again({decisions, *logs}, commit=_OUTCOMES[known.state])


def _producers(client: Client, log: TopicPartition, position: int, end: int) -> set[Producer]:
    """Who has written what stands in the log from ``position`` on."""
    found: set[Producer] = set()
    while position < end:
        data = client.fetch({log: position}, isolation=Isolation.READ_UNCOMMITTED)[log].records
        at, before = 0, position
        while (head := read_head(data, at, str(log))) is not None:
            producer, number, _ = PRODUCER.unpack_from(data, at + PRODUCER_AT)
            if head.last_offset >= position:
                found.add(Producer(producer, number))
            at, position = head.stop, max(position, head.last_offset + 1)
        if position == before:  # a leader that is new does not show it yet
            return set()
    return found


T = TypeVar("T")

ENTRY_BYTES = 900_000  # of one record batch of decisions
UNDER_WAY = "Ongoing", "PrepareCommit", "PrepareAbort"  # states of a transaction whose end will come


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

    def encoded(self, now_ms: int) -> ReadyBatch:
        """Returns one record batch of all. Raises TransactionTooLarge."""
        entries = [
            Entry(key, None) if record is None else entry.put(record) for key, record in self.records.items()
        ]
        entries[-1] = entries[-1]._replace(headers=entry.logs_header(self.logs))
        batch = entry.batch(entries, now_ms, transactional=True)
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
        known = self._client.transaction(producer)
        if begin < end and (known is None or known.state not in UNDER_WAY):
            raise errors.KafkaError(
                f"a transaction of {producer} hangs in {self.log} at offset {begin}: Kafka has ended it, its "
                "end is missing in the log, and nothing can be decided any more",
                "compare the batch with what its queues have, and abort what hangs in each log: "
                f"kafka-transactions.sh abort --topic {self.log.topic} --partition {self.log.partition} "
                f"--start-offset {begin}; docs/kafka.md",
            )

    def consumed(self) -> dict[str, int]:
        """Returns by log where its last decided range ended."""
        entries = (record for record in self._records.values() if isinstance(record, LedgerRecord))
        return self.ledger.consumed({log for record in entries for log in record.ranges})

    def trial(self, ask: Callable[[Changes], T]) -> tuple[T, Changes]:
        """Returns what ``ask`` answers, and what would change by it; nothing has changed. Raises what it
        raises.
        """
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
        self._undo.begin()

    def _take(self, key: str, record: Record | None) -> None:
        known = self._records.get(key)
        if record is None:
            if isinstance(known, LedgerRecord | LineageRecord):
                self.ledger.remove(known)
            self._records.pop(key, None)
        elif isinstance(record, LedgerRecord | LineageRecord | ReleaseRecord) and record != known:
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
                ledger.mark_applied(nowhere, app_id, record.sequence, versions.get(record.sequence, {}))
                continue
            named = {branch for _, _, branch, _ in record.branches}
            for branch, to in skipped.get(record.sequence, {}).items():
                if branch in named:
                    ledger.skip(nowhere, app_id, record.sequence, {branch}, to)
            for branch, name, at_us, text in notes.get(record.sequence, ()):
                with contextlib.suppress(errors.UnknownTransaction):  # all of it is skipped
                    ledger.note(nowhere, app_id, record.sequence, {branch}, name, at_us, text)
        ledger.mark_mirrored(nowhere, app_id, progress.mirrored())
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
        self._failures = 0  # of the client before the last fence

    def fence(self, lasting_ms: int = TIMEOUT_MS) -> None:
        """Takes over the app, for transactions of at most ``lasting_ms``."""
        self._failures = self._client.failures
        known = self._client.transaction(self.epoch.id)  # a fence lets Kafka forget how it has ended
        self.epoch.fence(lasting_ms)
        try:
            if end_again(self._client, self._decisions.log, self.epoch, known):
                self.epoch.fence(lasting_ms)
            self._decisions.replay(fenced=True)
        except BaseException:
            self.epoch.release()  # an epoch decides only with a memory that is as new
            raise
        here("kafka.owned.replayed")

    def answer(
        self, ask: Callable[[], LedgerRecord | None], lasting_ms: int = TIMEOUT_MS
    ) -> LedgerRecord | None:
        """Returns the answer of ``ask``: None, of a batch that is new, also from an epoch that was kept; an
        entry or an error only behind a fence of this call.
        """
        fenced = not self.epoch.is_held or self.epoch.timeout_ms < lasting_ms
        # a node that was lost may have lost the end of the last transaction, and an abort of the next one
        # would take that back
        fenced = fenced or self._failures != self._client.failures
        if fenced:
            self.fence(lasting_ms)
        try:
            found = ask()
        except (errors.LineageConflict, errors.BatchGap):
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
        patience = self._client.patience()
        while True:
            try:
                return attempt()
            except (errors.ConnectionFailed, errors.TransactionState) as error:
                self.epoch.release()
                patience.wait(error)

    def write(self, changes: Changes) -> None:
        """Writes decisions that publish nothing."""
        log = self._decisions.log
        transaction = self.epoch.begin()
        transaction.join([log])
        transaction.append({log: changes.encoded(self.epoch.now())})
        here("kafka.owned.entered")
        transaction.commit()
        here("kafka.owned.committed")
