"""Xids of the XA standard as names of transactions: reversible, and one name for each."""

from __future__ import annotations

import base64

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from broker_core.core import errors
from broker_core.core.xa.xid import Xid, check_name
from broker_core.message.arguments import MAX_TEXT_BYTES
from tests.broker.conftest import Node, declared

XIDS = st.builds(
    Xid,
    st.integers(-(2**31), 2**31 - 1).filter(lambda number: number != -1),
    st.binary(min_size=1, max_size=64),
    st.binary(max_size=64),
)
LARGEST = Xid(-(2**31), b"\xff" * 64, b"\xfe" * 64)


@given(XIDS, XIDS)
@example(LARGEST, Xid(0, b"\0"))
def test_the_name_of_an_xid_leads_back_to_it_and_to_no_other(one: Xid, other: Xid) -> None:
    assert Xid.parse(str(one)) == one
    assert (str(one) == str(other)) == (one == other)
    assert str(one).isascii() and len(f"amq.transaction.{one}") <= MAX_TEXT_BYTES
    check_name(str(one))


@given(st.text("xa:-0123456789AQg_w=+/", max_size=20).map("xa:".__add__))
@example("xa:1:AA:")
def test_what_begins_with_xa_is_the_name_that_its_xid_has_or_no_name(name: str) -> None:
    try:
        assert str(Xid.parse(name)) == name
    except errors.OptionError:
        with pytest.raises(errors.OptionError, match="xid"):
            check_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "xa:",
        "xa:1:AA",
        "xa:1::AA",  # no global id
        "xa:01:AA:",
        "xa:+1:AA:",
        "xa:-0:AA:",
        "xa:-1:AA:",  # the xid that is none
        "xa:2147483648:AA:",
        "xa:1:AA==:",
        "xa:1:AB:",  # the same byte as AA
        "xa:1:A:",
        "xa:1:A/:",
        "xa:1:AA:AA:",
        "xa:1:AA:\n",
        "xa:\u0661:AA:",  # a digit, and not one of ASCII
        f"xa:1:{base64.urlsafe_b64encode(bytes(65)).decode().rstrip('=')}:",
        f"xa:1:AA:{base64.urlsafe_b64encode(bytes(65)).decode().rstrip('=')}",
    ],
)
def test_another_way_to_write_an_xid_is_refused_for_a_prepare_and_a_token(node: Node, name: str) -> None:
    declared(node, "q")
    for end in ("prepare", "tx_commit"):
        with node.channel() as channel:
            channel.tx_select()
            channel.publish(b"x", routing_key="q")
            with pytest.raises(errors.OptionError, match="xid"):
                getattr(channel, end)(name)
    assert node.broker.prepared() == [] and node.browse("q") == []


@pytest.mark.parametrize("wrong", [(-1, b"a", b""), (2**31, b"a", b""), (1, b"", b"a"), (1, b"a", bytes(65))])
def test_parts_that_no_xid_has_are_refused(wrong: tuple[int, bytes, bytes]) -> None:
    with pytest.raises(errors.OptionError):
        Xid(*wrong)


@pytest.mark.parametrize("xid", [LARGEST, Xid(0, b"\0"), Xid(0x20005, b"global", b"branch")], ids=str)
def test_a_transaction_is_prepared_found_again_and_decided_by_its_xid(node: Node, xid: Xid) -> None:
    declared(node, "q")
    with node.channel() as channel:
        channel.tx_select()
        channel.publish(b"x", routing_key="q")
        channel.prepare(str(xid))
    node.restart()
    assert [Xid.parse(row.xid) for row in node.broker.recover()] == [xid]
    node.broker.commit(str(xid))
    assert node.broker.outcome(str(xid)) == "committed"
