"""How much came to each queue of an engine elsewhere, and how much left it, between two looks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from broker_core.admin import QueueInfo
from broker_core.server.http.rates import NOTHING, Counts, Rate


class TopicRates:
    """One thread looks, any thread reads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._at_s = 0.0
        self._before: dict[str, Counts] = {}
        self._rates: dict[str, Rate] = {}

    def look(self, queues: Iterable[QueueInfo]) -> None:
        now_s = self._clock()
        passed_s = now_s - self._at_s if self._at_s else 0.0
        counts = {each.name: counts_of(each) for each in queues}
        rates = {}
        for name, count in counts.items():
            known = self._before.get(name)
            if known is not None and passed_s:
                more = count.since(known)
                rates[name] = Rate(round(more.published / passed_s, 1), round(more.settled / passed_s, 1))
        self._at_s, self._before, self._rates = now_s, counts, rates

    def of(self, name: str) -> Rate:
        return self._rates.get(name, Rate())

    def of_all(self) -> Rate:
        found = list(self._rates.values())
        return Rate(
            round(sum(each.published for each in found), 1), round(sum(each.settled for each in found), 1)
        )


def counts_of(queue: QueueInfo) -> Counts:
    """``settled``: what is gone, as its retention says."""
    return Counts(queue.next_offset, queue.next_offset - queue.messages)


def sum_of(queues: Iterable[QueueInfo]) -> Counts:
    found = NOTHING
    for queue in queues:
        found = found.plus(counts_of(queue))
    return found
