"""A queue that an app owns, beside all that else may happen to a queue: what a claim freezes stays the same
rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from broker_core.broker.queue.log import Run
from broker_core.broker.topology.ownership import own
from broker_core.core.block import Block
from broker_core.core.errors import CorruptCatalog, DataLoss, PreconditionFailed, ResourceLocked
from broker_core.engine import START, Limit, Origin, Ranges, ReadTicket
from broker_core.message.properties import Properties
from broker_core.node.engine import EmbeddedEngine
from broker_core.node.local import LocalBroker
from broker_core.store.durable import DurableStore
from tests.broker.conftest import Clock, Node, declared, publish

TRANSIENT = Properties(delivery_mode=1).encode()
APP = "app"


class Durable:
    """A broker over a data directory, and its successors after crashes; one app with one stream over the
    queue ``in``.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.clock = Clock()
        self._open()

    def _open(self) -> None:
        self.store = DurableStore(self._path)
        self.broker = LocalBroker(self.store, self.clock, upkeep=False)
        self.engine = EmbeddedEngine(self.broker)

    def reopen(self, *, clean: bool = False) -> None:
        if clean:
            self.broker.close()
        else:
            self.store.close(clean=False)
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
        return self.engine.claim(
            APP, ["in"], start or {"in": START}, limit or Limit(), origin or Origin(), "fail"
        )

    def ranges(self, start: Any, end: Any) -> Ranges:
        return self.engine.resolve(APP, start, end)

    def read(self, ranges: Ranges, block: int = 0) -> list[bytes]:
        ticket = ReadTicket(
            APP, "query", block, ranges, tuple((log, first, last) for log, (first, last) in ranges.items())
        )
        return [body for rows in self.engine.read(ticket) for body in rows.column("body").to_pylist()]

    def close(self) -> None:
        self.broker.close()


@pytest.fixture
def durable(tmp_path: Path) -> Iterator[Durable]:
    found = Durable(tmp_path / "data")
    yield found
    found.close()


# -- a claimed range is the same rows, always ----------------------------------------------------------------


@pytest.mark.parametrize("sealed", [False, True], ids=["inbox", "segment"])
@pytest.mark.parametrize("clean", [False, True], ids=["killed", "closed"])
def test_a_claimed_range_with_transient_messages_is_the_same_rows_after_a_restart(
    durable: Durable, clean: bool, sealed: bool
) -> None:
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


# -- the head of an owned queue ------------------------------------------------------------------------------


def test_an_expired_message_of_an_owned_queue_expires_once_and_ends_the_sweep(node: Node) -> None:
    declared(node, "dead")
    declared(
        node,
        "q",
        **{"x-message-ttl": 1000, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"},
    )
    publish(node, "q", b"claimed")

    def consume(state: Any, change: Any, _now: int) -> None:
        queue = state.topology.queue("q")
        own(change, queue, APP)
        queue.claim(0, 1)
        queue.settle(0, 1)
        queue.record(change)

    node.broker.run(consume)
    publish(node, "q", b"late", b"later")
    node.clock.advance(5)
    queue = node.broker.state.topology.queue("q")
    for left in ([b"later"], []):
        head = queue.ready.head(queue.log.visible_end)
        assert head is not None and not queue.progress.is_settled(head)
        node.broker.run(lambda state, change, now: state.expiry.expire(change, now, [queue], 1))
        assert node.browse("q") == left
    assert queue.ready.head(queue.log.visible_end) is None, "nothing is left: a sweep ends here"
    node.broker.upkeep.expire()
    assert node.browse("dead") == [b"late", b"later"]


def test_a_head_is_never_an_entry_that_is_settled_wherever_the_search_begins(node: Node) -> None:
    declared(node, "q")
    publish(node, "q", b"0", b"1", b"2", b"3")
    queue = node.broker.state.topology.queue("q")
    node.broker.run(lambda _state, change, _now: (queue.settle(0, 2), queue.record(change)))
    assert [queue.ready.first_ready(start, 4) for start in range(5)] == [2, 2, 2, 3, None]


# -- rows of a run -------------------------------------------------------------------------------------------


def grown(*rows: int) -> Run:
    run = Run(0, 1, Block(7, inbox=[], closed=False), rows[0], b"", 0, 0)
    for row in rows[1:]:
        run.extend(row)
    return run


@pytest.mark.parametrize("row", [0, 2, 4])
def test_a_run_takes_no_row_that_does_not_rise(row: int) -> None:
    run = grown(2, 4)
    with pytest.raises(ValueError, match=r"offset 0 over block 7 ends with row 4"):
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
    queue = node.broker.state.topology.queue("q")
    with pytest.raises(DataLoss, match="offset 3 of queue 'q'"):
        queue.log.locate(3)
    node.drain("q")
    for offset in range(4):
        with pytest.raises(DataLoss):
            queue.log.locate(offset)


# -- offsets of transient messages that a crash took ---------------------------------------------------------


@pytest.mark.parametrize("decision", ["commit", "rollback"])
@pytest.mark.parametrize("requeue", [None, True, False], ids=["ack", "requeue", "reject"])
def test_a_prepared_settlement_of_a_lost_transient_message_takes_no_later_one(
    durable: Durable, requeue: Any, decision: str
) -> None:
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


def test_how_often_a_lost_transient_message_came_back_is_not_counted_for_a_later_one(
    durable: Durable,
) -> None:
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


# -- pairs: a claim beside each feature of a queue (docs/decisions.md) ------------------------------------------

DEAD = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}
LATEST = Origin("latest")
REOPENED = pytest.mark.parametrize("reopened", ["not", "killed", "closed"])


