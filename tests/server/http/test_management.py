"""RabbitMQ's management API: the same names and types as RabbitMQ 3.10, whose answers are recorded, and tools
that speak it, unmodified.

Not here: who may ask what (``test_http_rights.py``). ``rabbitmq_3_10.json``: of each path of a RabbitMQ
3.10.8 with the same queues, the types of what it answered.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pika
import pytest

from broker_core.launcher import Broker
from tests.progress import GUARD_S, wait_until
from tests.server.http.http_client import CHEAP, PASSWORD, Api, add_people, serving

RECORDED: dict[str, Any] = json.loads(Path(__file__).with_name("rabbitmq_3_10.json").read_text())
ADMIN = Path(
    "/usr/lib/rabbitmq/lib/rabbitmq_server-3.10.8/plugins/rabbitmq_management-3.10.8/priv/www/cli/rabbitmqadmin"
)
COUNTS = ("messages", "messages_ready", "messages_unacknowledged")
# what tools read, by path: telegraf's inputs.rabbitmq, the Prometheus exporter, KEDA, Datadog's check, Flower,
# rabbitmqadmin, Terraform's provider, the Java client. What is missing is in docs/management_api.md.
STATS = ("publish", "ack", "deliver", "deliver_get", "deliver_no_ack", "get", "get_no_ack", "redeliver")
TOOLS: dict[str, tuple[str, ...]] = {
    "/api/overview": (
        *(f"queue_totals.{name}" for name in COUNTS),
        *(
            f"object_totals.{name}"
            for name in ("channels", "connections", "consumers", "exchanges", "queues")
        ),
        *(
            f"message_stats.{name}{more}"
            for name in (*STATS, "confirm", "return_unroutable")
            for more in ("", "_details.rate")
        ),
        "rabbitmq_version",
        "management_version",
        "cluster_name",
        "node",
        "listeners",
        "exchange_types",
    ),
    "/api/nodes": (
        *("name", "running", "uptime", "os_pid", "run_queue", "type"),
        *("disk_free", "disk_free_alarm", "disk_free_limit", "mem_alarm", "mem_limit", "mem_used"),
        *("fd_total", "fd_used", "proc_total", "proc_used", "sockets_total", "sockets_used"),
    ),
    "/api/queues/%2F/orders": (
        *COUNTS,
        *(
            "messages_details.rate",
            *(f"message_stats.{name}{more}" for name in STATS for more in ("", "_details.rate")),
            *("message_bytes", "message_bytes_ready", "message_bytes_unacknowledged", "message_bytes_ram"),
            *("memory", "consumer_utilisation", "consumer_capacity"),
            "consumers",
            "name",
            "vhost",
            "node",
        ),
        *("durable", "auto_delete", "exclusive", "arguments", "state", "type", "consumer_details"),
    ),
    "/api/exchanges/%2F/events": (
        *("name", "vhost", "type", "durable", "auto_delete", "internal", "arguments"),
    ),
    "/api/bindings": (
        *("source", "vhost", "destination", "destination_type", "routing_key", "properties_key", "arguments"),
    ),
    "/api/connections": (
        *("name", "user", "vhost", "state", "channels", "channel_max", "frame_max", "timeout", "node"),
        *("peer_host", "peer_port", "host", "port", "protocol", "ssl", "connected_at", "client_properties"),
    ),
    "/api/channels": (
        *("name", "number", "user", "vhost", "transactional", "confirm", "consumer_count", "prefetch_count"),
        *("messages_unacknowledged", "messages_unconfirmed", "messages_uncommitted", "acks_uncommitted"),
        *("connection_details.name", "connection_details.peer_host", "connection_details.peer_port"),
    ),
    "/api/consumers": (
        *("consumer_tag", "queue.name", "queue.vhost", "ack_required", "exclusive", "prefetch_count"),
        *("channel_details.name", "channel_details.connection_name", "channel_details.number"),
    ),
    "/api/vhosts": ("name", "tracing", "description", *COUNTS),
    "/api/users": ("name", "tags", "password_hash", "hashing_algorithm"),
    "/api/permissions": ("user", "vhost", "configure", "write", "read"),
}


class World:
    """What RabbitMQ had when it was recorded."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        broker.accounts.add_user("guest", CHEAP, ["administrator"])
        broker.accounts.set_permissions("guest", ".*", ".*", ".*")
        broker.accounts.set_topic_permissions("manager", "amq.topic", "^a", ".*")
        login = f"amqp://guest:{quote(PASSWORD)}@"
        self.connection = pika.BlockingConnection(
            pika.URLParameters(broker.amqp_urls[0].replace("amqp://", login))
        )
        channel = self.connection.channel()
        channel.queue_declare(
            "orders", durable=True, arguments={"x-max-length": 1000, "x-dead-letter-exchange": ""}
        )
        channel.exchange_declare("events", "topic", durable=True)
        channel.queue_bind("orders", "events", "order.#")
        channel.queue_declare("empty", durable=False)
        channel.basic_consume("empty", lambda *_: None, consumer_tag="tag1")
        channel.confirm_delivery()
        for number in range(5):
            properties = pika.BasicProperties(
                headers={"n": number}, delivery_mode=2, content_type="text/plain"
            )
            channel.basic_publish("events", "order.new", b"body%d" % number, properties)
        for _ in range(3):
            channel.basic_publish("", "empty", b"x")
        self.connection.channel().basic_get("orders", auto_ack=False)
        self.api = Api(broker.http_urls[0], "guest", PASSWORD)
        (connection,) = self.api.get("/api/connections")
        self.names = {"CONN": quote(connection["name"], safe="")}

    def at(self, path: str) -> str:
        return path.replace("CONN", self.names["CONN"]).replace("CHAN", f"{self.names['CONN']}%20(1)")


