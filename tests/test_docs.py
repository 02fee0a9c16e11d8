"""The documentation is true: options, test names, rules, code blocks and links are compared with what is
there.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import click
import pytest

import txmq
from bench import readme
from broker_core.core import errors
from connector.batch.batch_transaction import BatchTransaction
from connector.conf import recommended_conf
from connector.options import OPTIONS, table
from tests import operating
from tests.claims import claims, plain
from txmq.command.declare import ROOT as ROOT_COMMAND

ROOT = Path(__file__).parents[1]
FORM = ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("*.md")])
SOURCES = [
    path
    for pattern in ("*.md", "*.toml", "*.py", "Makefile", ".ci/run", "docs/**/*.md", "txmq/**/*", "broker_core/**/*", "connector/**/*",
                    "tests/**/*", "bench/**/*", "examples/**/*")
    for path in ROOT.glob(pattern)
    if path.is_file() and "__pycache__" not in path.parts
]  # fmt: skip


CLAIMS = claims()


def _options_section() -> str:
    text = (ROOT / "docs" / "spark_reference.md").read_text()
    return text.split("## Options", 1)[1].split("\n## ", 1)[0]


def test_the_options_table_of_the_docs_is_that_of_the_code() -> None:
    assert table() in _options_section()


def test_the_commands_of_the_docs_are_those_of_the_parser() -> None:
    """``python -m tests.operating`` writes them."""
    _, found, commands = operating.PAGE.read_text().partition(operating.HEADING)
    assert found and commands == operating.commands()


def test_every_documented_option_exists() -> None:
    documented = set(re.findall(r"^\| `(\w+)` \|", _options_section(), re.MULTILINE))
    assert documented == {option.name for option in OPTIONS}


def test_every_recommended_setting_is_explained() -> None:
    text = (ROOT / "docs" / "spark_reference.md").read_text()
    assert [name for name in recommended_conf() if f"`{name}`" not in text] == []


# -- claims: tests/claims.tsv names the test of a sentence -----------------------------------------------------


@pytest.mark.parametrize("page", sorted({claim.page for claim in CLAIMS}))
def test_every_claim_is_on_its_page_and_its_test_exists(page: str) -> None:
    """After a sentence has changed, look whether its test still proves it, and change the line of ``claims.tsv``."""
    text = plain((ROOT / page).read_text())
    here = [claim for claim in CLAIMS if claim.page == page]
    assert [claim.words for claim in here if claim.words not in text] == []
    for claim in here:
        path, _, name = claim.test.partition("::")
        assert name in _tests_of(ROOT / path) if name else (ROOT / path).is_file(), claim


def test_every_limit_stands_where_the_list_says() -> None:
    """``limits.tsv``: page and words of what txmq does not do, so that no limit leaves the pages unnoticed."""
    rows = [line.split("\t") for line in (ROOT / "tests" / "limits.tsv").read_text().splitlines()]
    assert [row for row in rows if row[1] not in plain((ROOT / row[0]).read_text())] == []
    assert len({page for page, _ in rows}) >= 30


GUARANTEES = ("docs/guarantees.md", "docs/tested.md", "docs/tested_spark.md")


def _guarantees() -> dict[str, str]:
    """Each line of the lists of guarantees, and its test; ``""`` for one without."""
    lines = [
        plain(line)
        for page in GUARANTEES
        for line in re.findall(r"^- (.*)$", (ROOT / page).read_text(), re.MULTILINE)
    ]
    proved = {claim.words: claim.test for claim in CLAIMS if claim.page in GUARANTEES}
    return {line: proved.get(line, "") for line in lines}


def test_every_guarantee_has_a_test_of_its_own() -> None:
    guarantees = _guarantees()
    assert [line for line, test in guarantees.items() if not test] == []
    assert len(set(guarantees.values())) == len(guarantees) >= 50


_GENERATED = {"commands.md"}


def test_no_page_for_users_is_long() -> None:
    """A page answers the questions of one task; a longer one is two pages."""
    sizes = {path.name: path.stat().st_size for path in (ROOT / "docs").glob("*.md")}
    assert {name: size for name, size in sizes.items() if size > 12_000}.keys() <= _GENERATED


def test_the_pages_for_users_grow_no_more() -> None:
    """A fact stands once. Not counted: what is generated, and the pages of the group ``Contributing``."""
    groups = (ROOT / "mkdocs.yml").read_text().split("  - Contributing:\n", 1)
    for_contributors = set(re.findall(r"- (\w+\.md)", groups[1])) | _GENERATED | {"api.md"}
    sizes = {path.name: path.stat().st_size for path in (ROOT / "docs").glob("*.md")}
    assert sum(size for name, size in sizes.items() if name not in for_contributors) <= 202_000


def test_no_page_names_a_test() -> None:
    """``python -m tests.claims`` moves the names into ``tests/claims.tsv``."""
    named = {path.name: re.findall(r"`(?:tests/[\w/]+::)?test_\w+`", path.read_text()) for path in (ROOT / "docs").glob("*.md")}  # fmt: skip
    assert {page: names for page, names in named.items() if names} == {}


# what needs a cluster, or minutes: a part of each is tested before a change lands, under another name
SOAK_ALONE = {
    "tests/crash/test_kafka_nodes.py::test_soak_rows_go_through_once_while_nodes_and_drivers_are_killed",
    "tests/crash/test_kafka_nodes.py::test_soak_a_full_disk_stops_with_one_error_and_everything_is_there_once_when_it_has_room",
    "tests/crash/test_resume_crash.py::test_row_20_on_kafka_an_app_whose_topic_was_deleted_goes_on_behind_its_ledger_each_message_once",
    "tests/spark/test_executors.py::test_each_row_is_there_once_where_an_executor_is_killed_or_a_slow_task_runs_twice",
    "tests/spark/test_pipeline.py::test_a_full_refresh_empties_the_table_and_neither_repeats_nor_loses_what_the_queue_has",
    "tests/spark/test_pipeline.py::test_each_message_is_once_in_table_and_sink_wherever_a_pipeline_is_killed",
}  # fmt: skip


# of other claims: what needs another product, a browser or a client in Java, or whose rule has another test before
SOAK_CLAIMS = {
    "interop/test_definitions.py": ("test_definitions_of_more_bindings_than_one_call_takes_are_imported_in_files",),
    "interop/test_java.py": ("test_java_over_amqps_does_what_its_permissions_allow",),
    "interop/test_java_http.py": ("test_the_java_program_comes_to_all_its_checks_and_no_others",),
    "interop/test_shovel.py": (
        "test_a_shovel_brings_a_queue_of_rabbitmq_to_txmq",
        "test_a_shovel_into_a_queue_without_duplicates_brings_each_message_once_over_kills_of_both_sides",
    ),
    "server/http/test_page_browser.py": (
        "test_a_hostile_name_and_body_are_text",
        "test_a_message_shows_its_life_and_a_transaction_what_it_did",
        "test_a_transaction_in_doubt_is_decided_by_hand_after_a_confirmation",
        "test_the_broker_is_killed_while_the_page_is_open",
        "test_the_last_transactions_lead_to_older_ones_and_to_what_each_did",
    ),
    "spark/test_append_checks.py": ("test_what_a_table_refuses_after_the_decision_waits_and_can_be_skipped_to_files",),
    "spark/test_append_files.py": ("test_tables_that_take_no_files_take_rows_and_a_line_of_the_log_says_why",),
    "spark/test_connect_client.py": ("test_a_client_without_jvm_py4j_and_environment_does_every_operation_once",),
    "spark/test_data_directories.py": (
        "test_a_table_whose_older_copy_was_put_back_is_noticed_and_its_missing_batches_are_named_once",
        "test_the_rows_of_a_data_directory_made_anew_reach_a_table_that_was_kept",
    ),
    "spark/test_merge_values.py": ("test_what_passes_the_check_of_values_is_merged_as_by_delta",),
    "spark/test_only_sql.py": ("test_every_operation_of_a_batch_works_by_sql_alone_and_is_there_once",),
    "spark/test_page_blocks.py": ("test_an_app_goes_on_behind_its_ledger_on_another_engine",),
    "spark/test_pipeline.py": ("test_a_second_flow_into_a_sink_is_refused_and_with_a_sink_of_its_own_everything_is_once",),
    "spark/test_resume.py": ("test_c7_a_ledger_that_was_vacuumed_and_compacted_is_as_good",),
    "spark/test_state_kafka.py": ("test_the_state_of_apps_on_kafka",),
    "spark/test_table_names.py": ("test_every_spelling_of_a_table_in_one_batch_is_one_commit_with_all_rows",),
    "spark/test_threads.py": ("test_the_tables_of_a_function_in_threads_are_applied_side_by_side_each_once",),
    "store/test_salvage.py": ("test_flipped_bytes_in_the_catalog_never_make_a_message_another_one",),
}  # fmt: skip


def _landing(session: pytest.Session) -> dict[str, bool]:
    """Test, and file of tests -> whether a case of it is not ``soak``, of all that is collected."""
    lands: dict[str, bool] = {}
    for item in session.items:
        if isinstance(item, pytest.Function):
            file = str(item.path.relative_to(ROOT))
            for name in (file, f"{file}::{item.originalname}"):
                lands[name] = lands.get(name, False) or item.get_closest_marker("soak") is None
    return lands


def test_every_guarantee_is_tested_before_a_change_lands(request: pytest.FixtureRequest) -> None:
    """At least one case of its test is not ``soak``."""
    lands = _landing(request.session)
    named = set(_guarantees().values())
    alone = {test for test in named if not lands.get(test, True)}
    assert alone == SOAK_ALONE & lands.keys()


def test_every_claim_has_a_test_before_a_change_lands(request: pytest.FixtureRequest) -> None:
    """At least one of its tests, unless it is named above."""
    lands = _landing(request.session)
    tests: dict[tuple[str, str], set[str]] = {}
    for claim in CLAIMS:
        tests.setdefault((claim.page, claim.words), set()).add(claim.test)
    alone = {test for of in tests.values() if not any(lands.get(test, True) for test in of) for test in of}
    known = {f"tests/{file}::{name}" for file, names in SOAK_CLAIMS.items() for name in names}
    assert alone <= known | SOAK_ALONE
    assert known <= {claim.test for claim in CLAIMS}


def test_the_readme_is_short_and_its_figures_are_those_of_a_run_of_the_bench() -> None:
    text = readme.PAGE.read_text()
    assert len(text.splitlines()) <= 130
    assert "\n".join(readme.rows()) in text, "python -m bench.readme"
    for path, plot in readme.plots().items():
        assert path.read_text() == plot, "python -m bench.readme"
        assert path.name in (ROOT / "docs" / "performance.md").read_text()


def test_the_figures_and_their_references_have_the_ratios_that_stand_there() -> None:
    figures = {
        name: each
        for file in (readme.FILE, readme.LATENCY)
        for name, each in json.loads(file.read_text())["figures"].items()
    }
    for name, each in figures.items():
        whole = each["value"] + (each["reference"] if name in readme.ADDED else 0)
        assert abs(whole / each["reference"] - each["ratio"]) < 0.006, each


def test_every_no_of_a_rival_has_its_source() -> None:
    """A link to the rival's own page; what is measured here is in the table of figures below."""
    readme_table = readme.PAGE.read_text().split("## Compared\n", 1)[1].split("\n## ", 1)[0]
    table = (ROOT / "docs" / "compared.md").read_text().split("\n## ", 1)[0]
    cells = [cell for row in readme_table.strip().splitlines()[2:] for cell in row.split("|")[4:-1]]
    cells += [row.split("|")[3] for row in table.splitlines() if row.startswith("| ")][1:]
    assert len(cells) == 26
    assert [
        cell for cell in cells if re.search(r"\b(?:no|not|none)\b", cell) and "](https://" not in cell
    ] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    names = {name for path in (ROOT / "tests").rglob("test_*.py") for name in _tests_of(path)}
    files = {path.name for path in (ROOT / "tests").rglob("*.py")}
    assert [name for name in re.findall(r"`(test_\w+)`", text) if name not in names] == []
    assert [name for name in re.findall(r"`(test_\w+\.py)`", text) if name not in files] == []
    assert [path for path in re.findall(r"`(tests/[\w/.]+)`", text) if not (ROOT / path).exists()] == []


