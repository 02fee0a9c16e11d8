"""The port of the claims to their logs: what a claim reads from a log, and what it records there.

The queues of the embedded broker fill it (``queue_logs.py``), a Kafka engine with partitions.

An object is made for one change. Answers are those of one moment. What it is told becomes durable with the
records that ``Claims`` puts into the sink of the same change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from broker_core.engine import Limit, Origin

Spans = list[list[int]]  # [start, end] pairs, ascending


@dataclass(frozen=True, slots=True)
class Claimed:
    """What a claimed range reads: not the ``skipped`` offsets, which were settled before, and the
    ``redelivered`` ones as possibly sent before. An engine that has neither leaves both empty.
    """

    skipped: Spans = field(default_factory=list)
    redelivered: Spans = field(default_factory=list)


class Logs(Protocol):
    # -- asked -----------------------------------------------------------------------------------------------
    def of(self, queue: str) -> list[str]:
        """Returns the logs of a queue, in order, with all that a start may name. Raises QueueNotFound."""

    def queue_of(self, log: str) -> str:
        """Returns the queue whose log it is. Raises OptionError for a text that is no log."""

    def id_of(self, queue: str) -> str:
        """Returns the id of the queue that the app has claimed; another one of its name has another."""

    def first(self, log: str) -> int:
        """Returns where a log that no origin and no checkpoint names begins."""

    def goes_on(self, log: str, app_id: str) -> int | None:
        """Returns the first offset that the app has not acknowledged; None if it has never read the log."""

    def offsets(self, queues: Sequence[str], origin: Origin) -> dict[str, int]:
        """Returns ``origin`` as an offset of every log of these queues, as of now. Raises OptionError for an
        offset that the log does not have.
        """

    def require_ownable(self, log: str, app_id: str) -> None:
        """Raises ResourceLocked or PreconditionFailed if the app may not read the log."""

    def too_few(self, begin: Mapping[str, int], limit: Limit) -> bool:
        """Returns whether the app must wait for more messages after ``begin`` (``Limit.min_rows``)."""

    def cut(self, begin: Mapping[str, int], limit: Limit) -> dict[str, int]:
        """Returns an end for every log of ``begin``: within the limit, never below ``begin``."""

    # -- told ------------------------------------------------------------------------------------------------
    def own(self, log: str, app_id: str, start: int) -> None:
        """The app reads the log, from ``start`` on if this is its first claim there."""

    def claim(self, log: str, start: int, end: int) -> Claimed:
        """The range [start, end) is claimed: its bytes stay until they are acknowledged."""

    def ack(self, log: str, app_id: str, end: int, kept_from: int | None) -> None:
        """Everything below ``end`` is consumed. The range from ``kept_from`` to ``end`` may be read once
        more; None: unknown, so nothing is freed. A log that is gone, or not the app's, is left alone.
        """

    def reclaim(self, log: str, app_id: str, ranges: Iterable[Sequence[int]]) -> None:
        """Only these ranges are still claimed. A log that is gone, or not the app's, is left alone."""
