"""When the first row of a log from an offset on was committed, as its record says.

Not here: where a log begins and ends.
"""

from __future__ import annotations

from collections.abc import Mapping

from broker_core.core import errors
from broker_core.kafka.cluster.client import Client
from broker_core.kafka.protocol.port import EARLIEST, TopicPartition
from broker_core.kafka.record.decode import decode


def committed_ms(
    client: Client, positions: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int]
) -> list[int]:
    """Returns the timestamp of the first row of each log from its position on, where there is one below its
    end. Rows that are deleted have none: what a lost row means is for the read to say. Raises AccessRefused,
    DataLoss where a leader does not have what it showed.
    """
    found: list[int] = []
    waiting = {log: at for log, at in positions.items() if at < ends[log]}
    patience = client.patience()
    while waiting:
        try:
            answers = client.fetch(waiting, max_bytes=1)
        except errors.DataLoss as lost:
            begins = client.offsets(dict.fromkeys(waiting, EARLIEST))
            if all(begins[log] <= at for log, at in waiting.items()):
                patience.wait(lost)  # the node that answered was not up to date
            first = {log: max(at, begins[log]) for log, at in waiting.items()}
            waiting = {log: at for log, at in first.items() if at < ends[log]}
            continue
        for log, fetched in answers.items():
            decoded = decode(fetched.records, waiting[log], ends[log], fetched.aborted, log=str(log))
            if len(decoded.records):
                found.append(int(decoded.records.timestamps[0]))
            if len(decoded.records) or decoded.position >= ends[log] or decoded.position == waiting[log]:
                del waiting[log]
            else:
                waiting[log] = decoded.position
    return found
