"""One broker per test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.bench import Bench


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.local.close()
