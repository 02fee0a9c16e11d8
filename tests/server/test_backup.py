"""``txmq broker backup``: the copy of one moment, while the broker goes on."""

from __future__ import annotations

import json
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from broker_core.client import backup as client_backup
from broker_core.client.backup import Backup, backup
from broker_core.client.broker import BrokerClient
from broker_core.core import failpoint
from broker_core.core.address import parse_address
from broker_core.core.credentials import Credentials
from broker_core.core.endpoint import UNFINISHED
from broker_core.core.errors import (
    AccessRefused,
    DataDirectoryInvalid,
    OptionError,
    RemoteProtocolError,
    ResourceLocked,
    ResourceShortage,
)
from broker_core.core.password import hashed
from broker_core.launcher import Broker
from broker_core.store.catalog import CATALOG_COPY
from broker_core.store.durable import DurableStore
from broker_core.store.salvage.salvage import salvage
from broker_core.store.salvage.verify import verify
from tests.make import around
from tests.progress import wait_until

LARGE = 1_500  # messages that are a block of a segment


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with Broker.open(tmp_path / "data") as opened:
        yield opened
    failpoint.disarm()


def _backup(broker: Broker, to: Path) -> Backup:
    return backup(parse_address(broker.url), to)


def _pair(broker: Broker, number: int, count: int = 1) -> None:
    """The same messages in two queues, in one commit."""
    channel = broker.channel()
    channel.tx_select()
    for queue in ("a", "b"):
        for each in range(count):
            channel.publish(b"%d-%d" % (number, each), routing_key=queue)
    channel.tx_commit()
    channel.close()


def _bodies(broker: Broker, queue: str) -> list[bytes]:
    with BrokerClient(broker.url) as client:
        found = client.available([queue])[queue]
        return [
            row["body"]
            for batch in client.browse([(queue, found.start, found.end)])
            for row in batch.to_pylist()
        ]


def _declare(broker: Broker) -> None:
    with broker.channel() as channel:
        channel.queue_declare("a")
        channel.queue_declare("b")


def test_the_copy_is_of_one_moment_while_writers_go_on(broker: Broker, tmp_path: Path) -> None:
    _declare(broker)
    for number in range(3):
        _pair(broker, number, LARGE)
    confirmed, ending = [0, 1, 2], threading.Event()

    def write(writer: int) -> None:
        number = 10_000 * (writer + 1)
        while not ending.is_set():
            _pair(broker, number, LARGE if number % 20 == 0 else 1)
            confirmed.append(number)
            number += 1

    writers = [threading.Thread(target=write, args=(each,)) for each in range(3)]
    for each in writers:
        each.start()
    try:
        wait_until(lambda: len(confirmed) > 20)
        before = set(confirmed)
        copies = [_backup(broker, tmp_path / f"copy-{number}") for number in range(3)]
    finally:
        ending.set()
        for each in writers:
            each.join()
    for copy in copies:
        assert verify(copy.directory).problems == []
        with Broker.open(copy.directory) as opened:
            found = _bodies(opened, "a")
            assert found == _bodies(opened, "b"), "part of a commit"
            numbers = {int(body.partition(b"-")[0]) for body in found}
            assert before <= numbers <= {*confirmed}
            assert len(found) == sum(LARGE if n < 3 or n % 20 == 0 else 1 for n in numbers)
            _pair(opened, 1_000_000)
            assert len(_bodies(opened, "a")) == len(found) + 1
        with Broker.open(copy.directory):
            pass


def test_commits_seals_and_deletions_go_on_at_every_step_of_a_backup(broker: Broker, tmp_path: Path) -> None:
    """Each step waits for them, so it holds nothing that they need; the copy has what was there before."""
    _declare(broker)
    _pair(broker, 0, LARGE)
    with broker.local.open_store() as store:
        assert isinstance(store, DurableStore)
        for usage in store.segment_usage():
            store.roll(usage.number)
    segments = tmp_path / "data" / "segments"
    before, done = set(os.listdir(segments)), []

    def work() -> None:
        _pair(broker, len(done) + 1)
        _pair(broker, len(done) + 1, LARGE)
        with broker.channel() as channel:
            channel.queue_purge("a")
            channel.queue_purge("b")
        store.roll(max(usage.number for usage in store.segment_usage()))

    def meanwhile(name: str) -> None:
        other = threading.Thread(target=work)
        other.start()
        other.join(60)
        assert not other.is_alive(), f"{name} stops others"
        done.append(name)

    for name in ("store.backup.kept", "server.backup.catalog"):
        failpoint.arm(name, meanwhile)
    for hit in (1, 2, 3):
        failpoint.arm("server.backup.piece", meanwhile, hit=hit)
        failpoint.arm("server.backup.step", meanwhile, hit=hit)
    made = _backup(broker, tmp_path / "copy")
    assert {"store.backup.kept", "server.backup.step", "server.backup.catalog", "server.backup.piece"} <= set(
        done
    )
    wait_until(lambda: not before & set(os.listdir(segments)))  # what was kept for the backup is deleted
    assert not (tmp_path / "data" / CATALOG_COPY).exists()
    assert verify(made.directory).problems == []
    with Broker.open(made.directory) as copy:
        assert _bodies(copy, "a") == _bodies(copy, "b")