@cache
def _tests_of(path: Path) -> frozenset[str]:
    if not path.exists():
        return frozenset()
    return frozenset(
        node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)
    )


# -- tables --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_every_row_of_a_table_is_one_line_with_as_many_cells_as_its_head(page: Path) -> None:
    assert _torn(page.read_text()) == []


def test_a_row_that_is_wrapped_or_behind_a_blank_line_is_torn() -> None:
    table = "| a | b |\n|---|---|\n| 1 | 2 |\n"
    assert _torn(f"{table}\ntext\n```\n| code\n```\n{table}") == []
    assert _torn(f"{table}\n| 3 | 4 |\n") == ["5: | 3 | 4 |"]
    assert _torn(f"{table}| 3 |\n 4 |\n") == ["4: | 3 |", "5:  4 |"]


def _torn(text: str) -> list[str]:
    """Rows that are rendered as text or in the wrong cells: a wrapped one ends its table, and so does a blank line."""
    torn, cells, code = [], 0, False
    for number, (line, following) in enumerate(itertools.pairwise([*text.splitlines(), ""]), 1):
        code ^= line.startswith("```")
        if code:
            continue
        if re.fullmatch(r"\|[-:| ]+\|", following):
            cells = _cells(line)
        elif cells and not line.strip():
            cells = 0
        if (cells or line.startswith("|")) and _cells(line) != cells:
            torn.append(f"{number}: {line[:70]}")
    return torn


