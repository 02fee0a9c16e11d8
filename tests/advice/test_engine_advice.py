"""What an error of an engine says to do is done as it says, and arrives: each message once.

Not here: advice whose commands need Spark (``tests/spark/test_transient.py``, ``test_data_directories.py``,
``test_skip_rows.py``), and what follows a release (``tests/contract/engine/test_release.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest

from broker_core.core.errors import TxmqError
from broker_core.engine import START, Vector
from tests.contract.engine.bench import APP
from tests.contract.engine.bench import EngineBench as Bench
from tests.contract.engine.test_release import follow

ALL: Vector = {"in": START}


class Advice(NamedTuple):
    """``state`` ends with the error; ``words`` of it say what to do; ``way`` does it, and returns what is read."""

    name: str
    state: Callable[[Bench], object]
    words: str
    way: Callable[[Bench], list[bytes]]
    end: list[bytes]


def one_decided(bench: Bench) -> Vector:
    """Batch 0 of query ``q`` is decided, of message a."""
    bench.produce(b"a")
    end = bench.claim()
    bench.run("q", 0, ALL, end)
    return end


def new_checkpoint(bench: Bench) -> object:
    one_decided(bench)
    bench.produce(b"b")
    return bench.claim()


def new_checkpoint_of_the_sink(bench: Bench) -> object:
    end = one_decided(bench)
    bench.produce(b"b")
    bench.claim(end)
    return bench.engine.open_batch(APP, "new", 0, "fail")


def another_pipeline(bench: Bench) -> list[bytes]:
    bench.produce(b"x", queue="in2")
    start: Vector = {"in2": START}
    end = bench.claim(start, app="another")
    ranges = bench.ranges(start, end, app="another")
    opened = bench.engine.open_batch("another", "p", 0, "fail")
    found = bench.read("p", 0, ranges, app="another")
    bench.engine.commit_batch("another", "p", 0, opened.token, [])
    return found


def older_checkpoint(bench: Bench) -> object:
    new_checkpoint_resumed(bench)
    return bench.engine.open_batch(APP, "q", 1, "fail")


def new_checkpoint_resumed(bench: Bench) -> None:
    one_decided(bench)
    bench.produce(b"b")
    assert follow(bench, "new", 0, ALL) == [b"b"]
    bench.produce(b"c")


def checkpoint_ahead(bench: Bench) -> object:
    end = one_decided(bench)
    bench.produce(b"b")
    bench.claim(end)
    return bench.engine.open_batch(APP, "q", 5, "fail")


def unknown_start(bench: Bench) -> object:
    one_decided(bench)
    bench.produce(b"b", b"c")
    return bench.claim({"in": 2})


def resumed(bench: Bench) -> list[bytes]:
    return follow(bench, "again", 0, ALL)


ADVICE = [
    Advice("a new checkpoint", new_checkpoint, "onNewCheckpoint=resume", resumed, [b"b"]),
    Advice("a new checkpoint, as the sink sees it", new_checkpoint_of_the_sink, "onNewCheckpoint=resume", resumed, [b"b"]),
    Advice("a new checkpoint of another pipeline", new_checkpoint, "an appId and queues of its own", another_pipeline, [b"x"]),
    Advice("an older checkpoint", older_checkpoint, "a new one with onNewCheckpoint=resume", resumed, [b"c"]),
    Advice("a checkpoint that is ahead", checkpoint_ahead, "a new checkpoint with onNewCheckpoint=resume", resumed, [b"b"]),
    Advice("a start that is no end of a claim", unknown_start, "onNewCheckpoint=resume", resumed, [b"b", b"c"]),
]  # fmt: skip


@pytest.mark.parametrize("crash", [False, True], ids=["at once", "in a new process"])
@pytest.mark.parametrize("advice", ADVICE, ids=[advice.name for advice in ADVICE])
def test_who_does_what_the_error_says_goes_on_with_each_message_once(
    bench: Bench, advice: Advice, crash: bool
) -> None:
    with pytest.raises(TxmqError) as raised:
        advice.state(bench)
    assert advice.words in str(raised.value), raised.value
    if crash:
        bench.crash()
    assert advice.way(bench) == advice.end
