"""What a commit writes to a segment: a few messages for very many queues, so that each queue gets one run, and many
messages that must survive.
"""

from __future__ import annotations

import pytest

from broker_core.broker.transaction.transaction import INBOX_ROWS, Transaction
from broker_core.core.change import Change
from broker_core.message.message import Message
from broker_core.message.properties import Properties
from broker_core.node.channel_commit import COST, DROP, ENTRY, HEADER_BYTES, LETTER, MANY_ENTRIES, MANY_QUEUES
from tests.broker.conftest import Node, declared

TRANSIENT, PERSISTENT = Properties(delivery_mode=1).encode(), Properties(delivery_mode=2).encode()
MESSAGES = 40
NAMES = [f"q{number}" for number in range(MANY_ENTRIES // MESSAGES + 1)]


def gathered(node: Node, count: int, names: list[str], atomic: bool, properties: bytes) -> Transaction:
    transaction = Transaction(node.broker.limits, 0)
    transaction.atomic = transaction.transactional = atomic
    queues = tuple(node.broker.state.topology.queue(name) for name in names)
    for number in range(count):
        transaction.publish(Message(b"%d" % number, "key", "exchange", properties), queues, mandatory=True)
    return transaction


@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize("properties", [TRANSIENT, PERSISTENT])
def test_messages_for_very_many_queues_are_one_run_of_each(
    node: Node, atomic: bool, properties: bytes
) -> None:
    declared(node, *NAMES)
    transaction = gathered(node, MESSAGES, NAMES, atomic, properties)
    node.broker.channel_commits.spill_large(transaction)
    assert len(transaction.spilled) == 1 and not transaction.publishes

    def commit(_state: object, change: Change, now: int) -> list[Message]:
        return node.broker.state.transactions.commit(change, transaction, now).returned

    assert node.broker.run(commit) == []
    bodies = [b"%d" % number for number in range(MESSAGES)]
    assert node.browse(NAMES[0]) == node.browse(NAMES[-1]) == bodies
    assert len(node.broker.state.topology.queue(NAMES[-1]).log.runs) == 1
    node.restart()
    assert node.browse(NAMES[-1]) == (bodies if properties == PERSISTENT else [])


@pytest.mark.parametrize("atomic", [True, False])
def test_transient_messages_for_few_queues_are_not_written(node: Node, atomic: bool) -> None:
    declared(node, *NAMES[:MANY_QUEUES])
    transaction = gathered(node, MANY_ENTRIES // MANY_QUEUES * 2, NAMES[: MANY_QUEUES - 1], atomic, TRANSIENT)
    node.broker.channel_commits.spill_large(transaction)
    assert not transaction.spilled


@pytest.mark.parametrize(
    ("atomic", "kinds", "written"),
    [
        (False, [PERSISTENT], True),
        (False, [PERSISTENT, None], True),  # None: it reaches no queue
        (False, [PERSISTENT, TRANSIENT], False),  # the transient ones are never written
        (False, [TRANSIENT, PERSISTENT, None], False),
        (True, [TRANSIENT], False),
        (True, [TRANSIENT, PERSISTENT], True),
        (True, [TRANSIENT, None], False),
    ],
)
def test_many_messages_for_one_queue_are_written_if_they_must_survive(
    node: Node, atomic: bool, kinds: list[bytes | None], written: bool
) -> None:
    declared(node, "q")
    transaction = Transaction(node.broker.limits, 0)
    transaction.atomic = transaction.transactional = atomic
    queues = (node.broker.state.topology.queue("q"),)
    for number in range(2 * INBOX_ROWS):
        kind = kinds[number % len(kinds)]
        message = Message(b"x", "key", "exchange", PERSISTENT if kind is None else kind)
        transaction.publish(message, () if kind is None else queues, mandatory=kind is None)
    node.broker.channel_commits.spill_large(transaction)
    assert bool(transaction.spilled) == written
    assert bool(transaction.publishes) != written and bool(transaction.entries) != written


def test_publishes_are_cut_into_commits_of_about_the_same_cost(node: Node) -> None:
    """Others wait for each commit. A queue that drops a message for each, and makes it a dead letter, costs as much as
    many that do not, and so do long headers of dead letters.
    """
    dead = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "plain"}
    with node.channel() as channel:
        channel.queue_declare("plain")
        channel.queue_declare("bounded", arguments={"x-max-length": 10})
        channel.queue_declare("dead", arguments={"x-max-length": 10, **dead})
    long = Properties(delivery_mode=1, headers={"long": "x" * 10_000}).encode()
    for name, properties, most in (
        ("plain", TRANSIENT, COST // ENTRY),
        ("plain", long, COST // ENTRY),
        ("bounded", long, COST // DROP),
        ("dead", TRANSIENT, COST // LETTER),
        ("dead", long, COST // (LETTER + 10_000 // HEADER_BYTES)),
    ):
        count = 2 * most + 1
        transaction = gathered(node, count, [name], atomic=False, properties=properties)
        sizes = [len(piece.publishes) for piece in node.broker.channel_commits.pieces(transaction)]
        assert sizes == [most, most, 1], name


def test_a_transaction_for_one_queue_with_a_maximum_length_is_no_larger_than_for_one_without(
    node: Node,
) -> None:
    """It is one commit all the same, so it is not written to a segment for what it may drop."""
    with node.channel() as channel:
        channel.queue_declare("bounded", arguments={"x-max-length": 10})
    transaction = gathered(node, INBOX_ROWS - 1, ["bounded"], atomic=True, properties=PERSISTENT)
    node.broker.channel_commits.spill_large(transaction)
    assert not transaction.spilled
