"""``data=DIR``: the broker is a process that whoever needs it starts, and starts again when it is killed
under a running query.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from bench.broker import serve_command
from broker_core.client.broker import connect
from broker_core.core.endpoint import read_endpoint

pytestmark = pytest.mark.spark

BODIES = [f"message {number}" for number in range(40)]


@pytest.fixture
def data(tmp_path: Path) -> Iterator[str]:
    directory = str(tmp_path / "data")
    yield directory
    endpoint = read_endpoint(directory)
    if endpoint is not None:
        os.kill(endpoint.pid, signal.SIGTERM)
        deadline = time.monotonic() + 600
        while read_endpoint(directory) is not None:
            assert time.monotonic() < deadline, "the broker does not end"
            time.sleep(0.02)


def serve(directory: str, failpoint: str) -> subprocess.Popen[str]:
    """The broker of ``directory``, until it reaches ``failpoint``; its successor, started by a client, has
    none.
    """
    environment = {**os.environ, "TXMQ_FAILPOINTS": f"{failpoint}=kill"}
    command = serve_command(directory, "--amqp", "none")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("ready ")
    process.stdout.close()
    return process


# before a change lands a task starts the broker again, and the driver; row 17 of the crash table has every moment
@pytest.mark.parametrize(
    "failpoint",
    [
        pytest.param("engine.read.recorded", id="in a read"),
        pytest.param("engine.stage.durable", id="in staging", marks=pytest.mark.soak),
        pytest.param("engine.commit.received", id="before the commit", marks=pytest.mark.soak),
        pytest.param("engine.commit.decided", id="after the commit"),
    ],
)
def test_a_query_goes_on_when_its_embedded_broker_is_killed(
    spark: SparkSession, data: str, tmp_path: Path, failpoint: str
) -> None:
    first = serve(data, failpoint)
    broker = connect(data=data)
    with broker.channel() as channel:
        channel.queue_declare("in")
        channel.queue_declare("out")
        channel.tx_select()
        for body in BODIES:
            channel.publish(body.encode(), routing_key="in")
        channel.tx_commit()
    stream = spark.readStream.format("txmq").options(data=data, queue="in", appId="app").load().select("body")
    writer = stream.writeStream.format("txmq").options(data=data, queue="out", appId="app")
    writer.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(
        availableNow=True
    ).start().awaitTermination()
    assert first.wait(600) == -signal.SIGKILL
    found = broker.available(["out"])["out"]
    rows = [
        body.decode()
        for batch in broker.browse([("out", found.start, found.end)])
        for body in batch.column("body").to_pylist()
    ]
    assert sorted(rows) == sorted(BODIES)
    assert broker.available(["in"])["in"].rows == 0
