"""Commands whose broker, terminal, reader or words are not as they should be: one clear end each."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from broker_core.launcher import Broker
from tests.amqp_server import serving
from tests.progress import wait_for_end, wait_until
from txmq import cli
from txmq.command.declare import ROOT, CommandOption

HOSTILE = "evil\x1b]0;title\x07\x1b[2J\x9b31m\u202e\r\nforged\x00"


def leaves(command: click.Command = ROOT, *words: str) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    if not isinstance(command, click.Group):
        yield words, command
        return
    for word, child in command.commands.items():
        yield from leaves(child, *words, word)


COMMANDS = dict(leaves())
OF_BROKER = {
    words: each for words, each in COMMANDS.items() if any("--timeout" in p.opts for p in each.params)
}


def filled(words: tuple[str, ...], value: str = "1") -> list[str]:
    """The words of a command with ``value`` for each argument and needed option."""
    found = list(words)
    for param in COMMANDS[words].params:
        if isinstance(param, click.Argument):
            found += [] if param.name in ("directory", "tags") else [value]
        elif param.required or (isinstance(param, CommandOption) and param.needed and "--to" in param.opts):
            found += [param.opts[0], value]
    return found


@pytest.fixture
def hostile(broker: Broker, url: str) -> str:
    """A broker with such a name of each kind."""
    with broker.channel() as channel:
        channel.queue_declare(HOSTILE)
        channel.exchange_declare(HOSTILE, "topic")
        channel.queue_bind(HOSTILE, HOSTILE, HOSTILE)
        channel.publish(HOSTILE.encode(), routing_key=HOSTILE)
        channel.tx_select()
        channel.publish(HOSTILE.encode(), routing_key=HOSTILE)
        channel.prepare(HOSTILE)
    broker.engine.open_batch(HOSTILE, HOSTILE, 0, "fail")
    return url


LISTS = ("queue list", "exchange list", "exchange bindings", "connection channels", "connection list", "connection consumers",
         "tx list", "history list", "app staged", "app list", "status", "broker export", "vhost list", "user list",
         "permission list", "policy list")  # fmt: skip


@pytest.mark.parametrize("json", [[], ["--json"]], ids=["table", "json"])
def test_no_list_has_an_escape_sequence_or_a_forged_line(
    hostile: str, json: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for words in LISTS:
        assert cli.main([*words.split(), *json, "--url", hostile]) == 0
        printed = capsys.readouterr()
        assert all(letter.isprintable() or letter == "\n" for letter in printed.out + printed.err), words
        assert "\nforged" not in printed.out + printed.err
    assert cli.main(["message", "peek", HOSTILE, *json, "--url", hostile]) == 0
    assert all(map(str.isprintable, capsys.readouterr().out.splitlines()))


def test_no_error_of_any_command_has_one(
    hostile: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for words in OF_BROKER:
        if words in (("top",), ("serve",)):
            continue
        for value in (HOSTILE, "\udc80", "", "日" * 300):
            monkeypatch.setattr(sys, "stdin", io.StringIO("secret\n"))
            with contextlib.suppress(SystemExit):
                cli.main([*filled(words, value), "--url", hostile])
            printed = capsys.readouterr()
            assert all(map(str.isprintable, printed.err.split("\n"))), (words, printed.err)
            assert "Traceback" not in printed.err and "\nforged" not in printed.err, (words, printed.err)


READS_FIRST = (
    ("top",),
    ("broker", "backup"),
    ("broker", "import"),
    ("message", "move"),
    ("policy", "set"),
    ("vhost", "limit"),
)  # what it is to do


def test_a_wrong_address_is_one_line_of_each_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for wrong, text in (
        ("nonsense", "must be txmq://"),
        ("txmq://h:99999", "port"),
        ("txmq://127.0.0.1:1", "127.0.0.1:1"),
        ("txmq://\x1b[2J", "its port must be a number"),
    ):
        monkeypatch.setenv("TXMQ_URL", wrong)
        for words in OF_BROKER:
            monkeypatch.setattr(sys, "stdin", io.StringIO("secret\n"))
            code = cli.main([*filled(words), "--yes"] if _has(words, "--yes") else filled(words))
            printed = capsys.readouterr()
            if words == ("broker", "setup") and code == 0:
                continue  # it has nothing to prepare there
            misused = "the queue itself" in printed.err or "no limit is named" in printed.err
            assert code in ((2,) if misused else (1, 4)) and printed.out == "", (words, printed)
            (line,) = printed.err.splitlines()
            assert line.isprintable() and line.startswith("txmq: [TXMQ_"), (words, line)
            assert text in line or words in READS_FIRST, (words, line)


def _has(words: tuple[str, ...], option: str) -> bool:
    return any(option in param.opts for param in COMMANDS[words].params)


def test_options_that_exclude_each_other_are_refused_by_each_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TXMQ_URL", "txmq://127.0.0.1:1")
    seen = 0
    for words, command in COMMANDS.items():
        for param in command.params:
            if isinstance(param, CommandOption) and param.rivals and param is param.rivals[0]:
                pair = [[each.opts[0], *([] if each.is_flag else ["1"])] for each in param.rivals]
                with pytest.raises(SystemExit, match="2"):
                    cli.main([*filled(words), *pair[0], *pair[1]])
                assert "is not allowed with" in capsys.readouterr().err
                seen += 1
    assert seen > 40


def test_a_reader_that_has_ended_is_no_error(hostile: str) -> None:
    for words in (
        ["--help"],
        ["queue", "list"],
        ["broker", "export"],
        ["queue", "list", "--json"],
        ["message", "peek", "--help"],
        ["completion", "bash"],
    ):
        more = ["--url", hostile] if words[-1] == "export" or words[:2] == ["queue", "list"] else []
        ours, theirs = os.pipe()
        os.close(ours)
        with open(theirs, "wb") as closed:
            done = subprocess.run(
                [sys.executable, "-m", "txmq", *words, *more],
                stdout=closed,
                stderr=subprocess.PIPE,
                check=False,
            )
        assert (done.returncode, done.stderr) == (0, b""), words


def test_a_broker_that_hangs_is_an_error_within_seconds(tmp_path: Path) -> None:
    """The commands wait for it at the same time."""
    with serving(tmp_path / "d") as hung, contextlib.ExitStack() as running:
        words_of = ("queue list", "status", "queue purge q --yes", "app list", "top")
        commands = [*(f"{words} --url {hung.url}" for words in words_of), f"status --data {tmp_path / 'd'}"]
        os.kill(hung.pid, signal.SIGSTOP)
        began = time.monotonic()
        waiting = [
            subprocess.Popen(
                [sys.executable, "-m", "txmq", *words.split()],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for words in commands
        ]
        for each in waiting:
            running.enter_context(each)
        for words, each in zip(commands, waiting, strict=True):
            out, told = each.communicate()
            assert each.returncode in (1, 4) and out == "" and told.count("\n") == 1, (words, told)
            assert not words.startswith("status") or each.returncode == 4
        assert time.monotonic() - began < 30


@pytest.mark.parametrize(
    "words",
    [
        ["queue", "list"],
        ["message", "move", "a", "--back"],
        ["queue", "purge", "q"],
        ["status"],
        ["message", "publish", "--queue", "q", "-"],
    ],
)
def test_ctrl_c_ends_a_command_that_waits(words: list[str]) -> None:
    command = [sys.executable, "-m", "txmq", *words, "--url", "txmq://127.0.0.1:1", "--timeout", "600"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as waiting:
        wait_until(lambda: Path(f"/proc/{waiting.pid}/wchan").exists() and _sleeps(waiting.pid), "it waits")
        waiting.send_signal(signal.SIGINT)
        wait_for_end(waiting, "it ends")
        assert waiting.stdout is not None and waiting.stderr is not None
        assert (waiting.returncode, waiting.stdout.read(), waiting.stderr.read()) == (130, "", "")


def _sleeps(pid: int) -> bool:
    """It has its libraries, and waits."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "_flight" in maps and state == "S"
