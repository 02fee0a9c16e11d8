"""``txmq broker import`` of what a real RabbitMQ 3.10 exported, recorded and live; ``txmq broker export`` and back."""

from __future__ import annotations

import contextlib
import copy
import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pika
import pytest

from broker_core.admin import Imported
from broker_core.broker import definitions
from broker_core.client.accounts import RemoteAccounts
from broker_core.client.broker import BrokerClient
from broker_core.core import failpoint
from broker_core.core import password as passwords
from broker_core.core.errors import AccessRefused, OptionError, PreconditionFailed, TxmqError
from broker_core.launcher import Broker
from tests.cli.test_accounts import Shell, shell
from tests.interop.rabbitmq_node import PASSWORDS, RECORDED, exported, rabbit

__all__ = ["shell"]

Document = dict[str, Any]


def recorded() -> Document:
    found: Document = json.loads(RECORDED.read_text())
    return found


def _skipped(imported: Imported) -> list[tuple[str, str, str]]:
    return [(each.kind, each.name, each.vhost) for each in imported.skipped]


SKIPPED = [
    ("argument of queue", "orders", "/"),
    ("argument of queue", "quorum", "/"),
    ("binding", "inner -> quorum", "/"),
    ("binding", "orders -> inner", "/"),
    ("binding", "orders -> stream", "/"),
    ("global parameter", "colour", ""),
    ("limit", "ben", ""),
    ("password", "cron", ""),
    ("password", "guest", ""),
    ("password", "old", ""),
    ("permissions", "ben", "sales/eu"),
    ("queue", "stream", "/"),
    ("tag", "ben", ""),
]


def _check(broker: Broker, imported: Imported) -> None:
    assert sorted(_skipped(imported)) == SKIPPED
    assert imported.counts == {
        "vhosts": 2,
        "users": 5,
        "permissions": 5,
        "topic_permissions": 1,
        "policies": 1,
        "exchanges": 2,
        "queues": 4,
        "bindings": 3,
    }
    assert {user.name: user.tags for user in broker.accounts.users()} == {
        "ann": ("administrator", "management"),
        "ben": ("impersonator", "monitoring"),
        "cron": (),
        "guest": ("administrator",),
        "old": (),
    }
    hosts = {each.name: (each.max_queues, each.max_connections) for each in broker.vhosts.vhosts()}
    assert hosts == {"/": (None, None), "sales/eu": (20, 50)}
    queues = {queue.name: dict(queue.arguments) for queue in broker.queues()}
    assert queues == {
        "dead": {},
        "orders": {
            "team": "sales",
            "x-dead-letter-exchange": "dead",
            "x-max-priority": 5,
            "x-message-ttl": 60000,
            "x-queue-master-locator": "min-masters",
        },
        "quorum": {"x-queue-type": "quorum", "x-delivery-limit": 3, "x-quorum-initial-group-size": 1},
    }
    assert [queue.name for queue in broker.queues("sales/eu")] == ["orders"]


def _log_in(broker: Broker, name: str, password: str) -> bool:
    parameters = pika.URLParameters(f"{broker.amqp_urls[0]}/%2F?connection_attempts=1")
    parameters.credentials = pika.PlainCredentials(name, password)
    try:
        with pika.BlockingConnection(parameters) as connection:
            channel = connection.channel()
            if name == "ann":
                channel.basic_publish("orders", "new.eu", b"1")
            return True
    except pika.exceptions.AMQPConnectionError:
        return False


def test_arguments_as_deep_as_a_declaration_takes_them_are_exported_and_imported(tmp_path: Path) -> None:
    def declared(broker: Broker, depth: int) -> bool:
        arguments: dict[str, object] = {}
        for _ in range(depth):
            arguments = {"x-odd": arguments}
        with broker.channel() as channel, contextlib.suppress(PreconditionFailed, OptionError):
            channel.queue_declare("deep", arguments=arguments)
            channel.exchange_declare("deep", "fanout", arguments=arguments)
            channel.queue_bind("deep", "deep", "", arguments)
            return True
        return False

    with Broker.open(tmp_path / "one") as broker, BrokerClient(broker.url) as client:
        assert next(depth for depth in range(100, 0, -1) if declared(broker, depth)) > 50
        found = RemoteAccounts(client).export_definitions().definitions
    with Broker.open(tmp_path / "two") as broker, BrokerClient(broker.url) as client:
        RemoteAccounts(client).import_definitions(found)
        assert RemoteAccounts(client).export_definitions().definitions["bindings"] == found["bindings"]


