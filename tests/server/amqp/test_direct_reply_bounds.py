"""Direct replies that their requester does not read: so many wait, nobody else has less room, and an operator sees
where.

Not here: what a requester gets, also from RabbitMQ (``tests/interop/test_direct_reply_to.py``).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pamqp.commands import Basic, Confirm, Queue, Tx

from broker_core.core.change import Change
from broker_core.server.alarm import Alarm, AlarmLimits
from broker_core.server.amqp.direct_reply import MOST, MOST_BYTES, NAME
from tests.amqp_in_process import Served, serving
from tests.amqp_peer import Peer, peer

MiB = 1024 * 1024
BODY = b"z" * 100_000


@pytest.fixture
def served() -> Iterator[Served]:
    with serving() as found:
        yield found


def requester(served: Served, client: Peer) -> str:
    """Consumes replies. Their address."""
    client.call(1, Basic.Consume(queue=NAME, no_ack=True), Basic.ConsumeOk)
    (name,) = (name for name in served.broker.state.topology.queues if name.startswith(NAME))
    return name


def replies(server: Peer, to: str, count: int) -> None:
    for number in range(count):
        server.publish(1, "", to, b"%d " % number + BODY)
    for confirmed in iter(lambda: server.expect(Basic.Ack, 1), None):
        if confirmed.delivery_tag >= count:
            break


def test_what_waits_for_a_requester_that_does_not_read_is_bounded_and_the_newest(served: Served) -> None:
    count = 1_000
    with peer(served.url, 1) as client, peer(served.url, 1) as server:
        to = requester(served, client)
        server.call(1, Confirm.Select(), Confirm.SelectOk)
        replies(server, to, count)
        alarm = Alarm(served.broker, "", AlarmLimits(memory_bytes=2 * MOST_BYTES))
        assert alarm.look() is None
        (row,) = (row for row in served.broker.open_channels.rows("/", 0) if row.unacknowledged)
        waiting = row.unacknowledged[NAME]
        assert 0 < waiting <= MOST_BYTES // len(BODY)
        found = []
        while not found or found[-1] < count - 1:
            client.expect(Basic.Deliver, 1)
            found.append(int(client.content(1)[1].split()[0]))
        assert found[-waiting:] == [*range(count - waiting, count)]
        assert found == sorted(found) and found[0] == 0


def test_a_requester_that_reads_gets_all_of_a_transaction_that_is_larger(served: Served) -> None:
    count = MOST + 1_000
    with peer(served.url, 1) as client, peer(served.url, 1) as server:
        to = requester(served, client)
        server.call(1, Tx.Select(), Tx.SelectOk)
        for number in range(count):
            server.publish(1, "", to, b"%d" % number)
        server.call(1, Tx.Commit(), Tx.CommitOk)
        for number in range(count):
            client.expect(Basic.Deliver, 1)
            assert client.content(1)[1] == b"%d" % number


def test_replies_that_wait_do_not_count_in_the_virtual_host(served: Served) -> None:
    state = served.broker.state

    def limit(_state: object, change: Change, _now: int) -> None:
        state.virtual_hosts.limit(change, "/", {"max_messages": 10})

    served.broker.run(limit)
    with peer(served.url, 1) as client, peer(served.url, 1) as server, peer(served.url, 1) as other:
        to = requester(served, client)
        server.call(1, Confirm.Select(), Confirm.SelectOk)
        replies(server, to, 200)
        other.call(1, Queue.Declare(queue="q"), Queue.DeclareOk)
        other.call(1, Confirm.Select(), Confirm.SelectOk)
        other.publish(1, "", "q", b"")
        other.expect(Basic.Ack, 1)
        client.abort()
