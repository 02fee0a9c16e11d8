"""Starts Kafka for a benchmark: jars by Maven coordinates with Spark's Ivy, one KRaft node on loopback.

Not here: measurements. Needs only a JDK.
Invariant: the server and its files end with the context.
"""

from __future__ import annotations

import base64
import contextlib
import glob
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pyspark

KAFKA = "org.apache.kafka:kafka_2.13:4.3.1"
TOKEN_PROVIDER = "org.apache.spark:spark-token-provider-kafka-0-10_2.13"
TOKEN_PROVIDER_VERSION = "4.1.0-preview1"  # the version that the source names was never published
SPARK_KAFKA = (
    "org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0",
    "org.apache.kafka:kafka-clients:3.9.2",
    "org.apache.commons:commons-pool2:2.13.1",
)
START_S = 240.0
PLAIN = "PLAIN"  # the listener without TLS and login
RESOLVE = """
import sys
from pyspark.sql import SparkSession
builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
builder = builder.config("spark.jars.packages", sys.argv[1])
if sys.argv[2]:
    builder = builder.config("spark.jars.excludes", sys.argv[2])
spark = builder.getOrCreate()
print("jars " + spark.sparkContext.getConf().get("spark.jars"))
spark.stop()
"""


def resolve(coordinates: Sequence[str], excludes: str = "") -> list[str]:
    """Paths of the jars of ``coordinates`` and their dependencies. Starts a session."""
    command = [sys.executable, "-c", RESOLVE, ",".join(coordinates), excludes]
    done = subprocess.run(command, capture_output=True, text=True)
    found = [line for line in done.stdout.splitlines() if line.startswith("jars ")]
    if not found:
        raise SystemExit(f"cannot resolve {', '.join(coordinates)}:\n{done.stderr[-3000:]}")
    return [path.removeprefix("file://") for path in found[0].removeprefix("jars ").split(",")]


def spark_kafka_jars() -> list[str]:
    """The jars for Spark's Kafka source and sink."""
    jars = resolve(SPARK_KAFKA, TOKEN_PROVIDER)
    provider = resolve([f"{TOKEN_PROVIDER}:{TOKEN_PROVIDER_VERSION}"])
    return jars + [path for path in provider if "spark-token-provider" in path]


def _server_classpath() -> str:
    """Kafka's jars, with Scala and logging from Spark, which Ivy leaves out.

    Their paths are kept beside the interpreter, because asking Ivy starts a session.
    """
    known = Path(sys.prefix) / f"{KAFKA.replace(':', '_')}.jars"
    own = known.read_text().splitlines() if known.exists() else []
    if not own or not all(map(os.path.exists, own)):
        own = resolve([KAFKA])
        known.write_text("\n".join(own))
    spark = Path(pyspark.__path__[0]) / "jars"
    borrowed = [
        path
        for name in ("scala-library-2.13*", "slf4j-api-2*", "log4j-slf4j2-impl*")
        for path in glob.glob(str(spark / f"{name}.jar"))
    ]
    return os.pathsep.join([path for path in own if "slf4j-api" not in path] + borrowed)


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


def _properties(
    folder: Path, doors: Mapping[str, tuple[str, int]], controller: int, more: Mapping[str, str]
) -> Path:
    protocols = {name: protocol for name, (protocol, _) in doors.items()} | {"CONTROLLER": "PLAINTEXT"}
    open_to = ",".join(f"{name}://127.0.0.1:{port}" for name, (_, port) in doors.items())
    settings = {
        "process.roles": "broker,controller",
        "node.id": "1",
        "controller.quorum.voters": f"1@127.0.0.1:{controller}",
        "listeners": f"{open_to},CONTROLLER://127.0.0.1:{controller}",
        "advertised.listeners": open_to,
        "inter.broker.listener.name": PLAIN,
        "controller.listener.names": "CONTROLLER",
        "listener.security.protocol.map": ",".join(
            f"{name}:{protocol}" for name, protocol in protocols.items()
        ),
        "log.dirs": str(folder / "kafka"),
        "num.partitions": "2",
        "offsets.topic.replication.factor": "1",
        "transaction.state.log.replication.factor": "1",
        "transaction.state.log.min.isr": "1",
        "group.initial.rebalance.delay.ms": "0",
        **more,
    }
    path = folder / "server.properties"
    path.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
    return path


@contextlib.contextmanager
def kafka(folder: Path) -> Iterator[str]:
    """Run Kafka; the bootstrap address. Topics are created with two partitions at the first use."""
    with node(folder) as ports:
        yield f"127.0.0.1:{ports[PLAIN]}"


@contextlib.contextmanager
def node(
    folder: Path,
    *,
    doors: Mapping[str, str] | None = None,
    settings: Mapping[str, str] | None = None,
    users: Sequence[str] = (),
) -> Iterator[dict[str, int]]:
    """Run Kafka on loopback; its ports by the names of its listeners.

    ``doors``: more listeners than PLAIN, with their security protocols. ``settings``: lines of
    server.properties. ``users``: SCRAM credentials, as kafka-storage takes them.
    """
    classpath = _server_classpath()
    protocols = {PLAIN: "PLAINTEXT", **(doors or {})}
    controller, *free = free_ports(1 + len(protocols))
    ports = dict(zip(protocols, free))
    properties = _properties(
        folder, {name: (protocols[name], ports[name]) for name in protocols}, controller, settings or {}
    )
    quiet = folder / "log4j2.properties"
    quiet.write_text(
        "rootLogger.level=error\nrootLogger.appenderRef.out.ref=out\nappender.out.type=Console\nappender.out.name=out\n"
    )
    quiet.write_text(
        quiet.read_text() + "appender.out.layout.type=PatternLayout\nappender.out.layout.pattern=%d %p %m%n\n"
    )
    java = ["java", "-Xmx1g", f"-Dlog4j2.configurationFile={quiet}", "-cp", classpath]
    cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).rstrip(b"=").decode()
    credentials = [word for user in users for word in ("--add-scram", user)]
    formatted = subprocess.run(
        [*java, "kafka.tools.StorageTool", "format", "-t", cluster, "-c", str(properties), *credentials],
        capture_output=True,
        text=True,
    )
    if formatted.returncode:
        raise SystemExit(f"Kafka's storage cannot be formatted:\n{formatted.stdout}{formatted.stderr}")
    log = folder / "kafka.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*java, "kafka.Kafka", str(properties)], stdout=out, stderr=subprocess.STDOUT
        )
    try:
        deadline = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", ports[PLAIN]), 1).close()
                break
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"Kafka did not start:\n{log.read_text()[-3000:]}")
            time.sleep(0.2)
        yield ports
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
