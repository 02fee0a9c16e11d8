"""The sink of the Kafka engine: the port's methods from ``open_batch`` on (C1 to C6).

Not here: the source (``source/source.py``), which writes the journal; the steps of a decision
(``decide.py``).
Invariant: one lock for each app, because an epoch belongs to a process: threads that decide for one app wait
for each other.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

import pyarrow as pa

from broker_core.core import errors
from broker_core.core.records import LedgerRecord
from broker_core.engine import (
    AppInfo,
    BranchHeader,
    Committed,
    LedgerEntry,
    OnNewCheckpoint,
    Opened,
    StagedBatch,
    StagedBranch,
)
from broker_core.kafka import names
from broker_core.kafka.cluster.client import Client
from broker_core.kafka.journal.journal import AppProgress
from broker_core.kafka.record.record_batch import Codec
from broker_core.kafka.sink import attempts, batch_writes, staged_branches
from broker_core.kafka.sink.decide import Decider, OnUnroutable
from broker_core.kafka.sink.decisions import Decisions
from broker_core.kafka.sink.resume import resume
from broker_core.kafka.sink.staged_branches import EVERY_BYTES, Cleaner
from broker_core.kafka.sink.staging import KafkaStaging
from broker_core.kafka.topics import topics
from broker_core.kafka.topics.entry import now_ms
from broker_core.kafka.topics.routing import ClusterTopology
from broker_core.micro_batch.claims.releases import require_idle
from broker_core.micro_batch.ledger import Ledger, MicroBatch, public
from broker_core.micro_batch.resume import newest_of_each_log
from broker_core.micro_batch.unapplied import note, skip

logger = logging.getLogger(__name__)


class _App:
    """The state of one app in this process."""

    def __init__(self, client: Client, app_id: str, progress: AppProgress, clean_every_bytes: int) -> None:
        self.app_id = app_id
        self.lock = threading.Lock()
        self.progress = progress
        self.decisions = Decisions(client, app_id)
        self.cleaner = Cleaner(client, names.stage_topic(app_id), clean_every_bytes)
        self.decider = Decider(client, self.decisions, progress, cleaner=self.cleaner)

    @property
    def ledger(self) -> Ledger:
        return self.decisions.ledger

    def refreshed(self) -> Ledger:
        """Returns the ledger as it is now, without waiting for an open transaction."""
        self.decisions.replay()
        self.progress.refresh()
        self.decisions.learn(self.progress)
        return self.ledger

    def note(self, sequence: int, branches: Sequence[str], name: str, text: str) -> None:
        ledger, at_us = self.refreshed(), time.time_ns() // 1000
        fresh, _ = self.decisions.trial(
            lambda changes: note(ledger, changes, self.app_id, sequence, set(branches), name, at_us, text)
        )
        if fresh:
            self.progress.note(sequence, fresh, name, text)
            self.decisions.learn(self.progress)

    def skip(self, sequence: int, branches: Sequence[str], to: str) -> None:
        ledger = self.refreshed()
        fresh, _ = self.decisions.trial(
            lambda changes: skip(ledger, changes, self.app_id, sequence, set(branches), to)
        )
        if fresh:
            self.progress.skip(sequence, fresh, to)
            self.decisions.learn(self.progress)

    def release(self, queue: str, *, force: bool, by: str) -> None:
        progress, unapplied = (
            self.progress,
            [record.sequence for record in self.refreshed().unapplied(self.app_id)],
        )
        claimed = progress.undecided(queue, self.decisions.consumed())
        interrupted = queue in progress.queues() and require_idle(
            self.app_id, queue, claimed, unapplied, force=force, what="offsets"
        )
        self.decider.release(
            queue, lambda consumed: progress.note_release(queue, consumed, by=by, interrupted=interrupted)
        )


class KafkaSink:
    def __init__(
        self,
        client: Client,
        progress: Callable[[str], AppProgress],
        *,
        codec: Codec = Codec.NONE,
        clean_every_bytes: int = EVERY_BYTES,
    ) -> None:
        """``progress`` of an app, by its id."""
        self._client = client
        self._progress = progress
        self._clean_every_bytes = clean_every_bytes
        self._lock = threading.Lock()
        self._apps: dict[str, _App] = {}
        self.topology = ClusterTopology(client)
        self._staging = KafkaStaging(client, self.topology, codec)

    def _app(self, app_id: str) -> _App:
        """Returns the app, its topics made where there are none."""
        app = self._apps.get(app_id)
        if app is None:
            topics.ensure(self._client, topics.app(app_id))
            with self._lock:
                app = self._apps.get(app_id)
                if app is None:
                    app = _App(self._client, app_id, self._progress(app_id), self._clean_every_bytes)
                    self._apps[app_id] = app
        return app

    def _found(self, app_id: str) -> _App | None:
        """Returns the app; None if there is none. For queries, which create nothing."""
        there = app_id in self._apps or self._client.find_topic(topics.app(app_id).name) is not None
        return self._app(app_id) if there else None

    def identity(self, app_id: str) -> str:
        """Returns the ids of the cluster, and of the topic of the app's ledger: another one if made again."""
        topic = self._client.topic(self._app(app_id).decisions.log.topic)
        return f"{self._client.cluster_id()}/{topic.id.hex}"

    def decided(self, app_id: str) -> Ledger:
        """Returns what the app has decided, for its source: a copy, which nobody changes.

        An open transaction is of a driver that is deciding or was killed: a fence settles it at once, and a
        live driver decides again.
        """
        app = self._found(app_id)
        if app is None:
            return Ledger()
        with app.lock:
            app.decisions.replay()
            if app.decisions.has_open():
                app.decider.fence()
            return Ledger(app.ledger.records())

    # -- C1, C2, C4 ------------------------------------------------------------------------------------------
    def open_batch(
        self,
        app_id: str,
        query_id: str,
        batch_id: int,
        on_new_checkpoint: OnNewCheckpoint,
        *,
        token: str = "",
        offset_log: str = "",
    ) -> Opened:
        app = self._app(app_id)
        self._staging.ensure(app_id)
        with app.lock:
            app.cleaner.require_right()
            batch, token = MicroBatch(app_id, query_id, batch_id), token or uuid.uuid4().hex
            opened = app.decider.open(batch, on_new_checkpoint, token, offset_log)
        return replace(opened, identity=self.identity(app_id))

    def stage(self, header: BranchHeader, rows: Iterable[pa.RecordBatch]) -> StagedBranch:
        return self._staging.stage(header, rows)

    def commit_batch(
        self,
        app_id: str,
        query_id: str,
        batch_id: int,
        token: str,
        branches: Sequence[StagedBranch],
        *,
        on_unroutable: OnUnroutable = "fail",
        opens: OnNewCheckpoint | None = None,
        offset_log: str = "",
    ) -> Committed:
        batch = MicroBatch(app_id, query_id, batch_id)
        if opens is not None:
            self.open_batch(*batch, opens, token=token, offset_log=offset_log)
        with (app := self._app(app_id)).lock:
            return app.decider.commit(
                batch, token, branches, on_unroutable=on_unroutable, offset_log=offset_log
            )

    def commit_branches(
        self, token: str, branches: Sequence[StagedBranch], *, on_unroutable: OnUnroutable = "fail"
    ) -> int:
        return batch_writes.commit(self._client, token, branches, on_unroutable=on_unroutable)

    def rollback_batch(self, token: str, *, of: str | None = None) -> None:
        """Staged rows have no effect unless they are named, so nothing is dropped."""
        if batch_writes.is_committed(self._client, token):
            raise errors.BatchDecided(
                f"batch write {token} is committed and cannot be rolled back: only the reply to the commit "
                "was lost"
            )
        # a token does not name its app; the ones that this process works for come first
        mine = tuple(self._apps)
        for app_id in dict.fromkeys((*mine, *self.app_ids())):
            try:
                app = self._app(app_id)
                with app.lock:
                    app.decisions.replay()
                    entry = app.ledger.by_token(token)
            except errors.AccessRefused:
                if app_id in mine:
                    raise
                continue  # an app of others, which this user may see but not read
            if entry is not None:
                raise errors.BatchDecided(
                    f"batch {entry.batch_id} of app {entry.app_id!r} is committed and cannot be rolled back: "
                    "only the reply to the commit was lost"
                )

    # -- C5, C6 ----------------------------------------------------------------------------------------------
    def unapplied(self, app_id: str) -> list[LedgerEntry]:
        return [public(each) for each in self._records(app_id, lambda ledger: ledger.unapplied(app_id))]

    def read_branches(self, branches: Sequence[str]) -> Iterator[pa.RecordBatch]:
        return staged_branches.decided_rows(self._client, branches)

    def mark_applied(self, app_id: str, sequence: int, versions: Mapping[str, int] | None = None) -> None:
        app = self._app(app_id)
        with app.lock:
            waiting = {record.sequence: record for record in app.refreshed().unapplied(app_id)}
            if sequence in waiting:
                app.progress.mark_applied(sequence, versions or {})
                app.decisions.learn(app.progress)
                app.cleaner.applied(waiting[sequence], app.ledger.unapplied(app_id))

    def skip(self, app_id: str, sequence: int, branches: Sequence[str], to: str) -> None:
        with (app := self._app(app_id)).lock:
            app.skip(sequence, branches, to)

    def note(self, app_id: str, sequence: int, branches: Sequence[str], name: str, text: str) -> None:
        with (app := self._app(app_id)).lock:
            app.note(sequence, branches, name, text)

    def publish_refused(
        self,
        app_id: str,
        sequence: int,
        branches: Sequence[str],
        rows: str,
        token: str,
        staged: Sequence[StagedBranch],
    ) -> str:
        with (app := self._app(app_id)).lock:
            return app.decider.publish_refused(sequence, branches, rows, token, staged)

    def entries(self, app_id: str) -> list[LedgerEntry]:
        return [public(each) for each in self.entry_records(app_id)]

    def entry_records(self, app_id: str) -> list[LedgerRecord]:
        """Returns the records of ``entries``. Raises AccessRefused."""
        return self._records(app_id, lambda ledger: ledger.entries(app_id))

    def _records(self, app_id: str, choose: Callable[[Ledger], Iterable[LedgerRecord]]) -> list[LedgerRecord]:
        app = self._found(app_id)
        if app is None:
            return []
        with app.lock:
            return list(choose(app.refreshed()))

    def unmirrored(self, app_id: str, limit: int = 1000) -> list[LedgerEntry]:
        return [public(each) for each in self._records(app_id, lambda each: each.unmirrored(app_id, limit))]

    def mark_mirrored(self, app_id: str, sequence: int) -> None:
        app = self._app(app_id)
        with app.lock:
            waiting = app.refreshed().unmirrored(app_id, 1)
            if waiting and waiting[0].sequence <= sequence:
                app.progress.mark_mirrored(sequence)
                app.decisions.learn(app.progress)

    def last_entry(self, app_id: str) -> LedgerEntry | None:
        last = self._records(app_id, lambda ledger: filter(None, [ledger.last(app_id)]))
        return public(last[0]) if last else None

    def resume(self, app_id: str, entries: Sequence[LedgerEntry]) -> bool:
        newest = newest_of_each_log(app_id, entries)
        app = self._app(app_id)
        with app.lock:
            return resume(app.decider.fenced, app.decisions, app.progress, newest)

    # -- operators -------------------------------------------------------------------------------------------
    def app(self, app_id: str) -> AppInfo | None:
        """Returns what an app has claimed and decided; None if it has done neither."""
        app = self._found(app_id)
        if app is None:
            return None
        with app.lock:
            ledger, progress = app.refreshed(), app.progress
            last = ledger.last(app_id)
            if last is None and not progress.queues():
                return None
            unapplied, unmirrored = ledger.waiting(app_id)
            lag = progress.lag(app.decisions.consumed())
            return AppInfo(
                app_id=app_id,
                queues=progress.queues(),
                sequence=last.sequence if last else 0,
                query_id=last.query_id if last else "",
                batch_id=last.batch_id if last else -1,
                lag=lag.messages,
                unapplied=unapplied,
                unmirrored=unmirrored,
                lag_s=None if lag.since_ms is None else max(0, now_ms() - lag.since_ms) / 1e3,
            )

    def apps(self) -> list[AppInfo]:
        return [info for app_id in self.app_ids() if (info := _whole(self.app, app_id)) is not None]

    def staged_batches(self) -> list[StagedBatch]:
        decided: dict[str, Callable[[str], object]] = {}  # what is staged in a topic, by its token
        for app_id in self.app_ids():
            with (app := self._app(app_id)).lock:
                decided[names.stage_topic(app_id)] = app.refreshed().by_token
        decided[names.STAGE] = partial(batch_writes.is_committed, self._client)
        there = self._client.topics()
        found = [attempts.staged_batches(self._client, *each) for each in decided.items() if each[0] in there]
        return sorted(chain.from_iterable(found), key=lambda attempt: -attempt.idle_s)

    def release(self, app_id: str, queue: str, *, force: bool, by: str) -> None:
        app = self._found(app_id)
        if app is None:
            raise errors.PreconditionFailed(
                f"queue {queue!r} is not claimed by any app {app_id!r}; `txmq app list` lists the claims"
            )
        with app.lock:
            app.release(queue, force=force, by=by)

    def app_ids(self) -> list[str]:
        """Returns the apps of the cluster, as far as the user may see their topics."""
        found = (names.app_of(topic) for topic in self._client.topics())
        return sorted(app_id for app_id in found if app_id is not None)


def _whole(app: Callable[[str], AppInfo | None], app_id: str) -> AppInfo | None:
    """What is told of an app; None, and a warning, if its topic has lost records: it hides no other."""
    try:
        return app(app_id)
    except errors.DataLoss as lost:
        logger.warning("%s", lost)
        return None
