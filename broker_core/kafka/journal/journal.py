"""The journal of an app: partition 1 of its topic, in which the first one in the log is right.

Every process has a copy of the state (``history.py``) and reads the tail before it decides. A change is
compare-and-set by order: no lock, no transaction, no fencing.

Invariant: what :meth:`change` returns was accepted, and so every other reader of the log accepts it too. Ends
come from ListOffsets, never from a fetch.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from typing import Any, NamedTuple, Protocol, TypeVar
from uuid import UUID

from broker_core.core import failpoint
from broker_core.core.backoff import Backoff
from broker_core.core.errors import AccessRefused, DataLoss, QueueNotFound
from broker_core.core.records import ReadRecord, canonical, parse
from broker_core.engine import LedgerEntry, Ranges
from broker_core.kafka import names
from broker_core.kafka.cluster.client import Client
from broker_core.kafka.journal.history import History, PositionRecord, Proposal, read_key, surviving
from broker_core.kafka.lost import ledger_lost
from broker_core.kafka.protocol.port import LATEST, TopicPartition, Unanswered, parse_log
from broker_core.kafka.topics import topics
from broker_core.kafka.topics.entry import Entry, Row, batch, dumps, fields_of, now_ms, replay
from broker_core.kafka.topics.row_times import committed_ms
from broker_core.micro_batch.claims.claim import Claims

T = TypeVar("T")

LATEST_S = topics.DAY_MS / 1000 / 2  # a reader that comes later may miss tombstones, and begins again


class Journal:
    """Of one app, in one process. Threads may share it."""

    def __init__(self, client: Client, app_id: str) -> None:
        self._client = client
        self._app_id = app_id
        self._topic = topics.app(app_id)
        self.log = TopicPartition(self._topic.name, names.JOURNAL)
        self._history = History(app_id)
        self._position = 0
        self._read_at_s = 0.0  # when the position was an end
        self._id: uuid.UUID | None = None
        self._facts: set[str] = set()  # facts that this process has written
        self._lock = threading.RLock()

    # -- reading ---------------------------------------------------------------------------------------------

    def look(self, question: Callable[[Claims], T]) -> T:
        """Returns the answer of the claims as of the last catch-up."""
        with self._lock:
            return question(self._history.claims)

    @property
    def positions(self) -> Mapping[str, PositionRecord]:
        """By queue."""
        with self._lock:
            return dict(self._history.positions)

    @property
    def facts(self) -> Mapping[str, object]:
        """By key, without the reads."""
        with self._lock:
            return dict(self._history.facts)

    def exists(self) -> bool:
        """Returns whether the app has a topic. Raises LedgerLost where there was one, and now is another one
        or none.
        """
        found = self._client.find_topic(self._topic.name)
        if found is not None:
            self._require_same(found.id)
        elif self._id is not None:
            raise ledger_lost(self._app_id, "was deleted")
        return found is not None

    def ensure(self) -> None:
        """Makes the topic of the app, unless it exists. Raises AccessRefused, PreconditionFailed."""
        if self._id is None or not self.exists():
            self._require_same(topics.ensure(self._client, self._topic).id)

    def catch_up(self, end: int | None = None) -> set[str]:
        """Reads the log up to ``end``, the default is its end now; returns the ids of accepted changes."""
        with self._lock:
            if not self.exists():
                return set()
            if self._position and time.time() - self._read_at_s > LATEST_S:
                self._history, self._position = History(self._app_id), 0
            if end is None:
                end = self._client.offsets({self.log: LATEST})[self.log]
            self._read_at_s = time.time()
            if end <= self._position:
                return set()
            assert self._id is not None
            # all of it before any of it is applied: a reader that fails in between begins at its position
            rows = list(replay(self._client, self.log, self._position, end, ids={self._topic.name: self._id}))
            return self._apply(rows, end)

    def _apply(self, rows: Sequence[Row], end: int) -> set[str]:
        accepted = self._history.apply(rows if self._position else surviving(rows))
        self._position = end
        return accepted

    def _require_same(self, found: uuid.UUID) -> None:
        if self._id is None:
            self._id = found
        elif self._id != found:
            raise ledger_lost(self._app_id, "was deleted and made again")

    # -- writing ---------------------------------------------------------------------------------------------

    def change(self, compute: Callable[[Claims, Proposal], T], end: int | None = None) -> T:
        """Returns what ``compute`` returns, when the records that it put are accepted.

        ``compute`` is called again where another process was first. ``end``: an end of the log that was taken
        just now. Raises what it raises, ConnectionFailed.
        """
        with self._lock:
            self.ensure()
            self.catch_up(end)
            patience = self._client.patience()
            while True:
                result, proposal = self._history.compute(compute)
                change_id = uuid.uuid4().hex
                entries = self._history.entries(proposal, change_id)
                if not entries or self._won(entries, change_id, patience):
                    return result

    def _won(self, entries: list[Entry], change_id: str, patience: Backoff) -> bool:
        failpoint.here("kafka.journal.append")
        lost: Unanswered | None = None
        timestamp = now_ms()
        try:
            offset = self._client.produce({self.log: batch(entries, timestamp)})[self.log]
        except Unanswered as unanswered:
            lost, offset = unanswered, -1
        failpoint.here("kafka.journal.appended")
        if offset == self._position:  # nobody came between
            rows = [
                Row(
                    offset + number,
                    timestamp,
                    entry.key.encode(),
                    None if entry.value is None else entry.value.encode(),
                )
                for number, entry in enumerate(entries)
            ]
            return change_id in self._apply(rows, offset + len(rows))
        won = change_id in self.catch_up(offset + len(entries) if lost is None else None)
        if lost is not None and not won:
            patience.wait(lost)  # it may still come, and is void then
        return won

    def note(self, facts: Mapping[str, object]) -> None:
        """Records facts; returns when they are durable. What this process has written or read already is not
        written again.
        """
        with self._lock:
            self.ensure()
            new = {
                key: dumps(value)
                for key, value in facts.items()
                if key not in self._facts and self.facts.get(key) != value
            }
            if new:
                entries = [Entry(key, value) for key, value in new.items()]
                failpoint.here("kafka.journal.note")
                self._client.produce({self.log: batch(entries, now_ms())}, repeat=True)
                failpoint.here("kafka.journal.noted")
                self._facts |= new.keys()

    def forget(self, keys: Sequence[str]) -> None:
        """Removes facts that nothing needs any more."""
        with self._lock:
            self._facts -= set(keys)
            if keys:
                entries = [Entry(key, None) for key in keys]
                self._client.produce({self.log: batch(entries, now_ms())}, repeat=True)

    def note_read(self, query_id: str, batch_id: int, ranges: Ranges) -> None:
        """Records that (query, batch) reads ``ranges`` (S4). Every task of the batch writes the same. Raises
        CheckpointMismatch where it is known to have read others.
        """
        self.look(lambda claims: claims.reads.already(self._app_id, query_id, batch_id, ranges))
        spans = {log: [first, last] for log, (first, last) in ranges.items()}
        record = ReadRecord(self._app_id, query_id, batch_id, canonical(sorted(ranges)), spans)
        digest = hashlib.sha256(canonical(spans).encode()).hexdigest()[:16]
        self.note({read_key(record, digest): fields_of(record)})


# ["applied",3], behind which may be branches with the versions of their tables, and so on
APPLIED, MIRRORED, SKIPPED, NOTED = "applied", "mirrored", "skipped", "noted"


class ReleaseSource(Protocol):
    """What the source does with a queue that is released."""

    def note_release(
        self, app_id: str, queue: str, consumed: Mapping[str, int], *, by: str, interrupted: bool
    ) -> None: ...

    def release(self, app_id: str, queue: str) -> None: ...

    def resume(self, app_id: str, entries: Sequence[LedgerEntry]) -> None: ...


class Lag(NamedTuple):
    """About how many messages an app has not consumed, and when the oldest was written, in milliseconds since
    the epoch; None: there is none, or this user may not read it.
    """

    messages: int
    since_ms: int | None


class AppProgress:
    """What the sink takes from the journal of an app: claims, reads and acks, and which decided rows are
    applied, skipped and mirrored, as of the last :meth:`refresh`. ``releases``: changes the claims.

    A key is written with one value only, so facts commute, whoever writes them and in which order.
    """

    def __init__(self, client: Client, app_id: str, journal: Journal, releases: ReleaseSource) -> None:
        self._client = client
        self._app_id = app_id
        self._journal = journal
        self._releases = releases

    def refresh(self) -> None:
        """Replays the journal to its end of now, which ListOffsets says."""
        self._journal.catch_up()

    # -- claims and reads ------------------------------------------------------------------------------------
    def ranges_read(self, query_id: str, batch_id: int) -> dict[str, list[int]]:
        """Returns by log what this (query, batch) has read. Raises CheckpointMismatch where it is no claim of
        the app, DataLoss where a topic was deleted and made again since the claim.
        """
        ranges = self._journal.look(lambda claims: claims.ranges_read(query_id, batch_id))
        for queue in sorted({parse_log(log).topic for log in ranges}):
            self._require_same_topic(queue)
        return ranges

    def _require_same_topic(self, queue: str) -> None:
        position = self._journal.positions.get(queue)
        try:
            found = self._client.topic(queue).id
        except QueueNotFound:
            found = None
        if position is not None and found != UUID(position.topic_id):
            raise DataLoss(
                f"topic {queue} was deleted {'and made again ' if found else ''}since app {self._app_id!r} "
                "claimed it: what the batch has read is gone, and offsets count other messages now",
                f"run `txmq app release {self._app_id} {queue} --force`, and start with a new checkpoint and "
                "onNewCheckpoint=resume",
            )

    def settled(self, log: str, start: int | None, end: int) -> bool:
        """Returns whether the source has acknowledged everything between two offsets; None: the first one
        that it read.
        """
        position = self._journal.positions.get(parse_log(log).topic)
        return position is not None and int(position.acked.get(log, 0)) >= end

    def position(self) -> int:
        """Returns the position of the newest claim; 0: none."""
        return self._journal.look(lambda claims: claims.position(self._app_id))

    def queues(self) -> tuple[str, ...]:
        """Returns the queues that the app has claimed, in order."""
        return tuple(sorted(self._journal.positions))

    def logs(self, queue: str) -> list[str]:
        """Returns the logs of a queue that the app has claimed."""
        return list(self._journal.positions[queue].acked)

    def lag(self, consumed: Mapping[str, int]) -> Lag:
        """Returns what of its queues is not consumed; nothing of a topic that was deleted, or made again.
        ``consumed``: by log, as the ledger says.
        """
        read: dict[TopicPartition, int] = {}
        for queue, position in self._journal.positions.items():
            for log, acked in position.acked.items() if self._is(queue, position.topic_id) else ():
                read[parse_log(log)] = max(int(acked), consumed.get(log, 0))
        for note in self._journal.look(lambda claims: claims.releases.of(self._app_id)):
            left = note.interrupted and note.queue not in self._journal.positions
            if left and self._is(note.queue, note.queue_id):
                note_ends = {parse_log(log): int(at) for log, at in note.ends.items()}
                read |= {log: at for log, at in note_ends.items() if log.topic == note.queue}
        ends = self._client.offsets(dict.fromkeys(read, LATEST))
        since: list[int] = []
        with contextlib.suppress(AccessRefused, DataLoss):  # an operator may know less than an app
            since = committed_ms(self._client, read, ends)
        return Lag(sum(max(0, ends[log] - offset) for log, offset in read.items()), min(since, default=None))

    def _is(self, queue: str, topic_id: str) -> bool:
        """Whether the topic is the one that was claimed, or released."""
        with contextlib.suppress(QueueNotFound):
            return str(self._client.topic(queue, fresh=True).id) == topic_id
        return False

    def undecided(self, queue: str, consumed: Mapping[str, int]) -> int:
        """Returns how many offsets of a queue are claimed, and neither decided nor acknowledged."""
        position = self._journal.positions.get(queue)
        if position is None:
            return 0
        ends = self._journal.look(lambda claims: claims.ends(self._app_id, position.acked))
        done = {log: max(int(acked), consumed.get(log, 0)) for log, acked in position.acked.items()}
        return sum(max(0, ends[log] - at) for log, at in done.items() if log in ends)

    def note_release(self, queue: str, consumed: Mapping[str, int], *, by: str, interrupted: bool) -> None:
        """Records that a queue is released now, and where the app is in it."""
        self._releases.note_release(self._app_id, queue, consumed, by=by, interrupted=interrupted)

    def release(self, queue: str) -> None:
        """Drops the claims on a queue. Raises PreconditionFailed where the app has none."""
        self._releases.release(self._app_id, queue)

    def resume(self, entries: Sequence[LedgerEntry]) -> None:
        """Records that the app has consumed its logs up to the ends of entries of another ledger. Raises
        QueueNotFound, CheckpointMismatch.
        """
        self._releases.resume(self._app_id, entries)

    # -- decided rows ----------------------------------------------------------------------------------------
    def applied(self) -> Set[int]:
        """Returns sequences whose rows are applied."""
        return {int(sequence) for sequence, *_ in self._of(APPLIED)}

    def mirrored(self) -> int:
        """Returns the sequence up to which the Delta ledger has every entry."""
        return max((int(sequence) for sequence, *_ in self._of(MIRRORED)), default=0)

    def skipped(self) -> Mapping[int, Mapping[str, str]]:
        """Returns by sequence: branch -> where an operator has written its rows."""
        found: dict[int, dict[str, str]] = {}
        for sequence, branch, to in self._of(SKIPPED):
            found.setdefault(int(sequence), {})[branch] = to
        return found

    def versions(self) -> Mapping[int, Mapping[str, int]]:
        """Returns by sequence: branch -> version of the table that has its rows."""
        found: dict[int, dict[str, int]] = {}
        for sequence, *fields in self._of(APPLIED):
            pairs = zip(fields[::2], fields[1::2], strict=True)
            found.setdefault(int(sequence), {}).update((branch, int(version)) for branch, version in pairs)
        return found

    def mark_applied(self, sequence: int, versions: Mapping[str, int]) -> None:
        flat = (value for pair in sorted(versions.items()) for value in pair)
        self._note([_key(APPLIED, sequence, *flat)])

    def mark_mirrored(self, sequence: int) -> None:
        below = [_key(MIRRORED, older) for older, *_ in self._of(MIRRORED) if older < sequence]
        self._note([_key(MIRRORED, sequence)])
        self._journal.forget(below)

    def skip(self, sequence: int, branches: Collection[str], to: str) -> None:
        self._note([_key(SKIPPED, sequence, branch, to) for branch in sorted(branches)])

    def notes(self) -> Mapping[int, Sequence[tuple[str, str, int, str]]]:
        """Returns by sequence, oldest first: (branch, name, time, text), for the target of the branch."""
        found: dict[int, list[tuple[str, str, int, str]]] = {}
        for sequence, branch, name, at_us, text in sorted(self._of(NOTED), key=lambda key: int(key[3])):
            found.setdefault(int(sequence), []).append((branch, name, int(at_us), text))
        return found

    def note(self, sequence: int, branches: Mapping[str, int], name: str, text: str) -> None:
        """Replaces what these branches say under ``name``; their values are times."""
        before = [key for key in self._of(NOTED) if key[0] == sequence and key[1] in branches]
        self._note([_key(NOTED, sequence, branch, name, at, text) for branch, at in branches.items()])
        self._journal.forget([_key(NOTED, *key) for key in before if key[2] == name])

    def forget(self, sequences: Collection[int]) -> None:
        """Drops what is known of entries that the ledger no longer has. Need not be done at once."""
        gone = set(sequences)
        self._journal.forget(
            [
                _key(kind, *found)
                for kind in (APPLIED, SKIPPED, NOTED)
                for found in self._of(kind)
                if int(found[0]) in gone
            ]
        )

    def _note(self, keys: Sequence[str]) -> None:
        self._journal.note(dict.fromkeys(keys, True))
        self._journal.catch_up()

    def _of(self, kind: str) -> list[list[Any]]:
        """Returns what the keys of a kind say behind it."""
        prefix = f'["{kind}",'
        return [parse(key)[1:] for key in self._journal.facts if key.startswith(prefix)]


def _key(kind: str, *values: int | str) -> str:
    return canonical([kind, *values])
