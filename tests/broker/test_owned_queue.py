"""A queue that an app owns, beside all that else may happen to a queue: what a claim freezes stays the same rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from broker_core.broker.batch import Batch
from broker_core.broker.run import Run
from broker_core.embedded import EmbeddedEngine
from broker_core.engine import START, Limit, Origin, Ranges, ReadTicket
from broker_core.errors import CorruptCatalog, DataLoss
from broker_core.local import LocalBroker
from broker_core.properties import Properties
from broker_core.store.durable import DurableStore
from tests.broker.conftest import Clock, Node, declared, publish

TRANSIENT = Properties(delivery_mode=1).encode()
APP = "app"


class Durable:
    """A broker over a data directory, and its successors after crashes; one app with one stream over the queue ``in``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.clock = Clock()
        self._open()

    def _open(self) -> None:
        self.broker = LocalBroker(DurableStore(self._path), self.clock, upkeep=False)
        self.engine = EmbeddedEngine(self.broker)

    def reopen(self, *, clean: bool = False) -> None:
        if clean:
            self.broker.close()
        else:
            self.broker._store.close(clean=False)
        self._open()

    def publish(self, queue: str, *bodies: bytes, properties: bytes = b"") -> None:
        with self.broker.channel() as channel:
            for body in bodies:
                channel.publish(body, routing_key=queue, properties=properties)

    def declare(self, *queues: str, **arguments: Any) -> None:
        with self.broker.channel() as channel:
            for queue in queues:
                channel.queue_declare(queue, arguments=arguments or None)

    def claim(self, start: Any = None, origin: Origin | None = None, limit: Limit | None = None) -> Any:
        return self.engine.claim(APP, start or {"in": START}, limit or Limit(), origin or Origin(), "fail")

    def ranges(self, start: Any, end: Any) -> Ranges:
        return self.engine.resolve(APP, start, end)

    def read(self, ranges: Ranges, batch: int = 0) -> list[bytes]:
        ticket = ReadTicket(APP, "query", batch, ranges, tuple((log, first, last) for log, (first, last) in ranges.items()))
        return [body for rows in self.engine.read(ticket) for body in rows.column("body").to_pylist()]

    def close(self) -> None:
        self.broker.close()


@pytest.fixture
def durable(tmp_path: Path) -> Iterator[Durable]:
    found = Durable(tmp_path / "data")
    yield found
    found.close()


# -- a claimed range is the same rows, always -----------------------------------------------------------------------------------


@pytest.mark.parametrize("sealed", [False, True], ids=["inbox", "segment"])
@pytest.mark.parametrize("clean", [False, True], ids=["killed", "closed"])
def test_a_claimed_range_with_transient_messages_is_the_same_rows_after_a_restart(durable: Durable, clean: bool, sealed: bool) -> None:
    durable.declare("in", "other")
    sent = []
    for number in range(12):
        sent.append(b"%d" % number)
        durable.publish("in", sent[-1], properties=TRANSIENT if number % 3 == 0 else b"")
        durable.publish("other", b"not for the app")
    end = durable.claim()
    ranges = durable.ranges({"in": START}, end)
    assert durable.read(ranges) == sent
    durable.publish("other", *(b"a stranger's %d" % number for number in range(12)))
    if sealed:
        durable.broker.upkeep.close_open()
        durable.broker.upkeep.seal()
    durable.reopen(clean=clean)
    assert durable.read(ranges) == sent
    durable.broker.upkeep.close_open()
    durable.broker.upkeep.seal()
    durable.reopen()
    assert durable.read(ranges) == sent


def test_a_transient_message_that_no_claim_names_does_not_survive_and_shifts_none(durable: Durable) -> None:
    durable.declare("in")
    durable.publish("in", b"1", properties=TRANSIENT)
    durable.publish("in", b"2")
    first = durable.claim(limit=Limit(max_rows=2))
    durable.publish("in", b"3", properties=TRANSIENT)
    durable.publish("in", b"4")
    durable.reopen()
    second = durable.claim(first)
    assert durable.read(durable.ranges({"in": START}, first), 0) == [b"1", b"2"]
    assert durable.read(durable.ranges(first, second), 1) == [b"4"]


# -- the head of an owned queue -------------------------------------------------------------------------------------------------


