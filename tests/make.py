"""What tests of several folders make and reach, said once.

Not here: what one folder needs (its ``conftest.py``), servers and processes (``amqp_server.py``, ``forked.py``).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from broker_core.broker.channel import Channel
from broker_core.broker.queue.due_index import DueIndex
from broker_core.core.change import Change
from broker_core.node.channel import LocalChannel
from broker_core.node.local import LocalBroker
from broker_core.store.memory import MemoryStore


class GatedStore(MemoryStore):
    """A disk that is slow: a commit waits at the gate, so that others queue up behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.entered = threading.Event(), threading.Event()
        self.gate.set()
        self.groups: list[int] = []  # changes of each commit
        self.broken = False

    def commit(self, changes: Sequence[Change]) -> None:
        self.entered.set()
        assert self.gate.wait(600)
        if self.broken:
            raise OSError(5, "Input/output error")
        self.groups.append(len(changes))
        super().commit(changes)


def beneath(channel: LocalChannel) -> Channel:
    """The channel of the rules, without committer and store."""
    return channel._channel


def spill(broker: LocalBroker, channel: LocalChannel) -> None:
    """What the transaction has so far goes to the store, as that of a large one does."""
    broker.channel_commits.spill(beneath(channel).transaction)


def planned(index: DueIndex) -> list[tuple[int, int]]:
    """When each entry is due that the index has in memory, and its offset."""
    return [
        *index._fresh,
        *((at_us, offset) for array in index._arrays for at_us, offset in array.T.tolist()),
    ]


def around(patch: pytest.MonkeyPatch, owner: Any, name: str, replacement: Any) -> None:
    """``replacement`` stands in for a function, and gets it as its first argument."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda *given, **named: replacement(original, *given, **named))
