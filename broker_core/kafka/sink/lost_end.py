"""Transactions whose end Kafka has lost in some of their logs: the owner of the id writes it again.

A coordinator takes a log that has no leader for a deleted one, and ends a transaction there without a marker
(Kafka 4.3.1). Nobody has it any more, and the transaction stays open in this log. But a marker ends whatever
its producer has open in a log, so a transaction without a record ends it.
Which way it has ended, the log of decisions says: an epoch serves one transaction, whose last record is
there. Where that log hangs itself, the coordinator says it until the next fence; the timeout of that fence
says it from then on.
Not here: when it is looked for (``decisions.py``, ``decide.py``, ``batch_writes.py``).
Invariant: it is ended as its coordinator has ended it, in all its logs, or nothing is done.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping

from broker_core import errors
from broker_core.broker.state.records import LedgerRecord
from broker_core.kafka.cluster.client import Client
from broker_core.kafka.protocol.port import (
    EARLIEST,
    LATEST,
    Isolation,
    Producer,
    TopicPartition,
    TransactionAnswer,
)
from broker_core.kafka.record.record_batch import PRODUCER, PRODUCER_AT, read_head
from broker_core.kafka.sink.producer_epoch import ENDS_AGAIN_MS, EPOCH_PER_TRANSACTION, ProducerEpoch
from broker_core.kafka.topics import entry

OPEN, ENDING = "Ongoing", ("PrepareCommit", "PrepareAbort")  # states of a transaction
FIRST = 1  # sequence
_OUTCOMES = {"PrepareCommit": True, "CompleteCommit": True, "PrepareAbort": False, "CompleteAbort": False}
_BY_TIMEOUT = {timeout: commit for commit, timeout in ENDS_AGAIN_MS.items()}


def outcome(known: TransactionAnswer | None) -> bool | None:
    """Whether the last transaction was committed; None: it is open, or Kafka has forgotten it."""
    return None if known is None else _OUTCOMES.get(known.state, _BY_TIMEOUT.get(known.timeout_ms))


def last_transaction(client: Client, transactional_id: str) -> TransactionAnswer | None:
    """What the coordinator has of it. One that is open is ended: a fence would abort it, and forget that. It
    is aborted, but for the one of a process that died while it ended another again.
    """
    known = client.transaction(transactional_id)
    if known is None or known.state != OPEN:
        return known
    again = _BY_TIMEOUT.get(known.timeout_ms)
    bump = again is None and client.transaction_version() >= EPOCH_PER_TRANSACTION
    client.end_transaction(transactional_id, known.producer, commit=again is True, bump=bump)
    return client.transaction(transactional_id)


def open_in(client: Client, logs: Collection[TopicPartition]) -> dict[TopicPartition, tuple[int, int]]:
    """By log, of those in which a transaction is open, of whomever: where it begins, and the end of the
    log.
    """
    asked = dict.fromkeys(logs, LATEST)
    if not asked:
        return {}
    begins, ends = client.offsets(asked), client.offsets(asked, Isolation.READ_UNCOMMITTED)
    return {log: (begins[log], ends[log]) for log in asked if begins[log] < ends[log]}


def hanging_for_ever(transactional_id: str, log: TopicPartition, begin: int) -> errors.KafkaError:
    """The error of a transaction of which nothing says any more how it has ended."""
    return errors.KafkaError(
        f"a transaction of {transactional_id} hangs in {log} at offset {begin}: Kafka has ended it, its "
        "end is missing in the log, and nothing can be decided any more",
        "compare the batch with what its queues have, and abort what hangs in each log: "
        f"kafka-transactions.sh abort --topic {log.topic} --partition {log.partition} "
        f"--start-offset {begin}; docs/kafka.md",
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
        failures = self._asked([self._decisions])
        if failures == self._failures:
            return
        self._whole.clear()
        # 2. how has it ended?
        known = last_transaction(self._client, self._epoch.id)
        commit = outcome(known)
        if known is not None and commit is not None and open_in(self._client, [self._decisions]):
            # 3. what is open behind a fence is of that transaction alone; the fence remembers its end
            self._epoch.fence(ENDS_AGAIN_MS[commit])
            logs = self._logs_of_hanging(known.producer.id)
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
        failures = self._asked([self._decisions, *logs])
        if failures != self._failures:
            if open_in(self._client, [self._decisions]):
                raise errors.TransactionState(f"a transaction may hang in {self._decisions}", again)
            self._whole.clear()
        if self.end_in(logs):
            raise errors.TransactionState(f"a transaction of {self._epoch.id} hung and was ended", again)
        self._failures = failures

    def _asked(self, logs: Collection[TopicPartition]) -> int:
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
        named = {each for row in rows for each in entry.logs_of(row)}
        # a version that did not name them has left it to an operator
        return {log, *named & self._led({each.topic for each in named})} if named else set()

    def _hanging(self, logs: Collection[TopicPartition]) -> dict[TopicPartition, Producer]:
        """Returns by log what is open there of this app, if the user may read it."""
        opened = open_in(self._client, logs)
        known = self._client.transaction(self._epoch.id) if opened else None
        found: dict[TopicPartition, Producer] = {}
        for log, where in opened.items():
            with contextlib.suppress(errors.AccessRefused):
                producers = {producer for producer, _ in _batches(self._client, log, *where)}
                mine = [each for each in producers if known is not None and each.id == known.producer.id]
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
