"""The rings that plots show: in order, with one bound over all, and fair where the bound is reached."""

from __future__ import annotations

import random

from broker_core.server.http.state.history import Curve, Numbers, PlotHistory


def sampled(history: PlotHistory, at: int, rows: dict[str, float]) -> None:
    history.begin(float(at))
    history.add([(("queue", name), (value, 0.0, 0.0)) for name, value in rows.items()])
    history.end()


def first(history: PlotHistory, name: str) -> Curve:
    return history.of(("queue", name)).curves[0]


def test_a_ring_has_the_last_points_in_order() -> None:
    history = PlotHistory(4, 5)
    for at in range(1, 9):
        sampled(history, at, {"a": at})
        assert first(history, "a") == list(range(max(at - 4, 1), at + 1))
        assert history.of(("queue", "a")).times == list(range(max(at - 4, 1), at + 1))


def test_a_sum_has_what_each_knew() -> None:
    history = PlotHistory(4, 5)
    sampled(history, 1, {"a": 1})
    sampled(history, 2, {"a": 2, "b": 10})
    assert history.of(("queue", "a"), ("queue", "b")).curves[0] == [1, 12]
    assert history.of(("queue", "never")).times == []


def test_what_is_gone_is_forgotten_and_its_ring_is_empty_for_the_next() -> None:
    history = PlotHistory(1, 3)
    sampled(history, 1, {"a": 7})
    sampled(history, 2, {})
    assert len(history) == 0 and first(history, "a") == []
    sampled(history, 3, {"b": 5})
    assert first(history, "b") == [5]


def test_what_is_idle_makes_room_and_what_changes_keeps_its_ring() -> None:
    history = PlotHistory(2, 3)
    for at in range(1, 4):
        sampled(history, at, {"busy": at, "idle": 1, "new": at})
    assert first(history, "new") == [] and len(history) == 2  # both have changed within the ring
    sampled(history, 4, {"busy": 4, "idle": 1, "new": 4})
    assert first(history, "new") == [4] and first(history, "idle") == []
    assert first(history, "busy") == [2, 3, 4]
    sampled(history, 5, {"busy": 5, "idle": 1, "new": 5, "empty": 0})
    assert first(history, "empty") == []


def test_rings_never_exceed_their_bound(seed: int) -> None:
    source, history = random.Random(seed), PlotHistory(20, 10)
    size = history.size_bytes
    for at in range(200):
        rows = {f"q{source.randint(0, 100)}": float(source.randint(0, 3)) for _ in range(60)}
        sampled(history, at, rows)
        assert len(history) <= 20 and history.size_bytes == size and len(history._last) <= 20
        curves = [(value, first(history, name)) for name, value in rows.items()]
        assert all(curve[-1] == value for value, curve in curves if curve)


def test_a_sample_of_ten_thousand_queues_takes_little() -> None:
    numbers: list[Numbers] = [(float(each), 1.0, 1.0) for each in range(10_000)]
    history = PlotHistory()
    for at in range(3):
        history.begin(float(at))
        history.add((("queue", str(each)), row) for each, row in enumerate(numbers))
        history.end()
    assert len(history) == 2_000 and history.size_bytes < 9 << 20
