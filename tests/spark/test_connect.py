"""The same function on Spark Connect: a local Connect server, and a client that has no JVM."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from bench.certificates import Authority
from broker_core import password as passwords
from broker_core.launcher import Broker
from broker_core.server.doors import Doors
from broker_core.server.tls import TlsOptions
from tests.spark import shapes
from tests.spark.pipelines import CHANGED, Pipeline, Served, empty_table, run_once

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
    with Broker.open(scratch / "encrypted", doors=Doors(TlsOptions(pair.cert, pair.key))) as broker:
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
        )
        rate = Pipeline.create(
            "rate", served.url, tmp_path, source="rate", batches=1, lineage="first checkpoint"
        )
        messages = shapes.MESSAGES["typed"]
        typed = Pipeline.create("typed", served.url, tmp_path, messages, shape="typed", fn="rejects")
        dead = replace(typed, queue=f"{typed.queue}.{shapes.OTHER}", out=f"{typed.queue}.{shapes.OTHER}")
        dead.declare()
        unnamed = Pipeline.create("unnamed", served.url, tmp_path, source="rate", batches=1)
        changes = Pipeline.create("changes", served.url, tmp_path, MESSAGES, fn="changes", tables=[])
        empty_table(Path(changes.lake) / "changed", CHANGED)
        with encrypted(tmp_path) as (tls, broker):
            several = [pipeline, rate, typed, unnamed, changes, tls]
            errors = run_once(tmp_path, several, session={"connect": "true"})
            assert all(errors[name] is None for name in ("app", "rate", "typed", "changes", "tls")), errors
            with broker.channel() as channel:
                got = [channel.get(tls.out) for _ in MESSAGES]
            published = [each.message.body.decode().partition(":")[0] for each in got if each is not None]
            assert sorted(published) == sorted(row["body"] for row in tls.table("first")) == MESSAGES
        assert "pass lineage=" in str(errors["unnamed"])
        pipeline.require_once(MESSAGES)
        typed.require_once(shapes.EXPECTED["typed"])
        assert dead.published() == ["b,b", "d,d"]
        changes.require_once(MESSAGES)
        changes.require_changed(MESSAGES)
        rate.require_once([str(number) for number in range(2 * rate.entries())])
        told = [(row["batch_id"], row["log"], row["published"]) for row in pipeline.ledger_rows()]
        assert sorted(told) == [(0, None, 2), (1, None, 2)], (
            "the commit consumes nothing on Connect, the source acks"
        )
    finally:
        served.stop()
