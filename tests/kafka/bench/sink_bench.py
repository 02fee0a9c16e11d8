"""Drivers on FakeKafka: each with a client, memory and epoch of its own, as a process has; and what a reader
sees of what they publish.

The journal stands for the source: what was claimed and read is put there by the test.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field

import pyarrow as pa

from broker_core.core.backoff import Time
from broker_core.core.errors import CheckpointMismatch, PreconditionFailed
from broker_core.engine import BranchHeader, BranchKind, Committed, LedgerEntry, Opened, StagedBranch
from broker_core.kafka import names
from broker_core.kafka.cluster.client import Client
from broker_core.kafka.journal.journal import Lag
from broker_core.kafka.protocol.port import EARLIEST, LATEST, Isolation, TopicPartition
from broker_core.kafka.record.decode import decode
from broker_core.kafka.record.record_batch import Codec
from broker_core.kafka.sink.sink import KafkaSink
from broker_core.kafka.topics import entry
from tests.kafka.bench.fake_kafka import FakeKafka

APP, QUERY = "app", "q1"
EVERYTHING = 1 << 62
_tokens = itertools.count()


@dataclass
class Journal:
    """What every driver finds in partition 1."""

    reads: dict[tuple[str, int], dict[str, list[int]]] = field(default_factory=dict)
    acked: dict[str, int] = field(default_factory=dict)
    position: int = 0
    applied: set[int] = field(default_factory=set)
    mirrored: int = 0
    skipped: dict[int, dict[str, str]] = field(default_factory=dict)
    queues: tuple[str, ...] = ("input",)
    forgotten: set[int] = field(default_factory=set)
    left: dict[str, int] = field(default_factory=dict)
    notes: dict[int, list[tuple[str, str, int, str]]] = field(default_factory=dict)


class View:
    """One driver's ``Facts``: as old as its last refresh."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._seen = Journal()

    def refresh(self) -> None:
        self._seen = copy.deepcopy(self._journal)

    def ranges_read(self, query_id: str, batch_id: int) -> dict[str, list[int]]:
        ranges = self._seen.reads.get((query_id, batch_id), {})
        if any(span == [-1, -1] for span in ranges.values()):
            raise CheckpointMismatch("released")
        return ranges

    def settled(self, log: str, start: int | None, end: int) -> bool:
        return start is None or self._seen.acked.get(log, 0) >= end

    def position(self) -> int:
        return self._seen.position

    def queues(self) -> tuple[str, ...]:
        return self._seen.queues

    def logs(self, queue: str) -> list[str]:
        ranges = self._seen.reads.values()
        return sorted({log for read in ranges for log in read if log.startswith(f"{queue}/")})

    def lag(self, consumed: Mapping[str, int]) -> Lag:
        return Lag(sum(100 - offset for offset in consumed.values()), None)

    def undecided(self, queue: str, consumed: Mapping[str, int]) -> int:
        return 0

    def note_release(self, queue: str, consumed: Mapping[str, int], *, by: str, interrupted: bool) -> None:
        self._journal.left = dict(consumed)

    def release(self, queue: str) -> None:
        if queue not in self._journal.queues:
            raise PreconditionFailed("not claimed")
        self._journal.queues = tuple(name for name in self._journal.queues if name != queue)

    def resume(self, entries: Sequence[LedgerEntry]) -> None:
        raise AssertionError("no test of the sink alone resumes")

    def applied(self) -> Set[int]:
        return self._seen.applied

    def mirrored(self) -> int:
        return self._seen.mirrored

    def skipped(self) -> Mapping[int, Mapping[str, str]]:
        return self._seen.skipped

    def notes(self) -> Mapping[int, Sequence[tuple[str, str, int, str]]]:
        return self._seen.notes

    def note(self, sequence: int, branches: Mapping[str, int], name: str, text: str) -> None:
        notes = self._journal.notes.setdefault(sequence, [])
        notes += [(branch, name, at, text) for branch, at in branches.items()]
        self.refresh()

    def versions(self) -> Mapping[int, Mapping[str, int]]:
        return {}

    def mark_applied(self, sequence: int, versions: Mapping[str, int]) -> None:
        self._journal.applied.add(sequence)
        self.refresh()

    def mark_mirrored(self, sequence: int) -> None:
        self._journal.mirrored = max(sequence, self._journal.mirrored)
        self.refresh()

    def skip(self, sequence: int, branches: Collection[str], to: str) -> None:
        self._journal.skipped.setdefault(sequence, {}).update(dict.fromkeys(branches, to))
        self.refresh()

    def forget(self, sequences: Collection[int]) -> None:
        self._journal.forgotten |= set(sequences)


