"""Commit tokens and prepared transactions of AMQP clients (decisions 20 and 21), by an unmodified client and
the command line.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pika
import pytest
from pamqp import commands as c
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import ChannelClosedByBroker

from broker_core.client.broker import BrokerClient
from broker_core.core import errors
from broker_core.launcher import Broker
from broker_core.server.flight import channels
from tests.amqp_peer import Peer
from tests.amqp_server import AmqpServed, serving
from tests.progress import wait_until

NAMED = "amq.transaction"


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[AmqpServed]:
    with serving(tmp_path / "data") as broker:
        yield broker


def connect(broker: AmqpServed) -> pika.BlockingConnection:
    return pika.BlockingConnection(pika.URLParameters(broker.amqp_url))


def outcome(channel: BlockingChannel, xid: str) -> str | None:
    method, _, body = channel.basic_get(f"{NAMED}.{xid}", auto_ack=True)
    return body.decode() if method else None


def ready(channel: BlockingChannel, queue: str) -> int:
    return int(channel.queue_declare(queue, passive=True).method.message_count)


def txmq(broker: AmqpServed, *arguments: str) -> str:
    command = [sys.executable, "-m", "txmq", "tx", *arguments, "--url", broker.url]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def publish(channel: BlockingChannel, queue: str, *bodies: bytes) -> None:
    for body in bodies:
        channel.basic_publish("", queue, body, pika.BasicProperties(delivery_mode=2))


def test_21_a_commit_token_answers_whether_it_was_committed_over_amqp_and_flight_even_after_a_kill(
    broker: AmqpServed,
) -> None:
    with closing(connect(broker)) as connection:
        channel = connection.channel()
        channel.queue_declare("orders", durable=True)
        channel.tx_select()
        publish(channel, "orders", b"a", b"b")
        channel.basic_publish(NAMED, "token", b"order-7")
        assert outcome(connection.channel(), "order-7") is None
        channel.tx_commit()
        assert outcome(channel, "order-7") == "committed"
        publish(channel, "orders", b"c")
        channel.basic_publish(NAMED, "token", b"order-8")
        channel.tx_rollback()
    broker.restart()
    with closing(connect(broker)) as connection, broker.client() as client:
        channel = connection.channel()
        assert (outcome(channel, "order-7"), outcome(channel, "order-8")) == ("committed", None)
        assert client.committed("order-7") and not client.committed("order-8")
        assert ready(channel, "orders") == 2


def test_21_a_token_that_was_used_fails_the_second_commit_and_nothing_of_it_is_enqueued(
    broker: AmqpServed,
) -> None:
    with closing(connect(broker)) as connection:
        channel = connection.channel()
        channel.queue_declare("orders", durable=True)
        channel.tx_select()
        for _ in range(2):
            publish(channel, "orders", b"a")
            channel.basic_publish(NAMED, "token", b"order-7")
            if outcome(connection.channel(), "order-7") is None:
                channel.tx_commit()
        with pytest.raises(
            ChannelClosedByBroker, match="is committed: an xid names only one transaction"
        ) as closed:
            channel.tx_commit()
        assert (closed.value.reply_code, channel.is_closed) == (406, True)
        assert ready(connection.channel(), "orders") == 1


@pytest.mark.parametrize("decision", ["commit", "rollback"])
def test_20_a_prepared_transaction_is_durable_invisible_and_decided_by_name_from_the_command_line(
    broker: AmqpServed, decision: str
) -> None:
    with closing(connect(broker)) as connection:
        channel = connection.channel()
        channel.queue_declare("in", durable=True)
        channel.queue_declare("out", durable=True)
        publish(channel, "in", b"request")
        channel.tx_select()
        method, _, body = channel.basic_get("in")
        publish(channel, "out", b"answer to " + body)
        channel.basic_ack(method.delivery_tag)
        channel.basic_publish(NAMED, "prepare", b"xa-1")
        channel.tx_commit()
        channel.tx_commit()  # the channel goes on, with an empty transaction
        assert outcome(connection.channel(), "xa-1") == "prepared"
        assert (ready(connection.channel(), "in"), ready(connection.channel(), "out")) == (0, 0)
    broker.restart()
    listed = json.loads(txmq(broker, "list", "--json"))
    assert [(found["xid"], found["publishes"]) for found in listed] == [("xa-1", 1)]
    for _ in range(2):  # twice is fine
        txmq(broker, decision, "xa-1", "--yes")
    broker.restart()
    with closing(connect(broker)) as connection:
        channel = connection.channel()
        committed = decision == "commit"
        state = "heuristically_committed" if committed else "heuristically_rolled_back"
        assert outcome(channel, "xa-1") == state
        assert (ready(channel, "in"), ready(channel, "out")) == ((0, 1) if committed else (1, 0))
        if not committed:
            method, _, body = channel.basic_get("in")
            assert (method.redelivered, body) == (True, b"request")
    assert json.loads(txmq(broker, "list", "--json")) == []


@pytest.mark.product
@pytest.mark.parametrize("decision", ["commit", "rollback"])
@pytest.mark.parametrize("forgets", ["amqp", "python", "cli"])
def test_20_who_prepared_it_hears_of_a_decision_by_hand_until_it_forgets_that_also_after_a_kill(
    broker: AmqpServed, decision: str, forgets: str
) -> None:
    with closing(connect(broker)) as connection:
        channel = connection.channel()
        channel.queue_declare("out", durable=True)
        channel.tx_select()
        publish(channel, "out", b"a")
        channel.basic_publish(NAMED, "prepare", b"xa-1")
        channel.tx_commit()
    txmq(broker, decision, "xa-1", "--yes")
    broker.restart()
    code, state = (
        ("XA_HEURCOM", "heuristically_committed")
        if decision == "commit"
        else ("XA_HEURRB", "heuristically_rolled_back")
    )
    with closing(connect(broker)) as connection, broker.client() as client:
        for verb in ("commit", "rollback"):
            channel = connection.channel()
            channel.confirm_delivery()
            with pytest.raises(ChannelClosedByBroker) as closed:
                channel.basic_publish(NAMED, verb, b"xa-1")
            assert closed.value.reply_text.startswith(f"PRECONDITION_FAILED - {code}: transaction 'xa-1' was")
            with pytest.raises(errors.HeuristicOutcome, match=code):
                getattr(client, verb)("xa-1")
        assert [(row.xid, row.state) for row in client.recover()] == [("xa-1", state)]
        (row,) = json.loads(connection.channel().basic_get(f"{NAMED}@recover", auto_ack=True)[2])
        (listed,) = json.loads(txmq(broker, "recover", "--json"))
        assert (row["xid"], row["state"]) == (listed["xid"], listed["state"]) == ("xa-1", state)
        for _ in range(2):  # twice is fine
            if forgets == "amqp":
                channel = connection.channel()
                channel.confirm_delivery()
                channel.basic_publish(NAMED, "forget", b"xa-1")
            elif forgets == "python":
                client.forget("xa-1")
            else:
                txmq(broker, "forget", "xa-1", "--yes")
        assert client.recover() == [] and client.outcome("xa-1") == state.removeprefix("heuristically_")
    broker.restart()
    with closing(connect(broker)) as connection, broker.client() as client:
        channel = connection.channel()
        assert outcome(channel, "xa-1") == state.removeprefix("heuristically_")
        getattr(client, decision)("xa-1")  # as any other that it has decided
        assert client.recover() == [] and ready(channel, "out") == (decision == "commit")


@pytest.mark.parametrize("decision", ["commit", "rollback"])
def test_20_another_client_decides_over_amqp_and_the_confirm_says_that_it_is_durable(
    broker: AmqpServed, decision: str
) -> None:
    with closing(connect(broker)) as connection:
        channel = connection.channel()
        channel.queue_declare("out", durable=True)
        channel.tx_select()
        publish(channel, "out", b"a", b"b")
        channel.basic_publish(NAMED, "prepare", b"xa-1")
        channel.tx_commit()
    with closing(connect(broker)) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        for _ in range(2):  # twice is fine
            channel.basic_publish(NAMED, decision, b"xa-1")
        other = "rollback" if decision == "commit" else "commit"
        with pytest.raises(ChannelClosedByBroker) as closed:
            channel.basic_publish(NAMED, other, b"xa-1")
        assert closed.value.reply_code == 406 and "it cannot become" in closed.value.reply_text
    broker.restart()
    with closing(connect(broker)) as connection:
        assert ready(connection.channel(), "out") == (2 if decision == "commit" else 0)


def test_20_prepare_with_no_work_is_read_only_and_leaves_nothing_to_decide(broker: AmqpServed) -> None:
    with closing(connect(broker)) as connection:
        channel = connection.channel()
        channel.tx_select()
        channel.basic_publish(NAMED, "prepare", b"xa-1")
        channel.tx_commit()
        assert outcome(channel, "xa-1") is None
    assert json.loads(txmq(broker, "list", "--json")) == []


def recovered(channel: BlockingChannel) -> list[list[str]]:
    """The pages of what a manager that lost its log finds again."""
    pages, name = [], f"{NAMED}@recover"
    while (answer := channel.basic_get(name, auto_ack=True))[0] is not None:
        method, properties, body = answer
        assert properties.content_type == "application/json"
        rows = json.loads(body)
        assert all(row["state"] == "prepared" and row["since"] <= time.time() + 1 for row in rows)
        pages.append([row["xid"] for row in rows])
        name = method.routing_key
    return pages


def test_20_a_manager_that_lost_its_log_finds_what_it_has_prepared_again_after_a_kill(
    broker: AmqpServed,
) -> None:
    names = ["xa-1", 'a "name"\n', "x" * 239]
    with closing(connect(broker)) as connection:
        channel = connection.channel()
        assert recovered(channel) == []
        channel.queue_declare("out", durable=True)
        channel.tx_select()
        for xid in (*names, "ended"):
            publish(channel, "out", b"a")
            channel.basic_publish(NAMED, "prepare", xid.encode())
            channel.tx_commit()
        other = connection.channel()
        other.confirm_delivery()
        other.basic_publish(NAMED, "rollback", b"ended")
    broker.restart()
    with closing(connect(broker)) as connection, broker.client() as client:
        channel = connection.channel()
        assert recovered(channel) == [names] and [row.xid for row in client.recover()] == names
        channel.confirm_delivery()
        for (xid,) in [[xid] for page in recovered(channel) for xid in page]:
            channel.basic_publish(NAMED, "commit", xid.encode())
        assert recovered(channel) == [] and client.recover() == []
        assert ready(channel, "out") == len(names)


@pytest.mark.parametrize(("limit", "timeout"), [("30", b"0.05"), ("0.5", b"3000"), ("0.5", b"0")])
def test_18_a_client_limits_the_open_time_of_its_transactions_below_that_of_the_broker(
    tmp_path: Path, limit: str, timeout: bytes
) -> None:
    """Its own is no longer than that of the broker. What is prepared waits for ever."""
    with serving(tmp_path / "data", "--transaction-time", limit) as broker, Peer(broker.amqp_url) as peer:
        peer.opened(1).call(1, c.Queue.Declare(queue="q", durable=True), c.Queue.DeclareOk)
        peer.call(1, c.Tx.Select(), c.Tx.SelectOk)
        with broker.client() as client, client.channel() as channel:
            channel.tx_select()
            channel.publish(b"a", routing_key="q")
            channel.prepare("xa-1")
        peer.publish(1, NAMED, "timeout", timeout)
        peer.publish(1, "", "q", b"b")
        _, closed = peer.receive()  # by itself
        assert isinstance(closed, c.Channel.Close)
        seconds = min(float(limit), float(timeout) or float(limit))
        assert f"is open for longer than {seconds} s, the limit" in closed.reply_text
        with broker.client() as client:
            assert client.outcome("xa-1") == "prepared" and client.queues()[0].messages == 0


@pytest.mark.slow
def test_18_a_python_client_limits_the_open_time_of_its_transactions_and_reads_their_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker rolls back what is open for longer by itself: the client may hang."""
    monkeypatch.setattr(channels, "LOOK_S", 0.1)
    with (
        Broker.open(tmp_path / "data") as broker,
        BrokerClient(broker.url) as client,
        client.channel() as channel,
        client.channel() as other,
    ):
        channel.queue_declare("q")
        channel.publish(b"a", routing_key="q")
        channel.tx_select()
        channel.tx_timeout(0.01)
        channel.tx_rollback()
        channel.get("q")
        channel.ack(multiple=True)
        (row,) = [row for row in client.channels() if row.acks]
        assert row.transaction == channel.tx_current()
        wait_until(lambda: other.get("q"), "the message is ready again")
        with pytest.raises(errors.TransactionState, match=r"is open for longer than 0\.01 s, the limit"):
            channel.tx_commit()
        other.tx_select()
        with pytest.raises(errors.OptionError, match="a timeout is a number of seconds, not -1"):
            other.tx_timeout(-1)