@pytest.fixture(scope="module")
def often() -> Iterator[None]:
    """A sample each half second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("broker_core.server.http.server.INTERVAL_S", 0.5)
        yield


@pytest.fixture(scope="module")
def world(often: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with serving(tmp_path_factory.mktemp("http")) as broker:
        add_people(broker)
        made = World(broker)
        yield made
        made.api.close()
        made.connection.close()


def shape(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: shape(each) for name, each in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
    return kinds[type(value)]


def differences(path: str, theirs: Any, ours: Any) -> list[str]:
    """Where both have a value, and of another type."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        common = theirs.keys() & ours.keys()
        return [
            text
            for name in sorted(common)
            for text in differences(f"{path}.{name}", theirs[name], ours[name])
        ]
    if path.endswith((".consumer_utilisation", ".consumer_capacity")):  # 0 of a queue without consumers
        theirs = "integer" if ours == "integer" else "number"
    if isinstance(theirs, list) and isinstance(ours, list):
        return differences(f"{path}[]", theirs[0], ours[0]) if theirs and ours else []
    return (
        [] if theirs == ours or "null" in (theirs, ours) else [f"{path}: {theirs} of RabbitMQ, {ours} here"]
    )


@pytest.mark.parametrize("path", sorted(RECORDED))
def test_every_key_that_both_have_is_of_the_type_of_rabbitmqs(world: World, path: str) -> None:
    answer = world.api.ask("GET", world.at(path))
    assert answer.status == 200, answer
    assert differences(path, RECORDED[path], shape(answer.body)) == []
    if isinstance(RECORDED[path], dict):
        assert RECORDED[path].keys() & answer.body.keys(), "nothing is compared"


@pytest.mark.parametrize("path", sorted(RECORDED))
def test_a_slash_at_the_end_is_the_same_path(world: World, path: str) -> None:
    """The Java client asks so."""
    bare, _, query = world.at(path).partition("?")
    answer = world.api.ask("GET", f"{bare}/?{query}")
    assert (answer.status, differences(path, RECORDED[path], shape(answer.body))) == (200, [])


@pytest.mark.parametrize("path", sorted(TOOLS))
def test_every_key_that_tools_read_is_there(world: World, path: str) -> None:
    theirs = RECORDED[path]
    ours = world.api.get(path)
    (theirs, ours) = (theirs[0], ours[0]) if isinstance(theirs, list) else (theirs, ours)
    for key in TOOLS[path]:
        for row in (theirs, ours):
            value = row
            for step in key.split("."):
                assert step in value, (key, row)
                value = value[step]


LISTS = (
    "parameters/shovel", "parameters/shovel/%2F", "parameters/federation-upstream", "operator-policies/%2F", "policies",
    "user-limits/guest", "deprecated-features", "shovels", "shovels/%2F", "federation-links/%2F",
)  # fmt: skip


