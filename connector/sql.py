"""Names, literals and types of Spark as SQL text, and types without NOT NULL. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar, cast

from pyspark.sql.types import ArrayType, DataType, MapType, StructField, StructType

Type = TypeVar("Type", bound=DataType)


def quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def plain(names: Iterable[str]) -> bool:
    """Whether a name is the same where it is read as a path of fields (``a.b``)."""
    return all(name.replace("_", "").isalnum() for name in names)


def type_in_sql(kind: DataType) -> str:
    """A type in SQL, with the names of its fields in backticks."""
    if isinstance(kind, StructType):
        return f"STRUCT<{', '.join(f'{quoted(f.name)}: {type_in_sql(f.dataType)}' for f in kind)}>"
    if isinstance(kind, ArrayType):
        return f"ARRAY<{type_in_sql(kind.elementType)}>"
    if isinstance(kind, MapType):
        return f"MAP<{type_in_sql(kind.keyType)}, {type_in_sql(kind.valueType)}>"
    return str(kind.simpleString())


def literal(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def has(kind: DataType, *types: type[DataType]) -> bool:
    """Whether a type is one of ``types``, or has one within."""
    if isinstance(kind, StructType):
        return any(has(column.dataType, *types) for column in kind)
    if isinstance(kind, ArrayType):
        return has(kind.elementType, *types)
    if isinstance(kind, MapType):
        return has(kind.keyType, *types) or has(kind.valueType, *types)
    return isinstance(kind, types)


def nullable(kind: Type) -> Type:
    """The type, or the schema, without NOT NULL within, which staged rows do not have."""
    found: DataType = kind
    if isinstance(kind, StructType):
        found = StructType([StructField(f.name, nullable(f.dataType), True, f.metadata) for f in kind])
    elif isinstance(kind, ArrayType):
        found = ArrayType(nullable(kind.elementType), True)
    elif isinstance(kind, MapType):
        found = MapType(nullable(kind.keyType), nullable(kind.valueType), True)
    return cast(Type, found)
