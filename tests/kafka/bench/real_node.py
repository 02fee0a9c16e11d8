"""A real Kafka for tests: one KRaft node on loopback, with listeners for plaintext, TLS and every SASL mechanism.

Not here: resolving its jars and starting it (``bench/kafka_server.py``).
Invariant: without a JDK or the jars the tests that need it are skipped, and say why.
"""

from __future__ import annotations

import contextlib
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kafka
import pytest
from kafka import KafkaAdminClient
from kafka.errors import CoordinatorNotAvailableError

from bench.kafka_server import PLAIN, Cluster, cluster
from broker_core.kafka.protocol.port import NodeAddress, TopicPartition
from tests import jvm
from tests.progress import GUARD_S

USER, PASSWORD = "alice", "wonderland"
REAUTHENTICATE_MS = 1500
_STORE = "changeit"
_SASL = "org.apache.kafka.common.security"
_LOGINS = {
    "plain": f'{_SASL}.plain.PlainLoginModule required user_{USER}="{PASSWORD}";',
    "scram-sha-256": f"{_SASL}.scram.ScramLoginModule required;",
    "scram-sha-512": f"{_SASL}.scram.ScramLoginModule required;",
    # tokens without a signature, which Kafka takes for tests
    "oauthbearer": f"{_SASL}.oauthbearer.OAuthBearerLoginModule required "
    f'unsecuredLoginStringClaim_sub="{USER}";',
}


@dataclass(frozen=True)
class RealNode:
    plain: NodeAddress
    sasl: NodeAddress
    tls: NodeAddress
    certificate: Path  # of the TLS listener
    trusted: ssl.SSLContext  # trusts it

    def grow(self, topic: str, partitions: int) -> None:
        """Adds partitions to a topic, up to this number, and waits until their leaders know that they are."""
        with contextlib.closing(KafkaAdminClient(bootstrap_servers=str(self.plain))) as admin:
            admin.create_partitions({topic: partitions})
        logs = [kafka.TopicPartition(topic, number) for number in range(partitions)]
        with contextlib.closing(kafka.KafkaConsumer(bootstrap_servers=str(self.plain))) as consumer:
            consumer.end_offsets(logs, timeout_ms=int(GUARD_S * 1000))

    def position(self, group: str, log: TopicPartition) -> int:
        return position(self.plain, group, log)


def position(node: NodeAddress, group: str, log: TopicPartition) -> int:
    """What a group has committed; -1: nothing, or the cluster has had no group yet."""
    with contextlib.closing(KafkaAdminClient(bootstrap_servers=str(node))) as admin:
        try:
            found = admin.list_group_offsets({group: None})[group].get(kafka.TopicPartition(*log))
        except CoordinatorNotAvailableError:
            return -1
    return -1 if found is None else int(found.offset)


@contextlib.contextmanager
def real_cluster(folder: Path, count: int = 1, **more: Any) -> Iterator[Cluster]:
    """As ``bench.kafka_server.cluster``; skips the test without a JDK or the jars."""
    if shutil.which("java") is None:
        pytest.skip("a real Kafka needs a JDK, and there is no java")
    with contextlib.ExitStack() as stack:
        try:
            started = stack.enter_context(cluster(folder, count, options=jvm.of_kafka(), **more))
        except SystemExit as error:
            if "cannot resolve" not in str(error):
                raise
            pytest.skip(f"a real Kafka needs its jars from Maven: {str(error).splitlines()[0]}")
        yield started


@contextlib.contextmanager
def real_node(folder: Path) -> Iterator[RealNode]:
    if shutil.which("keytool") is None:
        pytest.skip("a real Kafka needs a JDK, and there is no keytool")
    store, certificate = folder / "keys.p12", folder / "certificate.pem"
    key = ["-alias", "node", "-keystore", str(store), "-storetype", "PKCS12", "-storepass", _STORE]
    _keytool(
        "-genkeypair",
        *key,
        "-keyalg",
        "EC",
        "-dname",
        "CN=node",
        "-ext",
        "SAN=ip:127.0.0.1",
        "-validity",
        "2",
    )
    _keytool("-exportcert", *key, "-rfc", "-file", str(certificate))
    settings = {
        "auto.create.topics.enable": "false",
        "offsets.topic.num.partitions": "2",
        "transaction.state.log.num.partitions": "2",
        "transaction.abort.timed.out.transaction.cleanup.interval.ms": "200",
        "connections.max.reauth.ms": str(REAUTHENTICATE_MS),
        "listener.name.sasl.sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512,OAUTHBEARER",
        **{f"listener.name.sasl.{mechanism}.sasl.jaas.config": login for mechanism, login in _LOGINS.items()},
        "listener.name.tls.ssl.keystore.location": str(store),
        "listener.name.tls.ssl.keystore.type": "PKCS12",
        "listener.name.tls.ssl.keystore.password": _STORE,
        "listener.name.tls.ssl.key.password": _STORE,
    }
    users = [f"SCRAM-SHA-{bits}=[name={USER},password={PASSWORD}]" for bits in (256, 512)]
    listeners = {"SASL": "SASL_PLAINTEXT", "TLS": "SSL"}
    with real_cluster(folder, listeners=listeners, settings=settings, users=users) as started:
        endpoints = {name: NodeAddress("127.0.0.1", port) for name, port in started.nodes[0].ports.items()}
        yield RealNode(
            endpoints[PLAIN],
            endpoints["SASL"],
            endpoints["TLS"],
            certificate,
            ssl.create_default_context(cafile=str(certificate)),
        )


def _keytool(*arguments: str) -> None:
    subprocess.run(["keytool", *arguments], check=True, capture_output=True)
