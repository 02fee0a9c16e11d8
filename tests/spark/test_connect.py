"""The same function on Spark Connect: a local Connect server, and a client that has no JVM."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from bench.certificates import Authority
from broker_core.core import password as passwords
from broker_core.launcher import Broker
from broker_core.server.listener_options import ListenerOptions
from broker_core.server.tls import TlsOptions
from tests.spark import shapes
from tests.spark.pipelines import CHANGED, Pipeline, Served, empty_table, run_once
from tests.spark.test_user_code import INNER, made, require_once, run

pytestmark = [pytest.mark.spark, pytest.mark.slow]

MESSAGES = ["a", "b", "c", "d"]


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


def test_on_connect_publishes_tables_and_the_ledger_are_exactly_once_and_a_missing_lineage_is_refused(
    tmp_path: Path,
) -> None:
    served = Served(tmp_path / "broker")
    try:
        pipeline = Pipeline.create(
            "app",
            served.url,
            tmp_path,
            MESSAGES,
            ledger=str(tmp_path / "ledger"),
            options={"maxOffsetsPerTrigger": "2"},
            call="beside_the_root",
        )
        rate = Pipeline.create("rate", served.url, tmp_path, source="rate", batches=1)
        messages = shapes.MESSAGES["typed"]
        typed = Pipeline.create(
            "typed", served.url, tmp_path, messages, shape="typed", fn="rejects", call="beside_the_root"
        )
        dead = replace(typed, queue=f"{typed.queue}.{shapes.OTHER}", out=f"{typed.queue}.{shapes.OTHER}")
        dead.declare()
        changes = Pipeline.create(
            "changes", served.url, tmp_path, MESSAGES, fn="changes", tables=[], call="beside_the_root"
        )
        empty_table(Path(changes.lake) / "changed", CHANGED)
        with encrypted(tmp_path) as (tls, broker):
            several = [pipeline, rate, typed, changes, tls]
            errors = run_once(tmp_path, several, session={"connect": "true"})
            assert all(errors[name] is None for name in ("app", "rate", "typed", "changes", "tls")), errors
            with broker.channel() as channel:
                got = [channel.get(tls.out) for _ in MESSAGES]
            published = [each.message.body.decode().partition(":")[0] for each in got if each is not None]
            assert sorted(published) == sorted(row["body"] for row in tls.table("first")) == MESSAGES
        pipeline.require_once(MESSAGES)
        typed.require_once(shapes.EXPECTED["typed"])
        assert dead.published() == ["b,b", "d,d"]
        changes.require_once(MESSAGES)
        changes.require_changed(MESSAGES)
        rate.require_once([str(number) for number in range(2 * rate.entries())])
        told = [
            (row["batch_id"], row["log"], row["start_offset"], row["end_offset"], row["published"])
            for row in pipeline.ledger_rows()
        ]
        assert sorted(told) == [(0, pipeline.queue, 0, 2, 2), (1, pipeline.queue, 2, 4, 2)]
    finally:
        served.stop()


# how a pipeline is called or what its function does, and a part of the error
REFUSED = {
    "two_apps": ({"call": "two_apps"}, "give both the same"),
    "within_its_own": ({"call": "within_its_own"}, "was called by its own function"),
    "within_another": ({"call": "within_another"}, "by that of another app"),
    "kept_batch": ({"fn": "kept_batch"}, "of another batch"),
    "caught_in_a_thread": ({"fn": "caught_in_a_thread"}, "body"),
    "rows_of_nobody": ({"call": "rows_of_nobody"}, "with no rows of its batch"),
}
WORKS = {
    "in_a_thread": {"call": "in_a_thread"},  # a classic session does not know its batch there
    "by_a_function": {"call": "by_a_function"},
    "joined_before": {"call": "joined_before"},
    "thread_pool": {"fn": "thread_pool"},
    "persisted": {"fn": "persisted"},
}


def test_on_connect_what_is_refused_consumes_nothing_and_the_same_query_goes_on_with_another_function(
    tmp_path: Path,
) -> None:
    served = Served(tmp_path / "broker")
    try:
        works = [made(tmp_path, served.url, name, what) for name, what in WORKS.items()]
        works.append(replace(made(tmp_path, served.url, "cached", {}), persist=True))
        refused = {name: made(tmp_path, served.url, name, what) for name, (what, _) in REFUSED.items()}
        again = [replace(each, call="directly", fn="effects") for each in refused.values()]
        twice = made(tmp_path, served.url, "twice", {"call": "twice"})
        everything = [*works, *refused.values(), *again, twice]
        errors = run(tmp_path, everything, session={"connect": "true"})
        for name, pipeline in refused.items():
            first, second = errors[pipeline.app]
            assert first is not None and REFUSED[name][1] in first, first
            assert second is None, second
        for pipeline in [*works, *again]:
            assert errors[pipeline.app][-1] is None, errors[pipeline.app]
            require_once(pipeline)
        (error,) = errors[twice.app]
        assert error is not None and "was called twice for batch 0" in error
    finally:
        served.stop()


def test_on_connect_another_query_of_the_app_and_a_lost_or_older_checkpoint_lose_and_repeat_nothing(
    tmp_path: Path,
) -> None:
    """Two queries of one app on two queues; then a lost checkpoint, and an older one that is put back (rows 13, 16)."""
    served = Served(tmp_path / "broker")
    try:
        first = made(tmp_path, served.url, "first", {})
        queue, checkpoint = f"{first.queue}.{shapes.OTHER}", f"{first.checkpoint}-2"
        second = replace(first, queue=queue, checkpoint=checkpoint, lake=f"{first.lake}-2")
        copy = ["copy", first.checkpoint, f"{first.checkpoint}-old"]
        newer = [copy, ["send", "e"], ["send", "f"]]
        lost = replace(first, checkpoint=f"{first.checkpoint}-3")
        runs = [
            first,
            second,
            second,
            replace(first, before=newer),
            replace(first, checkpoint=f"{first.checkpoint}-old", before=[["send", "g"]]),
            lost,
            replace(lost, on_new_checkpoint="resume"),
        ]
        errors = run(tmp_path, runs, session={"connect": "true"})[first.app]
        assert [error is None for error in errors] == [True, False, False, True, True, False, True], errors
        assert all("TXMQ_CHECKPOINT_MISMATCH" in str(errors[at]) for at in (1, 2, 5)), errors
        first.require_once([*MESSAGES, "e", "f", "g"])
        assert replace(second, lake=first.lake).depth() == len(INNER)
    finally:
        served.stop()