def test_definitions_of_rabbitmq_are_taken_and_what_is_not_is_listed(tmp_path: Path) -> None:
    with Broker.open(tmp_path / "data", amqp=("127.0.0.1:0",)) as broker:
        _check(broker, broker.accounts.import_definitions(recorded()))
        # twice is as once
        before = broker.accounts.export_definitions()
        _check(broker, broker.accounts.import_definitions(recorded()))
        after = broker.accounts.export_definitions()
        hashes = [
            {each["name"]: each["password_hash"] for each in one.definitions["users"]}
            for one in (before, after)
        ]
        assert {name for name in PASSWORDS if hashes[0][name] == hashes[1][name]} == {"ann", "ben"}
        # passwords of RabbitMQ are those of the users here
        assert _log_in(broker, "ann", PASSWORDS["ann"]) and _log_in(broker, "ben", PASSWORDS["ben"])
        for name in PASSWORDS:
            assert not _log_in(broker, name, "wrong") and not _log_in(broker, name, "")
        assert not _log_in(broker, "guest", "guest"), "which is known to everybody"
        channel = broker.channel()
        delivery = channel.get("orders")
        assert delivery is not None and delivery.message.body == b"1"
    with Broker.open(tmp_path / "data", amqp=("127.0.0.1:0",)) as broker:
        assert _log_in(broker, "ann", PASSWORDS["ann"])
        assert len(broker.queues()) == 3


@pytest.mark.soak
@pytest.mark.slow
def test_a_rabbitmq_that_runs_exports_what_is_recorded(tmp_path: Path) -> None:
    """``python -m tests.interop.rabbitmq_node`` records it; here it is put in by RabbitMQ's own import."""
    with rabbit(tmp_path) as running:
        running.ctl("import_definitions", str(RECORDED))
        found = exported(running, tmp_path)
    for document in (found, known := recorded()):
        for name in ("rabbit_version", "rabbitmq_version"):
            assert document.pop(name).startswith("3.")
        for rows in document.values():
            rows.sort(key=lambda row: json.dumps(row, sort_keys=True))
        document["global_parameters"] = [
            each for each in document["global_parameters"] if each["name"] == "colour"
        ]
        # of an internal exchange, which is in no export
        document["bindings"] = [
            each for each in document["bindings"] if "inner" not in (each["source"], each["destination"])
        ]
        for host in document["vhosts"]:
            host.pop("metadata")
            host["limits"].sort()
    assert found == known


def test_an_export_into_another_broker_gives_the_same(tmp_path: Path, shell: Shell) -> None:
    path = tmp_path / "definitions.json"
    with Broker.open(tmp_path / "data") as broker:
        broker.accounts.import_definitions(recorded())
        broker.accounts.add_user("eve", passwords.hashed("of eve"), ["operator"])
        broker.vhosts.limit_vhost("sales/eu", max_messages=7)
        channel = broker.channel()
        channel.queue_declare("mine", exclusive=True)
        channel.queue_declare("transient", durable=False)
        data = ("--data", str(tmp_path / "data"))
        assert "hashes of passwords" in shell.run("broker", "export", "--to", str(path), *data)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert (
            shell.code("broker", "export", "--to", str(path), *data) == 1 and "name a new file" in shell.error
        )
        assert json.loads(path.read_text()) == json.loads(shell.run("broker", "export", *data))
        channel.close()
        with Broker.open(tmp_path / "second") as second:
            data = ("--data", str(tmp_path / "second"))
            said = shell.run("broker", "import", str(path), "--check", *data)
            assert said.startswith("would import 2 vhosts, 6 users") and second.queues() == []
            assert [user.source for user in second.accounts.users()] == ["default"]
            assert "imported 2 vhosts, 6 users" in shell.run("broker", "import", str(path), *data)
            assert shell.run("broker", "export", *data) == shell.run(
                "broker", "export", "--data", str(tmp_path / "data")
            )
            report = json.loads(shell.run("broker", "import", str(path), "--json", *data))
            assert {each["kind"] for each in report["skipped"]} == {"argument of queue"}  # without effect
            assert report["counts"]["queues"] == 5
            assert second.accounts.permissions() == broker.accounts.permissions()


