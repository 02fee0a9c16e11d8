"""Dead letters that reach very many queues: a commit makes a bounded number of entries, or they are written
ahead of it; each queue gets all, in order, as if they were few.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from broker_core.broker.message import removals, settlement
from broker_core.broker.message.removals import Removals
from broker_core.broker.transaction.transaction import Transaction
from broker_core.core.change import Change
from broker_core.core.errors import ResourceShortage, TransactionState
from broker_core.message.properties import Properties
from broker_core.node.channel import LocalChannel
from tests.broker.conftest import Node, declared, publish

QUEUES, MESSAGES = 40, 30
ROOM = 100  # entries of a commit, and one message more
NAMES = [f"dead{number}" for number in range(QUEUES)]


def numbered(*numbers: int) -> list[bytes]:
    return [b"%d" % number for number in range(*numbers)]


@pytest.fixture(autouse=True)
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(removals, "ENTRIES", ROOM)


@pytest.fixture
def ahead(node: Node) -> list[int]:
    """How many dead letters were written ahead, each time."""
    return watched(node)


def watched(node: Node) -> list[int]:
    found: list[int] = []
    blocks = node.broker.committer.loaded_blocks
    write_ahead = blocks.write_ahead

    def noted(transaction: Transaction) -> None:
        write_ahead(transaction)
        found.append(sum(letters.spilled.rows for letters in transaction.letters_ahead))

    blocks.write_ahead = noted
    return found


def fanned(node: Node, kind: str = "fanout", key: str = "") -> None:
    with node.channel() as channel:
        channel.exchange_declare("dlx", kind)
    declared(node, *NAMES)
    with node.channel() as channel:
        for name in NAMES:
            channel.queue_bind(name, "dlx", key or name)


def entries(node: Node) -> int:
    return sum(node.broker.state.topology.queue(name).log.next_offset for name in NAMES)


def upkeep(node: Node) -> list[int]:
    """Expires what is due, and returns the entries that each commit made."""
    state = node.broker.state
    due, made = state.expiry.due(node.clock() + 1_000_000), []
    while due:
        before = entries(node)
        due = node.broker.run(lambda state, change, now, due=due: state.expiry.expire(change, now, due))
        due = due or state.expiry.due(node.clock() + 1_000_000)
        made.append(entries(node) - before)
    return made


def held(node: Node, queue: str, count: int = MESSAGES) -> LocalChannel:
    channel = node.channel()
    for _ in range(count):
        assert channel.get(queue) is not None
    return channel


def require_all(node: Node, expected: list[bytes]) -> None:
    for name in (NAMES[0], NAMES[17], NAMES[-1]):
        assert node.browse(name) == expected
    assert entries(node) == QUEUES * len(expected)
    node.restart()
    for name in (NAMES[0], NAMES[17], NAMES[-1]):
        assert node.browse(name) == expected


@pytest.mark.parametrize("more", [{}, {"x-max-priority": 3}, {"x-max-length-bytes": 1 << 20}])
def test_what_expires_leaves_as_its_dead_letters_find_room(node: Node, more: dict[str, int]) -> None:
    fanned(node)
    declared(node, "q", **{"x-message-ttl": 1000, "x-dead-letter-exchange": "dlx", **more})
    publish(node, "q", *numbered(MESSAGES))
    node.clock.advance(5)
    made = upkeep(node)
    assert max(made) <= ROOM + QUEUES and len(made) >= MESSAGES * QUEUES // (ROOM + QUEUES)
    assert node.browse("q") == []
    require_all(node, numbered(MESSAGES))


def test_queues_that_expire_together_share_the_room(node: Node) -> None:
    fanned(node)
    names = [f"q{number}" for number in range(MESSAGES)]
    declared(node, *names, **{"x-message-ttl": 1000, "x-dead-letter-exchange": "dlx"})
    for name, body in zip(names, numbered(MESSAGES), strict=True):
        publish(node, name, body)
    node.clock.advance(5)
    assert max(upkeep(node)) <= ROOM + QUEUES
    require_all(node, numbered(MESSAGES))


@pytest.mark.parametrize("more", [{"x-max-length": 4}, {"x-max-length-bytes": 8}])
def test_what_overflows_leaves_as_its_dead_letters_find_room(node: Node, more: dict[str, int]) -> None:
    fanned(node)
    declared(node, "q", **{"x-dead-letter-exchange": "dlx", **more})
    with node.channel() as channel:
        channel.tx_select()
        for body in numbered(10, MESSAGES):
            channel.publish(body, routing_key="q")
        channel.tx_commit()
    made = [entries(node), *upkeep(node)]
    assert max(made) <= ROOM + QUEUES and len(made) > 3
    assert node.browse("q") == numbered(MESSAGES - 4, MESSAGES)
    require_all(node, numbered(10, MESSAGES - 4))


@pytest.mark.parametrize("transactional", [True, False])
@pytest.mark.parametrize("kind", ["fanout", "topic", "headers"])
def test_rejects_that_reach_very_many_queues_are_written_ahead_of_their_commit(
    node: Node, ahead: list[int], kind: str, transactional: bool
) -> None:
    fanned(node, kind, "#")
    declared(node, "q", **{"x-dead-letter-exchange": "dlx"})
    publish(node, "q", *numbered(MESSAGES))
    with held(node, "q") as channel:
        if transactional:
            channel.tx_select()
        channel.nack(0, multiple=True, requeue=False)
        if transactional:
            channel.tx_commit()
    assert ahead == [MESSAGES]
    assert len(node.broker.state.topology.queue(NAMES[0]).log.runs) == 1
    require_all(node, numbered(MESSAGES))


@pytest.mark.parametrize("given", [{}, {"x-dead-letter-routing-key": NAMES[3]}])
def test_rejects_that_only_might_reach_very_many_queues_are_not(
    node: Node, ahead: list[int], given: dict[str, str]
) -> None:
    """Forty queues are bound, each to a key of its own."""
    fanned(node, "direct")
    declared(node, "q", **{"x-dead-letter-exchange": "dlx", **given})
    with node.channel() as channel:
        channel.queue_bind("q", "amq.direct", NAMES[3])
        for body in numbered(MESSAGES):
            channel.publish(body, "amq.direct", NAMES[3])
    with held(node, "q") as channel:
        channel.tx_select()
        channel.nack(0, multiple=True, requeue=False)
        channel.tx_commit()
    assert ahead == []
    assert node.browse(NAMES[3]) == numbered(MESSAGES) and entries(node) == MESSAGES


def test_what_is_written_ahead_goes_by_its_additional_keys_too(node: Node, ahead: list[int]) -> None:
    """As what is not: by all keys at once, so that the alternate exchange gets what none of them matches."""
    with node.channel() as channel:
        channel.exchange_declare("other", "fanout")
        channel.exchange_declare("dlx", "direct", arguments={"alternate-exchange": "other"})
    declared(node, *NAMES, "rest")
    declared(node, "q", **{"x-dead-letter-exchange": "dlx"})
    with node.channel() as channel:
        channel.queue_bind("rest", "other")
        for name in NAMES:
            channel.queue_bind(name, "dlx", "all")
        channel.queue_bind(NAMES[0], "dlx", "one")
    everywhere = [b"all none", *[b"all"] * 4]
    expected = {NAMES[0]: [b"all none", b"one", *[b"all"] * 4], NAMES[1]: everywhere, "rest": [b"none", b""]}
    for many in (ROOM, 1 << 40):
        with node.channel() as channel:
            for copies in (["all", "none"], ["one"], ["none"], [], *[["all"]] * 4):
                properties = Properties(headers={"CC": copies}).encode() if copies else b""
                channel.publish(" ".join(copies).encode(), routing_key="q", properties=properties)
        with held(node, "q", 8) as channel, pytest.MonkeyPatch.context() as patch:
            patch.setattr(removals, "ENTRIES", many)
            channel.tx_select()
            channel.nack(0, multiple=True, requeue=False)
            channel.tx_commit()
        for name, bodies in expected.items():
            assert node.drain(name) == bodies
    assert ahead == [8]


def rejected(node: Node, count: int = MESSAGES) -> LocalChannel:
    """A channel whose open transaction rejects all of ``q``."""
    fanned(node)
    declared(node, "q", **{"x-dead-letter-exchange": "dlx"})
    publish(node, "q", *numbered(count))
    channel = held(node, "q", count)
    channel.tx_select()
    channel.nack(0, multiple=True, requeue=False)
    return channel


@pytest.mark.parametrize("restarted", [False, True])
def test_the_rejects_of_a_prepared_transaction_are_written_ahead_of_its_commit(
    node: Node, restarted: bool
) -> None:
    with rejected(node) as channel:
        assert channel.prepare("x") == "prepared"
    if restarted:
        node.restart()
    ahead = watched(node)
    node.broker.commit("x")
    node.broker.commit("x")
    assert ahead == [MESSAGES] and node.browse("q") == []
    require_all(node, numbered(MESSAGES))


def test_two_who_decide_a_prepared_transaction_at_a_time_dead_letter_once(node: Node) -> None:
    with rejected(node) as channel:
        channel.prepare("x")
    blocks = node.broker.committer.loaded_blocks
    write_ahead, both = blocks.write_ahead, threading.Barrier(2)

    def together(transaction: Transaction) -> None:
        both.wait(600)
        write_ahead(transaction)

    blocks.write_ahead = together
    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(node.broker.commit, "x") for _ in range(2)]:
            assert future.result() == 0
    assert node.browse("q") == [] and not node.store.staged  # the other one's copies are forgotten
    require_all(node, numbered(MESSAGES))


@pytest.mark.parametrize("way", ["rollback", "commit"])
def test_a_prepared_transaction_is_rolled_back_while_its_letters_are_written(node: Node, way: str) -> None:
    with rejected(node) as channel:
        channel.prepare("x")
    blocks = node.broker.committer.loaded_blocks
    write_ahead = blocks.write_ahead

    def late(transaction: Transaction) -> None:
        if way == "commit":
            write_ahead(transaction)
        node.broker.rollback("x")
        if way == "rollback":
            write_ahead(transaction)

    blocks.write_ahead = late
    with pytest.raises(TransactionState):
        node.broker.commit("x")
    assert node.browse("q") == numbered(MESSAGES) and entries(node) == 0
    assert not node.store.staged


@pytest.mark.parametrize("prepared", [False, True])
def test_what_cannot_be_written_ahead_is_an_error_and_changes_nothing(
    node: Node, prepared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = rejected(node)
    if prepared:
        channel.prepare("x")

    def full(_rows: object) -> Any:
        raise ResourceShortage("the disk is full", "make room")

    monkeypatch.setattr(node.store, "append", full)
    with pytest.raises(ResourceShortage):
        node.broker.commit("x") if prepared else channel.tx_commit()
    assert node.browse("q") == numbered(MESSAGES) and entries(node) == 0
    monkeypatch.undo()
    monkeypatch.setattr(removals, "ENTRIES", ROOM)
    if prepared:
        node.broker.commit("x")
        require_all(node, numbered(MESSAGES))
    else:
        assert node.drain("q") == numbered(MESSAGES)
    channel.close()


def test_letters_of_an_exchange_that_comes_after_they_were_written_are_none(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transaction of very many rejects must not meet an exchange of very many queues in its commit."""
    monkeypatch.setattr(settlement, "MANY_REJECTS", MESSAGES)
    declared(node, "q", **{"x-dead-letter-exchange": "dlx"})
    publish(node, "q", *numbered(MESSAGES))
    blocks = node.broker.committer.loaded_blocks
    write_ahead = blocks.write_ahead

    def then_made(transaction: Transaction) -> None:
        write_ahead(transaction)
        fanned(node)

    blocks.write_ahead = then_made
    with held(node, "q") as channel:
        channel.tx_select()
        channel.nack(0, multiple=True, requeue=False)
        channel.tx_commit()
    assert node.browse("q") == [] and entries(node) == 0


