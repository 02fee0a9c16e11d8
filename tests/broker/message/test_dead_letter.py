"""Rewriting properties without decoding them, and the numbers that ``expiration`` may hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker_core.core import errors
from broker_core.core.records import NEVER
from broker_core.message.field_table import Long
from broker_core.message.properties import Properties, raw_headers, rewrite, with_raw_headers
from broker_core.routing.content import own_expiration_us

values = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.text(max_size=9), st.binary(max_size=9)
)
headers = st.dictionaries(
    st.sampled_from(["a", "b", "x-death", "c"]), st.one_of(values, st.lists(values, max_size=3)), max_size=4
)
short = st.none() | st.text(max_size=9)
properties = st.builds(
    Properties,
    content_type=short,
    headers=headers,
    delivery_mode=st.none() | st.integers(1, 2),
    priority=st.none() | st.integers(0, 255),
    expiration=short,
    timestamp=st.none() | st.integers(0, 2**64 - 1),
    user_id=short,
)


@given(found=properties, changed=headers)
def test_rewritten_properties_are_what_decoding_changing_and_encoding_gives(
    found: Properties, changed: dict[str, Any]
) -> None:
    expected = {
        name: value
        for name, value in {**found.headers, **changed}.items()
        if not (name in changed and changed[name] is None)
    }
    rewritten = Properties.decode(rewrite(found.encode(), changed, without=("expiration",)))
    assert _plain(rewritten) == _plain(replace(found, headers=expected, expiration=None))


def _plain(found: Properties) -> Properties:
    """Bytes that are UTF-8 come back as text or as bytes by their type, and so does everything else: compare
    what was encoded.
    """
    return Properties.decode(found.encode())


def test_headers_that_are_not_changed_keep_their_types() -> None:
    table = b"\x01ks\x00\x01" + b"\x01lL\x00\x00\x00\x00\x00\x00\x00\x02" + b"\x01ff\x00\x00\x00\x00"
    encoded = b"\x20\x00" + len(table).to_bytes(4, "big") + table
    rewritten = rewrite(encoded, {"n": Long(1)})
    added = b"\x01nl\x00\x00\x00\x00\x00\x00\x00\x01"
    assert rewritten == b"\x20\x00" + (len(table) + len(added)).to_bytes(4, "big") + table + added
    assert rewrite(rewritten, {"n": None}) == encoded


def test_a_header_that_was_given_twice_stays_twice_and_both_go_with_a_change() -> None:
    twice = [("k", b"V"), ("n", b"t\1"), ("k", b"B\1"), ("n", b"V")]
    rewritten = rewrite(with_raw_headers(b"", twice), {"n": Long(1)})
    assert raw_headers(rewritten) == [("k", b"V"), ("k", b"B\1"), ("n", b"l" + bytes(7) + b"\1")]


@pytest.mark.parametrize("data", [b"\x20\x00\x00\x00\x00\x05\x01k", b"\x20", b"\x10\x00\x02\x00"])
def test_damaged_properties_are_not_rewritten(data: bytes) -> None:
    with pytest.raises(errors.RemoteProtocolError, match="damaged"):
        rewrite(data, {"n": 1})


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0", 0), ("+5", 5), ("60000", 60000), ("", None), ("soon", None), ("1.5", None), (None, None)],
)
def test_a_time_to_live_is_a_whole_number(text: str | None, expected: int | None) -> None:
    found_us = own_expiration_us(Properties(expiration=text).encode())
    assert found_us == (NEVER if expected is None else expected * 1000)