def test_a_segment_that_was_deleted_during_the_backup_is_in_the_copy(broker: Broker, tmp_path: Path) -> None:
    _declare(broker)
    _pair(broker, 0, LARGE)
    with broker.local.open_store() as store:
        (number,) = {usage.number for usage in store.segment_usage()}
        store.roll(number)

    def delete(_name: str) -> None:
        with broker.channel() as channel:
            channel.queue_delete("a")
            channel.queue_delete("b")
        broker.local.run(lambda _state, _change, _now: None)
        wait_until(lambda: number not in {usage.number for usage in store.segment_usage()})

    failpoint.arm("server.backup.catalog", delete)
    made = _backup(broker, tmp_path / "copy")
    wait_until(lambda: not list((tmp_path / "data" / "segments").iterdir()))
    with Broker.open(made.directory) as copy:
        assert len(_bodies(copy, "a")) == len(_bodies(copy, "b")) == LARGE


def test_users_prepared_transactions_and_the_identity_are_in_the_copy(broker: Broker, tmp_path: Path) -> None:
    _declare(broker)
    broker.accounts.add_user("ann", hashed("secret"), ["administrator"])
    broker.accounts.set_permissions("ann", ".*", ".*", ".*")
    channel = broker.channel()
    channel.tx_select()
    channel.publish(b"1", routing_key="a")
    channel.prepare("xid")
    address = parse_address(str(broker.url), credentials=Credentials(user="ann", password="secret"))
    made = backup(address, tmp_path / "copy")
    with Broker.open(made.directory) as copy:
        assert copy.engine.identity() == broker.engine.identity()
        assert [user.name for user in copy.accounts.users()] == ["ann"]
        assert [each.xid for each in copy.prepared()] == ["xid"]
        copy.commit("xid")
        assert [queue.messages for queue in copy.queues()] == [1, 0]
    line = json.loads((tmp_path / "data" / "audit.log").read_text().splitlines()[-1])
    assert (line["event"], line["user"], line["listener"]) == ("get.backup", "ann", "flight")


def test_only_its_owner_reads_the_copy(broker: Broker, tmp_path: Path) -> None:
    _declare(broker)
    _pair(broker, 0, LARGE)
    (tmp_path / "copy").mkdir(mode=0o777)
    made = _backup(broker, tmp_path / "copy")
    found = [Path(made.directory), *Path(made.directory).rglob("*")]
    assert {stat.S_IMODE(path.stat().st_mode) for path in found} == {0o700, 0o600}
    names = {path.relative_to(made.directory).parts[0] for path in found[1:]}
    assert names == {"catalog.db", "id", "lock", "segments", "sums"}, "neither token nor log"


def test_a_place_that_is_no_new_directory_is_refused_and_not_changed(broker: Broker, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").write_text("mine")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    for name, why in (
        ("file", "no directory"),
        ("full", "not empty: it has notes; name a new or an empty one"),
        ("link", "no directory"),
    ):
        with pytest.raises(DataDirectoryInvalid, match=why):
            _backup(broker, tmp_path / name)
    of_directory = parse_address(data=tmp_path / "data")
    with pytest.raises(DataDirectoryInvalid, match="is in the data directory"):
        backup(of_directory, tmp_path / "data" / "segments" / "copy")
    assert (tmp_path / "file").read_text() == (tmp_path / "full" / "notes").read_text() == "mine"
    assert list((tmp_path / "empty").iterdir()) == []


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("a file/copy", "Not a directory"),
        ("n" * 300, "File name too long"),
        ("loop/copy", "Too many levels of symbolic links"),
        ("/proc/copy", "No such file or directory"),
    ],
)
def test_an_impossible_place_is_named_with_what_is_wrong_with_it(
    place: str, why: str, broker: Broker, tmp_path: Path
) -> None:
    (tmp_path / "a file").touch()
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(DataDirectoryInvalid, match=why) as refused:
        _backup(broker, tmp_path / place)
    assert "name a new directory" in str(refused.value) and "finished" not in str(refused.value)


