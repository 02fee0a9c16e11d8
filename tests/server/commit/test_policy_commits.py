"""A policy that changes while 32 channels commit: each transaction holds under one policy, and is whole."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from broker_core.core.errors import PreconditionFailed
from broker_core.launcher import Broker

CHANNELS, COMMITS = 32, 12
DEAD = {"dead-letter-exchange": "", "dead-letter-routing-key": "dead"}
DEFINITIONS: list[dict[str, Any]] = [
    {"max-length": 3, **DEAD},
    {"max-length": 3, "overflow": "reject-publish"},
    {"message-ttl": 1, **DEAD},
    {"x-message-deduplication": True, "x-cache-size": 10},
    {"max-length": 100_000},
]


def bodies(broker: Broker, queue: str) -> list[bytes]:
    held = broker.engine.available([queue])[queue]
    batches = broker.engine.browse([(queue, held.start, held.end)])
    return [body for batch in batches for body in batch.column("body").to_pylist()]


@pytest.mark.slow
def test_a_policy_that_changes_while_32_channels_commit_leaves_each_transaction_whole(tmp_path: Path) -> None:
    committed: set[bytes] = set()
    refused: set[bytes] = set()

    def commit_all(broker: Broker, number: int) -> None:
        channel = broker.channel()
        channel.tx_select()
        for count in range(COMMITS):
            body = b"%d.%d" % (number, count)
            try:
                for queue in ("limited", "witness"):
                    channel.publish(body, routing_key=queue)
                channel.tx_commit()
                committed.add(body)
            except PreconditionFailed:  # full: it closes the channel
                refused.add(body)
                channel = broker.channel()
                channel.tx_select()
        channel.close()

    with Broker.open(tmp_path / "data") as broker:
        with broker.channel() as channel:
            for queue in ("limited", "witness", "dead"):
                channel.queue_declare(queue)
        with ThreadPoolExecutor(CHANNELS) as pool:
            work = [pool.submit(commit_all, broker, number) for number in range(CHANNELS)]
            for changes, definition in enumerate(cycle(DEFINITIONS), 1):
                broker.vhosts.set_policy("p", "^limited$", definition)
                if all(each.done() for each in work) and changes >= len(DEFINITIONS):
                    break
            for each in work:
                each.result()
        broker.vhosts.set_policy("p", "^limited$", {"max-length": 100_000})
    with Broker.open(tmp_path / "data") as broker:
        found = Counter(bodies(broker, "limited") + bodies(broker, "dead"))
        witness = Counter(bodies(broker, "witness"))
    assert len(committed) + len(refused) == CHANNELS * COMMITS
    assert witness == Counter(committed)
    assert found == witness  # what a policy took out of the queue is a dead letter
