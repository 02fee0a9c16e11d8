"""Offsets in Spark's offset log: a JSON object from log to the next offset to read, or to ``"start"``.

Not here: their meaning in the broker (engine.py).
Invariant: an offset from :func:`symbolic` that a checkpoint returns through :func:`vector` has exactly the
queues of this query, or there is one error; no number is invented (S1).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from broker_core.engine import START, Vector
from broker_core.errors import LineageConflict


def symbolic(logs: Sequence[str]) -> Vector:
    """S1: the start of a new query. Spark asks again when it replays batch 0, so it has no number."""
    return dict.fromkeys(logs, START)


def is_symbolic(vector: Mapping[str, int | str]) -> bool:
    return any(offset == START for offset in vector.values())


def vector(logged: Any, logs: Sequence[str]) -> Vector:
    """The offset that Spark passes back. Raises LineageConflict if it is not of ``logs`` or of txmq."""
    if not isinstance(logged, dict) or not all(_is_offset(offset) for offset in logged.values()):
        raise LineageConflict(
            f"the checkpoint holds the offset {logged!r}, which no txmq source wrote",
            "start the query with another checkpoint",
        )
    if set(logged) != set(logs):
        raise LineageConflict(
            f"the checkpoint holds offsets of {_listed(logged)}, but the query reads {_listed(logs)}",
            "read the same queues, or start a new query with a new checkpoint and a new appId",
        )
    return {log: logged[log] for log in logs}


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def _is_offset(offset: Any) -> bool:
    return offset == START or (isinstance(offset, int) and not isinstance(offset, bool) and offset >= 0)
