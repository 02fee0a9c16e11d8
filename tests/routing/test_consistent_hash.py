"""Exchanges of type x-consistent-hash: one queue for each message, by weight; which keys move, and that no others
do, over restarts, backups and definitions.
"""

from __future__ import annotations

import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker_core.broker.topology.topology import Topology
from broker_core.client.backup import backup
from broker_core.core import errors
from broker_core.core.address import parse_address
from broker_core.core.block import selected_rows
from broker_core.core.change import Change
from broker_core.launcher import Broker
from broker_core.message.field_table import Long
from broker_core.message.properties import Properties
from broker_core.node.channel import LocalChannel
from broker_core.routing import consistent_hash
from broker_core.routing.exchange import reach
from tests.routing.test_exchange import names, topology

HASH = "x-consistent-hash"
KEYS = [f"key {number}" for number in range(400)]
WEIGHTS = {"a": "1", "b": "2", "c": "7"}
# of keys 0 to 19; these never change, because what waits in queues was placed by them
PLACED = "ccbccccccbbcabccbccc"
BY_TEXT = {"": "c", "é": "c", "x" * 255: "c"}


def hashed(weights: dict[str, str], **arguments: object) -> Topology:
    found = topology(*weights)
    found.declare_exchange(Change(), "h", HASH, arguments=dict(arguments))
    for queue, weight in weights.items():
        found.bind(Change(), queue, "h", weight)
    return found


def placed(found: Topology, keys: list[str] = KEYS, exchange: str = "h") -> dict[str, str]:
    """Where each key goes, and that it goes to one queue."""
    reached = {key: names(found, exchange, key) for key in keys}
    assert {len(each) for each in reached.values()} <= {1}, reached
    return {key: each[0] for key, each in reached.items()}


def moved(before: dict[str, str], after: dict[str, str]) -> set[tuple[str, str]]:
    return {(before[key], after[key]) for key in before if before[key] != after[key]}


# -- where a key goes ----------------------------------------------------------------------------------------
def test_a_key_has_its_queue_for_ever() -> None:
    found = hashed(WEIGHTS)
    assert "".join(placed(found, [f"k{number}" for number in range(20)]).values()) == PLACED
    assert "".join(placed(found, list(BY_TEXT)).values()) == "".join(BY_TEXT.values())


def test_the_same_text_has_the_same_queue_whatever_it_is_in() -> None:
    by_key = placed(hashed(WEIGHTS))
    cases: list[tuple[dict[str, str], Callable[[str], Properties]]] = [
        ({"hash-header": "part"}, lambda key: Properties(headers={"part": key, "other": key[::-1]})),
        ({"hash-property": "message_id"}, lambda key: Properties(message_id=key, correlation_id="x")),
        ({"hash-property": "correlation_id"}, lambda key: Properties(correlation_id=key, headers={"a": 1})),
    ]
    for arguments, encode in cases:
        found = hashed(WEIGHTS, **arguments)
        assert {key: names(found, "h", "any", encode(key).encode())[0] for key in KEYS} == by_key
    found, numbers = hashed(WEIGHTS, **{"hash-property": "timestamp"}), [str(each) for each in range(100)]
    by_time = {key: names(found, "h", "", Properties(timestamp=int(key)).encode())[0] for key in numbers}
    assert by_time == placed(hashed(WEIGHTS), numbers)


def test_messages_without_the_header_or_with_damaged_ones_are_alike() -> None:
    found = hashed(dict.fromkeys("abcdefgh", "1"), **{"hash-header": "part"})
    without = [b"", Properties(headers={"x": 1}).encode(), Properties(message_id="part").encode()]
    assert len({tuple(names(found, "h", key, each)) for key in KEYS[:9] for each in without}) == 1
    assert {len(names(found, "h", key, b"\x20\x00\xff")) for key in KEYS} == {1}
    empty = hashed({"a": "1"}, **{"hash-property": "message_id"})
    assert names(empty, "h", "", b"\x00\x80\xff") == ["a"]


