"""Offsets as Spark logs them: a JSON object from log to the next offset to read, or to ``"start"``.

Not here: what they mean to the broker (engine.py). Invariant: what leaves :func:`symbolic` and comes back from a checkpoint through
:func:`vector` is a vector of exactly the queues of this query, or one clear error; a number is never made up (S1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from broker_core.engine import START, Vector
from broker_core.errors import LineageConflict


def symbolic(logs: Sequence[str]) -> Vector:
    """S1: the offset that a new query starts from. Spark asks for it again when batch 0 is replayed, so it may not hold a number."""
    return dict.fromkeys(logs, START)


def is_symbolic(vector: Mapping[str, int | str]) -> bool:
    return any(offset == START for offset in vector.values())


def vector(logged: Any, logs: Sequence[str]) -> Vector:
    """The offset that Spark hands back. Raises LineageConflict where it is not one of ``logs`` or not txmq's."""
    if not isinstance(logged, dict) or not all(_is_offset(offset) for offset in logged.values()):
        raise LineageConflict(
            f"the checkpoint holds the offset {logged!r}, which no txmq source wrote; start the query with a checkpoint of its own"
        )
    if set(logged) != set(logs):
        raise LineageConflict(
            f"the checkpoint holds offsets of {', '.join(sorted(logged))}, but the query reads {', '.join(sorted(logs))}; "
            "keep the queues of a query, or start a new one with a new checkpoint and a new appId"
        )
    return {log: logged[log] for log in logs}


def _is_offset(offset: Any) -> bool:
    return offset == START or (isinstance(offset, int) and not isinstance(offset, bool) and offset >= 0)
