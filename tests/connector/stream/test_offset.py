"""Offsets: symbolic where the protocol asks for it, and never made up from what a checkpoint does not
hold.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from broker_core.core.errors import CheckpointMismatch
from connector.stream import offset

QUEUES = {"a": ["a"], "b": ["b"]}
PARTITIONED = {"orders": ["orders/0", "orders/1"], "pay": ["pay/0"]}


def test_a_new_query_starts_from_a_symbolic_offset_that_survives_sparks_log() -> None:
    logged = json.loads(json.dumps(offset.symbolic(["a", "b"])))
    assert logged == {"a": "start", "b": "start"}
    assert offset.is_symbolic(offset.vector(logged, QUEUES))
    assert not offset.is_symbolic(offset.vector({"a": 1, "b": 0}, QUEUES))


@pytest.mark.parametrize("logged", [{"a": 1}, {"a": 1, "b": 2, "c": 3}, {"a": 1, "c": 2}])
def test_a_checkpoint_of_other_queues_is_refused(logged: dict[str, int]) -> None:
    with pytest.raises(
        CheckpointMismatch,
        match=r"the checkpoint holds offsets of .*, but the query reads a, "
        r"b",
    ):
        offset.vector(logged, QUEUES)


@pytest.mark.parametrize(
    "logged", [None, 5, {"a": "latest"}, {"a": -1}, {"a": 1.5}, {"a": True}, {"a": None}]
)
def test_an_offset_that_txmq_did_not_write_is_refused(logged: Any) -> None:
    with pytest.raises(CheckpointMismatch, match="no txmq source wrote"):
        offset.vector(logged, {"a": ["a"]})


@pytest.mark.parametrize(
    "logged",
    [
        {"orders": "start", "pay": "start"},
        {"orders/0": 4, "orders/1": 0, "pay/0": 2},
        {"orders/1": 4, "pay/0": 2},  # orders/0 was added later
        {"orders/0": 4, "pay": "start"},
    ],
)
def test_an_offset_names_a_queue_while_it_is_symbolic_and_then_its_logs(logged: dict[str, Any]) -> None:
    assert offset.vector(logged, PARTITIONED) == logged


@pytest.mark.parametrize(
    "logged",
    [
        {"orders/0": "start", "pay": "start"},  # a log is never symbolic
        {"orders": 4, "pay/0": 2},  # a queue of several logs has no offset
        {"orders/0": 4},
        {"orders/0": 4, "orders/2": 1, "pay/0": 2},
    ],
)
def test_an_offset_of_other_logs_is_refused(logged: dict[str, Any]) -> None:
    with pytest.raises(CheckpointMismatch, match="the checkpoint holds offsets of"):
        offset.vector(logged, PARTITIONED)
