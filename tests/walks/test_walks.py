"""A commit passes few files: each walk has a limit, which falls with every way that becomes shorter.

A newcomer sees a walk with ``python -m tests.walks commit``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.progress import run_to_end
from tests.walks.__main__ import shown
from tests.walks.recorder import Call, Walk
from tests.walks.walks import WALKS

pytestmark = pytest.mark.slow  # a process that opens brokers

ROOT = Path(__file__).resolve().parents[2]

# files at most
LIMITS = {
    "commit": 28,  # two of them are the history of commits, three say whose turn it is
    "confirm": 28,
    "publish": 12,
    "login": 32,
    "channel": 19,
    "batch": 29,  # two of them are the history of commits
    "kafka-batch": 25,
}


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Files, calls and hand-overs by walk: of a process of its own, so that no other test has a thread in it."""
    command = [sys.executable, "-m", "tests.walks", "--json"]
    done = run_to_end(command, tmp_path_factory.mktemp("walks"), cwd=ROOT)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", WALKS)
def test_a_walk_passes_few_files(walked: dict[str, Any], name: str) -> None:
    files = walked[name]["files"]
    assert len(files) <= LIMITS[name], "\n".join(files)
    assert len(files) >= LIMITS[name] - 3, f"shorter than its limit says: lower it to {len(files)}"


def test_a_walk_begins_where_the_work_begins_and_reaches_the_disk(walked: dict[str, Any]) -> None:
    """So a limit cannot be kept because nothing was recorded."""
    for name in ("commit", "confirm"):
        assert "broker_core/server/amqp/connection.py" in walked[name]["files"][:3]
        assert "broker_core/store/durable.py" in walked[name]["files"]
    assert "broker_core/node/channel.py" in walked["channel"]["files"][:3]
    assert "broker_core/store/durable.py" in walked["channel"]["files"]
    for name, engine in (
        ("batch", "broker_core/node/engine.py"),
        ("kafka-batch", "broker_core/kafka/engine.py"),
    ):
        assert engine in walked[name]["files"][:3]


def test_a_walk_is_printed_as_its_hand_overs() -> None:
    calls = [Call("a.py", "first"), Call("a.py", "second"), Call("b.py", "third"), Call("a.py", "first")]
    assert [line.split() for line in shown(Walk(tuple(calls))).splitlines()] == [
        ["1", "a.py", "first,", "second"],
        ["2", "b.py", "third"],
        ["3", "a.py", "first"],
    ]
