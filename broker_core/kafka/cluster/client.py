"""What a client asks of a cluster: topics, offsets, records, transactions and the positions of groups.

Not here: which node is asked, and when again (``cluster.py``); what records mean.
Invariant: a method repeats a request only where twice is the same as once, or says so.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

from broker_core.core import errors
from broker_core.core.backoff import Backoff, Time
from broker_core.kafka.cluster import acls
from broker_core.kafka.cluster.cluster import RECONNECT_S, Cluster, Leaders
from broker_core.kafka.protocol import port
from broker_core.kafka.protocol.codes import Code
from broker_core.kafka.protocol.port import Isolation, NodeAddress, Producer, TopicPartition, Wire

T = TypeVar("T")
TRANSACTION_VERSION = "transaction.version"
PRODUCE_MS = 30_000  # a leader waits so long for its replicas


class Client:
    """Over a wire, from ``bootstrap`` endpoints on. Nothing is sent before the first question."""

    def __init__(
        self,
        wire: Wire,
        bootstrap: Sequence[NodeAddress],
        *,
        reconnect_s: float = RECONNECT_S,
        time: Time | None = None,
    ) -> None:
        self.cluster = Cluster(wire, bootstrap, reconnect_s, time or Time())
        self._leaders = Leaders(self.cluster)
        self._levels: Mapping[str, int] | None = None

    def close(self) -> None:
        self.cluster.close()

    @property
    def failures(self) -> int:
        """Another number than before: a node was lost meanwhile."""
        return self.cluster.nodes.failures

    def patience(self) -> Backoff:
        """For what is asked again here because an answer was too early."""
        return self.cluster.patience()

    def patiently(self, attempt: Callable[[], T], failed: Callable[[], None] = lambda: None) -> T:
        """Returns what ``attempt`` does; again after ``failed`` and a pause, where an answer was lost or a
        transaction is in the way.
        """
        patience = self.patience()
        while True:
            try:
                return attempt()
            except (errors.ConnectionFailed, errors.TransactionState) as error:
                failed()
                patience.wait(error)

    # -- the cluster -----------------------------------------------------------------------------------------

    def cluster_id(self) -> str:
        return self.cluster.cluster_id or self.cluster.metadata(()).cluster

    def transaction_version(self) -> int:
        """2: an epoch for each transaction (KIP-890); 1 or 0: AddPartitions comes first."""
        if self._levels is None:
            self._levels = self.cluster.anywhere(port.ApiVersions()).levels
        return self._levels.get(TRANSACTION_VERSION, 0)

    def topics(self) -> Mapping[str, port.TopicMetadata]:
        """All that this user may see."""
        return self.cluster.metadata(None).topics

    def existing(self, names: Collection[str]) -> set[str]:
        """Which of these are topics. Raises AccessRefused for one that this user may not see."""
        request = port.Metadata(tuple(names))
        found = self.cluster.metadata(request.topics).topics if names else {}
        for name, each in found.items():
            if each.code is Code.TOPIC_AUTHORIZATION_FAILED:
                raise acls.error(request, each.code, f"topic {name}", topic=name)
        absent = {Code.UNKNOWN_TOPIC_OR_PARTITION, Code.INVALID_TOPIC_EXCEPTION}
        return {name for name, each in found.items() if each.code not in absent}

    def topic(self, name: str, *, fresh: bool = False) -> port.TopicMetadata:
        """Its partitions, as they were at most REFRESH_S ago, or as they are now. Raises QueueNotFound."""
        return self.cluster.refresh(name) if fresh else self.cluster.topic(name)

    def find_topic(self, name: str) -> port.TopicMetadata | None:
        """As ``topic``; None if it is missing."""
        try:
            return self.topic(name)
        except errors.QueueNotFound:
            return None

    def create_topic(
        self,
        name: str,
        partitions: int = -1,
        *,
        replication: int = -1,
        configs: Mapping[str, str] | None = None,
    ) -> port.TopicMetadata:
        """A topic whose leaders answer, which may have existed. Raises AccessRefused, KafkaError."""
        self.cluster.administer(
            name, port.CreateTopic(name, partitions, replication, configs or {}), {Code.TOPIC_ALREADY_EXISTS}
        )
        return self._leaders.ready(name, 1)

    def delete_topic(self, name: str) -> None:
        """Raises QueueNotFound, AccessRefused, KafkaError."""
        self.cluster.administer(name, port.DeleteTopic(name), done={Code.UNKNOWN_TOPIC_OR_PARTITION})
        self.cluster.forget(name)

    def configs(self, name: str, *keys: str) -> Mapping[str, str | None]:
        """The topic's settings. Raises QueueNotFound, AccessRefused."""
        return self.cluster.about(name, port.DescribeTopic(name, keys or None)).values

    # -- records ---------------------------------------------------------------------------------------------

    def offsets(
        self, timestamps: Mapping[TopicPartition, int], isolation: Isolation = Isolation.READ_COMMITTED
    ) -> dict[TopicPartition, int]:
        """By log: its end (LATEST), begin (EARLIEST) or the first offset from a timestamp in ms on (-1:
        none). Raises QueueNotFound.
        """
        ask = self._leaders.ask(timestamps, lambda part: port.ListOffsets(part, isolation))
        return {log: answer.offset for log, answer in ask().items()}

    def fetch(
        self,
        offsets: Mapping[TopicPartition, int],
        *,
        ids: Mapping[str, uuid.UUID] | None = None,
        isolation: Isolation = Isolation.READ_COMMITTED,
        max_bytes: int = 8 << 20,
        max_wait_ms: int = 0,
        lane: str = "",
    ) -> dict[TopicPartition, port.Fetched]:
        """Batches from the offsets on. Raises DataLoss (OFFSET_OUT_OF_RANGE), QueueNotFound (also a topic
        with another id).
        """
        return self.fetching(offsets, isolation, max_bytes, lane, ids, max_wait_ms)()

    def fetching(
        self,
        offsets: Mapping[TopicPartition, int],
        isolation: Isolation,
        max_bytes: int,
        lane: str,
        ids: Mapping[str, uuid.UUID] | None = None,
        max_wait_ms: int = 0,
    ) -> Callable[[], dict[TopicPartition, port.Fetched]]:
        """Asks for batches, each leader for its share of ``max_bytes``. Returns the call that waits."""
        share = max_bytes / max(1, len(offsets))
        return self._leaders.ask(
            offsets,
            lambda part: port.Fetch(part, ids, isolation, int(share * len(part)) or 1, max_wait_ms, 1),
            lane=lane,
        )

    def produce(
        self,
        batches: Mapping[TopicPartition, bytes | bytearray | memoryview],
        *,
        transactional_id: str | None = None,
        implicit: bool = False,
        repeat: bool = False,
    ) -> dict[TopicPartition, int]:
        """Appends one batch to each log; the offsets of their first records.

        ``repeat``: what has no answer is sent again, and may stand there twice. Raises Unanswered without it,
        TransactionTooLarge, and TransactionState where another process has a later epoch.
        """
        return self.producing(batches, transactional_id=transactional_id, implicit=implicit, repeat=repeat)()

    def producing(
        self,
        batches: Mapping[TopicPartition, bytes | bytearray | memoryview],
        *,
        transactional_id: str | None = None,
        implicit: bool = False,
        repeat: bool = False,
        lane: str = "",
    ) -> Callable[[], dict[TopicPartition, int]]:
        """Sends what :meth:`produce` appends. Returns the call that waits until it is appended."""
        answers = self._leaders.ask(
            batches,
            lambda part: port.Produce(part, transactional_id, implicit, PRODUCE_MS),
            repeat=repeat,
            # a leader that loses its place while it waits for replicas says that it is none, and the next one
            # may have the batch; only sequences, of a transaction, make it stand there once
            moved=transactional_id is not None,
            lane=lane,
        )
        return lambda: {log: answer.offset for log, answer in answers().items()}

    def delete_records(self, before: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """Moves the begins of logs and returns them. Idempotent."""
        answers = self._leaders.ask(before, port.DeleteRecords)()
        return {log: answer.offset for log, answer in answers.items()}

    def sizes(self, logs: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        """Bytes on the disks of the leaders. Raises AccessRefused, QueueNotFound."""
        answers = self._leaders.ask(dict.fromkeys(logs, 0), lambda part: port.LogSizes(tuple(part)))()
        return {log: answer.bytes for log, answer in answers.items()}

    # -- transactions ----------------------------------------------------------------------------------------

    def fence(self, transactional_id: str, timeout_ms: int = 60_000) -> Producer:
        """A new epoch; every earlier one can write no more, and its open transaction is aborted."""
        request = port.InitProducer(transactional_id, timeout_ms)
        return self.cluster.coordinate(
            transactional_id, request, lambda answer: (answer.code, None), repeat=True
        ).producer

    def add_partitions(
        self, transactional_id: str, producer: Producer, logs: Sequence[TopicPartition]
    ) -> None:
        """Lets logs join the transaction, all or none. Idempotent. Raises TransactionState,
        AccessRefused.
        """
        request = port.AddPartitions(transactional_id, producer, tuple(logs))
        self.cluster.coordinate(transactional_id, request, _worst, repeat=True)

    def end_transaction(
        self, transactional_id: str, producer: Producer, *, commit: bool, bump: bool
    ) -> Producer:
        """The producer of the next transaction. Raises Unanswered: it may be ended; TransactionState: it is
        not, by us.
        """
        request = port.EndTransaction(transactional_id, producer, commit, bump)
        return self.cluster.coordinate(
            transactional_id, request, lambda answer: (answer.code, None), repeat=False
        ).producer

    def transaction(self, transactional_id: str) -> port.TransactionAnswer | None:
        """Returns what the coordinator has of it; None: nothing."""
        request = port.DescribeTransaction(transactional_id)

        def code(answer: port.TransactionAnswer) -> tuple[Code, None]:
            return Code.NONE if answer.code is Code.TRANSACTIONAL_ID_NOT_FOUND else answer.code, None

        answer = self.cluster.coordinate(transactional_id, request, code, repeat=True)
        return answer if answer.code is Code.NONE else None

    # -- groups ----------------------------------------------------------------------------------------------

    def commit_offsets(self, group: str, offsets: Mapping[TopicPartition, int]) -> None:
        """Sets the group's position, for tools that show lag. Idempotent."""
        self.cluster.coordinate(group, port.CommitOffsets(group, offsets), _worst, repeat=True, group=True)


def _worst(codes: Mapping[TopicPartition, Code]) -> tuple[Code, TopicPartition | None]:
    """Returns the code that says most of an answer about several logs, and whose it is."""
    log, code = max(
        codes.items(),
        key=lambda each: (each[1] is not Code.NONE, each[1] is not Code.OPERATION_NOT_ATTEMPTED),
    )
    return code, log
