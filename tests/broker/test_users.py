"""What a user may do is asked without the lock, while users change."""

from __future__ import annotations

import sys
import threading

import pytest

from broker_core.broker.change import Change
from broker_core.broker.rights import KEPT, Rights
from broker_core.broker.undo import Undo
from broker_core.broker.users import Users
from broker_core.errors import AccessRefused


@pytest.fixture
def users() -> Users:
    made = Users(Undo())
    made.add(Change(), "ann", "hash")
    made.permit(Change(), "ann", "", "", "")
    return made


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


def test_an_undone_change_leaves_no_answer_behind(users: Users) -> None:
    rights = Rights(users, "ann")
    users._undo.begin()
    users.permit(Change(), "ann", "", "", ".*")
    assert rights.may("read", "q")
    users._undo.roll_back()
    assert not rights.may("read", "q")
    users._undo.begin()
    users.delete(Change(), "ann") if len(users.by_name) > 1 else users.forbid(Change(), "ann")
    assert not rights.enters
    users._undo.roll_back()
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
    assert rights.may("configure", "a") and rights.may(
        "configure", "a\n"
    )  # as PCRE: $ is before a line end too
    assert not rights.may("configure", "a\nb") and not rights.may("configure", "b\na")
    assert not rights.may("configure", "") and rights.may("read", "") and not rights.may("read", "\n")
