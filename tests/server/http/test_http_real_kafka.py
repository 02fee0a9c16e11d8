"""``txmq http`` with a real Kafka: what it shows of pipelines, and what it says while the cluster is away."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from broker_core.kafka.engine import KafkaEngine
from tests.kafka.bench.real_node import real_cluster
from tests.progress import GUARD_S, wait_until
from tests.server.http.http_client import Api
from tests.server.http.kafka_door import APP, FROM, TABLE, TO, play
from tests.server.http.page_visitor import Visitor

pytestmark = pytest.mark.slow


def test_the_command_shows_a_real_cluster_and_outlives_it(tmp_path: Path) -> None:
    with real_cluster(tmp_path) as cluster:
        url = f"kafka://{cluster.bootstrap}"
        with KafkaEngine(url) as engine:
            play(engine)
        log = tmp_path / "door.log"
        with log.open("w") as output:
            options = ["--url", url, "--http", "127.0.0.1:0", "--log-format", "json"]
            door = subprocess.Popen(
                [sys.executable, "-m", "txmq", "http", *options],
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
            )
        try:
            assert door.stdout is not None
            word, address = door.stdout.readline().split()
            assert word == "ready"
            api, visitor = Api(address), Visitor(address, "guest", "guest")
            (app,) = api.get("/api/txmq/apps")
            assert (app["app_id"], app["queues"], app["unapplied"]) == (APP, [FROM], 1) and app["lag"] >= 4
            assert [each["batch_id"] for each in app["attempts"]] == [1]
            (entry,) = api.get(f"/api/txmq/ledger/%2F/{APP}")
            assert [each["table"] for each in entry["tables"]] == [TABLE]
            body = {"count": 10, "ackmode": "ack_requeue_true", "encoding": "auto"}
            peeked = api.ask("POST", f"/api/queues/%2F/{TO}/get", body).body
            assert sorted(row["payload"] for row in peeked) == [f"row {each}" for each in range(4)]
            for path in ("/ui", "/ui/queues", "/ui/pipelines", f"/ui/pipeline?vhost=%2F&app={APP}"):
                answer = visitor.get(path)
                assert answer.status == 200 and (APP in answer.text or FROM in answer.text), path
            for node in cluster.nodes:
                node.kill()
            wait_until(lambda: api.ask("GET", "/api/txmq/apps").status == 503)
            assert visitor.get("/ui/pipelines").status == 503
            door.send_signal(signal.SIGTERM)
            assert door.wait(GUARD_S) == 0
            door.stdout.close()
        finally:
            door.kill()
            door.wait()
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        assert "shows kafka://" in lines[0]["message"] and "it was asked to" in lines[-1]["message"]
        assert not any("row 1" in line["message"] for line in lines)
