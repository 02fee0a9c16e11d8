"""Every route of the HTTP listener, without a login and with every tag: who gets an answer, and who learns
nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pika
import pytest

from broker_core.launcher import Broker
from broker_core.server.http.routes import ROUTES
from tests.server.http.http_client import PASSWORD, Answer, Api
from tests.server.http.http_rows import EVERYBODY, WHO, Row, rows

SECRET = "secret"


@pytest.fixture(scope="module")
def people(broker: Broker) -> Iterator[dict[str, Api]]:
    apis = {name: Api(broker.http_urls[0], name) for name in EVERYBODY}
    yield apis
    for api in apis.values():
        api.close()


def ask(api: Api, row: Row, vhost: str = "%2F") -> Answer:
    return api.ask(row.method, row.at(vhost), {} if row.method in ("PUT", "POST") else None)


def test_the_table_has_every_route() -> None:
    assert sorted((row.method, row.path) for row in rows()) == sorted(
        (route.method, route.path) for route in ROUTES if not route.page
    )


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row.method} {row.path}")
def test_every_route_without_a_login_and_with_each_tag(
    broker: Broker, people: dict[str, Api], row: Row
) -> None:
    nobody = Api(broker.http_urls[0], "")
    answer = ask(nobody, row)
    assert answer.status == 401 and answer.body["error"] == "not_authorised"
    nobody.close()
    for name, api in people.items():
        answer = ask(api, row)
        if row.need == "own":  # of the caller: nobody has what is not there
            expected = 404 if name in WHO["monitoring"] else 401
            assert answer.status == expected, (name, answer)
        elif name in WHO[row.need]:
            assert answer.status not in (401, 403, 500), (name, answer)
        else:
            assert answer.status == 401 and answer.body["error"] == "not_authorised", (name, answer)
    for name in ("gone", "mqtt"):  # what PUT has made
        people["boss"].ask("DELETE", f"/api/queues/%2F/{name}")
        people["boss"].ask("DELETE", f"/api/exchanges/%2F/{name}")


@pytest.mark.parametrize(
    "row", [row for row in rows() if "{vhost}" in row.path], ids=lambda row: f"{row.method} {row.path}"
)
def test_a_virtual_host_of_others_is_answered_as_one_that_is_not_there(
    people: dict[str, Api], row: Row
) -> None:
    """Without a tag that looks at all."""
    for name in ("manager", "plain"):
        other, nowhere = ask(people[name], row, "other"), ask(people[name], row, "nowhere")
        assert (other.status, other.body) == (nowhere.status, nowhere.body), name
        assert other.status == 401


def test_a_permission_on_names_is_asked_for_as_at_every_listener(
    broker: Broker, people: dict[str, Api]
) -> None:
    boss = people["boss"]
    for name in ("mine", "theirs"):
        assert boss.ask("PUT", f"/api/queues/%2F/{name}", {}).status == 201
        assert boss.ask("PUT", f"/api/exchanges/%2F/x-{name}", {"type": "topic"}).status == 201
    broker.accounts.set_permissions("manager", "^(x-)?mine", "^(x-)?mine", "^(x-)?mine")
    get = {"count": 1, "ackmode": "ack_requeue_true", "encoding": "auto"}
    message = {"properties": {}, "routing_key": "k", "payload": "p", "payload_encoding": "string"}
    dying = {"arguments": {"x-dead-letter-exchange": "x-theirs"}}
    diverting = {"arguments": {"alternate-exchange": "x-theirs"}}
    try:
        for method, path, body, status in (
            ("PUT", "/api/queues/%2F/mine-2", {}, 201),
            ("PUT", "/api/queues/%2F/theirs-2", {}, 401),
            ("PUT", "/api/queues/%2F/mine-3", dying, 401),
            ("DELETE", "/api/queues/%2F/mine-2", None, 204),
            ("DELETE", "/api/queues/%2F/theirs", None, 401),
            ("DELETE", "/api/queues/%2F/mine/contents", None, 204),
            ("DELETE", "/api/queues/%2F/theirs/contents", None, 401),
            ("POST", "/api/queues/%2F/mine/get", get, 200),
            ("POST", "/api/queues/%2F/theirs/get", get, 401),
            ("PUT", "/api/exchanges/%2F/mine-x", {"type": "fanout"}, 201),
            ("PUT", "/api/exchanges/%2F/theirs-x", {"type": "fanout"}, 401),
            ("PUT", "/api/exchanges/%2F/mine-y", diverting, 401),
            ("DELETE", "/api/exchanges/%2F/mine-x", None, 204),
            ("DELETE", "/api/exchanges/%2F/x-theirs", None, 401),
            ("POST", "/api/exchanges/%2F/x-mine/publish", message, 200),
            ("POST", "/api/exchanges/%2F/x-theirs/publish", message, 401),
            ("POST", "/api/exchanges/%2F/amq.default/publish", message, 401),
            ("POST", "/api/bindings/%2F/e/x-mine/q/mine", {"routing_key": "k"}, 201),
            ("POST", "/api/bindings/%2F/e/x-theirs/q/mine", {"routing_key": "k"}, 401),
            ("POST", "/api/bindings/%2F/e/x-mine/q/theirs", {"routing_key": "k"}, 401),
            ("POST", "/api/bindings/%2F/e/x-mine/e/x-theirs", {"routing_key": "k"}, 401),
            ("DELETE", "/api/bindings/%2F/e/x-mine/q/mine/k", None, 204),
        ):
            answer = people["manager"].ask(method, path, body)
            assert answer.status == status, (method, path, answer)
        broker.accounts.set_topic_permissions("manager", "x-mine", "^a", "^a")
        answer = people["manager"].ask("POST", "/api/exchanges/%2F/x-mine/publish", message)
        assert answer.status == 401 and "access to topic 'k'" in answer.body["reason"]
        forged = {**message, "routing_key": "a", "properties": {"user_id": "boss"}}
        assert people["manager"].ask("POST", "/api/exchanges/%2F/x-mine/publish", forged).status == 400
    finally:
        broker.accounts.clear_topic_permissions("manager")
        broker.accounts.set_permissions("manager", ".*", ".*", ".*")


def test_no_path_tells_who_has_no_right_what_others_have(broker: Broker, people: dict[str, Api]) -> None:
    """The answers are the same before the things of others are made, and after."""
    stranger = people["stranger"]
    asked = [row for row in rows() if row.method == "GET"]

    def picture() -> dict[str, tuple[int, str]]:
        found = {}
        for row in asked:
            for value in ("gone", SECRET, connection_name):
                path = row.at().replace("gone", re.sub("[^a-z]", lambda each: f"%{ord(each[0]):02X}", value))
                answer = stranger.ask("GET", path)
                found[path] = (answer.status, re.sub(r'"rate": -?[0-9.]+', "", json.dumps(answer.body)))
        return found

    connection_name = SECRET
    boss = f"amqp://boss:{PASSWORD.replace(' ', '%20')}@"
    parameters = pika.URLParameters(broker.amqp_urls[0].replace("amqp://", boss))
    with pika.BlockingConnection(parameters) as connection:
        (seen,) = people["boss"].get("/api/connections")
        connection_name = seen["name"]
        before = picture()
        channel = connection.channel()
        channel.exchange_declare(SECRET, "fanout")
        channel.queue_declare(SECRET)
        channel.queue_bind(SECRET, SECRET, SECRET)
        channel.basic_publish(SECRET, SECRET, SECRET.encode())
        channel.basic_consume(SECRET, lambda *_: None, consumer_tag=SECRET)
        after = picture()
        assert people["boss"].get(f"/api/queues/%2F/{SECRET}")["consumers"] == 1
        channel.queue_delete(SECRET)
        channel.exchange_delete(SECRET)
    assert before == after
    told = {
        path: text for path, (status, text) in after.items() if status == 200 and "port-listener" not in path
    }
    assert all(SECRET not in text and connection_name not in text for text in told.values())
    assert json.loads(after["/api/queues"][1]) == [] and len(json.loads(after["/api/vhosts"][1])) == 1


def test_monitoring_looks_at_all_and_changes_nothing(broker: Broker, people: dict[str, Api]) -> None:
    watcher = people["watcher"]
    assert people["boss"].ask("PUT", "/api/queues/other/looked-at", {}).status == 201
    assert watcher.get("/api/queues/other/looked-at")["name"] == "looked-at"
    assert {row["vhost"] for row in watcher.get("/api/queues")} >= {"other"}
    for method, path, body in (
        ("DELETE", "/api/queues/other/looked-at", None),
        ("PUT", "/api/queues/other/another", {}),
        ("DELETE", "/api/queues/other/looked-at/contents", None),
        (
            "POST",
            "/api/queues/other/looked-at/get",
            {"count": 1, "ackmode": "ack_requeue_true", "encoding": "auto"},
        ),
    ):
        answer = watcher.ask(method, path, body)
        assert answer.status == 401, (method, path, answer)
    assert people["boss"].get("/api/queues/other/looked-at")["name"] == "looked-at"


def test_a_connection_is_closed_by_its_user_and_by_who_decides_for_others(
    broker: Broker, people: dict[str, Api]
) -> None:
    login = f"amqp://manager:{PASSWORD.replace(' ', '%20')}@"
    parameters = pika.URLParameters(broker.amqp_urls[0].replace("amqp://", login))
    for closer in ("manager", "operator", "boss"):
        connection = pika.BlockingConnection(parameters)
        (seen,) = people["manager"].get("/api/connections")
        name = seen["name"].replace(" ", "%20").replace(">", "%3E").replace(":", "%3A")
        assert people["stranger"].ask("DELETE", f"/api/connections/{name}").status == 401
        assert people["watcher"].ask("DELETE", f"/api/connections/{name}").status == 401
        assert (
            people[closer].ask("DELETE", f"/api/connections/{name}", None, {"x-reason": "why"}).status == 204
        )
        with pytest.raises(pika.exceptions.ConnectionClosedByBroker):
            connection.process_data_events(60)
