"""FakeKafka: a cluster in memory behind the wire port, with the errors of a real one at will.

It keeps what the port promises: leaders, epochs, coordinators, transactions of version 1 and 2, markers that
come late, the last stable offset, timeouts, DeleteRecords. ``tests/contract/test_kafka_contract.py`` holds it
against a real node.
Not here: replication; a node that is down only refuses connections.
Invariant: one lock; a request is done whole or not at all, also where its answer is lost.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import singledispatchmethod
from typing import Any, Generic, TypeVar

from broker_core.core import errors
from broker_core.kafka.protocol import port
from broker_core.kafka.protocol.codes import Code
from broker_core.kafka.protocol.port import NodeAddress, Producer, Request, TopicPartition, Unanswered
from tests.kafka.bench.fake_log import FakeLog
from tests.kafka.bench.fake_transactions import FakeTransactions

A = TypeVar("A")

CONFIGS = {
    "cleanup.policy": "delete",
    "delete.retention.ms": "86400000",
    "max.message.bytes": "1048588",
    "min.cleanable.dirty.ratio": "0.5",
    "retention.bytes": "-1",
    "retention.ms": "604800000",
    "segment.bytes": "1073741824",
    "segment.ms": "604800000",
}
# not sent; sent and not done; done, and its answer lost; as the last one, but done later
REFUSED, LOST, UNANSWERED, LATE = "refused", "lost", "unanswered", "late"


@dataclass
class FakeTopic:
    id: uuid.UUID
    configs: dict[str, str]
    logs: list[FakeLog] = field(default_factory=list)


class FakeKafka:
    """``fault`` is called before each request with its node. It may change the cluster, or answer REFUSED,
    LOST, UNANSWERED, LATE, or a code with which the request is answered although it is done.
    """

    def __init__(
        self, nodes: int = 3, transaction_version: int = 2, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.nodes = {number: NodeAddress("fake", number) for number in range(1, nodes + 1)}
        self.id = uuid.uuid4().hex
        self.down: set[int] = set()
        self.transaction_version = transaction_version
        self.marker_lag = 0  # requests between the decision of a transaction and its markers
        # logs without a leader, which the coordinator takes for deleted ones: the next marker is lost there
        self.taken_for_deleted: set[TopicPartition] = set()
        self.fault: Callable[[int, Request[Any]], str | Code | None] = lambda node, request: None
        self.topics: dict[str, FakeTopic] = {}
        self.transactions = FakeTransactions(now)
        self.groups: dict[str, dict[TopicPartition, int]] = {}
        self.late: list[tuple[int, Request[Any]]] = []  # in the network
        self.changed = threading.Condition(threading.RLock())
        self._moved: dict[str, int] = {}  # coordinators that are not where their key puts them
        self._markers_due: int | None = None

    def wire(self) -> FakeWire:
        return FakeWire(self)

    # -- what a test changes ---------------------------------------------------------------------------------

    def move_leader(self, log: TopicPartition, node: int, *, ends_unknown: int = 0) -> None:
        """An election; -1: there is none for now."""
        with self.changed:
            found = self.log(log)
            assert found is not None
            found.leader, found.epoch, found.ends_unknown = node, found.epoch + 1, ends_unknown

    @contextlib.contextmanager
    def hidden(self, log: TopicPartition) -> Iterator[None]:
        """A new leader that does not show in a fetch what was acknowledged before (KIP-207)."""
        found = self.log(log)
        assert found is not None
        found.hidden = True
        try:
            yield
        finally:
            found.hidden = False

    def compact(self, log: TopicPartition, upto: int | None = None) -> int:
        """Cleans a log below ``upto``, or all but its last batch; returns how many records are gone."""
        with self.changed:
            found = self.log(log)
            assert found is not None
            return found.compact(upto)

    def move_coordinator(self, key: str, node: int) -> None:
        self._moved[key] = node

    def deliver_late(self) -> None:
        """What was sent long ago arrives now; its sender is told nothing."""
        late, self.late = self.late, []
        for node, request in late:
            self.do(node, request)

    def write_markers(self) -> None:
        with self.changed:
            self._markers_due = None
            self.transactions.complete(self._mark)
            self.changed.notify_all()

    def _mark(self, log: TopicPartition, producer: Producer, commit: bool) -> None:
        found = self.log(log)
        if log in self.taken_for_deleted:
            self.taken_for_deleted.discard(log)
        elif found is not None:
            found.end_transaction(producer, commit=commit)

    # -- requests --------------------------------------------------------------------------------------------

    def log(self, log: TopicPartition) -> FakeLog | None:
        topic = self.topics.get(log.topic)
        return topic.logs[log.partition] if topic is not None and log.partition < len(topic.logs) else None

    def coordinator(self, key: str) -> int:
        return self._moved.get(key, sorted(self.nodes)[sum(key.encode()) % len(self.nodes)])

    def do(self, node: int, request: Request[A]) -> A:
        with self.changed:
            self.transactions.expire()
            answer: A = self._do(request, node)
            if any(known.ending for known in self.transactions.all.values()):
                self._markers_due = self.marker_lag if self._markers_due is None else self._markers_due - 1
                if self._markers_due <= 0:
                    self.write_markers()
            if not isinstance(request, port.Fetch):
                self.changed.notify_all()
            return answer

    @singledispatchmethod
    def _do(self, request: Request[Any], node: int) -> Any:
        raise NotImplementedError(type(request).__name__)

    @_do.register
    def _(self, request: port.ApiVersions, node: int) -> port.ApiVersionsAnswer:
        return port.ApiVersionsAnswer({}, {"transaction.version": self.transaction_version})

    @_do.register
    def _(self, request: port.Metadata, node: int) -> port.MetadataAnswer:
        def described(name: str) -> port.TopicMetadata:
            topic = self.topics.get(name)
            if topic is None:
                code = Code.UNKNOWN_TOPIC_OR_PARTITION if _valid(name) else Code.INVALID_TOPIC_EXCEPTION
                return port.TopicMetadata(code, uuid.UUID(int=0), {})
            partitions = {
                each.log.partition: port.PartitionMetadata(
                    Code.NONE if each.leader > 0 else Code.LEADER_NOT_AVAILABLE, each.leader, each.epoch
                )
                for each in topic.logs
            }
            return port.TopicMetadata(Code.NONE, topic.id, partitions)

        names = self.topics if request.topics is None else request.topics
        up = {number: endpoint for number, endpoint in self.nodes.items() if number not in self.down}
        return port.MetadataAnswer(up, min(up), {name: described(name) for name in names}, self.id)

    @_do.register
    def _(self, request: port.FindCoordinator, node: int) -> port.CoordinatorAnswer:
        found = self.coordinator(request.key)
        if found in self.down:
            return port.CoordinatorAnswer(Code.COORDINATOR_NOT_AVAILABLE, None)
        return port.CoordinatorAnswer(Code.NONE, self.nodes[found])

    # -- records ---------------------------------------------------------------------------------------------

    def _led(self, log: TopicPartition, node: int) -> FakeLog | Code:
        found = self.log(log)
        if found is None:
            return Code.UNKNOWN_TOPIC_OR_PARTITION
        return found if found.leader == node else Code.NOT_LEADER_OR_FOLLOWER

    @_do.register
    def _(self, request: port.ListOffsets, node: int) -> dict[TopicPartition, port.OffsetAnswer]:
        def answer(log: TopicPartition, timestamp: int) -> port.OffsetAnswer:
            found = self._led(log, node)
            return (
                port.OffsetAnswer(found, -1)
                if isinstance(found, Code)
                else found.offset_of(timestamp, request.isolation)
            )

        return {log: answer(log, timestamp) for log, timestamp in request.timestamps.items()}

    @_do.register
    def _(self, request: port.Fetch, node: int) -> dict[TopicPartition, port.Fetched]:
        room = request.max_bytes
        answers = {}
        for log, offset in request.offsets.items():
            found = self._led(log, node)
            topic = self.topics.get(log.topic)
            if request.ids is not None and (topic is None or topic.id != request.ids[log.topic]):
                found = Code.UNKNOWN_TOPIC_ID
            fetched = (
                port.Fetched(found, -1, -1, -1)
                if isinstance(found, Code)
                else found.fetch(offset, request, room, first=room == request.max_bytes)
            )
            room -= len(fetched.records)
            answers[log] = fetched
        return answers

    @_do.register
    def _(self, request: port.Produce, node: int) -> dict[TopicPartition, port.Produced]:
        return {log: self._produce(request, log, bytes(data), node) for log, data in request.batches.items()}

    def _produce(self, request: port.Produce, log: TopicPartition, data: bytes, node: int) -> port.Produced:
        found = self._led(log, node)
        if isinstance(found, Code):
            return port.Produced(found, -1)
        if request.transactional_id is None:
            return found.produce(data, None)
        producer = Producer(
            int.from_bytes(data[43:51], "big", signed=True), int.from_bytes(data[51:53], "big", signed=True)
        )
        if request.implicit:
            code = self.transactions.add(request.transactional_id, producer, {log})
        else:
            code = self.transactions.may_write(request.transactional_id, producer, log)
        return port.Produced(code, -1) if code else found.produce(data, producer)

    @_do.register
    def _(self, request: port.DeleteRecords, node: int) -> dict[TopicPartition, port.OffsetAnswer]:
        def answer(log: TopicPartition, offset: int) -> port.OffsetAnswer:
            found = self._led(log, node)
            return port.OffsetAnswer(found, -1) if isinstance(found, Code) else found.delete_before(offset)

        return {log: answer(log, offset) for log, offset in request.before.items()}

    @_do.register
    def _(self, request: port.LogSizes, node: int) -> dict[TopicPartition, port.SizeAnswer]:
        found = {log: self._led(log, node) for log in request.logs}
        return {
            log: port.SizeAnswer(Code.UNKNOWN_TOPIC_OR_PARTITION, 0)
            if isinstance(each, Code)
            else port.SizeAnswer(Code.NONE, sum(len(data) for _, data in each.batches))
            for log, each in found.items()
        }

    # -- transactions ----------------------------------------------------------------------------------------

    @_do.register
    def _(self, request: port.InitProducer, node: int) -> port.ProducerAnswer:
        if request.transactional_id is None:
            return port.ProducerAnswer(Code.NONE, self.transactions.new_id())
        if self.coordinator(request.transactional_id) != node:
            return port.ProducerAnswer(Code.NOT_COORDINATOR, Producer(-1, -1))
        return port.ProducerAnswer(*self.transactions.init(request.transactional_id, request.transaction_ms))

    @_do.register
    def _(self, request: port.AddPartitions, node: int) -> dict[TopicPartition, Code]:
        if self.coordinator(request.transactional_id) != node:
            return dict.fromkeys(request.logs, Code.NOT_COORDINATOR)
        unknown = {log for log in request.logs if self.log(log) is None}
        if unknown:
            return {
                log: Code.UNKNOWN_TOPIC_OR_PARTITION if log in unknown else Code.OPERATION_NOT_ATTEMPTED
                for log in request.logs
            }
        return dict.fromkeys(
            request.logs, self.transactions.add(request.transactional_id, request.producer, set(request.logs))
        )

    @_do.register
    def _(self, request: port.EndTransaction, node: int) -> port.ProducerAnswer:
        if self.coordinator(request.transactional_id) != node:
            return port.ProducerAnswer(Code.NOT_COORDINATOR, request.producer)
        return port.ProducerAnswer(
            *self.transactions.end(
                request.transactional_id, request.producer, commit=request.commit, bump=request.bump
            )
        )

    @_do.register
    def _(self, request: port.DescribeTransaction, node: int) -> port.TransactionAnswer:
        known = self.transactions.all.get(request.transactional_id)
        if self.coordinator(request.transactional_id) != node:
            return port.TransactionAnswer(Code.NOT_COORDINATOR, "", Producer(-1, -1))
        if known is None:
            return port.TransactionAnswer(Code.TRANSACTIONAL_ID_NOT_FOUND, "", Producer(-1, -1))
        return port.TransactionAnswer(
            Code.NONE, known.state, known.producer, frozenset(known.logs), round(known.timeout_s * 1000)
        )

    # -- topics and groups -----------------------------------------------------------------------------------

    @_do.register
    def _(self, request: port.CreateTopic, node: int) -> port.Outcome:
        if not _valid(request.name):
            return port.Outcome(Code.INVALID_TOPIC_EXCEPTION, f"Topic name is invalid: {request.name!r}")
        if request.name in self.topics:
            return port.Outcome(Code.TOPIC_ALREADY_EXISTS, f"Topic '{request.name}' already exists.")
        if unknown := [name for name in request.configs if name not in CONFIGS]:
            return port.Outcome(Code.INVALID_CONFIG, f"Unknown topic config name: {unknown[0]}")
        self.topics[request.name] = FakeTopic(uuid.uuid4(), {**CONFIGS, **request.configs})
        self.grow(request.name, 2 if request.partitions < 0 else request.partitions)
        return port.Outcome(Code.NONE)

    def grow(self, name: str, partitions: int) -> None:
        topic, up = self.topics[name], sorted(set(self.nodes) - self.down)
        size = int(topic.configs["max.message.bytes"])
        for number in range(len(topic.logs), partitions):
            topic.logs.append(
                FakeLog(TopicPartition(name, number), up[number % len(up)], max_message_bytes=size)
            )

    @_do.register
    def _(self, request: port.DeleteTopic, node: int) -> port.Outcome:
        return port.Outcome(
            Code.NONE if self.topics.pop(request.name, None) else Code.UNKNOWN_TOPIC_OR_PARTITION
        )

    @_do.register
    def _(self, request: port.DescribeTopic, node: int) -> port.ConfigsAnswer:
        topic = self.topics.get(request.name)
        if topic is None:
            return port.ConfigsAnswer(Code.UNKNOWN_TOPIC_OR_PARTITION, {})
        return port.ConfigsAnswer(
            Code.NONE,
            {
                name: value
                for name, value in topic.configs.items()
                if request.keys is None or name in request.keys
            },
        )

    @_do.register
    def _(self, request: port.CommitOffsets, node: int) -> dict[TopicPartition, Code]:
        if self.coordinator(request.group) != node:
            return dict.fromkeys(request.offsets, Code.NOT_COORDINATOR)
        known = {log: offset for log, offset in request.offsets.items() if self.log(log) is not None}
        self.groups.setdefault(request.group, {}).update(known)
        return {
            log: Code.NONE if log in known else Code.UNKNOWN_TOPIC_OR_PARTITION for log in request.offsets
        }

    def position(self, group: str, log: TopicPartition) -> int:
        """The committed one; -1: none."""
        return self.groups.get(group, {}).get(log, -1)


def _valid(name: str) -> bool:
    return re.fullmatch(r"[a-zA-Z0-9._-]{1,249}", name) is not None and name not in (".", "..")


class FakeWire:
    """A wire of one process. Requests are done when they are sent, but a fetch that waits."""

    def __init__(self, kafka: FakeKafka) -> None:
        self._kafka = kafka
        self._closed = False

    def send(self, node: NodeAddress, request: Request[A], lane: str = "") -> FakePending[A]:
        if self._closed:
            raise errors.ConnectionFailed("this client of Kafka is closed")
        fault = self._kafka.fault(node.port, request)
        if fault == REFUSED or node.port in self._kafka.down or node.port not in self._kafka.nodes:
            raise errors.ConnectionFailed(f"cannot connect to {node}")
        if fault == LATE:
            self._kafka.late.append((node.port, request))
        if fault in (LOST, LATE):
            return FakePending(node, None)
        if isinstance(request, port.Fetch) and request.max_wait_ms:
            return FakePending(node, lambda: self._wait(node.port, request))
        answer = self._kafka.do(node.port, request)
        if isinstance(fault, Code):
            answer = _coded(answer, fault)
        return FakePending(node, None if fault == UNANSWERED else lambda: answer)

    def _wait(self, node: int, request: Any) -> Any:
        deadline = time.monotonic() + request.max_wait_ms / 1000
        with self._kafka.changed:
            while True:
                answers: dict[TopicPartition, port.Fetched] = self._kafka.do(node, request)
                enough = sum(len(answer.records) for answer in answers.values()) >= request.min_bytes
                left_s = deadline - time.monotonic()
                if enough or any(answer.code for answer in answers.values()) or left_s <= 0:
                    return answers
                self._kafka.changed.wait(left_s)

    def close(self) -> None:
        self._closed = True


def _coded(answer: Any, code: Code) -> Any:
    """The answer with a code in place of each of its own."""
    if isinstance(answer, dict):
        return {key: _coded(value, code) for key, value in answer.items()}
    if isinstance(answer, port.MetadataAnswer):
        return replace(answer, topics=_coded(answer.topics, code))
    return code if isinstance(answer, Code) else replace(answer, code=code)


class FakePending(Generic[A]):
    def __init__(self, node: NodeAddress, answer: Callable[[], A] | None) -> None:
        self._node = node
        self._answer = answer

    def answer(self) -> A:
        if self._answer is None:
            raise Unanswered(f"{self._node} did not answer")
        return self._answer()
