"""A data directory of format 8, in which tokens and branches had no user: those of an app are its owner's since
then, and a batch write its user's.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from broker_core import errors, failpoint
from broker_core import password as passwords
from broker_core.broker.access.actor import Actor
from broker_core.broker.access.users import name_in
from broker_core.broker.state.change import Change
from broker_core.broker.state.records import (
    AttemptRecord,
    LedgerRecord,
    OutcomeRecord,
    PartRecord,
    Record,
    WriteUserRecord,
)
from broker_core.engine import BranchHeader, Engine, StagedBranch
from broker_core.launcher import Broker
from broker_core.store.catalog import FORMAT, Catalog
from broker_core.store.codec import encode_change
from broker_core.store.salvage.salvage import salvage
from broker_core.store.salvage.verify import verify

ANN = Actor("ann", administers=False, operates=False)
BEA = Actor("bea", administers=False, operates=False)
ROWS = pa.record_batch({"body": pa.array([b"one", b"two"], pa.binary())})


def of_format_8(record: Record) -> Record:
    match record:
        case PartRecord():
            return replace(record, token=name_in(record.token), branch=name_in(record.branch))
        case LedgerRecord():
            branches = [[kind, target, name_in(name), rows] for kind, target, name, rows in record.branches]
            return replace(record, token=name_in(record.token), branches=branches)
        case AttemptRecord() | WriteUserRecord():
            return replace(record, token=name_in(record.token))
        case OutcomeRecord():
            return replace(record, xid=record.xid.replace("write@%2F@ann:", "batch:"))
    return record


def taken_back(directory: Path) -> None:
    """The catalog as a broker of format 8 has left it."""
    with closing(Catalog(directory / "catalog.db")) as catalog:
        change = Change()
        for record in list(catalog.records()):
            change.drop(type(record), record.key)
            change.put(of_format_8(record))
        catalog.begin()
        catalog.put_records([encode_change(change)])
        catalog.set_meta(format=8)
        catalog.commit()
    with closing(sqlite3.connect(directory / "catalog.db")) as connection:
        connection.execute("DROP TABLE history")  # of format 10


def staged(engine: Engine, token: str, branch: str, **batch: object) -> StagedBranch:
    return engine.stage(BranchHeader(token, branch, "append", {"table": "t"}, **batch), [ROWS])  # type: ignore[arg-type]


@pytest.fixture
def old(tmp_path: Path) -> tuple[Path, dict[str, StagedBranch]]:
    """ann has an app with a decided and an open batch, an open batch write and one that is committed."""
    found = {}
    with Broker.open(tmp_path / "data") as broker:
        for user in ("ann", "bea"):
            broker.accounts.add_user(user, passwords.hashed("secret", passwords.Cost(4)))
        engine = broker.engine.acting(ANN)
        engine.open_batch("app", "query", 0, "fail", token="first")
        found["decided"] = staged(engine, "first", "decided", app_id="app", query_id="query", batch_id=0)
        engine.commit_batch("app", "query", 0, "first", [found["decided"]], consumes=False)
        engine.open_batch("app", "query", 1, "fail", token="second")
        found["open"] = staged(engine, "second", "open")
        found["write"] = staged(engine, "write", "written")
        done = staged(engine, "done", "done")
        engine.commit_branches("done", [done])
        found["done"] = done
    taken_back(tmp_path / "data")
    return tmp_path / "data", found


@pytest.mark.parametrize("salvaged", [False, True])
def test_what_was_staged_and_decided_is_that_of_its_user(
    old: tuple[Path, dict[str, StagedBranch]], salvaged: bool, tmp_path: Path
) -> None:
    directory, found = old
    assert verify(directory).ok
    if salvaged:
        salvage(directory, tmp_path / "new")
        directory = tmp_path / "new"
    with Broker.open(directory) as broker:
        assert {(each.token, each.user) for each in broker.engine.attempts()} == {
            ("second", "ann"),
            ("write", "ann"),
        }
        bea = broker.engine.acting(BEA)
        with pytest.raises(errors.MissingBranch):
            bea.commit_branches("write", [found["write"]])
        ann = broker.engine.acting(ANN)
        (entry,) = ann.unapplied("app")
        assert entry.token == "first"
        assert [rows.num_rows for rows in ann.read_branches(entry.to_apply[0].branches)] == [2]
        with pytest.raises(errors.BatchDecided):  # a late task
            staged(ann, "first", "late")
        assert not ann.commit_batch("app", "query", 1, "second", [found["open"]], consumes=False).already
        assert ann.commit_branches("write", [found["write"]]) == 2
        assert ann.commit_branches("done", [found["done"]]) == 2  # its answer was lost
        assert broker.engine.attempts() == []
    with closing(Catalog(directory / "catalog.db")) as catalog:
        assert catalog.meta().format == FORMAT


def test_an_upgrade_that_a_crash_interrupts_leaves_format_8(
    old: tuple[Path, dict[str, StagedBranch]],
) -> None:
    directory, found = old
    failpoint.arm("store.recovery.upgraded", "raise")
    try:
        with pytest.raises(errors.StoreError):
            Broker.open(directory)
    finally:
        failpoint.disarm()
    with Broker.open(directory) as broker:
        assert broker.engine.acting(ANN).commit_branches("write", [found["write"]]) == 2
