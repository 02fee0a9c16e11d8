"""The last commit of a table is known as long as it is the last one, and no longer."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from connector.delta.last_commit import LastCommit, LastCommits, commit_file
from connector.delta.table_files import TableFiles

SESSION: Any = SimpleNamespace(sparkContext=object())


def committed(root: Path, version: int) -> None:
    (root / "_delta_log").mkdir(parents=True, exist_ok=True)
    (root / commit_file(version)).write_text(f"commit {version}")


def noted(root: Path, version: int = 7) -> tuple[LastCommits, LastCommit]:
    """A table whose last commit is known."""
    committed(root, version)
    text, stamp = TableFiles(root).read(commit_file(version))
    assert text == f"commit {version}"
    nothing: Any = None
    look = ("id", "metadata", "protocol")
    commit = LastCommit(version, stamp, look, "shape", ("a", 1), nothing, nothing, SESSION.sparkContext)
    commits = LastCommits()
    commits.note(f"file:{root}", commit)
    return commits, commit


def again(root: Path) -> None:
    """The table is dropped and made again, with as many commits."""
    shutil.move(root / "_delta_log", root / "old")
    committed(root, 7)


CHANGES: dict[str, Callable[[Path], object]] = {
    "another commit": lambda root: committed(root, 8),
    "another table": again,
    "a table without its log": lambda root: shutil.rmtree(root / "_delta_log"),
    "a file in its place": lambda root: shutil.rmtree(root) or root.write_text(""),  # type: ignore[func-returns-value]
    "a commit that was changed": lambda root: os.utime(root / commit_file(7), (1, 1)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_commit_is_known_until_another_one_or_another_table_is_there(tmp_path: Path, change: str) -> None:
    root = tmp_path / "lake"
    commits, commit = noted(root)
    for _ in range(2):
        assert commits.of(SESSION, f"file:{root}") is commit
    CHANGES[change](root)
    assert commits.of(SESSION, f"file:{root}") is None
    shutil.rmtree(root, ignore_errors=True)
    root.unlink(missing_ok=True)
    committed(root, 7)
    assert commits.of(SESSION, f"file:{root}") is None, "what was over is known again"


def test_another_session_and_another_place_know_nothing(tmp_path: Path) -> None:
    commits, commit = noted(tmp_path)
    assert commits.of(SESSION, f"file:{tmp_path}/other") is None
    assert commits.of(SESSION, f"file:{tmp_path}") is commit
    other: Any = SimpleNamespace(sparkContext=object())
    assert commits.of(other, f"file:{tmp_path}") is None
