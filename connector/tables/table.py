"""A table as an operation names it: a name, a path, a URL or a symbolic link.

Not here: finding it (``table_format.py``), checking rows (``delta/before/fit.py``).

Invariant: two spellings of one table have one ``location``, if the catalog and the file system can tell. An
append depends on this for one commit instead of two, never for its rows.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass

from broker_core.core.errors import OptionError

_PATH = re.compile(r"(?i)\s*delta\s*\.\s*`((?:[^`]|``)+)`\s*")
_PART = r"\s*(?:`((?:[^`]|``)+)`|(\w+))\s*"
_NAME = re.compile(rf"{_PART}(?:\.{_PART})*")
_HIGH_WATER_MARK = re.compile(r'delta\.identity\.highWaterMark\\":-?\d+')


@dataclass(frozen=True)
class Table:
    """``name``: a qualified name or a path for Spark. ``table_id``: Delta's id, "" if there is no table yet.

    ``metadata``, ``protocol``: the JSON of the log's actions; on Connect only the metadata that SQL returns.
    """

    name: str
    location: str
    table_id: str
    metadata: str = ""
    protocol: str = ""

    @property
    def exists(self) -> bool:
        return bool(self.table_id)

    @property
    def locations(self) -> set[str]:
        """Its location, and what Spark Connect took for it before the table was made: its file system is not
        known there until then, nor where the table of a name will be.
        """
        before = plain_location(self.name) if is_path(self.name) else f"name:{self.name.lower()}"
        return {self.location, self.location.removeprefix("file:"), before}

    @property
    def properties(self) -> dict[str, str]:
        """What TBLPROPERTIES says."""
        return dict(json.loads(self.metadata)["metaData"].get("configuration", {})) if self.metadata else {}

    @property
    def shape(self) -> tuple[str, ...]:
        """The properties that matter for an append, without the last value of an identity column."""
        return self.name, self.table_id, without_high_water_marks(self.metadata), self.protocol


def without_high_water_marks(action: str) -> str:
    """The JSON of an action without the last values of identity columns, which each commit changes."""
    return _HIGH_WATER_MARK.sub("", action)


def is_connect(session_or_frame: object) -> bool:
    """Whether this session or DataFrame belongs to Spark Connect."""
    return type(session_or_frame).__module__.startswith("pyspark.sql.connect")


def is_path(table: str) -> bool:
    """``lake/flights``, ``/lake/flights`` and ``s3://...`` are paths; ``flights``, ``db.flights`` and
    ``delta.`/x``` are names.
    """
    return "/" in table and "`" not in table


def in_sql(table: str) -> str:
    """The name of the table in SQL."""
    return f"delta.`{table}`" if is_path(table) else table


def path_of(spelling: str) -> str | None:
    """The path that is given, plain or as ``delta.`...```; None for a name."""
    if is_path(spelling):
        return spelling
    found = _PATH.fullmatch(spelling)
    return found[1].replace("``", "`") if found is not None else None


def name_parts(spelling: str) -> list[str]:
    """``a.`b.c``` is ["a", "b.c"]. Raises OptionError."""
    if not _NAME.fullmatch(spelling):
        raise OptionError(
            f"table {spelling!r}: neither a path (it has no '/') nor the name of a table",
            "put a part with special characters in backticks",
        )
    return [quote.replace("``", "`") or plain for quote, plain in re.findall(_PART, spelling)]


def quoted(parts: list[str]) -> str:
    """A name from its parts, with backticks where needed."""
    return ".".join(
        part if re.fullmatch(r"\w+", part, re.ASCII) else "`" + part.replace("`", "``") + "`"
        for part in parts
    )


def plain_location(url: str) -> str:
    """A normalised URL or path: ``FILE:///a//b/`` is ``file:/a/b``. Follows local symbolic links."""
    scheme, colon, rest = url.partition(":")
    if not colon or "/" in scheme:
        scheme, rest = "", url
    scheme, authority = scheme.lower(), ""
    if rest.startswith("//"):
        authority, _, rest = rest[2:].partition("/")
        rest = "/" + rest
    rest = re.sub(r"/+", "/", rest).rstrip("/") or "/"
    if scheme == "file":
        return f"file:{os.path.realpath(rest)}"
    return f"{scheme}://{authority}{rest}" if scheme else rest
