"""One AMQP 0-9-1 connection over a raw socket, encoded and decoded by pamqp: it may send anything, and says
what came back.

Not a client: nothing is answered on its own but what ``opened`` and ``end`` say.
Invariant: what is received is returned, frame by frame.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar
from urllib.parse import urlsplit

from pamqp import base, body, commands, constants, exceptions, header, heartbeat
from pamqp import frame as codec

from tests.progress import GUARD_S

HEADER = b"AMQP\x00\x00\x09\x01"
AnyFrame = base.Frame | body.ContentBody | header.ContentHeader | header.ProtocolHeader | heartbeat.Heartbeat
Method = TypeVar("Method", bound=base.Frame)
CAPABILITIES = {
    "authentication_failure_close": True,
    "consumer_cancel_notify": True,
    "connection.blocked": True,
    "basic.nack": True,
}


def raw(
    frame_type: int, channel: int, payload: bytes, *, end: bytes = b"\xce", size: int | None = None
) -> bytes:
    """A frame as it goes over the wire, right or wrong; ``size`` is what it says of its payload."""
    return struct.pack(">BHI", frame_type, channel, len(payload) if size is None else size) + payload + end


def method(channel: int, class_id: int, method_id: int, arguments: bytes = b"") -> bytes:
    """A method frame whose arguments are encoded already."""
    return raw(constants.FRAME_METHOD, channel, struct.pack(">HH", class_id, method_id) + arguments)


def encoded(channel: int, frame: AnyFrame) -> bytes:
    return codec.marshal(frame, channel)


def changed(frame: Method, **fields: Any) -> Method:
    """The frame with fields that its constructor refuses."""
    frame.validate = lambda: None  # type: ignore[method-assign]
    for name, value in fields.items():
        setattr(frame, name, value)
    return frame


def content(
    channel: int, publish: base.Frame, data: bytes, *, frame_max: int = 131_072, **properties: Any
) -> bytes:
    """A method with its content, in frames of at most ``frame_max`` bytes."""
    frames = [encoded(channel, publish)]
    frames.append(
        encoded(channel, header.ContentHeader(0, len(data), commands.Basic.Properties(**properties)))
    )
    step = frame_max - 8
    frames += [
        raw(constants.FRAME_BODY, channel, data[first : first + step]) for first in range(0, len(data), step)
    ]
    return b"".join(frames)


def contents(
    channel: int, publish: base.Frame, bodies: Iterable[bytes], **properties: Any
) -> Iterator[bytes]:
    """The same method with each of these bodies, none of them empty or longer than a frame. What is the same
    is encoded once.
    """
    method = encoded(channel, publish)
    heads: dict[int, bytes] = {}
    for data in bodies:
        size = len(data)
        if size not in heads:
            heads[size] = encoded(
                channel, header.ContentHeader(0, size, commands.Basic.Properties(**properties))
            )
        yield method + heads[size] + raw(constants.FRAME_BODY, channel, data)


class Unknown(base.Frame):
    """A method that 0-9-1 does not have."""


class Closed(Exception):
    """The broker ended the socket; ``received`` is what came before and was no whole frame."""

    def __init__(self, received: bytes = b"") -> None:
        super().__init__(f"the broker closed the socket; left: {received!r}")
        self.received = received


class Peer:
    """One socket to the broker at ``url``; ``timeout_s`` is how long it waits for a frame."""

    def __init__(self, url: str, timeout_s: float = GUARD_S) -> None:
        parts = urlsplit(url)
        self.user, self.password = parts.username or "guest", parts.password or "guest"
        self.host, self.port, self.timeout_s = parts.hostname or "127.0.0.1", parts.port or 5672, timeout_s
        self.socket = socket.create_connection((self.host, self.port), timeout_s)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = bytearray()
        self.frame_max = 131_072

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.abort()

    def abort(self) -> None:
        """Without a word."""
        self.socket.close()

    def shutdown(self) -> None:
        """Nothing more is sent; what comes is still read."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)

    def fileno(self) -> int:
        return self.socket.fileno()

    # -- the way out -----------------------------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        self.socket.settimeout(self.timeout_s)
        try:
            self.socket.sendall(data)
        except (ConnectionResetError, BrokenPipeError):
            pass  # what the broker said before it closed is still to be read

    def send(self, channel: int, *frames: AnyFrame) -> None:
        self.write(b"".join(encoded(channel, frame) for frame in frames))

    def publish(
        self,
        channel: int,
        exchange: str,
        routing_key: str,
        data: bytes,
        *,
        mandatory: bool = False,
        **properties: Any,
    ) -> None:
        publish = commands.Basic.Publish(exchange=exchange, routing_key=routing_key, mandatory=mandatory)
        self.write(content(channel, publish, data, frame_max=self.frame_max, **properties))

    # -- the way in ------------------------------------------------------------------------------------------

    def _fill(self, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the broker said nothing")
        self.socket.settimeout(left)
        try:
            data = self.socket.recv(1 << 20)
        except ConnectionResetError:
            data = b""
        if not data:
            raise Closed(bytes(self._buffer))
        self._buffer += data

    def receive(self, timeout_s: float | None = None) -> tuple[int, AnyFrame]:
        """The next frame with its channel, heartbeats too. Raises TimeoutError, and Closed at the end of the
        socket.
        """
        deadline = time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)
        while len(self._buffer) < 7:
            self._fill(deadline)
        used = 8 if self._buffer[:4] == b"AMQP" else 8 + struct.unpack_from(">I", self._buffer, 3)[0]
        while len(self._buffer) < used:
            self._fill(deadline)
        found = bytes(self._buffer[:used])
        del self._buffer[:used]
        if found[0] == constants.FRAME_BODY and found[-1] == constants.FRAME_END:
            return int.from_bytes(found[1:3], "big"), body.ContentBody(found[7:-1])
        try:
            _, channel, frame = codec.unmarshal(found)
        except exceptions.UnmarshalingException:
            _, channel, _, class_id, method_id = struct.unpack_from(">BHIHH", found)
            frame = Unknown()
            frame.name = f"class {class_id}, method {method_id}"  # type: ignore[misc]
        return channel, frame

    def expect(self, kind: type[Method], channel: int | None = None) -> Method:
        """The next frame that is no heartbeat: a ``kind``, or the test fails."""
        while True:
            where, frame = self.receive()
            if isinstance(frame, heartbeat.Heartbeat):
                continue
            assert isinstance(frame, kind), (
                f"{kind.name} expected, but {described(frame)} came on channel {where}"
            )
            assert channel is None or where == channel, (
                f"{kind.name} on channel {where}, expected on {channel}"
            )
            return frame

    def call(self, channel: int, request: base.Frame, answer: type[Method]) -> Method:
        self.send(channel, request)
        return self.expect(answer, channel)

    def declare_exclusive(self, channel: int, queue: str) -> None:
        """When the connection that had it has ended, which takes longer than its socket."""
        while True:
            self.send(channel, commands.Queue.Declare(queue=queue, exclusive=True))
            frame = self.receive()[1]
            if isinstance(frame, commands.Queue.DeclareOk):
                return
            assert isinstance(frame, commands.Channel.Close) and frame.reply_code == 405, described(frame)
            self.send(channel, commands.Channel.CloseOk())
            self.open(channel)

    def content(self, channel: int | None = None) -> tuple[commands.Basic.Properties, bytes]:
        """Header and body of the method that was received last."""
        where, head = self.receive()
        assert isinstance(head, header.ContentHeader) and channel in (None, where)
        data = bytearray()
        while len(data) < head.body_size:
            again, part = self.receive()
            assert isinstance(part, body.ContentBody) and again == where
            data += part.value or b""
        return head.properties, bytes(data)

    def get(
        self, channel: int, queue: str, *, no_ack: bool = True
    ) -> tuple[commands.Basic.GetOk, bytes] | None:
        """Basic.get; None where the queue is empty."""
        self.send(channel, commands.Basic.Get(queue=queue, no_ack=no_ack))
        where, frame = self.receive()
        assert where == channel
        if isinstance(frame, commands.Basic.GetEmpty):
            return None
        assert isinstance(frame, commands.Basic.GetOk), described(frame)
        return frame, self.content(channel)[1]

    def count(self, channel: int, queue: str) -> int:
        """Ready messages, by a passive declaration."""
        return int(
            self.call(
                channel, commands.Queue.Declare(queue=queue, passive=True), commands.Queue.DeclareOk
            ).message_count
        )

    def drain(self, channel: int, queue: str) -> list[tuple[bool, bytes]]:
        """Takes all messages that are ready now, in their order: redelivered and body of each."""
        wanted = self.count(channel, queue)
        self.call(
            channel,
            commands.Basic.Consume(queue=queue, consumer_tag="drain", no_ack=True),
            commands.Basic.ConsumeOk,
        )
        found = []
        while len(found) < wanted:
            deliver = self.expect(commands.Basic.Deliver, channel)
            found.append((bool(deliver.redelivered), self.content(channel)[1]))
        self.call(channel, commands.Basic.Cancel("drain"), commands.Basic.CancelOk)
        return found

    # -- opening and closing ---------------------------------------------------------------------------------

    def started(self) -> commands.Connection.Start:
        self.write(HEADER)
        return self.expect(commands.Connection.Start, 0)

    def start_ok(
        self,
        mechanism: str = "PLAIN",
        response: str | None = None,
        capabilities: dict[str, Any] | None = None,
    ) -> None:
        plain = f"\0{self.user}\0{self.password}" if response is None else response
        properties = {
            "product": "peer",
            "capabilities": CAPABILITIES if capabilities is None else capabilities,
        }
        self.send(0, commands.Connection.StartOk(properties, mechanism, plain, "en_US"))

    def tuned(self) -> commands.Connection.Tune:
        self.started()
        self.start_ok()
        return self.expect(commands.Connection.Tune, 0)

    def opened(
        self,
        *channels: int,
        frame_max: int = 131_072,
        channel_max: int = 2047,
        heartbeat_s: int = 0,
        vhost: str = "/",
    ) -> Peer:
        """The connection open, with these channels open."""
        self.tuned()
        self.frame_max = frame_max
        self.send(0, commands.Connection.TuneOk(channel_max, frame_max, heartbeat_s))
        named = changed(commands.Connection.Open(), virtual_host=vhost)  # pamqp knows fewer names
        self.call(0, named, commands.Connection.OpenOk)
        for channel in channels:
            self.open(channel)
        return self

    def open(self, channel: int) -> None:
        self.call(channel, commands.Channel.Open(), commands.Channel.OpenOk)

    def end(self) -> None:
        """As a client ends: connection.close, close-ok, and the end of the socket."""
        self.send(0, commands.Connection.Close(200, "bye", 0, 0))
        while not isinstance(self.receive()[1], commands.Connection.CloseOk):
            pass
        self.abort()


@contextlib.contextmanager
def peer(url: str, *channels: int, **tune: int) -> Iterator[Peer]:
    """An open connection with these channels open."""
    with Peer(url) as made:
        yield made.opened(*channels, **tune)


def described(frame: AnyFrame) -> str:
    if isinstance(frame, base.Frame):
        return f"{frame.name}({', '.join(f'{name}={value!r}' for name, value in frame)})"
    return repr(frame)
