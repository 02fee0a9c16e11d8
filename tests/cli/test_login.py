"""How commands log in: the password comes from a file, standard input or the environment, and is never shown."""

from __future__ import annotations

import io
import json
import logging
import pickle
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from bench.certificates import Authority
from broker_core.client.broker import BrokerClient
from broker_core.core.credentials import PASSWORD_VARIABLE, Credentials
from broker_core.core.errors import OptionError
from broker_core.launcher import Broker
from broker_core.server.listener_options import ListenerOptions
from broker_core.server.tls import TlsOptions
from txmq.cli import main
from txmq.command.declare import ROOT

SECRET = "hunter2-not-to-be-seen"


@pytest.fixture
def known(tmp_path: Path) -> Iterator[list[str]]:
    """The arguments of a command for a broker with TLS, all but the password."""
    authority = Authority(tmp_path)
    pair = authority.sign()
    listeners = ListenerOptions(TlsOptions(pair.cert, pair.key))
    with Broker.open(tmp_path / "broker", users={"ann": SECRET}, listeners=listeners) as broker:
        with broker.channel() as channel:
            channel.queue_declare("q")
        yield ["--url", f"txmqs://localhost:{broker.port}", "--user", "ann", "--tls-ca", authority.ca]


def names(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [each["name"] for each in json.loads(capsys.readouterr().out)]


class Input(io.TextIOWrapper):
    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))


def test_the_password_comes_from_a_file_standard_input_or_the_environment(
    known: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "password"
    for content in (SECRET, SECRET + "\n", SECRET + "\r\n"):
        file.write_bytes(content.encode())
        assert main(["queue", "list", "--json", *known, "--login-password-file", str(file)]) == 0
        assert names(capsys) == ["q"]
    monkeypatch.setattr(sys, "stdin", Input(f"{SECRET}\nfirst\nsecond\n".encode()))
    assert main(["message", "publish", "--queue", "q", *known, "--login-password-file", "-", "-"]) == 0
    assert capsys.readouterr().out == "published 2\n"  # the lines after the password
    monkeypatch.setenv(PASSWORD_VARIABLE, SECRET)
    assert main(["queue", "list", "--json", *known]) == 0
    assert names(capsys) == ["q"]


def test_who_gives_no_password_is_told_the_option_for_it(
    known: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    of_url = ["--url", known[1].replace("://", "://ann@"), *known[4:]]
    for words in (of_url, known):
        assert main(["queue", "list", "--json", *words]) == 1
    (option, _) = re.findall(r"give (--\S+), or set TXMQ_PASSWORD", capsys.readouterr().err)
    (tmp_path / "password").write_text(SECRET)
    for words in (of_url, known):
        assert main(["queue", "list", "--json", *words, option, str(tmp_path / "password")]) == 0
        assert names(capsys) == ["q"]


def test_a_token_is_read_from_a_file(
    known: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = json.loads((tmp_path / "broker" / "endpoint.json").read_text())
    (tmp_path / "token").write_text(found["token"])
    url = [known[0], known[1], "--tls-ca", known[5], "--token-file", str(tmp_path / "token")]
    assert main(["queue", "list", "--json", *url]) == 0
    assert names(capsys) == ["q"]


def test_no_argument_of_any_command_is_a_secret() -> None:
    def options(command: click.Command) -> Iterator[str]:
        for param in command.params:
            yield from param.opts if isinstance(param, click.Option) else ()
        for each in getattr(command, "commands", {}).values():
            yield from options(each)

    found = {
        each for each in options(ROOT) if any(word in each for word in ("pass", "token", "secret", "key"))
    }
    files = {
        "--password-file",
        "--login-password-file",
        "--token-file",
        "--token-only",
        "--tls-key",
        "--routing-key",
    }
    assert found == files


@pytest.mark.parametrize("given", ["wrong", "missing", "empty", "nothing"])
def test_an_error_about_a_password_does_not_show_it(
    known: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    given: str,
) -> None:
    (tmp_path / "wrong").write_text(SECRET + "x")
    (tmp_path / "empty").write_text("\n")
    file = [] if given == "nothing" else ["--login-password-file", str(tmp_path / given)]
    with caplog.at_level(logging.DEBUG):
        assert main(["queue", "list", *known, *file]) == 1
    said = capsys.readouterr().err
    expected = {
        "wrong": "LOGIN_REFUSED",
        "missing": "cannot be read",
        "empty": "is empty",
        "nothing": "no password",
    }
    assert expected[given] in said and SECRET not in said + caplog.text
    assert given != "wrong" or "ann" in caplog.text


def test_no_text_of_a_client_has_its_secrets(tmp_path: Path) -> None:
    (tmp_path / "password").write_text(SECRET)
    for known in (
        Credentials(user="ann", password=SECRET),
        Credentials(user="ann", password_file=str(tmp_path / "password")),
        Credentials(token=SECRET),
    ):
        client = BrokerClient("txmq://localhost:1", credentials=known, connect_s=0)
        again = pickle.loads(pickle.dumps(client))
        assert SECRET in (again.address.credentials.password, again.address.credentials.token)
        with pytest.raises(Exception) as caught:
            again.queues()
        texts = [client, again, known, client.address, vars(again), caught.value]
        assert SECRET not in f"{texts} {texts!r} {client}"


@pytest.mark.parametrize(
    ("known", "text"),
    [
        (Credentials(user="ann"), "there is no password"),
        (Credentials(password=SECRET), "without option 'user'"),
        (Credentials(user="ann", password=SECRET, password_file="f"), "both given"),
        (Credentials(user="ann", password=SECRET, token=SECRET), "'token' is given with"),
        (Credentials(user="ann", password=SECRET + "\nx"), "an invalid character"),
        (Credentials(user="a:b", password=SECRET), "option 'user' has an invalid character"),
        (Credentials(token=SECRET + " x"), "option 'token' has an invalid character"),
        (Credentials(token=SECRET + "é"), "option 'token' has an invalid character"),
        (Credentials(tls_cert="c"), "'tlsCert' and 'tlsKey' is missing"),
    ],
)
def test_credentials_that_contradict_each_other_are_refused(known: Credentials, text: str) -> None:
    with pytest.raises(OptionError, match=text) as caught:
        known.resolved({})
    assert SECRET not in str(caught.value)


def test_a_url_may_have_the_login_and_then_no_option_has_it() -> None:
    url = f"txmq://ann:{SECRET}@localhost:1"
    with BrokerClient(url) as client:
        assert (client.address.credentials.user, client.address.credentials.password) == ("ann", SECRET)
        assert SECRET not in repr(client)
    for more in (Credentials(user="bob", password="x"), Credentials(token="t")):
        with pytest.raises(OptionError, match="give each of them once") as caught:
            BrokerClient(url, credentials=more)
        assert SECRET not in str(caught.value)
