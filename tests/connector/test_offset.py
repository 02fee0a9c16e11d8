"""Offsets: symbolic where the protocol asks for it, and never made up from what a checkpoint does not
hold.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from broker_core.errors import LineageConflict
from connector import offset


def test_a_new_query_starts_from_a_symbolic_offset_that_survives_sparks_log() -> None:
    logged = json.loads(json.dumps(offset.symbolic(["a", "b"])))
    assert logged == {"a": "start", "b": "start"}
    assert offset.is_symbolic(offset.vector(logged, ["a", "b"]))
    assert not offset.is_symbolic(offset.vector({"a": 1, "b": 0}, ["a", "b"]))


@pytest.mark.parametrize("logged", [{"a": 1}, {"a": 1, "b": 2, "c": 3}, {"a": 1, "c": 2}])
def test_a_checkpoint_of_other_queues_is_refused(logged: dict[str, int]) -> None:
    with pytest.raises(
        LineageConflict,
        match=r"the checkpoint holds offsets of .*, but the query reads a, "
        r"b",
    ):
        offset.vector(logged, ["a", "b"])


@pytest.mark.parametrize(
    "logged", [None, 5, {"a": "latest"}, {"a": -1}, {"a": 1.5}, {"a": True}, {"a": None}]
)
def test_an_offset_that_txmq_did_not_write_is_refused(logged: Any) -> None:
    with pytest.raises(LineageConflict, match="no txmq source wrote"):
        offset.vector(logged, ["a"])
