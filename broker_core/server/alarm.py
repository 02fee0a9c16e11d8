"""Alarms: if the broker runs out of disk or memory, publishers are stopped, and notified if they support it.

Not here: what happens to a connection of AMQP then (``Points.guard``), and which calls of Flight are refused
(``flight/calls.py``). Source: RabbitMQ's connection.blocked, also its reasons.
Invariant: looking costs nothing that grows with messages. What frees room is never stopped: to consume, to
commit or roll back what was published or staged.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from broker_core.node.local import LocalBroker

logger = logging.getLogger("txmq.alarm")

MiB = 1024 * 1024
LOOK_S = 0.5  # an answer is as old
RECORD_BYTES = 512  # of one record or id that outlives its call, about
_SPILL_SHARE = 0.25  # of ``memory_bytes``


@dataclass(frozen=True, slots=True)
class AlarmLimits:
    """Publishers are stopped below ``disk_free_bytes``, or above so many bytes in memory.

    ``memory_bytes`` counts transient messages, those in queues that are not durable, what open and prepared
    transactions hold, bindings, and records that outlive their call (outcomes, ended channels, attempts,
    branches, claims, decided batches);
    ``unsealed_bytes`` what small commits have written and the background has not yet moved into a segment.
    """

    disk_free_bytes: int = 50 * MiB
    memory_bytes: int = 1024 * MiB
    unsealed_bytes: int = 512 * MiB


@dataclass(frozen=True, slots=True)
class Shortage:
    """``reason``: in RabbitMQ's words, for clients; ``numbers``: what there is and may be, for the log."""

    reason: str
    numbers: str


class Alarm:
    """``directory`` "": a broker without files. ``counted``: how many records others keep in memory."""

    def __init__(self, broker: LocalBroker, directory: str, limits: AlarmLimits) -> None:
        self._broker = broker
        self._directory = directory
        self.limits = limits
        self.counted: list[Callable[[], int]] = []
        self._lock = threading.Lock()
        self._looked_at = float("-inf")
        self._found: Shortage | None = None

    def now(self) -> Shortage | None:
        """``look``, at most every LOOK_S; the log says when it begins and ends. For any thread."""
        with self._lock:
            if time.monotonic() - self._looked_at >= LOOK_S:
                before, self._found = self._found, self.look()
                self._looked_at = time.monotonic()
                if self._found is not None and before is None:
                    logger.warning(
                        "publishers have to wait: %s (%s)", self._found.reason, self._found.numbers
                    )
                elif self._found is None and before is not None:
                    logger.warning("publishers may go on")
            return self._found

    def look(self) -> Shortage | None:
        """Why publishers have to wait; None if they need not."""
        low = {"memory": self._memory_low(), "disk": self._disk_low() if self._directory else ""}
        short = {resource: numbers for resource, numbers in low.items() if numbers}
        return Shortage(f"low on {' & '.join(short)}", "; ".join(short.values())) if short else None

    def transactions_large(self) -> bool:
        """Whether open transactions together take so much memory that they have to spill early."""
        return self._broker.transaction_bytes() > self.limits.memory_bytes * _SPILL_SHARE

    def _disk_low(self) -> str:
        try:
            found = os.statvfs(self._directory)
        except OSError:
            return ""  # the next commit reports the error
        free = found.f_bavail * found.f_frsize
        return _below(f"free on the disk of {self._directory}", free, self.limits.disk_free_bytes)

    def _kept_records(self) -> int:
        outcomes = self._broker.state.names.outcomes
        return len(outcomes) + len(outcomes.channels) + sum(count() for count in self.counted)

    def _memory_low(self) -> str:
        memory = self._broker.transaction_bytes() + RECORD_BYTES * self._kept_records()
        unsealed = 0
        with self._broker.look as state:
            memory += sum(topology.bound.total for topology in state.hosts.by_name.values())
            for block in state.blocks.by_id.values():
                if block.inbox is None:
                    continue
                if block.block_id < 0:
                    memory += block.size_bytes
                else:
                    unsealed += block.size_bytes
        limits = self.limits
        above = [
            _above("of messages and records in memory", memory, limits.memory_bytes),
            _above("of small commits not yet in a segment", unsealed, limits.unsealed_bytes),
        ]
        return "; ".join(filter(None, above))


def _below(what: str, found: int, limit: int) -> str:
    return f"{found / MiB:.1f} MiB {what}, the limit is {limit / MiB:.1f}" if found < limit else ""


def _above(what: str, found: int, limit: int) -> str:
    return f"{found / MiB:.1f} MiB {what}, the limit is {limit / MiB:.1f}" if found > limit else ""
