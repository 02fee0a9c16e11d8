"""Asking the leaders of logs, all at once, while the caller does something else.

Not here: what is known of the cluster (``cluster.py``), and what is asked (``client.py``).
Invariant: a request that may have been done is repeated only where the caller says that twice is the same as
once; else Unanswered is raised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from broker_core import errors
from broker_core.kafka.cluster import acls
from broker_core.kafka.cluster.cluster import Cluster, Coded
from broker_core.kafka.protocol import port
from broker_core.kafka.protocol.codes import BUSY, MOVED, UNCLEAR, Code
from broker_core.kafka.protocol.port import AnyRequest, NodeAddress, Request, TopicPartition, Unanswered

V = TypeVar("V")
C = TypeVar("C", bound=Coded)


@dataclass(frozen=True, slots=True)
class _Asked(Generic[C]):
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
        asked: Mapping[TopicPartition, V],
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
        todo, done = dict(asked), {}
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
    ) -> list[_Asked[C]]:
        parts: dict[NodeAddress, dict[TopicPartition, V]] = {}
        for log, value in todo.items():
            leader = self._leader(log)
            if leader is not None:
                parts.setdefault(leader, {})[log] = value
        sent: list[_Asked[C]] = []
        for node, part in parts.items():
            request = make(part)
            pending: port.Pending[dict[TopicPartition, C]] | errors.ConnectionFailed
            try:
                pending = self._cluster.nodes.send(node, request, lane)
            except errors.ConnectionFailed as error:
                pending = error
            sent.append(_Asked(node, list(part), request, pending))
        return sent

    def _receive(
        self, sent: Iterable[_Asked[C]]
    ) -> list[tuple[_Asked[C], dict[TopicPartition, C] | errors.ConnectionFailed]]:
        """Every answer is read, also behind one that failed: the next user of a connection must not find
        it.
        """
        found: list[tuple[_Asked[C], dict[TopicPartition, C] | errors.ConnectionFailed]] = []
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
        self, log: TopicPartition, request: AnyRequest, answer: Coded, repeat: bool, moved: bool
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
                    "correct the number",
                )
        node = self._cluster.nodes.known.get(partition.leader)
        if node is None:
            self._forget([log])
        return node

    def _forget(self, logs: Iterable[TopicPartition]) -> None:
        for log in logs:
            self._cluster.forget(log.topic)
