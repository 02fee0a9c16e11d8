"""Virtual hosts: names that are separate, limits, and their end."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from broker_core.broker.access.rights import OWNER
from broker_core.broker.broker import BrokerState
from broker_core.broker.topology.registry import Registry
from broker_core.broker.topology.topology import PREDECLARED
from broker_core.core import errors
from broker_core.core.address import VHOST
from broker_core.core.change import Change
from broker_core.core.records import BindingRecord, ExchangeRecord, ProgressRecord, QueueRecord, RunRecord
from broker_core.engine import BranchHeader, Limit, Origin, ReadTicket
from broker_core.message.message import MESSAGE_SCHEMA
from broker_core.node import upkeep
from broker_core.node.channel import LocalChannel
from broker_core.node.engine import EmbeddedEngine
from broker_core.node.local import LocalBroker
from broker_core.node.vhost_engines import VhostEngines
from broker_core.routing import memory
from broker_core.server.access.vhosts import Vhosts
from tests.broker.conftest import Node, declared, publish

SALES = "sales"


def add(node: Node, name: str = SALES, **limits: int) -> None:
    node.broker.run(lambda state, change, _now: state.virtual_hosts.add(change, name, **limits))


def delete(node: Node, name: str = SALES) -> VhostEngines:
    engines = VhostEngines(node.broker)
    Vhosts(node.broker, engines).delete_vhost(name)
    return engines


def drained(channel: LocalChannel, queue: str) -> list[bytes]:
    bodies = []
    while (delivery := channel.get(queue, no_ack=True)) is not None:
        bodies.append(delivery.body)
    return bodies


def kept(broker: LocalBroker, vhost: str) -> dict[str, int]:
    return {queue.name: queue.messages for queue in broker.queues(vhost)}


# -- names ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clean", [False, True])
def test_the_same_names_are_other_queues_and_exchanges_in_another_virtual_host(
    node: Node, clean: bool
) -> None:
    add(node)
    for vhost, kind in ((VHOST, "fanout"), (SALES, "direct")):
        with node.broker.channel(vhost=vhost) as channel:
            channel.queue_declare("orders", arguments={"x-max-length": len(vhost)})
            channel.queue_declare(f"only {vhost}")
            channel.exchange_declare("in", kind)
            channel.queue_bind("orders", "in", "key")
            channel.publish(f"for {vhost}".encode(), "in", "key")
            channel.publish(b"by name", routing_key="orders")
    broker = node.restart(clean=clean)
    # one in `/`, because its limit is the length of that name
    assert kept(broker, VHOST) == {"orders": 1, "only /": 0}
    assert kept(broker, SALES) == {"orders": 2, "only sales": 0}
    with broker.channel(vhost=SALES) as channel:
        assert drained(channel, "orders") == [b"for sales", b"by name"]
        channel.exchange_declare("in", "direct")
        assert not channel.publish(b"", "in", "another key")
        with pytest.raises(errors.QueueNotFound, match="no queue 'only /' in vhost 'sales'"):
            channel.queue_bind("only /", "in")
        with pytest.raises(errors.PreconditionFailed, match="for exchange 'in' in vhost 'sales': received"):
            channel.exchange_declare("in", "fanout")
        channel.queue_delete("orders")
    assert kept(broker, VHOST) == {"orders": 1, "only /": 0} and node.drain("orders") == [b"by name"]


@pytest.mark.parametrize("name", [name for name in PREDECLARED if not name.endswith("trace")])
def test_each_virtual_host_has_the_predeclared_exchanges(node: Node, name: str) -> None:
    add(node)
    declared(node, "q")
    with node.broker.channel(vhost=SALES) as channel:
        channel.queue_declare("mine")
        channel.queue_bind("mine", name, "k")
        assert channel.publish(b"1", name, "k") and drained(channel, "mine") == [b"1"]
        with pytest.raises(errors.AccessRefused, match="in vhost 'sales' not allowed"):
            channel.exchange_delete(name)
    assert not node.channel().publish(b"2", name, "k")


def test_dead_letters_stay_in_their_virtual_host(node: Node) -> None:
    add(node)
    for vhost in (VHOST, SALES):
        with node.broker.channel(vhost=vhost) as channel:
            channel.exchange_declare("dead", "fanout")
            channel.queue_declare("graves")
            channel.queue_bind("graves", "dead")
    with node.broker.channel(vhost=SALES) as channel:
        letters = {"x-dead-letter-exchange": "dead", "x-message-ttl": 10}
        channel.queue_declare("q", arguments={**letters, "x-max-length": 1})
        for body in (b"too long", b"rejected"):
            channel.publish(body, routing_key="q")
        delivery = channel.get("q")
        assert delivery is not None
        channel.reject(delivery.tag, requeue=False)
        channel.publish(b"expired", routing_key="q")
        node.clock.advance(1)
        node.broker.upkeep.expire()
        assert drained(channel, "graves") == [b"too long", b"rejected", b"expired"]
    assert kept(node.broker, VHOST) == {"graves": 0}


def test_queues_of_all_virtual_hosts_expire(node: Node) -> None:
    add(node)
    for vhost in (VHOST, SALES):
        with node.broker.channel(vhost=vhost) as channel:
            channel.queue_declare("leased", arguments={"x-expires": 1000})
            channel.queue_declare("stays")
    node.broker.upkeep.expire()
    node.clock.advance(2)
    node.broker.upkeep.expire()
    assert kept(node.broker, VHOST) == kept(node.broker, SALES) == {"stays": 0}


WRONG = {
    "": "is empty",
    "x" * 256: "has 256 bytes",
    "é" * 128: "has 256 bytes",
    "a\nb": "has control characters",
    "\0": "has control characters",
    "a\u2028b": "has control characters",
    "\ud800": "cannot be encoded as UTF-8",
    SALES: "already exists",
    VHOST: "already exists",
}


@pytest.mark.parametrize(("name", "why"), WRONG.items(), ids=repr)
def test_a_damaged_name_gets_one_error_and_nothing_is_made(node: Node, name: str, why: str) -> None:
    add(node)
    before = list(node.broker.state.virtual_hosts.by_name)
    with pytest.raises(errors.OptionError, match=why) as caught:
        add(node, name)
    assert len(str(caught.value)) < 300 and list(node.broker.state.virtual_hosts.by_name) == before


def test_a_virtual_host_that_is_not_there_is_one_error(node: Node) -> None:
    for ask in (
        lambda: node.broker.channel(vhost="none"),
        lambda: node.broker.queues("none"),
        lambda: VhostEngines(node.broker).of("none"),
    ):
        with pytest.raises(errors.NotAllowed, match="vhost none not found"):
            ask()
    for word in ("limit", "delete", "require"):
        arguments = {"limit": (None, "none", {}), "delete": (None, "none"), "require": ("none",)}[word]
        with pytest.raises(errors.OptionError, match="virtual host 'none' does not exist"):
            getattr(node.broker.state.virtual_hosts, word)(*arguments)


# -- limits --------------------------------------------------------------------------------------------------


def test_the_limit_of_queues_counts_those_that_are_there(node: Node) -> None:
    add(node, max_queues=2)
    with node.broker.channel(vhost=SALES) as channel:
        for name in ("a", "b", "a"):
            channel.queue_declare(name)
        with pytest.raises(errors.PreconditionFailed) as caught:
            channel.queue_declare("c")
        assert caught.value.summary == (
            "cannot declare queue 'c': queue limit in vhost 'sales' (2) is reached"
        )
        channel.queue_delete("a")
        channel.queue_declare("c")
    declared(node, "x", "y", "z")  # no limit there
    broker = node.restart()
    broker.run(lambda state, change, _now: state.virtual_hosts.limit(change, SALES, {"max_queues": 3}))
    with broker.channel(vhost=SALES) as channel:
        channel.queue_declare("d")
        with pytest.raises(errors.PreconditionFailed, match=r"\(3\) is reached"):
            channel.queue_declare("e")


@pytest.mark.parametrize("clean", [False, True])
def test_a_virtual_host_that_is_made_again_is_another_engine_also_behind_a_restart(
    node: Node, clean: bool
) -> None:
    """A table tells their batches apart by it."""

    def identity() -> str:
        return VhostEngines(node.broker, identity="data").of(SALES).identity()

    add(node)
    first = identity()
    node.broker.run(lambda state, change, _now: state.virtual_hosts.limit(change, SALES, {"max_queues": 3}))
    node.restart(clean=clean)
    assert identity() == first
    delete(node)
    node.restart(clean=clean)
    add(node)
    second = identity()
    node.restart(clean=clean)
    assert identity() == second != first


def _publish(channel: LocalChannel) -> None:
    channel.publish(b"4", routing_key="q")


def _commit(channel: LocalChannel) -> None:
    channel.tx_select()
    channel.publish(b"4", routing_key="q")
    channel.tx_commit()


def _prepare(channel: LocalChannel) -> None:
    channel.tx_select()
    channel.publish(b"4", routing_key="q")
    channel.prepare("x")


@pytest.mark.parametrize("publishes", [_publish, _commit, _prepare])
def test_the_limit_of_messages_refuses_what_does_not_fit_and_loses_nothing(
    node: Node, publishes: Callable[[LocalChannel], None]
) -> None:
    add(node, max_messages=3)
    with node.broker.channel(vhost=SALES) as channel:
        channel.queue_declare("q")
        channel.queue_declare("other")
        for body in (b"1", b"2"):
            channel.publish(body, routing_key="q")
        channel.publish(b"3", routing_key="other")
        with pytest.raises(errors.PreconditionFailed, match=r"vhost 'sales' is full: 1 more .* limit of 3"):
            publishes(channel)
    declared(node, "q")
    publish(node, "q", b"a", b"b", b"c", b"d")  # of another virtual host
    broker = node.restart()
    assert kept(broker, SALES) == {"q": 2, "other": 1} and kept(broker, VHOST) == {"q": 4}
    with broker.channel(vhost=SALES) as channel:
        assert drained(channel, "other") == [b"3"]
        publishes(channel)


def test_a_message_that_is_taken_makes_room_in_its_own_transaction(node: Node) -> None:
    add(node, max_messages=1)
    with node.broker.channel(vhost=SALES) as channel:
        channel.queue_declare("in")
        channel.queue_declare("out")
        channel.publish(b"1", routing_key="in")
        channel.tx_select()
        delivery = channel.get("in")
        assert delivery is not None
        channel.ack(delivery.tag)
        channel.publish(b"1", routing_key="out")
        channel.tx_commit()
    assert kept(node.broker, SALES) == {"in": 0, "out": 1}


def test_a_limit_below_what_is_there_keeps_it(node: Node) -> None:
    add(node)
    with node.broker.channel(vhost=SALES) as channel:
        for name in ("a", "b"):
            channel.queue_declare(name)
            channel.publish(b"1", routing_key=name)
        node.broker.run(
            lambda state, change, _now: state.virtual_hosts.limit(
                change, SALES, {"max_queues": 1, "max_messages": 0}
            )
        )
        assert kept(node.broker, SALES) == {"a": 1, "b": 1}
        assert drained(channel, "a") == [b"1"]
        with pytest.raises(errors.PreconditionFailed):
            channel.publish(b"2", routing_key="a")
    with pytest.raises(errors.OptionError, match="max_queues of virtual host 'sales' is -2"):
        node.broker.run(
            lambda state, change, _now: state.virtual_hosts.limit(change, SALES, {"max_queues": -2})
        )


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(
            st.sampled_from(
                ["publish", "commit", "get", "ack", "refuse", "purge", "delete", "expire", "restart"]
            ),
            st.sampled_from("ab"),
        ),
        max_size=40,
    )
)
def test_the_messages_of_a_virtual_host_are_counted_as_they_come_and_go(steps: list[tuple[str, str]]) -> None:
    """A running count, which is that of all queues whatever happened before, and after what failed."""
    node = Node()
    add(node, max_messages=6)
    arguments = {"x-max-length": 4, "x-message-ttl": 50}
    channel = node.broker.channel(vhost=SALES)
    held = []
    for step, name in steps:
        channel.queue_declare(name, arguments=arguments)
        match step:
            case "publish":
                with contextlib.suppress(errors.PreconditionFailed):
                    channel.publish(b"1", routing_key=name)
            case "commit":
                with (
                    node.broker.channel(vhost=SALES) as other,
                    contextlib.suppress(errors.PreconditionFailed),
                ):
                    other.tx_select()
                    for _ in range(3):
                        other.publish(b"2", routing_key=name)
                    other.tx_commit()
            case "get":
                held += [found for _ in range(2) if (found := channel.get(name)) is not None]
            case "ack" | "refuse" if held:
                delivery = held.pop()
                channel.ack(delivery.tag) if step == "ack" else channel.reject(delivery.tag, requeue=False)
            case "purge":
                channel.queue_purge(name)
            case "delete":
                channel.queue_delete(name)
            case "expire":
                node.clock.advance(60)
                node.broker.upkeep.expire()
            case "restart":
                node.restart()
                channel, held = node.broker.channel(vhost=SALES), []
        topology = node.broker.state.of(SALES).topology
        assert topology.tally.total == sum(queue.depth for queue in topology.queues.values())
        assert 0 <= topology.tally.total <= 6
    node.broker.close()


# -- transactions and apps -----------------------------------------------------------------------------------


def test_a_prepared_transaction_is_decided_in_its_virtual_host_alone(node: Node) -> None:
    add(node)
    with node.broker.channel(vhost=SALES) as channel:
        channel.queue_declare("q")
        channel.tx_select()
        channel.publish(b"1", routing_key="q")
        channel.prepare("order-7")
    broker = node.restart()
    assert [found.xid for found in broker.prepared(SALES)] == ["order-7"] and broker.prepared(VHOST) == []
    for decide in (broker.commit, broker.rollback):
        with pytest.raises(errors.UnknownTransaction, match="no transaction of vhost '/' has the xid"):
            decide("order-7", VHOST)
    with broker.channel() as channel:  # a name is one of its virtual host
        channel.queue_declare("q")
        channel.tx_select()
        channel.publish(b"2", routing_key="q")
        channel.prepare("order-7")
    for decide in (broker.commit, broker.rollback):
        with pytest.raises(errors.TransactionState, match=f"the vhosts /, {SALES} have the xid 'order-7'"):
            decide("order-7")
    broker.commit("order-7", SALES)
    assert kept(broker, SALES) == {"q": 1} and broker.outcome("order-7", vhost=SALES) == "committed"
    assert broker.outcome("order-7", vhost=VHOST) == broker.outcome("order-7") == "prepared"
    broker.rollback("order-7")
    broker = node.restart()
    ends = [broker.outcome("order-7", vhost=vhost) for vhost in (VHOST, SALES)]
    assert ends == ["rolled_back", "committed"] and kept(broker, VHOST) == {"q": 0}


def test_a_token_of_one_virtual_host_says_nothing_in_another(node: Node) -> None:
    """Neither does a committed name of "/" stop a commit of another host, nor the other way round."""
    add(node)
    for vhost in (VHOST, SALES):
        with node.broker.channel(vhost=vhost) as channel:
            with pytest.raises(errors.UnknownTransaction):
                node.broker.outcome("invoice", vhost=vhost)
            channel.queue_declare("q")
            channel.tx_select()
            channel.publish(b"1", routing_key="q")
            channel.tx_commit("invoice")
    assert kept(node.broker, VHOST) == kept(node.broker, SALES) == {"q": 1}


@pytest.mark.parametrize("restart", [False, True])
def test_a_virtual_host_that_is_made_again_knows_no_outcome_of_the_earlier_one(
    node: Node, restart: bool
) -> None:
    """While there is none, the manager of a transaction still learns how that ended."""

    def ended(vhost: str, user: str) -> None:
        with node.broker.channel(vhost=vhost, user=user) as channel:
            channel.queue_declare("q")
            channel.tx_select()
            channel.publish(b"", routing_key="q")
            channel.tx_commit("token")
            for xid in ("by hand", "open"):
                channel.publish(b"", routing_key="q")
                channel.prepare(xid)
        node.broker.decide("rollback", "by hand", OWNER, None, vhost, user or None, by_hand=True)

    def known(vhost: str, user: str) -> dict[str, str]:
        found = {}
        for name in ("token", "by hand", "open", "never"):
            with contextlib.suppress(errors.UnknownTransaction):
                found[name] = node.broker.outcome(name, vhost=vhost, of=user)
        return found

    other = f"{SALES}2"
    node.broker.run(lambda state, change, _now: state.users.add(change, "ann", ""))
    for vhost in (SALES, other):
        add(node, vhost)
        for user in ("", "ann"):
            ended(vhost, user)
    expected = {"token": "committed", "by hand": "heuristically_rolled_back", "open": "prepared"}
    assert known(SALES, "ann") == known(other, "ann") == expected
    delete(node)
    assert known(SALES, "ann") == {**expected, "open": "rolled_back"}
    if restart:
        node.restart()

    def failing(state: BrokerState, change: Change, _now: int) -> None:
        state.virtual_hosts.add(change, SALES)
        raise errors.OptionError("undone", "all of it")

    before = list(node.broker.state.names.ended())
    with pytest.raises(errors.OptionError):
        node.broker.run(failing)
    assert list(node.broker.state.names.ended()) == before
    add(node)
    for _ in range(2):
        for user in ("", "ann"):
            assert known(SALES, user) == {}
            assert node.broker.recover(user, vhost=SALES) == []
            assert known(other, user) == expected
        node.restart()
    ended(SALES, "ann")  # its names are free
    assert known(SALES, "ann") == expected


def test_a_users_transaction_has_no_name_of_the_brokers_own(node: Node) -> None:
    """``batch:TOKEN`` is the key of a batch write. A token of a micro-batch is no name at all."""
    engine = EmbeddedEngine(node.broker)
    rows = pa.record_batch({"body": pa.array([b"row"], pa.binary())})
    with node.broker.channel() as channel:
        for queue in ("q", "other"):
            channel.queue_declare(queue)
        staged = engine.stage(BranchHeader("T", "b", "publish", {"routing_key": "q"}), [rows])
        opened = engine.open_batch("app", "query", 0, "fail", token="micro")
        batch = engine.stage(BranchHeader("micro", "c", "publish", {"routing_key": "q"}), [rows])
        channel.tx_select()
        for name in ("batch:T", "batch@%2F:T", "xid@%2F:T", "micro", "T"):
            channel.publish(b"", routing_key="other")
            channel.tx_commit(name)
            assert node.broker.outcome(name) == "committed"
    assert engine.commit_branches("T", [staged]) == 1 and kept(node.broker, VHOST)["q"] == 1
    assert engine.commit_batch("app", "query", 0, opened.token, [batch]).entry.published == 1
    assert kept(node.broker, VHOST) == {"other": 5, "q": 2}


LIMIT, ORIGIN = Limit(max_rows=10), Origin(at="earliest")


def run_batch(engines: VhostEngines, vhost: str) -> tuple[int, list[bytes]]:
    """One micro-batch of app "app" from queue "in" to nowhere: its number, and what it read."""
    engine = engines.of(vhost)
    start = {"in": "start"}
    end = engine.claim("app", ["in"], start, LIMIT, ORIGIN, "fail")
    ranges = engine.resolve("app", start, end)
    opened = engine.open_batch("app", "query", 0, "fail")
    slices = tuple((log, first, last) for log, (first, last) in ranges.items())
    ticket = ReadTicket("app", "query", 0, ranges, slices)
    bodies = [body for rows in engine.read(ticket) for body in rows.column("body").to_pylist()]
    committed = engine.commit_batch("app", "query", 0, opened.token, [])
    engine.ack("app", end)
    return committed.entry.sequence, bodies


def test_an_app_of_the_same_name_is_another_one_in_another_virtual_host(node: Node) -> None:
    add(node)
    for vhost in (VHOST, SALES):
        with node.broker.channel(vhost=vhost) as channel:
            channel.queue_declare("in")
            channel.publish(vhost.encode(), routing_key="in")
    engines = VhostEngines(node.broker)
    assert run_batch(engines, SALES) == (1, [b"sales"])
    assert engines.of(VHOST).apps() == [] and engines.of(VHOST).last_entry("app") is None
    engines = VhostEngines(node.restart())
    assert run_batch(engines, VHOST) == (1, [b"/"])
    identities = {engines.of(vhost).identity("app") for vhost in (VHOST, SALES)}
    assert len(identities) == 2  # so a Delta table tells their steps apart
    engines = VhostEngines(node.restart())
    for vhost in (VHOST, SALES):
        (app,) = engines.of(vhost).apps()
        assert (app.app_id, app.queues, app.sequence, app.lag) == ("app", ("in",), 1, 0)


def header(token: str) -> BranchHeader:
    target = {"exchange": "", "routing_key": "out"}
    return BranchHeader(
        app_id="",
        query_id="",
        batch_id=0,
        token=token,
        branch=token,
        partition=0,
        attempt=0,
        kind="publish",
        target=target,
    )


def rows(count: int) -> pa.RecordBatch:
    columns = {"exchange": [""] * count, "routing_key": ["out"] * count}
    more = {"body": [b"x" * 100] * count, "properties": [b""] * count}
    return pa.RecordBatch.from_pydict({**columns, **more}, schema=MESSAGE_SCHEMA)


def test_a_token_that_another_virtual_host_uses_too_is_another_attempt(node: Node) -> None:
    add(node)
    engines = VhostEngines(node.broker)
    for vhost in (VHOST, SALES):
        with node.broker.channel(vhost=vhost) as channel:
            channel.queue_declare("out")
    staged = engines.of(SALES).stage(header("t"), [rows(3)])
    engines.of(VHOST).stage(header("t"), [rows(2)])
    engines.of(VHOST).rollback_batch("t")
    with pytest.raises(errors.MissingBranch):
        engines.of(VHOST).commit_branches("another", [staged])
    engines = VhostEngines(node.restart())
    assert engines.of(SALES).commit_branches("t", [staged]) == 3
    assert kept(node.broker, SALES) == {"out": 3} and kept(node.broker, VHOST) == {"out": 0}
    with pytest.raises(errors.TransactionState, match="was rolled back"):
        engines.of(VHOST).commit_branches("t", [staged])


def test_rows_that_are_staged_for_a_virtual_host_that_is_gone_leave_no_block(node: Node) -> None:
    add(node)
    with node.broker.channel(vhost=SALES) as channel:
        channel.queue_declare("out")
    engines = VhostEngines(node.broker)
    late = engines.of(SALES)
    late.stage(header("kept"), [rows(5000)])
    Vhosts(node.broker, engines).delete_vhost(SALES)
    with pytest.raises(errors.NotAllowed, match="vhost sales not found"):
        late.stage(header("late"), [rows(5000)])
    assert not list(node.store.load().blocks)


# -- the end -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pieces", [0, 1, 2, 3])
def test_a_virtual_host_with_many_queues_ends_in_pieces_and_at_once_for_all_who_look(
    node: Node, monkeypatch: pytest.MonkeyPatch, pieces: int
) -> None:
    """Also if the broker is killed between two pieces; a new host of its name has nothing of it."""
    monkeypatch.setattr(upkeep, "LOOKED_AT", 2)
    add(node)
    engines = VhostEngines(node.broker)
    with node.broker.channel(vhost=SALES) as channel:
        channel.exchange_declare("x", "topic")
        for number in range(5):
            channel.queue_declare(f"q{number}")
            channel.queue_bind(f"q{number}", "x", "#")
        channel.publish(b"1", "x", "k")
    ends = Registry.end_some
    done: list[bool] = []

    def end_some(self: Registry, change: Change, count: int) -> None:
        assert SALES not in node.broker.state.virtual_hosts.by_name
        assert not [queue for queue in node.broker.state.queues if queue.vhost == SALES]
        if len(done) == pieces:
            raise errors.OptionError("killed")
        done.append(True)
        ends(self, change, count)

    with monkeypatch.context() as patch:
        patch.setattr(Registry, "end_some", end_some)
        with contextlib.suppress(errors.OptionError):
            Vhosts(node.broker, engines).delete_vhost(SALES)
    assert len(done) == pieces
    node.restart()
    records = node.store.reopened().load().records
    of_queues = (QueueRecord, BindingRecord, ExchangeRecord, ProgressRecord, RunRecord)
    assert not [record for record in records if isinstance(record, of_queues)]
    assert SALES not in node.broker.state.virtual_hosts.by_name
    node.broker.run(lambda state, change, _now: state.virtual_hosts.add(change, SALES))
    with node.broker.channel(vhost=SALES) as channel:
        channel.queue_declare("q0")
        channel.exchange_declare("x", "topic")
        channel.publish(b"2", "x", "k")
        assert channel.get("q0") is None


def test_a_deleted_virtual_host_leaves_nothing_and_its_name_is_free(node: Node) -> None:
    add(node, max_messages=100)
    engines = VhostEngines(node.broker)
    vhosts = Vhosts(node.broker, engines)
    for vhost in (VHOST, SALES):
        with node.broker.channel(vhost=vhost) as channel:
            channel.queue_declare("in")
            channel.exchange_declare("x", "topic")
            channel.queue_bind("in", "x", "#")
            channel.publish(vhost.encode(), "x", "k")
    run_batch(engines, SALES)
    engines.of(SALES).open_batch("app", "query", 1, "fail")
    with node.broker.channel(vhost=SALES) as channel:
        channel.queue_declare("q")
        channel.publish(b"held", routing_key="q")
        channel.tx_select()
        channel.publish(b"", routing_key="q")
        channel.prepare("x")
    held = node.broker.channel(vhost=SALES)
    assert held.get("q") is not None
    opened = [node.broker.channel(vhost=SALES) for _ in range(2)]
    for channel in opened:
        channel.tx_select()
        channel.publish(b"", routing_key="q")
    late = engines.of(SALES)
    node.broker.run(lambda state, change, _now: state.users.add(change, "ann", ""))
    node.broker.run(lambda state, change, _now: state.users.permit(change, "ann", "", "", ".*", SALES))
    node.broker.run(lambda state, change, _now: state.users.own_app(change, "app", "ann", SALES))
    vhosts.delete_vhost(SALES)
    for ask in (
        lambda: held.queue_declare("late"),
        lambda: opened[0].prepare("late"),
        lambda: opened[1].tx_commit(),
        lambda: late.open_batch("app", "query", 2, "fail"),
        lambda: engines.of(SALES),
    ):
        with pytest.raises(errors.NotAllowed, match="vhost sales not found"):
            ask()
    held.close()
    assert node.broker.outcome("x", vhost=SALES) == "rolled_back" and node.broker.prepared() == []
    virtual_hosts = node.broker.state.virtual_hosts
    assert virtual_hosts.registry.memory.total == virtual_hosts.get(VHOST).memory.total
    names = {getattr(record, "vhost", VHOST) for record in node.store.load().records}
    assert names == {VHOST}
    broker = node.restart()
    assert list(broker.state.virtual_hosts.by_name) == [VHOST] and kept(broker, VHOST) == {"in": 1}
    assert not broker.state.users.permissions and not broker.state.users.apps
    add(node)
    engines = VhostEngines(broker)
    assert engines.of(SALES).apps() == [] and kept(broker, SALES) == {}
    assert broker.state.virtual_hosts.limits(SALES).max_messages == -1
    with pytest.raises(errors.OptionError, match="virtual host '/' cannot be deleted"):
        Vhosts(broker, engines).delete_vhost(VHOST)


def test_a_virtual_host_whose_record_is_lost_is_made_again_with_what_is_in_it(node: Node) -> None:
    add(node)
    with node.broker.channel(vhost=SALES) as channel:
        channel.queue_declare("q")
        channel.publish(b"1", routing_key="q")

    def lose(state: Any, change: Any, _now: int) -> None:
        change.drop(type(state.virtual_hosts.records[SALES]), (SALES,))

    node.broker.run(lose)
    broker = node.restart()
    assert kept(broker, SALES) == {"q": 1}
    assert any("virtual host 'sales' was made again" in text for text in broker.state.loaded.repaired.done)
    assert node.restart().state.loaded.repaired.done == []


def fill(node: Node, vhost: str) -> None:
    for count in itertools.count():
        node.broker.channel(vhost=vhost).queue_declare(f"{count}", arguments={"a": "x" * (count % 7)})


def test_a_full_virtual_host_leaves_three_times_its_memory_to_others(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a restart, and where several are full."""
    hosts = [f"host{number}" for number in range(6)]
    for host in hosts:
        add(node, host)
    registry = node.broker.state.virtual_hosts.registry
    spare = 1_000_000
    monkeypatch.setattr(memory, "NAMES_BYTES", registry.memory.total + spare)
    full: list[int] = []
    for number, host in enumerate(hosts):
        virtual_hosts = node.broker.state.virtual_hosts
        before = virtual_hosts.get(host).memory.total
        with pytest.raises(errors.PreconditionFailed, match=f"of vhost '{host}' take"):
            fill(node, host)
        full.append(virtual_hosts.get(host).memory.total - before)
        left = memory.NAMES_BYTES - virtual_hosts.registry.memory.total
        assert abs(3 * (full[-1] + before) - left) < 20_000
        if number == 2:
            node.restart()
            assert node.broker.state.virtual_hosts.registry.memory.total == memory.NAMES_BYTES - left
    assert full[-1] > 3 * memory.NAME_BYTES
    node.broker.channel().queue_declare("of the first one")
