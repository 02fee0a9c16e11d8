"""The tables of a broker's state are documented column by column."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pyspark.sql.types import ArrayType, DataType, MapType, StructType

from broker_core.admin import EffectInfo, LedgerInfo, QueueInfo, TableInfo, TransactionInfo
from connector import state
from connector.options import BY_KEY

PAGE = Path(__file__).parents[2] / "docs" / "spark_reference.md"


def text(kind: DataType) -> str:
    """As the page writes it: names, and behind a nested one those in it."""
    if isinstance(kind, ArrayType):
        return text(kind.elementType)
    if isinstance(kind, MapType):
        return text(kind.valueType)
    fields = kind.fields if isinstance(kind, StructType) else []
    nested = {field.name: text(field.dataType) for field in fields}
    return ", ".join(f"{name} ({inner})" if inner else name for name, inner in nested.items())


@pytest.mark.parametrize("table", state.SCHEMAS)
def test_the_page_has_the_columns_of_each_table(table: str) -> None:
    columns = text(state.SCHEMAS[table])
    (row,) = [
        line
        for line in PAGE.read_text().splitlines()
        if re.match(rf"\| `{table}` \| an? ", line) and " tag" in line
    ]
    assert f"| `{columns}` |" in row


def test_each_table_is_an_allowed_value_of_the_option() -> None:
    assert [BY_KEY["table"].parse(table) for table in state.SCHEMAS] == list(state.SCHEMAS)


def test_rows_have_nulls_for_what_is_not_there() -> None:
    info = TransactionInfo(
        sequence=0,
        committed_at_us=1,
        vhost="/",
        listener="",
        user="",
        client="",
        address="",
        effects=(EffectInfo("consumed", "in/0", 2, ((3, 5),)),),
        tables=(TableInfo("t", "append", 2, True, version=0),),
    )
    (row,) = state.batch_of("transactions", [info]).to_pylist()
    assert (row["sequence"], row["listener"], row["app_id"], row["batch_id"], row["ledger_sequence"]) == (
        None,
    ) * 5
    assert row["effects"] == [
        {
            "effect": "consumed",
            "queue": "in/0",
            "entries": 2,
            "ranges": [{"start": 3, "end": 5}],
            "exact": True,
            "source": None,
        }
    ]
    assert row["tables"][0]["version"] == 0 and row["tables"][0]["refused"] is None
    entry = LedgerInfo("a", 1, "q", 0, 0, 1, {"in/0": (3, 5)}, 2, 0, True, False)
    (row,) = state.batch_of("ledger", [entry]).to_pylist()
    assert (row["transaction"], row["batch_id"], row["ranges"]) == (
        None,
        0,
        [("in/0", {"start": 3, "end": 5})],
    )
    queue = QueueInfo("q", 0, 0, 0, 0, "", True, {"n": 1, "text": "a", "table": {"x": [1]}, "none": None})
    (row,) = state.batch_of("queues", [queue]).to_pylist()
    assert dict(row["arguments"]) == {"n": "1", "text": "a", "table": '{"x": [1]}', "none": "null"}


@pytest.mark.parametrize("table", state.SCHEMAS)
def test_an_empty_table_has_its_types(table: str) -> None:
    batch = state.batch_of(table, [])
    assert batch.schema.names == state.SCHEMAS[table].names and batch.num_rows == 0
