"""What is known of a cluster, and asking it: its controller, a coordinator, any node, or the leaders of logs;
and when it is asked again.

Not here: what is asked (``client.py``), and how it is carried (``wire.py``).
Invariant: a request that may have been done is repeated only where the caller says that twice is the same as
once; else Unanswered is raised. What has no answer within ``reconnect_s`` raises the last error. Threads may
share a cluster: its caches are dicts whose entries are replaced whole, and an old entry costs one refused
request.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from broker_core.core import errors
from broker_core.core.backoff import Backoff, Time
from broker_core.kafka.cluster import acls
from broker_core.kafka.protocol import port
from broker_core.kafka.protocol.codes import BUSY, COORDINATOR_MOVED, MOVED, UNCLEAR, Code
from broker_core.kafka.protocol.port import (
    AnyRequest,
    NodeAddress,
    Pending,
    Request,
    TopicPartition,
    Unanswered,
    Wire,
)

A = TypeVar("A")
V = TypeVar("V")

RECONNECT_S = 30.0
REFRESH_S = 30.0  # of metadata: how late a new partition is seen
PAUSES_S = (0.003, 0.006, 0.012, 0.025, 0.05, 0.1, 0.2, 0.5, 1.0)


class HasCode(Protocol):
    @property
    def code(self) -> Code: ...


C = TypeVar("C", bound=HasCode)


class Nodes:
    """Those that there are, and which did not answer when they were asked last. Threads may share it.

    A node that did not answer is asked about the cluster after all others: it may take connections and be
    silent, and whoever asks it loses the time of a connection.
    """

    def __init__(self, wire: Wire, bootstrap: Sequence[NodeAddress]) -> None:
        self.addresses: Mapping[int, NodeAddress] = {}
        self._wire = wire
        self._bootstrap = tuple(bootstrap)
        self._doubtful: set[NodeAddress] = set()
        self.failures = 0  # to send a request, or to get its answer

    def close(self) -> None:
        self._wire.close()

    def in_order(self) -> list[NodeAddress]:
        """Returns those to ask about the cluster, one after the other."""
        return sorted(
            dict.fromkeys((*self.addresses.values(), *self._bootstrap)), key=self._doubtful.__contains__
        )

    def ask(self, node: NodeAddress, request: Request[A]) -> A:
        """Raises ConnectionFailed, Unanswered."""
        return self.answer(node, self.send(node, request))

    def send(self, node: NodeAddress, request: Request[A], lane: str = "") -> Pending[A]:
        """Raises ConnectionFailed: nothing was sent."""
        try:
            return self._wire.send(node, request, lane)
        except errors.ConnectionFailed:
            self._failed(node)
            raise

    def answer(self, node: NodeAddress, pending: Pending[A]) -> A:
        """Raises Unanswered."""
        try:
            answer = pending.answer()
        except errors.ConnectionFailed:
            self._failed(node)
            raise
        self._doubtful.discard(node)
        return answer

    def _failed(self, node: NodeAddress) -> None:
        self.failures += 1
        self._doubtful.add(node)


class Cluster:
    """Over a wire, from ``bootstrap`` endpoints on. Nothing is sent before the first question."""

    def __init__(self, wire: Wire, bootstrap: Sequence[NodeAddress], reconnect_s: float, time: Time) -> None:
        self.nodes, self.cluster_id = Nodes(wire, bootstrap), ""  # the id as the last answer said it
        self._reconnect_s = reconnect_s
        self._time = time
        self._topics: dict[str, tuple[port.TopicMetadata, float]] = {}  # and when it was asked for
        self._coordinators: dict[str, NodeAddress] = {}

    def close(self) -> None:
        self.nodes.close()

    def patience(self) -> Backoff:
        return Backoff(self._reconnect_s, self._time, PAUSES_S, spread=0.5, from_start=True)

    # -- topics ----------------------------------------------------------------------------------------------

    def topic(self, name: str) -> port.TopicMetadata:
        """Its partitions, as they were at most REFRESH_S ago. Raises QueueNotFound."""
        cached = self._topics.get(name)
        if cached is not None and self._time.now() - cached[1] < REFRESH_S:
            return cached[0]
        return self.refresh(name)

    def refresh(self, name: str) -> port.TopicMetadata:
        """As :meth:`topic`, asked for now."""
        patience = self.patience()
        while True:
            found = self.metadata((name,), patience).topics[name]
            if found.code is Code.NONE:
                self._topics[name] = found, self._time.now()
                return found
            self._topics.pop(name, None)
            error = acls.error(port.Metadata((name,)), found.code, f"topic {name}", topic=name)
            if found.code not in MOVED:
                raise error
            patience.wait(error)

    def metadata(
        self, topics: tuple[str, ...] | None, patience: Backoff | None = None
    ) -> port.MetadataAnswer:
        answer = self.anywhere(port.Metadata(topics), patience)
        self.nodes.addresses, self.cluster_id = answer.nodes, answer.cluster
        return answer

    def forget(self, name: str) -> None:
        """The next question about the topic is asked anew."""
        self._topics.pop(name, None)

    # -- asking nodes ----------------------------------------------------------------------------------------

    def anywhere(self, request: Request[A], patience: Backoff | None = None) -> A:
        """The answer of any node. Raises ConnectionFailed when none answers. Only for questions."""
        patience = patience or self.patience()
        while True:
            error = errors.ConnectionFailed("no node of Kafka is known")
            for node in self.nodes.in_order():
                try:
                    return self.nodes.ask(node, request)
                except errors.ConnectionFailed as failed:
                    error = failed
            patience.wait(error)

    def about(self, topic: str, request: Request[C]) -> C:
        """The answer of any node about a topic, when its code is NONE. Raises the error of a final code."""
        patience = self.patience()
        while True:
            answer = self.anywhere(request, patience)
            if answer.code is Code.NONE:
                return answer
            message = getattr(answer, "message", None)
            error = acls.error(request, answer.code, f"topic {topic}", topic=topic, message=message)
            if answer.code not in MOVED | BUSY | UNCLEAR:
                raise error
            patience.wait(error)

    def _ask_controller(self, request: Request[A], patience: Backoff) -> A:
        """Raises Unanswered."""
        while True:
            cluster = self.metadata((), patience)
            node = cluster.nodes.get(cluster.controller) or next(iter(cluster.nodes.values()))
            try:
                pending = self.nodes.send(node, request)
            except errors.ConnectionFailed as error:
                patience.wait(error)
                continue
            return self.nodes.answer(node, pending)

    def administer(
        self,
        name: str,
        request: Request[port.Outcome],
        fine: Collection[Code] = (),
        *,
        done: Collection[Code] = (),
    ) -> None:
        """Asks the controller about a topic until the answer is clear. ``fine``: codes that count as success;
        ``done``: where an earlier try may have done it. Raises the error of any other code.
        """
        patience = self.patience()
        accepted = {Code.NONE, *fine}
        while True:
            try:
                outcome = self._ask_controller(request, patience)
            except Unanswered as unanswered:
                error: errors.TxmqError = unanswered
                accepted |= {*done}
            else:
                if outcome.code in accepted:
                    return
                error = acls.error(
                    request, outcome.code, f"topic {name}", topic=name, message=outcome.message
                )
                if outcome.code in UNCLEAR:
                    accepted |= {*done}
                elif outcome.code not in MOVED | BUSY:
                    raise error
            patience.wait(error)

    def coordinate(
        self,
        key: str,
        request: Request[A],
        code_of: Callable[[A], tuple[Code, TopicPartition | None]],
        *,
        repeat: bool,
        group: bool = False,
    ) -> A:
        """The answer of the key's coordinator. ``code_of``: its code, and the log that it is about, if any.
        Raises Unanswered without ``repeat``, and the error of a final code.
        """
        name = f"group {key}" if group else f"transactional id {key}"
        patience = self.patience()
        while True:
            node = self._coordinators.get(name) or self._find_coordinator(key, group, name, patience)
            try:
                answer = self.nodes.ask(node, request)
            except errors.ConnectionFailed as failed:
                self._coordinators.pop(name, None)
                if isinstance(failed, Unanswered) and not repeat:
                    raise
                patience.wait(failed)
                continue
            code, log = code_of(answer)
            if code is Code.NONE:
                return answer
            what = name if log is None else f"log {log} ({name})"
            error = acls.error(request, code, what, topic="" if log is None else log.topic)
            if code in UNCLEAR and not repeat:
                raise Unanswered(error.message)
            if code in COORDINATOR_MOVED:
                self._coordinators.pop(name, None)
            elif code not in BUSY | UNCLEAR:
                raise error
            patience.wait(error)

    def _find_coordinator(self, key: str, group: bool, name: str, patience: Backoff) -> NodeAddress:
        while True:
            request = port.FindCoordinator(key, group)
            answer = self.anywhere(request, patience)
            if answer.node is not None:
                self._coordinators[name] = answer.node
                return answer.node
            error = acls.error(request, answer.code, name)
            # the first question of a cluster makes the topic of transactions: until then there is no
            # coordinator
            if answer.code not in COORDINATOR_MOVED | BUSY | UNCLEAR:
                raise error
            patience.wait(error)


@dataclass(frozen=True, slots=True)
class _LeaderRequest(Generic[C]):
    """``pending``: the answer of a leader about its logs, or why there will be none."""

    node: NodeAddress
    logs: list[TopicPartition]
    request: Request[dict[TopicPartition, C]]
    pending: port.Pending[dict[TopicPartition, C]] | errors.ConnectionFailed


class Leaders:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def ask(
        self,
        values: Mapping[TopicPartition, V],
        make: Callable[[dict[TopicPartition, V]], Request[dict[TopicPartition, C]]],
        *,
        repeat: bool = True,
        moved: bool = True,
        lane: str = "",
    ) -> Callable[[], dict[TopicPartition, C]]:
        """Sends the leaders their requests. Returns the call that waits for the answers; call it once, before
        the next request about these logs where their order matters.

        It raises the error of the first log whose code is final, and Unanswered without ``repeat``. ``moved``
        False: a node that is no leader any more may have done it while it was.
        """
        todo, done = dict(values), {}
        sent = self._send(todo, make, lane)

        def answers() -> dict[TopicPartition, C]:
            nonlocal sent
            patience = self._cluster.patience()  # begins here: the caller may have been busy for long
            while True:
                error: errors.TxmqError | None = None
                for each, found in self._receive(sent):
                    if isinstance(found, errors.ConnectionFailed):
                        self._forget(each.logs)
                        if isinstance(found, Unanswered) and not repeat:
                            raise found
                        error = found
                        continue
                    for log in each.logs:
                        answer = found.get(log)
                        if answer is None:
                            raise errors.RemoteProtocolError(
                                f"an answer of Kafka lacks {log}",
                                "check that the address is that of a Kafka broker",
                            )
                        if answer.code is Code.NONE:
                            done[log] = answer
                            del todo[log]
                            patience.renew()
                        else:
                            error = self._refused(log, each.request, answer, repeat, moved)
                if not todo:
                    return done
                patience.wait(
                    error or errors.ConnectionFailed(f"{', '.join(map(str, todo))}: there is no leader")
                )
                sent = self._send(todo, make, lane)

        return answers

    def ready(self, topic: str, partitions: int) -> port.TopicMetadata:
        """Returns the topic when it has so many partitions and their leaders answer."""
        patience = self._cluster.patience()
        while True:
            # a node may not know the topic, or its new partitions, yet
            try:
                found = self._cluster.refresh(topic)
                led = [number for number, each in found.partitions.items() if each.leader >= 0]
                of = max(len(found.partitions), partitions)
                error: errors.TxmqError = errors.ConnectionFailed(
                    f"{len(led)} of {of} partitions of topic {topic} have a leader"
                )
                if len(led) == of:
                    # a leader may not know yet that it is one, and would refuse the first batch
                    self.ask(
                        {TopicPartition(topic, number): port.EARLIEST for number in led},
                        lambda part: port.ListOffsets(part, port.Isolation.READ_UNCOMMITTED),
                    )()
                    return found
            except errors.QueueNotFound as unknown:
                error = unknown
            patience.wait(error)

    def _send(
        self,
        todo: dict[TopicPartition, V],
        make: Callable[[dict[TopicPartition, V]], Request[dict[TopicPartition, C]]],
        lane: str,
    ) -> list[_LeaderRequest[C]]:
        parts: dict[NodeAddress, dict[TopicPartition, V]] = {}
        for log, value in todo.items():
            leader = self._leader(log)
            if leader is not None:
                parts.setdefault(leader, {})[log] = value
        sent: list[_LeaderRequest[C]] = []
        for node, part in parts.items():
            request = make(part)
            pending: port.Pending[dict[TopicPartition, C]] | errors.ConnectionFailed
            try:
                pending = self._cluster.nodes.send(node, request, lane)
            except errors.ConnectionFailed as error:
                pending = error
            sent.append(_LeaderRequest(node, list(part), request, pending))
        return sent

    def _receive(
        self, sent: Iterable[_LeaderRequest[C]]
    ) -> list[tuple[_LeaderRequest[C], dict[TopicPartition, C] | errors.ConnectionFailed]]:
        """Every answer is read, also behind one that failed: the next user of a connection must not find
        it.
        """
        found: list[tuple[_LeaderRequest[C], dict[TopicPartition, C] | errors.ConnectionFailed]] = []
        for each in sent:
            if isinstance(each.pending, errors.ConnectionFailed):
                found.append((each, each.pending))
                continue
            try:
                found.append((each, self._cluster.nodes.answer(each.node, each.pending)))
            except errors.ConnectionFailed as error:
                found.append((each, error))
        return found

    def _refused(
        self, log: TopicPartition, request: AnyRequest, answer: HasCode, repeat: bool, moved: bool
    ) -> errors.TxmqError:
        """The error of an answer that another try may better; raises it where none does."""
        message = getattr(answer, "message", None)
        error = acls.error(request, answer.code, f"log {log}", topic=log.topic, message=message)
        if answer.code in MOVED or answer.code is Code.UNKNOWN_TOPIC_OR_PARTITION:
            self._forget([log])  # whether the topic exists is what the metadata say
        elif answer.code not in BUSY | UNCLEAR:
            raise error
        if not repeat and answer.code in (UNCLEAR if moved else UNCLEAR | MOVED):
            raise Unanswered(error.message)
        return error

    def _leader(self, log: TopicPartition) -> NodeAddress | None:
        """None: there is none for now. Raises QueueNotFound where the topic has no such partition."""
        found = self._cluster.topic(log.topic)
        partition = found.partitions.get(log.partition)
        if partition is None:
            found = self._cluster.refresh(log.topic)
            partition = found.partitions.get(log.partition)
            if partition is None:
                raise errors.QueueNotFound(
                    f"log {log}: topic {log.topic} has {len(found.partitions)} partitions",
                    "correct the number; if the topic was made again with fewer, run the batch again",
                )
        node = self._cluster.nodes.addresses.get(partition.leader)
        if node is None:
            self._forget([log])
        return node

    def _forget(self, logs: Iterable[TopicPartition]) -> None:
        for log in logs:
            self._cluster.forget(log.topic)
