"""Every type of Spark in every operation on a table: what the check before the decision lets pass, Delta takes;
what it refuses, plain Delta refuses too; and the table is what a plain write of the same rows makes of it.

Not here: the values (``values.py``), clauses and expressions of a merge (``test_merge_values.py``).
"""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame

from broker_core.core.errors import OptionError, cause
from connector.batch.foreach_batch import BatchTransaction, transactional
from connector.sql import quoted
from tests.spark.conftest import settings
from tests.spark.query_thread import query_thread, write_checkpoint
from tests.spark.values import (
    NAMES,
    PLAIN,
    Column,
    Kind,
    columns,
    in_another_type,
    needed,
    partitions,
    select,
)

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("planned_once")]

# What txmq refuses and plain Delta does not: docs/foreach_batch.md names each
DOCUMENTED = r"void cannot be written|which Spark cannot give to Python"

Act = Callable[[BatchTransaction, DataFrame, str], None]
Plain = Callable[[DataFrame, str], None]


@dataclass(frozen=True)
class Operation:
    """An operation of ``tx``, and the same of plain Delta; on a table by its path."""

    told: str
    ours: Act
    plain: Plain


def merged(rows: DataFrame, table: str, on: str, clauses: str, schema: str = "") -> None:
    rows.createOrReplaceTempView("given_values")
    sql = f"MERGE {schema} INTO delta.`{table}` AS t USING given_values AS s ON {on} {clauses}"
    rows.sparkSession.sql(sql).collect()


def append(**options: Any) -> Operation:
    def plain(rows: DataFrame, table: str) -> None:
        chosen = dict(options)
        writer = rows.write.format("delta").mode("append").partitionBy(*chosen.pop("partitionBy", []))
        writer.options(**chosen).save(table)

    return Operation(f"append {options}", lambda tx, rows, table: tx.append(rows, table, **options), plain)


def merge_all(on: str = "t.id = s.id", schema: bool = False) -> Operation:
    return Operation(
        f"merge all on {on}, schema {schema}",
        lambda tx, rows, table: tx.merge(rows, table, on, update=True, insert=True, merge_schema=schema),
        lambda rows, table: merged(
            rows,
            table,
            on,
            "WHEN MATCHED THEN UPDATE SET * WHEN NOT MATCHED THEN INSERT *",
            "WITH SCHEMA EVOLUTION" if schema else "",
        ),
    )


def merge_named(names: Sequence[str]) -> Operation:
    values = {quoted(name): f"s.{quoted(name)}" for name in names}
    update = ", ".join(f"{name} = {value}" for name, value in values.items())
    insert = f"INSERT (id, {', '.join(values)}) VALUES (s.id, {', '.join(values.values())})"
    return Operation(
        "merge named",
        lambda tx, rows, table: tx.merge(
            rows, table, "t.id = s.id", update=values, insert={"id": "s.id", **values}
        ),
        lambda rows, table: merged(
            rows,
            table,
            "t.id = s.id",
            f"WHEN MATCHED THEN UPDATE SET {update} WHEN NOT MATCHED THEN {insert}",
        ),
    )


def delete(on: str) -> Operation:
    return Operation(
        f"delete on {on}",
        lambda tx, rows, table: tx.delete(rows, table, on),
        lambda rows, table: merged(rows, table, on, "WHEN MATCHED THEN DELETE"),
    )


def overwrite(where: str) -> Operation:
    return Operation(
        f"overwrite where {where}",
        lambda tx, rows, table: tx.overwrite(rows, table, where),
        lambda rows, table: (
            rows.write.format("delta").mode("overwrite").option("replaceWhere", where).save(table)
        ),
    )


# -- one operation -------------------------------------------------------------------------------------------


