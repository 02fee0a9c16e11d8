"""Which test proves which sentence of the pages: ``claims.tsv`` has the page, the words, and the test.

``python -m tests.claims`` moves the names of tests that pages cite, in parentheses or in a column ``test``, into that file:
a page is for its readers, and ``tests/test_docs.py`` checks that each claim is on its page and that its test exists.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "tests" / "claims.tsv"
_TEST = r"`(?:tests/[\w/]+\.py|test_\w+(?:\.py)?)(?:::\w+)?`"
_CITED = re.compile(rf"\s*\({_TEST}(?:,?\s+(?:and\s+)?{_TEST})*\)")
_TAIL = 90  # characters of the end of a sentence that find it again


class Claim(NamedTuple):
    page: str
    words: str  # as on the page, with single spaces
    test: str  # path::name, or a path


def claims() -> list[Claim]:
    return [Claim(*line.split("\t")) for line in FILE.read_text().splitlines()] if FILE.exists() else []


def plain(text: str) -> str:
    return " ".join(text.split())


def pages() -> list[Path]:
    return sorted((ROOT / "docs").glob("*.md"))


def _path_of(cited: str) -> str:
    """``path::name`` of a test that a page cites by its name, its file, or both."""
    cited = cited.strip("`")
    if cited.startswith("tests/"):
        return cited
    if cited.endswith(".py"):
        return str(max((ROOT / "tests").rglob(cited)).relative_to(ROOT))
    paths = [path for path in (ROOT / "tests").rglob("test_*.py") if f"def {cited}(" in path.read_text()]
    return f"{min(paths).relative_to(ROOT)}::{cited}"


def _without_columns(page: str, lines: list[str], found: list[Claim]) -> list[str]:
    """The lines of a page without the columns of tests in its tables."""
    kept, inside, above = [], False, ""
    for line in lines:
        row = line.startswith("|")
        if row and re.search(r"\| tests? \|$", line):
            inside = True
        inside = inside and row
        if not inside:
            kept.append(line)
            continue
        before, _, cell = line.rstrip().removesuffix("|").rpartition("|")
        cell = above if cell.strip() == '"' else cell
        above = cell
        words = max(before.strip("| ").split(" | ")[:2], key=len).strip()
        found += [Claim(page, plain(words), _path_of(test)) for test in re.findall(_TEST, cell)]
        kept.append(before.rstrip() + " |" if before.strip() else "|")
    return kept


def _paragraphs(lines: list[str]) -> list[list[str]]:
    """Lines that are filled together; what is not prose stays as it is, a line each."""
    groups: list[list[str]] = []
    code = False
    for line in lines:
        code ^= line.lstrip().startswith("```")
        prose = line.strip() and not code and not line.lstrip().startswith(("|", "#", "```", "<!--", "!["))
        begins = re.match(r"\s*(?:[-*]|\d+\.) ", line)
        if prose and groups and groups[-1] and not begins and groups[-1][0] != "":
            groups[-1].append(line)
        elif prose:
            groups.append([line])
        else:
            groups += [["", line], []]
    return [group for group in groups if group]


def _without_names(page: str, group: list[str], found: list[Claim]) -> list[str]:
    if group[0] == "" and not group[1].startswith("|"):
        return group[1:]
    text = "\n".join(line for line in group if group[0] or line)
    if not _CITED.search(text):
        return text.split("\n")
    while cited := _CITED.search(text):
        sentence = re.split(r"(?<=[.:;|])\s|^\s*(?:[-*]|\d+\.)\s", plain(text[: cited.start()]))[-1].strip(
            "| "
        )
        words = sentence if len(sentence) <= _TAIL else sentence[-_TAIL:].partition(" ")[2]
        found += [Claim(page, words, _path_of(test)) for test in re.findall(_TEST, cited.group())]
        text = text[: cited.start()] + text[cited.end() :]
    if text.startswith("|"):
        return [text]
    marker = re.match(r"\s*(?:[-*]\s+|\d+\.\s+)?", text)
    assert marker
    later = text.split("\n")[1:]
    indent = re.match(r"\s*", later[0]).group() if later else " " * len(marker.group())  # type: ignore[union-attr]
    return textwrap.wrap(
        plain(text[marker.end() :]), 140, initial_indent=marker.group(), subsequent_indent=indent,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def main() -> None:
    known = claims()
    for path in pages():
        page, text = str(path.relative_to(ROOT)), path.read_text()
        found: list[Claim] = []
        lines = _without_columns(page, text.rstrip("\n").split("\n"), found)
        lines = [line for group in _paragraphs(lines) for line in _without_names(page, group, found)]
        if found:
            path.write_text("\n".join(lines) + "\n")
            known += found
    FILE.write_text("".join("\t".join(claim) + "\n" for claim in dict.fromkeys(known)))


if __name__ == "__main__":
    main()
