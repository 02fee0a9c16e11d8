"""Any sequence of commands has the same effects and the same answers, however its bytes are cut into reads:
whole in one read, one command per read, or reads of random size. So what came before a command that fails is
carried out and answered before the error.

Channels are concurrent, as in RabbitMQ: each has its own queues here, and behind an error of the connection only
the channel of that error goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from broker_core.amqp.v0_9_1 import methods as m
from broker_core.amqp.v0_9_1.decoder import Decoder
from broker_core.amqp.v0_9_1.encoder import encode_content, encode_method
from broker_core.amqp.v0_9_1.events import Command
from broker_core.broker.transaction.transaction import Limits
from broker_core.message.properties import Properties
from broker_core.server import turns
from broker_core.server.amqp.options import AmqpOptions
from tests.gates import examples
from tests.server.amqp.test_publish_many import Server, begun

CHANNELS = (1, 2)
MODES = ("plain", "confirm", "tx")
ONE = Properties(delivery_mode=2).encode()
LIMITS = Limits()
TOO_LARGE = 1_000
CONFIRMS = (m.BasicAck, m.BasicNack)


class Sent(NamedTuple):
    """A command of a channel as bytes. ``channel`` 0: of the connection."""

    channel: int
    name: str
    data: bytes


def publish(channel: int, key: str, body: bytes = b"x", properties: bytes = ONE, **flags: Any) -> bytes:
    exchange = flags.pop("exchange", "")
    return encode_content(channel, m.BasicPublish(exchange, key, **flags), properties, body, 131072)


def method(kind: Callable[..., m.Method], *arguments: Any, **named: Any) -> Callable[[int], bytes]:
    return lambda number: encode_method(number, kind(*arguments, **named))


Make = Callable[[int], bytes]
WORKS: dict[str, Make] = {
    "publish": lambda n: publish(n, f"own{n}"),
    "publish alike": lambda n: publish(n, f"own{n}") * 5,
    "mandatory": lambda n: publish(n, "nowhere", mandatory=True),
    "mandatory alike": lambda n: publish(n, "nowhere", mandatory=True) * 4,
    "unroutable": lambda n: publish(n, "nowhere"),
    "full": lambda n: publish(n, f"full{n}") * 2,
    "copies": lambda n: publish(n, f"own{n}", properties=Properties(headers={"CC": [f"full{n}"]}).encode()),
    "get": lambda n: encode_method(n, m.BasicGet(f"own{n}", no_ack=True)),
    "hold": lambda n: encode_method(n, m.BasicGet(f"own{n}")),
    "ack": method(m.BasicAck, 1),
    "requeue all": method(m.BasicNack, 0, multiple=True, requeue=True),
    "count": lambda n: encode_method(n, m.QueueDeclare(f"own{n}", passive=True)),
    "purge": lambda n: encode_method(n, m.QueuePurge(f"own{n}")),
    "bind": lambda n: encode_method(n, m.QueueBind(f"own{n}", "all", f"k{n}")),
    "declare": lambda n: encode_method(n, m.ExchangeDeclare(f"e{n}", "direct")),
    "qos": method(m.BasicQos, prefetch_count=7),
    "recover": method(m.BasicRecover, True),
    "commit": method(m.TxCommit),
    "rollback": method(m.TxRollback),
    "select": method(m.ConfirmSelect),
}
CHANNEL_ERRORS: dict[str, Make] = {
    "no exchange": lambda n: publish(n, "k", exchange="missing"),
    "no exchange alike": lambda n: publish(n, "k", exchange="missing") * 3,
    "no answers": lambda n: publish(
        n, "nowhere", properties=Properties(reply_to="amq.rabbitmq.reply-to").encode()
    ),
    "another user": lambda n: publish(n, f"own{n}", properties=Properties(user_id="other").encode()),
    "expiration": lambda n: publish(n, f"own{n}", properties=Properties(expiration="1.5").encode()),
    "too large": lambda n: publish(n, f"own{n}", b"x" * (TOO_LARGE + 1)),
    "unknown tag": method(m.BasicAck, 99),
    "no queue": method(m.QueueDeclare, "missing", passive=True),
    "no binding": lambda n: encode_method(n, m.QueueBind("missing", "all", "")),
    "get from no queue": method(m.BasicGet, "missing"),
    "another type": method(m.ExchangeDeclare, "all", "direct"),
}
CONNECTION_ERRORS: dict[str, Make] = {
    "immediate": lambda n: publish(n, f"own{n}", immediate=True),
    "prefetch_size": method(m.BasicQos, prefetch_size=7),
    "unknown type": method(m.ExchangeDeclare, "x", "nonsense"),
    "a channel that is not open": lambda _: encode_method(7, m.TxCommit()),
    "damaged": lambda n: b"\x01\0\x01\0\0\0\4\0\0\0\0\0",
}
CLOSES: dict[str, Make] = {"close": method(m.ChannelClose)}
ALL = {**WORKS, **CHANNEL_ERRORS, **CONNECTION_ERRORS, **CLOSES}
OF_CONNECTION = ("a channel that is not open", "damaged")


def sent(channel: int, name: str) -> Sent:
    return Sent(0 if name in OF_CONNECTION else channel, name, ALL[name](channel))


COMMAND = st.builds(
    sent,
    st.sampled_from(CHANNELS),
    st.one_of(
        *[st.sampled_from(sorted(WORKS))] * 5,
        st.sampled_from(sorted(CHANNEL_ERRORS)),
        st.sampled_from(sorted({**CONNECTION_ERRORS, **CLOSES})),
    ),
)


@pytest.fixture(scope="module", autouse=True)
def long_turns() -> Iterator[None]:
    """What is fed at once is one tick, however slow the machine is."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("TURN_S", "SHARE_S", "WINDOW_S"):
            patch.setattr(turns, name, 600.0)
        yield


