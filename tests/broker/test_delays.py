"""Messages that wait in an exchange of type x-delayed-message: which ones, until when, and where they go then,
whichever way they came.

Not here: kills (``crash/test_delays_crash.py``), the clients (``interop/test_celery.py``).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from broker_core.broker.message import delays, due_entries, expiry, removals
from broker_core.broker.queue import due_index
from broker_core.core import errors
from broker_core.engine import BranchHeader
from broker_core.message.field_table import Long
from broker_core.message.message import MAX_DELAY_MS
from broker_core.message.properties import Properties
from broker_core.node.committer import changes
from broker_core.node.engine import EmbeddedEngine
from broker_core.node.vhost_engines import VhostEngines
from broker_core.routing.exchange_types import after_delay, delay_ms
from broker_core.routing.search import STEPS
from broker_core.server.access.vhosts import Vhosts
from tests.broker.conftest import Node, declared
from tests.make import around, spill

QUEUE, LATER = "q", "later"
numbers = itertools.count()


def waits(ms: object, **more: Any) -> bytes:
    headers = {**more.pop("headers", {}), "x-delay": ms}
    return Properties(headers=headers, **{"delivery_mode": 2, **more}).encode()


def delayed(node: Node, type: str = "direct", name: str = LATER, **more: Any) -> None:
    with node.channel() as channel:
        channel.exchange_declare(name, "x-delayed-message", arguments={"x-delayed-type": type}, **more)


def upkeep(node: Node) -> None:
    node.broker.upkeep.expire()


def wait(node: Node, ms: int) -> None:
    node.clock.advance(ms / 1000 + 0.0001)  # each commit of a clock that stands takes a microsecond
    upkeep(node)


def waiting(node: Node) -> int:
    return sum(queue.messages for _, queue in node.broker.state.topology.delayed())


def vhosts(node: Node) -> Vhosts:
    return Vhosts(node.broker, VhostEngines(node.broker))


def watched(
    node: Node,
    monkeypatch: pytest.MonkeyPatch,
    queue: str = QUEUE,
    after_first: Callable[[], None] = lambda: None,
) -> list[int]:
    """Returns a list that gets the messages of a queue after each commit of the upkeep."""
    commits: list[int] = []

    def expire(intact: Any, due: list[Any]) -> list[Any]:
        left: list[Any] = intact(due)
        if not commits:
            after_first()
        commits.append(len(node.browse(queue)))
        return left

    around(monkeypatch, node.broker.upkeep, "_expire_some", expire)
    return commits


@pytest.fixture
def ready(node: Node) -> Node:
    """A queue behind an exchange that delays."""
    declared(node, QUEUE)
    delayed(node)
    with node.channel() as channel:
        channel.queue_bind(QUEUE, LATER, "k")
    return node


# -- the ways of a message -----------------------------------------------------------------------------------
def plain(node: Node, *messages: tuple[bytes, int]) -> None:
    with node.channel() as channel:
        for body, ms in messages:
            assert channel.publish(body, LATER, "k", waits(ms), mandatory=True)


def gathered(node: Node, *messages: tuple[bytes, int], spilled: bool = False, prepared: str = "") -> None:
    with node.channel() as channel:
        channel.tx_select()
        for body, ms in messages:
            channel.publish(body, LATER, "k", waits(ms))
        if spilled:
            spill(node.broker, channel)
        if prepared:
            channel.prepare(prepared)
        else:
            channel.tx_commit()


def spilled(node: Node, *messages: tuple[bytes, int]) -> None:
    gathered(node, *messages, spilled=True)


def prepared(node: Node, *messages: tuple[bytes, int]) -> None:
    gathered(node, *messages, prepared=(xid := f"x{next(numbers)}"))
    node.restart()
    node.broker.commit(xid)


def staged(node: Node, *messages: tuple[bytes, int], copies: int = 1) -> None:
    """A batch write of Spark; a micro-batch publishes the same way."""
    engine = EmbeddedEngine(node.broker)
    token, target = f"t{next(numbers)}", {"exchange": LATER, "routing_key": "k"}
    block = pa.RecordBatch.from_pydict(
        {
            "body": pa.array([body for body, _ in messages] * copies, pa.binary()),
            "properties": pa.array([waits(ms) for _, ms in messages] * copies, pa.binary()),
        }
    )
    engine.commit_branches(
        token, [engine.stage(BranchHeader(token, f"b{next(numbers)}", "publish", target), [block])]
    )


WAYS: dict[str, Callable[..., None]] = {
    each.__name__: each for each in (plain, gathered, spilled, prepared, staged)
}


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("seal", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_messages_arrive_in_the_order_of_their_times(
    ready: Node, way: str, seal: bool, restart: bool
) -> None:
    WAYS[way](ready, (b"third", 300), (b"first", 100), (b"second", 200))
    if seal:
        broker = ready.broker
        broker.upkeep.close_open()
        broker.upkeep.seal()
    if restart:
        ready.restart()
    assert waiting(ready) == 3
    wait(ready, 99)
    assert (ready.browse(QUEUE), waiting(ready)) == ([], 3)
    wait(ready, 1)
    assert ready.browse(QUEUE) == [b"first"]
    wait(ready, 100)
    if restart:
        ready.restart()
    wait(ready, 100)
    assert (ready.browse(QUEUE), waiting(ready)) == ([b"first", b"second", b"third"], 0)
    ready.restart()
    wait(ready, 1_000)
    assert ready.browse(QUEUE) == [b"first", b"second", b"third"], "each arrives once"


def test_a_message_that_arrives_says_how_long_it_waited_as_after_the_plugin(ready: Node) -> None:
    with ready.channel() as channel:
        channel.publish(b"", LATER, "k", waits(50, headers={"mine": 1}, message_id="m"))
    wait(ready, 50)
    with ready.channel() as channel:
        delivery = channel.get(QUEUE)
        assert delivery is not None
        assert (delivery.message.exchange, delivery.message.routing_key) == (LATER, "k")
        found = Properties.decode(delivery.message.properties)
        assert found == Properties(headers={"mine": 1, "x-delay": -50}, delivery_mode=2, message_id="m")
        channel.publish(b"", LATER, "k", delivery.message.properties)
    assert (len(ready.browse(QUEUE)), waiting(ready)) == (2, 0), "it waits once"


@pytest.mark.parametrize(
    ("value", "ms"),
    [
        (1, 1),
        (Long(5_000), 5_000),
        (MAX_DELAY_MS, MAX_DELAY_MS),
        ("5000", 5_000),
        (5.9, 5),
        (Decimal("5.9"), 5),
        (0, 0),
        (-1, 0),
        (MAX_DELAY_MS + 1, 0),
        (1 << 62, 0),
        ("soon", 0),
        ("1.5", 0),
        ("9" * 5_000, 0),
        (float("inf"), 0),
        (float("nan"), 0),
        (True, 0),
        (None, 0),
        ([1], 0),
        ({"a": 1}, 0),
        (b"\xff", 0),
    ],
)
def test_a_delay_is_a_number_of_milliseconds_that_the_plugin_obeys(
    ready: Node, value: object, ms: int
) -> None:
    assert delay_ms(waits(value)) == ms
    with ready.channel() as channel:
        channel.publish(b"", LATER, "k", waits(value))
    assert (len(ready.browse(QUEUE)), waiting(ready)) == ((0, 1) if ms else (1, 0))


def test_damaged_and_other_properties_have_no_delay() -> None:
    assert [delay_ms(each) for each in (b"", b"\xff", b"\x20\x00\x07x-delay", waits(5)[:-3])] == [0] * 4
    assert after_delay(b"\x20\x00\x07x-delay") == b"\x20\x00\x07x-delay"


def test_other_exchanges_ignore_the_header(ready: Node) -> None:
    with ready.channel() as channel:
        channel.publish(b"", "", QUEUE, waits(1_000))
        channel.exchange_declare("plain", "fanout")
        channel.queue_bind(QUEUE, "plain")
        channel.publish(b"", "plain", "", waits(1_000))
    assert (len(ready.browse(QUEUE)), waiting(ready)) == (2, 0)


@pytest.mark.parametrize(
    ("type", "bound", "headers", "reached"),
    [
        ("direct", {"a": "k", "b": "other"}, {}, "a"),
        ("fanout", {"a": "", "b": ""}, {}, "ab"),
        ("topic", {"a": "#", "b": "k.*"}, {}, "a"),
        ("headers", {"a": "", "b": ""}, {"color": "red"}, "b"),
    ],
)
def test_a_message_is_routed_by_the_bindings_of_the_time_when_it_is_due(
    node: Node, type: str, bound: dict[str, str], headers: dict[str, object], reached: str
) -> None:
    declared(node, *bound)
    delayed(node, type)
    with node.channel() as channel:
        channel.publish(b"", LATER, "k", waits(10, headers=headers))
        for queue, key in bound.items():
            wanted: dict[str, object] = {"x-match": "all", "color": "blue" if queue == "a" else "red"}
            channel.queue_bind(queue, LATER, key, wanted if type == "headers" else None)
        channel.publish(b"", LATER, "k", Properties(headers={**headers}).encode())
    node.restart()
    wait(node, 10)
    assert {queue: len(node.browse(queue)) for queue in bound} == {
        queue: 2 if queue in reached else 0 for queue in bound
    }


def test_keys_under_cc_and_bcc_count_when_it_is_due(ready: Node) -> None:
    declared(ready, "cc", "bcc")
    with ready.channel() as channel:
        for queue in ("cc", "bcc"):
            channel.queue_bind(queue, LATER, queue)
        channel.publish(b"", LATER, "k", waits(10, headers={"CC": ["cc"], "BCC": ["bcc"]}))
    wait(ready, 10)
    assert [len(ready.browse(queue)) for queue in (QUEUE, "cc", "bcc")] == [1, 1, 1]
    with ready.channel() as channel:
        delivery = channel.get("bcc")
        assert delivery is not None
        assert Properties.decode(delivery.message.properties).headers == {"CC": ["cc"], "x-delay": -10}


def test_what_reaches_no_queue_then_goes_to_the_alternate_exchange_or_is_counted(node: Node) -> None:
    declared(node, "lost")
    delayed(node)
    with node.channel() as channel:
        channel.publish(b"", LATER, "k", waits(10))
    wait(node, 10)
    counted = node.broker.state.expiry.delays.unroutable
    assert (waiting(node), counted.total) == (0, 1)
    with node.channel() as channel:
        channel.exchange_delete(LATER)
        channel.exchange_declare("else", "fanout")
        channel.queue_bind("lost", "else")
        arguments: dict[str, object] = {"x-delayed-type": "direct", "alternate-exchange": "else"}
        channel.exchange_declare(LATER, "x-delayed-message", arguments=arguments)
        channel.publish(b"", LATER, "k", waits(10))
    wait(node, 10)
    assert (len(node.browse("lost")), counted.total) == (1, 1)


def test_it_waits_also_behind_another_exchange_and_as_a_dead_letter(node: Node) -> None:
    declared(node, QUEUE)
    declared(node, "work", **{"x-dead-letter-exchange": LATER, "x-dead-letter-routing-key": "k"})
    delayed(node)
    with node.channel() as channel:
        channel.queue_bind(QUEUE, LATER, "k")
        channel.exchange_declare("front", "topic")
        node.broker.run(changes(node.broker.state.topology.bind_exchange, LATER, "front", "#"))
        channel.publish(b"behind", "front", "k", waits(10))
        channel.publish(b"dead", "", "work", waits(20))
        delivery = channel.get("work")
        assert delivery is not None
        channel.reject(delivery.tag, requeue=False)
    assert (node.browse(QUEUE), waiting(node)) == ([], 2)
    wait(node, 10)
    wait(node, 10)
    assert node.browse(QUEUE) == [b"behind", b"dead"]


def test_a_dead_letter_that_comes_back_after_a_delay_is_no_duplicate(node: Node) -> None:
    declared(
        node,
        QUEUE,
        **{"x-message-deduplication": True, "x-cache-size": 10, "x-dead-letter-exchange": LATER},
        **{"x-dead-letter-routing-key": "k"},
    )
    delayed(node)
    with node.channel() as channel:
        channel.queue_bind(QUEUE, LATER, "k")
        for _ in range(2):
            channel.publish(b"", "", QUEUE, waits(10, message_id="m"))
            channel.publish(b"", LATER, "k", waits(10, message_id="n"))
        wait(node, 10)
        tags = [channel.get(QUEUE).tag for _ in range(2)]  # type: ignore[union-attr]
        assert channel.get(QUEUE) is None, "what was published twice is there once"
        for tag in tags:
            channel.reject(tag, requeue=False)
    wait(node, 10)
    assert len(node.browse(QUEUE)) == 2


# -- atomic --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("end", ["tx_rollback", "close", "restart"])
def test_what_is_not_committed_never_arrives(ready: Node, end: str) -> None:
    channel = ready.channel()
    channel.tx_select()
    channel.publish(b"", LATER, "k", waits(10))
    if end == "restart":
        ready.restart()
    else:
        getattr(channel, end)()
    wait(ready, 1_000)
    assert (ready.browse(QUEUE), waiting(ready)) == ([], 0)


def test_a_transaction_delays_from_its_commit(ready: Node) -> None:
    with ready.channel() as channel:
        channel.tx_select()
        channel.publish(b"later", LATER, "k", waits(1_000))
        channel.publish(b"now", LATER, "k")
        wait(ready, 5_000)
        channel.tx_commit()
    assert (ready.browse(QUEUE), waiting(ready)) == ([b"now"], 1)
    wait(ready, 999)
    assert waiting(ready) == 1
    wait(ready, 1)
    assert ready.browse(QUEUE) == [b"now", b"later"]


def test_a_delivery_that_fails_is_undone_and_repeated(ready: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    plain(ready, (b"a", 10), (b"b", 20))
    ready.clock.advance(1)
    for module, step in ((due_entries, "settle_parts"), (delays, "Publish")):
        with monkeypatch.context() as patch:
            patch.setattr(module, step, lambda *_: 1 / 0)
            with pytest.raises(errors.InternalFault):
                ready.broker.run(lambda state, change, now: state.expiry.expire(change, now))
        assert (ready.browse(QUEUE), waiting(ready)) == ([], 2)
    upkeep(ready)
    assert (ready.browse(QUEUE), waiting(ready)) == ([b"a", b"b"], 0)


@pytest.mark.parametrize("call", ["before", "after"])
def test_an_exception_in_the_index_loses_and_doubles_no_message(
    ready: Node, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where there is no memory."""
    plain(ready, (b"a", 10), (b"b", 20))
    ready.clock.advance(1)
    add_all = due_index.DueIndex.add_all

    def fails(*arguments: Any) -> None:
        if call == "after":
            add_all(*arguments)
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(due_index.DueIndex, "add_all", fails)
        with pytest.raises((MemoryError, errors.TxmqError)):
            ready.broker.run(lambda state, change, now: state.expiry.expire(change, now))
    assert (ready.browse(QUEUE), waiting(ready)) == ([], 2)
    ready.broker.upkeep.expire()
    assert (ready.browse(QUEUE), waiting(ready)) == ([b"a", b"b"], 0)


