"""What one user may have of what all users share: its share, at every listener, and after a restart; and how what a
user has prepared is emptied.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from pamqp import commands as c

from broker_core.broker import commit
from broker_core.broker.access.shares import SHARE
from broker_core.broker.transaction.outcomes import OutcomeLimits
from broker_core.client.broker import BrokerClient
from broker_core.core import errors, failpoint
from broker_core.core import password as passwords
from broker_core.core.credentials import Credentials
from broker_core.flight.authorization import Basic
from broker_core.launcher import Broker
from broker_core.server.listener_options import ListenerOptions
from broker_core.server.quotas import QuotaLimits, UserLimit
from tests.amqp_peer import Peer
from tests.server.flight.flight_calls import Raw
from tests.server.http.http_client import Api
from txmq.cli import main

PASSWORD = "secret of all"
MAN, ANN, BOSS, OLGA, LOOKER = "man", "ann", "boss", "olga", "looker"
TAGS = {MAN: [], ANN: [], BOSS: ["administrator"], OLGA: ["operator"], LOOKER: ["monitoring"]}
TOTAL = 40  # prepared transactions, here
PART = int(TOTAL * SHARE)
Open = Callable[..., Broker]


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Opens the directory, again if it is open."""
    monkeypatch.setattr(commit, "MOST_PREPARED", TOTAL)
    brokers: list[Broker] = []

    def open_(*users: str, **more: Any) -> Broker:
        for each in brokers:
            each.close()
        brokers[:] = [Broker.open(tmp_path / "data", amqp=["127.0.0.1:0"], **more)]
        broker = brokers[0]
        for user in users:
            broker.accounts.add_user(user, passwords.hashed(PASSWORD, passwords.Cost(4)), TAGS[user])
            broker.accounts.set_permissions(user, ".*", ".*", ".*")
        with broker.channel() as channel:
            channel.queue_declare("q")
        return broker

    yield open_
    for each in brokers:
        each.close()


def client(broker: Broker, user: str, vhost: str = "") -> BrokerClient:
    login = Credentials(user=user, password=PASSWORD) if user else None
    return BrokerClient(f"{broker.url}/{vhost}" if vhost else broker.url, credentials=login)


def by_flight(broker: Broker, user: str, xid: str) -> str:
    """Prepares; returns the refusal, or nothing."""
    with client(broker, user) as made, made.channel() as channel:
        channel.tx_select()
        channel.publish(b"x", routing_key="q")
        try:
            channel.prepare(xid)
        except errors.PreconditionFailed as refused:
            return refused.message
    return ""


def by_amqp(broker: Broker, user: str, xid: str) -> str:
    with Peer(broker.amqp_urls[0]) as peer:
        peer.user, peer.password = (user, PASSWORD) if user else ("guest", "guest")
        peer.opened(1)
        peer.call(1, c.Tx.Select(), c.Tx.SelectOk)
        peer.publish(1, "", "q", b"x")
        peer.publish(1, "amq.transaction", "prepare", xid.encode())
        peer.send(1, c.Tx.Commit())
        _, answer = peer.receive()
        return answer.reply_text if isinstance(answer, c.Channel.Close) else ""


LISTENERS = {"flight": by_flight, "amqp": by_amqp}


def prepared_by(broker: Broker, listener: str, user: str, name: str, most: int = TOTAL) -> tuple[int, str]:
    for number in range(most + 1):
        refused = LISTENERS[listener](broker, user, f"{name}-{number}")
        if refused:
            return number, refused
    return most + 1, ""


@pytest.mark.parametrize("listener", LISTENERS)
def test_a_user_prepares_up_to_its_share_and_others_go_on_also_after_a_restart(
    opened: Open, listener: str
) -> None:
    broker = opened(MAN, ANN, BOSS)
    count, refused = prepared_by(broker, listener, MAN, "a")
    assert count == PART
    assert (
        f"user 'man' has {PART} prepared transactions in vhost '/', which is its share of {TOTAL}" in refused
    )
    assert "`txmq tx rollback --of man --all`" in refused and refused.endswith("or raise --user-share")
    for restart in (False, True):
        again = opened() if restart else broker
        assert prepared_by(again, listener, MAN, "b") == (0, refused)
        assert LISTENERS[listener](again, ANN, f"of ann {restart}") == ""
    # what is decided makes room, and no more
    again.rollback("a-0", of=MAN)
    assert prepared_by(again, listener, MAN, "c")[0] == 1
    # an administrator is not hindered, but by the bound of all
    count, refused = prepared_by(again, listener, BOSS, "d")
    assert count == TOTAL - PART - 2
    assert f"{TOTAL} prepared transactions are there, which is the limit" in refused


