"""What the channels promise (semantics): one test for each promise that needs no AMQP connection, named after
it.
"""

from __future__ import annotations

from typing import Any

import pytest

from broker_core.broker.channel import Channel
from broker_core.broker.topology.ownership import own, release
from broker_core.broker.transaction.transaction import Limits
from broker_core.core import errors
from broker_core.core.block import OPEN_ROWS
from broker_core.message.properties import Properties
from broker_core.node.channel_commit import SPILL_ROWS
from broker_core.node.local import LocalBroker
from broker_core.store.memory import MemoryStore
from tests.make import beneath
from tests.progress import wait_until
from tests.reading import unsettled

from .conftest import Node, declared, publish

# -- the notes -----------------------------------------------------------------------------------------------


def test_a_publish_in_a_transaction_is_held_until_commit_and_outside_goes_straight_to_its_queues(
    node: Node,
) -> None:
    declared(node, "q")
    with node.channel() as channel:
        channel.publish(b"at once", routing_key="q")
        assert node.queue("q").messages == 1
        channel.tx_select()
        channel.publish(b"held", routing_key="q")
        assert node.queue("q").messages == 1
        channel.tx_commit()
        assert node.browse("q") == [b"at once", b"held"]


def test_an_ack_matches_zero_or_more_deliveries_marks_in_a_transaction_and_deletes_outside(
    node: Node,
) -> None:
    declared(node, "q")
    publish(node, "q", b"1", b"2", b"3", b"4")
    with node.channel() as channel:
        channel.ack(0, multiple=True)
        tags = [delivery.tag for _ in range(4) if (delivery := channel.get("q"))]
        channel.ack(tags[1], multiple=True)
        assert node.browse("q") == [b"3", b"4"]
        channel.tx_select()
        channel.ack(0, multiple=True)
        assert node.browse("q") == [b"3", b"4"]
        channel.tx_commit()
        assert node.browse("q") == []


def test_commit_does_not_touch_other_deliveries(node: Node) -> None:
    declared(node, "q")
    publish(node, "q", b"1", b"2")
    with node.channel() as channel:
        channel.tx_select()
        first, second = channel.get("q"), channel.get("q")
        assert first and second
        channel.ack(first.tag)
        channel.tx_commit()
        assert node.queue("q").unacknowledged == 1
        channel.ack(second.tag)
        channel.tx_commit()
        assert node.queue("q").messages == 0


def test_a_requeued_delivery_comes_back_at_its_old_place_and_says_redelivered(node: Node) -> None:
    declared(node, "q")
    publish(node, "q", b"1", b"2", b"3")
    with node.channel() as channel:
        first, second = channel.get("q"), channel.get("q")
        assert first and second
        channel.nack(second.tag)
        channel.reject(first.tag)
        again = [channel.get("q") for _ in range(3)]
        assert [(delivery.body, delivery.redelivered) for delivery in again if delivery] == [
            (b"1", True),
            (b"2", True),
            (b"3", False),
        ]


def test_tx_select_may_be_repeated_and_commit_or_rollback_without_it_is_precondition_failed(
    node: Node,
) -> None:
    with node.channel() as channel:
        for call in (channel.tx_commit, channel.tx_rollback, lambda: channel.prepare("x")):
            with pytest.raises(errors.PreconditionFailed, match="channel is not transactional"):
                call()
        channel.tx_select()
        channel.tx_select()
        channel.tx_commit()


def test_a_message_is_stored_once_with_an_entry_for_each_queue_and_goes_when_the_last_is_acked(
    node: Node,
) -> None:
    declared(node, "a", "b")
    with node.channel() as channel:
        channel.exchange_declare("e", "fanout")
        channel.queue_bind("a", "e")
        channel.queue_bind("b", "e")
        channel.publish(b"x" * 1000, "e")
    image = node.store.reopened().load()
    assert [len(row.routes) for row in image.inbox] == [32]
    assert node.drain("a") == [b"x" * 1000]
    node.broker.upkeep.close_open()
    assert len(node.store.reopened().load().inbox) == 1
    assert node.drain("b") == [b"x" * 1000]
    node.broker.upkeep.tick()
    assert node.store.reopened().load().inbox == []


