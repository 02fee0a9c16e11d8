"""A given value in the type of a column of a table, as SQL: the value, and whether it can be cast.

Delta casts the values of a MERGE as ``spark.sql.storeAssignmentPolicy`` says, not as ANSI mode does: ANSI
fails for a value that does not fit, LEGACY writes null or a part of it. Fields are taken by name.

Not here: which values a merge writes (``delta/before/merge_values.py``). Pure.
Invariant: ``value`` never fails; it is what Delta writes if ``castable`` is true.
"""

from __future__ import annotations

from pyspark.sql.types import ArrayType, DataType, MapType, StructType

from connector.sql import literal, nullable, quoted, type_in_sql


def same(given: DataType, wanted: DataType) -> bool:
    """Whether a value needs no cast."""
    return bool(nullable(given) == nullable(wanted))


def value(sql: str, given: DataType, wanted: DataType, cast: str = "try_cast", depth: int = 0) -> str:
    """SQL for a value in the type ``wanted``; ``cast`` is the function that casts what is not nested."""
    if same(given, wanted):
        return sql
    item = f"item{depth}"
    if isinstance(given, StructType) and isinstance(wanted, StructType):
        names = {field.name.lower(): field for field in given}
        fields: list[str] = []
        for field in wanted:
            have = names.get(field.name.lower())
            within = (
                value(f"{sql}.{quoted(have.name)}", have.dataType, field.dataType, cast, depth)
                if have is not None
                else f"CAST(NULL AS {type_in_sql(field.dataType)})"
            )
            fields += [literal(field.name), within]
        return f"CASE WHEN {sql} IS NOT NULL THEN named_struct({', '.join(fields)}) END"
    if isinstance(given, ArrayType) and isinstance(wanted, ArrayType):
        within = value(item, given.elementType, wanted.elementType, cast, depth + 1)
        return f"transform({sql}, {item} -> {within})"
    if isinstance(given, MapType) and isinstance(wanted, MapType):
        key = value(item, given.keyType, wanted.keyType, cast, depth + 1)
        held = value(item, given.valueType, wanted.valueType, cast, depth + 1)
        keys, values = f"transform(map_keys({sql}), {item} -> {key})", f"map_values({sql})"
        return f"map_from_arrays({keys}, transform({values}, {item} -> {held}))"
    return f"{cast}({sql} AS {type_in_sql(wanted)})"


def castable(sql: str, given: DataType, wanted: DataType, depth: int = 0) -> str:
    """SQL that is true if each value within can be cast; "" if that is always so."""
    if same(given, wanted):
        return ""
    item = f"item{depth}"
    if isinstance(given, StructType) and isinstance(wanted, StructType):
        kinds = {field.name.lower(): field.dataType for field in wanted}
        found = [
            castable(f"{sql}.{quoted(field.name)}", field.dataType, kinds[field.name.lower()], depth)
            for field in given
            if field.name.lower() in kinds
        ]
        return " AND ".join(f"({each})" for each in found if each)
    parts: list[tuple[str, DataType, DataType]] = []
    if isinstance(given, ArrayType) and isinstance(wanted, ArrayType):
        parts = [(sql, given.elementType, wanted.elementType)]
    elif isinstance(given, MapType) and isinstance(wanted, MapType):
        parts = [
            (f"map_keys({sql})", given.keyType, wanted.keyType),
            (f"map_values({sql})", given.valueType, wanted.valueType),
        ]
    else:
        return f"{sql} IS NULL OR try_cast({sql} AS {type_in_sql(wanted)}) IS NOT NULL"
    asked = [(array, castable(item, have, want, depth + 1)) for array, have, want in parts]
    return " AND ".join(
        f"({sql} IS NULL OR forall({array}, {item} -> {within}))" for array, within in asked if within
    )


def evaluated(sql: str, kind: DataType) -> str:
    """SQL that is true, and that Spark evaluates ``sql`` for: the optimizer cannot remove it."""
    text = str(kind.simpleString())
    hashed = f"to_json(struct({sql} AS x))" if "map<" in text or "variant" in text else sql
    return f"xxhash64({hashed}) <> 7046029254386353131"
