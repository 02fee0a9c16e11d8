"""Merges as values: the text of a MERGE, what is stored of it, and what is refused."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest

from broker_core.core.errors import OptionError
from connector.batch.steps import Steps
from connector.tables.change import Merge
from connector.tables.when import When


def plain(merge: Merge) -> str:
    """The text of the merge of view v into table x, without line breaks."""
    return merge.sql("x", "v").replace("\n)", ")").replace("\n", " ")


def test_a_merge_has_the_clauses_of_deltas_builder_in_their_order() -> None:
    merge = Merge.parse(
        "t.id = s.id",
        clauses=[
            When.not_matched_by_source("t.old").delete(),
            When.not_matched("s.n > 0").insert({"id": "s.id", "a b": "1"}),
            When.matched("s.gone").delete(),
            When.not_matched().insert(),
            When.matched().update({"n": "t.n + s.n", "p.q": "s.q"}),
            When.not_matched_by_source().update({"n": "0"}),
        ],
        evolves=True,
    )
    assert plain(merge) == (
        "MERGE WITH SCHEMA EVOLUTION INTO x AS t USING v AS s ON (t.id = s.id) "
        "WHEN MATCHED AND (s.gone) THEN DELETE "
        "WHEN MATCHED THEN UPDATE SET n = (t.n + s.n), p.q = (s.q) "
        "WHEN NOT MATCHED AND (s.n > 0) THEN INSERT (id, `a b`) VALUES ((s.id), (1)) "
        "WHEN NOT MATCHED THEN INSERT * "
        "WHEN NOT MATCHED BY SOURCE AND (t.old) THEN DELETE "
        "WHEN NOT MATCHED BY SOURCE THEN UPDATE SET n = (0)"
    )
    assert merge.acts_without_rows
    assert Merge.of(json.loads(json.dumps(asdict(merge)))) == merge


def test_update_insert_and_delete_are_short_for_clauses() -> None:
    short = Merge.parse("t.id = s.id -- by id", update=True, insert=True, delete="s.gone")
    assert plain(short) == (
        "MERGE INTO x AS t USING v AS s ON (t.id = s.id -- by id) WHEN MATCHED AND (s.gone) THEN DELETE "
        "WHEN MATCHED THEN UPDATE SET * WHEN NOT MATCHED THEN INSERT *"
    )
    assert "-- by id\n)" in short.sql("x", "v"), "a comment does not reach beyond its expression"
    assert not short.acts_without_rows


class Column:
    """As pyspark's: no text."""


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (lambda: Merge.parse("", update=True), "merge got on=''"),
        (lambda: Merge.parse(Column(), update=True), "give SQL over t and s"),  # type: ignore[arg-type]
        (lambda: Merge.parse("true"), "has no clause"),
        (lambda: Merge.parse("true", update=False, insert=None), "has no clause"),
        (lambda: Merge.parse("true", update=True, clauses=[When.matched().delete()]), "has both"),
        (lambda: Merge.parse("true", clauses=[When.matched()]), "give When.matched().update()"),
        (lambda: Merge.parse("true", update="s.n > 1"), "sets 's.n > 1'"),
        (lambda: Merge.parse("true", update={}), "sets {}"),
        (lambda: Merge.parse("true", update={"n": 1}), "update of column 'n' is 1, not SQL"),
        (lambda: Merge.parse("true", insert={"n": " "}), "insert of column 'n' has no expression"),
        (lambda: When.matched(Column()), "a Column is not text"),  # type: ignore[arg-type]
        (lambda: When.matched().insert(), "use When.not_matched"),
        (lambda: When.not_matched().update(), "insert it"),
        (lambda: When.not_matched().delete(), "use When.matched"),
        (lambda: When.not_matched_by_source().insert(), "use When.not_matched"),
        (lambda: When.not_matched_by_source().update(), "names no columns"),
    ],
)
def test_a_merge_that_means_nothing_is_refused_with_one_error(made: Callable[[], Any], told: str) -> None:
    with pytest.raises(OptionError) as raised:
        made()
    assert told in str(raised.value)


def test_appends_in_a_row_share_a_step_and_every_change_has_its_own() -> None:
    steps = Steps()
    calls = [steps.append("a"), steps.append("a"), steps.change("a"), steps.change("b"), steps.append("b")]
    calls += [steps.append("a"), steps.append("a"), steps.change("a"), steps.change("a"), steps.append("b")]
    assert calls == [0, 0, 1, 0, 1, 2, 2, 3, 4, 1]
    steps.same_target("append", "a", 0, {"schema": "x", "options": {}})
    steps.same_target("append", "a", 2, {"schema": "y", "options": {}})
    with pytest.raises(OptionError, match="different columns"):
        steps.same_target("append", "a", 0, {"schema": "y", "options": {}})
    with pytest.raises(OptionError, match="different options"):
        steps.same_target("append", "a", 2, {"schema": "y", "options": {"mergeSchema": "true"}})


def test_an_append_that_failed_does_not_say_what_the_next_one_may_have() -> None:
    steps, right, wrong = Steps(), {"schema": "x", "options": {}}, {"schema": "y", "options": {}}

    def fails() -> None:
        with pytest.raises(RuntimeError), steps.left_by_failures(threading.Lock(), "append", "a", 0):
            raise RuntimeError("a task has failed")

    steps.same_target("append", "a", 0, wrong)
    fails()
    steps.same_target("append", "a", 0, right)
    steps.same_target("append", "a", 0, right)
    fails()
    with pytest.raises(OptionError, match="different columns"):  # the other one has staged its rows
        steps.same_target("append", "a", 0, wrong)
