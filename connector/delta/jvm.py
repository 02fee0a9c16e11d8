"""Classes and static members of the JVM by their full names, each looked up once in a process.

py4j asks the JVM for every part of ``jvm.org.apache...``, each time: that was a third of the calls of a
small append.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from pyspark.sql import SparkSession

from connector.tables.table import is_connect

if TYPE_CHECKING:  # a client of Spark Connect has no py4j
    from py4j.java_gateway import GatewayClient, JavaObject

OPTION = "scala.Option"
PATH = "org.apache.hadoop.fs.Path"
DELTA = "org.apache.spark.sql.delta"
PYTHON = "org.apache.spark.api.python.PythonUtils"
CONVERTERS = "scala.jdk.javaapi.CollectionConverters"
_SOURCES = "org.apache.spark.sql.execution.datasources.DataSource"
_MAPPER = "com.fasterxml.jackson.databind.ObjectMapper"
_MODE = "org.apache.spark.sql.execution.CommandExecutionMode"


def execution(spark: SparkSession, sql: str) -> JavaObject:
    """The execution of a statement in a session, which is analysed and not carried out yet."""
    state = spark._jsparkSession.sessionState()
    return state.executePlan(state.sqlParser().parsePlan(sql), call(spark, _MODE, "ALL"))


def only_sql(spark: SparkSession) -> bool:
    """Whether Delta is reached by SQL alone: on Spark Connect, and in a session whose Delta has other classes
    than delta-spark has, as that of a vendor's runtime.
    """
    return is_connect(spark) or (not _has_delta(_client(spark)) and _reads_delta(spark))


def new(spark: SparkSession, name: str, *arguments: object) -> JavaObject:
    """An object of the class. Raises Py4JError, Py4JJavaError."""
    return _class(_client(spark), name)(*arguments)


def call(spark: SparkSession, name: str, method: str, *arguments: object) -> JavaObject:
    """What a static method returns. Raises Py4JError if there is none, Py4JJavaError."""
    return _member(_client(spark), name, method)(*arguments)


def field(spark: SparkSession, name: str, member: str) -> JavaObject:
    """The value of a static field."""
    return _member(_client(spark), name, member)


def nothing(spark: SparkSession) -> JavaObject:
    """Scala's None."""
    return _nothing(_client(spark))


def some(spark: SparkSession, value: object) -> JavaObject:
    return call(spark, OPTION, "apply", value)


def items(found: JavaObject) -> Iterator[JavaObject]:
    """Those of a collection or an iterator of Scala."""
    iterator = found.iterator()
    while iterator.hasNext():
        yield iterator.next()


def json_mapper(spark: SparkSession) -> JavaObject:
    """Jackson: the text of a map is one call, its items are one each."""
    return _mapper(_client(spark))


def _client(spark: SparkSession) -> GatewayClient:
    jvm: Any = spark._jvm
    return jvm._gateway_client


@lru_cache(maxsize=8)
def _has_delta(client: GatewayClient) -> bool:
    from py4j.protocol import Py4JError

    try:
        _member(client, f"{DELTA}.DeltaLog", "forTable")
    except Py4JError:
        return False
    return True


def _reads_delta(spark: SparkSession) -> bool:
    from py4j.protocol import Py4JError

    try:
        call(spark, _SOURCES, "lookupDataSource", "delta", spark._jsparkSession.sessionState().conf())
    except Py4JError:
        return False
    return True


def _class(client: GatewayClient, name: str) -> JavaObject:
    from py4j.java_gateway import JavaClass

    return JavaClass(name, client)


@lru_cache(maxsize=64)
def _member(client: GatewayClient, name: str, member: str) -> JavaObject:
    return getattr(_class(client, name), member)


@lru_cache(maxsize=8)
def _nothing(client: GatewayClient) -> JavaObject:
    return _member(client, OPTION, "empty")()


@lru_cache(maxsize=8)
def _mapper(client: GatewayClient) -> JavaObject:
    return _class(client, _MAPPER)()
