"""Whose a named transaction is, at every listener: who named it decides it; an operator decides for others. Names are
known to everybody here.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pamqp import commands as c

from broker_core.client.broker import BrokerClient
from broker_core.core import errors
from broker_core.core import password as passwords
from broker_core.core.credentials import Credentials
from broker_core.launcher import Broker
from tests.amqp_peer import Peer
from txmq.cli import main

PASSWORD = "secret of all"
ANN, MALLORY, OLGA, LOOKER = "ann", "mallory", "olga", "looker"
NAMED = "amq.transaction"
Of = Callable[[str], BrokerClient]


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with Broker.open(tmp_path / "data", amqp=["127.0.0.1:0"]) as made:
        with made.channel() as channel:
            channel.queue_declare("q")
        for user, tags in ((ANN, []), (MALLORY, []), (OLGA, ["operator"]), (LOOKER, ["monitoring"])):
            add(made, user, tags)
        yield made


def add(broker: Broker, user: str, tags: list[str]) -> None:
    broker.accounts.add_user(user, passwords.hashed(PASSWORD, passwords.Cost(4)), tags)
    broker.accounts.set_permissions(user, ".*", ".*", ".*")


@pytest.fixture
def of(broker: Broker) -> Iterator[Of]:
    with contextlib.ExitStack() as stack:
        made: dict[str, BrokerClient] = {}

        def client(user: str) -> BrokerClient:
            if user not in made:
                login = Credentials(user=user, password=PASSWORD)
                made[user] = stack.enter_context(BrokerClient(broker.url, credentials=login))
            return made[user]

        yield client


@contextlib.contextmanager
def amqp(broker: Broker, user: str) -> Iterator[Peer]:
    with Peer(broker.amqp_urls[0]) as made:
        made.user, made.password = user, PASSWORD
        yield made.opened(1)


def prepare(client: BrokerClient, xid: str, body: bytes = b"1") -> None:
    with client.channel() as channel:
        channel.tx_select()
        channel.publish(body, routing_key="q")
        channel.prepare(xid)


def said(peer: Peer, verb: str, xid: str) -> tuple[int, str]:
    """The answer to a decision over AMQP: code and text of the refusal, or 200."""
    peer.call(1, c.Confirm.Select(), c.Confirm.SelectOk)
    peer.publish(1, NAMED, verb, xid.encode())
    _, frame = peer.receive()
    if isinstance(frame, c.Channel.Close):
        return frame.reply_code, frame.reply_text
    assert isinstance(frame, c.Basic.Ack), frame
    return 200, ""


def messages(broker: Broker) -> int:
    (queue,) = (queue for queue in broker.queues() if queue.name == "q")
    return queue.messages


@pytest.mark.parametrize("verb", ["commit", "rollback"])
def test_who_knows_a_name_does_not_decide_the_transaction_of_another(
    broker: Broker, of: Of, verb: str
) -> None:
    """Neither with all permissions, nor with the tag monitoring."""
    prepare(of(ANN), "order-7")
    for user in (MALLORY, LOOKER):
        with pytest.raises(errors.UnknownTransaction):
            getattr(of(user), verb)("order-7")
        with pytest.raises(errors.AccessRefused):
            getattr(of(user), verb)("order-7", of=ANN)
        with amqp(broker, user) as peer:
            code, text = said(peer, verb, "order-7")
        assert code == 406 and "no transaction has the xid 'order-7'" in text
    assert broker.outcome("order-7", of=ANN) == "prepared" and messages(broker) == 0
    with amqp(broker, ANN) as peer:
        assert said(peer, verb, "order-7") == (200, "")
    getattr(of(ANN), verb)("order-7")  # by another listener, and twice is fine
    assert messages(broker) == (1 if verb == "commit" else 0)


def test_a_name_that_others_have_used_says_and_stops_nothing(broker: Broker, of: Of) -> None:
    """A guessable token is not squatted: neither "committed" nor "in use" comes from somebody else."""
    prepare(of(MALLORY), "invoice-11", b"hers")
    of(MALLORY).commit("invoice-11")
    with amqp(broker, MALLORY) as peer:
        peer.call(1, c.Tx.Select(), c.Tx.SelectOk)
        peer.publish(1, NAMED, "token", b"invoice-12")
        peer.call(1, c.Tx.Commit(), c.Tx.CommitOk)
    for token in ("invoice-11", "invoice-12"):
        assert not of(ANN).committed(token) and not broker.committed(token)
        with amqp(broker, ANN) as peer:
            assert peer.get(1, f"{NAMED}.{token}") is None
        with of(ANN).channel() as channel:
            channel.tx_select()
            channel.publish(b"ann's", routing_key="q")
            channel.tx_commit(token)
        assert of(ANN).committed(token) and of(MALLORY).committed(token)
        with pytest.raises(errors.AccessRefused):
            of(MALLORY).outcome(token, of=ANN)
        assert of(LOOKER).outcome(token, of=ANN) == "committed"


def test_an_operator_decides_for_others_and_names_the_user_where_two_have_used_the_name(
    broker: Broker, of: Of, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for user in (ANN, MALLORY):
        prepare(of(user), "order-7", user.encode())
    assert [(info.xid, info.user) for info in of(OLGA).prepared()] == [("order-7", ANN), ("order-7", MALLORY)]
    with pytest.raises(errors.TransactionState, match="of the users 'ann', 'mallory' have the xid 'order-7'"):
        of(OLGA).commit("order-7")
    with amqp(broker, OLGA) as peer:
        assert said(peer, "commit", "order-7")[0] == 406
    for _ in range(2):
        of(OLGA).commit("order-7", of=ANN)
    data = ("--data", str(tmp_path / "data"))
    assert main(["tx", "rollback", "order-7", "--of", MALLORY, "--yes", *data]) == 0
    assert capsys.readouterr().out.startswith("rolled back order-7")
    prepare(of(ANN), "order-8")
    with amqp(broker, OLGA) as peer:  # it is the only one
        assert said(peer, "rollback", "order-8") == (200, "")
    of(OLGA).rollback("order-8")
    assert broker.outcome("order-7", of=MALLORY) == "heuristically_rolled_back"
    with broker.channel() as channel:
        delivery = channel.get("q", no_ack=True)
        assert delivery is not None and delivery.body == ANN.encode() and channel.get("q") is None
    lines = map(json.loads, (tmp_path / "data/audit.log").read_text().splitlines())
    decided = {("commit", "order-7"): ANN, ("rollback", "order-7"): MALLORY, ("rollback", "order-8"): ANN}
    found = {
        (line["event"].rpartition(".")[2], line["xid"]): line["of"]
        for line in lines
        if line["event"].startswith(("admin.", "transaction.")) and "xid" in line
    }
    assert found == decided


def test_who_has_not_named_a_transaction_neither_hears_of_its_decision_by_hand_nor_forgets_it(
    broker: Broker, of: Of
) -> None:
    """Its owner hears of what an operator has decided, at each listener, and not of what it has decided itself."""
    for user in (ANN, MALLORY):
        prepare(of(user), "order-7")
    prepare(of(ANN), "order-8")
    of(MALLORY).rollback("order-7")
    of(OLGA).rollback("order-7", of=ANN)
    with amqp(broker, OLGA) as peer:
        assert said(peer, "commit", "order-8") == (200, "")
    for user, code in ((ANN, 406), (MALLORY, 200)):
        with amqp(broker, user) as peer:
            found = said(peer, "rollback", "order-7")
        assert found[0] == code and ("XA_HEURRB" in found[1]) == (code == 406)
    assert of(MALLORY).recover() == [] and len(of(ANN).recover()) == 2
    for user in (MALLORY, LOOKER):
        with pytest.raises(errors.AccessRefused):
            of(user).forget("order-7", of=ANN)
        with pytest.raises(errors.UnknownTransaction):
            of(user).forget("order-8")
        with amqp(broker, user) as peer:
            assert said(peer, "forget", "order-8")[0] == 406
    of(MALLORY).forget("order-7")  # its own
    assert len(of(ANN).recover()) == 2
    with amqp(broker, ANN) as peer:
        assert said(peer, "forget", "order-7") == (200, "")
    of(OLGA).forget("order-8")  # as it decides: the only one of this name
    assert of(ANN).recover() == []
    prepare(of(ANN), "order-9")
    with pytest.raises(errors.TransactionState, match="'order-9' is prepared: commit it or roll it back"):
        of(ANN).forget("order-9")
    of(OLGA).rollback("order-9", of=ANN)
    broker.accounts.delete_user(ANN)
    add(broker, ANN, [])
    with BrokerClient(broker.url, credentials=Credentials(user=ANN, password=PASSWORD)) as another:
        assert another.recover() == []  # of a later user of the name


def test_a_later_user_of_the_name_does_not_decide_for_one_that_was_deleted(
    tmp_path: Path, broker: Broker, of: Of
) -> None:
    prepare(of(ANN), "order-7")
    broker.accounts.delete_user(ANN)
    add(broker, ANN, [])
    with BrokerClient(broker.url, credentials=Credentials(user=ANN, password=PASSWORD)) as another:
        for decide in (another.commit, another.rollback):
            with pytest.raises(errors.UnknownTransaction):
                decide("order-7")
        prepare(another, "order-7", b"2")
    broker.close()
    with Broker.open(tmp_path / "data") as again:
        found = again.prepared()
        assert [info.xid for info in found] == ["order-7"] * 2
        deleted = found[0].user
        assert re.fullmatch(r"ann:\d+", deleted) and found[1].user == ANN
        with BrokerClient(again.url, credentials=Credentials(user=ANN, password=PASSWORD)) as another:
            another.commit("order-7")
        assert messages(again) == 1
        for _ in range(2):
            again.commit("order-7", of=ANN)  # hers has ended: what the deleted one has prepared is meant
            assert again.prepared() == [] and messages(again) == 2
            again.commit("order-7", of=deleted)  # a repetition


@pytest.mark.parametrize("verb", ["commit", "rollback"])
def test_the_error_for_users_of_one_name_says_what_selects_each(
    broker: Broker, of: Of, tmp_path: Path, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = ("--data", str(tmp_path / "data"))
    for body in (b"1", b"2", b"3"):
        with BrokerClient(broker.url, credentials=Credentials(user=ANN, password=PASSWORD)) as ann:
            prepare(ann, "order-7", body)
        if body != b"3":
            broker.accounts.delete_user(ANN)
            add(broker, ANN, [])
    decide = getattr(of(OLGA), verb)
    decide("order-7", of=ANN)  # the only one of this name that is not deleted
    first, second = of(OLGA).prepared()
    assert first.first == (b"1",) and second.first == (b"2",)
    decided = 1 if verb == "commit" else 0
    assert messages(broker) == decided
    assert main(["tx", verb, "order-7", "--of", ANN, "--yes", *data]) != 0
    error = capsys.readouterr().err
    assert "have the xid 'order-7': name the user: --of" in error
    assert re.findall("'(ann:.*?)'", error) == [first.user, second.user]
    assert main(["tx", verb, "order-7", "--of", second.user, "--yes", *data]) == 0
    assert [info.first for info in of(OLGA).prepared()] == [(b"1",)]
    assert broker.outcome("order-7", of=second.user) == ("committed" if decided else "rolled_back")
    for _ in range(2):
        decide("order-7", of=first.user)
        assert of(OLGA).prepared() == [] and messages(broker) == 3 * decided
    with amqp(broker, ANN) as peer:  # she hears of hers alone
        assert said(peer, verb, "order-7")[0] == 406


def test_all_of_the_owner_that_the_list_shows_is_one_transaction_where_the_user_is_deleted(
    broker: Broker,
) -> None:
    for _ in range(2):
        with BrokerClient(broker.url, credentials=Credentials(user=ANN, password=PASSWORD)) as ann:
            prepare(ann, "order-7")
            prepare(ann, "order-8")
        broker.accounts.delete_user(ANN)
        add(broker, ANN, [])
    first, *others = broker.prepared()
    assert broker.engine.local.rollback_all(of=first.user) == 1
    assert [info.user for info in broker.prepared()] == [info.user for info in others]
    assert broker.engine.local.rollback_all(of=ANN) == 3


@pytest.mark.parametrize("restart", [False, True])
def test_a_later_user_of_the_name_neither_sees_nor_misses_the_tokens_of_one_that_was_deleted(
    tmp_path: Path, broker: Broker, of: Of, restart: bool
) -> None:
    def pay(client: BrokerClient, token: str) -> None:
        with client.channel() as channel:
            channel.tx_select()
            channel.publish(b"paid", routing_key="q")
            channel.tx_commit(token)

    for user in (ANN, MALLORY):
        pay(of(user), "payment-7")
    prepare(of(ANN), "payment-8")
    of(OLGA).commit("payment-8", of=ANN)  # by hand
    broker.accounts.delete_user(ANN)
    add(broker, ANN, [])
    with contextlib.ExitStack() as stack:
        if restart:
            broker.close()
            broker = stack.enter_context(Broker.open(tmp_path / "data", amqp=["127.0.0.1:0"]))
        login = Credentials(user=ANN, password=PASSWORD)
        ann = stack.enter_context(BrokerClient(broker.url, credentials=login))
        for token in ("payment-7", "payment-8"):
            with amqp(broker, ANN) as peer:
                assert peer.get(1, f"{NAMED}.{token}") is None
            assert not ann.committed(token)
            pay(ann, token)
            assert ann.committed(token)
        assert messages(broker) == 5 and broker.outcome("payment-7", of=MALLORY) == "committed"


def test_who_recovers_finds_its_own_transactions_and_an_operator_those_that_it_asks_for(
    broker: Broker, of: Of
) -> None:
    for user in (ANN, MALLORY):
        prepare(of(user), f"of {user}")
    for user, expected in ((ANN, ["of ann"]), (MALLORY, ["of mallory"]), (OLGA, []), (LOOKER, [])):
        assert [row.xid for row in of(user).recover()] == expected
        with amqp(broker, user) as peer:
            found = peer.get(1, f"{NAMED}@recover")
        assert (found is not None) == bool(expected)
        if found is not None:
            assert [row["xid"] for row in json.loads(found[-1])] == expected
    assert [row.xid for row in of(OLGA).recover(of=ANN)] == ["of ann"]
    with pytest.raises(errors.AccessRefused):
        of(MALLORY).recover(of=ANN)
    broker.accounts.set_permissions(ANN, ".*", ".*", "^q$")
    with amqp(broker, ANN) as peer:
        peer.send(1, c.Basic.Get(queue=f"{NAMED}@recover", no_ack=True))
        _, frame = peer.receive()
        assert isinstance(frame, c.Channel.Close) and frame.reply_code == 403


@pytest.mark.parametrize("listener", ["amqp", "flight"])
@pytest.mark.parametrize("spilled", [False, True])
def test_a_right_that_is_taken_while_a_transaction_is_open_stops_its_commit_and_its_prepare(
    broker: Broker, of: Of, listener: str, spilled: bool
) -> None:
    if spilled:
        broker.engine.local.channel_commits.spill_rows = 1
    for end in ("commit", "prepare"):
        broker.accounts.set_permissions(ANN, "^$", ".*", ".*")
        if listener == "flight":
            with of(ANN).channel() as channel:
                channel.tx_select()
                for body in (b"1", b"2"):
                    channel.publish(body, routing_key="q")
                broker.accounts.set_permissions(ANN, "^$", "^amq.transaction$", ".*")
                with pytest.raises(errors.AccessRefused, match=r"exchange 'amq.default' .* user 'ann'"):
                    channel.tx_commit("t") if end == "commit" else channel.prepare("t")
        else:
            with amqp(broker, ANN) as peer:
                peer.call(1, c.Tx.Select(), c.Tx.SelectOk)
                for body in (b"1", b"2"):
                    peer.publish(1, "", "q", body)
                peer.publish(1, NAMED, "token" if end == "commit" else "prepare", b"t")
                assert peer.count(1, "q") == 0  # all of it has arrived
                broker.accounts.set_permissions(ANN, "^$", "^amq.transaction$", ".*")
                closed = peer.call(1, c.Tx.Commit(), c.Channel.Close)
            assert closed.reply_code == 403 and "exchange 'amq.default'" in closed.reply_text
        assert messages(broker) == 0 and broker.prepared() == []


@pytest.mark.parametrize("listener", ["amqp", "flight"])
@pytest.mark.parametrize("restart", [False, True])
def test_a_right_that_is_taken_after_the_prepare_leaves_the_commit_to_an_operator(
    tmp_path: Path, broker: Broker, of: Of, listener: str, restart: bool
) -> None:
    prepare(of(ANN), "order-7")
    broker.accounts.set_permissions(ANN, "^$", "^amq.transaction$", ".*")
    with contextlib.ExitStack() as stack:
        if restart:
            broker.close()
            broker = stack.enter_context(Broker.open(tmp_path / "data", amqp=["127.0.0.1:0"]))
        if listener == "amqp":
            with amqp(broker, ANN) as peer:
                assert said(peer, "commit", "order-7")[0] == 403
        else:
            login = Credentials(user=ANN, password=PASSWORD)
            ann = stack.enter_context(BrokerClient(broker.url, credentials=login))
            with pytest.raises(errors.AccessRefused, match=r"exchange 'amq.default' .* user 'ann'"):
                ann.commit("order-7")
        assert messages(broker) == 0
        login = Credentials(user=OLGA, password=PASSWORD)
        olga = stack.enter_context(BrokerClient(broker.url, credentials=login))
        olga.commit("order-7")
        assert messages(broker) == 1
