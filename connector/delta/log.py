"""The log of a Delta table: its commits and their userMetadata.

Not here: writing (``before/append_rows.py``). In classic sessions the log is read through Delta's classes,
which takes a few milliseconds; on Spark Connect it is read with SQL.

Invariant: ``find_commit`` says True or False only if the log proves it, otherwise None.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

from pyspark.sql import SparkSession

from connector.delta import jvm
from connector.delta.resolve import log_at, resolve, snapshot_at
from connector.stream.offset_log import text_of
from connector.tables.commit_id import OTHERS, restored_in
from connector.tables.table import Table, in_sql
from connector.tables.table_format import Later, TableMark

if TYPE_CHECKING:  # a client of Spark Connect has no py4j
    from py4j.java_gateway import JavaObject

# The largest difference between the clock of a driver, which stamps commits, and that of the broker.
CLOCKS_APART_MS = 24 * 3600 * 1000
_LAST = "spark.databricks.delta.lastCommitVersionInSession"
SQL_COMMITS = 100
_PAGES = (1, SQL_COMMITS, 10_000)
# operations that take no row away; for another one, somebody looks once too often
_KEEPS_ROWS = {
    "WRITE Append", "OPTIMIZE", "VACUUM START", "VACUUM END", "SET TBLPROPERTIES", "UNSET TBLPROPERTIES",
    "ADD COLUMNS", "CHANGE COLUMN", "CHANGE COLUMNS", "UPGRADE PROTOCOL",
}  # fmt: skip


class Commit(NamedTuple):
    version: int
    timestamp_ms: int
    metadata: dict[str, Any]  # from userMetadata
    operation: str = ""  # as DESCRIBE HISTORY names it; "WRITE Append" for an append
    restored_to: int | None = None  # of a RESTORE to a version


def _location(spark: SparkSession, table: Table) -> str:
    """The location, even if the table did not exist when it was resolved."""
    return resolve(spark, table.name).location if table.location.startswith("name:") else table.location


def snapshot(spark: SparkSession, table: Table) -> JavaObject:
    """Delta's current snapshot of an existing table; not on Connect."""
    return snapshot_at(spark, _location(spark, table))


def commits(
    spark: SparkSession, table: Table, *, fresh: bool = True, up_to: int | None = None
) -> Iterator[Commit]:
    """The commits of an existing table, newest first, as far back as its log goes. ``up_to``: the newest one
    that is wanted.

    ``fresh=False`` saves a listing; use it to find a commit that this process has just made.
    """
    if jvm.only_sql(spark):
        history = _sql_history(spark, table)
        yield from (commit for commit in history if up_to is None or commit.version <= up_to)
        return
    log = log_at(spark, _location(spark, table))
    configuration = log.newDeltaHadoopConf()
    last = int((snapshot(spark, table) if fresh else log.unsafeVolatileSnapshot()).version())
    for version in range(last if up_to is None else min(last, up_to), -1, -1):
        path = jvm.new(spark, jvm.PATH, log.logPath(), f"{version:020d}.json")
        try:
            lines = log.store().readAsIterator(path, configuration)
        except Exception:  # cleaned, or stored elsewhere by a catalog that coordinates commits
            yield from (commit for commit in _sql_history(spark, table) if commit.version <= version)
            return
        try:
            yield _commit(version, lines)
        finally:
            lines.close()


def _commit(version: int, lines: JavaObject) -> Commit:
    """The commitInfo of a commit, which is among its first lines."""
    found = (_json_object(line).get("commitInfo") for line in jvm.items(lines))
    about: dict[str, Any] = next(filter(None, found), {})
    operation = _operation(about.get("operation", ""), about.get("operationParameters") or {})
    return Commit(version, int(about.get("timestamp", 0)), user_metadata(about), *operation)


def _operation(operation: str, parameters: Mapping[str, Any]) -> tuple[str, int | None]:
    """``operation`` and ``restored_to`` of a commit."""
    to = parameters.get("version") if operation == "RESTORE" else None
    name = f"WRITE {parameters.get('mode', '')}" if operation == "WRITE" else operation
    return name, None if to is None else int(to)