@pytest.mark.parametrize(
    ("users", "user"),
    [((), ""), ((MAN,), MAN), ((MAN, BOSS), BOSS)],
    ids=["nobody", "alone", "administrator"],
)
def test_who_has_nobody_to_share_with_is_not_hindered(
    opened: Open, users: tuple[str, ...], user: str
) -> None:
    assert prepared_by(opened(*users), "flight", user, "a")[0] == TOTAL


def test_the_share_is_of_all_virtual_hosts_and_the_refusal_names_them(opened: Open) -> None:
    broker = opened(MAN, ANN, OLGA)
    broker.vhosts.add_vhost("sales")
    broker.accounts.set_permissions(MAN, ".*", ".*", ".*", vhost="sales")
    with client(broker, MAN, "sales") as there, there.channel() as channel:
        channel.queue_declare("q")
        channel.tx_select()
        channel.publish(b"x", routing_key="q")
        channel.prepare("there")
    count, refused = prepared_by(broker, "flight", MAN, "a")
    assert count == PART - 1 and "in vhost '/', 'sales'" in refused
    with client(broker, OLGA) as olga:
        assert olga.rollback_all(of=MAN) == PART - 1
    with client(broker, OLGA, "sales") as olga:
        assert olga.rollback_all(of=MAN) == 1