def test_the_upkeep_wakes_at_the_time_of_the_first_message(ready: Node) -> None:
    checks = ready.broker.state.pending_checks
    now = ready.clock.now_us
    for ms in (5_000, 1_000, 3_000):
        plain(ready, (b"", ms))
    assert now + 1_000_000 <= checks.next_deadline < now + 1_001_000
    wait(ready, 1_000)
    assert now + 3_000_000 <= checks.next_deadline < now + 3_001_000


@pytest.mark.parametrize("part", ["decode", "read", "locate"])
def test_a_message_that_cannot_be_read_stays_and_holds_up_no_other(
    ready: Node, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spilled(ready, (b"damaged", 10), (b"damaged", 30))
    plain(ready, (b"whole", 20), (b"whole", 40))
    ready.restart()
    ((_, queue),) = ready.broker.state.topology.delayed()
    owner: Any = queue.log.__class__ if part == "locate" else ready.broker.state.blocks.__class__
    intact = getattr(owner, part)
    damaged = queue.log.locate(0)[0].block_id

    def fails(self: Any, place: Any, *rest: Any) -> Any:
        if (self is queue.log and place < 2) if part == "locate" else place == damaged:
            raise errors.CorruptSegment("on purpose")
        return intact(self, place, *rest)

    monkeypatch.setattr(owner, part, fails)
    wait(ready, 100)
    assert waiting(ready) == 2
    assert ready.drain(QUEUE) == [b"whole", b"whole"]


# -- bounds --------------------------------------------------------------------------------------------------
def test_they_count_for_the_limit_of_messages_of_a_virtual_host(ready: Node) -> None:
    vhosts(ready).limit_vhost("/", max_messages=2)
    plain(ready, (b"a", 10), (b"b", 10))
    with pytest.raises(errors.PreconditionFailed, match="is full"):
        plain(ready, (b"c", 10))
    ready.restart()
    with pytest.raises(errors.PreconditionFailed, match="is full"):
        plain(ready, (b"c", 10))
    wait(ready, 10)
    assert ready.drain(QUEUE) == [b"a", b"b"]
    plain(ready, (b"c", 10))


@pytest.mark.parametrize("restart", [False, True])
def test_many_are_delivered_in_several_commits(
    ready: Node, restart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(due_index, "FRESH", 8)
    monkeypatch.setattr(due_index, "LARGEST", 64)
    monkeypatch.setattr(due_entries, "PIECE", 16)
    monkeypatch.setattr(due_entries, "LOOKED_AT", 10)
    expected = [(number * 7) % 300 + 1 for number in range(300)]
    for start in range(0, 300, 100):
        part = expected[start : start + 100]
        (gathered, spilled, staged)[start // 100](ready, *((b"%d" % ms, ms) for ms in part))
    if restart:
        ready.restart()
    arrived: list[int] = []
    for end in range(37, 371, 37):
        wait(ready, 37)
        arrived += map(int, ready.drain(QUEUE))
        assert sorted(arrived) == [ms for ms in range(1, 301) if ms <= end]
    assert waiting(ready) == 0


def test_messages_whose_routes_are_dear_are_delivered_in_several_commits(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes some 900 steps, and a commit has room for 5,000."""
    monkeypatch.setattr(removals, "ENTRIES", 5 * 1_000 // STEPS)
    delayed(node, "topic")
    declared(node, QUEUE)
    with node.channel() as channel:
        for number in range(40):
            channel.exchange_declare(f"x{number}", "fanout")
            source = f"x{number - 1}" if number else LATER
            node.broker.run(changes(node.broker.state.topology.bind_exchange, f"x{number}", source, "#"))
        channel.queue_bind(QUEUE, "x39")
        for number in range(20):
            channel.publish(b"%d" % number, LATER, f"k{number}", waits(1_000))
    node.clock.advance(1.001)
    commits = watched(node, monkeypatch)
    wait(node, 1_000)
    assert [count for count in dict.fromkeys(commits) if count] == [6, 12, 18, 20]


def test_many_that_are_due_at_once_are_delivered_in_commits_that_take_10_ms(
    ready: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes 35 us: a commit of 512 of them kept a confirm of another client waiting for 50 ms."""
    plain(ready, *((b"%d" % number, 1_000) for number in range(600)))
    commits = watched(ready, monkeypatch)
    wait(ready, 1_100)
    arrived = [0, *dict.fromkeys(commits)]
    assert max(later - before for before, later in itertools.pairwise(arrived)) <= 512 // 3 + 1, arrived
    assert ready.drain(QUEUE) == [b"%d" % number for number in range(600)]


def test_after_a_restart_a_new_message_does_not_wait_until_all_older_ones_are_looked_at(
    ready: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(10):
        spilled(ready, (b"old %d" % number, 60_000 + number))
    ready.restart()
    arrived_at_look: list[int] = []

    def look(intact: Any, block: pa.RecordBatch) -> Any:
        """Between two works of the upkeep: blocks are read outside of the lock."""
        if not arrived_at_look:
            plain(ready, (b"new", 5))
            ready.clock.advance(1)
        arrived_at_look.append(len(ready.browse(QUEUE)))
        return intact(block)

    around(monkeypatch, ready.broker.state.expiry.delays, "_times", look)
    upkeep(ready)
    assert arrived_at_look[:3] == [0, 1, 1], "it waited for the blocks of the others"
    assert len(arrived_at_look) >= 10, "the others wait in blocks of their own"
    wait(ready, 60_000)
    assert ready.drain(QUEUE) == [b"new", *(b"old %d" % number for number in range(10))]


def test_what_is_due_meanwhile_does_not_wait_until_another_exchange_has_delivered_all(
    ready: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expiry, "SLICE_BYTES", 64)  # of a commit
    delayed(ready, name="other")
    declared(ready, "other")
    with ready.channel() as channel:
        channel.queue_bind("other", "other", "k")
    plain(ready, *((b"0123456789", 10) for _ in range(200)))

    def another() -> None:
        with ready.channel() as channel:
            channel.publish(b"new", "other", "k", waits(5))
        ready.clock.advance(1)

    commits = watched(ready, monkeypatch, "other", another)
    wait(ready, 10)
    assert commits[:4][-1] == 1 and len(commits) > 20, "it waited for the others"
    assert len(ready.drain(QUEUE)) == 200


# -- the clock -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("restart", [False, True])
def test_a_clock_that_steps_makes_messages_early_or_late_and_loses_none(ready: Node, restart: bool) -> None:
    plain(ready, (b"a", 60_000))
    ready.clock.advance(-3_600)
    if restart:
        ready.restart()
    plain(ready, (b"b", 60_000))
    wait(ready, 59_000)
    assert ready.browse(QUEUE) == []
    wait(ready, 3_600_000 + 2_000)
    assert ready.browse(QUEUE) == [b"a", b"b"]
    plain(ready, (b"c", 60_000))
    ready.clock.advance(7_200)
    upkeep(ready)
    assert ready.browse(QUEUE) == [b"a", b"b", b"c"], "the hour has come"


# -- exchanges -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "given", [None, {}, {"x-delayed-type": "x-delayed-message"}, {"x-delayed-type": "x"}]
)
def test_an_exchange_that_delays_says_how_it_routes(node: Node, given: dict[str, object] | None) -> None:
    with node.channel() as channel, pytest.raises(errors.PreconditionFailed, match="x-delayed-type"):
        channel.exchange_declare(LATER, "x-delayed-message", arguments=given)


def test_it_is_declared_again_alike(ready: Node) -> None:
    plain(ready, (b"a", 10))
    delayed(ready)
    with ready.channel() as channel, pytest.raises(errors.PreconditionFailed, match="inequivalent arg"):
        channel.exchange_declare(LATER, "x-delayed-message", arguments={"x-delayed-type": "fanout"})
    wait(ready, 10)
    assert ready.browse(QUEUE) == [b"a"]


@pytest.mark.parametrize("way", ["exchange", "vhost"])
def test_what_waits_is_deleted_with_its_exchange(node: Node, way: str) -> None:
    hosts = vhosts(node)
    hosts.add_vhost("other")
    with node.broker.channel(vhost="other") as channel:
        channel.exchange_declare(LATER, "x-delayed-message", arguments={"x-delayed-type": "fanout"})
        channel.publish(b"", LATER, "", waits(10))
        if way == "exchange":
            channel.exchange_delete(LATER)
    if way == "vhost":
        hosts.delete_vhost("other")
    state = node.broker.state
    while state.virtual_hosts.registry.ending:
        node.broker.upkeep.end_queues()
    assert not list(state.queues)
    node.restart()
    assert not list(node.broker.state.queues)


@pytest.mark.parametrize("durable", [True, False])
def test_nobody_else_gets_at_what_waits(node: Node, durable: bool) -> None:
    delayed(node, durable=durable)
    with node.channel() as channel:
        channel.publish(b"", LATER, "k", waits(10))
    ((_, queue),) = node.broker.state.topology.delayed()
    assert node.broker.queues() == []
    for call in ("queue_delete", "get", "queue_purge"):
        with node.channel() as channel:
            try:
                getattr(channel, call)(queue.name)
            except errors.QueueNotFound:
                pass
    with node.channel() as channel:
        assert not channel.publish(b"", "", queue.name)
        with pytest.raises(errors.AccessRefused):
            channel.queue_declare(queue.name)
    assert waiting(node) == 1
    node.restart()
    assert waiting(node) == int(durable)
