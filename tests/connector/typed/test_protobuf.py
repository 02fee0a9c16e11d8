"""Protobuf: what google.protobuf writes is read, and no damaged body gives a value, hangs, or takes its neighbours along."""

from __future__ import annotations

import datetime
import decimal
import struct
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import StructType

from broker_core.core.errors import OptionError
from connector.arrow_type import arrow_type
from connector.sql import nullable
from connector.typed.protobuf.descriptors import Descriptors, of_set
from connector.typed.protobuf.read import SchemaMismatch, columns_of, decoder, reading, unknown
from connector.typed.protobuf.write import encoder, writing
from connector.typed.registry.client import RegisteredSchema
from connector.typed.registry.wire_format import FIRST, header, written_indexes
from tests import ddl
from tests.gates import examples
from tests.protobuf_files import LINE, OLD, ORDER, descriptor_set, file, message_class, serialized

NAMED = ((LINE.name, serialized(LINE)),)
SCHEMA = RegisteredSchema("PROTOBUF", (serialized(LINE), serialized(ORDER)), NAMED)
TYPE = Descriptors.of(SCHEMA).at(FIRST)
COLUMNS = columns_of(TYPE)
DDL = (
    "id:bigint,name:string,state:string,at:timestamp,took:interval day to second,"
    "lines:array<struct<sku:string,price:double>>,tags:map<string,int>,card:string,cash:float,note:string,"
    "ratings:array<int>,total:decimal(20,0),where:struct<x:bigint>,raw:binary,paid:boolean,"
    "shelves:map<bigint,struct<sku:string,price:double>>"
)
Order = message_class("shop.Order", LINE, ORDER)
EMPTY = {
    "id": 0, "name": None, "state": "NEW", "at": None, "took": None, "lines": [], "tags": [], "card": None, "cash": None,
    "note": None, "ratings": [], "total": decimal.Decimal(0), "where": None, "raw": b"", "paid": False, "shelves": [],
}  # fmt: skip


def only(each: Any, name: str = "") -> RegisteredSchema:
    return RegisteredSchema("PROTOBUF", (serialized(each),))


def body(message: bytes, number: int = 1, indexes: tuple[int, ...] = FIRST) -> bytes:
    return header(number) + written_indexes(indexes) + message


def decoded(
    bodies: list[bytes | None], columns: Any = COLUMNS, schemas: Any = None, allowed: Any = None
) -> list[Any]:
    """(value, fault) of each."""
    wanted = ddl.columns(columns) if isinstance(columns, str) else columns
    found = decoder(schemas or {1: SCHEMA}, wanted, allowed)(pa.array(bodies, pa.binary()))
    assert len(found) == len(bodies)
    return [(one["value"], one["fault"]) for one in found.to_pylist()]


def test_the_columns_of_a_message_are_the_types_of_spark() -> None:
    assert COLUMNS.simpleString() == f"struct<{DDL}>"
    assert nullable(COLUMNS) == COLUMNS


lines = st.fixed_dictionaries({"sku": st.text(max_size=3), "price": st.floats(allow_nan=False)})
floats = st.floats(width=32, allow_nan=False)
int32s, int64s = st.integers(-(2**31), 2**31 - 1), st.integers(-(2**63), 2**63 - 1)
UTC = datetime.timezone.utc
orders = st.fixed_dictionaries(
    {
        "id": int64s,
        "name": st.none() | st.text(max_size=4),
        "state": st.sampled_from(["NEW", "PAID", "7", "-1"]),
        "at": st.none() | st.datetimes(timezones=st.just(UTC)),
        "took": st.none() | st.timedeltas(datetime.timedelta(days=-999_999), datetime.timedelta(days=999_999)),
        "lines": st.lists(lines, max_size=2),
        "tags": st.dictionaries(st.text(max_size=2), int32s, max_size=2),
        "note": st.none() | st.text(max_size=2),
        "ratings": st.lists(int32s, max_size=3),
        "total": st.integers(0, 2**64 - 1).map(decimal.Decimal),
        "where": st.none() | st.fixed_dictionaries({"x": st.integers(0, 2**32 - 1)}),
        "raw": st.binary(max_size=3),
        "paid": st.booleans(),
        "shelves": st.dictionaries(st.integers(0, 2**32 - 1), lines, max_size=2),
    }
).flatmap(
    lambda value: st.sampled_from([("card", st.text(max_size=2)), ("cash", floats), ("card", st.none())]).flatmap(
        lambda choice: choice[1].map(lambda paid: {**value, "card": None, "cash": None, choice[0]: paid})
    )
)  # fmt: skip


