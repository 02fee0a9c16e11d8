"""Random contents of messages through every listener and every later life: nothing is lost, doubled or torn, and
the broker goes on.

Each message is in exactly one queue, in the hands of one channel or transaction, or settled by somebody: a
set of bodies says which. Nothing here may drop one: the queues and exchanges lead to each other without a
cycle, and each exchange takes everything to one queue.
"""

from __future__ import annotations

import random
import struct
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from broker_core.broker.transaction.publish import Publish
from broker_core.core import errors
from broker_core.engine import BranchHeader
from broker_core.message.field_table import MAX_NESTING, Long, Timestamp
from broker_core.message.message import Message
from broker_core.message.properties import Properties, delivery_mode
from broker_core.node.channel import LocalChannel
from broker_core.node.engine import EmbeddedEngine
from connector.stream.schema import properties_column
from tests.broker.conftest import Node
from tests.reading import unsettled

HISTORIES = 40
STEPS = 60
TYPES = ("direct", "fanout", "topic", "headers")
NAMES = (
    "CC",
    "BCC",
    "x-death",
    "x-delivery-count",
    "x-first-death-queue",
    "x-first-death-reason",
    "x-original-transaction",
    "a",
    "k" * 255,
)
SOURCES: dict[str, dict[str, Any]] = {
    "plain": {},
    "late": {"x-message-ttl": 1000},
    "short": {"x-max-length": 2},
    "small": {"x-max-length-bytes": 30},
    "quorum": {"x-queue-type": "quorum", "x-delivery-limit": 1},
    "ranked": {"x-max-priority": 4},
}


def value(choose: random.Random, depth: int = 0) -> Any:
    """A header's value of any type, in range and at its edges."""
    kind = choose.randrange(14 if depth < 3 else 11)
    match kind:
        case 0:
            return None
        case 1:
            return choose.random() < 0.5
        case 2:
            return choose.choice([0, 1, -1, 2**31, -(2**31), 2**63 - 1, -(2**63)])
        case 3:
            return Long(choose.choice([1, 2**63 - 1, -(2**63)]))
        case 4:
            return Timestamp(choose.choice([0, 2**63, 2**64 - 1]))
        case 5:
            return choose.choice([0.0, float("nan"), float("inf"), 1e308])
        case 6:
            return choose.choice([Decimal(0), Decimal((1, (2, 1), -255)), Decimal("-21474836.48")])
        case 7:
            return choose.choice(["", "plain", "final", "é" * 200, "expired", "rejected"])
        case 8 | 9:
            return choose.randbytes(choose.randrange(4))
        case 10:
            return {
                # one of a target would be a cycle, which drops the message
                "queue": choose.choice([*SOURCES, "elsewhere", 3]),
                "reason": choose.choice(["expired", "rejected", None]),
                "count": Long(7),
            }
        case 11:
            return [value(choose, depth + 1) for _ in range(choose.randrange(3))]
        case 12:
            return {choose.choice(NAMES): value(choose, depth + 1) for _ in range(choose.randrange(3))}
    deep: Any = 1
    for _ in range(choose.choice([5, MAX_NESTING - 2 - depth])):
        deep = [deep] if choose.random() < 0.5 else {"n": deep}
    return deep


def contents(choose: random.Random) -> bytes:
    """Encoded properties: sound ones, and every fourth damaged in one place."""
    if choose.random() < 0.2:
        return b""
    headers = {choose.choice(NAMES): value(choose) for _ in range(choose.randrange(4))}
    if choose.random() < 0.3:
        headers["CC"] = [value(choose) for _ in range(choose.randrange(3))]
    for name in ("CC", "BCC"):  # a copy of its own in a queue (``tests/server/test_copies.py``) is no double
        if isinstance(headers.get(name), list):
            headers[name] = [f"no {each}" if each in (*SOURCES, "final") else each for each in headers[name]]
    try:
        encoded = Properties(
            headers=headers,
            delivery_mode=choose.choice([None, 1, 2, 2, 2, 3]),
            priority=choose.choice([None, 0, 9, 255]),
            expiration=choose.choice([None, None, None, "500", "0", "-1", "soon", "9" * 255]),
            message_id=choose.choice([None, "m", "é" * 127]),
            timestamp=choose.choice([None, 2**64 - 1]),
        ).encode()
    except errors.LocalProtocolError:
        return b""
    if encoded and choose.random() < 0.25:
        at = choose.randrange(len(encoded))
        match choose.randrange(3):
            case 0:
                encoded = encoded[:at]
            case 1:
                encoded = encoded[:at] + choose.randbytes(1) + encoded[at + 1 :]
            case 2:
                encoded = encoded + choose.randbytes(3)
    return encoded


