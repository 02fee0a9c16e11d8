"""Any JSON in any field, and any name in any path: one clear error, and never a defect."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from decimal import Decimal
from typing import Any
from urllib.parse import quote

import pytest

from broker_core.launcher import Broker
from broker_core.message.field_table import Timestamp
from broker_core.message.properties import Properties
from tests.server.http.http_client import Api, add_people, serving
from tests.server.http.http_rows import rows

FIELDS = (
    *("arguments", "durable", "auto_delete", "internal", "type", "routing_key", "properties", "payload"),
    *("payload_encoding", "count", "ackmode", "encoding", "truncate", "tags", "password", "configure"),
    *("write", "read", "exchange", "value", "action", "of"),
    *("users", "vhosts", "permissions", "topic_permissions", "parameters", "queues", "exchanges", "bindings"),
)
DEEP: Any = {}
for _ in range(200):
    DEEP = {"x": DEEP}
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1.5, 1 << 63, -(1 << 70), 10**400, "", "x" * 300, "\ud800", "\x00", "(", "ack_requeue_true"),
    *("auto", "string", "base64", "true", [], [1], ["management", 1], {}, {"x": 1}, {"headers": 1}, {"headers": {"n": None}}),
    *({"x-max-length": 1 << 64}, {"x-max-length": -1}, {"x-queue-type": "stream"}, {"x": float("nan")}, {"x": [DEEP]}, DEEP),
    *([{}], [{"name": "fuzz"}], [{"name": 1, "vhost": []}], [{"name": "fuzz", "vhost": "/", "type": "direct"}]),
    *([{"user": "boss", "vhost": "/", "configure": "(", "write": "", "read": ""}], [{"name": "fuzz", "tags": [1]}]),
    *({"x": 10**400}, {"\ud800": 1}, {"x" * 300: 1}, {"delivery_mode": 9}, {"timestamp": -1}, {"content_type": 5}, {"expiration": "x"}),
)  # fmt: skip


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with serving(tmp_path_factory.mktemp("http")) as made:
        add_people(made)
        made.vhosts.add_vhost("fuzzed")
        yield made


@pytest.mark.parametrize(
    "row", [row for row in rows() if row.method in ("PUT", "POST")], ids=lambda row: row.path
)
def test_any_value_in_any_field_is_no_defect(broker: Broker, row: Any, seed: int) -> None:
    source = random.Random(f"{seed} {row.path}")
    api = Api(broker.http_urls[0], "boss")
    for _ in range(60):
        body = {name: source.choice(VALUES) for name in source.sample(FIELDS, source.randint(1, len(FIELDS)))}
        name = source.choice(
            ("gone", "gone", "a%2Fb", "%00", "x" * 256, "amq.default", "amq.topic", "%ED%A0%80")
        )
        path = row.at(source.choice(("%2F", "fuzzed"))).replace("gone", name)
        answer = api.ask(row.method, path, json.dumps(body).encode())
        assert answer.status < 500, (row.method, path, body, answer)
        if answer.status >= 400:
            assert set(answer.body) == {"error", "reason"}, answer
    for path in (
        "/api/queues",
        "/api/exchanges",
        "/api/bindings",
        "/api/vhosts",
        "/api/users",
        "/api/permissions",
        "/api/definitions",
    ):
        found = api.ask("GET", path)
        assert found.status == 200, (path, found)
        json.dumps(found.body, allow_nan=False)
    api.close()


@pytest.mark.parametrize("payload", ["é", "YQ", "YQ==\n", "Y Q="])
def test_a_payload_that_is_no_base64_is_said(broker: Broker, payload: str) -> None:
    body = {"properties": {}, "routing_key": "q", "payload": payload, "payload_encoding": "base64"}
    answer = Api(broker.http_urls[0], "boss").ask("POST", "/api/exchanges/%2F/amq.direct/publish", body)
    assert (answer.status, answer.body["reason"]) == (400, "the payload is not base64")


def test_arguments_and_headers_of_every_type_of_amqp_are_json(broker: Broker) -> None:
    api = Api(broker.http_urls[0], "boss")
    odd: dict[str, Any] = {"d": float("nan"), "i": float("-inf"), "b": b"\xff\xfe", "n": None}
    odd |= {"l": [1, {"x": b"\x00", "f": float("inf")}], "t": Timestamp(5), "m": Decimal("1.5")}
    with broker.channel() as channel:
        channel.queue_declare("typed")
        channel.exchange_declare("typed", "headers")
        channel.queue_bind("typed", "typed", "", {"b": b"\xff", "n": None, "l": [1, {"x": b"\x00"}]})
        channel.publish(b"\xff", "", "typed", Properties(headers=odd, timestamp=5).encode())
    asked = {"count": 1, "ackmode": "ack_requeue_true", "encoding": "auto"}
    for answer in (
        api.ask("GET", "/api/bindings/%2F"),
        api.ask("POST", "/api/queues/%2F/typed/get", asked),
        api.ask("GET", "/api/definitions"),
    ):
        assert answer.status == 200, answer
        json.dumps(answer.body, allow_nan=False)
    (binding,) = api.get("/api/exchanges/%2F/typed/bindings/source")
    key = quote(binding["properties_key"], safe="")
    assert api.ask("DELETE", f"/api/bindings/%2F/e/typed/q/typed/{key}").status == 204
    assert api.get("/api/exchanges/%2F/typed/bindings/source") == []
    api.close()


MESSAGE = {"properties": {}, "routing_key": "k", "payload": "p", "payload_encoding": "string"}


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/api/exchanges/%2F/amq.topic/publish", {**MESSAGE, "payload": "\ud800"}),
        (
            "POST",
            "/api/exchanges/%2F/amq.topic/publish",
            {**MESSAGE, "properties": {"headers": {"\udfff": 1}}},
        ),
        ("PUT", "/api/queues/%2F/lone", {"arguments": {"a": "\ud800"}}),
        ("PUT", "/api/exchanges/%2F/lone", {"type": "direct", "arguments": {"a": ["\ud800"]}}),
        ("POST", "/api/bindings/%2F/e/amq.topic/e/amq.fanout", {"arguments": {"a": "\udbff x"}}),
        ("PUT", "/api/vhosts/lone", {"description": "\ud800"}),
    ],
)
def test_a_lone_surrogate_anywhere_in_a_body_is_refused(
    broker: Broker, method: str, path: str, body: Any
) -> None:
    api = Api(broker.http_urls[0], "boss")
    before = api.get("/api/definitions")
    answer = api.ask(method, path, body)
    assert answer.status == 400 and "lone surrogate" in answer.body["reason"], answer
    assert api.get("/api/definitions") == before
    pair = api.ask("POST", "/api/exchanges/%2F/amq.topic/publish", {**MESSAGE, "payload": "\U0001f600"})
    assert pair.status == 200
    api.close()
