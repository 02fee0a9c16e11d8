"""What the crash tables share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.amqp_server import AmqpServed, serving


@pytest.fixture(scope="module")
def kafka(request: pytest.FixtureRequest) -> str | None:
    """None without its jars: then only the cases on Kafka are skipped."""
    try:
        url: str = request.getfixturevalue("kafka_url")
    except pytest.skip.Exception:
        return None
    return url


@pytest.fixture
def served(tmp_path: Path) -> Iterator[AmqpServed]:
    with serving(tmp_path / "data") as broker:
        yield broker
