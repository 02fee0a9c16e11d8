"""The door of a cluster of Kafka, over a FakeKafka: the same API and page, and what Kafka does not have."""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest

from broker_core import errors
from broker_core.kafka.engine import KafkaEngine
from broker_core.kafka.protocol import port
from broker_core.kafka.protocol.port import Request
from broker_core.server.http.elsewhere.recent import FAILED_S, KEYS, Recent
from broker_core.server.http.elsewhere.routes import ELSEWHERE, served
from broker_core.server.http.routes import ROUTES
from broker_core.server.http.server import HttpServer
from tests.kafka.bench.fake_kafka import REFUSED, FakeKafka
from tests.progress import wait_until
from tests.server.http.http_client import CHEAP, PASSWORD, Api
from tests.server.http.http_rows import Row, rows
from tests.server.http.kafka_door import APP, FROM, TABLE, TO, kafka_door, play
from tests.server.http.page_visitor import Visitor

URL = "kafka://fake:1,fake:2,fake:3"
MARKED = range(4, 9)  # four rows, and markers of transactions, which have offsets too


def connected(fake: FakeKafka, **settings: str) -> KafkaEngine:
    return KafkaEngine(URL, settings, lambda _: fake.wire())


@pytest.fixture(scope="module")
def door() -> Iterator[HttpServer]:
    engine = connected(FakeKafka())
    play(engine)
    with kafka_door(engine) as server:
        yield server


@pytest.fixture
def api(door: HttpServer) -> Iterator[Api]:
    made = Api(door.urls[0])
    yield made
    made.close()


def test_an_app_shows_its_lag_its_last_batch_what_waits_and_its_attempts(api: Api) -> None:
    (app,) = api.get("/api/txmq/apps")
    assert (app["app_id"], app["queues"], app["sequence"]) == (APP, [FROM], 1)
    assert app["lag"] in MARKED and app["lag_s"] >= 0 and (app["unapplied"], app["unmirrored"]) == (1, 1)
    last = app["last_batch"]
    assert (last["batch_id"], last["published"]) == (0, 4) and last["messages"] in MARKED
    assert last["age_s"] >= 0 and (last["after_s"], last["rate"]) == (None, None)
    assert [(each["batch_id"], each["rows"]) for each in app["attempts"]] == [(1, 1)]
    assert app["attempts"][0]["client"].endswith(f"{socket.gethostname()[:60]} {os.getpid()}")
    (staged,) = api.get("/api/txmq/staged")
    assert (staged["app_id"], staged["batch_id"], "token" in staged) == (APP, 1, False)


def test_the_ledger_and_the_transactions_have_ranges_and_tables(api: Api) -> None:
    (entry,) = api.get(f"/api/txmq/ledger/%2F/{APP}")
    assert (entry["batch_id"], entry["transaction"], entry["to_apply"]) == (0, 0, 1)
    assert sum(end - start for start, end in entry["ranges"].values()) in MARKED
    assert [(each["table"], each["rows"], each["applied"]) for each in entry["tables"]] == [(TABLE, 4, False)]
    page = api.get("/api/txmq/history/%2F")
    (batch,) = page["transactions"]
    assert (batch["app_id"], batch["ledger_sequence"], page["before"]) == (APP, 1, 0)
    assert {each["effect"] for each in batch["effects"]} == {"consumed"}
    assert api.ask("GET", "/api/txmq/ledger/%2F/nobody").status == 404


def consumed(api: Api) -> tuple[str, int]:
    """A log and an offset that the first batch has read."""
    ranges = api.get(f"/api/txmq/ledger/%2F/{APP}")[0]["ranges"]
    return next((log, start) for log, (start, end) in ranges.items() if end > start)


def test_a_message_has_its_life(api: Api) -> None:
    log, start = consumed(api)
    life = api.get(f"/api/txmq/messages/%2F/{quote(log, safe='')}/{start}")
    assert [each["effect"] for each in life["steps"]] == ["published", "consumed"]
    assert api.ask("GET", "/api/txmq/messages/%2F/nowhere%2F0/0").status == 404


