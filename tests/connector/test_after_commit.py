"""The functions of ``after_commit``: the arguments that they get, and their token."""

from __future__ import annotations

import uuid
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import pytest

from broker_core.core.errors import OptionError
from broker_core.engine import LedgerEntry
from connector.batch.after_commit import call, check_functions, token

ENTRY = LedgerEntry(
    app_id="app",
    sequence=7,
    query_id="q",
    batch_id=3,
    token="6f1c" * 8,
    ranges={"in": (0, 2)},
    messages=2,
    published=0,
    committed_at_us=1,
)
Got = list[tuple[Any, ...]]


def two(got: Got) -> Any:
    return lambda rows, sequence: got.append((rows, sequence))


def three(got: Got) -> Any:
    return lambda rows, sequence, token: got.append((rows, sequence, token))


def by_keyword(got: Got) -> Any:
    def function(rows: Any, sequence: int, *, token: str) -> None:
        got.append((rows, sequence, token))

    return function


def with_default(got: Got) -> Any:
    def function(rows: Any, sequence: int, token: str = "none") -> None:
        got.append((rows, sequence, token))

    return function


def another_third(got: Got) -> Any:
    def function(rows: Any, sequence: int, table: str = "lake") -> None:
        got.append((rows, sequence))

    return function


def anything(got: Got) -> Any:
    return lambda *values, **named: got.append((*values, *named.values()))


def method(got: Got) -> Any:
    class Target:
        def __call__(self, rows: Any, sequence: int, token: str) -> None:
            got.append((rows, sequence, token))

    return Target()


def wrapped(got: Got) -> Any:
    @wraps(three(got))
    def function(*values: Any, **named: Any) -> None:
        three(got)(*values, **named)

    return function


def bound(got: Got) -> Any:
    def function(table: str, rows: Any, sequence: int, token: str) -> None:
        got.append((rows, sequence, token))

    return partial(function, "lake")


@pytest.mark.parametrize("kind", [two, another_third, anything])
def test_a_function_without_a_parameter_token_gets_rows_and_sequence(kind: Any) -> None:
    got: Got = []
    check_functions({"f": kind(got)})
    call("f", kind(got), "rows", ENTRY)  # type: ignore[arg-type]
    assert got == [("rows", 7)]


@pytest.mark.parametrize("kind", [three, by_keyword, with_default, method, wrapped, bound])
def test_a_function_with_a_parameter_token_gets_it(kind: Any) -> None:
    got: Got = []
    check_functions({"f": kind(got)})
    call("f", kind(got), "rows", ENTRY)  # type: ignore[arg-type]
    assert got == [("rows", 7, token("f", ENTRY))]


@pytest.mark.parametrize(
    "function",
    [
        lambda rows: None,
        lambda rows, token: None,
        lambda rows, sequence, key: None,
        lambda rows, sequence, token, more: None,
        lambda: None,
        "upsert",
        None,
    ],
)
def test_a_function_of_another_form_is_refused_with_the_allowed_ones(function: Any) -> None:
    with pytest.raises(OptionError) as raised:
        check_functions({"good": print, "bad": function})
    assert "after_commit['bad']" in str(raised.value)
    assert "give a function f(rows, sequence), or f(rows, sequence, token)" in str(raised.value)


def test_a_token_is_the_same_for_each_call_of_a_batch_and_differs_for_any_other() -> None:
    ours = token("f", ENTRY)
    assert str(uuid.UUID(ours)) == ours, "it fits a column of type uuid and a header of HTTP"
    # the same entry, read again after the rows were freed, by another driver, of another version
    assert token("f", replace(ENTRY, applied=False, mirrored=True, messages=0)) == ours
    others = {token("g", ENTRY), token("f", replace(ENTRY, token="7" * 32))}
    assert len({ours, *others}) == 3


def test_tokens_are_those_of_every_version() -> None:
    """A batch that one version decided and called for may be called for again by the next one."""
    assert token("upsert", ENTRY) == "5b5aa5de-9844-5651-a8db-42bffd50257d"
