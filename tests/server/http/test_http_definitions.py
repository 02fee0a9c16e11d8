"""Definitions over HTTP, both ways: what RabbitMQ exported, what another broker exported, and what is wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from broker_core.launcher import Broker
from tests.interop.rabbitmq_node import PASSWORDS, RECORDED
from tests.server.http.http_client import Api, add_people, serving
from tests.server.http.test_management import ADMIN, RabbitMqAdmin

Document = dict[str, Any]
TOPOLOGY = {
    "queues": [{"name": "in", "durable": True, "auto_delete": False, "arguments": {"x-max-length": 5}}],
    "exchanges": [
        {
            "name": "x",
            "type": "topic",
            "durable": True,
            "auto_delete": False,
            "internal": False,
            "arguments": {},
        }
    ],
    "bindings": [
        {
            "source": "x",
            "destination": "in",
            "destination_type": "queue",
            "routing_key": "a.#",
            "arguments": {},
        }
    ],
}


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with serving(tmp_path) as made:
        add_people(made)
        yield made


def names(broker: Broker) -> list[str]:
    return [each.name for each in broker.queues()]


def test_what_a_real_rabbitmq_exported_is_imported_and_its_users_log_in(broker: Broker, boss: Api) -> None:
    answer = boss.ask("POST", "/api/definitions", json.loads(RECORDED.read_text()))
    assert answer.status == 200 and answer.body["imported"]["users"] == 5
    skipped = {(each["kind"], each["name"]) for each in answer.body["skipped"]}
    assert ("global parameter", "colour") in skipped and all(each["why"] for each in answer.body["skipped"])
    assert "orders" in names(broker)
    (policy,) = boss.get("/api/policies")
    assert (policy["name"], policy["definition"]) == ("short", {"message-ttl": 1000, "max-length": 5})
    user, password = next((name, text) for name, text in PASSWORDS.items() if name in _users(boss))
    assert Api(broker.http_urls[0], user, password).ask("GET", "/api/whoami").body.get("reason") in (
        None,
        "Not management user",  # the password is right, and the tag is missing
    )
    text = (Path(broker.directory) / "audit.log").read_text()
    assert "admin.import_definitions" in text
    again = boss.ask("POST", "/api/definitions", json.loads(RECORDED.read_text()))
    assert again.body == answer.body  # applied twice is applied once


def _users(api: Api) -> set[str]:
    return {row["name"] for row in api.get("/api/users")}


def test_an_export_makes_the_same_broker_elsewhere(broker: Broker, boss: Api, tmp_path: Path) -> None:
    assert boss.ask("POST", "/api/definitions/%2F", TOPOLOGY).status == 204
    told = boss.get("/api/definitions")
    with serving(tmp_path / "other") as other:
        guest = Api(other.http_urls[0])
        assert guest.ask("POST", "/api/definitions", told).status == 204
        there = Api(other.http_urls[0], "boss")  # the hashes came too
        assert there.get("/api/definitions") == told
        assert guest.ask("GET", "/api/whoami").status == 401  # the default user has ended


def test_a_virtual_host_takes_its_own_and_no_users(broker: Broker, boss: Api) -> None:
    more = {**TOPOLOGY, "users": [{"name": "evil", "password": "x", "tags": "administrator"}]}
    answer = boss.ask("POST", "/api/definitions/other", more)
    assert answer.status == 200 and [each["name"] for each in answer.body["skipped"]] == ["users"]
    assert {row["name"] for row in boss.get("/api/queues/other")} == {"in"}
    assert boss.get("/api/queues/%2F") == [] and "evil" not in _users(boss)
    one = boss.get("/api/definitions/other")
    assert {kind: one[kind] for kind in TOPOLOGY} == TOPOLOGY
    stray = {"queues": [{**TOPOLOGY["queues"][0], "vhost": "/"}]}
    answer = boss.ask("POST", "/api/definitions/other", stray)
    assert answer.status == 400 and "name the vhost '/'" in answer.body["reason"]
    assert boss.ask("POST", "/api/definitions/nowhere", TOPOLOGY).status == 404


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"queues": {}}, "must be an array"),
        (
            {"queues": [*TOPOLOGY["queues"], {"name": "in", "vhost": "/", "arguments": {"x-max-length": 6}}]},
            "in",
        ),
        ({"queues": TOPOLOGY["queues"], "permissions": [{"user": "nobody"}]}, "permissions"),
        ({"exchanges": [{"name": "x", "vhost": "/", "type": "nope"}], "queues": TOPOLOGY["queues"]}, "nope"),
        ({"vhosts": [{"name": "made"}], "queues": [{"name": 5}]}, "name"),
    ],
)
def test_wrong_definitions_change_nothing_and_say_what_is_wrong(
    broker: Broker, boss: Api, wrong: Document, text: str
) -> None:
    before = boss.get("/api/definitions")
    answer = boss.ask("POST", "/api/definitions", wrong)
    if answer.status == 200:  # what txmq lacks is skipped, and said
        assert text in json.dumps(answer.body["skipped"])
        return
    assert answer.status == 400 and text in answer.body["reason"], answer
    assert "nothing is changed" in answer.body["reason"]
    assert boss.get("/api/definitions") == before


@pytest.mark.skipif(not ADMIN.exists(), reason="the Debian package rabbitmq-server is not installed")
def test_rabbitmqadmin_exports_and_imports(broker: Broker, boss: Api, tmp_path: Path) -> None:
    boss.ask("POST", "/api/definitions/%2F", TOPOLOGY)
    file = tmp_path / "definitions.json"
    admin = RabbitMqAdmin(broker.http_urls[0])
    assert "Exported definitions" in admin("export", str(file))
    assert boss.ask("DELETE", "/api/queues/%2F/in").status == 204 and names(broker) == []
    assert "Uploaded definitions" in admin("import", str(file))
    assert names(broker) == ["in"]
    assert boss.get("/api/definitions") == json.loads(file.read_text())
