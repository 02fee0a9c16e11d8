"""Connections at the port of Flight that do not log in: their number, time, bytes and streams are bounded,
and those of others go on.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pyarrow.flight
import pytest

from bench.certificates import Authority
from broker_core.client.broker import BrokerClient
from broker_core.core import errors
from broker_core.core import password as passwords
from broker_core.flight.authorization import Basic
from broker_core.launcher import Broker
from broker_core.server.amqp.options import AmqpOptions
from broker_core.server.flight import connection_limit as entrances
from broker_core.server.flight import listener, messages, server
from broker_core.server.flight.calls import ANSWERS, LARGE, SILENT, Calls
from broker_core.server.flight.connection_limit import FlightConnectionLimit, peer_of
from broker_core.server.flight.kernel_sockets import ClientSocket, KernelSockets, Peer
from broker_core.server.flight.listener import FIRST_THREADS
from broker_core.server.listener_options import ListenerOptions
from broker_core.server.quotas import Quota, QuotaLimits, UserLimit
from broker_core.server.tls import TlsOptions
from tests.progress import wait_until
from tests.server.flight.flight_calls import Raw

HEADER = Basic("ann", "secret").header


def add(broker: Broker) -> None:
    broker.accounts.add_user("ann", passwords.hashed("secret", passwords.Cost(4)), ("monitoring",))
    broker.accounts.set_permissions("ann", ".*", ".*", ".*")


@contextlib.contextmanager
def serving(folder: Path, handshake_s: float = 600.0, limit: int | None = None) -> Iterator[Broker]:
    with Broker.open(
        folder / "data",
        amqp_options=AmqpOptions(handshake_timeout_s=handshake_s),
        quotas=QuotaLimits(flight_connections=limit),
    ) as broker:
        add(broker)
        yield broker


def knock(broker: Broker) -> socket.socket:
    return socket.create_connection(("127.0.0.1", broker.port), 30)


def ended(client: socket.socket) -> bool:
    """Whether the broker has closed it; what gRPC said before is read."""
    client.settimeout(0)
    try:
        while client.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def request(method: str, header: str = "") -> bytes:
    """The headers of a call, as HTTP/2 has them without a table. ``header``: of ``authorization``."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": f"/arrow.flight.protocol.FlightService/{method}",
        ":authority": "x",
        "te": "trailers",
        "content-type": "application/grpc",
    } | ({"authorization": header} if header else {})
    texts = ((each.encode() for each in pair) for pair in fields.items())
    return b"".join(
        b"\x10" + bytes([len(name)]) + name + bytes([len(value)]) + value for name, value in texts
    )


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def calls(
    client: socket.socket, method: str, count: int, header: str = "", end: bytes = b"", before: int = 0
) -> None:
    """Opens so many, and ends each with the frame ``end``; "": they stay silent. ``before``: calls of this
    connection."""
    with contextlib.suppress(OSError):  # the broker ends it meanwhile
        if not before:
            client.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0))
        for stream in range(2 * before + 1, 2 * (before + count), 2):
            ended = frame(end[0], end[1], stream, end[2:]) if end else b""
            client.sendall(frame(1, 4, stream, request(method, header)) + ended)


class Threads:
    """The most that this process has meanwhile."""

    def __enter__(self) -> Threads:
        self.before = self.most = threads()
        self._over = threading.Event()
        self._look = threading.Thread(target=self._run)
        self._look.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._look.join()

    def _run(self) -> None:
        while not self._over.wait(0.001):
            self.most = max(self.most, threads() - 1)  # without this one


WAIT = '{"queues": ["q"], "ends": {"q": 0}, "timeout_s": 1.0}'
RESET, EMPTY = bytes((3, 0, 0, 0, 0, 8)), bytes((0, 1, 0, 0, 0, 0, 0))


