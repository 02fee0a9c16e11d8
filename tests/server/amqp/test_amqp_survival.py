"""Clients that stop, flood, come in thousands or send very large and very small bodies: the broker serves all
others meanwhile.

Real sockets and a real broker process. Violations of the protocol are in ``test_amqp_violations``, kills in
``tests/crash``.
"""

from __future__ import annotations

import contextlib
import random
import resource
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from pamqp import commands, header, heartbeat

from tests.amqp_peer import HEADER, Closed, Peer, changed, content, encoded, peer
from tests.amqp_server import AmqpServed, serving
from tests.progress import wait_until

C, H, Q, B, T = commands.Connection, commands.Channel, commands.Queue, commands.Basic, commands.Tx
MiB = 1024 * 1024
IDLE = 2_000


@pytest.fixture
def served(tmp_path: Path) -> Iterator[AmqpServed]:
    with serving(tmp_path / "data") as broker:
        yield broker


def round_trip(client: Peer, queue: str) -> float:
    """Seconds that a publish and the get of it take."""
    began = time.perf_counter()
    client.publish(1, "", queue, b"ping")
    found = client.get(1, queue)
    assert found is not None and found[1] == b"ping"
    return time.perf_counter() - began


def median_round_trip_s(client: Peer, queue: str) -> float:
    return statistics.median(round_trip(client, queue) for _ in range(50))


@contextlib.contextmanager
def witness(served: AmqpServed) -> Iterator[Peer]:
    """A client that only wants to be served."""
    with peer(served.amqp_url, 1) as client:
        client.call(1, Q.Declare(queue="witness", exclusive=True), Q.DeclareOk)
        yield client
        client.end()


PUBLISH = content(1, B.Publish(routing_key="half"), b"x" * 100)


def refusal(client: Peer, queue: str) -> int:
    """The code of the error for who looks for a queue of nobody."""
    client.send(1, Q.Declare(queue=queue, passive=True))
    code: int = client.expect(H.Close).reply_code
    client.send(1, H.CloseOk())
    client.open(1)
    return code


def test_half_a_frame_then_silence_is_ended_by_the_heartbeat_and_others_are_served(
    served: AmqpServed,
) -> None:
    with witness(served) as other, contextlib.ExitStack() as stack:
        silent = {}
        for sent in (0, 3, 7, 12, len(PUBLISH) - 1):
            client = silent[sent] = stack.enter_context(Peer(served.amqp_url)).opened(1, heartbeat_s=1)
            client.call(1, Q.Declare(queue=f"half.{sent}", exclusive=True), Q.DeclareOk)
        began = time.monotonic()
        for sent, client in silent.items():
            client.write(PUBLISH[:sent])
        for sent, client in silent.items():
            with contextlib.suppress(Closed):
                while time.monotonic() - began < 20:
                    assert isinstance(client.receive(5)[1], heartbeat.Heartbeat)
                    round_trip(other, "witness")
            assert 1.5 < time.monotonic() - began < 10, f"{sent} bytes sent"
            wait_until(lambda sent=sent: refusal(other, f"half.{sent}") == 404)  # a moment after its socket


@pytest.mark.soak  # test_amqp_connection.py has it with a shorter time
def test_handshake_that_stops_is_ended_in_time(served: AmqpServed) -> None:
    with witness(served) as other, contextlib.ExitStack() as stack:
        began = time.monotonic()
        stuck = [
            stack.enter_context(socket.create_connection((served.host, served.port), 30)) for _ in range(3)
        ]
        for connection, sent in zip(stuck, [b"", HEADER[:5], HEADER], strict=True):
            connection.sendall(sent)
        round_trip(other, "witness")
        for connection in stuck:
            while connection.recv(4096):
                pass
            assert 5 < time.monotonic() - began < 60


