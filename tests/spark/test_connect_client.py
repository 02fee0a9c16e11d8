"""Spark Connect as platforms run it: the server is another process, and the client has neither a JVM nor py4j nor an
environment.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.connect_server import connect_server
from broker_core.client.broker import BrokerClient
from broker_core.launcher import Broker
from tests.conftest import SESSION_CONF
from tests.progress import run_to_end, wait_for_end, wait_until
from tests.spark.demo_client import flights
from tests.spark.jobs import PLANNED_ONCE
from tests.spark.notebook_run import DISPLAYED
from tests.spark.pipelines import delta_rows

pytestmark = [pytest.mark.spark, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
CONF = {**SESSION_CONF, **PLANNED_ONCE}
NOTEBOOKS = ("exactly_once", "on_kafka", "typed_messages", "upserts", "without_duplicates")
FLIGHTS = 6_000
WITHOUT_PY4J = """
import sys
sys.modules["py4j"] = sys.modules["pyspark.core"] = None
import txmq
import connector.datasource, connector.table_formats
print([getattr(txmq, name).__name__ for name in ("decode", "encode", "mirror_offsets", "transactional")])
"""


def test_everything_of_txmq_is_there_without_py4j() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", WITHOUT_PY4J], cwd=ROOT, env={}, capture_output=True, text=True
    )
    assert done.stdout.strip() == "['decode', 'encode', 'mirror_offsets', 'transactional']", done.stderr[
        -3000:
    ]


@pytest.mark.soak
def test_a_client_without_jvm_py4j_and_environment_does_every_operation_once(tmp_path: Path) -> None:
    with Broker.open(tmp_path / "broker") as broker, connect_server(tmp_path, CONF) as remote:
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
    versions = told.pop("versions")
    assert [each[:2] for each in versions if each[1] == "append"] == [["added", "append"]] * 2
    assert [each[2] for each in versions if each[1] == "append"] == [1, 2]
    assert {each[1] for each in versions} >= {"append", "merge"} and all(each[2] for each in versions)
    assert told == {
        "added": [[body, 1] for body in "abcd"],
        "merged": [["a", 1], ["b", 1], ["d", 1]],
        "copied": [[body, "copied", None] for body in "abcd"],
        "batches": 2,
        "in the history": True,
        "queues": ["copied", "in", "out"],
        "encoded": ['{"id":1,"name":"a"}', "1,a"],
        "observed": [0, False, ""],
        "read": 20,  # each of the five operations has read the four messages once
    }


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with connect_server(tmp_path_factory.mktemp("connect"), CONF) as address:
        yield address


@pytest.mark.soak
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs_with_the_session_and_the_parameters_of_a_platform(
    name: str, remote: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """On Spark Connect; in a classic session: ``tests/test_notebooks.py``."""
    widgets = [f"broker_url={request.getfixturevalue('kafka_url')}"] if name == "on_kafka" else []
    notebook = ROOT / "examples" / "notebooks" / f"{name}.py"
    given = [str(notebook), str(tmp_path / "given"), f"remote={remote}", *widgets]
    done = run_to_end([sys.executable, "-m", "tests.spark.notebook_run", *given], tmp_path, cwd=ROOT, env={})
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-5000:]}"
    assert [line for line in done.stdout.splitlines() if line.startswith(DISPLAYED)] != []


@pytest.mark.soak
def test_the_jobs_of_the_demo_do_each_flight_once(remote: str, tmp_path: Path) -> None:
    demo = flights()
    messages = list(itertools.islice(demo.messages(), FLIGHTS))
    bodies = [json.loads(body) for _, _, body in messages]
    late = sorted(each["id"] for each in bodies if (each["dep_delay"] or 0) > demo.LATE_MIN)
    with Broker.open(tmp_path / "broker") as broker, contextlib.ExitStack() as running:
        demo.topology(broker.url)
        with broker.channel() as channel:
            channel.tx_select()
            for _, routing_key, body in messages:
                channel.publish(body, exchange="flights", routing_key=routing_key)
            channel.tx_commit()
        client = running.enter_context(BrokerClient(broker.url))
        jobs = [_job(job, remote, broker.url, tmp_path, running) for job in ("job_1", "job_2")]

        def notified() -> list[int]:
            assert all(job.poll() is None for job in jobs), _logs(tmp_path)
            there = client.available(["notifications"])["notifications"]
            batches = client.browse([("notifications", there.start, there.end)])
            return sorted(json.loads(body)["id"] for batch in batches for body in batch["body"].to_pylist())

        wait_until(lambda: len(notified()) >= len(late), "every late flight is published", poll_s=0.2)
        assert notified() == late
        # a query that is stopped behind the decision leaves the append to its next start
        wait_until(lambda: not any(app.unapplied for app in client.apps()), "every batch is in its table")
        (tmp_path / "stop").touch()
        assert [wait_for_end(job, "a job ends") for job in jobs] == [0, 0], _logs(tmp_path)
    assert sorted(row["id"] for row in delta_rows(tmp_path / "lake" / "flights")) == list(range(FLIGHTS))
    assert {row["app_id"] for row in delta_rows(tmp_path / "lake" / "ledger")} == {"flights"}


def _job(
    job: str, remote: str, url: str, folder: Path, running: contextlib.ExitStack
) -> subprocess.Popen[bytes]:
    """A job of the demo, which is ended with ``running``."""
    command = [sys.executable, "-m", "tests.spark.demo_client", remote, job, url, str(folder)]
    with (folder / f"{job}.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, env={}, stdout=log, stderr=log)
    running.callback(process.wait)
    running.callback(process.kill)
    return process


def _logs(folder: Path) -> str:
    return "\n".join(path.read_text(errors="replace")[-3000:] for path in folder.glob("job_*.log"))
