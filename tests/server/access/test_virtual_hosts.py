"""Virtual hosts at the listeners: AMQP by connection.open, Flight by the url; their limits and their end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pika
import pytest
from pamqp import commands as c

from broker_core.client.accounts import RemoteAccounts, RemoteVhosts
from broker_core.client.broker import BrokerClient
from broker_core.core import errors
from broker_core.launcher import Broker
from tests.amqp_peer import Closed, Peer, contents, peer
from tests.progress import wait_until
from tests.server.conftest import Served
from tests.server.flight.flight_calls import Raw

SALES = "sales"
NAMES = ["sales", "a/b c%2F", "ünï+?#@:&", "x" * 255, "/".join("abc"), "."]


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with Broker.open(tmp_path / "data", amqp=["127.0.0.1:0"]) as made:
        made.vhosts.add_vhost(SALES)
        yield made


def audited(tmp_path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (tmp_path / "data" / "audit.log").read_text().splitlines()]


def refusal(url: str, vhost: str, user: str = "guest", password: str = "guest") -> tuple[int, str]:
    """What connection.open of ``vhost`` gets."""
    with Peer(url) as client:
        client.user, client.password = user, password
        client.tuned()
        client.send(0, c.Connection.TuneOk(2047, 131_072, 0))
        client.send(0, c.Connection.Open(vhost))
        closed = client.expect(c.Connection.Close, 0)
    return closed.reply_code, closed.reply_text


def url_of(broker: Broker, vhost: str) -> str:
    return f"{broker.url}/{quote(vhost, safe='')}"


# -- names ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_all_listeners_reach_the_same_virtual_host_by_its_name(broker: Broker, name: str) -> None:
    if name != SALES:
        broker.vhosts.add_vhost(name)
    address = broker.amqp_urls[0].removeprefix("amqp://")
    with BrokerClient(url_of(broker, name)) as client, client.channel() as channel:
        channel.queue_declare("q")
        channel.publish(b"by flight", routing_key="q")
        assert [queue.name for queue in client.queues()] == ["q"] and broker.queues() == []
        with peer(broker.amqp_urls[0], 1, vhost=name) as raw:
            found = raw.get(1, "q")
            assert found is not None and found[1] == b"by flight"
            raw.publish(1, "", "q", b"by a peer")
            assert raw.count(1, "q") == 1
        parameters = pika.URLParameters(f"amqp://guest:guest@{address}/{quote(name, safe='')}")
        with pika.BlockingConnection(parameters) as connection:
            assert connection.channel().basic_get("q", auto_ack=True)[2] == b"by a peer"
    assert str(client.address) == url_of(broker, name)


def test_an_unknown_virtual_host_is_refused_with_rabbitmqs_text(broker: Broker, tmp_path: Path) -> None:
    for name in ("nowhere", "", "Sales", "sales/"):
        assert refusal(broker.amqp_urls[0], name) == (530, f"NOT_ALLOWED - vhost {name} not found")
    refused = [line for line in audited(tmp_path) if line["event"] == "refused"]
    assert [line["vhost"] for line in refused] == ["nowhere", "", "Sales", "sales/"]
    assert refused[-1]["why"] == "vhost sales/ not found" and refused[-1]["user"] == "guest"
    with BrokerClient(url_of(broker, "nowhere"), connect_s=0.0) as client:
        for ask in (client.queues, client.apps, lambda: client.channel().get("q")):
            with pytest.raises(errors.NotAllowed, match="vhost nowhere not found"):
                ask()


@pytest.mark.parametrize("value", ["%FF", "%ff%fe"])
def test_a_header_that_names_nothing_is_one_error(broker: Broker, value: str) -> None:
    raw = Raw(broker.url, "", "x")
    raw.client.close()
    from broker_core.client.connection import SendHeader

    header = SendHeader("", "x")
    header._middleware._headers = {"txmq-vhost": value}
    import pyarrow.flight as arrow_flight

    raw.client = arrow_flight.connect(broker.url.replace("txmq://", "grpc://"), middleware=[header])
    found = raw.call("engine.apps", {})
    assert isinstance(found, errors.RemoteProtocolError) and "one percent-encoded name" in found.summary
    raw.client.close()


def test_a_channel_belongs_to_the_virtual_host_where_it_was_opened(broker: Broker) -> None:
    here, there = Raw(broker.url), Raw(broker.url, vhost=SALES)
    assert not isinstance(there.call("channel.queue_declare", {"queue": "q"}), errors.TxmqError)
    here.channel_id = there.channel_id
    for word in ("tx_select", "keepalive", "close", "open"):
        found = here.call(f"channel.{word}", {})
        assert isinstance(found, errors.AccessRefused), word
    assert broker.queues() == [] and [queue.name for queue in broker.queues(SALES)] == ["q"]
    for raw in (here, there):
        raw.client.close()


def test_a_direct_reply_and_a_carbon_copy_stay_in_their_virtual_host(broker: Broker) -> None:
    url = broker.amqp_urls[0]
    with peer(url, 1, vhost=SALES) as asking, peer(url, 1) as stranger, peer(url, 1, vhost=SALES) as other:
        for each in (stranger, other):
            each.call(1, c.Queue.Declare(queue="requests"), c.Queue.DeclareOk)
        asking.call(1, c.Basic.Consume(queue="amq.rabbitmq.reply-to", no_ack=True), c.Basic.ConsumeOk)
        asking.publish(1, "", "none", b"?", reply_to="amq.rabbitmq.reply-to", headers={"CC": ["requests"]})
        wait_until(lambda: other.count(1, "requests") == 1)
        assert stranger.count(1, "requests") == 0
        other.send(1, c.Basic.Get(queue="requests", no_ack=True))
        other.expect(c.Basic.GetOk, 1)
        reply_to = other.content(1)[0].reply_to
        stranger.publish(1, "", reply_to, b"of a stranger")
        stranger.call(1, c.Basic.Qos(prefetch_count=1), c.Basic.QosOk)
        other.publish(1, "", reply_to, b"answer")
        asking.expect(c.Basic.Deliver, 1)
        assert asking.content(1)[1] == b"answer"


def test_a_prepared_transaction_of_another_virtual_host_is_not_decided(broker: Broker) -> None:
    url = broker.amqp_urls[0]
    with peer(url, 1, 2, vhost=SALES) as owner, peer(url, 1) as stranger:
        owner.call(1, c.Queue.Declare(queue="q"), c.Queue.DeclareOk)
        owner.call(1, c.Tx.Select(), c.Tx.SelectOk)
        owner.publish(1, "", "q", b"1")
        owner.publish(1, "amq.transaction", "prepare", b"order-7")
        owner.call(1, c.Tx.Commit(), c.Tx.CommitOk)
        stranger.publish(1, "amq.transaction", "commit", b"order-7")
        closed = stranger.expect(c.Channel.Close, 1)
        assert "no transaction of vhost '/' has the xid 'order-7'" in closed.reply_text
        owner.publish(2, "amq.transaction", "commit", b"order-7")
        wait_until(lambda: owner.count(2, "q") == 1)
    with BrokerClient(broker.url) as client, pytest.raises(errors.UnknownTransaction):
        client.rollback("no such one")


# -- limits --------------------------------------------------------------------------------------------------


def test_the_limit_of_connections_is_that_of_the_virtual_host(broker: Broker, tmp_path: Path) -> None:
    url = broker.amqp_urls[0]
    broker.vhosts.limit_vhost(SALES, max_connections=2)
    text = "NOT_ALLOWED - access to vhost 'sales' refused for user 'guest': connection limit (2) is reached"
    with peer(url, vhost=SALES), peer(url, vhost=SALES) as second, peer(url), peer(url), peer(url):
        assert refusal(url, SALES) == (530, text)
        assert {info.name: info.connections for info in broker.vhosts.vhosts()} == {"/": 3, SALES: 2}
        second.end()
        wait_until(lambda: {info.connections for info in broker.vhosts.vhosts()} == {1, 3})
        with peer(url, vhost=SALES):
            assert refusal(url, SALES) == (530, text)
    broker.vhosts.limit_vhost(SALES, max_connections=0)
    wait_until(lambda: all(info.connections == 0 for info in broker.vhosts.vhosts()))
    assert refusal(url, SALES)[0] == 530
    (first,) = [line for line in audited(tmp_path) if line["event"] == "refused"]  # the others are counted
    assert first["why"] == text.removeprefix("NOT_ALLOWED - ")


def test_a_full_virtual_host_rejects_a_publish_and_closes_the_channel_of_a_transaction(
    broker: Broker,
) -> None:
    broker.vhosts.limit_vhost(SALES, max_messages=2, max_queues=1)
    with peer(broker.amqp_urls[0], 1, 2, 3, vhost=SALES) as client:
        client.call(1, c.Queue.Declare(queue="q"), c.Queue.DeclareOk)
        client.send(3, c.Queue.Declare(queue="r"))
        closed = client.expect(c.Channel.Close, 3)
        assert (closed.reply_code, closed.reply_text) == (
            406,
            "PRECONDITION_FAILED - cannot declare queue 'r': queue limit in vhost 'sales' (1) is reached",
        )
        client.call(1, c.Confirm.Select(), c.Confirm.SelectOk)
        answers = []
        for number in range(4):
            client.publish(1, "", "q", str(number).encode())
            answers.append(type(client.receive()[1]))
        assert answers == [c.Basic.Ack, c.Basic.Ack, c.Basic.Nack, c.Basic.Nack]
        client.call(2, c.Tx.Select(), c.Tx.SelectOk)
        client.publish(2, "", "q", b"in a transaction")
        client.send(2, c.Tx.Commit())
        assert "vhost 'sales' is full: 1 more messages on 2 are over" in (
            client.expect(c.Channel.Close, 2).reply_text
        )
        assert client.drain(1, "q") == [(False, b"0"), (False, b"1")]
        client.publish(1, "", "q", b"again")
        assert isinstance(client.receive()[1], c.Basic.Ack)


def test_of_many_publishes_at_once_those_that_fit_are_kept(broker: Broker) -> None:
    broker.vhosts.limit_vhost(SALES, max_messages=10)
    with peer(broker.amqp_urls[0], 1, vhost=SALES) as client:
        client.call(1, c.Queue.Declare(queue="q"), c.Queue.DeclareOk)
        client.call(1, c.Confirm.Select(), c.Confirm.SelectOk)
        publish = c.Basic.Publish(exchange="", routing_key="q")
        client.write(b"".join(contents(1, publish, (str(number).encode() for number in range(3000)))))
        refused = set()
        confirmed = 0
        while confirmed + len(refused) < 3000:
            frame = client.receive()[1]
            if isinstance(frame, c.Basic.Ack):
                confirmed = frame.delivery_tag - len([n for n in refused if n <= frame.delivery_tag])
            else:
                assert isinstance(frame, c.Basic.Nack)
                refused.add(frame.delivery_tag)
        assert client.count(1, "q") == 10 == confirmed


# -- the end -------------------------------------------------------------------------------------------------


def test_deleting_a_virtual_host_closes_its_connections_and_no_others(broker: Broker, tmp_path: Path) -> None:
    url = broker.amqp_urls[0]
    with BrokerClient(url_of(broker, SALES)) as client, BrokerClient(broker.url) as root:
        mine, others = client.channel(), root.channel()
        mine.queue_declare("q")
        others.queue_declare("q")
        before = client.identity()
        mine.tx_select()
        mine.publish(b"open", routing_key="q")
        with peer(url, 1, vhost=SALES) as closing, peer(url, 1) as staying:
            closing.call(1, c.Basic.Consume(queue="q"), c.Basic.ConsumeOk)
            RemoteVhosts(root).delete_vhost(SALES)
            while not isinstance(frame := closing.receive()[1], c.Connection.Close):
                assert isinstance(frame, c.Basic.Cancel)
            assert (frame.reply_code, frame.reply_text) == (
                320,
                "CONNECTION_FORCED - vhost 'sales' is deleted",
            )
            closing.send(0, c.Connection.CloseOk())
            with pytest.raises((Closed, ConnectionError)):
                closing.receive()
            assert staying.count(1, "q") == 0 and refusal(url, SALES)[0] == 530
        with pytest.raises(errors.NotAllowed, match="vhost sales not found"):
            mine.tx_commit()
        with pytest.raises(errors.NotAllowed, match="vhost sales not found"):
            client.queues()
        others.publish(b"1", routing_key="q")
        RemoteVhosts(root).add_vhost(SALES)
        assert client.queues() == []  # the same client, in another virtual host of that name
        assert client.identity() != before
        with pytest.raises(errors.TransactionState, match="the channel is closed"):
            mine.queue_declare("q")
    events = [(line["event"], line.get("name")) for line in audited(tmp_path)]
    assert ("admin.delete_vhost", SALES) in events and ("admin.add_vhost", SALES) in events


def test_permissions_are_given_and_listed_per_virtual_host(broker: Broker, tmp_path: Path) -> None:
    broker.accounts.add_user("root", _hash("of root"), ["administrator"])
    broker.accounts.add_user("ann", _hash("of ann"))
    login = broker.url.replace("txmq://", "txmq://root:of%20root@")
    with BrokerClient(f"{login}/{SALES}") as root:
        accounts = RemoteAccounts(root)
        accounts.set_permissions("ann", "^a", "", ".*")
        accounts.set_topic_permissions("ann", "amq.topic", "^ann", ".*")
        listed = [(found.vhost, found.exchange, found.configure) for found in accounts.permissions()]
        assert listed == [(SALES, "", "^a"), (SALES, "amq.topic", "")]
    url = broker.amqp_urls[0].replace("amqp://", "amqp://ann:of%20ann@")
    assert refusal(url, "/", "ann", "of ann") == (
        530,
        "NOT_ALLOWED - access to vhost '/' refused for user 'ann'",
    )
    with Peer(url) as client:
        client.user, client.password = "ann", "of ann"
        client.opened(1, vhost=SALES)
        client.call(1, c.Queue.Declare(queue="a"), c.Queue.DeclareOk)
        client.send(1, c.Queue.Declare(queue="b"))
        assert client.expect(c.Channel.Close, 1).reply_text == (
            "ACCESS_REFUSED - access to queue 'b' in vhost 'sales' refused for user 'ann'"
        )
    lines = audited(tmp_path)
    assert [line["vhost"] for line in lines if line["event"] == "queue.declare"] == [SALES]
    assert [line["vhost"] for line in lines if line["event"] == "admin.set_permissions"] == [SALES]
    with pytest.raises(errors.OptionError, match="virtual host 'none' does not exist"):
        broker.accounts.set_permissions("ann", "", "", "", "none")


def _hash(password: str) -> str:
    from broker_core.core import password as passwords

    return passwords.hashed(password, passwords.Cost(4))


def test_after_a_sigkill_each_virtual_host_has_what_was_committed_there(served: Served) -> None:
    served.start()
    url = f"txmq://127.0.0.1:{served.port}"
    with BrokerClient(url) as root, BrokerClient(f"{url}/{SALES}") as sales:
        RemoteVhosts(root).add_vhost(SALES, max_queues=5)
        RemoteVhosts(root).add_vhost("gone")
        with BrokerClient(f"{url}/gone") as gone, gone.channel() as channel:
            channel.queue_declare("q")
            channel.publish(b"gone", routing_key="q")
        for client, name in ((root, b"/"), (sales, b"sales")):
            channel = client.channel()
            channel.queue_declare("q")
            channel.exchange_declare("x", "fanout")
            channel.queue_bind("q", "x")
            for number in range(3):
                channel.publish(name + str(number).encode(), "x")
        RemoteVhosts(root).delete_vhost("gone")
        served.kill()
        served.start()
        assert [
            (info.name, info.queues, info.messages, info.max_queues) for info in RemoteVhosts(root).vhosts()
        ] == [("/", 1, 3, None), (SALES, 1, 3, 5)]
        for client, name in ((root, b"/"), (sales, b"sales")):
            with client.channel() as channel:
                channel.publish(name + b"3", "x")
                found = [channel.get("q", no_ack=True) for _ in range(5)]
                assert [each and each.body for each in found] == [
                    *(name + str(number).encode() for number in range(4)),
                    None,
                ]


def test_a_data_directory_takes_the_name_of_a_virtual_host(embedded: Path) -> None:
    with BrokerClient(data=embedded) as root, BrokerClient(data=embedded, vhost="a/b") as client:
        RemoteVhosts(root).add_vhost("a/b")
        with client.channel() as channel:
            channel.queue_declare("q")
        assert [queue.name for queue in client.queues()] == ["q"] and root.queues() == []
        assert str(client.address) == f"data={embedded}, vhost=a/b"


WRONG_URLS = {
    "txmq://h:1/a/b": "its path has several parts",
    "txmq://h:1/%00": "has control characters",
    "txmq://h:1/%FF": "its path is not UTF-8",
    f"txmq://h:1/{'x' * 256}": "has 256 bytes",
    f"txmq://h:1/{'%F0%9F%90%87' * 64}": "has 256 bytes",
    "txmq://h:1/a?b": "it must be",
    "txmq://h:1/a#b": "it must be",
}


@pytest.mark.parametrize(("url", "why"), WRONG_URLS.items(), ids=lambda text: text[:30])
def test_a_damaged_path_is_one_error(url: str, why: str) -> None:
    with pytest.raises(errors.OptionError, match=why) as caught:
        BrokerClient(url)
    assert len(str(caught.value)) < 700


def test_a_virtual_host_is_named_once(tmp_path: Path) -> None:
    with pytest.raises(errors.OptionError, match="the virtual host of a url is its path"):
        BrokerClient("txmq://h:1", vhost="sales")
    with pytest.raises(errors.OptionError, match="is empty"):
        BrokerClient(data=tmp_path, vhost="")
    for path in ("", "/", "/%2F", "/%2f"):
        assert BrokerClient(f"txmq://h:1{path}").address.vhost == "/"
    assert BrokerClient("txmq://h:1/a%2Fb").address.vhost == "a/b"
