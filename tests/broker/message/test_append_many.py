"""Messages that are appended together leave the state and the change that they leave one by one."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from broker_core.broker.channel import Channel
from broker_core.broker.message import append_many, messages
from broker_core.broker.transaction.transaction import Transaction
from broker_core.core import block
from broker_core.core.change import Change
from broker_core.message.message import Message
from broker_core.message.properties import Properties
from tests.broker.conftest import Node
from tests.gates import examples
from tests.undo.snapshot import difference, snapshot

DURABLE = Properties(delivery_mode=2).encode()
PROPERTIES = [
    b"",
    DURABLE,
    DURABLE,
    Properties(delivery_mode=2, message_id="1").encode(),
    Properties(delivery_mode=1).encode(),
    Properties(delivery_mode=2, expiration="1000").encode(),
    b"\x90\x00\xff",  # damaged: its content type goes beyond its end
]
QUEUES = {
    "a": {},
    "b": {},
    "ranked": {"arguments": {"x-max-priority": 3}},
    "counted": {"arguments": {"x-delivery-limit": 1}},
    "short": {"arguments": {"x-max-length": 3}},
    "small": {"arguments": {"x-max-length-bytes": 9}},
    "full": {"arguments": {"x-max-length": 3, "x-overflow": "reject-publish"}},
    "memory": {"durable": False},
    "deleted": {},
    "local": {},
}
# The queues of one publish. Most transactions have one route.
ROUTES = [("a",), ("b",), ("a", "b"), ("b", "a"), *((name,) for name in QUEUES), ("a", "memory"), ()]
TRANSACTION = st.tuples(
    st.booleans(),  # atomic
    st.sampled_from(ROUTES),
    st.lists(
        st.tuples(
            st.none() | st.none() | st.sampled_from(ROUTES),  # None: the route of the transaction
            st.sampled_from(PROPERTIES),
            st.booleans(),  # mandatory
            st.binary(max_size=4),
        ),
        max_size=12,
    ),
)


class Place(Node):
    """A node with a queue of each kind, and the changes of its commits."""

    def __init__(self) -> None:
        super().__init__()
        state = self.broker.state
        for name, options in QUEUES.items():
            with self.channel() as channel:
                channel.queue_declare(name, **options)
        self.queues = {name: state.topology.queue(name) for name in QUEUES}
        listener = Channel(state, connection="someone")
        listener.consume(self.queues["local"], "tag", lambda *_: None, lambda *_: None, no_local=True)
        with self.channel() as channel:
            channel.queue_delete("deleted")
        self.written: list[object] = []

    def commit(self, atomic: bool, route: tuple[str, ...], publishes: list) -> None:
        transaction = Transaction(self.broker.limits, 0)
        transaction.atomic = transaction.transactional = atomic
        transaction.connection = "someone"
        for own_route, properties, mandatory, body in publishes:
            queues = tuple(self.queues[name] for name in (route if own_route is None else own_route))
            transaction.publish(Message(body, "key", "exchange", properties), queues, mandatory)

        def work(state: object, change: Change, now: int) -> object:
            committed = self.broker.state.transactions.commit(change, transaction, now)
            self.written.append((list(change.rows), list(change.journal), change.sequence))
            return committed

        try:
            self.written.append(self.broker.run(work))
        except Exception as error:
            self.written.append(str(error))


@pytest.mark.slow
@examples(200)
@given(st.lists(TRANSACTION, max_size=8), st.integers(1, 20), st.integers(1, 60))
@example([(False, ("a",), [(None, b"", False, body) for body in (b"12", b"3456", b"")])], 3, 6)
def test_messages_alike_leave_what_they_leave_one_by_one(transactions, rows, size_bytes):
    with pytest.MonkeyPatch.context() as patch:
        for module in (append_many, block):
            patch.setattr(module, "OPEN_ROWS", rows)
            patch.setattr(module, "OPEN_BYTES", size_bytes)
        together, one_by_one = Place(), Place()
        one_by_one.broker.state.names.of_messages.identity = (
            together.broker.state.names.of_messages.identity
        )  # chosen at random
        for transaction in transactions:
            together.commit(*transaction)
            with patch.context() as plain:
                plain.setattr(messages, "append_many", lambda *_: False)
                one_by_one.commit(*transaction)
            assert together.written == one_by_one.written
        assert not difference(snapshot(one_by_one.broker.state), snapshot(together.broker.state))
        assert list(map(marks, together.queues.values())) == list(map(marks, one_by_one.queues.values()))
        together.broker.close()
        one_by_one.broker.close()


def marks(queue) -> object:
    """What a snapshot leaves out."""
    return queue.marks.timed, queue.marks.hasty, [run.block.expires_us for run in queue.log.runs]


def test_the_usual_transactions_are_appended_together(monkeypatch: pytest.MonkeyPatch):
    place = Place()
    taken = []

    def counted(*arguments):
        taken.append(append_many.append_many(*arguments))
        return taken[-1]

    monkeypatch.setattr(messages, "append_many", counted)
    for route in (("a",), ("b",), ("a", "b"), ("ranked",), ("counted",)):
        place.commit(True, route, [(None, DURABLE, False, b"x"), (None, b"", True, b"y")] * 20)
    place.commit(True, ("a",), [(None, DURABLE, False, b"x"), (("b",), DURABLE, False, b"x")])
    place.commit(True, ("memory",), [(None, DURABLE, False, b"x")] * 2)
    assert taken == [True] * 5 + [False] * 2
    place.broker.close()