def test_what_is_written_ahead_is_not_in_the_record_of_a_prepared_transaction(node: Node) -> None:
    """Its user is deleted meanwhile, and the broker is killed behind that: another write ahead is needed."""
    with rejected(node) as channel:
        channel._user = "bob"
        channel.prepare("x")
    prepared = node.broker.state.prepared
    (transaction,) = prepared.by_key.values()
    node.broker.committer.loaded_blocks.write_ahead(transaction)
    node.broker.run(lambda state, change, _now: state.prepared.disown(change, "bob"))
    node.restart()
    (key,) = node.broker.state.prepared.by_key
    node.broker.run(lambda state, change, now: state.prepared.commit(change, key, now))
    assert node.browse("q") == []
    require_all(node, numbered(MESSAGES))


@pytest.mark.parametrize("others", [False, True])
def test_letters_of_a_queue_that_is_deleted_before_the_commit_are_none(node: Node, others: bool) -> None:
    channel = rejected(node)
    if others:
        declared(node, "q2", **{"x-dead-letter-exchange": "dlx"})
        publish(node, "q2", *numbered(MESSAGES, 2 * MESSAGES))
        for _ in range(MESSAGES):
            assert channel.get("q2") is not None
        channel.nack(0, multiple=True, requeue=False)
    blocks = node.broker.committer.loaded_blocks
    write_ahead, calls = blocks.write_ahead, []

    def then_deleted(transaction: Transaction) -> None:
        write_ahead(transaction)
        if not calls:
            with node.channel() as other:
                other.queue_delete("q")
        calls.append(transaction)

    blocks.write_ahead = then_deleted
    channel.tx_commit()
    channel.close()
    assert len(calls) == 1 + others or not others
    assert not node.store.staged
    require_all(node, numbered(MESSAGES, 2 * MESSAGES) if others else [])


