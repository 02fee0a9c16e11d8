"""A change of a table by rows: a merge, or an overwrite, as a value that the decision stores.

Not here: the clauses of a merge (``when.py``), checking it (``before/check_change.py``), doing it
(``after/make_change.py``). Pure.
Invariant: the text of a MERGE follows from the value alone, so a repetition does the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from broker_core.core.errors import OptionError
from connector.tables.table import quoted
from connector.tables.when import ORDER, Clause, When, enclosed

TARGET, SOURCE = "t", "s"  # the names of a row of the table, and of a given row


@dataclass(frozen=True)
class Merge:
    """``on``: SQL over a row of the table ``t`` and a given row ``s``; ``evolves``: it may add columns."""

    on: str
    clauses: tuple[Clause, ...]
    evolves: bool = False

    @classmethod
    def parse(
        cls,
        on: str,
        update: object = None,
        insert: object = None,
        delete: object = None,
        clauses: Sequence[object] = (),
        *,
        evolves: bool = False,
    ) -> Merge:
        """From the arguments of ``tx.merge``. Raises OptionError."""
        if not isinstance(on, str) or not on.strip():
            raise OptionError(f"merge got on={on!r}", "give SQL over t and s, such as 't.id = s.id'")
        short = list(_short(update, insert, delete))
        if bool(short) == bool(clauses):
            raise OptionError(
                "a merge has both clauses and update, insert or delete" if short else "a merge has no clause",
                "give update, insert and delete, or clauses=[When.matched().update(), ...]",
            )
        chosen: list[Clause] = []
        for clause in clauses or short:
            if not isinstance(clause, Clause):
                raise OptionError(
                    f"a merge got the clause {clause!r}", "give When.matched().update() and the like"
                )
            chosen.append(clause)
        chosen.sort(key=lambda clause: ORDER.index(clause.rows))  # stable: the order within each kind is kept
        return cls(on.strip(), tuple(chosen), bool(evolves))

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> Merge:
        """From what ``asdict`` returned."""
        return cls(stored["on"], tuple(Clause(**clause) for clause in stored["clauses"]), stored["evolves"])

    def of_columns(self, columns: Sequence[str], names: Sequence[str]) -> Merge:
        """The merge with the columns of the table by name where it sets all of them, so that a later column
        changes nothing. One that may add columns stays as it is.

        A column that the rows do not have is left alone, as an append leaves it. It is named, so that Delta
        refuses the merge, if a column of the rows is for nothing: then one of the two is misspelt.
        """
        if self.evolves:
            return self
        have = {name.lower() for name in names}
        if not all(map(self._names, have - {name.lower() for name in columns})):
            have.update(name.lower() for name in columns)
        values = {quoted([name]): f"{SOURCE}.{quoted([name])}" for name in columns if name.lower() in have}
        clauses = (replace(clause, values=values) if clause.sets_all else clause for clause in self.clauses)
        return replace(self, clauses=tuple(clauses))

    def _names(self, column: str) -> bool:
        """Whether a condition or a value may name a column of the rows."""
        texts = [self.on, *(clause.condition for clause in self.clauses)]
        texts += [sql for clause in self.clauses for sql in (clause.values or {}).values()]
        whole = rf"(?<!\w){re.escape(column)}(?!\w)"
        return any(re.search(whole, text, re.IGNORECASE) for text in texts)

    @property
    def acts_without_rows(self) -> bool:
        """Whether it has an effect even if no row is given."""
        return any(clause.rows == "NOT MATCHED BY SOURCE" for clause in self.clauses)

    def sql(self, table: str, view: str) -> str:
        """The MERGE of the rows of a view into a table, both as SQL names them."""
        evolves = "WITH SCHEMA EVOLUTION " if self.evolves else ""
        head = f"MERGE {evolves}INTO {table} AS {TARGET} USING {view} AS {SOURCE} ON {enclosed(self.on)}"
        return "\n".join([head, *(clause.sql() for clause in self.clauses)])


def _short(update: object, insert: object, delete: object) -> list[Clause]:
    """The clauses of ``update``, ``insert`` and ``delete``: a delete comes before an update."""
    found: list[Clause] = []
    if delete not in (None, False):
        found.append(When.matched("" if delete is True else delete).delete())  # type: ignore[arg-type]
    if update not in (None, False):
        found.append(When.matched().update(None if update is True else update))  # type: ignore[arg-type]
    if insert not in (None, False):
        found.append(When.not_matched().insert(None if insert is True else insert))  # type: ignore[arg-type]
    return found


@dataclass(frozen=True)
class Overwrite:
    """The rows of a table for which a condition is true are replaced (Delta's ``replaceWhere``). ``where``:
    SQL over a row of the table, true for every given row; ``options``: of the writer.
    """

    where: str
    options: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, where: str, options: Mapping[str, str]) -> Overwrite:
        """Raises OptionError."""
        if not isinstance(where, str) or not where.strip():
            raise OptionError(
                f"overwrite got where={where!r}", "give SQL over the rows to replace, 'true' for all of them"
            )
        return cls(where.strip(), dict(options))

    @property
    def acts_without_rows(self) -> bool:
        """Without rows, it deletes."""
        return True


Change = Merge | Overwrite