@pytest.mark.parametrize("path", LISTS)
def test_a_list_of_what_there_is_none_of_is_empty_and_not_missing(world: World, path: str) -> None:
    assert world.api.get(f"/api/{path}") == []


def test_users_who_may_enter_nowhere_are_listed(world: World) -> None:
    listed = {row["name"] for row in world.api.get("/api/users/without-permissions")}
    assert "watcher" in listed and not {"guest", "boss", "plain"} & listed


def test_what_is_delivered_got_and_come_again_is_counted(often: None, tmp_path: Path) -> None:
    with serving(tmp_path) as broker:
        api = Api(broker.http_urls[0])
        url = broker.amqp_urls[0].replace("//", "//guest:guest@")
        with pika.BlockingConnection(pika.URLParameters(url)) as connection:
            channel = connection.channel()
            channel.queue_declare("q", durable=True)
            channel.confirm_delivery()
            for number in range(6):
                channel.basic_publish("", "q", b"%d" % number * 50)
            with pytest.raises(pika.exceptions.UnroutableError):
                channel.basic_publish("", "gone", b"x", mandatory=True)
            method, *_ = channel.basic_get("q")
            channel.basic_nack(method.delivery_tag)  # it comes again
            channel.basic_get("q", auto_ack=True)
            got: list[int] = []
            tag = channel.basic_consume("q", lambda _c, method, *_: got.append(method.delivery_tag))
            while len(got) < 5:
                connection.process_data_events(1)
            row = api.get("/api/queues/%2F/q")
            assert (row["message_bytes"], row["message_bytes_unacknowledged"]) == (250, 250)
            assert (row["message_bytes_ready"], row["memory"] >= 250) == (0, True)
            channel.basic_cancel(tag)
            channel.basic_nack(0, multiple=True)
            more = connection.channel()
            none = more.basic_consume("q", lambda *_: got.append(0), auto_ack=True)
            while len(got) < 10:
                connection.process_data_events(1)
            more.basic_cancel(none)
        wanted = {"publish": 6, "get": 1, "get_no_ack": 1, "redeliver": 6, "deliver_no_ack": 5, "ack": 6}
        stats = wait_until(lambda: _if(api.get("/api/queues/%2F/q")["message_stats"], wanted))
        assert stats["deliver"] >= 5
        # the overview counts what a sample has seen
        wait_until(
            lambda: _if(
                api.get("/api/overview")["message_stats"], {**wanted, "confirm": 7, "return_unroutable": 1}
            )
        )
        idle = wait_until(lambda: api.get("/api/queues/%2F/q").get("idle_since"))
        assert idle.endswith("+00:00")


def _if(found: dict[str, Any], wanted: dict[str, int]) -> dict[str, Any] | None:
    return found if {name: found[name] for name in wanted} == wanted else None


def test_numbers_of_a_queue_are_right(world: World) -> None:
    orders, empty = (world.api.get(f"/api/queues/%2F/{name}") for name in ("orders", "empty"))
    assert [orders[name] for name in COUNTS] == [5, 4, 1] and orders["message_stats"]["publish"] == 5
    assert [empty[name] for name in COUNTS] == [3, 0, 3] and empty["consumers"] == 1
    assert empty["consumer_details"][0]["consumer_tag"] == "tag1"
    overview = world.api.get("/api/overview")
    assert [overview["queue_totals"][name] for name in COUNTS] == [8, 4, 4]
    assert overview["object_totals"]["consumers"] == 1 and overview["object_totals"]["channels"] == 2


def test_definitions_are_in_rabbitmqs_format(world: World) -> None:
    told = world.api.get("/api/definitions")
    (orders,) = [row for row in told["queues"] if row["name"] == "orders"]
    arguments = {"x-max-length": 1000, "x-dead-letter-exchange": ""}
    assert orders == {
        "name": "orders",
        "vhost": "/",
        "durable": True,
        "auto_delete": False,
        "arguments": arguments,
    }
    binding = {
        "source": "events",
        "vhost": "/",
        "destination": "orders",
        "destination_type": "queue",
        "routing_key": "order.#",
        "arguments": {},
    }
    assert told["bindings"] == [binding] and [row["name"] for row in told["exchanges"]] == ["events"]
    assert {row["name"] for row in told["vhosts"]} == {"/", "other"}
    assert {row["name"] for row in told["users"]} >= {"boss", "plain"}
    assert all(row["password_hash"] and row["hashing_algorithm"] for row in told["users"])
    one = world.api.get("/api/definitions/%2F")
    assert [{**row, "vhost": "/"} for row in one["exchanges"]] == told["exchanges"]
    assert "users" not in one and "vhost" not in one["queues"][0]


