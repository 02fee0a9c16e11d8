"""Logins on both listeners: wrong passwords cost the honest little, deleted users are gone, and nothing is told.

Not here: permissions (``interop/test_permissions.py``, ``flight/test_flight_permissions.py``).
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pyarrow.flight
import pytest
from pamqp import commands as c

import txmq
from broker_core.broker.access.users import Users
from broker_core.client.connection import FlightConnection
from broker_core.core import endpoint, errors
from broker_core.core import password as passwords
from broker_core.core.address import Address
from broker_core.core.credentials import Credentials
from broker_core.core.undo import Undo
from broker_core.flight import contract
from broker_core.flight.authorization import CHALLENGE_BYTES, Basic, Bearer, parse, proof
from broker_core.launcher import Broker
from broker_core.server.access import audit as audits
from broker_core.server.access import login_queue as login_queues
from broker_core.server.access import password_checks, repeats
from broker_core.server.access import throttle as throttles
from broker_core.server.access.audit import Audit
from broker_core.server.access.caller import Caller
from broker_core.server.access.identity import Identity
from broker_core.server.access.login_queue import Login, LoginQueue
from broker_core.server.access.logins import Logins
from broker_core.server.access.password_checks import is_loopback
from broker_core.server.access.throttle import Throttle, network_of
from broker_core.server.access.users_file import read_users
from broker_core.server.flight.audit import ACCOUNTS
from broker_core.server.flight.login import peer_address
from broker_core.store.salvage.salvage import salvage
from tests.amqp_peer import Closed, Peer
from tests.permission_rows import PASSWORD
from tests.progress import wait_until
from tests.server.flight.flight_calls import Raw
from tests.server.http.http_client import Api, serving

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
    "header", ["", "Basic", "Basic !!!", "Basic é", "Basic YW5u", "Bearer ", "Digest x", "Basic /w=="]
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


def checks_of(login_queue: LoginQueue, throttle: Throttle, logins: list[Login], until: float) -> list[Login]:
    """Those that are checked, in their order, all wrong and in no time; each comes at its ``since``."""
    checked, now = [], 0.0
    for login in [*logins, None]:
        end = until if login is None else login.since
        while now < end:
            login_queue.expired(now)
            found = login_queue.next(now)
            if found is not None:
                checked.append(found)
                login_queue.done(found)
                throttle.count_failure(found.user, found.pair[0], now)
            else:
                at = login_queue.next_at(now)
                now = end if at is None else min(max(at, now + 0.001), end)
        if login is not None:
            login_queue.add(login)
    return checked


@pytest.mark.soak
def test_an_address_gets_few_checks_and_another_one_is_not_slowed_down() -> None:
    throttle = Throttle(b"salt")
    attack = [Login(f"user {n}", str(n), "10.0.0.1", b"%d" % n, n / 1000) for n in range(10_000)]
    checked = checks_of(LoginQueue(throttle), throttle, attack, 10.0)
    assert 10 / throttles.ADDRESS_S / 2 < len(checked) <= throttles.FREE + 10 / throttles.ADDRESS_S + 2
    assert throttle.free_at("user 1", "10.0.0.2", 10.0) <= 10.0


def test_a_user_of_an_address_gets_one_check_in_two_seconds() -> None:
    throttle = Throttle(b"salt")
    attack = [Login("ann", str(n), "10.0.0.1", b"%d" % n, n / 100) for n in range(6000)]
    checked = checks_of(LoginQueue(throttle), throttle, attack, 60.0)
    assert 25 <= len(checked) <= 60 / throttles.MAX_S + 6
    later = 60.0 + throttles.FORGET_S + throttles.MAX_S + 1
    assert (
        throttle.free_at("ann", "10.0.0.1", 60.0) > 60.0
        and throttle.free_at("ann", "10.0.0.1", later) <= later
    )


def test_a_right_login_does_not_speed_up_who_guesses() -> None:
    throttle = Throttle(b"salt")
    for _ in range(8):
        throttle.count_failure("ann", "10.0.0.1", 1.0)
    throttle.note_login("ann", "10.0.0.1")
    assert throttle.free_at("ann", "10.0.0.1", 1.0) == 1.0 + throttles.MAX_S


@pytest.mark.parametrize(
    ("names", "addresses"),
    [(20, 1), (1, 1000), (1000, 1), (1000, 1000)],
    ids=["users", "one", "names", "all"],
)
def test_a_thousand_wrong_logins_a_minute_delay_no_honest_first_one(names: int, addresses: int) -> None:
    """Wrong ones for the honest users too, where there is one address: but not from theirs, which is 10.9."""
    throttle = Throttle(b"salt")
    logins = [
        Login(
            f"h{n % names}", str(n), f"10.0.{n % addresses >> 8}.{n % addresses & 255}", b"%d" % n, n * 0.06
        )
        for n in range(1000)
    ]
    near = (
        "10.0.0.0" if names == 1000 else "10.9.0.1"
    )  # the address of the attack, for names that it tries once
    logins += [Login(f"honest {n}", "right", near, b"right", n * 3.0 + 0.01) for n in range(20)]
    checked = checks_of(LoginQueue(throttle), throttle, sorted(logins, key=lambda each: each.since), 70.0)
    assert [each.user for each in checked if each.password == "right"] == [f"honest {n}" for n in range(20)]
    place = {id(each): n for n, each in enumerate(sorted(logins, key=lambda each: each.since))}
    for n, each in enumerate(checked):  # nobody who came long after an honest one was checked before it
        if each.password == "right":
            assert sum(place[id(other)] > place[id(each)] for other in checked[:n]) <= 2


def test_a_queue_of_logins_is_fair_to_addresses_and_users_and_bounded() -> None:
    throttle = Throttle(b"salt")
    waiting = LoginQueue(throttle)
    throttle.note_login("known", "10.0.0.1")
    refused = []
    for n in range(2000):
        refused.append(waiting.add(Login(f"n{n % 500}", str(n), "10.0.0.1", b"%d" % n, 0.0)))
        refused.append(waiting.add(Login("victim", str(n), f"10.1.{n >> 8}.{n & 255}", b"%d" % n, 0.0)))
    assert len(waiting) == login_queues.WAITING
    honest = [
        Login("known", "", "10.0.0.1", b"", 0.0),
        Login("elsewhere", "", "10.9.0.1", b"", 0.0),
        Login("another", "", "10.9.0.2", b"", 0.0),
    ]
    for login in honest:
        gave_way = waiting.add(login)
        assert gave_way is not None and gave_way not in honest
    order = []
    for _ in range(login_queues.WAITING):
        found = waiting.next(0.0)
        if found is None:
            break
        order.append(found)
        waiting.done(found)
    assert order[0] is honest[0]
    assert {order.index(each) for each in honest[1:]} <= set(range(5))


@pytest.mark.parametrize("addresses", [1, 40, 80, 1000])
def test_a_first_login_waits_for_one_of_each_other_address_that_waits_at_most(addresses: int) -> None:
    throttle = Throttle(b"salt")
    waiting = LoginQueue(throttle)
    for n in range(3 * addresses):
        address = f"10.1.{n % addresses >> 8}.{n % addresses & 255}"
        waiting.add(Login(f"h{n % 7}", str(n), address, b"%d" % n, 0.0))
    honest = Login("honest", "right", "10.9.0.1", b"right", 0.0)
    assert waiting.add(honest) is not honest
    before: list[str] = []
    while (login := waiting.next(0.0)) is not honest:
        assert login is not None
        before.append(login.pair[0])
        waiting.done(login)
    assert len(before) == len(set(before)) <= min(addresses, login_queues.WAITING - 1)


def test_of_one_user_from_one_address_few_wait_and_one_is_checked() -> None:
    waiting = LoginQueue(Throttle(b"salt"))
    logins = [Login("ann", str(n), "10.0.0.1", b"%d" % n, 0.0) for n in range(6)]
    assert [waiting.add(each) is each for each in logins] == [False] * login_queues.PAIR + [True, True]
    assert waiting.next(0.0) is logins[0] and waiting.next(0.0) is None
    assert waiting.add(logins[4]) is logins[4], "the one that is checked has its place"
    waiting.done(logins[0])
    assert waiting.next(0.0) is logins[1]
    assert waiting.expired(login_queues.PATIENCE_S + 1) == logins[2:4] and len(waiting) == 0


def test_the_memory_of_failures_is_bounded() -> None:
    throttle = Throttle(b"salt")
    networks = [network_of(f"10.{n >> 16}.{n >> 8 & 255}.{n & 255}") for n in range(40_000)]
    for attempt, network in enumerate(networks):
        throttle.count_failure(f"user {attempt}", network, 0.0)
        throttle.count_failure(f"user {attempt}", network_of("10.9.9.9"), 0.0)
        throttle.count_failure("user", network_of(f"2001:db8::{attempt:x}"), 0.0)  # all of one network
        throttle.note_login(f"user {attempt}", network)
    assert len(throttle) <= throttles.ADDRESSES + throttles.COUNTERS
    assert sum(throttle.failures(network) > 0 for network in networks) < throttles.ADDRESSES
    logged_in = [throttle.has_logged_in(f"user {n}", network) for n, network in enumerate(networks)]
    assert sum(logged_in) <= throttles.LOGINS


@pytest.mark.parametrize("logins", [4_000, pytest.param(100_000, marks=pytest.mark.soak)])
def test_after_many_wrong_logins_honest_clients_are_served_and_memory_is_bounded(
    broker: Broker, logins: int
) -> None:
    """The attacker guesses for others from the address of the honest one, and for it from elsewhere."""
    add(broker, "honest")
    checks = broker.logins.checks
    with connect(broker, "honest") as client:
        client.opened(1)
        client.call(1, c.Queue.Declare(queue="q"), c.Queue.DeclareOk)
        asked: list[Future[Identity]] = []

        def attack() -> None:
            for attempt in range(logins):
                here = attempt % 2
                user, address = (f"user {attempt}", "127.0.0.1") if here else ("honest", "10.0.0.1")
                try:
                    asked.append(checks.ask(user, f"wrong {attempt}", address))
                except errors.LoginRefused:
                    continue

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
    for answer in asked:
        with pytest.raises(errors.LoginRefused):
            answer.result(60)
    assert len(checks.throttle) <= throttles.ADDRESSES + throttles.COUNTERS
    assert len(asked) < logins // 10, "all others were refused without a hash"


def asked(logins: Logins, user: str, password: str, address: str = "10.0.0.1") -> bool | None:
    """Whether it is accepted; None: not at once."""
    try:
        answer = logins.ask(user, password, address)
        return True if answer.done() else None
    except errors.LoginRefused:
        return False


def test_a_right_password_is_behind_the_wrong_ones_and_on_a_proved_connection_it_is_not(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The speed of an answer, or its absence, would tell who guesses which password is right."""
    monkeypatch.setattr(throttles, "MAX_S", 1.0)
    add(broker, "ann")
    logins = broker.logins
    for address in ("10.0.0.1", "10.0.0.2"):
        logins.basic("ann", PASSWORD, address, f"ipv4:{address}:1")
    assert asked(logins, "ann", PASSWORD) is True
    for _ in range(8):
        logins.checks.throttle.count_failure("ann", "10.0.0.1", time.monotonic())
    wrong = [logins.ask("ann", f"wrong {n}", "10.0.0.1") for n in range(login_queues.PAIR)]
    assert asked(logins, "ann", PASSWORD) is False, "the places are taken: right and wrong are refused alike"
    assert asked(logins, "ann", "wrong again") is False
    assert logins.basic("ann", PASSWORD, "10.0.0.1", "ipv4:10.0.0.1:1").user == "ann"
    assert asked(logins, "ann", PASSWORD, "10.0.0.2") is True, "others are not slowed down"
    for answer in wrong:
        with pytest.raises(errors.LoginRefused):
            answer.result(60)
    late = logins.ask("ann", PASSWORD, "10.0.0.1")
    assert not late.done(), "one check in a while, whatever its answer is"
    assert late.result(60).user == "ann"
    assert asked(logins, "ann", "wrong 0") is False, "what was wrong costs nothing, and stops nobody"


