"""A data directory of format 5, from before there were virtual hosts: everything in it is in ``/``."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from broker_core import errors, failpoint
from broker_core.address import VHOST
from broker_core.broker.access.actor import Actor
from broker_core.broker.access.users import name_in, own_id
from broker_core.broker.state.records import RECORDS
from broker_core.engine import StagedBranch
from broker_core.launcher import Broker
from broker_core.store.catalog import FORMAT, OF_HOSTS, PAGE_BYTES
from broker_core.store.durable import DurableStore
from broker_core.store.salvage.salvage import salvage
from broker_core.store.salvage.verify import verify

FORMAT_5 = Path(__file__).with_name("catalog_format_5.sql")


@pytest.fixture
def old(tmp_path: Path) -> Path:
    directory = tmp_path / "data"
    directory.mkdir()
    (directory / "lock").write_text("1 host\n")
    (directory / "segments").mkdir()
    connection = sqlite3.connect(directory / "catalog.db", isolation_level=None)
    connection.executescript(f"PRAGMA page_size = {PAGE_BYTES};" + FORMAT_5.read_text())
    connection.close()
    return directory


def format_of(directory: Path) -> int:
    connection = sqlite3.connect(directory / "catalog.db")
    (found,) = connection.execute("SELECT format FROM meta").fetchone()
    connection.close()
    return int(found)


def test_everything_of_an_old_directory_is_in_the_virtual_host_that_is_always_there(old: Path) -> None:
    assert verify(old).ok and format_of(old) == 5
    with Broker.open(old) as broker:
        assert [info.name for info in broker.vhosts.vhosts()] == [VHOST]
        assert [(queue.name, queue.messages, queue.owner) for queue in broker.queues()] == [
            ("orders", 2, "app"),
            ("out", 0, ""),
        ]
        broker.vhosts.add_vhost("sales")
        assert broker.queues("sales") == [] and broker.engines.of("sales").apps() == []
        # the app goes on: its first batch is decided, its second one is staged
        engine = broker.engine
        (app,) = engine.apps()
        assert (app.app_id, app.sequence, app.batch_id, app.lag) == ("app", 1, 0, 2)
        (staged,) = engine._branches.of_token(own_id("ann", "second"))
        named = StagedBranch("staged", 0, 0, 1, staged.checksum)
        anns = engine.acting(Actor("ann", administers=False, operates=False))
        with pytest.raises(errors.MissingBranch, match="but 1 are staged"):  # not the checksum of a branch
            anns.commit_batch("app", "query", 1, "second", [named])
        assert broker.commit("order-7") == 0
        with broker.channel() as channel:
            delivery = channel.get("out", no_ack=True)
            assert delivery is not None and delivery.body == b"prepared"
            assert channel.publish(b"through both exchanges", "in", "b")
            assert channel.publish(b"by its pattern", "in", "a.x")
        (names, topics) = broker.accounts.permissions()
        assert (names.user, names.vhost, names.configure) == ("ann", VHOST, "^a")
        assert (topics.vhost, topics.exchange, topics.write) == (VHOST, "amq.topic", "^w")
        assert broker._local.state.users.apps["/", "app"] == "ann"
    with Broker.open(old) as broker:
        assert [(queue.name, queue.messages) for queue in broker.queues()] == [("orders", 4), ("out", 0)]
    assert verify(old).ok and format_of(old) == FORMAT


def test_each_record_is_kept_as_it_was_but_for_its_virtual_host_and_user(old: Path) -> None:
    connection = sqlite3.connect(old / "catalog.db")
    before = {
        cls: connection.execute(f'SELECT * FROM "{cls.TABLE}"').fetchall()
        for cls in RECORDS
        if cls.TABLE not in ("vhost", "release_note", "write_user", "history")  # of later formats
    }
    connection.close()
    assert all(before[cls] for cls in OF_HOSTS)  # no table is upgraded without a row
    DurableStore(old).close()
    connection = sqlite3.connect(old / "catalog.db")
    for cls, rows in before.items():
        after = connection.execute(f'SELECT * FROM "{cls.TABLE}"').fetchall()
        hosted = [(*row[:-1], VHOST) for row in rows] if cls in OF_HOSTS else [row[:-1] for row in rows]
        kept = [tuple(name_in(each) if isinstance(each, str) else each for each in row) for row in after]
        assert sorted(row[:-1] for row in kept) == sorted(hosted), cls
    connection.close()


def test_an_upgrade_that_a_crash_interrupts_leaves_the_old_format(old: Path) -> None:
    failpoint.arm("store.recovery.upgraded", "raise")
    try:
        with pytest.raises(errors.StoreError):
            DurableStore(old)
    finally:
        failpoint.disarm()
    assert format_of(old) == 5 and verify(old).ok
    with Broker.open(old) as broker:
        assert [queue.name for queue in broker.queues()] == ["orders", "out"]


def test_a_damaged_row_of_an_old_directory_is_refused_and_nothing_is_upgraded(old: Path) -> None:
    catalog = old / "catalog.db"
    catalog.write_bytes(catalog.read_bytes().replace(b'{"x-max-length":100}', b'{"x-max-length":900}'))
    with pytest.raises(errors.CorruptCatalog, match=r"a row of table queue with key .* its checksum"):
        DurableStore(old)
    assert format_of(old) == 5


def test_an_old_directory_is_salvaged(old: Path, tmp_path: Path) -> None:
    report = salvage(old, tmp_path / "new")
    assert report.inbox_rows == 4 and not [text for text in report.losses if "table" in text]
    with Broker.open(tmp_path / "new") as broker:
        assert [queue.name for queue in broker.queues()] == ["orders", "out"]
        assert [queue.name for queue in broker.queues() if queue.messages == 2] == ["orders"]
