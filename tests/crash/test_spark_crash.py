"""The rows of the crash table that are Spark's, on txmq and some on Kafka too: real drivers, brokers and tables.

A driver costs seconds to start. So one driver runs the pipelines of many rows, one after the other, each until
its thread reaches the failpoint of its row and stays there; then the driver is killed. The process of the test
restarts all of them; the tests look at what is left. Row numbers are those of the crash table in
docs/commit_rules.md.

``make test`` kills at one or two steps of each row; the pipelines of ``SELDOM`` are killed in ``make soak``.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from broker_core.core.errors import PreconditionFailed
from broker_core.engines import connect
from tests.crash import test_volume_of_tables as on_volume
from tests.crash.test_resume_crash import identities, lose_directory, require_rows_once, runs_behind
from tests.failing_volume import FailingVolume, failing_volume
from tests.gates import seldom
from tests.spark import shapes
from tests.spark.kafka_pipelines import KafkaPipeline
from tests.spark.pipelines import APPENDED, CHANGED, Driver, Pipeline, Served, empty_table
from tests.spark.successor import run_each
from tests.spark.targets import Api, postgres

pytestmark = [pytest.mark.spark, pytest.mark.crash, pytest.mark.slow, pytest.mark.xdist_group("spark-crash")]

TWO_BATCHES = {"maxOffsetsPerTrigger": "2"}
MESSAGES = ["a", "b", "c", "d"]
TWO_TABLES = ["first", "second"]

CHANGES: dict[str, object] = {"fn": "changes", "tables": []}

Killed = dict[str, tuple[str, int, dict[str, object]]]

# app -> failpoint, its hit, what is special about the pipeline
KILLED: Killed = {
    "staged": ("foreach.staged", 1, {"options": TWO_BATCHES}),
    "decided": ("foreach.decided", 2, {"options": TWO_BATCHES}),
    "applied-some": ("foreach.applied.0", 1, {"tables": TWO_TABLES}),
    "called": ("foreach.called", 1, {}),
    "called-recipes": ("foreach.called", 1, {"fn": "recipes", "tables": []}),  # at its last function
    # their tables are there before them, so they append files
    "files-written": ("files.written", 1, {}),
    "files-staged": ("foreach.files_staged", 2, {"tables": TWO_TABLES}),
    "files-decided": ("adding.checked", 1, {}),
    "files-copied": ("adding.copied", 1, {}),
    "files-committed": ("adding.committed", 2, {"tables": TWO_TABLES}),
    "files-complete": ("adding.complete", 1, {}),
    "files-cleared": ("adding.cleared", 1, {}),
    "changes": ("foreach.applied.1", 1, CHANGES),
    "unmirrored": ("foreach.marked", 1, {"ledger_sync": True, "tables": []}),
    "mirrored-untold": ("ledger.appended", 1, {"ledger_sync": True, "tables": []}),
    "state": ("foreach.mirrored", 1, {"fn": "counts"}),
    "rate": ("foreach.decided", 1, {"source": "rate", "batches": 2}),
    "lost-decided": ("foreach.decided", 1, {}),
    "lost-staged": ("foreach.staged", 1, {"tables": []}),
    "released-decided": ("foreach.decided", 2, {"options": TWO_BATCHES}),
    "released-staged": ("foreach.staged", 2, {"options": TWO_BATCHES}),
    "released-marked": ("foreach.marked", 1, {"options": TWO_BATCHES}),
    "latest": ("foreach.opened", 1, {"options": {"startingOffsets": "latest"}, "tables": []}),
    # in the process of the source
    "unacked": ("connector.latest_offset.asked", 2, {"options": TWO_BATCHES, "tables": []}),
    "unlogged": ("connector.latest_offset.claimed", 1, {"options": TWO_BATCHES, "tables": []}),
    "released-unlogged": ("connector.latest_offset.claimed", 2, {"options": TWO_BATCHES, "tables": []}),
}
# queries with state, killed when the state of their second batch is written and Spark does not know it yet; what they
# publish says whether it was kept
KILLED |= {
    shape: ("foreach.decided", 2, {"shape": shape, "options": TWO_BATCHES, "tables": []})
    for shape in shapes.MESSAGES
}
KILLED["typed"][2]["fn"] = "rejects"
# only the Python driver is killed, and its JVM lives on; one pipeline, because its driver is woken only once
KILLED_IN_DRIVER: Killed = {"decided-driver": ("foreach.decided", 1, {"options": TWO_BATCHES})}
STOPPED: Killed = {
    "two-drivers": ("foreach.staged", 1, {"options": TWO_BATCHES}),
    "zombie": ("foreach.applying.0", 1, {"options": TWO_BATCHES}),
    "files-two-drivers": ("foreach.files_staged", 1, {}),
    "files-zombie": ("adding.copied", 1, {}),
    "changes-zombie": ("changing.started", 1, CHANGES),
    "zombie-recipes": ("foreach.applied.0", 1, {"fn": "recipes"}),
    "two-clusters": ("foreach.decided", 1, {"options": TWO_BATCHES}),
}
ON_VOLUME = "table-by-files", "checkpoint"  # row 7, with one of them on a volume that turns read-only
OF_THEIR_OWN = {"zombie-recipes", "changes-zombie", "two-clusters"}  # tests of what is stopped
# row 20, on a broker whose directory is lost: the ledger has the second batch, or the engine alone
EMPTIED: Killed = {
    "directory-mirrored": ("ledger.appended", 2, {"ledger_sync": True, "options": TWO_BATCHES}),
    "directory-unmirrored": ("foreach.marked", 2, {"ledger_sync": True, "options": TWO_BATCHES}),
}


ON_KAFKA: Killed = {
    "kafka-decided": ("foreach.decided", 2, {"options": TWO_BATCHES}),
    "kafka-state": ("foreach.mirrored", 1, {"fn": "counts"}),
    "kafka-lost-decided": ("foreach.decided", 1, {}),
    "kafka-files-copied": ("adding.copied", 1, {}),
    "kafka-changes": ("changing.committed", 3, CHANGES),
    "kafka-released-decided": ("foreach.decided", 2, {"options": TWO_BATCHES}),
    "kafka-released-staged": ("foreach.staged", 2, {"options": TWO_BATCHES}),
    "kafka-unlogged": ("connector.latest_offset.claimed", 1, {"options": TWO_BATCHES, "tables": []}),
}
STOPPED_ON_KAFKA: Killed = {"kafka-zombie": ("foreach.staged", 1, {"options": TWO_BATCHES})}

# only in ``make soak``: a neighbour of the same row stays
SELDOM = {
    "files-staged", "files-decided", "files-complete", "files-cleared", "unmirrored", "released-staged",
    "released-marked", "zombie", "files-two-drivers", "self-union", "self-join", "deduplicated",
    "processor-in-pandas", "kafka-state", "kafka-files-copied", "kafka-released-decided", "kafka-released-staged",
    "kafka-batch-fails", "kafka-nothing", "called", "files-zombie", "released-unlogged", "kafka-unlogged",
    "files-committed",
}  # fmt: skip


def of(apps: Iterable[str], prefix: str = "") -> list[Any]:
    """As parameters of a test."""
    return seldom(apps, lambda app: prefix + app in SELDOM)


@dataclass
class Outcome:
    pipelines: dict[str, Pipeline]
    first: dict[str, str | None]  # app -> error of its first run after the kill
    last: dict[str, str | None]  # and of its last
    woken: dict[str, str | None]  # of the driver that was stopped, when it went on after them
    before: dict[str, str]  # the engines whose directory was lost
    on_volume: dict[str, on_volume.Outcome]  # none where a volume cannot be mounted


@dataclass
class Targets:
    """What the recipes of docs/after_commit.md write to. ``database``: None without PostgreSQL."""

    api: Api
    database: str | None

    def addresses(self) -> dict[str, str]:
        return ({"to_postgres": self.database} if self.database else {}) | {"to_http": self.api.url}


def made(scratch: Path, url: str, apps: Killed, kind: type[Pipeline] = Pipeline) -> dict[str, Pipeline]:
    pipelines = {
        app: kind.create(
            app,
            url,
            scratch,
            shapes.MESSAGES.get(str(special.get("shape")), MESSAGES),
            ledger=str(scratch / f"{app}.ledger") if "mirrored" in app else None,
            **special,  # type: ignore[arg-type]
        )
        for app, (_, _, special) in apps.items()
    }
    for pipeline in pipelines.values():
        if pipeline.shape:
            other = replace(pipeline, queue=f"{pipeline.queue}.{shapes.OTHER}")
            other.declare()
            # half of it is there when the other half of the join is already in the state
            other.send(reversed(MESSAGES) if pipeline.shape == "join-of-two-queues" else [])
    for app, pipeline in pipelines.items():
        for table in pipeline.tables if "files" in app else ():
            empty_table(Path(pipeline.lake) / table, APPENDED)
        if pipeline.fn == "changes":
            empty_table(Path(pipeline.lake) / "changed", CHANGED)
    return pipelines


def dying(
    scratch: Path, pipelines: dict[str, Pipeline], apps: Killed, how: str, then: dict[str, Any] | None = None
) -> Driver:
    """The one driver that dies while each of the pipelines is at its failpoint."""
    at = [apps[app][:2] for app in pipelines]
    return Driver(scratch, list(pipelines.values()), at=at, how=how, then=then)


def _restarts(
    scratch: Path,
    killed: dict[str, Pipeline],
    later: list[Pipeline],
    served: Served,
    dropping: Served,
    mortal: Served,
    kafka_url: str | None,
    left_out: set[str],
) -> list[Pipeline]:
    """Every run of the driver that recovers, in order; an app that stands twice is run twice. ``later``: at last."""
    lost = [app for app in killed if "lost" in app]
    for app in lost:
        shutil.rmtree(killed[app].checkpoint)
    killed["unlogged"] = replace(killed["unlogged"], options={"maxOffsetsPerTrigger": "3"})
    killed["latest"].send(["e", "f"])
    for app in killed:
        if app.endswith("state"):
            killed[app].send(["a", "z"])
    first = killed["two-clusters"]
    others = {"checkpoint": f"{first.checkpoint}.other"}, {"checkpoint": f"{first.checkpoint}.resumed"}
    runs = [pipeline for pipeline in killed.values() if pipeline is not first]
    runs += [replace(first, **others[0]), replace(first, **others[1], on_new_checkpoint="resume")]
    runs += [replace(killed[app], on_new_checkpoint="resume") for app in lost]
    runs += released(killed)

    def added(app: str, url: str, kind: type[Pipeline] = Pipeline, **special: object) -> Pipeline:
        return kind.create(app, url, scratch, MESSAGES, **special)  # type: ignore[arg-type]

    for before, url, kind in (("", served.url, Pipeline), ("kafka-", kafka_url, KafkaPipeline)):
        if url is not None:
            runs.append(added(f"{before}task-fails", url, kind, fn="fail_once"))
            if f"{before}batch-fails" not in left_out:
                runs += [added(f"{before}batch-fails", url, kind, fn="fail_batch_once")] * 2
            if f"{before}nothing" not in left_out:
                runs.append(added(f"{before}nothing", url, kind, fn="nothing"))
    runs.append(added("reply-lost", dropping.url, tables=[]))
    raised = added("commit-raises", served.url)
    runs += [replace(raised, before=[["arm", "foreach.decided", "raise"]]), raised]
    runs.append(added("two-actions", served.url, fn="two_actions", persist=True, tables=[]))
    restored = added("restored", served.url, tables=[])
    copy = f"{restored.checkpoint}.older"
    runs.append(restored)
    runs.append(replace(restored, before=[["copy", restored.checkpoint, copy], ["send", "e"]]))
    runs.append(replace(restored, before=[["copy", copy, restored.checkpoint], ["send", "f"]]))
    runs.append(added("broker-dies", mortal.url, options=TWO_BATCHES))
    return runs + later


def released(killed: dict[str, Pipeline]) -> list[Pipeline]:
    """An operator releases the queues of apps that were killed. They are run with their checkpoints and resume, after
    the run of before without it, and those that this stops with new checkpoints.
    """
    apps = [app for app in killed if "released" in app]
    runs = []
    for app in apps:
        pipeline = killed[app]
        with contextlib.closing(connect(pipeline.url)) as engine:
            if "marked" not in app:
                with pytest.raises(PreconditionFailed, match="--force"):
                    engine.release(app, pipeline.queue)
            engine.release(app, pipeline.queue, force="marked" not in app, by="ann")
        runs.append(replace(pipeline, on_new_checkpoint="resume"))
        if "unlogged" not in app:
            runs.append(replace(runs[-1], checkpoint=f"{pipeline.checkpoint}.new"))
    return runs


class Supervised:
    """Starts a broker again each time it has died, with the next failpoints, until there are none left."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._failpoints = [
            "engine.stage.durable@2=kill",
            "engine.commit.received=kill",
            "engine.commit.decided=kill",
        ]
        self.deaths = 0
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while not self._ending.wait(0.05):
            if not self._served.alive:
                self.deaths += 1
                self._served.start(self._failpoints.pop(0) if self._failpoints else "")

    def end(self) -> None:
        self._ending.set()
        self._thread.join()