def told(value: dict[str, Any]) -> dict[str, Any]:
    """As Arrow tells it: in the order of the columns, and maps are lists of pairs, which have no order."""
    pairs = {name: sorted(dict(value[name]).items()) for name in ("tags", "shelves")}
    return {name: pairs.get(name, value[name]) for name in COLUMNS.names}


def sorted_maps(found: Any) -> Any:
    return [(value and told(value), fault) for value, fault in found]


def message(value: dict[str, Any]) -> bytes:
    """By google.protobuf alone."""
    made = Order(id=value["id"], total=int(value["total"]), raw=value["raw"], paid=value["paid"])
    made.state = (
        {"NEW": 0, "PAID": 1}.get(value["state"])
        if value["state"] in ("NEW", "PAID")
        else int(value["state"])
    )
    for name in ("name", "card", "cash"):
        if value[name] is not None:
            setattr(made, name, value[name])
    if value["at"] is not None:
        made.at.FromDatetime(value["at"])
    if value["took"] is not None:
        made.took.FromTimedelta(value["took"])
    if value["note"] is not None:
        made.note.value = value["note"]
        made.note.SetInParent()
    if value["where"] is not None:
        made.where.SetInParent()
        made.where.x = value["where"]["x"]
    made.ratings.extend(value["ratings"])
    for each in value["lines"]:
        made.lines.add(**each)
    made.tags.update(value["tags"])
    for key, each in value["shelves"].items():
        made.shelves[key].MergeFrom(type(made.lines.add())(**each))
    del made.lines[len(value["lines"]) :]
    return made.SerializeToString()


@pytest.mark.slow
@given(st.lists(orders, max_size=3))
@examples(60)
def test_what_google_protobuf_writes_is_read(values: list[dict[str, Any]]) -> None:
    found = decoded([body(message(value)) for value in values])
    assert sorted_maps(found) == [(told(value), None) for value in values]


@pytest.mark.slow
@given(st.lists(orders, max_size=3))
@examples(60)
def test_what_is_encoded_google_protobuf_and_decode_read(values: list[dict[str, Any]]) -> None:
    rows = [{**value, "tags": list(value["tags"].items()), "shelves": list(value["shelves"].items())} for value in values]  # fmt: skip
    structs = pa.array(rows, arrow_type(COLUMNS))
    bodies = encoder(header(1) + written_indexes(FIRST), SCHEMA, FIRST, COLUMNS)(structs)
    for value, made in zip(values, bodies.to_pylist(), strict=True):
        assert Order.FromString(made[6:]) == Order.FromString(message(value))
    assert sorted_maps(decoded(bodies.to_pylist())) == [(told(value), None) for value in values]
    assert encoder(header(1) + written_indexes(FIRST), SCHEMA, FIRST, COLUMNS)(structs) == bodies


