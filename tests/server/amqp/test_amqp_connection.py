"""One connection and all of them: handshake, time limits, back-pressure both ways, closing, and what the
server does around them.

Violations of the protocol have a module of their own (``test_amqp_violations.py``). Raw sockets here say what
no client would.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pika
import pytest
from pamqp import commands as c
from pamqp import heartbeat

from broker_core import __version__
from broker_core.core.errors import OptionError
from broker_core.launcher import Broker
from broker_core.node.local import LocalBroker
from broker_core.server.alarm import AlarmLimits
from broker_core.server.amqp import ports
from broker_core.server.amqp.options import AmqpOptions
from broker_core.server.amqp.server import AmqpServer
from broker_core.store.memory import MemoryStore
from tests.amqp_in_process import Served, serving
from tests.amqp_peer import HEADER, AnyFrame, Closed, Peer, content, encoded, peer
from tests.make import GatedStore
from tests.progress import wait_until

MiB = 1024 * 1024
LOOPBACK = "127.0.0.1:0"


def unsent_bytes(served: Served) -> int:
    """Of the connection that has most."""
    connections = served.server.connections
    return served.in_loop(
        lambda: max(each._transport.get_write_buffer_size() + each.protocol.out.size for each in connections)
    )


@pytest.fixture
def store() -> GatedStore:
    return GatedStore()


@pytest.fixture
def broker(store: GatedStore) -> Iterator[Served]:
    with serving(store=store) as made:
        yield made


def remaining(connection: Peer, timeout_s: float = 10.0) -> list[tuple[int, AnyFrame]]:
    """What still comes until the broker closes the socket, which it has to do."""
    found = []
    while True:
        try:
            found.append(connection.receive(timeout_s))
        except Closed:
            return found


def blocking(broker: Served, **more: object) -> pika.BlockingConnection:
    return pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", broker.port, **more))


# -- handshake -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "said",
    [b"", b"AMQP\0", HEADER, HEADER + b"\1\0\0\0\0"],
    ids=["nothing", "half a header", "a header", "half a frame"],
)
def test_a_client_that_falls_silent_in_the_handshake_is_closed(said: bytes) -> None:
    with serving(options=AmqpOptions(handshake_timeout_s=0.3)) as broker, Peer(broker.url) as client:
        client.write(said)
        remaining(client)
        wait_until(lambda: not broker.server.connections)


def test_an_open_connection_outlives_the_time_limit_of_the_handshake() -> None:
    with serving(options=AmqpOptions(handshake_timeout_s=0.5)) as broker, peer(broker.url, 1) as client:
        with pytest.raises(TimeoutError):
            client.receive(2.0)
        client.call(1, c.Queue.Declare(queue="q", exclusive=True), c.Queue.DeclareOk)


def test_a_client_of_another_protocol_is_told_which_one_is_spoken_here(broker: Served) -> None:
    with socket.create_connection(("127.0.0.1", broker.port), 10) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while data := client.recv(100):
                received += data
    assert received == HEADER


def test_a_login_by_amqplain_is_taken(broker: Served) -> None:
    with Peer(broker.url) as client:
        client.started()
        client.start_ok("AMQPLAIN", "\x05LOGINS\0\0\0\x05guest\x08PASSWORDS\0\0\0\x05guest")
        assert client.expect(c.Connection.Tune).channel_max == 2047


@pytest.mark.parametrize(("announced", "said"), [(True, True), (False, False)])
def test_a_wrong_password_is_answered_only_to_a_client_that_understands_it(
    broker: Served, announced: bool, said: bool
) -> None:
    with Peer(broker.url) as client:
        client.started()
        client.start_ok("PLAIN", "\0guest\0wrong", {"authentication_failure_close": announced})
        if said:
            close = client.expect(c.Connection.Close)
            assert (close.reply_code, close.class_id, close.method_id) == (403, 0, 0)
            assert close.reply_text == (
                "ACCESS_REFUSED - Login was refused using authentication mechanism PLAIN. For details see "
                "the broker logfile."
            )
            client.send(0, c.Connection.CloseOk())
        remaining(client)


def _address_of_this_host() -> str | None:
    """One that is not loopback; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return None
        address: str = probe.getsockname()[0]
    return None if address.startswith("127.") else address


def _refused(url: str) -> bool:
    with Peer(url) as client:
        client.started()
        client.start_ok()
        frame = client.receive()[1]
        return isinstance(frame, c.Connection.Close) and frame.reply_code == 403


