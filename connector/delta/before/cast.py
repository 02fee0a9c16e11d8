"""A given value in the type of a column of a table, as SQL: the value, and whether it can be cast.

Delta casts the values of a MERGE as ``spark.sql.storeAssignmentPolicy`` says, not as ANSI mode does: ANSI
fails for a value that does not fit, LEGACY writes null or a part of it. Fields are taken by name.

Not here: which values a merge writes (``delta/before/merge_values.py``). Pure.
Invariant: ``value`` never fails; it is what Delta writes if ``castable`` is true.
"""

from __future__ import annotations

from pyspark.sql.types import ArrayType, DataType, MapType, StructType

from connector.sql import arrays, inner_types, literal, nullable, quoted, type_in_sql


def same(source: DataType, target: DataType) -> bool:
    """Whether a value needs no cast."""
    return bool(nullable(source) == nullable(target))


def value(sql: str, source: DataType, target: DataType, cast: str = "try_cast", depth: int = 0) -> str:
    """SQL for a value in the type ``target``; ``cast`` is the function that casts what is not nested."""
    if same(source, target):
        return sql
    item = f"item{depth}"
    if isinstance(source, StructType) and isinstance(target, StructType):
        names = {field.name.lower(): field for field in source}
        fields: list[str] = []
        for field in target:
            have = names.get(field.name.lower())
            inner = (
                value(f"{sql}.{quoted(have.name)}", have.dataType, field.dataType, cast, depth)
                if have is not None
                else f"CAST(NULL AS {type_in_sql(field.dataType)})"
            )
            fields += [literal(field.name), inner]
        return f"CASE WHEN {sql} IS NOT NULL THEN named_struct({', '.join(fields)}) END"
    if isinstance(source, ArrayType) and isinstance(target, ArrayType):
        element = value(item, source.elementType, target.elementType, cast, depth + 1)
        return f"transform({sql}, {item} -> {element})"
    if isinstance(source, MapType) and isinstance(target, MapType):
        key = value(item, source.keyType, target.keyType, cast, depth + 1)
        items = value(item, source.valueType, target.valueType, cast, depth + 1)
        keys, values = f"transform(map_keys({sql}), {item} -> {key})", f"map_values({sql})"
        return f"map_from_arrays({keys}, transform({values}, {item} -> {items}))"
    return f"{cast}({sql} AS {type_in_sql(target)})"


def castable(sql: str, source: DataType, target: DataType, depth: int = 0) -> str:
    """SQL that is true if each value within can be cast; "" if that is always so."""
    if same(source, target):
        return ""
    item = f"item{depth}"
    if isinstance(source, StructType) and isinstance(target, StructType):
        kinds = {field.name.lower(): field.dataType for field in target}
        found = [
            castable(f"{sql}.{quoted(field.name)}", field.dataType, kinds[field.name.lower()], depth)
            for field in source
            if field.name.lower() in kinds
        ]
        return " AND ".join(f"({each})" for each in found if each)
    parts = arrays(sql, source)
    if not parts or type(source) is not type(target):
        return f"{sql} IS NULL OR try_cast({sql} AS {type_in_sql(target)}) IS NOT NULL"
    return " AND ".join(
        f"({sql} IS NULL OR forall({array}, {item} -> {condition}))"
        for (array, have, _), want in zip(parts, inner_types(target), strict=True)
        if (condition := castable(item, have, want, depth + 1))
    )


def evaluated(sql: str, kind: DataType) -> str:
    """SQL that is true, and that Spark evaluates ``sql`` for: the optimizer cannot remove it."""
    text = str(kind.simpleString())
    hashed = f"to_json(struct({sql} AS x))" if "map<" in text or "variant" in text else sql
    return f"xxhash64({hashed}) <> 7046029254386353131"