@pytest.fixture(scope="module")
def targets() -> Iterator[Targets]:
    with contextlib.ExitStack() as stack:
        api = stack.enter_context(Api())
        try:
            yield Targets(api, stack.enter_context(postgres()))
        except pytest.skip.Exception:
            yield Targets(api, None)


@pytest.fixture(scope="module")
def volume(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FailingVolume | None]:
    with contextlib.ExitStack() as stack:
        try:
            yield stack.enter_context(failing_volume(tmp_path_factory.mktemp("volume")))
        except pytest.skip.Exception:
            yield None


@pytest.fixture(scope="module")
def outcome(
    request: pytest.FixtureRequest,
    spark: SparkSession,
    tmp_path_factory: pytest.TempPathFactory,
    kafka: str | None,
    targets: Targets,
    volume: FailingVolume | None,
) -> Iterator[Outcome]:
    left_out = set() if request.config.getoption("--soak-rounds") else SELDOM

    def chosen(apps: Killed) -> Killed:
        return {app: how for app, how in apps.items() if app not in left_out}

    scratch = tmp_path_factory.mktemp("crash")
    served = Served(scratch / "broker")
    dropping = Served(scratch / "dropping", failpoints="server.reply.commit_batch=drop")
    mortal = Served(scratch / "mortal", failpoints="engine.read.recorded=kill")
    supervised = Supervised(mortal)
    apps, stopped_apps = chosen(KILLED), chosen(STOPPED)
    killed, overtaken = made(scratch, served.url, apps), made(scratch, served.url, stopped_apps)
    apps["called-recipes"] = ("foreach.called", len(targets.addresses()), {})
    for pipeline in (killed["called-recipes"], overtaken["zombie-recipes"]):
        pipeline.targets = targets.addresses()
    if kafka is not None:
        apps, stopped_apps = apps | ON_KAFKA, stopped_apps | STOPPED_ON_KAFKA
        killed |= made(scratch, kafka, chosen(ON_KAFKA), KafkaPipeline)
        overtaken |= made(scratch, kafka, STOPPED_ON_KAFKA, KafkaPipeline)
    in_driver = made(scratch, served.url, KILLED_IN_DRIVER)
    emptied = Served(scratch / "emptied")
    of_row_20 = made(scratch, emptied.url, EMPTIED)
    # the driver that is stopped goes on when others have taken over, until it is killed itself
    at = [KILLED_IN_DRIVER[app][:2] for app in in_driver]
    then = {"at": at, "how": "driver", "pipelines": [asdict(pipeline) for pipeline in in_driver.values()]}
    failing = on_volume.made_on(volume, scratch, served.url, ON_VOLUME) if volume is not None else {}
    stopped_apps |= {app: (*on_volume.DECIDED, {}) for app in failing}
    stopped = dying(scratch, overtaken | failing, stopped_apps, "stop", then)
    try:
        dying(scratch, killed | of_row_20, apps | EMPTIED, "group").require_killed()
        stopped.wait_stopped()
        for pipeline in failing.values():
            on_volume.make_durable(Path(pipeline.checkpoint))
        if volume is not None:
            volume.turn_read_only()
        before = identities(of_row_20)
        lose_directory(emptied, scratch / "emptied", of_row_20)
        later = [
            replace(pipeline, before=[["wake", str(stopped.process.pid)]]) for pipeline in in_driver.values()
        ]
        runs = runs_behind(of_row_20, before)
        runs += _restarts(scratch, killed | overtaken, later, served, dropping, mortal, kafka, left_out)
        errors = run_each(spark, runs)
        stopped.require_killed()
        first = {run.app: error for run, error in reversed(list(zip(runs, errors, strict=True)))}
        last = {run.app: error for run, error in zip(runs, errors, strict=True)}
        assert supervised.deaths == len(KILLED_BROKER)
        woken, decided = stopped.errors(), {app: pipeline.entries() for app, pipeline in failing.items()}
        if volume is not None:
            volume.repair()
        repaired = dict(zip(failing, run_each(spark, failing.values()), strict=True))
        of_volume = {
            app: on_volume.Outcome(pipeline, decided[app], woken[app], repaired[app])
            for app, pipeline in failing.items()
        }
        yield Outcome({run.app: run for run in runs}, first, last, woken, before, of_volume)
    finally:
        stopped.end()
        supervised.end()
        for each in (served, dropping, mortal, emptied):
            each.stop()