def test_after_a_crash_committed_messages_without_an_ack_come_again_and_all_others_are_gone(
    node: Node,
) -> None:
    declared(node, "q", "gone")
    publish(node, "q", b"acked", b"unacked", b"untouched")
    publish(node, "gone", b"of a deleted queue")
    channel = node.channel()
    channel.tx_select()
    channel.queue_delete("gone")
    first, second = channel.get("q"), channel.get("q")
    assert first and second
    channel.ack(first.tag)
    channel.tx_commit()
    channel.publish(b"uncommitted", routing_key="q")
    channel.ack(second.tag)
    node.restart()
    with node.channel() as again:
        found = [again.get("q") for _ in range(3)]
        assert [(delivery.body, delivery.redelivered) for delivery in found if delivery] == [
            (b"unacked", True),
            (b"untouched", True),
        ]
        with pytest.raises(errors.QueueNotFound):
            again.get("gone")


# -- the decisions, by number --------------------------------------------------------------------------------


def test_01_a_commit_takes_publishes_acks_nacks_and_dead_letterings_over_any_number_of_queues(
    node: Node,
) -> None:
    declared(node, "in", **{"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"})
    declared(node, "out", "dead")
    publish(node, "in", b"ack", b"reject", b"requeue")
    with node.channel() as channel:
        channel.tx_select()
        tags = [delivery.tag for _ in range(3) if (delivery := channel.get("in"))]
        channel.ack(tags[0])
        channel.nack(tags[1], requeue=False)
        channel.nack(tags[2])
        channel.publish(b"published", routing_key="out")
        before = (node.browse("in"), node.browse("out"), node.browse("dead"))
        assert before == ([b"ack", b"reject", b"requeue"], [], [])
        sequence = node.broker.state.numbers.sequence
        channel.tx_commit()
        assert node.broker.state.numbers.sequence == sequence + 1, "one commit sequence number for all of it"
    node.restart()
    assert (node.browse("in"), node.browse("out"), node.browse("dead")) == (
        [b"requeue"],
        [b"published"],
        [b"reject"],
    )


def test_04_routing_is_decided_at_publish_with_errors_at_once(node: Node) -> None:
    declared(node, "q")
    with node.channel() as channel:
        channel.exchange_declare("e", "fanout")
        channel.tx_select()
        assert channel.publish(b"to nobody", "e") is False
        channel.queue_bind("q", "e")
        assert channel.publish(b"to q", "e") is True
        channel.queue_unbind("q", "e")
        with pytest.raises(errors.ExchangeNotFound, match="no exchange 'none' in vhost '/'"):
            channel.publish(b"x", "none")
        channel.tx_commit()
    assert node.browse("q") == [b"to q"]


def test_04_a_queue_deleted_before_commit_drops_out_and_a_mandatory_message_without_any_left_is_returned(
    node: Node,
) -> None:
    declared(node, "a", "b")
    with node.channel() as channel, node.channel() as other:
        channel.exchange_declare("e", "fanout")
        channel.queue_bind("a", "e")
        channel.queue_bind("b", "e")
        channel.tx_select()
        channel.publish(b"both", "e", mandatory=True)
        channel.publish(b"only a", routing_key="a", mandatory=True)
        channel.publish(b"nowhere", routing_key="nowhere", mandatory=True)
        other.queue_delete("a")
        assert channel.returned == []
        channel.tx_commit()
        assert [message.body for message in channel.returned] == [b"only a", b"nowhere"]
    assert node.browse("b") == [b"both"]