def headers_of(connection: pika.BlockingConnection, count: int, asks: bool) -> list[dict[str, object]]:
    """The headers of the messages of "q", which are ready again."""
    found: list[dict[str, object]] = []

    def take(_channel: object, _method: object, properties: pika.BasicProperties, _body: bytes) -> None:
        found.append(properties.headers or {})

    channel = connection.channel()
    channel.basic_consume("q", take, arguments={"x-transaction-id": asks})
    while len(found) < count:
        connection.process_data_events(1)
    channel.close()
    return found


def test_a_consumer_gets_the_id_of_the_transaction_of_each_message_if_it_asks_for_it(
    broker: AmqpServed,
) -> None:
    """Not of a message without one, whatever its publisher has written there."""
    with closing(connect(broker)) as connection:
        channel = connection.channel()
        channel.queue_declare("q", durable=True)
        liar = pika.BasicProperties(headers={"x-transaction-id": "mine", "other": 1})
        channel.basic_publish("", "q", b"none", liar)
        channel.tx_select()
        for verb, name in (("token", b"order-7"), ("prepare", b"xa-1"), ("", b"")):
            publish(channel, "q", b"1", b"2")
            if verb:
                channel.basic_publish(NAMED, verb, name)
            channel.tx_commit()
        connection.channel().basic_publish(NAMED, "commit", b"xa-1")
        wait_until(lambda: ready(connection.channel(), "q") == 7, "all is committed")
        found = {asks: headers_of(connection, 7, asks) for asks in (True, False)}
        assert found[False] == [liar.headers, *[{}] * 6]
        assert found[True][0] == {"other": 1}
        ids = [row["x-transaction-id"] for row in found[True][1:]]
        assert ids[0] == ids[1] == "order-7" and ids.count("xa-1") == 2
        assert len(set(ids)) == 3  # also of one without a name


