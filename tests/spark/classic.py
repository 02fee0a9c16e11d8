"""Tests of tests/spark that need a classic session, and why. The others run over Spark Connect too, with
``TXMQ_SESSION=connect`` (``sessions.py``).

Not here: what Spark Connect does differently, docs/connect.md.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
PAGE = FOLDER.parents[1] / "docs" / "test_matrix.md"
BEGIN, END = "<!-- sessions -->\n", "<!-- end of sessions -->"

IN_A_THREAD = "runs its batches in a thread of this process, as if it was that of a query"
# words in a test, and why it is one of a classic session
WORDS: Mapping[str, str] = {
    r"failpoint\.arm|[Mm]onkey[Pp]atch|caplog|nonlocal|spans_kept|Event\(\)|\b(between|require_dead|hidden_files)\(": "looks into the process of the function, which is another one on Connect",
    r"_jsparkSession|\.rdd\b|sparkContext|_jvm\b|_jdf|\.newSession\(|query_thread|getOrCreate": "looks into the JVM",
    r"\bDriver\(rig\b": IN_A_THREAD,
    r"DeltaTable\b": "compares with Delta's API, whose plug-in the server does not have",
    r"tx\._seen": "looks at the metrics of an execution, which a client of Connect does not get",
}
JVM_ERROR = "an error of the JVM, which is another one on Connect"
OF_DELTA = "asks Delta's classes, which Connect does not have"
HERE = "keeps what the function has in this process"
ASKED = "Connect asks a table for types and constraints alone"
FILES: Mapping[str, str] = {
    **dict.fromkeys(("test_tables_changed.py", "test_type_widening.py", "test_values.py"), IN_A_THREAD),
}
# of test_user_code.py: what its functions do, and why only a classic session has it
WAYS: Mapping[str, str] = {
    "rdd": "Connect has no RDDs",
    "other_session": "Connect has no `newSession`",
    "settings": "Connect has no job groups and no local properties",
    "side_effects": "Connect has no accumulators and no broadcasts",
    "in_a_thread": "a classic session refuses it; on Connect it works (`connect`)",
    "tx_in_another_query": "a classic session refuses it; on Connect the query within does not start, and the rest is done once",
}
TESTS: Mapping[str, str] = {
    "test_foreach_batch.py::test_an_append_that_would_fail_after_the_decision_is_refused_before_it": ASKED,
    "test_append_checks.py::test_an_append_that_the_table_refuses_stops_before_anything_is_consumed": ASKED,
    "test_append_checks.py::test_a_table_that_its_catalog_manages_is_refused_before_anything_is_consumed": ASKED,
    "test_merge_values.py::test_what_on_excludes_is_evaluated_before_where_delta_evaluates_it": (
        "asks the plan of a merge what it computes, which a client of Connect does not get"
    ),
    "test_foreach_batch.py::test_an_exception_with_a_long_java_trace_ends_the_query_as_failed": JVM_ERROR,
    "test_foreach_batch.py::test_tx_is_of_no_use_after_its_function": HERE,
    "test_reused.py::test_of_two_queries_at_the_same_time_one_fails_with_one_error_and_nothing_is_doubled": HERE,
    "test_skip_rows_kafka.py::test_each_row_is_once_in_the_table_or_the_queue_where_a_node_or_the_command_dies": HERE,
    "test_observed.py::test_broken_rows_are_known_only_if_the_whole_batch_was_executed": WORDS[r"tx\._seen"],
    "test_from_kafka_source.py::test_a_new_query_starts_at_the_offsets_of_a_checkpoint_of_sparks_kafka_source": (
        "its first query is one of a classic session beside that of the test"
    ),
    "test_only_sql.py::test_a_session_without_delta_is_told_apart": OF_DELTA,
    "test_merge.py::test_what_a_table_would_refuse_stops_before_anything_is_consumed": HERE,
    "test_foreach_batch.py::test_several_appends_to_one_table_are_one_delta_commit": (
        "where a new table is, Connect does not tell: spellings of its path are tables of their own until it is there"
    ),
}
_CASES = "tests/crash/test_connect_crash.py::test_on_connect_whoever_is_killed_or_suspended_at_a_row_of_the_crash_table_each_row_is_there_once"
_KILLS = "tests/spark/test_connect.py::test_on_connect_everything_is_there_once_wherever_the_server_is_killed"
# row of the crash table -> the test that kills on Connect
ON_CONNECT: Mapping[int, str] = {
    **dict.fromkeys((1, 2, 5, 9, 11, 12, 13, 15, 17, 19), _CASES),
    **dict.fromkeys((3, 6, 7, 10, 14), _KILLS),
    8: "tests/crash/test_connect_crash.py::test_soak_random_kills_of_server_and_worker_leave_each_row_once",
    16: "tests/spark/test_connect.py::test_on_connect_another_query_of_the_app_and_a_lost_or_older_checkpoint_lose_and_repeat_nothing",
    20: "tests/crash/test_resume_crash.py::test_row_20_an_app_whose_directory_was_lost_goes_on_behind_its_ledger_each_row_once",
    21: "tests/crash/test_connect_crash.py::test_row_21_on_connect_a_copy_of_the_directory_from_any_step_of_the_first_batch_loses_nothing",
}
OF_THE_ENGINE = {4, 18}
ROWS = range(1, 22)


def reason(item: pytest.Function) -> str | None:
    """Why a test needs a classic session; None if it does not."""
    return _reason(f"{item.path.name}::{item.originalname}", inspect.getsource(item.function))


def _reason(name: str, source: str) -> str | None:
    own = TESTS.get(name) or FILES.get(name.partition("::")[0])
    return own or next((why for words, why in WORDS.items() if re.search(words, source)), None)


def by_reason() -> dict[str, dict[str, list[str]]]:
    """Of all tests of the folder: reason, "" for none -> file -> names."""
    found: dict[str, dict[str, list[str]]] = {}
    for path in sorted(FOLDER.glob("test_*.py")):
        text = path.read_text()
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                why = _reason(f"{path.name}::{node.name}", ast.get_source_segment(text, node) or "")
                found.setdefault(why or "", {}).setdefault(path.name, []).append(node.name)
    return found


def table() -> str:
    """Which of both sessions run what, as docs/test_matrix.md has it."""
    rows = ["| tests of `tests/spark` | classic | Connect | why not |", "|---|---|---|---|"]
    for why, files in sorted(by_reason().items(), key=lambda item: (item[0] != "", item[0])):
        count = sum(map(len, files.values()))
        named = f"{count} in {len(files)} files" if not why else _listed(files)
        rows.append(f"| {named} | yes | {'no' if why else 'yes'} | {why} |")
    rows += [f"| the function `{way}` of `user_code` | yes | no | {why} |" for way, why in WAYS.items()]
    rows += ["", "| rows of the crash table | classic | Connect | why not |", "|---|---|---|---|"]
    rows += [f"| {_numbers(ON_CONNECT)} | yes | yes |  |"]
    rows += [f"| {_numbers(OF_THE_ENGINE)} | no | no | no session takes part: the engine alone is killed |"]
    return "\n".join(rows) + "\n\n"


def _numbers(rows: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(rows)))


def _listed(files: Mapping[str, list[str]]) -> str:
    return ", ".join(
        f"{len(names)} of `{file.removeprefix('test_').removesuffix('.py')}`" for file, names in files.items()
    )


if __name__ == "__main__":  # writes the page
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.partition(END)[2])