def _sql_history(spark: SparkSession, table: Table) -> Iterator[Commit]:
    below = None
    for limit in _PAGES:
        rows = (
            spark.sql(f"DESCRIBE HISTORY {in_sql(table.name)} LIMIT {limit}")
            .select("version", "timestamp", "userMetadata", "operation", "operationParameters")
            .collect()
        )
        for row in rows:
            if below is None or row["version"] < below:
                below = int(row["version"])
                at, done = int(row["timestamp"].timestamp() * 1000), row["operationParameters"] or {}
                metadata = _json_object(row["userMetadata"])
                yield Commit(below, at, metadata, *_operation(row["operation"] or "", done))
        if len(rows) < limit:
            return


def disturbances(
    spark: SparkSession, table: Table, seen: TableMark | None
) -> tuple[TableMark | None, list[str]]:
    """See ``TableFormat``. Reads commits only if there are new ones."""
    if jvm.only_sql(spark):
        return None, []
    version = int(log_at(spark, _location(spark, table)).unsafeVolatileSnapshot().version())
    now = TableMark(table.table_id, version)
    if seen is None or seen == now:
        return now, []
    if seen.table_id != now.table_id or version < seen.version:
        return now, ["it was removed or replaced"]
    found = [
        f"{commit.operation or 'a commit'} in version {commit.version}"
        for commit in takewhile(lambda each: each.version > seen.version, commits(spark, table, fresh=False))
        if commit.operation not in _KEEPS_ROWS and "txn_app_id" not in commit.metadata
    ]
    return now, found[::-1]


def with_restores(history: Iterable[Commit]) -> Iterator[tuple[Commit, bool | None, int]]:
    """Commits, newest first; whether each is still part of the table: not if a RESTORE has taken it out, None
    behind one to a time, because which version that was is not written; and the newest RESTORE, 0 for none.
    """
    is_known, newest_part, restored = True, None, 0
    for commit in history:
        is_part = newest_part is None or commit.version <= newest_part
        yield commit, is_part if is_known else None, restored
        if is_part and commit.operation == "RESTORE":
            restored, newest_part = restored or commit.version, commit.restored_to
            is_known = is_known and newest_part is not None


def later(spark: SparkSession, table: Table, txn_app_id: str, sequence: int) -> Later:
    """See ``TableFormat``."""
    version, first, restored, undone, of_others, between = 0, None, 0, False, 0, 0
    for commit, is_part, newest in with_restores(commits(spark, table)):
        if is_part is None:
            return Later(first, 0, between)
        version, restored = commit.version, newest
        ours = restored_in(str(commit.metadata.get("txn_app_id", "")), txn_app_id) is not None
        is_later = ours and int(commit.metadata.get("sequence", 0)) > sequence
        if not is_part:
            undone |= is_later
        elif is_later:
            first, between = version, of_others
        elif ours:
            break  # those before it are not later
        elif commit.operation != "RESTORE":  # those of maintenance change no row
            of_others += not commit.operation.startswith(("OPTIMIZE", "VACUUM"))
    else:
        undone &= version == 0  # otherwise the log was cleaned
    return Later(first, restored if undone and first is None else 0, between)


def lacks(spark: SparkSession, table: Table, version: int, token: str) -> bool:
    """See ``TableFormat``. Not on Connect, where it is not known cheaply."""
    if jvm.only_sql(spark):
        return False
    found = next(commits(spark, table, up_to=version), None)
    if found is None:
        return False
    if found.version == version:
        return all(batch.get("token") != token for batch in (found.metadata, *found.metadata.get(OTHERS, ())))
    return int(snapshot(spark, table).version()) < version


def made_last(spark: SparkSession, table: Table, batch: Mapping[str, object]) -> int | None:
    """The version of the commit of ``batch``, if the log has it where Delta says that this session has made
    its last one; None if that is not certain. Only where the history is a job over the log, as this is not.
    """
    if not jvm.only_sql(spark):
        return None
    try:
        version = int(str(spark.conf.get(_LAST, None)))
        lines = text_of(f"{table.location}/_delta_log/{version:020d}.json", spark).splitlines()
    except Exception:  # of any class: nothing is said, or nobody may read it
        return None
    metadata = [user_metadata(_json_object(line).get("commitInfo") or {}) for line in lines]
    return version if any(is_of(each, batch) for each in metadata) else None