def test_05_an_unknown_or_repeated_delivery_tag_is_refused_at_once(node: Node) -> None:
    declared(node, "q")
    publish(node, "q", b"1", b"2")
    with node.channel() as channel:
        delivery = channel.get("q")
        assert delivery
        with pytest.raises(
            errors.PreconditionFailed,
            match=r"^.TXMQ_PRECONDITION_FAILED. unknown delivery "
            r"tag 7$",
        ):
            channel.ack(7)
        with pytest.raises(errors.PreconditionFailed, match="unknown delivery tag 7"):
            channel.ack(7, multiple=True)
        channel.tx_select()
        channel.ack(delivery.tag)
        for settle in (channel.ack, channel.reject, channel.nack):
            with pytest.raises(errors.PreconditionFailed, match=f"unknown delivery tag {delivery.tag}"):
                settle(delivery.tag)
        channel.tx_commit()
        with pytest.raises(errors.PreconditionFailed, match=f"unknown delivery tag {delivery.tag}"):
            channel.ack(delivery.tag)


def test_06_rollback_drops_publishes_and_unacks_the_same_tags_without_redelivery(node: Node) -> None:
    declared(node, "q")
    publish(node, "q", b"1")
    with node.channel() as channel:
        channel.tx_select()
        delivery = channel.get("q")
        assert delivery
        channel.publish(b"dropped", routing_key="q")
        channel.ack(delivery.tag)
        channel.tx_rollback()
        assert channel.get("q") is None, "the message is not dispatched again"
        channel.ack(delivery.tag)
        channel.tx_commit()
    assert node.browse("q") == []


def test_07_closing_a_channel_rolls_back_and_requeues_acked_and_unacked_as_redelivered(node: Node) -> None:
    declared(node, "q")
    publish(node, "q", b"acked", b"unacked")
    channel = node.channel()
    channel.tx_select()
    first, _second = channel.get("q"), channel.get("q")
    assert first
    channel.ack(first.tag)
    channel.publish(b"dropped", routing_key="q")
    channel.close()
    with pytest.raises(errors.TransactionState, match="the channel is closed"):
        channel.publish(b"x", routing_key="q")
    with node.channel() as other:
        found = [other.get("q") for _ in range(3)]
        assert [(delivery.body, delivery.redelivered) for delivery in found if delivery] == [
            (b"acked", True),
            (b"unacked", True),
        ]


def test_08_recover_skips_tags_acked_in_the_open_transaction(node: Node) -> None:
    declared(node, "q")
    publish(node, "q", b"acked", b"unacked")
    with node.channel() as channel:
        channel.tx_select()
        first, second = channel.get("q"), channel.get("q")
        assert first and second
        channel.ack(first.tag)
        assert channel.recover() == 1
        again = channel.get("q")
        assert again and (again.body, again.redelivered) == (b"unacked", True)
        with pytest.raises(errors.PreconditionFailed, match=f"unknown delivery tag {second.tag}"):
            channel.ack(second.tag)
        channel.tx_commit()
    assert node.browse("q") == [b"unacked"]


def test_09_confirm_and_tx_on_one_channel_are_refused_both_ways(node: Node) -> None:
    with node.channel() as channel:
        channel.tx_select()
        with pytest.raises(errors.PreconditionFailed, match="cannot switch from tx to confirm mode"):
            channel.confirm_select()
    with node.channel() as channel:
        channel.confirm_select()
        with pytest.raises(errors.PreconditionFailed, match="cannot switch from confirm to tx mode"):
            channel.tx_select()


def test_10_a_nack_or_reject_in_a_transaction_does_nothing_before_commit_and_nothing_after_rollback(
    node: Node,
) -> None:
    declared(node, "q")
    publish(node, "q", b"1", b"2")
    with node.channel() as channel, node.channel() as other:
        channel.tx_select()
        first, second = channel.get("q"), channel.get("q")
        assert first and second
        channel.nack(first.tag, requeue=True)
        channel.reject(second.tag, requeue=False)
        assert other.get("q") is None
        channel.tx_rollback()
        assert other.get("q") is None
        assert node.browse("q") == [b"1", b"2"]
        channel.nack(first.tag, requeue=True)
        channel.reject(second.tag, requeue=False)
        channel.tx_commit()
        again = other.get("q")
        assert again and again.body == b"1"
        assert node.browse("q") == [b"1"]