@pytest.mark.slow
@given(orders, st.data())
@examples(200)
def test_a_damaged_body_has_a_fault_or_is_another_value_and_harms_no_other(value: Any, data: Any) -> None:
    sound = body(message(value))
    damaged = bytearray(sound)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(damaged)))
        damaged[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    first, found, last = decoded([sound, bytes(damaged), sound])
    assert sorted_maps([first]) == sorted_maps([last]) == [(told(value), None)]
    assert found[0] is None or found[1] is None
    assert found[1] is None or len(found[1]) < 500


def test_a_body_that_nobody_would_send_has_a_fault() -> None:
    deep = b""
    for _ in range(150):
        deep = b"\x0a" + bytes(_varint(len(deep))) + deep
    huge = Order()
    huge.at.seconds = 2**62
    negative = Order()
    negative.at.nanos = -1
    signs = Order()
    signs.took.seconds, signs.took.nanos = 1, -1
    odd: list[tuple[bytes | None, str | None]] = [
        (header(1), "the body has no message indexes behind the id of its schema: one has no end"),
        (header(1) + b"\x80", "no message indexes"),
        (header(1) + b"\x0a", "no message indexes"),
        (header(1) + b"\1", "no message indexes behind the id of its schema: there are -1"),
        (header(1) + b"\2\1", "no message indexes behind the id of its schema: one is -1"),
        (body(b"", 1, (9,)), "schema id 1 has no message [9]"),
        (body(b"", 1, (0, 1)), "schema id 1 has no message [0, 1]"),
        (body(b"\xff"), "the body is not Protobuf of the schema (DecodeError"),
        (body(b"\x12\x01\xff"), "the body is not Protobuf of the schema (DecodeError"),
        (body(b"\x08"), "the body is not Protobuf of the schema (DecodeError"),
        (body(b"\x08" + b"\xff" * 10), "the body is not Protobuf of the schema (DecodeError"),
        (body(huge.SerializeToString()), "Timestamp is not valid: Seconds"),
        (body(negative.SerializeToString()), "Timestamp is not valid: Nanos"),
        (body(signs.SerializeToString()), "a duration is longer than 10,000 years, or has two signs"),
        (None, None),
        (b"", None),
        (b"\1\0\0\0\1\0", None),
        (header(2) + b"\0", None),
    ]  # fmt: skip
    found = decoded([sent for sent, _ in odd] + [body(b"\x08\x07")])
    for (sent, reason), (value, fault) in zip(odd, found, strict=False):
        assert value is None and (fault is None if reason is None else reason in str(fault)), (sent, fault)
    assert found[-1] == ({**EMPTY, "id": 7}, None)
    node = file(
        'syntax: "proto3" message_type { name: "N" field { name: "next" number: 1 type_name: ".N" } }'
    )
    ((value, fault),) = decoded([body(deep)], "next struct<next: struct<next: void>>".replace("void", "struct<>"), {1: only(node)})  # fmt: skip
    assert value is None and "DecodeError" in fault


def _varint(number: int) -> list[int]:
    made = []
    while number > 0x7F:
        made.append(number & 0x7F | 0x80)
        number >>= 7
    return [*made, number]


def test_a_batch_may_have_several_schemas_and_messages_and_columns_are_found_by_name() -> None:
    older = file(
        'syntax: "proto3" message_type { name: "Order" field { name: "id" number: 5 type: TYPE_INT32 } }'
    )
    texts = file(
        'syntax: "proto3" message_type { name: "Order" field { name: "id" number: 1 type: TYPE_STRING } }'
    )
    schemas = {1: SCHEMA, 2: only(older), 3: only(texts)}
    sent: list[bytes | None] = [
        body(Order(id=1, name="a").SerializeToString()),
        body(message_class("shop.Cancelled", LINE, ORDER)(id=2).SerializeToString(), 1, (1,)),
        body(message_class("Order", older)(id=3).SerializeToString(), 2),
        body(message_class("Order", texts)(id="4").SerializeToString(), 3),
        body(Order(id=5).SerializeToString()),
    ]  # fmt: skip
    assert decoded(sent, "id bigint, name string, other array<int>", schemas) == [
        ({"id": 1, "name": "a", "other": None}, None),
        ({"id": 2, "name": None, "other": None}, None),
        ({"id": 3, "name": None, "other": None}, None),
        (None, "the message Order of schema id 3 does not fit: field 'id' is string, not bigint"),
        ({"id": 5, "name": None, "other": None}, None),
    ]


def test_a_column_may_be_wider_than_its_field_and_a_value_that_is_too_large_is_rejected() -> None:
    sent: list[bytes | None] = [body(Order(id=each, total=each, ratings=[each % 99]).SerializeToString()) for each in (1, 300)]  # fmt: skip
    first, second = decoded(sent, "id tinyint, total bigint, ratings array<decimal(3,0)>")
    assert first == ({"id": 1, "total": 1, "ratings": [decimal.Decimal(1)]}, None)
    assert second[0] is None and second[1].startswith("the body does not fit the columns (")
    large: list[bytes | None] = [body(Order(total=2**64 - 1).SerializeToString())]
    ((value, fault),) = decoded(large, "total bigint")
    assert value is None and "does not fit the columns" in fault
    assert decoded(large, "total decimal(38,2)")[0][0]["total"] == decimal.Decimal(2**64 - 1)
    assert decoded([body(Order(cash=0.5, state=1).SerializeToString())], "cash double, state int") == [({"cash": 0.5, "state": 1}, None)]  # fmt: skip
    whole = Order()
    whole.note.value = "n"
    whole.at.seconds = 5
    assert decoded([body(whole.SerializeToString())], "note struct<value: string>, at struct<nanos: int, seconds: bigint>") == [
        ({"note": {"value": "n"}, "at": {"nanos": 0, "seconds": 5}}, None)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ("id string", "field 'id' is int64, not string"),
        ("id struct<a: int>", "field 'id' is int64, not struct<a:int>"),
        ("id array<bigint>", "field 'id' is int64, not array<bigint>"),
        ("name binary", "field 'name' is string, not binary"),
        ("ratings int", "field 'ratings' is repeated sint32, not int"),
        ("ratings array<string>", "field 'ratings[]' is repeated sint32, not string"),
        ("tags array<int>", "field 'tags' is map<string, int32>, not array<int>"),
        ("tags map<string, string>", "field 'tags{}' is int32, not string"),
        ("tags map<int, int>", "field 'tags{}' is string, not int"),
        ("lines array<struct<sku: int>>", "field 'lines[].sku' is string, not int"),
        ("at bigint", "field 'at' is google.protobuf.Timestamp, not bigint"),
        ("at timestamp_ntz", "field 'at' is google.protobuf.Timestamp, not timestamp_ntz"),
        ("took timestamp", "field 'took' is google.protobuf.Duration, not timestamp"),
        ("note int", "field 'note' is string, not int"),
        ("where string", "field 'where' is shop.Order.Place, not string"),
        ("state decimal(3,0)", "field 'state' is enum, not decimal(3,0)"),
        ("cash decimal(3,0)", "field 'cash' is float, not decimal(3,0)"),
    ],
)
def test_a_column_of_another_type_is_told(columns: str, text: str) -> None:
    with pytest.raises(SchemaMismatch) as raised:
        reading(TYPE, ddl.columns(columns))
    assert str(raised.value) == text
    ((value, fault),) = decoded([body(b"")], columns)
    assert value is None and fault == f"the message shop.Order of schema id 1 does not fit: {text}"


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ("a void", "column 'a' of type void"),
        ("a array<array<int>>", "column 'a' of type array<array<int>>"),
        ("a map<string, array<int>>", "column 'a' of type map<string,array<int>>"),
        ("a map<double, int>", "column 'a' of type map<double,int>"),
        ("a struct<b: array<struct<c: date>>>", "column 'a.b[].c' of type date"),
        ("a map<int, interval year>", "column 'a{}' of type interval year"),
        ("a variant", "column 'a' of type variant"),
    ],
)
def test_a_type_that_no_field_can_have_is_known_before_a_row_is_read(columns: str, text: str) -> None:
    assert unknown(ddl.columns(columns), "") == text


