"""Names, literals and types of Spark as SQL text, and types without NOT NULL. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

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


def arrays(sql: str, kind: DataType) -> list[tuple[str, DataType, bool]]:
    """SQL of the arrays in an array or a map, the types of their elements, and whether these may be null."""
    if isinstance(kind, ArrayType):
        return [(sql, kind.elementType, kind.containsNull)]
    if not isinstance(kind, MapType):
        return []
    values = f"map_values({sql})", kind.valueType, kind.valueContainsNull
    return [(f"map_keys({sql})", kind.keyType, True), values]


def inner_types(kind: DataType) -> list[DataType]:
    """The types of the fields, or of the elements."""
    if isinstance(kind, StructType):
        return [field.dataType for field in kind]
    return [element for _, element, _ in arrays("", kind)]


def has(kind: DataType, *types: type[DataType]) -> bool:
    """Whether a type is one of ``types``, or has one within."""
    return isinstance(kind, types) or any(has(each, *types) for each in inner_types(kind))


def mapped(kind: Type, change: Callable[[Any], DataType]) -> Type:
    """The type, or the schema, without NOT NULL within, and with each type changed that is not nested."""
    found: DataType
    if isinstance(kind, StructType):
        found = StructType([StructField(f.name, mapped(f.dataType, change), True, f.metadata) for f in kind])
    elif isinstance(kind, ArrayType):
        found = ArrayType(mapped(kind.elementType, change), True)
    elif isinstance(kind, MapType):
        found = MapType(mapped(kind.keyType, change), mapped(kind.valueType, change), True)
    else:
        found = change(kind)
    return cast(Type, found)


def nullable(kind: Type) -> Type:
    """The type, or the schema, without NOT NULL within, which staged rows do not have."""
    return mapped(kind, lambda simple: simple)
