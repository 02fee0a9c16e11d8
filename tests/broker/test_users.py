"""What a user may do is asked without the lock, while users change."""

from __future__ import annotations

import re
import signal
import sys
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker_core.broker.access.permission import check_pattern, matches
from broker_core.broker.access.rights import KEPT, Rights
from broker_core.broker.access.users import Users
from broker_core.core.change import Change
from broker_core.core.errors import AccessRefused, OptionError
from broker_core.core.undo import Undo


@pytest.fixture
def undo() -> Undo:
    return Undo()


@pytest.fixture
def users(undo: Undo) -> Users:
    made = Users(undo)
    made.add(Change(), "ann", "hash")
    made.permit(Change(), "ann", "", "", "")
    return made


def test_a_pattern_ends_where_the_name_ends(users: Users) -> None:
    """A line feed at the end is a part of the name."""
    users.permit(Change(), "ann", "", "^mine\n$", "^mine$")
    rights = Rights(users, "ann")
    assert rights.may("read", "mine") and not rights.may("read", "mine\n")
    assert rights.may("write", "mine\n") and not rights.may("write", "mine\n\n")


@pytest.mark.slow
def test_an_answer_is_never_older_than_the_last_change(users: Users) -> None:
    rights, stop, asked = Rights(users, "ann"), threading.Event(), 0

    def ask() -> None:
        nonlocal asked
        while not stop.is_set():
            rights.may("read", "q")
            asked += 1

    readers = [threading.Thread(target=ask) for _ in range(3)]
    usual, between = sys.getswitchinterval(), 1e-6
    sys.setswitchinterval(between)
    for reader in readers:
        reader.start()
    try:
        for number in range(2000):
            allowed = bool(number % 2)
            users.permit(Change(), "ann", "", "", "^q$" if allowed else "^$")
            assert rights.may("read", "q") is allowed
    finally:
        sys.setswitchinterval(usual)
        stop.set()
        for reader in readers:
            reader.join()
    assert asked > 0


def test_an_undone_change_leaves_no_answer_behind(users: Users, undo: Undo) -> None:
    rights = Rights(users, "ann")
    undo.begin()
    users.permit(Change(), "ann", "", "", ".*")
    assert rights.may("read", "q")
    undo.roll_back()
    assert not rights.may("read", "q")
    undo.begin()
    users.delete(Change(), "ann") if len(users.by_name) > 1 else users.forbid(Change(), "ann")
    assert not rights.enters
    undo.roll_back()
    assert rights.enters


def test_the_answers_that_are_kept_are_bounded(users: Users) -> None:
    users.permit(Change(), "ann", "", ".*x?", "")
    users.permit_topic(Change(), "ann", "t", "^k", "")
    rights = Rights(users, "ann")
    for number in range(2 * KEPT + 10):
        rights.require_publish(f"e{number}", "", topic=False)
        rights.require_publish("t", f"k{number}", topic=True)
    assert len(rights.writable) <= KEPT and len(rights._current().answers) <= KEPT
    assert "t" not in rights.writable
    with pytest.raises(AccessRefused):
        rights.require_publish("t", "other", topic=True)


def test_names_with_line_ends_and_other_odd_characters_match_as_patterns_say(users: Users) -> None:
    users.permit(Change(), "ann", "^a$", "^(a|b)$", "")
    rights = Rights(users, "ann")
    # not as PCRE, where $ is before a line end too: "a\n" is another queue
    assert rights.may("configure", "a") and not rights.may("configure", "a\n")
    assert not rights.may("configure", "a\nb") and not rights.may("configure", "b\na")
    assert not rights.may("configure", "") and rights.may("read", "") and not rights.may("read", "\n")


# what each permits of the names below
BACKTRACKING = {
    "^(a+)+$": ["aa"],
    "^(a|aa)+$": ["aa"],
    "^(a|a?)+$": ["aa"],
    "^(.*a){24}$": ["aa"],
    "^(([a-z])+.)+[A-Z]([a-z])+$": [],
    "^(a?){60}a{60}!": [],
    ".*.*.*.*.*.*y": [],
    "^orders-.*-eu-.*-v1$": [],
    "(x+x+)+y": [],
}


@pytest.fixture
def bounded() -> Iterator[None]:
    """Ends a search that goes back: Python's engine would search for longer than the machine exists."""

    def late(*_: object) -> None:
        raise AssertionError("a pattern was searched for more than ten seconds")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 10)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("bounded")
def test_a_pattern_costs_no_more_than_its_name_is_long(users: Users) -> None:
    names = {"aa!": "a" * 254 + "!", "aa": "a" * 255, "xx": "x" * 255, "eu": "orders-" + "-eu" * 82}
    for pattern, permitted in BACKTRACKING.items():
        users.permit(Change(), "ann", pattern, "^$", "^$")
        rights = Rights(users, "ann")
        found = [short for short, name in names.items() if rights.may("configure", name)]
        assert found == permitted, pattern
    users.permit(Change(), "ann", "a", ".*", "")
    rights = Rights(users, "ann")
    assert not rights.may("configure", "a" * 1_000_000), "no name is that long"
    assert not rights._current().answers, "and no answer about one is kept"


EXCEPTING = st.builds(
    "^(?!{}){}".format,
    st.sampled_from(
        ["a", "a|b", "ab$", "(a|b)$", r"\)", "[)]", "[]a]", "[^])]", r"[\])]a", "[[:alpha:])]b", ""]
    ),
    st.sampled_from(["", ".*", "(a|b|.)*$", "(?!b).*", r"(?!a\|).", "[|]a?", "b$"]),
)


@given(EXCEPTING, st.text("ab)|]", max_size=4))
def test_names_can_be_excepted_as_pcre_has_it(pattern: str, name: str) -> None:
    check_pattern(pattern)
    assert matches(pattern, name) == bool(re.search(pattern.replace("[:alpha:]", "ab"), name))


@pytest.mark.parametrize(
    "pattern",
    [
        "a(?!b)",
        "^(?!a)b|c",
        "^(?=a)",
        "^(?!(a)",
        "^(?!(?=a))b",
        "(?<=a)b",
        r"(a)\1",
        "(",
        "a{2000}",
        "\ud800",
        "*",
    ],
)
def test_a_pattern_without_a_bound_is_refused_where_it_is_given(users: Users, pattern: str) -> None:
    with pytest.raises(OptionError, match="is not a regular expression"):
        users.permit(Change(), "ann", ".*", pattern, ".*")
    with pytest.raises(OptionError, match="is not a regular expression"):
        users.permit_topic(Change(), "ann", "amq.topic", ".*", pattern)
    assert not Rights(users, "ann").may("read", "q"), "nothing has changed"
