"""Recovery by a manager of transactions: pages of what its user has in doubt, whatever is decided meanwhile."""

from __future__ import annotations

import pytest

from broker_core.broker import recover
from broker_core.broker.recover import RecoverPage
from broker_core.core.xa.recover_info import RecoverInfo
from broker_core.message.properties import Properties
from tests.broker.conftest import Node

PAGE = 4


@pytest.fixture(autouse=True)
def _short_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recover, "PAGE", PAGE)


def prepare(node: Node, *xids: str, user: str = "", vhost: str = "/") -> None:
    with node.broker.channel(user=user, vhost=vhost) as channel:
        channel.queue_declare("q")
        channel.tx_select()
        for xid in xids:
            channel.publish(b"x", routing_key="q", properties=Properties(delivery_mode=2).encode())
            channel.prepare(xid)


def page(node: Node, user: str, after_us: int = 0, vhost: str = "/") -> RecoverPage:
    return recover.recover(node.broker.state, vhost, user, after_us)


def names(rows: list[RecoverInfo]) -> list[str]:
    assert all(row.state == "prepared" for row in rows)
    return [row.xid for row in rows]


@pytest.mark.parametrize("restart", [False, True])
def test_20_recovery_leaves_out_nothing_that_is_prepared_whatever_is_decided_between_two_pages(
    node: Node, restart: bool
) -> None:
    xids = [f"x{number:02d}" for number in range(11)][::-1]  # the order is that of time, not of names
    prepare(node, *xids)
    if restart:
        node.clock.advance(-3600)  # a clock that steps back does not change the order of time
        node.restart()
    first = page(node, "")
    assert (names(first.rows), first.left) == (xids[:4], 7)
    for xid in (*xids[:3], xids[5]):
        node.broker.commit(xid)
    prepare(node, "late")
    if restart:
        node.restart()
    found, left = names(first.rows), 1
    while left:
        rows, left = page(node, "", first.rows[-1].since_us)
        found += names(rows)
        first = RecoverPage(rows, left)
    assert found == [*xids[:5], *xids[6:], "late"]
    assert page(node, "", first.rows[-1].since_us) == RecoverPage([], 0)


def test_20_recovery_finds_what_its_user_has_prepared_in_its_virtual_host_and_nothing_of_another(
    node: Node,
) -> None:
    node.broker.run(lambda state, change, _now: state.virtual_hosts.add(change, "sales"))
    for user in ("", "ann", "ann@1", "bob"):
        for vhost in ("/", "sales"):
            prepare(node, f"{user} {vhost}", user=user, vhost=vhost)
    node.broker.run(lambda state, change, _now: state.prepared.disown(change, "bob"))
    for user in ("", "ann", "ann@1", "bob"):
        for vhost in ("/", "sales"):
            found = names(page(node, user, vhost=vhost).rows)
            assert found == ([] if user == "bob" else [f"{user} {vhost}"])  # a later user of the name
