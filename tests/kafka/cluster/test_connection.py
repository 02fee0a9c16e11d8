"""A connection to a node that misbehaves: late, silent, talking nonsense, or gone. The node is a thread with
a script.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from broker_core.core import errors
from broker_core.kafka.cluster import connection as module
from broker_core.kafka.cluster.connection import NodeConnection, Settings
from broker_core.kafka.cluster.wire import SocketWire
from broker_core.kafka.protocol import port
from broker_core.kafka.protocol.port import NodeAddress, TopicPartition, Unanswered
from broker_core.kafka.protocol.sasl import SaslLogin

GUARD_S = 120.0
# what ApiVersions says: Metadata, Produce, FindCoordinator, SaslHandshake, SaslAuthenticate
VERSIONS = {3: (0, 12), 0: (0, 12), 10: (0, 3), 17: (0, 1), 36: (0, 2), 18: (0, 3)}
# and Fetch, DeleteRecords, InitProducerId
VERSIONS |= {1: (0, 13), 21: (0, 2), 22: (0, 4)}


def features(versions: dict[int, tuple[int, int]] = VERSIONS, code: int = 0) -> bytes:
    """The body of an answer to ApiVersions, version 3."""
    keys = b"".join(struct.pack(">hhhb", key, low, high, 0) for key, (low, high) in versions.items())
    return struct.pack(">hB", code, len(versions) + 1) + keys + struct.pack(">ib", 0, 0)


def coordinator(host: bytes = b"somewhere", number: int = 9092) -> bytes:
    """The body of an answer to FindCoordinator, version 3, behind its flexible header."""
    return (
        b"\0"
        + struct.pack(">ihB", 0, 0, 1)
        + struct.pack(">iB", 1, len(host) + 1)
        + host
        + struct.pack(">ib", number, 0)
    )


class Node:
    """Accepts connections one after the other. Each gets ``script``, which is called with a :class:`Peer`."""

    def __init__(self, script: Callable[[Peer], None]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(GUARD_S)
        self.endpoint = NodeAddress(*self._listener.getsockname())
        self.accepted = 0
        self.failures: list[BaseException] = []
        self._script = script
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._ends.is_set():
            with contextlib.suppress(OSError):
                taken, _ = self._listener.accept()
                if self._ends.is_set():
                    taken.close()
                    return
                taken.settimeout(GUARD_S)
                self.accepted += 1
                with taken:
                    try:
                        self._script(Peer(taken, self._ends))
                    except (OSError, EOFError):
                        pass
                    except BaseException as error:
                        self.failures.append(error)

    def close(self) -> None:
        self._ends.set()
        with contextlib.suppress(OSError):
            socket.create_connection(self.endpoint, 1).close()
        self._thread.join(GUARD_S)
        self._listener.close()
        assert not self._thread.is_alive() and self.failures == []


class Peer:
    def __init__(self, connected: socket.socket, ends: threading.Event) -> None:
        self.socket = connected
        self.ends = ends

    def request(self) -> tuple[int, int, bytes]:
        """API key, correlation id and the whole frame."""
        (length,) = struct.unpack(">i", self._exactly(4))
        frame = self._exactly(length)
        key, _, correlation = struct.unpack_from(">hhi", frame)
        return key, correlation, frame

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = self.socket.recv(size - len(data))
            if not piece:
                raise EOFError
            data += piece
        return data

    def answer(self, correlation: int, body: bytes) -> None:
        self.socket.sendall(struct.pack(">ii", 4 + len(body), correlation) + body)

    def open(self) -> None:
        key, correlation, _ = self.request()
        assert key == 18
        self.answer(correlation, features())

    def until_closed(self) -> None:
        while self.socket.recv(1 << 16):
            pass


@contextlib.contextmanager
def serving(script: Callable[[Peer], None]) -> Iterator[Node]:
    node = Node(script)
    try:
        yield node
    finally:
        node.close()


ASK = port.FindCoordinator("key")
QUICK = Settings(connect_s=GUARD_S, request_s=0.2)
PATIENT = Settings(connect_s=GUARD_S, request_s=GUARD_S)


@contextlib.contextmanager
def connected(node: Node, settings: Settings = PATIENT) -> Iterator[NodeConnection]:
    connection = NodeConnection(node.endpoint, settings)
    try:
        yield connection
    finally:
        connection.close()


def test_answers_belong_to_their_requests_whoever_asks_first() -> None:
    def script(peer: Peer) -> None:
        peer.open()
        asked = [peer.request()[1] for _ in range(3)]
        for number, correlation in enumerate(asked):
            peer.answer(correlation, coordinator(number=number + 1))
        peer.until_closed()

    with serving(script) as node, connected(node) as connection:
        pending = [connection.send(ASK) for _ in range(3)]
        found = [pending[number].answer().node for number in (2, 0, 1)]
        assert found == [NodeAddress("somewhere", number) for number in (3, 1, 2)]


def test_threads_share_a_connection() -> None:
    def script(peer: Peer) -> None:
        peer.open()
        while True:
            _, correlation, frame = peer.request()
            peer.answer(correlation, coordinator(frame[frame.index(b"name-") :][:8]))

    with serving(script) as node, connected(node) as connection:
        wrong: list[object] = []

        def ask(number: int) -> None:
            for turn in range(50):
                name = f"name-{number}{turn:02}"
                found = connection.send(port.FindCoordinator(name)).answer().node
                if found is None or found.host != name:
                    wrong.append((name, found))

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(GUARD_S)
        assert wrong == [] and not any(thread.is_alive() for thread in threads)


def test_a_node_that_is_silent_breaks_the_connection_in_time() -> None:
    def script(peer: Peer) -> None:
        peer.open()
        peer.until_closed()

    with serving(script) as node, connected(node, QUICK) as connection:
        first, second = connection.send(ASK), connection.send(ASK)
        for pending in (first, second):
            with pytest.raises(Unanswered, match="did not answer FindCoordinator: no answer in time"):
                pending.answer()
        assert connection.broken
        with pytest.raises(errors.ConnectionFailed, match="is closed"):
            connection.send(ASK)


@pytest.mark.parametrize(
    ("request_", "expected_s"),
    [
        (ASK, 2.0),
        (port.InitProducer("t", transaction_ms=900_000), 2.0),
        (port.Produce({TopicPartition("orders", 0): b"batch"}), 2.0),
        (port.DeleteRecords({TopicPartition("orders", 0): 1}), 2.0),
        (port.Fetch({TopicPartition("orders", 0): 1}, max_wait_ms=500), 2.5),
    ],
)
def test_no_request_but_one_that_waits_for_rows_gives_a_silent_node_more_time(
    request_: port.Request[Any], expected_s: float
) -> None:
    """A node that waits for its replicas gives up before we do."""

    def script(peer: Peer) -> None:
        peer.open()
        asked.append(peer.request()[2])
        arrived.set()
        peer.until_closed()

    asked: list[bytes] = []
    arrived = threading.Event()
    with serving(script) as node, connected(node, Settings(request_s=2.0)) as connection:
        pending: Any = connection.send(request_)
        assert pending.timeout_s == expected_s
        if isinstance(request_, port.Produce | port.DeleteRecords):
            assert arrived.wait(GUARD_S)
            assert struct.pack(">i", 1500) in asked[0]


class Slow:
    """A socket over which every piece takes ten seconds."""

    def __init__(self, connected: socket.socket, now: list[float]) -> None:
        self._socket, self._now = connected, now

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def recv_into(self, buffer: memoryview) -> int:
        self._now[0] += 10
        return self._socket.recv_into(buffer[:2])

    def send(self, data: memoryview) -> int:
        self._now[0] += 10
        return self._socket.send(data[:5000])

    def sendall(self, data: bytes) -> None:
        raise AssertionError("it has one time for all of it")


def test_a_slow_network_is_no_silent_node() -> None:
    def script(peer: Peer) -> None:
        peer.open()
        _, correlation, frame = peer.request()
        assert len(frame) > 100_000
        peer.answer(correlation, b"\0\x01" + struct.pack(">ib", 0, 0))
        peer.until_closed()

    now = [0.0]
    with serving(script) as node:
        connection = NodeConnection(node.endpoint, Settings(request_s=15.0), clock=lambda: now[0])
        slow: Any = Slow(connection._socket, now)
        connection._socket = slow
        assert connection.send(port.Produce({TopicPartition("t", 0): bytes(100_000)})).answer() == {}
        assert now[0] > 200
        connection.close()


def test_an_answer_that_was_waited_for_late_is_not_late() -> None:
    """The time for an answer runs while somebody waits for it, not while the caller does something else."""
    arrived = threading.Event()

    def script(peer: Peer) -> None:
        peer.open()
        _, correlation, _ = peer.request()
        peer.answer(correlation, coordinator())
        arrived.set()
        peer.until_closed()

    now = [0.0]
    with serving(script) as node:
        connection = NodeConnection(node.endpoint, PATIENT, clock=lambda: now[0])
        pending = connection.send(ASK)
        assert arrived.wait(GUARD_S)
        now[0] += 10 * GUARD_S
        assert pending.answer().node == NodeAddress("somewhere", 9092)
        connection.close()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "bytes that are not of the Kafka protocol"),
        (struct.pack(">i", -1), "bytes that are not of the Kafka protocol"),
        (struct.pack(">ii", 8, 0) + b"\0\0\0\0", "it belongs to another request"),
        (struct.pack(">ii", 4, 2), "cannot be read: IndexError"),
        (struct.pack(">ii", 5, 2) + b"\1", "its header has tagged fields"),
        (struct.pack(">ii", 9, 2) + b"\0\0\0\0\0", "FindCoordinator cannot be read"),
    ],
)
def test_nonsense_is_one_error(body: bytes, reason: str) -> None:
    def script(peer: Peer) -> None:
        peer.open()
        peer.request()
        peer.socket.sendall(body)
        peer.until_closed()

    with serving(script) as node, connected(node) as connection:
        with pytest.raises(errors.RemoteProtocolError, match=reason):
            connection.send(ASK).answer()
        assert connection.broken


def test_a_node_that_closes_leaves_its_requests_unanswered() -> None:
    def script(peer: Peer) -> None:
        peer.open()
        peer.request()

    with serving(script) as node, connected(node) as connection:
        with pytest.raises(Unanswered, match=r"closed the connection|reset"):
            connection.send(ASK).answer()


def test_a_request_that_no_common_version_has_is_refused() -> None:
    def script(peer: Peer) -> None:
        _, correlation, _ = peer.request()
        peer.answer(correlation, features({3: (0, 9)}))
        peer.until_closed()

    with serving(script) as node, connected(node) as connection:
        with pytest.raises(
            errors.KafkaError, match=r"does not speak Metadata of version 10 to 12, but 0 to 9.*Kafka 3.1"
        ):
            connection.send(port.Metadata())
        with pytest.raises(errors.KafkaError, match="does not speak Produce"):
            connection.send(port.Produce({TopicPartition("t", 0): b""}))


def test_nothing_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = NodeAddress(*taken.getsockname())
    with pytest.raises(errors.ConnectionFailed, match=f"cannot connect to {endpoint}"):
        NodeConnection(endpoint, PATIENT)


def test_a_large_request_waits_until_earlier_answers_are_taken() -> None:
    """A node reads no further while its answer is not taken; sending on without reading would block both for
    ever.
    """
    large = 6 << 20

    def script(peer: Peer) -> None:
        peer.open()
        _, correlation, _ = peer.request()
        peer.answer(correlation, coordinator() + bytes(large))  # more than the buffers of the sockets take
        _, correlation, frame = peer.request()
        assert len(frame) > large
        peer.answer(correlation, b"\0\x01" + struct.pack(">ib", 0, 0))
        peer.until_closed()

    with serving(script) as node, connected(node) as connection:
        first = connection.send(ASK)
        second = connection.send(port.Produce({TopicPartition("t", 0): bytes(large)}))
        assert second.answer() == {}
        assert first.answer().node == NodeAddress("somewhere", 9092)


def test_closing_wakes_the_one_that_waits() -> None:
    asked = threading.Event()

    def script(peer: Peer) -> None:
        peer.open()
        peer.request()
        asked.set()
        peer.until_closed()

    with serving(script) as node:
        connection = NodeConnection(node.endpoint, PATIENT)
        failures: list[BaseException] = []

        def wait() -> None:
            try:
                connection.send(ASK).answer()
            except errors.ConnectionFailed as error:
                failures.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        assert asked.wait(GUARD_S)
        connection.close()
        thread.join(GUARD_S)
        assert not thread.is_alive() and len(failures) == 1


# -- the wire ------------------------------------------------------------------------------------------------


def answering(peer: Peer) -> None:
    peer.open()
    while True:
        _, correlation, _ = peer.request()
        peer.answer(correlation, coordinator())


def test_a_wire_opens_a_connection_when_it_is_used_and_again_when_it_broke() -> None:
    turns = iter((False, True))

    def script(peer: Peer) -> None:
        peer.open()
        _, correlation, _ = peer.request()
        if next(turns):
            peer.answer(correlation, coordinator())
            peer.until_closed()

    with serving(script) as node:
        wire = SocketWire(PATIENT)
        assert node.accepted == 0
        with pytest.raises(Unanswered):
            wire.send(node.endpoint, ASK).answer()
        assert wire.send(node.endpoint, ASK).answer().node is not None
        assert node.accepted == 2
        wire.close()
        with pytest.raises(errors.ConnectionFailed, match="this client of Kafka is closed"):
            wire.send(node.endpoint, ASK)


def test_a_lane_of_its_own_is_not_held_up() -> None:
    release = threading.Event()
    opened: list[threading.Thread] = []

    def script(peer: Peer) -> None:
        first = not opened
        held = peer.socket.dup()

        def serve() -> None:
            own = Peer(held, peer.ends)
            held.settimeout(GUARD_S)
            with contextlib.suppress(OSError, EOFError), held:
                own.open()
                _, correlation, _ = own.request()
                if first:
                    release.wait(GUARD_S)
                own.answer(correlation, coordinator())
                own.until_closed()

        opened.append(threading.Thread(target=serve))
        opened[-1].start()

    with serving(script) as node:
        wire = SocketWire(PATIENT)
        waiting = wire.send(node.endpoint, ASK, "wait")
        assert wire.send(node.endpoint, ASK).answer().node is not None
        release.set()
        assert waiting.answer().node is not None
        wire.close()
        for thread in opened:
            thread.join(GUARD_S)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_has_connections_of_its_own() -> None:
    def script(peer: Peer) -> None:
        peer.open()
        _, correlation, _ = peer.request()
        peer.answer(correlation, coordinator(number=node.accepted))
        if node.accepted == 1:
            parent.append(peer.socket.dup())  # left open while the child is served

    parent: list[socket.socket] = []
    with serving(script) as node:
        wire = SocketWire(PATIENT)
        assert wire.send(node.endpoint, ASK).answer().node == NodeAddress("somewhere", 1)
        child = os.fork()
        if not child:  # no assertion leaves the child
            with contextlib.suppress(BaseException):
                found = wire.send(node.endpoint, ASK).answer().node
                wire.close()
                os._exit(0 if found == NodeAddress("somewhere", 2) else 1)
            os._exit(2)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        # the child closed nothing of its parent
        pending = wire.send(node.endpoint, ASK)
        (held,) = parent
        peer = Peer(held, threading.Event())
        peer.answer(peer.request()[1], coordinator(number=7))
        assert pending.answer().node == NodeAddress("somewhere", 7)
        wire.close()
        held.close()


# -- logins --------------------------------------------------------------------------------------------------


def test_a_login_happens_before_anything_else_and_again_in_time() -> None:
    seen: list[int] = []

    def script(peer: Peer) -> None:
        while True:
            key, correlation, frame = peer.request()
            seen.append(key)
            if key == 18:
                peer.answer(correlation, features())
            elif key == 17:
                peer.answer(correlation, struct.pack(">hi", 0, 0))
            elif key == 36:
                assert b"\0alice\0secret" in frame
                peer.answer(correlation, b"\0" + struct.pack(">hBB", 0, 0, 1) + struct.pack(">qb", 10_000, 0))
            else:
                peer.answer(correlation, coordinator())

    now = [0.0]
    with serving(script) as node:
        settings = Settings(login=SaslLogin("PLAIN", "alice", "secret"), connect_s=GUARD_S, request_s=GUARD_S)
        connection = NodeConnection(node.endpoint, settings, clock=lambda: now[0])
        connection.send(ASK).answer()
        now[0] = 8.4
        waiting = connection.send(ASK)
        now[0] = 8.6
        connection.send(ASK).answer()
        assert waiting.answer().node is not None
        connection.close()
    assert seen == [18, 17, 36, 10, 10, 17, 36, 10]


def test_a_mechanism_that_the_node_lacks_is_named() -> None:
    def script(peer: Peer) -> None:
        peer.open()
        _, correlation, _ = peer.request()
        peer.answer(correlation, struct.pack(">hi", 33, 1) + struct.pack(">h", 6) + b"GSSAPI")
        peer.until_closed()

    with serving(script) as node:
        with pytest.raises(errors.AccessRefused, match="does not take the mechanism PLAIN, but GSSAPI"):
            NodeConnection(node.endpoint, Settings(login=SaslLogin("PLAIN", "alice", "secret")))


def test_a_node_that_does_not_know_the_password_is_refused() -> None:
    """SCRAM proves both sides (RFC 5802)."""

    def script(peer: Peer) -> None:
        peer.open()
        peer.answer(peer.request()[1], struct.pack(">hi", 0, 0))
        _, correlation, frame = peer.request()
        nonce = frame[frame.index(b"r=") + 2 :].split(b"\0")[0]
        challenge = b"r=" + nonce + b"x,s=c2FsdA==,i=4096"
        peer.answer(correlation, _challenge(challenge))
        _, correlation, _ = peer.request()
        peer.answer(correlation, _challenge(b"v=d3Jvbmc="))
        peer.until_closed()

    with serving(script) as node:
        with pytest.raises(errors.AccessRefused, match="does not prove that it knows the password") as caught:
            NodeConnection(node.endpoint, Settings(login=SaslLogin("SCRAM-SHA-256", "alice", "secret")))
        assert "secret" not in repr(caught.value) + str(caught.value.__context__)


def _challenge(data: bytes) -> bytes:
    return b"\0" + struct.pack(">hBB", 0, 0, len(data) + 1) + data + struct.pack(">qb", 0, 0)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("GSSAPI", "a", "b"), "'GSSAPI' is not supported: use one of PLAIN"),
        (("PLAIN", "", "secret"), "PLAIN needs a user and a password"),
        (("SCRAM-SHA-512", "alice", ""), "SCRAM-SHA-512 needs a user and a password"),
        (("OAUTHBEARER",), "OAUTHBEARER needs a function"),
    ],
)
def test_a_login_that_cannot_work_is_refused_at_once(arguments: tuple[Any, ...], reason: str) -> None:
    with pytest.raises(errors.OptionError, match=reason):
        SaslLogin(*arguments)


def test_no_secret_is_shown() -> None:
    settings = Settings(login=SaslLogin("PLAIN", "alice", "hunter2", lambda: "hunter2"))
    assert "hunter2" not in repr(settings) and "alice" not in repr(settings)
    assert module.Settings() == Settings()