class Pair:
    """Two messages that an app skipped, two that it claimed (one of them transient), two that came behind."""

    def __init__(self, durable: Durable, reopened: str, properties: bytes = b"", **arguments: Any) -> None:
        self.durable, self._reopened = durable, reopened
        durable.declare("dead")
        durable.declare("in", **arguments)
        durable.publish("in", b"skipped 1", b"skipped 2", properties=properties)
        assert durable.claim(origin=LATEST) == {"in": START}
        durable.publish("in", b"claimed 1", properties=properties or TRANSIENT)
        durable.publish("in", b"claimed 2", properties=properties)
        self.ranges = durable.ranges({"in": START}, durable.claim(origin=LATEST))
        durable.publish("in", b"behind 1", b"behind 2", properties=properties)
        self.reopen()

    def reopen(self) -> None:
        if self._reopened != "not":
            self.durable.reopen(clean=self._reopened == "closed")

    def shows(self, *bodies: bytes, dead: tuple[bytes, ...] = ()) -> None:
        """Now and after a restart; and the claim reads what it read at first."""
        for _ in range(2):
            assert (self.browse("in"), self.browse("dead")) == (list(bodies), list(dead))
            assert self.durable.read(self.ranges) == [b"claimed 1", b"claimed 2"]
            self.reopen()

    def browse(self, queue: str) -> list[bytes]:
        found = self.durable.engine.available([queue])[queue]
        return [
            body
            for rows in self.durable.engine.browse([(queue, found.start, found.end)])
            for body in rows.column("body").to_pylist()
        ]

    def decide(self) -> None:
        self.durable.read(self.ranges)
        opened = self.durable.engine.open_batch(APP, "query", 0, "fail")
        self.durable.engine.commit_batch(APP, "query", 0, opened.token, [])

    def drain(self) -> list[tuple[bytes, bool]]:
        with self.durable.broker.channel() as channel:
            found = []
            while (delivery := channel.get("in")) is not None:
                found.append((delivery.body, delivery.redelivered))
                channel.ack(delivery.tag)
            return found


@REOPENED
@pytest.mark.parametrize("own", [False, True], ids=["of the queue", "of the message"])
def test_pair_time_to_live_takes_what_is_skipped_and_behind_and_nothing_claimed(
    durable: Durable, reopened: str, own: bool
) -> None:
    properties = Properties(expiration="1000", delivery_mode=2).encode() if own else b""
    pair = Pair(durable, reopened, properties, **DEAD, **({} if own else {"x-message-ttl": 1000}))
    durable.clock.advance(5)
    durable.broker.upkeep.expire()
    durable.broker.upkeep.expire()
    gone = (b"skipped 1", b"skipped 2", b"behind 1", b"behind 2")
    pair.shows(b"claimed 1", b"claimed 2", dead=gone)
    pair.decide()
    pair.shows(dead=gone)


@REOPENED
@pytest.mark.parametrize(
    "limit", [{"x-max-length": 4}, {"x-max-length-bytes": 36}], ids=["messages", "bytes"]
)
def test_pair_drop_head_drops_what_is_skipped_then_what_is_behind_and_nothing_claimed(
    durable: Durable, reopened: str, limit: Any
) -> None:
    pair = Pair(durable, reopened, **limit, **DEAD)
    durable.publish("in", b"behind 3")
    pair.shows(
        b"skipped 2", b"claimed 1", b"claimed 2", b"behind 1", b"behind 2", b"behind 3", dead=(b"skipped 1",)
    )
    durable.publish("in", b"behind 4", b"behind 5")
    left = [b"behind %d" % number for number in range(2, 6)]
    pair.shows(b"claimed 1", b"claimed 2", *left, dead=(b"skipped 1", b"skipped 2", b"behind 1"))


@REOPENED
@pytest.mark.parametrize(
    "limit", [{"x-max-length": 4}, {"x-max-length-bytes": 36}], ids=["messages", "bytes"]
)
def test_pair_reject_publish_counts_what_is_skipped_and_not_what_is_claimed(
    durable: Durable, reopened: str, limit: Any
) -> None:
    pair = Pair(durable, reopened, **limit, **{"x-overflow": "reject-publish"})
    with durable.broker.channel() as channel, pytest.raises(PreconditionFailed, match="is full"):
        channel.publish(b"refused", routing_key="in")
    pair.decide()
    with durable.broker.channel() as channel, pytest.raises(PreconditionFailed, match="is full"):
        channel.publish(b"refused", routing_key="in")
    with durable.broker.channel() as channel:
        assert channel.queue_purge("in") == 2, "what is skipped can be purged, which makes room"
    durable.publish("in", b"behind 3")
    pair.shows(b"behind 1", b"behind 2", b"behind 3")