@pytest.mark.parametrize(
    "value", [None, True, 5, -(2**40), 1.5, Decimal("1.50"), b"\xff", [1, "a"], [], {"a": {"b": 1}}, "5"]
)
def test_a_header_of_any_kind_is_hashed_by_its_value(value: object) -> None:
    found = hashed(dict.fromkeys(map(str, range(1000)), "1"), **{"hash-header": "part"})
    one = names(found, "h", "", Properties(headers={"part": value}).encode())
    assert names(found, "h", "k", Properties(headers={"a": 1, "part": value}).encode()) == one
    if type(value) is int:
        long = Properties(headers={"part": Long(value)}).encode()
        assert names(found, "h", "", long) == one, "by the value, not by the width that a client encodes"
        assert names(found, "h", "", Properties(headers={"part": str(value)}).encode()) != one


def test_queues_get_keys_by_their_weights() -> None:
    """The placements are fixed, so this cannot fail by chance; the bound is four standard deviations."""
    weights = {"a": 1, "b": 2, "c": 7, "d": 10, "big": 80}
    keys, total = [f"{number}" for number in range(20_000)], sum(weights.values())
    found = Counter(placed(hashed({name: str(each) for name, each in weights.items()}), keys).values())
    for name, weight in weights.items():
        share = weight / total
        assert abs(found[name] - share * len(keys)) < 4 * (len(keys) * share * (1 - share)) ** 0.5, name


# -- what moves ----------------------------------------------------------------------------------------------
STEPS = st.lists(
    st.tuples(st.sampled_from(["bind", "unbind", "delete"]), st.sampled_from("abcde"), st.integers(1, 12)),
    max_size=25,
)


@given(STEPS)
def test_only_the_keys_of_what_comes_or_goes_move_and_the_order_of_binding_is_nothing(
    steps: list[tuple[str, str, int]],
) -> None:
    found = topology(*"abcde")
    found.declare_exchange(Change(), "h", HASH)
    bound: dict[str, set[str]] = {}
    keys, before = KEYS[:60], dict[str, str]()
    for act, queue, weight in steps:
        were = {name: min(each) for name, each in bound.items()}
        if act == "bind":
            found.bind(Change(), queue, "h", str(weight))
            bound.setdefault(queue, set()).add(str(weight))
        elif act == "unbind":
            found.unbind(Change(), queue, "h", str(weight))
            bound.get(queue, set()).discard(str(weight))
        else:  # what the index has of the deleted one is there until upkeep comes
            found.delete_queue(Change(), queue)
            found.declare_queue(Change(), queue)
            bound.pop(queue, None)
        bound = {name: each for name, each in bound.items() if each}
        after = placed(found, keys) if bound else {}
        assert set(after.values()) <= bound.keys()
        assert bool(bound) or names(found, "h", "k") == []
        if before and after and were != {name: min(each) for name, each in bound.items()}:
            assert all(queue in ends for ends in moved(before, after)), "others keep theirs"
        else:
            assert not (before and after and moved(before, after)), "nothing that counts has changed"
        before = after
    again = topology(*"edcba")
    again.declare_exchange(Change(), "h", HASH)
    for queue, weights in reversed(bound.items()):
        for each in sorted(weights, reverse=True):
            again.bind(Change(), queue, "h", each)
    assert (placed(again, keys) if bound else {}) == before


def test_a_queue_with_several_keys_counts_once_with_the_first_of_them() -> None:
    once = placed(hashed(WEIGHTS))
    found = hashed(WEIGHTS)
    for key, other in (("9", None), ("70", None), ("7", 1)):
        found.bind(Change(), "c", "h", key, {"other": other} if other else {})
    assert placed(found) == once
    found.unbind(Change(), "c", "h", "7")
    assert placed(found) == once, "the other binding with this key is there"
    found.unbind(Change(), "c", "h", "7", {"other": 1})
    assert placed(found) == placed(hashed({**WEIGHTS, "c": "70"}))


# -- beside other things -------------------------------------------------------------------------------------
def test_a_column_is_routed_as_each_of_its_rows() -> None:
    rows = [(key, Properties(headers={"part": key[::-1]}).encode()) for key in KEYS]
    columns = pa.array([key for key, _ in rows]), pa.array([each for _, each in rows], pa.binary())
    for arguments in ({}, {"hash-header": "part"}):
        found = hashed(WEIGHTS, **arguments)
        routed = found.route_column("h", *columns)
        ids = [found.route("h", *row)[0].queue_id for row in rows]
        assert routed.unroutable == 0
        rows_of = {queue: len(selected_rows(each)) for queue, each in routed.selections.items()}
        assert rows_of == Counter(ids)