def test_every_type_that_a_field_has_is_known() -> None:
    assert unknown(COLUMNS, "") is None
    assert (
        unknown(ddl.columns("a tinyint, b smallint, c decimal(38,3), d map<boolean, struct<e: float>>"), "")
        is None
    )


def test_a_field_that_is_not_null_is_demanded_at_any_depth() -> None:
    columns = "id bigint not null, where struct<x: bigint not null, other: int>, note string not null"
    whole, null = Order(id=1), Order(id=2)
    whole.note.value = ""
    whole.note.SetInParent()
    demanding = "lines array<struct<gone: string not null>>"
    assert decoded([body(whole.SerializeToString()), body(null.SerializeToString())], columns) == [
        ({"id": 1, "where": None, "note": ""}, None),
        (None, "field 'note' is missing or null"),
    ]
    line = Order()
    line.lines.add()
    assert decoded([body(b""), body(line.SerializeToString())], demanding) == [
        ({"lines": []}, None),
        (None, "field 'lines[].gone' is missing or null"),
    ]


def test_proto2_has_required_fields_closed_enums_text_that_is_none_and_groups() -> None:
    old = {1: only(OLD)}
    sent: list[bytes | None] = [
        body(b"\x08\x05"),
        body(b"\x08\x05\x12\x01a\x18\x02"),
        body(b"\x08\x05\x18\x09"),  # of no name: an unknown field
        body(b"\x12\x01a"),
        body(b"\x08\x05\x12\x01\xff"),
        body(b"\x08\x05\x23\x08\x01\x24"),
    ]
    found = decoded(sent, "id bigint, text string, kind string", old)
    assert found[:3] == [
        ({"id": 5, "text": None, "kind": None}, None),
        ({"id": 5, "text": "a", "kind": "B"}, None),
        ({"id": 5, "text": None, "kind": None}, None),
    ]
    assert "it lacks the required field 'id'" in found[3][1]
    assert found[4][0] is None and "not a utf8 string" in found[4][1]
    assert found[5] == ({"id": 5, "text": None, "kind": None}, None)
    ((value, fault),) = decoded(sent[:1], "group struct<a: int>", old)
    assert value is None and fault.endswith("field 'group' is a group, not struct<a:int>")


