"""The data directory: who owns it, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from broker_core.client import starter
from broker_core.core.errors import DataDirectoryInvalid, DataDirectoryLocked
from broker_core.server.access.audit import Audit
from broker_core.store.durable import DurableStore
from broker_core.store.salvage.salvage import salvage
from broker_core.store.salvage.verify import verify

HOLD = """
import sys
from broker_core.store.durable import DurableStore
store = DurableStore(sys.argv[1]); store.load(); print("open", flush=True); sys.stdin.read()
"""


def test_a_second_process_is_refused_and_told_the_pid_of_the_first(tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "data")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert owner.stdout is not None and owner.stdout.readline() == "open\n"
        with pytest.raises(
            DataDirectoryLocked,
            match=f"data is in use by process {owner.pid} on host .*connect to that broker, or end it",
        ):
            DurableStore(tmp_path / "data")
        for read in (verify, lambda path: salvage(path, tmp_path / "new")):  # they take no url
            with pytest.raises(DataDirectoryLocked, match=r"on host \S+; end it first$"):
                read(tmp_path / "data")
    finally:
        owner.kill()
        owner.communicate()
    assert verify(tmp_path / "data").ok  # the lock died with its process
    DurableStore(tmp_path / "data").close()


def test_the_same_process_is_refused_as_well_and_closing_gives_the_lock_back(tmp_path: Path) -> None:
    first = DurableStore(tmp_path)
    with pytest.raises(DataDirectoryLocked, match=f"process {os.getpid()} "):
        DurableStore(tmp_path)
    first.close()
    first.close()
    DurableStore(tmp_path).close()


def test_a_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataDirectoryInvalid, match="file is a file, not a data directory"):
        DurableStore(tmp_path / "file")
    with pytest.raises(DataDirectoryInvalid, match="cannot be used as a data directory"):
        DurableStore(tmp_path / "file" / "below")


def test_a_foreign_directory_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(
        DataDirectoryInvalid,
        match=r"is not empty and not a data directory: it has "
        r"thesis\.tex; name an empty",
    ):
        DurableStore(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(DataDirectoryInvalid, match="is not a data directory"):
        verify(tmp_path)


def test_what_the_launcher_puts_into_a_new_directory_does_not_make_it_foreign(tmp_path: Path) -> None:
    (tmp_path / "broker.log").write_text("")
    (tmp_path / "endpoint.json").write_text("{}")
    DurableStore(tmp_path).close()


def test_missing_parents_are_made(tmp_path: Path) -> None:
    DurableStore(tmp_path / "a" / "b").close()
    assert (tmp_path / "a" / "b" / "catalog.db").exists()


def as_user(user: int, code: str, *arguments: object) -> str:
    """What ``code`` prints as another user; it may import what root may read."""
    prelude = (
        "import os, sys\nfrom broker_core.core import errors\nfrom broker_core.client import starter\n"
        "from broker_core.store.durable import DurableStore\n"
        f"os.setgroups([]); os.setgid({user}); os.setuid({user})\n"
    )
    command = [sys.executable, "-c", prelude + code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


OPENED = """
for call in (lambda: DurableStore(sys.argv[1]).close(), lambda: starter.find(sys.argv[1], lambda _: True)):
    try:
        call()
        print("opened")
    except errors.DataDirectoryInvalid as error:
        print(error.code)
"""


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_a_directory_of_another_user_is_refused() -> None:
    with tempfile.TemporaryDirectory() as parent:
        os.chmod(parent, 0o755)
        for owner, answers in ((23001, ["TXMQ_DATA_DIRECTORY_INVALID"] * 2), (23002, ["opened"] * 2)):
            made = Path(parent, str(owner))
            made.mkdir()
            made.chmod(0o777)
            os.chown(made, owner, owner)
            assert as_user(23002, OPENED, made).split() == answers
            assert (os.listdir(made) == []) == (owner == 23001)


@pytest.mark.parametrize("name", ["lock", "broker.log", "audit.log"])
def test_a_link_in_the_place_of_a_file_is_not_followed(tmp_path: Path, name: str) -> None:
    data, target = tmp_path / "data", tmp_path / "precious"
    data.mkdir()
    target.write_text("precious")
    (data / name).symlink_to(target)
    if name == "lock":
        with pytest.raises(DataDirectoryInvalid, match="symbolic links"):
            DurableStore(data)
    elif name == "broker.log":
        with pytest.raises(OSError, match="symbolic links"):
            starter._spawn(str(data), str(data / name))
    else:
        audit = Audit(str(data))
        audit.record("login", "ann", "")
        audit.close()
    assert target.read_text() == "precious"
