"""`txmq app skip --refused` on a Kafka whose node dies at each request of it, and with a command that dies: each row is once
in the table or in the queue of those that it refuses.

Not here: drivers that die, files, and the embedded broker (``test_skip_rows.py``); the other requests of a micro-batch
(``tests/crash/test_kafka_requests.py``).
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from bench.kafka_server import Cluster
from broker_core.core.errors import cause
from broker_core.kafka import engine as kafka_engine
from broker_core.kafka.engine import KafkaEngine
from connector.batch.foreach_batch import BatchTransaction
from tests.crash.test_kafka_requests import SETTINGS, Case
from tests.kafka.bench import batch_worker
from tests.kafka.bench.real_node import real_cluster
from tests.kafka.kills import Kills, Moment
from tests.spark.conftest import Rig
from tests.spark.kafka_pipelines import committed, make_topics, send
from tests.spark.pipelines import ROOT, delta_rows, empty_table
from tests.spark.test_foreach_batch import run
from txmq.skip import skip_rows

pytestmark = [
    pytest.mark.spark, pytest.mark.crash, pytest.mark.slow, pytest.mark.usefixtures("planned_once")
]  # fmt: skip

MOST_TRIES = 8  # of a command or a query, by somebody who repeats it
COMMAND_DIES = "kafka.journal.note", "kafka.journal.noted"
_names = itertools.count()


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with real_cluster(tmp_path_factory.mktemp("kafka"), settings=SETTINGS, heap="512m") as started:
        yield started


@pytest.fixture
def kills(node: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kills]:
    """Of the engine that drivers and commands have in this process."""
    found, url = Kills(node), f"kafka://{node.bootstrap}"
    with KafkaEngine(url, None, found.wire) as engine:
        monkeypatch.setitem(kafka_engine._engines, (os.getpid(), url, ()), engine)
        yield found
        found.revive()


@dataclass
class Refusing:
    """An app with one batch that is decided, and a table that refuses two of its four rows since."""

    rig: Rig
    app: str
    table: Path

    @classmethod
    def create(cls, url: str, spark: SparkSession, scratch: Path) -> Refusing:
        app = f"app-{next(_names)}"
        made = cls(Rig(SimpleNamespace(url=url), spark, scratch), app, scratch / app)  # type: ignore[arg-type]
        make_topics(url, made.queue, made.refused)
        send(url, made.queue, "abcd")
        empty_table(made.table, {"v": "string"})
        with pytest.raises(Exception, match="does not take its rows"):
            made.start(made.altered)
        return made

    @property
    def queue(self) -> str:
        return f"source-{self.app}"

    @property
    def refused(self) -> str:
        return f"refused-{self.app}"

    def altered(self, batch: DataFrame, tx: BatchTransaction) -> None:
        tx.append(batch.selectExpr("CAST(body AS STRING) AS v"), str(self.table))
        altering = f"ALTER TABLE delta.`{self.table}` ADD CONSTRAINT one CHECK (v NOT IN ('b', 'd'))"
        batch.sparkSession.sql(altering)

    def start(self, fn: Any = lambda batch, tx: None) -> None:
        run(self.rig, fn, app_id=self.app, queue=self.queue, checkpoint=f"{self.app}.checkpoint")

    @property
    def command(self) -> list[str]:
        return [
            "app",
            "skip",
            "--yes",
            self.app,
            "1",
            "--refused",
            "--queue",
            self.refused,
            "--url",
            self.rig.broker.url,
        ]

    def skip(self) -> None:
        """The command, in this process."""
        skip_rows(kafka_engine.connect(self.rig.broker.url), self.app, 1, None, self.refused, None)

    def skip_elsewhere(self, failpoints: str = "") -> int:
        environment = {**os.environ, "TXMQ_FAILPOINTS": failpoints}
        command = [sys.executable, "-m", "txmq", *self.command]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True).returncode

    def require_once(self) -> None:
        assert sorted(row["v"] for row in delta_rows(self.table)) == ["a", "c"]
        letters = sorted(body.decode() for body in committed(self.rig.broker.url, self.refused) if body)
        assert letters == ['{"v":"b"}', '{"v":"d"}']
        with KafkaEngine(self.rig.broker.url) as engine:
            assert engine.unapplied(self.app) == []
            last = engine.last_entry(self.app)
            assert last is not None and last.sequence == 1


def again(action: Callable[[], None], tries: Counter[str]) -> None:
    """Until it goes through, as often as somebody repeats it."""
    for _ in range(MOST_TRIES):
        try:
            return action()
        except Exception as error:
            found = cause(error)
            if not isinstance(found, batch_worker.AGAIN):
                raise
            tries[type(found).__name__] += 1
    raise AssertionError(f"it does not go through: {tries}")


def survives(kills: Kills, app: Refusing, case: Case) -> Counter[str]:
    """The command and the next start of the query, while the node dies once. What was tried again."""
    tries, turns = Counter[str](), itertools.count(1)

    def chosen(name: str) -> bool:
        return name == case.name and next(turns) == case.turn

    kills.plan(chosen, case.moment, ends_driver=False)
    again(app.skip, tries)
    again(app.start, tries)
    kills.revive()
    app.require_once()
    return tries


def test_each_row_is_once_in_the_table_or_the_queue_where_a_node_or_the_command_dies(
    kills: Kills, spark: SparkSession, tmp_path: Path
) -> None:
    """The command before and behind what it writes, and the node with the refused rows published, unanswered."""
    app = Refusing.create(f"kafka://{kills.cluster.bootstrap}", spark, tmp_path)
    for step in COMMAND_DIES:
        assert app.skip_elsewhere(f"{step}=kill") == -signal.SIGKILL
    survives(kills, app, Case("Produce decisions+refused", 1, Moment.DONE, False))
    assert kills.killed is not None, f"it never came: {Counter(kills.seen)}"


@pytest.mark.soak
@pytest.mark.parametrize("moment", Moment, ids=lambda moment: moment.name.lower())
def test_soak_whatever_request_of_the_command_or_the_driver_a_node_dies_at_every_row_is_there_once(
    kills: Kills, spark: SparkSession, tmp_path: Path, moment: Moment, seed: int, rounds: int
) -> None:
    """The first request of each kind first, ``rounds`` of them; the end of the transaction among three nodes only, in
    ``test_kafka_requests.py``, where that answer is lost: a node alone may never tell its logs (docs/kafka_operations.md).
    """
    url = f"kafka://{kills.cluster.bootstrap}"
    plain = Refusing.create(url, spark, tmp_path)
    kills.plan(lambda name: False, moment, ends_driver=False)
    plain.skip()
    plain.start()
    plain.require_once()
    cases = [
        Case(name, turn, moment, ends_driver=False)
        for name, times in Counter(kills.seen).items()
        for turn in range(1, times + 1)
        if (name, moment) not in {("EndTransaction", Moment.DONE), ("EndTransaction", Moment.SENT)}
    ]
    random.Random(seed).shuffle(cases)
    cases, killed = sorted(cases, key=lambda case: case.turn)[:rounds], 0
    for case in cases:
        began, app = time.monotonic(), Refusing.create(url, spark, tmp_path)
        tries = survives(kills, app, case)
        killed += kills.killed is not None
        print(f"{case}: {dict(tries)}, {time.monotonic() - began:.0f} s", flush=True)
    print(f"\nof {len(cases)} requests, {killed} killed the node")
    assert killed > 0.8 * len(cases)