WRONG: dict[str, tuple[Callable[[Document], object], str]] = {
    "no list": (lambda d: d.update(queues={}), "queues of the definitions must be an array"),
    "no object": (
        lambda d: d["queues"].append("orders"),
        r"queues\[5\] of the definitions must be an object",
    ),
    "no name": (lambda d: d["queues"].append({"vhost": "/"}), "must have 'name', a text, and has None"),
    "a number": (lambda d: d["users"].append({"name": 5}), "must have 'name', a text, and has 5"),
    "a flag": (lambda d: d["queues"][0].update(durable="yes"), "'durable' of .* must be true or false"),
    "arguments": (lambda d: d["queues"][0].update(arguments=[1]), "'arguments' of .* must be an object"),
    "a value": (lambda d: d["queues"][0]["arguments"].update({"x-max-length": "x"}), "x-max-length"),
    "a vhost": (lambda d: d["queues"][0].update(vhost="nowhere"), "virtual host 'nowhere' does not exist"),
    "its name": (lambda d: d["vhosts"].append({"name": "a\tb"}), "has control characters"),
    "a limit": (lambda d: d["vhosts"][1].update(limits=[["max-queues", -5]]), "give a whole number"),
    "limits": (lambda d: d["vhosts"][1].update(limits=[1]), "must be pairs"),
    "too many": (
        lambda d: d["vhosts"][1].update(limits=[]) or d["parameters"][0]["value"].update({"max-queues": 0}),
        "limit",
    ),
    "a user": (lambda d: d["permissions"][0].update(user="nobody"), "nobody"),
    "tags": (lambda d: d["users"][0].update(tags=5), "must be an array"),
    "a type": (lambda d: d["bindings"][0].update(destination_type="topic"), "leads to a 'topic'"),
    "a long name": (lambda d: d["queues"][0].update(name="é" * 200), "has 400 bytes"),
    "a surrogate": (lambda d: d["queues"][0].update(name="\ud800"), "cannot be encoded as UTF-8"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_part_is_one_error_and_nothing_is_changed(name: str, tmp_path: Path) -> None:
    change, why = WRONG[name]
    document = copy.deepcopy(recorded())
    change(document)
    with Broker.open(tmp_path / "data") as broker:
        before = broker.accounts.export_definitions()
        with pytest.raises(TxmqError, match=why) as refused:
            broker.accounts.import_definitions(document)
        assert type(refused.value) is not TxmqError
        assert broker.accounts.export_definitions() == before
        assert broker.accounts.users()[0].source == "default"
    with Broker.open(tmp_path / "data") as broker:
        assert broker.accounts.export_definitions() == before


def test_what_is_there_in_another_form_stays_and_is_named(tmp_path: Path) -> None:
    with Broker.open(tmp_path / "data") as broker:
        with broker.channel() as channel:
            channel.queue_declare("orders", arguments={"x-max-length": 5})
            channel.exchange_declare("orders", "fanout")
        imported = broker.accounts.import_definitions(recorded())
        left = [each for each in imported.skipped if "stays" in each.why]
        assert [(each.kind, each.name) for each in left] == [("exchange", "orders"), ("queue", "orders")]
        assert "received" in left[1].why
        assert imported.counts["queues"] == 3 and imported.counts["exchanges"] == 1
        assert {queue.name: dict(queue.arguments) for queue in broker.queues()}["orders"] == {
            "x-max-length": 5
        }
        assert broker.accounts.import_definitions(recorded(), check=True) == imported


def test_more_passwords_than_can_be_hashed_in_one_call_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(definitions, "PASSWORDS", 2)
    users = [{"name": f"u{number}", "password": "x", "tags": "administrator"} for number in range(3)]
    with Broker.open(tmp_path / "data") as broker:
        with pytest.raises(OptionError, match="more than 2 passwords without a hash"):
            broker.accounts.import_definitions({"users": users})
        assert broker.accounts.import_definitions({"users": users[:2]}).counts["users"] == 2


MANY: Document = {
    "vhosts": [{"name": "sales"}],
    "exchanges": [{"name": "x", "vhost": "sales", "type": "topic", "durable": True}],
    "queues": [{"name": f"q{number}", "vhost": "sales", "durable": True} for number in range(150)],
    "bindings": [
        {"source": "x", "vhost": "sales", "destination": f"q{number}", "destination_type": "queue"}
        | {"routing_key": f"k{each}"}
        for number in range(150)
        for each in range(2)
    ],
}


def test_the_last_of_many_rows_is_wrong_and_nothing_is_changed(tmp_path: Path) -> None:
    document = copy.deepcopy(MANY)
    document["bindings"][-1]["routing_key"] = "k" * 300
    with Broker.open(tmp_path / "data") as broker:
        before = broker.accounts.export_definitions()
        with pytest.raises(TxmqError, match="routing key"):
            broker.accounts.import_definitions(document)
        assert broker.accounts.export_definitions() == before


@pytest.mark.parametrize("piece", [1, 3])
def test_an_import_that_was_ended_between_two_pieces_goes_on_when_it_is_repeated(
    piece: int, tmp_path: Path
) -> None:
    with Broker.open(tmp_path / "other") as other:
        whole = other.accounts.import_definitions(MANY)
        expected = other.accounts.export_definitions()
    with Broker.open(tmp_path / "data") as broker:
        failpoint.arm("accounts.import.piece", "raise", hit=piece + 1)
        with pytest.raises(OSError):
            broker.accounts.import_definitions(MANY)
        failpoint.disarm()
        assert broker.accounts.export_definitions() != expected
    with Broker.open(tmp_path / "data") as broker:
        assert len(broker.vhosts.vhosts()) == 2
        assert broker.accounts.import_definitions(MANY) == whole
        assert broker.accounts.export_definitions() == expected


@pytest.mark.soak
@pytest.mark.slow
def test_definitions_of_more_bindings_than_one_call_takes_are_imported_in_files(
    tmp_path: Path, shell: Shell
) -> None:
    bindings = [
        {"source": "e", "vhost": "/", "destination": "q", "destination_type": "queue",
         "routing_key": f"key {number}", "arguments": {}}
        for number in range(130_000)
    ]  # fmt: skip
    document = {
        "exchanges": [{"name": "e", "vhost": "/", "type": "direct", "durable": True, "arguments": {}}],
        "queues": [{"name": "q", "vhost": "/", "durable": True, "arguments": {}}],
        "bindings": bindings,
    }
    files = [document, {**document, "bindings": bindings[:65_000]}, {"bindings": bindings[65_000:]}]
    paths = [tmp_path / f"{number}.json" for number in range(3)]
    for path, each in zip(paths, files, strict=True):
        path.write_text(json.dumps(each))
    with Broker.open(tmp_path / "data") as broker:
        before = broker.accounts.export_definitions()
        assert shell.code("broker", "import", str(paths[0]), "--url", broker.url) == 1
        assert "send it in several calls" in shell.error
        assert broker.accounts.export_definitions() == before
        for path in paths[1:]:
            assert "65000 bindings" in shell.run("broker", "import", str(path), "--url", broker.url)


def test_a_limit_that_is_reached_on_the_way_says_how_far_the_import_came(tmp_path: Path) -> None:
    document = {**MANY, "vhosts": [{"name": "sales", "limits": [["max-queues", 120]]}]}
    with Broker.open(tmp_path / "data") as broker:
        with pytest.raises(TxmqError, match=r"limit.*1 of 5 pieces are imported: the same import continues"):
            broker.accounts.import_definitions(document)
        broker.vhosts.limit_vhost("sales", max_queues=200)
        broker.accounts.import_definitions(MANY)
        assert len(broker.queues("sales")) == 150


def test_definitions_of_one_virtual_host_are_for_the_one_that_is_named(tmp_path: Path, shell: Shell) -> None:
    path = tmp_path / "definitions.json"
    path.write_text(json.dumps({"queues": [{"name": "q", "durable": True}], "exchanges": [], "bindings": []}))
    with Broker.open(tmp_path / "data") as broker:
        broker.vhosts.add_vhost("sales")
        assert "imported 1 queues; 0 skipped" in shell.run(
            "broker", "import", str(path), "--url", f"{broker.url}/sales"
        )
        assert broker.queues() == [] and [queue.name for queue in broker.queues("sales")] == ["q"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "cannot be read as JSON"),
        ("[" * 100_000, "cannot be read as JSON"),
        ("[]", "has no JSON object, but a list"),
        ('{"queues": 5}', "must be an array"),
        (None, "cannot be read as JSON"),
    ],
)
def test_a_file_that_is_no_document_is_one_error(
    text: str | None, why: str, tmp_path: Path, shell: Shell
) -> None:
    path = tmp_path / "definitions.json"
    if text is not None:
        path.write_text(text)
    with Broker.open(tmp_path / "data") as broker:
        assert shell.code("broker", "import", str(path), "--url", broker.url) == 1
        assert why in shell.error and shell.error.count("\n") == 1


