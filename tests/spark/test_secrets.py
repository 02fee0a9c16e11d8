"""A stream over TLS with a password, and every place where Spark could show the password.

Invariant: a place is searched while it holds something, so a test that finds nothing has looked.
"""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from pyspark.sql import SparkSession

from bench.certificates import Authority
from broker_core.core.errors import LoginRefused, OptionError, cause
from broker_core.launcher import Broker
from broker_core.server.listener_options import ListenerOptions
from broker_core.server.tls import TlsOptions
from connector.datasource import TxmqDataSource
from connector.stream.schema import read_schema
from txmq import transactional

pytestmark = pytest.mark.spark

SECRET = "hunter2-not-to-be-seen"


@pytest.fixture
def options(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Of a broker with TLS and a user."""
    authority = Authority(tmp_path)
    pair = authority.sign()
    listeners = ListenerOptions(TlsOptions(pair.cert, pair.key))
    with Broker.open(tmp_path / "broker", users={"ann": SECRET}, listeners=listeners) as broker:
        with broker.channel() as channel:
            for queue in ("in", "out"):
                channel.queue_declare(queue)
            channel.tx_select()
            for number in range(5):
                channel.publish(str(number).encode(), routing_key="in")
            channel.tx_commit()
        yield {"url": f"txmqs://localhost:{broker.port}", "user": "ann", "tlsCa": authority.ca}


def shown_plans(spark: SparkSession) -> str:
    """What the page of each execution shows of it."""
    store = spark._jsparkSession.sharedState().statusStore()
    found = store.executionsList()
    return "\n".join(
        found.apply(place).physicalPlanDescription() + found.apply(place).details()
        for place in range(found.size())
    )


def command_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it has ended
        return ""


def test_a_stream_over_tls_with_a_password_shows_it_nowhere(
    spark: SparkSession, options: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    known = {**options, "password": SECRET}
    seen: dict[str, str] = {}
    source = spark.readStream.format("txmq").options(**known, queue="in", appId="app").load()
    sink = source.select("body").writeStream.format("txmq").options(**known, queue="out", appId="app")
    checkpoint = tmp_path / "checkpoint"
    query = sink.option("checkpointLocation", str(checkpoint)).start()
    query.processAllAvailable()
    plan = io.StringIO()
    with contextlib.redirect_stdout(plan):
        source.explain(extended=True)
        query.explain(extended=True)
    seen["plan"] = plan.getvalue() + query._jsq.toString() + source._jdf.queryExecution().toString()
    seen["progress"] = str([dict(each) for each in query.recentProgress]) + str(query.lastProgress)
    seen["status"] = str(query.status)
    query.stop()
    browser = spark.read.format("txmq").options(**known, queue="out").load()
    assert sorted(bytes(row.body) for row in browser.collect()) == [b"0", b"1", b"2", b"3", b"4"]
    seen["frame"] = repr(browser) + browser._jdf.queryExecution().toString()
    browser.select("body").write.format("txmq").options(**known, queue="out").mode("append").save()
    seen["ui"] = shown_plans(spark)
    seen["checkpoint"] = "".join(
        path.read_bytes().decode(errors="replace") for path in checkpoint.rglob("*") if path.is_file()
    )
    schema = read_schema()
    stream = TxmqDataSource({**known, "queue": "in", "appId": "app"}).streamReader(schema)
    for made in (stream, TxmqDataSource({**known, "queue": "in"}).reader(schema)):
        again = pickle.loads(pickle.dumps(made))
        seen[f"repr {type(made).__name__}"] = f"{made!r} {again!r} {vars(again)!r}"
    settings = {"user": "ann", "password": SECRET, "tlsCa": options["tlsCa"]}
    function = transactional(lambda batch, tx: None, url=options["url"], app_id="a", settings=settings)
    seen["function"] = f"{function!r} {vars(function)!r} {pickle.loads(pickle.dumps(function.address))!r}"
    output = capfd.readouterr()
    seen["log"] = output.out + output.err + "-"
    seen["ps"] = "\n".join(map(command_of, psutil.Process().children(recursive=True)))
    assert [name for name, text in seen.items() if not text] == []
    assert [name for name, text in seen.items() if SECRET in text] == []
    assert "txmq" in seen["plan"] and "txmq" in seen["ui"]


def refusals(
    spark: SparkSession, known: dict[str, str]
) -> Iterator[tuple[type[Exception], Callable[[], Any]]]:
    def read(**more: str) -> Callable[[], Any]:
        return lambda: spark.read.format("txmq").options(**{**known, "queue": "in", **more}).load().collect()

    yield LoginRefused, read(password=SECRET + "x")
    yield OptionError, read(password=SECRET, passwordFile="file")
    yield OptionError, read(pasword=SECRET)
    yield OptionError, read(token=SECRET, password=SECRET)
    yield OptionError, read(url=f"txmqs://ann:{SECRET}@localhost:x", user="")
    yield OptionError, read(url=f"txmqs://ann:{SECRET}@localhost:1", data="dir")
    yield OptionError, read(url=f"txmqs://bob:{SECRET}@localhost:1", password=SECRET)


def test_an_error_about_a_login_shows_no_password(spark: SparkSession, options: dict[str, str]) -> None:
    for kind, read in refusals(spark, options):
        with pytest.raises(Exception) as caught:
            read()
        found = cause(caught.value)
        assert type(found) is kind, caught.value
        texts = f"{caught.value} {caught.value!r} {found} {found!r}"
        assert SECRET not in texts, texts
