"""The composition root of tables: the one module that names an implementation of
``tables/table_format.py``.
"""

from __future__ import annotations

from connector.delta.format import Delta
from connector.tables.table_format import CONFLICT_TIMEOUT_S, TableFormat


def table_format(conflict_timeout_s: float = CONFLICT_TIMEOUT_S) -> TableFormat:
    """A new object for the format of all tables. It may remember what its process has done."""
    return Delta(conflict_timeout_s)