def test_values_that_json_does_not_have_are_listed_by_an_export(tmp_path: Path) -> None:
    with Broker.open(tmp_path / "data") as broker:
        with broker.channel() as channel:
            channel.queue_declare("q", arguments={"key": b"\xff"})
            channel.queue_declare("p", arguments={"nested": {"list": [1, 2.5, None, "x"]}})
        found = broker.accounts.export_definitions()
        assert [(each.kind, each.name) for each in found.skipped] == [("queue", "q")]
        assert [queue["name"] for queue in found.definitions["queues"]] == ["p"]


def test_an_administrator_alone_exports_and_imports(tmp_path: Path) -> None:
    with Broker.open(tmp_path / "data") as broker:
        broker.accounts.add_user("ann", passwords.hashed("x"), ["operator", "monitoring", "impersonator"])
        broker.accounts.set_permissions("ann", ".*", ".*", ".*")
        with BrokerClient(broker.url.replace("//", "//ann:x@")) as client:
            for word, more in (("export_definitions", {}), ("import_definitions", {"definitions": {}})):
                with pytest.raises(AccessRefused, match="administrator"):
                    client.administer(dict, word, **more)


def test_a_hash_of_rabbitmq_is_checked_as_rabbitmq_does(tmp_path: Path) -> None:
    ann = next(user for user in recorded()["users"] if user["name"] == "ann")
    kept = passwords.of_rabbitmq(ann["hashing_algorithm"], ann["password_hash"])
    assert passwords.is_hash(kept) and passwords.is_right(PASSWORDS["ann"], kept)
    for wrong in ("of ann ", "", "of an", "\udcff", "x" * 100_000):
        assert not passwords.is_right(wrong, kept)
    assert passwords.to_rabbitmq(kept) == (ann["hashing_algorithm"], ann["password_hash"])
    for algorithm, text in (
        ("rabbit_password_hashing_md5", ann["password_hash"]),
        ("rabbit_password_hashing_sha512", ann["password_hash"]),
        ("rabbit_password_hashing_sha256", ann["password_hash"][:-4]),
        ("rabbit_password_hashing_sha256", "é"),
        ("scrypt$ln=14", "x"),
        ("", ""),
    ):
        with pytest.raises(OptionError):
            passwords.of_rabbitmq(algorithm, text)


@pytest.mark.parametrize("arguments", [{}, {"arguments": None}, {"arguments": {}}])
def test_an_exchange_needs_no_arguments_in_a_file_but_one_that_delays_does(
    arguments: dict[str, Any], tmp_path: Path
) -> None:
    rows = [
        {"name": kind, "vhost": "/", "type": kind, **arguments} for kind in ("topic", "x-delayed-message")
    ]
    with Broker.open(tmp_path / "data") as broker:
        found = broker.accounts.import_definitions({"exchanges": rows})
        exported: Any = broker.accounts.export_definitions().definitions["exchanges"]
    assert {row["name"] for row in exported} == {"topic"}
    assert [each for each in found.skipped if "x-delayed-type" in str(each)]