def test_clients_that_send_one_password_share_its_check(broker: Broker) -> None:
    add(broker, "ann")
    logins = broker.logins
    for n in range(4):
        with pytest.raises(errors.LoginRefused):
            logins.basic("ann", f"wrong {n}", "10.0.0.1", "")
    answers = [logins.ask("ann", PASSWORD, "10.0.0.1") for _ in range(50)]
    assert all(answer.result(60).user == "ann" for answer in answers)


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
        assert (closed.reply_code, closed.reply_text) == (320, "CONNECTION_FORCED - user 'guest' was deleted")
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


@pytest.mark.parametrize("tags", [("monitoring",), ("operator",), ("administrator",), ()])
def test_a_stream_ends_with_its_user(broker: Broker, tags: tuple[str, ...]) -> None:
    add(broker, "root", "administrator")
    add(broker, "ann", *tags)
    rows = 200
    with broker.channel() as channel:
        channel.queue_declare("q")
        channel.tx_select()
        for _ in range(rows):
            channel.publish(bytes(300_000), routing_key="q")
        channel.tx_commit()
    raw = Raw(broker.url, Basic("ann", PASSWORD).header)
    ticket = pyarrow.flight.Ticket(contract.encode(contract.Ticket(browse=(("q", 0, rows),))))
    reader = raw.client.do_get(ticket)
    read = reader.read_chunk().data.num_rows
    broker.accounts.delete_user("ann")

    def read_on() -> None:
        nonlocal read
        while True:
            read += reader.read_chunk().data.num_rows

    with pytest.raises(pyarrow.flight.FlightError, match="ACCESS_REFUSED"):
        read_on()
    assert read < rows