class World:
    def __init__(self, seed: int) -> None:
        self.choose = random.Random(seed)
        self.node = Node()
        self.engine = EmbeddedEngine(self.node.broker)
        self.expected: set[bytes] = set()
        self.transient: set[bytes] = set()  # gone with a restart, perhaps
        # xid -> what it publishes, what it settles for good
        self.prepared: dict[str, tuple[set[bytes], set[bytes]]] = {}
        self.number = 0
        with self.node.channel() as channel:
            channel.queue_declare("final")
            channel.queue_declare(
                "dead",
                arguments={
                    "x-max-length": 3,
                    "x-dead-letter-exchange": "",
                    "x-dead-letter-routing-key": "final",
                },
            )
            for kind in TYPES:
                channel.exchange_declare(f"dlx-{kind}", kind)
            for name, arguments in SOURCES.items():
                kind = self.choose.choice(TYPES)
                more = {"x-dead-letter-exchange": f"dlx-{kind}"}
                if kind == "direct" or self.choose.random() < 0.3:
                    more["x-dead-letter-routing-key"] = "k"
                channel.queue_declare(name, arguments={**arguments, **more})
            channel.queue_bind("dead", "dlx-direct", "k")
            channel.queue_bind("dead", "dlx-fanout")
            channel.queue_bind("dead", "dlx-topic", "#")
            channel.queue_bind("dead", "dlx-headers", "", {"x-match": "all"})

    # -- listeners -----------------------------------------------------------------------------------------------
    def body(self, properties: bytes) -> bytes:
        self.number += 1
        body = b"message %d" % self.number
        try:
            if delivery_mode(properties) == 1:
                self.transient.add(body)
        except errors.RemoteProtocolError:
            pass
        return body

    def publish(self) -> None:
        properties, queue = contents(self.choose), self.choose.choice([*SOURCES])
        body = self.body(properties)
        with self.node.channel() as channel:
            transactional = self.choose.random() < 0.5
            if transactional:
                channel.tx_select()
            try:
                channel.publish(body, routing_key=queue, properties=properties)
            except (errors.RemoteProtocolError, errors.PreconditionFailed):
                return
            if transactional:
                channel.tx_commit()
        self.expected.add(body)

    def put_in(self) -> None:
        """What no listener lets in."""
        properties, name = contents(self.choose), self.choose.choice([*SOURCES])
        body = self.body(properties)
        message = Message(body, name, "", properties)
        self.node.broker.run(
            lambda state, change, now: state.messages.enqueue(
                change, [Publish(message, (state.topology.queue(name),))], now
            )
        )
        self.expected.add(body)

    def stage(self) -> None:
        rows = [contents(self.choose) for _ in range(self.choose.choice([1, 3, 300]))]
        bodies = [self.body(properties) for properties in rows]
        self.transient.difference_update(bodies)  # staged rows are written, whatever they say
        self.transient.update(bodies)  # or not: few rows go in one by one
        name, token = self.choose.choice([*SOURCES]), f"token {self.number}"
        header = BranchHeader(branch=token, kind="publish", target={}, partition=0, attempt=0, token=token)
        table = pa.RecordBatch.from_pydict(
            {"body": bodies, "routing_key": [name] * len(rows), "properties": pa.array(rows, pa.binary())},
        )
        try:
            staged = self.engine.stage(header, [table])
        except (errors.RemoteProtocolError, errors.PreconditionFailed):
            self.engine.rollback_batch(token)
            return
        self.engine.commit_branches(token, [staged])
        self.expected.update(bodies)

    # -- later lives -----------------------------------------------------------------------------------------
    def got(self, channel: LocalChannel) -> list[tuple[int, bytes]]:
        found = []
        for name in self.choose.sample([*SOURCES, "dead"], 3):
            for _ in range(self.choose.randrange(4)):
                delivery = channel.get(name)
                if delivery is not None:
                    found.append((delivery.tag, delivery.body))
        return found

    def settle(self, channel: LocalChannel, found: list[tuple[int, bytes]]) -> set[bytes]:
        """Which are settled for good."""
        gone = set()
        for tag, body in found:
            match self.choose.randrange(4):
                case 0:
                    channel.ack(tag)
                    gone.add(body)
                case 1:
                    channel.reject(tag, requeue=False)
                case 2:
                    channel.reject(tag, requeue=True)
        return gone

    def consume(self) -> None:
        with self.node.channel() as channel:
            self.expected -= self.settle(channel, self.got(channel))

    def transact(self) -> None:
        with self.node.channel() as channel:
            found = self.got(channel)
            channel.tx_select()
            body = self.body(b"")
            channel.publish(body, routing_key=self.choose.choice([*SOURCES]))
            gone = self.settle(channel, found)
            match self.choose.randrange(3):
                case 0:
                    channel.tx_commit()
                    self.expected.add(body)
                    self.expected -= gone
                case 1:
                    channel.tx_rollback()
                case 2:
                    xid = f"xid {self.number}"
                    channel.prepare(xid)
                    self.prepared[xid] = ({body}, gone)

    def decide(self) -> None:
        if self.prepared:
            xid = self.choose.choice(sorted(self.prepared))
            new, gone = self.prepared.pop(xid)
            if self.choose.random() < 0.5:
                self.node.broker.commit(xid)
                self.expected |= new
                self.expected -= gone
            else:
                self.node.broker.rollback(xid)

    def expire(self) -> None:
        self.node.clock.advance(self.choose.choice([0.1, 0.6, 2]))
        self.node.broker.upkeep.expire()

    def seal(self) -> None:
        self.node.broker.upkeep.close_open()
        self.node.broker.upkeep.seal()

    def compact(self) -> None:
        self.node.broker.upkeep.compact()

    def restart(self) -> None:
        self.node.restart(clean=self.choose.random() < 0.5)
        self.engine = EmbeddedEngine(self.node.broker)
        there = self.there()
        self.expected = {body for body in self.expected if body in there or body not in self.transient}

    # -- what must hold --------------------------------------------------------------------------------------
    def there(self) -> list[bytes]:
        return [body for name in (*SOURCES, "dead", "final") for body in self.node.browse(name)]

    def check(self) -> None:
        there = self.there()
        assert len(there) == len(set(there)), "doubled"
        assert set(there) == self.expected
        state = self.node.broker.state
        assert self.node.broker.committer.failure is None
        for name in (*SOURCES, "dead", "final"):
            queue = state.topology.queue(name)
            rows = [state.messages.fetch(queue, at) for at in unsettled(queue)]
            assert len(properties_column(pa.array([row.properties for row in rows], pa.binary()))) == len(
                rows
            )
            if name in ("dead", "final"):
                for row in rows:
                    assert Properties.decode(row.properties).headers["x-death"]

    def run(self) -> None:
        steps = (
            [self.publish] * 4
            + [self.put_in] * 3
            + [self.consume] * 3
            + [self.transact] * 2
            + [self.expire] * 2
        )
        steps += [self.stage, self.decide, self.seal, self.compact, self.restart]
        for number in range(STEPS):
            step = self.choose.choice(steps)
            step()
            if number % 5 == 4:
                self.check()
        self.check()
        self.node.broker.close()


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_random_contents_are_neither_lost_nor_doubled_in_any_life_of_a_message(part: int, seed: int) -> None:
    for number in range(HISTORIES // 4):
        World(seed * 1000 + part * 100 + number).run()


@pytest.mark.soak
def test_soak_random_contents_are_neither_lost_nor_doubled(seed: int, rounds: int) -> None:
    for number in range(rounds * 200):
        World(seed + 7919 * number).run()


def test_properties_of_random_bytes_are_dead_lettered_as_a_header(seed: int) -> None:
    choose = random.Random(seed)
    node = Node()
    with node.channel() as channel:
        channel.queue_declare("dead")
        channel.queue_declare(
            "q", arguments={"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}
        )
    for number in range(300):
        properties = struct.pack(">H", choose.getrandbits(16)) + choose.randbytes(choose.randrange(40))
        message = Message(b"%d" % number, "q", "", properties)
        node.broker.run(
            lambda state, change, now, message=message: state.messages.enqueue(
                change, [Publish(message, (state.topology.queue("q"),))], now
            )
        )
        with node.channel() as channel:
            delivery = channel.get("q")
            if delivery is not None:
                channel.reject(delivery.tag, requeue=False)
    assert node.browse("dead") == [b"%d" % number for number in range(300)]