@pytest.fixture
def on_kafka(outcome: Outcome, kafka: str | None) -> Outcome:
    if kafka is None:
        pytest.skip("a real Kafka needs its jars from Maven")
    return outcome


KILLED_BROKER = ["in a read", "in staging", "before the commit", "after the commit, before the answer"]


def require_once(outcome: Outcome, app: str, messages: list[str] = MESSAGES) -> Pipeline:
    assert outcome.last[app] is None, outcome.last[app]
    outcome.pipelines[app].require_once(messages)
    return outcome.pipelines[app]


def test_row_1_a_task_that_fails_after_its_rows_and_is_retried_publishes_once(outcome: Outcome) -> None:
    assert outcome.last["task-fails"] is None
    pipeline = outcome.pipelines["task-fails"]
    assert pipeline.published() == [f"{message}:x" for message in MESSAGES]
    assert Path(f"{pipeline.lake}.failed").exists()


def test_row_2_a_batch_whose_function_fails_leaves_nothing_and_its_replay_everything_once(
    outcome: Outcome,
) -> None:
    assert "the function fails after it has staged everything" in str(outcome.first["batch-fails"])
    require_once(outcome, "batch-fails")


def test_row_3_a_driver_killed_after_staging_and_before_the_commit_publishes_and_appends_once(
    outcome: Outcome,
) -> None:
    require_once(outcome, "staged")