class Bench:
    """Tables in pairs: one for txmq, one for plain Delta."""

    def __init__(self, rig: Any, directory: Path) -> None:
        self.rig, self.spark, self.directory = rig, rig.spark, directory
        self._number = 0

    def new_tables(self) -> tuple[str, str]:
        """Two places without a table."""
        self._number += 1
        place = self.directory / f"table-{self._number}"
        return str(place), f"{place}-plain"

    def tables(
        self, held: Sequence[Column], more: str = "", *, vectors: bool = False, mapped: bool = True
    ) -> tuple[str, str]:
        """Two tables with the same two rows; ``vectors``: with deletion vectors; ``mapped``: any name is a column,
        and partitions are no directories.
        """
        place, _ = self.new_tables()
        ddl = ", ".join(["id INT", *(each.ddl for each in held)])
        mode = "name" if mapped else "none"
        properties = {"columnMapping.mode": mode, "enableDeletionVectors": str(vectors).lower()}
        told = ", ".join(f"'delta.{name}' = '{value}'" for name, value in properties.items())
        self.spark.sql(f"CREATE TABLE delta.`{place}` ({ddl}) USING delta {more} TBLPROPERTIES ({told})")
        names = ", ".join(["id", *(quoted(each.name) for each in held)])
        self.spark.sql(f"INSERT INTO delta.`{place}` ({names}) {select(held, before=True)}")
        shutil.copytree(place, f"{place}-plain")
        return place, f"{place}-plain"

    def decide(self, operation: Operation, rows: DataFrame, table: str) -> None:
        """In a micro-batch of its own, of a new app. Raises what the query would end with."""
        self._number += 1
        app = f"app-{self._number}"
        each = transactional(
            lambda _batch, tx: operation.ours(tx, rows, table),
            url=self.rig.broker.url,
            app_id=app,
            checkpoint=write_checkpoint(self.rig.directory / f"checkpoint of {app}", app),
        )
        try:
            with query_thread(self.spark, app):
                each(self.spark.range(1), 0)
        finally:
            entry = self.rig.broker.engine.last_entry(app)
            self.decided, self.applied = entry is not None, entry is not None and entry.applied

    def contents(self, tables: Sequence[str]) -> list[list[str]]:
        """The rows of each table as sorted texts."""
        frames = []
        for number, table in enumerate(tables):
            frame = self.spark.read.format("delta").load(table)
            frames.append(frame.selectExpr(f"{number} AS number", "hex(CAST(struct(*) AS STRING)) AS row"))
        found = frames[0].unionByName(frames[1]).collect()
        texts = [
            (row["number"], bytes.fromhex(row["row"]).decode(errors="backslashreplace")) for row in found
        ]
        return [sorted(text for of, text in texts if of == number) for number in (0, 1)]

    def schemas(self, tables: Sequence[str]) -> list[Any]:
        return [
            _bare(json.loads(self.spark.read.format("delta").load(table).schema.json())) for table in tables
        ]


def _bare(told: Any) -> Any:
    """A schema without the numbers of its columns."""
    if isinstance(told, dict):
        return {name: _bare(value) for name, value in told.items() if "columnMapping" not in name}
    return [_bare(each) for each in told] if isinstance(told, list) else told


def failure(act: Callable[[], None]) -> Exception | None:
    try:
        act()
    except Exception as error:
        return error
    return None


def compared(bench: Bench, operation: Operation, sql: str, tables: tuple[str, str], told: str) -> str:
    """``taken`` or ``refused``, by both. Fails if txmq and plain Delta differ."""
    told = f"{operation.told}, {told}"
    rows = bench.spark.sql(sql).coalesce(1)
    plain = failure(lambda: operation.plain(rows, tables[1]))
    ours = failure(lambda: bench.decide(operation, rows, tables[0]))
    if ours is not None:
        found = cause(ours)
        assert not bench.decided, f"passed the check and failed: {str(found or ours)[:800]}: {told}"
        assert isinstance(found, OptionError), f"no clear error: {str(ours)[:800]}: {told}"
        assert tables[0] in str(found), f"the error does not name the table: {found}: {told}"
        assert plain or re.search(DOCUMENTED, str(found)), f"refused without need: {found}: {told}"
        return "refused"
    assert bench.applied
    assert plain is None, f"plain Delta refuses: {str(plain)[:800]}: {told}"
    found_rows, wanted = bench.contents(tables)
    assert found_rows == wanted, f"other rows: {set(found_rows) ^ set(wanted)}: {told}"
    assert len(set(map(str, bench.schemas(tables)))) == 1, f"another schema: {told}"
    return "taken"


