"""Each error that says how a pipeline or a directory goes on has a test that does it and arrives, or a reason; and each
command that a text of the product names is one.

Not here: the tests that the table names.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest

from broker_core.core import errors
from txmq.cli import parsed
from txmq.command.declare import ROOT as COMMANDS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
GOES_ON = re.compile(
    r"onNewCheckpoint|(new|newest) checkpoint|txmq (app release|app skip|broker salvage)|RESTORE TABLE|resume_from=|(another|new) app_id|another ledger|"
    r"kafka-(?!topics)\w+\.sh|\{[\w. ]*\b(UNAPPLIED|ALL_ROWS|LOST|AGAIN|_START|_OTHERWISE|_AS_WEIGHT|_AS_HASHED)\}"
)
ENGINES = (
    "tests/advice/test_engine_advice.py::test_who_does_what_the_error_says_goes_on_with_each_message_once"
)
SKIPPED = "tests/spark/test_skip_rows.py::test_only_the_rows_that_a_table_refuses_are_skipped_each_once_wherever_the_driver_dies"
FILES_GONE = "tests/spark/test_append_files.py::test_a_table_dropped_with_its_files_stops_and_they_are_given_up_only_by_name"
RESUMED = (
    "tests/spark/test_resume.py::test_c7_an_app_whose_engine_has_lost_its_ledger_goes_on_behind_the_table"
)
HASHED = "tests/routing/test_consistent_hash.py::test_who_does_what_a_refusal_says_is_taken_at_once"
PUT_BACK = "tests/spark/test_data_directories.py::test_a_table_that_is_put_back_as_the_error_says_takes_the_batches_of_restored_data"
ANOTHER_LEDGER = "tests/spark/test_data_directories.py::test_a_data_directory_restored_one_batch_older_stops_before_the_decision"
OTHERS_KEEP = "tests/spark/test_data_directories.py::test_who_does_what_the_error_of_a_newer_table_says_loses_no_row_of_others"
REPLACED = "tests/spark/test_tables_changed.py::test_a_change_is_not_done_on_a_table_that_replaces_its_own_and_never_silently"
SALVAGED = "tests/store/test_salvage.py::test_flipped_bytes_in_the_catalog_never_make_a_message_another_one"
BY_HAND = "what is done by hand depends on what others did; that the error comes before any effect: "

# words that only this error has: the test that does what it says, or why none does
ADVICE: dict[str, str] = {
    **dict.fromkeys(
        (
            "the checkpoint of app {app_id} starts at {brief(vector)}", "asks for the range", "which the queues {', '.join(names)} do not have",
            "has committed the batch that ends at", "a new checkpoint starts under appId", "has read {brief(read.ranges, spans)} and now asks",
            "has read {', '.join(gone)} before that was released", "is not released from app", "was followed by query", "is a new checkpoint under appId",
            "but the ledger expects", "lies before what the ledger", "(app {entry.app_id}, consumed", "committing it would lose or duplicate",
            "but no batch before it", "not to '{app_id}'; `txmq app release", "was deleted {'and made again ' if found else ''}since",
            "was deleted, or deleted and made again", "the claims and decisions of app {app_id} are lost with it", "has no claim of the app. It is",
        ),
        ENGINES,
    ),
    **dict.fromkeys(
        ("The binding key must be an integer", "The binding key must be greater", "are mutually exclusive", "Unsupported property: ", "for arg '{name}': {_AS_HASHED}"),
        HASHED,
    ),
    ", which is decided; its rows are kept": "tests/spark/test_skip_rows.py::test_a_table_that_lost_a_column_of_decided_rows_is_to_be_repaired",
    "has claimed damaged messages of": "tests/server/test_skip_damaged.py::test_what_an_app_has_claimed_is_not_taken_from_it",
    "only its stream consumes it": "tests/cli/test_cli.py::test_apps_are_listed_and_their_queues_released",
    "which say where app {app_id} is, were deleted": "tests/kafka/sink/test_sink.py::test_an_app_whose_topic_was_emptied_hides_no_other_app",
    "had asked before where to begin": "tests/crash/test_resume_crash.py::test_row_20_an_app_whose_directory_was_lost_goes_on_behind_its_ledger_each_row_once",
    "begin each source that is not txmq after": "tests/spark/test_other_sources.py::test_row_16_an_older_checkpoint_of_files_stops_and_both_ways_on_that_the_error_names_lose_nothing",
    "the checkpoint holds offsets of": "tests/contract/engine/test_release.py::test_s2_a_stream_with_a_queue_more_or_less_goes_on_with_a_new_checkpoint_and_resume",
    "and the range {start} to {end} names them": "tests/contract/engine/test_source.py::test_s4_fail_on_data_loss_false_reads_what_is_left",
    "does not have these offsets (": "tests/spark/test_resume.py::test_c7_an_engine_without_the_offsets_of_the_ledger_waits_for_its_messages",
    "ends here at {found.end}": "tests/spark/test_resume.py::test_c7_an_engine_without_the_offsets_of_the_ledger_waits_for_its_messages",
    "and this engine has no ledger of the app": RESUMED,
    "had other messages than here": RESUMED,
    "and this engine, which wrote that": PUT_BACK,
    "{text} decided {why}": OTHERS_KEEP,
    "{text} mirrored {why}": ANOTHER_LEDGER,
    "the catalog holds a record that cannot be read": SALVAGED,
    "the catalog {path} is damaged": SALVAGED,
    "see `txmq broker salvage`: {what}": "tests/server/test_skip_damaged.py::test_what_is_damaged_is_left_out_and_the_rest_flows",
    "does not take {what}": SKIPPED,  # after --refused: test_where_a_row_of_the_table_decides_...
    "the table refuses more than": SKIPPED,
    "cannot be written to {self._path}": SKIPPED,
    "deletes rows that its source lacks": "tests/spark/test_skip_rows.py::test_no_row_of_an_overwrite_is_left_out_because_that_would_delete_what_it_replaces",
    "{what}: {renamed}; otherwise create it again": "tests/spark/test_tables_changed.py::test_a_table_that_is_renamed_gets_everything_once_it_has_its_name_back",
    "has not taken {what}": "tests/spark/test_transient.py::test_a_full_disk_of_a_table_is_told_and_the_batch_is_applied_once_when_there_is_room",
    "data files are gone ({gone[0]})": FILES_GONE,
    "decided rows are gone (batch": FILES_GONE,
    "decided rows for {goal(part)} are gone": FILES_GONE,
    "rows wait in data files": FILES_GONE,
    "it is not done on another table": REPLACED,
    "and the new one has the change as version": REPLACED,
    "hangs in {log} at offset": BY_HAND + "tests/kafka/sink/test_lost_end.py::test_a_transaction_whose_end_kafka_has_lost_and_forgotten_is_one_error_that_names_it",
    "another engine has taken the app over since": BY_HAND + "tests/spark/test_resume.py::test_c7_of_two_engines_that_go_on_behind_one_ledger_one_does",
    "was taken over by another engine after": BY_HAND + "tests/spark/test_resume.py::test_c7_of_two_engines_that_go_on_behind_one_ledger_one_does",
    "cannot continue after ledger": BY_HAND + "tests/spark/test_resume.py::test_c7_a_ledger_that_others_have_changed_is_refused_and_nothing_has_changed",
    "its rows would come twice": BY_HAND + "tests/spark/test_resume.py::test_c7_a_batch_that_only_a_table_knows_stops_before_the_decision",
    "Delta has skipped batch": BY_HAND + "tests/spark/test_data_directories.py::test_a_data_directory_restored_one_batch_older_stops_before_the_decision",
    "forgets the batches that it has": BY_HAND + "tests/spark/test_delta.py::test_a_table_that_forgets_its_transactions_takes_a_repeated_append_once",
}  # fmt: skip


def test_each_error_that_says_how_to_go_on_is_followed_by_a_test_or_has_a_reason() -> None:
    found = {where: said for where, said in texts() if GOES_ON.search(said)}
    for words, how in ADVICE.items():
        assert any(words in said for said in found.values()), words
        path, _, name = how.rpartition(": ")[2].partition("::")
        assert f"def {name}(" in (ROOT / path).read_text(), how
    told = {where: [words for words in ADVICE if words in said] for where, said in found.items()}
    assert {where: (words, found[where]) for where, words in told.items() if len(words) != 1} == {}


def test_each_command_that_a_text_of_the_product_names_is_one() -> None:
    named = {
        (path, line.partition(" --")[0] if of_docstring else line)
        for path, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr | ast.Constant)
        for of_docstring, line in re.findall(r"(`?)`txmq ([^`]+)`", text(node))
    }
    assert len(named) > 100
    assert [each for each in sorted(named) if not is_command(each[1])] == []


def test_an_error_that_says_more_than_the_one_it_follows_stands_alone() -> None:
    """A Spark exception has the text of both, the older one first, and ``cause`` finds that."""
    ours = {name for name, each in vars(errors).items() if isinstance(each, type)} | {"Undone"}
    handlers = [
        (path, node)
        for path, tree in modules()
        for node in ast.walk(tree)
        if path.startswith("connector/") and isinstance(node, ast.ExceptHandler) and node.type is not None
    ]
    caught = [
        (path, raised)
        for path, handler in handlers
        if ours & {name.id for name in ast.walk(handler.type or handler) if isinstance(name, ast.Name)}
        for raised in ast.walk(handler)
        if isinstance(raised, ast.Raise) and isinstance(raised.exc, ast.Call)
    ]
    assert caught
    assert [path for path, each in caught if not ast.unparse(each).endswith(" from None")] == []


def is_command(line: str) -> bool:
    words = shlex.split(re.sub(r"\{[^}]*\}?|\b[A-Z]{2,}\b", "1", line))
    for more in ([], ["--url", "txmq://host:5673"]):
        try:
            return bool(parsed([*words, *more]))
        except click.UsageError:
            pass
    command: click.Command | None = COMMANDS  # or the name alone
    for word in words:
        command = command.commands.get(word) if isinstance(command, click.Group) else None
    return command is not None


def texts() -> Iterator[tuple[str, str]]:
    """(where, what it says) of each error that is made in the product."""
    for path, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
                name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
                kind = getattr(errors, name, None)
                if isinstance(kind, type) and issubclass(kind, errors.TxmqError):
                    yield f"{path}:{node.lineno}", ": ".join(map(text, node.args))


@cache
def modules() -> list[tuple[str, ast.Module]]:
    files = [
        path for name in ("broker_core", "connector", "txmq") for path in sorted((ROOT / name).rglob("*.py"))
    ]
    return [(str(path.relative_to(ROOT)), ast.parse(path.read_text())) for path in files]


def text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(text, node.values))
    if isinstance(node, ast.BinOp):
        return text(node.left) + text(node.right)
    return "{" + ast.unparse(node.value if isinstance(node, ast.FormattedValue) else node) + "}"
