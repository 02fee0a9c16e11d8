"""The same function on Spark Connect: a local Connect server, and a client that has no JVM.

A server costs as much as everything that is done with it, so one runs the pipelines of all tests. Each rule is here once
before a change lands; ``SELDOM``, and each test of this folder over a server, are ``soak``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from bench.certificates import Authority
from broker_core.core import password as passwords
from broker_core.launcher import Broker
from broker_core.server.listener_options import ListenerOptions
from broker_core.server.tls import TlsOptions
from tests.gates import seldom
from tests.spark import shapes
from tests.spark.pipelines import CHANGED, Driver, Pipeline, Served, delta_rows, empty_table
from tests.spark.test_other_sources import NOT_TOLD, two_batches_behind
from tests.spark.test_user_code import INNER, made, require_once

pytestmark = [pytest.mark.spark, pytest.mark.slow]

MESSAGES = ["a", "b", "c", "d"]
# all that separates names somewhere: in tags of Spark, in ids of commits, in urls and paths
ODD_APP = "ä, b=1 %2F/c@d #e~1 '\"`\\ é漢😀"
TWO_BATCHES = {"maxOffsetsPerTrigger": "2"}


@contextmanager
def encrypted(scratch: Path) -> Iterator[tuple[Pipeline, Broker]]:
    """A pipeline whose user has few permissions, over TLS and with the password in a file."""
    authority = Authority(scratch)
    pair = authority.sign()
    secret = scratch / "secret"
    secret.write_text("of the pipeline\n")
    settings = {"user": "ann", "passwordFile": str(secret), "tlsCa": authority.ca}
    with Broker.open(
        scratch / "encrypted", listeners=ListenerOptions(TlsOptions(pair.cert, pair.key))
    ) as broker:
        url = f"txmqs://localhost:{broker.port}"
        lake, checkpoint = str(scratch / "tls"), str(scratch / "tls.checkpoint")
        made = Pipeline("tls", url, lake, checkpoint, queue="tls.in", out="tls.out", settings=settings)
        with broker.channel() as channel:
            channel.queue_declare(made.queue)
            channel.queue_declare(made.out)
            channel.tx_select()
            for message in MESSAGES:
                channel.publish(message.encode(), routing_key=made.queue)
            channel.tx_commit()
        broker.accounts.add_user("ann", passwords.hashed("of the pipeline", passwords.Cost(4)))
        broker.accounts.set_permissions("ann", "^$", "^amq\\.default$", "^tls\\.in$")
        yield made, broker


# how a pipeline is called or what its function does, and a part of the error
REFUSED = {
    "two_apps": ({"call": "two_apps"}, "give both the same"),
    "within_its_own": ({"call": "within_its_own"}, "was called by its own function"),
    "within_another": ({"call": "within_another"}, "by that of another app"),
    "kept_batch": ({"fn": "kept_batch"}, "of another batch"),
    "caught_in_a_thread": ({"fn": "caught_in_a_thread"}, "body"),
    "evolves_to_an_interval": ({"fn": "evolves_to_an_interval"}, "unsupported data types: [lasts"),
    "rows_of_nobody": ({"call": "rows_of_nobody"}, "with no rows of its batch"),
    "computed_and_checkpointed": (
        {"call": "computed_and_checkpointed"},
        "made of it without localCheckpoint",
    ),
}
WORKS = {
    "in_a_thread": {"call": "in_a_thread"},  # a classic session does not know its batch there
    "by_a_function": {"call": "by_a_function"},
    "joined_before": {"call": "joined_before"},
    "thread_pool": {"fn": "thread_pool"},
    "persisted": {"fn": "persisted"},
    "cached": {},
}
# another one that is called or refused in the same way is left
SELDOM = {"by_a_function", "joined_before", "persisted", "within_another", "rows_of_nobody"}
# the same query with another function, behind what was refused in its batch, and behind what was refused of its call
AGAIN = {"kept_batch", "two_apps", "computed_and_checkpointed"}


# app -> where its server, client and function are killed
KILLED: dict[str, tuple[str, int, dict[str, object]]] = {
    "staged": ("foreach.staged", 1, {"options": TWO_BATCHES}),
    "decided": ("foreach.decided", 2, {"options": TWO_BATCHES}),
    "applied-some": ("foreach.applied.0", 1, {"tables": ["first", "second"]}),
    "marked": ("foreach.marked", 1, {}),
    "mirrored": ("foreach.mirrored", 1, {"options": TWO_BATCHES}),
    "changed": ("foreach.applied.1", 1, {"fn": "changes", "tables": []}),
    "unlogged": ("connector.latest_offset.claimed", 2, {"options": TWO_BATCHES, "tables": []}),
}
# ``decided`` is of the same row, ``mirrored`` of the one before Spark's commit log
SELDOM_KILLED = {"applied-some", "marked", "changed"}


@dataclass
class Outcome:
    """Pipelines by name, their runs in order, and the error of each."""

    pipelines: dict[str, Pipeline]
    runs: list[Pipeline]
    errors: list[str | None]
    received: list[str]  # of the queue of ``tls``

    def errors_of(self, name: str) -> list[str | None]:
        app = self.pipelines[name].app
        return [error for run, error in zip(self.runs, self.errors, strict=True) if run.app == app]


def operations(scratch: Path, url: str, tls: Pipeline) -> dict[str, Pipeline]:
    """Each operation: publish, append, reject, changes of a table, the ledger; sources with and without offsets of txmq."""
    beside = {"call": "beside_the_root"}
    app = Pipeline.create(
        "app", url, scratch, MESSAGES, ledger=str(scratch / "ledger"), options=TWO_BATCHES, **beside
    )
    app = replace(app, app=ODD_APP)
    rate = Pipeline.create("rate", url, scratch, source="rate", batches=1)
    messages = shapes.MESSAGES["typed"]
    typed = Pipeline.create("typed", url, scratch, messages, shape="typed", fn="rejects", **beside)
    dead_letters(typed).declare()
    changes = Pipeline.create("changes", url, scratch, MESSAGES, fn="changes", tables=[], **beside)
    empty_table(Path(changes.lake) / "changed", CHANGED)
    return {"app": app, "rate": rate, "typed": typed, "changes": changes, "tls": tls}


def dead_letters(of: Pipeline) -> Pipeline:
    queue = f"{of.queue}.{shapes.OTHER}"
    return replace(of, queue=queue, out=queue)


def other_checkpoints(first: Pipeline) -> list[Pipeline]:
    """A second query of the app on another queue, twice; then an older checkpoint, and a lost one."""
    queue, checkpoint = f"{first.queue}.{shapes.OTHER}", f"{first.checkpoint}-2"
    second = replace(first, queue=queue, checkpoint=checkpoint, lake=f"{first.lake}-2")
    older = f"{first.checkpoint}-old"
    newer = [["copy", first.checkpoint, older], ["send", "e"], ["send", "f"]]
    lost = replace(first, checkpoint=f"{first.checkpoint}-3")
    return [
        first,
        second,
        second,
        replace(first, before=newer),
        replace(first, checkpoint=older, before=[["send", "g"]]),
        lost,
        replace(lost, on_new_checkpoint="resume"),
    ]


def killed(scratch: Path, url: str, left_out: set[str]) -> dict[str, Pipeline]:
    """Pipelines whose server was killed with its client and the processes of functions."""
    found = {
        app: Pipeline.create(app, url, scratch, MESSAGES, **special)
        for app, (_, _, special) in KILLED.items()
        if app not in left_out
    }
    for pipeline in found.values():
        if pipeline.fn == "changes":
            empty_table(Path(pipeline.lake) / "changed", CHANGED)
    at = [KILLED[app][:2] for app in found]
    Driver(scratch, list(found.values()), at=at, session={"connect": "true"}).require_killed()
    return found


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Outcome]:
    soak = bool(request.config.getoption("--soak-rounds"))
    left_out, again = (set(), set(REFUSED)) if soak else (SELDOM, AGAIN)
    scratch = tmp_path_factory.mktemp("connect")
    served = Served(scratch / "broker")
    try:
        with encrypted(scratch) as (tls, broker):
            found = killed(scratch, served.url, set() if soak else SELDOM_KILLED)
            found |= operations(scratch, served.url, tls)
            runs = list(found.values())
            for name, what in (*WORKS.items(), *((name, what) for name, (what, _) in REFUSED.items())):
                if name not in left_out:
                    found[name] = replace(made(scratch, served.url, name, what), persist=name == "cached")
                    runs.append(found[name])
            runs += [replace(found[name], call="directly", fn="effects") for name in REFUSED if name in again]
            found["twice"] = made(scratch, served.url, "twice", {"call": "twice"})
            found["first"] = replace(made(scratch, served.url, "first", {}), tables=[])
            runs += [found["twice"], *other_checkpoints(found["first"])]
            both = Pipeline.create(
                "both", served.url, scratch, ["m1"], source="both", tables=[], checkpoint_of="session"
            )
            found["both"] = both
            files = [["file", "1"], ["file", "2"]]
            runs += [replace(both, before=files), replace(both, checkpoint_of="function")]
            older = Pipeline.create("older", served.url, scratch, source="files", tables=[], ledger="auto")
            found["older"] = older
            runs += [run for run, _ in two_batches_behind(older)]
            errors = Driver(scratch, runs, session={"connect": "true"}).require_done_each()
            with broker.channel() as channel:
                got = [channel.get(tls.out) for _ in MESSAGES]
            received = [each.message.body.decode().partition(":")[0] for each in got if each is not None]
            yield Outcome(found, runs, errors, sorted(received))
    finally:
        served.stop()


def test_on_connect_publishes_tables_and_the_ledger_are_exactly_once_and_a_missing_lineage_is_refused(
    outcome: Outcome,
) -> None:
    found = outcome.pipelines
    names = ("app", "rate", "typed", "changes", "tls")
    assert {name: outcome.errors_of(name) for name in names} == {name: [None] for name in names}
    assert outcome.received == sorted(row["body"] for row in found["tls"].table("first")) == MESSAGES
    app, rate, typed, changes = (found[name] for name in names[:4])
    app.require_once(MESSAGES)
    typed.require_once(shapes.EXPECTED["typed"])
    assert dead_letters(typed).published() == ["b,b", "d,d"]
    changes.require_once(MESSAGES)
    changes.require_changed(MESSAGES)
    rate.require_once([str(number) for number in range(2 * rate.entries())])
    told = [
        (row["app_id"], row["batch_id"], row["log"], row["start_offset"], row["end_offset"], row["published"])
        for row in app.ledger_rows()
    ]
    assert sorted(told) == [(ODD_APP, 0, app.queue, 0, 2, 2), (ODD_APP, 1, app.queue, 2, 4, 2)]


@pytest.mark.crash
@pytest.mark.parametrize("app", seldom(KILLED, SELDOM_KILLED.__contains__))
def test_on_connect_everything_is_there_once_wherever_the_server_is_killed(
    outcome: Outcome, app: str
) -> None:
    """Another server goes on."""
    pipeline = outcome.pipelines[app]
    assert outcome.errors_of(app) == [None]
    pipeline.require_once(MESSAGES)
    if pipeline.fn == "changes":
        pipeline.require_changed(MESSAGES)


@pytest.mark.parametrize("name", seldom(WORKS, SELDOM.__contains__))
def test_on_connect_what_people_do_leaves_each_row_once(outcome: Outcome, name: str) -> None:
    assert outcome.errors_of(name) == [None]
    require_once(outcome.pipelines[name])


@pytest.mark.parametrize("name", seldom(REFUSED, SELDOM.__contains__))
def test_on_connect_what_is_refused_consumes_nothing_and_the_same_query_goes_on_with_another_function(
    outcome: Outcome, name: str
) -> None:
    first, *again = outcome.errors_of(name)
    pipeline = outcome.pipelines[name]
    assert first is not None and REFUSED[name][1] in first, first
    if again:
        assert again == [None]
        require_once(pipeline)
    else:
        assert pipeline.depth() == len(MESSAGES) and pipeline.entries() == 0
        assert pipeline.published() == pipeline.table("first") == pipeline.collected() == []


def test_on_connect_a_second_call_for_a_batch_is_refused(outcome: Outcome) -> None:
    (error,) = outcome.errors_of("twice")
    assert error is not None and "was called twice for batch 0" in error


def test_on_connect_another_query_of_the_app_and_a_lost_or_older_checkpoint_lose_and_repeat_nothing(
    outcome: Outcome,
) -> None:
    """Rows 13 and 16."""
    errors, first = outcome.errors_of("first"), outcome.pipelines["first"]
    assert [error is None for error in errors] == [True, False, False, True, True, False, True], errors
    assert all("TXMQ_CHECKPOINT_MISMATCH" in str(errors[at]) for at in (1, 2, 5)), errors
    first.require_once([*MESSAGES, "e", "f", "g"])
    assert replace(first, queue=f"{first.queue}.{shapes.OTHER}").depth() == len(INNER)


def test_on_connect_an_older_checkpoint_of_files_stops_and_the_newest_loses_nothing(
    outcome: Outcome,
) -> None:
    """Row 16, of a source that is not txmq."""
    older = outcome.pipelines["older"]
    for error, (_, told) in zip(outcome.errors_of("older"), two_batches_behind(older), strict=True):
        assert (error is None) == (told == "") and told in (error or ""), error
    older.require_once(["1", "2", "3", "4", "5", "6"])
    assert len(delta_rows(Path(f"{older.checkpoint}_ledger"))) == older.entries()


def test_on_connect_a_queue_beside_files_is_refused_before_its_first_batch_without_the_checkpoint(
    outcome: Outcome,
) -> None:
    first, second = outcome.errors_of("both")
    assert first is not None and NOT_TOLD in first and second is None, (first, second)
    assert [body.partition(":")[0] for body in outcome.pipelines["both"].published()] == ["1", "2", "m1"]
