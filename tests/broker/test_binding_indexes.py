"""The indexes of topic and headers exchanges, against the definition, while bindings come and go."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from broker_core.broker import wild_patterns
from broker_core.broker.header_index import MATCHES, HeaderIndex
from broker_core.broker.topic_patterns import TopicPatterns

WORDS = st.sampled_from(["a", "b", "", "*", "#"])
PATTERNS = st.lists(WORDS, max_size=11).map(".".join)
KEYS = st.lists(st.sampled_from(["a", "b", "", "c"]), max_size=10).map(".".join)


def topic_matches(pattern: str, key: str) -> bool:
    parts = {"*": r"[^.]*\.", "#": r"(?:[^.]*\.)*"}
    words = pattern.split(".") if pattern else []
    text = "".join(parts.get(word, re.escape(word) + r"\.") for word in words)
    return re.fullmatch(text, key + "." if key else "") is not None


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wild_patterns, "PAGE_BITS", 24)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.booleans(), PATTERNS), max_size=30), st.lists(KEYS, min_size=1, max_size=4))
def test_topic_patterns_match_as_defined_while_they_come_and_go(
    steps: list[tuple[bool, str]], keys: list[str]
) -> None:
    index: TopicPatterns[str, str] = TopicPatterns()
    given_patterns: set[str] = set()
    for adds, pattern in steps:
        if adds:
            index.add(pattern, pattern, pattern)
            given_patterns.add(pattern)
        else:
            index.remove(pattern, pattern)
            given_patterns.discard(pattern)
    for key in keys:
        expected = [pattern for pattern in given_patterns if topic_matches(pattern, key)]
        assert sorted(index.matching(key)) == sorted(expected), key


SCALARS = st.sampled_from([1, 0, True, False, 1.0, Decimal(1), "1", b"1", "", -1, -2])
VALUES = st.one_of(SCALARS, st.none(), st.sampled_from([{"b": [1]}, {"b": [2]}, [1], []]))
NAMES = st.sampled_from(["a", "b", "c", "x-a"])
HEADERS = st.dictionaries(NAMES, VALUES, max_size=4)
ARGUMENTS = st.tuples(HEADERS, st.sampled_from(["", *MATCHES])).map(
    lambda given: {**given[0], "x-match": given[1]} if given[1] else given[0]
)


def equal(one: object, other: object) -> bool:
    """Of one kind: true is not 1, and neither is 1.0 nor Decimal(1)."""
    kinds = (bool, float, Decimal)
    return one == other and all(isinstance(one, kind) == isinstance(other, kind) for kind in kinds)


def headers_match(arguments: Mapping[str, Any], headers: Mapping[str, Any]) -> bool:
    match = arguments.get("x-match", "all")
    found = [
        name in headers and (expected is None or equal(headers[name], expected))
        for name, expected in arguments.items()
        if name != "x-match" and (match.endswith("-with-x") or not name.startswith("x-"))
    ]
    return all(found) if match.startswith("all") else any(found)


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 5), ARGUMENTS), max_size=20),
    st.lists(HEADERS, min_size=1, max_size=5),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_headers_match_as_defined_while_bindings_come_and_go(
    steps: list[tuple[bool, int, dict[str, Any]]], messages: list[dict[str, Any]]
) -> None:
    index: HeaderIndex[int, int] = HeaderIndex()
    bound: dict[int, dict[str, Any]] = {}
    for adds, number, arguments in steps:
        if adds:
            index.add(number, arguments, number)
            bound[number] = arguments
        else:
            index.remove(number)
            bound.pop(number, None)
    for headers in messages:
        expected = {number for number, arguments in bound.items() if headers_match(arguments, headers)}
        assert set(index.matching(headers)) == expected, headers
    for number in list(bound):
        index.remove(number)
    assert not (index._under or index._places or index._always), "nothing is left of what was removed"
