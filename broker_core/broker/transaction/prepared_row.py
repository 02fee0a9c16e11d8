"""A prepared transaction as an operator sees it: for which queues it is, and its first bodies. Pure.

Invariant: a body is shown only to a caller who could read it from a queue that it is for. The names of direct
replies are shown to nobody: who knows one may answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice

from broker_core.admin import PreparedInfo
from broker_core.broker.access.users import name_of, owner_of
from broker_core.broker.transaction.transaction import Transaction

BODIES, BODY_BYTES = 3, 200
QUEUES = 100  # with the most messages, of one transaction


def prepared_row(
    key: str, transaction: Transaction, age_s: float, reads: Callable[[str], bool] | None
) -> PreparedInfo:
    """``reads``: whether the caller may see the messages of a queue; None: of none."""
    to = Counter(
        queue.name for publish in transaction.publishes for queue in publish.queues if not queue.replies
    )
    for spilled in transaction.spilled:
        for queue, selection in spilled.selections:
            if not queue.replies:
                to[queue.name] += selection.rows
    return PreparedInfo(
        name_of(key),
        age_s,
        transaction.messages,
        len(transaction.settles),
        transaction.size_bytes,
        transaction.dropped,
        owner_of(key) or "",
        dict(to.most_common(QUEUES)),
        dict(Counter(each.queue.name for each in transaction.settles).most_common(QUEUES)),
        tuple(islice(_bodies(transaction, reads), BODIES)) if reads is not None else (),
    )


def _bodies(transaction: Transaction, reads: Callable[[str], bool]) -> Iterator[bytes]:
    """Of what is in memory: the bodies of a large transaction are in a segment."""
    for publish in () if transaction.spilled else transaction.publishes:
        if any(not queue.exclusive and reads(queue.name) for queue in publish.queues):
            yield publish.message.body[:BODY_BYTES]