def _cells(line: str) -> int:
    """The number of cells of a row; -1 for what is none. A bar within code separates cells too (GFM)."""
    if not (line.startswith("|") and line.endswith("|")):
        return -1
    return len(re.findall(r"(?<!\\)\|", line)) - 1


# -- numbered rules ------------------------------------------------------------------------------------------


RULES = ("transactions.md", "commit_rules.md")


def _rules() -> dict[str, list[str]]:
    """The numbers of the rules of a micro-batch, the decisions and the rows of the crash table."""
    text = "".join((ROOT / "docs" / name).read_text() for name in RULES)
    crashes = text.split("## Crash table", 1)[1].split("\n## ", 1)[0]
    decisions = (ROOT / "docs" / "decisions.md").read_text().split("## Decisions", 1)[1].split("\n## ", 1)[0]
    return {
        "rule": re.findall(r"^- \*\*([SC]\d)\b", text, re.MULTILINE),
        "row": re.findall(r"^\| (\d+) \|", crashes, re.MULTILINE),
        "decision": re.findall(r"^(\d+)\. \*\*", decisions, re.MULTILINE),
    }


_NUMBERS = r"(\d+(?:(?:, | and |, and | to )\d+)*)"
_CITATIONS = {
    "rule": (r"\b([SC]\d)\b(?![\"'])", r"(?:test_|\")([sc]\d)_", r"_and_([sc]\d)_"),
    "row": (
        rf"\b[Rr]ows? {_NUMBERS} of the crash table",
        rf"Crash rows? {_NUMBERS}",
        r"test_rows?_(\d+(?:_and_\d+)*)_",
    ),
    "decision": (rf"\b(?:semantics|decisions?) {_NUMBERS}\b", r"def test_(\d\d)_"),
}


