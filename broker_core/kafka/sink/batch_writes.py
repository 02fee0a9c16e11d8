"""Batch writes on Kafka: what is staged under a token is published by one transaction, whose outcome the
coordinator remembers (a week, ``transactional.id.expiration.ms``).

Not here: staging.
Where Kafka loses its end in a log (``producer.py``), it is written again before the write is over.
Invariant: a transactional id is one write, and a transaction of it is begun only where the coordinator says
that none is open and none was committed. Its outcome is asked for, never concluded from a lost answer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence

from broker_core.core import errors
from broker_core.core.failpoint import here
from broker_core.engine import StagedBranch
from broker_core.kafka.cluster.client import Client
from broker_core.kafka.names import write_id
from broker_core.kafka.protocol.port import TopicPartition
from broker_core.kafka.sink.decide import OnUnroutable, end_quietly, require_routable, rounds, timeout_ms
from broker_core.kafka.sink.producer import (
    ENDING,
    ENDS_AGAIN_MS,
    OPEN,
    ProducerEpoch,
    last_transaction,
    open_in,
    outcome,
)
from broker_core.kafka.sink.staged_branches import NamedBranch, parse, require


def is_committed(client: Client, token: str) -> bool:
    """Returns whether this is the token of a batch write that was committed."""
    return outcome(client.transaction(write_id(token))) is True


def commit(
    client: Client, token: str, branches: Sequence[StagedBranch], *, on_unroutable: OnUnroutable
) -> int:
    """Commits a batch write and returns its rows; it may be repeated. Raises MissingBranch, Unroutable,
    TransactionTooLarge, QueueNotFound.
    """
    found = require(parse(branches), token, None)
    if on_unroutable == "fail":
        require_routable(found)
    published = [each for each in found if each.receipt.logs]
    logs = {log for each in published for log in each.receipt.logs}

    def write() -> None:
        committed = _settled(client, token)
        if committed is False:
            _end_everywhere(client, token, logs, commit=False)
        if not committed:
            _publish(client, token, published)

    if published:
        client.patiently(write)
        # it is committed, so a log that is away now is no reason to fail
        with contextlib.suppress(errors.ConnectionFailed, errors.TransactionState):
            client.patiently(lambda: _end_everywhere(client, token, logs, commit=True))
    return sum(branch.rows for branch in branches)


def _settled(client: Client, token: str) -> bool | None:
    """Returns whether the write is committed, None where nothing was begun; nothing of it is open. Raises
    TransactionState where that is not clear yet.
    """
    # one that is open is of a call that lost an answer
    found = last_transaction(client, write_id(token))
    if found is not None and found.state in (OPEN, *ENDING):
        raise errors.TransactionState(f"batch write {token} is {found.state}", "wait until it is settled")
    return outcome(found)


def _end_everywhere(client: Client, token: str, logs: Collection[TopicPartition], *, commit: bool) -> None:
    """Waits until the transaction that has ended so has its end in the logs, and ends it there again where
    Kafka has lost that.
    """
    found = last_transaction(client, write_id(token))
    if found is not None and found.state in ENDING:
        raise errors.TransactionState(f"batch write {token} is {found.state}", "wait for its end")
    # of whomever: what is open of others is left alone
    hanging = open_in(client, logs)
    if hanging:
        epoch = ProducerEpoch(client, write_id(token))
        epoch.fence(ENDS_AGAIN_MS[commit])
        epoch.end_again(hanging, commit=commit)


def _publish(client: Client, token: str, found: Sequence[NamedBranch]) -> None:
    epoch = ProducerEpoch(client, write_id(token))
    epoch.fence(timeout_ms(found))
    transaction = epoch.begin()
    try:
        transaction.join([log for each in found for log in each.receipt.logs])
        for batches in rounds(client, found):
            transaction.append(batches)
        here("kafka.write.published")
        transaction.commit()
    except (errors.ConnectionFailed, errors.TransactionState):
        raise
    except Exception:
        end_quietly(transaction)
        raise
    here("kafka.write.committed")
