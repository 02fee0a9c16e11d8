"""The documentation is true: options, test names, code blocks and links are compared with what is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from broker_core import errors
from connector.conf import recommended_conf
from connector.options import OPTIONS, table

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
SOURCES = [
    path
    for pattern in ("*.md", "*.toml", "*.py", "Makefile", ".ci/run", "docs/**/*.md", "txmq/**/*", "broker_core/**/*", "connector/**/*",
                    "tests/**/*", "bench/**/*", "examples/**/*")
    for path in ROOT.glob(pattern)
    if path.is_file() and "__pycache__" not in path.parts
]  # fmt: skip


def _options_section() -> str:
    text = (ROOT / "docs" / "spark.md").read_text()
    return text.split("## Options", 1)[1].split("\n## ", 1)[0]


def test_the_options_table_of_the_docs_is_that_of_the_code() -> None:
    assert table() in _options_section()


def test_every_documented_option_exists() -> None:
    documented = set(re.findall(r"^\| `(\w+)` \|", _options_section(), re.MULTILINE))
    assert documented == {option.name for option in OPTIONS}


def test_every_recommended_setting_is_explained() -> None:
    text = (ROOT / "docs" / "spark.md").read_text()
    assert [name for name in recommended_conf() if f"`{name}`" not in text] == []


def test_every_test_that_the_readme_names_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "README.md").read_text())
    assert len(named) >= 15
    missing = [f"{path}::{name}" for path, name in named if not _defines(ROOT / path, name)]
    assert missing == []


def _defines(path: Path, name: str) -> bool:
    if not path.exists():
        return False
    return any(isinstance(node, ast.FunctionDef) and node.name == name for node in ast.walk(ast.parse(path.read_text())))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_every_python_block_compiles(page: Path) -> None:
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        compile(block, page.name, "exec")


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_architecture_stays_one_read() -> None:
    assert len((ROOT / "ARCHITECTURE.md").read_text().splitlines()) < 150


def test_every_path_that_the_architecture_names_exists() -> None:
    named = re.findall(r"`((?:broker_core|connector|txmq|tests|docs)/[\w/.]+)`", (ROOT / "ARCHITECTURE.md").read_text())
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_every_error_stands_in_the_tree_of_its_module() -> None:
    tree = errors.__doc__ or ""
    classes = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, errors.TxmqError)]
    assert [found.__name__ for found in classes if found.__name__ not in tree] == []


def test_no_file_names_a_path_of_somebodys_machine() -> None:
    home = re.compile(r"(?<![\w.$}>-])/(?:home|root|Users|work)/\w")
    found = [f"{path.relative_to(ROOT)}: {line}" for path in SOURCES if path.suffix in _TEXT and path != Path(__file__)
             for line in path.read_text().splitlines() if home.search(line)]  # fmt: skip
    assert found == []


_TEXT = {".md", ".toml", ".py", ".sql", ""}