def test_rates_are_those_of_the_last_seconds(world: World) -> None:
    with world.broker.channel() as channel:
        channel.queue_declare("rated")

        def rate() -> float:
            channel.publish(b"x", routing_key="rated")
            return world.api.get("/api/queues/%2F/rated")["message_stats"]["publish_details"]["rate"]

        wait_until(lambda: rate() > 0)
        vhost = world.api.get("/api/vhosts/%2F")["message_stats"]
        assert vhost["publish_details"]["rate"] > 0 and vhost["publish"] > 0
        channel.queue_delete("rated")


def test_to_look_at_messages_changes_nothing(world: World) -> None:
    asked = {"count": 10, "ackmode": "ack_requeue_true", "encoding": "auto"}
    first = world.api.ask("POST", "/api/queues/%2F/orders/get", asked).body
    assert [row["payload"] for row in first] == [f"body{number}" for number in range(1, 5)]
    assert first[0]["properties"] == {"content_type": "text/plain", "delivery_mode": 2, "headers": {"n": 1}}
    assert [row["message_count"] for row in first] == [3, 2, 1, 0]
    assert world.api.ask("POST", "/api/queues/%2F/orders/get", asked).body == first
    assert not any(row["redelivered"] for row in first)
    coded = world.api.ask(
        "POST", "/api/queues/%2F/orders/get", {**asked, "encoding": "base64", "truncate": 2}
    )
    assert base64.b64decode(coded.body[0]["payload"]) == b"bo" and coded.body[0]["payload_bytes"] == 5
    for mode in ("ack_requeue_false", "reject_requeue_false", "get"):
        answer = world.api.ask("POST", "/api/queues/%2F/orders/get", {**asked, "ackmode": mode})
        assert answer.status == 400 and "only looked at" in answer.body["reason"]
    assert world.api.get("/api/queues/%2F/orders")["messages"] == 5


@pytest.mark.parametrize(
    "query",
    [
        "columns=" + ",".join(f"c{number}" for number in range(101)),
        "columns=a.b.c.d.e.f.g",
        "sort=a.b.c.d.e.f.g",
        "page=1&sort=" + "a." * 4_000,
    ],
    ids=["columns", "levels", "order", "long"],
)
def test_a_query_costs_no_more_than_a_hundred_columns_of_six_levels(world: World, query: str) -> None:
    answer = world.api.ask("GET", f"/api/queues?{query}")
    assert (answer.status, answer.body["error"]) == (400, "bad_request")
    assert world.api.ask("GET", "/api/queues?columns=" + ",".join(["name"] * 1_000)).status == 200


def test_lists_have_pages_order_patterns_and_columns(world: World) -> None:
    with world.broker.channel() as channel:
        for number in range(7):
            channel.queue_declare(f"page-{number}", durable=False)
        for _ in range(3):
            channel.publish(b"x", routing_key="page-3")
    page = world.api.get("/api/queues?page=2&page_size=3&name=page-&columns=name,message_stats.publish")
    assert [row["name"] for row in page["items"]] == ["page-3", "page-4", "page-5"]
    assert page["items"][0] == {"name": "page-3", "message_stats": {"publish": 3}}
    assert (page["filtered_count"], page["item_count"], page["page_count"], page["page"]) == (7, 3, 3, 2)
    ordered = world.api.get("/api/queues/%2F?sort=messages&sort_reverse=true&page=1&page_size=2&name=page")
    assert ordered["items"][0]["name"] == "page-3"
    # KEDA's query
    asked = "page=1&use_regex=true&pagination=false&name=%5Epage-%5B12%5D%24&page_size=100"
    found = world.api.get(f"/api/queues/%2F?{asked}")
    assert [row["name"] for row in found["items"]] == ["page-1", "page-2"]
    for query in ("page=0", "page=x", "page=1&page_size=100000", "page=9999", "page=1&use_regex=true&name=("):
        assert world.api.ask("GET", f"/api/queues?{query}").status == 400, query
    for number in range(7):
        assert world.api.ask("DELETE", f"/api/queues/%2F/page-{number}").status == 204


