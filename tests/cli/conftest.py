"""A broker in this process, for the commands."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from broker_core.client.broker import BrokerClient
from broker_core.launcher import Broker


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with Broker.open(tmp_path / "data") as opened:
        yield opened


@pytest.fixture
def url(broker: Broker) -> Iterator[str]:
    yield broker.url
    BrokerClient(broker.url).close()
