"""Random histories of a whole broker (whole_broker.py), and each rule that they check switched off once: then
they must fail.

``TXMQ_SOAK_ROUNDS=n`` (or ``--soak-rounds n``) runs n times as many histories, from other seeds each time.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from broker_core.broker.channel import Channel
from broker_core.broker.message.admission import Admission
from broker_core.broker.message.expiry import Expiry
from broker_core.broker.message.messages import Messages
from broker_core.broker.message.overflow import Overflow
from broker_core.broker.message.settlement import Settlement
from broker_core.broker.queue import Queue
from broker_core.broker.queue.due_index import DueIndex
from broker_core.broker.queue.log import Log
from broker_core.broker.queue.message_ids import MessageIds
from broker_core.broker.queue.pending_checks import PendingChecks
from broker_core.broker.queue.queue import Marks
from broker_core.broker.queue.ready import Ready
from broker_core.broker.transaction.heuristics import Heuristics
from broker_core.core import errors
from broker_core.core.block import Blocks
from broker_core.routing import exchange_types
from tests import reading
from tests.make import spill
from tests.model.naive_broker import LATER, LENGTH, NEWS, ONCE, PENDING, Work
from tests.model.whole_broker import ROUTES, NothingInMemory, OnDisk, WholeBroker

Patch = pytest.MonkeyPatch

QUIET = (
    HealthCheck.too_slow,
    HealthCheck.filter_too_much,
    HealthCheck.data_too_large,
    HealthCheck.large_base_example,
)


@pytest.mark.parametrize(("machine", "histories"), [(WholeBroker, 75), (NothingInMemory, 40), (OnDisk, 30)])
def test_every_history_of_a_broker_agrees_with_plain_lists(
    machine: type[WholeBroker], histories: int, rounds: int
) -> None:
    soak = rounds or int(os.environ.get("TXMQ_SOAK_ROUNDS", "0"))
    reads = reading.reads
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=2 * histories * soak or histories,
            stateful_step_count=40,
            deadline=None,
            derandomize=not soak,
            database=None,
            print_blob=True,
            suppress_health_check=QUIET,
        ),
    )
    # random histories of a soak may hardly seal anything
    wanted = 0 if soak else 20
    assert machine is WholeBroker or reading.reads > reads + wanted, "and none of them under the lock"


def nothing(*_args: object, **_kwargs: object) -> None: ...


def none(*_args: object, **_kwargs: object) -> list[object]:
    return []


def no(*_args: object, **_kwargs: object) -> bool:
    return False


def off(owner: object, name: str, value: object) -> Callable[[Patch], None]:
    return lambda patch: patch.setattr(owner, name, value)


RULES: dict[str, Callable[[Patch], None]] = {
    "a bounded queue drops its oldest messages": off(Overflow, "cut", nothing),
    "a full queue that rejects publishes refuses the whole commit": off(Overflow, "check", nothing),
    "what is rejected, expired or dropped is dead-lettered": off(Messages, "dead_letter_all", nothing),
    "a commit settles its deliveries": off(Settlement, "settle", nothing),
    "settled messages stay settled over a restart": off(Queue, "restore_progress", nothing),
    "what no queue needs lets its block go": off(Blocks, "unpin", nothing),
}


class WithoutApps(WholeBroker):
    micro_batch = None  # type: ignore[assignment]


@pytest.mark.soak
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_switched_off_is_seen(rule: str, monkeypatch: Patch) -> None:
    RULES[rule](monkeypatch)
    with pytest.raises(BaseException):  # noqa: B017  # whatever shows first
        run_state_machine_as_test(
            WithoutApps,
            settings=settings(
                max_examples=1_000,
                stateful_step_count=150,  # a long history shows it sooner than many short ones
                deadline=None,
                derandomize=True,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=QUIET,
            ),
        )


def publish(broker: WholeBroker, queue: str, *, persistent: bool = True) -> None:
    broker.publish_one(broker.peers[1], ROUTES.index((queue,)), persistent, crash="")


def a_delivery_comes_back(broker: WholeBroker) -> None:
    publish(broker, "plain")
    taking = broker.peers[1]
    broker.get_one(taking, "plain")
    broker.close_one(taking)
    broker.both_hold_the_same()
    broker.get_one(broker.peers[0], "plain")


def a_time_to_live_passes(broker: WholeBroker) -> None:
    publish(broker, "timed")
    broker.clock_step(1.1)
    broker.get_one(broker.peers[0], "timed")


def messages_wait(broker: WholeBroker) -> None:
    """In memory row by row, in a sealed block, and over a restart; one arrives before."""
    for step in ("now", "sealed", "restarted"):
        for _ in range(2):
            publish(broker, LATER)
        if step == "sealed":
            broker.upkeep("seal", crash="")
        if step == "restarted":
            broker.restart("killed")
        broker.clock_step(1.1)
        broker.upkeep("expire", crash="")
        broker.both_hold_the_same()
    broker.clock_step(5)
    broker.upkeep("expire", crash="")


def expirations_pass_behind_a_head(broker: WholeBroker) -> None:
    """Every second message has one, the first has none. In memory, and sealed over a restart."""
    for step in ("now", "restarted"):
        for _ in range(5):
            publish(broker, "plain")
        if step == "restarted":
            broker.upkeep("seal", crash="")
            broker.restart("killed")
        for seconds in (1.1, 5):
            broker.clock_step(seconds)
            broker.upkeep("expire", crash="")
            broker.both_hold_the_same()


def a_block_is_sealed(broker: WholeBroker) -> None:
    publish(broker, "plain")
    broker.upkeep("seal", crash="")
    broker.restart("killed")


def a_transient_message_is_claimed(broker: WholeBroker) -> None:
    publish(broker, "in", persistent=False)
    broker.micro_batch("claim", rows=1)
    broker.restart("killed")


def a_policy_comes_to_a_long_queue(broker: WholeBroker) -> None:
    for _ in range(LENGTH + 1):
        publish(broker, "plain")
    broker.policy(bound=True, crash="")
    broker.policy(bound=False, crash="")
    for _ in range(LENGTH + 1):
        publish(broker, "plain")


def a_message_is_sent_again(broker: WholeBroker) -> None:
    """Behind a sealed block; it was consumed in one of the two queues. And once more after a crash."""
    both, window = ROUTES.index((PENDING, ONCE)), ROUTES.index((ONCE,))
    broker.publish_one(broker.peers[1], both, True, crash="")
    for name in (ONCE, PENDING):
        broker.purge(name)
    broker.publish_one(broker.peers[1], both, True, crash="", again=1)
    broker.upkeep("seal", crash="")
    broker.both_hold_the_same()
    broker.restart("killed")
    broker.publish_one(broker.peers[1], window, True, crash="", again=1)


def a_delayed_message_is_sent_again(broker: WholeBroker) -> None:
    """It has arrived, and the broker was killed."""
    broker.publish_one(broker.peers[1], ROUTES.index((LATER,)), True, crash="")
    broker.clock_step(5)
    broker.upkeep("expire", crash="")
    broker.restart("killed")
    broker.publish_one(broker.peers[1], ROUTES.index((ONCE,)), True, crash="", again=1)


def a_message_is_sent_again_to_an_exchange(broker: WholeBroker) -> None:
    """It has left; and once more after a crash."""
    for again in (0, 1, 1):
        broker.publish_one(broker.peers[1], ROUTES.index((NEWS,)), True, crash="", again=again)
        broker.upkeep("expire", crash="")
        broker.both_hold_the_same()
        broker.restart("killed" if again else "not now")


def a_message_is_sent_again_in_a_spilled_transaction(broker: WholeBroker) -> None:
    window = ROUTES.index((ONCE,))
    broker.publish_one(broker.peers[1], window, True, crash="")
    for again in (1, 0, 1):
        broker.publish_one(broker.peers[0], window, True, crash="", again=again)
    work, channel = broker.peers[0].work, broker.peers[0].channel
    spill(broker.broker, channel)
    channel.tx_commit()
    broker.naive.commit(work, broker.now_us())
    broker.peers[0].work = Work()


def an_operator_decides(broker: WholeBroker) -> None:
    for commit in (True, False):
        xid, peer = f"decided-{commit}", broker.peers[0]
        broker.publish_one(peer, ROUTES.index(("plain",)), True, crash="")
        peer.channel.prepare(xid)
        broker.naive.prepare(peer.work, xid)
        peer.work = Work()
        broker.decide_one(xid, commit, by_hand=True)
    broker.restart("killed")
    broker.both_hold_the_same()


# rules that random histories take long to show, each with one that shows it
SHOWN: dict[str, tuple[Callable[[WholeBroker], None], Callable[[Patch], None]]] = {
    "a delivery that came back says redelivered": (a_delivery_comes_back, off(Ready, "was_sent", no)),
    "a closed channel gives back what it held": (a_delivery_comes_back, off(Channel, "_give_back", nothing)),
    "a duplicate is dropped": (a_message_is_sent_again, off(MessageIds, "has", no)),
    "a duplicate is dropped by an exchange": (
        a_message_is_sent_again_to_an_exchange,
        off(MessageIds, "has", no),
    ),
    "ids of messages that have waited are durable": (
        a_delayed_message_is_sent_again,
        off(Admission, "record", nothing),
    ),
    "ids of an exchange are durable": (
        a_message_is_sent_again_to_an_exchange,
        off(MessageIds, "restore", nothing),
    ),
    "an id is forgotten with its message, or stays": (
        a_message_is_sent_again,
        off(MessageIds, "_is_over", no),
    ),
    "ids are durable": (a_message_is_sent_again, off(MessageIds, "restore", nothing)),
    "a duplicate in a spilled transaction is dropped": (
        a_message_is_sent_again_in_a_spilled_transaction,
        off(Admission, "new_shares", lambda _self, _block, shares, _now: shares),
    ),
    "a decision by hand is told apart, also after a restart": (
        an_operator_decides,
        off(Heuristics, "restore", nothing),
    ),
    "what is due arrives": (messages_wait, off(Expiry, "due_of", none)),
    "what waits has an order, also after a restart": (messages_wait, off(DueIndex, "add_all", nothing)),
    "a message waits": (messages_wait, off(exchange_types, "delay_ms", lambda _: 0)),
    "what is too old expires": (a_time_to_live_passes, off(Expiry, "head_expired", no)),
    "what expires behind the head leaves": (expirations_pass_behind_a_head, off(Marks, "expire_at", nothing)),
    "an expiration holds over a restart": (expirations_pass_behind_a_head, off(Marks, "loaded", nothing)),
    "a queue keeps the limit of a policy": (
        a_policy_comes_to_a_long_queue,
        off(PendingChecks, "obey_soon", nothing),
    ),
    "a sealed block is named by its runs": (a_block_is_sealed, off(Log, "record_runs", none)),
    "a claim writes the transient messages of its range": (
        a_transient_message_is_claimed,
        off(Messages, "persist", nothing),
    ),
}


def show(history: Callable[[WholeBroker], None]) -> None:
    broker = WholeBroker()
    try:
        broker.start()
        history(broker)
        broker.both_hold_the_same()
    finally:
        broker.teardown()


@pytest.mark.parametrize("rule", SHOWN)
def test_a_rule_switched_off_is_seen_in_the_history_that_shows_it(rule: str, monkeypatch: Patch) -> None:
    history, switch_off = SHOWN[rule]
    show(history)
    switch_off(monkeypatch)
    with pytest.raises((AssertionError, errors.TxmqError)):
        show(history)