def test_fields_may_have_the_names_of_methods() -> None:
    names = ["HasField", "FromString", "ParseFromString", "SerializeToString", "IsInitialized", "SetInParent", "from", "self", "value", "DESCRIPTOR", "__class__", "__init__"]  # fmt: skip
    fields = " ".join(
        f'field {{ name: "{name}" number: {at} type: TYPE_STRING oneof_index: {at - 1} proto3_optional: true }}'
        for at, name in enumerate(names, 1)
    )
    one = f'field {{ name: "m" number: {len(names) + 1} type_name: ".M" }}'
    choices = " ".join(f'oneof_decl {{ name: "_o{at}" }}' for at in range(len(names)))
    made = only(
        file(
            f'syntax: "proto3" message_type {{ name: "M" {fields} {one} {choices} nested_type {{ name: "FromString" }} }}'
        )
    )
    within = StructType()
    for name in names:
        within = within.add(name, "string")
    columns = StructType([*within.fields]).add("m", within)
    rows = [{**dict.fromkeys(names, "x"), "m": dict.fromkeys(names, None)}]
    bodies = encoder(header(1) + b"\0", made, FIRST, columns)(pa.array(rows, arrow_type(columns)))
    assert decoded(bodies.to_pylist(), columns, {1: made}) == [(rows[0], None)]


def test_known_types_that_a_schema_declares_in_its_own_way_are_told() -> None:
    strange = file("""
        package: "google.protobuf"
        message_type { name: "M" field { name: "at" number: 1 type_name: "Timestamp" } field { name: "n" number: 2 type_name: "Int32Value" } }
        message_type { name: "Timestamp" field { name: "seconds" number: 1 type: TYPE_STRING } }
        message_type { name: "Int32Value" field { name: "other" number: 1 type: TYPE_STRING } }
    """)
    at = message_class("google.protobuf.M", strange)()
    at.at.seconds = "x"
    for columns, text in (("at timestamp", "Timestamp, not timestamp"), ("n int", "Int32Value, not int")):
        ((value, fault),) = decoded([body(at.SerializeToString())], columns, {1: only(strange)})
        assert value is None and fault.endswith(f"is google.protobuf.{text}")


def test_a_type_of_the_caller_reads_what_a_registry_has_only_as_text() -> None:
    own, indexes = of_set("shop.Order", descriptor_set(LINE, ORDER))
    sent: list[bytes | None] = [
        body(Order(id=1).SerializeToString()),
        body(b"\x08\1", 1, (1,)),
        header(2) + b"\0",
    ]
    assert decoded(sent, COLUMNS, {1: own}, indexes) == [
        ({**EMPTY, "id": 1}, None),
        (None, "message [1] of schema id 1 is not shop.Order"),
        (None, None),
    ]


# -- the way back --------------------------------------------------------------------------------------------


def encoded(rows: list[dict[str, Any]], columns: str, schema: RegisteredSchema = SCHEMA) -> list[bytes]:
    kind = ddl.columns(columns)
    made: list[bytes] = encoder(b"", schema, FIRST, kind)(pa.array(rows, arrow_type(kind))).to_pylist()
    return made


def test_a_null_is_a_field_that_is_not_set() -> None:
    rows = [{"id": None, "name": None, "at": None, "lines": None, "tags": None, "where": {"x": None}}]
    (made,) = encoded(rows, "id int, name string, at timestamp, lines array<struct<sku: string>>, tags map<string, int>, where struct<x: int>")  # fmt: skip
    expected = Order()
    expected.where.SetInParent()
    assert made == expected.SerializeToString()


