"""What an error of an engine says to do is done as it says, and arrives: each message once.

Not here: advice whose commands need Spark (``tests/spark/test_transient.py``, ``test_data_directories.py``,
``test_skip_rows.py``), and what follows a release (``tests/contract/engine/test_release.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest

from broker_core.core.errors import TxmqError
from broker_core.engine import START, Limit, Origin, Vector
from broker_core.kafka import names
from tests.contract.engine.bench import APP
from tests.contract.engine.bench import EngineBench as Bench
from tests.contract.engine.test_release import follow, released
from tests.kafka.bench.engine_bench import KafkaBench

ALL: Vector = {"in": START}


class Advice(NamedTuple):
    """``state`` ends with the error; ``words`` of it say what to do; ``way`` does it, and returns what is read."""

    name: str
    state: Callable[[Bench], object]
    words: str
    way: Callable[[Bench], list[bytes]]
    end: list[bytes]
    engine: str = ""  # the only one that says so


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


def another_query(bench: Bench) -> list[bytes]:
    bench.produce(b"x", queue="in2")
    return another_app(bench, {"in2": START})


def another_app(bench: Bench, start: Vector) -> list[bytes]:
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


def unknown_range(bench: Bench) -> object:
    one_decided(bench)
    bench.produce(b"b", b"c")
    return bench.ranges({"in": 1}, {"in": 2})


def other_logs(bench: Bench) -> object:
    one_decided(bench)
    bench.produce(b"b")
    return bench.engine.claim(APP, ["in"], {bench.log("in2"): 1}, Limit(), Origin(), "fail")


def other_sink(bench: Bench) -> object:
    bench.produce(b"a")
    bench.claim()
    return bench.engine.open_batch(APP, "q", 3, "fail")


def before_the_ledger(bench: Bench) -> object:
    end = one_decided(bench)
    bench.produce(b"b")
    bench.engine.open_batch(APP, "new", 5, "resume")
    bench.claim(end)
    return bench.engine.open_batch(APP, "new", 4, "resume")


def other_range_of_a_decided_batch(bench: Bench) -> object:
    end = one_decided(bench)
    bench.produce(b"b")
    return bench.read("q", 0, bench.ranges(end, bench.claim(end)))


def other_range_of_a_batch(bench: Bench) -> object:
    """Its sink is another system, which has the first message."""
    bench.produce(b"a")
    end = bench.claim()
    bench.read("p", 0, bench.ranges(ALL, end))
    bench.produce(b"b")
    return bench.read("p", 0, bench.ranges(end, bench.claim(end)))


def a_range_that_is_consumed(bench: Bench) -> object:
    end = one_decided(bench)
    bench.produce(b"b")
    bench.claim(end)
    opened = bench.engine.open_batch(APP, "new", 0, "resume")
    bench.read("new", 0, bench.ranges(ALL, end))
    return bench.engine.commit_batch(APP, "new", 0, opened.token, [])


def undecided_and_committed(bench: Bench) -> object:
    """By an older copy of the data directory."""
    end = one_decided(bench)
    bench.produce(b"b")
    then = bench.claim(end)
    bench.crash()
    return bench.claim(then, ran=False)


def a_released_batch(bench: Bench) -> object:
    bench.produce(b"a", b"b")
    ranges = bench.ranges(ALL, bench.claim())
    bench.read("q", 0, ranges)
    bench.engine.release(APP, "in", force=True, by="ann")
    return bench.read("q", 0, ranges)


def read_after_a_release(bench: Bench) -> object:
    return bench.claim(released(bench))


def claimed_and_released(bench: Bench) -> None:
    bench.produce(b"a", b"b")
    bench.claim()
    bench.engine.release(APP, "in")


def finished_and_released(bench: Bench) -> list[bytes]:
    """More comes while the query runs. With AvailableNow it claims nothing of that."""
    found = follow(bench, "q", 0, ALL, "fail")
    bench.produce(b"c")
    assert bench.claim({"in": 2}, limit=Limit(end={"in": 2})) == {"in": 2}
    bench.engine.release(APP, "in")
    return found + another_app(bench, {"in": START})[-1:]  # of Kafka each app reads all


def read_for_another_system(bench: Bench) -> None:
    """The query was killed behind its first batch, and was started again."""
    bench.produce(b"a", b"b")
    end = bench.claim()
    bench.read("q", 0, bench.ranges(ALL, end))
    bench.crash()
    assert bench.claim(end, ran=False) == end
    bench.engine.release(APP, "in")


def released_behind_its_next_batch(bench: Bench) -> list[bytes]:
    bench.produce(b"c")
    end = bench.claim({"in": 2}, ran=False)
    found = bench.read("q", 1, bench.ranges({"in": 2}, end))
    assert bench.claim(end) == end
    bench.engine.release(APP, "in")
    return found


def forced(bench: Bench) -> list[bytes]:
    bench.engine.release(APP, "in", force=True)
    return resumed(bench)


def left_by_its_query(bench: Bench) -> None:
    """A new checkpoint reads one of two queues, of which a batch was claimed."""
    bench.produce(b"a")
    bench.produce(b"x", queue="in2")
    both: Vector = {"in": START, "in2": START}
    bench.read("one", 0, bench.ranges(both, bench.claim(both)))
    assert follow(bench, "two", 0, ALL) == [b"a"]
    bench.engine.release(APP, "in2")


def left_and_forced(bench: Bench) -> list[bytes]:
    bench.engine.release(APP, "in2", force=True)
    return another_app(bench, {"in2": START})


def of_another_app(bench: Bench) -> object:
    one_decided(bench)
    bench.produce(b"b")
    return bench.claim(app="another")


def released_for_another(bench: Bench) -> list[bytes]:
    bench.engine.release(APP, "in")
    return another_app(bench, ALL)


def made_again(bench: Bench) -> None:
    end = one_decided(bench)
    bench.produce(b"b")
    bench.claim(end)
    bench.read("q", 1, bench.ranges(end, {"in": 2}))
    bench.remake("in")
    bench.produce(b"x", b"y")


def planned_of_a_topic_made_again(bench: Bench) -> object:
    made_again(bench)
    return bench.ranges({"in": 1}, {"in": 2})


def decided_of_a_topic_made_again(bench: Bench) -> object:
    made_again(bench)
    opened = bench.engine.open_batch(APP, "q", 1, "fail")
    return bench.engine.commit_batch(APP, "q", 1, opened.token, [])


def lost_ledger(bench: Bench) -> Vector:
    """The topic of the app is deleted; a new process has none of it in memory."""
    assert isinstance(bench, KafkaBench)
    end = one_decided(bench)
    bench.produce(b"b")
    bench.client.delete_topic(names.app_topic(APP))
    return end


def lost_while_it_runs(bench: Bench) -> object:
    return bench.claim(lost_ledger(bench))


def lost_before_it_starts(bench: Bench) -> object:
    end = lost_ledger(bench)
    bench.crash()
    return bench.claim(end)


def begun_behind(bench: Bench) -> list[bytes]:
    """A new checkpoint in a new process, with startingOffsets."""
    bench.crash()
    end = bench.claim(origin=Origin(offsets={"in": 1}))
    opened = bench.engine.open_batch(APP, "new", 0, "fail")
    found = bench.read("new", 0, bench.ranges(ALL, end))
    bench.engine.commit_batch(APP, "new", 0, opened.token, [])
    return found


def resumed(bench: Bench) -> list[bytes]:
    return follow(bench, "again", 0, ALL)


ADVICE = [
    Advice("a new checkpoint", new_checkpoint, "onNewCheckpoint=resume", resumed, [b"b"]),
    Advice("a new checkpoint, as the sink sees it", new_checkpoint_of_the_sink, "onNewCheckpoint=resume", resumed, [b"b"]),
    Advice("a new checkpoint of another query", new_checkpoint, "an appId and queues of its own", another_query, [b"x"]),
    Advice("an older checkpoint", older_checkpoint, "a new one with onNewCheckpoint=resume", resumed, [b"c"]),
    Advice("a checkpoint that is ahead", checkpoint_ahead, "a new checkpoint with onNewCheckpoint=resume", resumed, [b"b"]),
    Advice("a start that is no end of a claim", unknown_start, "onNewCheckpoint=resume", resumed, [b"b", b"c"]),
    Advice("a range that was never given", unknown_range, "new one with onNewCheckpoint=resume", resumed, [b"b", b"c"]),
    Advice("a start of other logs", other_logs, "a new checkpoint with onNewCheckpoint=resume", resumed, [b"b"]),
    Advice("a checkpoint of another sink, new", other_sink, "or start with a new checkpoint", resumed, [b"a"]),
    Advice("a checkpoint of another sink, resumed", other_sink, "set onNewCheckpoint=resume to go on here", lambda bench: follow(bench, "q", 3, ALL), [b"a"]),
    Advice("a batch before the ledger", before_the_ledger, "a new one with onNewCheckpoint=resume", resumed, [b"b"]),
    Advice("a decided batch with another range", other_range_of_a_decided_batch, "a new one with onNewCheckpoint=resume", resumed, [b"b"]),
    Advice("a batch with another range", other_range_of_a_batch, "a new one with onNewCheckpoint=resume", resumed, [b"b"]),
    Advice("a range that is consumed", a_range_that_is_consumed, "a new one and onNewCheckpoint=resume", resumed, [b"b"]),
    Advice("a committed batch that is not decided", undecided_and_committed, "a new checkpoint and onNewCheckpoint=resume", resumed, [b"b"]),
    Advice("a batch that was read before a release", a_released_batch, "onNewCheckpoint=resume", resumed, [b"a", b"b"]),
    Advice("a checkpoint after a release", read_after_a_release, "onNewCheckpoint=resume", resumed, [b"b", b"c"]),
    Advice("a release of what is claimed, finished", claimed_and_released, "start its query once more with trigger(availableNow=True), which ends when they are finished, and release then", finished_and_released, [b"a", b"b", b"c"]),
    Advice("a release of what another system has", read_for_another_system, "may leave its last batch so until its next one", released_behind_its_next_batch, [b"c"]),
    Advice("a release of a queue that is not read any more", left_by_its_query, "With --force, as for a queue that it reads no more", left_and_forced, [b"x"]),
    Advice("a release of what is claimed, forced", claimed_and_released, "the claimed messages are for whoever reads next", forced, [b"a", b"b"]),
    Advice("a queue of another app", of_another_app, "`txmq app release alerts in`", released_for_another, [b"b"], "embedded"),
    Advice("a claim of a topic that was made again", planned_of_a_topic_made_again, "`txmq app release APP QUEUE --force`", forced, [b"x", b"y"], "kafka"),
    Advice("a batch of a topic that was made again", decided_of_a_topic_made_again, "`txmq app release alerts in --force`", forced, [b"x", b"y"], "kafka"),
    Advice("a lost ledger", lost_while_it_runs, "with startingOffsets where it was", begun_behind, [b"b"], "kafka"),
    Advice("a lost ledger, at a start", lost_before_it_starts, "with startingOffsets where it was", begun_behind, [b"b"], "kafka"),
]  # fmt: skip


@pytest.mark.parametrize("crash", [False, True], ids=["at once", "in a new process"])
@pytest.mark.parametrize("advice", ADVICE, ids=[advice.name for advice in ADVICE])
def test_who_does_what_the_error_says_goes_on_with_each_message_once(
    bench: Bench, advice: Advice, crash: bool
) -> None:
    if advice.engine and (advice.engine == "kafka") != isinstance(bench, KafkaBench):
        pytest.skip("the other engine does not say so")
    with pytest.raises(TxmqError) as raised:
        advice.state(bench)
    assert advice.words in str(raised.value), raised.value
    if crash:
        bench.crash()
    assert advice.way(bench) == advice.end
