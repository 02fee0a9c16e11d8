"""A wire over sockets that ends the node to which a chosen request is sent, before it, with it, or when it is
done.

Not here: what is sent (``tests/crash/test_kafka_requests.py``), and starting nodes
(``bench/kafka_server.py``).
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kafka import KafkaAdminClient
from kafka.errors import KafkaError

from bench.kafka_server import PLAIN, START_S, Cluster, Node
from broker_core.kafka import names
from broker_core.kafka.cluster.wire import SocketWire
from broker_core.kafka.protocol.port import NodeAddress, Pending, Request, TopicPartition, Unanswered
from broker_core.kafka.settings import KafkaSettings

A = TypeVar("A")
_OF_LOGS = "batches", "offsets", "timestamps", "before", "logs"  # fields of requests


class Moment(enum.Enum):
    """When the node is killed."""

    BEFORE = "before it is sent"
    SENT = "while it is under way"  # it may be done or not, and answered or not
    DONE = "when it is done, before its answer"


class DriverKilled(BaseException):
    """The driver dies with the node."""


@dataclass
class Kills:
    """Notes the requests of all wires, and kills a node once, at the one that is ``chosen`` by its name."""

    cluster: Cluster
    replicas: int = 3
    chosen: Callable[[str], bool] = lambda name: False
    moment: Moment = Moment.BEFORE
    ends_driver: bool = False
    seen: list[str] = field(default_factory=list)
    killed: Node | None = None
    down: bool = False  # it is not started again yet
    lock: threading.Lock = field(default_factory=threading.Lock)

    def plan(self, chosen: Callable[[str], bool], moment: Moment, *, ends_driver: bool) -> None:
        self.chosen, self.moment, self.ends_driver = chosen, moment, ends_driver
        self.seen, self.killed = [], None

    def wire(self, settings: KafkaSettings) -> _Wire:
        return _Wire(SocketWire(settings.connection), self)

    def is_next(self, request: Request[Any]) -> bool:
        with self.lock:
            self.seen.append(name_of(request))
            return self.killed is None and self.chosen(self.seen[-1])

    def kill(self, endpoint: NodeAddress) -> None:
        (self.killed,) = (node for node in self.cluster.nodes if node.ports[PLAIN] == endpoint.port)
        self.killed.kill()
        self.down = True
        if min(self.replicas, len(self.cluster.nodes)) == 1:  # who else could answer?
            self._start(self.killed)

    def _start(self, node: Node) -> None:
        self.down = False
        node.start()

    def revive(self) -> None:
        """Returns when every node accepts connections, and could do without any other one that may."""
        if self.killed is None:
            return
        if self.down:
            self._start(self.killed)
        self.killed.wait()
        deadline = time.monotonic() + START_S
        while behind := _behind(self.cluster.bootstrap):
            assert time.monotonic() < deadline, f"replicas do not catch up: {behind}"
            time.sleep(0.2)


@dataclass(frozen=True)
class _Wire:
    """Implements :class:`broker_core.kafka.protocol.port.Wire`."""

    inner: SocketWire
    kills: Kills

    def send(self, node: NodeAddress, request: Request[A], lane: str = "") -> Pending[A]:
        if not self.kills.is_next(request):
            return self.inner.send(node, request, lane)
        pending: Pending[A] | None = None
        if self.kills.moment is not Moment.BEFORE:
            pending = self.inner.send(node, request, lane)
        if pending is not None and self.kills.moment is Moment.DONE:
            pending.answer()
            pending = _Lost()
        self.kills.kill(node)
        if self.kills.ends_driver:
            raise DriverKilled
        return pending if pending is not None else self.inner.send(node, request, lane)

    def close(self) -> None:
        self.inner.close()


class _Lost:
    def answer(self) -> Any:
        raise Unanswered("the node was killed before its answer came")


def _behind(bootstrap: str) -> list[str]:
    """The logs that some replica does not have whole, or that are not known yet."""
    try:
        admin = KafkaAdminClient(bootstrap_servers=bootstrap)
    except KafkaError as error:
        return [str(error)]
    try:
        return [
            f"{topic['name']}/{log['partition_index']}"
            for topic in admin.describe_topics()
            for log in topic["partitions"]
            if set(log["isr_nodes"]) != set(log["replica_nodes"])
        ]
    except KafkaError as error:
        return [str(error)]
    finally:
        admin.close()


def name_of(request: Request[Any]) -> str:
    """Such as ``Produce journal``: the request and what it is about."""
    about = sorted(set(_roles(request)))
    return " ".join([type(request).__name__, "+".join(about)]).strip()


def _roles(request: Request[Any]) -> Iterator[str]:
    for attribute in _OF_LOGS:
        for log in getattr(request, attribute, ()):
            yield _role(log.topic, log)
    for topic in (*(getattr(request, "topics", None) or ()), *filter(None, [getattr(request, "name", "")])):
        yield _role(topic)


def _role(topic: str, log: TopicPartition | None = None) -> str:
    if names.app_of(topic) is not None:
        return "app" if log is None else ("decisions", "journal")[log.partition]
    if topic.startswith(names.STAGE):
        return "stage"
    return "topology" if topic == names.TOPOLOGY else topic.partition("-")[0]