# -- random rows ---------------------------------------------------------------------------------------------

ROWS = 4


def operations(choice: random.Random, held: Sequence[Column]) -> Operation:
    """Of an existing table with these columns."""
    one = choice.choice(held)
    name, names = quoted(one.name), [each.name for each in held]
    same = f"t.{name} {choice.choice(['=', '<=>'])} s.{name}"
    comparable = not re.search("MAP|VARIANT", one.held.ddl)
    on = same if comparable else "t.id = s.id"
    value = one.before[0] if comparable else "1"
    where = f"{name} <=> {value}" if comparable else "id <=> 1"
    return choice.choice([
        append(), append(), append(dataChange="true"), append(mergeSchema="true"),
        merge_all(), merge_all(f"t.id = s.id AND {on}"), merge_all(schema=True), merge_named(names),
        delete(on), overwrite("true"), overwrite(f"id >= 1 AND (true OR {where})"),
    ])  # fmt: skip


COMPILED = {"spark.sql.codegen.wholeStage": "true", "spark.sql.codegen.factoryMode": "FALLBACK"}
BY_HAND = {"spark.sql.codegen.wholeStage": "false", "spark.sql.codegen.factoryMode": "NO_CODEGEN"}


def try_once(bench: Bench, seed: int) -> str:
    """Either many columns with values of their types, or three, of which the last is given in another type."""
    choice = random.Random(seed)
    other = choice.random() < 0.5
    held = columns(choice, 3 if other else 16, ROWS)
    told, chosen = held, {}
    if other:
        held[-1] = in_another_type(choice, held[-1])
        told = held[-1:]
    operation = operations(choice, told)
    if choice.random() < 0.3:
        chosen = {
            "spark.sql.ansi.enabled": choice.choice(["true", "false"]),
            "spark.sql.storeAssignmentPolicy": choice.choice(["ANSI", "LEGACY", "STRICT"]),
        }
    text = "\n".join(f"{each.ddl} <- {each.given.ddl}: {each.values}" for each in told)[:2000]
    with settings(bench.spark, chosen):
        return compared(bench, operation, select(held), bench.tables(held), f"{seed=} {chosen}\n{text}")


def try_table(bench: Bench, seed: int) -> str:
    """Tables that are new, partitioned, with columns that are NOT NULL or with deletion vectors; compiled or not."""
    choice = random.Random(seed)
    names = choice.choice([NAMES, PLAIN])
    held = columns(choice, 5, ROWS, names=names)
    by = [each.name for each in held if partitions(each) and choice.random() < 0.3][:2]
    ansi = {"spark.sql.ansi.enabled": choice.choice(["true", "false"])}
    with settings(bench.spark, {**choice.choice([COMPILED, BY_HAND]), **ansi}):
        if choice.random() < 0.25:
            text, tables = f"new table by {by}", bench.new_tables()
            options = {"partitionBy": by} if by else {}
            operation = append(**options, **choice.choice([{}, {"dataChange": "true"}]))
        else:
            if choice.random() < 0.5:
                held[0] = needed(choice, held[0])
            if choice.random() < 0.5:
                held[-1] = in_another_type(choice, held[-1])
            vectors, mapped = choice.random() < 0.5, names is NAMES or choice.random() < 0.3
            more = f"PARTITIONED BY ({', '.join(map(quoted, by))})" if by else ""
            tables = bench.tables(held, more, vectors=vectors, mapped=mapped)
            text, operation = f"{more}, {vectors=}, {mapped=}", operations(choice, held)
        text += "\n".join(f"{each.ddl} <- {each.given.ddl}: {each.values}" for each in held)[:3000]
        return compared(bench, operation, select(held), tables, f"{seed=} {ansi}\n{text}")


@pytest.fixture
def bench(rig: Any, tmp_path: Path) -> Bench:
    return Bench(rig, tmp_path)


def require_both(outcomes: Iterable[str]) -> None:
    """Tries until something was taken and something refused; ``soak`` goes on."""
    found: set[str] = set()
    for outcome in outcomes:
        found.add(outcome)
        if len(found) == 2:
            return
    raise AssertionError(f"only {found}")


