"""Avro by fastavro: what was written is read, and no damaged body gives a value, hangs, or takes its neighbours along."""

from __future__ import annotations

import datetime
import decimal
import io
import json
import re
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pyspark.sql import types as T
from pyspark.sql.types import StructType

from broker_core.core.errors import OptionError
from connector.typed.avro import AvroSchema, avro_schema, columns_of, decoder, encoder
from connector.typed.decode_udf import UnsupportedSchema
from connector.typed.registry.wire_format import header
from tests.gates import examples

ORDER = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "name", "type": ["null", "string"], "default": None},
        {"name": "tags", "type": {"type": "map", "values": "int"}, "default": {}},
        {
            "name": "lines",
            "type": {
                "type": "array",
                "items": {
                    "type": "record",
                    "name": "Line",
                    "fields": [
                        {"name": "sku", "type": "string"},
                        {"name": "more", "type": {"type": "map", "values": ["null", "string"]}},
                    ],
                },
            },
            "default": [],
        },
        {
            "name": "price",
            "type": ["null", {"type": "bytes", "logicalType": "decimal", "precision": 6, "scale": 2}],
            "default": None,
        },
        {
            "name": "at",
            "type": ["null", {"type": "long", "logicalType": "timestamp-micros"}],
            "default": None,
        },
    ],
}
TEXT = json.dumps(ORDER)
DDL = (
    "id:bigint,name:string,tags:map<string,int>,lines:array<struct<sku:string,more:map<string,string>>>,"
    "price:decimal(6,2),at:timestamp"
)


def body(value: Any, schema: Any = ORDER, number: int = 1) -> bytes:
    buffer = io.BytesIO()
    fastavro.schemaless_writer(buffer, fastavro.parse_schema(json.loads(json.dumps(schema))), value)
    return header(number) + buffer.getvalue()


def decoded(bodies: list[bytes | None], writers: Any = None, reader: Any = TEXT) -> list[Any]:
    """(value, fault) of each."""
    found = decoder(writers or {1: (TEXT,)}, (reader,))(pa.array(bodies, pa.binary()))
    assert len(found) == len(bodies)
    return [(one["value"], one["fault"]) for one in found.to_pylist()]


def test_the_columns_of_a_schema_are_the_types_of_spark() -> None:
    assert columns_of((TEXT,)).simpleString() == f"struct<{DDL}>"
    others = {
        "e": {"type": "enum", "name": "E", "symbols": ["A"]},
        "f": {"type": "fixed", "name": "F", "size": 3},
        "g": "F",
        "u": {"type": "string", "logicalType": "uuid"},
        "d": {"type": "int", "logicalType": "date"},
        "t": {"type": "int", "logicalType": "time-millis"},
        "n": {"type": "long", "logicalType": "timestamp-nanos"},
        "l": {"type": "long", "logicalType": "local-timestamp-millis"},
        "w": {"type": "bytes", "logicalType": "decimal", "precision": 39},
        "z": {"type": "bytes", "logicalType": "decimal", "precision": "4"},
        "x": {"type": "fixed", "name": "X", "size": 4, "logicalType": "decimal", "precision": 4, "scale": 4},
    }
    schema = {"type": "record", "name": "R", "fields": [{"name": n, "type": t} for n, t in others.items()]}
    assert columns_of((json.dumps(schema),)).simpleString() == (
        "struct<e:string,f:binary,g:binary,u:string,d:date,t:int,n:bigint,l:timestamp_ntz,w:binary,z:binary,x:decimal(4,4)>"
    )


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ("{", "is not a schema of Avro"),
        ('{"type": "record"}', "is not a schema of Avro"),
        ('"nothing"', "is not a schema of Avro"),
        ("5", "is not a schema of Avro"),
        ("null", "is not a schema of Avro"),
        ('{"type": "record", "name": "R", "fields": [{"name": "r", "type": ["null", "R"]}]}', "has the type R within itself"),
        ('{"type": "record", "name": "R", "fields": [{"name": "r", "type": {"type": "map", "values": "R"}}]}', "within itself"),
        ('{"type": "record", "name": "R", "fields": [{"name": "a", "type": {"type": "array", "items": "null"}}]}', "has an array of items without bytes in field 'a'"),
        ('{"type": "array", "items": {"type": "record", "name": "N", "fields": []}}', "items without bytes"),
        ('{"type": "array", "items": {"type": "fixed", "name": "N", "size": 0}}', "items without bytes"),
    ],
)  # fmt: skip
def test_a_schema_that_few_bytes_could_make_endless_is_not_read(schema: str, text: str) -> None:
    with pytest.raises(UnsupportedSchema, match=re.escape(text)):
        AvroSchema.of((schema,))
    with pytest.raises(OptionError, match="the schema"):
        columns_of((schema,))


