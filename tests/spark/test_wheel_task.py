"""The example of a deployed job: its wheel has the entry point, and the job runs until it is told to end."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.progress import wait_until
from tests.spark.pipelines import delta_rows

EXAMPLE = Path(__file__).parents[2] / "examples" / "wheel_task"


@pytest.fixture
def job() -> Any:
    spec = importlib.util.spec_from_file_location("orders_job", EXAMPLE / "orders_job" / "main.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def handlers() -> Iterator[None]:
    """Those of pytest come back."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


def test_the_wheel_has_the_entry_point_of_the_page(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=EXAMPLE, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("orders_job-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (points,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
        assert "orders-job = orders_job.main:main" in archive.read(points).decode()
        assert "orders_job/main.py" in archive.namelist()
        (metadata,) = [name for name in archive.namelist() if name.endswith("METADATA")]
        # nobody may put a package of this name on an index, and into the cluster
        assert "Requires-Dist" not in archive.read(metadata).decode()
    task = json.loads((EXAMPLE / "README.md").read_text().partition("```json")[2].partition("```")[0])
    assert {"package_name": "orders_job", "entry_point": "orders-job"}.items() <= task[
        "python_wheel_task"
    ].items()


@pytest.mark.soak  # its operations are in test_merge.py and test_decode.py
@pytest.mark.spark
@pytest.mark.usefixtures("interpreted", "handlers")
def test_the_job_merges_the_newest_state_rejects_what_is_none_and_ends_when_told(
    rig: Any, job: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with rig.broker.channel() as channel:
        channel.queue_declare("broken")
        channel.queue_declare(
            "orders", arguments={"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "broken"}
        )
    lake = tmp_path / "lake"
    rig.spark.sql(f"CREATE TABLE delta.`{lake}` (id BIGINT, state STRING, amount DOUBLE) USING delta")
    rig.publish(
        "orders", '{"id": 1, "state": "new"}', "no order", '{"id": 1, "state": "paid", "amount": 2.5}'
    )

    def tell() -> None:
        wait_until(lambda: bool(rig.bodies("broken")) and len(delta_rows(lake)) == 1, "the batch is done")
        os.kill(os.getpid(), signal.SIGTERM)

    told = threading.Thread(target=tell)
    told.start()
    arguments = ["--url", rig.broker.url, "--table", str(lake), "--checkpoint", rig.checkpoint()]
    job.main(arguments)
    told.join()
    assert delta_rows(lake) == [{"id": 1, "state": "paid", "amount": 2.5}]
    assert rig.bodies("broken") == ["no order"] and rig.bodies("orders") == []
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["numInputRows"] == 3
    assert not rig.spark.streams.active
    once = [*arguments[:2], "--table", f"{lake}-none", *arguments[4:], "--once", "--no-persist"]
    job.main(once)  # nothing to do
    rig.publish("orders", '{"id": 2, "state": "new"}')
    with pytest.raises(Exception, match="does not exist"):  # Databricks sees no status of an entry point
        job.main(once)
    assert "does not exist" in capsys.readouterr().err


def test_a_line_has_the_rows_of_a_batch_on_spark_connect_too(job: Any, capsys: Any) -> None:
    source = {"numInputRows": 3, "processedRowsPerSecond": 1.5}
    progress = {"batchId": 0, "numInputRows": None, "sources": [source], "durationMs": {"addBatch": 7}}
    assert job.report(SimpleNamespace(recentProgress=[progress]), -1) == 0
    line = json.loads(capsys.readouterr().out)
    assert line == {"batchId": 0, **source, "durationMs": {"addBatch": 7}}
