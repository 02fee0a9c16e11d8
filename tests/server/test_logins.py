"""Logins on both doors: wrong passwords cost the honest little, deleted users are gone, and nothing is told.

Not here: permissions (``interop/test_permissions.py``, ``test_flight_permissions.py``).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow.flight
import pytest
from pamqp import commands as c

import txmq
from broker_core import endpoint, errors
from broker_core import password as passwords
from broker_core.address import Address
from broker_core.broker.undo import Undo
from broker_core.broker.users import Users
from broker_core.client.connection import Connection
from broker_core.flight import contract
from broker_core.flight.authorization import CHALLENGE_BYTES, Basic, Bearer, parse, proof
from broker_core.launcher import Broker
from broker_core.server.access import audit as audits
from broker_core.server.access import logins as logins_module
from broker_core.server.access import throttle as throttles
from broker_core.server.access.audit import Audit
from broker_core.server.access.logins import Logins, is_loopback
from broker_core.server.access.throttle import Throttle
from broker_core.server.access.users_file import read_users
from broker_core.server.flight.login import peer_address
from broker_core.store.salvage import salvage
from tests.amqp_peer import Closed, Peer
from tests.permission_rows import PASSWORD
from tests.server.flight_calls import Raw

CHEAP = passwords.Cost(4)
REFUSED = (
    "ACCESS_REFUSED - Login was refused using authentication mechanism PLAIN. For details see the broker "
    "logfile."
)


def add(broker: Broker, name: str, *tags: str, patterns: tuple[str, str, str] = (".*", ".*", ".*")) -> None:
    broker.accounts.add_user(name, passwords.hashed(PASSWORD, CHEAP), tags)
    broker.accounts.set_permissions(name, *patterns)


def connect(broker: Broker, user: str, password: str = PASSWORD) -> Peer:
    made = Peer(broker.amqp_urls[0])
    made.user, made.password = user, password
    return made


def refusal(broker: Broker, user: str, password: str) -> tuple[int, str]:
    with connect(broker, user, password) as client:
        client.started()
        client.start_ok()
        closed = client.expect(c.Connection.Close, 0)
        return closed.reply_code, closed.reply_text


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with Broker.open(tmp_path / "data", amqp=["127.0.0.1:0"]) as made:
        yield made


# -- passwords -----------------------------------------------------------------------------------------------


def test_a_hash_is_right_for_its_password_alone_and_two_hashes_differ() -> None:
    first, second = passwords.hashed("one", CHEAP), passwords.hashed("one", CHEAP)
    assert first != second and "one" not in first
    assert passwords.is_right("one", first) and passwords.is_right("one", second)
    for wrong in ("", "One", "one ", "on", "one\0", "x" * 5000):
        assert not passwords.is_right(wrong, first)
    longest = passwords.hashed("x" * passwords.MAX_BYTES, CHEAP)
    assert not passwords.is_right("x" * (passwords.MAX_BYTES + 1), longest)
    assert not passwords.is_right("one", passwords.unmatched(CHEAP))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "secret",
        "$scrypt$ln=15,r=8,p=1$AAAA",
        "$scrypt$ln=15,r=8,p=1$!!$!!",
        "$scrypt$ln=63,r=8,p=1$" + "A" * 24 + "$" + "A" * 44,
        "$scrypt$ln=20,r=32,p=16$" + "A" * 24 + "$" + "A" * 44,
        "$scrypt$ln=-1,r=8,p=1$" + "A" * 24 + "$" + "A" * 44,
        "$bcrypt$ln=15,r=8,p=1$" + "A" * 24 + "$" + "A" * 44,
    ],
)
def test_what_is_no_hash_is_refused_and_not_shown(text: str) -> None:
    with pytest.raises(errors.OptionError) as caught:
        passwords.check_hash(text)
    assert not text or text not in str(caught.value)


@pytest.mark.parametrize("password", ["", "x" * 1025, "\udcff", "one\0"])
def test_an_empty_or_too_long_password_is_refused(password: str) -> None:
    with pytest.raises(errors.OptionError):
        passwords.hashed(password, CHEAP)


# -- the header of a call ------------------------------------------------------------------------------------


@pytest.mark.parametrize("login", [Basic("ann", "a:b c€"), Basic("ann", ""), Bearer("token")])
def test_a_header_says_what_it_was_made_of(login: Basic | Bearer) -> None:
    assert parse(login.header) == login


@pytest.mark.parametrize(
    "header", ["", "Basic", "Basic !!!", "Basic YW5u", "Bearer ", "Digest x", "Basic /w=="]
)
def test_a_damaged_header_is_refused_and_not_shown(header: str) -> None:
    with pytest.raises(errors.LoginRefused) as caught:
        parse(header)
    assert "YW5u" not in str(caught.value) and "Digest" not in str(caught.value)


@pytest.mark.parametrize(
    ("peer", "address", "loopback"),
    [
        ("ipv4:127.0.0.1:4711", "127.0.0.1", True),
        ("ipv4:10.0.0.1:4711", "10.0.0.1", False),
        ("ipv6:%5B::1%5D:4711", "::1", True),
        ("ipv6:[fe80::1%25eth0]:4711", "fe80::1", False),
        ("ipv6:[::ffff:127.0.0.1]:1", "::ffff:127.0.0.1", True),
        ("ipv6:[::ffff:10.0.0.1]:1", "::ffff:10.0.0.1", False),
        ("unix:/tmp/socket", "", False),
        ("", "", False),
    ],
)
def test_the_address_of_a_caller_is_read_from_grpc(peer: str, address: str, loopback: bool) -> None:
    assert peer_address(peer) == address
    assert is_loopback(address) is loopback


# -- too many wrong logins -----------------------------------------------------------------------------------


def test_an_address_gets_few_checks_and_another_one_is_not_slowed_down() -> None:
    throttle = Throttle(b"salt")
    now, checked = 0.0, 0
    for attempt in range(100_000):
        now += 0.0001  # 10 s in all
        user = f"user {attempt}"
        if throttle.turn(user, "10.0.0.1", now) is not None:
            checked += 1
            throttle.failed(user, "10.0.0.1", now)
    most = throttles.FREE + (10 + throttles.PATIENCE_S) / throttles.ADDRESS_S + throttles.SLOTS
    assert checked <= most
    assert throttle.turn("user 1", "10.0.0.2", now) == 0.0


def test_a_user_of_an_address_waits_longer_with_each_failure_up_to_a_limit() -> None:
    throttle = Throttle(b"salt")
    now, waits = 0.0, []
    for _ in range(12):
        wait_s = throttle.turn("ann", "10.0.0.1", now)
        assert wait_s is not None
        waits.append(round(wait_s, 6))
        now += wait_s
        throttle.failed("ann", "10.0.0.1", now)
    assert waits[0] == 0.0 and waits == sorted(waits) and 0 < waits[-1] <= throttles.MAX_S
    now += throttles.FORGET_S + throttles.MAX_S + 1
    assert throttle.turn("ann", "10.0.0.1", now) == 0.0
    throttle.failed("ann", "10.0.0.1", now)
    throttle.succeeded("ann", "10.0.0.1")
    assert throttle.turn("ann", "10.0.0.1", now) == 0.0


def test_the_memory_of_failures_is_bounded() -> None:
    throttle = Throttle(b"salt")
    for attempt in range(20_000):
        throttle.failed(f"user {attempt}", f"10.{attempt >> 16}.{attempt >> 8 & 255}.{attempt & 255}", 0.0)
        throttle.failed(f"user {attempt}", "10.9.9.9", 0.0)
        throttle.failed("user", f"2001:db8::{attempt:x}", 0.0)  # all of one network
    assert len(throttle) <= throttles.ADDRESSES * (throttles.SLOTS + 1)
    assert len(throttle._known) <= throttles.ADDRESSES


def test_after_100000_wrong_logins_honest_clients_are_served_and_memory_is_bounded(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(broker, "honest")
    logins = broker._logins
    monkeypatch.setattr(logins_module, "UNKNOWN", passwords.unmatched(CHEAP))
    with connect(broker, "honest") as client:
        client.opened(1)
        client.call(1, c.Queue.Declare(queue="q"), c.Queue.DeclareOk)
        checked = 0

        def attack() -> None:
            nonlocal checked
            for attempt in range(100_000):
                user = "honest" if attempt % 2 else f"user {attempt}"
                try:
                    assert logins.known(user, "wrong", "127.0.0.1") is None
                    logins.turn(user, "127.0.0.1")
                    checked += 1
                    logins.check(user, "wrong", "127.0.0.1")
                except errors.LoginRefused:
                    continue
                raise AssertionError("a wrong password was accepted")

        attacker = threading.Thread(target=attack)
        attacker.start()
        rounds = 0
        while attacker.is_alive() or rounds < 3:
            with connect(broker, "honest") as again:  # from the attacker's address
                again.opened(1)
                again.publish(1, "", "q", b"body")
                again.end()
            assert not isinstance(
                Raw(broker.url, Basic("honest", PASSWORD).header).action("hello", b""), errors.TxmqError
            )
            rounds += 1
        attacker.join()
        assert client.count(1, "q") == rounds
    assert checked < 1000  # all others were refused without a hash
    assert len(logins._throttle) <= throttles.SLOTS + 1
    assert len(logins._right) == 1


def test_many_wrong_logins_at_once_do_not_hold_up_an_open_connection(broker: Broker) -> None:
    add(broker, "honest")
    with connect(broker, "honest") as client:
        client.opened(1)
        client.call(1, c.Queue.Declare(queue="q"), c.Queue.DeclareOk)
        client.call(1, c.Confirm.Select(), c.Confirm.SelectOk)
        attackers = [connect(broker, "honest", "wrong") for _ in range(100)]
        for attacker in attackers:
            attacker.started()
            attacker.start_ok()
        for _ in range(50):
            client.publish(1, "", "q", b"body")
            client.expect(c.Basic.Ack, 1)
        refused = 0
        for attacker in attackers:
            with attacker:
                refused += attacker.expect(c.Connection.Close, 0).reply_text == REFUSED
        assert refused == len(attackers)


def test_a_client_that_leaves_while_its_password_is_checked_leaves_nothing(broker: Broker) -> None:
    broker.accounts.add_user("slow", passwords.hashed(PASSWORD, passwords.Cost(13)))
    for _ in range(3):
        with connect(broker, "slow") as client:
            client.started()
            client.start_ok()
    broker.accounts.set_permissions("slow", ".*", ".*", ".*")
    with connect(broker, "slow") as client:
        client.opened(1)


def test_what_is_sent_before_the_login_is_carried_out_after_it_or_never(broker: Broker) -> None:
    add(broker, "ann")
    for password in (PASSWORD, "wrong"):
        with connect(broker, "ann", password) as client:
            client.started()
            client.start_ok()
            client.send(0, c.Connection.TuneOk(2047, 131_072, 0), c.Connection.Open("/"))
            client.send(1, c.Channel.Open(), c.Queue.Declare(queue=f"of {password}"))
            if password == PASSWORD:
                client.expect(c.Connection.Tune, 0)
                client.expect(c.Connection.OpenOk, 0)
                client.expect(c.Channel.OpenOk, 1)
                client.expect(c.Queue.DeclareOk, 1)
            else:
                client.expect(c.Connection.Close, 0)
    assert [queue.name for queue in broker.queues()] == [f"of {PASSWORD}"]


# -- users come and go ---------------------------------------------------------------------------------------


def test_the_first_user_ends_the_default_one_and_its_connections(broker: Broker) -> None:
    with connect(broker, "guest", "guest") as client:
        client.opened(1)
        assert not isinstance(Raw(broker.url).action("hello", b""), errors.TxmqError)
        add(broker, "ann")
        closed = client.expect(c.Connection.Close, 0)
        assert (closed.reply_code, closed.reply_text) == (
            320,
            "CONNECTION_FORCED - user 'guest' was deleted",
        )
    assert refusal(broker, "guest", "guest") == (403, REFUSED)
    assert isinstance(Raw(broker.url).action("hello", b""), errors.LoginRefused)
    with pytest.raises(errors.OptionError, match="the last one"):
        broker.accounts.delete_user("ann")


def test_a_deleted_user_is_disconnected_and_its_queue_is_free(broker: Broker) -> None:
    add(broker, "ann")
    add(broker, "bob")
    with connect(broker, "ann") as client, connect(broker, "bob") as other:
        client.opened(1)
        other.opened(1)
        client.call(1, c.Queue.Declare(queue="mine", exclusive=True), c.Queue.DeclareOk)
        broker.accounts.delete_user("ann")
        closed = client.expect(c.Connection.Close, 0)
        assert (closed.reply_code, closed.reply_text) == (320, "CONNECTION_FORCED - user 'ann' was deleted")
        client.send(0, c.Connection.CloseOk())
        with pytest.raises(Closed):
            client.receive()
        other.call(1, c.Queue.Declare(queue="theirs"), c.Queue.DeclareOk)
    assert [queue.name for queue in broker.queues()] == ["theirs"]
    add(broker, "ann", patterns=("^$", "^$", "^$"))  # the same name: none of the old permissions
    with connect(broker, "ann") as client:
        client.opened(1)
        client.send(1, c.Queue.Declare(queue="mine"))
        assert client.expect(c.Channel.Close, 1).reply_code == 403


def test_a_password_that_was_changed_is_not_remembered(broker: Broker) -> None:
    add(broker, "ann")
    with connect(broker, "ann") as client:
        client.opened(1)
        broker.accounts.set_password("ann", passwords.hashed("another", CHEAP))
        client.call(1, c.Queue.Declare(queue="q"), c.Queue.DeclareOk)  # who is in stays in, as in RabbitMQ
    assert refusal(broker, "ann", PASSWORD) == (403, REFUSED)
    with connect(broker, "ann", "another") as client:
        client.opened(1)


def test_permissions_that_change_hold_for_open_channels_at_once(broker: Broker) -> None:
    add(broker, "ann")
    with connect(broker, "ann") as client:
        client.opened(1)
        client.call(1, c.Queue.Declare(queue="q"), c.Queue.DeclareOk)
        for _ in range(20):
            client.publish(1, "", "q", b"body")
        assert client.count(1, "q") == 20
        broker.accounts.set_permissions("ann", "", "^nothing$", "")
        for _ in range(20):
            client.publish(1, "", "q", b"body")
        closed = client.expect(c.Channel.Close, 1)
        assert closed.reply_code == 403
        client.send(1, c.Channel.CloseOk())
        client.open(2)
        assert client.count(2, "q") == 20
        broker.accounts.set_permissions("ann", "", ".*", "")
        client.publish(2, "", "q", b"body")
        assert client.count(2, "q") == 21
        broker.accounts.set_topic_permissions("ann", "amq.topic", "^yes$", "")
        client.publish(2, "amq.topic", "yes", b"")
        client.publish(2, "amq.topic", "no", b"")
        assert client.expect(c.Channel.Close, 2).reply_code == 403


def test_users_survive_a_restart_and_a_salvage(tmp_path: Path) -> None:
    with Broker.open(tmp_path / "data") as broker:
        add(broker, "ann", "administrator", patterns=("a", "b", "c"))
        add(broker, "bob")
        broker.accounts.set_topic_permissions("ann", "amq.topic", "w", "r")
        broker.accounts.delete_user("bob")
        users, permissions = broker.accounts.users(), broker.accounts.permissions()
    assert [user.name for user in users] == ["ann"] and len(permissions) == 2
    salvage(str(tmp_path / "data"), str(tmp_path / "salvaged"))
    for directory in ("data", "salvaged"):
        with Broker.open(tmp_path / directory, amqp=["127.0.0.1:0"]) as broker:
            assert broker.accounts.users() == users
            assert broker.accounts.permissions() == permissions
            with connect(broker, "ann") as client:
                client.opened(1)


def test_a_wrong_change_is_refused_and_changes_nothing(broker: Broker) -> None:
    add(broker, "ann")
    accounts, hashed = broker.accounts, passwords.hashed("x", CHEAP)
    before = accounts.users(), accounts.permissions()
    wrong = (
        lambda: accounts.add_user("ann", hashed),
        lambda: accounts.add_user("", hashed),
        lambda: accounts.add_user("a:b", hashed),
        lambda: accounts.add_user("x" * 256, hashed),
        lambda: accounts.add_user("bob", "plain"),
        lambda: accounts.add_user("bob", hashed, ["king"]),
        lambda: accounts.set_tags("ann", ["king"]),
        lambda: accounts.set_tags("bob", []),
        lambda: accounts.set_password("bob", hashed),
        lambda: accounts.delete_user("bob"),
        lambda: accounts.set_permissions("bob", "", "", ""),
        lambda: accounts.set_permissions("ann", "(", "", ""),
        lambda: accounts.set_permissions("ann", "", "", "*"),
        lambda: accounts.set_topic_permissions("ann", "x", "[", ""),
        lambda: accounts.clear_permissions("bob"),
    )
    for change in wrong:
        with pytest.raises(errors.OptionError):
            change()
    assert (accounts.users(), accounts.permissions()) == before


# -- the users file ------------------------------------------------------------------------------------------


def users_file(path: Path, text: str, mode: int = 0o600) -> str:
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_a_users_file_has_passwords_or_hashes_and_the_catalog_says_what_its_users_may(tmp_path: Path) -> None:
    text = f"# users\nann:plain: with colon\n\nbob:{passwords.hashed('secret', CHEAP)}\n"
    users = read_users(users_file(tmp_path / "users", text))
    with Broker.open(tmp_path / "data", amqp=["127.0.0.1:0"], users=users) as broker:
        assert refusal(broker, "guest", "guest") == refusal(broker, "bob", users["bob"]) == (403, REFUSED)
        assert refusal(broker, "ann", "plain")[0] == 403
        for user, password in (("ann", "plain: with colon"), ("bob", "secret")):
            with connect(broker, user, password) as client:
                client.opened(1)
                client.call(1, c.Queue.Declare(queue=user), c.Queue.DeclareOk)
        with pytest.raises(errors.OptionError, match="users file alone"):
            broker.accounts.set_permissions("ann", "", "", "")
        add(broker, "ann", patterns=("^$", "^$", "^$"))
        assert refusal(broker, "ann", PASSWORD)[0] == 403  # the file has another password
        with connect(broker, "ann", "plain: with colon") as client:
            client.opened(1)
            client.send(1, c.Queue.Declare(queue="more"))
            assert client.expect(c.Channel.Close, 1).reply_code == 403
        assert [(user.name, user.source) for user in broker.accounts.users()] == [
            ("ann", "catalog+file"),
            ("bob", "file"),
        ]


@pytest.mark.parametrize(
    ("text", "mode", "why"),
    [
        ("ann:x", 0o644, "may be read or written by others"),
        ("ann:x", 0o620, "may be read or written by others"),
        ("", 0o600, "has no user"),
        ("ann", 0o600, "line 1"),
        ("a:b\nann:", 0o600, "line 2"),
        (":x", 0o600, "line 1"),
        ("ann:$scrypt$ln=99$a$b", 0o600, "line 1"),
    ],
)
def test_a_wrong_users_file_is_refused_without_its_content(
    tmp_path: Path, text: str, mode: int, why: str
) -> None:
    with pytest.raises(errors.OptionError, match=why):
        read_users(users_file(tmp_path / "users", text, mode))


# -- the audit log -------------------------------------------------------------------------------------------


def test_the_audit_log_has_who_did_what_and_no_secret(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    with Broker.open(directory, amqp=["127.0.0.1:0"]) as broker:
        add(broker, "ann", "administrator", patterns=("^q", "", ""))
        refusal(broker, "ann", "wrong-secret")
        with connect(broker, "ann") as client:
            client.opened(1)
            client.call(1, c.Queue.Declare(queue="q"), c.Queue.DeclareOk)
            client.call(1, c.Queue.Declare(queue="q", passive=True), c.Queue.DeclareOk)
            client.publish(1, "", "q", b"secret body")
            client.expect(c.Channel.Close, 1)
        raw = Raw(broker.url, Basic("ann", PASSWORD).header)
        hashed = passwords.hashed("new-secret", CHEAP)
        assert raw.call("admin.add_user", {"name": "bob", "password_hash": hashed, "tags": []}) == [b"null"]
        raw.call("admin.commit", {"xid": "nothing"})  # there is none: nothing is decided
        raw.call("channel.exchange_delete", {"exchange": "x"})
    log = directory / audits.FILE
    assert log.stat().st_mode & 0o777 == 0o600
    text = log.read_text()
    for secret in (PASSWORD, "wrong-secret", "new-secret", hashed, "secret body", "$scrypt"):
        assert secret not in text
    lines = [json.loads(line) for line in text.splitlines() if '"door": "process"' not in line]
    said = [(line["event"], line["user"], line.get("answer") or line.get("asked") or "") for line in lines]
    assert said == [
        ("login", "ann", "refused"),
        ("login", "ann", "accepted"),
        ("queue.declare", "ann", ""),
        ("refused", "ann", "basic.publish"),
        ("admin.add_user", "ann", ""),
        ("refused", "ann", "channel.exchange_delete"),
    ]
    assert lines[4]["name"] == "bob" and all(line["address"] == "127.0.0.1" for line in lines)


def test_changes_of_users_in_the_process_are_in_the_audit_log_without_hashes(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    hashed = passwords.hashed("new-secret", CHEAP)
    with Broker.open(directory) as broker:
        accounts = broker.accounts
        calls: list[tuple[str, dict[str, object]]] = [
            ("add_user", {"name": "ann", "password_hash": hashed, "tags": ["administrator"]}),
            ("add_user", {"name": "bob", "password_hash": hashed}),
            ("set_password", {"name": "bob", "password_hash": passwords.hashed("another", CHEAP)}),
            ("set_tags", {"name": "bob", "tags": ["monitoring"]}),
            ("set_permissions", {"user": "bob", "configure": "^c", "write": "^w", "read": "^r"}),
            ("set_topic_permissions", {"user": "bob", "exchange": "amq.topic", "write": "^t", "read": ""}),
            ("clear_topic_permissions", {"user": "bob"}),
            ("clear_permissions", {"user": "bob"}),
            ("give_app", {"app_id": "app", "user": "bob"}),
            ("delete_user", {"name": "bob"}),
            ("add_vhost", {"name": "sales", "max_queues": 5}),
            ("limit_vhost", {"name": "sales", "max_messages": 7}),
            ("delete_vhost", {"name": "sales"}),
        ]
        for word, arguments in calls:
            getattr(broker.vhosts if "vhost" in word else accounts, word)(**arguments)
        with pytest.raises(errors.OptionError):
            accounts.delete_user("nobody")
        raw = Raw(broker.url, Basic("ann", "new-secret").header)
        assert raw.call("admin.delete_user", {"name": "nobody"}) != [b"null"]
        for word, arguments in calls[1:2]:
            assert raw.call(f"admin.{word}", {"tags": [], **arguments}) == [b"null"]
        said = {each for each in contract.ACCOUNTS if each not in ("users", "permissions", "vhosts")}
        assert said == {word for word, _ in calls}
    text = (directory / audits.FILE).read_text()
    assert "$scrypt" not in text
    lines = [json.loads(line) for line in text.splitlines()]
    changes = [line for line in lines if line["event"] != "login"]
    assert [(line["event"], line["door"], line["user"]) for line in changes] == [
        *((f"admin.{word}", "process", "") for word, _ in calls),
        ("admin.add_user", "flight", "ann"),
    ]
    for line, (_, arguments) in zip(changes, calls, strict=False):
        for name, value in arguments.items():
            if name != "password_hash":
                assert line["of" if name == "user" else name] == value


def test_the_audit_log_is_rotated_and_a_full_disk_does_not_stop_the_broker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audits, "MAX_BYTES", 1000)
    log = Audit(str(tmp_path))
    for number in range(200):
        log.say("event", "ann", "", number=number, text="\udcff\n")
    log.close()
    files = sorted(tmp_path.iterdir())
    assert len(files) == audits.KEPT + 1 and all(file.stat().st_size <= 1000 for file in files)
    numbers = [
        json.loads(line)["number"]
        for file in (*reversed(files[1:]), files[0])
        for line in file.read_text().splitlines()
    ]
    assert numbers == list(range(numbers[0], 200))
    gone = Audit(str(tmp_path / "gone"))
    gone.say("event", "ann", "")
    gone.close()


def test_a_line_of_the_audit_log_is_bounded_whatever_a_caller_sends(tmp_path: Path) -> None:
    log = Audit(str(tmp_path))
    log.say("refused", "\x01" * 1_000_000, "", names=["x" * 300] * 5000, queue="orders", count=7)
    log.say("refused", "ann", "", name="é" * 130)
    log.close()
    first, second = (tmp_path / audits.FILE).read_text().splitlines()
    assert len(first) < 3 * audits.FIELD_BYTES
    line = json.loads(first)
    assert line["user"].startswith("\x01\x01") and line["user"].endswith("... (1000000 characters)")
    assert line["names"].startswith('["xxx') and (line["queue"], line["count"]) == ("orders", 7)
    assert json.loads(second)["name"] == "é" * 130


def test_a_client_of_a_directory_sends_no_token_to_a_broker_that_cannot_prove_to_have_it(
    tmp_path: Path,
) -> None:
    """As after a kill: ``endpoint.json`` is left, and another process has bound the port."""
    directory = str(tmp_path / "data")
    seen: list[tuple[str, object]] = []

    class Note(pyarrow.flight.ServerMiddlewareFactory):
        def start_call(self, _info: object, headers: dict[str, list[str]]) -> None:
            seen.append(("headers", headers.get("authorization")))

    class Impostor(pyarrow.flight.FlightServerBase):
        def do_action(self, _context: object, action: pyarrow.flight.Action) -> list[bytes]:
            seen.append((action.type, action.body.to_pybytes()))
            return [b"0" * 64]

    with Broker.open(directory) as broker:
        known = endpoint.read_endpoint(directory)
        assert known is not None
        challenge = b"c" * CHALLENGE_BYTES
        assert Raw(broker.url).action("prove", challenge) == [proof(known.token, challenge)]
        assert Raw(broker.url).action("prove", challenge[1:]) == [b""]
        with txmq.connect(data=directory) as client:
            assert client.queues() == []
    with Impostor("grpc://127.0.0.1:0", middleware={"note": Note()}) as impostor:
        live = Connection(Address(host="127.0.0.1", port=impostor.port, token=known.token), 0, 0)
        with pytest.raises(errors.ConnectionFailed):
            live.live()
    assert {name for name, _ in seen} == {"headers", "prove"}
    assert not any(value for name, value in seen if name == "headers")


def test_a_call_from_elsewhere_needs_a_login_and_one_with_the_token_none() -> None:
    logins = Logins(Users(Undo()), token="the token")
    assert logins.anonymous("127.0.0.1").user == "guest"
    assert logins.bearer("the token", "10.0.0.1").owner
    for refused in (
        lambda: logins.anonymous("10.0.0.1"),
        lambda: logins.anonymous(""),
        lambda: logins.bearer("another", "127.0.0.1"),
        lambda: Logins(Users(Undo())).bearer("", "127.0.0.1"),
        lambda: Logins(Users(Undo()), open_to_anonymous=False).anonymous("127.0.0.1"),
        lambda: logins.basic("guest", "guest", "10.0.0.1"),
    ):
        with pytest.raises(errors.LoginRefused):
            refused()