@pytest.mark.parametrize("schema", ['"string"', '["null", "int"]'])
def test_columns_need_a_record_and_no_union_of_several_types(schema: str) -> None:
    with pytest.raises(UnsupportedSchema, match="not a record"):
        AvroSchema.of((schema,)).columns()
    union = {"type": "record", "name": "R", "fields": [{"name": "u", "type": ["int", "string"]}]}
    with pytest.raises(OptionError, match="has a union of several types in field 'u'"):
        columns_of((json.dumps(union),))


def test_references_are_schemas_in_front() -> None:
    line = {
        "type": "record",
        "name": "Line",
        "namespace": "shop",
        "fields": [{"name": "sku", "type": "string"}],
    }
    order = {"type": "record", "name": "Order", "fields": [{"name": "line", "type": "shop.Line"}]}
    texts = (json.dumps(line), json.dumps(order))
    named = {**order, "fields": [{"name": "line", "type": line}]}
    assert columns_of(texts).simpleString() == "struct<line:struct<sku:string>>"
    found = decoder({1: texts}, texts)(pa.array([body({"line": {"sku": "a"}}, named)]))
    assert found.to_pylist() == [{"value": {"line": {"sku": "a"}}, "fault": None}]


orders = st.fixed_dictionaries(
    {
        "id": st.integers(-(2**63), 2**63 - 1),
        "name": st.none() | st.text(max_size=5),
        "tags": st.dictionaries(st.text(max_size=2), st.integers(-(2**31), 2**31 - 1), max_size=2),
        "lines": st.lists(
            st.fixed_dictionaries({"sku": st.text(max_size=3), "more": st.dictionaries(st.text(max_size=2), st.none() | st.text(max_size=2), max_size=2)}),
            max_size=3,
        ),
        "price": st.none() | st.decimals(-9999, 9999, places=2),
        "at": st.none() | st.datetimes(timezones=st.just(datetime.timezone.utc)),
    }
)  # fmt: skip


def told(value: dict[str, Any]) -> dict[str, Any]:
    """As Arrow tells it: maps are lists of pairs."""
    lines = [{**line, "more": list(line["more"].items())} for line in value["lines"]]
    return {**value, "tags": list(value["tags"].items()), "lines": lines}


@given(st.lists(orders, max_size=4))
@examples(60)
def test_what_is_written_is_read(values: list[dict[str, Any]]) -> None:
    assert decoded([body(value) for value in values]) == [(told(value), None) for value in values]