class Cluster:
    def __init__(self, version: int = 2, *, partitions: int = 2, nodes: int = 3) -> None:
        self.kafka = FakeKafka(nodes, transaction_version=version)
        self.journal = Journal()
        self.reader = self.client()
        for queue in ("orders", "paid"):
            self.reader.create_topic(queue, partitions)

    def client(self, reconnect_s: float = 30.0) -> Client:
        """A client whose pauses take no time."""
        clock = itertools.count()
        time = Time(now=lambda: next(clock) * 0.001, sleep=lambda seconds: None)
        return Client(self.kafka.wire(), [self.kafka.nodes[1]], reconnect_s=reconnect_s, time=time)

    def driver(
        self, *, reconnect_s: float = 30.0, clean_every_bytes: int = 0, codec: Codec = Codec.NONE
    ) -> Driver:
        return Driver(self, self.client(reconnect_s), clean_every_bytes, codec)

    # -- what a reader sees ----------------------------------------------------------------------------------
    def bodies(self, queue: str = "orders") -> list[bytes]:
        """What is committed in a queue, in the order of partitions and offsets."""
        return [
            value
            for number in sorted(self.reader.topic(queue).partitions)
            for value in self.read(TopicPartition(queue, number))
        ]

    def read(self, log: TopicPartition, isolation: Isolation = Isolation.READ_COMMITTED) -> list[bytes]:
        position = self.reader.offsets({log: EARLIEST})[log]
        end = self.reader.offsets({log: LATEST}, isolation)[log]
        found: list[bytes] = []
        while position < end:
            fetched = self.reader.fetch({log: position}, isolation=isolation)[log]
            decoded = decode(fetched.records, position, end, fetched.aborted, log=str(log))
            found += decoded.records.values.to_pylist()
            position = decoded.position
        return found

    def entries(self, app_id: str = APP) -> list[tuple[int, int]]:
        """(sequence, batch) of every ledger entry that was ever committed."""
        log = TopicPartition(names.app_topic(app_id), names.DECISIONS)
        end = self.reader.offsets({log: LATEST})[log]
        found = [
            entry.parse(row.key or b"", row.value)
            for row in entry.replay(self.reader, log, 0, end)
            if row.value is not None
        ]
        return [(each.sequence, each.batch_id) for each in found if type(each).TABLE == "ledger"]  # type: ignore[attr-defined]


class Driver:
    """A process: one engine, over one wire."""

    def __init__(self, cluster: Cluster, client: Client, clean_every_bytes: int, codec: Codec) -> None:
        self.cluster = cluster
        self.client = client
        self.sink = KafkaSink(
            client, lambda _: View(cluster.journal), codec=codec, clean_every_bytes=clean_every_bytes
        )

    def open(self, batch: int, query: str = QUERY, *, on_new: str = "fail", token: str = "") -> Opened:
        return self.sink.open_batch(APP, query, batch, on_new, token=token)  # type: ignore[arg-type]

    def stage(
        self,
        token: str,
        bodies: Sequence[bytes],
        *,
        batch: int = 0,
        query: str = QUERY,
        partition: int = 0,
        kind: BranchKind = "publish",
        target: Mapping[str, str] | None = None,
        app: str = APP,
    ) -> StagedBranch:
        given = {"exchange": "", "routing_key": "orders"} if target is None else dict(target)
        header = BranchHeader(
            token, f"branch-{next(_tokens)}", kind, given, app, query, batch, partition=partition
        )
        return self.sink.stage(header, [rows(*bodies)] if bodies else [])

    def commit(
        self, batch: int, token: str, branches: Sequence[StagedBranch], query: str = QUERY, **options: object
    ) -> Committed:
        return self.sink.commit_batch(APP, query, batch, token, branches, **options)  # type: ignore[arg-type]

    def run(self, batch: int, bodies: Sequence[bytes], query: str = QUERY, **options: object) -> Committed:
        """A whole micro-batch, of two tasks."""
        opened = self.open(batch, query)
        if opened.already:
            return self.commit(batch, "", [], query, **options)
        half = len(bodies) // 2
        branches = [
            self.stage(opened.token, part, batch=batch, query=query, partition=number)
            for number, part in enumerate((bodies[:half], bodies[half:]))
        ]
        return self.commit(batch, opened.token, branches, query, **options)


def rows(*bodies: bytes, **columns: Sequence[object]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"body": pa.array(bodies, pa.binary()), **columns})


def nothing_open(cluster: Cluster) -> bool:
    return all(not log.open for topic in cluster.kafka.topics.values() for log in topic.logs)
