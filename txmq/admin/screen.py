"""A screen that is drawn again and again, for ``--watch`` and ``txmq top``.

Not here: what is shown. Another thread fetches it, so that keys work while a broker is silent.
Invariant: each line fits the terminal and has no escape sequence but ours. The terminal is as before however
the screen ends, SIGKILL excepted.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import shutil
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

from broker_core.core.errors import ConnectionFailed, OptionError, one_line
from txmq.command.declare import Options
from txmq.output import cut, print_lines

LOOK_S = 0.25  # how soon a key is seen
SILENT_S = 1.0  # more than the interval: the broker does not answer
Fetch = Callable[[int], Sequence[str]]  # given the rows of the terminal


def watch(options: Options) -> int:
    """The command again and again: on a screen, or, where standard output is no terminal, line by line."""
    printed = sys.stdout

    def fetch(_rows: int) -> list[str]:
        text = _Caught()
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
            options.command(options)
        return text.getvalue().splitlines()

    if printed.isatty() and not options.json:
        return show_live(fetch, options.watch, "txmq")
    while True:
        try:
            options.command(options)
        except ConnectionFailed as error:  # it may come back
            print_lines(f"txmq: {one_line(error)}", error=True)
        printed.flush()
        time.sleep(options.watch)


def show_live(fetch: Fetch, interval_s: float, title: str) -> int:
    """Draws what ``fetch`` returns until q or Ctrl-C. Raises OptionError, and what ``fetch`` cannot
    survive.
    """
    if not sys.stdout.isatty() or os.environ.get("TERM", "dumb") == "dumb":
        raise OptionError("this needs a terminal", "use `txmq queue list --watch --json` in a script")
    fetching = _Fetching(fetch, interval_s)
    out = sys.stdout
    with _screen(out) as key:
        threading.Thread(target=fetching.run, daemon=True).start()
        while True:
            columns, rows = shutil.get_terminal_size()
            lines = [fetching.head(title), *fetching.lines][:rows]
            text = "\n".join(f"{cut(line, columns)}\x1b[K" for line in lines)
            out.write(f"\x1b[H{text}\x1b[J")
            out.flush()
            if fetching.failed is not None:
                raise fetching.failed
            if key(LOOK_S) in ("q", "Q", "\x03", "\x04"):
                break
    return 0


class _Caught(io.StringIO):
    def isatty(self) -> bool:
        return True  # its tables fit the terminal


class _Fetching:
    """``lines``: those of the last answer. ``failed``: why there will be no more."""

    def __init__(self, fetch: Fetch, interval_s: float) -> None:
        self._fetch, self._interval_s = fetch, interval_s
        self._answered = time.monotonic()
        self._why = ""
        self.lines: Sequence[str] = ()
        self.failed: Exception | None = None

    def run(self) -> None:
        while self.failed is None:
            try:
                self.lines = self._fetch(shutil.get_terminal_size().lines - 1)
                self._answered, self._why = time.monotonic(), ""
            except ConnectionFailed as error:
                self._why = one_line(error)
            except Exception as error:
                self.failed = error
            time.sleep(self._interval_s)

    def head(self, title: str) -> str:
        silent_s = time.monotonic() - self._answered
        if self._why or silent_s > self._interval_s + SILENT_S:
            return f"{title}  no answer for {silent_s:.0f} s  q ends  {self._why}"
        return f"{title}  {time.strftime('%H:%M:%S')}  every {self._interval_s:g} s  q ends"


@contextlib.contextmanager
def _screen(out: TextIO) -> Iterator[Callable[[float], str]]:
    """The other screen of the terminal, without a cursor; a function that waits for a key."""
    keyboard = sys.stdin.fileno() if sys.stdin.isatty() else None
    before = termios.tcgetattr(keyboard) if keyboard is not None else None
    handlers = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP)}

    def key(wait_s: float) -> str:
        if keyboard is None:
            time.sleep(wait_s)
            return ""
        if not select.select([keyboard], [], [], wait_s)[0]:
            return ""
        return os.read(keyboard, 1).decode(errors="replace") or "q"  # the terminal is gone

    try:
        for each in handlers:
            signal.signal(each, signal.SIG_IGN if each == signal.SIGTSTP else signal.default_int_handler)
        if keyboard is not None:
            tty.setcbreak(keyboard)
        out.write("\x1b[?1049h\x1b[?25l")
        with contextlib.suppress(KeyboardInterrupt):
            yield key
    finally:
        with contextlib.suppress(OSError):
            out.write("\x1b[?25h\x1b[?1049l")
            out.flush()
        if keyboard is not None and before is not None:
            with contextlib.suppress(termios.error):
                termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
        for each, handler in handlers.items():
            signal.signal(each, handler)