@pytest.mark.parametrize("vhost", ["/", "sales of may"])
def test_the_command_that_a_full_share_names_makes_room(
    opened: Open, vhost: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broker = opened(MAN, ANN)
    if vhost != "/":
        broker.vhosts.add_vhost(vhost)
        broker.accounts.set_permissions(MAN, ".*", ".*", ".*", vhost=vhost)
    with client(broker, MAN, "" if vhost == "/" else quote(vhost)) as there, there.channel() as channel:
        channel.queue_declare("q")
        for number in range(PART):
            channel.tx_select()
            channel.publish(b"x", routing_key="q")
            channel.prepare(f"there-{number}")
    count, refused = prepared_by(broker, "flight", MAN, "a")
    assert count == 0
    (line,) = re.findall(r"`txmq ([^`]+)`", refused)
    assert main([*shlex.split(line), "--yes", "--data", str(tmp_path / "data")]) == 0, capsys.readouterr()
    assert prepared_by(broker, "flight", MAN, "b")[0] == PART


def test_an_option_says_how_large_a_share_is(opened: Open) -> None:
    for share, most in ((0.5, TOTAL // 2), (1.0, TOTAL)):
        broker = opened(*() if share == 1 else (MAN, ANN), quotas=QuotaLimits(share=share))
        assert prepared_by(broker, "flight", MAN, f"{share}")[0] == (most if share == 0.5 else TOTAL // 2)
    for wrong in (0.0, 1.5, -1.0, float("nan")):
        with pytest.raises(errors.OptionError, match="the share of a user"):
            QuotaLimits(share=wrong)


# -- all that a user has prepared ----------------------------------------------------------------------------


def fill(broker: Broker, *users: str, name: str = "x") -> None:
    for user in users:
        for number in range(PART):
            assert by_flight(broker, user, f"{name}{number}") == ""


def whose(broker: Broker) -> dict[str, int]:
    users = [each.user for each in broker.prepared()]
    return {user: users.count(user) for user in users}


def test_the_advice_of_the_refusal_makes_room(
    opened: Open, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the text has it, by the user itself, and by the owner of the directory."""
    broker = opened(MAN, ANN)
    fill(broker, ANN)
    monkeypatch.setenv("TXMQ_PASSWORD", PASSWORD)
    for where in (["--url", broker.url, "--user", MAN], ["--data", str(tmp_path / "data")]):
        refused = prepared_by(broker, "flight", MAN, where[0])[1]
        words = shlex.split(refused.partition("`txmq ")[2].partition("`")[0])
        assert words == ["tx", "rollback", "--of", MAN, "--all"]
        assert main([*words, *where]) == 1 and "--yes" in capsys.readouterr().err
        assert main([*words, "--yes", *where]) == 0
        assert capsys.readouterr().out == f"rolled back {PART} transactions of user 'man'\n"
        assert whose(broker) == {ANN: PART}
        assert main([*words, "--yes", *where]) == 0 and " 0 " in capsys.readouterr().out
    assert by_flight(broker, MAN, "last") == ""
    for wrong in ([], ["x", "--all"]):
        assert main(["tx", "rollback", *wrong, *where]) == 2
        assert "takes an XID or --all" in capsys.readouterr().err


def over_flight(broker: Broker, user: str, of: str | None) -> int:
    with client(broker, user) as made:
        return made.rollback_all(of=of)


def over_http(broker: Broker, user: str, of: str | None) -> int:
    api = Api(broker.http_urls[0], user, PASSWORD)
    answer = api.ask("POST", "/api/txmq/prepared/%2F/rollback", {} if of is None else {"of": of})
    if answer.status != 200:
        raise errors.AccessRefused(str(answer.body))
    ended: int = answer.body["transactions"]
    return ended


@pytest.mark.parametrize("ends", [over_flight, over_http])
def test_who_may_roll_back_all_of_a_user(
    opened: Open, tmp_path: Path, ends: Callable[[Broker, str, str | None], int]
) -> None:
    TAGS_HERE = {MAN: ["management"], ANN: ["management"]}  # HTTP needs one
    broker = opened(MAN, ANN, BOSS, OLGA, LOOKER, listeners=ListenerOptions(http=["127.0.0.1:0"]))
    for user, tags in TAGS_HERE.items():
        broker.accounts.set_tags(user, tags)
    fill(broker, MAN, ANN, BOSS)
    full = {MAN: PART, ANN: PART, BOSS: PART}
    for user in (MAN, LOOKER):
        with pytest.raises(errors.AccessRefused):
            ends(broker, user, ANN)
    assert ends(broker, LOOKER, None) == 0 and whose(broker) == full
    assert ends(broker, MAN, None) == PART and whose(broker) == {ANN: PART, BOSS: PART}
    assert ends(broker, ANN, ANN) == PART
    assert ends(broker, OLGA, BOSS) == PART and whose(broker) == {}
    fill(broker, MAN, name="y")
    broker.accounts.delete_user(MAN)
    assert ends(broker, OLGA, MAN) == PART and whose(broker) == {}  # of a deleted user, for operators
    lines = map(json.loads, (tmp_path / "data/audit.log").read_text().splitlines())
    decided = [
        (line["user"], line.get("of") or line["user"], line["vhost"])
        for line in lines
        if line["event"].endswith(".rollback_all")
    ]
    people = [(LOOKER, LOOKER), (MAN, MAN), (ANN, ANN), (OLGA, BOSS), (OLGA, MAN)]
    assert decided == [(*each, "/") for each in people]


def test_a_rollback_of_all_that_is_interrupted_goes_on(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broker_core.node.local.DECIDED", 2)
    broker = opened(MAN, ANN)
    fill(broker, MAN, ANN)
    failpoint.arm("rollback.piece", "raise")
    try:
        with pytest.raises(OSError, match=r"rollback\.piece"):
            broker.local.rollback_all(of=MAN)
    finally:
        failpoint.disarm()
    for restart in (False, True):
        again = opened() if restart else broker
        assert whose(again) == {MAN: PART - 2, ANN: PART}
    assert again.local.rollback_all(of=MAN) == PART - 2 and whose(again) == {ANN: PART}
    assert (
        again.outcome("x0", of=MAN) == "heuristically_rolled_back"
        and again.outcome("x0", of=ANN) == "prepared"
    )


def test_what_a_deleted_user_has_prepared_takes_no_share_of_a_later_one_of_its_name(opened: Open) -> None:
    broker = opened(MAN, ANN)
    fill(broker, MAN)
    broker.accounts.delete_user(MAN)
    again = opened(MAN)
    assert prepared_by(again, "flight", MAN, "new")[0] == PART
    with client(again, MAN) as man:
        assert man.rollback_all() == PART
    assert [each.user.partition(":")[0] for each in again.prepared()] == [MAN] * PART


# -- outcomes ------------------------------------------------------------------------------------------------


@pytest.mark.soak
def test_who_commits_much_makes_outcomes_of_nobody_else_unknown(opened: Open) -> None:
    kept = OutcomeLimits(100)
    broker = opened(MAN, ANN, outcomes=kept)

    def commits(user: str, *tokens: str) -> None:
        with client(broker, user) as made:
            for token in tokens:
                with made.channel() as channel:
                    channel.tx_select()
                    channel.publish(b"x", routing_key="q")
                    channel.tx_commit(token)

    commits(ANN, "hers")
    commits(MAN, *(f"t{number}" for number in range(3 * kept.count)))
    for restart in (False, True):
        again = broker = opened(outcomes=kept) if restart else broker
        outcomes = again.local.state.names.outcomes
        for table in (outcomes, outcomes.channels):
            assert len(table) <= 2 * SHARE * kept.count + 1  # and as many on their way out
        with client(again, ANN) as ann, client(again, MAN) as man:
            assert ann.committed("hers") and not ann.committed("never")
            assert man.committed(f"t{3 * kept.count - 1}")
            for unknown in ("t0", "never"):
                with pytest.raises(errors.UnknownOutcome, match="a user's share of them"):
                    man.committed(unknown)
    commits(ANN, *(f"a{number}" for number in range(3 * kept.count)))
    with client(broker, ANN) as ann, pytest.raises(errors.UnknownOutcome):
        ann.committed("hers")
    # the horizons of users leave with that of all
    broker.accounts.set_tags(ANN, ["administrator"])
    commits(ANN, *(f"b{number}" for number in range(3 * kept.count)))
    names = [kind for kind in broker.local.state.names.outcomes.horizons if kind.startswith("outcome")]
    assert names == ["outcome"]
    with client(broker, MAN) as man, pytest.raises(errors.UnknownOutcome):
        man.committed("never")


# -- connections and channels --------------------------------------------------------------------------------


@contextlib.contextmanager
def connected(broker: Broker, user: str, vhost: str = "/") -> Iterator[Peer]:
    with Peer(broker.amqp_urls[0]) as peer:
        peer.user, peer.password = user, PASSWORD
        yield peer.opened(vhost=vhost)


def until_refused(
    stack: contextlib.ExitStack, broker: Broker, user: str, vhost: str = "/"
) -> tuple[int, str]:
    count = 0
    while True:
        try:
            stack.enter_context(connected(broker, user, vhost))
        except AssertionError as closed:  # another answer than open-ok
            return count, str(closed)
        count += 1


@pytest.mark.parametrize("own", [None, 7])
def test_a_user_has_its_share_of_connections_or_what_its_option_says(opened: Open, own: int | None) -> None:
    broker = opened(MAN, ANN, BOSS, quotas=QuotaLimits(connections=UserLimit(40, own)))
    with contextlib.ExitStack() as stack:
        count, said = until_refused(stack, broker, MAN)
        assert count == (own or 4) and "user connection limit" in said and "--user-connections" in said
        stack.enter_context(connected(broker, ANN))
        assert until_refused(stack, broker, BOSS)[0] == (own or 40 - count - 1)


def test_a_user_has_its_share_of_the_connections_of_a_virtual_host(opened: Open) -> None:
    broker = opened(MAN, ANN, BOSS)
    broker.vhosts.limit_vhost("/", max_connections=20)
    with contextlib.ExitStack() as stack:
        count, said = until_refused(stack, broker, MAN)
        assert count == 2 and "it has 2 connections, its share of the connection limit (20)" in said
        stack.enter_context(connected(broker, ANN))
        assert until_refused(stack, broker, BOSS)[0] == 17


def test_a_user_has_its_share_of_channels_at_both_listeners(opened: Open) -> None:
    broker = opened(MAN, ANN, quotas=QuotaLimits(channels=UserLimit(40)))
    with contextlib.ExitStack() as stack:
        man = stack.enter_context(client(broker, MAN))
        for _ in range(4):
            stack.enter_context(man.channel())
        with pytest.raises(errors.NotAllowed, match=r"allowed user limit of \(4\).*--user-channels"):
            man.channel().tx_select()
        stack.enter_context(connected(broker, ANN)).open(1)


def test_without_an_option_channels_are_limited_too(opened: Open) -> None:
    quota = opened(MAN, ANN).quotas.channels
    for number in range(10_000):
        quota.enter(number, MAN)
    with pytest.raises(errors.NotAllowed, match=r"allowed user limit of \(10000\).*--user-channels"):
        quota.enter("one more", MAN)
    quota.enter("of another", ANN)


def test_a_user_has_its_share_of_connections_of_flight(opened: Open) -> None:
    broker = opened(MAN, ANN, BOSS, quotas=QuotaLimits(flight_connections=30))
    with contextlib.ExitStack() as stack:

        def one_more(user: str) -> None:
            """Without the patience of a client."""
            raw = Raw(broker.url, Basic(user, PASSWORD).header)
            stack.callback(raw.client.close)
            answer = raw.action("engine.identity", b"")
            if isinstance(answer, errors.TxmqError):
                raise answer

        for _ in range(3):
            one_more(MAN)
        with pytest.raises(errors.Busy, match="3 connections of user 'man' are open"):
            one_more(MAN)
        for _ in range(4):
            one_more(BOSS)
        one_more(ANN)


def test_the_prepared_transactions_of_a_user_take_its_share_of_memory(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else those of one user raise the alarm that stops all publishers."""
    monkeypatch.setattr(commit, "MOST_PREPARED_BYTES", 10_000)
    broker = opened(MAN, ANN, BOSS)
    count, refused = prepared_by(broker, "flight", MAN, "a")
    assert count == 2  # 401 bytes each, of 1,000
    assert "1000 bytes in prepared transactions" in refused and "--of man --all" in refused
    again = opened()
    assert prepared_by(again, "amqp", MAN, "b")[0] == 0
    assert by_flight(again, ANN, "hers") == "" and prepared_by(again, "flight", BOSS, "c")[0] > 10
