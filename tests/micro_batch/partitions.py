"""Partitioned queues in lists, as the logs of claims: the smallest engine whose queues have several logs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from broker_core.core.errors import QueueNotFound
from broker_core.core.records import ClaimRecord, OriginRecord, ReadRecord, Record
from broker_core.engine import EARLIEST, LATEST, Available, Limit, Origin, Ranges, Vector
from broker_core.micro_batch.claims.claim import Claims
from broker_core.micro_batch.claims.finished import CommittedBelow
from broker_core.micro_batch.claims.logs import Claimed
from broker_core.micro_batch.claims.next_range import next_range
from broker_core.micro_batch.ledger import Ledger, MicroBatch, new_entry

APP = "app"


class Partitions:
    """Implements ``Logs``: log ``orders/1`` is partition 1 of queue ``orders``."""

    def __init__(self, **queues: Sequence[int]) -> None:
        self.ends = {queue: list(ends) for queue, ends in queues.items()}
        self.acked: dict[tuple[str, str], int] = {}

    def of(self, queue: str) -> list[str]:
        if queue not in self.ends:
            raise QueueNotFound(f"no queue {queue!r}")
        return [f"{queue}/{number}" for number in range(len(self.ends[queue]))]

    def id_of(self, queue: str) -> str:
        return queue

    def end(self, log: str) -> int:
        queue, _, number = log.partition("/")
        return self.ends[queue][int(number)]

    def first(self, log: str) -> int:
        return 0

    def goes_on(self, log: str, app_id: str) -> int | None:
        return self.acked.get((log, app_id))

    def offsets(self, queues: Sequence[str], origin: Origin) -> dict[str, int]:
        named = {log: origin.offset(queue, log) for queue in queues for log in self.of(queue)}
        return {log: {LATEST: self.end(log), EARLIEST: 0}.get(at, at) for log, at in named.items()}

    def require_ownable(self, log: str, app_id: str) -> None:
        """Every app may read every partition."""

    def too_few(self, begin: Mapping[str, int], limit: Limit) -> bool:
        return sum(self.end(log) - at for log, at in begin.items()) < (limit.min_rows or 0)

    def cut(self, begin: Mapping[str, int], limit: Limit) -> dict[str, int]:
        ends = {log: self.end(log) for log in begin}
        if limit.end is not None:
            ends = {log: min(end, limit.end.get(log, 0)) for log, end in ends.items()}
        return {log: max(begin[log], end) for log, end in ends.items()}

    def own(self, log: str, app_id: str, start: int) -> None:
        self.acked.setdefault((log, app_id), start)

    def claim(self, log: str, start: int, end: int) -> Claimed:
        return Claimed()

    def ack(self, log: str, app_id: str, end: int, kept_from: int | None) -> None:
        self.acked[(log, app_id)] = end

    def reclaim(self, log: str, app_id: str, ranges: Iterable[Sequence[int]]) -> None:
        """Nothing is freed or hidden by a claim."""


class PartitionedEngine:
    """The part of the port that a stream reader calls on the driver, over ``Partitions``."""

    def __init__(self, logs: Partitions) -> None:
        self._logs = logs
        self._claims = Claims()
        self.acked: list[Vector] = []

    def identity(self) -> str:
        return f"partitions {id(self)}"

    def logs(self, queues: Sequence[str]) -> list[str]:
        return [log for queue in queues for log in self._logs.of(queue)]

    def available(self, logs: Sequence[str], starts: Mapping[str, int] | None = None) -> dict[str, Available]:
        begin = {log: (starts or {}).get(log, 0) for log in logs}
        ends = {log: self._logs.end(log) for log in logs}
        return {log: Available(begin[log], ends[log], ends[log] - begin[log], 0) for log in logs}

    def wait(self, queues: Sequence[str], ends: Mapping[str, int], timeout_s: float) -> bool:
        return any(self._logs.end(log) > ends.get(log, 0) for log in self.logs(queues))

    def claim(
        self,
        app_id: str,
        queues: Sequence[str],
        start: Vector,
        limit: Limit,
        origin: Origin,
        on_new: Any,
        acks: bool = True,
        ran: bool = False,
    ) -> Vector:
        asked = app_id, queues, start, limit, origin, on_new
        return next_range(self._claims, self._logs, Written(), *asked, CommittedBelow(Ledger(), acks, ran))

    def resolve(self, app_id: str, start: Vector, end: Vector) -> Ranges:
        found = self._claims.resolve(app_id, start, end)
        return {} if found is None else {log: (int(at[0]), int(at[1])) for log, at in found.ranges.items()}

    def count(self, app_id: str, ranges: Ranges) -> dict[str, Available]:
        return {log: Available(start, end, end - start, 0) for log, (start, end) in ranges.items()}

    def ack(self, app_id: str, end: Vector, ran: bool = False) -> None:
        self._claims.ack(self._logs, Written(), app_id, end, CommittedBelow(Ledger(), ran=ran))
        self.acked.append(end)


class Written:
    """Implements ``Sink``: every record in order, as a log that other drivers replay."""

    def __init__(self) -> None:
        self.entries: list[Record | tuple[type[Record], tuple[Any, ...]]] = []

    def put(self, record: Record) -> None:
        self.entries.append(record)

    def drop(self, kind: type[Record], key: tuple[Any, ...]) -> None:
        self.entries.append((kind, key))

    def replay(self, claims: Claims) -> Claims:
        known: dict[tuple[type[Record], tuple[Any, ...]], Record] = {}
        for entry in self.entries:
            key = entry if isinstance(entry, tuple) else (type(entry), entry.key)
            gone = known.pop(key, None)
            if isinstance(gone, (ClaimRecord, OriginRecord, ReadRecord)):
                claims.remove(gone)
            if isinstance(entry, (ClaimRecord, OriginRecord, ReadRecord)):
                claims.apply(entry)
                known[key] = entry
        return claims


def claim(
    claims: Claims,
    logs: Partitions,
    written: Written,
    start: Vector,
    *queues: str,
    origin: Origin | None = None,
    consumed: Mapping[str, int] | None = None,
    resume: bool = False,
) -> Vector:
    return next_range(
        claims,
        logs,
        written,
        APP,
        queues or ("orders",),
        start,
        Limit(),
        origin or Origin(),
        "resume" if resume else "fail",
        CommittedBelow(decided(consumed) if consumed else Ledger(), ran=True),
    )


def decided(ends: Mapping[str, int]) -> Ledger:
    """A ledger whose last ranges of these logs ended there."""
    ranges = {log: [0, end] for log, end in ends.items()}
    batch = MicroBatch(APP, "decided", 0)
    ledger = Ledger()
    entry = new_entry(
        ledger, batch, "token", ranges, [], messages=0, published=0, committed_at=0, claim_position=0
    )
    ledger.apply(entry)
    return ledger