@cache
def _cited(kind: str) -> dict[str, str]:
    """Each number that code, tests or pages cite, and one place that does."""
    found: dict[str, str] = {}
    for path in SOURCES:
        if path.suffix not in _TEXT or path == Path(__file__):
            continue
        text = path.read_text()
        for pattern in _CITATIONS[kind]:
            for cited in re.findall(pattern, text):
                numbers = (
                    [cited.upper()]
                    if kind == "rule"
                    else [str(int(number)) for number in re.findall(r"\d+", cited)]
                )
                found |= dict.fromkeys(numbers, str(path.relative_to(ROOT)))
    return found


@pytest.mark.parametrize("kind", list(_CITATIONS))
def test_every_rule_that_is_cited_is_a_rule_of_the_page(kind: str) -> None:
    rules = _rules()[kind]
    assert len(rules) == len(set(rules)) == {"rule": 13, "row": 21, "decision": 22}[kind]
    cited = _cited(kind)
    assert len(cited) > len(rules) / 2, "the pattern of the citations finds too little"
    assert {number: where for number, where in cited.items() if number not in rules} == {}


def test_every_rule_has_a_test() -> None:
    tests = "\n".join(
        path.read_text() for path in (ROOT / "tests").rglob("test_*.py") if path != Path(__file__)
    )
    rules = _rules()
    names = (*RULES, "decisions.md")
    page = "".join((ROOT / "docs" / name).read_text() for name in names)
    assert [rule for rule in rules["rule"] if not re.search(rf"(?:test_|\"){rule.lower()}_", tests)] == []
    # of a decision or a row whose tests have another name, the side file says which they are
    words = [claim.words for claim in CLAIMS if claim.page.removeprefix("docs/") in names]
    for kind, lines in (("decision", r"^{}\. \*\*(?:.|\n(?!\d|\n))*"), ("row", r"^\| {} \|.*")):
        name = r"test_{:02d}_" if kind == "decision" else r"test_rows?_(?:\d+_and_)?{}_"
        untested = []
        for number in rules[kind]:
            found = re.search(lines.format(number), page, re.MULTILINE)
            assert found, number
            if not re.search(name.format(int(number)), tests) and not any(
                claim in plain(found.group()) for claim in words
            ):
                untested.append(number)
        assert untested == []


# -- errors and commands -------------------------------------------------------------------------------------


