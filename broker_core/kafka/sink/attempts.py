"""What is staged and not decided, for operators: found by reading the stage topics, because no state is kept.

Not here: deleting it, which the next decision does (``staged_branches.py``).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from broker_core.engine import StagedBatch
from broker_core.kafka.cluster.client import Client
from broker_core.kafka.protocol.port import EARLIEST, LATEST, Isolation, TopicPartition
from broker_core.kafka.sink.staged_branches import APP, BATCH, CLIENT, QUERY, ROWS, TOKEN
from broker_core.kafka.topics import entry


@dataclass
class _Attempt:
    app_id: str
    query_id: str
    batch_id: int
    branches: set[bytes] = field(default_factory=set)
    rows: int = 0
    size_bytes: int = 0
    newest_ms: int = 0
    client: str = ""  # of the newest part


def staged_batches(client: Client, topic: str, decided: Callable[[str], object]) -> list[StagedBatch]:
    """Returns the attempts in one stage topic whose token is not ``decided``. Reads all of the topic.

    A part that was sent again counts twice.
    """
    logs = [TopicPartition(topic, number) for number in client.topic(topic).partitions]
    begins = client.offsets(dict.fromkeys(logs, EARLIEST), Isolation.READ_UNCOMMITTED)
    ends = client.offsets(dict.fromkeys(logs, LATEST), Isolation.READ_UNCOMMITTED)
    found: dict[str, _Attempt] = {}
    for log in logs:
        for row in entry.replay(client, log, begins[log], ends[log], isolation=Isolation.READ_UNCOMMITTED):
            headers = {name: (value or b"").decode() for name, value in row.headers}
            token = headers.get(TOKEN, "")
            if not token:
                continue
            attempt = found.setdefault(token, _Attempt(headers[APP], headers[QUERY], int(headers[BATCH])))
            attempt.branches.add(row.key or b"")
            attempt.rows += int(headers[ROWS])
            attempt.size_bytes += len(row.value or b"")
            if row.timestamp >= attempt.newest_ms:
                attempt.newest_ms, attempt.client = row.timestamp, headers.get(CLIENT, "")
    now_ms = time.time_ns() // 1_000_000
    return [
        StagedBatch(
            token=token,
            app_id=each.app_id if each.batch_id >= 0 else "",
            query_id=each.query_id,
            batch_id=each.batch_id,
            idle_s=max(0, now_ms - each.newest_ms) / 1000,
            branches=len(each.branches),
            rows=each.rows,
            size_bytes=each.size_bytes,
            client=each.client,
        )
        for token, each in found.items()
        if not decided(token)
    ]
