"""``txmq queue skip-damaged``: a segment that is damaged under a running broker; what is intact flows on, once each."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pika
import pytest

from broker_core.client.broker import BrokerClient
from broker_core.core.errors import CorruptSegment
from broker_core.engine import START, Limit, Origin
from broker_core.launcher import Broker
from broker_core.server.listener_options import ListenerOptions
from broker_core.store.salvage.verify import verify
from tests.amqp_server import serving
from tests.cli.test_accounts import Shell, shell
from tests.forked import Forked
from tests.progress import wait_for_end
from tests.server.conftest import Served, bodies, fill
from tests.server.http.http_client import Api
from tests.server.test_kill import patient
from txmq import cli

__all__ = ["shell"]

COUNT = 2_000  # rows with a checksum for every 256
SIZE = 1_000
NUMBERS = [str(number).encode().ljust(SIZE) for number in range(COUNT)]


def damage(directory: Path, body: bytes) -> None:
    """Flips a byte of the body in the segment that holds it."""
    for segment in (directory / "segments").glob("*.arrow"):
        content = segment.read_bytes()
        at = content.find(body)
        if at >= 0:
            assert content.count(body) == 1
            with segment.open("r+b") as file:
                file.seek(at + SIZE // 2)
                file.write(b"\x00")
            return
    raise AssertionError("no segment has the body")


def damaged(served: Served) -> BrokerClient:
    """A broker whose queue has a damaged block, of which nothing is in its memory."""
    served.start()
    with patient(served) as client:
        fill(client, "orders", COUNT, size=SIZE)
    served.terminate()
    damage(served.directory, NUMBERS[700])
    served.start()
    return patient(served)


def test_what_is_damaged_is_left_out_and_the_rest_flows(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    with damaged(served) as client, client.channel() as channel:
        with pytest.raises(CorruptSegment):
            channel.get("orders")
        assert cli.main(["queue", "skip-damaged", "orders", "--url", served.url]) == 1
        assert "256 damaged messages: offsets 512 to 767 of queue 'orders'" in capsys.readouterr().err
        with pytest.raises(CorruptSegment):
            channel.get("orders")
        assert cli.main(["queue", "skip-damaged", "orders", "--yes", "--json", "--url", served.url]) == 0
        said = json.loads(capsys.readouterr().out)
        assert [(part["start"], part["end"]) for part in said["messages"]] == [(512, 768)]
        assert bodies(client, "orders") == NUMBERS[:512] + NUMBERS[768:]
        delivery = channel.get("orders")
        assert delivery is not None and delivery.message.body == NUMBERS[0] and delivery.offset == 0
        channel.ack(delivery.tag)
        assert cli.main(["queue", "skip-damaged", "orders", "--url", served.url]) == 0
        assert capsys.readouterr().out == "nothing of queue orders is damaged\n"
    served.terminate()
    report = verify(str(served.directory))
    assert (report.ok, report.problems) == (True, [])
    served.start()
    with patient(served) as client:
        assert bodies(client, "orders") == NUMBERS[1:512] + NUMBERS[768:]


def test_a_waiting_consumer_is_cancelled_and_the_next_one_gets_the_rest(tmp_path: Path) -> None:
    with serving(tmp_path / "data") as served:
        with served.client() as client:
            fill(client, "orders", COUNT, size=SIZE)
            fill(client, "others", 0)
        served.terminate()
        damage(served.directory, NUMBERS[700])
        served.start()
        with pika.BlockingConnection(pika.URLParameters(served.amqp_url)) as connection:
            other, channel = connection.channel(), connection.channel()
            waiting = other.consume("others")
            assert list(channel.consume("orders")) == []  # basic.cancel
            assert cli.main(["queue", "skip-damaged", "orders", "--yes", "--url", served.url]) == 0
            got = [
                body for _, (_, _, body) in zip(range(COUNT - 256), channel.consume("orders"), strict=False)
            ]
            assert got == NUMBERS[:512] + NUMBERS[768:]
            other.basic_publish("", "others", b"still here")
            assert next(waiting)[2] == b"still here"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Queues ``a`` and ``b`` have the same rows. No broker has it."""
    with Broker.open(tmp_path / "data") as broker, broker.channel() as channel:
        channel.exchange_declare("both", "fanout")
        for queue in ("a", "b"):
            channel.queue_declare(queue)
            channel.queue_bind(queue, "both")
        channel.tx_select()
        for body in NUMBERS:
            channel.publish(body, exchange="both")
        channel.tx_commit()
    return tmp_path / "data"


def test_every_queue_that_shares_the_rows_loses_them_and_the_preview_says_so(
    directory: Path, shell: Shell
) -> None:
    damage(directory, NUMBERS[0])
    with Broker.open(directory) as broker:
        assert shell.code("queue", "skip-damaged", "a", "--url", broker.url) == 1
        for name in ("a", "b"):
            assert f"0 to 255 of queue '{name}' in vhost '/'" in shell.error
        shell.run("queue", "skip-damaged", "a", "--yes", "--url", broker.url)
        for name in ("a", "b"):
            assert bodies(broker.engine, name) == NUMBERS[256:]


