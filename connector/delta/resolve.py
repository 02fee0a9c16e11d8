"""Finds a Delta table and its log.

Not here: what a spelling means (``connector/tables/table.py``), reading the log (``log.py``).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from typing import TYPE_CHECKING, Any

from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import SparkSession

from broker_core.core.errors import OptionError
from connector.delta import jvm
from connector.delta.last_commit import LastCommits
from connector.errors import first_line, without_logs
from connector.stream.offset_log import text_of
from connector.tables.table import (
    Table,
    in_sql,
    name_parts,
    path_of,
    plain_location,
    quoted,
    without_high_water_marks,
)

if TYPE_CHECKING:
    from py4j.java_gateway import JavaObject

_FILE_FORMATS = ("parquet", "orc", "csv", "json", "text", "avro", "xml")
_SESSION_CATALOG = "spark_catalog"


def digest(metadata: str, protocol: str) -> str:
    """A short text that differs where the metadata or the protocol of a table differs, in their JSON."""
    actions = [json.loads(without_high_water_marks(action)) for action in (metadata, protocol)]
    return hashlib.sha256(json.dumps(actions, sort_keys=True).encode()).hexdigest()[:32]


def resolve(spark: SparkSession, spelling: str, commits: LastCommits | None = None) -> Table:
    """The table that ``spelling`` names now. ``commits``: tables whose state this process knows.
    Raises OptionError if it cannot be a Delta table.
    """
    commits = commits or LastCommits()
    path = path_of(spelling)
    if path is not None:
        return _at_path(spark, path, commits)
    parts = name_parts(spelling)
    if len(parts) == 2 and parts[0].lower() in _FILE_FORMATS and "/" in parts[1]:
        raise OptionError(f"table {spelling!r} has files of format {parts[0]}", "name a Delta table")
    parts = _qualified(spark, parts)
    if parts[0].lower() == _SESSION_CATALOG and len(parts) == 3 and not jvm.only_sql(spark):
        return _in_session_catalog(spark, parts, commits)
    return _in_some_catalog(spark, parts, commits)


def _qualified(spark: SparkSession, parts: list[str]) -> list[str]:
    if len(parts) == 1:
        return [spark.catalog.currentCatalog(), *name_parts(spark.catalog.currentDatabase()), *parts]
    if len(parts) == 2 and spark.conf.get(f"spark.sql.catalog.{parts[0]}", None) is None:
        return [spark.catalog.currentCatalog(), *parts]
    return parts


def _at_path(spark: SparkSession, path: str, commits: LastCommits) -> Table:
    if jvm.only_sql(spark):
        name = path.rstrip("/") or "/"
        if not _is_delta(spark, path):
            return Table(name, plain_location(path), "")
        return _from_sql(spark, name, in_sql(path), commits)
    qualified = commits.qualify(spark, path, lambda: _qualified_path(spark, path))
    location = plain_location(qualified)
    return Table(qualified, location, *_look(spark, qualified, location, commits))


def _qualified_path(spark: SparkSession, path: str) -> str:
    try:
        hadoop_path = jvm.new(spark, jvm.PATH, path)
        file_system = hadoop_path.getFileSystem(spark._jsparkSession.sessionState().newHadoopConf())
        return str(file_system.makeQualified(hadoop_path).toString())
    except Exception as error:
        raise _wrong(path, error) from error


def _wrong(name: str, error: Exception, advice: str = "give a path that Spark can write to") -> OptionError:
    return OptionError(f"table {name!r}: {first_line(error)[:300]}", advice)


def _is_delta(spark: SparkSession, path: str) -> bool:
    try:
        with without_logs():
            return spark.read.format("delta").load(path).schema is not None
    except AnalysisException:  # Spark has several error classes for a missing table
        return False
    except PySparkException as error:
        if "UnsupportedFileSystem" not in str(error):
            raise
        raise _wrong(path, error) from error


def managed(table: str) -> OptionError:
    return OptionError(
        f"table {table!r} is managed by its catalog (the feature catalogManaged): Delta refuses a "
        "transaction by its path, which txmq needs",
        "append to a table without this feature, and let another query copy its rows",
    )


def log_at(spark: SparkSession, location: str) -> JavaObject:
    """Delta's object for the log at a path; not on Connect. Raises OptionError without Delta, and for a table
    that its catalog manages.
    """
    from py4j.protocol import Py4JError, Py4JJavaError

    try:
        return jvm.call(spark, f"{jvm.DELTA}.DeltaLog", "forTable", spark._jsparkSession, location)
    except Py4JJavaError as error:
        if "CATALOG_MANAGED_TABLE" in str(error):
            raise managed(location) from None
        raise
    except Py4JError as error:
        raise OptionError(
            f"table {location!r}: the Spark session has no Delta Lake",
            "build it with delta.configure_spark_with_delta_pip",
        ) from error


def snapshot_at(spark: SparkSession, location: str) -> JavaObject:
    """Delta's current snapshot of the table at a path; not on Connect."""
    nothing = jvm.nothing(spark)
    return log_at(spark, location).update(False, nothing, nothing)