def test_a_stream_that_a_tag_permitted_ends_with_the_tag(broker: Broker) -> None:
    add(broker, "root", "administrator")
    add(broker, "ann", "administrator")
    caller = Caller(Identity("ann"), broker.logins.rights(Identity("ann")), "", broker.local.state.of("/"))
    assert caller.administers and caller.operates
    broker.accounts.set_tags("ann", ["monitoring"])
    assert not caller.operates and caller.tags == {"monitoring"}
    caller.look("anything")
    broker.accounts.delete_user("ann")
    with pytest.raises(errors.AccessRefused):
        caller.enter()


def test_the_first_user_ends_a_stream_of_the_default_one(broker: Broker) -> None:
    guest = Identity("guest")
    caller = Caller(guest, broker.logins.rights(guest), "", broker.local.state.of("/"))
    caller.enter()
    add(broker, "ann")
    with pytest.raises(errors.AccessRefused):
        caller.enter()


def test_hello_tells_those_who_may_do_nothing_nothing(broker: Broker) -> None:
    add(broker, "ann", patterns=("^$", "^$", "^$"))
    broker.accounts.add_user("nobody", passwords.hashed(PASSWORD, CHEAP))

    def hello(user: str) -> contract.Hello:
        (answer,) = Raw(broker.url, Basic(user, PASSWORD).header).action("hello", b"")
        return contract.decode(contract.Hello, answer)

    assert hello("ann").pid == os.getpid() and hello("ann").directory
    assert hello("nobody") == contract.Hello(contract.VERSION, broker.server.run, "", "", 0)


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
    lines = [json.loads(line) for line in text.splitlines() if '"listener": "process"' not in line]
    said = [(line["event"], line["user"], line.get("answer") or line.get("asked") or "") for line in lines]
    assert said == [
        ("login", "ann", "refused"),
        ("login", "ann", "accepted"),
        ("queue.declare", "ann", ""),
        ("refused", "ann", "basic.publish"),
        ("login", "ann", "accepted"),
        ("admin.add_user", "ann", ""),
        ("refused", "ann", "channel.exchange_delete"),
    ]
    assert lines[5]["name"] == "bob" and all(line["address"] == "127.0.0.1" for line in lines)