def test_row_5_a_lost_reply_to_the_commit_is_asked_for_again_and_everything_is_there_once(
    outcome: Outcome,
) -> None:
    assert require_once(outcome, "reply-lost").entries() == 1


def test_row_6_a_driver_killed_before_sparks_commit_log_replays_the_batch_and_keeps_its_state(
    outcome: Outcome,
) -> None:
    assert outcome.last["state"] is None, outcome.last["state"]
    pipeline = outcome.pipelines["state"]
    by_sequence = sorted((row["sequence"], row["body"], row["count"]) for row in pipeline.table("counts"))
    assert by_sequence == [*((1, body, 1) for body in MESSAGES), (2, "a", 2), (2, "z", 1)]


def test_row_7_decided_and_no_append_made_the_first_attempts_rows_are_applied(outcome: Outcome) -> None:
    require_once(outcome, "decided")


def test_row_7_some_appends_made_the_others_follow_with_the_first_attempts_rows(outcome: Outcome) -> None:
    require_once(outcome, "applied-some")


@pytest.mark.parametrize("shape", of(shapes.MESSAGES))
def test_row_6_a_query_that_joins_or_aggregates_goes_on_with_its_state_exactly_once(
    outcome: Outcome, shape: str
) -> None:
    require_once(outcome, shape, shapes.EXPECTED[shape])


