"""Message indexes: what is written is read, and damaged bytes are one error."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.typed.registry.wire_format import read_indexes, written_indexes


@pytest.mark.parametrize(
    ("indexes", "data"),
    [((0,), b"\0"), ((1,), b"\2\2"), ((1, 0), b"\4\2\0"), ((0, 64), b"\4\0\x80\1"), ((2**31 - 1,), b"\2\xfe\xff\xff\xff\x0f")],
)  # fmt: skip
def test_the_bytes_are_those_of_the_wire_format(indexes: tuple[int, ...], data: bytes) -> None:
    assert written_indexes(indexes) == data
    assert read_indexes(b"head" + data + b"tail", 4) == (indexes, 4 + len(data))


def test_the_first_message_may_also_be_written_out() -> None:
    assert read_indexes(b"\2\0rest", 0) == ((0,), 2)


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=100), st.binary(max_size=3))
def test_what_is_written_is_read(indexes: list[int], rest: bytes) -> None:
    data = written_indexes(tuple(indexes))
    assert read_indexes(data + rest, 0) == (tuple(indexes), len(data))


@given(st.binary(max_size=12))
def test_any_bytes_are_indexes_or_one_error(data: bytes) -> None:
    try:
        indexes, at = read_indexes(data, 0)
    except ValueError:
        return
    assert 0 < at <= len(data) and indexes and all(0 <= each < 2**31 for each in indexes)


@pytest.mark.parametrize(
    "data",
    [b"", b"\x80", b"\2", b"\2\x80\x80\x80\x80\x80\0", b"\2\xff\xff\xff\xff\x7f", b"\1", b"\2\1", b"\xfe\xff\xff\xff\x0f\0", b"\xca\1" + b"\0" * 101],
)  # fmt: skip
def test_what_has_no_end_or_is_no_index_is_an_error(data: bytes) -> None:
    with pytest.raises(ValueError):
        read_indexes(data, 0)
