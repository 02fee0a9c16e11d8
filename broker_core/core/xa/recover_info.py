"""A transaction that its manager finds again after it has lost its log."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RecoverInfo:
    """``since_us``: when it came into this state, in microseconds since the epoch."""

    xid: str
    state: str  # prepared, heuristically_committed, heuristically_rolled_back
    since_us: int
