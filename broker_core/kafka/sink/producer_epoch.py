"""Who may decide for a transactional id: the process that has its newest epoch (KIP-98, KIP-890).

Not here: what a decision says (``decisions.py``), and in which order (``decide.py``).
Invariant: an epoch serves one transaction. ``begin`` takes it away from the owner, and only a commit whose
answer names the next epoch (transaction.version 2) gives one back. So every error and every lost answer leads
to a fence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from typing import NamedTuple

from broker_core.errors import ConnectionFailed, QueueNotFound, TxmqError
from broker_core.failpoint import here
from broker_core.kafka.cluster.client import Client
from broker_core.kafka.protocol.port import Producer, TopicPartition
from broker_core.kafka.record.encode import stamp
from broker_core.kafka.topics.entry import now_ms

TIMEOUT_MS = 60_000  # Kafka aborts a transaction that is open for longer
# of a fence behind which a transaction that was committed, or was not, is ended again: Kafka forgets by the
# fence how it has ended, and keeps the timeout
ENDS_AGAIN_MS = {True: 59_001, False: 59_002}
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