def test_a_login_is_in_the_audit_log_for_each_connection_at_every_listener(tmp_path: Path) -> None:
    """Also if its password is remembered from another one, and once, whatever the connection calls."""
    with serving(tmp_path) as broker:
        add(broker, "ann", "administrator", patterns=("^q", "", ""))
        with connect(broker, "ann") as client:
            client.opened(1)
        for _ in range(2):
            raw = Raw(broker.url, Basic("ann", PASSWORD).header)
            assert raw.call("admin.users", {}) and raw.call("admin.users", {})
            api = Api(broker.http_urls[0], "ann", PASSWORD)
            assert api.ask("GET", "/api/whoami").status == api.ask("GET", "/api/whoami").status == 200
    lines = [json.loads(line) for line in (tmp_path / "data" / audits.FILE).read_text().splitlines()]
    logins = [(line["listener"], line["answer"]) for line in lines if line["event"] == "login"]
    assert logins == [(listener, "accepted") for listener in ("amqp", "flight", "http", "flight", "http")]


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
            ("set_policy", {"name": "p", "pattern": "^q", "definition": {"max-length": 1}}),
            ("delete_policy", {"name": "p"}),
            ("delete_vhost", {"name": "sales"}),
            ("import_definitions", {"definitions": {}}),
            ("export_definitions", {}),
        ]
        for word, arguments in calls:
            getattr(broker.vhosts if hasattr(broker.vhosts, word) else accounts, word)(**arguments)
        with pytest.raises(errors.OptionError):
            accounts.delete_user("nobody")
        raw = Raw(broker.url, Basic("ann", "new-secret").header)
        assert raw.call("admin.delete_user", {"name": "nobody"}) != [b"null"]
        for word, arguments in calls[1:2]:
            assert raw.call(f"admin.{word}", {"tags": [], **arguments}) == [b"null"]
        assert set(ACCOUNTS) - {"users", "permissions", "vhosts", "policies"} == {word for word, _ in calls}
    text = (directory / audits.FILE).read_text()
    assert "$scrypt" not in text
    lines = [json.loads(line) for line in text.splitlines()]
    changes = [line for line in lines if line["event"] != "login"]
    assert [(line["event"], line["listener"], line["user"]) for line in changes] == [
        *((f"admin.{word}", "process", "") for word, _ in calls),
        ("admin.add_user", "flight", "ann"),
    ]
    for line, (_, arguments) in zip(changes, calls, strict=False):
        for name, value in arguments.items():
            if name not in ("password_hash", "definitions"):
                assert line["of" if name == "user" else name] == value


