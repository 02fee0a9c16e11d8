"""Programs in other languages: each checks one side of a broker and prints a line per check, which becomes a
test of its own.

A program prints ``ok NAME``, ``FAILED NAME: why`` or ``skipped NAME: why``, and ``kill the broker`` where it
wants that done. The names are read from its source when tests are collected.
Not here: the programs, and how a language is built.
Invariant: a program runs once per module, a check that printed nothing fails, and no program outlives its
time.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.amqp_server import AmqpServed, serving

LIMIT_S = 1_200.0  # a program waits for itself; this ends one that waits for ever
KILL = "kill the broker"
LINE = re.compile(r"(ok|FAILED|skipped) (.*)")
CHECK = re.compile(r'(?:check|only)\((?:"txmq", )?"([^"]+)"')


def checks_of(source: Path) -> list[str]:
    """The names of the checks in a source file, in its order."""
    names = CHECK.findall(source.read_text())
    assert names, f"{source.name} has no checks"
    assert len(set(names)) == len(names), f"{source.name} has two checks of one name"
    return names


@dataclass(frozen=True)
class Ended:
    """A program that has run: its lines, what it said on stderr, and its exit code (negative: the signal)."""

    lines: Sequence[str]
    errors: str
    code: int

    @property
    def words(self) -> str:
        return "\n".join([*self.lines[-20:], self.errors[-5000:], f"exit code {self.code}"])

    def verdict(self, check: str) -> None:
        """Passes, fails or skips the test that asks for this check."""
        for line in self.lines:
            found = LINE.match(line)
            if found and (found[2] == check or found[2].startswith(f"{check}: ")):
                break
        else:
            pytest.fail(f"the program did not come to {check!r}:\n{self.words}")
        if found[1] == "skipped":
            pytest.skip(found[2].removeprefix(f"{check}: "))
        assert found[1] == "ok", f"{found[2]}\n{self.errors[-5000:]}"

    def complete(self, checks: Iterable[str]) -> None:
        """Every check came once, nothing else was printed, and the exit code tells whether one failed."""
        printed = [LINE.match(line) for line in self.lines if line != KILL]
        assert all(printed), self.words
        names = [found[2] if found[1] == "ok" else found[2].partition(": ")[0] for found in printed if found]
        assert sorted(names) == sorted(checks), self.words
        assert self.code == int(any(found[1] == "FAILED" for found in printed if found)), self.words


def run(command: Sequence[str], folder: Path, kill: Callable[[], object] | None = None) -> Ended:
    """Runs a program to its end in ``folder``; ``kill`` does what it asks for. It is killed after
    ``LIMIT_S``.
    """
    lines: list[str] = []
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, cwd=folder, text=True)
        limit = threading.Timer(LIMIT_S, process.kill)
        limit.start()
        try:
            assert process.stdout is not None
            with process.stdout as output:
                for line in output:
                    lines.append(line.rstrip("\n"))
                    if lines[-1] == KILL:
                        assert kill is not None, "the program wants the broker killed, which is not ours"
                        kill()
            code = process.wait()
        finally:
            limit.cancel()
            process.kill()
            process.wait()
        errors.seek(0)
        return Ended(lines, errors.read(), code)


class Programs:
    """The programs of one language against one broker, each run when the first of its checks is asked for."""

    def __init__(self, url: str, folder: Path, served: AmqpServed | None) -> None:
        self.url, self.folder, self._served = url, folder, served
        self._ended: dict[str, Ended] = {}

    def ended(self, name: str, command: Sequence[str], *, kills: bool = False) -> Ended:
        """The program of this name, which has run with the broker's URL as last argument. Skips where it may
        not kill the broker.
        """
        if kills and self._served is None:
            pytest.skip("this kills the broker, and TXMQ_INTEROP_URL names one that is not ours")
        if name not in self._ended:
            kill = self._served.restart if kills and self._served else None
            self._ended[name] = run([*command, self.url], self.folder, kill)
        return self._ended[name]


@contextlib.contextmanager
def programs(folder: Path, data: Path) -> Iterator[Programs]:
    """Programs that run in ``folder``, with a broker on ``data`` or the one that ``TXMQ_INTEROP_URL``
    names.
    """
    other = os.environ.get("TXMQ_INTEROP_URL")
    if other:
        yield Programs(other, folder, None)
        return
    with serving(data) as served:
        yield Programs(served.amqp_url, folder, served)
