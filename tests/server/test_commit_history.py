"""The history of commits at the listeners: over Flight, over HTTP and with the commands, for each kind of user."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from broker_core.admin import TransactionInfo
from broker_core.broker.history.rows import PastCommit, commits
from broker_core.client.admin import RemoteAdmin
from broker_core.client.broker import BrokerClient
from broker_core.core import errors, failpoint
from broker_core.core import password as passwords
from broker_core.core.credentials import Credentials
from broker_core.core.records import HistoryRecord
from broker_core.engine import Limit, Origin, ReadTicket
from broker_core.launcher import Broker
from broker_core.node import committer
from broker_core.store.inbox import unpack_all
from broker_core.store.salvage.verify import verify
from tests.progress import wait_until
from txmq.cli import main

USERS = {"plain": (), "watcher": ("monitoring",), "other": ()}


@pytest.fixture
def broker(tmp_path: object) -> Iterator[Broker]:
    with Broker.open(f"{tmp_path}/data") as found:
        for user, tags in USERS.items():
            found.accounts.add_user(user, passwords.hashed(user), tags)
        found.accounts.set_permissions("plain", "^mine", "^mine", "^mine")
        yield found


def client(broker: Broker, user: str, vhost: str = "") -> BrokerClient:
    return BrokerClient(f"{broker.url}/{vhost}", credentials=Credentials(user, user))


def publish(broker: Broker, *queues: str, vhost: str = "/") -> int:
    """Publishes to each of the queues in one transaction, and returns its number."""
    with broker.channel(vhost=vhost) as channel:
        for queue in queues:
            channel.queue_declare(queue)
        channel.tx_select()
        for queue in queues:
            channel.publish(b"the body", routing_key=queue)
        channel.tx_commit()
    return broker.local.state.transactions.history.rows()[-1].last


def queues(found: TransactionInfo) -> list[str]:
    return [effect.queue for effect in found.effects]


def test_each_user_is_shown_what_its_permissions_allow(broker: Broker) -> None:
    both, secret = publish(broker, "mine", "secret"), publish(broker, "secret")
    with client(broker, "watcher") as watcher:
        assert queues(RemoteAdmin(watcher).transaction(both)) == ["mine", "secret"]
        assert queues(RemoteAdmin(watcher).transaction(secret)) == ["secret"]
        assert [each.sequence for each in RemoteAdmin(watcher).history(2)] == [secret, both]
        assert RemoteAdmin(watcher).message("secret", 1).steps[0].sequence == secret
    with client(broker, "plain") as plain:
        assert (
            queues(RemoteAdmin(plain).transaction(both)) == ["mine"]
            and RemoteAdmin(plain).transaction(both).listener == ""
        )
        assert [each.sequence for each in RemoteAdmin(plain).history()] == [both]
        with pytest.raises(errors.UnknownTransaction) as hidden:
            RemoteAdmin(plain).transaction(secret)
        with pytest.raises(errors.UnknownTransaction) as absent:
            RemoteAdmin(plain).transaction(secret + 1000)
        assert str(hidden.value).replace(str(secret), "") == str(absent.value).replace(str(secret + 1000), "")
        with pytest.raises(errors.QueueNotFound) as hidden_queue:
            RemoteAdmin(plain).message("secret", 0)
        with pytest.raises(errors.QueueNotFound) as no_queue:
            RemoteAdmin(plain).message("absent", 0)
        assert str(hidden_queue.value).replace("secret", "") == str(no_queue.value).replace("absent", "")
    with client(broker, "other") as other, pytest.raises(errors.TxmqError):
        RemoteAdmin(other).transaction(both)


def test_a_virtual_host_made_again_does_not_show_what_the_one_before_did(broker: Broker) -> None:
    broker.vhosts.add_vhost("theirs")
    number = publish(broker, "secret", vhost="theirs")
    publish(broker, "here")
    broker.vhosts.delete_vhost("theirs")
    broker.vhosts.add_vhost("theirs")
    broker.accounts.set_permissions("plain", ".*", ".*", ".*", vhost="theirs")
    later = publish(broker, "new", vhost="theirs")
    for user in ("plain", "watcher"):
        with client(broker, user, "theirs") as found:
            assert [each.sequence for each in RemoteAdmin(found).history()] == [later]
            with pytest.raises(errors.UnknownTransaction):
                RemoteAdmin(found).transaction(number)
            with pytest.raises(errors.QueueNotFound):
                RemoteAdmin(found).message("secret", 0)


def test_a_micro_batch_says_its_app_and_what_goes_to_tables(broker: Broker) -> None:
    publish(broker, "in")
    engine = broker.engine
    end = engine.claim("app", ["in"], {"in": "start"}, Limit(), Origin(), "fail")
    ranges = engine.resolve("app", {"in": "start"}, end)
    token = engine.open_batch("app", "query", 0, "fail").token
    list(engine.read(ReadTicket("app", "query", 0, ranges, (("in", *ranges["in"]),))))
    engine.commit_batch("app", "query", 0, token, [])
    with client(broker, "watcher") as watcher:
        (found, *_) = RemoteAdmin(watcher).history()
        assert (found.listener, found.app_id, found.query_id, found.batch_id) == ("spark", "app", "query", 0)
        assert [(each.effect, each.queue, each.ranges) for each in found.effects] == [
            ("consumed", "in", ((0, 1),))
        ]
        life = RemoteAdmin(watcher).message("in", 0)
        assert [each.effect for each in life.steps] == ["published", "consumed"]
        assert (life.state, life.steps[1].app_id, life.steps[1].batch_id) == ("settled", "app", 0)


def test_the_commands_say_it_as_text_and_as_json(broker: Broker, capsys: pytest.CaptureFixture[str]) -> None:
    number = publish(broker, "in")
    at = ("--data", broker.directory)
    assert main(["history", "show", str(number), *at]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"transaction {number}  ") and "published 1 in at 0" in text
    assert "the body" not in text
    assert main(["history", "show", str(number), *at, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["effects"][0]["ranges"] == [[0, 1]]
    assert main(["message", "show", "in", "0", *at]) == 0
    text = capsys.readouterr().out
    assert text.startswith("message 0 of queue in: ready") and f"by transaction {number}" in text
    for queue, text in (
        ("in", "has no message at offset 7: its next message gets offset 1"),
        ("none", "no queue 'none'"),
    ):
        assert main(["message", "show", queue, "7", *at]) != 0
        assert text in capsys.readouterr().err
    assert main(["history", "list", "--last", "1", *at, "--json"]) == 0
    assert [row["sequence"] for row in json.loads(capsys.readouterr().out)] == [number]
    assert main(["history", "show", "999999", *at]) != 0
    assert "[TXMQ_UNKNOWN_TRANSACTION]" in capsys.readouterr().err


@pytest.mark.parametrize(
    "sizes",
    [[100] * 7, [30_000] * 7, [2_000_000, 100], [100, 2_000_000], [2_000_000, 100, 100, 2_000_000]],
    ids=["share a row", "in several rows", "a block and a row", "a row and a block", "blocks and rows"],
)
def test_commits_of_a_group_are_the_same_after_a_restart(
    tmp_path: Path, sizes: list[int], monkeypatch
) -> None:
    """Each publishes one message, for one of three users; the history is in the rows of the messages, if each
    has one: a large message is in a block.
    """
    monkeypatch.setattr(committer, "PLAN_S", 60.0)  # one group, however busy the machine is
    with Broker.open(tmp_path / "data") as broker:
        publish(broker, "q0", "q1", "q2")
        works, held, go_on = broker.local.committer, threading.Event(), threading.Event()

        def hold(_name: str) -> None:
            held.set()
            assert go_on.wait(600)

        def commit(number: int, size: int = 100) -> None:
            with broker.local.channel(user=f"user {number % 3}") as channel:
                channel.tx_select()
                channel.publish(bytes(size), routing_key=f"q{number % 3}")
                channel.tx_commit()

        for number in range(3):  # whose names are in the history of the block from now on
            commit(number)
        failpoint.arm("committer.durable", hold)
        with ThreadPoolExecutor(1 + len(sizes)) as pool:
            try:
                done = [pool.submit(commit, 0)]
                assert held.wait(600)
                for number, size in enumerate(sizes, 1):  # in this order
                    done.append(pool.submit(commit, number, size))
                    wait_until(lambda number=number: len(works.waiting) == number)
            finally:
                go_on.set()
        assert [each.result() for each in done] == [None] * len(done)
        before = broker.local.run(lambda state, _change, _now: state.transactions.history.rows())
    with contextlib.closing(sqlite3.connect(tmp_path / "data" / "catalog.db")) as catalog:
        _, beside = unpack_all(
            catalog.execute("SELECT id, count, messages FROM inbox ORDER BY id").fetchall()
        )
    assert (b'"own"' in beside[-1].text and len(beside[-1].messages) == len(sizes)) == (set(sizes) == {100})
    with Broker.open(tmp_path / "data") as broker:
        after = broker.local.run(lambda state, _change, _now: state.transactions.history.rows())
        assert list(map(commits_of, after)) == list(map(commits_of, before))


def commits_of(row: HistoryRecord) -> list[PastCommit]:
    return list(commits(row))


def test_it_is_in_the_data_directory_beside_messages_as_records_and_packed(tmp_path: Path) -> None:
    def told(broker: Broker) -> list[TransactionInfo]:
        with BrokerClient(broker.url) as found:
            return RemoteAdmin(found).history(1_000)

    with Broker.open(tmp_path / "data") as broker:
        for number in range(300):
            publish(broker, f"q{number % 3}")
        broker.local.upkeep.tick()
        publish(broker, "q0")
        with broker.channel() as channel:
            channel.queue_purge("q1")
        before = told(broker)
        assert len(before) == 302
    assert verify(tmp_path / "data").ok
    with Broker.open(tmp_path / "data") as broker:
        assert told(broker) == before