def test_what_is_written_of_any_type_is_what_plain_delta_writes(bench: Bench) -> None:
    require_both(try_once(bench, seed) for seed in (3, 4, 6, 10))


@pytest.mark.soak
def test_what_is_written_of_any_type_is_what_plain_delta_writes_soak(
    bench: Bench, rounds: int, seed: int
) -> None:
    for number in range(rounds):
        try_once(bench, seed + number)


@pytest.mark.soak  # test_append_files.py has the kinds of tables, the test above the types
def test_every_kind_of_table_takes_what_plain_delta_takes(bench: Bench) -> None:
    require_both(try_table(bench, seed) for seed in (1, 2, 3, 4))


@pytest.mark.soak
def test_every_kind_of_table_takes_what_plain_delta_takes_soak(bench: Bench, rounds: int, seed: int) -> None:
    for number in range(rounds):
        try_table(bench, seed + number)


@pytest.mark.soak
@pytest.mark.parametrize("operation", [append(), append(dataChange="true"), merge_all(), overwrite("true")])
def test_a_thousand_columns_are_written_as_plain_delta_writes_them(
    bench: Bench, operation: Operation, seed: int
) -> None:
    held = columns(random.Random(seed), 1_000, 2, depths=(0,))
    assert compared(bench, operation, select(held), bench.tables(held), f"{seed=}") == "taken"


# -- what txmq and plain Delta do not treat alike, or did not ------------------------------------------------

NO_UTF8 = "'a column' AS plain, array(CAST(X'ff00fe' AS STRING)) AS `a b`"


def refused(bench: Bench, operation: Operation, sql: str, table: str) -> str:
    """The one clear error, with nothing decided."""
    with pytest.raises(Exception) as raised:
        bench.decide(operation, bench.spark.sql(sql), table)
    found = cause(raised.value)
    assert isinstance(found, OptionError) and not bench.decided
    return str(found)


STAGED = [append(dataChange="true"), merge_all(), overwrite("true")]


@pytest.mark.parametrize(
    "operations", [STAGED[:1], pytest.param(STAGED[1:], marks=pytest.mark.soak)], ids=["first", "more"]
)
def test_a_text_that_is_not_utf8_is_refused_with_its_column_where_rows_are_staged(
    bench: Bench, operations: list[Operation]
) -> None:
    text, array = Kind("STRING"), Kind("ARRAY<STRING>")
    held = [Column("plain", text, text, (), ("''",)), Column("a b", array, array, (), ("array()",))]
    ours, _ = bench.tables(held)
    for operation in operations:
        told = refused(bench, operation, f"SELECT 1 AS id, {NO_UTF8}", ours)
        assert ours in told and "column 'a b' has a value that cannot be staged" in told
        assert "make_valid_utf8" in told
    bench.decide(append(), bench.spark.sql(f"SELECT 1 AS id, {NO_UTF8}"), ours)  # in files, as it is
    assert bench.applied


# as files, and as rows
BY_VALUE = [append(), merge_all(), append(dataChange="true"), overwrite("true")]


@pytest.mark.parametrize(
    ("value", "operations"),
    [
        pytest.param("'\\0x'", BY_VALUE[:2], id="first"),
        *(
            pytest.param(value, BY_VALUE, id=value, marks=pytest.mark.soak)
            for value in ("'\\0x'", "repeat('x', 300)", "repeat('=', 90)")
        ),
    ],
)
def test_a_value_that_no_directory_can_have_is_refused_before_the_decision(
    bench: Bench, value: str, operations: list[Operation]
) -> None:
    """A table that is partitioned by it has a directory for each, without column mapping."""
    text = Kind("STRING")
    held = [Column("v", text, text, ("'fits'",), ("'a'", "'b'"))]
    tables = bench.tables(held, "PARTITIONED BY (v)", mapped=False)
    for operation in operations:
        assert compared(bench, operation, select(held), tables, value) == "taken"
        told = refused(bench, operation, f"SELECT 1 AS id, {value} AS v", tables[0])
        assert tables[0] in told and "column 'v'" in told
    new, _ = bench.new_tables()
    told = refused(bench, append(partitionBy=["v"]), f"SELECT 1 AS id, {value} AS v", new)
    assert new in told and "column 'v'" in told
    rows = bench.spark.sql(f"SELECT 1 AS id, {value} AS v")
    assert failure(lambda: append().plain(rows, tables[1]))


