"""What a manager of transactions finds again after it has lost its log, in pages. Pure.

Not here: who asks, and in which words (``server/amqp/transaction_exchange.py``, ``server/flight``).
Invariant: no two transactions come into a state at one time, so a page that begins after a time leaves out
none, whatever is decided between two pages.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import nsmallest
from typing import NamedTuple

from broker_core.broker.access.users import name_of, payer_of
from broker_core.broker.broker import BrokerState
from broker_core.core.xa.recover_info import RecoverInfo

PAGE = 1_000


class RecoverPage(NamedTuple):
    """``left``: how many come after it."""

    rows: list[RecoverInfo]
    left: int


def recover(state: BrokerState, vhost: str, user: str, after_us: int = 0) -> RecoverPage:
    """Returns the oldest PAGE of what the user has prepared, or others have decided for it, in a virtual host
    after a time.
    """
    later = [(since_us, key) for since_us, key in _of(state, vhost, user) if since_us > after_us]
    rows = [
        RecoverInfo(name_of(key), state.names.outcome(key), since_us)
        for since_us, key in nsmallest(PAGE, later)
    ]
    return RecoverPage(rows, len(later) - len(rows))


def _of(state: BrokerState, vhost: str, user: str) -> Iterator[tuple[int, str]]:
    owner = state.names.key(vhost, "", user)  # what a deleted user has has another one
    for key in state.prepared.keys_of.get(payer_of(owner), ()):
        if key.startswith(owner):
            yield state.prepared.since_us[key], key
    heuristics = state.names.heuristics
    for key in heuristics.keys_of.get(payer_of(owner), ()):
        if key.startswith(owner):
            yield heuristics.by_key[key].decided_at, key