def test_the_entries_of_a_map_have_an_order() -> None:
    """Spark may execute a row twice, in two processes."""
    tags = {f"k{at}": at for at in range(30)}
    (made,) = encoded([{"tags": list(tags.items())[::-1]}], "tags map<string, int>")
    assert made == Order(tags=tags).SerializeToString(deterministic=True)


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ("ids bigint", "the message shop.Order has no field for the column 'ids'"),
        ("ID bigint", "has no field for the column 'ID'"),
        (
            "lines array<struct<more: int>>",
            "the message shop.Line has no field for the column 'lines[].more'",
        ),
        ("id string", "field 'id' is int64, not string"),
        ("id double", "field 'id' is int64, not double"),
        ("cash double", "field 'cash' is float, not double"),
        ("ratings int", "field 'ratings' is repeated sint32, not int"),
        ("tags array<int>", "field 'tags' is map<string, int32>, not array<int>"),
        ("at timestamp_ntz", "field 'at' is google.protobuf.Timestamp, not timestamp_ntz"),
        ("where int", "field 'where' is shop.Order.Place, not int"),
        ("note struct<other: string>", "has no field for the column 'note.other'"),
    ],
)
def test_columns_that_do_not_fit_are_known_before_a_row_is_written(columns: str, text: str) -> None:
    with pytest.raises(SchemaMismatch) as raised:
        writing(TYPE, ddl.columns(columns))
    assert text in str(raised.value)


@pytest.mark.parametrize(
    ("columns", "row", "text"),
    [
        ("total bigint", {"total": -1}, "a row does not fit the schema of Protobuf (ValueError"),
        ("ratings array<bigint>", {"ratings": [2**31]}, "does not fit the schema of Protobuf (ValueError"),
        ("ratings array<int>", {"ratings": [None]}, "field 'ratings[]' has a null"),
        ("tags map<string, int>", {"tags": [("a", None)]}, "field 'tags{}' has a null"),
        ("lines array<struct<sku: string>>", {"lines": [None]}, "field 'lines[]' has a null"),
        ("id decimal(4,2)", {"id": decimal.Decimal("1.50")}, "1.50 is not a whole number"),
        ("state string", {"state": "GONE"}, "field 'state' is not of the enum shop.State: 'GONE'"),
        ("card string, cash float", {"card": "", "cash": 0.0}, "card and cash are of one oneof"),
    ],
)
def test_a_row_that_does_not_fit_is_one_clear_error(columns: str, row: dict[str, Any], text: str) -> None:
    with pytest.raises(OptionError) as raised:
        encoded([row], columns)
    assert text in str(raised.value)


def test_the_columns_of_a_struct_are_its_fields_and_not_what_it_holds() -> None:
    """The library takes a dict for the contents of a google.protobuf.Struct."""
    from google.protobuf import struct_pb2

    assert struct_pb2.DESCRIPTOR.name == "google/protobuf/struct.proto"  # the default pool has it
    holder = file("""
        syntax: "proto3" dependency: "google/protobuf/struct.proto"
        message_type { name: "M" field { name: "s" number: 1 type_name: ".google.protobuf.Struct" } }
    """)
    rows = [{"s": {"fields": [("a", {"string_value": "x"})]}}, {"s": {"fields": []}}, {"s": None}]
    columns = "s struct<fields: map<string, struct<string_value: string>>>"
    kind = message_class("M", holder)
    filled = kind()
    filled.s["a"] = "x"
    empty = kind()
    empty.s.SetInParent()
    assert encoded(rows, columns, only(holder)) == [
        each.SerializeToString() for each in (filled, empty, kind())
    ]


def test_a_required_field_that_is_null_is_one_clear_error() -> None:
    assert encoded([{"id": 1, "kind": "B"}], "id int, kind string", only(OLD)) == [b"\x08\1\x18\2"]
    for row in ({"id": None, "kind": "B"}, {"id": 1, "kind": "3"}):
        with pytest.raises(OptionError, match="a row does not fit the schema of Protobuf"):
            encoded([row], "id int, kind string", only(OLD))
    with pytest.raises(SchemaMismatch, match="field 'group' is a group"):
        writing(Descriptors.of(only(OLD)).at(FIRST), ddl.columns("group struct<a: int>"))


def test_a_nan_is_a_number_of_protobuf() -> None:
    made = encoded([{"cash": float("nan")}, {"cash": float("-inf")}], "cash float")
    assert [struct.unpack("<f", each[1:])[0] for each in made][1] == float("-inf")
    found = decoded([body(each) for each in made], "cash float")
    assert str(found[0][0]["cash"]) == "nan" and found[1] == ({"cash": float("-inf")}, None)