def test_what_is_intact_in_memory_is_written_again_and_nothing_is_lost(directory: Path, shell: Shell) -> None:
    with Broker.open(directory) as broker:
        assert bodies(broker.engine, "a") == NUMBERS
        damage(directory, NUMBERS[0])
        said = json.loads(shell.run("queue", "skip-damaged", "a", "--yes", "--json", "--url", broker.url))
        assert (said["messages"], said["blocks"]) == ([], 1)
    with Broker.open(directory) as again:
        assert bodies(again.engine, "a") == bodies(again.engine, "b") == NUMBERS


def test_what_an_app_has_claimed_is_not_taken_from_it(directory: Path, shell: Shell) -> None:
    damage(directory, NUMBERS[0])
    with Broker.open(directory) as broker:
        broker.engine.claim("etl", ["a"], {"a": START}, Limit(), Origin(), "fail")
        assert shell.code("queue", "skip-damaged", "a", "--yes", "--url", broker.url) == 1
        assert "app 'etl' has claimed" in shell.error and "txmq app release etl a --force" in shell.error
        assert broker.queues()[0].messages == COUNT
        shell.run("app", "release", "etl", "a", "--force", "--yes", "--url", broker.url)
        shell.run("queue", "skip-damaged", "a", "--yes", "--url", broker.url)
        assert bodies(broker.engine, "a") == NUMBERS[256:]


def test_a_missing_segment_loses_all_of_it_and_the_next_messages_flow(directory: Path, shell: Shell) -> None:
    for segment in (directory / "segments").glob("*.arrow"):
        segment.unlink()
    with Broker.open(directory) as broker, broker.channel() as channel:
        channel.publish(b"next", routing_key="a")
        said = json.loads(shell.run("queue", "skip-damaged", "a", "--yes", "--json", "--url", broker.url))
        assert {(part["start"], part["end"]) for part in said["messages"]} == {(0, COUNT)}
        assert bodies(broker.engine, "a") == [b"next"]


def test_over_http_it_is_shown_first_and_leaves_when_told_to(directory: Path) -> None:
    damage(directory, NUMBERS[0])
    path = "/api/txmq/queues/%2F/a/skip-damaged"
    with Broker.open(directory, listeners=ListenerOptions(http=["127.0.0.1:0"])) as broker:
        api = Api(broker.http_urls[0])
        for body in (None, {}, {"check": True}):
            shown = api.ask("POST", path, body)
            assert shown.status == 200 and shown.body["check"] is True
            assert [(each["queue"], each["start"], each["end"]) for each in shown.body["messages"]] == [
                ("a", 0, 256),
                ("b", 0, 256),
            ]
        for body, status in (({"check": "no"}, 400), ({"check": 0}, 400), ([], 400)):
            assert api.ask("POST", path, body).status == status
        assert api.ask("POST", path.replace("/a/", "/gone/"), {"check": False}).status == 404
        broker.engine.claim("etl", ["a"], {"a": START}, Limit(), Origin(), "fail")
        refused = api.ask("POST", path, {"check": False})
        assert refused.status == 400 and "app 'etl' has claimed" in refused.body["reason"]
        broker.engine.release("etl", "a", force=True)
        assert broker.queues()[0].messages == COUNT
        done = api.ask("POST", path, {"check": False})
        assert done.status == 200
        assert done.body["messages"] == shown.body["messages"] and done.body["check"] is False
        for name in ("a", "b"):
            assert bodies(broker.engine, name) == NUMBERS[256:]
        again = api.ask("POST", path, {"check": False}).body
        assert (again["messages"], again["blocks"]) == ([], 0)
        api.close()
    lines = [json.loads(line) for line in (directory / "audit.log").read_text().splitlines()]
    told = [line for line in lines if line["event"] == "queue.skip_damaged"]
    assert [(line["queue"], line["listener"], line["check"]) for line in told] == [
        *[("a", "http", True)] * 3,
        *[("a", "http", False)] * 2,
    ]


@pytest.mark.crash
@pytest.mark.parametrize(
    "step",
    ["skip.found", "store.rewrite.synced", "skip.rewritten",
     "store.commit.synced", "store.commit.executed", "store.commit.committed", "skip.committed",
     "server.reply.skip_damaged@2"],
)  # fmt: skip
def test_nothing_intact_is_lost_when_the_broker_is_killed_at_any_step(served: Served, step: str) -> None:
    with damaged(served):
        pass
    served.terminate()
    served.start(f"{step}=kill")
    skipping = Forked("txmq", ["queue", "skip-damaged", "orders", "--yes", "--url", served.url], os.environ)
    assert served.wait() == -9
    served.start()
    with skipping.stdout:
        assert wait_for_end(skipping, "the command ends") in (0, 1)  # type: ignore[arg-type]
    assert cli.main(["queue", "skip-damaged", "orders", "--yes", "--url", served.url]) == 0
    with patient(served) as client:
        assert bodies(client, "orders") == NUMBERS[:512] + NUMBERS[768:]
