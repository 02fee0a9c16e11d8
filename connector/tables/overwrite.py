"""An overwrite: the rows of a table for which a condition is true are replaced (Delta's ``replaceWhere``).

Not here: checking and staging it (``before/check_change.py``), doing it (``after/make_change.py``). Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from broker_core.core.errors import OptionError


@dataclass(frozen=True)
class Overwrite:
    """``where``: SQL over a row of the table, true for every given row; ``options``: of the writer."""

    where: str
    options: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def made(cls, where: str, options: Mapping[str, str]) -> Overwrite:
        """Raises OptionError."""
        if not isinstance(where, str) or not where.strip():
            raise OptionError(
                f"overwrite got where={where!r}", "give SQL over the rows to replace, 'true' for all of them"
            )
        return cls(where.strip(), dict(options))

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> Overwrite:
        """From what ``to_json`` returned."""
        return cls(stored["where"], dict(stored["options"]))

    def to_json(self) -> dict[str, object]:
        """As JSON."""
        return {"where": self.where, "options": dict(self.options)}

    @property
    def acts_without_rows(self) -> bool:
        """Without rows, it deletes."""
        return True