def test_a_queue_of_amq_transaction_that_answers_nothing_is_not_found(broker: AmqpServed) -> None:
    with closing(connect(broker)) as connection:
        for name in (f"{NAMED}@recover:x", f"{NAMED}@recovered", f"{NAMED}@other", NAMED):
            with pytest.raises(ChannelClosedByBroker) as closed:
                connection.channel().basic_get(name, auto_ack=True)
            assert closed.value.reply_code == 404 and name in closed.value.reply_text


@pytest.mark.parametrize(
    ("transactional", "verb", "body", "code", "text"),
    [
        (True, "begin", b"x", 406, "unknown routing key 'begin' for exchange 'amq.transaction'"),
        (True, "timeout", b"-1", 406, "a timeout is a number of seconds, not '-1'"),
        (True, "timeout", b"nan", 406, "a timeout is a number of seconds, not 'nan'"),
        (False, "timeout", b"1", 406, "channel is not transactional"),
        (True, "token", b"", 406, "an empty body names no transaction"),
        (True, "token", b"\xff", 406, "an xid is UTF-8 text of at most 239 bytes"),
        (True, "token", b"x" * 240, 406, "an xid is UTF-8 text of at most 239 bytes"),
        (True, "prepare", b"x" * 240, 406, "an xid is UTF-8 text of at most 239 bytes"),
        (False, "commit", b"x" * 256, 406, "an xid is UTF-8 text of at most 255 bytes"),
        (False, "commit", b"x" * 255, 406, "no transaction has the xid 'xxx"),
        (True, "prepare", b"xa:1:AB:", 406, "'xa:1:AB:' is not the name of an xid of the XA standard"),
        (True, "token", b"xa:1", 406, "'xa:1' is not the name of an xid of the XA standard"),
        (True, "commit", b"x", 406, "cannot commit transaction 'x' on a channel that is transactional"),
        (False, "token", b"x", 406, "channel is not transactional"),
        (False, "prepare", b"x", 406, "channel is not transactional"),
        (False, "commit", b"x", 406, "no transaction has the xid 'x'"),
        (False, "rollback", b"x", 406, "no transaction has the xid 'x'"),
        (False, "forget", b"x", 406, "no transaction has the xid 'x'"),
        (True, "forget", b"x", 406, "cannot forget transaction 'x' on a channel that is transactional"),
    ],
)
def test_a_wrong_publish_to_amq_transaction_closes_the_channel_with_its_reason(
    broker: AmqpServed, transactional: bool, verb: str, body: bytes, code: int, text: str
) -> None:
    with closing(connect(broker)) as connection:
        channel = connection.channel()
        if transactional:
            channel.tx_select()
        channel.basic_publish(NAMED, verb, body)
        with pytest.raises(ChannelClosedByBroker) as closed:
            channel.queue_declare("")
        assert (closed.value.reply_code, text in closed.value.reply_text) == (code, True), (
            closed.value.reply_text
        )
        assert connection.channel().queue_declare("").method.message_count == 0


