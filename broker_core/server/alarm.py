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

from broker_core.admin import Level
from broker_core.node.local import LocalBroker

logger = logging.getLogger("txmq.alarm")

MiB = 1024 * 1024
LOOK_S = 0.5  # an answer is as old
RECORD_BYTES = 512  # of one record or id that outlives its call, about
_SPILL_SHARE = 0.25  # of ``memory_bytes``
_RESOURCE = {"memory": "memory", "unsealed": "memory", "disk free": "disk"}  # RabbitMQ's words
_WHAT = {"memory": "of messages and records in memory", "unsealed": "of small commits not yet in a segment"}


@dataclass(frozen=True, slots=True)
class AlarmLimits:
    """Publishers are stopped below ``disk_free_bytes``, or above so many bytes in memory.

    ``memory_bytes`` counts transient messages, those in queues that are not durable, what open and prepared
    transactions hold, and records that outlive their call (outcomes, ended channels, apps, attempts,
    branches, claims, reads, decided batches); not queues, exchanges and bindings, which have a bound of
    their own: nobody frees them by waiting.
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
                before, found = self._found, self.look()
                self._found, self._looked_at = found, time.monotonic()
                if found is not None and before is None:
                    logger.warning("publishers have to wait: %s (%s)", found.reason, found.numbers)
                elif found is None and before is not None:
                    logger.warning("publishers may continue")
            return self._found

    def look(self) -> Shortage | None:
        """Why publishers have to wait; None if they need not."""
        short = [level for level in self.levels() if level.alarm]
        resources = dict.fromkeys(_RESOURCE[level.name] for level in short)  # each once, in this order
        return (
            Shortage(f"low on {' & '.join(resources)}", "; ".join(map(self._text, short))) if short else None
        )

    def levels(self) -> list[Level]:
        """What publishers have to wait for, with its limits."""
        limits = self.limits
        memory, unsealed = self._memory()
        levels = [
            Level("memory", memory, limits.memory_bytes, memory > limits.memory_bytes),
            Level("unsealed", unsealed, limits.unsealed_bytes, unsealed > limits.unsealed_bytes),
        ]
        free = self._disk_free() if self._directory else None
        if free is not None:
            levels.append(Level("disk free", free, limits.disk_free_bytes, free < limits.disk_free_bytes))
        return levels

    def _text(self, level: Level) -> str:
        what = _WHAT.get(level.name, f"free on the disk of {self._directory}")
        return f"{level.found / MiB:.1f} MiB {what}, the limit is {level.limit / MiB:.1f}"

    def transactions_large(self) -> bool:
        """Whether open transactions together take so much memory that they have to spill early."""
        return self._broker.transaction_bytes() > self.limits.memory_bytes * _SPILL_SHARE

    def _disk_free(self) -> int | None:
        try:
            found = os.statvfs(self._directory)
        except OSError:
            return None  # the next commit reports the error
        return found.f_bavail * found.f_frsize

    def _kept_records(self) -> int:
        state = self._broker.state
        outcomes = state.names.outcomes
        counts = (
            len(outcomes)
            + len(state.names.heuristics.by_key)
            + len(outcomes.channels)
            + len(state.users.apps)
        )
        return counts + sum(count() for count in self.counted)

    def _memory(self) -> tuple[int, int]:
        """Bytes of messages and records in memory, and those of small commits not yet in a segment."""
        memory = self._broker.transaction_bytes() + RECORD_BYTES * self._kept_records()
        memory += self._broker.state.transactions.history.size_bytes
        unsealed = 0
        with self._broker.look as state:
            for block in state.blocks.by_id.values():
                if block.inbox is None:
                    continue
                if block.block_id < 0:
                    memory += block.size_bytes
                else:
                    unsealed += block.size_bytes
        return memory, unsealed
