"""Batch writes on Kafka: what is staged under a token is published by one transaction, whose outcome the
coordinator remembers (a week, ``transactional.id.expiration.ms``).

Not here: staging.
Invariant: a transactional id is one write, and a transaction of it is begun only where the coordinator says
that none is open and none was committed. Its outcome is asked for, never concluded from a lost answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from broker_core import errors
from broker_core.engine import StagedBranch
from broker_core.failpoint import here
from broker_core.kafka.cluster.client import Client
from broker_core.kafka.names import write_id
from broker_core.kafka.sink.decide import OnUnroutable, end_quietly, require_routable, rounds, timeout_ms
from broker_core.kafka.sink.decisions import EPOCH_PER_TRANSACTION, ProducerEpoch
from broker_core.kafka.sink.staged_branches import NamedBranch, parse, require

COMMITTED, ENDING, OPEN = "CompleteCommit", ("PrepareCommit", "PrepareAbort"), "Ongoing"


def is_committed(client: Client, token: str) -> bool:
    """Returns whether this is the token of a batch write that was committed."""
    found = client.transaction(write_id(token))
    return found is not None and found.state in ("PrepareCommit", COMMITTED)


def commit(
    client: Client, token: str, branches: Sequence[StagedBranch], *, on_unroutable: OnUnroutable
) -> int:
    """Commits a batch write and returns its rows; it may be repeated. Raises MissingBranch, Unroutable,
    TransactionTooLarge, QueueNotFound.
    """
    named = require(parse(branches), token, None)
    if on_unroutable == "fail":
        require_routable(named)
    published = [each for each in named if each.receipt.logs]
    patience = client.patience()
    while True:
        try:
            if published and not _settled(client, token):
                _publish(client, token, published)
            break
        except (errors.ConnectionFailed, errors.TransactionState) as error:
            patience.wait(error)
    return sum(branch.rows for branch in branches)


def _settled(client: Client, token: str) -> bool:
    """Returns whether the write is committed; else nothing of it is open. Raises TransactionState where that
    is not clear yet.
    """
    found = client.transaction(write_id(token))
    if found is None:
        return False
    if found.state == OPEN:
        # of a call that lost an answer: whether it is committed is decided by this request and by its own
        client.end_transaction(
            write_id(token),
            found.producer,
            commit=False,
            bump=client.transaction_version() >= EPOCH_PER_TRANSACTION,
        )
    if found.state in (OPEN, *ENDING):
        raise errors.TransactionState(f"batch write {token} is {found.state}", "wait until it is settled")
    return found.state == COMMITTED


def _publish(client: Client, token: str, named: Sequence[NamedBranch]) -> None:
    epoch = ProducerEpoch(client, write_id(token))
    epoch.fence(timeout_ms(named))
    transaction = epoch.begin()
    try:
        transaction.join([log for each in named for log in each.receipt.logs])
        for batches in rounds(client, named):
            transaction.append(batches)
        here("kafka.write.published")
        transaction.commit()
    except (errors.ConnectionFailed, errors.TransactionState):
        raise
    except Exception:
        end_quietly(transaction)
        raise
    here("kafka.write.committed")
