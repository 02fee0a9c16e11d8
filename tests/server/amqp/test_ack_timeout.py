"""``x-consumer-timeout``: which delivery is late, by the notes of a channel."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from broker_core.server.amqp.commands.ack_timeout import LEAST_S, NOTES, TagNotes


@given(st.lists(st.floats(0.1, 3.0), min_size=1, max_size=300), st.integers(1, 100_000))
def test_no_delivery_is_called_late_before_its_time_and_each_soon_after(
    pauses: list[float], limit: int
) -> None:
    """One delivery before each sweep: its tag is its number."""
    notes, now, sent, highest = TagNotes(limit), 0.0, {}, 0
    for tag, pause in enumerate(pauses, 1):
        sent[tag] = now
        now += pause
        found = notes.late(now, tag)
        highest = max(highest, found)
        for other in range(1, found + 1):
            assert now - sent[other] >= limit / 1000
        room = 2 * max(limit / 1000 / NOTES, LEAST_S) + 2 * 3.0
        overdue = [other for other, at in sent.items() if now - at > limit / 1000 + room]
        assert not overdue or highest >= max(overdue)
        assert len(notes._all) <= NOTES + 3
