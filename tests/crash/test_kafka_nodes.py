"""Three nodes of Kafka that are killed, stopped and all away, while drivers of one checkpoint claim, stage
and decide, and are killed too. With a node its leaders and its coordinators move.

Not here: one node and faults at will (``tests/kafka``).
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from bench.kafka_server import PLAIN, Cluster, Node
from broker_core.core import errors
from broker_core.engine import START, Limit, Origin, Vector
from broker_core.kafka.engine import KafkaEngine
from broker_core.kafka.protocol.port import TopicPartition
from broker_core.kafka.record.encode import encode
from tests.crash.test_store_crash import small_file_system
from tests.kafka.bench import batch_worker
from tests.kafka.bench.real_node import real_cluster
from tests.progress import wait_until

pytestmark = [pytest.mark.crash, pytest.mark.slow, pytest.mark.soak]

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 300.0
WORKERS, PARTITIONS, ROWS = 3, 3, 20
SETTINGS = {
    "auto.create.topics.enable": "false",
    "offsets.topic.num.partitions": "2",
    "transaction.state.log.num.partitions": "3",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "500",
    # a node that is silent loses its leaders soon
    "broker.heartbeat.interval.ms": "500",
    "broker.session.timeout.ms": "3000",
    "controller.quorum.election.timeout.ms": "1000",
    "controller.quorum.fetch.timeout.ms": "2000",
    "replica.lag.time.max.ms": "4000",
}
PATIENT = {"kafka.request.timeout.ms": "5000", "kafka.default.api.timeout.ms": str(int(WAIT_S * 1000))}
APP, FROM, TO = "shop", "orders", "done"


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with real_cluster(tmp_path_factory.mktemp("kafka"), 3, settings=SETTINGS, heap="512m") as started:
        yield started


@dataclass
class Workers:
    """Processes of ``batch_worker`` over one checkpoint; one that is killed is started again."""

    url: str
    folder: Path
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    lives: Counter[int] = field(default_factory=Counter)

    def start(self, number: int) -> None:
        name = f"worker-{number}.{self.lives[number]}"
        command = [sys.executable, "-m", "tests.kafka.bench.batch_worker", self.url, APP, FROM, TO]
        with (self.folder / f"{name}.log").open("wb") as out:
            self.processes[number] = subprocess.Popen(
                [*command, str(self.folder), f"{name}.answers"],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stderr=out,
            )

    def kill(self, number: int) -> None:
        self.processes[number].kill()
        self.processes[number].wait()
        self.lives[number] += 1
        self.start(number)

    def answers(self) -> list[dict[str, Any]]:
        lines = [line for path in self.folder.glob("*.answers") for line in path.read_text().splitlines(True)]
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def decided(self) -> int:
        """How many batches there are."""
        return len({each["batch"] for each in self.answers() if "batch" in each})

    def require_alive(self) -> None:
        for number, process in self.processes.items():
            log = self.folder / f"worker-{number}.{self.lives[number]}.log"
            assert process.poll() is None, f"worker {number} ended:\n{log.read_text()[-3000:]}"

    def finish(self) -> None:
        """Lets them do what is left, and end."""
        (self.folder / "stop").touch()
        for number, process in self.processes.items():
            log = self.folder / f"worker-{number}.{self.lives[number]}.log"
            assert process.wait(WAIT_S) == 0, log.read_text()[-3000:]

    def end(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


class Faults:
    """What happens to the nodes and the workers, by chance."""

    def __init__(
        self, nodes: Cluster, workers: Workers, choice: random.Random, go_on: Callable[[int], None]
    ) -> None:
        """``go_on`` returns when so many more batches are decided."""
        self._nodes, self._workers, self._choice, self._go_on = nodes, workers, choice, go_on
        self.happened: Counter[str] = Counter()

    def one(self) -> None:
        kinds = [self.kill_a_node, self.freeze_a_node, self.freeze_all_nodes, self.kill_all_nodes]
        fault = self._choice.choices([*kinds, self.kill_a_worker, self.freeze_a_worker], [4, 3, 1, 1, 2, 2])[
            0
        ]
        self.happened[fault.__name__] += 1
        fault()

    def _node(self) -> Node:
        return self._choice.choice(self._nodes.nodes)

    def _pause(self, least_s: float, most_s: float) -> None:
        time.sleep(self._choice.uniform(least_s, most_s))

    def kill_a_node(self) -> None:
        node = self._node()
        node.kill()
        self._pause(0, 6)
        node.start()
        node.wait()

    def freeze_a_node(self) -> None:
        """For less and for more than its session lasts."""
        node = self._node()
        node.freeze()
        self._pause(0.5, 8)
        node.thaw()

    def freeze_all_nodes(self) -> None:
        """For longer than a request waits for its answer."""
        for node in self._nodes.nodes:
            node.freeze()
        self._pause(1.2 * batch_worker.REQUEST_MS / 1000, 3 * batch_worker.REQUEST_MS / 1000)
        for node in self._nodes.nodes:
            node.thaw()

    def kill_all_nodes(self) -> None:
        for node in self._nodes.nodes:
            node.kill()
        self._pause(0, 2)
        for node in self._nodes.nodes:
            node.start()
        for node in self._nodes.nodes:
            node.wait()

    def kill_a_worker(self) -> None:
        self._workers.kill(self._choice.randrange(WORKERS))

    def freeze_a_worker(self) -> None:
        """The others overtake it, and it goes on where it was."""
        process = self._workers.processes[self._choice.randrange(WORKERS)]
        process.send_signal(signal.SIGSTOP)
        try:
            self._go_on(2)
        finally:
            process.send_signal(signal.SIGCONT)


class Sender:
    """Rows by a client that does not know whether a row without an answer is there: it may stand twice."""

    def __init__(self, engine: KafkaEngine) -> None:
        self._client = engine.client
        self.sent = 0

    def send(self) -> None:
        bodies = [b"%d" % (self.sent + number) for number in range(ROWS)]
        batch = encode(pa.array(bodies, pa.binary()), timestamp=time.time_ns() // 1_000_000)
        with contextlib.suppress(errors.ConnectionFailed):
            self._client.produce({TopicPartition(FROM, self.sent // ROWS % PARTITIONS): batch})
        self.sent += ROWS


def bodies(engine: KafkaEngine, queue: str) -> Counter[bytes]:
    found = engine.available(engine.logs([queue]))
    slices = [(log, one.start, one.end) for log, one in found.items()]
    return Counter(body for rows in engine.browse(slices) for body in rows.column("body").to_pylist())


def test_soak_rows_go_through_once_while_nodes_and_drivers_are_killed(
    nodes: Cluster, tmp_path: Path, seed: int, rounds: int
) -> None:
    choice = random.Random(seed)
    url = f"kafka://{nodes.bootstrap}"
    (tmp_path / "offsets").mkdir()
    workers = Workers(url, tmp_path)
    with KafkaEngine(url, PATIENT) as engine:
        for queue in (FROM, TO):
            engine.client.create_topic(queue, PARTITIONS)
        sender = Sender(engine)

        def go_on(batches: int) -> None:
            wanted, deadline = workers.decided() + batches, time.monotonic() + WAIT_S
            while workers.decided() < wanted:
                workers.require_alive()
                assert time.monotonic() < deadline, "nothing is decided any more"
                sender.send()
                time.sleep(0.05)

        faults = Faults(nodes, workers, choice, go_on)
        try:
            for number in range(WORKERS):
                workers.start(number)
            for _ in range(rounds):
                go_on(choice.randrange(1, 6))
                faults.one()
            workers.finish()
        finally:
            workers.end()
        answers = workers.answers()
        failed = Counter(each["error"] for each in answers if "error" in each)
        print(f"\n{workers.decided()} batches, {dict(faults.happened)}, errors of workers: {dict(failed)}")
        ends: dict[str, str] = {}
        for start, end in (each["claim"] for each in answers if "claim" in each):
            assert ends.setdefault(start, end) == end
        expected = bodies(engine, FROM)
        assert len(expected) >= rounds
        wait_until(lambda: bodies(engine, TO).total() >= expected.total(), "all rows are there")
        assert bodies(engine, TO) == expected
        last = engine.last_entry(APP)
        count = len(list((tmp_path / "offsets").iterdir()))
        assert last is not None and (last.sequence, last.batch_id) == (count, count - 1)
        decided = [each["batch"] for each in answers if each.get("already") is False]
        assert len(decided) == len(set(decided))


def test_soak_a_silent_node_fails_nothing_with_the_settings_of_a_user_who_has_set_none(
    nodes: Cluster,
) -> None:
    """Each node leads some log of the batch, or coordinates it."""
    queues = "silent-orders", "silent-done"
    with KafkaEngine(f"kafka://{nodes.bootstrap}") as engine:
        for queue in queues:
            engine.client.create_topic(queue, len(nodes.nodes))
        start: Vector = {queues[0]: START}
        for batch, silent in enumerate((None, *nodes.nodes)):
            for number in range(len(nodes.nodes)):
                rows = encode(pa.array([b"%d" % batch], pa.binary()), timestamp=time.time_ns() // 1_000_000)
                engine.client.produce({TopicPartition(queues[0], number): rows})
            if silent is not None:
                silent.freeze()
            try:
                end = engine.claim("silent", queues[:1], start, Limit(), Origin(), "fail")
                batch_worker.micro_batch(engine, engine, ("silent", *queues), batch, start, end)
                start = end
            finally:
                if silent is not None:
                    silent.thaw()
        wait_until(lambda: bodies(engine, queues[1]).total() == 12, "all rows are there")
        assert bodies(engine, queues[1]) == {b"%d" % batch: 3 for batch in range(4)}


def test_soak_a_full_disk_stops_with_one_error_and_everything_is_there_once_when_it_has_room(
    tmp_path: Path,
) -> None:
    """A node ends itself when its only disk is full."""
    of = "full", "full-orders", "full-done"
    app, orders, done = of
    with contextlib.ExitStack() as stack:
        disk = stack.enter_context(small_file_system(tmp_path / "disk", 64 << 20))
        settings = {**SETTINGS, "log.dirs": str(disk / "logs"), "log.index.size.max.bytes": str(1 << 20)}
        (node,) = stack.enter_context(real_cluster(tmp_path, settings=settings, heap="512m")).nodes
        short = {"kafka.request.timeout.ms": "3000", "kafka.default.api.timeout.ms": "10000"}
        engine = stack.enter_context(KafkaEngine(f"kafka://127.0.0.1:{node.ports[PLAIN]}", short))
        for queue in (orders, done):
            engine.client.create_topic(queue, 1)
        start: Vector = {orders: START}
        end: Vector | None = None
        batch = 0

        def steps(batches: int) -> None:
            """Each publishes a row and claims it, unless a claim waits, and moves what is claimed."""
            nonlocal start, end, batch
            for _ in range(batches):
                if end is None:
                    rows = encode(
                        pa.array([b"%d" % batch + b"x" * 800_000], pa.binary()),
                        timestamp=time.time_ns() // 1_000_000,
                    )
                    engine.client.produce({TopicPartition(orders, 0): rows})
                    end = engine.claim(app, [orders], start, Limit(), Origin(), "fail")
                batch_worker.micro_batch(engine, engine, of, batch, start, end)
                start, end, batch = end, None, batch + 1

        with pytest.raises(errors.ConnectionFailed) as raised:
            steps(100)
        print(f"\n{batch} batches, then: {raised.value}")
        assert batch > 0 and "127.0.0.1" in str(raised.value)
        assert "No space left on device" in node.log.read_text()
        subprocess.run(["mount", "-o", f"remount,size={512 << 20}", disk], check=True)
        node.kill()
        node.start()
        node.wait()
        steps(3)
        assert bodies(engine, done) == bodies(engine, orders)
        last = engine.last_entry(app)
        assert last is not None and last.sequence == batch
