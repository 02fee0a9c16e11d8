"""``txmq broker backup`` while it, or the broker, is killed: a copy is whole, or is refused; the broker's directory is
whole.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from broker_core.core.endpoint import UNFINISHED
from broker_core.core.errors import DataDirectoryInvalid
from broker_core.launcher import Broker
from broker_core.store.catalog import CATALOG_COPY
from broker_core.store.salvage.verify import verify
from tests.forked import Forked
from tests.progress import wait_for_end, wait_until
from tests.server.conftest import Served, bodies, fill
from tests.server.test_kill import patient

pytestmark = pytest.mark.crash

COUNT = 2_000
SIZE = 2_000  # bytes of a message: several pieces


def _filled(served: Served, failpoints: str = "") -> None:
    served.start()
    with patient(served) as client:
        fill(client, "large", COUNT, size=SIZE)
        fill(client, "small", 10)
    served.terminate()
    served.start(failpoints)


def _backup(served: Served, to: Path, failpoints: str = "") -> Forked:
    command = ["broker", "backup", str(served.directory), "--to", str(to)]
    return Forked("txmq", command, {**os.environ, "TXMQ_FAILPOINTS": failpoints})


def _ended(process: Forked) -> int:
    with process.stdout:
        return wait_for_end(process, "the backup ends")  # type: ignore[arg-type]


def _refused(copy: Path) -> None:
    assert (copy / UNFINISHED).exists()
    with pytest.raises(DataDirectoryInvalid, match="is a backup that was not finished, and lacks data"):
        Broker.open(copy)


def _whole(copy: Path) -> None:
    assert verify(copy).problems == []
    with Broker.open(copy) as broker:
        assert {queue.name: queue.messages for queue in broker.queues()} == {"large": COUNT, "small": 10}


@pytest.mark.parametrize(
    "point", ["backup.begun", "backup.file@1", "backup.file@2", "backup.file@3", "backup.synced"]
)
def test_a_copy_whose_backup_was_killed_is_refused_and_the_broker_goes_on(
    served: Served, point: str, tmp_path: Path
) -> None:
    _filled(served)
    assert _ended(_backup(served, tmp_path / "copy", f"{point}=kill")) == -9
    _refused(tmp_path / "copy")
    with patient(served) as client:
        fill(client, "more", 1)
        with client.channel() as channel:
            channel.queue_purge("large")
        assert len(bodies(client, "more")) == 1
    # another one need not wait for the one that was killed
    assert eventually_backed_up(served, tmp_path)
    assert served.terminate() == 0


def eventually_backed_up(served: Served, tmp_path: Path) -> bool:
    """The broker notices soon that the process of the last backup is gone."""
    tried: list[int] = []

    def done() -> bool:
        tried.append(_ended(_backup(served, tmp_path / f"again-{len(tried)}")))
        return tried[-1] == 0

    wait_until(done)
    return verify(tmp_path / f"again-{len(tried) - 1}").ok


def test_a_backup_that_is_killed_after_its_last_step_is_one(served: Served, tmp_path: Path) -> None:
    _filled(served)
    assert _ended(_backup(served, tmp_path / "copy", "backup.done=kill")) == -9
    _whole(tmp_path / "copy")


@pytest.mark.parametrize(
    "point",
    [
        "store.backup.kept",
        "server.backup.step",
        "server.backup.catalog",
        "server.backup.piece@1",
        "server.backup.piece@3",
    ],
)
def test_a_copy_whose_broker_was_killed_is_refused_and_the_directory_is_whole(
    served: Served, point: str, tmp_path: Path
) -> None:
    _filled(served, f"{point}=kill")
    process = _backup(served, tmp_path / "copy")
    assert served.wait() == -9
    assert _ended(process) == 1
    if (tmp_path / "copy").exists():
        _refused(tmp_path / "copy")
    else:
        assert point != "server.backup.piece@3", "two pieces came"
    served.start()
    assert not (served.directory / CATALOG_COPY).exists()
    with patient(served) as client:
        assert len(bodies(client, "large")) == COUNT and len(bodies(client, "small")) == 10
    assert _ended(_backup(served, tmp_path / "second")) == 0
    _whole(tmp_path / "second")


def test_a_broker_that_is_asked_to_end_does_not_wait_for_a_backup_that_hangs(
    served: Served, tmp_path: Path
) -> None:
    _filled(served)
    process = _backup(served, tmp_path / "copy", "backup.file=stop")
    wait_until(lambda: (tmp_path / "copy" / "catalog.db").exists())
    try:
        assert served.terminate() == 0
    finally:
        process.kill()
        _ended(process)
    _refused(tmp_path / "copy")
    served.start()
    with patient(served) as client:
        assert len(bodies(client, "large")) == COUNT