def test_queues_bindings_and_messages_are_those_of_the_cluster(api: Api) -> None:
    found = {row["name"]: row for row in api.get("/api/queues")}
    assert set(found) == {FROM, TO}
    assert (found[FROM]["app"], found[TO]["app"]) == (APP, "") and found[TO]["messages"] in MARKED
    assert found[FROM]["arguments"] == {"x-partitions": 2}
    assert [row["name"] for row in api.get("/api/queues?page=1&page_size=1&name=do")["items"]] == [TO]
    bindings = [(row["source"], row["routing_key"]) for row in api.get(f"/api/queues/%2F/{FROM}/bindings")]
    assert bindings == [("", FROM), ("events", "order.#")]
    assert "events" in {row["name"] for row in api.get("/api/exchanges/%2F")}
    body = {"count": 10, "ackmode": "ack_requeue_true", "encoding": "auto"}
    peeked = api.ask("POST", f"/api/queues/%2F/{TO}/get", body).body
    assert sorted(row["payload"] for row in peeked) == [f"row {each}" for each in range(4)]
    assert {row["log"] for row in peeked} <= {f"{TO}/0", f"{TO}/1"}
    totals = api.get("/api/overview")
    messages = sum(row["messages"] for row in found.values())
    assert (totals["queue_totals"]["messages"], totals["object_totals"]["queues"]) == (messages, 2)


def test_metrics_have_the_lag_of_each_app(api: Api) -> None:
    text = api.get("/metrics")
    assert re.search(rf'txmq_app_lag{{app="{APP}",vhost="/"}} [4-8]', text) and "txmq_queues 2.0" in text


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row.method} {row.path}")
def test_every_route_is_answered_or_says_in_a_sentence_what_there_is_instead(api: Api, row: Row) -> None:
    route = next(each for each in ELSEWHERE if (each.method, each.path) == (row.method, row.path))
    answer = api.ask(row.method, row.at("%2F"), {} if row.method in ("PUT", "POST") else None)
    if served(route) or route.path == "/api/txmq/openapi.json":
        assert answer.status in (200, 400, 404), answer
    else:
        assert (answer.status, answer.body["error"]) == (501, "not_implemented")
        assert len(answer.body["reason"]) > 20 and "\n" not in answer.body["reason"]


def test_the_table_has_the_routes_of_a_broker_with_the_same_needs() -> None:
    assert {(each.method, each.path, each.need) for each in ELSEWHERE} == {
        (each.method, each.path, each.need) for each in ROUTES
    }


def test_the_description_names_only_what_is_served(api: Api) -> None:
    paths = api.get("/api/txmq/openapi.json")["paths"]
    assert "/api/txmq/apps" in paths and "/api/queues/{vhost}/{name}/get" in paths
    assert "/api/users" not in paths and "/api/txmq/prepared" not in paths
    assert "delete" not in paths["/api/queues/{vhost}/{name}"]


def test_every_page_that_is_linked_is_there_and_what_kafka_lacks_is_hidden(
    door: HttpServer, api: Api
) -> None:
    visitor = Visitor(door.urls[0], "guest", "guest")
    home = visitor.get("/ui")
    assert home.status == 200 and APP in home.text and FROM in home.text
    for hidden in ("/ui/connections", "/ui/store"):
        assert f'href="{hidden}"' not in home.text and visitor.get(hidden).status == 501
    assert FROM in visitor.get("/ui/queues").text
    queue = visitor.get(f"/ui/queue?vhost=%2F&name={FROM}&peek=10")
    assert queue.status == 200 and "row 1" in queue.text and "Purge" not in queue.text
    assert "order.#" in queue.text and "Who holds" not in queue.text
    pipelines = visitor.get("/ui/pipelines")
    assert pipelines.status == 200 and APP in pipelines.text
    pipeline = visitor.get(f"/ui/pipeline?vhost=%2F&app={APP}")
    assert pipeline.status == 200 and TABLE in pipeline.text and "not applied" in pipeline.text
    transactions = visitor.get("/ui/transactions")
    assert transactions.status == 200 and APP in transactions.text and "In doubt" not in transactions.text
    log, start = consumed(api)
    message = visitor.get(f"/ui/message?vhost=%2F&name={quote(log, safe='')}&offset={start}")
    assert message.status == 200 and "consumed" in message.text
    visitor.close()


