"""What is run in both sessions: the list of tests of classic sessions names tests, and notes of a function arrive."""

from __future__ import annotations

import re
from pathlib import Path

from tests.crash.test_connect_crash import CASES
from tests.crash.test_connect_crash import (
    test_on_connect_whoever_is_killed_or_suspended_at_a_row_of_the_crash_table_each_row_is_there_once as killed_at_rows,
)
from tests.spark.classic import (
    BEGIN,
    END,
    FILES,
    OF_THE_ENGINE,
    ON_CONNECT,
    PAGE,
    ROWS,
    TESTS,
    WORDS,
    table,
)
from tests.spark.sessions import Notes

HERE = Path(__file__).parent


def test_each_name_of_the_list_is_a_test_and_each_word_is_in_one() -> None:
    for name in TESTS:
        file, _, function = name.partition("::")
        assert f"def {function}(" in (HERE / file).read_text(), name
    assert all((HERE / file).exists() for file in FILES)
    text = "".join(path.read_text() for path in HERE.glob("test_*.py"))
    assert [words for words in WORDS if not re.search(words, text)] == []


def test_the_page_says_which_session_runs_what() -> None:
    """``python -m tests.spark.classic`` writes it."""
    assert PAGE.read_text().partition(BEGIN)[2].partition(END)[0] == table()
    pages = PAGE.parent / "commit_rules.md"
    assert [int(row) for row in re.findall(r"^\| (\d+) \|", pages.read_text(), re.MULTILINE)] == list(ROWS)
    assert {*ROWS} == {*ON_CONNECT} | OF_THE_ENGINE
    named = {row for row, test in ON_CONNECT.items() if test.endswith(killed_at_rows.__name__)}
    assert {case.row for case in CASES.values()} == named
    for test in ON_CONNECT.values():
        file, _, function = test.partition("::")
        text = (PAGE.parents[1] / file).read_text()
        assert f"def {function}(" in text and "connect" in text.lower(), test


def test_notes_are_a_list_that_another_object_of_the_same_file_fills(tmp_path: Path) -> None:
    notes, other = (Notes(tmp_path / "notes") for _ in range(2))
    other.append(("a", 1))
    notes.append(["b"])
    assert notes == other == [("a", 1), ["b"]] and len(notes) == 2 and notes[-1] == ["b"]
