"""A user who fills all that it may, in any order, leaves each other user a working broker: at every listener, in its
own virtual host, and after a restart.

Bounds are lowered, so that they are reached. Each is filled until the broker refuses one more.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from pamqp import base
from pamqp import commands as c

from broker_core.broker import channel, commit
from broker_core.broker.batch import owners
from broker_core.broker.batch.branch import StagedLimits
from broker_core.broker.transaction.outcomes import OutcomeLimits
from broker_core.client.broker import BrokerClient
from broker_core.core import errors
from broker_core.core import password as passwords
from broker_core.core.credentials import Credentials
from broker_core.engine import BranchHeader, StagedBranch
from broker_core.flight.authorization import Basic
from broker_core.launcher import Broker
from broker_core.routing import memory
from broker_core.server.listener_options import ListenerOptions
from broker_core.server.quotas import QuotaLimits, UserLimit
from tests.amqp_peer import Peer
from tests.server.flight.flight_calls import Raw, messages
from tests.server.http.http_client import Api
from txmq.cli import main

PASSWORD = "secret of all"
MAN, ANN = "man", "ann"
HIS = "his"  # a virtual host
BOUND = 40
QUOTAS = QuotaLimits(
    connections=UserLimit(BOUND),
    channels=UserLimit(BOUND * 5),
    flight_connections=BOUND,
    staged=StagedLimits(user_bytes=50_000, user_attempts=BOUND),
)


def served(folder: Path) -> Broker:
    return Broker.open(
        folder / "data",
        amqp=["127.0.0.1:0"],
        listeners=ListenerOptions(http=["127.0.0.1:0"]),
        quotas=QUOTAS,
        outcomes=OutcomeLimits(BOUND),
    )


def until_refused(most: int, once: Callable[[int], object], refusal: type[Exception], text: str) -> None:
    for number in range(most):
        try:
            once(number)
        except refusal as refused:
            if re.search(text, str(refused)):
                return
            raise
    raise RuntimeError(f"{most} were not refused")


class Filler:
    """``stack`` holds what is held while it is connected. Each method ends with a refusal, or with what cannot
    be refused and is above its bound.
    """

    def __init__(self, broker: Broker, stack: contextlib.ExitStack) -> None:
        self.broker, self.stack = broker, stack
        # one connection of each listener, before its share is full
        login = Credentials(user=MAN, password=PASSWORD)
        self.client = stack.enter_context(BrokerClient(broker.url, credentials=login))
        self.peer = self._peer()
        self.peer.opened(1, 2)
        self.his = self._peer()
        self.his.opened(1, vhost=HIS)

    def _peer(self) -> Peer:
        peer = self.stack.enter_context(Peer(self.broker.amqp_urls[0]))
        peer.user, peer.password = MAN, PASSWORD
        return peer

    def connections(self) -> None:
        until_refused(2 * BOUND, lambda _: self._peer().opened(), AssertionError, "user connection limit")

    def channels(self) -> None:
        def once(_: int) -> None:
            self.stack.enter_context(self.client.channel()).tx_select()

        until_refused(10 * BOUND, once, errors.NotAllowed, "channels opened for user")

    def flight_connections(self) -> None:
        def once(_: int) -> None:
            raw = Raw(self.broker.url, Basic(MAN, PASSWORD).header)
            self.stack.callback(raw.client.close)
            answer = raw.action("engine.identity", b"")
            if isinstance(answer, errors.TxmqError):
                raise answer

        until_refused(2 * BOUND, once, errors.Busy, "its share")

    def http_connections(self) -> None:
        def once(_: int) -> None:
            api = Api(self.broker.http_urls[0], MAN, PASSWORD)
            self.stack.callback(api.close)
            assert api.ask("GET", "/api/whoami").status == 200

        until_refused(100, once, AssertionError, "503")

    def prepared(self) -> None:
        self.peer.call(1, c.Tx.Select(), c.Tx.SelectOk)

        def once(number: int) -> None:
            self.peer.publish(1, "", "in", b"x")
            self.peer.publish(1, "amq.transaction", "prepare", f"x{number} {id(self)}".encode())
            self.peer.call(1, c.Tx.Commit(), c.Tx.CommitOk)

        until_refused(2 * BOUND, once, AssertionError, "its share")
        self.peer.send(1, c.Channel.CloseOk())
        self.peer.open(1)

    def outcomes(self) -> None:
        self.peer.call(1, c.Tx.Select(), c.Tx.SelectOk)
        for number in range(4 * BOUND):
            self.peer.publish(1, "", "in", b"x")
            self.peer.publish(1, "amq.transaction", "token", f"w{number}".encode())
            self.peer.call(1, c.Tx.Commit(), c.Tx.CommitOk)

    def _staged(self, token: str, size: int) -> StagedBranch:
        header = BranchHeader(token, f"b-{token}", "publish", {"routing_key": "in"})
        return self.client.stage(header, [messages(b"x" * size)])

    def attempts(self) -> None:
        def once(number: int) -> None:
            self.client.open_batch("app", "q", 0, "fail", token=f"t{number}")

        until_refused(2 * BOUND, once, errors.NotAllowed, "staged batches|apps, which is")

    def apps(self) -> None:
        """Each with a decided batch, so that it has no attempt."""

        def once(number: int) -> None:
            opened = self.client.open_batch(f"own {number}", "q", 0, "fail")
            self.client.commit_batch(f"own {number}", "q", 0, opened.token, [])

        until_refused(2 * BOUND, once, errors.NotAllowed, "apps, which is the limit|staged batches")

    def staged_bytes(self) -> None:
        until_refused(
            BOUND, lambda n: self._staged(f"s{n}", 5_000), errors.TxmqError, "has staged|staged batches"
        )

    def _fill_his(self, method: Callable[[str], base.Frame], answer: type[base.Frame]) -> None:
        """His own virtual host takes a quarter of the memory for names."""
        until_refused(
            1000,
            lambda number: self.his.call(1, method(f"{number} {id(self)}"), answer),
            AssertionError,
            "bytes, the limit is",
        )
        self.his.send(1, c.Channel.CloseOk())
        self.his.open(1)

    def queues(self) -> None:
        self._fill_his(lambda name: c.Queue.Declare(queue=name), c.Queue.DeclareOk)

    def exchanges(self) -> None:
        self._fill_his(lambda name: c.Exchange.Declare(exchange=name), c.Exchange.DeclareOk)

    def bindings(self) -> None:
        self._fill_his(
            lambda name: c.Exchange.Bind(destination="amq.fanout", source="amq.topic", routing_key=name),
            c.Exchange.BindOk,
        )

    def consumers(self) -> None:
        """Of one queue; a refusal closes the channel, so the consumers are on another one."""
        most = BOUND // 10

        def once(number: int) -> None:
            consume = c.Basic.Consume(queue="shared", consumer_tag=f"{number}")
            self.peer.call(2 if number < most else 1, consume, c.Basic.ConsumeOk)

        until_refused(BOUND, once, AssertionError, "consumers of one queue")
        self.peer.send(1, c.Channel.CloseOk())
        self.peer.open(1)

    def audit_log(self) -> None:
        for _ in range(100):
            with contextlib.suppress(errors.AccessRefused):
                self.client.rollback_all(of=ANN)


FILLS: dict[str, Callable[[Filler], None]] = {
    name: method for name, method in vars(Filler).items() if not name.startswith("_")
}


def works(broker: Broker, round_: str) -> None:
    """Ann does each thing once, at each listener."""
    login = Credentials(user=ANN, password=PASSWORD)
    with Peer(broker.amqp_urls[0]) as peer:
        peer.user, peer.password = ANN, PASSWORD
        peer.opened(1, 2)
        queue, exchange = f"q-{round_}", f"e-{round_}"
        peer.call(1, c.Queue.Declare(queue=queue, durable=True), c.Queue.DeclareOk)
        peer.call(1, c.Exchange.Declare(exchange=exchange, exchange_type="topic"), c.Exchange.DeclareOk)
        peer.call(1, c.Queue.Bind(queue=queue, exchange=exchange, routing_key="a.#"), c.Queue.BindOk)
        peer.call(1, c.Confirm.Select(), c.Confirm.SelectOk)
        peer.publish(1, exchange, "a.b", b"one")
        assert isinstance(peer.receive()[1], c.Basic.Ack)
        peer.call(2, c.Tx.Select(), c.Tx.SelectOk)
        for verb, name in (("prepare", f"p-{round_}"), ("token", f"t-{round_}")):
            peer.publish(2, "", queue, verb.encode())
            peer.publish(2, "amq.transaction", verb, name.encode())
            peer.call(2, c.Tx.Commit(), c.Tx.CommitOk)
        found = peer.get(1, queue)
        assert found is not None and found[1] == b"one"
        peer.call(1, c.Basic.Consume(queue="shared"), c.Basic.ConsumeOk)
    with BrokerClient(broker.url, credentials=login) as client, client.channel() as own:
        assert client.committed(f"t-{round_}") and client.outcome(f"p-{round_}") == "prepared"
        client.commit(f"p-{round_}")
        assert sum(batch.num_rows for batch in client.browse([(queue, 0, 3)])) == 2  # one was taken
        app, token = f"app-{round_}", f"token-{round_}"
        client.open_batch(app, "q", 0, "fail", token=token)
        header = BranchHeader(token, f"b-{round_}", "publish", {"routing_key": queue})
        staged = client.stage(header, [messages(b"row", routing_key=queue)])
        assert client.commit_batch(app, "q", 0, token, [staged]).entry.published == 1
        own.tx_select()
        own.publish(b"four", routing_key=queue)
        own.prepare(f"f-{round_}")
        client.rollback(f"f-{round_}")
    api = Api(broker.http_urls[0], ANN, PASSWORD)
    assert api.get(f"/api/queues/%2F/{queue}")["name"] == queue
    api.close()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(commit, "MOST_PREPARED", BOUND)
    monkeypatch.setattr(owners, "USER_APPS", BOUND)
    monkeypatch.setattr(channel, "QUEUE_CONSUMERS", BOUND)
    monkeypatch.setattr(memory, "NAMES_BYTES", 3_000_000)
    return tmp_path


@pytest.mark.parametrize("seed", range(4))
def test_who_fills_all_that_it_may_leaves_others_a_working_broker(folder: Path, seed: int) -> None:
    order = list(FILLS)
    random.Random(seed).shuffle(order)
    with served(folder) as broker:
        for user in (MAN, ANN):
            hash_ = passwords.hashed(PASSWORD, passwords.Cost(4))
            broker.accounts.add_user(user, hash_, ["management"])
            broker.accounts.set_permissions(user, ".*", ".*", ".*")
        broker.vhosts.add_vhost(HIS)
        broker.accounts.set_permissions(MAN, ".*", ".*", ".*", vhost=HIS)
        with broker.channel() as own:
            own.queue_declare("in")
            own.queue_declare("shared")
        with contextlib.ExitStack() as stack:
            filler = Filler(broker, stack)
            for number, name in enumerate(order):
                FILLS[name](filler)
                works(broker, f"{number}")
    with served(folder) as broker:
        with contextlib.ExitStack() as stack:
            filler = Filler(broker, stack)
            assert len(broker.prepared()) == BOUND // 10  # what lasts is counted again
            lost = ("connections", "channels", "flight_connections", "http_connections", "consumers")
            for name in (*lost, "prepared", "queues", "exchanges", "bindings"):
                FILLS[name](filler)
            assert len(broker.prepared()) == BOUND // 10
            works(broker, "again")
        assert broker.failure is None


def cli(capsys: pytest.CaptureFixture[str], folder: Path, *words: str) -> str:
    assert main([*words, "--data", str(folder / "data"), "--vhost", HIS]) == 0
    return capsys.readouterr().out


LIMITED = {
    "queues": (
        lambda user, n: c.Queue.Declare(queue=f"{user}-{n}"),
        "queue limit in vhost 'his' (20) is reached",
        lambda n: ("queue", "delete", f"{MAN}-{n}", "--yes"),
    ),
    "memory": (
        lambda user, n: c.Exchange.Declare(exchange=f"{user}-{n}"),
        "the queues, exchanges and bindings of vhost 'his' take",
        lambda n: ("exchange", "delete", f"{MAN}-{n}", "--yes"),
    ),
}


@pytest.mark.parametrize("limit", LIMITED)
def test_who_fills_a_virtual_host_is_found_and_ended_and_its_other_users_go_on(
    folder: Path, limit: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its limits are for all of its users: the operator sees who, and takes back what he has made."""
    make, refusal, delete = LIMITED[limit]
    if limit == "memory":
        monkeypatch.setattr(memory, "NAMES_BYTES", 600_000)
    with served(folder) as broker, contextlib.ExitStack() as stack:
        broker.vhosts.add_vhost(HIS)
        broker.vhosts.limit_vhost(HIS, max_queues=20)
        peers = {}
        for user in (MAN, ANN):
            broker.accounts.add_user(user, passwords.hashed(PASSWORD, passwords.Cost(4)), [])
            broker.accounts.set_permissions(user, f"^{user}", ".*", ".*", vhost=HIS)
            peer = peers[user] = stack.enter_context(Peer(broker.amqp_urls[0]))
            peer.user, peer.password = user, PASSWORD
            peer.opened(1, vhost=HIS)

        def declares(user: str, number: int) -> object:
            peer = peers[user]
            peer.send(1, make(user, number))
            answer = peer.receive()[1]
            if isinstance(answer, c.Channel.Close):
                peer.send(1, c.Channel.CloseOk())
                peer.open(1)
                raise errors.TxmqError(answer.reply_text)
            return answer

        until_refused(100, lambda number: declares(MAN, number), errors.TxmqError, re.escape(refusal))
        with pytest.raises(errors.TxmqError, match=re.escape(refusal)):
            declares(ANN, 0)
        lines = map(json.loads, (folder / "data/audit.log").read_text().splitlines())
        made = [line["user"] for line in lines if line["event"].endswith(".declare") and line["vhost"] == HIS]
        assert len(made) > 10 and set(made) == {MAN}
        cli(capsys, folder, "permission", "set", MAN, "^$", ".*", ".*")
        cli(capsys, folder, *delete(0))
        with pytest.raises(errors.TxmqError, match="ACCESS_REFUSED"):
            declares(MAN, 0)
        declares(ANN, 0)
        if limit == "queues":
            cli(capsys, folder, "vhost", "limit", HIS, "--max-queues", "40")
        else:
            for number in range(1, len(made)):
                cli(capsys, folder, *delete(number))
        for number in range(1, 10):
            declares(ANN, number)
        # nobody else noticed
        own = stack.enter_context(broker.channel())
        own.queue_declare("of others")
        own.publish(b"x", routing_key="of others")
        assert broker.quotas.alarm is not None and broker.quotas.alarm.look() is None