def test_nobody_comes_in_without_a_login_and_users_replace_the_default_one() -> None:
    engine = connected(FakeKafka())
    with kafka_door(engine, {"eve": CHEAP}) as server:
        nobody, guest, eve = (Api(server.urls[0], user) for user in ("", "guest", "eve"))
        for path in ("/api/txmq/apps", "/api/queues", "/metrics", "/api/users"):
            assert nobody.ask("GET", path).status == 401, path
            assert guest.ask("GET", path).status == 401, path
        assert eve.get("/api/txmq/apps") == [] and eve.ask("GET", "/api/users").status == 501
        assert Visitor(server.urls[0], "eve", PASSWORD).get("/ui").status == 200
        for each in (nobody, guest, eve):
            each.close()


@pytest.mark.parametrize("played", [False, True])
def test_to_look_asks_a_cluster_for_what_it_has_and_changes_nothing(played: bool) -> None:
    fake = FakeKafka()
    if played:
        play(connected(fake))
    asked: set[type] = set()

    def note(_node: int, request: Request[Any]) -> None:
        asked.add(type(request))

    fake.fault = note
    with kafka_door(connected(fake)) as server:
        api, visitor = Api(server.urls[0]), Visitor(server.urls[0], "guest", "guest")
        for row in rows():
            api.ask(row.method, row.at("%2F"), {} if row.method in ("PUT", "POST") else None)
        for path in ("/ui", "/ui/queues", "/ui/pipelines", "/ui/transactions"):
            assert visitor.get(path).status == 200
        api.close()
        visitor.close()
    looks = {port.ApiVersions, port.Metadata, port.ListOffsets, port.Fetch, port.DescribeTopic, port.LogSizes}
    looks |= {port.FindCoordinator, port.DescribeTransaction}
    assert asked - looks == set()


def test_a_cluster_that_does_not_answer_is_said_and_the_door_goes_on() -> None:
    fake = FakeKafka()
    engine = connected(fake, **{"kafka.default.api.timeout.ms": "50"})
    with kafka_door(engine) as server:
        api, visitor = Api(server.urls[0]), Visitor(server.urls[0], "guest", "guest")
        assert api.get("/api/txmq/apps") == []
        fake.fault = lambda _request, _node: REFUSED
        for path in ("/api/queues", "/api/txmq/history/%2F"):
            wait_until(lambda path=path: api.ask("GET", path).status == 503)  # type: ignore[misc]
        refused = visitor.get("/ui/queues")
        assert refused.status == 503 and "cannot connect" in refused.text
        fake.fault = lambda _request, _node: None
        assert visitor.get("/ui/login").status == 303
        api.close()
        visitor.close()


def test_many_who_look_cost_the_cluster_as_much_as_one() -> None:
    now, asked = [0.0], []
    together, recent = threading.Barrier(8), Recent(lambda: now[0])

    def ask() -> int:
        asked.append(1)
        return len(asked)

    found: list[int] = []

    def look() -> None:
        together.wait()
        found.append(recent.get("apps", ask, 1.0))

    threads = [threading.Thread(target=look) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert found == [1] * 8
    now[0] = 1.0
    assert recent.get("apps", ask, 1.0) == 2
    assert [recent.get(each, ask, 1.0) for each in range(KEYS + 5)][-1] > 2 and len(recent) == KEYS


def test_what_takes_long_is_asked_for_seldom() -> None:
    now, asked, recent = [0.0], [], Recent(lambda: now[0])

    def slow() -> int:
        now[0] += 3.0
        asked.append(1)
        return len(asked)

    assert recent.get("attempts", slow, 30.0, 20.0) == 1
    now[0] += 59.0
    assert recent.get("attempts", slow, 30.0, 20.0) == 1
    now[0] += 1.0
    assert recent.get("attempts", slow, 30.0, 20.0) == 2


def test_a_failure_is_kept_for_a_moment_too() -> None:
    now, recent = [0.0], Recent(lambda: now[0])

    def fail() -> int:
        now[0] += 5.0
        raise errors.ConnectionFailed("it does not answer")

    for ask in (fail, lambda: 1):
        with pytest.raises(errors.ConnectionFailed):
            recent.get("apps", ask, 30.0, 20.0)
    now[0] += FAILED_S
    assert recent.get("apps", lambda: 1, 1.0) == 1