def test_an_expired_message_of_an_owned_queue_expires_once_and_ends_the_sweep(node: Node) -> None:
    declared(node, "dead")
    declared(node, "q", **{"x-message-ttl": 1000, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"})
    publish(node, "q", b"claimed")

    def consume(state: Any, change: Any, _now: int) -> None:
        queue = state.queue("q")
        state.own(change, queue, APP)
        queue.claim(0, 1)
        queue.settle(0, 1)
        queue.record(change)

    node.broker.run(consume)
    publish(node, "q", b"late", b"later")
    node.clock.advance(5)
    queue = node.broker.state.queue("q")
    for left in ([b"later"], []):
        head = queue.head(queue.visible_end)
        assert head is not None and not queue.is_settled(head)
        node.broker.run(lambda state, change, now: state.expire(change, now, [queue], 1))
        assert node.browse("q") == left
    assert queue.head(queue.visible_end) is None, "nothing is left: a sweep ends here"
    node.broker.upkeep.expire()
    assert node.browse("dead") == [b"late", b"later"]


def test_a_head_is_never_an_entry_that_is_settled_wherever_the_search_begins(node: Node) -> None:
    declared(node, "q")
    publish(node, "q", b"0", b"1", b"2", b"3")
    queue = node.broker.state.queue("q")
    node.broker.run(lambda _state, change, _now: (queue.settle(0, 2), queue.record(change)))
    assert [queue.first_ready(start, 4) for start in range(5)] == [2, 2, 2, 3, None]


# -- rows of a run --------------------------------------------------------------------------------------------------------------


def grown(*rows: int) -> Run:
    run = Run(0, 1, Batch(7, inbox=[], closed=False), rows[0], b"", 0, 0)
    for row in rows[1:]:
        run.extend(row)
    return run


@pytest.mark.parametrize("row", [0, 2, 4])
def test_a_run_takes_no_row_that_does_not_rise(row: int) -> None:
    run = grown(2, 4)
    with pytest.raises(ValueError, match=r"offset 0 over batch 7 ends with row 4"):
        run.extend(row)
    assert list(run.rows()) == [2, 4]


def test_a_run_whose_bitmap_selects_other_rows_is_neither_written_nor_read() -> None:
    run = grown(2, 4, 9)
    assert run.record(1).count == 3
    run.count = 4
    with pytest.raises(ValueError, match="selects others"):
        run.record(1)
    with pytest.raises(CorruptCatalog, match="selects 3 rows, not 4"):
        run.rows()


def test_an_offset_that_no_run_holds_is_data_loss_and_never_a_row_of_a_neighbour(node: Node) -> None:
    declared(node, "q", "other")
    publish(node, "q", b"0", b"1", b"2")
    publish(node, "other", b"a stranger's")
    queue = node.broker.state.queue("q")
    with pytest.raises(DataLoss, match="offset 3 of queue 'q'"):
        queue.locate(3)
    node.drain("q")
    for offset in range(4):
        with pytest.raises(DataLoss):
            queue.locate(offset)


# -- offsets of transient messages that a crash took ----------------------------------------------------------------------------


@pytest.mark.parametrize("decision", ["commit", "rollback"])
@pytest.mark.parametrize("requeue", [None, True, False], ids=["ack", "requeue", "reject"])
def test_a_prepared_settlement_of_a_lost_transient_message_takes_no_later_one(durable: Durable, requeue: Any, decision: str) -> None:
    durable.declare("dead")
    durable.declare("q", **{"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"})
    durable.publish("q", b"transient", properties=TRANSIENT)
    channel = durable.broker.channel()
    channel.tx_select()
    delivery = channel.get("q")
    assert delivery is not None
    channel.ack(delivery.tag) if requeue is None else channel.reject(delivery.tag, requeue=requeue)
    channel.prepare("xid")
    durable.reopen()
    durable.publish("q", b"another")
    getattr(durable.broker, decision)("xid")
    with durable.broker.channel() as channel:
        got = channel.get("q")
        assert got is not None
        assert got.body == b"another"
        assert channel.get("dead") is None


def test_how_often_a_lost_transient_message_came_back_is_not_counted_for_a_later_one(durable: Durable) -> None:
    durable.declare("q", **{"x-delivery-limit": 1})
    durable.publish("q", b"transient", properties=TRANSIENT)
    with durable.broker.channel() as channel:
        delivery = channel.get("q")
        assert delivery is not None
        channel.nack(delivery.tag)
    durable.reopen()
    durable.publish("q", b"another")
    for _ in range(2):
        with durable.broker.channel() as channel:
            got = channel.get("q")
            assert got is not None and got.body == b"another"
            channel.nack(got.tag)
