"""The nodes of a cluster: which there are, and which did not answer when they were asked last.

Not here: which of them to ask (``cluster.py``), and how it is carried (``wire.py``).
Invariant: a node that did not answer is asked about the cluster after all others: it may take connections and
be silent, and whoever asks it loses the time of a connection.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from broker_core import errors
from broker_core.kafka.protocol.port import NodeAddress, Pending, Request, Wire

A = TypeVar("A")


class Nodes:
    """Over a wire, from ``bootstrap`` endpoints on. Threads may share it."""

    def __init__(self, wire: Wire, bootstrap: Sequence[NodeAddress]) -> None:
        self.known: Mapping[int, NodeAddress] = {}
        self._wire = wire
        self._bootstrap = tuple(bootstrap)
        self._doubtful: set[NodeAddress] = set()

    def close(self) -> None:
        self._wire.close()

    def in_order(self) -> list[NodeAddress]:
        """Returns those to ask about the cluster, one after the other."""
        return sorted(
            dict.fromkeys((*self.known.values(), *self._bootstrap)), key=self._doubtful.__contains__
        )

    def ask(self, node: NodeAddress, request: Request[A]) -> A:
        """Raises ConnectionFailed, Unanswered."""
        return self.answer(node, self.send(node, request))

    def send(self, node: NodeAddress, request: Request[A], lane: str = "") -> Pending[A]:
        """Raises ConnectionFailed: nothing was sent."""
        try:
            return self._wire.send(node, request, lane)
        except errors.ConnectionFailed:
            self._doubtful.add(node)
            raise

    def answer(self, node: NodeAddress, pending: Pending[A]) -> A:
        """Raises Unanswered."""
        try:
            answer = pending.answer()
        except errors.ConnectionFailed:
            self._doubtful.add(node)
            raise
        self._doubtful.discard(node)
        return answer