def test_the_audit_log_is_rotated_and_a_full_disk_does_not_stop_the_broker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audits, "MAX_BYTES", 1000)

    def numbers() -> list[int]:
        files = [tmp_path / f"{audits.FILE}.{n}" for n in range(len(list(tmp_path.iterdir())) - 1, 0, -1)]
        lines = [line for file in (*files, tmp_path / audits.FILE) for line in file.read_text().splitlines()]
        return [json.loads(line)["number"] for line in lines]

    log = Audit(str(tmp_path))
    for number in range(200):
        log.record("event", "ann", "", number=number, text="\udcff\n")
    assert numbers() == list(range(200)), "nothing young is deleted"
    assert all(file.stat().st_size <= 1000 for file in tmp_path.iterdir())
    for n in (1, 2, 3, 4):  # the oldest files first: each rotation deletes what is last
        old = max(int(file.suffix[1:]) for file in tmp_path.iterdir() if file.suffix[1:].isdigit()) - n + 1
        os.utime(tmp_path / f"{audits.FILE}.{old}", (0, 0))
    before = len(list(tmp_path.iterdir()))
    for number in range(200, 260):
        log.record("event", "ann", "", number=number, text="\udcff\n")
    left = numbers()
    assert left == list(range(left[0], 260)) and left[0] > 0
    monkeypatch.setattr(audits, "MOST", before - 10)
    for number in range(260, 300):
        log.record("event", "ann", "", number=number, text="\udcff\n")
    log.close()
    assert len(list(tmp_path.iterdir())) <= before - 10 + 1 and numbers()[-1] == 299
    gone = Audit(str(tmp_path / "gone"))
    gone.record("event", "ann", "")
    gone.close()


def test_a_line_of_the_audit_log_is_bounded_whatever_a_caller_sends(tmp_path: Path) -> None:
    log = Audit(str(tmp_path))
    log.record("refused", "\x01" * 1_000_000, "", names=["x" * 300] * 5000, queue="orders", count=7)
    log.record("queue.declare", "ann", "", name="é" * 130)
    log.close()
    first, second = (tmp_path / audits.FILE).read_text().splitlines()
    assert len(first) < 4 * audits.REFUSAL_BYTES
    line = json.loads(first)
    assert line["user"].startswith("\x01\x01") and line["user"].endswith("... (1000000 characters)")
    assert line["names"].startswith('["xxx') and (line["queue"], line["count"]) == ("orders", 7)
    assert json.loads(second)["name"] == "é" * 130