@pytest.mark.parametrize("limit", [{"x-max-length": 2}, {"x-max-length-bytes": 2}])
def test_11_a_commit_over_a_full_reject_publish_queue_fails_whole_with_nothing_enqueued(
    node: Node, limit: dict[str, int]
) -> None:
    declared(node, "free")
    declared(node, "full", **limit, **{"x-overflow": "reject-publish"})
    publish(node, "full", b"1")
    with node.channel() as channel:
        channel.tx_select()
        channel.publish(b"f", routing_key="free")
        channel.publish(b"2", routing_key="full")
        channel.publish(b"3", routing_key="full")
        with pytest.raises(
            errors.PreconditionFailed,
            match=r"queue 'full' in vhost '/' is full.*nothing was "
            r"enqueued",
        ):
            channel.tx_commit()
    assert (node.browse("free"), node.browse("full")) == ([], [b"1"])
    publish(node, "full", b"2")
    with pytest.raises(errors.PreconditionFailed, match="is full"):
        publish(node, "full", b"3")


@pytest.mark.parametrize("limit", [{"x-max-length": 2}, {"x-max-length-bytes": 2}])
def test_11_drop_head_drops_the_oldest_ready_message_and_dead_letters_it_in_the_same_commit(
    node: Node, limit: dict[str, int]
) -> None:
    declared(node, "dead")
    declared(node, "q", **limit, **{"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"})
    with node.channel() as holder, node.channel() as channel:
        publish(node, "q", b"h")
        held = holder.get("q")
        assert held
        channel.tx_select()
        for body in (b"1", b"2", b"3", b"4"):
            channel.publish(body, routing_key="q")
        channel.tx_commit()
        assert node.browse("q") == [b"h", b"3", b"4"], "what a channel holds is neither counted nor dropped"
        node.restart()
        assert node.browse("q") == [b"h", b"3", b"4"]
        assert node.browse("dead") == [b"1", b"2"]


def test_12_after_a_failed_commit_the_channel_is_closed_and_its_state_rolled_back(node: Node) -> None:
    declared(node, "in")
    declared(node, "full", **{"x-max-length": 0, "x-overflow": "reject-publish"})
    publish(node, "in", b"1")
    channel = node.channel()
    channel.tx_select()
    delivery = channel.get("in")
    assert delivery
    channel.ack(delivery.tag)
    channel.publish(b"x", routing_key="full")
    with pytest.raises(errors.PreconditionFailed):
        channel.tx_commit()
    assert "its commit failed" in channel.closed
    assert node.drain("in") == [b"1"]


def test_14_the_time_to_live_starts_at_commit_and_an_uncommitted_ack_keeps_a_message_from_expiring(
    node: Node,
) -> None:
    declared(node, "q", **{"x-message-ttl": 1000})
    with node.channel() as channel:
        channel.tx_select()
        channel.publish(b"1", routing_key="q")
        channel.publish(b"2", routing_key="q")
        node.clock.advance(5)
        channel.tx_commit()
        delivery = channel.get("q")
        assert delivery and delivery.body == b"1"
        channel.ack(delivery.tag)
        node.clock.advance(5)
        node.broker.upkeep.tick()
        assert node.browse("q") == [b"1"], "the held one stays, the other expired"
        channel.tx_rollback()
        channel.close()
    assert node.drain("q") == [], "given back, it is too old"