def test_a_second_backup_waits_for_its_turn_and_an_error_leaves_the_broker_whole(
    broker: Broker, tmp_path: Path
) -> None:
    _declare(broker)

    def again(_name: str) -> None:
        with pytest.raises(ResourceLocked, match="another backup of this broker is in progress"):
            _backup(broker, tmp_path / "second")

    steps = ("store.backup.kept", "server.backup.step", "server.backup.catalog", "server.backup.piece")
    for name in steps:
        failpoint.arm(name, again)
        made = _backup(broker, tmp_path / f"first at {name}")
        failpoint.disarm()
        assert (verify(made.directory).problems, (tmp_path / "second").exists()) == ([], False)
    for name in steps:
        failpoint.arm(name, "enospc")
        with pytest.raises(ResourceShortage, match="the backup was given up: "):
            _backup(broker, tmp_path / f"of {name}")
        failpoint.disarm()
        assert not (tmp_path / f"of {name}").exists(), "nothing came"
        _pair(broker, 1)
    assert broker.failure is None and not (tmp_path / "data" / CATALOG_COPY).exists()
    _backup(broker, tmp_path / "third")


def test_a_copy_that_was_not_finished_is_refused_by_whatever_opens_it(tmp_path: Path) -> None:
    with Broker.open(tmp_path / "data") as broker:
        made = _backup(broker, tmp_path / "copy")
    (tmp_path / "copy" / UNFINISHED).touch()
    before = sorted(path.name for path in (tmp_path / "copy").rglob("*"))
    opens = [
        lambda: Broker.open(made.directory),
        lambda: verify(made.directory),
        lambda: salvage(made.directory, tmp_path / "salvaged"),
    ]
    for opened in opens:
        with pytest.raises(DataDirectoryInvalid, match="is a backup that was not finished, and lacks data"):
            opened()
    assert sorted(path.name for path in (tmp_path / "copy").rglob("*")) == before


def test_it_needs_the_tag_administrator_and_a_directory(broker: Broker, tmp_path: Path) -> None:
    broker.accounts.add_user("ann", hashed("secret"), ["operator", "monitoring"])
    broker.accounts.set_permissions("ann", ".*", ".*", ".*")
    address = parse_address(broker.url, credentials=Credentials(user="ann", password="secret"))
    with pytest.raises(AccessRefused, match="a copy of the data directory refused for user 'ann'"):
        backup(address, tmp_path / "copy")
    assert not (tmp_path / "copy").exists(), "who may do it can have this place"
    with Broker.memory() as memory, pytest.raises(OptionError, match="is in memory"):
        _backup(memory, tmp_path / "of memory")


@pytest.mark.parametrize(
    "name",
    ["../outside", "/tmp/outside", "segments/../../outside", "segments/1.arrow", "endpoint.json", "a\0"],
)
def test_a_broker_cannot_write_elsewhere(
    name: str, broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_backup, "_pieces", lambda *_: iter([(name, b"x"), ("", b"{}")]))
    with pytest.raises(RemoteProtocolError, match="which a backup does not have"):
        _backup(broker, tmp_path / "deep" / "copy")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "deep"]
    assert sorted(path.name for path in (tmp_path / "deep" / "copy").iterdir()) == [
        UNFINISHED,
        "lock",
        "segments",
        "sums",
    ]


@pytest.mark.parametrize("change", ["less", "more", "another"])
def test_bytes_that_are_not_those_of_the_broker_are_found(
    change: str, broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _declare(broker)

    def changed(known: Any, *arguments: object) -> Iterator[tuple[str, bytes]]:
        for name, piece in known(*arguments):
            if name == "id":
                piece = {"less": piece[:-1], "more": piece + b"x", "another": b"X" + piece[1:]}[change]
            yield name, piece

    around(monkeypatch, client_backup, "_pieces", changed)
    with pytest.raises(RemoteProtocolError, match="is not what the broker has sent"):
        _backup(broker, tmp_path / "copy")
    assert (tmp_path / "copy" / UNFINISHED).exists()
