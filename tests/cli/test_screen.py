"""``txmq top`` and ``--watch`` on a real terminal (a pty): what is drawn, and how they end."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from broker_core.admin import QueueInfo
from broker_core.engine import AppInfo
from broker_core.launcher import Broker
from tests.amqp_server import serving
from tests.progress import Meter, wait_for_end
from txmq import cli
from txmq.admin.top import LiveRates
from txmq.output import cut

HOSTILE = "evil\x1b]0;title\x07\x1b[2J\x9b31m\u202e\r\nforged"
DRAWN = re.compile(r"\x1b\[H|\x1b\[K|\x1b\[J|\x1b\[\?1049[hl]|\x1b\[\?25[hl]")


class Terminal:
    """A command on a terminal of this size."""

    def __init__(self, *arguments: str, columns: int = 100, rows: int = 24) -> None:
        self.ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.before = termios.tcgetattr(theirs)
        self.seen = ""
        environment = {**os.environ, "TERM": "xterm", "PYTHONIOENCODING": "utf-8"}
        environment = {name: value for name, value in environment.items() if name not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "txmq", *arguments],
            stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, env=environment, start_new_session=True,
        )  # fmt: skip
        self.theirs = theirs

    def screen(self) -> list[str]:
        """The last whole picture."""
        pictures = self.seen.split("\x1b[H")
        whole = [each for each in pictures[1:] if each.endswith("\x1b[J") or "\x1b[J" in each]
        return [DRAWN.sub("", line) for line in whole[-1].split("\x1b[J")[0].split("\r\n")] if whole else []

    def until(self, condition: Callable[[list[str]], object], what: str) -> list[str]:
        meter = Meter()
        while not condition(self.screen()):
            assert self.process.poll() is None, (what, self.seen[-500:], self.errors())
            if select.select([self.ours], [], [], 0.2)[0]:
                self.seen += os.read(self.ours, 65536).decode(errors="replace")
            meter.check(f"{what}: {self.screen()}")
        return self.screen()

    def press(self, key: str) -> None:
        os.write(self.ours, key.encode())

    def errors(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.read().decode()

    def ended(self) -> int:
        """The exit code. The terminal is as it was."""

        def drain() -> bool:
            while select.select([self.ours], [], [], 0)[0]:
                self.seen += os.read(self.ours, 65536).decode(errors="replace")
            return self.process.poll() is not None

        meter = Meter()
        while not drain():
            select.select([self.ours], [], [], 0.2)
            meter.check("the command ends")
        drain()
        assert self.seen.endswith("\x1b[?25h\x1b[?1049l"), self.seen[-200:]
        assert termios.tcgetattr(self.theirs) == self.before
        return self.process.returncode


@contextlib.contextmanager
def terminal(*arguments: str, columns: int = 100, rows: int = 24) -> Iterator[Terminal]:
    shown = Terminal(*arguments, columns=columns, rows=rows)
    try:
        yield shown
    finally:
        if shown.process.poll() is None:
            shown.process.kill()
        shown.process.wait()
        assert shown.process.stderr is not None
        shown.process.stderr.close()
        os.close(shown.ours)
        os.close(shown.theirs)


def publish(broker: Broker, queue: str, count: int = 1) -> None:
    with broker.channel() as channel:
        channel.queue_declare(queue)
        for _ in range(count):
            channel.publish(b"x", routing_key=queue)


def test_top_shows_queues_and_pipelines_and_survives_a_broker_that_restarts(tmp_path: Path) -> None:
    with Broker.open(tmp_path / "data") as broker:
        publish(broker, "orders", 3)
        broker.engine.open_batch("etl", "query", 0, "fail")
        url, port = broker.url, int(broker.url.rpartition(":")[2])
        with contextlib.ExitStack() as stack:
            shown = stack.enter_context(terminal("top", "--interval", "0.1", "--url", url))
            shown.until(lambda lines: any(line.startswith("orders ") for line in lines), "the queue is there")
            publish(broker, "orders", 4)
            shown.until(
                lambda lines: "orders" in "".join(lines) and " 7 " in "".join(lines), "it has 7 messages"
            )
            broker.close()
            shown.until(lambda lines: "no answer for" in lines[0], "the broker is gone")
            with Broker.open(tmp_path / "data", port=port) as again:
                publish(again, "later")
                lines = shown.until(
                    lambda lines: any(line.startswith("later ") for line in lines), "it is back"
                )
                assert "no answer" not in lines[0]
                shown.press("q")
                assert (shown.ended(), shown.errors()) == (0, "")


@pytest.mark.parametrize("command", [["top"], ["queue", "list", "--watch", "0.1"], ["status", "--watch"]])
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, "q"])
def test_they_end_cleanly(broker: Broker, url: str, command: list[str], end: signal.Signals | str) -> None:
    publish(broker, "orders")
    with terminal(*command, "--url", url) as shown:
        shown.until(lambda lines: len(lines) > 2, "it is drawn")
        if isinstance(end, str):
            shown.press(end)
        else:
            shown.process.send_signal(end)
        assert (shown.ended(), shown.errors()) == (0, "")


@pytest.mark.parametrize("command", [["top"], ["queue", "list", "--watch"]])
def test_no_name_has_an_escape_sequence_and_each_line_fits(
    broker: Broker, url: str, command: list[str]
) -> None:
    publish(broker, HOSTILE)
    publish(broker, "日本語" * 10)
    with terminal(*command, "--url", url, columns=20, rows=6) as shown:
        lines = shown.until(lambda lines: len(lines) > 3, "it is drawn")
        assert len(lines) <= 6 and all(cut(line, 20) == line and line.isprintable() for line in lines)
        shown.press("q")
        assert shown.ended() == 0
    assert all(letter.isprintable() or letter in "\r\n" for letter in DRAWN.sub("", shown.seen))


def test_a_broker_that_hangs_is_said_and_q_ends(tmp_path: Path) -> None:
    with serving(tmp_path / "d") as hung:
        with terminal("top", "--interval", "0.1", "--url", hung.url) as shown:
            shown.until(lambda lines: any("0 queues" in line for line in lines), "it is drawn")
            os.kill(hung.pid, signal.SIGSTOP)
            shown.until(lambda lines: "no answer for" in lines[0], "the broker is silent")
            shown.press("q")
            assert shown.ended() == 0


def test_without_a_terminal_top_is_one_error_and_watch_prints_on(
    broker: Broker, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["top", "--url", url]) == 1
    assert capsys.readouterr().err.startswith(
        "txmq: [TXMQ_OPTION] this needs a terminal: use `txmq queue list"
    )
    command = [sys.executable, "-m", "txmq", "queue", "list", "--json", "--watch", "0.05", "--url", url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        assert json.loads(watching.stdout.readline()) == []
        publish(broker, "orders")
        assert any(json.loads(line) for line in iter(watching.stdout.readline, ""))
        watching.stdout.close()  # as `head` does
        assert wait_for_end(watching, "nobody reads it") == 0


def test_rates_are_those_between_two_looks() -> None:
    def look(next_offset: int, messages: int, sequence: int, now_s: float) -> list[str]:
        queue = QueueInfo("orders", messages, 0, next_offset, 1, "etl", True)
        app = AppInfo("etl", ("orders",), sequence, "query", 0, 5, 0, 0)
        return rates.screen([queue], [app], 20, now_s)

    rates = LiveRates()
    assert look(100, 100, 7, 1_000.0)[0] == "1 queues, 100 messages, 0.0/s in, 0.0/s out, 1 apps"
    head, _, _, queue, _, _, app = look(300, 50, 9, 1_002.0)
    assert head == "1 queues, 50 messages, 100.0/s in, 125.0/s out, 1 apps"
    assert queue.split() == ["orders", "50", "0", "100.0", "125.0", "1", "etl"]
    assert app.split() == ["etl", "5", "9", "1.0", "0", "orders"]
    assert " 0.0/s in, 0.0/s out" in look(0, 0, 0, 1_004.0)[0], "declared again"