def test_one_queue_also_with_copies_and_none_goes_to_the_alternate() -> None:
    found = hashed(WEIGHTS, **{"alternate-exchange": "amq.fanout"})
    copies = Properties(headers={"CC": ["k1", "k2"], "BCC": ["k3"]}).encode()
    for key in KEYS[:30]:
        queues, _ = found.route_copies("h", key, copies)
        assert [queue.name for queue in queues] == names(found, "h", key)
    found.declare_queue(Change(), "left")
    found.bind(Change(), "left", "amq.fanout", "")
    for queue in WEIGHTS:
        assert "left" not in placed(found).values()
        found.delete_queue(Change(), queue)
    assert set(placed(found).values()) == {"left"}


def test_exchanges_are_destinations_too_and_divide_again_what_they_get() -> None:
    found = hashed({})
    for outer in ("x", "y"):
        found.declare_exchange(Change(), outer, HASH)
        found.bind_exchange(Change(), outer, "h", "5")
        for inner in "12":
            found.declare_queue(Change(), outer + inner)
            found.bind(Change(), outer + inner, outer, "1")
    assert min(Counter(placed(found).values()).values()) > len(KEYS) // 8
    before = placed(found)
    found.bind(Change(), "x1", "h", "3")  # the queue that is named as an exchange is another destination
    assert {end for _, end in moved(before, placed(found))} == {"x1"}


def test_after_a_delay_it_hashes_as_the_type_itself_does() -> None:
    found = topology(*WEIGHTS)
    found.declare_exchange(Change(), "h", "x-delayed-message", arguments={"x-delayed-type": HASH})
    for queue, weight in WEIGHTS.items():
        found.bind(Change(), queue, "h", weight)
    assert placed(found) == placed(hashed(WEIGHTS))
    found.delete_queue(Change(), "c")
    assert placed(found) == placed(hashed({"a": "1", "b": "2"}))
    with pytest.raises(errors.PreconditionFailed, match="must be an integer"):
        found.bind(Change(), "a", "h", "red")
    arguments: dict[str, object] = {"x-delayed-type": HASH, "hash-property": "priority"}
    with pytest.raises(errors.PreconditionFailed, match="Unsupported property: priority"):
        found.declare_exchange(Change(), "later", "x-delayed-message", arguments=arguments)


# -- what is refused -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("red", 'The binding key must be an integer: <<"red">>'),
        ("", 'The binding key must be an integer: <<"">>'),
        *[
            (key, f'The binding key must be an integer: <<"{key}">>')
            for key in ("1_0", " 1", "1.5", "٣", "1\n")
        ],
        ("0", "The binding key must be greater than 0"),
        ("-3", "The binding key must be greater than 0"),
    ],
)
def test_a_weight_that_is_none_is_refused_with_the_text_of_the_plugin(key: str, text: str) -> None:
    found = hashed(WEIGHTS)
    before = placed(found)
    for bind, target in ((found.bind, "a"), (found.bind_exchange, "amq.fanout")):
        with pytest.raises(errors.PreconditionFailed) as raised:
            bind(Change(), target, "h", key)
        assert (raised.value.reply_code, raised.value.summary) == (406, text)
    assert placed(found) == before


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"hash-header": "a", "hash-property": "message_id"},
            "hash-header and hash-property are mutually exclusive",
        ),
        ({"hash-property": "priority"}, "Unsupported property: priority"),
        ({"hash-header": 5}, "invalid type 'signedint' for arg 'hash-header'"),
        ({"hash-property": True}, "invalid type 'bool' for arg 'hash-property'"),
    ],
)
def test_arguments_that_say_not_what_is_hashed_are_refused(arguments: dict[str, Any], text: str) -> None:
    found = topology()
    with pytest.raises(errors.PreconditionFailed) as raised:
        found.declare_exchange(Change(), "h", HASH, arguments=arguments)
    assert text in str(raised.value)
    assert "h" not in found.exchanges
    found.declare_exchange(Change(), "other", "direct", arguments=arguments)  # they are its client's


