"""JSON and order of large values: as ``json`` and ``sorted``, and other threads run meanwhile."""

from __future__ import annotations

import json
import traceback
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker_core.core import pieces
from broker_core.core.errors import RemoteProtocolError
from broker_core.flight import contract

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=30
)
ROWS = [
    {
        "source": "t",
        "destination": f"q{number * 7919 % 50_000}",
        "routing_key": f"user.{number}.#",
        "arguments": {},
    }
    for number in range(30_000)
]


@given(VALUES, st.integers(1, 3))
def test_a_value_is_written_as_json_writes_it(value: object, rows: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "ROWS", rows)
        assert pieces.dumps(value) == json.dumps(value, separators=(",", ":"))


@pytest.mark.parametrize(
    "value", [{1: [1, 2]}, {"a": {2: [1, 2], "b": (1, 2, 3)}}, (), [[]], {"a": [float("nan")]}]
)
def test_what_is_no_plain_json_is_written_alike(value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "ROWS", 1)
    assert pieces.dumps(value) == json.dumps(value, separators=(",", ":"))


@given(VALUES)
def test_a_text_is_read_as_json_reads_it(value: object) -> None:
    text = json.dumps(value).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "SMALL_BYTES", 0)
        patch.setattr(pieces, "FEW", 0)
        assert pieces.loads(text) == json.loads(text)


@pytest.mark.parametrize(
    "text", [b"[1,", b"{", b"[1 2]", b'{"a" 1}', b'{"a":1,}', b'"\xff"', b"[,]", b"\xff\xfe"]
)
def test_a_damaged_text_is_refused_by_both(text: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in (pieces.SMALL_BYTES, 0):
        monkeypatch.setattr(pieces, "SMALL_BYTES", limit)
        monkeypatch.setattr(pieces, "FEW", limit)
        with pytest.raises(ValueError):
            pieces.loads(text)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_a_text_may_be_coded_as_json_says(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = '{"a": [1, "\u00e4", "\\ud800"]}'.encode(encoding)
    monkeypatch.setattr(pieces, "SMALL_BYTES", 0)
    monkeypatch.setattr(pieces, "FEW", 0)
    assert pieces.loads(text) == json.loads(text)


def test_an_answer_has_any_number_of_values_and_a_call_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "SMALL_BYTES", 0)
    monkeypatch.setattr(pieces, "MOST", 9)
    text = contract.encode(list(range(10)))
    assert contract.decode(list[int], text) == list(range(10))
    with pytest.raises(RemoteProtocolError, match="more than 9 values"):
        contract.decode_checked(list[int], text, "call")


def test_constants_are_asked_for_in_a_long_text_too() -> None:
    def refuse(text: str) -> None:
        raise ValueError(text)

    text = b"[" + b"1," * pieces.FEW + b"NaN]"
    with pytest.raises(ValueError, match=r"^NaN$"):
        pieces.loads(text, refuse)
    assert str(pieces.loads(text)[-1]) == "nan"


@pytest.mark.parametrize("item", [b"[],", b"{},", b"1,", b"[[],"])
def test_a_text_of_too_many_values_is_refused_before_it_is_read(item: bytes) -> None:
    text = b"[" + item * (pieces.MOST + 1)  # not even JSON
    with pytest.raises(pieces.TooManyValues, match="more than 1000000 values"):
        pieces.loads(text)


@given(st.lists(st.tuples(st.integers(0, 5), st.text())))
def test_the_order_is_that_of_sorted(rows: list[tuple[int, str]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "SORTED", 2)
        for reverse in (False, True):
            found = pieces.in_order(rows, lambda row: row[0], reverse=reverse)
            assert found == sorted(rows, key=lambda row: row[0], reverse=reverse)


# -- other threads -------------------------------------------------------------------------------------------
def size(value: object) -> int:
    """How many values it has."""
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + sum(map(size, value)) if isinstance(value, (list, tuple)) else 1


@pytest.mark.parametrize("value", [ROWS, {"definitions": {"bindings": ROWS, "queues": []}}])
def test_no_call_writes_more_than_a_piece(value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other threads run between calls into C, and during none."""
    whole, sizes = json.dumps, []

    def recorded(value: object, **options: Any) -> str:
        sizes.append(size(value))
        return whole(value, **options)

    monkeypatch.setattr(json, "dumps", recorded)
    assert len(pieces.dumps(value)) > 1_000_000
    assert len(sizes) >= len(ROWS) / pieces.ROWS
    assert max(sizes) <= 10 * pieces.ROWS


def test_a_text_of_many_values_is_read_value_by_value() -> None:
    """A decoder in Python: a class of the text is met between two of its values."""
    text = json.dumps([[number] for number in range(pieces.FEW)] + [float("inf")]).encode()
    assert len(text) > pieces.SMALL_BYTES
    stacks = []

    def met(_text: str) -> None:
        stacks.append([frame.name for frame in traceback.extract_stack()])

    pieces.loads(text, met)
    assert "JSONArray" in stacks[0]


def test_no_call_sorts_more_than_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = []

    def recorded(rows: list[object], **options: Any) -> list[object]:
        lengths.append(len(rows))
        return sorted(rows, **options)

    monkeypatch.setattr(pieces, "sorted", recorded, raising=False)
    found = pieces.in_order(ROWS, lambda row: row["destination"])
    assert found == sorted(ROWS, key=lambda row: row["destination"])
    assert max(lengths) == pieces.SORTED