@REOPENED
def test_pair_priorities_order_neither_claims_nor_what_is_read_and_hold_again_after_a_release(
    durable: Durable, reopened: str
) -> None:
    durable.declare("dead")
    durable.declare("in", **{"x-max-priority": 5})
    for priority in (1, 5, 3):
        durable.publish(
            "in", b"%d" % priority, properties=Properties(priority=priority, delivery_mode=2).encode()
        )
    end = durable.claim(limit=Limit(max_rows=2))
    durable.publish("in", b"4", properties=Properties(priority=4, delivery_mode=2).encode())
    if reopened != "not":
        durable.reopen(clean=reopened == "closed")
    assert durable.read(durable.ranges({"in": START}, end)) == [b"1", b"5"]
    durable.engine.release(APP, "in", force=True)
    with durable.broker.channel() as channel:
        assert [(found := channel.get("in")) and found.body for _ in range(5)] == [
            b"5",
            b"4",
            b"3",
            b"1",
            None,
        ]


@REOPENED
def test_pair_a_delivery_limit_counts_on_after_the_release(durable: Durable, reopened: str) -> None:
    durable.declare("dead")
    durable.declare("in", **{"x-delivery-limit": 1}, **DEAD)
    durable.publish("in", b"poison", b"good")
    with durable.broker.channel() as channel:
        first = channel.get("in")
        assert first is not None
        channel.nack(first.tag)
    end = durable.claim()
    assert durable.read(durable.ranges({"in": START}, end)) == [b"poison", b"good"]
    if reopened != "not":
        durable.reopen(clean=reopened == "closed")
    durable.engine.release(APP, "in", force=True)
    with durable.broker.channel() as channel:
        again = channel.get("in")
        assert again is not None and again.body == b"poison"
        channel.nack(again.tag)
        after = channel.get("in")
        assert after is not None and after.body == b"good"
        dead = channel.get("dead")
        assert dead is not None and dead.body == b"poison"


@REOPENED
def test_pair_a_release_gives_back_what_was_not_consumed_and_says_redelivered_of_the_claimed(
    durable: Durable, reopened: str
) -> None:
    pair = Pair(durable, reopened)
    durable.engine.release(APP, "in", force=True)
    found = pair.drain()
    assert [body for body, _ in found] == [
        b"skipped 1",
        b"skipped 2",
        b"claimed 1",
        b"claimed 2",
        b"behind 1",
        b"behind 2",
    ]
    assert [redelivered for body, redelivered in found if body.startswith(b"claimed")] == [True, True]


@REOPENED
def test_pair_consumers_and_deletion_are_refused_and_nothing_ends_the_queue_while_it_is_owned(
    durable: Durable, reopened: str
) -> None:
    pair = Pair(durable, reopened, **{"x-expires": 1000})
    for word in ("get", "queue_delete"):
        with durable.broker.channel() as channel, pytest.raises(ResourceLocked, match="belongs to app"):
            getattr(channel, word)("in")
    for _ in range(3):
        durable.clock.advance(10)
        durable.broker.upkeep.expire()
    durable.broker.run(
        lambda state, change, _now: state.topology.delete_unused(change, [state.topology.queue("in")])
    )
    pair.shows(b"skipped 1", b"skipped 2", b"claimed 1", b"claimed 2", b"behind 1", b"behind 2")


@REOPENED
def test_pair_a_prepared_delivery_keeps_an_app_out_and_a_prepared_publish_comes_behind_a_claim(
    durable: Durable, reopened: str
) -> None:
    durable.declare("in", "other")
    durable.publish("in", b"held")
    for xid, settles in (("settles", True), ("publishes", False)):
        channel = durable.broker.channel()
        channel.tx_select()
        if settles:
            delivery = channel.get("in")
            assert delivery is not None
            channel.ack(delivery.tag)
        else:
            channel.publish(b"prepared", routing_key="in")
        channel.prepare(xid)
    if reopened != "not":
        durable.reopen(clean=reopened == "closed")
    with pytest.raises(ResourceLocked, match="prepared transactions hold 1"):
        durable.claim()
    durable.broker.rollback("settles")
    first = durable.claim()
    durable.broker.commit("publishes")
    second = durable.claim(first)
    assert durable.read(durable.ranges({"in": START}, first), 0) == [b"held"]
    assert durable.read(durable.ranges(first, second), 1) == [b"prepared"]


@REOPENED
def test_pair_seal_and_compaction_keep_a_decided_claim_until_it_is_acked(
    durable: Durable, reopened: str
) -> None:
    pair = Pair(durable, reopened)
    pair.decide()
    durable.broker.upkeep.close_open()
    durable.broker.upkeep.seal()
    with durable.broker.channel() as channel:
        channel.queue_purge("in")
    durable.broker.upkeep.compact()
    pair.shows(b"behind 1", b"behind 2")
