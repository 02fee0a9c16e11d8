"""The recipes of docs/after_commit.md, run as they stand there.

Not here: what they write to (``targets.py``).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[2] / "docs" / "after_commit.md"
ADDRESS = {"to_postgres": "POSTGRES", "to_http": "API"}  # recipe -> the name of its address in the page


def recipe(name: str, address: str) -> Callable[..., None]:
    """The function of the page."""
    (block,) = [block for block in _blocks("python") if f"def {name}(" in block]
    names: dict[str, Any] = {ADDRESS[name]: address}
    exec(compile(block, PAGE.name, "exec"), names)
    made: Callable[..., None] = names[name]
    return made


def statements() -> list[str]:
    """The SQL of the page."""
    return [statement for block in _blocks("sql") for statement in block.split(";") if statement.strip()]


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)
