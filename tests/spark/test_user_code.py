"""What people do in foreachBatch, and where its driver dies: each message is in the table and in the queue once, and
none is left; or there is one error, and nothing is consumed.

What they do is in ``user_code.py`` (functions) and ``shapes.py`` (queries with state). The session of the test process runs
the table. ``SELDOM``, and the whole product of table and steps are ``soak``; a driver dies at the steps of ``KILLED``, before a
change lands at two of them. Executors of their own: ``test_executors.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.gates import seldom
from tests.spark import shapes, user_code
from tests.spark.classic import WAYS
from tests.spark.kafka_pipelines import KafkaPipeline
from tests.spark.pipelines import APPENDED, Driver, Pipeline, Served, delta_rows, empty_table
from tests.spark.sessions import CONNECT
from tests.spark.successor import run_each

pytestmark = [
    pytest.mark.spark, pytest.mark.crash, pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),  # ``forked``, Python 3.12
]  # fmt: skip

MESSAGES = ["a", "b", "c", "d"]
INNER = ["y", "z"]  # in the queue of a nested stream
# a Python process that reads or stages is a new one, so that it dies where it is told; a task that is suspended keeps
# its place in the session
NEW_WORKERS = {"spark.python.worker.reuse": "false", "spark.master": "local[256,4]"}

WORKS: dict[str, dict[str, str]] = {name: {"fn": name} for name in user_code.WAYS}
OF_SHAPES = {**shapes.MESSAGES, **shapes.MORE}
WORKS |= {shape: {"shape": shape} for shape in OF_SHAPES}
WORKS["typed"]["fn"] = "rejects"
WORKS |= {
    call: {"call": call}
    for call in user_code.CALLS
    if call not in user_code.REFUSED_CALLS and call != "twice"
}
if CONNECT:
    WORKS = {name: what for name, what in WORKS.items() if name not in WAYS}
    WORKS["tx_in_another_query"] = {"fn": "tx_in_another_query"}
# the queries with state are killed in tests/crash/test_spark_crash.py; here only in soak
FUNCTIONS = [name for name, what in WORKS.items() if "shape" not in what]
REFUSED = {name: ({"fn": name}, told) for name, (_, told) in user_code.REFUSED.items()}
REFUSED |= {call: ({"call": call}, told) for call, told in user_code.REFUSED_CALLS.items()}
REFUSED = {name: how for name, how in REFUSED.items() if not (CONNECT and name in WAYS)}

# step -> failpoint, and the hit of the second batch; tasks are counted in their own process
STEPS = {
    "claimed": ("connector.latest_offset.claimed", 2),
    "opened": ("foreach.opened", 2),
    "reading": ("connector.read.rows", 1),
    "written": ("files.written", 2),
    "staged": ("foreach.staged", 2),
    "executed": ("foreach.executed", 2),
    "decided": ("foreach.decided", 2),
    "copied": ("adding.copied", 2),
    "appended": ("adding.committed", 2),
    "called": ("foreach.called", 2),
    "finished": ("foreach.mirrored", 2),
    "logged": ("connector.latest_offset.asked", 3),
}
if CONNECT:  # rows are staged as rows there, and written by a plain append
    STEPS |= {
        "written": ("foreach.staged", 2),
        "copied": ("foreach.applying.0", 2),
        "appended": ("foreach.applied.0", 2),
    }
# (what, step): a join has rows in one batch alone
UNREACHED = {("join-of-two-queues", step) for step in ("copied", "appended", "called")}
KILLED = {
    "thread_pool": "written",
    "nested_stream": "decided",
    # only in ``make soak``
    "persisted": "executed",
    "counting_udf": "appended",
    "by_a_function": "finished",
    "retried": "logged",
}
# run by ``soak`` alone: another one of their kind (threads, caches, own rows, other queries, values that differ; what
# is returned; where ``tx`` goes) is left
SELDOM = {
    "threads", "coroutines", "process_pool", "several_actions", "unpersisted_between", "checkpointed", "rdd",
    "to_pandas", "collected", "other_session", "shuffled", "nested_read", "rate_stream", "swallowed", "generators",
    "side_effects", "directly", "a_generator", "tx_in_a_udf", "union", "a_future", "tx_in_a_process", "cancelled",
    "interrupted", "within_another",
}  # fmt: skip
# after these another function does everything once; the others have left everything as it was
AGAIN = {"kept_batch", "kept_tx", "task_that_always_fails", "tx_in_another_query"}
# These keep nothing between batches: one is enough, where no driver is killed. The others see a second one.
ONE_BATCH = {
    "threads", "coroutines", "process_pool", "several_actions", "checkpointed", "rdd", "to_pandas", "collected",
    "shuffled", "union", "swallowed", "generators", "side_effects", *(REFUSED.keys() - {"kept_tx", "kept_batch"}),
}  # fmt: skip
ALL_AT_ONCE = {"maxOffsetsPerTrigger": str(len(MESSAGES))}


def made(
    scratch: Path, url: str, name: str, what: Mapping[str, str], kind: type[Pipeline] = Pipeline
) -> Pipeline:
    """A pipeline with its messages, tables and the queue of a second stream; a batch has two of its messages."""
    shape = what.get("shape", "")
    messages = OF_SHAPES.get(shape, MESSAGES)
    pipeline = kind.create(
        f"{scratch.name}-{name}".replace("_", "-"),
        url,
        scratch,
        messages,
        options={"maxOffsetsPerTrigger": "2"},
        **what,
    )
    other = replace(pipeline, queue=f"{pipeline.queue}.{shapes.OTHER}")
    other.declare()
    if not shape:
        other.send(INNER)
    elif shape == "join-of-two-queues":
        other.send(reversed(messages))
    empty_table(Path(pipeline.lake) / "first", APPENDED)
    return pipeline


def require_once(pipeline: Pipeline) -> None:
    pipeline.require_once(shapes.EXPECTED.get(pipeline.shape, MESSAGES))
    inner = Path(f"{pipeline.lake}.inner")
    if inner.exists():
        assert sorted(row["body"] for row in delta_rows(inner)) == INNER


@dataclass
class Outcome:
    works: dict[str, Pipeline]
    refused: dict[str, Pipeline]
    twice: Pipeline
    errors: dict[str, list[str | None]]  # app -> of each of its runs

    def require_once(self, pipeline: Pipeline) -> None:
        error = self.errors[pipeline.app][-1]
        assert error is None, error
        require_once(pipeline)


def of_apps(pipelines: list[Pipeline], errors: list[str | None]) -> dict[str, list[str | None]]:
    """The errors of each app, in order."""
    found: dict[str, list[str | None]] = {}
    for pipeline, error in zip(pipelines, errors, strict=True):
        found.setdefault(pipeline.app, []).append(error)
    return found


@pytest.fixture(scope="module")
def outcome(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest, spark: SparkSession
) -> Iterator[Outcome]:
    soak = bool(request.config.getoption("--soak-rounds"))
    left_out = set() if soak else SELDOM
    scratch = tmp_path_factory.mktemp("user-code")
    served = Served(scratch / "broker")
    try:
        works = {
            name: made(scratch, served.url, name, WORKS[name]) for name in FUNCTIONS if name not in left_out
        }
        refused = {
            name: made(scratch, served.url, name, what)
            for name, (what, _) in REFUSED.items()
            if name not in left_out
        }
        for pipelines in (works, refused):
            for name in ONE_BATCH & pipelines.keys():
                pipelines[name].options = ALL_AT_ONCE
        names = list(KILLED) if soak else list(KILLED)[:2]
        at = [STEPS[KILLED[name]] for name in names]
        Driver(scratch, [works[name] for name in names], at=at, session=NEW_WORKERS).require_killed()
        after = [
            *refused.values(),
            *(
                replace(refused[name], fn="effects", call="directly")
                for name in sorted(AGAIN & refused.keys())
            ),
        ]
        twice = made(scratch, served.url, "twice", {"call": "twice"})
        runs = [*works.values(), *after, twice]
        yield Outcome(works, refused, twice, of_apps(runs, run_each(spark, runs)))
    finally:
        served.stop()


def killed_and_restarted(
    scratch: Path, url: str, step: str, hit: int, kind: type[Pipeline]
) -> dict[str, str]:
    """Everything that works, killed at a step: what is wrong afterwards. What does not come to the step is only run."""
    pipelines = {name: made(scratch, url, name, what, kind) for name, what in WORKS.items()}
    dying = [pipelines[name] for name in WORKS if (name, step) not in UNREACHED]
    at = [(STEPS[step][0], hit)] * len(dying)
    Driver(scratch, dying, at=at, session=NEW_WORKERS).require_killed()
    runs = list(pipelines.values())
    errors = of_apps(runs, Driver(scratch, runs).require_done_each())
    wrong = {}
    for name, pipeline in pipelines.items():
        try:
            assert errors[pipeline.app] == [None]
            require_once(pipeline)
        except Exception as error:
            wrong[f"{name}, {step}@{hit}"] = str(error)[:2000]
    return wrong


@pytest.mark.soak
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("engine", ["embedded", "kafka"])
def test_soak_whatever_people_do_and_wherever_the_driver_dies_each_row_is_there_once(
    request: pytest.FixtureRequest, tmp_path: Path, engine: str, step: str, rounds: int
) -> None:
    """Of each step the second batch first, then the first one."""
    kind: type[Pipeline] = KafkaPipeline if engine == "kafka" else Pipeline
    served = Served(tmp_path / "broker")
    try:
        url = request.getfixturevalue("kafka_url") if engine == "kafka" else served.url
        for number in range(min(rounds, STEPS[step][1])):
            scratch = tmp_path / f"{step}-{number}"
            scratch.mkdir()
            assert killed_and_restarted(scratch, url, step, STEPS[step][1] - number, kind) == {}
    finally:
        served.stop()


@pytest.mark.parametrize("name", seldom(FUNCTIONS, SELDOM.__contains__))
def test_what_people_do_in_a_batch_leaves_each_row_once(outcome: Outcome, name: str) -> None:
    """Those of ``KILLED`` after their driver was killed."""
    outcome.require_once(outcome.works[name])


@pytest.mark.parametrize("name", seldom(REFUSED, SELDOM.__contains__))
def test_what_is_refused_is_one_clear_error_and_consumes_nothing(outcome: Outcome, name: str) -> None:
    """So the same query with another function does everything once (``AGAIN``)."""
    told, pipeline = REFUSED[name][1], outcome.refused[name]
    first, *_ = outcome.errors[pipeline.app]
    assert first is not None and told in first, first
    if name in AGAIN:
        outcome.require_once(pipeline)
    else:
        assert pipeline.depth() == len(MESSAGES) and pipeline.entries() == 0
        assert pipeline.published() == pipeline.table("first") == pipeline.collected() == []


def test_a_second_call_for_a_batch_is_refused_and_not_silently_without_effect(outcome: Outcome) -> None:
    """The first one has decided."""
    (error,) = outcome.errors[outcome.twice.app]
    assert error is not None and "was called twice for batch 0" in error
    assert [text.split(":")[0] for text in outcome.twice.published()] == ["a"]
