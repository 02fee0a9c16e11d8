"""A real Kafka for the contracts of this process, with all listeners; tests make topics of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kafka.bench.real_node import RealNode, real_node


@pytest.fixture(scope="session")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealNode]:
    with real_node(tmp_path_factory.mktemp("kafka")) as node:
        yield node
