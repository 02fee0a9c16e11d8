"""The state of a table after a commit of this process, while that is the last one: Delta is not asked.

To ask Delta costs a listing of the log and a dozen calls of the JVM, in each batch several times.
Not here: tables whose last commit is somebody else's (``resolve.py``).
Invariant: an answer is the one that Delta would give at this moment. The commit was read back and changed
neither the metadata nor the protocol; its file is still the same one, and there is no file of the next one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from pyspark.sql import SparkSession

from connector.delta.table_files import DISK, Stamp, TableFiles
from connector.tables.table import Table, is_path

if TYPE_CHECKING:  # a client of Spark Connect has no py4j
    from py4j.java_gateway import JavaObject

_KEPT = 16  # each holds a snapshot in the JVM
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class LastCommit:
    """``stamp``: of its file; ``look``: id, metadata and protocol of the table, as in ``Table``; ``shape``:
    their digest; ``txn``: the (txnAppId, txnVersion) that it carries. ``log``, ``snapshot``: those of Delta.
    """

    version: int
    stamp: Stamp
    look: tuple[str, str, str]
    shape: str
    txn: tuple[str, int]
    log: JavaObject
    snapshot: JavaObject
    session: object  # what the JVM's objects belong to


class LastCommits:
    """Of one app, by the location of the table. ``by_name``: where SQL alone tells of tables, id, location
    and version of those at a path, by their names.
    """

    def __init__(self) -> None:
        self.by_name: dict[str, tuple[str, str, int]] = {}
        self._commits: dict[str, LastCommit] = {}
        self._paths: dict[tuple[object, str], str] = {}
        self._lock = threading.Lock()  # of a change: tables are looked at in threads

    def of(self, spark: SparkSession, location: str) -> LastCommit | None:
        """The commit if it is still the last one of the table."""
        commit = self._commits.get(location)
        if commit is None:
            return None
        files = TableFiles.at(location)
        # in this order: while the file is the same one, the table is the same one
        if (
            commit.session is spark.sparkContext
            and files.stamp(commit_file(commit.version + 1)) is None
            and files.stamp(commit_file(commit.version)) == commit.stamp
        ):
            return commit
        self._commits.pop(location, None)  # two threads may find it old
        return None

    def qualify(self, spark: SparkSession, path: str, ask: Callable[[], str]) -> str:
        """The path as the file system has it; ``ask`` is called once for each."""
        key = spark.sparkContext, path
        found = self._paths.get(key)
        if found is None:
            found = ask()
            with self._lock:
                _keep(self._paths, key, found)
        return found

    def committed(self, table: Table, version: int | None) -> int | None:
        if version is not None and is_path(table.name):  # a name may be one of another place now
            with self._lock:
                _keep(self.by_name, table.name, (table.table_id, table.location, version))
        return version

    def note(self, location: str, commit: LastCommit) -> None:
        if not location.startswith(DISK):
            raise AssertionError(f"{location} is not on a disk")
        with self._lock:
            _keep(self._commits, location, commit)


def _keep(cache: dict[_Key, _Value], key: _Key, value: _Value) -> None:
    """As the newest; the oldest one goes if there are too many."""
    cache.pop(key, None)
    cache[key] = value
    if len(cache) > _KEPT:
        del cache[next(iter(cache))]


def commit_file(version: int) -> str:
    """Where a commit is, in the directory of its table."""
    return f"_delta_log/{version:020d}.json"
