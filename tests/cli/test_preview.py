"""What drops something, or decides it for good, says first what that is; with ``--yes`` it asks nobody."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from broker_core.engine import START, BranchHeader, Limit, Origin
from broker_core.launcher import Broker
from tests.cli.test_accounts import Shell, shell

__all__ = ["shell"]


@pytest.fixture
def directory(tmp_path: Path) -> str:
    return str(tmp_path / "data")


def _prepare(broker: Broker) -> None:
    """Something for each verb."""
    broker.vhosts.add_vhost("sales")
    with broker.channel() as channel:
        for queue in ("orders", "claimed"):
            channel.queue_declare(queue)
            channel.publish(b"x", routing_key=queue)
        channel.queue_bind("orders", "amq.topic", "key")
        channel.tx_select()
        for xid in ("first", "second"):
            channel.publish(b"x", routing_key="orders")
            channel.prepare(xid)
    broker.engine.claim("etl", ["claimed"], {"claimed": START}, Limit(), Origin(), "fail")
    rows = pa.record_batch({"v": [1, 2]})
    opened = broker.engine.open_batch("app", "q", 0, "fail")
    header = BranchHeader(
        opened.token, "branch", "append", {"table": "lake/a"}, app_id="app", query_id="q", batch_id=0
    )
    broker.engine.commit_batch("app", "q", 0, opened.token, [broker.engine.stage(header, [rows])])
    body = pa.RecordBatch.from_pydict({"body": pa.array([b"x"] * 3, pa.binary())})
    broker.engine.stage(BranchHeader("token", "of", "publish", {"routing_key": "orders"}), [body])


VERBS = {
    "tx commit first": "commit ends transaction first for good, with 1 publishes to orders and 0 acks",
    "tx forget first": "forget keeps from the manager of first that it is heuristically_committed",
    "tx rollback second": "rollback ends transaction second for good, with 1 publishes to orders",
    "app discard token": "discard drops 3 rows",
    "app release etl claimed --force": "release takes queue claimed from app etl, which has 1 messages to read",
    "app skip app 1 --to {}/skipped": "skip takes all of 2 rows for lake/a out of app app",
    "exchange unbind amq.topic orders key": "unbind removes the binding of amq.topic to orders by 'key'",
    "queue purge orders": "purge drops 2 messages of queue orders",
    "message move orders --to claimed": "move takes 2 messages of orders: 2 to claimed",
    "queue delete orders": "delete drops queue orders with 0 messages",
    "vhost delete sales": "delete drops virtual host sales with 0 queues, 0 messages and 0 connections",
}


def test_what_cannot_be_taken_back_says_first_what_it_is(
    directory: str, shell: Shell, tmp_path: Path
) -> None:
    with Broker.open(directory) as broker:
        _prepare(broker)
        for words, preview in VERBS.items():
            if words.startswith("message move"):
                shell.run("message", "publish", "--queue", "orders", "--data", directory, "a", "b")
            verb = [word.format(tmp_path) for word in words.split()]
            assert shell.code(*verb, "--data", directory) == 1, words
            assert preview in shell.error and "needs --yes" in shell.error and shell.output == "", shell.error
            shell.run(*verb, "--yes", "--json", "--data", directory)
        assert [queue.name for queue in broker.queues()] == ["claimed"]


def test_what_is_not_there_is_said_before_anybody_is_asked(directory: str, shell: Shell) -> None:
    with Broker.open(directory) as broker:
        for words in (
            "tx commit absent", "tx rollback absent", "tx forget absent", "app discard absent", "app release absent absent",
            "app skip absent 1 --to d", "queue purge absent", "message move absent --back", "vhost delete absent",
            "connection close absent", "queue skip-damaged absent",
        ):  # fmt: skip
            assert shell.code(*words.split(), "--data", directory) == 1
            assert "--yes" not in shell.error and shell.output == "", (words, shell.error)
        assert broker.queues() == []


def test_a_user_and_its_permissions_end_only_with_yes(directory: str, shell: Shell) -> None:
    with Broker.open(directory):
        shell.run("user", "add", "boss", "--tag", "administrator", "--data", directory, typed="secret\n")
        shell.run("user", "add", "ann", "--data", directory, typed="secret\n")
        shell.run("permission", "set", "ann", "a", "b", "c", "--data", directory)
        for words in ("permission clear ann", "user delete ann"):
            assert shell.code(*words.split(), "--data", directory) == 1 and "needs --yes" in shell.error
        assert [row["user"] for row in shell.listed("permission", "list", "--data", directory)] == ["ann"]
        for words in ("permission clear ann", "user delete ann"):
            shell.run(*words.split(), "--yes", "--data", directory)
        assert shell.listed("permission", "list", "--data", directory) == []
        assert [row["name"] for row in shell.listed("user", "list", "--data", directory)] == ["boss"]
