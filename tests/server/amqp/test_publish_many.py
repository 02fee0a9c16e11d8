"""Publishes that are carried out together leave what they leave one by one: the answers, the messages, and
what the channel remembers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker_core.amqp.v0_9_1 import connection as protocol
from broker_core.amqp.v0_9_1 import methods as m
from broker_core.amqp.v0_9_1.decoder import Decoder
from broker_core.amqp.v0_9_1.encoder import encode_content, encode_method
from broker_core.broker.transaction.transaction import Limits
from broker_core.message.properties import Properties
from broker_core.node.local import LocalBroker
from broker_core.server import turns
from broker_core.server.access.logins import Logins
from broker_core.server.amqp import connection as connection_module
from broker_core.server.amqp import handshake
from broker_core.server.amqp.commands import COMMANDS, basic
from broker_core.server.amqp.connection import Connection, Unwritten
from broker_core.server.amqp.handlers.handler import Handlers
from broker_core.server.amqp.options import AmqpOptions
from broker_core.server.commit_queue import CommitQueue
from broker_core.server.listen.unauthenticated_limit import UnauthenticatedLimit
from broker_core.server.quotas import Quotas
from broker_core.store.memory import MemoryStore
from tests.amqp.test_fast_paths import PlainDecoder
from tests.broker.conftest import Clock
from tests.gates import examples

DURABLE = Properties(delivery_mode=2).encode()
PROPERTIES = [
    DURABLE,
    DURABLE,
    b"",
    Properties(delivery_mode=1).encode(),
    Properties(delivery_mode=3).encode(),  # refused
    Properties(delivery_mode=2, expiration="60000").encode(),
    Properties(delivery_mode=2, expiration="soon").encode(),  # refused
    Properties(user_id="guest").encode(),
    Properties(user_id="other").encode(),  # refused
    Properties(headers={"CC": ["b"]}).encode(),
    Properties(reply_to="amq.rabbitmq.reply-to").encode(),  # refused: there is no consumer of answers
]
QUEUES: dict[str, dict[str, Any]] = {
    "a": {},
    "b": {},
    "short": {"x-max-length": 3},
    "full": {"x-max-length": 3, "x-overflow": "reject-publish"},
}
ROUTES = [("", "a"), ("", "a"), ("", "b"), ("", "short"), ("", "full"), ("", "nowhere"), ("all", ""),
          ("missing", "a"), ("amq.transaction", "token")]  # fmt: skip
PUBLISHES = st.tuples(
    st.sampled_from([1, 1, 1, 2]),
    st.sampled_from(ROUTES),
    st.sampled_from(PROPERTIES),
    st.sampled_from(["", "", "mandatory", "immediate"]),
    st.lists(st.sampled_from([1, 1, 1, 5, 0]), max_size=12),
)
STEP = st.one_of(
    PUBLISHES, PUBLISHES, st.tuples(st.sampled_from([1, 2]), st.sampled_from(["commit", "undo"]))
)


@pytest.fixture(scope="module", autouse=True)
def long_turns() -> Iterator[None]:
    """What is fed at once is one tick, however slow the machine is."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("TURN_S", "SHARE_S", "WINDOW_S"):
            patch.setattr(turns, name, 600.0)
        yield


class Loop:
    """What is called in this tick and the next ones."""

    def __init__(self) -> None:
        self._calls: deque[tuple[Callable[..., object], Any]] = deque()

    def call_soon(self, function: Callable[..., object], *arguments: object) -> None:
        self._calls.append((function, arguments))

    call_soon_threadsafe = call_soon  # there is one thread

    def run(self) -> None:
        while self._calls:
            function, arguments = self._calls.popleft()
            function(*arguments)


class Transport:
    def __init__(self) -> None:
        self.written = b""

    def write(self, data: bytes) -> None:
        self.written += data

    def get_extra_info(self, _name: str) -> tuple[str, int]:
        return "127.0.0.1", 1

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, *_: int) -> None: ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def write_eof(self) -> None: ...


class Server:
    """The server of one connection, without sockets and threads."""

    def __init__(self, limits: Limits, spill_rows: int, options: AmqpOptions | None = None) -> None:
        self.broker = LocalBroker(MemoryStore(), Clock(), limits=limits, upkeep=False)
        self.broker.channel_commits.spill_rows = spill_rows
        self.handlers, self.options, self.commands = Handlers(), options or AmqpOptions(), COMMANDS
        self.logins = Logins(self.broker.state.users)
        self.tls, self.unauthenticated, self.quotas = None, UnauthenticatedLimit(1), Quotas()
        self.loop: Any = Loop()
        self.commits = CommitQueue(self.loop, self.broker)
        self.unwritten, self.turns = Unwritten(self.loop), turns.Turns(self.loop)
        self.connection = Connection(self, handshake.offer(self.options))
        self.transport: Any = Transport()
        self.connection.connection_made(self.transport)
        self.commits.answered = self.connection.flush

    def connections_to(self, _vhost: str, _user: str | None = None) -> int:
        return 0

    def opened(self, _connection: Connection) -> None: ...

    def closed(self, _connection: Connection) -> None: ...

    def feed(self, data: bytes) -> None:
        self.connection.data_received(data)
        self.loop.run()

    def left(self) -> object:
        """The answers, the messages in the order of the queues, and what the channels remember."""
        queues = {
            queue.name: [
                row
                for run in queue.log.runs
                for rows in [self.broker.read_block(run.block_id).take(list(run.rows())).to_pylist()]
                for first, end in queue.progress.unsettled_within(run.first, run.end)
                for row in rows[first - run.first : end - run.first]
            ]
            for queue in self.broker.state.topology.queues.values()
        }
        for rows in queues.values():
            for row in rows:  # spilled rows have them in the run
                row.pop("commit_sequence", None)
                row.pop("committed_at", None)
        channels = [
            (
                session.tick_commit.published,
                session.transaction_name,
                sum(spilled.rows for spilled in transaction.spilled),
                transaction.messages,
                transaction.size_bytes,
                transaction.opened_us,
                {queue.name: counted for queue, counted in transaction.incoming.items()},
            )
            for session in self.connection.sessions.by_number.values()
            for transaction in [session.channel.transaction]
        ]
        return self.transport.written, queues, channels


