"""Rows of staged files read without Spark: the table's names for them, partition values, and files that are
gone.
"""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql.types import (
    ArrayType,
    DateType,
    IntegerType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from broker_core.engine import ToApply
from connector.delta.before.staged_files import StagedFiles
from connector.delta.exported_files import DeltaExportedFiles

PHYSICAL = "delta.columnMapping.physicalName"


def column(name: str, kind: object) -> StructField:
    return StructField(name, kind, True, {PHYSICAL: f"col-{name}"})  # type: ignore[arg-type]


INNER = StructType(
    [column("x", IntegerType()), column("y", ArrayType(StructType([column("z", StringType())])))]
)
HELD = StructType(
    [
        column("s", INNER),
        column("m", MapType(StringType(), StructType([column("v", IntegerType())]))),
        column("day", DateType()),
        column("at", TimestampType()),
        column("absent", IntegerType()),
    ]
)
AT = datetime.datetime(2020, 1, 2, 3, 4, 5, 678901, tzinfo=datetime.timezone.utc)


def staged(root: Path) -> StagedFiles:
    """Two files, in two partitions; the second one is gone."""
    struct = pa.struct([("col-x", pa.int32()), ("col-y", pa.list_(pa.struct([("col-z", pa.string())])))])
    rows = {
        "col-s": pa.array([{"col-x": 1, "col-y": [{"col-z": "é"}]}, None], struct),
        "col-m": pa.array(
            [[("k", {"col-v": 7})], []], pa.map_(pa.string(), pa.struct([("col-v", pa.int32())]))
        ),
        "col-at": pa.array([AT, None], pa.timestamp("us", "UTC")),
    }
    file = root / "_txmq/app/1.t/0/day=2020-01-02 é/part.parquet"
    file.parent.mkdir(parents=True)
    pq.write_table(pa.table(rows), file, use_deprecated_int96_timestamps=True)
    adds = [
        {
            "path": f"day=2020-01-0{day}%20%C3%A9/part.parquet",
            "partitionValues": {"col-day": f"2020-01-0{day}"},
            "size": 10,
            "stats": json.dumps({"numRecords": 2}),
        }
        for day in (2, 3)
    ]
    lines = [{"protocol": {}}, {"metaData": {"schemaString": HELD.json()}}, *({"add": add} for add in adds)]
    return StagedFiles("_txmq/app/1.t/0", "", tuple(map(json.dumps, lines)))


def test_rows_have_the_names_and_types_of_the_append_and_missing_files_are_named(tmp_path: Path) -> None:
    files = staged(tmp_path)
    assert (files.rows, files.size_bytes, len(files.adds)) == (4, 20, 2)
    loose = DeltaExportedFiles(files, f"file:{tmp_path}", HELD)
    assert loose.missing() == [f"{tmp_path}/_txmq/app/1.t/0/day=2020-01-03 é/part.parquet"]
    (batch,) = loose.rows()
    assert batch.to_pylist() == [
        {
            "s": {"x": 1, "y": [{"z": "é"}]},
            "m": [("k", {"v": 7})],
            "day": datetime.date(2020, 1, 2),
            "at": AT,
            "absent": None,
        },
        {"s": None, "m": [], "day": datetime.date(2020, 1, 2), "at": None, "absent": None},
    ]


@pytest.mark.parametrize(
    ("text", "zone", "instant"),
    [
        ("2026-01-01T10:00:00.500000Z", "Asia/Tokyo", "2026-01-01 10:00:00.500000"),
        ("2026-01-01 10:00:00.5", "UTC", "2026-01-01 10:00:00.500000"),
        ("2026-01-01 10:00:00", "Asia/Tokyo", "2026-01-01 01:00:00.000000"),
        ("2026-01-01 10:00:00", "GMT+5:30", "2026-01-01 04:30:00.000000"),
        ("2026-01-01 10:00:00", "-08:00", "2026-01-01 18:00:00.000000"),
        ("2026-10-25 02:30:00", "Europe/Berlin", "2026-10-25 00:30:00.000000"),  # shown twice
        ("0001-01-01 00:00:00", "UTC", "0001-01-01 00:00:00.000000"),
        (None, "UTC", None),
    ],
)
def test_a_timestamp_that_partitions_a_table_is_an_instant_also_without_its_zone(
    tmp_path: Path, text: str | None, zone: str, instant: str | None
) -> None:
    schema = StructType([StructField("v", IntegerType()), StructField("p", TimestampType())])
    (tmp_path / "files").mkdir()
    pq.write_table(pa.table({"v": pa.array([1], pa.int32())}), tmp_path / "files/f.parquet")
    add = {"path": "f.parquet", "partitionValues": {"p": text}, "size": 1, "stats": '{"numRecords": 1}'}
    metadata = {"schemaString": schema.json(), "partitionColumns": ["p"]}
    lines = [{"protocol": {}}, {"metaData": metadata}, {"add": add}]
    files = StagedFiles("files", "", tuple(map(json.dumps, lines)), zone)
    assert files.names_no_zone == (text is not None and "T" not in text)
    part = ToApply("append", files.target(), ("b",), 1)
    files = StagedFiles.of(part, [files.batch()])
    (batch,) = DeltaExportedFiles(files, f"file:{tmp_path}", schema).rows()
    assert batch.column("p").cast(pa.timestamp("us")).cast(pa.string())[0].as_py() == instant