@given(orders, st.data())
@example(orders, None)
@examples(150)
def test_a_damaged_body_has_a_fault_or_is_another_value_and_harms_no_other(value: Any, data: Any) -> None:
    if data is None:
        return
    sound = body(value)
    damaged = bytearray(sound)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(damaged)))
        damaged[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    first, found, last = decoded([sound, bytes(damaged), sound])
    assert first == last == (told(value), None)
    assert found[0] is None or found[1] is None
    if found[0] is not None:  # it is the encoding of another value
        again = decoded([body({**found[0], "tags": dict(found[0]["tags"]), "lines": [{**line, "more": dict(line["more"])} for line in found[0]["lines"]]})])  # fmt: skip
        assert again[0][1] is None


HUGE = b"\xfe\xff\xff\xff\xff\xff\xff\xff\x7f"  # the largest number of items
ODD: list[tuple[bytes | None, str]] = [
    (header(1), "the body is not Avro of the schema (EOFError"),
    (body({"id": 1}) + b"\x00", "the body has 1 bytes behind the value"),
    (header(1) + b"\x02\x00" + HUGE, "the body is not Avro of the schema"),
    (header(1) + b"\x02\x02" + HUGE, "the body is not Avro of the schema"),
    (header(1) + b"\x02\x02\x01", "the body is not Avro of the schema"),
    (header(1) + b"\x02\x02\x02\xff", "the body is not Avro of the schema (UnicodeDecodeError"),
    (header(1) + b"\x02\x04", "the body is not Avro of the schema"),
    (body({"id": 1})[:-2] + b"\x02\x08\x7f\xff\xff\xff\x00", "more than 6 digits"),
    (body({"id": 1})[:-2] + b"\x02\x00\x00", "more than 6 digits, or none"),
    (body({"id": 1})[:-1] + b"\x02" + HUGE, "the body is not Avro of the schema (OverflowError"),
    (header(1) + b"\x02\x00\x02\x02a" + b"\x80\x80\x80\x80\x20" + b"\x00\x00\x00\x00", "the body does not fit the columns"),
]  # fmt: skip


def test_a_body_that_nobody_would_send_has_a_fault() -> None:
    found = decoded([body for body, _ in ODD] + [body({"id": 7})])
    for (sent, reason), (value, fault) in zip(ODD, found, strict=False):
        assert value is None and reason in str(fault), (sent, fault)
    assert found[-1][0]["id"] == 7


def test_a_body_without_a_known_id_has_neither_value_nor_fault() -> None:
    """The wire format tells what is wrong with it."""
    sent = [None, b"", b"\0\0\0\0", b"\1\0\0\0\1\2", header(2) + b"\2"]
    assert decoded(sent) == [(None, None)] * len(sent)


def test_a_batch_may_have_several_schemas_and_each_becomes_that_of_the_reader() -> None:
    old = {
        "type": "record",
        "name": "Order",
        "fields": [{"name": "id", "type": "int"}, {"name": "gone", "type": "string"}],
    }
    other = {"type": "record", "name": "Order", "fields": [{"name": "id", "type": "string"}]}
    found = decoded(
        [body({"id": 5}), body({"id": 6, "gone": "x"}, old, 2), body({"id": "7"}, other, 3)],
        {1: (TEXT,), 2: (json.dumps(old),), 3: (json.dumps(other),)},
    )  # fmt: skip
    assert [value and value["id"] for value, _ in found] == [5, 6, None]
    assert found[1][0]["lines"] == [] and "SchemaResolutionError" in found[2][1]


ROWS = [
    {
        "a": 1, "b": "x", "c": [1, None], "d": {"k": 2.5}, "e": {"f": b"\0"}, "g": decimal.Decimal("-1.50"),
        "h": datetime.date(1, 1, 1), "i": datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone.utc),
        "j": datetime.datetime(1969, 1, 1), "k": True,
    },
    {**dict.fromkeys("abcdeghij"), "k": False},
]  # fmt: skip
ROW = (
    StructType()
    .add("a", T.ByteType())
    .add("b", T.StringType())
    .add("c", T.ArrayType(T.IntegerType()))
    .add("d", T.MapType(T.StringType(), T.DoubleType()))
    .add("e", StructType().add("f", T.BinaryType()))
    .add("g", T.DecimalType(9, 2))
    .add("h", T.DateType())
    .add("i", T.TimestampType())
    .add("j", T.TimestampNTZType())
    .add("k", T.BooleanType(), nullable=False)
)


def test_columns_become_a_schema_and_rows_bodies_that_are_read_again() -> None:
    text = json.dumps(avro_schema(ROW))
    kind = decoder({}, (text,))(pa.array([], pa.binary())).type.field("value").type
    values = pa.array([{**row, "d": row["d"] and list(row["d"].items())} for row in ROWS], kind)
    bodies = encoder(header(9), text)(values)
    found = decoder({9: (text,)}, (text,))(bodies).to_pylist(maps_as_pydicts="strict")
    assert found == [{"value": row, "fault": None} for row in ROWS]
    assert columns_of((text,)).simpleString() == ROW.simpleString().replace("tinyint", "int")


def test_a_row_that_does_not_fit_the_schema_is_one_clear_error() -> None:
    text = '{"type": "record", "name": "R", "fields": [{"name": "a", "type": "int"}]}'
    for value in (None, 1 << 40, "x"):
        with pytest.raises(OptionError, match="a row does not fit the schema of Avro"):
            encoder(header(1), text)(pa.array([{"a": value}]))
    late = pa.array([4_000_000], pa.date32())  # Python has dates until the year 9999
    text = json.dumps(avro_schema(StructType().add("a", T.DateType())))
    with pytest.raises(OptionError, match="a row does not fit the schema of Avro"):
        encoder(header(1), text)(pa.StructArray.from_arrays([late], ["a"]))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a-b", T.IntegerType()),
        ("a", T.MapType(T.IntegerType(), T.IntegerType())),
        ("a", T.ArrayType(T.YearMonthIntervalType())),
        ("a", StructType().add("1", T.IntegerType())),
    ],
)
def test_columns_that_avro_has_no_type_for_are_one_clear_error(name: str, kind: T.DataType) -> None:
    with pytest.raises(OptionError, match="Avro"):
        avro_schema(StructType().add(name, kind))