UNTYPED = [append(), merge_all(), delete("t.id = s.id"), overwrite("true")]


@pytest.mark.parametrize(
    "operations", [UNTYPED[:1], pytest.param(UNTYPED[1:], marks=pytest.mark.soak)], ids=["first", "more"]
)
def test_a_column_without_a_type_takes_that_of_the_table(bench: Bench, operations: list[Operation]) -> None:
    held = [Column("v", Kind("INT"), Kind("VOID"), ("NULL", "NULL"), ("1", "2"))]
    for operation in operations:
        tables = bench.tables(held)
        assert compared(bench, operation, select(held), tables, "void") == "taken", operation.told
    told = refused(bench, append(mergeSchema="true"), "SELECT 1 AS id, NULL AS w", tables[0])
    assert "column 'w' has type void, and void cannot be written: cast it" in told


def test_an_interval_of_months_is_refused_by_name(bench: Bench) -> None:
    ours, _ = bench.tables([Column("v", Kind("STRING"), Kind("STRING"), (), ("''",))])
    for interval in ("INTERVAL '1-2' YEAR TO MONTH", "make_interval(1, 2)"):
        told = refused(bench, delete("t.id = s.id"), f"SELECT 1 AS id, array({interval}) AS v", ours)
        assert ours in told and "column 'v' has type array<interval" in told
        assert "which Spark cannot give to Python" in told


# -- trailing blanks -------------------------------------------------------------------------------------------

BLANKS: dict[str, list[tuple[Operation, str]]] = {
    "append": [(append(), given) for given in ("'a'", "'abc   '", "'ab '", "'abcd'")],
    "overwrite": [
        (overwrite(where), given)
        for given, wheres in {
            "'a'": ["c = 'a'", "c = 'a  '", "length(c) = 1"],
            "'ab '": ["c = 'ab '", "c = 'ab'"],
            "'abc  '": ["c = 'abc'", "c = 'abc  '"],
        }.items()
        for where in wheres
    ],
    "delete": [
        (delete(on), given)
        for given, conditions in {
            "'a'": ["t.c = s.c", "t.c = 'a'", "length(t.c) = 1"],
            "'a  '": ["t.c = s.c"],
            "'abc  '": ["t.c = s.c"],
            "'ab'": ["t.c = s.c"],
        }.items()
        for on in conditions
    ],
    "merge": [(merge_all("t.c = s.c"), given) for given in ("'a'", "'abc  '", "'ab'", "'a  ', 'a'")],
}
KINDS = ("CHAR(3)", "VARCHAR(3)")
# one that is kept, one that is refused and one that is compared; the others only in ``make soak``
OFTEN = {("append 1", "CHAR(3)"), ("append 3", "VARCHAR(3)"), ("merge 1", "VARCHAR(3)")}


@pytest.mark.parametrize(
    ("operation", "given", "kind"),
    [
        pytest.param(
            *case,
            kind,
            id=f"{name} {number}-{kind}",
            marks=[] if (f"{name} {number}", kind) in OFTEN else pytest.mark.soak,
        )
        for name, cases in BLANKS.items()
        for number, case in enumerate(cases)
        for kind in KINDS
    ],
)
def test_trailing_blanks_are_kept_compared_and_refused_as_by_plain_delta(
    bench: Bench, operation: Operation, given: str, kind: str
) -> None:
    """CHAR fills with blanks and VARCHAR does not; both drop those beyond their length."""
    tables = bench.new_tables()
    for table in tables:
        bench.spark.sql(f"CREATE TABLE delta.`{table}` (c {kind}, v INT) USING delta")
        bench.spark.sql(f"INSERT INTO delta.`{table}` VALUES ('a', 0), ('abc', 0), ('ab ', 0)")
    rows = f"SELECT explode(array({given})) AS c, 1 AS v"
    outcome = compared(bench, operation, rows, tables, f"{kind} {given}")
    if given == "'abcd'":
        assert outcome == "refused"
