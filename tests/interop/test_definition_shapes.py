"""Definitions files in the shapes that people and tools write, each posted to RabbitMQ 3.10.8 too: one table.

Shapes are made by hand after files of public repositories: written for a container or a chart, exported by
RabbitMQ 3.6 to 4.2, made for Terraform and for operators of Kubernetes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pika
import pytest

from broker_core.core.errors import TxmqError
from broker_core.launcher import Broker
from tests.interop.rabbitmq_node import rabbit

Row = dict[str, Any]
ALL = {"configure": ".*", "write": ".*", "read": ".*"}
HASH = "i1jHZntihmaPCruqDPM4zOvOZztqnkt2uokYDFj+mTpjBrBi"
SHA256, SHA512 = "rabbit_password_hashing_sha256", "rabbit_password_hashing_sha512"
ROOT = {"name": "root", "password_hash": HASH, "hashing_algorithm": SHA256, "tags": "administrator"}
DEV = {"name": "dev", "password": "of dev", "tags": "administrator"}


def queue(name: str = "q", vhost: str = "/", /, **arguments: Any) -> Row:
    arguments = {key.replace("_", "-"): value for key, value in arguments.items()}
    return {"name": name, "vhost": vhost, "durable": True, "auto_delete": False, "arguments": arguments}


def exchange(name: str, type: str = "topic", **more: Any) -> Row:
    return {"name": name, "vhost": "/", "type": type, "durable": True, "auto_delete": False} | {
        "internal": False, "arguments": {}, **more,
    }  # fmt: skip


def binding(source: str, destination: str, **more: Any) -> Row:
    ends = {"source": source, "vhost": "/", "destination": destination, "destination_type": "queue"}
    return {**ends, "routing_key": "k", "arguments": {}, **more}


def users(*rows: Row, **more: Any) -> Row:
    permissions = [{"user": row["name"], "vhost": "/", **ALL} for row in rows]
    return {"users": list(rows), "vhosts": [{"name": "/"}], "permissions": permissions, **more}


class Shape(NamedTuple):
    """``rabbit``: whether 3.10.8 takes it. ``refused``: what the error here says. ``skipped``: kind and name.
    ``queues``: of ``/``, as RabbitMQ has them too unless it refuses.
    """

    document: Row
    rabbit: bool = True
    refused: str = ""
    skipped: tuple[tuple[str, str], ...] = ()
    queues: tuple[str, ...] = ()
    logins: tuple[str, ...] = ()  # user:password


Q, S = {"x_queue_type": "quorum"}, {"x_queue_type": "stream"}
SHAPES: dict[str, Shape] = {
    "by hand, one user with its password": Shape(users(DEV), logins=("dev:of dev",)),
    "by hand, a password beside a hash": Shape(users(ROOT, DEV), logins=("dev:of dev",)),
    "a chart of Kubernetes": Shape(
        users(
            DEV,
            policies=[{"vhost": "/", "name": "ha-all", "pattern": ".*", "definition": {"ha-mode": "all"}}],
            queues=[queue()],
            exchanges=[exchange("x")],
            bindings=[binding("x", "q")],
        ),
        skipped=(("setting of policy", "ha-all: ha-mode"),),
        queues=("q",),
        logins=("dev:of dev",),
    ),
    "a container, the algorithm beside a password": Shape(
        users({**DEV, "hashing_algorithm": SHA512, "tags": ["administrator"]}), logins=("dev:of dev",)
    ),
    "a password and a hash": Shape(
        users(ROOT, {**DEV, "password_hash": HASH}), False, skipped=(("password", "dev"),)
    ),
    "an empty password": Shape(users(ROOT, {**DEV, "password": ""}), skipped=(("password", "dev"),)),
    "a user without a password": Shape(
        users(ROOT, {"name": "cert", "password_hash": "", "tags": ""}), skipped=(("password", "cert"),)
    ),
    "a hash without its algorithm, since 3.6": Shape(
        users(DEV, {"name": "old", "password_hash": HASH, "tags": ""}), logins=("dev:of dev",)
    ),
    "a hash of MD5": Shape(
        users(ROOT, {**DEV, "name": "md5"})
        | {"users": [ROOT, {**ROOT, "name": "md5", "hashing_algorithm": "rabbit_password_hashing_md5"}]},
        skipped=(("password", "md5"),),
    ),
    "a hash of a plugin": Shape(
        users(ROOT, {**ROOT, "name": "own", "hashing_algorithm": "company_hash"}),
        skipped=(("password", "own"),),
    ),
    "limits of a user": Shape(
        users({**DEV, "limits": {"max-connections": 3}}), skipped=(("limit", "dev"),), logins=("dev:of dev",)
    ),
    "limits of a user that are none": Shape(users({**DEV, "limits": 5}), False, "limits of user 'dev'"),
    "topic permissions": Shape(
        users(
            DEV,
            topic_permissions=[
                {"user": "dev", "vhost": "/", "exchange": "amq.topic", "write": "^a", "read": ".*"}
            ],
        )
    ),
    "global parameters": Shape(
        users(
            DEV,
            global_parameters=[
                {"name": "cluster_name", "value": "rabbit@a"},
                {"name": "internal_cluster_id", "value": "rabbitmq-cluster-id-x"},
            ],
        ),
        skipped=(("global parameter", "cluster_name"), ("global parameter", "internal_cluster_id")),
    ),
    "a virtual host alone, as 3.8 exports it": Shape(
        {
            "rabbit_version": "3.8.9",
            "policies": [],
            "queues": [queue()],
            "exchanges": [exchange("x")],
            "bindings": [binding("x", "q")],
        },
        queues=("q",),
    ),
    "a virtual host alone, as 4.1 exports it": Shape(
        {
            "rabbitmq_version": "4.1.0",
            "rabbit_version": "4.1.0",
            "product_name": "RabbitMQ",
            "original_vhost_name": "/",
            "rabbitmq_definition_format": "single_virtual_host",
            "explanation": "Definitions of virtual host '/'",
            "default_queue_type": "quorum",
            "limits": [],
            "metadata": {"description": "Default"},
            "parameters": [],
            "policies": [],
            "queues": [queue(**Q)],
            "exchanges": [],
            "bindings": [],
        },
        skipped=(
            ("default_queue_type", "default_queue_type"),
            ("limits", "limits"),
            ("metadata", "metadata"),
        ),
        queues=("q",),
    ),
    "a virtual host of 4.2 with what describes it": Shape(
        users(DEV)
        | {
            "vhosts": [
                {
                    "name": "/",
                    "description": "Default virtual host",
                    "tags": [],
                    "default_queue_type": "quorum",
                    "limits": [],
                    "metadata": {"description": "Default virtual host", "tags": ["prod"]},
                }
            ]
        },
        skipped=(("default_queue_type of vhosts", "/"), ("tags of vhosts", "/")),
    ),
    "virtual hosts and nothing else": Shape({"vhosts": [{"name": "eu"}, {"name": "us/east"}]}),
    "limits of a virtual host": Shape(
        {
            "vhosts": [{"name": "eu"}],
            "parameters": [
                {
                    "component": "vhost-limits",
                    "name": "limits",
                    "vhost": "eu",
                    "value": {"max-queues": 5, "max-connections": 9},
                }
            ],
        }
    ),
    "limits of the virtual host that is there": Shape(
        {
            "parameters": [
                {"component": "vhost-limits", "name": "limits", "vhost": "/", "value": {"max-queues": 99}}
            ]
        }
    ),
    "a shovel": Shape(
        users(DEV, parameters=[{"component": "shovel", "vhost": "/", "name": "s", "value": {}}]),
        False,
        skipped=(("shovel parameter", "s"),),
    ),
    "an operator's policy": Shape(
        users(
            DEV,
            parameters=[
                {
                    "component": "operator_policy",
                    "vhost": "/",
                    "name": "most",
                    "value": {
                        "pattern": ".*",
                        "definition": {"max-length": 5},
                        "apply-to": "queues",
                        "priority": 0,
                    },
                }
            ],
        )
    ),
    "quorum queues without a limit, of 4.0": Shape(
        {"queues": [queue(**Q, x_delivery_limit=-1, x_quorum_initial_group_size=3)]},
        skipped=(("argument of queue", "q"),),
        queues=("q",),
    ),
    "a quorum queue with dead letters at least once": Shape(
        {
            "queues": [
                queue(
                    **Q,
                    x_dead_letter_exchange="",
                    x_dead_letter_routing_key="dead",
                    x_dead_letter_strategy="at-least-once",
                    x_overflow="reject-publish",
                )
            ]
        },
        queues=("q",),
    ),
    "a delivery limit that is text": Shape(
        {"queues": [queue(**Q, x_delivery_limit="5")]}, skipped=(("argument of queue", "q"),), queues=("q",)
    ),
    "a quorum queue that is not durable": Shape(
        {
            "queues": [{**queue(**Q), "durable": False}, queue("other")],
            "bindings": [binding("amq.topic", "q")],
        },
        skipped=(("binding", "amq.topic -> q"), ("queue", "q")),
        queues=("other",),
    ),
    "mirrors of 3.6": Shape(
        {
            "rabbit_version": "3.6.16",
            "queues": [queue(x_ha_policy="all", x_queue_master_locator="min-masters", x_queue_mode="lazy")],
        },
        skipped=(("argument of queue", "q"), ("argument of queue", "q")),
        queues=("q",),
    ),
    "a plugin that drops duplicates": Shape(
        {"queues": [queue(x_message_deduplication=True, x_nonsense=1)]},
        skipped=(("argument of queue", "q"),),
        queues=("q",),
    ),
    "a queue that says its type": Shape(
        {"queues": [{**queue(), "type": "quorum"}, {**queue("p", **Q), "type": "quorum"}]},
        skipped=(("type of queues", "q"),),
        queues=("p", "q"),
    ),
    "rows of GET /api/queues": Shape(
        {"queues": [{**queue(), "exclusive": False, "node": "rabbit@a", "messages": 5, "policy": None}]},
        skipped=(("messages of queues", "q"), ("node of queues", "q")),
        queues=("q",),
    ),
    "two queues of one name": Shape(
        {"queues": [queue(x_max_length=5), queue(x_max_length=6)]}, skipped=(("queue", "q"),), queues=("q",)
    ),
    "what RabbitMQ exports of a row that did not say it": Shape(
        {"exchanges": [exchange("x", auto_delete="undefined")]}
    ),
    "a binding with its key": Shape(
        {"queues": [queue()], "bindings": [binding("amq.topic", "q", properties_key="k")]}, queues=("q",)
    ),
    "a binding to nowhere": Shape(
        {"bindings": [binding("amq.topic", "gone")]}, skipped=(("binding", "amq.topic -> gone"),)
    ),
    "an exchange that delays": Shape(
        {"exchanges": [exchange("x", "x-delayed-message", arguments={"x-delayed-type": "direct"})]}, False
    ),
    "an exchange that delays and does not say how it routes": Shape(
        {"exchanges": [exchange("x", "x-delayed-message", arguments={"x-delayed-type": "random"})]},
        False,
        skipped=(("exchange", "x"),),
    ),
    "an exchange that drops duplicates": Shape(
        {"exchanges": [exchange("x", "x-message-deduplication", arguments={"x-cache-size": 5})]}, False
    ),
    "an exchange that drops duplicates and does not say how many it remembers": Shape(
        {"exchanges": [exchange("x", "x-message-deduplication")]}, False, skipped=(("exchange", "x"),)
    ),
    "a part that nobody knows": Shape({"nonsense": [1]}, skipped=(("nonsense", "nonsense"),)),
    "a length that is text": Shape({"queues": [queue(x_max_length="5")]}, False, "x-max-length"),
    "a time below zero": Shape({"queues": [queue(x_message_ttl=-1)]}, False, "x-message-ttl"),
    "a virtual host that is not there": Shape({"queues": [queue("q", "nowhere")]}, False, "nowhere"),
    "a user who is not there": Shape({"permissions": [{"user": "no", "vhost": "/", **ALL}]}, False, "'no'"),
    "a password that is a number": Shape(
        users(ROOT, {**DEV, "password": 5}), False, skipped=(("password", "dev"),)
    ),
}
STREAM = Shape(  # RabbitMQ takes seconds to make a stream
    {"queues": [queue("s", **S, x_max_age="7D"), queue()], "bindings": [binding("amq.topic", "s")]},
    skipped=(("binding", "amq.topic -> s"), ("queue", "s")),
    queues=("q",),
)


@pytest.mark.parametrize("name", [*SHAPES, "a stream"])
def test_a_shape_is_taken_or_refused_and_what_is_left_out_is_named(name: str, tmp_path: Path) -> None:
    shape = SHAPES.get(name, STREAM)
    with Broker.open(tmp_path / "data", amqp=("127.0.0.1:0",)) as broker:
        if shape.refused:
            with pytest.raises(TxmqError, match=shape.refused):
                broker.accounts.import_definitions(shape.document)
            assert broker.queues() == []
            return
        imported = broker.accounts.import_definitions(shape.document)
        assert sorted((each.kind, each.name) for each in imported.skipped) == sorted(shape.skipped)
        assert [each.name for each in broker.queues()] == sorted(shape.queues)
        assert imported.counts["queues"] == len(shape.queues)
        for login in shape.logins:
            parameters = pika.URLParameters(f"{broker.amqp_urls[0]}/%2F")
            parameters.credentials = pika.PlainCredentials(*login.split(":"))
            pika.BlockingConnection(parameters).close()
        before = broker.accounts.export_definitions()
        again = broker.accounts.import_definitions(shape.document)
        assert again == imported
        after = broker.accounts.export_definitions()
        for exported in (before, after):  # nobody's password is another one each time
            for user in exported.definitions["users"]:
                if any(kind == "password" for kind, _ in shape.skipped):
                    user.pop("password_hash")
        assert after == before


def test_every_argument_that_an_import_keeps_can_be_declared_again(tmp_path: Path) -> None:
    with Broker.open(tmp_path / "data") as broker:
        for shape in SHAPES.values():
            if not shape.refused:
                broker.accounts.import_definitions(shape.document)
                for row in shape.document.get("queues", []):
                    if row["name"] in shape.queues and shape.rabbit:
                        _declare_again(broker, row)
                for each in broker.queues():
                    broker.channel().queue_delete(each.name)


def _declare_again(broker: Broker, row: Row) -> None:
    left = ("x-delivery-limit",) if row["arguments"].get("x-delivery-limit") != -1 else ()
    arguments = {name: value for name, value in row["arguments"].items() if name not in left}
    if row["arguments"].get("x-max-length") != 6:  # the second of one name
        with broker.channel() as channel:
            channel.queue_declare(row["name"], durable=row["durable"], arguments=arguments)


TRY = """
    lists:foreach(fun(File) ->
        {{ok, Bytes}} = file:read_file(File),
        Found = (catch rabbit_definitions:import_parsed(rabbit_json:decode(Bytes))),
        Queues = [element(4, element(2, Q)) || Q <- rabbit_amqqueue:list(<<"/">>)],
        [rabbit_amqqueue:delete(Q, false, false, <<"test">>) || Q <- rabbit_amqqueue:list(<<"/">>)],
        [rabbit_exchange:delete(rabbit_misc:r(<<"/">>, exchange, <<"x">>), false, <<"test">>)],
        io:format("~ts~n", [rabbit_json:encode(#{{taken => Found =:= ok, queues => lists:sort(Queues)}})])
    end, [{files}]).
"""


@pytest.mark.slow
@pytest.mark.soak  # asks a node of RabbitMQ, which a change here does not alter
def test_rabbitmq_takes_and_refuses_the_same_shapes(tmp_path: Path) -> None:
    files = []
    for number, shape in enumerate(SHAPES.values()):
        files.append(tmp_path / f"{number}.json")
        files[-1].write_text(json.dumps(shape.document))
    with rabbit(tmp_path / "rabbit") as running:
        running.ctl("await_startup")
        said = running.ctl("eval", TRY.format(files=", ".join(f'"{file}"' for file in files)))
    found = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert len(found) == len(SHAPES)
    for (name, shape), there in zip(SHAPES.items(), found, strict=True):
        assert there["taken"] == shape.rabbit, (name, there)
        if shape.rabbit:
            assert there["queues"] == sorted(shape.queues), (name, there)