@pytest.mark.parametrize("end", [b"", RESET, EMPTY], ids=["silent", "reset", "empty"])
@pytest.mark.parametrize(
    ("method", "header"), [("DoPut", ""), ("DoExchange", ""), ("DoAction", ""), ("DoAction", "Bearer none")]
)
def test_calls_without_a_login_take_no_thread_are_not_read_for_long_and_others_are_served(
    tmp_path: Path, method: str, header: str, end: bytes
) -> None:
    with serving(tmp_path) as broker, contextlib.ExitStack() as stack:
        honest = stack.enter_context(BrokerClient(broker.url.replace("//", "//ann:secret@")))
        assert honest.apps() == []
        with Threads() as found:
            flooding = [stack.enter_context(knock(broker)) for _ in range(4)]
            for client in flooding:
                calls(client, method, 10 * entrances.REFUSALS, header, end)
            for _ in range(20):
                assert honest.apps() == []
            with BrokerClient(broker.url.replace("//", "//ann:secret@")) as late:
                assert late.apps() == []
            wait_until(lambda: len(broker.server.connection_limit.stalled) == len(flooding))
            assert not any(map(ended, flooding)), "or they would come again"
        assert found.most < found.before + 50


def test_calls_of_a_user_who_was_deleted_are_not_read_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way to end a flood of somebody with a login."""
    monkeypatch.setattr(server, "GRACE_S", 0.2)  # for calls that nobody reads
    with serving(tmp_path) as broker, knock(broker) as client:
        limit = broker.server.connection_limit
        calls(client, "DoAction", 1, HEADER, EMPTY)
        wait_until(lambda: limit.proved)
        broker.accounts.add_user("bob", passwords.hashed("secret", passwords.Cost(4)))
        broker.accounts.delete_user("ann")
        calls(client, "DoAction", 2 * entrances.LATER_REFUSALS, HEADER, EMPTY, before=1)
        wait_until(lambda: limit.stalled)
        assert not ended(client)


def test_a_connection_of_two_users_goes_on_while_one_of_them_is_let_in() -> None:
    limit = FlightConnectionLimit(lambda _name: None)
    limit._thread = threading.current_thread()
    name, one = "ipv4:127.0.0.1:4711", ClientSocket(Peer("127.0.0.1", 4711), 1, 0)
    for _ in range(2):
        with limit.login(name) as enter:
            enter("ann")
        for _ in range(entrances.LATER_REFUSALS):
            limit.refused(name)
        assert limit.floods([one]) == (set(), set())
    limit.refused(name)
    assert limit.floods([one]) == ({1}, set())


def test_a_login_that_is_being_checked_excuses_bytes_but_no_flood_of_calls() -> None:
    limit = FlightConnectionLimit(lambda _name: None)
    limit._thread = threading.current_thread()
    name, one = "ipv4:127.0.0.1:4711", ClientSocket(Peer("127.0.0.1", 4711), 1, entrances.BYTES + 1)
    with limit.login(name) as enter:
        assert limit.overdue([one], 0.0) == []
        for _ in range(entrances.REFUSALS):
            limit.refused(name)
        assert limit.floods([one]) == (set(), set())
        limit.refused(name)
        assert limit.floods([one]) == ({1}, set())
        enter("ann")
        assert limit.floods([one]) == (set(), {1})


def test_calls_of_a_user_that_bring_nothing_are_bounded_and_others_go_on(tmp_path: Path) -> None:
    with serving(tmp_path) as broker:
        broker.accounts.add_user("bob", passwords.hashed("secret", passwords.Cost(4)))
        honest = Raw(broker.url, Basic("bob", "secret").header)
        assert isinstance(honest.action("hello", b""), list)
        ann = Raw(broker.url, HEADER)
        assert isinstance(ann.action("hello", b""), list)
        with knock(broker) as client:
            most = SILENT.user or 0
            calls(client, "DoAction", 5 * most, HEADER)
            wait_until(lambda: isinstance(ann.action("hello", b""), errors.Busy))
            for _ in range(20):
                assert isinstance(honest.action("hello", b""), list)
        wait_until(lambda: isinstance(ann.action("hello", b""), list))


def test_headers_that_are_no_text_are_not_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """grpcio does, with a traceback: what everybody may send, and credentials."""
    with serving(tmp_path) as broker, knock(broker) as client:
        client.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0))
        secret = b"\x10\x0dauthorization\x0eBearer secret\xed"
        client.sendall(frame(1, 5, 1, request("DoAction") + secret))
        wait_until(lambda: broker.server.connection_limit.refusals)
        assert "secret" not in caplog.text and "encoding" not in caplog.text


def test_what_is_compressed_on_its_way_is_refused(tmp_path: Path) -> None:
    """A few kilobytes would become a gigabyte before anybody could ask."""
    with (
        serving(tmp_path) as broker,
        grpc.insecure_channel(f"127.0.0.1:{broker.port}", compression=grpc.Compression.Gzip) as channel,
    ):
        call = channel.unary_stream("/arrow.flight.protocol.FlightService/DoAction")
        with pytest.raises(grpc.RpcError) as refused:
            list(call(bytes(1 << 20), metadata=[("authorization", HEADER)]))
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_message_of_many_fields_is_refused_before_they_are_read() -> None:
    with pytest.raises(errors.RemoteProtocolError, match="too many fields"):
        messages.action(b"\x08\x00" * 1000)


def test_a_client_has_more_calls_under_way_than_a_hundred(tmp_path: Path) -> None:
    with serving(tmp_path) as broker:
        with broker.channel() as channel:
            channel.queue_declare("q")
            for _ in range(10):
                channel.publish(bytes(1000), routing_key="q")
        client = Raw(broker.url, HEADER)
        ticket = pyarrow.flight.Ticket(b'{"browse": [["q", 0, 10]]}')
        streams = [client.client.do_get(ticket) for _ in range(150)]
        assert isinstance(client.action("hello", b""), list)
        assert all(stream.read_chunk().data.num_rows == 10 for stream in streams)


def test_answers_that_are_not_read_are_bounded_until_they_are_sent() -> None:
    calls, sent = Calls(Quota(UserLimit(), lambda *_: errors.Busy("never"))), []

    def ended(call: Callable[[], None]) -> bool:
        sent.append(call)
        return True

    large = bytes(ANSWERS.user or 0)
    calls.answered(large, "ann", ended)
    with pytest.raises(errors.Busy, match="of user 'ann' are not read yet"):
        calls.answered(large[: LARGE + 1], "ann", ended)
    calls.answered(large[:LARGE], "ann", ended)
    calls.answered(large[: LARGE + 1], "bob", lambda _: False)
    sent.pop()()
    calls.answered(large[: LARGE + 1], "ann", ended)


def test_many_right_logins_at_once_are_all_let_in(tmp_path: Path) -> None:
    with serving(tmp_path) as broker, ThreadPoolExecutor(100) as pool:

        def log_in(_: int) -> int:
            with BrokerClient(broker.url.replace("//", "//ann:secret@")) as client:
                return len(client.apps())

        assert list(pool.map(log_in, range(100))) == [0] * 100


def test_threads_end_when_there_is_nothing_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "IDLE_S", 0.2)
    with serving(tmp_path) as broker:
        client = Raw(broker.url, HEADER)
        assert isinstance(client.action("hello", b""), list)
        with broker.channel() as channel:
            channel.queue_declare("q")
        before = of_flight()
        waiting = [
            threading.Thread(target=client.action, args=("engine.wait", WAIT.encode())) for _ in range(50)
        ]
        for each in waiting:
            each.start()
        wait_until(lambda: of_flight() >= 50)
        for each in waiting:
            each.join()
        wait_until(lambda: of_flight() <= before)
        assert isinstance(client.action("hello", b""), list)


def of_flight() -> int:
    return sum(thread.name == "flight" for thread in threading.enumerate())


def test_calls_are_served_while_no_thread_can_be_started_and_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, refused = threading.Thread.start, []

    def refusing(thread: threading.Thread) -> None:
        if thread.name == "flight":
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    with serving(tmp_path) as broker:
        clients = [Raw(broker.url, HEADER) for _ in range(4 * FIRST_THREADS)]
        assert isinstance(clients[0].action("hello", b""), list)
        found: list[object] = []

        def call(client: Raw) -> None:
            found.extend(client.action("hello", b"") for _ in range(5))

        calling = [threading.Thread(target=call, args=(client,)) for client in clients]
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refusing)
            for each in calling:
                each.start()
            for each in calling:
                each.join()
        assert refused and len(found) == 5 * len(clients)
        assert all(isinstance(answer, list) for answer in found)
        assert isinstance(clients[0].action("hello", b""), list)


def test_a_connection_that_does_not_log_in_ends_in_time_and_one_that_has_stays(tmp_path: Path) -> None:
    with serving(tmp_path, handshake_s=0.5) as broker, knock(broker) as idle:
        honest = Raw(broker.url, HEADER)
        assert isinstance(honest.action("engine.identity", b""), list)
        began = time.monotonic()
        wait_until(lambda: ended(idle))
        assert time.monotonic() - began > 0.4
        (name,) = broker.server.connection_limit.proved
        time.sleep(1.0)  # twice the time that it would have had
        assert isinstance(honest.action("engine.identity", b""), list)
        assert list(broker.server.connection_limit.proved) == [name], "the same connection"
        honest.client.close()
        wait_until(lambda: not broker.server.connection_limit.proved)


def test_half_open_handshakes_of_tls_end_in_time(tmp_path: Path) -> None:
    pair = Authority(tmp_path).sign()
    with Broker.open(
        tmp_path / "data",
        listeners=ListenerOptions(TlsOptions(pair.cert, pair.key)),
        amqp_options=AmqpOptions(handshake_timeout_s=0.5),
    ) as broker:
        add(broker)
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(knock(broker)) for _ in range(50)]
            for client in clients:
                client.sendall(b"\x16\x03\x01")
            wait_until(lambda: all(map(ended, clients)))


def test_a_large_call_without_a_login_is_not_taken(tmp_path: Path) -> None:
    with serving(tmp_path) as broker:
        with contextlib.suppress(
            pyarrow.flight.FlightUnavailableError
        ):  # its connection may end before it hears
            refused = Raw(broker.url).action("engine.logs", bytes(256 << 20))
            assert isinstance(refused, errors.LoginRefused)
        honest = Raw(broker.url, HEADER)
        assert isinstance(honest.action("engine.identity", b""), list)
        large = honest.action("engine.logs", bytes(2 * entrances.BYTES))
        assert isinstance(large, errors.TxmqError), "it is taken, and has no arguments"


def test_more_connections_than_the_limit_end_those_that_have_not_logged_in(tmp_path: Path) -> None:
    with serving(tmp_path, limit=20) as broker, contextlib.ExitStack() as stack:
        honest = Raw(broker.url, HEADER)
        assert isinstance(honest.action("engine.identity", b""), list)
        clients = [stack.enter_context(knock(broker)) for _ in range(60)]
        wait_until(lambda: sum(map(ended, clients)) >= 50)
        assert isinstance(honest.action("engine.identity", b""), list)
        late = Raw(broker.url, HEADER)
        assert isinstance(late.action("engine.identity", b""), list)


def made(limit: int) -> FlightConnectionLimit:
    return FlightConnectionLimit(lambda _name: None, limit, 10.0)


def log_in(connection_limit: FlightConnectionLimit, name: str) -> None:
    with connection_limit.login(name) as prove:
        prove("")


def test_the_oldest_of_the_address_that_has_most_ends_first() -> None:
    connection_limit = made(20)
    found = [ClientSocket(Peer("10.0.0.1", n), n + 1, 0) for n in range(12)]
    assert len(connection_limit.overdue(found[:3], 0.0)) == 0
    alone = ClientSocket(Peer("10.0.0.2", 1), 99, 0)
    over = connection_limit.overdue([alone, *found], 1.0)
    assert {each.peer for each in over} == {Peer("10.0.0.1", n) for n in range(3)}
    assert alone in connection_limit.overdue([alone], 12.0)


def test_who_is_asked_or_let_in_is_not_ended() -> None:
    connection_limit = made(2)
    first, second = (
        ClientSocket(Peer("10.0.0.1", 1), 1, 1 << 30),
        ClientSocket(Peer("10.0.0.2", 1), 2, 1 << 30),
    )
    assert connection_limit.floods([first]) == (set(), set()), "a login may be behind the first bytes"
    assert connection_limit.overdue([first], 0.0) == []
    assert connection_limit.floods([first]) == ({1}, set()) and connection_limit.floods([first]) == (
        set(),
        set(),
    )
    with connection_limit.login("ipv4:10.0.0.1:1") as prove:
        prove("")
        assert connection_limit.floods([first, second]) == (set(), {1}), "it has logged in"
        assert connection_limit.overdue([first, second], 60.0) == []
        assert connection_limit.floods([first, second]) == ({2}, set())
        assert connection_limit.overdue([first, second], 120.0) == [second]
    with contextlib.suppress(errors.LoginRefused), connection_limit.login("ipv4:10.0.0.2:1"):
        raise errors.LoginRefused("wrong")
    assert connection_limit.overdue([first, second], time.monotonic() + 60) == [second]
    log_in(connection_limit, "ipv4:10.0.0.3:1")
    with pytest.raises(errors.Busy, match="flight-connections"):
        log_in(connection_limit, "ipv4:10.0.0.4:1")
    log_in(connection_limit, "ipv4:10.0.0.3:1")
    gone: list[str] = []
    connection_limit = FlightConnectionLimit(gone.append, 2, 10.0)
    log_in(connection_limit, "ipv6:%5B2001:db8::1%5D:7")
    assert connection_limit.overdue([], time.monotonic() + 1) == [] and gone == ["ipv6:%5B2001:db8::1%5D:7"]


def test_it_looks_again_when_sockets_come_or_go_or_somebody_waits_and_seldom_otherwise() -> None:
    connection_limit = made(20)
    waiting = ClientSocket(Peer("10.0.0.1", 1), 1, 0)

    def looks(counted: int | None, now: float, *, woken: bool = False) -> bool:
        return connection_limit.must_look(counted, now, woken=woken)

    assert looks(7, 100.0) and not looks(7, 100.1)
    assert looks(7, 100.2, woken=True) and not looks(7, 100.6)
    assert looks(7, 100.8) and looks(8, 100.9) and looks(7, 101.0) and not looks(7, 101.1)
    connection_limit.overdue([waiting], 101.1)
    assert looks(7, 101.2)
    log_in(connection_limit, "ipv4:10.0.0.1:1")
    connection_limit.overdue([waiting], 101.2)
    assert not looks(7, 101.3)
    assert looks(None, 101.4) and looks(None, 101.5), "where the kernel counts nothing"


def test_the_kernel_counts_a_socket_that_comes() -> None:
    with contextlib.closing(KernelSockets()) as kernel, contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        before = kernel.count()
        assert before is not None

        def more() -> bool:  # those of other programs go meanwhile
            stack.enter_context(socket.create_connection(listening.getsockname(), 30))
            stack.enter_context(listening.accept()[0])
            counted = kernel.count()
            return counted is not None and counted > before

        wait_until(more)


def test_the_kernel_tells_the_connections_of_a_port_and_ends_one_of_them() -> None:
    with contextlib.closing(KernelSockets()) as kernel, socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(socket.create_connection(("127.0.0.1", port), 30)) for _ in "ab"]
            accepted = [stack.enter_context(listening.accept()[0]) for _ in clients]
            clients[0].sendall(b"x" * 1000)
            wait_until(lambda: {each.received for each in kernel.connections(port)} == {0, 1000})
            found = {each.peer: each for each in kernel.connections(port)}
            peers = [Peer(*client.getsockname()) for client in clients]
            assert set(found) == set(peers)
            kernel.end({found[peers[0]].inode})
            wait_until(lambda: ended(clients[0]))
            assert not ended(clients[1])
            accepted[1].sendall(b"on")
            clients[1].settimeout(30)
            assert clients[1].recv(2) == b"on"


def test_the_kernel_drops_what_a_stalled_connection_sends_until_it_ends() -> None:
    with contextlib.closing(KernelSockets()) as kernel, socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        with contextlib.ExitStack() as stack:
            client, other = (
                stack.enter_context(socket.create_connection(("127.0.0.1", port), 30)) for _ in "ab"
            )
            accepted, accepted_other = (stack.enter_context(listening.accept()[0]) for _ in "ab")
            client.sendall(b"before")
            accepted.settimeout(30)
            assert accepted.recv(6) == b"before"
            found = {each.peer: each.inode for each in kernel.connections(port)}
            inode = found[Peer(*client.getsockname())]
            kernel.stall({inode})
            client.sendall(b"x" * 1000)
            other.sendall(b"on")
            assert accepted_other.recv(2) == b"on"
            accepted.sendall(b"answer")
            assert client.recv(6) == b"answer"
            assert {each.received for each in kernel.connections(port)} == {6, 2}
            kernel.end({inode})
            wait_until(lambda: ended(client))


@pytest.mark.parametrize(
    ("name", "peer"),
    [
        ("ipv4:127.0.0.1:4711", Peer("127.0.0.1", 4711)),
        ("ipv6:%5B::1%5D:4711", Peer("::1", 4711)),
        ("ipv6:[::ffff:10.0.0.1]:1", Peer("10.0.0.1", 1)),
        ("unix:/tmp/socket", None),
        ("", None),
    ],
)
def test_the_connection_of_a_call_is_that_which_the_kernel_tells(name: str, peer: Peer | None) -> None:
    assert peer_of(name) == peer
