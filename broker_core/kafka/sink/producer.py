"""The producer of a transactional id: who has its newest epoch and so may decide (KIP-98, KIP-890), its
transactions, and their ends that Kafka has lost in some logs.

A coordinator takes a log that has no leader for a deleted one, and ends a transaction there without a marker
(Kafka 4.3.1). Nobody has it any more, and the transaction stays open in this log. But a marker ends whatever
its producer has open in a log, so a transaction without a record ends it.
Which way it has ended, the log of decisions says: an epoch serves one transaction, whose last record is
there. Where that log hangs itself, the coordinator says it until the next fence; the timeout of that fence
says it from then on.
Not here: what a decision says (``decisions.py``), in which order, and when a lost end is looked for
(``decisions.py``, ``decide.py``, ``batch_writes.py``).
Invariant: an epoch serves one transaction. ``begin`` takes it away from the owner, and only a commit whose
answer names the next epoch (transaction.version 2) gives one back. So every error and every lost answer leads
to a fence.
Invariant: a transaction is ended again as its coordinator has ended it, in all its logs, or nothing is done.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from typing import NamedTuple

from broker_core.core import errors
from broker_core.core.failpoint import here
from broker_core.core.records import LedgerRecord
from broker_core.kafka.cluster.client import Client
from broker_core.kafka.protocol.port import (
    EARLIEST,
    LATEST,
    Isolation,
    Producer,
    TopicPartition,
    TransactionAnswer,
)
from broker_core.kafka.record.encode import stamp
from broker_core.kafka.record.record_batch import PRODUCER, PRODUCER_AT, read_head
from broker_core.kafka.topics import entry

TIMEOUT_MS = 60_000  # Kafka aborts a transaction that is open for longer
# of a fence behind which a transaction that was committed, or was not, is ended again: Kafka forgets by the
# fence how it has ended, and keeps the timeout
ENDS_AGAIN_MS = {True: 59_001, False: 59_002}
EPOCH_PER_TRANSACTION = 2  # this transaction.version: EndTxn answers with the next epoch, Produce adds logs
LANES = 2  # connections to a node for what follows the first batches of a transaction
OPEN, ENDING = "Ongoing", ("PrepareCommit", "PrepareAbort")  # states of a transaction
FIRST = 1  # sequence
_OUTCOMES = {"PrepareCommit": True, "CompleteCommit": True, "PrepareAbort": False, "CompleteAbort": False}
_BY_TIMEOUT = {timeout: commit for commit, timeout in ENDS_AGAIN_MS.items()}


class ReadyBatch(NamedTuple):
    """An encoded record batch with its transactional bit set, and how many records it has."""

    batch: bytes | memoryview
    rows: int


class ProducerEpoch:
    def __init__(self, client: Client, transactional_id: str) -> None:
        self.client = client
        self.id = transactional_id
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
        """Takes the newest epoch: no other process can decide any more, and its transaction is aborted."""
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

    def end_again(self, logs: Collection[TopicPartition], *, commit: bool) -> None:
        """Ends what the producer has open in the logs, though its coordinator has ended it: they join a
        transaction without a record. Uses up the epoch, which was fenced with ENDS_AGAIN_MS: a process that
        finds this transaction open knows its end.
        """
        assert self.timeout_ms == ENDS_AGAIN_MS[commit]
        producer, self._producer = self._producer, None
        assert producer is not None, "fence first"
        self.client.add_partitions(self.id, producer, sorted(logs))
        here("kafka.owner.joined_again")
        self.client.end_transaction(self.id, producer, commit=commit, bump=False)
        here("kafka.owner.ended_again")

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
        except errors.QueueNotFound as error:
            topics = ", ".join(sorted({log.topic for log in joining}))
            raise errors.QueueNotFound(
                f"one of the topics {topics} was deleted since rows were staged for it ({error.summary})",
                "create it again, and let Spark run the batch again",
            ) from None

    def append(self, batches: Mapping[TopicPartition, ReadyBatch]) -> None:
        """Sends one batch to each log, stamped with producer, sequence and the time of now. The next one of a
        log waits until it is appended, and raises what that raises.
        """
        now = entry.now_ms()
        lanes: dict[str, dict[TopicPartition, bytearray | memoryview]] = {}
        for log, (batch, _) in batches.items():
            # what was fetched for this transaction alone is stamped where it is
            data = batch if isinstance(batch, memoryview) and not batch.readonly else bytearray(batch)
            # A node reads no request while it appends the one before it on the same connection, so logs take
            # turns in several. Their first batches go together: with them the logs join the transaction.
            lane = f"published {log.partition % LANES}" if self._sequences[log] else ""
            lanes.setdefault(lane, {})[log] = data
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
            except errors.ConnectionFailed:
                raise
            except errors.TxmqError:
                pass  # of what is aborted
        self._end(commit=False)

    def _end(self, *, commit: bool) -> Producer:
        return self._epoch.client.end_transaction(
            self._epoch.id, self._producer, commit=commit, bump=self._implicit
        )


# -- ends that Kafka has lost --------------------------------------------------------------------------------
def outcome(answer: TransactionAnswer | None) -> bool | None:
    """Whether the last transaction was committed; None: it is open, or Kafka has forgotten it."""
    return None if answer is None else _OUTCOMES.get(answer.state, _BY_TIMEOUT.get(answer.timeout_ms))


def last_transaction(client: Client, transactional_id: str) -> TransactionAnswer | None:
    """What the coordinator has of it. One that is open is ended: a fence would abort it, and forget that. It
    is aborted, but for the one of a process that died while it ended another again.
    """
    answer = client.transaction(transactional_id)
    if answer is None or answer.state != OPEN:
        return answer
    again = _BY_TIMEOUT.get(answer.timeout_ms)
    bump = again is None and client.transaction_version() >= EPOCH_PER_TRANSACTION
    client.end_transaction(transactional_id, answer.producer, commit=again is True, bump=bump)
    return client.transaction(transactional_id)


def open_in(client: Client, logs: Collection[TopicPartition]) -> dict[TopicPartition, tuple[int, int]]:
    """By log, of those in which a transaction is open, of whomever: where it begins, and the end of the
    log.
    """
    times = dict.fromkeys(logs, LATEST)
    if not times:
        return {}
    begins, ends = client.offsets(times), client.offsets(times, Isolation.READ_UNCOMMITTED)
    return {log: (begins[log], ends[log]) for log in times if begins[log] < ends[log]}


def hanging_for_ever(transactional_id: str, log: TopicPartition, begin: int) -> errors.KafkaError:
    """The error of a transaction of which nothing says any more how it has ended."""
    return errors.KafkaError(
        f"a transaction of {transactional_id} hangs in {log} at offset {begin}: Kafka has ended it, its "
        "end is missing in the log, and nothing can be decided any more",
        "compare the batch with what its queues have, and abort what hangs in each log: "
        f"kafka-transactions.sh abort --topic {log.topic} --partition {log.partition} "
        f"--start-offset {begin}; docs/kafka_operations.md",
    )


class LostEnds:
    """Of the transactions of one app. It looks for them where the process meets a log for the first time, and
    everywhere when a node was lost.
    """

    def __init__(self, client: Client, decisions: TopicPartition, epoch: ProducerEpoch) -> None:
        self._client = client
        self._decisions = decisions
        self._epoch = epoch
        self._whole: set[TopicPartition] = set()  # nothing hung there
        self._failures = -1  # of the client when it looked last

    def end_decision(self) -> None:
        """Ends what hangs in the log of decisions, before a fence lets Kafka forget how. Gives up the epoch
        that is held where something does.
        """
        # 1. a node that was lost is noticed
        failures = self._ask([self._decisions])
        if failures == self._failures:
            return
        self._whole.clear()
        # 2. how has it ended?
        answer = last_transaction(self._client, self._epoch.id)
        commit = outcome(answer)
        if answer is not None and commit is not None and open_in(self._client, [self._decisions]):
            # 3. what is open behind a fence is of that transaction alone; the fence remembers its end
            self._epoch.fence(ENDS_AGAIN_MS[commit])
            logs = self._logs_of_hanging(answer.producer.id)
            # 4. its end again, in all its logs
            if logs:
                self._epoch.end_again(logs, commit=commit)
        self._failures = failures

    def end_in(self, logs: Collection[TopicPartition]) -> bool:
        """Ends what hangs in the topics of these logs, while the log of decisions is whole. Returns whether
        it has: the app is to be fenced again.
        """
        fresh = self._led({log.topic for log in logs}) - self._whole
        hanging = self._hanging(fresh)
        fenced = bool(hanging)
        if hanging:
            # 1. what is on the way to its end has it behind a fence
            self._epoch.fence()
            hanging = self._hanging(hanging)
        # 2. the log of decisions says how each has ended
        committed = self._committed(hanging) if hanging else set()
        for commit in (True, False):
            ended = {log for log, producer in hanging.items() if (producer in committed) == commit}
            if ended:
                self._epoch.fence(ENDS_AGAIN_MS[commit])
                self._epoch.end_again(ended, commit=commit)
        self._whole |= fresh
        return fenced

    def require_none(self, logs: Collection[TopicPartition]) -> None:
        """Before a transaction of these logs, whose end would be the end of what hangs there. Raises
        TransactionState where that was so.
        """
        again = "begin again, behind a fence"
        failures = self._ask([self._decisions, *logs])
        if failures != self._failures:
            if open_in(self._client, [self._decisions]):
                raise errors.TransactionState(f"a transaction may hang in {self._decisions}", again)
            self._whole.clear()
        if self.end_in(logs):
            raise errors.TransactionState(f"a transaction of {self._epoch.id} hung and was ended", again)
        self._failures = failures

    def _ask(self, logs: Collection[TopicPartition]) -> int:
        """Returns the failures of the client, after it has asked the leaders of the logs: a connection that
        was lost since is one.
        """
        self._client.offsets(dict.fromkeys(logs, LATEST))
        return self._client.failures

    def _led(self, topics: Iterable[str]) -> set[TopicPartition]:
        """The logs that have a leader. One that has none would lose the end again."""
        found: set[TopicPartition] = set()
        for name in topics:
            with contextlib.suppress(errors.QueueNotFound):
                parts = self._client.topic(name).partitions
                found |= {TopicPartition(name, part) for part, each in parts.items() if each.leader >= 0}
        return found

    def _logs_of_hanging(self, producer_id: int) -> set[TopicPartition]:
        """Returns the logs that the decision names; none where another transaction hangs, or nothing."""
        log = self._decisions
        where = open_in(self._client, [log]).get(log)
        if where is None:
            return set()
        found = {producer for producer, _ in _batches(self._client, log, *where)}
        if len(found) != 1 or found.pop().id != producer_id:
            return set()
        rows = entry.replay(self._client, log, *where, isolation=Isolation.READ_UNCOMMITTED)
        logs = {each for row in rows for each in entry.logs_of(row)}
        # a version that did not name them has left it to an operator
        return {log, *logs & self._led({each.topic for each in logs})} if logs else set()

    def _hanging(self, logs: Collection[TopicPartition]) -> dict[TopicPartition, Producer]:
        """Returns by log what is open there of this app, if the user may read it."""
        opened = open_in(self._client, logs)
        answer = self._client.transaction(self._epoch.id) if opened else None
        found: dict[TopicPartition, Producer] = {}
        for log, where in opened.items():
            with contextlib.suppress(errors.AccessRefused):
                producers = {producer for producer, _ in _batches(self._client, log, *where)}
                mine = [each for each in producers if answer is not None and each.id == answer.producer.id]
                found.update(dict.fromkeys([log] if mine else (), max(mine, default=Producer(-1, -1))))
        return found

    def _committed(self, hanging: Mapping[TopicPartition, Producer]) -> set[Producer]:
        """Returns whose last record is committed in the log of decisions. Raises KafkaError where a producer
        is older than all of them, and older ones were pruned.
        """
        log = self._decisions
        begin, end = (self._client.offsets({log: when})[log] for when in (EARLIEST, LATEST))
        rows = {row.offset: row for row in entry.replay(self._client, log, begin, end)}
        found: set[Producer] = set()
        oldest: dict[int, int] = {}  # by sequence of what is kept, the epoch
        for producer, span in _batches(self._client, log, begin, end):
            for row in (rows[offset] for offset in span if offset in rows):
                found.add(producer)
                kind, key = entry.parse_key(row.key or b"")
                if kind is LedgerRecord and row.value is not None:
                    oldest.setdefault(key[1], producer.epoch)
        pruned = min(oldest, default=FIRST) > FIRST
        for each, producer in hanging.items():
            if pruned and producer not in found and producer.epoch < oldest[min(oldest)]:
                raise hanging_for_ever(self._epoch.id, each, open_in(self._client, [each])[each][0])
        return found


def _batches(
    client: Client, log: TopicPartition, position: int, end: int
) -> Iterator[tuple[Producer, range]]:
    """Yields who has written the batches of the log from ``position`` on, and their offsets."""
    patience = client.patience()
    while position < end:
        data = client.fetch({log: position}, isolation=Isolation.READ_UNCOMMITTED)[log].records
        at, before = 0, position
        while (head := read_head(data, at, str(log))) is not None:
            producer, number, _ = PRODUCER.unpack_from(data, at + PRODUCER_AT)
            if head.last_offset >= position:
                yield Producer(producer, number), range(head.base_offset, head.last_offset + 1)
            at, position = head.stop, max(position, head.last_offset + 1)
        if position == before:
            patience.wait(errors.ConnectionFailed(f"the leader of {log} does not show offset {position} yet"))