def test_14_a_message_expires_by_its_own_expiration_also_after_a_restart_and_in_a_segment(node: Node) -> None:
    declared(node, "q")
    publish(node, "q", b"short", properties=Properties(expiration="1000").encode())
    publish(node, "q", b"long")
    node.broker.upkeep.close_open()
    node.broker.upkeep.seal()
    node.restart()
    assert node.browse("q") == [b"short", b"long"]
    node.clock.advance(2)
    assert node.drain("q") == [b"long"]
    with (
        node.channel() as channel,
        pytest.raises(errors.PreconditionFailed, match="invalid expiration 'soon'"),
    ):
        channel.publish(b"x", routing_key="q", properties=Properties(expiration="soon").encode())


def test_15_a_transient_message_keeps_its_place_in_the_commit_and_is_never_written(node: Node) -> None:
    declared(node, "q")
    transient = Properties(delivery_mode=1).encode()
    with node.channel() as channel:
        channel.tx_select()
        channel.publish(b"1", routing_key="q")
        channel.publish(b"2", routing_key="q", properties=transient)
        channel.publish(b"3", routing_key="q")
        channel.tx_commit()
        assert node.browse("q") == [b"1", b"2", b"3"]
        channel.queue_declare("fleeting", durable=False)
        channel.publish(b"4", routing_key="fleeting")
        channel.tx_commit()
        assert node.browse("fleeting") == [b"4"]
    assert [row.body for row in node.store.reopened().load().inbox] == [b"1", b"3"]
    node.restart()
    assert node.browse("q") == [b"1", b"3"]
    assert node.drain("q") == [b"1", b"3"]


@pytest.mark.parametrize(("clean", "flags"), [(False, [True, True, True]), (True, [True, False, False])])
def test_16_after_a_restart_redelivered_is_true_for_whatever_may_have_been_sent(
    node: Node, clean: bool, flags: list[bool]
) -> None:
    declared(node, "q")
    publish(node, "q", b"1", b"2", b"3")
    with node.channel() as channel:
        assert channel.get("q")
        node.restart(clean=clean)
        with node.channel() as again:
            found = [again.get("q") for _ in range(3)]
            assert [delivery.redelivered for delivery in found if delivery] == flags


def test_17_delivery_tags_count_from_one_in_each_channel_and_are_never_used_twice(node: Node) -> None:
    declared(node, "q")
    publish(node, "q", b"1", b"2")
    with node.channel() as one, node.channel() as other:
        tags = []
        for _ in range(3):
            delivery = one.get("q")
            assert delivery
            tags.append(delivery.tag)
            one.reject(delivery.tag)
        assert tags == [1, 2, 3]
        first = other.get("q")
        assert first and first.tag == 1


def test_18_a_transaction_over_its_limits_is_refused_by_messages_bytes_and_open_time(node: Node) -> None:
    declared(node, "q")
    limits = Limits(messages=2, size_bytes=10, open_s=60)
    with node.broker.channel(limits=limits) as channel:
        channel.tx_select()
        channel.publish(b"1", routing_key="q")
        with pytest.raises(errors.TransactionTooLarge, match="more than 10 bytes"):
            channel.publish(b"x" * 10, routing_key="q")
        channel.publish(b"2", routing_key="q")
        with pytest.raises(errors.TransactionTooLarge, match="holds 2 messages"):
            channel.publish(b"3", routing_key="q")
        channel.tx_commit()
        channel.publish(b"3", routing_key="q")
        node.clock.advance(61)
        with pytest.raises(errors.TransactionTooLarge, match="open for longer than 60 s"):
            channel.tx_commit()
    assert node.browse("q") == [b"1", b"2"]