@contextlib.contextmanager
def open_files(count: int) -> Iterator[None]:
    """So many files may be open, here and in the broker that is started then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count:
        pytest.skip(f"needs {count} open files, but the hard limit is {hard} (ulimit -Hn)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_2000_idle_connections_cost_little_and_slow_nobody(tmp_path: Path) -> None:
    with (
        open_files(IDLE + 500),
        serving(tmp_path / "data") as served,
        witness(served) as other,
        contextlib.ExitStack() as idle,
    ):
        before_bytes, before_s = served.memory_bytes(), median_round_trip_s(other, "witness")
        for number in range(IDLE):
            client = idle.enter_context(Peer(served.amqp_url)).opened(1)
            if number % 2:
                client.call(1, Q.Declare(queue="", exclusive=True), Q.DeclareOk)
        each_bytes = (served.memory_bytes() - before_bytes) / IDLE
        assert each_bytes < 64 * 1024, f"{each_bytes:.0f} bytes per idle connection"
        with_idle_s = median_round_trip_s(other, "witness")
        assert with_idle_s < 5 * before_s + 0.02, (
            f"{with_idle_s * 1000:.1f} ms, {before_s * 1000:.1f} ms without them"
        )
        idle.close()
        broker = psutil.Process(served.pid)
        wait_until(lambda: len(broker.net_connections()) < 20)
        assert median_round_trip_s(other, "witness") < 5 * before_s + 0.02


def test_connection_per_message_leaves_nothing_behind_but_the_messages(served: AmqpServed) -> None:
    connections = 1_000
    choice = random.Random(1)
    broker = psutil.Process(served.pid)
    with witness(served) as other:
        other.call(1, Q.Declare(queue="each", durable=True), Q.DeclareOk)
        files = memory_bytes = 0
        for number in range(connections):
            with peer(served.amqp_url, 1) as client:
                client.publish(1, "", "each", b"%d" % number, delivery_mode=2)
                if choice.random() < 0.5:
                    client.end()
                else:
                    client.count(1, "each")  # the publish has arrived; then it is gone without a word
            if number == 200:
                files, memory_bytes = broker.num_fds(), served.memory_bytes()
        wait_until(lambda: broker.num_fds() <= files + 10)
        assert served.memory_bytes() - memory_bytes < 20 * MiB
        assert [body for _, body in other.drain(1, "each")] == [
            b"%d" % number for number in range(connections)
        ]


FRAME_MAX = 131_072
SIZES = [0, 1, FRAME_MAX - 8, FRAME_MAX - 7, 2 * (FRAME_MAX - 8), 100 * MiB]


@pytest.mark.product
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("delivery_mode", [1, 2, None])  # None: persistent
def test_body_of_this_size_comes_back_as_it_was(
    served: AmqpServed, size: int, delivery_mode: int | None
) -> None:
    body = (bytes(range(256)) * (size // 256 + 1))[:size]
    with witness(served) as other, peer(served.amqp_url, 1) as client:
        client.call(1, Q.Declare(queue="body", durable=True), Q.DeclareOk)
        client.publish(1, "", "body", body, delivery_mode=delivery_mode)
        found = client.get(1, "body", no_ack=False)  # as get-ok
        assert found is not None and found[1] == body
        client.send(1, B.Reject(found[0].delivery_tag, True))
        client.call(1, B.Consume(queue="body", consumer_tag="tag"), B.ConsumeOk)
        deliver = client.expect(B.Deliver)  # as deliver
        assert deliver.redelivered
        assert client.content(1)[1] == body
        client.call(1, T.Select(), T.SelectOk)
        client.publish(1, "", "body", body, delivery_mode=delivery_mode)
        client.send(1, B.Ack(deliver.delivery_tag))
        client.call(1, T.Commit(), T.CommitOk)  # and in a transaction
        again = client.expect(B.Deliver)
        assert not again.redelivered
        assert client.content(1)[1] == body
        round_trip(other, "witness")
        client.end()
    served.restart()
    with peer(served.amqp_url, 1) as client:
        assert client.drain(1, "body") == ([] if delivery_mode == 1 else [(True, body)])
        client.end()


@pytest.mark.parametrize("frame_max", [4096, 8192])
def test_content_is_cut_into_frames_of_the_size_that_was_agreed_on(
    served: AmqpServed, frame_max: int
) -> None:
    body = bytes(range(256)) * 256
    with peer(served.amqp_url, 1, frame_max=frame_max) as client:
        client.call(1, Q.Declare(queue="cut", exclusive=True), Q.DeclareOk)
        client.publish(1, "", "cut", body)
        client.send(1, B.Get(queue="cut", no_ack=True))
        client.expect(B.GetOk)
        head = client.receive()[1]
        assert isinstance(head, header.ContentHeader) and head.body_size == len(body)
        parts = []
        while sum(map(len, parts)) < len(body):
            parts.append(client.receive()[1].value)
        assert b"".join(parts) == body
        assert {len(part) for part in parts[:-1]} == {frame_max - 8}
        client.end()


@pytest.mark.parametrize("no_ack", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
def test_properties_that_do_not_fit_a_frame_close_the_channel_and_stay_for_others(
    served: AmqpServed, no_ack: bool, batch: int
) -> None:
    """The client agreed on frames of 4096 bytes, and the specification (4.2.3) forbids larger ones."""
    large = {"h": "x" * 5_000}
    with peer(served.amqp_url, 1) as client, peer(served.amqp_url, 1, frame_max=4096) as small:
        client.call(1, Q.Declare(queue="in", durable=True), Q.DeclareOk)
        for number, headers in enumerate([{}] * batch + [large, {}]):
            client.publish(1, "", "in", b"%d" % number, delivery_mode=2, headers=headers)
        small.send(1, B.Consume(queue="in", consumer_tag="c", no_ack=no_ack))
        small.expect(B.ConsumeOk)
        for _ in range(batch):
            small.expect(B.Deliver)
            small.content()
        closed = small.expect(H.Close)
        assert (closed.reply_code, closed.class_id) == (406, 0)
        assert "need a frame of 50" in closed.reply_text and "frame_max" in closed.reply_text
        small.send(1, H.CloseOk())
        small.end()
        wait_until(lambda: client.count(1, "in") == (2 if no_ack else batch + 2))
        found = [body for _, body in client.drain(1, "in")]
        assert found == [b"%d" % number for number in range(batch if no_ack else 0, batch + 2)]
        client.end()


@pytest.mark.parametrize("no_ack", [False, True])
def test_a_get_of_properties_that_do_not_fit_a_frame_closes_the_channel(
    served: AmqpServed, no_ack: bool
) -> None:
    with peer(served.amqp_url, 1) as client, peer(served.amqp_url, 1, frame_max=4096) as small:
        client.call(1, Q.Declare(queue="in", durable=True), Q.DeclareOk)
        client.publish(1, "", "in", b"large", delivery_mode=2, headers={"h": "x" * 5_000})
        wait_until(lambda: client.count(1, "in") == 1)
        small.send(1, B.Get(queue="in", no_ack=no_ack))
        closed = small.expect(H.Close)
        assert (closed.reply_code, closed.class_id, closed.method_id) == (406, 60, 70)
        small.send(1, H.CloseOk())
        small.end()
        wait_until(lambda: client.count(1, "in") == 1)
        assert [body for _, body in client.drain(1, "in")] == [b"large"]
        client.end()


def test_a_consumer_with_larger_frames_gets_what_does_not_fit_those_of_another(served: AmqpServed) -> None:
    with peer(served.amqp_url, 1, frame_max=4096) as small, peer(served.amqp_url, 1) as large:
        large.call(1, Q.Declare(queue="shared"), Q.DeclareOk)
        for client in (small, large):
            client.call(1, B.Consume(queue="shared", no_ack=True), B.ConsumeOk)
        with peer(served.amqp_url, 1) as publisher:
            for number in range(4):
                publisher.publish(1, "", "shared", b"%d" % number, headers={"h": "x" * 5_000})
            publisher.end()
        bodies = set()
        for _ in range(4):
            large.expect(B.Deliver)
            bodies.add(large.content()[1])
        assert bodies == {b"0", b"1", b"2", b"3"}
        small.expect(H.Close)
        small.send(1, H.CloseOk())
        small.end()
        large.end()


def test_slow_consumer_and_an_unbounded_publisher_do_not_fill_the_brokers_memory(served: AmqpServed) -> None:
    """300 MB of persistent messages pass a consumer that does not read: they wait on the disk, and then all
    come in order.
    """
    size, messages = 10_000, 30_000
    with witness(served) as other, Peer(served.amqp_url) as slow, peer(served.amqp_url, 1) as client:
        slow.opened(1)
        slow.call(1, Q.Declare(queue="slow", durable=True), Q.DeclareOk)
        slow.call(1, B.Consume(queue="slow", no_ack=True), B.ConsumeOk)
        before_bytes = served.memory_bytes()
        most_bytes = 0
        block = 500
        padding = bytes(size - 8)
        for first in range(0, messages, block):
            numbers = range(first, first + block)
            publish = B.Publish(routing_key="slow")
            client.write(
                b"".join(
                    content(1, publish, b"%08d" % number + padding, delivery_mode=2) for number in numbers
                )
            )
            most_bytes = max(most_bytes, served.memory_bytes())
            round_trip(other, "witness")
        client.count(1, "slow")  # the last publish has arrived
        most_bytes = max(most_bytes, served.memory_bytes())
        assert most_bytes - before_bytes < 150 * MiB, (
            f"the broker grew by {(most_bytes - before_bytes) // MiB} MiB"
        )
        for number in range(messages):
            slow.expect(B.Deliver)
            assert slow.content(1)[1][:8] == b"%08d" % number
        most_bytes = max(most_bytes, served.memory_bytes())
        assert most_bytes - before_bytes < 150 * MiB, (
            f"the broker grew by {(most_bytes - before_bytes) // MiB} MiB"
        )
        client.end()


def test_consumer_that_stops_reading_stops_no_other_consumer_of_its_queue(served: AmqpServed) -> None:
    with Peer(served.amqp_url) as stuck, peer(served.amqp_url, 1) as client:
        stuck.opened(1)
        stuck.call(1, Q.Declare(queue="shared", durable=True), Q.DeclareOk)
        stuck.call(1, B.Consume(queue="shared", consumer_tag="stuck"), B.ConsumeOk)
        messages, size = 4_000, 20_000
        client.call(1, B.Consume(queue="shared", consumer_tag="reads", no_ack=True), B.ConsumeOk)
        publish = B.Publish(routing_key="shared")
        seen = set()
        for first in range(0, messages, 100):
            numbers = range(first, first + 100)
            client.write(b"".join(content(1, publish, b"%08d" % number + bytes(size)) for number in numbers))
            client.send(1, Q.Declare(queue="shared", passive=True))
            while isinstance(frame := client.receive()[1], B.Deliver):
                seen.add(int(client.content(1)[1][:8]))
            assert isinstance(frame, Q.DeclareOk)
        stuck.abort()  # what it held goes back
        while len(seen) < messages:
            client.expect(B.Deliver)
            seen.add(int(client.content(1)[1][:8]))
        client.end()


def test_publisher_that_reads_nothing_back_is_held_and_not_buffered_for(served: AmqpServed) -> None:
    """Confirms and returns that nobody reads: the broker stops reading from that client, and its memory
    stays.
    """
    with witness(served) as other, Peer(served.amqp_url, timeout_s=3) as deaf:
        deaf.opened(1)
        deaf.call(1, commands.Confirm.Select(), commands.Confirm.SelectOk)
        before_bytes = served.memory_bytes()
        publish = B.Publish(routing_key="nowhere", mandatory=True)
        block = content(1, publish, bytes(50_000)) * 100
        with contextlib.suppress(TimeoutError):
            for _ in range(200):  # 1 GB, and as much would come back
                deaf.write(block)
                round_trip(other, "witness")
        # most of it is what malloc does not give back: the broker holds less than 20 MB
        assert served.memory_bytes() - before_bytes < 200 * MiB
        round_trip(other, "witness")


@pytest.mark.parametrize("delivery_mode", [1, 2])
def test_messages_that_are_consumed_leave_no_memory_behind(served: AmqpServed, delivery_mode: int) -> None:
    """400 MB pass a queue a hundred messages at a time."""
    with peer(served.amqp_url, 1) as client:
        client.call(1, Q.Declare(queue="passed", durable=True), Q.DeclareOk)
        client.call(1, B.Consume(queue="passed", no_ack=True), B.ConsumeOk)
        block = content(1, B.Publish(routing_key="passed"), bytes(40_000), delivery_mode=delivery_mode) * 100
        before_bytes = 0
        for number in range(120):
            if number == 20:
                before_bytes = served.memory_bytes()
            client.write(block)
            for _ in range(100):
                client.expect(B.Deliver)
                client.content(1)
        assert served.memory_bytes() - before_bytes < 64 * MiB
        client.end()


@pytest.mark.slow
def test_transient_flood_is_stopped_by_connection_blocked_and_goes_on_once_it_is_read(
    served: AmqpServed,
) -> None:
    if psutil.virtual_memory().available < 4096 * MiB:
        pytest.skip(
            "needs 4 GiB of free memory: the broker takes 1 GiB of transient messages before it "
            "stops a publisher"
        )
    # more than it takes: it looks twice a second, and a fast machine sends 0.5 GiB meanwhile
    size, messages, block = 40_000, 48_000, 100
    with Peer(served.amqp_url) as flood, peer(served.amqp_url, 1) as reader:
        flood.opened(1)
        flood.call(1, Q.Declare(queue="flood"), Q.DeclareOk)
        sent: list[int] = []
        blocked = threading.Event()

        def publish() -> None:
            for first in range(0, messages, block):
                if blocked.is_set():
                    break
                numbers = range(first, first + block)
                bodies = [b"%08d" % number + bytes(size - 8) for number in numbers]
                flood.write(
                    b"".join(
                        content(1, B.Publish(routing_key="flood"), body, delivery_mode=1) for body in bodies
                    )
                )
                sent.append(block)
            flood.publish(1, "", "flood", b"the end", delivery_mode=1)

        flooding = threading.Thread(target=publish)
        flooding.start()
        try:
            assert "memory" in flood.expect(C.Blocked, 0).reason
            assert sum(sent) < messages
            blocked.set()
            assert served.memory_bytes() < 2048 * MiB
            reader.call(1, B.Consume(queue="flood", no_ack=True), B.ConsumeOk)
            read: list[bytes] = []
            while not read or read[-1] != b"the end":
                reader.expect(B.Deliver)
                read.append(reader.content(1)[1][:8])
            assert read[:-1] == [b"%08d" % number for number in range(sum(sent))]
            flood.expect(C.Unblocked, 0)
        finally:
            flooding.join()
        assert served.memory_bytes() < 2048 * MiB
        reader.end()
        flood.end()


@pytest.mark.parametrize("ended_by", ["queue.delete", "connection.close", "the end of the socket"])
def test_queue_deleted_together_with_messages_for_it_stops_nobody(served: AmqpServed, ended_by: str) -> None:
    """Publishes and what deletes their queue come in one piece, so that one group commit takes both."""
    arguments = {"x-max-priority": 5, "x-message-ttl": 60_000}
    ends = {
        "queue.delete": encoded(1, changed(Q.Delete(queue="x"), queue="")),
        "connection.close": encoded(0, C.Close(200, "bye", 0, 0)),
    }
    with witness(served) as other:
        for number in range(100):
            queue = f"short.{number}"
            publish = b"".join(
                content(1, B.Publish(routing_key=queue), b"x", priority=priority) for priority in range(5)
            )
            with peer(served.amqp_url, 1) as client:
                declare = encoded(1, Q.Declare(queue=queue, exclusive=True, arguments=arguments))
                # so that the end comes a little later
                between = encoded(1, Q.Declare(queue=queue, passive=True)) * (number % 5)
                client.write(declare + between + publish + ends.get(ended_by, b""))
                client.shutdown()
                with contextlib.suppress(Closed):
                    while True:
                        client.receive()
            round_trip(other, "witness")