def test_row_6_a_broken_message_of_a_batch_that_is_replayed_is_one_dead_letter(outcome: Outcome) -> None:
    pipeline = outcome.pipelines["typed"]
    dead = replace(pipeline, out=f"{pipeline.queue}.{shapes.OTHER}")
    assert dead.published() == ["b,b", "d,d"]


@pytest.mark.parametrize("app", of(["files-written", "files-staged"]))
def test_row_3_files_that_no_decision_names_are_deleted_and_the_replay_appends_once(
    outcome: Outcome, app: str
) -> None:
    require_once(outcome, app)


@pytest.mark.parametrize(
    "app", of(["files-decided", "files-copied", "files-committed", "files-complete", "files-cleared"])
)
def test_row_7_files_of_a_decided_batch_are_added_once_wherever_the_driver_is_killed(
    outcome: Outcome, app: str
) -> None:
    require_once(outcome, app)


def test_row_7_operations_on_a_table_are_done_once_and_in_order_wherever_the_driver_is_killed(
    outcome: Outcome,
) -> None:
    require_once(outcome, "changes").require_changed(MESSAGES)


def test_row_12_a_merge_of_a_driver_that_wakes_up_after_its_successor_is_done_once(outcome: Outcome) -> None:
    require_once(outcome, "changes-zombie").require_changed(MESSAGES)


