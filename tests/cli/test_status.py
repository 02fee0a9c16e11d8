"""``txmq status``: what it says, and its exit codes for a probe."""

from __future__ import annotations

import json
import os
import resource
import socket
from pathlib import Path

import pika
import pytest

from bench.ports import free_ports
from broker_core import __version__
from broker_core.launcher import Broker
from broker_core.server import status as status_reader
from broker_core.server.alarm import AlarmLimits
from broker_core.server.amqp.options import AmqpOptions
from tests.cli.test_accounts import Shell, shell
from txmq.admin import status

__all__ = ["shell"]


def test_it_counts_what_there_is_over_all_virtual_hosts(shell: Shell, tmp_path: Path) -> None:
    with Broker.open(tmp_path / "data", amqp=("127.0.0.1:0",)) as broker:
        broker.vhosts.add_vhost("sales")
        channels = [broker.channel(vhost=vhost) for vhost in ("/", "sales")]
        for channel in channels:
            channel.queue_declare("q")
            channel.publish(b"1", routing_key="q")
            channel.publish(b"2", routing_key="q")
        assert channel.get("q") is not None
        channel.tx_select()
        channel.publish(b"3", routing_key="q")
        channel.prepare("xid")
        attempt = broker.engine.open_batch("app", "query", 0, "fail")
        assert attempt.token
        with pika.BlockingConnection(pika.URLParameters(f"{broker.amqp_urls[0]}/%2F")):
            found = json.loads(shell.run("status", "--url", broker.url, "--json"))
        assert found.pop("uptime_s") >= 0
        levels = {level["name"]: level for level in found.pop("levels")}
        assert found == {
            "version": __version__,
            "pid": os.getpid(),
            "directory": str(tmp_path / "data"),
            "listens": [broker.url, *broker.amqp_urls],
            "vhosts": 2,
            "queues": 2,
            "messages": 4,
            "unacknowledged": 1,
            "connections": 1,
            "channels": 2,
            "prepared": 1,
            "staged": 1,
            "unapplied": 0,
            "lag_s": None,
            "alarms": [],
        }
        assert list(levels) == ["memory", "unsealed", "disk free", "files"]
        assert levels["unsealed"]["found"] > 0
        assert levels["files"]["limit"] == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        text = shell.run("status", "--data", str(tmp_path / "data"))
        assert f"version      {__version__}\n" in text and "alarms       none\n" in text


@pytest.mark.parametrize(
    ("limits", "name"),
    [
        (AlarmLimits(memory_bytes=-1), "memory"),
        (AlarmLimits(unsealed_bytes=-1), "unsealed"),
        (AlarmLimits(disk_free_bytes=1 << 62), "disk free"),
        (None, "files"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_alarm_is_named_with_its_numbers_and_is_exit_code_3(
    limits: AlarmLimits | None, name: str, shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if limits is None:
        monkeypatch.setattr(status_reader, "FILES_SHARE", 0.0)
    options = AmqpOptions(alarms=limits or AlarmLimits())
    with Broker.open(tmp_path / "data", amqp_options=options) as broker:
        assert shell.code("status", "--url", broker.url, "--json") == status.ALARM == 3
        found = json.loads(shell.output)
        assert found["alarms"] == [name]
        (level,) = [each for each in found["levels"] if each["alarm"]]
        assert level["name"] == name and level["limit"] != level["found"]
        assert shell.code("status", "--url", broker.url) == 3
        assert [line.split("  ")[0] for line in shell.output.splitlines() if "ALARM" in line] == [name]


def test_no_broker_is_exit_code_4_and_none_is_started(shell: Shell, tmp_path: Path) -> None:
    (port,) = free_ports(1)  # which no system gives to another process meanwhile
    with Broker.open(tmp_path / "data", port=port) as broker:
        url = broker.url
    assert shell.code("status", "--url", url) == status.NO_ANSWER == 4
    assert "nothing listens at" in shell.error and not shell.output
    assert shell.code("status", "--data", str(tmp_path / "data")) == 4
    assert "no broker runs for" in shell.error
    assert not (tmp_path / "data" / "endpoint.json").exists()
    # of a broker that was killed, and whose port another broker has
    with Broker.open(tmp_path / "data") as broker, Broker.open(tmp_path / "other") as other:
        text = (tmp_path / "data" / "endpoint.json").read_text()
        (tmp_path / "data" / "endpoint.json").write_text(text.replace(str(broker.port), str(other.port)))
        assert shell.code("status", "--data", str(tmp_path / "data")) == 4
    assert shell.code("status", "--data", str(tmp_path / "nothing")) == 1
    with socket.create_server(("127.0.0.1", 0)) as silent:  # as of a broker that is stopped
        assert shell.code("status", "--url", f"txmq://127.0.0.1:{silent.getsockname()[1]}") == 4
    assert "it accepts connections and answers nothing: try again, or restart it" in shell.error


def test_it_needs_a_tag(shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Broker.open(tmp_path / "data") as broker:
        for name, tags in (("ann", []), ("bob", ["monitoring"])):
            shell.run("user", "add", name, *(f"--tag={tag}" for tag in tags), "--data", str(tmp_path / "data"),
                      typed="secret")  # fmt: skip
        monkeypatch.setenv("TXMQ_PASSWORD", "secret")
        assert shell.code("status", "--url", broker.url, "--user", "ann") == 1
        assert "access to the state of the broker refused" in shell.error
        shell.run("permission", "set", "bob", "", "", "", "--data", str(tmp_path / "data"))
        assert shell.code("status", "--url", broker.url, "--user", "bob") == 0
        assert shell.code("status", "--url", broker.url, "--user", "eve") == 1
        assert "AUTH" in shell.error.upper() or "login" in shell.error.lower()
