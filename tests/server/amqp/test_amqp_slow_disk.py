"""Clients of a broker whose disk is slow: who needs a block from it waits, in order, and nobody else does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pamqp import commands

from broker_core.core.errors import CorruptSegment
from tests.amqp_in_process import Served, ended, serving
from tests.amqp_peer import Peer, peer
from tests.progress import GUARD_S, wait_until
from tests.reading import SlowDisk

Q, B = commands.Queue, commands.Basic
DLX = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}


@pytest.fixture
def disk() -> Iterator[SlowDisk]:
    found = SlowDisk()
    yield found
    found.gate.set()


@pytest.fixture
def served(disk: SlowDisk) -> Iterator[Served]:
    with serving(store=disk) as found:
        found.broker.upkeep.stop()  # the tests seal
        yield found
        disk.gate.set()


def on_disk(served: Served, queue: str, *bodies: bytes, **arguments: object) -> None:
    """Two messages in each block."""
    with served.broker.channel() as channel:
        channel.queue_declare(queue, arguments=dict(arguments))
        for number, body in enumerate(bodies):
            channel.publish(body, routing_key=queue)
            if number % 2:
                served.broker.upkeep.close_open()
                served.broker.upkeep.seal()


def delivered(client: Peer, channel: int, count: int) -> list[bytes]:
    found = []
    for _ in range(count):
        client.expect(B.Deliver, channel)
        found.append(client.content(channel)[1])
    return found


BODIES = [b"%d" % number for number in range(10)]


@pytest.mark.parametrize("no_ack", [False, True])
@pytest.mark.parametrize("prefetch", [0, 3])
def test_a_consumer_gets_all_messages_of_a_slow_disk_in_order_while_others_are_served(
    prefetch: int, no_ack: bool, disk: SlowDisk, served: Served
) -> None:
    on_disk(served, "disk", *BODIES)
    with peer(served.url, 1, 2) as client:
        client.call(2, Q.Declare(queue="memory"), Q.DeclareOk)
        client.call(2, B.Consume(queue="memory", no_ack=True), B.ConsumeOk)
        if prefetch:
            client.call(1, B.Qos(prefetch_count=prefetch), B.QosOk)
        disk.stop()
        client.call(1, B.Consume(queue="disk", no_ack=no_ack), B.ConsumeOk)
        assert disk.entered.wait(GUARD_S)
        for number in range(5):
            client.publish(2, "", "memory", b"%d" % number)
            assert delivered(client, 2, 1) == [b"%d" % number]
        disk.gate.set()
        found = []
        for _ in BODIES:
            frame = client.expect(B.Deliver, 1)
            found.append(client.content(1)[1])
            if not no_ack:
                client.send(1, B.Ack(frame.delivery_tag))
        assert found == BODIES


def test_a_get_waits_for_the_disk_before_the_commands_behind_it(disk: SlowDisk, served: Served) -> None:
    on_disk(served, "disk", *BODIES)
    with peer(served.url, 1, 2) as client:
        disk.stop()
        client.send(1, B.Get(queue="disk", no_ack=True), B.Get(queue="disk"), Q.Purge(queue="disk"))
        assert disk.entered.wait(GUARD_S)
        client.call(2, Q.Declare(queue="other"), Q.DeclareOk)
        disk.gate.set()
        for body in BODIES[:2]:
            client.expect(B.GetOk, 1)
            assert client.content(1)[1] == body
        assert client.expect(Q.PurgeOk, 1).message_count == len(BODIES) - 2


def test_rejects_that_wait_for_the_disk_are_dead_lettered_in_order(disk: SlowDisk, served: Served) -> None:
    on_disk(served, "disk", *BODIES, **DLX)
    with peer(served.url, 1, 2) as client:
        client.call(1, Q.Declare(queue="dead"), Q.DeclareOk)
        client.call(1, B.Consume(queue="disk"), B.ConsumeOk)
        assert delivered(client, 1, len(BODIES)) == BODIES
        disk.stop()
        client.send(1, *(B.Reject(tag, requeue=False) for tag in range(1, len(BODIES) + 1)))
        client.send(1, Q.Declare(queue="after"))
        assert disk.entered.wait(GUARD_S)
        client.call(2, Q.Declare(queue="other"), Q.DeclareOk)
        disk.gate.set()
        client.expect(Q.DeclareOk, 1)
        assert [body for _, body in client.drain(2, "dead")] == BODIES


def test_a_client_that_leaves_while_it_waits_leaves_its_messages(disk: SlowDisk, served: Served) -> None:
    on_disk(served, "disk", *BODIES)
    with peer(served.url, 1, 2) as client:
        disk.stop()
        client.call(1, B.Consume(queue="disk"), B.ConsumeOk)
        client.send(2, B.Get(queue="disk", no_ack=True))
        assert disk.entered.wait(GUARD_S)
    wait_until(lambda: not served.server.connections)  # else the get may be answered before
    disk.gate.set()
    ended(served)
    with peer(served.url, 1) as client:
        assert [body for _, body in client.drain(1, "disk")] == BODIES


def test_a_damaged_block_cancels_the_consumers_of_its_queue_alone(disk: SlowDisk, served: Served) -> None:
    on_disk(served, "disk", *BODIES)
    on_disk(served, "whole", *BODIES)
    disk.damaged.add(served.broker.state.topology.queue("disk").log.runs[1].block_id)
    with peer(served.url, 1, 2) as client:
        client.send(1, B.Consume(queue="disk"))
        client.send(2, B.Consume(queue="whole"))
        kinds: dict[int, list[str]] = {1: [], 2: []}
        while "Basic.Cancel" not in kinds[1] or kinds[2].count("Basic.Deliver") < len(BODIES):
            channel, frame = client.receive()
            if hasattr(frame, "name"):
                kinds[channel].append(frame.name)
        assert kinds[1].count("Basic.Deliver") == 2 and "Basic.Cancel" not in kinds[2]
    ended(served)
    with served.broker.channel() as channel:
        assert [channel.get("disk").body for _ in BODIES[:2]] == BODIES[:2]
        with pytest.raises(CorruptSegment):
            channel.get("disk")
