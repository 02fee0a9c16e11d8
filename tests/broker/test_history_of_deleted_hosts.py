"""The history of a virtual host that was deleted is not shown to a later one of its name."""

from __future__ import annotations

from broker_core.broker.broker import BrokerState
from broker_core.broker.history.history import TOGETHER, HistoryLimits
from broker_core.broker.history.lookup import ReadBudget, Visibility, latest
from broker_core.core.change import Change
from broker_core.node.upkeep import compact_history
from tests.broker.conftest import Node, declared, publish

AGE_S = 60.0


def seen(node: Node, vhost: str) -> int:
    """How many commits who looks at all of the virtual host is shown."""

    def work(state: BrokerState, _change: Change, _now: int) -> int:
        history = state.transactions.history
        sees = Visibility(vhost, True, "", lambda _queue: True, lambda _app: True, history.hidden)
        return len(latest(history.rows(), sees, 10_000, 0, ReadBudget())[0])

    return node.broker.run(work)


def delete(node: Node, vhost: str) -> None:
    def work(state: BrokerState, change: Change, now: int) -> None:
        state.transactions.history.hide(change, vhost, now)

    node.broker.run(work)
    node.clock.advance(0.001)


def upkeep(node: Node) -> None:
    compact_history(node.broker.committer, node.clock())


def commits(node: Node, count: int) -> None:
    for _ in range(count):
        publish(node, "in", b"")


def test_a_row_that_began_before_the_end_of_a_virtual_host_does_not_show_it(node: Node) -> None:
    history = node.broker.state.transactions.history
    history.limits = HistoryLimits(age_s=AGE_S)
    declared(node, "in")
    commits(node, TOGETHER)
    upkeep(node)
    node.clock.advance(AGE_S / 2)
    commits(node, 1)
    delete(node, "/")
    commits(node, TOGETHER - 1)
    upkeep(node)
    assert len(history.rows()) == 2 and seen(node, "/") == TOGETHER - 1
    node.clock.advance(AGE_S / 2 + 1)
    upkeep(node)  # only the first row is too old
    assert len(history.rows()) == 1 and seen(node, "/") == TOGETHER - 1
    assert history.hidden
    commits(node, 1)
    node.clock.advance(AGE_S / 2)
    upkeep(node)
    assert not history.hidden and seen(node, "/") == 1


def test_what_is_too_old_and_still_beside_messages_is_not_shown_after_a_restart(node: Node) -> None:
    node.broker.state.transactions.history.limits = HistoryLimits(age_s=AGE_S)
    declared(node, "in")
    commits(node, 3)
    delete(node, "/")
    commits(node, 1)
    node.clock.advance(AGE_S + 1)
    commits(node, 2)
    upkeep(node)
    assert not node.broker.state.transactions.history.hidden and seen(node, "/") == 2
    node.restart(clean=False)
    assert seen(node, "/") == 3  # the one behind the end of the virtual host, until the next upkeep
