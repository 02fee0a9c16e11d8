"""The loads: RabbitMQ's PerfTest, and a Java program (AmqpLoad.java) for loads that PerfTest does not have.

Not here: the list of figures. Needs a JDK; the jars come from Maven Central by their coordinates.
Invariant: if a load fails, the benchmark ends with its output and without a figure.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.jars import resolve
from bench.report import Skipped

PERF_TEST = "com.rabbitmq:perf-test:2.22.1"
PROGRAM = Path(__file__).with_name("AmqpLoad.java")
BODY_BYTES = 100
LIMIT_S = 60.0  # more than any load takes
JAVA = ("java", "-Xmx1g", "-XX:+UseParallelGC", "-Duser.language=en", "-Duser.country=US")
SAMPLE = re.compile(
    r"time (?P<time>[\d.]+) s(?=(?:.* sent: (?P<sent>[\d.]+) msg/s)?)(?=(?:.* received: "
    r"(?P<received>[\d.]+) msg/s)?)"
)


@dataclass(frozen=True)
class Rates:
    """Messages per second, after the warm-up."""

    sent: float
    received: float


@dataclass(frozen=True)
class Relayed:
    """``cores``: the processor time of the load per second."""

    rate: float
    cores: float


@dataclass(frozen=True)
class CommitTimes:
    """``p50_us`` and ``p99_us`` of the time from sending tx.commit to its commit-ok; ``cores`` as in
    Relayed.
    """

    commits: int
    p50_us: float
    p99_us: float
    cores: float


@functools.cache
def classpath() -> str:
    """PerfTest's jars and the compiled program; once per process. Raises Skipped without a JDK."""
    if not shutil.which("javac"):
        raise Skipped("javac is not installed: install a JDK 17 or later")
    jars = os.pathsep.join(resolve([PERF_TEST]))
    classes = tempfile.TemporaryDirectory(prefix="txmq-bench-classes-")
    _KEPT.append(classes)
    settings = "<configuration><root level='ERROR'/></configuration>"  # the default of the client is DEBUG
    (Path(classes.name) / "logback-test.xml").write_text(settings)
    compiled = subprocess.run(
        ["javac", "-d", classes.name, "-cp", jars, str(PROGRAM)], capture_output=True, text=True
    )
    if compiled.returncode:
        raise SystemExit(f"{PROGRAM.name} does not compile:\n{compiled.stderr}")
    return classes.name + os.pathsep + jars


_KEPT: list[tempfile.TemporaryDirectory[str]] = []  # for the life of the process


def _run(*arguments: str) -> str:
    command = [*JAVA, "-cp", classpath(), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired as error:
        said = error.stdout if isinstance(error.stdout, bytes) else b""
        raise SystemExit(
            f"the load did not end in {LIMIT_S:g} s: "
            f"{' '.join(arguments)}\n{said.decode(errors='replace')[-2000:]}"
        ) from None
    if done.returncode:
        raise SystemExit(
            f"the load ended with {done.returncode}: "
            f"{' '.join(arguments)}\n{(done.stdout + done.stderr)[-3000:]}"
        )
    return done.stdout


def _number(text: str | None) -> float:
    return float(text.replace(",", "")) if text else 0.0


def rates(output: str) -> Rates:
    """The mean rates of PerfTest's samples without the first (warm-up). Raises SystemExit if it has none."""
    samples = [found for line in output.splitlines() if (found := SAMPLE.search(line))]
    total_s, sent, received = 0.0, 0.0, 0.0
    for before, sample in itertools.pairwise(samples):
        step_s = _number(sample["time"]) - _number(before["time"])
        total_s += step_s
        sent += step_s * _number(sample["sent"])
        received += step_s * _number(sample["received"])
    if not sent:
        raise SystemExit(f"PerfTest sent nothing:\n{output[-3000:]}")
    return Rates(sent / total_s, received / total_s)


def perf_test(uri: str, queue: str, seconds: int, *options: str) -> Rates:
    """Run PerfTest on one durable queue, which keeps its messages until ``delete``."""
    fixed = [
        "-h",
        uri,
        "-u",
        queue,
        "-ad",
        "false",
        "-f",
        "persistent",
        "-s",
        str(BODY_BYTES),
        "-z",
        str(seconds),
        "-dcr",
    ]
    return rates(_run("com.rabbitmq.perf.PerfTest", *fixed, *options))


def delete(uri: str, *queues: str) -> None:
    _run("AmqpLoad", "delete", uri, *queues)


def _program(*arguments: str | int) -> dict[str, float]:
    words = _run("AmqpLoad", *(str(each) for each in arguments)).split()
    return {name: float(value) for name, value in zip(words[::2], words[1::2])}


@contextlib.contextmanager
def turns(uris: Sequence[str], acknowledged: str, messages: int) -> Iterator[Callable[[int], None]]:
    """A function that sends ``messages`` as the user of one of two URIs. ``acknowledged``: "tx", in hundreds,
    or "confirms", with a consumer too.
    """
    command = [*JAVA, "-cp", classpath(), "AmqpLoad", "turns", *uris, acknowledged, str(messages)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as load:
        assert load.stdin is not None and load.stdout is not None

        def turn(number: int) -> None:
            print(number, file=load.stdin, flush=True)
            if load.stdout.readline() != "done\n":  # type: ignore[union-attr]
                raise SystemExit("the load ended before its turn did; its error is above")

        yield turn
        load.stdin.close()


def relay(uri: str, channels: int, batch: int, acks: str, warm_s: int, measured_s: int) -> Relayed:
    """Messages per second consumed, published, acked ("each" or "multiple") and committed in batches."""
    found = _program("relay", uri, channels, batch, acks, warm_s, measured_s)
    return Relayed(found["rate"], found["processor"])


def open_transaction(uri: str, messages: int) -> Relayed:
    """Messages per second of one transaction, from its first publish to its commit-ok."""
    found = _program("open", uri, messages)
    return Relayed(found["rate"], found["processor"])


def commits(uri: str, channels: int, warm_s: int, measured_s: int) -> CommitTimes:
    """The duration of a commit of one message, with ``channels`` channels on one connection."""
    found = _program("commits", uri, channels, warm_s, measured_s)
    return CommitTimes(int(found["commits"]), found["p50"], found["p99"], found["processor"])
