"""A queue is read by one source of an app in a Spark driver; what has ended holds nothing, and other drivers
are not asked.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from broker_core.core.errors import ResourceLocked
from connector.stream import reader_lock
from connector.stream.reader_lock import ReaderLock

URL = "txmq://here:1"
CHILD = """
import sys
from connector.stream import reader_lock
from broker_core.core.errors import TxmqError
reader_lock.PATIENCE_S = float(sys.argv[1])
lock = reader_lock.ReaderLock()
print("started", flush=True)
sys.stdin.readline()
try:
    lock.take("txmq://here:1", "app", sys.argv[2].split(","))
    print("taken", flush=True)
except TxmqError as error:
    print(error, flush=True)
sys.stdin.readline()
"""
PARENT = "import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', *sys.argv[1:]]))"


class Source:
    """The process of a source. ``driver``: with a driver process of its own between it and the test."""

    def __init__(
        self, stack: ExitStack, queues: str = "q", *, driver: bool = False, patience_s: float = 0.0
    ) -> None:
        command = [sys.executable, "-c", *([PARENT] if driver else []), CHILD, str(patience_s), queues]
        self.process = stack.enter_context(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
        stack.callback(self.process.kill)
        assert self.line() == "started"

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def take(self) -> str:
        self.go()
        return self.line()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_lock, "PATIENCE_S", 0.0)


def test_a_second_source_of_a_driver_is_refused_a_queue_that_another_reads(stack: ExitStack) -> None:
    assert Source(stack).take() == "taken"
    second = Source(stack).take()
    assert second.startswith("[TXMQ_RESOURCE_LOCKED] queue 'q'") and "df.union(df)" in second


def test_a_source_of_another_driver_is_not_refused(stack: ExitStack) -> None:
    """A killed driver goes on for a moment beside its successor, and claims are made for that."""
    assert [Source(stack, driver=True).take() for _ in range(2)] == ["taken", "taken"]


def test_a_source_waits_for_one_that_is_ending_and_then_goes_on(stack: ExitStack) -> None:
    first, second = Source(stack), Source(stack, patience_s=600)
    assert first.take() == "taken"
    second.go()
    first.process.kill()
    assert second.line() == "taken"


def test_a_source_that_was_killed_holds_nothing(stack: ExitStack) -> None:
    first = Source(stack)
    assert first.take() == "taken"
    first.process.kill()
    first.process.wait()
    assert Source(stack).take() == "taken"


def test_a_refused_source_holds_none_of_its_queues(stack: ExitStack) -> None:
    assert Source(stack, "b").take() == "taken"
    assert "queue 'b'" in Source(stack, "a,b").take()
    assert Source(stack, "a").take() == "taken"


def test_other_queues_apps_and_brokers_are_none_of_its_business() -> None:
    lock = ReaderLock()
    lock.take(URL, "app", ["a", "b"])
    for broker, app, queues in ((URL, "app", ["c"]), (URL, "other", ["a"]), ("txmq://there:1", "app", ["a"])):
        ReaderLock().take(broker, app, queues)
    with pytest.raises(ResourceLocked, match="queue 'b'"):
        ReaderLock().take(URL, "app", ["c", "b"])


def test_a_lock_ends_with_its_reader_and_a_pickled_copy_holds_nothing() -> None:
    lock = ReaderLock()
    lock.take(URL, "app", ["a"])
    copy = pickle.loads(pickle.dumps(lock))
    del lock
    ReaderLock().take(URL, "app", ["a"])
    copy.take(URL, "app", ["a"])


def test_a_system_without_such_names_refuses_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> str:
        raise FileNotFoundError("/proc")

    monkeypatch.setattr(reader_lock, "driver", unknown)
    for _ in range(2):
        ReaderLock().take(URL, "app", ["a"])