@pytest.mark.soak  # the recipes below are called in the same row
def test_row_7_functions_called_and_not_marked_are_called_again_with_the_same_rows(outcome: Outcome) -> None:
    pipeline = require_once(outcome, "called")
    assert pipeline.collected() == [(1, MESSAGES), (1, MESSAGES)]


def ordered(targets: Targets, app: str) -> list[str]:
    """What an app has written to PostgreSQL."""
    if targets.database is None:
        pytest.skip("PostgreSQL is not installed")
    import psycopg

    with psycopg.connect(targets.database) as connection:
        found = connection.execute("SELECT body FROM orders WHERE body LIKE %s ORDER BY body", [f"{app}:%"])
        return [body.partition(":")[2] for (body,) in found]


def charged(targets: Targets, app: str) -> list[str]:
    """What the API has done for an app."""
    orders = [str(charge["order"]).partition(":") for charge in targets.api.charges]
    return sorted(body for name, _, body in orders if name == app)


def test_row_7_a_function_called_and_not_marked_has_its_effect_in_postgresql_once(
    outcome: Outcome, targets: Targets
) -> None:
    assert outcome.last["called-recipes"] is None, outcome.last["called-recipes"]
    assert ordered(targets, "called-recipes") == MESSAGES


def test_row_7_a_function_called_and_not_marked_has_its_effect_at_an_http_api_once(
    outcome: Outcome, targets: Targets
) -> None:
    assert outcome.last["called-recipes"] is None, outcome.last["called-recipes"]
    assert charged(targets, "called-recipes") == MESSAGES
    requests = [request for request in targets.api.requests if b"called-recipes:" in request[1]]
    assert len(requests) == 2 * len(MESSAGES) and len(set(requests)) == len(MESSAGES), (
        "a repeated call has the keys and the rows of the first one"
    )


def test_row_12_a_function_that_a_driver_calls_after_its_successor_has_no_second_effect(
    outcome: Outcome, targets: Targets
) -> None:
    assert outcome.last["zombie-recipes"] is None, outcome.last["zombie-recipes"]
    assert charged(targets, "zombie-recipes") == MESSAGES
    assert ordered(targets, "zombie-recipes") == MESSAGES


def test_row_7_only_the_python_driver_is_killed_and_its_jvm_lives_on(outcome: Outcome) -> None:
    require_once(outcome, "decided-driver")


def test_row_7_a_source_that_is_not_txmq_is_exactly_once_too(outcome: Outcome) -> None:
    assert outcome.last["rate"] is None, outcome.last["rate"]
    pipeline = outcome.pipelines["rate"]
    pipeline.require_once([str(number) for number in range(2 * pipeline.entries())])
    assert pipeline.entries() >= 2


@pytest.mark.parametrize("app", of(["unmirrored", "mirrored-untold"]))
def test_row_8_a_missing_ledger_row_is_repaired_at_the_next_start_and_never_doubled(
    outcome: Outcome, app: str
) -> None:
    pipeline = require_once(outcome, app)
    (row,) = pipeline.ledger_rows()
    assert (row["app_id"], row["batch_id"], row["log"], row["start_offset"], row["end_offset"]) == (
        app,
        0,
        pipeline.queue,
        0,
        4,
    )
    assert (row["messages"], row["published"]) == (4, 4)


