"""Origins: where the symbolic start of each set of queues of an app is, resolved once (S1, S2). Pure.

Not here: which range follows it (``next_range.py``).
Invariant: the origin of a set of queues changes only when a new checkpoint resumes, to a higher lineage.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from broker_core.core.address import VHOST
from broker_core.core.errors import CheckpointMismatch, NotAllowed
from broker_core.core.records import ClaimRecord, OriginRecord, canonical, parse
from broker_core.core.undo import Undo
from broker_core.engine import OnNewCheckpoint, Origin
from broker_core.micro_batch.claims.logs import Logs
from broker_core.micro_batch.positions import brief
from broker_core.micro_batch.sink import RecordSink


class Origins:
    def __init__(self, undo: Undo, vhost: str = VHOST) -> None:
        self._undo = undo
        self._vhost = vhost
        self._of: dict[str, dict[str, OriginRecord]] = {}  # app -> queues -> origin

    # -- replay ----------------------------------------------------------------------------------------------
    def apply(self, record: OriginRecord) -> None:
        """Takes in a durable record, in place of the one of its key."""
        if record.app_id not in self._of:
            self._undo.item(self._of, record.app_id)
        origins = self._of.setdefault(record.app_id, {})
        self._undo.item(origins, record.queues)
        origins[record.queues] = record

    def remove(self, record: OriginRecord) -> None:
        """Takes back a record that is durably gone; one that is not known changes nothing."""
        origins = self._of.get(record.app_id, {})
        if origins.get(record.queues) == record:
            self._undo.order(origins)
            del origins[record.queues]
            if not origins:
                self._undo.item(self._of, record.app_id)
                del self._of[record.app_id]

    # -- looking ---------------------------------------------------------------------------------------------
    def records(self) -> list[OriginRecord]:
        return [record for origins in self._of.values() for record in origins.values()]

    def apps(self) -> set[str]:
        return {app for app, origins in self._of.items() if origins}

    def knows(self, app_id: str) -> bool:
        return bool(self._of.get(app_id))

    def size(self) -> int:
        """Returns how many there are. For any thread."""
        return sum(map(len, list(self._of.values())))

    def require_room(self, entry: OriginRecord, most: int) -> None:
        """Raises NotAllowed: the app has as many, of other queues."""
        entries = self._of.get(entry.app_id, {})
        if (
            len(entries) >= most
            and entry.queues not in entries
            and not self._sharing(entry.app_id, parse(entry.queues))
        ):
            raise too_many(entry.app_id, most)

    def lineage(self, app_id: str, queues: Iterable[str]) -> int:
        """Returns the newest lineage of a source of these queues."""
        return max((entry.lineage for entry in self._sharing(app_id, queues)), default=1)

    def starts_at(self, app_id: str, vector: Mapping[str, int]) -> bool:
        """Returns whether the app went on there after a release or another ledger, and claimed nothing."""
        starts = {
            log: at
            for entry in list(self._of.get(app_id, {}).values())
            if entry.passed
            for log, at in entry.start.items()
        }
        return bool(vector) and vector.items() <= starts.items()

    def _sharing(self, app_id: str, queues: Iterable[str]) -> list[OriginRecord]:
        """Returns the origins of sets of queues that share a queue with ``queues``."""
        own = set(queues)
        return [
            entry
            for entry in list(self._of.get(app_id, {}).values())
            if own.intersection(parse(entry.queues))
        ]

    def meaning(
        self,
        logs: Logs,
        app_id: str,
        queues: list[str],
        origin: Origin,
        on_new_checkpoint: OnNewCheckpoint,
        consumed: Mapping[str, int],
        names: Mapping[str, Sequence[str]],
        last_query: str,
        left: Mapping[str, int],
    ) -> OriginRecord:
        """Returns the meaning of the symbolic start of ``queues``: the recorded origin, or a new one, which
        is not recorded yet. ``names``: all queues of the reader, and their logs; ``left``: where the app was
        in those that were released from it, which holds until it has claimed again.

        Raises CheckpointMismatch if it is a new checkpoint, which may not resume; OptionError.
        """
        key = canonical(queues)
        found = self._of.get(app_id, {}).get(key)
        sharing = self._sharing(app_id, queues)  # others: earlier, the stream had other queues
        if not sharing and not (left and on_new_checkpoint == "resume"):
            origin.check(names)
            start = dict(logs.offsets(queues, origin))
            return OriginRecord(app_id, key, 1, start, passed=False, vhost=self._vhost)
        own = {log: consumed[log] for queue in queues for log in names[queue] if log in consumed}
        decided = found is not None and any(
            offset > int(found.start.get(log, 0)) for log, offset in own.items()
        )
        if found is not None and sharing == [found] and not found.passed and not decided:
            return found
        # a start that was passed is asked for again: another checkpoint
        if on_new_checkpoint != "resume":
            raise _new_checkpoint(app_id, queues, own, last_query)
        resumed: dict[str, int] = {}
        fresh: list[str] = []  # queues that the app reads for the first time
        for queue in queues:
            # acked offsets may be behind the ledger: resuming there would publish twice
            ends = {
                log: own[log] if log in own else left.get(log) if not sharing else logs.goes_on(log, app_id)
                for log in names[queue]
            }
            if all(offset is None for offset in ends.values()):
                fresh.append(queue)
            else:
                resumed |= {
                    log: logs.first(log) if offset is None else offset for log, offset in ends.items()
                }
        if fresh:
            origin.check(names)
            resumed |= logs.offsets(fresh, origin)
        lineage = 1 + max((entry.lineage for entry in sharing), default=0)
        return OriginRecord(app_id, key, lineage, dict(resumed), passed=False, vhost=self._vhost)

    # -- changing --------------------------------------------------------------------------------------------
    def keep(self, sink: RecordSink, entry: OriginRecord) -> None:
        """Records a new meaning, in place of those of other sets of queues that share one with it."""
        if self._of.get(entry.app_id, {}).get(entry.queues) == entry:
            return
        for other in self._sharing(entry.app_id, parse(entry.queues)):
            if other.queues != entry.queues:
                self._drop(sink, other)
        self._put(sink, entry)

    def pass_by(
        self, sink: RecordSink, app_id: str, vector: Mapping[str, int], finished: ClaimRecord | None
    ) -> None:
        """Records which symbolic starts lie behind ``vector``, a start where ``finished`` ends: then no
        checkpoint of the app asks for them again.
        """
        logs = {log for entry in list(self._of.get(app_id, {}).values()) for log in entry.start}
        for entry in list(self._of.get(app_id, {}).values()):
            if not entry.passed and (
                any(vector.get(log, 0) > int(first) for log, first in entry.start.items())
                or (finished is not None and _read_added(finished, entry, logs))
            ):
                self._put(sink, replace(entry, passed=True))

    def release(self, sink: RecordSink, app_id: str, queue: str) -> None:
        """Forgets the starts of a queue that is released."""
        for entry in self._sharing(app_id, [queue]):
            self._drop(sink, entry)

    def _put(self, sink: RecordSink, entry: OriginRecord) -> None:
        self.apply(entry)
        sink.put(entry)

    def _drop(self, sink: RecordSink, entry: OriginRecord) -> None:
        self.remove(entry)
        sink.drop(OriginRecord, entry.key)


def too_many(app_id: str, most: int) -> NotAllowed:
    return NotAllowed(
        f"app {app_id!r} has read {most} sets of queues, which is the limit",
        "give the query an app id of its own",
    )


def _read_added(claim: ClaimRecord, entry: OriginRecord, logs: set[str]) -> bool:
    """Returns whether a claim of this origin has messages of a log that was added since it was resolved."""
    return (
        claim.lineage == entry.lineage
        and bool(claim.ranges.keys() & entry.start.keys())
        and any(first < last for log, (first, last) in claim.ranges.items() if log not in logs)
    )


def _new_checkpoint(
    app_id: str, queues: list[str], consumed: Mapping[str, int], last_query: str
) -> CheckpointMismatch:
    where = brief(consumed) if consumed else "what its source acknowledged"
    return CheckpointMismatch(
        f"a new checkpoint starts under appId {app_id!r}, but this app has already read {', '.join(queues)} "
        f"(query {last_query or 'unknown'}, consumed up to {where}). Continue with the old checkpoint, or "
        "set onNewCheckpoint=resume to continue where the app's last committed batch ended; another query "
        "needs an appId and queues of its own"
    )
