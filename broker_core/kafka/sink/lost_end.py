"""A transaction whose end Kafka has lost: the owner of its transactional id writes the end again.

A node that was killed and comes back takes logs that have no leader yet for deleted ones, and ends a
transaction there without a marker (Kafka 4.3.1). Nobody has it any more, and it stays open in these logs. But
a marker ends whatever its producer has open in a log, so a transaction without a record ends it.
Not here: how such a log is noticed (``decisions.py``).
Invariant: it is ended as its coordinator has ended it, in all its logs, or nothing is done.
"""

from __future__ import annotations

import json

from broker_core.kafka.cluster.client import Client
from broker_core.kafka.protocol.port import LATEST, Isolation, Producer, TopicPartition, TransactionAnswer
from broker_core.kafka.record.record_batch import PRODUCER, PRODUCER_AT, read_head
from broker_core.kafka.sink.producer_epoch import ProducerEpoch
from broker_core.kafka.topics import entry

_OUTCOMES = {"PrepareCommit": True, "CompleteCommit": True, "PrepareAbort": False, "CompleteAbort": False}


def end_again(
    client: Client, decisions: TopicPartition, epoch: ProducerEpoch, known: TransactionAnswer | None
) -> bool:
    """Returns whether something hung in ``decisions`` and was ended; another fence has to follow then.
    ``known``: what the coordinator had of the app before the fence that ``epoch`` holds.
    """
    # 1. how the coordinator has ended it
    if known is None or known.state not in _OUTCOMES:
        return False
    # 2. what is open behind a fence is of that transaction alone
    begin = client.offsets({decisions: LATEST})[decisions]
    end = client.offsets({decisions: LATEST}, Isolation.READ_UNCOMMITTED)[decisions]
    ended = known.producer._replace(epoch=known.producer.epoch - 1) if epoch.renews else known.producer
    if begin >= end or _producers(client, decisions, begin, end) != {ended}:
        return False
    # 3. its end again, in all its logs
    rows = entry.replay(client, decisions, begin, end, isolation=Isolation.READ_UNCOMMITTED)
    told = [value for row in rows for name, value in row.headers if name == entry.LOGS and value is not None]
    if not told:  # a version that did not name them
        return False
    named_logs = (each for value in told for each in json.loads(value).items())
    logs = {TopicPartition(topic, part) for topic, parts in named_logs for part in parts}
    return epoch.end_again({decisions, *logs}, commit=_OUTCOMES[known.state])


def _producers(client: Client, log: TopicPartition, position: int, end: int) -> set[Producer]:
    """Who has written what stands in the log from ``position`` on."""
    found: set[Producer] = set()
    while position < end:
        data = client.fetch({log: position}, isolation=Isolation.READ_UNCOMMITTED)[log].records
        at, before = 0, position
        while (head := read_head(data, at, str(log))) is not None:
            producer, number, _ = PRODUCER.unpack_from(data, at + PRODUCER_AT)
            if head.last_offset >= position:
                found.add(Producer(producer, number))
            at, position = head.stop, max(position, head.last_offset + 1)
        if position == before:  # a leader that is new does not show it yet
            return set()
    return found
