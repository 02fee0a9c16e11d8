"""The history of commits, whose upkeep is killed at each step, finds no room, or finds its rows damaged: no
message and no commit is lost with it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from broker_core.broker.broker import BrokerState
from broker_core.client.admin import RemoteAdmin
from broker_core.client.broker import BrokerClient
from broker_core.core import failpoint
from broker_core.core.change import Change
from broker_core.core.errors import StoreError
from broker_core.node.local import LocalBroker
from broker_core.store.salvage.verify import verify
from tests.crash import history_workload
from tests.crash.history_workload import COMMITS, DAY_US, commit, opened, pack, told
from tests.crash.test_store_crash import small_file_system
from tests.progress import GUARD_S, wait_until
from tests.server.conftest import Served, served
from tests.server.test_kill import patient

__all__ = ["served"]
pytestmark = pytest.mark.crash
MESSAGES = 2 * COMMITS // 3 - COMMITS // 3  # that are left in the queue
COMMIT_STEPS = [f"store.commit.{step}" for step in ("begin", "synced", "executed", "committed")]


def messages(broker: LocalBroker) -> int:
    return {each.name: each.messages for each in broker.queues()}["in"]


def killed(directory: Path, work: str, step: str) -> str:
    """The history before the work at which the process died."""
    command = [sys.executable, history_workload.__file__, str(directory), work, step]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=GUARD_S)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    return ended.stdout.rstrip("\n")


@pytest.mark.parametrize("step", ["upkeep.history.packed", *COMMIT_STEPS])
def test_killed_while_rows_are_packed_it_says_the_same_and_commits_go_on(step: str, tmp_path: Path) -> None:
    before = killed(tmp_path / "data", "pack", step)
    for _ in range(2):  # as it was left, and packed
        broker = opened(tmp_path / "data")
        assert told(broker) == before and messages(broker) == MESSAGES
        pack(broker)
        assert told(broker) == before
        assert broker.state.transactions.history.rows()[0].packed
        broker.close()
    broker = opened(tmp_path / "data")
    commit(broker, 2)
    assert told(broker).endswith(before[1:]) and messages(broker) == MESSAGES + 2
    after = told(broker)
    broker.close()
    assert verify(tmp_path / "data").ok
    broker = opened(tmp_path / "data")
    assert told(broker) == after
    broker.close()


@pytest.mark.parametrize("step", ["upkeep.history.trimmed", *COMMIT_STEPS])
def test_killed_while_old_rows_are_dropped_the_newer_ones_stay(step: str, tmp_path: Path) -> None:
    before = killed(tmp_path / "data", "trim", step)
    newest = before[: before.index("), TransactionInfo(")]
    broker = opened(tmp_path / "data", DAY_US)
    assert told(broker).startswith(newest) and messages(broker) == MESSAGES + 1
    pack(broker)
    assert told(broker) == f"{newest})]"
    commit(broker, 1)
    assert told(broker).endswith(f"{newest[1:]})]") and messages(broker) == MESSAGES + 2
    broker.close()
    assert verify(tmp_path / "data").ok


@pytest.mark.parametrize("step", COMMIT_STEPS[:3])
def test_a_disk_that_is_full_while_rows_are_packed_stops_the_broker_as_at_any_commit(
    step: str, tmp_path: Path
) -> None:
    broker = opened(tmp_path / "data")
    commit(broker, COMMITS)
    before = told(broker)
    failpoint.arm(step, "enospc")
    try:
        with pytest.raises(StoreError, match="TXMQ_DISK_FULL"):
            pack(broker)
    finally:
        failpoint.disarm()
    with pytest.raises(StoreError, match="TXMQ_DISK_FULL"):
        commit(broker, 1)
    broker.close()
    broker = opened(tmp_path / "data")
    assert told(broker) == before and messages(broker) == MESSAGES
    pack(broker)
    assert told(broker) == before
    commit(broker, 1)
    broker.close()


@pytest.mark.soak
def test_a_file_system_that_is_full_loses_no_commit_and_none_of_its_history(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:  # the broker is closed before its disk goes
        disk = stack.enter_context(small_file_system(tmp_path / "disk", 8 << 20))
        broker = stack.enter_context(contextlib.closing(opened(disk / "data")))
        commit(broker, COMMITS)
        with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as filler:
            while True:
                filler.write(bytes(4096))
        acknowledged, before = MESSAGES, told(broker)

        def go_on() -> None:
            nonlocal acknowledged, before
            while True:
                pack(broker)
                commit(broker, 1)
                acknowledged, before = acknowledged + 1, told(broker)

        with pytest.raises(StoreError, match="TXMQ_DISK_FULL"):
            go_on()
        broker.close()
        (disk / "filler").unlink()
        broker = stack.enter_context(contextlib.closing(opened(disk / "data")))
        assert messages(broker) == acknowledged and told(broker) == before
        pack(broker)
        commit(broker, 1)
        assert told(broker).endswith(before[1:])


@pytest.mark.parametrize("packed", [True, False])
def test_a_damaged_row_is_named_and_left_out_and_the_broker_starts_with_its_messages(
    packed: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broker = opened(tmp_path / "data")
    commit(broker, COMMITS)
    if packed:
        pack(broker)
    rest = told(broker)
    broker.close()
    with contextlib.closing(sqlite3.connect(tmp_path / "data" / "catalog.db")) as catalog:
        ((number, commits),) = catalog.execute("SELECT number, commits FROM history ORDER BY number LIMIT 1")
        flipped = commits[:40] + bytes([commits[40] ^ 1]) + commits[41:]
        catalog.execute("UPDATE history SET commits = ? WHERE number = ?", (flipped, number))
        catalog.commit()
    named = f"a row of table history with key {number} does not match its checksum"
    report = verify(tmp_path / "data")
    assert report.ok and len(report.repairs) == 1 and named in report.repairs[0]
    with caplog.at_level(logging.WARNING):
        broker = opened(tmp_path / "data")
    assert caplog.text.count(named) == 1 and messages(broker) == MESSAGES
    left = told(broker)
    assert left != rest and rest.startswith(left[:200])  # the newest are there
    commit(broker, 1)
    assert told(broker).endswith(left[1:])
    broker.close()
    assert verify(tmp_path / "data").repairs == []


@pytest.mark.product
@pytest.mark.parametrize("text", [b"no history", b"{}", b"[]"])
@pytest.mark.parametrize("packed", [1, 2, 0])
def test_a_row_with_a_right_checksum_that_is_no_history_is_found_by_verify(
    packed: int, text: bytes, tmp_path: Path
) -> None:
    broker = opened(tmp_path / "data")
    commit(broker, COMMITS)
    if packed:
        pack(broker)
    before = told(broker)
    with contextlib.closing(broker):
        (oldest, *_) = broker.state.transactions.history.rows()
        number = oldest.number or 1

        def spoil(_state: BrokerState, change: Change, _now: int) -> None:
            change.put(replace(oldest, number=number, packed=packed, commits=text))

        broker.run(spoil)
    report = verify(tmp_path / "data")
    found = [*report.problems, *report.repairs]
    assert len(found) == 1 and f"row {number} of" in found[0] and report.ok == (not packed)
    with contextlib.closing(opened(tmp_path / "data")) as broker:
        assert (
            messages(broker) == MESSAGES and told(broker) != before and before.startswith(told(broker)[:200])
        )


def test_without_a_history_nothing_of_it_is_left_once_the_broker_is_ready(served: Served) -> None:
    served.start()
    with patient(served) as client:
        publish(client)
        assert len(RemoteAdmin(client).history()) == 3
    served.kill()
    options = ["--data", str(served.directory), "--listen", "127.0.0.1:0", "--amqp", "none"]
    without_upkeep = (
        "from broker_core.node.upkeep import Upkeep\nUpkeep.start = lambda _: None\n"
        f"from txmq.cli import main\nmain({['serve', *options, '--history-bytes', '0']!r})"
    )
    at_once = {**os.environ, "TXMQ_FAILPOINTS": "launcher.open.listening=kill"}
    command = [sys.executable, "-c", without_upkeep]
    ended = subprocess.run(command, env=at_once, capture_output=True, timeout=GUARD_S)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    served.start()
    with patient(served) as client:
        assert RemoteAdmin(client).history() == []
        assert [each.messages for each in client.queues()] == [3]


def publish(client: BrokerClient) -> None:
    """Three small commits: their history is beside their messages."""
    with client.channel() as channel:
        channel.queue_declare("in")
        for _ in range(3):
            channel.publish(b"small", routing_key="in")


def test_a_directory_is_opened_without_a_history_and_with_one_again(served: Served) -> None:
    served.start()
    with patient(served) as client:
        publish(client)
        assert len(RemoteAdmin(client).history()) == 3
    served.kill()
    served.start("", "--history-bytes", "0")
    with patient(served) as client:
        wait_until(lambda: RemoteAdmin(client).history() == [])
        publish(client)
        assert RemoteAdmin(client).history() == []
    served.kill()
    served.start()
    with patient(served) as client:
        assert RemoteAdmin(client).history() == []
        publish(client)
        before = RemoteAdmin(client).history()
        assert len(before) == 3
    served.kill()
    served.start()
    with patient(served) as client:
        assert RemoteAdmin(client).history() == before
        assert [each.messages for each in client.queues()] == [9]