def test_guest_comes_in_from_loopback_only_and_other_users_from_anywhere() -> None:
    address = _address_of_this_host()
    if address is None:
        pytest.skip("this host has no address but loopback")
    with serving(listeners=("0.0.0.0:0",)) as broker:
        assert _refused(f"amqp://guest:guest@{address}:{broker.port}")
        with peer(f"amqp://guest:guest@127.0.0.1:{broker.port}", 1):
            pass
    with serving(listeners=("0.0.0.0:0",), users={"ann": "secret"}) as broker:
        assert _refused(f"amqp://guest:guest@127.0.0.1:{broker.port}")
        with peer(f"amqp://ann:secret@{address}:{broker.port}", 1):
            pass


def test_frames_of_the_negotiated_size_go_both_ways(broker: Served) -> None:
    body = bytes(range(256)) * 100
    with peer(broker.url, 1, frame_max=4096) as client:
        client.call(1, c.Queue.Declare(queue="q", exclusive=True), c.Queue.DeclareOk)
        client.publish(1, "", "q", body)
        found = client.get(1, "q")
        assert found is not None and found[1] == body


@pytest.mark.parametrize(
    "size", [0, 1, 131_064, 131_065, 131_072, 100 * MiB], ids=lambda size: f"{size} bytes"
)
def test_a_body_comes_back_as_it_was_sent(broker: Served, size: int) -> None:
    body = (b"0123456789abcdef" * (size // 16 + 1))[:size]
    with blocking(broker) as connection:
        channel = connection.channel()
        channel.queue_declare("q")
        channel.confirm_delivery()
        channel.basic_publish("", "q", body)
        _, _, found = channel.basic_get("q", auto_ack=True)
        assert found == body


# -- heartbeats ----------------------------------------------------------------------------------------------


def test_a_client_gets_heartbeats_and_one_that_sends_none_is_closed(broker: Served) -> None:
    with peer(broker.url, heartbeat_s=1) as client:
        assert isinstance(client.receive(2.0)[1], heartbeat.Heartbeat)
        started = time.monotonic()
        remaining(client)
        assert time.monotonic() - started < 6


def test_a_client_that_sends_heartbeats_stays(broker: Served) -> None:
    with peer(broker.url, 1, heartbeat_s=2) as client:
        until = time.monotonic() + 6  # a silent one is closed after 4
        while time.monotonic() < until:
            client.send(0, heartbeat.Heartbeat())
            with contextlib.suppress(TimeoutError):
                client.receive(0.3)
        client.send(1, c.Queue.Declare(queue="q", exclusive=True))
        answers = (frame for _, frame in iter(client.receive, None))
        answer = next(frame for frame in answers if not isinstance(frame, heartbeat.Heartbeat))
        assert isinstance(answer, c.Queue.DeclareOk)


# -- half a frame, many connections --------------------------------------------------------------------------


def test_half_a_frame_holds_up_nobody_and_is_taken_when_the_rest_comes(broker: Served) -> None:
    publish = content(1, c.Basic.Publish(routing_key="q"), b"whole")
    with peer(broker.url, 1) as slow, peer(broker.url, 1) as quick:
        slow.call(1, c.Queue.Declare(queue="q"), c.Queue.DeclareOk)
        for cut in range(1, len(publish), 7):
            slow.write(publish[:cut])
            assert quick.get(1, "q") is None
            slow.write(publish[cut:])
            wait_until(lambda: (quick.get(1, "q") or (None, b""))[1] == b"whole")


def test_a_client_that_goes_in_the_middle_of_a_frame_leaves_nothing(broker: Served) -> None:
    with peer(broker.url, 1) as client:
        client.call(1, c.Queue.Declare(queue="q", exclusive=True), c.Queue.DeclareOk)
        client.write(content(1, c.Basic.Publish(routing_key="q"), b"x" * 1000)[:-500])
    wait_until(lambda: not broker.server.connections and "q" not in broker.broker.state.topology.queues)


def test_a_connection_per_message_loses_none_and_leaves_none_open(broker: Served) -> None:
    with blocking(broker) as connection:
        channel = connection.channel()
        channel.queue_declare("q")
        for number in range(100):
            with blocking(broker) as other:
                one = other.channel()
                one.confirm_delivery()
                one.basic_publish("", "q", str(number).encode())
        bodies = [channel.basic_get("q", auto_ack=True)[2] for _ in range(100)]
    assert bodies == [str(number).encode() for number in range(100)]
    wait_until(lambda: not broker.server.connections)


# -- commits and order ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("connections", [1, 32])
def test_all_that_arrives_in_one_tick_is_one_group_commit(
    broker: Served, store: GatedStore, connections: int
) -> None:
    with contextlib.ExitStack() as open_ones:
        peers = [
            open_ones.enter_context(peer(broker.url, *range(1, 32 // connections + 1)))
            for _ in range(connections)
        ]
        channels = [(each, number) for each in peers for number in range(1, 32 // connections + 1)]
        peers[0].call(1, c.Queue.Declare(queue="q", durable=True), c.Queue.DeclareOk)
        for each, number in channels:
            each.call(number, c.Tx.Select(), c.Tx.SelectOk)
        publish = c.Basic.Publish(routing_key="q")
        entered, held = threading.Event(), threading.Event()
        broker.server.loop.call_soon_threadsafe(lambda: (entered.set(), held.wait(600)))
        assert entered.wait(600)
        for each in peers:
            asked = [
                (content(number, publish, b"x", delivery_mode=2), encoded(number, c.Tx.Commit()))
                for other, number in channels
                if other is each
            ]
            each.write(b"".join(part for parts in asked for part in parts))
        before = len(store.groups)
        held.set()
        for each, number in channels:
            assert isinstance(each.expect(c.Tx.CommitOk), c.Tx.CommitOk), number
        assert len(store.groups) == before + 1


def test_everything_asked_for_before_close_is_done_and_answered_in_order(broker: Served) -> None:
    with peer(broker.url, 1, 2) as client:
        client.send(1, c.Queue.Declare(queue="q", exclusive=True), c.Tx.Select())
        for body in (b"1", b"2"):
            client.publish(1, "", "q", body)
            client.send(1, c.Tx.Commit())
        client.send(1, c.Basic.Get(queue="q", no_ack=True), c.Channel.Close(200, "", 0, 0))
        client.send(2, c.Basic.Qos(0, 1, False))
        client.send(0, c.Connection.Close(200, "", 0, 0))
        received = [
            (channel, getattr(frame, "name", type(frame).__name__)) for channel, frame in remaining(client)
        ]
    assert [name for channel, name in received if channel == 1] == [
        "Queue.DeclareOk",
        "Tx.SelectOk",
        "Tx.CommitOk",
        "Tx.CommitOk",
        "Basic.GetOk",
        "ContentHeader",
        "ContentBody",
        "Channel.CloseOk",
    ]
    assert (2, "Basic.QosOk") in received
    assert received[-1] == (0, "Connection.CloseOk")


def test_a_connection_that_is_closed_behind_a_commit_gets_its_commit_ok_first(broker: Served) -> None:
    with peer(broker.url, 1, 2) as client:
        client.call(1, c.Queue.Declare(queue="q"), c.Queue.DeclareOk)
        for channel in (1, 2):
            client.call(channel, c.Tx.Select(), c.Tx.SelectOk)
        work = b"".join(
            content(channel, c.Basic.Publish(routing_key="q"), b"x") + encoded(channel, c.Tx.Commit())
            for channel in (1, 2, 1, 2)
        )
        client.write(work + encoded(0, c.Connection.Close(200, "", 0, 0)))
        names = [frame.name for _, frame in remaining(client)]
    assert names == ["Tx.CommitOk"] * 4 + ["Connection.CloseOk"]


# -- back-pressure -------------------------------------------------------------------------------------------


def test_a_consumer_that_does_not_read_fills_no_memory_holds_up_nobody_and_gets_all_in_order(
    broker: Served,
) -> None:
    count = 64
    with peer(broker.url, 1) as slow, blocking(broker) as connection:
        slow.call(1, c.Queue.Declare(queue="slow"), c.Queue.DeclareOk)
        slow.call(1, c.Basic.Consume(queue="slow", no_ack=True), c.Basic.ConsumeOk)
        channel = connection.channel()
        channel.queue_declare("quick")
        channel.confirm_delivery()
        for number in range(count):
            channel.basic_publish("", "slow", number.to_bytes(4, "big") * (MiB // 4))
            assert unsent_bytes(broker) < ports.HIGH_BYTES + 2 * MiB
            channel.basic_publish("", "quick", b"x")
            assert channel.basic_get("quick", auto_ack=True)[2] == b"x"
        assert channel.queue_declare("slow", passive=True).method.message_count > count // 2
        for number in range(count):
            slow.expect(c.Basic.Deliver)
            assert slow.content(1)[1][:4] == number.to_bytes(4, "big")


def test_a_consumer_that_starts_on_a_connection_that_is_not_read_waits_for_it(broker: Served) -> None:
    with peer(broker.url, 1, 2) as slow, blocking(broker) as connection:
        channel = connection.channel()
        for queue in ("first", "second"):
            channel.queue_declare(queue)
            for _ in range(24):
                channel.basic_publish("", queue, b"x" * MiB)
        wait_until(lambda: channel.queue_declare("second", passive=True).method.message_count == 24)
        slow.send(1, c.Basic.Consume(queue="first", consumer_tag="first", no_ack=True))
        wait_until(lambda: unsent_bytes(broker) > ports.HIGH_BYTES)
        slow.send(2, c.Basic.Consume(queue="second", consumer_tag="second", no_ack=True))
        wait_until(lambda: channel.queue_declare("second", passive=True).method.consumer_count == 1)
        assert unsent_bytes(broker) < ports.HIGH_BYTES + 2 * MiB
        tags = []
        while len(tags) < 48:
            number, frame = slow.receive()
            if isinstance(frame, c.Basic.Deliver):
                tags.append(frame.consumer_tag)
                assert len(slow.content(number)[1]) == MiB
        assert tags.count("first") == tags.count("second") == 24


def test_replies_that_nobody_reads_stop_the_reading_of_commands(broker: Served) -> None:
    count = 64
    with peer(broker.url, 1) as greedy, blocking(broker) as connection:
        channel = connection.channel()
        channel.queue_declare("q")
        channel.confirm_delivery()
        for number in range(count):
            channel.basic_publish("", "q", number.to_bytes(4, "big") * (MiB // 4))
        for _ in range(count):
            greedy.send(1, c.Basic.Get(queue="q", no_ack=True))
        wait_until(lambda: unsent_bytes(broker) > ports.HARD_BYTES)
        assert unsent_bytes(broker) < ports.HARD_BYTES + 3 * MiB
        assert channel.queue_declare("q", passive=True).method.message_count > count // 2
        for number in range(count):
            greedy.expect(c.Basic.GetOk)
            assert greedy.content(1)[1][:4] == number.to_bytes(4, "big")


# -- alarms --------------------------------------------------------------------------------------------------


def test_publishers_are_blocked_while_memory_is_low_and_consumers_are_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with serving(options=AmqpOptions(alarms=AlarmLimits(memory_bytes=8 * MiB))) as broker:
        with peer(broker.url, 1) as publisher, peer(broker.url, 1) as consumer:
            consumer.call(1, c.Queue.Declare(queue="q"), c.Queue.DeclareOk)
            for _ in range(12):
                publisher.publish(1, "", "q", b"x" * MiB)
            wait_until(lambda: bool(broker.server.shortages.reason))
            assert (
                publisher.call(1, c.Queue.Declare(queue="q", passive=True), c.Queue.DeclareOk).message_count
                == 12
            )
            publisher.publish(1, "", "q", b"last")
            assert publisher.expect(c.Connection.Blocked, 0).reason == "low on memory"
            publisher.send(1, c.Queue.Declare(queue="q", passive=True))
            with pytest.raises(TimeoutError):
                publisher.receive(1.0)
            assert consumer.call(1, c.Queue.Purge(queue="q"), c.Queue.PurgeOk).message_count == 13
            publisher.expect(c.Connection.Unblocked, 0)
            assert publisher.expect(c.Queue.DeclareOk, 1).message_count == 0
    waiting, going_on = (text for text in caplog.messages if text.startswith("publishers "))
    assert re.fullmatch(
        r"publishers have to wait: low on memory \(\d+\.\d MiB of messages and records in memory, the limit is 8\.0\)",
        waiting,
    )
    assert going_on == "publishers may continue"


def test_a_publisher_that_does_not_understand_blocked_only_waits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(
        options=AmqpOptions(alarms=AlarmLimits(disk_free_bytes=1 << 62)), directory=str(tmp_path)
    ) as broker:
        wait_until(lambda: broker.server.shortages.reason == "low on disk")
        assert f"MiB free on the disk of {tmp_path}, the limit is " in caplog.text
        with Peer(broker.url) as client:
            client.started()
            client.start_ok(capabilities={})
            client.expect(c.Connection.Tune)
            client.send(0, c.Connection.TuneOk(2047, 131_072, 1))
            client.call(0, c.Connection.Open("/"), c.Connection.OpenOk)
            client.open(1)
            client.publish(1, "", "nowhere", b"x")
            client.send(1, c.Basic.Qos(0, 1, False))
            deadline = time.monotonic() + 4  # also: who is not read is not closed for its missing heartbeats
            while time.monotonic() < deadline:
                assert isinstance(client.receive(4)[1], heartbeat.Heartbeat)


# -- channels and closing ------------------------------------------------------------------------------------


def test_exclusive_queues_are_gone_when_close_is_answered(broker: Served) -> None:
    with peer(broker.url, 1) as other:
        for _ in range(20):
            with peer(broker.url, 1) as owner:
                owner.call(1, c.Queue.Declare(queue="mine", exclusive=True), c.Queue.DeclareOk)
                owner.end()
            other.send(1, c.Queue.Declare(queue="mine", passive=True))
            assert other.expect(c.Channel.Close, 1).reply_code == 404
            other.send(1, c.Channel.CloseOk())
            other.open(1)


def test_deliveries_of_a_lost_connection_come_again_and_its_transaction_is_rolled_back(
    broker: Served,
) -> None:
    with peer(broker.url, 1) as heir:
        heir.call(1, c.Queue.Declare(queue="q"), c.Queue.DeclareOk)
        heir.publish(1, "", "q", b"held")
        with peer(broker.url, 1) as lost:
            lost.call(1, c.Tx.Select(), c.Tx.SelectOk)
            assert lost.get(1, "q", no_ack=False) is not None
            lost.publish(1, "", "q", b"rolled back")
            lost.call(1, c.Basic.Qos(0, 1, False), c.Basic.QosOk)
        wait_until(
            lambda: (
                heir.call(1, c.Queue.Declare(queue="q", passive=True), c.Queue.DeclareOk).message_count == 1
            )
        )
        found = heir.get(1, "q")
        assert found is not None and found[0].redelivered and found[1] == b"held"
        assert heir.get(1, "q") is None


def test_a_channel_that_the_broker_closed_drops_everything_until_close_ok_and_its_number_is_free_then(
    broker: Served,
) -> None:
    with peer(broker.url, 1, 2) as client:
        client.call(2, c.Queue.Declare(queue="q", exclusive=True), c.Queue.DeclareOk)
        client.send(1, c.Basic.Ack(7))
        close = client.expect(c.Channel.Close, 1)
        assert (close.reply_code, close.reply_text) == (406, "PRECONDITION_FAILED - unknown delivery tag 7")
        client.publish(1, "", "q", b"dropped")
        client.send(1, c.Channel.CloseOk())
        client.open(1)
        client.publish(1, "", "q", b"taken")
        client.call(1, c.Basic.Qos(0, 1, False), c.Basic.QosOk)
        found = client.get(1, "q")
        assert found is not None and found[1] == b"taken"


def test_a_content_that_a_client_breaks_off_because_its_channel_was_closed_does_no_harm(
    broker: Served,
) -> None:
    with peer(broker.url, 1) as client:
        half = content(1, c.Basic.Publish(routing_key="q"), b"x" * 100)
        client.write(encoded(1, c.Basic.Ack(7)) + half[: len(half) - 108])
        client.expect(c.Channel.Close, 1)
        client.send(1, c.Channel.CloseOk())
        client.open(1)


def test_a_client_may_close_the_connection_without_answering_for_a_channel(broker: Served) -> None:
    with peer(broker.url, 1, 2) as client:
        client.send(1, c.Basic.Ack(7))
        client.expect(c.Channel.Close, 1)
        client.call(0, c.Connection.Close(200, "", 0, 0), c.Connection.CloseOk)
        remaining(client)


def test_a_close_that_crosses_the_brokers_own_is_answered(broker: Served) -> None:
    with peer(broker.url, 1) as client:
        client.send(1, c.Queue.Declare(queue="missing", passive=True), c.Channel.Close(200, "", 0, 0))
        assert client.expect(c.Channel.Close, 1).reply_code == 404
        client.expect(c.Channel.CloseOk, 1)
        client.send(1, c.Channel.CloseOk())
        client.open(1)


def test_more_channels_than_negotiated_are_refused(broker: Served) -> None:
    with peer(broker.url, 1, 2, channel_max=2) as client:
        client.send(1, c.Channel.Close(200, "", 0, 0))
        client.expect(c.Channel.CloseOk, 1)
        client.open(7)
        client.send(3, c.Channel.Open())
        close = client.expect(c.Connection.Close, 0)
        assert (close.reply_code, close.reply_text) == (
            530,
            "NOT_ALLOWED - number of channels opened (2) has reached the negotiated channel_max (2)",
        )


def test_a_client_that_broke_the_protocol_and_answers_close_is_let_go_at_once() -> None:
    def overheard() -> list[bytes]:
        listeners = [each.protocol._listener for each in broker.server.connections]
        return [each._recent[-5:] for each in listeners if each is not None]

    with serving(options=AmqpOptions(close_timeout_s=60)) as broker, peer(broker.url, 1) as client:
        client.write(b"\xff" * 100)
        assert client.expect(c.Connection.Close, 0).reply_code == 501
        answer = encoded(0, c.Connection.CloseOk())
        client.write(b"\0" * 50 + answer[:5])
        wait_until(lambda: broker.in_loop(overheard) == [answer[:5]])
        client.write(answer[5:])
        remaining(client)


def test_a_client_that_never_answers_close_is_cut_off() -> None:
    with serving(options=AmqpOptions(close_timeout_s=0.3)) as broker, peer(broker.url, 1) as client:
        client.send(1, c.Channel.Open())
        assert client.expect(c.Connection.Close, 0).reply_code == 504
        remaining(client)


# -- the server ----------------------------------------------------------------------------------------------


def test_stop_says_why_to_every_client_and_frees_the_port() -> None:
    with serving() as broker, peer(broker.url, 1) as answering, peer(broker.url, 1) as silent:
        port = broker.port
        stopping = threading.Thread(target=broker.server.stop)
        stopping.start()
        close = answering.expect(c.Connection.Close, 0)
        assert (close.reply_code, close.reply_text) == (320, "CONNECTION_FORCED - broker is shutting down")
        answering.send(0, c.Connection.CloseOk())
        remaining(answering)
        remaining(silent)
        stopping.join(600)
        assert not stopping.is_alive()
    with serving(listeners=(f"127.0.0.1:{port}",)) as again, peer(again.url, 1):
        pass


def test_stop_commits_what_clients_had_published(tmp_path: Path) -> None:
    with Broker.open(tmp_path / "data", amqp=[LOOPBACK]) as broker, peer(broker.amqp_urls[0], 1) as client:
        client.call(1, c.Queue.Declare(queue="q", durable=True), c.Queue.DeclareOk)
        for number in range(500):
            client.publish(1, "", "q", str(number).encode(), delivery_mode=2)
        client.call(1, c.Basic.Qos(0, 1, False), c.Basic.QosOk)  # so all before it has arrived
        broker.close()
    with Broker.open(tmp_path / "data") as broker:
        assert {queue.name: queue.messages for queue in broker.queues()} == {"q": 500}


@pytest.mark.parametrize(
    "text",
    ["", "5672", "localhost", ":5672", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:65536", "::1:5672", "[::1]"],
)
def test_an_address_that_is_none_is_refused_with_what_to_write(text: str) -> None:
    broker = LocalBroker(MemoryStore())
    with contextlib.closing(broker), pytest.raises(OptionError, match="must be HOST:PORT"):
        AmqpServer(broker, [text])


def test_an_address_that_is_taken_is_named_and_nothing_stays_open() -> None:
    before = threading.enumerate()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        broker = LocalBroker(MemoryStore())
        server = AmqpServer(broker, [LOOPBACK, address])
        with contextlib.closing(broker), pytest.raises(OptionError, match=f"cannot listen on {address}"):
            server.start()
        assert [
            each for each in threading.enumerate() if each.name == "txmq-amqp" and each not in before
        ] == []


def test_it_listens_on_several_addresses_ipv6_too() -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("this host has no IPv6")
    with serving(listeners=(LOOPBACK, "[::1]:0")) as broker:
        assert [address.rpartition(":")[0] for address in broker.server.addresses] == ["127.0.0.1", "[::1]"]
        for address in broker.server.addresses:
            with peer(f"amqp://guest:guest@{address}", 1):
                pass


def test_idle_time_counts_from_the_last_connection() -> None:
    with serving() as broker:
        with peer(broker.url):
            assert broker.server.idle_s() == 0
        wait_until(lambda: 0 < broker.server.idle_s() < 5)


def test_a_user_sees_what_the_broker_is(broker: Served) -> None:
    with blocking(broker) as connection:
        properties = connection._impl.server_properties
        assert (properties["product"], properties["version"]) == ("txmq", __version__)
        assert connection.publisher_confirms_supported and connection.consumer_cancel_notify_supported
        assert connection.basic_nack_supported and connection.exchange_exchange_bindings_supported
