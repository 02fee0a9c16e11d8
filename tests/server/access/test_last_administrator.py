"""The last administrator who can log in stays one, whatever takes it: commands, HTTP, definitions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from broker_core.core import failpoint
from broker_core.core import password as passwords
from broker_core.core.errors import OptionError
from broker_core.launcher import Broker
from tests.cli.test_accounts import Shell, shell
from tests.server.http.http_client import CHEAP, PASSWORD, Api, serving

LEFT = "no administrator who can log in would be left"
ADVICE = "txmq user tag NAME administrator"
ROOT, BOB = "root", "bob"


__all__ = ["shell"]


def row(name: str, *tags: str, password_hash: str = CHEAP) -> dict[str, Any]:
    return {"name": name, "tags": list(tags), "hashing_algorithm": "scrypt", "password_hash": password_hash}


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with serving(tmp_path) as made:
        made.accounts.add_user(ROOT, CHEAP, ["administrator"])
        made.accounts.add_user(BOB, CHEAP, ["operator"])
        yield made


TAKING: dict[str, Callable[[Broker], object]] = {
    "delete": lambda broker: broker.accounts.delete_user(ROOT),
    "tag": lambda broker: broker.accounts.set_tags(ROOT, ["operator"]),
    "put": lambda broker: broker.accounts.put_user(ROOT, "", []),
    "a password": lambda broker: broker.accounts.set_password(ROOT, passwords.unmatched()),
    "import": lambda broker: broker.accounts.import_definitions({"users": [row(ROOT)]}),
    "import without a password": lambda broker: broker.accounts.import_definitions(
        {"users": [row(ROOT, "administrator", password_hash="")], "queues": [{"name": "q"}]}
    ),
}


@pytest.mark.parametrize("name", TAKING)
def test_what_takes_the_last_administrator_is_refused_and_changes_nothing(name: str, broker: Broker) -> None:
    before = broker.accounts.export_definitions()
    with pytest.raises(OptionError, match=LEFT) as refused:
        TAKING[name](broker)
    assert ADVICE in str(refused.value)
    assert broker.accounts.export_definitions() == before
    assert Api(broker.http_urls[0], ROOT).ask("GET", "/api/users").status == 200
    broker.accounts.set_tags(BOB, ["administrator"])
    TAKING[name](broker)  # another one is left
    assert Api(broker.http_urls[0], BOB).ask("GET", "/api/users").status == 200


def test_http_refuses_it_with_the_same_text(broker: Broker) -> None:
    root = Api(broker.http_urls[0], ROOT)
    for method, path, body in (
        ("DELETE", f"/api/users/{ROOT}", None),
        ("PUT", f"/api/users/{ROOT}", {"tags": "operator"}),
        ("POST", "/api/definitions", {"users": [row(ROOT, "monitoring")]}),
    ):
        answer = root.ask(method, path, body)
        assert answer.status == 400 and LEFT in answer.body["reason"], answer
        assert ADVICE in answer.body["reason"], answer
    assert root.ask("PUT", f"/api/users/{ROOT}", {"tags": "administrator", "password": "new"}).status == 204


def test_a_check_of_definitions_says_it(broker: Broker, shell: Shell, tmp_path: Path) -> None:
    path = tmp_path / "definitions.json"
    path.write_text(json.dumps({"users": [row(ROOT), row(BOB)]}))
    data = ("--data", str(tmp_path / "data"))
    for more in (("--check",), ()):
        assert shell.code("broker", "import", str(path), *more, *data) == 1
        assert LEFT in shell.error and "nothing is changed" in shell.error


def test_the_first_users_of_an_import_have_an_administrator(tmp_path: Path) -> None:
    with Broker.open(tmp_path / "data") as broker:
        with pytest.raises(OptionError, match=LEFT):
            broker.accounts.import_definitions({"users": [row(BOB, "operator")]})
        assert [user.source for user in broker.accounts.users()] == ["default"]
        broker.accounts.import_definitions({"users": [row(BOB, "operator"), row(ROOT, "administrator")]})


def test_an_import_that_hands_over_has_an_administrator_between_any_two_of_its_commits(
    broker: Broker,
) -> None:
    many = [row(ROOT), *(row(f"user {number}") for number in range(250)), row("boss", "administrator")]
    failpoint.arm("accounts.import.piece", "raise", hit=2)
    try:
        with pytest.raises(OSError, match="failpoint"):
            broker.accounts.import_definitions({"users": many})
    finally:
        failpoint.disarm()
    assert Api(broker.http_urls[0], "boss").ask("GET", "/api/users").status == 200
    broker.accounts.import_definitions({"users": many})
    tags = {user.name: user.tags for user in broker.accounts.users()}
    assert tags["boss"] == ("administrator",) and tags[ROOT] == ()


def test_two_who_take_each_others_tag_leave_one(broker: Broker) -> None:
    broker.accounts.set_tags(BOB, ["administrator"])
    broker.accounts.set_tags(ROOT, [])
    with pytest.raises(OptionError, match=LEFT):
        broker.accounts.set_tags(BOB, [])


def test_a_user_of_the_users_file_logs_in_by_the_password_of_the_file(tmp_path: Path) -> None:
    with Broker.open(tmp_path / "data", users={"keeper": PASSWORD}) as broker:
        broker.accounts.add_user(ROOT, CHEAP, ["administrator"])
        broker.accounts.set_tags(ROOT, [])  # the user of the file is an administrator
        broker.accounts.add_user("keeper", passwords.unmatched(), ["administrator"])
        with pytest.raises(OptionError, match=LEFT):
            broker.accounts.set_tags("keeper", [])


def test_an_import_hands_over_to_a_user_of_the_users_file(tmp_path: Path) -> None:
    with Broker.open(tmp_path / "data", users={"keeper": PASSWORD}) as broker:
        broker.accounts.add_user("keeper", passwords.unmatched(), [])
        broker.accounts.add_user(ROOT, CHEAP, ["administrator"])
        many = [row(f"user {number}") for number in range(250)]
        keeper = row("keeper", "administrator", password_hash="")
        broker.accounts.import_definitions({"users": [*many[:120], row(ROOT), *many[120:], keeper]})
        tags = {user.name: user.tags for user in broker.accounts.users()}
        assert tags["keeper"] == ("administrator",) and tags[ROOT] == ()