class Client:
    """A server and what its client got."""

    def __init__(self, modes: tuple[str, str]) -> None:
        self.server = Server(LIMITS, 10_000, AmqpOptions(max_body_bytes=TOO_LARGE))
        begun(self.server, modes)
        for number in CHANNELS:
            self.server.feed(encode_method(number, m.QueueDeclare(f"own{number}", durable=True)))
            bounds = {"x-max-length": 3, "x-overflow": "reject-publish"}
            self.server.feed(
                encode_method(number, m.QueueDeclare(f"full{number}", durable=True, arguments=bounds))
            )
        self.server.transport.written = b""

    @property
    def closed(self) -> bool:
        return self.server.connection.closed_for_sending

    def left(self) -> tuple[object, object, object]:
        """The answers of each channel, the queues with their messages, and what the channels remember."""
        written, queues, channels = self.server.left()  # type: ignore[misc]
        counts = [
            (queue.name, queue.messages, queue.unacknowledged)
            for queue in self.server.broker.state.topology.queues.values()
        ]
        answers: dict[int, list[Command]] = {}
        for event in Decoder(0, handshake=False).feed(written):
            assert isinstance(event, Command), event
            answers.setdefault(event.channel, []).append(event)
        return {number: told(each) for number, each in answers.items()}, (queues, counts), channels

    def close(self) -> None:
        self.server.broker.close()


def told(answers: Sequence[Command]) -> list[object]:
    """The answers in order. Between two of them: the messages that came back, in order, and what was confirmed
    so far, in any order. A return comes before the confirm of its message.
    """
    found: list[object] = []
    returned: list[Command] = []
    confirmed: dict[int, str] = {}
    settled: set[int] = set()

    def gathered() -> None:
        if returned or confirmed:
            found.append((tuple(returned), tuple(sorted(confirmed.items()))))
            returned.clear()
            confirmed.clear()

    for answer in answers:
        if isinstance(answer.method, CONFIRMS):
            tag = answer.method.delivery_tag
            first = 1 if answer.method.multiple else tag  # all that have none yet
            new = set(range(first, tag + 1)) - settled
            assert new, "confirmed twice"
            confirmed.update(dict.fromkeys(new, answer.method.NAME))
            settled |= new
        elif isinstance(answer.method, m.BasicReturn):
            returned.append(answer)
        else:
            gathered()
            found.append(answer)
    gathered()
    return found


