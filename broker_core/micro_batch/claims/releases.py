"""Releases: which queues an operator took from an app, when, by whom, and where the app was then (S6). Pure.

Not here: what a release drops (``claim.py``, ``reads.py``, ``ledger.py``).
Invariant: an app goes on only behind what it had consumed, and only in the queue that it was released from.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

from broker_core.core.address import VHOST
from broker_core.core.errors import PreconditionFailed
from broker_core.core.records import ReleaseNoteRecord
from broker_core.core.undo import Undo
from broker_core.micro_batch.claims.logs import Logs
from broker_core.micro_batch.positions import brief
from broker_core.micro_batch.sink import RecordSink


@dataclass(frozen=True, slots=True)
class Release:
    """What an operator does. ``interrupted``: the app has not finished."""

    app_id: str
    queue: str
    by: str
    at_us: int
    interrupted: bool


class Releases:
    def __init__(self, undo: Undo, vhost: str = VHOST) -> None:
        self._undo = undo
        self._vhost = vhost
        self._notes: dict[str, dict[str, ReleaseNoteRecord]] = {}  # app -> queue -> its last release

    # -- replay ----------------------------------------------------------------------------------------------
    def apply(self, note: ReleaseNoteRecord) -> None:
        """Takes in a durable record, in place of the one of its key."""
        self._undo.item(self._notes, note.app_id)
        self._notes[note.app_id] = {**self._notes.get(note.app_id, {}), note.queue: note}

    def remove(self, note: ReleaseNoteRecord) -> None:
        """Takes back a record that is durably gone; one that is not known changes nothing."""
        notes = self._notes.get(note.app_id, {})
        if notes.get(note.queue) == note:
            self._undo.item(self._notes, note.app_id)
            others = {queue: other for queue, other in notes.items() if queue != note.queue}
            if others:
                self._notes[note.app_id] = others
            else:
                del self._notes[note.app_id]

    # -- looking ---------------------------------------------------------------------------------------------
    def records(self) -> list[ReleaseNoteRecord]:
        return [note for notes in self._notes.values() for note in notes.values()]

    def of(self, app_id: str) -> list[ReleaseNoteRecord]:
        """Returns the releases of an app, oldest first."""
        return sorted(self._notes.get(app_id, {}).values(), key=lambda note: note.released_at)

    def release_text(self, app_id: str, logs: Collection[str], *, followed: bool = False) -> str:
        """Returns what happened to these logs of an app, and the way on; "" if they were not released.
        ``followed``: the app has gone on since then.
        """
        notes = [note for note in self.of(app_id) if note.ends.keys() & set(logs)]
        if not notes:
            return ""
        note = notes[-1]
        at = datetime.fromtimestamp(note.released_at / 1e6, timezone.utc).isoformat(timespec="seconds")
        return (
            f"queue {note.queue!r} was released from app {app_id!r} by {note.released_by or 'an operator'} "
            f"at {at}, and with it what the app had claimed. "
            + (
                "The app has gone on since then: use the checkpoint that is in use"
                if followed
                else "Start once more with a new checkpoint and onNewCheckpoint=resume: it continues at "
                f"{brief(_ends(notes))}, after what is decided, or at the start of a queue declared anew"
            )
        )

    def left_at(self, logs: Logs, app_id: str, names: Mapping[str, Sequence[str]]) -> dict[str, int]:
        """Returns where the app goes on in each log of these queues that was released from it."""
        notes = self.of(app_id)
        others = {
            note.queue for note in notes if note.queue in names and logs.id_of(note.queue) != note.queue_id
        }
        own_logs = {log for queue, found in names.items() if queue not in others for log in found}
        return {log: at for log, at in _ends(notes).items() if log in own_logs}

    # -- changing --------------------------------------------------------------------------------------------
    def note(
        self,
        logs: Logs,
        sink: RecordSink,
        done: Release,
        names: Collection[str],
        consumed: Mapping[str, int],
        position: int,
    ) -> None:
        """Records a release, before it drops anything. ``names``: the logs of what it drops; ``consumed``:
        where the last decided range of each log ended; ``position``: of the app's newest claim.

        A release that was cut off is done again: the ledger has forgotten its ends by then.
        """
        before = self._notes.get(done.app_id, {}).get(done.queue)
        again = before.ends if before is not None and before.position == position else {}
        ends: dict[str, int] = {}
        for log in sorted(names):
            at = consumed.get(log, again.get(log, logs.goes_on(log, done.app_id)))
            if at is not None:
                ends[log] = int(at)
        note = ReleaseNoteRecord(
            app_id=done.app_id,
            queue=done.queue,
            vhost=self._vhost,
            queue_id=logs.id_of(done.queue),
            released_at=done.at_us,
            released_by=done.by,
            interrupted=done.interrupted,
            position=position,
            ends=dict(ends),
        )
        self.apply(note)
        sink.put(note)


def require_idle(
    app_id: str, queue: str, claimed: int, unapplied: Sequence[int], *, force: bool, what: str = "messages"
) -> bool:
    """Returns whether a release interrupts the app. Raises PreconditionFailed if it does, and is not forced.
    ``claimed``: how many ``what`` are claimed and not decided; ``unapplied``: sequences of decided batches.
    """
    left = [f"{claimed} {what} are claimed and not decided"] if claimed else []
    if unapplied:
        first = ", ".join(map(str, unapplied[:5])) + (", ..." if len(unapplied) > 5 else "")
        left.append(f"{len(unapplied)} decided batches are not applied (SEQUENCE {first})")
    if left and not force:
        raise PreconditionFailed(
            f"queue {queue!r} is not released from app {app_id!r}: {' and '.join(left)}",
            "start its query once more with trigger(availableNow=True), which ends when they are finished, "
            "and release then (a stream into another system may leave its last batch so until its next one); "
            "or `txmq app skip` what a table refuses. With --force, as for a queue that it reads no more, "
            "the claimed messages are for whoever reads next, what is decided waits for the app, which goes "
            "on with a new checkpoint and onNewCheckpoint=resume: the old one does not fit any more",
        )
    return bool(left)


def _ends(notes: Sequence[ReleaseNoteRecord]) -> dict[str, int]:
    """Returns the ends of releases, oldest first; a later one holds."""
    return {log: int(at) for note in notes for log, at in note.ends.items()}
