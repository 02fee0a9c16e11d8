"""``When``: the clauses of a merge, with the names and the meaning of Delta's ``DeltaMergeBuilder``.

    When.matched("s.op = 'D'").delete()
    When.matched().update({"n": "t.n + s.n"})
    When.not_matched("s.op <> 'D'").insert()
    When.not_matched_by_source("t.day < current_date()").delete()

Not here: the merge (``change.py``). Pure.
Invariant: a clause is text, so that the decision can store it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from broker_core.core.errors import OptionError
from connector.sql import quoted

Rows = Literal["MATCHED", "NOT MATCHED", "NOT MATCHED BY SOURCE"]
Action = Literal["update", "insert", "delete"]

ORDER: tuple[Rows, ...] = ("MATCHED", "NOT MATCHED", "NOT MATCHED BY SOURCE")  # in the text of a MERGE
_PART = r"(?:`(?:[^`]|``)+`|\w+)"
_FIELD = re.compile(rf"{_PART}(?:\.{_PART})*", re.ASCII)  # without backticks, SQL takes ASCII only


@dataclass(frozen=True)
class Clause:
    """What happens to some rows. ``values``: SQL by column of the table; None: every column, from the column
    of the rows with its name.
    """

    rows: Rows
    condition: str
    action: Action
    values: Mapping[str, str] | None = None

    @property
    def sets_all(self) -> bool:
        """Whether it sets every column, without their names."""
        return self.values is None and self.action != "delete"

    def sql(self) -> str:
        condition = f" AND {enclosed(self.condition)}" if self.condition else ""
        return f"WHEN {self.rows}{condition} THEN {self._action()}"

    def _action(self) -> str:
        if self.action == "delete":
            return "DELETE"
        if self.values is None:
            return "UPDATE SET *" if self.action == "update" else "INSERT *"
        # the name of a column in SQL: of a nested field too (``a.b``), and with any characters
        assignments = {
            name if _FIELD.fullmatch(name) else quoted(name): enclosed(value)
            for name, value in self.values.items()
        }
        if self.action == "insert":
            return f"INSERT ({', '.join(assignments)}) VALUES ({', '.join(assignments.values())})"
        return "UPDATE SET " + ", ".join(f"{name} = {value}" for name, value in assignments.items())


@dataclass(frozen=True)
class When:
    """The rows of a merge that satisfy ``condition`` (SQL; "" for all), where ``t`` is the row of the table
    and ``s`` the source row. ``update``, ``insert`` and ``delete`` return the clause for these rows.
    """

    rows: Rows
    condition: str = ""

    @classmethod
    def matched(cls, condition: str = "") -> When:
        """Rows of the table that match a source row."""
        return cls("MATCHED", _text("condition", condition))

    @classmethod
    def not_matched(cls, condition: str = "") -> When:
        """Source rows that match no row of the table."""
        return cls("NOT MATCHED", _text("condition", condition))

    @classmethod
    def not_matched_by_source(cls, condition: str = "") -> When:
        """Rows of the table that match no source row."""
        return cls("NOT MATCHED BY SOURCE", _text("condition", condition))

    def update(self, values: Mapping[str, str] | None = None) -> Clause:
        """Set columns of the table (name -> SQL); default: every column of the source rows. Raises
        OptionError.
        """
        if self.rows == "NOT MATCHED":
            raise OptionError("a row that the table does not have cannot be updated", "insert it")
        if self.rows == "NOT MATCHED BY SOURCE" and values is None:
            raise OptionError(
                "an update of rows that are not matched by the source names no columns",
                "give {column: expression}, because there is no row to take them from",
            )
        return Clause(self.rows, self.condition, "update", _values("update", values))

    def insert(self, values: Mapping[str, str] | None = None) -> Clause:
        """Insert the row (name of a column -> SQL); default: every column of the source rows. Raises
        OptionError.
        """
        if self.rows != "NOT MATCHED":
            raise OptionError(
                "only a row that the table does not have can be inserted", "use When.not_matched"
            )
        return Clause(self.rows, self.condition, "insert", _values("insert", values))

    def delete(self) -> Clause:
        """Delete the row of the table. Raises OptionError."""
        if self.rows == "NOT MATCHED":
            raise OptionError("a row that the table does not have cannot be deleted", "use When.matched")
        return Clause(self.rows, self.condition, "delete")


def enclosed(sql: str) -> str:
    """An expression within a longer text; it may end with a comment."""
    return f"({sql}\n)"


def _text(what: str, value: object) -> str:
    if not isinstance(value, str):
        raise OptionError(
            f"{what} is {value!r}, not SQL", "give text: the decision stores it, and a Column is not text"
        )
    return value.strip()


def _values(action: str, pairs: Mapping[str, str] | None) -> Mapping[str, str] | None:
    if pairs is None:
        return None
    if not isinstance(pairs, Mapping) or not pairs:
        raise OptionError(f"{action} sets {pairs!r}", "give {column: expression}, or nothing for all columns")
    values = {str(name): _text(f"{action} of column {name!r}", value) for name, value in pairs.items()}
    for name, text in values.items():
        if not text:
            raise OptionError(f"{action} of column {name!r} has no expression", "give SQL, such as 's.name'")
    return values
