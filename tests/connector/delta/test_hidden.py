"""The files of a table beside Delta, and which attempts in its hidden directory are over."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from broker_core.engine import LedgerEntry
from connector.delta.table_files import TableFiles, hidden_directory, sweep
from connector.tables.table_format import Attempt


def entry(sequence: int, token: str) -> LedgerEntry:
    return LedgerEntry("app", sequence, "q", sequence, token, {}, 0, 0, 0)


def keep(root: Path, attempt: Attempt) -> Path:
    file = root / hidden_directory(attempt) / "0" / "p=1" / "part.parquet"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("rows")
    return file


def test_attempts_that_can_be_neither_decided_nor_added_are_swept_and_no_others(tmp_path: Path) -> None:
    lost = [
        keep(tmp_path, Attempt("app", "app@a/t", number, token)) for number, token in ((3, "x"), (4, "y"))
    ]
    undecided = keep(tmp_path, Attempt("app", "app@a/t", 5, "z"))
    unapplied = keep(tmp_path, Attempt("app", "app@a/t", 4, "decided"))
    other_engine = keep(tmp_path, Attempt("app", "app@b/t", 3, "x"))
    other_app = keep(tmp_path, Attempt("app2", "app2@a/t", 3, "x"))
    asked: list[int] = []
    sweep(str(tmp_path), Attempt("app", "app@a/t", 4, "decided"), lambda: [entry(4, "decided"), *asked])  # type: ignore[list-item]
    assert not any(file.exists() for file in lost)
    assert all(file.exists() for file in (undecided, unapplied, other_engine, other_app))
    sweep(str(tmp_path), Attempt("app", "app@a/t", 5, "z"), lambda: [entry(5, "z")])
    assert undecided.exists() and not unapplied.exists()
    sweep(str(tmp_path / "nothing there"), Attempt("app", "app@a/t", 5, "z"), list)


def test_nothing_is_asked_while_there_is_nothing_to_sweep(tmp_path: Path) -> None:
    keep(tmp_path, Attempt("app", "app@a/t", 5, "z"))

    def asked() -> list[LedgerEntry]:
        raise AssertionError("asked")

    sweep(str(tmp_path), Attempt("app", "app@a/t", 4, "y"), asked)


def test_a_directory_is_made_durable_again_only_if_it_has_got_a_new_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[str] = set()
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        fsync(descriptor)
        synced.add(os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), tmp_path))

    monkeypatch.setattr(os, "fsync", noted)
    files = TableFiles(tmp_path)

    def of_attempt(number: int) -> tuple[list[str], set[str]]:
        """The directories of an attempt, innermost first, and what is synced for it."""
        attempt = Attempt("app", "app@a/t", number, "x")
        files.make(f"{hidden_directory(attempt)}/0")
        file = keep(tmp_path, attempt)
        synced.clear()
        files.sync([str(file.relative_to(tmp_path))])
        ways = [str(path.relative_to(tmp_path)) for path in file.parents if tmp_path in path.parents]
        return ways, synced - {str(file.relative_to(tmp_path))}

    first, all_of_first = of_attempt(1)
    assert all_of_first == {*first, "."} and len(first) == 5
    second, some = of_attempt(2)
    assert some == set(second[:4])  # the app's directory has got a name, those above it have not
    # a table that is made again has other directories, which may have the numbers of the old ones
    shutil.rmtree(tmp_path / "_txmq")
    third, again = of_attempt(3)
    assert again == {*third, "."}
    os.rename(tmp_path / "_txmq", tmp_path / "old")
    (tmp_path / third[3]).mkdir(parents=True)  # by another process
    fourth, again = of_attempt(4)
    assert again == {*fourth, "."}
    synced.clear()
    files.sync([])
    assert not synced
    files.delete("_txmq")
    with pytest.raises(FileNotFoundError):
        files.sync([f"{fourth[0]}/part.parquet"])


@pytest.mark.parametrize("links", [True, False])
def test_a_copy_has_its_bytes_and_checksum_may_be_repeated_and_outlives_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    file = keep(tmp_path, Attempt("app", "app@a/t", 1, "x"))
    file.with_name(".part.parquet.crc").write_text("sum")
    name = str(file.relative_to(tmp_path))
    if not links:

        def none(*_: object) -> None:
            raise OSError(errno.EPERM, "no links here")

        monkeypatch.setattr(os, "link", none)
    files = TableFiles(tmp_path)
    files.sync([name])
    for _ in range(2):
        files.copy({name: "p=1/part.parquet"})
    assert files.missing([name, "p=1/part.parquet", "p=1/other"]) == ["p=1/other"]
    files.delete("_txmq")
    files.delete("_txmq")
    assert sorted(os.listdir(tmp_path / "p=1")) == [".part.parquet.crc", "part.parquet"]
    assert (tmp_path / "p=1" / "part.parquet").read_text() == "rows"
    with pytest.raises(FileNotFoundError):
        files.copy({name: "p=1/again.parquet"})
    assert files.children("_txmq") == [] and files.missing(["p=1/again.parquet"]) == ["p=1/again.parquet"]