def look_at(snapshot: JavaObject) -> tuple[str, str, str]:
    """(id, metadata, protocol) of a table; empty if there is none."""
    if int(snapshot.version()) < 0:
        return "", "", ""
    metadata = snapshot.metadata()
    return str(metadata.id()), str(metadata.json()), str(snapshot.protocol().json())


def _look(spark: SparkSession, place: str, location: str, commits: LastCommits) -> tuple[str, str, str]:
    """As ``look_at``, of the table at a path. ``location``: the same, as in ``Table``."""
    last = commits.of(spark, location)
    return last.look if last is not None else look_at(snapshot_at(spark, place))


def _from_sql(spark: SparkSession, name: str, sql: str, commits: LastCommits) -> Table:
    """An existing table, as SQL tells of it. Its columns are analysed; for the rest, SQL has a job over the
    log, and Delta a file beside each commit.
    """
    found = _from_checksum(spark, *commits.by_name[name]) if name in commits.by_name else None
    if found is None:
        found = spark.sql(f"DESCRIBE DETAIL {sql}").collect()[0].asDict()
        if str(found["format"]).lower() != "delta":
            raise OptionError(f"table {name!r} is a table of format {found['format']}", "name a Delta table")
    metadata = {
        "schemaString": spark.table(sql).schema.json(),
        "partitionColumns": list(found["partitionColumns"]),
        "configuration": dict(found["properties"] or {}),
    }
    text = json.dumps({"metaData": metadata}, sort_keys=True)
    return Table(name, plain_location(str(found["location"])), str(found["id"]), text)


def _from_checksum(spark: SparkSession, table_id: str, location: str, version: int) -> dict[str, Any] | None:
    """What Delta has written beside the commit of ``version`` about the table; None if that is not its last
    commit, or if it is not certain: a file of this name may be one of another table, or of another host.
    """
    log = f"{location}/_delta_log"
    with contextlib.suppress(Exception):  # of any class: nobody has noted it, or nobody may read it
        try:
            text_of(f"{log}/{version + 1:020d}.json", spark)
        except FileNotFoundError:
            metadata = json.loads(text_of(f"{log}/{version:020d}.crc", spark))["metadata"]
            if metadata["id"] == table_id:
                return {**metadata, "location": location, "properties": metadata["configuration"]}
    return None


def _in_session_catalog(spark: SparkSession, parts: list[str], commits: LastCommits) -> Table:
    """Uses the catalog directly: a few milliseconds for each batch."""
    catalog = spark._jsparkSession.sessionState().catalog()
    if not catalog.databaseExists(parts[1]):
        raise _no_database(parts)
    key = jvm.new(spark, "org.apache.spark.sql.catalyst.TableIdentifier", parts[2], jvm.some(spark, parts[1]))
    if not catalog.tableExists(key):
        location = plain_location(_decoded(spark, catalog.defaultTablePath(key)))
        exact = spark.conf.get("spark.sql.caseSensitive", "false") == "true"
        name = quoted(parts if exact else [part.lower() for part in parts])
        if _look(spark, location, location, commits)[0]:  # for example, written by its path
            raise OptionError(
                f"table {name!r}: no such table in the catalog, but its location {location} has one",
                f"append to that path, or CREATE TABLE {name} USING delta LOCATION '{location}'",
            )
        return Table(name, location, "")
    entry = catalog.getTableMetadata(key)
    identifier = entry.identifier()
    name = quoted([_SESSION_CATALOG, str(identifier.database().get()), str(identifier.table())])
    provider = str(entry.provider().get()).lower() if entry.provider().isDefined() else ""
    kind = "a view" if str(entry.tableType().name()) == "VIEW" else f"a table of format {provider or 'hive'}"
    if kind != "a table of format delta":
        raise OptionError(f"table {name!r}: it is {kind}", "name a Delta table, or its path")
    location = _decoded(spark, entry.location())
    table_id, metadata, protocol = _look(spark, location, plain_location(location), commits)
    if not table_id:
        raise OptionError(f"table {name!r}: there is no Delta log at {location}", "drop and create the table")
    return Table(name, plain_location(location), table_id, metadata, protocol)


def _no_database(parts: list[str]) -> OptionError:
    what = f"table {quoted(parts)!r}: there is no database {'.'.join(parts[1:-1])!r}"
    return OptionError(what, "create it, or name another one")


def _decoded(spark: SparkSession, url: object) -> str:
    return str(jvm.new(spark, jvm.PATH, url).toString())


def _in_some_catalog(spark: SparkSession, parts: list[str], commits: LastCommits) -> Table:
    name = quoted(parts)
    try:
        if not spark.catalog.tableExists(name):
            if len(parts) > 2 and not spark.catalog.databaseExists(quoted(parts[:-1])):
                raise _no_database(parts)
            return Table(name, f"name:{name.lower()}", "")
        return _from_sql(spark, name, name, commits)
    except OptionError:
        raise
    except Exception as error:
        raise _wrong(name, error, "name a Delta table, or its path") from error