def cut(data: bytes, sizes: Sequence[int]) -> Iterator[bytes]:
    position, at = 0, 0
    while position < len(data):
        size = sizes[at % len(sizes)]
        yield data[position : position + size]
        position, at = position + size, at + 1


def sequence(*commands: tuple[int, str]) -> list[Sent]:
    return [sent(*each) for each in commands]


@examples(150)
@given(
    st.tuples(*[st.sampled_from(MODES)] * 2),
    st.lists(COMMAND, min_size=1, max_size=14),
    st.lists(st.integers(1, 400), min_size=1, max_size=5),
)
@example(("confirm", "plain"), sequence((1, "mandatory alike"), (1, "no exchange")), [50])
@example(("plain", "plain"), sequence((1, "mandatory"), (1, "bind"), (1, "unknown tag")), [50])
@example(("confirm", "confirm"), sequence((1, "publish"), (2, "mandatory"), (2, "immediate")), [50])
@example(("tx", "tx"), sequence((1, "publish"), (1, "commit"), (1, "purge"), (2, "prefetch_size")), [50])
@example(("plain", "confirm"), sequence((2, "publish"), (2, "close"), (1, "damaged")), [50])
@example(("plain", "plain"), sequence((1, "count"), (1, "no queue"), (1, "too large")), [50])
@example(("confirm", "tx"), sequence((1, "publish"), (1, "expiration")), [50])
@example(("confirm", "tx"), sequence((1, "publish"), (1, "close"), (1, "publish alike"), (1, "close")), [9])
@example(("plain", "plain"), sequence((1, "ack"), (1, "close"), (1, "close")), [50])
@example(("plain", "confirm"), sequence((2, "full"), (2, "full")), [50])
@example(("plain", "plain"), sequence((1, "bind"), (1, "immediate"), (1, "too large"), (1, "close")), [50])
def test_a_sequence_has_the_same_effects_and_answers_whatever_its_reads_are(
    modes: tuple[str, str], commands: list[Sent], sizes: list[int]
) -> None:
    alone = Client(modes)
    done: list[Sent] = []
    closed: set[int] = set()  # by the client: what it sends on them before close-ok is ignored
    for at, each in enumerate(commands):
        done.append(each)
        if each.channel in closed:
            continue
        if each.name in CLOSES:
            closed.add(each.channel)
        alone.server.feed(each.data)
        if alone.closed:
            done += [other for other in commands[at + 1 :] if other.channel == each.channel and each.channel]
            break
    expected = alone.left()
    alone.close()
    data = b"".join(each.data for each in done)
    for reads in ([data], list(cut(data, sizes))):
        client = Client(modes)
        for read in reads:
            client.server.connection.data_received(read)  # within one tick, where it does not end by itself
        client.server.loop.run()
        found = client.left()
        client.close()
        assert found == expected


@examples(50)
@given(st.sampled_from(MODES), st.sampled_from(sorted({**WORKS, **CHANNEL_ERRORS, **CLOSES})))
@example("plain", "too large")
def test_what_comes_behind_close_ok_is_refused_and_never_carried_out(mode: str, late: str) -> None:
    """So the cut decides between silence and an error, as in RabbitMQ, and never about an effect."""
    client = Client((mode, "plain"))
    client.server.feed(CLOSES["close"](1))
    _, queues, _ = client.left()
    client.server.feed(ALL[late](1))
    answers, after, _ = client.left()
    client.close()
    (refused,) = answers[0]
    assert refused.method.reply_code == 504 and after == queues