def test_row_9_an_error_after_the_decision_rolls_nothing_back(outcome: Outcome) -> None:
    assert "failpoint foreach.decided" in str(outcome.first["commit-raises"])
    assert require_once(outcome, "commit-raises").entries() == 1


def test_row_10_a_driver_killed_before_the_sources_ack_loses_nothing_and_reads_nothing_again(
    outcome: Outcome,
) -> None:
    pipeline = require_once(outcome, "unacked")
    assert [len(bodies) for _, bodies in pipeline.collected()] == [2, 2]


def test_row_14_a_driver_killed_before_sparks_offset_log_gets_the_same_range_again_under_another_limit(
    outcome: Outcome,
) -> None:
    pipeline = require_once(outcome, "unlogged")
    assert [len(bodies) for _, bodies in pipeline.collected()] == [2, 2], (
        "the claim was made under a limit of 2"
    )


@pytest.mark.parametrize("app", of([app for app in STOPPED if app not in OF_THEIR_OWN]))
def test_rows_11_and_12_a_second_driver_takes_over_and_the_first_wakes_up_later_everything_is_there_once(
    outcome: Outcome, app: str
) -> None:
    require_once(outcome, app)


def test_of_two_clusters_with_one_app_the_one_that_resumes_goes_on_and_everything_is_there_once(
    outcome: Outcome,
) -> None:
    """Each has a checkpoint of its own; the first one is told that another one has gone on."""
    refused = str(outcome.first["two-clusters"])
    assert "[TXMQ_CHECKPOINT_MISMATCH]" in refused and "onNewCheckpoint=resume" in refused
    assert "[TXMQ_CHECKPOINT_MISMATCH]" in str(outcome.woken["two-clusters"])
    assert require_once(outcome, "two-clusters").entries() == 2, "who is refused has decided nothing"


def test_row_20_an_app_whose_directory_was_lost_goes_on_behind_its_ledger_each_row_once(
    outcome: Outcome,
) -> None:
    app = "directory-mirrored"
    assert "TXMQ_CHECKPOINT_MISMATCH" in str(outcome.first[app]), "the old checkpoint alone does not go on"
    assert outcome.last[app] is None, outcome.last[app]
    require_rows_once(outcome.pipelines[app], outcome.before[app])
    assert outcome.pipelines[app].depth() == 0


def test_row_20_a_batch_that_its_table_has_and_the_ledger_not_is_an_error_and_nothing_comes_twice(
    outcome: Outcome,
) -> None:
    app = "directory-unmirrored"
    assert "the ledger ends with batch 1: its rows would come twice" in str(outcome.last[app])
    assert sorted(row["body"] for row in outcome.pipelines[app].table("first")) == MESSAGES


@pytest.mark.parametrize("app", ON_VOLUME)
def test_row_7_a_decided_batch_is_appended_once_after_its_volume_was_read_only(
    outcome: Outcome, app: str
) -> None:
    if not outcome.on_volume:
        pytest.skip("no volume that fails can be mounted here")
    on_volume.require_appended_once(app, outcome.on_volume[app])


def test_row_13_a_lost_checkpoint_stops_loudly_and_resumes_without_loss_or_duplicates(
    outcome: Outcome,
) -> None:
    assert "[TXMQ_CHECKPOINT_MISMATCH]" in str(outcome.first["lost-decided"])
    require_once(outcome, "lost-decided")


def test_row_13_a_checkpoint_lost_before_anything_was_decided_is_replaced_and_everything_is_there_once(
    outcome: Outcome,
) -> None:
    assert outcome.first["lost-staged"] is None
    require_once(outcome, "lost-staged")


RELEASED = ["decided", "staged", "marked", "unlogged"]


@pytest.mark.parametrize("step", of(RELEASED, "released-"))
def test_row_19_a_released_queue_stops_the_old_checkpoint_by_name_and_everything_is_there_once(
    outcome: Outcome, step: str
) -> None:
    assert "was released from app" in str(outcome.first[f"released-{step}"])
    require_once(outcome, f"released-{step}")


