"""``txmq vhost``, and the virtual host of every other command."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker_core.launcher import Broker
from tests.cli.test_accounts import Shell, directory, shell

__all__ = ["directory", "shell"]


def test_virtual_hosts_of_a_running_broker(shell: Shell, tmp_path: Path) -> None:
    with Broker.open(tmp_path / "data") as broker:
        root, sales = ("--url", broker.url), ("--url", f"{broker.url}/sales")
        assert "added virtual host sales" in shell.run("vhost", "add", "sales", "--max-queues", "2", *root)
        shell.run("queue", "declare", "q", *root)
        shell.run("queue", "declare", "q", "--argument", "x-max-length=5", *sales)
        shell.run("message", "publish", "--queue", "q", "hello", *sales)
        shell.run("vhost", "limit", "sales", "--max-messages", "1", "--max-connections", "3", *root)
        nothing = {"connections": 0, "max_queues": None, "max_connections": None, "max_messages": None}
        assert shell.listed("vhost", "list", *root) == [
            {"name": "/", "queues": 1, "messages": 0, **nothing},
            {
                "name": "sales",
                "queues": 1,
                "connections": 0,
                "messages": 1,
                "max_queues": 2,
                "max_connections": 3,
                "max_messages": 1,
            },
        ]
        assert shell.code("message", "publish", "--queue", "q", "hello", *sales) == 1
        assert "vhost 'sales' is full" in shell.error
        shell.run("vhost", "limit", "sales", "--max-messages", "-1", *root)
        shell.run("message", "publish", "--queue", "q", "hello", *sales)
        assert [row["messages"] for row in shell.listed("queue", "list", *sales)] == [2]
        assert [row["messages"] for row in shell.listed("queue", "list", *root)] == [0]
        shell.run("vhost", "delete", "sales", "--yes", *root)
        assert shell.code("queue", "list", *sales) == 1 and "vhost sales not found" in shell.error


def test_virtual_hosts_of_a_directory(shell: Shell, directory: str) -> None:
    data = ("--data", directory)
    shell.run("vhost", "add", "a/b", *data)
    shell.run("queue", "declare", "q", *data, "--vhost", "a/b")
    assert shell.listed("queue", "list", *data) == []
    assert [row["name"] for row in shell.listed("queue", "list", *data, "--vhost", "a/b")] == ["q"]
    for wrong, why in (("", "is empty"), ("a\tb", "has control characters"), ("é" * 128, "has 256 bytes")):
        assert shell.code("vhost", "add", wrong, *data) == 1 and why in shell.error
        assert shell.code("queue", "list", *data, "--vhost", wrong) == 1 and why in shell.error
    assert shell.code("vhost", "delete", "/", "--yes", *data) == 1 and "cannot be deleted" in shell.error
    assert shell.code("vhost", "limit", "a/b", "--max-queues", "-2", *data) == 1
    assert shell.code("vhost", "limit", "a/b", *data) == 2
    assert "no limit is named" in shell.error and "one of --max-queues, --max-connections" in shell.error
    shell.run("vhost", "limit", "a/b", "--max-queues", "-1", *data)


def test_a_virtual_host_is_named_where_it_has_a_meaning(shell: Shell) -> None:
    assert shell.code("queue", "list", "--url", "txmq://h:1", "--vhost", "sales") == 1
    assert "the virtual host of a url is its path" in shell.error
    assert shell.code("queue", "list", "--url", "kafka://h:1", "--vhost", "sales") == 1
    assert "a cluster of Kafka has no virtual hosts" in shell.error
    with pytest.raises(SystemExit):
        shell.code("vhost", "add", "sales", "--max-queues", "many", "--url", "txmq://h:1")
