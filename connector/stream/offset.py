"""Offsets in Spark's offset log: a JSON object from log to the next offset to read, or from queue to
``"start"``.

Not here: their meaning in the broker (engine.py).
Invariant: an offset that a checkpoint returns through :func:`vector` is of exactly the queues of this query,
or there is one error; no number is invented (S1). It may lack logs, which were added to a queue later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from broker_core.core.errors import CheckpointMismatch
from broker_core.engine import START, Vector


def symbolic(queues: Sequence[str]) -> Vector:
    """S1: the start of a new query. Spark asks again when it replays batch 0, so it has no number, and names
    the queues: one may have got another log meanwhile.
    """
    return dict.fromkeys(queues, START)


def is_symbolic(vector: Mapping[str, int | str]) -> bool:
    return any(offset == START for offset in vector.values())


def vector(logged: object, logs: Mapping[str, Sequence[str]]) -> Vector:
    """The offset that Spark passes back. ``logs``: those of every queue of the query.

    Raises CheckpointMismatch if it is of other queues, or not of txmq.
    """
    if not isinstance(logged, dict) or not all(is_offset(offset) for offset in logged.values()):
        raise CheckpointMismatch(
            f"the checkpoint holds the offset {logged!r}, which no txmq source wrote",
            "start the query with another checkpoint",
        )
    queue_of = {log: queue for queue, found in logs.items() for log in found}
    queues = [
        (name if name in logs else None) if offset == START else queue_of.get(name)
        for name, offset in logged.items()
    ]
    if set(queues) != set(logs):
        logged_names, read = (", ".join(sorted(names)) for names in (logged, logs))
        raise CheckpointMismatch(
            f"the checkpoint holds offsets of {logged_names}, but the query reads {read}",
            "read the same queues, or start with a new checkpoint, the same appId and "
            "onNewCheckpoint=resume: it continues after the last decided batch",
        )
    return dict(logged)


def is_offset(offset: object) -> bool:
    return offset == START or (isinstance(offset, int) and not isinstance(offset, bool) and offset >= 0)