@pytest.mark.parametrize("name", ["a/b", "ünï?#&", "%2F", ".", "..", "<script>", "x" * 255])
def test_any_name_is_declared_seen_bound_and_deleted(world: World, name: str) -> None:
    at = quote(name, safe="")
    api = world.api
    assert api.ask("PUT", f"/api/queues/%2F/{at}", {}).status == 201
    assert api.ask("PUT", f"/api/exchanges/%2F/{at}", {"type": "headers"}).status == 201
    arguments = {"x-match": "all", "n": 1}
    bound = api.ask("POST", f"/api/bindings/%2F/e/{at}/q/{at}", {"routing_key": name, "arguments": arguments})
    assert bound.status == 201
    (binding,) = api.get(f"/api/exchanges/%2F/{at}/bindings/source")
    assert (binding["destination"], binding["routing_key"], binding["arguments"]) == (name, name, arguments)
    key = binding["properties_key"]
    assert api.get(f"/api/bindings/%2F/e/{at}/q/{at}/{quote(key, safe='')}") == binding
    assert api.ask("DELETE", f"/api/bindings/%2F/e/{at}/q/{at}/{quote(key, safe='')}").status == 204
    assert api.get(f"/api/queues/%2F/{at}")["name"] == name
    assert api.ask("DELETE", f"/api/queues/%2F/{at}").status == 204
    assert api.ask("DELETE", f"/api/exchanges/%2F/{at}").status == 204


