"""Each rule of the protocol, switched off, must be seen by the model: a scenario that holds as it is, and
fails without the rule.

Not here: flags in the product. A rule is switched off by replacing the function that holds it, in this test
only. Where two rules guard the same thing, both are replaced, and the name says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import pytest

from broker_core.broker.batch import micro_batch as batches
from broker_core.broker.batch.branch import Branches
from broker_core.broker.batch.micro_batch import MicroBatches
from broker_core.broker.queue import Queue
from broker_core.broker.topology.topology import Topology
from broker_core.core import failpoint
from broker_core.core.change import Drop
from broker_core.core.errors import BatchDecided, BatchGap, CheckpointMismatch, DataLoss, ResourceLocked
from broker_core.micro_batch import opening
from broker_core.micro_batch.claims import claim as claim_rules
from broker_core.micro_batch.claims import next_range as claim_range
from broker_core.micro_batch.claims.claim import Claims
from broker_core.micro_batch.claims.origins import Origins
from broker_core.micro_batch.claims.reads import Reads
from broker_core.micro_batch.claims.releases import Releases
from broker_core.micro_batch.ledger import Ledger, MicroBatch
from broker_core.node import engine as embedded
from broker_core.node.engine import EmbeddedEngine
from connector.batch import after_commit, apply, batch_transaction
from connector.batch.apply import Apply
from connector.batch.batch_reads import BatchReads
from connector.batch.batch_transaction import BatchTransaction
from connector.batch.foreach_batch import Transactional
from connector.delta.before.append_rows import append
from connector.ledger.delta_ledger import LEDGER_COLUMNS, DeltaLedger, ledger_rows
from connector.ledger.resume import Resume
from connector.stream import staging
from connector.stream.reader_lock import ReaderLock
from connector.stream.source import StreamReader
from connector.stream.without_admission_control import UnadmittedReader
from connector.tables import checks
from connector.tables.commit_id import CommitId
from connector.tables.table import Table
from tests.make import around
from tests.model.test_owned_queue import acks_delete_the_last_range, claims_freeze_nothing
from tests.model.world import Violation, World, require, world

Patch = pytest.MonkeyPatch


# -- scenarios: each holds as long as the rules do -----------------------------------------------------------


def plain(w: World) -> None:
    w.produce(3)
    w.until(w.start_driver(), "idle")
    w.produce(2)
    w.finish()


def batch_0_of_latest_is_replayed(w: World) -> None:
    """Crash row 15."""
    w.produce(2)
    w.first_offset["in"] = 2
    driver = w.start_driver()
    w.until(driver, "idle")
    w.produce(2)
    w.until(driver, "open_read")
    w.kill(driver)
    w.produce(1)
    w.finish()


def checkpoint_is_lost_after_a_restart_with_a_sink_that_is_not_ours(w: World) -> None:
    """Crash rows 10 and 13: the first latestOffset of a restarted query acks what Spark has committed."""
    w.produce(2)
    w.until(w.start_driver(), "idle")
    w.kill_all()
    w.produce(2)
    driver = w.start_driver()
    w.until(driver, "commit log write")
    w.step(driver)
    w.kill(driver)
    w.until(w.start_driver(), "idle")
    w.kill_all()
    w.lose_checkpoint()
    w.finish(on_new="resume")


def engine_dies_between_claim_and_read(w: World) -> None:
    w.produce(2)
    driver = w.start_driver()
    w.until(driver, "resolve")
    w.crash_engine()
    w.finish()


def two_drivers_ask_with_new_messages_between(w: World) -> None:
    """Crash rows 11 and 14."""
    w.produce(2)
    first = w.until(w.start_driver(), "offset log write")
    w.produce(2)
    w.until(w.start_driver(), "offset log write")
    w.step(first)
    w.kill_all()
    w.crash_engine()
    w.finish()


def checkpoint_of_another_broker(w: World) -> None:
    w.produce(3)
    w.person = True
    w.checkpoint.add_offsets(0, {"in": 1})
    w.checkpoint.add_commit(0)
    w.acked["in"] = 1  # its commit log says so
    w.finish(on_new="resume")


def checkpoint_is_lost_behind_a_decision(w: World) -> None:
    """Crash row 13."""
    w.produce(3)
    w.until(w.start_driver(), "commit log write")
    w.kill_all()
    w.lose_checkpoint()
    w.finish(on_new="resume")
    require(len(w.resuming) == 1, "S2: resume did not go on where the last decided batch ended")


def decided_batch_is_replayed(w: World) -> None:
    """Crash rows 6 and 7."""
    w.produce(3)
    w.until(w.start_driver(), "commit log write")
    w.kill_all()
    w.crash_engine()
    w.finish()


def driver_dies_between_the_function_and_the_mark(w: World) -> None:
    """Crash row 7."""
    w.produce(3)
    w.until(w.start_driver(), "mark_applied")
    w.kill_all()
    w.finish()
    require(len(w.upserts) > len(w.entries), "the function was not called again")


def newest_commit_log_entry_is_lost(w: World) -> None:
    w.produce(2)
    w.until(w.start_driver(), "idle")
    w.kill_all()
    w.until(w.start_driver(), "idle")  # its first latestOffset acks
    w.kill_all()
    w.lose_commit_log_entry()
    w.finish()


def older_checkpoint_plans_a_decided_batch_with_another_range(w: World) -> None:
    """Crash row 16."""
    w.save_checkpoint()
    w.produce(3)
    w.until(w.start_driver(), "commit log write")
    w.kill_all()
    w.produce(2)
    w.restore_checkpoint()
    w.finish(on_new="resume")


def older_checkpoint_plans_an_empty_batch_with_messages(w: World) -> None:
    w.save_checkpoint()
    w.until(w.start_driver(), "idle")
    w.kill_all()
    w.produce(2)
    w.restore_checkpoint()
    w.finish()


def another_consumer_takes_what_it_can(w: World) -> None:
    w.produce(3)
    w.until(w.start_driver(), "open_batch")
    w.take()
    w.finish()


def claimed_messages_meet_a_full_queue(w: World) -> None:
    w.produce(2)
    w.until(w.start_driver(), "open_batch")
    w.produce(2)
    w.finish()
    w.take()
    w.verify()


def new_checkpoint_where_only_the_source_resumes(w: World) -> None:
    w.produce(2)
    w.until(w.start_driver(), "idle")
    w.kill_all()
    w.lose_checkpoint()
    w.produce(2)
    w.until(w.start_driver(on_new="resume", sink_on_new="fail"), "idle")
    w.finish(on_new="resume")


def new_checkpoint_and_nobody_resumes(w: World) -> None:
    w.produce(2)
    w.until(w.start_driver(), "idle")
    w.kill_all()
    w.lose_checkpoint()
    w.produce(2)
    w.until(w.start_driver(), "idle")
    w.finish(on_new="resume")


def older_data_directory(w: World) -> None:
    """The engine forgets a decision that Spark has in its commit log: nothing may be decided on top of
    that.
    """
    w.produce(2)
    driver = w.until(w.start_driver(), "commit_batch")
    older = w.store.reopened()
    w.until(driver, "idle")
    w.kill_all()
    w.store = older
    w.crash_engine()
    w.produce(1)
    driver = w.start_driver()
    while not driver.done and driver.pending != "idle":
        driver.step()
    require(isinstance(driver.error, BatchGap), f"C1: batch 1 follows on nothing, and {driver!r}")


def a_copy_of_a_claimed_batch_is_restored(w: World) -> None:
    """The lost directory has decided the batch, and Spark has committed it."""
    w.produce(2)
    w.until(w.start_driver(), "idle")
    w.kill_all()
    w.produce(2)
    driver = w.until(w.start_driver(), "offset log write")
    copy = w.copy_engine()
    w.until(driver, "idle")
    w.restore_engine(copy)
    w.finish()


def a_copy_is_restored_and_a_batch_goes_on_behind_its_claim(w: World) -> None:
    """The copy knows no batch of the app: its first one is claimed, and the query resumes behind it."""
    w.produce(2)
    driver = w.until(w.start_driver(), "offset log write")
    copy = w.copy_engine()
    w.until(driver, "idle")
    w.restore_engine(copy)
    w.produce(1)
    w.until(w.start_driver(on_new="resume"), "idle")
    w.finish(on_new="resume")


def engine_dies_between_decision_and_apply(w: World) -> None:
    w.produce(3)
    driver = w.until(w.start_driver(), "read_branches")
    w.crash_engine()
    w.until(driver, "commit log write")
    w.finish()


def tasks_are_run_twice(w: World) -> None:
    """Crash row 1."""
    w.produce(3)
    driver = w.start_driver()
    w.until(driver, "task")
    w.step(driver, "repeated")
    w.until(driver, "task")
    w.step(driver, "zombie")
    w.until(driver, "commit_batch")
    for zombie in [actor for actor in w.actors if actor is not driver]:
        w.until(zombie)
    w.until(driver, "idle")
    w.finish()


def answer_of_the_commit_is_lost(w: World) -> None:
    """Crash row 5."""
    w.produce(3)
    driver = w.until(w.start_driver(), "commit_batch")
    w.step(driver, "unanswered")
    w.until(driver, "idle")
    w.finish()


def two_checkpoints_claim_behind_the_same_batch(w: World) -> None:
    """Crash row 12: a zombie driver of the lost checkpoint decides after the new one has claimed."""
    w.produce(3)
    old = w.until(w.start_driver(), "commit log write")
    w.lose_checkpoint()
    w.produce(2)
    new = w.until(w.start_driver(on_new="resume"), "unapplied", "open_batch")
    w.step(old)
    w.until(old, "commit log write")
    require(len(w.entries) == 2, "the old query decides as long as the new one has not opened a batch")
    w.until(new, "idle")
    w.finish(on_new="resume")


def abort_comes_late(w: World) -> None:
    """Crash row 2: a driver that hangs aborts an attempt whose commit is on the way."""
    w.produce(3)
    driver = w.until(w.start_driver(), "commit_batch")
    for token in list(w.engine.batches.branches._attempts):
        w.engine.rollback_batch(token)
    w.step(driver)
    w.finish()


def orphans_everywhere(w: World) -> None:
    w.produce(3)
    w.until(w.start_driver(), "commit_batch")
    w.kill_all()
    driver = w.start_driver()
    w.until(driver, "task")
    w.step(driver, "repeated")
    w.until(driver, "idle")
    w.finish()


def commit_raises_though_it_committed(w: World) -> None:
    """Crash row 9."""
    w.produce(3)
    driver = w.until(w.start_driver(), "commit_batch")
    failpoint.arm("foreach.decided", _interrupt)
    with pytest.raises(_Interrupted):
        w.until(driver, "idle")
    failpoint.disarm()
    w.finish()


class _Interrupted(Exception):
    pass


def _interrupt(name: str) -> None:
    raise _Interrupted(name)


def two_mirrors(w: World) -> None:
    for _ in range(4):
        w.produce(1)
        w.until(w.start_driver(), "idle")
        w.kill_all()
    one, two = w.start_mirror(), w.start_mirror()
    w.until(one, "delta commit", "delta merge")
    w.until(two)
    w.until(one)
    w.finish()


def one_source_idles_beside_a_busy_one(w: World) -> None:
    w.produce(1, 1)
    driver = w.until(w.start_driver(), "idle")
    for _ in range(4):
        w.produce(1)
        if not driver.done:
            w.step(driver)
            w.until(driver, "idle")
    w.crash_engine()
    w.produce(1, 1)
    w.finish()


def one_queue_is_read_twice_in_one_query(w: World) -> None:
    """A message comes between the two questions of one trigger, and the sources would be out of step for
    ever.
    """
    driver = w.until(w.start_driver(), "logs")
    w.step(driver)
    w.until(driver, "logs")
    w.produce(1)
    while not driver.done and driver.pending != "idle":
        w.step(driver)
    if isinstance(driver.error, ResourceLocked):
        require("one readStream" in str(driver.error), "the refusal does not say the way out")
        require(w.checkpoint.offsets == {}, "the query has begun")
        return
    w.produce(1)
    w.finish()


def a_batch_does_not_read_its_source(w: World) -> None:
    w.produce(2)
    driver = w.until(w.start_driver(), "idle")
    w.unread_next = 1
    w.produce(2)
    w.step(driver)
    w.until(driver, "idle")
    w.produce(2)
    w.finish()


def an_operator_releases_the_queue_behind_a_decision(w: World) -> None:
    """Crash row 19: with a new checkpoint the app goes on where it was, and not at startingOffsets."""
    w.produce(2)
    w.first_offset["in"] = 2
    driver = w.start_driver()
    w.until(driver, "idle")
    w.produce(2)
    w.until(driver, "commit log write")
    w.produce(2)
    w.kill_all()
    w.release()
    w.crash_engine()
    w.lose_checkpoint()
    w.finish(on_new="resume")


def an_operator_releases_the_queue_behind_a_finished_batch(w: World) -> None:
    """Crash row 19: the old checkpoint goes on, because all that it has planned is decided."""
    w.produce(2)
    w.first_offset["in"] = 2
    driver = w.start_driver()
    w.until(driver, "idle")
    w.produce(2)
    w.until(driver, "commit log write")
    w.until(driver, "idle")
    w.produce(2)
    w.kill_all()
    w.release(force=True)
    w.crash_engine()
    w.finish(on_new="resume")


def the_engine_is_lost_behind_a_mirrored_batch(w: World) -> None:
    """Crash row 20."""
    w.produce(2)
    driver = w.until(w.start_driver(), "idle")
    w.produce(2)
    w.step(driver)
    w.until(driver, "commit log write")
    w.lose_engine()
    w.lose_checkpoint()
    w.produce(2)
    w.finish(on_new="resume")
    require(max(w.entries) == 3, "C7: the sequence did not go on")


def the_engine_is_lost_before_a_mirrored_batch_is_applied(w: World) -> None:
    """Another driver writes the ledger while this one has not applied what it has decided."""
    w.produce(2)
    w.until(w.start_driver(), "idle")
    w.kill_all()
    w.produce(2)
    w.until(w.start_driver(), "read_branches")
    w.until(w.start_mirror())
    w.lose_engine()
    w.lose_checkpoint()
    w.finish(on_new="resume")


def the_engine_is_lost_behind_a_batch_that_only_a_table_has(w: World) -> None:
    w.produce(2)
    w.until(w.start_driver(), "idle")
    w.kill_all()
    w.produce(2)
    w.until(w.start_driver(), "unmirrored", "commit log write")
    require(w.forgotten == 0 and len(w.entries) == 2, "the batch is decided")
    w.lose_engine()
    w.lose_checkpoint()
    require(w.forgotten == 2, "the batch is not in the ledger")
    driver = w.start_driver(on_new="resume")
    while not driver.done and driver.pending != "idle":
        w.step(driver)
    require(isinstance(driver.error, CheckpointMismatch), f"C7: the rows would come twice, and {driver!r}")


def a_stream_waits_for_more_from_the_latest_message_on(w: World) -> None:
    w.produce(1)
    driver = w.start_driver()
    for _ in range(4):
        w.until(driver, "idle", "offset log write")
        w.step(driver)
        w.produce(1)
    w.finish()


def small_batches(w: World) -> None:
    for _ in range(4):
        w.produce(1)
    w.until(w.start_driver(limit=1), "idle")
    w.finish()


def a_batch_leaves_out_its_source_and_the_next_one_reads(w: World) -> None:
    w.unread_next = 1
    w.produce(2)
    driver = w.until(w.start_driver(), "commit log write")
    w.step(driver)
    w.produce(1)
    w.until(driver, "task")
    w.finish()


# -- rules, switched off -------------------------------------------------------------------------------------


def numbers_for_start(patch: Patch) -> None:
    patch.setattr(
        StreamReader,
        "initialOffset",
        lambda self: self._engine.offsets(self._options.queues, self._options.origin),
    )


def planned_ends_are_forgotten(patch: Patch) -> None:
    patch.setattr(UnadmittedReader, "partitions", StreamReader.partitions)


def told_ends_are_forgotten(patch: Patch) -> None:
    patch.setattr(
        UnadmittedReader, "_given_end", property(lambda _self: None, lambda *_: None), raising=False
    )


def every_start_is_acked(patch: Patch) -> None:
    whatever_spark_committed_is_acknowledged(patch)
    around(
        patch,
        StreamReader,
        "_end",
        lambda end, self, start, *, limited, acks=True: end(self, start, limited=limited),
    )


def no_ack_by_claim(patch: Patch) -> None:
    def without(claim: Any, *arguments: Any) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Claims, "ack_below", lambda *_: None)
            return claim(*arguments)

    around(patch, embedded, "next_range", without)


def claim_in_memory_only(patch: Patch) -> None:
    def without(record: Any, self: Claims, logs: Any, change: Any, *arguments: Any) -> None:
        before = len(change.journal)
        record(self, logs, change, *arguments)
        change.journal[before:] = [entry for entry in change.journal[before:] if isinstance(entry, Drop)]

    around(patch, claim_range, "_record", without)


def claims_may_move(patch: Patch) -> None:
    patch.setattr(Claims, "at", lambda *_: None)


def any_start(patch: Patch) -> None:
    patch.setattr(Claims, "_require_end", lambda *_: None)


def resume_at_acked(patch: Patch) -> None:
    def without(claim: Any, claims: Claims, logs: Any, change: Any, *arguments: Any) -> Any:
        *before, _consumed = arguments
        acked = {log: logs._state.topology.queue(log).progress.acked for log in arguments[2]}
        return claim(claims, logs, change, *before, acked)

    around(patch, embedded, "next_range", without)


def settled_ranges_do_not_resolve(patch: Patch) -> None:
    resolve = EmbeddedEngine.resolve

    def without(self: EmbeddedEngine, app_id: str, start: Any, end: Any) -> Any:
        ranges = resolve(self, app_id, start, end)
        for log, (first, last) in ranges.items():
            if first < last <= self.local.state.topology.queue(log).progress.floor:
                raise DataLoss("the range is settled")
        return ranges

    patch.setattr(EmbeddedEngine, "resolve", without)


def reads_are_not_recorded(patch: Patch) -> None:
    patch.setattr(Claims, "record_read", lambda *_: None)


def a_batch_may_read_another_range(patch: Patch) -> None:
    patch.setattr(Reads, "already", lambda *_: False)
    patch.setattr(opening, "require_undecided", lambda *_: None)


def a_decided_batch_may_read_more(patch: Patch) -> None:
    patch.setattr(opening, "require_undecided", lambda *_: None)


def the_decision_deletes(patch: Patch) -> None:
    settle = Queue.settle

    def without(self: Queue, start: int, end: int) -> None:
        settle(self, start, end)
        if self.owner and self.progress.acked < end <= self.progress.floor:
            self.progress.acked = end
            self._free(0, end)

    patch.setattr(Queue, "settle", without)


def nobody_owns(patch: Patch) -> None:
    patch.setattr(Topology, "usable", lambda self, name, connection=None: self.queue(name))
    patch.setattr(Queue, "claim", lambda *_: None)


def no_refusal(patch: Patch) -> None:
    patch.setattr(opening, "_refuse", lambda *_: None)


def no_refusal_anywhere(patch: Patch) -> None:
    meaning = Origins.meaning

    def without(self: Origins, logs: Any, app: str, queues: Any, where: Any, _on_new: str, *rest: Any) -> Any:
        return meaning(self, logs, app, queues, where, "resume", *rest)

    patch.setattr(opening, "_refuse", lambda *_: None)
    patch.setattr(Origins, "meaning", without)


def gaps_are_fine(patch: Patch) -> None:
    expected = Ledger.expected
    patch.setattr(
        Ledger,
        "expected",
        lambda self, app_id, query_id: max(expected(self, app_id, query_id), self.__dict__.get("_wanted", 0)),
    )

    def without(opened: Any, of: Ledger, change: Any, batch: MicroBatch, _on_new: Any, *rest: Any) -> Any:
        of.__dict__["_wanted"] = batch.batch_id if of.entry(batch) is None else 0
        return opened(of, change, batch, "resume", *rest)

    around(patch, batches, "open_batch", without)


def parts_in_memory_only(patch: Patch) -> None:
    stage = Branches.stage

    def without(self: Branches, state: Any, change: Any, part: Any) -> None:
        before = len(change.journal)
        stage(self, state, change, part)
        change.journal[before:] = [entry for entry in change.journal[before:] if isinstance(entry, Drop)]

    patch.setattr(Branches, "stage", without)


def all_branches_of_the_token(patch: Patch) -> None:
    def without(self: Branches, token: str, _named: Any) -> Any:
        return [part for branch in sorted(self._by_token.get(token, ())) for part in self.parts(branch)]

    patch.setattr(Branches, "require", without)


def whatever_is_there(patch: Patch) -> None:
    patch.setattr(
        Branches,
        "require",
        lambda self, _token, named: [part for branch in named for part in self.parts(branch.branch)],
    )


def the_frame_is_not_executed(patch: Patch) -> None:
    patch.setattr(staging, "execute", lambda _frame: None)


def commits_are_not_remembered(patch: Patch) -> None:
    patch.setattr(Ledger, "entry", lambda *_: None)


def whatever_spark_committed_is_acknowledged(patch: Patch) -> None:
    patch.setattr(claim_rules, "is_consumed", lambda *_, **_named: True)


def whatever_is_claimed_below(patch: Patch) -> None:
    around(
        patch,
        MicroBatches,
        "_settled",
        lambda settled, self, log, start, end: start is None or settled(self, log, start, end),
    )


def any_range(patch: Patch) -> None:
    patch.setattr(Ledger, "require_ranges", lambda *_: None)


def orphans_stay(patch: Patch) -> None:
    patch.setattr(Branches, "orphans", lambda *_: [])
    patch.setattr(Branches, "settle", lambda *_: None)


def apply_at_the_next_start(patch: Patch) -> None:
    decided = Apply.decided
    patch.setattr(
        Apply,
        "decided",
        lambda self, spark, engine, *newest, **_named: None if newest else decided(self, spark, engine),
    )


def append_at_once(patch: Patch) -> None:
    def without(tx: BatchTransaction, rows: Any, table: str, **_options: Any) -> None:
        once = CommitId(tx.app_id, tx.sequence, {"token": tx._opened.token}, 0)
        append(rows.sparkSession, Table(table, table, ""), lambda _: rows, once)

    patch.setattr(BatchTransaction, "append", without)


def apply_from_a_new_execution(patch: Patch) -> None:
    """Two executions of the user's function, each staging half of what is decided: the rows are not of one
    execution.
    """
    marked = World.marked

    def without(run: Any, self: Transactional, batch: Any, *arguments: Any) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            append = BatchTransaction.append
            inner.setattr(
                BatchTransaction,
                "append",
                lambda tx, rows, table: append(tx, marked(tx._owner._fn.__self__, batch), table),
            )
            return run(self, batch, *arguments)

    around(patch, Transactional, "_decide", without)


def rows_may_be_freed_early(patch: Patch) -> None:
    def without(self: Branches, state: Any, change: Any, parts: Any) -> None:
        for part in parts:
            self.free(state, change, part.branch)

    patch.setattr(Branches, "published", without)


def only_tasks_note_what_they_read(patch: Patch) -> None:
    patch.setattr(BatchReads, "note", lambda *_: None)


def one_id_for_all_steps(patch: Patch) -> None:
    made = batch_transaction.txn_app_id
    patch.setattr(
        batch_transaction,
        "txn_app_id",
        lambda app, identity, location, step=0, restored=0: made(app, identity, location),
    )


def steps_in_another_order(patch: Patch) -> None:
    def without(grouped: Any, entry: Any) -> Any:
        tables, functions = grouped(entry)
        return [steps[::-1] for steps in tables], functions

    around(patch, apply, "_grouped", without)


def a_token_is_made_for_each_call(patch: Patch) -> None:
    patch.setattr(after_commit, "token", lambda name, entry: uuid4().hex)


def a_token_is_that_of_the_app(patch: Patch) -> None:
    patch.setattr(after_commit, "token", lambda name, entry: f"{entry.app_id}/{name}")


def coalesced_appends(patch: Patch) -> None:
    def without(self: DeltaLedger, spark: Any, entries: Any) -> None:
        rows = spark.createDataFrame([row for entry in entries for row in ledger_rows(entry)], LEDGER_COLUMNS)
        rows.coalesce(1).write.format("delta").mode("append").save(self._table)
        self._engine.mark_mirrored(self._app_id, entries[-1].sequence)

    patch.setattr(DeltaLedger, "_merge", without)


def rollback_of_what_is_decided(patch: Patch) -> None:
    def without(self: EmbeddedEngine, token: str) -> None:
        self.local.run(lambda state, change, _now: self._branches.drop(state, change, token))

    patch.setattr(EmbeddedEngine, "rollback_batch", without)


def a_replay_of_the_sink_fails(patch: Patch) -> None:
    stage = EmbeddedEngine.stage_part

    def without(self: EmbeddedEngine, header: Any, *arguments: Any) -> Any:
        try:
            return stage(self, header, *arguments)
        except BatchDecided as error:
            raise DataLoss(error.message) from error

    patch.setattr(EmbeddedEngine, "stage_part", without)


def claims_are_kept_by_app(patch: Patch) -> None:
    def without(self: Claims, change: Any, newest: Any) -> None:
        claims = self._by_app[newest.app_id]
        while len(claims) > claim_rules.KEPT_CLAIMS:
            self._drop(change, claims[0])

    patch.setattr(Claims, "prune", without)


def any_number_of_sources(patch: Patch) -> None:
    patch.setattr(ReaderLock, "take", lambda *_: None)


def acknowledged_ranges_are_not_passed(patch: Patch) -> None:
    patch.setattr(MicroBatches, "_settled", lambda *_: False)


def releases_are_forgotten(patch: Patch) -> None:
    patch.setattr(Releases, "left_at", lambda _self, _logs, _app_id, _names: {})


def nobody_looks_at_the_ledger(patch: Patch) -> None:
    patch.setattr(Resume, "ready", lambda *_: {})


def rows_may_come_before_their_batch_is_applied(patch: Patch) -> None:
    patch.setattr(DeltaLedger, "_due", lambda self: self._engine.unmirrored(self._app_id))


def tables_are_not_asked(patch: Patch) -> None:
    patch.setattr(checks, "refuse_what_was_done_elsewhere", lambda *_: None)


def too_few_messages_fix_no_start(patch: Patch) -> None:
    claim = EmbeddedEngine.claim

    def without(
        self: EmbeddedEngine,
        app_id: str,
        queues: Any,
        start: Any,
        limit: Any,
        origin: Any,
        on_new: Any,
        **named: Any,
    ) -> Any:
        starts = self.offsets(list(start), origin) if "start" in start.values() else start
        if (
            limit.min_rows
            and sum(one.rows for one in self.available(list(start), starts).values()) < limit.min_rows
        ):
            return start
        return claim(self, app_id, queues, start, limit, origin, on_new, **named)

    patch.setattr(EmbeddedEngine, "claim", without)


@dataclass
class Case:
    rule: str
    switch_off: Callable[[Patch], None]
    scenario: Callable[[World], None]
    options: dict[str, Any] = field(default_factory=dict)


NATIVE: dict[str, Any] = {"sink": "native"}
STEPS: dict[str, Any] = {"shape": ("steps", "publish")}
LATEST: dict[str, Any] = {"source_options": {"startingOffsets": "latest"}}
IDLE: dict[str, Any] = {"queues": ("in", "in2"), "joined": True, "kept": 2}
UNADMITTED: dict[str, Any] = {"unadmitted": True}
REPORTS: dict[str, Any] = {"unadmitted": True, "reports": 2}
MORE: dict[str, Any] = {
    "source_options": {"startingOffsets": "latest", "minOffsetsPerTrigger": "2", "maxTriggerDelay": "1h"}
}
SMALL: dict[str, Any] = {
    "queue_arguments": {"x-max-length": 2, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}
}

CASES = [
    Case(
        "s6_a_release_is_noted",
        releases_are_forgotten,
        an_operator_releases_the_queue_behind_a_decision,
        LATEST,
    ),
    Case(
        "s6_a_finished_checkpoint_goes_on",
        releases_are_forgotten,
        an_operator_releases_the_queue_behind_a_finished_batch,
        LATEST,
    ),
    Case("s1_symbolic_start", numbers_for_start, batch_0_of_latest_is_replayed, LATEST),
    Case(
        "s2_ack_first",
        no_ack_by_claim,
        checkpoint_is_lost_after_a_restart_with_a_sink_that_is_not_ours,
        {"sink": "other"},
    ),
    Case("s2_durable_claim", claim_in_memory_only, engine_dies_between_claim_and_read),
    Case("s2_immutable_claim", claims_may_move, two_drivers_ask_with_new_messages_between),
    Case("s2_start_named_by_spark", planned_ends_are_forgotten, decided_batch_is_replayed, UNADMITTED),
    Case(
        "s2_start_told_to_spark",
        told_ends_are_forgotten,
        a_batch_leaves_out_its_source_and_the_next_one_reads,
        UNADMITTED,
    ),
    Case("s2_ack_only_what_spark_named", every_start_is_acked, small_batches, REPORTS),
    Case("s2_lineage", any_start, checkpoint_of_another_broker, NATIVE),
    Case("s2_and_c1_new_checkpoint_fails", no_refusal_anywhere, new_checkpoint_and_nobody_resumes),
    Case("s2_resume_at_the_ledger", resume_at_acked, checkpoint_is_lost_behind_a_decision),
    Case("s2_claims_of_each_source", claims_are_kept_by_app, one_source_idles_beside_a_busy_one, IDLE),
    Case(
        "s2_one_source_per_queue",
        any_number_of_sources,
        one_queue_is_read_twice_in_one_query,
        {"twice": True},
    ),
    Case(
        "s2_a_start_is_fixed_by_the_first_question",
        too_few_messages_fix_no_start,
        a_stream_waits_for_more_from_the_latest_message_on,
        MORE,
    ),
    Case("s3_settled_ranges_resolve", settled_ranges_do_not_resolve, decided_batch_is_replayed),
    Case("s4_record_of_reads", reads_are_not_recorded, plain),
    Case(
        "s4_one_range_per_batch",
        a_batch_may_read_another_range,
        older_checkpoint_plans_a_decided_batch_with_another_range,
    ),
    Case(
        "s4_the_range_is_noted_whoever_has_read_it",
        only_tasks_note_what_they_read,
        checkpoint_is_lost_behind_a_decision,
        {"threads": True},
    ),
    Case("s5_deletion_by_acks_only", the_decision_deletes, decided_batch_is_replayed),
    Case("s5_the_last_range_is_kept", acks_delete_the_last_range, newest_commit_log_entry_is_lost),
    Case(
        "s2_only_what_is_decided_is_acknowledged",
        whatever_spark_committed_is_acknowledged,
        a_copy_of_a_claimed_batch_is_restored,
        NATIVE,
    ),
    Case(
        "c4_nothing_claimed_is_left_below_the_first_range",
        whatever_is_claimed_below,
        a_copy_is_restored_and_a_batch_goes_on_behind_its_claim,
        NATIVE,
    ),
    Case("s6_ownership", nobody_owns, another_consumer_takes_what_it_can),
    Case("s6_freeze", claims_freeze_nothing, claimed_messages_meet_a_full_queue, SMALL),
    Case("c1_lineage", no_refusal, new_checkpoint_where_only_the_source_resumes),
    Case(
        "c1_gap", gaps_are_fine, older_data_directory, NATIVE
    ),  # without a ledger in Delta, which stops it too
    Case("c2_durable_parts", parts_in_memory_only, engine_dies_between_decision_and_apply),
    Case("c2_named_branches_only", all_branches_of_the_token, tasks_are_run_twice),
    Case("c3_execute_once_a_function_that_does_nothing", the_frame_is_not_executed, plain, {"shape": ()}),
    Case("c3_execute_once_on_replay", the_frame_is_not_executed, decided_batch_is_replayed),
    Case("c4_idempotent", commits_are_not_remembered, answer_of_the_commit_is_lost),
    Case("c4_idempotent_native", commits_are_not_remembered, answer_of_the_commit_is_lost, NATIVE),
    Case(
        "c4_equal_range", a_decided_batch_may_read_more, older_checkpoint_plans_an_empty_batch_with_messages
    ),
    Case("c4_range_starts_at_the_ledgers_end", any_range, two_checkpoints_claim_behind_the_same_batch),
    Case(
        "c4_or_behind_what_is_acknowledged",
        acknowledged_ranges_are_not_passed,
        a_batch_does_not_read_its_source,
    ),
    Case("c4_branches_are_there", whatever_is_there, abort_comes_late),
    Case("c4_orphans_dropped", orphans_stay, orphans_everywhere),
    Case("c5_apply_before_return", apply_at_the_next_start, plain),
    Case("c5_decide_before_apply", append_at_once, plain),
    Case("c5_rows_of_one_execution", apply_from_a_new_execution, plain),
    Case("c5_rows_kept_until_applied", rows_may_be_freed_early, decided_batch_is_replayed),
    Case("c5_an_id_for_each_step", one_id_for_all_steps, plain, STEPS),
    Case("c5_steps_in_the_order_of_the_calls", steps_in_another_order, plain, STEPS),
    Case(
        "c5_token_of_the_decision",
        a_token_is_made_for_each_call,
        driver_dies_between_the_function_and_the_mark,
    ),
    Case("c5_token_of_one_batch", a_token_is_that_of_the_app, plain),
    Case("c6_one_commit_per_sequence", coalesced_appends, two_mirrors, {"ledger_sync": False}),
    Case(
        "c7_resume_behind_the_ledger", nobody_looks_at_the_ledger, the_engine_is_lost_behind_a_mirrored_batch
    ),
    Case(
        "c7_a_row_says_that_its_batch_is_applied",
        rows_may_come_before_their_batch_is_applied,
        the_engine_is_lost_before_a_mirrored_batch_is_applied,
        {"ledger_sync": False, "shape": ("append",)},
    ),
    Case(
        "c7_tables_know_what_the_ledger_does_not",
        tables_are_not_asked,
        the_engine_is_lost_behind_a_batch_that_only_a_table_has,
    ),
    Case("abort_refused_once_decided", rollback_of_what_is_decided, commit_raises_though_it_committed),
    Case("native_replay_stages_nothing", a_replay_of_the_sink_fails, decided_batch_is_replayed, NATIVE),
]


@pytest.mark.soak
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.rule)
def test_the_scenario_holds_with_every_rule(case: Case) -> None:
    with world(**case.options) as w:
        case.scenario(w)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.rule)
def test_the_model_sees_the_rule_switched_off(case: Case, monkeypatch: Patch) -> None:
    with world(**case.options) as w:
        case.switch_off(monkeypatch)
        with pytest.raises((Violation, AssertionError)):
            case.scenario(w)
