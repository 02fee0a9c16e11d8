"""Rows of the crash table on Spark Connect, where the function of a batch runs in a process of the server: server, client
and that process are killed or suspended while each pipeline is at its failpoint, and another server goes on.

Not here: one kill of each kind before a change lands, in the server of ``tests/spark/test_connect.py``.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.crash.test_spark_crash import KILLED_BROKER, Supervised, made, released
from tests.spark import shapes
from tests.spark.pipelines import CHANGED, Driver, Pipeline, Served, empty_table

pytestmark = [pytest.mark.spark, pytest.mark.crash, pytest.mark.slow, pytest.mark.soak]

MESSAGES = ["a", "b", "c", "d"]
TWO_BATCHES = {"maxOffsetsPerTrigger": "2"}
CONNECT = {"connect": "true"}


@dataclass(frozen=True)
class Case:
    """A row of the crash table, and who ends at which failpoint. ``told``: a part of the error of the first run behind it."""

    row: int
    victim: str
    at: str = ""
    hit: int = 1
    told: str = ""
    special: Mapping[str, object] = field(default_factory=dict)


TWO: dict[str, object] = {"options": TWO_BATCHES}
RELEASED = "was released from app"
# app -> its case. The victims: worker: the process of the function; server: with its client and all workers; suspended:
# client and worker, while the server goes on, until another server is behind them; client: it alone
CASES = {
    "task-killed": Case(1, "task", special={"fn": "retried"}),
    "function-fails": Case(2, "function", told="the function fails after", special={"fn": "fail_batch_once"}),
    "function-killed": Case(2, "worker", "foreach.executed"),
    "reply-lost": Case(5, "reply", "server.reply.commit_batch", special={"tables": []}),
    "commit-raises": Case(9, "function", "foreach.decided", told="failpoint foreach.decided"),
    "commit-killed": Case(9, "worker", "foreach.decided"),
    "two-drivers": Case(11, "suspended", "foreach.staged", special=TWO),
    "client-killed": Case(11, "client", "foreach.staged", special=TWO),
    "zombie": Case(12, "suspended", "foreach.applying.0", special=TWO),
    "zombie-changes": Case(12, "suspended", "foreach.applied.1", special={"fn": "changes", "tables": []}),
    "lost-decided": Case(13, "server", "foreach.decided", told="[TXMQ_CHECKPOINT_MISMATCH]"),
    "lost-staged": Case(13, "server", "foreach.staged", special={"tables": []}),
    "latest": Case(
        15, "server", "foreach.opened", special={"options": {"startingOffsets": "latest"}, "tables": []}
    ),
    "broker-killed": Case(17, "broker", special=TWO),
    "released-unlogged": Case(19, "server", "connector.latest_offset.claimed", 2, RELEASED, TWO),
    "released-staged": Case(19, "server", "foreach.staged", 2, RELEASED, TWO),
    "released-decided": Case(19, "server", "foreach.decided", 2, RELEASED, TWO),
    "released-marked": Case(19, "server", "foreach.marked", 1, RELEASED, TWO),
}
LATER = ["e", "f"]  # of the stream from the latest


@dataclass
class Outcome:
    pipelines: dict[str, Pipeline]
    first: dict[str, str | None]  # app -> error of its first run after the kill
    last: dict[str, str | None]  # and of its last


def of(victim: str, scratch: Path, url: str) -> dict[str, Pipeline]:
    """The pipelines of a victim, with their messages."""
    cases = {app: case for app, case in CASES.items() if case.victim == victim}
    return made(scratch, url, {app: (case.at, case.hit, {**case.special}) for app, case in cases.items()})


def places(pipelines: Iterable[str]) -> list[tuple[str, int]]:
    return [(CASES[app].at, CASES[app].hit) for app in pipelines]


def behind_the_server(killed: dict[str, Pipeline]) -> list[Pipeline]:
    """Runs of the pipelines whose server was killed; an app that stands twice is run twice."""
    lost = [pipeline for app, pipeline in killed.items() if "lost" in app]
    for pipeline in lost:
        shutil.rmtree(pipeline.checkpoint)
    killed["latest"].send(LATER)
    return [
        *killed.values(),
        *(replace(pipeline, on_new_checkpoint="resume") for pipeline in lost),
        *released(killed),
    ]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcome]:
    scratch = tmp_path_factory.mktemp("connect-crash")
    served = Served(scratch / "broker")
    dropping = Served(scratch / "dropping", failpoints=f"{CASES['reply-lost'].at}=drop")
    mortal = Served(scratch / "mortal", failpoints="engine.read.recorded=kill")
    supervised = Supervised(mortal)
    overtaken, client = of("suspended", scratch, served.url), of("client", scratch, served.url)
    then = {
        "at": places(client),
        "how": "driver",
        "pipelines": [asdict(pipeline) for pipeline in client.values()],
    }
    suspended = Driver(
        scratch, list(overtaken.values()), at=places(overtaken), how="stop", then=then, session=CONNECT
    )
    try:
        workers, killed = of("worker", scratch, served.url), of("server", scratch, served.url)
        for pipelines, how in ((workers, "worker"), (killed, "group")):
            Driver(
                scratch, list(pipelines.values()), at=places(pipelines), how=how, session=CONNECT
            ).require_killed()
        nothing = workers["function-killed"]
        assert (nothing.published(), nothing.table("first"), nothing.entries()) == ([], [], 0)
        functions = of("function", scratch, served.url)
        raises = replace(functions["commit-raises"], before=[["arm", CASES["commit-raises"].at, "raise"]])
        suspended.wait_stopped()
        runs = [
            *workers.values(),
            *behind_the_server(killed),
            *of("task", scratch, served.url).values(),
            functions["function-fails"],
            raises,
            *functions.values(),
            *of("reply", scratch, dropping.url).values(),
            *of("broker", scratch, mortal.url).values(),
            *overtaken.values(),
            *(replace(each, before=[["wake", str(suspended.process.pid)]]) for each in client.values()),
        ]
        errors = Driver(scratch, runs, session=CONNECT).require_done_each()
        suspended.require_killed()
        assert supervised.deaths == len(KILLED_BROKER)
        told = list(zip((run.app for run in runs), errors, strict=True))
        yield Outcome({run.app: run for run in runs}, dict(reversed(told)), dict(told))
    finally:
        suspended.end()
        supervised.end()
        for each in (served, dropping, mortal):
            each.stop()


@pytest.mark.parametrize("app", CASES)
def test_on_connect_whoever_is_killed_or_suspended_at_a_row_of_the_crash_table_each_row_is_there_once(
    outcome: Outcome, app: str
) -> None:
    case, pipeline, first = CASES[app], outcome.pipelines[app], outcome.first[app]
    assert outcome.last[app] is None, outcome.last[app]
    assert case.told in str(first) if case.told else first is None, first
    if app == "latest":
        assert [body.partition(":")[0] for body in pipeline.published()] == LATER
        return
    pipeline.require_once(MESSAGES)
    if pipeline.fn == "changes":
        pipeline.require_changed(MESSAGES)
    if case.row in (5, 9):
        assert pipeline.entries() == 1


# where each pipeline is when the copy is made
COPIED = {
    "claimed": ("connector.latest_offset.claimed", 1),
    "opened": ("foreach.opened", 1),
    "staged": ("foreach.staged", 1),
    "decided": ("foreach.decided", 1),
    "second": ("foreach.opened", 2),
}


def test_row_21_on_connect_a_copy_of_the_directory_from_any_step_of_the_first_batch_loses_nothing(
    tmp_path: Path,
) -> None:
    """The checkpoints are those of a batch later; then a new one goes on, as the error says."""
    served = Served(tmp_path / "broker")
    try:
        runs = [
            Pipeline.create(app, served.url, tmp_path, MESSAGES, tables=[], options=TWO_BATCHES)
            for app in COPIED
        ]
        tables = Pipeline.create("tables", served.url, tmp_path, MESSAGES)
        runs.append(tables)
        at = [*COPIED.values(), ("foreach.staged", 1)]
        Driver(tmp_path, runs, at=at, session=CONNECT).require_killed()
        served.stop()
        shutil.copytree(tmp_path / "broker", tmp_path / "copy")
        served.start()
        errors = Driver(tmp_path, runs, session=CONNECT).require_done()
        assert set(errors.values()) == {None}, errors
        served.stop()
        shutil.rmtree(tmp_path / "broker")
        (tmp_path / "copy").rename(tmp_path / "broker")
        served.start()
        new = [
            replace(each, checkpoint=f"{each.checkpoint}-new", on_new_checkpoint="resume") for each in runs
        ]
        stops = Driver(tmp_path, [*runs, *new], session=CONNECT).require_done_each()
        for pipeline, stopped, last in zip(runs, stops, stops[len(runs) :], strict=False):
            assert stopped is not None and "onNewCheckpoint=resume" in stopped, (pipeline.app, stopped)
            if pipeline is tables:  # which has the batch that the copy has not decided, and made the table
                assert last is not None and "older copy of the broker's data was restored" in last, last
                assert sorted(row["body"] for row in pipeline.table("first")) == MESSAGES
                assert pipeline.depth() == len(MESSAGES)
                continue
            assert last is None, (pipeline.app, last)
            assert [body.partition(":")[0] for body in pipeline.published()] == MESSAGES, pipeline.app
            assert pipeline.depth() == 0
    finally:
        served.stop()


# where a random kill may find each of two batches
ANYWHERE = [
    *(("connector.latest_offset.claimed", hit) for hit in (1, 2, 3)),
    ("connector.read.rows", 1),
    *(
        (f"foreach.{step}", hit)
        for step in ("opened", "staged", "executed", "decided", "marked", "mirrored")
        for hit in (1, 2)
    ),
]
ONCE = [(step, hit) for step, hit in ANYWHERE if hit == 1]
KINDS: dict[str, dict[str, Any]] = {
    "effects": {"fn": "effects", "options": TWO_BATCHES},
    "ledger": {"fn": "effects", "options": TWO_BATCHES, "ledger": "auto"},
    "changes": {"fn": "changes", "tables": []},
    "rejects": {"fn": "rejects", "shape": "typed"},
}


def test_soak_random_kills_of_server_and_worker_leave_each_row_once(
    tmp_path: Path, rounds: int, seed: int
) -> None:
    """In each round each kind of function loses the server, or the process of its function and then the server."""
    draw = random.Random(seed)
    served = Served(tmp_path / "broker")
    # a task that is suspended as it reads holds its core
    cores = f"local[{len(KINDS) + 1},4]"
    session = {**CONNECT, "spark.python.worker.reuse": "false", "spark.master": cores}
    try:
        for number in range(rounds):
            runs = {}
            for kind, special in KINDS.items():
                messages = shapes.MESSAGES["typed"] if kind == "rejects" else MESSAGES
                runs[kind] = Pipeline.create(f"{kind}{number}", served.url, tmp_path, messages, **special)
            dead = replace(runs["rejects"], queue=f"{runs['rejects'].queue}.{shapes.OTHER}")
            dead.declare()
            empty_table(Path(runs["changes"].lake) / "changed", CHANGED)
            at = [draw.choice(ANYWHERE if kind in ("effects", "ledger") else ONCE) for kind in KINDS]
            how = draw.choice(("group", "worker"))
            Driver(tmp_path, list(runs.values()), at=at, how=how, session=session).require_killed()
            errors = Driver(tmp_path, list(runs.values()), session=session).require_done()
            for kind, pipeline in runs.items():
                what = f"{kind}, killed at {at}, {how}"
                assert errors[pipeline.app] is None, (what, errors[pipeline.app])
                pipeline.require_once(shapes.EXPECTED["typed"] if kind == "rejects" else MESSAGES)
            runs["changes"].require_changed(MESSAGES)
            assert replace(dead, out=dead.queue).published() == ["b,b", "d,d"]
    finally:
        served.stop()