def test_row_15_a_driver_killed_in_batch_0_of_a_stream_from_latest_loses_nothing_that_came_later(
    outcome: Outcome,
) -> None:
    assert outcome.last["latest"] is None, outcome.last["latest"]
    assert [text.split(":")[0] for text in outcome.pipelines["latest"].published()] == ["e", "f"]


def test_row_16_a_checkpoint_one_batch_older_restored_is_answered_already_for_that_batch_and_goes_on(
    outcome: Outcome,
) -> None:
    require_once(outcome, "restored", [*MESSAGES, "e", "f"])
    assert [bodies for _, bodies in outcome.pipelines["restored"].collected()] == [MESSAGES, ["e"], ["f"]]


def test_row_17_a_broker_killed_in_reads_in_staging_and_around_the_commit_stops_no_query(
    outcome: Outcome,
) -> None:
    assert outcome.first["broker-dies"] is None
    require_once(outcome, "broker-dies")


def test_two_actions_on_the_batch_in_the_function_see_the_same_rows(outcome: Outcome) -> None:
    require_once(outcome, "two-actions")


def test_a_function_that_never_executes_the_batch_consumes_it_all_the_same(outcome: Outcome) -> None:
    assert outcome.last["nothing"] is None
    assert outcome.pipelines["nothing"].depth() == 0
    assert outcome.pipelines["nothing"].entries() == 1


# -- on Kafka ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "app",
    of(["decided", "files-copied", "unlogged", "zombie", "released-decided", "released-staged"], "kafka-"),
)
def test_on_kafka_a_driver_killed_or_overtaken_leaves_everything_exactly_once(
    on_kafka: Outcome, app: str
) -> None:
    require_once(on_kafka, f"kafka-{app}")


def test_on_kafka_operations_on_a_table_are_done_once_and_in_order(on_kafka: Outcome) -> None:
    require_once(on_kafka, "kafka-changes").require_changed(MESSAGES)


def test_on_kafka_a_task_that_fails_after_its_rows_and_is_retried_publishes_once(on_kafka: Outcome) -> None:
    assert on_kafka.last["kafka-task-fails"] is None
    pipeline = on_kafka.pipelines["kafka-task-fails"]
    assert pipeline.published() == [f"{message}:x" for message in MESSAGES]
    assert Path(f"{pipeline.lake}.failed").exists()


@pytest.mark.soak
def test_on_kafka_a_batch_whose_function_fails_leaves_nothing_and_its_replay_everything_once(
    on_kafka: Outcome,
) -> None:
    assert "the function fails after it has staged everything" in str(on_kafka.first["kafka-batch-fails"])
    require_once(on_kafka, "kafka-batch-fails")


def test_on_kafka_a_lost_checkpoint_stops_loudly_and_resumes_without_loss_or_duplicates(
    on_kafka: Outcome,
) -> None:
    assert "[TXMQ_CHECKPOINT_MISMATCH]" in str(on_kafka.first["kafka-lost-decided"])
    require_once(on_kafka, "kafka-lost-decided")


@pytest.mark.soak
def test_on_kafka_state_of_a_replayed_batch_is_kept(on_kafka: Outcome) -> None:
    assert on_kafka.last["kafka-state"] is None, on_kafka.last["kafka-state"]
    rows = sorted(
        (row["sequence"], row["body"], row["count"])
        for row in on_kafka.pipelines["kafka-state"].table("counts")
    )
    assert sum(1 for _, body, _ in rows if body == "z") == 1
    assert {body: max(count for _, name, count in rows if name == body) for _, body, _ in rows} == {
        **dict.fromkeys("bcd", 1),
        "a": 2,
        "z": 1,
    }


@pytest.mark.soak
def test_on_kafka_a_function_that_never_executes_the_batch_consumes_it_all_the_same(
    on_kafka: Outcome,
) -> None:
    assert on_kafka.last["kafka-nothing"] is None
    assert on_kafka.pipelines["kafka-nothing"].depth() == 0
    assert on_kafka.pipelines["kafka-nothing"].entries() == 1