class CommitStatus(NamedTuple):
    """Whether a table has the commit of a batch, None if it is not known; and the version of that commit,
    even if a RESTORE has taken it out, or may have. ``restored``: the newest one then.
    """

    exists: bool | None
    version: int | None = None
    restored: int = 0


def find_commit(history: Iterator[Commit], batch: Mapping[str, object], decided_at_us: int) -> CommitStatus:
    """Whether ``history`` (newest first) has the commit of ``batch``."""
    oldest = None
    for oldest, is_part, restored in with_restores(history):
        if is_of(oldest.metadata, batch):
            return CommitStatus(is_part, oldest.version, 0 if is_part else restored)
        if oldest.timestamp_ms and oldest.timestamp_ms < decided_at_us // 1000 - CLOCKS_APART_MS:
            return CommitStatus(False)  # an append is never older than its decision
    return CommitStatus(False if oldest is None or oldest.version == 0 else None)


def user_metadata(commit_info: Mapping[str, Any]) -> dict[str, object]:
    """What a commit says about its batch; empty for another one."""
    return _json_object(commit_info.get("userMetadata"))


def is_of(metadata: Mapping[str, object], batch: Mapping[str, object]) -> bool:
    """Whether a commit is that of ``batch``, and of its ``txn_app_id`` if both name one: each operation of a
    batch on a table is a commit.
    """
    mine = batch.get("txn_app_id", metadata.get("txn_app_id"))
    return metadata.get("token") == batch["token"] and metadata.get("txn_app_id", mine) == mine


def _checksum_part(snapshot: JavaObject, name: str) -> JavaObject | None:
    """A part of what Delta has written beside the commit of a version; None if it has not. The state itself
    is a job of Spark over the whole log.
    """
    checksum = snapshot.checksumOpt()
    part = getattr(checksum.get(), name)() if checksum.isDefined() else None
    return None if part is None or part.isEmpty() else part.get()


def parts(snapshot: JavaObject, name: str) -> Iterator[JavaObject]:
    """``setTransactions`` or ``domainMetadata`` of a snapshot, without that job if the checksum has them."""
    part = _checksum_part(snapshot, name)
    return jvm.items(getattr(snapshot, name)() if part is None else part)


def version_in_checksum(snapshot: JavaObject, txn_app_id: str) -> int | None:
    """The last txnVersion of an app; None if the checksum does not name it."""
    part = _checksum_part(snapshot, "setTransactions")
    versions = () if part is None else jvm.items(part)
    return next((int(each.version()) for each in versions if str(each.appId()) == txn_app_id), None)


def stored_versions(spark: SparkSession, table: Table, prefix: str) -> dict[str, int]:
    """The last txnVersion of each id that begins with ``prefix`` and has no @ behind; on Connect of TOLD."""
    if jvm.only_sql(spark):
        latest = [commit.metadata for commit in islice(_sql_history(spark, table), SQL_COMMITS)]
        versions = [(str(each.get("txn_app_id")), int(each.get("sequence", 0))) for each in latest]
    else:
        stored = parts(snapshot(spark, table), "setTransactions")
        versions = [(str(each.appId()), int(each.version())) for each in stored]
    found = {name: version for name, version in sorted(versions) if name.startswith(prefix)}
    return {name: version for name, version in found.items() if "@" not in name.removeprefix(prefix)}


def commits_of(spark: SparkSession, table: Table, tokens: Collection[str]) -> dict[str, Mapping[str, object]]:
    """See ``TableFormat``."""
    missing = set(tokens)
    found: dict[str, Mapping[str, object]] = {}
    for commit in commits(spark, table) if missing else ():
        for batch in (commit.metadata, *commit.metadata.get(OTHERS, ())):
            if batch.get("token") in missing:
                found[batch["token"]] = batch
                missing.discard(batch["token"])
        if not missing:
            break
    return found


def stored_at_ms(spark: SparkSession, table: Table, txn_app_id: str) -> int:
    """When the table stored the last txnVersion of this app; 0 if that is not known."""
    stored = () if jvm.only_sql(spark) else jvm.items(snapshot(spark, table).setTransactions())
    ours = (each.lastUpdated() for each in stored if each.appId() == txn_app_id)
    return next((int(at.get()) for at in ours if at.isDefined()), 0)


def _json_object(text: str | None) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