def test_refusals_are_counted_and_erase_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of callers who have not proved who they are, with as many names and addresses as they
    like.
    """
    log = Audit(str(tmp_path))
    log.record("admin.add_user", "ann", "10.0.0.1", name="bob")
    for n in range(5000):
        log.record("refused", "mal", "10.0.0.2", asked="engine.resolve", why="x" * 1000, vhost="/")
        log.record("login", f"user {n}", f"10.1.{n >> 8}.{n & 255}", answer="refused", why="wrong")
        log.record("queue.declare", "eve", "10.0.0.3", queue=f"q{n}")
    assert log.record("admin.delete_user", "ann", "10.0.0.1", name="bob")
    assert log.record("refused", "mal", "10.0.0.2", asked="engine.release", why="no", vhost="/"), (
        "another kind"
    )
    log.close()
    lines = [json.loads(line) for line in (tmp_path / audits.FILE).read_text().splitlines()]
    count = Counter((line["event"], line["user"]) for line in lines if "more" not in line)
    assert count["admin.add_user", "ann"] == count["admin.delete_user", "ann"] == 1
    assert count["refused", "mal"] == 2 and count["queue.declare", "eve"] == repeats.LINES
    assert sum(event == "login" for event, _ in count.elements()) == repeats.REFUSALS
    more = {(line["event"], line["user"], line["address"]): line["more"] for line in lines if "more" in line}
    assert more == {
        ("refused", "mal", "10.0.0.2"): 4999,
        ("login", "*", "*"): 5000 - repeats.REFUSALS,
        ("queue.declare", "eve", "*"): 5000 - repeats.LINES,
    }


def test_what_was_counted_is_written_at_the_end_of_its_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audits, "INTERVAL_S", 0.05)
    log = Audit(str(tmp_path))
    for _ in range(3):
        log.record("login", "ann", "10.0.0.1", answer="refused", why="wrong")
    wait_until(lambda: '"more": 2' in (tmp_path / audits.FILE).read_text())
    log.record("login", "ann", "10.0.0.1", answer="refused", why="wrong")
    log.close()
    assert [json.loads(line).get("more") for line in (tmp_path / audits.FILE).read_text().splitlines()] == [
        None,
        2,
        None,
    ]


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
        assert Raw(broker.url).prove(challenge) == [proof(known.token, challenge)]
        assert Raw(broker.url).prove(challenge[1:]) == [b""]
        with txmq.connect(data=directory) as client:
            assert client.queues() == []
    with Impostor("grpc://127.0.0.1:0", middleware={"note": Note()}) as impostor:
        live = FlightConnection(
            Address("127.0.0.1", impostor.port, credentials=Credentials(token=known.token)), 0, 0
        )
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
        lambda: logins.basic("guest", "guest", "10.0.0.1", ""),
    ):
        with pytest.raises(errors.LoginRefused):
            refused()


def test_a_check_is_the_same_work_for_every_user_whatever_hash_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for nobody: its time tells neither that a user is there nor how its password is kept."""
    salted = b"salt" + hashlib.sha256(b"salt" + PASSWORD.encode()).digest()
    hashes = {
        "own": passwords.hashed(PASSWORD),
        "cheap": passwords.hashed(PASSWORD, CHEAP),
        "dear": passwords.hashed(PASSWORD, passwords.Cost(15)),
        "rabbit": passwords.of_rabbitmq("rabbit_password_hashing_sha256", base64.b64encode(salted).decode()),
        "none": passwords.unmatched(),
    }
    work: list[tuple[int, int, int, int]] = []
    scrypt = hashlib.scrypt

    def counted(password: bytes, *, n: int, r: int, p: int, dklen: int, **more: Any) -> bytes:
        work.append((n, r, p, dklen))
        return scrypt(password, n=n, r=r, p=p, dklen=dklen, **more)

    with Broker.open(tmp_path / "data") as broker:
        for user, text in hashes.items():
            broker.accounts.add_user(user, text)
        checks = password_checks.PasswordChecks(
            broker.engine.state.users, Audit(), {"given": PASSWORD, "file": hashes["cheap"]}, True
        )
        monkeypatch.setattr(hashlib, "scrypt", counted)
        done: dict[tuple[str, bool], list[tuple[int, int, int, int]]] = {}
        for at, user in enumerate((*hashes, "given", "file", "nobody")):
            for password in ("wrong", PASSWORD):
                work.clear()
                right = password == PASSWORD and user not in ("none", "nobody")
                answer = checks.ask(user, password, f"192.0.{at}.{right:d}")
                assert (answer.exception(600) is None) == right
                if user != "given" or not right:  # a plain password is right without one
                    done[user, right] = list(work)
        checks.close()
    assert {tuple(each) for each in done.values()} == {
        ((16, 8, 1, 64), (1 << 14, 8, 1, 64), (1 << 15, 8, 1, 64))
    }