def test_a_transaction_is_named_once_and_its_outcome_is_only_got_without_ack(broker: AmqpServed) -> None:
    with closing(connect(broker)) as connection:
        channel = connection.channel()
        channel.tx_select()
        channel.basic_publish(NAMED, "token", b"a")
        channel.basic_publish(NAMED, "prepare", b"b")
        with pytest.raises(ChannelClosedByBroker, match="is named 'a' already: it cannot be named 'b'"):
            channel.tx_commit()
        with pytest.raises(ChannelClosedByBroker, match="only answers: it has nothing to acknowledge"):
            connection.channel().basic_get(f"{NAMED}.a")


def test_the_longest_name_of_amqp_can_be_asked_for(broker: AmqpServed) -> None:
    with closing(connect(broker)) as connection:
        channel = connection.channel()
        channel.tx_select()
        channel.basic_publish(NAMED, "token", b"x" * 239)
        channel.tx_commit()
        assert outcome(channel, "x" * 239) == "committed"


def test_an_outcome_that_may_be_forgotten_is_answered_unknown_with_the_time_up_to_which(
    tmp_path: Path,
) -> None:
    with serving(tmp_path / "data", "--outcomes", "5") as broker, closing(connect(broker)) as connection:
        began = time.time()
        channel = connection.channel()
        channel.queue_declare("orders", durable=True)
        channel.tx_select()
        for number in range(20):
            publish(channel, "orders", b"a")
            channel.basic_publish(NAMED, "token", f"order-{number}".encode())
            channel.tx_commit()
        assert outcome(channel, "order-19") == "committed"
        for name in ("order-0", "never used"):
            method, properties, body = channel.basic_get(f"{NAMED}.{name}", auto_ack=True)
            assert method and body == b"unknown"
            assert began <= properties.timestamp <= time.time() + 1
        with broker.client() as client:
            with pytest.raises(errors.UnknownOutcome):
                client.committed("order-0")
            assert not client.committed("never used", since=time.time() + 1)
