"""A FakeKafka and a client of it, for tests that need no faults."""

from __future__ import annotations

import pytest

from broker_core.kafka.cluster.client import Client
from tests.kafka.bench.fake_kafka import FakeKafka


@pytest.fixture
def kafka() -> FakeKafka:
    return FakeKafka()


@pytest.fixture
def client(kafka: FakeKafka) -> Client:
    return Client(kafka.wire(), list(kafka.nodes.values()), reconnect_s=1.0)
