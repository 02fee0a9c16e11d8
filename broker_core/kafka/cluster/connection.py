"""One blocking connection to one Kafka node: TCP or TLS, the first questions, SASL, and requests in their
order.

Not here: bytes of messages (``protocol/frame.py``), which node to ask, and what to do when it does not
answer.
Invariant: answers come in the order of their requests (Kafka answers one request of a connection at a time),
so the oldest request without one gets the next. A connection that broke, or on which an answer did not come
in time, is never used again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from broker_core.core import errors
from broker_core.kafka.protocol import port
from broker_core.kafka.protocol.codes import error_of
from broker_core.kafka.protocol.frame import RequestCodec, VersionedRequest
from broker_core.kafka.protocol.port import NodeAddress, Unanswered
from broker_core.kafka.protocol.request_codecs import codec_of
from broker_core.kafka.protocol.sasl import Challenge, SaslExchange, SaslLogin, authenticate, handshake

A = TypeVar("A")

REQUEST_S = 15.0
LARGEST_ANSWER = 512 << 20  # bytes; a larger length means that the peer does not speak Kafka, but TLS or HTTP
NODES_SHARE = 0.75  # of the time for an answer: a node that waits for others gives up before we do
SMALL = 32 << 10  # bytes that a socket's buffers take while the node does not read
REAUTHENTICATE = 0.85  # of the lifetime of a session, as the Java client
SOONEST_S = (
    1.1  # a node refuses to authenticate twice within a second; a session that ended can still be renewed
)
_LENGTH = struct.Struct(">i")


@dataclass(frozen=True, slots=True)
class Settings:
    """How to connect. ``tls``: a context; None: plaintext. Times in seconds.

    A cluster gives up a silent node after 9 s (``broker.session.timeout.ms``). So long a node may have to
    wait for another one, and soon after that another leader can be asked.
    """

    tls: ssl.SSLContext | None = None
    login: SaslLogin | None = None
    connect_s: float = 10.0
    request_s: float = REQUEST_S  # of silence before an answer, beyond what a fetch waits for rows


class _Sent(Generic[A]):
    """A request on its way (:class:`broker_core.kafka.protocol.port.Pending`). The connection fills in its
    answer.
    """

    def __init__(
        self, connection: NodeConnection, message: VersionedRequest, correlation: int, timeout_s: float
    ) -> None:
        self.message = message
        self.correlation = correlation
        self.timeout_s = timeout_s
        self.frame: memoryview | None = None
        self.failure: errors.TxmqError | None = None
        self._connection = connection

    @property
    def settled(self) -> bool:
        return self.frame is not None or self.failure is not None

    def answer(self) -> A:
        """Waits for it. Raises Unanswered; RemoteProtocolError where it cannot be read."""
        self._connection.receive_until(self)
        if self.failure is not None:
            raise self.failure
        assert self.frame is not None
        try:
            answer: A = self.message.decode(self.frame, self.correlation)
        except errors.RemoteProtocolError:
            self._connection.close()  # what follows may belong to another request
            raise
        return answer


class NodeConnection:
    """Opened by its constructor. Raises ConnectionFailed, and AccessRefused for a login that the node
    refuses.
    """

    def __init__(
        self, node: NodeAddress, settings: Settings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.node = node
        self.broken = False
        self._settings = settings
        self._clock = clock
        # OpenSSL's connection is not for two threads at once; a TCP socket is
        self._sending = threading.RLock()
        self._receiving = self._sending if settings.tls is not None else threading.RLock()
        self._state = threading.Lock()  # of the requests that wait
        self._waiting: deque[_Sent[Any]] = deque()
        self._correlation = 0
        self._versions: Mapping[int, tuple[int, int]] | None = None
        self._expires = float("inf")  # when to authenticate again
        self._socket = self._connected()
        try:
            self._versions = self._ask(codec_of(port.ApiVersions())).versions
            self._authenticate()
        except BaseException:
            self.close()
            raise

    # -- requests --------------------------------------------------------------------------------------------

    def send(self, request: port.Request[A]) -> port.Pending[A]:
        """Raises ConnectionFailed: the request was not sent whole, so the node did not do it."""
        message = VersionedRequest(codec_of(_in_time(request, self._settings)), self._versions, self.node)
        waits_s = getattr(request, "max_wait_ms", 0) / 1000
        with self._sending:
            if self._clock() >= self._expires:
                self._drain()  # between the steps nothing else may be answered (KIP-368)
                self._authenticate()
            return self._send(message, waits_s + self._settings.request_s)

    def _send(self, message: VersionedRequest, timeout_s: float) -> _Sent[Any]:
        self._correlation = (self._correlation + 1) & 0x7FFFFFFF
        frame = message.encode(self._correlation)
        if len(frame) > SMALL:
            # a node that waits for us to take its answer does not read on: both would wait for ever
            self._drain()
        pending: _Sent[object] = _Sent(self, message, self._correlation, timeout_s)
        if self.broken:
            raise errors.ConnectionFailed(f"the connection to {self.node} is closed")
        with self._state:
            self._waiting.append(pending)  # before it is sent: another thread may receive its answer at once
        try:
            unsent = memoryview(frame)
            while unsent:  # sendall would have one time for all of it
                self._socket.settimeout(timeout_s)
                unsent = unsent[self._socket.send(unsent) :]
        except OSError as error:
            failure = self._fail(error)
            raise errors.ConnectionFailed(failure.message) from None
        return pending

    def receive_until(self, pending: _Sent[Any]) -> None:
        """Receives answers until ``pending`` has its own. What fails is noted in the requests that wait."""
        with self._receiving:
            while not pending.settled and not self.broken:
                with self._state:
                    oldest = self._waiting[0] if self._waiting else pending
                try:
                    frame = self._receive(oldest.timeout_s)
                except (OSError, EOFError, errors.RemoteProtocolError) as error:
                    if not self.broken:
                        self._fail(error)
                    break
                with self._state:
                    # else sending failed meanwhile, or it was closed: with TLS these may be other bytes
                    if not self._is_broken() and self._waiting and self._waiting[0] is oldest:
                        self._waiting.popleft().frame = frame
        if not pending.settled:
            pending.failure = Unanswered(
                f"the connection to {self.node} was closed before it answered {pending.message.name}"
            )

    def _is_broken(self) -> bool:
        """For another thread may have broken it since the last look."""
        return self.broken

    def _drain(self) -> None:
        with self._state:
            newest = self._waiting[-1] if self._waiting else None
        if newest is not None:
            self.receive_until(newest)

    def _receive(self, silent_s: float) -> memoryview:
        head = self._exactly(_LENGTH.size, silent_s)
        (length,) = _LENGTH.unpack(head)
        if not 4 <= length <= LARGEST_ANSWER:
            raise errors.RemoteProtocolError(
                f"{self.node} answers with bytes that are not of the Kafka protocol ({bytes(head)!r})",
                "check the port, and whether it needs TLS",
            )
        return self._exactly(length, silent_s)

    def _exactly(self, size: int, silent_s: float) -> memoryview:
        """A node that sends is not silent, however long it takes."""
        buffer = memoryview(bytearray(size))
        received = 0
        while received < size:
            self._socket.settimeout(silent_s)
            count = self._socket.recv_into(buffer[received:])
            if not count:
                raise EOFError(f"{self.node} closed the connection")
            received += count
        return buffer

    def _fail(self, error: Exception) -> errors.TxmqError:
        """Breaks the connection: later answers cannot be assigned to requests. All pending requests are
        unanswered.
        """
        self.broken = True
        text = "no answer in time" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
        with self._state:
            waiting, self._waiting = list(self._waiting), deque()
        for pending in waiting:
            if isinstance(error, errors.RemoteProtocolError):
                pending.failure = error
            else:
                pending.failure = Unanswered(f"{self.node} did not answer {pending.message.name}: {text}")
        self._close_socket()
        return errors.ConnectionFailed(f"{self.node}: {text}", "check that Kafka is running, and the address")

    # -- opening and closing ---------------------------------------------------------------------------------

    def _connected(self) -> socket.socket:
        raw = None
        try:
            raw = socket.create_connection(self.node, self._settings.connect_s)
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._settings.tls is None:
                return raw
            return self._settings.tls.wrap_socket(raw, server_hostname=self.node.host)
        except OSError as error:  # also every error of TLS
            if raw is not None:
                raw.close()
            advice = (
                "check the certificates, and whether the port speaks TLS"
                if isinstance(error, ssl.SSLError)
                else "is Kafka running?"
            )
            raise errors.ConnectionFailed(f"cannot connect to {self.node}: {error}", advice) from None

    def _ask(self, codec: RequestCodec) -> Any:
        return self._send(
            VersionedRequest(codec, self._versions, self.node), self._settings.connect_s
        ).answer()

    def _authenticate(self) -> None:
        """SASL, where there is a login; also again on a connection whose session ends (KIP-368)."""
        login = self._settings.login
        if login is None:
            return
        code, mechanisms = self._ask(handshake(login.mechanism))
        if code:
            raise error_of(
                code,
                f"{self.node} does not take the mechanism {login.mechanism}, but {', '.join(mechanisms)}",
            )
        exchange = SaslExchange(login)
        lifetime_ms = 0
        while not exchange.done:
            challenge: Challenge = self._ask(authenticate(exchange.next()))
            if challenge.code:
                raise error_of(
                    challenge.code, f"login to {self.node} by {login.mechanism}", challenge.message
                )
            exchange.receive(challenge.data)
            lifetime_ms = challenge.lifetime_ms
        lifetime_s = max(REAUTHENTICATE * lifetime_ms / 1000, SOONEST_S)
        self._expires = self._clock() + lifetime_s if lifetime_ms else float("inf")

    def close(self) -> None:
        """Requests without an answer get none."""
        self.broken = True
        self._close_socket()

    def _close_socket(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that receives
        self._socket.close()

    def abandon(self) -> None:
        """In a forked child: closes the child's descriptor and leaves the connection to the parent."""
        self.broken = True
        with contextlib.suppress(OSError):
            socket.close(self._socket.detach())


def _in_time(request: port.Request[A], settings: Settings) -> port.Request[A]:
    """Returns the request with a time for the node that ends before ours."""
    most_ms = int(1000 * NODES_SHARE * settings.request_s)
    if getattr(request, "timeout_ms", 0) <= most_ms:
        return request
    any_request: Any = request
    shorter: port.Request[A] = dataclasses.replace(any_request, timeout_ms=most_ms)
    return shorter
