"""One bench per test and engine. ``@pytest.mark.needs("deletes_acked")``: only engines that do so."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.contract.engine.bench import EngineBench
from tests.engine.bench import Bench
from tests.kafka.bench.engine_bench import KafkaBench

BENCHES: dict[str, Callable[[], EngineBench]] = {
    "embedded": Bench,
    "kafka": KafkaBench,
    "kafka-tv1": lambda: KafkaBench(transaction_version=1),
}


@pytest.fixture(params=list(BENCHES))
def bench(request: pytest.FixtureRequest) -> Iterator[EngineBench]:
    made = BENCHES[request.param]()
    try:
        for mark in request.node.iter_markers("needs"):
            for feature in mark.args:
                if feature in made.lacks:
                    pytest.skip(f"the engine has no {feature}")
        yield made
    finally:
        made.close()
