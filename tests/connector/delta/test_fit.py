"""What fits into a Delta table, decided without a session; that Delta agrees is shown with real tables
elsewhere.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from pyspark.sql.types import (
    ArrayType,
    IntegerType,
    LongType,
    MapType,
    NullType,
    ShortType,
    StringType,
    StructField,
    StructType,
)

from broker_core.core.errors import OptionError
from connector.delta.before.fit import Shape, asserting, check_columns, check_void, fit
from connector.sql import literal, nullable, quoted


def schema(**columns: Any) -> StructType:
    return StructType([StructField(name, kind) for name, kind in columns.items()])


def column(name: str, kind: Any, nullable: bool = True, **metadata: Any) -> StructField:
    return StructField(name, kind, nullable, metadata)


def known(*columns: StructField, partitions: tuple[str, ...] = (), **configuration: str) -> Shape:
    return Shape(StructType(list(columns)), partitions, configuration)


def test_only_texts_that_name_directories_of_a_disk_are_asked_whether_they_can() -> None:
    rows = schema(n=IntegerType(), v=StringType())

    def asked(location: str, **configuration: str) -> list[str]:
        told = {"schemaString": rows.json(), "partitionColumns": ["v", "n"], "configuration": configuration}
        held = Shape.of(json.dumps({"metaData": told}), location)
        return [told for _, told in fit("t", rows, held, (), merges=False).conditions]

    for location in ("file:/lake/t", "hdfs://host/t"):
        (told,) = asked(location)
        assert "partition column 'v'" in told and "more than 253 bytes" in told
        for name, value in {
            "delta.columnMapping.mode": "name",
            "delta.randomizeFilePrefixes": "true",
        }.items():
            assert asked(location, **{name: value}) == []
    assert asked("s3://bucket/t") == []


A, AB = schema(a=IntegerType()), schema(a=IntegerType(), b=IntegerType())


@pytest.mark.parametrize(
    ("given", "held", "told"),
    [
        (schema(v=StringType()), known(column("v", IntegerType())), "'v' is string, not int: cast it"),
        (
            schema(v=IntegerType(), x=IntegerType()),
            known(column("v", IntegerType())),
            "no column 'x': drop it, or set mergeSchema=True",
        ),
        (schema(s=AB), known(column("s", A)), "'s' is struct<a:int,b:int>"),
        (schema(s=ArrayType(AB)), known(column("s", ArrayType(A))), "cast it"),
        (
            schema(s=MapType(StringType(), LongType())),
            known(column("s", MapType(StringType(), IntegerType()))),
            "cast it",
        ),
        (
            schema(v=IntegerType()),
            known(column("v", IntegerType()), column("w", IntegerType(), False)),
            "NOT NULL column 'w' is not in the DataFrame",
        ),
        (
            schema(v=LongType()),
            known(
                column(
                    "v",
                    LongType(),
                    **{"delta.identity.start": 1, "delta.identity.allowExplicitInsert": False},
                )
            ),
            "GENERATED ALWAYS AS IDENTITY: leave it out",
        ),
    ],
)
def test_what_cannot_fit_is_refused_with_the_way_out(given: StructType, held: Shape, told: str) -> None:
    with pytest.raises(OptionError, match=told.replace("(", r"\(")):
        fit("t", given, held, [], merges=False)


def test_another_partitioning_than_the_tables_is_refused_and_its_own_is_not() -> None:
    held = known(column("v", IntegerType()), column("p", IntegerType()), partitions=("p",))
    given = schema(v=IntegerType(), p=IntegerType())
    for own in ([], ["p"], ["P"]):
        fit("t", given, held, own, merges=False)
    for other in (["v"], ["p", "v"]):
        with pytest.raises(OptionError, match="the table is partitioned by p: leave partitionBy out"):
            fit("t", given, held, other, merges=False)


def test_columns_that_delta_never_takes_are_refused() -> None:
    doubled = StructType(
        [
            StructField(
                "s", ArrayType(StructType([StructField("a", IntegerType()), StructField("A", IntegerType())]))
            )
        ]
    )
    with pytest.raises(OptionError, match=r"column 's\.a' occurs twice"):
        check_columns("t", doubled, [])
    for kind in (MapType(StringType(), NullType()), NullType()):
        with pytest.raises(OptionError, match=r"'m' has type .*void.*: cast it"):
            check_void("t", schema(m=kind), A)
    with pytest.raises(OptionError, match="partitionBy names column 'q'"):
        check_columns("t", A, ["q"])
    with pytest.raises(OptionError, match="has no columns"):
        check_columns("t", StructType(), [])


def test_a_column_without_a_type_takes_that_of_the_table() -> None:
    check_void("t", schema(A=NullType()), A)
    assert fit("t", schema(A=NullType()), Shape(A), [], merges=False).columns == {"a": "CAST(`A` AS int)"}
    with pytest.raises(OptionError, match="has type array<void>"):
        check_void("t", schema(a=ArrayType(NullType())), schema(a=ArrayType(IntegerType())))


def test_a_narrower_integer_is_cast_only_where_the_value_is_checked() -> None:
    found = fit(
        "t",
        schema(V=LongType(), w=ShortType()),
        known(column("v", IntegerType()), column("w", LongType())),
        [],
        merges=False,
    )
    assert found.columns["v"].startswith(
        "CASE WHEN `V` IS NULL OR `V` BETWEEN -2147483648L AND 2147483647L THEN CAST(`V` AS int)"
    )
    assert "[TXMQ_OPTION]" in found.columns["v"] and found.columns["w"] == "CAST(`w` AS bigint)"
    assert found.conditions == ()


def test_every_promise_of_the_table_becomes_a_condition_on_each_row() -> None:
    inner = StructType([StructField("n", IntegerType(), False)])
    held = known(
        column("v", IntegerType(), False),
        column("c", StringType(), __CHAR_VARCHAR_TYPE_STRING="varchar(3)"),
        column("g", IntegerType(), **{"delta.generationExpression": "v + 1"}),
        column("h", IntegerType(), **{"delta.generationExpression": "v * 2"}),
        column("s", ArrayType(inner, False)),
        column(
            "i", IntegerType(), **{"delta.invariants": json.dumps({"expression": {"expression": "i > 0"}})}
        ),
        column("m", StringType()),
        **{"delta.constraints.pos": "v > 0", "delta.appendOnly": "true"},
    )
    given = schema(v=IntegerType(), c=StringType(), g=IntegerType(), s=ArrayType(inner), i=IntegerType())
    found = fit("t", given, held, [], merges=False)
    assert [sql for sql, _ in found.conditions] == [
        "`v` IS NOT NULL",
        "`c` IS NULL OR length(`c`) <= 3",
        "`g` <=> (v + 1)",
        "`s` IS NULL OR forall(`s`, item0 -> item0 IS NOT NULL)",
        "`s` IS NULL OR forall(`s`, item0 -> item0 IS NULL OR (item0.`n` IS NOT NULL))",
        "i > 0",
        "xxhash64(CAST((v * 2) AS int)) <> 7046029254386353131",
        "v > 0",
    ]
    assert found.beside == {"h": "CAST((v * 2) AS int)", "m": "CAST(NULL AS string)"}


def test_odd_names_and_texts_are_quoted() -> None:
    assert quoted("a`b") == "`a``b`" and literal("it's \\ so") == "'it\\'s \\\\ so'"
    assert asserting("v", []) == "`v`"
    assert asserting("v", [("v > 0", "no")]).startswith(
        "CASE WHEN NOT coalesce((v > 0), false) THEN raise_error('[TXMQ_OPTION] no')"
    )
    assert (
        nullable(StructType([StructField("a", ArrayType(IntegerType(), False), False)])).simpleString()
        == "struct<a:array<int>>"
    )


def test_a_nested_column_that_is_not_given_is_null_also_with_odd_names() -> None:
    nested = StructType([StructField("a.b", ArrayType(IntegerType()))])
    held = Shape(StructType([StructField("n", IntegerType()), StructField("v", nested)]))
    found = fit("t", StructType([StructField("n", IntegerType())]), held, (), merges=False)
    assert found.beside == {"v": "CAST(NULL AS STRUCT<`a.b`: ARRAY<int>>)"}