def test_who_does_what_a_refusal_says_is_taken_at_once() -> None:
    """Each value in the advice, in the place that it names."""
    found = topology("a")
    for key in ("red", "0"):
        with pytest.raises(errors.PreconditionFailed, match="bind with a weight, 1 or more"):
            hashed(WEIGHTS).bind(Change(), "a", "h", key)
    hashed(WEIGHTS).bind(Change(), "a", "h", "1")
    for wrong in (
        {"hash-header": "a", "hash-property": "message_id"},
        {"hash-header": 5},
        {"hash-property": "priority"},
    ):
        with pytest.raises(errors.PreconditionFailed) as refused:
            found.declare_exchange(Change(), "wrong", HASH, arguments=wrong)
        assert refused.value.message.endswith(
            ": give a header as hash-header, or correlation_id or message_id or timestamp as hash-property, or neither"
        )
    properties = ("correlation_id", "message_id", "timestamp")
    taken = [{}, {"hash-header": "a"}, *({"hash-property": name} for name in properties)]
    for number, arguments in enumerate(taken):
        found.declare_exchange(Change(), f"right {number}", HASH, arguments=arguments)


def test_a_second_declaration_must_hash_the_same() -> None:
    found = hashed({}, **{"hash-header": "part"})
    found.declare_exchange(Change(), "h", HASH, arguments={"hash-header": "part", "mine": 1})
    others: list[dict[str, object]] = [{}, {"hash-header": "other"}, {"hash-property": "message_id"}]
    for arguments in others:
        with pytest.raises(errors.PreconditionFailed, match="inequivalent arg 'hash-"):
            found.declare_exchange(Change(), "h", HASH, arguments=arguments)


def test_memory_and_cost_are_those_of_the_destinations_whatever_their_weights() -> None:
    tracemalloc.start()
    try:
        found = hashed({"a": "1" + "0" * 250, "b": "2" + "0" * 250})
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()
    assert min(Counter(placed(found).values()).values()) > len(KEYS) // 5
    assert reach(found.exchange("h")) == 1


def test_the_number_of_destinations_is_bounded_and_more_are_reached_by_exchanges(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("broker_core.routing.refusals.DESTINATIONS", 3)
    assert consistent_hash.DESTINATIONS == 4_096
    found = hashed(WEIGHTS)
    found.declare_queue(Change(), "d")
    with pytest.raises(
        errors.PreconditionFailed, match=r"divides its keys among 3 destinations.*bind other exch"
    ):
        found.bind(Change(), "d", "h", "1")
    found.bind(Change(), "a", "h", "5")  # it is there
    found.unbind(Change(), "c", "h", "7")
    found.declare_exchange(Change(), "more", HASH)
    found.bind_exchange(Change(), "more", "h", "7")
    for queue in ("c", "d"):
        found.bind(Change(), queue, "more", "1")
    assert set(placed(found).values()) == set("abcd")


# -- what stays ----------------------------------------------------------------------------------------------
def _sent(broker: Broker) -> dict[str, list[bytes]]:
    with broker.channel() as channel:
        for key in KEYS[:60]:
            channel.publish(key.encode(), "h", key)
        return {queue: list(_drained(channel, queue)) for queue in WEIGHTS}


def _drained(channel: LocalChannel, queue: str) -> Iterator[bytes]:
    while (delivery := channel.get(queue, no_ack=True)) is not None:
        yield delivery.body


def test_a_key_keeps_its_queue_over_restart_backup_and_definitions(tmp_path: Path) -> None:
    expected: dict[str, list[bytes]] = {queue: [] for queue in WEIGHTS}
    for key, queue in placed(hashed(WEIGHTS), KEYS[:60]).items():
        expected[queue].append(key.encode())
    with Broker.open(tmp_path / "data") as broker:
        with broker.channel() as channel:
            channel.exchange_declare("h", HASH, arguments={"alternate-exchange": "amq.fanout"})
            for queue in ("c", "a", "b"):
                channel.queue_declare(queue)
                channel.queue_bind(queue, "h", WEIGHTS[queue])
                channel.queue_bind(queue, "h", f"{WEIGHTS[queue]}5")
        assert _sent(broker) == expected
        backup(parse_address(broker.url), tmp_path / "copy")
        definitions: Any = broker.accounts.export_definitions().definitions
    for name in ("data", "copy"):
        with Broker.open(tmp_path / name) as broker:
            assert _sent(broker) == expected
    with Broker.open(tmp_path / "other") as broker:
        imported = broker.accounts.import_definitions(definitions)
        assert not [each for each in imported.skipped if "h" in str(each)], imported.skipped
        assert _sent(broker) == expected
        again: Any = broker.accounts.export_definitions().definitions
        assert [(row["name"], row["type"]) for row in again["exchanges"]] == [("h", HASH)]
