"""The columns that Spark sees: exactly its Arrow types, the engine's buffers, and properties that survive the
way there and back.
"""

from __future__ import annotations

import itertools
from datetime import datetime, timezone
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import BinaryType, IntegerType, LongType, MapType, StringType, StructField, StructType

from broker_core.core.errors import LocalProtocolError, OptionError
from broker_core.message.message import READ_SCHEMA
from broker_core.message.properties import Properties
from connector.arrow_type import arrow_type
from connector.options import ExtraColumns
from connector.stream.schema import (
    PROPERTIES_TYPE,
    check_publish_columns,
    check_read_schema,
    properties_column,
    read_schema,
    to_messages,
    to_spark,
)


def batch(properties: list[bytes]) -> pa.RecordBatch:
    count = len(properties)
    columns: list[Any] = [
        ["q"] * count,
        [0] * count,
        list(range(count)),
        [""] * count,
        ["q"] * count,
        [b"x"] * count,
        [0] * count,
        [False] * count,
        properties,
    ]
    return pa.RecordBatch.from_arrays(
        [pa.array(values, field.type) for values, field in zip(columns, READ_SCHEMA)], schema=READ_SCHEMA
    )


@pytest.mark.parametrize(
    "included", [ExtraColumns(*each) for each in itertools.product([False, True], repeat=4)]
)
@pytest.mark.parametrize("properties", [[b"", b""], [Properties(type="t").encode(), b""], []])
def test_batches_have_exactly_the_arrow_schema_that_spark_derives(
    included: ExtraColumns, properties: list[bytes]
) -> None:
    (given,) = to_spark(iter([batch(properties)]), included)
    assert given.schema.equals(pa.schema(arrow_type(read_schema(included))))
    given.validate(full=True)


def test_plain_columns_are_the_buffers_of_the_engine() -> None:
    source = batch([b"", b""])
    (given,) = to_spark(iter([source]))
    for name in given.schema.names:
        assert [buffer and buffer.address for buffer in given.column(name).buffers()] == [
            buffer and buffer.address for buffer in source.column(name).buffers()
        ]


FULL = Properties(
    content_type="text/plain", content_encoding="gzip", headers={"a": "b"}, delivery_mode=1, priority=3, correlation_id="c",
    reply_to="r", expiration="1000", message_id="m", timestamp=1_357_016_400, type="t", user_id="u", app_id="x",
)  # fmt: skip


def test_every_property_arrives_in_its_field() -> None:
    (row,) = properties_column(pa.array([FULL.encode()])).to_pylist()
    moment = datetime(2013, 1, 1, 5, tzinfo=timezone.utc)
    expected = {name: getattr(FULL, name) for name in PROPERTIES_TYPE.names} | {
        "headers": [("a", "b")],
        "timestamp": moment,
    }
    assert row == expected


def test_properties_survive_the_way_to_spark_and_back() -> None:
    encoded = [FULL.encode(), b"", Properties(headers={"a": None}).encode(), FULL.encode()]
    there = pa.RecordBatch.from_arrays([properties_column(pa.array(encoded))], names=["properties"])
    assert to_messages(there).column("properties").to_pylist() == encoded


def test_a_message_without_properties_has_null() -> None:
    assert properties_column(pa.array([b"", FULL.encode()])).is_null().to_pylist() == [True, False]
    assert properties_column(pa.array([b"", b""])).null_count == 2


def test_a_header_that_is_no_string_is_given_as_its_json_text() -> None:
    headers = {
        "n": 1,
        "t": True,
        "z": None,
        "l": [1, "a"],
        "d": {"k": Decimal("1.5")},
        "s": "ü",
        "b": b"\xff",
    }
    (row,) = properties_column(pa.array([Properties(headers=headers).encode()])).to_pylist()
    assert dict(row["headers"]) == {
        "n": "1",
        "t": "true",
        "z": None,
        "l": '[1,"a"]',
        "d": '{"k":1.5}',
        "s": "ü",
        "b": '"/w=="',
    }


def test_the_list_of_headers_has_bytes_and_the_key_is_the_routing_key() -> None:
    headers = {"s": "ü", "b": b"\xff", "z": None, "n": 1, "d": {"k": b"\xff"}}
    (rows,) = to_spark(
        iter([batch([Properties(headers=headers).encode(), b"", Properties(type="t").encode(), b"\xff"])]),
        ExtraColumns(key=True, headers=True),
    )
    assert rows.column("key").to_pylist() == [b"q"] * 4
    pairs = [("s", "ü".encode()), ("b", b"\xff"), ("z", None), ("n", b"1"), ("d", b'{"k":"/w=="}')]
    (found, *without) = rows.column("headers").to_pylist()
    assert found == [{"key": name, "value": value} for name, value in pairs] and without == [None] * 3


def test_a_priority_above_sparks_tinyint_is_given_as_127() -> None:
    assert properties_column(pa.array([Properties(priority=255).encode()])).to_pylist()[0]["priority"] == 127


def test_any_subset_of_the_fields_can_be_written() -> None:
    struct = pa.array([{"priority": 3}, None], pa.struct([("priority", pa.int8())]))
    rows = pa.RecordBatch.from_arrays([pa.array(["a", "b"]), struct], names=["body", "properties"])
    assert to_messages(rows).column("properties").to_pylist() == [Properties(priority=3).encode(), b""]


def test_a_property_that_amqp_cannot_hold_is_refused() -> None:
    rows = pa.RecordBatch.from_arrays(
        [pa.array([{"priority": -1}], pa.struct([("priority", pa.int8())]))], names=["properties"]
    )
    with pytest.raises(LocalProtocolError, match="'priority' is -1, allowed is 0 to 255"):
        to_messages(rows)


BODY = StructField("body", BinaryType())


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            [StructField("value", StringType())],
            "column 'value' is not part of a message; allowed are body, exchange, routing_key, properties",
        ),
        ([StructField("exchange", StringType())], "the rows have no column 'body'"),
        ([StructField("body", LongType())], "column 'body' has the type bigint; allowed: binary, string"),
        (
            [BODY, StructField("routing_key", IntegerType())],
            "column 'routing_key' has the type int; allowed: string",
        ),
        (
            [BODY, StructField("properties", StringType())],
            "column 'properties' has the type string; allowed: a struct of",
        ),
        (
            [BODY, StructField("properties", StructType([StructField("prio", StringType())]))],
            "field 'prio' of column 'properties' is unknown",
        ),
        (
            [
                BODY,
                StructField(
                    "properties", StructType([StructField("headers", MapType(StringType(), LongType()))])
                ),
            ],
            "field 'headers' of column 'properties' has the type map<string,bigint>; allowed: "
            "map<string,string>",
        ),
    ],
)
def test_rows_that_cannot_be_messages_are_refused(fields: list[StructField], text: str) -> None:
    with pytest.raises(OptionError) as caught:
        check_publish_columns(StructType(fields))
    assert text in str(caught.value)


@pytest.mark.parametrize("body", [BinaryType(), StringType()])
def test_rows_that_can_be_messages_are_accepted(body: Any) -> None:
    check_publish_columns(
        StructType([StructField("BODY".lower(), body), StructField("properties", PROPERTIES_TYPE)])
    )


def test_a_differing_schema_is_refused() -> None:
    check_read_schema(read_schema(), read_schema())
    with pytest.raises(OptionError, match=r"the schema given by \.schema\(\) is struct<a:int>"):
        check_read_schema(StructType([StructField("a", IntegerType())]), read_schema())