@pytest.mark.parametrize(
    ("most", "seconds", "limit"), [(60.0, 30.0, 30), (60.0, 90.0, 60), (60.0, 0.0, 60), (None, 30.0, 30)]
)
def test_18_a_channel_limits_the_open_time_of_its_transactions_below_that_of_the_broker(
    node: Node, most: float | None, seconds: float, limit: int
) -> None:
    declared(node, "q")
    with node.broker.channel(limits=Limits(open_s=most)) as channel:
        channel.tx_select()
        channel.tx_timeout(seconds)
        for _ in range(2):  # of each transaction
            channel.publish(b"in time", routing_key="q")
            node.clock.advance(limit - 1)
            channel.tx_commit()
        channel.publish(b"late", routing_key="q")
        node.clock.advance(limit + 1)
        with pytest.raises(errors.TransactionTooLarge, match=f"open for longer than {limit}.0 s"):
            channel.prepare("xa-1")
        channel.tx_rollback()
        channel.tx_timeout(0)
        channel.publish(b"late", routing_key="q")
        node.clock.advance(10**6)
        if most is None:
            channel.tx_commit()  # 0 takes the limit back
        else:
            with pytest.raises(errors.TransactionTooLarge):
                channel.tx_commit()
    assert len(node.browse("q")) == (3 if most is None else 2)


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_18_a_timeout_is_a_number_of_seconds(node: Node, seconds: float) -> None:
    with node.channel() as channel:
        with pytest.raises(errors.PreconditionFailed, match="not transactional"):
            channel.tx_timeout(1)
        channel.tx_select()
        with pytest.raises(errors.OptionError, match=r"a number of seconds|must be a number"):
            channel.tx_timeout(seconds)


def test_a_channel_names_its_open_transaction_and_each_has_another_id(node: Node) -> None:
    declared(node, "q")
    with node.channel() as channel:
        with pytest.raises(errors.PreconditionFailed, match="not transactional"):
            channel.tx_current()
        channel.tx_select()
        ids = []
        for end in (channel.tx_commit, channel.tx_rollback, lambda: channel.prepare("xa-1")):
            channel.publish(b"1", routing_key="q")
            ids.append(channel.tx_current())
            assert [row.transaction for row in node.broker.channels()] == ids[-1:]
            end()
        assert len({*ids, channel.tx_current()}) == 4


@pytest.mark.slow
def test_18_the_bodies_of_a_large_transaction_spill_to_a_segment_early_and_keep_their_order(
    node: Node,
) -> None:
    declared(node, "odd", "all", "late")
    count = 2 * SPILL_ROWS + 10
    with node.channel() as channel:
        channel.exchange_declare("e", "topic")
        channel.queue_bind("all", "e", "#")
        channel.queue_bind("odd", "e", "odd")
        channel.tx_select()
        for number in range(count):
            channel.publish(b"%d" % number, "e", "odd" if number % 2 else "even")
            assert len(beneath(channel).transaction.publishes) < SPILL_ROWS, "memory stays flat"
        assert node.queue("all").messages == 0
        channel.tx_commit()
        expected = [b"%d" % number for number in range(count)]
        assert node.browse("all") == expected
        assert node.browse("odd") == expected[1::2]
        state = node.broker.state
        sequences = {
            state.messages.fetch(state.topology.queue("all"), offset).sequence
            for offset in (0, SPILL_ROWS, count - 1)
        }
        assert len(sequences) == 1, "one transaction, one commit sequence"
        node.restart()
        assert node.browse("all") == expected
        assert node.browse("odd") == expected[1::2]


def test_18_a_large_transaction_that_is_rolled_back_leaves_nothing_behind(node: Node) -> None:
    declared(node, "q")
    with node.channel() as channel:
        channel.tx_select()
        for _ in range(SPILL_ROWS + 1):
            channel.publish(b"x", routing_key="q")
        channel.tx_rollback()
        channel.tx_commit()
    assert node.browse("q") == []
    assert node.store.staged == {}


