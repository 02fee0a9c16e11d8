"""A server of Spark Connect in a process of its own, with the jars of Delta."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from bench.jars import SPARK_JARS, delta, missing_in_spark, resolve
from bench.ports import free_ports

SERVER = "org.apache.spark.sql.connect.service.SparkConnectServer"
LIMIT_S = 600.0
END_S = 60.0


@contextlib.contextmanager
def connect_server(folder: Path, conf: Mapping[str, str]) -> Iterator[str]:
    """Its address, for ``SparkSession.builder.remote``. Raises RuntimeError, with its log."""
    (port,) = free_ports(1)
    settings = {
        **conf,
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": str(port),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
    }
    command = [str(SPARK_JARS.parent / "bin" / "spark-submit"), "--master", "local[2]", "--class", SERVER]
    command += ["--driver-class-path", os.pathsep.join(missing_in_spark(resolve([delta()])))]
    command += [word for setting in settings.items() for word in ("--conf", "=".join(setting))]
    environment = {**os.environ, "SPARK_HOME": str(SPARK_JARS.parent)}
    environment.pop("PYSPARK_SUBMIT_ARGS", None)
    log = folder / "server.log"
    with log.open("w") as output:
        server = subprocess.Popen(
            [*command, "spark-internal"], stdout=output, stderr=output, env=environment, cwd=folder
        )
    try:
        deadline = time.monotonic() + LIMIT_S
        while not _listens(port):
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"no Connect server: {log.read_text()[-3000:]}")
            time.sleep(0.05)
        yield f"sc://127.0.0.1:{port}"
    finally:
        server.terminate()
        try:
            server.wait(END_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0
