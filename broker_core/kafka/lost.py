"""What is said of an app whose topic is gone.

Not here: finding it out (``cluster/acls.py``, ``journal/journal.py``, ``source/source.py``).
"""

from __future__ import annotations

from broker_core.core.errors import CheckpointMismatch, LedgerLost
from broker_core.engine import Vector
from broker_core.kafka import names
from broker_core.micro_batch.positions import brief

_START = (
    "a new checkpoint: with onNewCheckpoint=resume and its Delta ledger, or with startingOffsets where it was"
)


def ledger_lost(app_id: str, how: str = "does not exist") -> LedgerLost:
    """``how``: what has become of its topic."""
    return LedgerLost(
        f"topic {names.app_topic(app_id)} {how}: the claims and decisions of app {app_id!r} are lost with it",
        f"start the query in a new process with {_START}",
    )


def unknown_start(app_id: str, start: Vector) -> CheckpointMismatch:
    """Of a checkpoint that is not at its beginning, for an app without a claim."""
    return CheckpointMismatch(
        f"the checkpoint of app {app_id!r} starts at {brief(start)}, and topic "
        f"{names.app_topic(app_id)} has no claim of the app. It is the checkpoint of another app or cluster, "
        "or the topic was deleted, and with it what the app has claimed and decided",
        f"use the checkpoint that belongs to the app, or start it with {_START}",
    )
