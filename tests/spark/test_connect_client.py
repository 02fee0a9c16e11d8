"""Spark Connect as platforms run it: the server is another process, and the client has neither a JVM nor py4j nor an
environment.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.jars import SPARK_JARS, delta, missing_in_spark, resolve
from bench.ports import free_ports
from broker_core.launcher import Broker
from tests.conftest import SESSION_CONF
from tests.progress import GUARD_S, run_to_end, wait_until
from tests.spark.jobs import PLANNED_ONCE

pytestmark = [pytest.mark.spark, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
SERVER = "org.apache.spark.sql.connect.service.SparkConnectServer"
NOTEBOOKS = ("exactly_once", "typed_messages", "upserts", "without_duplicates")
WITHOUT_PY4J = """
import sys
sys.modules["py4j"] = sys.modules["pyspark.core"] = None
import txmq
import connector.datasource, connector.table_formats
print([getattr(txmq, name).__name__ for name in ("decode", "encode", "mirror_offsets", "transactional")])
"""


@contextmanager
def connect_server(folder: Path) -> Iterator[str]:
    (port,) = free_ports(1)
    conf = {
        **SESSION_CONF,
        **PLANNED_ONCE,
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": str(port),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
    }
    command = [str(SPARK_JARS.parent / "bin" / "spark-submit"), "--master", "local[2]", "--class", SERVER]
    command += ["--driver-class-path", os.pathsep.join(missing_in_spark(resolve([delta()])))]
    command += [word for setting in conf.items() for word in ("--conf", "=".join(setting))]
    environment = {**os.environ, "SPARK_HOME": str(SPARK_JARS.parent)}
    environment.pop("PYSPARK_SUBMIT_ARGS", None)
    log = folder / "server.log"
    with log.open("w") as output:
        server = subprocess.Popen(
            [*command, "spark-internal"], stdout=output, stderr=output, env=environment, cwd=folder
        )
    try:

        def answers() -> bool:
            assert server.poll() is None, log.read_text()[-3000:]
            with socket.socket() as client:
                return client.connect_ex(("127.0.0.1", port)) == 0

        wait_until(answers, "the Connect server listens")
        yield f"sc://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(GUARD_S)


def test_everything_of_txmq_is_there_without_py4j() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", WITHOUT_PY4J], cwd=ROOT, env={}, capture_output=True, text=True
    )
    assert done.stdout.strip() == "['decode', 'encode', 'mirror_offsets', 'transactional']", done.stderr[
        -3000:
    ]


def test_a_client_without_jvm_py4j_and_environment_does_every_operation_once(tmp_path: Path) -> None:
    with Broker.open(tmp_path / "broker") as broker, connect_server(tmp_path) as remote:
        with broker.channel() as channel:
            for queue in ("in", "out", "copied"):
                channel.queue_declare(queue)
            for body in "abcd":
                channel.publish(body.encode(), routing_key="in")
        command = [
            sys.executable,
            "-m",
            "tests.spark.connect_client",
            remote,
            broker.url,
            str(tmp_path / "lake"),
        ]
        done = run_to_end(command, tmp_path, cwd=ROOT, env={})
        assert done.returncode == 0, f"{done.stderr[-5000:]}\n{(tmp_path / 'server.log').read_text()[-3000:]}"
        told = json.loads(done.stdout.splitlines()[-1])
    assert told == {
        "added": [[body, 1] for body in "abcd"],
        "merged": [["a", 1], ["b", 1], ["d", 1]],
        "copied": list("abcd"),
        "batches": 2,
    }


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with connect_server(tmp_path_factory.mktemp("connect")) as address:
        yield address


@pytest.mark.soak
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs_with_the_session_and_the_parameters_of_a_platform(
    name: str, remote: str, tmp_path: Path
) -> None:
    """On Spark Connect; as a plain script: ``tests/test_notebooks.py``."""
    notebook = ROOT / "examples" / "notebooks" / f"{name}.py"
    command = [
        sys.executable,
        "-m",
        "tests.spark.given_notebook",
        remote,
        str(notebook),
        str(tmp_path / "given"),
    ]
    (tmp_path / "given").mkdir()
    done = run_to_end(command, tmp_path, cwd=ROOT, env={})
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-5000:]}"