def begun(server: Server, modes: tuple[str, str]) -> None:
    """The client is logged in, there are the queues, and two channels are in their modes."""
    server.feed(b"AMQP\0\0\x09\x01")
    server.feed(encode_method(0, m.ConnectionStartOk({}, "PLAIN", b"\0guest\0guest", "en_US")))
    server.feed(encode_method(0, m.ConnectionTuneOk(2047, 131072, 60)))
    server.feed(encode_method(0, m.ConnectionOpen("/")))
    server.feed(encode_method(1, m.ChannelOpen()) + encode_method(2, m.ChannelOpen()))
    for name, arguments in QUEUES.items():
        server.feed(encode_method(1, m.QueueDeclare(name, durable=True, arguments=arguments)))
    server.feed(encode_method(1, m.ExchangeDeclare("all", "fanout", durable=True)))
    for name in ("a", "b"):
        server.feed(encode_method(1, m.QueueBind(name, "all")))
    for number, mode in enumerate(modes, 1):
        if mode == "tx":
            server.feed(encode_method(number, m.TxSelect()))
        elif mode == "confirm":
            server.feed(encode_method(number, m.ConfirmSelect()))


def encoded(step: tuple[Any, ...]) -> bytes:
    if len(step) == 2:
        return encode_method(step[0], m.TxCommit() if step[1] == "commit" else m.TxRollback())
    channel, (exchange, key), properties, flag, sizes = step
    method = m.BasicPublish(exchange, key, mandatory=flag == "mandatory", immediate=flag == "immediate")
    bodies = [b"%d" % at * size for at, size in enumerate(sizes)]
    return b"".join(encode_content(channel, method, properties, body, 131072) for body in bodies)


@examples(300)
@given(
    st.tuples(*[st.sampled_from(["plain", "tx", "tx", "confirm"])] * 2),
    st.lists(STEP, max_size=10),
    st.integers(10, 1 << 20),
    st.sampled_from([Limits(), Limits(messages=15), Limits(size_bytes=30), Limits(open_s=1000.0)]),
    st.sampled_from([10_000, 10_000, 4]),
)
def test_publishes_carried_out_together_leave_what_they_leave_one_by_one(
    modes, steps, chunk, limits, spill_rows
):
    stream = b"".join(map(encoded, steps))
    together = Server(limits, spill_rows)
    with pytest.MonkeyPatch.context() as plain:
        plain.setattr(protocol, "Decoder", PlainDecoder)
        one_by_one = Server(limits, spill_rows)
    for server in (together, one_by_one):
        begun(server, modes)
        for start in range(0, len(stream), chunk):
            server.feed(stream[start : start + chunk])
    found, expected = together.left(), one_by_one.left()
    if spill_rows < 10_000:  # the pieces that are spilled may have other sizes
        found, expected = found[:2], expected[:2]
    assert found == expected
    for server in (together, one_by_one):
        server.broker.close()


@pytest.mark.parametrize("mode", ["plain", "tx", "confirm"])
def test_the_usual_publishes_are_carried_out_together(mode: str, monkeypatch: pytest.MonkeyPatch):
    carried_out: list[tuple[int, bool]] = []

    def counted(session: Any, publishes: Any) -> bool:
        carried_out.append((len(publishes.bodies), basic.publish_many(session, publishes)))
        return carried_out[-1][1]

    monkeypatch.setattr(connection_module, "publish_many", counted)
    server = Server(Limits(), 10_000)
    begun(server, (mode, mode))
    publish = encode_content(1, m.BasicPublish("", "a"), DURABLE, b"x", 131072)
    server.feed(publish * 10)
    server.feed(publish * 20 + (encode_method(1, m.TxCommit()) if mode == "tx" else b""))
    assert carried_out == [(8, True), (20, True)]
    assert server.broker.state.topology.queue("a").messages == 30
    server.broker.close()


def test_the_plain_decoder_makes_no_group():
    publish = encode_content(1, m.BasicPublish("", "a"), DURABLE, b"x", 131072)
    assert len(PlainDecoder(handshake=False).feed(publish * 5)) == 5
    assert len(Decoder(handshake=False).feed(publish * 5)) == 3