# -- tools ---------------------------------------------------------------------------------------------------
class RabbitMqAdmin:
    """The script of the Debian package rabbitmq-server."""

    def __init__(self, url: str) -> None:
        self._port = str(urlsplit(url).port)

    def __call__(self, *command: str) -> str:
        login = ["-H", "127.0.0.1", "-P", self._port, "-u", "boss", "-p", PASSWORD]
        done = subprocess.run(
            [sys.executable, str(ADMIN), *login, *command],
            capture_output=True,
            text=True,
            timeout=GUARD_S,
            env={**os.environ, "PYTHONWARNINGS": "ignore"},
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout

    def rows(self, *command: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self("-f", "raw_json", *command))
        return found


@pytest.mark.skipif(not ADMIN.exists(), reason="the Debian package rabbitmq-server is not installed")
def test_rabbitmqadmin_does_its_work(world: World) -> None:
    admin = RabbitMqAdmin(world.broker.http_urls[0])
    admin("declare", "queue", "name=tool", "durable=true", 'arguments={"x-max-length":10}')
    admin("declare", "exchange", "name=tool-x", "type=topic")
    admin("declare", "binding", "source=tool-x", "destination=tool", "routing_key=a.#")
    assert "Message published" in admin("publish", "exchange=tool-x", "routing_key=a.b", "payload=hello")
    assert "NOT routed" in admin("publish", "exchange=tool-x", "routing_key=c", "payload=hello")
    (message,) = admin.rows("get", "queue=tool", "count=5", "ackmode=ack_requeue_true")
    assert (message["payload"], message["exchange"], message["routing_key"]) == ("hello", "tool-x", "a.b")
    assert "tool" in admin("list", "queues", "vhost", "name", "messages", "arguments")
    assert {"tool", "orders"} <= {row["name"] for row in admin.rows("list", "queues")}
    assert "a.#" in admin("list", "bindings")
    for what in (
        "exchanges",
        "connections",
        "channels",
        "consumers",
        "vhosts",
        "users",
        "permissions",
        "nodes",
        "policies",
        "parameters",
    ):
        admin("list", what)
    assert json.loads(admin("-f", "raw_json", "show", "overview"))[0]["product_name"] == "txmq"
    admin("purge", "queue", "name=tool")
    assert admin.rows("get", "queue=tool", "ackmode=ack_requeue_true") == []
    admin(
        "delete",
        "binding",
        "source=tool-x",
        "destination_type=queue",
        "destination=tool",
        "properties_key=a.%23",
    )
    admin("delete", "queue", "name=tool")
    admin("delete", "exchange", "name=tool-x")
    admin("declare", "vhost", "name=tools")
    admin("declare", "user", "name=tooled", "password=secret", "tags=management")
    admin("declare", "permission", "vhost=tools", "user=tooled", "configure=.*", "write=.*", "read=.*")
    assert any(row["user"] == "tooled" for row in admin.rows("list", "permissions"))
    admin("delete", "permission", "vhost=tools", "user=tooled")
    admin("delete", "user", "name=tooled")
    admin("delete", "vhost", "name=tools")
    login = f"amqp://manager:{quote(PASSWORD)}@"
    connection = pika.BlockingConnection(
        pika.URLParameters(world.broker.amqp_urls[0].replace("amqp://", login))
    )
    (seen,) = [row for row in admin.rows("list", "connections") if row["user"] == "manager"]
    admin("close", "connection", f"name={seen['name']}")
    with pytest.raises(pika.exceptions.ConnectionClosedByBroker):
        connection.process_data_events(60)


def test_telegraf_gets_an_answer_from_each_path_that_it_asks(world: World) -> None:
    """The requests of its plugin inputs.rabbitmq, in its order."""
    (node,) = world.api.get("/api/nodes")
    memory = world.api.get(f"/api/nodes/{quote(node['name'], safe='')}/memory")["memory"]
    assert memory["total"]["rss"] > 0
    for path in ("overview", "queues", "exchanges", "federation-links", "health/checks/local-alarms"):
        assert world.api.get(f"/api/{path}") is not None


def test_permissions_and_limits_are_those_of_the_virtual_host_of_the_path(world: World) -> None:
    api = world.api
    patterns = {"configure": "^c", "write": "^w", "read": "^r"}
    assert api.ask("PUT", "/api/permissions/other/plain", patterns).status == 201
    assert api.ask("PUT", "/api/permissions/other/plain", patterns).status == 204
    assert api.get("/api/permissions/other/plain") == {"user": "plain", "vhost": "other", **patterns}
    assert api.get("/api/permissions/%2F/plain")["configure"] == ".*"
    assert api.ask("DELETE", "/api/permissions/other/plain").status == 204
    assert api.ask("GET", "/api/permissions/other/plain").status == 404
    assert api.get("/api/permissions/%2F/plain")["configure"] == ".*"
    topic = {"exchange": "amq.topic", "write": "^w", "read": "^r"}
    assert api.ask("PUT", "/api/topic-permissions/other/plain", topic).status == 201
    assert api.get("/api/topic-permissions/other/plain") == [{"user": "plain", "vhost": "other", **topic}]
    assert api.ask("DELETE", "/api/topic-permissions/other/plain").status == 204
    assert api.ask("PUT", "/api/vhost-limits/other/max-queues", {"value": 5}).status == 204
    assert api.get("/api/vhost-limits") == [{"vhost": "other", "value": {"max-queues": 5}}]
    assert api.ask("DELETE", "/api/vhost-limits/other/max-queues").status == 204
    assert api.get("/api/vhost-limits") == []
    assert api.ask("PUT", "/api/permissions/nowhere/plain", patterns).status == 404
    assert api.ask("PUT", "/api/permissions/%2F/nobody", patterns).status == 400


@pytest.mark.parametrize("single", [False, True])
def test_one_consumer_is_the_single_active_one_and_the_others_wait(world: World, single: bool) -> None:
    channel = world.connection.channel()
    channel.queue_declare("turns", exclusive=True, arguments={"x-single-active-consumer": single})
    for tag in ("first", "second", "third"):
        channel.basic_consume("turns", lambda *_: None, consumer_tag=tag)
    channel.basic_cancel("first")
    found = {
        row["consumer_tag"]: (row["active"], row["activity_status"])
        for row in world.api.get("/api/consumers")
        if row["queue"]["name"] == "turns"
    }
    second, third = ((True, "single_active"), (False, "waiting")) if single else ((True, "up"),) * 2
    assert found == {"second": second, "third": third}
    channel.queue_delete("turns")
    channel.close()


def test_the_names_of_direct_replies_are_in_no_list(world: World) -> None:
    """Who knows one may answer."""
    channel = world.connection.channel()
    channel.basic_consume("amq.rabbitmq.reply-to", lambda *_: None, auto_ack=True, consumer_tag="replies")
    row = world.api.get(f"/api/channels/{world.names['CONN']}%20({channel.channel_number})")
    assert row["consumer_details"] == [], row
    assert [each["consumer_tag"] for each in world.api.get("/api/consumers")] == ["tag1"]
    channel.close()
