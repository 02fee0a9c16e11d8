"""The example of a declarative pipeline, run as its page says, killed in the middle, and refreshed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest

from bench.ports import free_ports
from tests.page_blocks import blocks_of
from tests.progress import GUARD_S, wait_until
from tests.spark.jobs import PLANNED_ONCE, is_suspended
from tests.spark.pipelines import ROOT, Pipeline, Served

pytestmark = [pytest.mark.spark, pytest.mark.crash, pytest.mark.slow]

KILLED = ("connector.read.rows", "connector.write.staged", "connector.commit.decided")
EXAMPLE = ROOT / "examples" / "pipeline"
CONNECT_PORT = "TXMQ_TEST_CONNECT_PORT"  # see ``startup/sitecustomize.py``
COMMAND = Path(sys.executable).with_name("spark-pipelines")


class Example:
    """A copy of the example, and what it reads and writes."""

    def __init__(self, place: Path) -> None:
        self.place = place / "pipeline"
        shutil.copytree(EXAMPLE, self.place)
        specification = self.place / "spark-pipeline.yml"
        written = specification.read_text().replace("/tmp/txmq-orders", str(place))
        written += "".join(f'  {name}: "{value}"\n' for name, value in PLANNED_ONCE.items())
        specification.write_text(written)
        self.sent: list[str] = []
        self.broker = Served(place / "broker")
        self.orders = Pipeline("orders-in", self.broker.url, "", "", queue="orders", out="large")
        self.orders.declare()

    def send(self, count: int) -> None:
        """Every second one is small."""
        bodies = [f"{number:0{3 + number % 2}d}" for number in range(len(self.sent), len(self.sent) + count)]
        self.sent += bodies
        self.orders.send(bodies)

    def start(self, *arguments: str, failpoints: str = "") -> subprocess.Popen[bytes]:
        page = (self.place / "README.md").read_text()
        (line,) = [each for each in page.splitlines() if each.startswith("spark-pipelines ")]
        (port,) = free_ports(1)
        # few: PySpark forgets settings of the command where they are long (PYSPARK_REMOTE_INIT_CONF_LEN)
        options = [*line.split()[1:-1], "--conf", f"spark.connect.grpc.binding.port={port}"]
        environment = {**os.environ, CONNECT_PORT: str(port), "TXMQ_FAILPOINTS": failpoints}
        with (self.place / "log").open("ab") as log:
            return subprocess.Popen(
                [str(COMMAND), *options, "run", *arguments],
                cwd=self.place,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def run(self, *arguments: str) -> str:
        """To its end; what it printed, with the exit code in the last line."""
        before = len(self.log())
        process = self.start(*arguments)
        try:
            code = process.wait(GUARD_S)
        finally:
            end(process)
        return f"{self.log()[before:]}\nexit {code}"

    def log(self) -> str:
        return (self.place / "log").read_text() if (self.place / "log").exists() else ""

    def rows(self) -> list[str]:
        """Of the table: those of the files that the log of its sink names."""
        table = self.place / "spark-warehouse" / "orders"
        entries = [
            json.loads(line)
            for log in (table / "_spark_metadata").glob("[0-9]*")
            for line in log.read_text().splitlines()
            if line.startswith("{")
        ]
        files = {entry["path"].removeprefix("file:") for entry in entries}
        return [row["id"] for file in sorted(files) for row in pq.ParquetFile(file).read().to_pylist()]

    def require_once(self) -> None:
        """Each message is once in the table, and the large ones are once in the queue."""
        assert sorted(self.rows()) == sorted(self.sent)
        assert self.orders.published() == sorted(body for body in self.sent if len(body) > 3)
        assert self.orders.depth() == 0

    def kill_at(self, failpoint: str) -> None:
        """A run is killed while a process of it waits there."""
        process = self.start(failpoints=f"{failpoint}=stop")
        try:
            wait_until(lambda: stopped(process), f"a process waits at {failpoint}")
        finally:
            end(process)


@pytest.mark.soak  # the same by its parts: the kills below
def test_the_commands_of_the_page_make_a_table_and_a_message(tmp_path: Path) -> None:
    """From a copy of the example, with ports and a directory of this test. They end as the last one peeks."""
    (block,) = blocks_of("examples/pipeline/README.md", "sh")
    shutil.copytree(EXAMPLE, tmp_path / "examples" / "pipeline")
    specification = tmp_path / "examples" / "pipeline" / "spark-pipeline.yml"
    place = str(tmp_path / "orders")
    written = specification.read_text().replace("/tmp/txmq-orders", place)
    written += "".join(f'  {name}: "{value}"\n' for name, value in PLANNED_ONCE.items())
    specification.write_text(written)
    (port,) = free_ports(1)
    changed = {
        "pip install": ": pip install",
        "/tmp/txmq-orders": place,
        "hive run": f"hive --conf spark.connect.grpc.binding.port={port} run",
    }
    for words, here in changed.items():
        assert words in block
        block = block.replace(words, here)
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "txmq").write_text(f'#!/bin/sh\nexec {sys.executable} -m txmq "$@"\n')
    (commands / "txmq").chmod(0o700)
    environment = {
        **os.environ,
        CONNECT_PORT: str(port),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "PATH": f"{commands}:{COMMAND.parent}:{os.environ['PATH']}",
    }
    done = subprocess.run(
        ["sh", "-eu", "-c", block], cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=GUARD_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    peeked = done.stdout.rpartition("large1")
    assert peeked[1], done.stdout
    assert (specification.parent / "spark-warehouse" / "orders").is_dir()


def end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(GUARD_S)


def stopped(process: subprocess.Popen[bytes]) -> bool:
    """Whether a process of the run waits at its failpoint."""
    assert process.poll() is None, "it ended"
    found = psutil.Process(process.pid).children(recursive=True)
    return any(map(is_suspended, found))


def test_each_message_is_once_in_table_and_sink_of_a_pipeline_that_is_killed_and_a_full_refresh_is_refused(
    tmp_path: Path,
) -> None:
    example = Example(tmp_path)
    try:
        example.send(10)
        # the source was asked behind the rows: they are in the table, and not acknowledged
        example.kill_at("connector.latest_offset.claimed@2")
        example.send(10)
        said = example.run()
        assert said.endswith("exit 0"), said[-3000:]
        example.require_once()
        said = example.run("--full-refresh", "orders")
        assert "TABLE_NOT_RESETTABLE" in said and not said.endswith("exit 0"), said[-3000:]
        example.require_once()
    finally:
        example.broker.stop()


@pytest.mark.soak
def test_each_message_is_once_in_table_and_sink_wherever_a_pipeline_is_killed(tmp_path: Path) -> None:
    example = Example(tmp_path)
    try:
        for failpoint in KILLED:
            example.send(10)
            example.kill_at(failpoint)
        said = example.run()
        assert said.endswith("exit 0"), said[-3000:]
        example.require_once()
    finally:
        example.broker.stop()


@pytest.mark.soak
def test_a_full_refresh_empties_the_table_and_neither_repeats_nor_loses_what_the_queue_has(
    tmp_path: Path,
) -> None:
    example = Example(tmp_path)
    code = example.place / "transformations" / "orders.py"
    code.write_text(code.read_text().replace('"pipelines.reset.allowed": "false"', ""))
    try:
        example.send(10)
        said = example.run()
        assert said.endswith("exit 0"), said[-3000:]
        published = example.orders.published()
        example.send(10)
        said = example.run("--full-refresh", "orders")
        assert "TXMQ_CHECKPOINT_MISMATCH" in said and not said.endswith("exit 0"), said[-3000:]
        assert (example.rows(), example.orders.published()) == ([], published)
        assert example.orders.depth() == 10, "who is refused has consumed nothing"
        code.write_text(
            code.read_text().replace('appId="orders-in"', 'appId="orders-in", onNewCheckpoint="resume"')
        )
        said = example.run()
        assert said.endswith("exit 0"), said[-3000:]
        assert sorted(example.rows()) == sorted(example.sent[10:])
        assert example.orders.published() == sorted(body for body in example.sent if len(body) > 3)
        assert example.orders.depth() == 0
    finally:
        example.broker.stop()


SECOND_FLOW = """

@dp.append_flow(target="large_orders", name="small_out")
def small_out() -> DataFrame:
    return spark.readStream.table("orders").where("size <= 3").selectExpr("id AS body")
"""
SECOND_SINK = """

dp.create_sink("small_orders", format="txmq", options={"data": data, "queue": "large", "appId": "small-out"})
"""


@pytest.mark.soak
def test_a_second_flow_into_a_sink_is_refused_and_with_a_sink_of_its_own_everything_is_once(
    tmp_path: Path,
) -> None:
    example = Example(tmp_path)
    code = example.place / "transformations" / "orders.py"
    try:
        example.send(10)
        said = example.run()
        assert said.endswith("exit 0"), said[-3000:]
        example.send(10)
        one = code.read_text()
        code.write_text(one + SECOND_FLOW)
        said = example.run()
        assert "a sink with an appId of its own" in said and not said.endswith("exit 0"), said[-3000:]
        example.send(10)
        code.write_text(one + SECOND_SINK + SECOND_FLOW.replace("large_orders", "small_orders"))
        said = example.run()
        assert said.endswith("exit 0"), said[-3000:]
        assert sorted(example.rows()) == sorted(example.sent) == example.orders.published()
        assert example.orders.depth() == 0
    finally:
        example.broker.stop()