def test_a_few_keys_of_one_message_are_many_queues_of_the_default_exchange(
    node: Node, ahead: list[int]
) -> None:
    declared(node, *NAMES)
    declared(node, "q", **{"x-dead-letter-exchange": ""})
    properties = Properties(headers={"CC": NAMES}).encode()
    publish(node, "q", *numbered(MESSAGES), properties=properties)
    for name in NAMES:
        assert node.drain(name) == numbered(MESSAGES)
    with held(node, "q") as channel:
        channel.tx_select()
        channel.nack(0, multiple=True, requeue=False)
        channel.tx_commit()
    assert ahead == [MESSAGES] and node.browse(NAMES[5]) == numbered(MESSAGES)


def test_large_rejects_are_written_ahead(
    node: Node, ahead: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(removals, "SIZE_BYTES", 1000)
    declared(node, "dead")
    declared(node, "q", **{"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"})
    publish(node, "q", *[b"x" * 100] * MESSAGES)
    with held(node, "q") as channel:
        channel.tx_select()
        channel.nack(0, multiple=True, requeue=False)
        channel.tx_commit()
    assert ahead == [MESSAGES] and len(node.browse("dead")) == MESSAGES


def test_headers_that_must_be_decoded_take_room(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has died before."""
    monkeypatch.setattr(removals, "SIZE_BYTES", 1 << 18)
    declared(node, "dead")
    declared(
        node,
        "q",
        **{"x-message-ttl": 1000, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"},
    )
    died = Properties(headers={"x-death": [{"queue": "other", "reason": "expired"}], "long": "x" * 2000})
    publish(node, "q", *numbered(MESSAGES), properties=died.encode())
    node.clock.advance(5)
    state = node.broker.state
    due, steps = state.expiry.due(node.clock()), 0
    while due:
        due = node.broker.run(lambda state, change, now, due=due: state.expiry.expire(change, now, due))
        steps += 1
    assert steps > MESSAGES // 4 and node.browse("dead") == numbered(MESSAGES)


def test_a_message_that_is_given_back_is_dead_lettered_once(node: Node) -> None:
    """Its queue has priorities, which are read again after a restart, while a prepared transaction holds it."""
    declared(node, "dead")
    to_dead = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}
    declared(node, "q", **{"x-max-priority": 3, "x-message-ttl": 3000, **to_dead})
    publish(node, "q", b"A")
    with node.channel() as channel:
        delivery = channel.get("q")
        assert delivery is not None
        channel.tx_select()
        channel.ack(delivery.tag)
        channel.prepare("x")
    publish(node, "q", b"B", properties=Properties(priority=1).encode())
    node.restart()
    with held(node, "q", 1) as channel:  # the look for it reads all
        channel.nack(0, multiple=True)
    node.broker.rollback("x")
    node.clock.advance(5)
    node.broker.run(lambda state, change, now: state.expiry.expire(change, now))
    assert node.browse("dead") == [b"B", b"A"]


def test_a_dead_letter_of_a_closed_channel_lives_from_then_on(node: Node) -> None:
    declared(node, "dead", **{"x-message-ttl": 3000})
    to_dead = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}
    declared(node, "q", **{"x-queue-type": "quorum", "x-delivery-limit": 0, **to_dead})
    publish(node, "q", b"m")
    held(node, "q", 1).close()
    assert node.drain("dead") == [b"m"]


def test_a_requeue_gives_up_as_many_as_find_room_and_the_others_before_they_are_delivered(
    node: Node,
) -> None:
    fanned(node)
    declared(node, "q", **{"x-queue-type": "quorum", "x-delivery-limit": 1, "x-dead-letter-exchange": "dlx"})
    publish(node, "q", *numbered(MESSAGES))
    for _ in range(2):
        with held(node, "q") as channel:
            channel.nack(0, multiple=True, requeue=True)
    assert 0 < entries(node) <= ROOM + QUEUES
    with node.channel() as channel:
        assert channel.get("q") is None
    assert max(upkeep(node), default=0) <= ROOM + QUEUES
    require_all(node, numbered(MESSAGES))
    assert node.browse("q") == []


def test_the_room_counts_rows_bytes_and_entries(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    fanned(node)
    declared(node, "q", **{"x-dead-letter-exchange": "dlx"})
    publish(node, "q", *[b"x" * 100] * 10)
    state = node.broker.state
    queue = state.topology.queue("q")

    def taken(**limits: int) -> int:
        for name, value in {"ROWS": 1000, "ENTRIES": 1 << 20, "SIZE_BYTES": 1 << 20, **limits}.items():
            monkeypatch.setattr(removals, name, value)
        rows = removals.messages_of(queue, range(10))
        found: Removals = state.messages.removals(Change(), 0)
        count = found.add(queue, rows, "rejected")
        assert found.full == bool(limits)
        assert found.add(queue, rows, "rejected", whole=True) == 10
        return count

    assert taken() == 10
    assert taken(ROWS=4) == 4 and taken(SIZE_BYTES=201) == 3 and taken(ENTRIES=2 * QUEUES) == 2
