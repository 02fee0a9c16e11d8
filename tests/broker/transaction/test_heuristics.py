"""Heuristic outcomes: kept until who named the transaction forgets them, however long that takes."""

from __future__ import annotations

import pytest

from broker_core.broker.access.rights import OWNER, Actor
from broker_core.broker.decision import Decision
from broker_core.broker.transaction import heuristics
from broker_core.broker.transaction.outcomes import OutcomeLimits
from broker_core.core import errors
from tests.broker.conftest import Node, declared


def prepare(node: Node, *xids: str, user: str = "") -> None:
    declared(node, "q")
    with node.broker.channel(user=user) as channel:
        channel.tx_select()
        for xid in xids:
            channel.publish(b"x", routing_key="q")
            channel.prepare(xid)


def by_hand(node: Node, verb: Decision, xid: str, of: str | None = None) -> None:
    node.broker.decide(verb, xid, OWNER, None, None, of, by_hand=True)


def forget(node: Node, xid: str) -> None:
    node.broker.decide("forget", xid, OWNER, None, None)


def states(node: Node, user: str = "") -> dict[str, str]:
    return {row.xid: row.state for row in node.broker.recover(user)}


@pytest.mark.parametrize("restart", [False, True])
def test_20_a_heuristic_outcome_stays_until_it_is_forgotten_while_others_grow_old(
    node: Node, restart: bool
) -> None:
    prepare(node, "a", "b", "own")
    by_hand(node, "commit", "a")
    by_hand(node, "rollback", "b")
    node.broker.commit("own")
    for _ in range(3):
        node.clock.advance(3 * OutcomeLimits().age_s)
        if restart:
            node.restart()
        prepare(node, f"at {node.clock.now_us}")
        node.broker.rollback(f"at {node.clock.now_us}")
    assert states(node) == {"a": "heuristically_committed", "b": "heuristically_rolled_back"}
    with pytest.raises(errors.UnknownOutcome):
        node.broker.outcome("own")
    for verb in ("commit", "rollback"):
        with pytest.raises(
            errors.HeuristicOutcome, match="XA_HEURCOM: transaction 'a' was committed by hand"
        ):
            getattr(node.broker, verb)("a")
        with pytest.raises(
            errors.HeuristicOutcome, match="XA_HEURRB: transaction 'b' was rolled back by hand"
        ):
            getattr(node.broker, verb)("b")
    assert node.broker.committed("a") and not node.broker.committed("b")
    with pytest.raises(errors.TransactionState, match="'a' is heuristically_committed"):
        by_hand(node, "rollback", "a")
    with pytest.raises(
        errors.TransactionState, match="'a' is heuristically_committed: an xid names only one"
    ):
        prepare(node, "a")
    for _ in range(2):
        forget(node, "a")
        forget(node, "b")
    assert states(node) == {} and node.broker.committed("a")
    assert node.browse("q") == [b"x", b"x"]


def test_20_above_the_share_of_a_user_its_oldest_heuristic_outcome_is_forgotten_and_of_nobody_else(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heuristics, "MOST_HEURISTIC", 30)
    for user in ("ann", "bob"):
        node.broker.run(lambda state, change, _now, user=user: state.users.add(change, user, "a hash"))  # type: ignore[misc]
    prepare(node, "hers", user="bob")
    by_hand(node, "commit", "hers", "bob")
    xids = [f"x{number}" for number in range(5)]
    prepare(node, *xids, user="ann")
    for xid in xids[::-1]:
        by_hand(node, "rollback", xid, "ann")
    for restart in (False, True):
        if restart:
            node.restart()
        assert states(node, "ann") == dict.fromkeys(xids[2::-1], "heuristically_rolled_back")
        assert states(node, "bob") == {"hers": "heuristically_committed"}
        assert node.broker.outcome("x4", of="ann") == "rolled_back"
        node.broker.decide("rollback", "x4", Actor("ann", False, False), None, "/")  # as if it were its own


def test_20_a_decision_of_the_user_itself_is_not_heuristic_and_one_of_an_operator_is(node: Node) -> None:
    prepare(node, "own", "hand", user="ann")
    ann = Actor("ann", administers=False, operates=False)
    node.broker.decide("commit", "own", ann, None, "/")
    node.broker.decide("commit", "hand", Actor("olga"), None, "/", "ann")
    assert states(node, "ann") == {"hand": "heuristically_committed"}
    prepare(node, *"pq", user="ann")
    assert node.broker.rollback_all(ann) == 2 and states(node, "ann").keys() == {"hand"}
    prepare(node, *"rs", user="ann")
    assert node.broker.rollback_all(ann, by_hand=True) == 2
    assert states(node, "ann").keys() == {"hand", "r", "s"}