def test_19_declare_bind_and_delete_are_not_transactional(node: Node) -> None:
    with node.channel() as channel:
        channel.tx_select()
        channel.queue_declare("q")
        channel.exchange_declare("e", "fanout")
        channel.queue_bind("q", "e")
        channel.tx_rollback()
        assert channel.publish(b"x", "e")
    node.restart()
    with node.channel() as channel:
        assert channel.publish(b"x", "e")
        channel.queue_delete("q")
        channel.exchange_delete("e")
    node.restart()
    assert node.broker.queues() == []
    with node.channel() as channel, pytest.raises(errors.ExchangeNotFound):
        channel.publish(b"x", "e")


def test_21_a_commit_token_answers_whether_it_was_committed(node: Node) -> None:
    declared(node, "q")
    with node.channel() as channel:
        channel.tx_select()
        channel.publish(b"1", routing_key="q")
        with pytest.raises(errors.UnknownTransaction, match="no transaction has the xid 'order-1'"):
            node.broker.outcome("order-1")
        channel.tx_commit("order-1")
    node.restart()
    assert node.broker.outcome("order-1") == "committed"
    channel = node.channel()
    channel.tx_select()
    channel.publish(b"again", routing_key="q")
    with pytest.raises(errors.TransactionState, match="'order-1' is committed"):
        channel.tx_commit("order-1")
    assert node.browse("q") == [b"1"]


def test_22_an_app_owns_its_queue_until_it_is_released_and_a_channel_keeps_the_app_out(node: Node) -> None:
    declared(node, "q")
    publish(node, "q", b"1", b"2")
    broker = node.broker

    def claim(app_id: str) -> None:
        broker.run(lambda state, change, _now: own(change, state.topology.queue("q"), app_id))

    with node.channel() as channel:
        assert channel.get("q")
        with pytest.raises(
            errors.ResourceLocked,
            match=r"cannot be owned by app 'etl'.*hold 1 of its "
            r"messages",
        ):
            claim("etl")
        channel.recover()
        claim("etl")
        claim("etl")
        with pytest.raises(errors.ResourceLocked, match="belongs to app 'etl', not to 'other'"):
            claim("other")
        for call in (channel.get, channel.queue_purge, channel.queue_delete):
            with pytest.raises(
                errors.ResourceLocked, match=r"belongs to app 'etl'.*`txmq app release etl q`"
            ):
                call("q")
        assert channel.publish(b"3", routing_key="q"), "publishing is always allowed"
        node.restart()
        assert node.queue("q").owner == "etl"
        node.broker.run(lambda state, change, _now: release(change, state.topology.queue("q")))
        assert node.drain("q") == [b"1", b"2", b"3"]


def test_22_claimed_entries_neither_expire_nor_overflow_and_those_behind_them_do(node: Node) -> None:
    declared(node, "q", **{"x-message-ttl": 1000, "x-max-length": 2})
    publish(node, "q", b"1", b"2")

    def claim(state: Any, change: Any, _now: int) -> None:
        queue = state.topology.queue("q")
        own(change, queue, "etl")
        queue.claim(0, 2)
        queue.record(change)

    node.broker.run(claim)
    publish(node, "q", b"3", b"4", b"5")
    assert node.browse("q") == [b"1", b"2", b"4", b"5"]
    node.clock.advance(5)
    node.broker.upkeep.tick()
    assert node.browse("q") == [b"1", b"2"]


# -- upkeep: the same messages wherever their bytes are ------------------------------------------------------


def test_sealing_keeps_offsets_rows_sequences_and_holes_over_restarts(node: Node) -> None:
    declared(node, "a", "b")
    with node.channel() as channel:
        channel.exchange_declare("e", "topic")
        channel.queue_bind("a", "e", "#")
        channel.queue_bind("b", "e", "b")
        for number in range(50):
            channel.publish(b"%d" % number, "e", "b" if number % 3 == 0 else "x")
        tags = [delivery.tag for _ in range(20) if (delivery := channel.get("a"))]
        for tag in tags[::2]:
            channel.ack(tag)

    def seen() -> list[tuple[bytes, int, int]]:
        state = node.broker.state
        found = []
        for name in ("a", "b"):
            queue = state.topology.queue(name)
            rows = [state.messages.fetch(queue, offset) for offset in unsettled(queue)]
            found += [(row.body, row.sequence, row.committed_at) for row in rows]
        return found

    before = seen()
    assert len(before) == 40 + 17
    node.broker.upkeep.close_open()
    node.broker.upkeep.seal()
    assert node.broker.state.blocks.full == []
    assert seen() == before
    node.restart()
    assert seen() == before
    assert node.store.reopened().load().inbox == []


