"""The indexes of topic and headers exchanges, against the definition, while bindings come and go."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from broker_core.routing import topic_patterns
from broker_core.routing.header_index import MATCHES, HeaderIndex
from broker_core.routing.topic_patterns import TopicPatterns
from tests.undo.snapshot import snapshot

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
    monkeypatch.setattr(topic_patterns, "PAGE_BITS", 24)


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
        assert sorted(index.matching(key, int)) == sorted(expected), key


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
        assert set(index.matching(headers, int)) == expected, headers
    for number in list(bound):
        index.remove(number)
    assert snapshot(index) == snapshot(HeaderIndex()), "nothing is left of what was removed"


class Interrupted(Exception):
    pass


def interrupted(work: Callable[[], object], moment: str, at: int) -> bool:
    """Runs ``work`` until its call number ``at`` begins or ends, and returns whether it had so many."""
    calls = 0

    def fail(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event == moment
        if event == moment and calls == at + 1:  # the first is ``work`` itself
            sys.setprofile(None)
            raise Interrupted

    sys.setprofile(fail)
    try:
        work()
    except Interrupted:
        return True
    finally:
        sys.setprofile(None)
    return False


TOPICS = ["a.#.b.#.c", "#.a.*.b.#.c", "a.b", "*.a.#", "a.*." * 9 + "a", "#.b.*.a"]
WANTED = [
    {"a": 1, "b": 2},
    {"x-match": "any", "a": 1, "b": {"c": 1}},
    {},
    {"x-match": "any-with-x", "x-a": None},
]


@pytest.mark.parametrize("moment", ["call", "return"])
@pytest.mark.parametrize("given_last", range(6))
def test_an_add_or_a_remove_that_is_interrupted_anywhere_can_be_undone(moment: str, given_last: int) -> None:
    """The undo of an add is a remove, and the other way round."""
    wanted = WANTED[given_last % len(WANTED)]
    keys = ["a.x.b.c", "a.b", "x.a", "a.y." * 9 + "a", "b.a.q.b.c", "b.x.a"]
    messages = [{"a": 1}, {"a": 1, "b": 2}, {"b": {"c": 1}}, {"x-a": 5}]

    def topics() -> TopicPatterns[int, int]:
        index: TopicPatterns[int, int] = TopicPatterns()
        for number, pattern in enumerate(TOPICS):
            if number != given_last:
                index.add(pattern, number, number)
        return index

    def headers() -> HeaderIndex[int, int]:
        index: HeaderIndex[int, int] = HeaderIndex()
        for number, arguments in enumerate(WANTED):
            if arguments is not wanted:
                index.add(number, arguments, number)
        return index

    pattern, failed = TOPICS[given_last], 0
    for at in itertools.count():
        by_key, by_headers = topics(), headers()
        without = (
            [sorted(by_key.matching(key, int)) for key in keys],
            [set(by_headers.matching(m, int)) for m in messages],
        )
        failing = [interrupted(lambda index=by_key: index.add(pattern, 99, 99), moment, at)]
        by_key.remove(pattern, 99)
        failing.append(interrupted(lambda index=by_headers: index.add(99, wanted, 99), moment, at))
        by_headers.remove(99)
        found = (
            [sorted(by_key.matching(key, int)) for key in keys],
            [set(by_headers.matching(m, int)) for m in messages],
        )
        assert found == without
        by_key.add(pattern, 99, 99)
        by_headers.add(99, wanted, 99)
        with_it = (
            [set(by_key.matching(key, int)) for key in keys],
            [set(by_headers.matching(m, int)) for m in messages],
        )
        failing.append(interrupted(lambda index=by_key: index.remove(pattern, 99), moment, at))
        by_key.add(pattern, 99, 99)
        failing.append(interrupted(lambda index=by_headers: index.remove(99), moment, at))
        by_headers.add(99, wanted, 99)
        assert (
            [set(by_key.matching(k, int)) for k in keys],
            [set(by_headers.matching(m, int)) for m in messages],
        ) == with_it
        failed += sum(failing)
        if not any(failing):
            break
    assert failed > 4
