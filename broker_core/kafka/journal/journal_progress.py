"""The facts of the sink in the journal of an app: which decided rows are applied, skipped and mirrored; and
what the sink asks of claims and reads.

Not here: the journal itself, and how claims are dropped (both given).
Invariant: a key is written with one value only, so facts commute, whoever writes them and in which order.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any, Protocol
from uuid import UUID

from broker_core.broker.state.records import ReleaseNoteRecord
from broker_core.engine import LedgerEntry
from broker_core.errors import AccessRefused, DataLoss, QueueNotFound
from broker_core.kafka.cluster.client import Client
from broker_core.kafka.journal.app_progress import Lag
from broker_core.kafka.journal.journal import Journal
from broker_core.kafka.names import parse_log
from broker_core.kafka.protocol.port import LATEST, TopicPartition
from broker_core.kafka.topics.row_times import committed_ms

# ["applied",3], behind which may be branches with the versions of their tables, and so on
APPLIED, MIRRORED, SKIPPED, NOTED = "applied", "mirrored", "skipped", "noted"


class ReleaseSource(Protocol):
    """What the source does with a queue that is released."""

    def note_release(
        self, app_id: str, queue: str, consumed: Mapping[str, int], *, by: str, interrupted: bool
    ) -> None: ...

    def release(self, app_id: str, queue: str) -> None: ...

    def resume(self, app_id: str, entries: Sequence[LedgerEntry]) -> None: ...


class JournalProgress:
    """``Facts`` of one app. ``releases``: changes the claims."""

    def __init__(self, client: Client, app_id: str, journal: Journal, releases: ReleaseSource) -> None:
        self._client = client
        self._app_id = app_id
        self._journal = journal
        self._releases = releases

    def refresh(self) -> None:
        self._journal.catch_up()

    # -- claims and reads ------------------------------------------------------------------------------------
    def ranges_read(self, query_id: str, batch_id: int) -> dict[str, list[int]]:
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
                f"run `txmq release {self._app_id} {queue} --force`, and start with a new checkpoint and "
                "onNewCheckpoint=resume",
            )

    def settled(self, log: str, start: int, end: int) -> bool:
        position = self._journal.positions.get(parse_log(log).topic)
        return position is not None and int(position.acked.get(log, 0)) >= end

    def position(self) -> int:
        return self._journal.look(lambda claims: claims.position(self._app_id))

    def queues(self) -> tuple[str, ...]:
        return tuple(sorted(self._journal.positions))

    def lag(self, consumed: Mapping[str, int]) -> Lag:
        read: dict[TopicPartition, int] = {}
        for position in self._journal.positions.values():
            for log, acked in position.acked.items():
                read[parse_log(log)] = max(int(acked), consumed.get(log, 0))
        for note in self._journal.look(lambda claims: claims.releases.of(self._app_id)):
            if note.interrupted and note.queue not in self._journal.positions and self._is(note):
                named = {parse_log(log): int(at) for log, at in note.ends.items()}
                read |= {log: at for log, at in named.items() if log.topic == note.queue}
        ends = self._client.offsets(dict.fromkeys(read, LATEST))
        since: list[int] = []
        with contextlib.suppress(AccessRefused, DataLoss):  # an operator may know less than an app
            since = committed_ms(self._client, read, ends)
        return Lag(sum(max(0, ends[log] - offset) for log, offset in read.items()), min(since, default=None))

    def _is(self, note: ReleaseNoteRecord) -> bool:
        """Whether the topic is the one that was released."""
        with contextlib.suppress(QueueNotFound):
            return str(self._client.topic(note.queue).id) == note.queue_id
        return False

    def undecided(self, queue: str, consumed: Mapping[str, int]) -> int:
        position = self._journal.positions.get(queue)
        if position is None:
            return 0
        ends = self._journal.look(lambda claims: claims.ends(self._app_id, position.acked))
        done = {log: max(int(acked), consumed.get(log, 0)) for log, acked in position.acked.items()}
        return sum(max(0, ends[log] - at) for log, at in done.items() if log in ends)

    def note_release(self, queue: str, consumed: Mapping[str, int], *, by: str, interrupted: bool) -> None:
        self._releases.note_release(self._app_id, queue, consumed, by=by, interrupted=interrupted)

    def release(self, queue: str) -> None:
        self._releases.release(self._app_id, queue)

    def resume(self, entries: Sequence[LedgerEntry]) -> None:
        self._releases.resume(self._app_id, entries)

    # -- decided rows ----------------------------------------------------------------------------------------
    def applied(self) -> Set[int]:
        return {int(sequence) for sequence, *_ in self._of(APPLIED)}

    def mirrored(self) -> int:
        return max((int(sequence) for sequence, *_ in self._of(MIRRORED)), default=0)

    def skipped(self) -> Mapping[int, Mapping[str, str]]:
        found: dict[int, dict[str, str]] = {}
        for sequence, branch, to in self._of(SKIPPED):
            found.setdefault(int(sequence), {})[branch] = to
        return found

    def versions(self) -> Mapping[int, Mapping[str, int]]:
        found: dict[int, dict[str, int]] = {}
        for sequence, *named in self._of(APPLIED):
            pairs = zip(named[::2], named[1::2], strict=True)
            found.setdefault(int(sequence), {}).update((branch, int(version)) for branch, version in pairs)
        return found

    def mark_applied(self, sequence: int, versions: Mapping[str, int]) -> None:
        named = (value for pair in sorted(versions.items()) for value in pair)
        self._note([_key(APPLIED, sequence, *named)])

    def mark_mirrored(self, sequence: int) -> None:
        below = [_key(MIRRORED, known) for known, *_ in self._of(MIRRORED) if known < sequence]
        self._note([_key(MIRRORED, sequence)])
        self._journal.forget(below)

    def skip(self, sequence: int, branches: Collection[str], to: str) -> None:
        self._note([_key(SKIPPED, sequence, branch, to) for branch in sorted(branches)])

    def notes(self) -> Mapping[int, Sequence[tuple[str, str, int, str]]]:
        found: dict[int, list[tuple[str, str, int, str]]] = {}
        for sequence, branch, name, at_us, text in sorted(self._of(NOTED), key=lambda key: int(key[3])):
            found.setdefault(int(sequence), []).append((branch, name, int(at_us), text))
        return found

    def note(self, sequence: int, branches: Mapping[str, int], name: str, text: str) -> None:
        before = [key for key in self._of(NOTED) if key[0] == sequence and key[1] in branches]
        self._note([_key(NOTED, sequence, branch, name, at, text) for branch, at in branches.items()])
        self._journal.forget([_key(NOTED, *key) for key in before if key[2] == name])

    def forget(self, sequences: Collection[int]) -> None:
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
        return [json.loads(key)[1:] for key in self._journal.facts if key.startswith(prefix)]


def _key(kind: str, *values: int | str) -> str:
    return json.dumps([kind, *values], separators=(",", ":"))
