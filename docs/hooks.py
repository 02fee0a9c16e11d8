"""Hooks of MkDocs: the pages outside ``docs/`` and the examples are part of the site.

A page is written for its place in the repository. Its links are translated to the places of the site, so that
``mkdocs build --strict`` finds those that lead nowhere.
"""

from __future__ import annotations

import itertools
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    "README.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "CODE_OF_CONDUCT.md",
    "SECURITY.md",
    "CHANGELOG.md",
)
LISTED = (
    "examples",
    "examples/notebooks",
    "examples/production",
)  # folders that pages link and that have no README
NOTEBOOKS = "In Databricks' source format: [import the folder](docs/databricks.md#notebooks)."
EXAMPLES = ("*.md", "*.py", "*.toml", "*.yml", "*.service", "*.nft", "Containerfile")
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")


def _examples() -> Iterator[str]:
    for pattern in EXAMPLES:
        for path in (ROOT / "examples").rglob(pattern):
            yield path.relative_to(ROOT).as_posix()


def _notebooks(examples: list[str]) -> str:
    """The heading and the first paragraph of each notebook, without its set-up."""
    lines = []
    for name in examples:
        if name.startswith("examples/notebooks/") and not posixpath.basename(name).startswith("_"):
            cell = (ROOT / name).read_text().split("# COMMAND ----------")[0]
            words = [line.removeprefix("# MAGIC").strip() for line in cell.splitlines()[2:]]
            heading, _, *text = words
            about = " ".join(itertools.takewhile(bool, text))
            link = f"[{posixpath.basename(name)}]({name})"
            lines += [f"## {heading.removeprefix('# ')}", "", about, "", link, ""]
    return "\n".join(["# Notebooks", "", NOTEBOOKS, "", *lines])


def _index(folder: str, examples: list[str]) -> str:
    """The page of a folder: its files, and the folders in it."""
    if folder == "examples/notebooks":
        return _notebooks(examples)
    inside = {
        name.removeprefix(f"{folder}/").split("/")[0] for name in examples if name.startswith(f"{folder}/")
    }
    lines = [f"- [{name}]({folder}/{name})" for name in sorted(inside)]
    return "\n".join([f"# {posixpath.basename(folder).capitalize()}", "", *lines, ""])


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages of the repository's root, and the examples as they are."""
    examples = sorted(_examples())
    for name in (*PAGES, "LICENSE", *examples):
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    for folder in LISTED:
        files.append(File.generated(config, f"{folder}/index.md", content=_index(folder, examples)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The text of a page with its links as the site has them."""
    source = page.file.src_uri
    generated = source.endswith("/index.md")
    home = "." if generated else posixpath.dirname(_in_repository(source))

    def translated(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(home, link.group(1))).removeprefix("docs/")
        if (ROOT / target).is_dir():
            readme = (ROOT / target / "README.md").is_file()
            target = f"{target}/{'README' if readme else 'index'}.md"
        return posixpath.relpath(target, posixpath.dirname(source) or ".")

    return _LINK.sub(translated, markdown)


def _in_repository(source: str) -> str:
    outside = source in PAGES or source.startswith("examples/")
    return source if outside else f"docs/{source}"
