"""The world of the model: one engine, one query with its checkpoint and its driver processes, producers,
tables; and what must hold.

Not here: the choice of what happens next (test_machine.py chooses, test_rules_switched_off.py says it step by
step).

Reference model. A message that was produced has its effect in the output queue and in every table exactly
once, and all effects of a micro-batch come from ONE execution of it. Decided batches have numbers without a
gap, and their ranges follow each other without a gap. Nothing is visible that no decided batch published;
nothing is deleted that Spark has not committed; no table is ahead of the ledger. The query ends with an error
that a restart does not cure only where a checkpoint was lost or an older one restored.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

import pyarrow as pa
import pytest

from broker_core.arrow import parts
from broker_core.core import failpoint
from broker_core.core.errors import ResourceLocked, TxmqError
from broker_core.core.records import AttemptRecord, OriginRecord, PartRecord
from broker_core.engine import LedgerEntry
from broker_core.micro_batch.claims import claim
from broker_core.node.engine import EmbeddedEngine
from broker_core.node.local import LocalBroker
from broker_core.store.memory import MemoryStore
from connector.batch import batch_reads, batch_transaction
from connector.delta.format import Delta as DeltaFormat
from connector.ledger import resume
from connector.ledger.delta_ledger import LEDGER_COLUMNS, DeltaLedger
from connector.ledger.resume import TAKEN
from connector.tables.commit_id import STEP
from connector.tables.table import Table, is_connect
from connector.tables.table_format import CheckResult, Later
from tests.model.actors import Actor, current, point
from tests.model.driver import ROW, URL, Driver
from tests.model.fake_spark import (
    Checkpoint,
    ConcurrentQuery,
    Delta,
    Frame,
    Session,
    install_task_context,
    isolated,
)
from tests.model.wire import Wire

TABLES = ("lake/a", "lake/b")
CHANGED = "lake/changed"  # by several operations in a batch
FINISH_STEPS = 3_000
RESTARTS = 4  # so often a clean restart may stumble over what dead drivers left, before it counts as stuck

_current: list[World] = []


class Violation(AssertionError):
    """The real thing does what the reference model forbids."""


def require(holds: object, promise: str) -> None:
    if not holds:
        raise Violation(promise)


class Copy(NamedTuple):
    """Of a data directory, with what producers had sent and batches had decided by then."""

    store: MemoryStore
    produced: dict[str, list[str]]
    entries: dict[int, LedgerEntry]
    batches: dict[int, list[str]]


class World:
    def __init__(
        self,
        *,
        sink: str = "foreach",
        queues: tuple[str, ...] = ("in",),
        shape: tuple[str, ...] = ("publish", "append", "after_commit"),
        source_options: dict[str, str] | None = None,
        ledger: str = "lake/ledger",
        ledger_sync: bool = True,
        queue_arguments: dict[str, Any] | None = None,
        joined: bool = False,
        twice: bool = False,
        kept: int = 0,
        threads: bool = False,
        unadmitted: bool = False,
        reports: int = 0,
    ) -> None:
        """``joined``: a source of the query for each queue; ``twice``: two for each; ``kept``: so many claims
        of each source; ``threads``: the function executes the batch in threads, whose tasks know no query;
        ``unadmitted``: Spark has no admission control; ``reports``: its wrapper for AvailableNow, which fetches an
        end before anything else, asks so often for one that it does not plan.
        """
        self.unadmitted, self.reports = unadmitted, reports
        self.threads = threads
        self.sink, self.queues, self.shape = sink, queues, shape
        self.app = "pipeline"
        self.source_options = source_options or {}
        self.ledger, self.ledger_sync = ledger, ledger_sync
        self.streams = [(queue,) for queue in queues] if joined else [queues]
        self.streams *= 2 if twice else 1
        self.wire = Wire(self)
        self.delta = Delta()
        if "steps" in shape:  # merges need a table that is there
            self.delta.tables[CHANGED] = []
        self.actors: list[Actor] = []
        self.drivers: dict[Actor, Driver] = {}
        self.history: list[str] = []
        self.person = False  # a checkpoint was lost or restored: a stop that needs a person is allowed
        self.restarts = 0
        self.produced: dict[str, list[str]] = {queue: [] for queue in queues}  # per queue, in offset order
        self.transactions: list[list[str]] = []
        self.upserts: list[tuple[int, tuple[str, ...]]] = []
        self.tokens: set[tuple[int, str]] = set()  # (sequence, token) of these calls
        self.acked: dict[str, int] = dict.fromkeys(queues, 0)  # the furthest end in any commit log
        self.entries: dict[int, LedgerEntry] = {}
        self.batches: dict[int, list[str]] = {}  # sequence -> bodies that it published
        self.first_offset: dict[str, int] = dict.fromkeys(queues, 0)
        # whose start nobody knows yet
        self.latest = set(queues) if self.source_options.get("startingOffsets") == "latest" else set()
        self.unread: dict[str, bool] = {}  # batches of queries, as text, that do (not) read their source
        self.unread_next = 0  # so many batches to come do not
        # ranges that Spark has committed and nobody read
        self.passed: dict[str, list[tuple[int, int]]] = {queue: [] for queue in queues}
        self.resuming: set[str] = set()  # checkpoints that somebody told to resume
        # (query, batch) -> bodies: a sink that is idempotent and not ours
        self.other_sink: dict[tuple[str, int], list[str]] = {}
        self.taken: list[str] = []  # by consumers that are no app
        self._executions = itertools.count(1)
        self._queries = itertools.count(1)
        self._now = 1_000_000
        self._seen_out = 0
        self.checkpoint = Checkpoint(f"q{next(self._queries)}")
        self.saved: Checkpoint | None = None
        self.resume_from: str | None = None  # what the operator says
        self.forgotten = 0  # the newest batch that was decided, and is in no ledger any more
        self._directories = itertools.count(1)
        self._queue_arguments = queue_arguments
        self._make()

    # -- the engine ------------------------------------------------------------------------------------------
    def _make(self) -> None:
        """A new data directory."""
        self.store = MemoryStore()
        self.identity = f"model {next(self._directories)}"
        self._open()
        with self.local.channel() as channel:
            for queue in (*self.queues, "out", "dead"):
                channel.queue_declare(
                    queue, arguments=self._queue_arguments if queue in self.queues else None
                )

    def lose_engine(self) -> None:
        """The data directory is lost. What producers had sent, they send again, and an operator says so."""
        self.kill_all()
        written = {row[3] for row in self.delta.rows("lake/ledger")}
        for sequence in [each for each, entry in self.entries.items() if entry.token not in written]:
            del self.entries[sequence], self.batches[sequence]
            self.forgotten = max(self.forgotten, sequence)
        self.acked |= {queue: max(self.acked[queue], self._reached(queue)) for queue in self.queues}
        self.person, self.resume_from, self._seen_out = True, self.identity, 0
        self._make()
        with self.local.channel() as channel:
            channel.tx_select()
            for queue in self.queues:
                for name in self.produced[queue]:
                    channel.publish(name.encode(), routing_key=queue)
            channel.tx_commit()
        self.history.append("data directory lost, messages sent again")

    def copy_engine(self) -> Copy:
        """A backup of the data directory, or a snapshot of its volume, as it is now."""
        produced = {queue: list(names) for queue, names in self.produced.items()}
        return Copy(self.store.reopened(), produced, dict(self.entries), dict(self.batches))

    def restore_engine(self, copy: Copy) -> None:
        """The data directory is lost and a copy of before stands in its place. The checkpoint does not go back
        with it, and what was sent since then is gone.
        """
        self.kill_all()
        self.store = copy.store.reopened()
        self.produced = {queue: list(names) for queue, names in copy.produced.items()}
        self.forgotten = max((self.forgotten, *self.entries))
        self.entries, self.batches = dict(copy.entries), dict(copy.batches)
        self.person = True
        self._open()
        self._seen_out = self.engine.available(["out"], {"out": 0})["out"].end
        self.history.append(
            f"copy of the data directory restored, decided up to {max(self.entries, default=0)}"
        )

    def _open(self) -> None:
        self.local = LocalBroker(self.store, clock=self._clock, upkeep=False)
        self.engine = EmbeddedEngine(self.local, identity=self.identity)

    def _clock(self) -> int:
        self._now += 1_000
        return self._now

    def crash_engine(self) -> None:
        self.restarts += 1
        self.store = self.store.reopened()
        self._open()

    def seal(self) -> None:
        """Background work: small commits move into a segment."""
        self.local.upkeep.close_open()
        self.local.upkeep.seal()

    # -- producers -------------------------------------------------------------------------------------------
    def produce(self, *counts: int) -> None:
        """One transaction with so many messages for each queue."""
        made: list[str] = []
        with self.local.channel() as channel:
            channel.tx_select()
            for queue, count in zip(self.queues, counts, strict=False):
                for _ in range(count):
                    name = f"{queue}:{len(self.produced[queue])}"
                    self.produced[queue].append(name)
                    made.append(name)
                    channel.publish(name.encode(), routing_key=queue)
            channel.tx_commit()
        self.transactions.append(made)

    def take(self) -> None:
        """Another consumer takes what it can get."""
        for queue in (*self.queues, "dead"):
            with self.local.channel() as channel, suppress(ResourceLocked):
                while (delivery := channel.get(queue, no_ack=True)) is not None:
                    self.taken.append(delivery.body.decode())

    # -- processes -------------------------------------------------------------------------------------------
    def start_driver(self, *, on_new: str = "fail", limit: int | None = None, sink_on_new: str = "") -> Actor:
        driver = Driver(self, self.checkpoint, on_new=on_new, limit=limit, sink_on_new=sink_on_new or on_new)
        if driver.sink_on_new == "resume":
            self.resuming.add(self.checkpoint.query_id)
        actor = Actor(f"driver {len(self.drivers)} of {self.checkpoint.query_id}", driver.run)
        self.actors.append(actor)
        self.drivers[actor] = driver
        return actor

    def session(self) -> Any:
        """Of the program that starts the query; a Connect server runs it elsewhere."""
        return None if self.sink == "connect" else Session(self)

    def start_mirror(self) -> Actor:
        """The thread or the listener that writes the Delta ledger behind the batches."""
        ledger = DeltaLedger(Session(self), "lake/ledger", self.wire, self.app)  # type: ignore[arg-type]
        actor = Actor("mirror", ledger.write_missing)
        self.actors.append(actor)
        return actor

    def step(self, actor: Actor, mode: str = "go") -> None:
        before = actor.pending
        actor.step(mode)
        if actor.done:
            self.actors.remove(actor)
        self.history.append(
            f"{actor.name}: {before} ({mode})" + (f" -> {actor.error!r}" if actor.error else "")
        )
        if actor.error is not None and not isinstance(actor.error, (TxmqError, ConcurrentQuery)):
            raise actor.error
        self.check()

    def until(self, actor: Actor, *labels: str) -> Actor:
        """Step until one of ``labels`` is pending, or the actor has ended."""
        for _ in range(FINISH_STEPS):
            if actor.done or actor.pending in labels:
                return actor
            self.step(actor)
        raise AssertionError(f"{actor!r} never comes to {labels}")

    def kill(self, actor: Actor) -> None:
        actor.kill()
        self.history.append(f"{actor.name}: killed before {actor.pending}")
        if actor in self.actors:
            self.actors.remove(actor)

    def kill_all(self) -> None:
        for actor in list(self.actors):
            self.kill(actor)

    # -- checkpoints -----------------------------------------------------------------------------------------
    def release(self, *, force: bool = False) -> None:
        """An operator takes the queue from the app: a range that is decided is not replayed any more."""
        self.engine.release(self.app, "in", force=force)
        self.acked["in"] = max(self.acked["in"], self._reached("in"))
        self.person = True
        self.history.append("in released")

    def lose_checkpoint(self) -> None:
        self.person = True
        self.checkpoint = Checkpoint(f"q{next(self._queries)}")
        self.history.append(f"checkpoint lost, the next is {self.checkpoint.query_id}")

    def save_checkpoint(self) -> None:
        self.saved = self.checkpoint.copy()
        self.history.append("checkpoint saved")

    def restore_checkpoint(self) -> None:
        if self.saved is not None:
            self.person = True
            self.checkpoint = self.saved.copy()
            self.history.append(
                f"checkpoint {self.checkpoint.query_id} restored, batches up to "
                f"{max(self.checkpoint.offsets, default=-1)}"
            )

    def lose_commit_log_entry(self) -> None:
        """A checkpoint on a file system that loses its newest file: Spark runs the batch again, and nobody
        needs a person for it.
        """
        newest = max(self.checkpoint.commits, default=-1)
        if newest >= 0 and newest == max(self.checkpoint.offsets):
            self.checkpoint.commits.remove(newest)
            self.history.append(f"commit log entry {newest} lost")

    def on_answer(self, queues: Iterable[str]) -> None:
        """A stream that starts at the latest message reads what comes after its first answer, if not after
        its first question.
        """
        for queue in self.latest & set(queues):
            records = [
                record for record in self.store.reopened().load().records if isinstance(record, OriginRecord)
            ]
            found = [record.start[queue] for record in records if queue in record.start]
            self.first_offset[queue] = int(found[0]) if found else len(self.produced[queue])
            self.latest.discard(queue)

    def is_unread(self, query_id: str, batch_id: int) -> bool:
        """The same for every replay of a batch."""
        key = f"{query_id} {batch_id}"
        if key not in self.unread:
            self.unread[key] = self.unread_next > 0
            self.unread_next -= self.unread[key]
        return self.unread[key]

    def on_spark_commit(
        self, query_id: str, batch_id: int, start: dict[str, Any] | None, end: dict[str, Any]
    ) -> None:
        for queue, offset in {queue: offset for queue, offset in end.items() if queue in self.queues}.items():
            first = (start or {}).get(queue, "start")
            if self.is_unread(query_id, batch_id) and isinstance(offset, int) and first != offset:
                self.passed[queue].append((self._reached(queue) if first == "start" else first, offset))
            if isinstance(offset, int):
                self.acked[queue] = max(self.acked[queue], offset)
        require(not self.engine.unapplied(self.app), "C5: Spark has committed a batch that is not applied")

    # -- what the user wrote ---------------------------------------------------------------------------------
    def marked(self, batch: Frame) -> Frame:
        """A function without determinism: each execution marks its rows, and every second one has a row
        more.
        """
        execution = next(self._executions)

        def mark(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for rows in batches:
                bodies = [f"{body.decode()}|{execution}" for body in rows.column("body").to_pylist()]
                if execution % 2:
                    bodies.append(f"extra|{execution}|{bodies[0]}")
                yield pa.RecordBatch.from_pydict({"body": pa.array(bodies, pa.string())})

        return batch.mapInArrow(mark, ROW)

    def user_function(self, batch: Frame, tx: Any) -> None:
        rows = self.marked(batch)
        for what in self.shape:
            if what == "publish":
                tx.publish(rows, queue="out")
            elif what == "append":
                for table in TABLES:
                    tx.append(rows, table)
            elif what == "append twice":
                tx.append(rows, TABLES[0])
                tx.append(rows, TABLES[0])
            elif what == "steps":
                tx.append(rows, CHANGED)
                tx.merge(rows, CHANGED, "t.body = s.body", update=True, insert=True)
                tx.overwrite(rows, CHANGED, "true")
                tx.append(rows, CHANGED)
            elif what == "after_commit":
                tx.after_commit(rows, "upsert")

    def upsert(self, rows: Any, sequence: int, token: str) -> None:
        found = tuple(sorted(row["body"] for row in rows.collect()))
        point("upsert")
        self.upserts.append((sequence, found))
        self.tokens.add((sequence, token))

    # -- what holds after every step -------------------------------------------------------------------------
    def check(self) -> None:
        state = self.local.state
        self._check_ledger()
        for queue in sorted(set(self.queues) - self.latest):
            acked = state.topology.queue(queue).progress.acked if state.topology.queue(queue).owner else 0
            require(
                acked <= max(self.acked[queue], self.first_offset[queue]),
                f"S5: {queue} is acked up to {acked}, Spark committed {self.acked[queue]}",
            )
            floor, reached = state.topology.queue(queue).progress.floor, self._reached(queue)
            require(
                floor <= reached
                or self.taken
                or self._queue_arguments
                or self.sink not in ("foreach", "native"),
                f"S2: {queue} is consumed up to {floor}, and what is decided ends at {reached}",
            )
        last = max((*self.entries, self.forgotten), default=0)
        for table, every in self.delta.tables.items():
            commits = [commit for commit in every if not commit.app.startswith(TAKEN)]
            versions = [commit.version for commit in commits]
            require(
                all(version <= last for version in versions),
                f"C5, C6: table {table} is ahead of the ledger ({versions}, {last})",
            )
            order = [(commit.version, int(commit.app.partition(STEP)[2] or 0)) for commit in commits]
            require(
                order == sorted(set(order)),
                f"C5: commits of {table} are not in the order of the sequence and the calls: {order}",
            )
        first_calls = list(dict.fromkeys(sequence for sequence, _ in self.upserts))
        require(first_calls == sorted(first_calls), f"C5: functions are not called in order: {first_calls}")
        for sequence, rows in self.upserts:
            require(
                rows == dict(reversed(self.upserts))[sequence],
                f"C5: a repeated call for batch {sequence} has other rows",
            )
        sequences, tokens = ({pair[at] for pair in self.tokens} for at in (0, 1))
        require(
            len(self.tokens) == len(sequences) == len(tokens),
            f"C5: a batch has two tokens, or two batches have one: {sorted(self.tokens)}",
        )

    def _check_ledger(self) -> None:
        last = self.engine.last_entry(self.app)
        known = max(self.entries, default=0)
        out = self.engine.available(["out"], {"out": self._seen_out})["out"]
        if last is None or last.sequence == known:
            require(out.end == self._seen_out, "C4: rows are visible that no decided batch published")
            return
        before = self.entries.get(known)
        if before is not None and before.query_id != last.query_id:
            require(
                last.query_id in self.resuming,
                f"C1: {last.query_id} went on after {before.query_id}, and nobody said resume",
            )
            require(
                all(entry.query_id != last.query_id for entry in self.entries.values()),
                f"C1: {last.query_id} came back",
            )
        require(last.sequence == known + 1, f"C1: the ledger went from batch {known} to {last.sequence}")
        bodies = [
            body.decode()
            for batch in self.engine.browse([("out", out.start, out.end)])
            for body in batch.column("body").to_pylist()
        ]
        require(
            len(bodies) == last.published,
            f"C4: batch {last.sequence} published {last.published}, and {len(bodies)} became visible",
        )
        for log, (start, end) in last.ranges.items():
            reached = self._reached(log)
            require(
                start == reached and end >= start,
                f"C4: batch {last.sequence} consumed {start} to {end} of {log}, consumed so far: {reached}",
            )
        self.entries[last.sequence] = last
        self.batches[last.sequence] = bodies
        self._seen_out = out.end

    def _reached(self, log: str) -> int:
        """Where the next range of a queue starts: behind what was decided, and behind what Spark committed
        and nobody read.
        """
        decided = (entry.ranges[log][1] for entry in self.entries.values() if log in entry.ranges)
        return max(self.first_offset[log], *decided, *(last for _, last in self.passed[log]), 0)

    # -- what holds in the end -------------------------------------------------------------------------------
    def finish(self, *, on_new: str = "fail") -> None:
        """Everybody dies, one driver starts, nothing goes wrong any more: the query must get through, or stop
        where it may.
        """
        failpoint.disarm()
        self.kill_all()
        self._now += 3_600_000_000  # maxTriggerDelay is over
        error = self._run_clean(on_new)
        if error is not None:
            require(self.person, f"the query does not get on after a clean restart: {error}")
            require(isinstance(error, TxmqError), f"the stop says nothing to the user: {error!r}")
            self.lose_checkpoint()  # what every such error says: a new checkpoint with onNewCheckpoint=resume
            error = self._run_clean("resume")
            require(error is None, f"the query does not get on with a new checkpoint and resume: {error}")
        self.kill_all()
        self.verify()

    def _run_clean(self, on_new: str) -> BaseException | None:
        error: BaseException | None = None
        for _ in range(RESTARTS):
            driver = self.start_driver(on_new=on_new)
            idle = 0
            for _ in range(FINISH_STEPS):
                idle = idle + 1 if driver.pending == "idle" else 0 if driver.pending == "task" else idle
                if driver.done or idle >= 2:
                    break
                self.step(driver)
            else:
                raise Violation(f"the query never comes to rest: {self.history[-20:]}")
            error = driver.error
            if not driver.done:
                return None
        return error

    def verify(self) -> None:
        wanted = {queue: names[self.first_offset[queue] :] for queue, names in self.produced.items()}
        consumed = [
            name
            for entry in self.entries.values()
            for log, (start, end) in sorted(entry.ranges.items())
            for name in self.produced[log][start:end]
        ]
        consumed += self.taken
        consumed += [
            name
            for queue, ranges in self.passed.items()
            for first, last in ranges
            for name in self.produced[queue][first:last]
        ]
        consumed += [body for bodies in self.other_sink.values() for body in bodies]
        expected, found = Counter(name for names in wanted.values() for name in names), Counter(consumed)
        require(
            expected == found,
            f"consumed not exactly once: lost {dict(expected - found)}, too often {dict(found - expected)}",
        )
        executions: dict[int, set[str]] = {}
        if "publish" in self.shape or self.sink == "native":
            for sequence, bodies in self.batches.items():
                executions.setdefault(sequence, set()).update(
                    self._effect(sequence, bodies, "the output queue")
                )
        if self.sink in ("foreach", "connect"):
            self._verify_tables(executions)
            if self.ledger:
                self._verify_mirror()
        for sequence, marks in executions.items():
            require(len(marks) <= 1, f"C4: effects of batch {sequence} come from several executions: {marks}")
        require(not self.engine.unapplied(self.app), "C5: something is decided and not applied")
        self._verify_orphans()

    def _verify_orphans(self) -> None:
        records = self.store.reopened().load().records
        decided_at = max((entry.committed_at_us for entry in self.entries.values()), default=0)
        late = {
            record.token
            for record in records
            if isinstance(record, AttemptRecord) and record.opened_at > decided_at
        }
        left = [record for record in records if isinstance(record, PartRecord) and record.token not in late]
        require(not left, f"C4: staged parts of attempts that can never be decided are kept: {left}")

    def _effect(self, sequence: int, bodies: list[str], where: str) -> set[str]:
        """The executions behind the rows of a batch; each of its messages must be there once."""
        names = Counter(body.split("|")[0] for body in bodies if not body.startswith("extra|"))
        wanted = Counter(
            name
            for log, (start, end) in self.entries[sequence].ranges.items()
            for name in self.produced[log][start:end]
        )
        require(names == wanted, f"batch {sequence} in {where}: {dict(names)}, consumed {dict(wanted)}")
        return {body.split("|")[1] for body in bodies}

    def _verify_tables(self, executions: dict[int, set[str]]) -> None:
        tables = TABLES if "append" in self.shape else ()
        for table in tables:
            held = {
                commit.version: [row[0] for row in commit.rows] for commit in self.delta.tables.get(table, ())
            }
            for sequence in self.entries:
                executions.setdefault(sequence, set()).update(
                    self._effect(sequence, held.get(sequence, []), table)
                )
        if "append twice" in self.shape:
            held = {
                commit.version: [row[0] for row in commit.rows]
                for commit in self.delta.tables.get(TABLES[0], ())
            }
            for sequence in self.entries:
                once = [name for name, count in Counter(held.get(sequence, [])).items() if count == 2]
                executions.setdefault(sequence, set()).update(
                    self._effect(sequence, once, "the table appended to twice")
                )
        if "steps" in self.shape:
            done = {
                (commit.version, commit.app.partition(STEP)[2]): [row[0] for row in commit.rows]
                for commit in self.delta.tables[CHANGED]
            }
            for sequence in self.entries:
                for step in ("", "1", "2", "3"):
                    executions.setdefault(sequence, set()).update(
                        self._effect(sequence, done.get((sequence, step), []), f"step {step or 0}")
                    )
        if "after_commit" in self.shape:
            calls = dict(reversed(self.upserts))
            for sequence in self.entries:
                executions.setdefault(sequence, set()).update(
                    self._effect(sequence, list(calls.get(sequence, ())), "the function")
                )

    def _verify_mirror(self) -> None:
        self.until(self.start_mirror())
        rows = [row[:7] for row in self.delta.rows("lake/ledger")]
        wanted = []
        for _, entry in sorted(self.entries.items()):
            identity = (entry.app_id, entry.query_id, entry.batch_id, entry.token)
            ranges = sorted(entry.ranges.items()) or [(None, (None, None))]  # type: ignore[list-item]
            wanted += [(*identity, log, start, end) for log, (start, end) in ranges]
        require(rows == wanted, f"C6: the Delta ledger is no copy of the ledger: {rows} instead of {wanted}")

    def close(self) -> None:
        failpoint.disarm()
        self.kill_all()
        self.local.close()


def _newest_rows(world: World) -> list[dict[str, Any]]:
    """The rows of the newest batch of each log in the ledger."""
    names = [column.split()[0] for column in LEDGER_COLUMNS.split(", ")]
    rows = [dict(zip(names, row, strict=True)) for row in world.delta.rows("lake/ledger")]
    newest = {row["log"]: row for row in sorted(rows, key=lambda row: int(row["sequence"]))}
    return [{**row, "committed_at_us": int(row["committed_at"].timestamp() * 1e6)} for row in newest.values()]


class _Gate:
    """What ``connect`` answers in every process of the model: the wire of the world in hand."""

    def __getattr__(self, method: str) -> Any:
        return getattr(_current[-1].wire, method)


def _query_of(batch: Any) -> tuple[str, str]:
    (query,) = batch.sparkSession.active
    return query.id, query.runId


def _is_connect(session: object) -> bool:
    """Of what the model has made; a background thread of another test may ask for a real session."""
    if type(session).__module__.startswith("pyspark."):
        return is_connect(session)
    return _current[-1].sink == "connect"


class OneThread:
    """Every operation of a driver runs in its own thread, which has what its jobs need."""

    def __init__(self, *_: object) -> None: ...

    def of_batch(self, *, elsewhere: bool) -> contextlib.AbstractContextManager[None]:
        assert not elsewhere
        return contextlib.nullcontext()


@contextmanager
def world(**options: Any) -> Iterator[World]:
    """A world, with Spark, Delta and the connection replaced while it is there."""
    import broker_core.client.broker
    import connector.batch.call
    import connector.batch.foreach_batch
    import connector.delta.after.make_change
    import connector.delta.after.same_table
    import connector.delta.log
    import connector.ledger.delta_ledger
    import connector.options
    import connector.stream.reader_lock
    import connector.stream.spark_version
    import connector.stream.staging

    gate = _Gate()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(broker_core.client.broker, "connect", lambda *_, **__: gate)
        patch.setattr(connector.options, "connect", lambda *_, **__: gate)
        patch.setattr(
            connector.stream.reader_lock,
            "driver",
            lambda: f"{id(_current[-1])} {getattr(current(), 'name', '')}",
        )
        patch.setattr(connector.stream.reader_lock, "PATIENCE_S", 0.0)
        admitted = not options.get("unadmitted")
        patch.setattr(connector.stream.spark_version, "has_admission_control", lambda: admitted)
        for module in (connector.ledger.delta_ledger, connector.batch.foreach_batch, connector.batch.call):
            patch.setattr(module, "is_connect", _is_connect)
        patch.setattr(connector.batch.call, "_query_of", _query_of)  # frames of the model have no plan
        patch.setattr(
            DeltaFormat,
            "resolve",
            lambda _self, _spark, name: Table(name, name, name if name in _current[-1].delta.tables else ""),
        )
        checked = CheckResult(lambda rows: rows, by_rows="a model")
        patch.setattr(DeltaFormat, "check_append", lambda *_: checked)
        patch.setattr(DeltaFormat, "check_change", lambda *_: checked)
        patch.setattr(DeltaFormat, "context", lambda *_: {})
        patch.setattr(DeltaFormat, "only_latest", lambda *_: False)
        patch.setattr(connector.delta.log, "made_last", lambda *_: None)  # a shorter way to ``held``
        patch.setattr(DeltaFormat, "settled", lambda _self, _table, _columns, change, _context: change)
        patch.setattr(DeltaFormat, "decided", lambda _self, spark, _context: nullcontext(spark))
        patch.setattr(connector.delta.after.make_change, "isolated_session", isolated)
        for module in (connector.delta.after.make_change, connector.delta.before.append_rows):
            patch.setattr(module, "widened", lambda rows, _table: rows)
        patch.setattr(
            connector.delta.after.same_table, "merge", lambda session, text, *_: session.sql(text).collect()
        )
        patch.setattr(connector.delta.after.same_table, "require", lambda *_: None)
        patch.setattr(connector.delta.after.same_table, "require_done_on", lambda *_: None)
        patch.setattr(connector.stream.staging, "no_rows", lambda session, schema: Frame(session, [], schema))
        patch.setattr(DeltaFormat, "later", lambda *_: Later(None))
        patch.setattr(DeltaFormat, "lacks", lambda *_: False)
        patch.setattr(
            connector.delta.log,
            "commits",
            lambda _spark, table, fresh=True: _current[-1].delta.history(table.name),
        )
        patch.setattr(
            connector.ledger.delta_ledger,
            "held_tokens",
            lambda _tables, _spark, table, _entries: {row[3] for row in _current[-1].delta.rows(table)},
        )
        patch.setattr(
            DeltaFormat,
            "sequences",
            lambda _self, _spark, table, prefix: _current[-1].delta.versions(table.name, prefix),
        )
        patch.setattr(resume, "newest_rows", lambda *_: _newest_rows(_current[-1]))
        patch.setattr(connector.batch.foreach_batch, "active_session", lambda: _current[-1].session())
        patch.setattr(parts, "PART_ROWS", 2)  # branches of several parts
        patch.setattr(DeltaLedger, "start", lambda self: None)  # the mirror is an actor of its own
        # nobody else writes the ledger of the model
        patch.setattr(
            DeltaLedger, "_sound", lambda self, spark, **_: self._tables.resolve(spark, self._table)
        )
        if options.get("kept"):
            patch.setattr(claim, "KEPT_CLAIMS", options["kept"])
        install_task_context(patch)
        patch.setattr(batch_reads, "input_partitions", lambda batch: batch.partitions)
        patch.setattr(batch_transaction, "ThreadContext", OneThread)
        made = World(**options)
        _current.append(made)
        try:
            yield made
        finally:
            made.close()
            _current.pop()


__all__ = ["TABLES", "URL", "ConcurrentQuery", "Violation", "World", "world"]
