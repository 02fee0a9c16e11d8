"""The dead letters of what a transaction rejects, before its commit.

Not here: when they must be written ahead (``message/settlement.py``), and how (``node/letters_ahead.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from broker_core.broker.queue import Queue
from broker_core.broker.transaction.spilled import Spilled


class SpilledLetters(NamedTuple):
    """Dead letters of ``sources`` whose bytes are in a segment, routed when they were written."""

    sources: tuple[Queue, ...]
    spilled: Spilled


@dataclass(slots=True)
class Letters:
    """The dead letters of what a transaction rejects, and how many. ``ahead``: all of them, if they were
    written before its commit; ``failure``: why they could not be.
    """

    count: int = 0
    ahead: list[SpilledLetters] | None = None
    failure: Exception | None = None