def test_the_page_of_errors_has_each_code_once_and_says_which_calls_may_be_repeated() -> None:
    """The first cell of a row: codes, the reply code of AMQP, and whether the call may be repeated."""
    retry = {}
    for line in (ROOT / "docs" / "errors.md").read_text().splitlines():
        first = line.split("|")[1] if line.startswith("| `TXMQ_") else ""
        for code in re.findall(r"`(TXMQ_\w+)`", first):
            assert code not in retry, code
            retry[code] = "*again*" in first
    classes = {
        each.code: each
        for each in vars(errors).values()
        if isinstance(each, type) and issubclass(each, errors.TxmqError)
    }
    assert retry.keys() == classes.keys() - {"TXMQ_ERROR"}
    assert {code for code, again in retry.items() if again} == {
        code for code, each in classes.items() if each.retriable
    }


@pytest.mark.parametrize("page", [*PAGES, FORM], ids=lambda path: path.name)
def test_every_command_of_a_page_exists_with_its_options(page: Path) -> None:
    text = page.read_text()
    lines = "\n".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL)).splitlines()
    lines += re.findall(r"`(txmq [^`\n]+)`", text) if page.name != "CHANGELOG.md" else []
    wrong = []
    for line in lines:
        for words in re.findall(r"(?:^|[\s$;(])txmq ((?:[^|;&#<>()]|<\()+)", line):
            command: click.Command = ROOT_COMMAND
            for word in words.split():
                if isinstance(command, click.Group) and not word.startswith(("-", "[")):
                    if word not in command.commands:
                        wrong.append(f"txmq {words}")
                        break
                    command = command.commands[word]
                elif word.startswith("--") and word.partition("=")[0].rstrip(",.]") not in {
                    *(name for param in command.params for name in param.opts), "--help", "--version",
                }:  # fmt: skip
                    wrong.append(f"txmq {words}: {word}")
    assert wrong == []


# -- code blocks, links, paths -------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_every_python_block_compiles(page: Path) -> None:
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        compile(block, page.name, "exec")


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^):\s]+)\)", page.read_text())
    assert [link for link in links if not _leads(page, link)] == []


def _leads(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = page.parent / path if path else page
    if not anchor or not target.exists():
        return target.exists()
    headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
    return anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages as MkDocs renders them; a dead link, a page outside the navigation or a missing name fails."""
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],  # quiet, it is not strict
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    return folder


@pytest.mark.slow
def test_the_site_has_every_public_name_of_the_package(site: Path) -> None:
    page = (site / "api.html").read_text()
    headings = set(re.findall(r'<h\d id="[\w.]*?(\w+)"', page))
    assert [name for name in txmq.__all__ if name not in headings] == ["__version__"]


def test_every_public_name_and_method_of_the_package_has_a_docstring() -> None:
    named = {name: getattr(txmq, name) for name in txmq.__all__ if name != "__version__"}
    bare = []
    for name, value in {**named, "BatchTransaction": BatchTransaction}.items():
        members = vars(value).items() if isinstance(value, type) else ()
        calls = {f"{name}.{member}": each for member, each in members if not member.startswith("_")}
        wanted = {n: c for n, c in calls.items() if callable(c) or isinstance(c, (property, classmethod, staticmethod))}  # fmt: skip
        bare += [each for each, call in {name: value, **wanted}.items() if not inspect.getdoc(call)]
    assert bare == []


@pytest.mark.slow
def test_a_page_of_the_site_requests_nothing_from_other_hosts(site: Path) -> None:
    requested = re.compile(
        r'<(?:script|img|link rel="(?:stylesheet|icon|preload)")[^>]*(?:src|href)="?(?:https?:)?//'
    )
    assert [page.name for page in site.rglob("*.html") if requested.search(page.read_text())] == []


def test_the_architecture_stays_one_read() -> None:
    assert len((ROOT / "ARCHITECTURE.md").read_text().splitlines()) < 150


def test_every_path_that_the_architecture_names_exists() -> None:
    named = re.findall(
        r"`((?:broker_core|connector|txmq|tests|docs)/[\w/.]+)`", (ROOT / "ARCHITECTURE.md").read_text()
    )
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_every_error_stands_in_the_tree_of_its_module() -> None:
    tree = errors.__doc__ or ""
    classes = [
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, errors.TxmqError)
    ]
    assert [found.__name__ for found in classes if found.__name__ not in tree] == []


def test_no_file_names_a_path_of_somebodys_machine() -> None:
    home = re.compile(r"(?<![\w.$}>-])/(?:home|root|Users|work)/\w")
    found = [f"{path.relative_to(ROOT)}: {line}" for path in SOURCES if path.suffix in _TEXT and path != Path(__file__)
             for line in path.read_text().splitlines() if home.search(line)]  # fmt: skip
    assert found == []


_TEXT = {".md", ".toml", ".py", ".sql", ""}
