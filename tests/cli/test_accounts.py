"""``txmq user`` and ``txmq permission``, against a running broker and on a directory."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from broker_core.client.accounts import RemoteAccounts
from broker_core.client.broker import BrokerClient
from broker_core.core import errors
from broker_core.launcher import Broker
from tests.server.conftest import end_broker
from txmq import cli


class Shell:
    """Runs commands in this process; ``typed`` is their standard input."""

    def __init__(self, capsys: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch) -> None:
        self._capsys, self._patch = capsys, patch

    def run(self, *arguments: str, typed: str = "") -> str:
        assert self.code(*arguments, typed=typed) == 0, self.error
        return self.output

    def code(self, *arguments: str, typed: str = "") -> int:
        self._patch.setattr(sys, "stdin", io.StringIO(typed))
        code = cli.main(arguments)
        self.output, self.error = self._capsys.readouterr()
        return code

    def listed(self, *arguments: str) -> Any:
        return json.loads(self.run(*arguments, "--json"))


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    return Shell(capsys, monkeypatch)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[str]:
    made = tmp_path / "data"
    made.mkdir()
    yield str(made)
    end_broker(made)


def test_users_and_permissions_of_a_running_broker(shell: Shell, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("of root\nanother line\n")
    with Broker.open(tmp_path / "data") as broker:
        first = ("--url", broker.url)
        assert shell.listed("user", "list", *first) == [
            {"name": "guest", "tags": ["administrator"], "source": "default"}
        ]
        assert shell.code("permission", "set", "guest", ".*", ".*", ".*", *first) == 1
        assert (
            "user 'guest' is the default user, and has all permissions: add it with `txmq user add`"
            in shell.error
        )
        said = shell.run(
            "user", "add", "root", "--tag", "administrator", "--password-file", str(secret), *first
        )
        assert "without permissions" in said and "of root" not in said
        assert shell.code("user", "list", *first) == 1 and "TXMQ_LOGIN_REFUSED" in shell.error
        client = BrokerClient(broker.url.replace("txmq://", "txmq://root:of%20root@"))
        with client:
            accounts = RemoteAccounts(client)
            assert [user.name for user in accounts.users()] == ["root"]
            accounts.add_user("ann", "a password", ["monitoring"])
            accounts.set_password("ann", "another")
            accounts.set_tags("ann", [])
            accounts.set_permissions("ann", "a", "b", "c")
            accounts.set_topic_permissions("ann", "amq.topic", "w", "r")
            accounts.clear_topic_permissions("ann")
            accounts.clear_permissions("ann")
            accounts.delete_user("ann")
            with pytest.raises(errors.OptionError, match="the last one"):
                accounts.delete_user("root")


def test_users_and_permissions_of_a_directory(shell: Shell, directory: str) -> None:
    data = ("--data", directory)
    said = shell.run("user", "add", "root", *data, "--password-file", "-", typed="of root\n")
    assert "no user is an administrator: `txmq user tag root administrator --data DIR`" in said
    said = shell.run("user", "add", "ann", "--tag", "monitoring", *data, typed="of ann\n")
    assert "no user is an administrator" not in said
    assert shell.code("user", "add", "bob", *data, typed="\n") == 1
    assert "the password is empty" in shell.error
    shell.run("user", "tag", "root", "administrator", *data)
    shell.run("user", "passwd", "ann", *data, typed="another\n")
    shell.run("permission", "set", "ann", "^a", "", ".*", *data)
    shell.run("permission", "set-topic", "ann", "amq.topic", "^w", "^r", *data)
    assert shell.listed("user", "list", *data) == [
        {"name": "ann", "tags": ["monitoring"], "source": "catalog"},
        {"name": "root", "tags": ["administrator"], "source": "catalog"},
    ]
    topic = {
        "user": "ann",
        "vhost": "/",
        "exchange": "amq.topic",
        "configure": "",
        "write": "^w",
        "read": "^r",
    }
    names = {"user": "ann", "vhost": "/", "exchange": "", "configure": "^a", "write": "", "read": ".*"}
    assert shell.listed("permission", "list", *data) == [names, topic]
    clear = ("permission", "clear-topic", "ann")
    assert shell.run(*clear, "logs", *data) == "user ann had no topic permissions for exchange logs\n"
    assert shell.listed("permission", "list", *data) == [names, topic]
    assert shell.run(*clear, *data) == "cleared the topic permissions of user ann for amq.topic\n"
    assert shell.run(*clear, *data) == "user ann had no topic permissions\n"
    assert shell.listed(*clear, *data) == {"user": "ann", "exchanges": []}
    assert shell.listed("permission", "list", *data) == [names]
    shell.run("permission", "clear", "ann", "--yes", *data)
    assert shell.listed("permission", "list", *data) == []
    assert shell.code("permission", "set", "ann", "(", "", "", *data) == 1
    assert "'(' is not a regular expression" in shell.error
    shell.run("user", "delete", "ann", "--yes", *data)
    assert [user["name"] for user in shell.listed("user", "list", *data)] == ["root"]


def test_the_default_user_is_added_as_the_error_says_and_takes_permissions(
    shell: Shell, directory: str
) -> None:
    on = ("--data", directory)
    for words in (
        ("permission", "set", "guest", "a", "b", "c"),
        ("user", "passwd", "guest", "--password-file", "-"),
    ):
        assert shell.code(*words, *on, typed="secret\n") == 1
        assert "add it with `txmq user add`" in shell.error
    shell.run("user", "add", "guest", "--password-file", "-", *on, typed="secret\n")
    shell.run("permission", "set", "guest", "a", "b", "c", *on)
    assert shell.listed("permission", "list", *on)[0]["write"] == "b"


def test_a_password_is_no_argument(shell: Shell, directory: str) -> None:
    with pytest.raises(SystemExit):
        shell.code("user", "add", "ann", "a password", "--data", directory)
    with pytest.raises(SystemExit):
        shell.code("user", "add", "ann", "--password", "a password", "--data", directory)
