"""Starts Kafka on loopback for benchmarks, tests and the demo: one KRaft node or several, jars by Ivy.

Not here: measurements. Needs only a JDK.
Invariant: every node ends with the context.
"""

from __future__ import annotations

import base64
import contextlib
import glob
import os
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.jars import SPARK_JARS, resolve
from bench.ports import free_ports

KAFKA = "org.apache.kafka:kafka_2.13:4.3.1"
TOKEN_PROVIDER = "org.apache.spark:spark-token-provider-kafka-0-10_2.13"
TOKEN_PROVIDER_VERSION = "4.1.0-preview1"  # the version that the source names was never published
SPARK_KAFKA = (
    "org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0",
    "org.apache.kafka:kafka-clients:3.9.2",
    "org.apache.commons:commons-pool2:2.13.1",
)
START_S = 900.0  # on a machine that is busy with other work
PLAIN = "PLAIN"  # the listener without TLS and login
QUIET = {
    "rootLogger.level": "error",
    "rootLogger.appenderRef.out.ref": "out",
    "appender.out.type": "Console",
    "appender.out.name": "out",
    "appender.out.layout.type": "PatternLayout",
    "appender.out.layout.pattern": "%d %p %m%n",
}


def spark_kafka_jars() -> list[str]:
    """The jars for Spark's Kafka source and sink."""
    jars = resolve(SPARK_KAFKA, TOKEN_PROVIDER)
    provider = resolve([f"{TOKEN_PROVIDER}:{TOKEN_PROVIDER_VERSION}"])
    return jars + [path for path in provider if "spark-token-provider" in path]


def _server_classpath() -> str:
    """Kafka's jars, with Scala and logging from Spark, which Ivy leaves out."""
    borrowed = [
        path
        for name in ("scala-library-2.13*", "slf4j-api-2*", "log4j-slf4j2-impl*")
        for path in glob.glob(str(SPARK_JARS / f"{name}.jar"))
    ]
    return os.pathsep.join([path for path in resolve([KAFKA]) if "slf4j-api" not in path] + borrowed)


def _lines(path: Path, settings: Mapping[str, str]) -> Path:
    path.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
    return path


def cluster_id() -> str:
    """A random one, as Kafka writes it. Never with a first "-": kafka-storage would take it for an option."""
    while (identity := base64.urlsafe_b64encode(uuid.uuid4().bytes).rstrip(b"=").decode()).startswith("-"):
        pass
    return identity


class Node:
    """One process of Kafka, broker and controller, which may be killed and started again over its files."""

    def __init__(self, folder: Path, command: Sequence[str], ports: Mapping[str, int]) -> None:
        self.ports = dict(ports)  # by the names of its listeners
        self.log = folder / "kafka.log"
        self.command = command
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Does not wait until it answers (``wait``)."""
        with self.log.open("ab") as out:
            self._process = subprocess.Popen(
                self.command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait(self) -> None:
        """Waits until the node accepts connections. Raises SystemExit if it ends, or after START_S."""
        deadline = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", self.ports[PLAIN]), 1).close()
                return
            if self._process is None or self._process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"Kafka did not start:\n{self.log.read_text()[-3000:]}")
            time.sleep(0.2)

    def kill(self) -> None:
        """Ends it with SIGKILL, as a crash does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def freeze(self) -> None:
        """Stops its time, as a pause of its machine does."""
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        if self._process is None or self._process.poll() is not None:
            return
        self.thaw()
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self.kill()


@dataclass(frozen=True)
class Cluster:
    nodes: tuple[Node, ...]

    @property
    def bootstrap(self) -> str:
        return ",".join(f"127.0.0.1:{node.ports[PLAIN]}" for node in self.nodes)


@contextlib.contextmanager
def cluster(
    folder: Path,
    count: int = 1,
    *,
    listeners: Mapping[str, str] | None = None,
    settings: Mapping[str, str] | None = None,
    users: Sequence[str] = (),
    features: Sequence[str] = (),
    heap: str = "1g",
    options: Sequence[str] = (),
) -> Iterator[Cluster]:
    """Runs ``count`` nodes on loopback, with every internal topic on up to three of them.

    ``listeners``: more listeners than PLAIN, with their security protocols. ``settings``: more lines of
    server.properties. ``users``: SCRAM credentials, ``features``: levels, both as kafka-storage takes them.
    ``options``: more of them for each JVM.
    """
    classpath = _server_classpath()
    quiet = _lines(folder / "log4j2.properties", QUIET)
    java = ["java", *options, f"-Xmx{heap}", f"-Dlog4j2.configurationFile={quiet}", "-cp", classpath]
    protocols = {PLAIN: "PLAINTEXT", **(listeners or {})}
    free = free_ports(count * (1 + len(protocols)))
    controllers = [free.pop() for _ in range(count)]
    voters = ",".join(f"{number}@127.0.0.1:{port}" for number, port in enumerate(controllers, 1))
    identity = cluster_id()
    chosen = [word for user in users for word in ("--add-scram", user)]
    chosen += [word for feature in features for word in ("--feature", feature)]
    nodes = []
    for number, controller in enumerate(controllers, 1):
        mine = folder / f"node-{number}"
        mine.mkdir()
        ports = {name: free.pop() for name in protocols}
        open_to = ",".join(f"{name}://127.0.0.1:{port}" for name, port in ports.items())
        replicas = str(min(count, 3))
        properties = _lines(
            mine / "server.properties",
            {
                "process.roles": "broker,controller",
                "node.id": str(number),
                "controller.quorum.voters": voters,
                "listeners": f"{open_to},CONTROLLER://127.0.0.1:{controller}",
                "advertised.listeners": open_to,
                "inter.broker.listener.name": PLAIN,
                "controller.listener.names": "CONTROLLER",
                "listener.security.protocol.map": ",".join(
                    f"{name}:{protocol}"
                    for name, protocol in {**protocols, "CONTROLLER": "PLAINTEXT"}.items()
                ),
                "log.dirs": str(mine / "logs"),
                "num.partitions": "2",
                "default.replication.factor": replicas,
                "min.insync.replicas": str(min(count, 2)),
                "offsets.topic.replication.factor": replicas,
                "transaction.state.log.replication.factor": replicas,
                "transaction.state.log.min.isr": str(min(count, 2)),
                "group.initial.rebalance.delay.ms": "0",
                **(settings or {}),
            },
        )
        formatted = subprocess.run(
            [*java, "kafka.tools.StorageTool", "format", "-t", identity, "-c", str(properties), *chosen],
            capture_output=True,
            text=True,
        )
        if formatted.returncode:
            raise SystemExit(f"Kafka's storage cannot be formatted:\n{formatted.stdout}{formatted.stderr}")
        nodes.append(Node(mine, [*java, "kafka.Kafka", str(properties)], ports))
    try:
        for node in nodes:
            node.start()
        for node in nodes:
            node.wait()
        yield Cluster(tuple(nodes))
    finally:
        for node in nodes:
            node.stop()
