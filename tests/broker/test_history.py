"""The history of commits: what each of them did is known after it, after a restart, and within bounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker_core.admin import TransactionInfo
from broker_core.broker.broker import BrokerState
from broker_core.broker.history.history import HistoryLimits
from broker_core.broker.history.lookup import Place, ReadBudget, Visibility, find, latest, steps
from broker_core.broker.history.rows import COMPRESSED, NAMES_BYTES, Names, commits, compressed, written
from broker_core.broker.message.purge import Purge
from broker_core.core import failpoint
from broker_core.core.change import PUBLISHED, QUEUES, RANGES, REJECTED, Author, Change, Effects
from broker_core.core.errors import OptionError
from broker_core.core.ids import CommitSequence, QueueId
from broker_core.core.records import HistoryRecord
from broker_core.node.upkeep import compact_history
from tests.broker.conftest import Node

ALL = Visibility("/", True, "", lambda _queue: True, lambda _app: True, {})
DEAD = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}


@dataclass(frozen=True)
class Queued:
    """What the history asks of a queue."""

    queue_id: QueueId
    name: str
    vhost: str = "/"
    replies: bool = False


def told(node: Node, sees: Visibility = ALL) -> list[TransactionInfo]:
    """The history, oldest first."""
    rows = node.broker.run(lambda state, _c, _n: state.transactions.history.rows())
    found, more = latest(rows, sees, 10_000, 0, ReadBudget())
    assert not more
    return found[::-1]


def life(rows: Sequence[HistoryRecord], queue_id: int, offset: int) -> list[str]:
    """What happened to a message of queue "in"."""
    found, more = steps(rows, "in", offset, ALL, Place(queue_id), ReadBudget())
    assert more is None
    return [each.effect for each in found]


def effects(found: TransactionInfo) -> list[tuple[object, ...]]:
    return [(each.effect, each.queue, each.entries, each.ranges) for each in found.effects]


def publish(node: Node, count: int, queue: str = "in") -> None:
    with node.channel() as channel:
        channel.queue_declare(queue)
        channel.tx_select()
        for _ in range(count):
            channel.publish(b"secret", routing_key=queue)
        channel.tx_commit()


def test_a_commit_says_what_it_published_acknowledged_rejected_and_dead_lettered(node: Node) -> None:
    with node.channel() as channel:
        channel.queue_declare("dead")
        channel.queue_declare("in", arguments=DEAD)
        channel.tx_select()
        for _ in range(4):
            channel.publish(b"secret", routing_key="in")
        channel.tx_commit()
        for settle in (channel.ack, lambda tag: channel.reject(tag, requeue=False)):
            delivery = channel.get("in")
            assert delivery is not None
            settle(delivery.tag)
        channel.publish(b"secret", routing_key="dead")
        channel.tx_commit("order-7")
        channel.queue_purge("in")
    first, second, third = told(node)
    assert effects(first) == [("published", "in", 4, ((0, 4),))]
    assert effects(second) == [
        ("published", "dead", 1, ((0, 1),)),
        ("acknowledged", "in", 1, ((0, 1),)),
        ("rejected", "in", 1, ((1, 2),)),
        ("dead_lettered", "dead", 1, ((1, 2),)),
    ]
    assert (second.listener, second.xid, second.effects[3].source) == ("process", "order-7", "in")
    assert effects(third) == [("purged", "in", 2, ((2, 4),))]
    assert first.sequence < second.sequence < third.sequence
    rows = node.broker.state.transactions.history.rows()
    assert find(rows, second.sequence, ALL) == second and find(rows, third.sequence + 1, ALL) is None
    assert not any(b"secret" in row.commits for row in rows)  # never a body


@pytest.mark.parametrize("clean", [True, False])
def test_the_history_is_the_same_after_a_restart(node: Node, clean: bool) -> None:
    publish(node, 3)
    with node.channel() as channel:
        channel.queue_declare("in")
        delivery = channel.get("in")
        assert delivery is not None
        channel.ack(delivery.tag)
    publish(node, 2)
    before = told(node)
    assert len(before) == 3
    node.restart(clean=clean)
    assert told(node) == before
    publish(node, 1)
    assert told(node)[:-1] == before


def test_what_was_beside_messages_is_kept_when_these_leave_the_inbox(node: Node) -> None:
    for _ in range(5):
        publish(node, 1)
    before = told(node)
    with node.channel() as channel:
        channel.queue_purge("in")
    node.broker.upkeep.close_open()  # nothing needs the block now: it is forgotten
    node.restart()
    assert told(node)[:5] == before
    publish(node, 2)
    before = told(node)
    node.broker.upkeep.close_open()
    node.broker.upkeep.seal()
    node.restart()
    assert told(node) == before


def test_many_rows_become_one_and_say_the_same(node: Node) -> None:
    for _ in range(600):
        publish(node, 1)
    before = told(node)
    compact_history(node.broker.committer, node.broker.clock())
    rows = node.broker.state.transactions.history.rows()
    assert [row.packed for row in rows[:2]] == [COMPRESSED, COMPRESSED] and len(rows) == 3
    assert told(node) == before
    node.restart()
    assert told(node) == before


def test_names_are_said_once_where_commits_with_and_without_messages_take_turns(node: Node) -> None:
    """Otherwise who has many names makes each look, and each row, as long as that."""
    with node.channel() as holder:
        holder.queue_declare("in")
        for number in range(100):
            publish(node, 1, f"queue{number}")
        for _ in range(20):
            publish(node, 1)
            holder.get("in", no_ack=True)
    before = told(node)
    assert [each.sequence for each in before] == sorted(each.sequence for each in before)
    assert len({each.sequence for each in before}) == len(before) >= 140
    (row,) = node.broker.state.transactions.history.rows()
    assert row.commits.count(b'"queue7"') == 1
    node.restart()
    assert told(node) == before


def test_one_that_is_interrupted_while_it_packs_says_the_same(node: Node) -> None:
    for _ in range(300):
        publish(node, 1)
    before = told(node)
    failpoint.arm("upkeep.history.packed", "raise")
    try:
        with pytest.raises(OSError):
            compact_history(node.broker.committer, node.broker.clock())
    finally:
        failpoint.disarm()
    node.restart()
    assert told(node) == before


def test_it_never_takes_more_bytes_than_it_may(node: Node) -> None:
    history = node.broker.state.transactions.history
    history.limits = HistoryLimits(size_bytes=20_000)
    for number in range(400):
        publish(node, 1)
        assert history.size_bytes <= 20_000
        if number == 200:
            compact_history(node.broker.committer, node.broker.clock())
    kept = told(node)
    assert 10 < len(kept) < 400
    node.restart()
    node.broker.state.transactions.history.limits = HistoryLimits(size_bytes=20_000)
    compact_history(node.broker.committer, node.broker.clock())
    assert node.broker.state.transactions.history.size_bytes <= 20_000
    assert told(node)[-1] == kept[-1]


def test_names_of_very_many_queues_are_within_the_bound_too(node: Node) -> None:
    history = node.broker.state.transactions.history
    history.limits = HistoryLimits(size_bytes=300_000)
    for number in range(600):
        publish(node, 1, f"{number:04}{'n' * 240}")
        assert history.size_bytes <= 300_000
    assert sum(names.size_bytes for names in history._beside.values()) < 2 * NAMES_BYTES
    before = told(node)
    assert before[-1].effects[0].queue.startswith("0599")
    node.restart()
    assert told(node)[-len(before) :] == before


def test_what_is_too_old_is_forgotten_also_in_the_middle_of_a_restart(node: Node) -> None:
    for _ in range(600):
        publish(node, 1)
    compact_history(node.broker.committer, node.broker.clock())
    node.clock.advance(25 * 3600)
    publish(node, 1)
    failpoint.arm("upkeep.history.trimmed", "raise")
    try:
        with pytest.raises(OSError):
            compact_history(node.broker.committer, node.broker.clock())
    finally:
        failpoint.disarm()
    node.restart()
    compact_history(node.broker.committer, node.broker.clock())
    assert len(told(node)) == 1


def test_without_bytes_there_is_none_and_what_there_was_goes(node: Node) -> None:
    publish(node, 1)
    node.broker.state.transactions.history.limits = HistoryLimits(size_bytes=0)
    publish(node, 1)
    compact_history(node.broker.committer, node.broker.clock())
    assert told(node) == [] and node.broker.state.transactions.history.size_bytes == 0
    with pytest.raises(OptionError):
        HistoryLimits(age_s=0)


def test_with_bytes_again_it_begins_anew_and_what_had_gone_stays_gone(node: Node) -> None:
    """Also what is still beside messages."""
    for _ in range(3):
        publish(node, 1)
    node.restart()
    node.broker.state.transactions.history.limits = HistoryLimits(size_bytes=0)
    compact_history(node.broker.committer, node.broker.clock())
    publish(node, 1)
    node.restart()
    assert told(node) == []
    publish(node, 1)
    publish(node, 1)
    before = told(node)
    assert len(before) == 2
    node.restart()
    assert told(node) == before
    assert len(node.drain("in")) == 6


# -- rows that cannot be read --------------------------------------------------------------------------------
def test_a_row_that_cannot_be_read_is_left_out_and_the_messages_are_there(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    publish(node, 2)
    node.broker.upkeep.close_open()
    node.broker.upkeep.seal()
    publish(node, 1)
    before = told(node)
    for text in (b"", b"[]", b"{}", b'{"commits":[[1]]}', b'{"plain":"AAAA"}', b"\xff"):
        node.store.commit([Change(journal=[HistoryRecord(999, 998, 999, 1, 0, text)])])
        caplog.clear()
        node.restart()
        assert "row 999 of table history" in caplog.text and told(node) == before
        caplog.clear()
        node.restart()
        assert "row 999" not in caplog.text  # it was dropped
    assert len(node.drain("in")) == 3


def test_rows_beside_messages_are_left_out_up_to_one_that_says_all_names(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(4):
        publish(node, 1)
    before = told(node)
    kept = node.store.content.history
    at = next(place for place, each in enumerate(kept) if b"fresh" in each.text)
    kept[at] = kept[at]._replace(text=b"{")
    node.restart()
    assert "a history beside messages of block" in caplog.text and "it follows one" in caplog.text
    left = told(node)
    assert len(left) < len(before) and left == before[len(before) - len(left) :]
    publish(node, 1)
    publish(node, 2)
    after = told(node)
    assert after[:-2] == left
    node.restart()
    assert told(node) == after
    node.broker.upkeep.close_open()
    node.broker.upkeep.seal()
    node.restart()
    assert told(node) == after and len(node.drain("in")) == 7


def test_a_clock_that_is_set_back_changes_neither_order_nor_bounds(node: Node) -> None:
    publish(node, 1)
    node.clock.advance(-7 * 24 * 3600)
    node.restart()
    publish(node, 1)
    first, second = told(node)
    assert first.committed_at_us < second.committed_at_us
    compact_history(node.broker.committer, node.broker.clock())
    assert len(told(node)) == 2


def test_a_commit_of_very_many_settled_messages_is_a_summary(node: Node) -> None:
    count = 3_000
    publish(node, count)
    with node.channel() as channel:
        channel.queue_declare("in")
        tags = [delivery.tag for _ in range(count) if (delivery := channel.get("in")) is not None]
        channel.tx_select()
        for tag in tags[::2]:
            channel.ack(tag)
        channel.tx_commit()
    found = told(node)[-1]
    (effect,) = found.effects
    assert (effect.entries, effect.exact) == (count // 2, False)
    assert effect.ranges[0][0] == 0 and max(end for _, end in effect.ranges) == count - 1
    assert len(effect.ranges) <= RANGES + 1
    assert max(len(row.commits) for row in node.broker.state.transactions.history.rows()) < 4_096


def test_effects_are_bounded_whatever_is_noted() -> None:
    class Named:
        queue_id, name, vhost, replies = 1, "q", "/", False

    noted = Effects()
    for offset in range(0, 2_000_000, 2):
        noted.note(PUBLISHED, ONE, offset, offset + 1)  # type: ignore[arg-type]
    ((_, found),) = noted.items()
    assert found[0] == 1_000_000 and len(found) <= 2 * RANGES + 3
    assert (min(found[1::2]), max(found[2::2])) == (0, 1_999_999)
    for _ in range(2 * QUEUES):
        noted.note(PUBLISHED, Named(), 0, 1)  # type: ignore[arg-type]
    assert len(noted) == QUEUES and noted.left_out == QUEUES + 1


class One:
    queue_id, name, vhost, replies = 1, "q", "/", False


ONE = One()


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3), st.booleans()), min_size=1, max_size=40))
def test_the_commits_of_a_group_keep_their_order_whatever_they_did(
    given_works: list[tuple[int, int, bool]],
) -> None:
    queues = [Queued(QueueId(number), f"q{number}") for number in (1, 2)]
    group, expected = [], []
    for number, (user, count, rejects) in enumerate(given_works):
        effects = Effects()
        effects.who = Author("amqp", "/", f"user {user}")
        effects.note(PUBLISHED, queues[user % 2], number, number + count)
        ranges = [("published", number, number + count)]
        if rejects:
            effects.note(REJECTED, queues[0], number, number + 1)
            ranges.append(("rejected", number, number + 1))
        group.append((CommitSequence(10 + 2 * number), 1_000 + number, effects))
        expected.append((10 + 2 * number, 1_000 + number, effects.who, ranges))
    names = Names()
    parts = [written(part, names) for part in (group[:3], group[3:]) if part]
    record = HistoryRecord(1, 0, 0, 0, 0, names.text(part[0] for part in parts if part).encode())
    for row in (record, compressed(record)):
        assert [
            (each.sequence, each.committed_at, each.who, [(e.kind, *e.ranges[0]) for e in each.effects])
            for each in commits(row)
        ] == expected


def test_a_row_of_format_10_says_the_same() -> None:
    """It had each commit as text."""
    row = (
        b'{"who":[["amqp","/","ann","",""]],"queues":{"7":["/","in"]},'
        b'"commits":[[3,1000,0,[[0,7,0,1,4,5]]],[5,1001,0,[[2,7,0,1,4,5]]]]}'
    )
    first, second = commits(HistoryRecord(1, 3, 5, 1001, 0, row))
    assert (first.sequence, first.who.user) == (3, "ann") and first.queues == {7: ("/", "in")}
    assert [(each.kind, each.ranges) for each in (*first.effects, *second.effects)] == [
        ("published", ((4, 5),)),
        ("acknowledged", ((4, 5),)),
    ]


def test_expired_and_overflowed_messages_are_told(node: Node) -> None:
    with node.channel() as channel:
        channel.queue_declare("dead")
        channel.queue_declare("short", arguments={"x-max-length": 1, **DEAD})
        channel.queue_declare("brief", arguments={"x-message-ttl": 10})
        for _ in range(2):
            channel.publish(b"", routing_key="short")
        channel.publish(b"", routing_key="brief")
    node.clock.advance(1)
    node.broker.upkeep.expire()
    found = {each.effect: each for one in told(node) for each in one.effects}
    assert (found["overflowed"].queue, found["overflowed"].ranges) == ("short", ((0, 1),))
    assert (found["dead_lettered"].queue, found["dead_lettered"].source) == ("dead", "short")
    assert (found["expired"].queue, found["expired"].ranges) == ("brief", ((0, 1),))
    assert told(node)[-1].listener == ""  # the broker itself


def test_rejects_whose_dead_letters_are_written_ahead_are_rejects(node: Node) -> None:
    with node.channel() as channel:
        channel.queue_declare("dead")
        channel.queue_declare("in", arguments=DEAD)
        channel.tx_select()
        for _ in range(1_500):
            channel.publish(b"", routing_key="in")
        channel.tx_commit()
        last = [delivery.tag for _ in range(1_500) if (delivery := channel.get("in")) is not None][-1]
        channel.nack(last, multiple=True, requeue=False)
        channel.tx_commit()
    assert effects(told(node)[-1]) == [
        ("rejected", "in", 1_500, ((0, 1_500),)),
        ("dead_lettered", "dead", 1_500, ((0, 1_500),)),
    ]


def test_the_life_of_a_message_ends_with_what_settled_it(node: Node) -> None:
    publish(node, 3)
    with node.channel() as channel:
        channel.queue_declare("in")
        delivery = channel.get("in")
        assert delivery is not None
        channel.ack(delivery.tag)
    rows = node.broker.state.transactions.history.rows()
    queue_id = node.broker.state.topology.queues["in"].queue_id
    assert life(rows, queue_id, 0) == ["published", "acknowledged"]
    assert life(rows, queue_id, 2) == ["published"]
    assert life(rows, queue_id, 3) == []


def test_a_queue_made_again_is_another_one(node: Node) -> None:
    publish(node, 2)
    with node.channel() as channel:
        channel.queue_delete("in")
    publish(node, 1)
    rows = node.broker.state.transactions.history.rows()
    queue_id = node.broker.state.topology.queues["in"].queue_id
    assert life(rows, queue_id, 0) == ["published"] and not life(rows, queue_id, 1)
    assert effects(told(node)[1]) == [("deleted", "in", 2, ((0, 2),))]


def test_a_user_sees_its_queues_alone_and_others_only_as_its_own_commits(node: Node) -> None:
    with node.channel() as channel:
        for queue in ("mine", "secret"):
            channel.queue_declare(queue)
        channel.tx_select()
        channel.publish(b"", routing_key="mine")
        channel.publish(b"", routing_key="secret")
        channel.tx_commit("the name")
        channel.publish(b"", routing_key="secret")
        channel.tx_commit()
    ann = Visibility("/", False, "ann", lambda queue: queue == "mine", lambda _app: False, {})
    (found,) = told(node, ann)
    assert effects(found) == [("published", "mine", 1, ((0, 1),))]
    assert "secret" not in repr(found) and (found.listener, found.user, found.xid, found.left_out) == (
        "",
        "",
        "",
        0,
    )
    hidden = told(node)[1]
    assert find(node.broker.state.transactions.history.rows(), hidden.sequence, ann) is None
    other = Visibility("other", True, "", lambda _queue: True, lambda _app: True, {})
    assert told(node, other) == []


def test_a_failed_work_leaves_nothing_in_the_history(node: Node) -> None:
    publish(node, 1)

    def fails(state: BrokerState, change: Change, now: int) -> None:
        assert Purge(state.topology, "in").step(state, change, now)
        raise OptionError("no")

    with pytest.raises(OptionError):
        node.broker.run(fails)
    assert len(told(node)) == 1
