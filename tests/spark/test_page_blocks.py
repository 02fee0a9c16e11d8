"""The blocks of the pages that need a session, as they stand there, with what they take for granted."""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

import txmq
from bench.certificates import Authority
from broker_core.launcher import Broker
from tests.connector.typed.test_avro import body
from tests.page_blocks import code
from tests.progress import wait_until
from tests.registry_server import RegistryServer
from tests.spark.conftest import Rig
from tests.spark.kafka_pipelines import make_topics, send
from tests.spark.pipelines import delta_rows
from tests.spark.sessions import CONNECT

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.usefixtures("planned_once")]


@pytest.fixture
def page(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """A directory in which ``data`` is a broker; the JVM has another working directory, so tables get a place."""
    monkeypatch.chdir(tmp_path)
    with Broker.open("data") as broker:
        yield Rig(broker, spark, tmp_path)
        for query in spark.streams.active:
            query.stop()


def run(page: Rig, block: str, **names: Any) -> dict[str, Any]:
    block = re.sub(r'"(lake/\w+|checkpoint[-\w]*(?<!Location))"', rf'"{page.directory}/\1"', block)
    for address in ("txmq://127.0.0.1:5673", "txmq://localhost:5673"):
        block = block.replace(address, page.broker.url)
    block = block.replace('data="data"', f'data="{page.directory / "data"}"')
    found: dict[str, Any] = {"spark": page.spark, "url": page.broker.url, "transactional": txmq.transactional}
    found |= names
    exec(block, found)
    end_all(page.spark)
    return found


def end_all(spark: SparkSession) -> None:
    for query in spark.streams.active:
        query.processAllAvailable()
        query.stop()


def consumed(page: Rig, app_id: str) -> int:
    """Messages of the batches that the app has decided."""
    return sum(entry.messages for entry in page.broker.engine.entries(app_id))


@pytest.mark.soak  # test_merge.py has each operation
def test_the_merges_of_the_page(page: Rig) -> None:
    spark, lake = page.spark, page.directory / "lake"
    columns = "id INT, name STRING, visits INT, gone BOOLEAN, day DATE"
    for table, held in (("customers", columns), ("letters", "customer INT"), ("days", columns)):
        spark.sql(f"CREATE TABLE delta.`{lake / table}` ({held}) USING delta")
    spark.sql(f"INSERT INTO delta.`{lake / 'letters'}` VALUES (1), (2)")
    page.declare("in")
    page.publish(
        "in",
        '{"id": 1, "name": "a", "visits": 3, "day": "2026-01-01"}',
        '{"id": 2, "gone": true, "visits": 1}',
    )
    go(page, run(page, code("docs/merge.md", "def customers("))["customers"], "in")
    assert sorted(row["id"] for row in delta_rows(lake / "customers")) == [1, 2]
    assert [row["customer"] for row in spark.read.format("delta").load(str(lake / "letters")).collect()] == [
        1
    ]
    assert [row["id"] for row in delta_rows(lake / "days")] == [1]


def test_the_stream_into_a_queue(page: Rig) -> None:
    page.declare("alerts", "mails")
    page.publish("alerts", "late", "äther")
    run(page, code("docs/spark.md", "checkpoint-mail"))
    assert page.bodies("mails") == ["LATE", "ÄTHER"] and consumed(page, "mail") == 2


def test_the_first_function_then_its_state_and_its_observation(
    page: Rig, capsys: pytest.CaptureFixture[str]
) -> None:
    page.declare("in", "late")
    with page.broker.channel() as channel:
        channel.exchange_declare("alerts", "direct")
        channel.queue_bind("late", "alerts", "late")
    page.publish("in", "a", "b")
    upserted = page.notes()
    functions = {
        "stream": page.stream("in", "delays"),
        "upsert": lambda rows, sequence: upserted.append(
            ([row["offset"] for row in rows.collect()], sequence)
        ),
    }
    found = run(page, code("docs/foreach_batch.md", "def enrich("), **functions)
    assert page.bodies("late") == ["a", "b"]
    assert sorted(row["offset"] for row in delta_rows(page.directory / "lake" / "flights")) == [0, 1]
    assert [(sorted(offsets), sequence) for offsets, sequence in upserted] == [([0, 1], 1)] and consumed(
        page, "delays"
    ) == 2
    found["each"].flush()
    assert [row["messages"] for row in delta_rows(page.directory / "lake" / "ledger")] == [2]

    capsys.readouterr()
    run(page, code("docs/spark_reference.md", '"table", "apps"'))
    apps, ledger = capsys.readouterr().out.split("\n\n", 1)
    assert "|app_id|" in apps and "lag_s" in apps and "delays" not in apps, "nothing waits"
    assert re.search(r"\|delays\|\s*\d+\|.*/.*\|\s*0\|\n", ledger), ledger

    query = page.stream("in", "delays").writeStream.foreachBatch(found["each"]).queryName("of delays")
    query = query.option("checkpointLocation", page.checkpoint()).start()
    run(page, code("docs/observe.md", "txmq.observe"), query=query)
    shown: list[str] = []
    wait_until(lambda: shown.append(capsys.readouterr().out) or "ended" in "".join(shown))
    assert "of delays" in "".join(shown)


def test_broken_messages_become_dead_letters(page: Rig) -> None:
    with page.broker.channel() as channel:
        channel.queue_declare("dead")
        channel.queue_declare(
            "in", arguments={"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}
        )
    page.publish("in", '{"id": 1, "amount": 2.5}', "{", '{"amount": 1}')
    orders = run(page, code("docs/typed_messages.md", "amount double"))["orders"]
    go(page, orders, "in")
    assert [
        (row["id"], row["amount"], row["offset"]) for row in delta_rows(page.directory / "lake" / "orders")
    ] == [(1, 2.5, 0)]
    assert page.bodies("dead") == ["{", '{"amount": 1}']


def test_bodies_of_a_registry(page: Rig) -> None:
    pair = Authority(page.directory).sign()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.cert, pair.key)
    server = RegistryServer("spark:secret", context)
    try:
        schema = {"type": "record", "name": "Order", "fields": [{"name": "id", "type": "long"}]}
        number = server.add("orders-value", schema)
        with page.broker.channel() as channel:
            channel.queue_declare("dead")
            channel.queue_declare(
                "in", arguments={"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}
            )
            for each in (body({"id": 7}, schema, number), b"broken"):
                channel.publish(each, routing_key="in")
        text = code("docs/schema_registry.md", "SchemaRegistry").replace("https://registry:8081", server.url)
        # on Connect, the function runs in a process of the server, in another directory
        text = text.replace("ca.pem", str(page.directory / "ca.pem"))
        go(page, run(page, text)["orders"], "in")
        assert [row["id"] for row in delta_rows(page.directory / "lake" / "orders")] == [7]
        assert page.bodies("dead") == ["broken"]
    finally:
        server.close()


@pytest.mark.soak  # test_resume.py has the rule
def test_an_app_goes_on_behind_its_ledger_on_another_engine(page: Rig) -> None:
    taken = page.notes()

    def shop(batch: DataFrame, _tx: Any) -> None:
        taken.append([row["body"].decode() for row in batch.orderBy("offset").collect()])

    page.declare("orders")
    page.publish("orders", "a", "b")
    ledger = str(page.directory / "lake" / "ledger")
    go(page, shop, "orders", ledger=ledger, ledger_sync=True)
    with Broker.open("other") as broker:
        other = Rig(broker, page.spark, page.directory)
        other.declare("orders")
        other.publish("orders", "a", "b")
        other.publish("orders", "c")
        text = code("docs/ledger.md", "resume_from")
        text = text.replace("the engine that the error names", page.broker.engine.identity("app"))
        text = text.replace('"shop"', '"app"')
        if CONNECT:  # the app goes on in its first batch, and its source has begun by then
            with pytest.raises(Exception, match="start it once more, with a new checkpoint"):
                run(other, text, shop=shop)
            text = text.replace('"checkpoint-2"', '"checkpoint-3"')
        run(other, text, shop=shop)
        assert taken == [["a", "b"], ["c"]]


@pytest.mark.soak  # the commands of tests/contract/engine
def test_the_stream_on_kafka_and_its_app_once_more_from_a_batch(page: Rig, kafka_url: str) -> None:
    taken = page.notes()

    def shop(batch: DataFrame, tx: Any) -> None:
        taken.append(sorted(row["body"].decode() for row in batch.collect()))

    make_topics(kafka_url, "orders")
    for bodies in (["a", "b"], ["c", "d"]):
        send(kafka_url, "orders", bodies)
        text = code("docs/kafka.md", "kafka://").replace("kafka://host1:9092,host2:9092", kafka_url)
        each = run(page, text, shop=shop)["each"]
        each.flush()
    assert taken == [["a", "b"], ["c", "d"]]
    text = (
        code("docs/ledger.md", '"batch": 17').replace("17", "2").replace('"lake', f'"{page.directory}/lake')
    )
    again = run(page, text, url=kafka_url)["again"]
    (rows,) = page.collect(again, "again")
    assert sorted(row["body"].decode() for row in rows) == ["c", "d"]


def go(page: Rig, fn: Any, queue: str, **more: Any) -> None:
    """A query with the function, until all is read."""
    each = txmq.transactional(fn, url=page.broker.url, app_id="app", **more)
    writer = page.stream(queue).writeStream.foreachBatch(each)
    writer.option("checkpointLocation", page.checkpoint("of app")).start()
    end_all(page.spark)
