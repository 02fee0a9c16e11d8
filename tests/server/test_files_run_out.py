"""What runs out comes back: files, memory and threads that the broker does not get for a while (I10).

Each call fails with a clear error or waits, and everything goes on afterwards: publishes, commits, consumers,
expiry, leases, the ends of sessions and seals. What was answered is there, and what was refused is not, also
after a restart.
"""

from __future__ import annotations

import contextlib
import errno
import http.client
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pamqp import commands

from bench.ports import free_ports
from broker_core.client import channel as client_channel
from broker_core.client.broker import BrokerClient
from broker_core.core import endpoint, errors, failpoint
from broker_core.launcher import Broker
from broker_core.message.properties import Properties
from broker_core.node import upkeep
from broker_core.server.flight import channels
from broker_core.server.listener_options import ListenerOptions
from broker_core.server.options import ServeOptions
from broker_core.store.durable import DurableStore
from tests.amqp_peer import Closed, Peer
from tests.amqp_server import AmqpServed, serving
from tests.progress import wait_until
from tests.refused_calls import PASSING, RefusedCalls
from tests.server.http.http_client import Api

B, H, C, Q = commands.Basic, commands.Channel, commands.Confirm, commands.Queue
SIZE = 1_500
LONG = 600  # messages that are on the disk, and not in the cache
ENOUGH_S = 120.0
PUBLISH = "/api/exchanges/%2F/amq.default/publish"
FAILED = (
    *(errors.TxmqError, AssertionError, Closed, OSError, RuntimeError, TimeoutError),
    http.client.HTTPException,
)


