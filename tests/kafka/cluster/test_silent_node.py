"""A node that freezes: it takes connections and answers nothing. The cluster moves its leaders and
coordinators after a while; who asked it asks another one in time, with the settings of a user who has set
none. The clock is moved by hand.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pyarrow as pa
import pytest

from broker_core.core.backoff import Time
from broker_core.engine import START, Vector
from broker_core.kafka import engine as engines
from broker_core.kafka import names
from broker_core.kafka.cluster.client import Client
from broker_core.kafka.cluster.connection import REQUEST_S, Settings
from broker_core.kafka.engine import KafkaEngine
from broker_core.kafka.protocol import port
from broker_core.kafka.protocol.port import LATEST, Request, TopicPartition, Unanswered
from broker_core.kafka.record.encode import encode
from tests.kafka.bench.fake_kafka import LOST, FakeKafka
from tests.kafka.bench.source_bench import APP
from tests.kafka.test_engine import FROM, TO, URL, Bench, micro_batch

CONNECT_S = Settings().connect_s
NEVER = 1 << 30


class Silence:
    """From a request on, the node that is asked is silent. Whoever waits for it loses time."""

    def __init__(self, kafka: FakeKafka, at: int) -> None:
        self.kafka = kafka
        self.now = 1000.0
        self.asked = 0
        self.waited = 0  # times for the silent node
        self.at = at
        self._node: int | None = None
        self._lock = threading.Lock()
        kafka.fault = self._fault

    @property
    def time(self) -> Time:
        return Time(lambda: self.now, self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.now += seconds

    def _fault(self, node: int, request: Request[Any]) -> str | None:
        with self._lock:
            self.asked += 1
            if self._node is not None:
                self.kafka.down.add(self._node)
            if self._node is None and self.asked > self.at:
                self._node = node
                self.now += REQUEST_S
                self._move(node)
            elif node == self._node:
                self.now += CONNECT_S
            else:
                return None
            self.waited += 1
            return LOST

    def _move(self, node: int) -> None:
        lead_everything(self.kafka, node % len(self.kafka.nodes) + 1)


def batches(monkeypatch: pytest.MonkeyPatch, leader: int, at: int) -> Silence:
    """Two micro-batches of one driver; in the second one, ``leader`` has and coordinates all."""
    bench = Bench()
    silence = Silence(bench.kafka, NEVER)
    monkeypatch.setattr(engines, "Client", partial(Client, time=silence.time))
    driver = KafkaEngine(URL, None, lambda _: bench.kafka.wire())
    start: Vector = {FROM: START}
    for batch in range(2):
        bench.send(batch, b"%d" % batch)
        if batch:
            lead_everything(bench.kafka, leader)
            silence.asked, silence.at = 0, at
        start = micro_batch(driver, driver, batch, start)
    bench.kafka.fault = lambda node, request: None
    assert bench.bodies(TO) == [b"0", b"1"]
    driver.close()
    return silence


def lead_everything(kafka: FakeKafka, node: int) -> None:
    for name, topic in kafka.topics.items():
        for log in topic.logs:
            kafka.move_leader(TopicPartition(name, log.log.partition), node)
    kafka.move_coordinator(names.producer_of(APP), node)


@pytest.mark.parametrize("leader", [1, 2])
def test_a_batch_is_decided_although_the_node_of_everything_is_silent_from_any_request_on(
    monkeypatch: pytest.MonkeyPatch, leader: int
) -> None:
    """Node 1 is also the first that is asked about the cluster."""
    count = batches(monkeypatch, leader, NEVER).asked
    waited = [batches(monkeypatch, leader, at).waited for at in range(count)]
    assert sum(map(bool, waited)) > 10  # the last requests are of a thread of its own


def test_a_silent_node_is_not_asked_again_where_another_one_knows() -> None:
    kafka = FakeKafka()
    silence = Silence(kafka, NEVER)
    client = Client(kafka.wire(), list(kafka.nodes.values()), time=silence.time)
    log = TopicPartition("orders", 0)
    client.create_topic("orders", 3)
    client.offsets({log: LATEST})
    leader = kafka.log(log)
    assert leader is not None
    kafka.move_leader(log, 1)  # the first that is asked about the cluster
    client.offsets({log: LATEST})
    silence.asked, silence.at = 0, 0
    with pytest.raises(Unanswered):
        client.produce({log: encode(pa.array([b"a"], pa.binary()), timestamp=1)})
    assert silence.waited == 1
    for _ in range(3):
        assert client.offsets({log: LATEST}) == {log: 0}
        client.topic("orders", fresh=True)
    assert silence.waited == 1
    # one that answers again is asked as before
    kafka.down.clear()
    kafka.fault = lambda node, request: None
    kafka.move_leader(log, 1)
    client.offsets({log: LATEST})
    asked: list[int] = []
    kafka.fault = lambda node, request: asked.append(node) if isinstance(request, port.Metadata) else None
    client.topic("orders", fresh=True)
    assert asked == [1]