def test_a_full_open_block_is_sealed_while_the_broker_runs() -> None:
    broker = LocalBroker(MemoryStore())
    with broker.channel() as channel:
        channel.queue_declare("q")
        channel.tx_select()
        for _ in range(OPEN_ROWS // 512 + 1):
            for _ in range(512):
                channel.publish(b"x", routing_key="q")
            channel.tx_commit()
        (first,) = broker.state.topology.queue("q").log.runs_between(0, 1)
        wait_until(lambda: broker.state.blocks.by_id[first.block_id].inbox is None)
        (run,) = broker.state.topology.queue("q").log.runs_between(0, 3)
        found = broker.read_block(run.block_id).take(list(run.rows()))
        assert found.column("body").to_pylist() == [b"x"] * 3
    broker.close()


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"body": "text"}, "a body must be bytes, not str"),
        ({"body": None}, "a body must be bytes, not NoneType"),
        ({"body": b"", "routing_key": None}, "a routing key must be a str, not NoneType"),
        ({"body": b"", "routing_key": "\udc80", "exchange": "amq.fanout"}, "cannot be encoded as UTF-8"),
        ({"body": b"", "routing_key": "k" * 256, "exchange": "amq.fanout"}, "has 256 bytes, allowed are 255"),
        ({"body": b"", "properties": "text"}, "properties must be bytes, not str"),
    ],
)
def test_a_message_that_cannot_be_stored_is_refused_with_its_reason_and_the_broker_goes_on(
    node: Node, message: dict[str, Any], text: str
) -> None:
    declared(node, "q")
    with node.channel() as channel:
        channel.queue_bind("q", "amq.fanout")
        with pytest.raises(errors.OptionError, match=text):
            channel.publish(**message)
        channel.publish(bytearray(b"good"), routing_key="q")
        with pytest.raises(
            errors.PreconditionFailed,
            match=r"invalid arg 'h' for a binding of queue 'q' in vhost '/': "
            r"\{unacceptable_type,set\}",
        ):
            channel.queue_bind("q", "amq.headers", arguments={"h": {1}})
        with pytest.raises(errors.OptionError, match="queue"):
            channel.queue_declare("\udc80")
    assert node.browse("q") == [b"good"]


def test_a_channel_needs_no_broker_around_it(node: Node) -> None:
    state = node.broker.state
    channel = Channel(state)
    with pytest.raises(errors.PreconditionFailed, match="unknown delivery tag 1"):
        channel.settle(1, "ack", False, 0)


@pytest.mark.parametrize("limit", [{"x-max-length": 3}, {"x-max-length-bytes": 3}])
@pytest.mark.parametrize("transactional", [False, True])
def test_what_comes_back_to_a_full_queue_is_its_oldest_and_is_dropped(
    node: Node, limit: dict[str, int], transactional: bool
) -> None:
    declared(node, "dead")
    declared(node, "q", **limit, **{"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"})
    publish(node, "q", b"a")
    with node.channel() as channel:
        delivery = channel.get("q")
        publish(node, "q", b"b", b"c", b"d")
        if transactional:
            channel.tx_select()
        channel.nack(delivery.tag)
        if transactional:
            assert node.browse("dead") == []
            channel.tx_commit()
    assert (node.browse("q"), node.browse("dead")) == ([b"b", b"c", b"d"], [b"a"])
