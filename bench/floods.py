"""flood_p99_ms: how long a client waits for a confirm while peers send frames as fast as they can; the notes
have each flood, and the time of a new login beside it.

``FLOODS`` has every type of frame of AMQP that costs something, with and without a login, and on many
channels; ``OTHERS`` what HTTP and Flight (HTTP/2) may be sent in bulk. Each comes from one connection and
from ``PEERS``. One process sends them all, so that the broker has a core.
Not here: counted turns (``tests/server/amqp/test_floods.py``), which takes the frames from here.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import selectors
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import pika

from bench.broker import serving
from bench.report import Figure, note
from broker_core.amqp.v0_9_1 import methods as m
from broker_core.amqp.v0_9_1.decoder import PROTOCOL_HEADER
from broker_core.amqp.v0_9_1.encoder import HEARTBEAT, encode_content, encode_method

PEERS = 50
CHANNELS = 500
CALLS = 2000
SECONDS = 6.0  # some 200 confirms: of 100, the p99 is the longest one
UNDER_WAY = 1 << 20  # bytes that have been sent when the others are looked at
EVERY_S = 0.005  # between two publishes of the other client
QUEUE = "flooded"
PERSISTENT = pika.BasicProperties(delivery_mode=2)
LOGIN = encode_method(0, m.ConnectionStartOk({}, "PLAIN", b"\0guest\0guest", "en_US"))
OPEN = encode_method(0, m.ConnectionTuneOk(2047, 131072, 0)) + encode_method(0, m.ConnectionOpen("/"))


@dataclass(frozen=True)
class Flood:
    """``begin``: sent once; ``again``: as often as it goes. ``login`` False: both follow the protocol header.

    ``refused``: the words of the error that ends its connection; "": nothing is wrong with it but its number.
    ``server``: whose listener it floods; those of HTTP and Flight say all that they send.
    """

    again: bytes
    begin: bytes = b""
    login: bool = True
    refused: str = ""
    server: Literal["amqp", "http", "flight"] = "amqp"

    @property
    def hello(self) -> bytes:
        if self.server != "amqp":
            return self.begin
        return PROTOCOL_HEADER + (LOGIN + OPEN if self.login else b"") + self.begin


def _frame(kind: int, payload: bytes, channel: int = 1) -> bytes:
    return bytes((kind,)) + channel.to_bytes(2, "big") + len(payload).to_bytes(4, "big") + payload + b"\xce"


def _opened(*channels: int) -> bytes:
    return b"".join(encode_method(channel, m.ChannelOpen()) for channel in channels)


def _begun(size: int) -> bytes:
    """A publish whose body has ``size`` bytes, up to them."""
    whole = encode_content(1, m.BasicPublish("", QUEUE), b"", b"x", 0)
    return whole[: -9 - 11] + size.to_bytes(8, "big") + b"\0\0\xce"


def _publish(channel: int, body: bytes = b"x", key: str = QUEUE) -> bytes:
    return encode_content(channel, m.BasicPublish("", key), b"", body, 0)


_MANY = range(1, CHANNELS + 1)
_LARGE = 100_000_000
_EMPTY = "heartbeats or empty pieces of a body"
FLOODS: dict[str, Flood] = {
    "heartbeats, no login": Flood(HEARTBEAT, login=False, refused=_EMPTY),
    "no protocol": Flood(b"GET / HT", login=False, refused="frame_too_large"),
    "heartbeats": Flood(HEARTBEAT, refused=_EMPTY),
    "empty pieces of a body": Flood(_frame(3, b""), _opened(1) + _begun(5), refused=_EMPTY),
    "a body of one byte a frame": Flood(_frame(3, b"x"), _opened(1) + _begun(_LARGE)),
    "a body that was refused": Flood(_frame(3, b"x"), _opened(1) + _begun(1 << 40)),
    "channels that open and close": Flood(_opened(1) + encode_method(1, m.ChannelClose(200, "", 0, 0))),
    "publishes": Flood(_publish(1), _opened(1)),
    "publishes without a body": Flood(_publish(1, b""), _opened(1)),
    "publishes to no queue": Flood(_publish(1, key="none"), _opened(1)),
    "publishes that are confirmed": Flood(_publish(1), _opened(1) + encode_method(1, m.ConfirmSelect(False))),
    "publishes and commits": Flood(
        _publish(1) + encode_method(1, m.TxCommit()), _opened(1) + encode_method(1, m.TxSelect())
    ),
    "declares": Flood(encode_method(1, m.QueueDeclare(QUEUE, durable=True)), _opened(1)),
    "limits": Flood(encode_method(1, m.BasicQos(0, 1, False)), _opened(1)),
    "gets": Flood(encode_method(1, m.BasicGet("empty", True)), _opened(1)),
    "consumers that come and go": Flood(
        encode_method(1, m.BasicConsume("empty", "c")) + encode_method(1, m.BasicCancel("c")), _opened(1)
    ),
    "500 channels that publish": Flood(b"".join(map(_publish, _MANY)), _opened(*_MANY)),
    "500 channels that are confirmed": Flood(
        b"".join(map(_publish, _MANY)),
        _opened(*_MANY) + b"".join(encode_method(each, m.ConfirmSelect(False)) for each in _MANY),
    ),
    "500 channels that commit": Flood(
        b"".join(_publish(each) + encode_method(each, m.TxCommit()) for each in _MANY),
        _opened(*_MANY) + b"".join(encode_method(each, m.TxSelect()) for each in _MANY),
    ),
    "500 channels that declare": Flood(
        b"".join(encode_method(each, m.QueueDeclare(QUEUE, durable=True)) for each in _MANY), _opened(*_MANY)
    ),
}


# nothing here has a login: what comes before one is what everybody may send
_HTTP = b"POST /api/queues HTTP/1.1\r\nHost: broker\r\n"
_HTTP_2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04\0" + bytes(4)  # and its first settings
OTHERS: dict[str, Flood] = {
    "HTTP, requests": Flood(b"GET /api/overview HTTP/1.1\r\nHost: broker\r\n\r\n", server="http"),
    "HTTP, headers": Flood(b"A: b\r\n", _HTTP, server="http"),
    "HTTP, a header without an end": Flood(b"a", _HTTP + b"A: ", server="http"),
    "HTTP, pieces of one byte": Flood(
        b"1\r\nx\r\n", _HTTP + b"Transfer-Encoding: chunked\r\n\r\n", server="http"
    ),
    "HTTP, no protocol": Flood(b"\0\r\n", server="http"),
    "HTTP/2, pings": Flood(b"\0\0\x08\x06\0" + bytes(12), _HTTP_2, server="flight"),
    "HTTP/2, settings": Flood(b"\0\0\0\x04\0" + bytes(4), _HTTP_2, server="flight"),
    "HTTP/2, windows": Flood(b"\0\0\x04\x08\0" + bytes(7) + b"\x01", _HTTP_2, server="flight"),
    "HTTP/2, unknown frames": Flood(b"\0\0\0\xff\0" + bytes(4), _HTTP_2, server="flight"),
    "HTTP/2, priorities": Flood(b"\0\0\x05\x02\0\0\0\0\x01" + bytes(5), _HTTP_2, server="flight"),
    "HTTP/2, a header without an end": Flood(
        b"\0\0\x01\x09\0\0\0\0\x01\x40", _HTTP_2 + b"\0\0\x01\x01\0\0\0\0\x01\x40", server="flight"
    ),
}


def _frame_2(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def _calls(method: str, *, reset: bool = False) -> bytes:
    """``CALLS`` of them by a stranger; the first one again ends the connection."""
    fields = {
        ":method": "POST", ":scheme": "http", ":authority": "broker", "te": "trailers",
        ":path": f"/arrow.flight.protocol.FlightService/{method}", "content-type": "application/grpc",
        "authorization": "Bearer none",
    }  # fmt: skip
    texts = ((each.encode() for each in pair) for pair in fields.items())
    coded = b"".join(
        b"\x10" + bytes((len(name),)) + name + bytes((len(value),)) + value for name, value in texts
    )
    found = bytearray()
    for stream in range(1, 2 * CALLS, 2):
        end = _frame_2(3, 0, stream, b"\0\0\0\x08") if reset else _frame_2(0, 1, stream, bytes(5))
        found += _frame_2(1, 4, stream, coded) + end
    return bytes(found)


OTHERS |= {
    "Flight, calls": Flood(_calls("DoAction"), _HTTP_2, server="flight"),
    "Flight, calls that are reset": Flood(_calls("DoAction", reset=True), _HTTP_2, server="flight"),
    "Flight, calls of nothing": Flood(_calls("Handshake"), _HTTP_2, server="flight"),
}


class _Peer:
    """One flooding connection; it connects again when it is ended."""

    def __init__(self, address: tuple[str, int], flood: Flood, selector: selectors.BaseSelector) -> None:
        self._address, self._flood, self._selector = address, flood, selector
        self._chunk = flood.again * max(65_536 // len(flood.again), 1)
        self._socket: socket.socket | None = None
        self.bytes = 0  # sent

    def go(self) -> None:
        try:
            if self._socket is None:
                self._connect()
            else:
                self._write()
        except BlockingIOError:
            return
        except OSError:
            self._drop()

    def _connect(self) -> None:
        made = socket.create_connection(self._address, 10)
        made.sendall(self._flood.hello)
        made.setblocking(False)
        self._socket, self._left = made, memoryview(self._chunk)
        self._selector.register(made, selectors.EVENT_READ | selectors.EVENT_WRITE, self)

    def _write(self) -> None:
        assert self._socket is not None
        with contextlib.suppress(BlockingIOError):
            while True:
                if not self._socket.recv(1 << 16):
                    raise ConnectionResetError
        sent = self._socket.send(self._left)
        self.bytes += sent
        self._left = self._left[sent:] or memoryview(self._chunk)

    def _drop(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(self._socket)
            self._socket.close()
            self._socket = None


def _send(address: tuple[str, int], flood: Flood, peers: int, under_way: Event) -> None:
    selector = selectors.DefaultSelector()
    every = [_Peer(address, flood, selector) for _ in range(peers)]
    while True:
        for each in every:
            if each._socket is None:
                each.go()
        for key, _ in selector.select(0.01):
            key.data.go()
        if sum(each.bytes for each in every) > UNDER_WAY:
            under_way.set()


@contextlib.contextmanager
def flooding(uri: str, flood: Flood, peers: int) -> Iterator[None]:
    """``uri``: of the server that is flooded."""
    parts = urlsplit(uri)
    address = (parts.hostname or "127.0.0.1", parts.port or 5672)
    context = multiprocessing.get_context("spawn")
    under_way = context.Event()
    sender = context.Process(target=_send, args=(address, flood, peers, under_way), daemon=True)
    sender.start()
    try:
        under_way.wait()
        yield
    finally:
        sender.kill()
        sender.join()


def waits(folder: Path, flood: Flood, peers: int) -> tuple[list[float], float]:
    """How long each confirm took, sorted, and the longest login, in ms, beside ``peers`` that flood.

    The broker is a new one: another carries out for minutes what ended peers left in its sockets, megabytes
    each, and the row would measure two floods.
    """
    with serving(folder, "--http", "127.0.0.1:0", amqp=True) as served:
        assert served.amqp is not None and served.http is not None
        flooded = {"amqp": served.amqp, "http": served.http, "flight": served.url}[flood.server]
        parameters = pika.URLParameters(f"{served.amqp}?heartbeat=0")
        with pika.BlockingConnection(parameters) as connection:
            channel = connection.channel()
            for name in (QUEUE, "empty", "victim"):
                channel.queue_declare(name, durable=True)
            channel.confirm_delivery()
            with flooding(flooded, flood, peers):
                took, logins, end = [], [], time.monotonic() + SECONDS
                while time.monotonic() < end:
                    began = time.monotonic()
                    channel.basic_publish("", "victim", b"x", PERSISTENT)
                    took.append((time.monotonic() - began) * 1000)
                    time.sleep(EVERY_S)
                for _ in range(3):
                    began = time.monotonic()
                    pika.BlockingConnection(parameters).close()
                    logins.append((time.monotonic() - began) * 1000)
        return sorted(took), max(logins)


def flood_p99_ms(folder: Path) -> list[Figure]:
    worst = []
    for row, (name, flood) in enumerate((FLOODS | OTHERS).items()):
        for peers in (1, PEERS):
            took, login = waits(folder / f"{row}-{peers}", flood, peers)
            p99 = took[len(took) * 99 // 100]
            note(
                f"{name}, {peers} connections: p50 {took[len(took) // 2]:.0f} ms, p99 {p99:.0f} ms of "
                f"{len(took)}; login {login:.0f} ms"
            )
            worst.append(p99)
    return [Figure("flood_p99_ms", round(max(worst), 1), "ms")]