def eventually(condition: Callable[[], bool], what: str, timeout_s: float = ENOUGH_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not yet: {what}")
        time.sleep(0.02)


def _options() -> ServeOptions:
    return ServeOptions(amqp=["127.0.0.1:0"], listeners=ListenerOptions(http=["127.0.0.1:0"]))


class Rig:
    """A broker in this process, and everything that it does for clients. ``answered`` and ``refused``: bodies."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.answered: set[bytes] = set()
        self.refused: set[bytes] = set()
        self._number = 0
        self.patience_s = ENOUGH_S  # of one step

    def open(self) -> Rig:
        store = DurableStore(self.directory, cache_bytes=50_000, roll_bytes=400_000)
        self.broker = Broker(store, str(self.directory), _options())
        return self

    def fill(self) -> None:
        limited = {
            "x-queue-type": "quorum",
            "x-delivery-limit": 0,
            "x-dead-letter-exchange": "",
            "x-dead-letter-routing-key": "dead",
        }
        old = {"x-message-ttl": 1, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}
        with self.broker.channel() as channel:
            for name in ("in", "dead", "long"):
                channel.queue_declare(name)
            channel.queue_declare("limited", arguments=limited)
            channel.queue_declare("old", arguments=old)
            channel.tx_select()
            for name in ("limited", "long"):
                for number in range(LONG):
                    channel.publish(b"%06d" % number + b"." * SIZE, routing_key=name)
                channel.tx_commit()

    def body(self) -> bytes:
        self._number += 1
        return b"%06d" % self._number

    @contextlib.contextmanager
    def deciding(self, body: bytes) -> Iterator[None]:
        """What the block publishes is answered if it ends, and refused if the broker says so."""
        try:
            yield
        except errors.ResourceShortage:
            self.refused.add(body)
            raise
        self.answered.add(body)

    # -- what goes on ----------------------------------------------------------------------------------------
    def publish(self) -> None:
        body = self.body()
        with Peer(self.broker.amqp_urls[0], self.patience_s).opened(1) as peer:
            peer.call(1, C.Select(), C.SelectOk)
            peer.publish(1, "", "in", body, delivery_mode=2)
            answer = peer.receive()[1]
            (self.answered if isinstance(answer, B.Ack) else self.refused).add(body)
            assert isinstance(answer, B.Ack), answer

    def commit(self) -> None:
        """Large, so that it needs a new segment."""
        body = self.body()
        channel = self.broker.channel()
        channel.tx_select()
        with self.deciding(body):
            for number in range(4):
                channel.publish(body + (b"" if number == 0 else os.urandom(200_000)), routing_key="in")
            channel.tx_commit()

    def call(self) -> None:
        body = self.body()
        with BrokerClient(self.broker.url) as client, self.deciding(body):
            client.channel().publish(body, routing_key="in")

    def ask(self) -> None:
        """Over HTTP: publishes, and looks at what there is."""
        body = self.body()
        message = {"properties": {"delivery_mode": 2}, "routing_key": "in", "payload_encoding": "string"}
        api = Api(self.broker.http_urls[0], timeout_s=self.patience_s)
        with contextlib.closing(api):
            answer = api.ask("POST", PUBLISH, {**message, "payload": body.decode()})
            (self.answered if answer.status == 200 else self.refused).add(body)
            assert (answer.status, answer.body) == (200, {"routed": True}), answer
            for path in ("/api/queues", "/api/txmq/store", "/api/txmq/history/%2F", "/metrics"):
                api.get(path)

    def consume(self) -> None:
        """From a queue on the disk."""
        with Peer(self.broker.amqp_urls[0], self.patience_s).opened(1) as peer:
            peer.call(1, B.Qos(prefetch_count=20), B.QosOk)
            peer.call(1, B.Consume(queue="long", consumer_tag="c"), B.ConsumeOk)
            for _ in range(20):
                peer.expect(B.Deliver)
                peer.content()
            peer.end()

    def get(self) -> None:
        with self.broker.channel() as channel:
            assert channel.get("long") is not None

    def expire(self) -> None:
        with self.broker.channel() as channel:
            channel.tx_select()
            for _ in range(30):
                channel.publish(
                    b"old" + b"." * SIZE, routing_key="old", properties=Properties(delivery_mode=2)
                )
            channel.tx_commit()
        eventually(lambda: self.count("old") == 0, "messages expire", self.patience_s)

    def lease(self) -> None:
        """Of a client that is silent: its delivery is dead-lettered, which reads the disk."""
        client = BrokerClient(self.broker.url)
        assert client.channel().get("limited") is not None
        self.read_others()
        client.close()
        eventually(lambda: self.held("limited") == 0, "the lease ends", self.patience_s)

    def session(self) -> None:
        with Peer(self.broker.amqp_urls[0], self.patience_s).opened(1) as peer:
            peer.call(1, Q.Declare(queue=f"mine.{self._number}", exclusive=True), Q.DeclareOk)
            peer.send(1, B.Get(queue="limited", no_ack=False))
            peer.expect(B.GetOk)
            peer.content()
            self.read_others()
        eventually(lambda: self.held("limited") == 0, "the session ends", self.patience_s)
        mine = f"mine.{self._number}"
        eventually(lambda: mine not in self.counts(), "its queue is deleted", self.patience_s)

    def seal(self) -> None:
        local = self.broker.local
        local.upkeep.close_open()
        eventually(lambda: not local.state.blocks.full, "the upkeep seals", self.patience_s)

    def read_others(self) -> None:
        """Drives what was read from the cache."""
        with self.broker.channel() as channel:
            for _ in range(60):
                channel.get("long")

    @property
    def steps(self) -> list[Callable[[], None]]:
        return [
            self.publish,
            self.commit,
            self.call,
            self.ask,
            self.get,
            self.consume,
            self.expire,
            self.lease,
            self.session,
            self.seal,
        ]

    # -- what is there ---------------------------------------------------------------------------------------
    def counts(self) -> dict[str, int]:
        return {queue.name: queue.messages for queue in self.broker.queues()}

    def count(self, name: str) -> int:
        return self.counts()[name]

    def held(self, name: str) -> int:
        (found,) = [queue.unacknowledged for queue in self.broker.queues() if queue.name == name]
        return found

    def tolerate(self) -> None:
        """Each step once; it may fail."""
        for step in self.steps:
            with contextlib.suppress(*FAILED):
                step()

    def check(self) -> None:
        """Everything goes on, and is what was answered."""
        assert self.broker.failure is None
        self.patience_s = ENOUGH_S
        for step in self.steps:
            step()
        assert self.held("limited") == 0
        self.compare()

    def compare(self) -> None:
        with self.broker.channel() as channel:
            found = []
            while (delivery := channel.get("in")) is not None:
                found.append(delivery.body)
        short = [body for body in found if len(body) == 6]
        assert len(short) == len(set(short)), "published twice"
        assert self.answered <= set(short), "answered and lost"
        assert not self.refused & set(short), "refused and published"

    def reopen(self) -> None:
        self.broker.close()
        self.open()
        self.compare()


@contextlib.contextmanager
def filled(directory: Path) -> Iterator[Rig]:
    """Nothing of it is in the cache."""
    rig = Rig(directory).open()
    try:
        rig.fill()
        rig.seal()
        rig.reopen()
        yield rig
    finally:
        rig.broker.close()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> RefusedCalls:
    monkeypatch.setattr(channels, "LEASE_S", 0.5)
    monkeypatch.setattr(channels, "LOOK_S", 0.1)
    monkeypatch.setattr(client_channel, "KEEPALIVE_S", 1000.0)
    monkeypatch.setattr(upkeep, "COMPACT_TICKS", 2)
    monkeypatch.setattr(upkeep, "OPEN_BYTES", 1_000)
    return RefusedCalls(monkeypatch)


@pytest.fixture
def rig(tmp_path: Path, calls: RefusedCalls) -> Iterator[Rig]:
    with filled(tmp_path / "data") as rig:
        try:
            yield rig
        finally:
            calls.stop()


def test_every_system_call_is_refused_once_with_each_error_and_everything_goes_on(
    rig: Rig, calls: RefusedCalls
) -> None:
    calls.each, rig.patience_s = True, 0.5
    seen = -1
    while sum(calls.places.values()) > seen:  # until a whole round met no new error
        seen = sum(calls.places.values())
        rig.tolerate()
    calls.stop()
    # a read is among them only if the upkeep has not brought the blocks into the cache before it
    for reached in ("_create", "_write_all"):
        assert any(reached in place for place in calls.places), (reached, sorted(calls.places))
    rig.check()
    rig.reopen()
    rig.check()


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(
            number, marks=[] if number == errno.EMFILE else pytest.mark.soak, id=errno.errorcode[number]
        )
        for number in PASSING
    ],
)
def test_all_system_calls_are_refused_for_two_seconds_and_everything_goes_on(
    rig: Rig, calls: RefusedCalls, number: int
) -> None:
    rig.patience_s = 0.3
    calls.always, end = number, time.monotonic() + 2.0
    while time.monotonic() < end:
        rig.tolerate()
    calls.stop()
    assert calls.places
    rig.check()
    rig.reopen()
    rig.check()


@pytest.mark.soak
def test_whatever_loading_a_block_raises_it_is_tried_again(rig: Rig) -> None:
    failed = []

    def fail(name: str) -> None:
        failed.append(name)
        raise ValueError("a defect")

    for hit in range(1, 41):
        failpoint.arm("shelf.load", fail, hit=hit)
    rig.patience_s = 0.3
    try:
        while len(failed) < 40:
            rig.tolerate()
        rig.check()
    finally:
        failpoint.disarm()


# -- a real limit ----------------------------------------------------------------------------------------------

MiB = 1024 * 1024
X = commands.Tx
BIG = 24  # messages of 1 MiB: two commits of them are in segments, and not in the cache


@contextlib.contextmanager
def no_files_left(served: AmqpServed) -> Iterator[None]:
    """The limit of the process is what it has open, and clients that say nothing take the rest."""
    used = [int(name) for name in os.listdir(f"/proc/{served.pid}/fd")]
    before = resource.prlimit(served.pid, resource.RLIMIT_NOFILE)
    most = max(used) + 3
    resource.prlimit(served.pid, resource.RLIMIT_NOFILE, (most, before[1]))
    try:
        with contextlib.ExitStack() as stack:
            for _ in range(most - len(used) + 5):
                idle = socket.create_connection((served.host, served.port))
                stack.enter_context(contextlib.closing(idle))
            eventually(lambda: len(os.listdir(f"/proc/{served.pid}/fd")) >= most, "no file is left")
            yield
    finally:
        resource.prlimit(served.pid, resource.RLIMIT_NOFILE, before)


def put(peer: Peer, number: int) -> None:
    for _ in range(BIG):
        peer.publish(1, "", "q", b"%06d" % number + os.urandom(MiB), delivery_mode=2)
    peer.call(1, X.Commit(), X.CommitOk)


def take(peer: Peer, number: int) -> None:
    for _ in range(BIG):
        delivery = peer.expect(B.Deliver)
        assert peer.content()[1].startswith(b"%06d" % number)
        peer.send(2, B.Ack(delivery.delivery_tag))


def test_with_no_file_left_commits_and_reads_use_the_reserve_and_clients_come_in_again(
    tmp_path: Path,
) -> None:
    with serving(tmp_path / "data") as served:
        with Peer(served.amqp_url).opened(1) as peer:
            for name in ("q", "small"):
                peer.call(1, Q.Declare(queue=name, durable=True), Q.DeclareOk)
            peer.call(1, X.Select(), X.SelectOk)
            put(peer, 1)
            put(peer, 2)
            peer.end()
        assert served.terminate() == 0
        served.start()
        with Peer(served.amqp_url).opened(1) as peer:
            peer.open(2)
            peer.call(1, X.Select(), X.SelectOk)
            with no_files_left(served):
                put(peer, 3)  # a new segment
                for _ in range(4):  # together more than a checkpoint of the catalog
                    for _ in range(100):
                        peer.publish(1, "", "small", bytes(5_000), delivery_mode=2)
                    peer.call(1, X.Commit(), X.CommitOk)
                peer.call(2, B.Qos(prefetch_count=1), B.QosOk)
                peer.call(2, B.Consume(queue="q"), B.ConsumeOk)
                take(peer, 1)  # from the disk
            take(peer, 2)
            peer.end()
        with Peer(served.amqp_url).opened(1) as another:
            with served.client() as client:
                assert len(client.queues()) == 2
            assert (another.count(1, "q"), another.count(1, "small")) == (BIG, 400)
            another.end()
        assert served.terminate() == 0
        served.start()
        with Peer(served.amqp_url).opened(1) as peer:
            assert [data[:6] for _, data in peer.drain(1, "q")] == [b"000003"] * BIG
            assert peer.count(1, "small") == 400
            peer.end()


FILES = 128


def test_clients_that_connect_again_while_it_starts_take_it_no_file_that_it_needs(tmp_path: Path) -> None:
    """They connect as soon as it listens, more of them than it may open files."""
    ports, directory = free_ports(3), tmp_path / "data"
    flight, amqp, web = (f"127.0.0.1:{port}" for port in ports)
    command = [sys.executable, "-m", "txmq", "serve", "--data", str(directory)]
    broker = subprocess.Popen(
        [*command, "--listen", flight, "--amqp", amqp, "--http", web],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES)),
    )
    clients: list[socket.socket] = []
    over = threading.Event()

    def storm(port: int) -> None:
        for _ in range(FILES):
            while not over.is_set():
                with contextlib.suppress(OSError):
                    clients.append(socket.create_connection(("127.0.0.1", port), 1.0))
                    break
                over.wait(0.005)

    threads = [threading.Thread(target=storm, args=(port,)) for port in ports]
    for thread in threads:
        thread.start()
    try:
        ready = directory / endpoint.ENDPOINT
        wait_until(lambda: ready.exists() or broker.poll() is not None, "it serves")
        wait_until(lambda: len(clients) >= FILES or broker.poll() is not None, "there are more than files")
        assert broker.poll() is None
        over.set()
        for client in clients:
            client.close()
        with Peer(f"amqp://{amqp}").opened(1) as peer:
            peer.call(1, Q.Declare(queue="a"), Q.DeclareOk)
    finally:
        over.set()
        for thread in threads:
            thread.join()
        broker.kill()
        broker.wait()
