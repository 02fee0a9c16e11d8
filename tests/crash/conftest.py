"""What the crash tables share."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def kafka(request: pytest.FixtureRequest) -> str | None:
    """None without its jars: then only the cases on Kafka are skipped."""
    try:
        url: str = request.getfixturevalue("kafka_url")
    except pytest.skip.Exception:
        return None
    return url
