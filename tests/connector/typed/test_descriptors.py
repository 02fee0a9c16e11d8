"""Descriptors: the files of a schema and their imports, and what is refused in one clear way."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Iterable
from typing import Any

import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import MapType, StringType, StructField, StructType

from broker_core.core.errors import OptionError
from connector.typed.decode_udf import UnsupportedSchema
from connector.typed.protobuf.descriptors import Descriptors, descriptor_of, of_set
from connector.typed.protobuf.read import SchemaMismatch, columns_of, reading
from connector.typed.protobuf.write import writing
from connector.typed.registry.client import RegisteredSchema
from tests.gates import examples
from tests.protobuf_files import LINE, OLD, ORDER, descriptor_set, file, serialized

NAMED = (("shop/line.proto", serialized(LINE)),)


def described(text: str, named: Iterable[tuple[str, str]] = ()) -> Descriptors:
    return Descriptors.of(RegisteredSchema("PROTOBUF", (text,), tuple(named)))


def of(*files: FileDescriptorProto) -> Descriptors:
    """The last one, which imports the others."""
    return described(serialized(files[-1]), [(each.name, serialized(each)) for each in files[:-1]])


def test_the_indexes_count_top_level_messages_and_those_within_them() -> None:
    found = of(LINE, ORDER)
    for indexes, name in (
        ((0,), "Order"),
        ((1,), "Cancelled"),
        ((0, 0), "Order.Place"),
        ((0, 0, 0), "Order.Place.Deep"),
    ):
        assert found.at(indexes).full_name == f"shop.{name}"
        assert found.indexes(name) == found.indexes(f"shop.{name}") == indexes
    assert found.indexes(None) == (0,)
    for indexes in ((2,), (0, 3), (0, 0, 0, 0), (2**31 - 1,)):
        with pytest.raises(UnsupportedSchema, match="has no message"):
            found.at(indexes)
    for name in ("Line", "shop", "", "Order.TagsEntry", "shop.shop.Order", "Order."):
        with pytest.raises(UnsupportedSchema, match="has no message"):
            found.indexes(name)


def test_clients_that_count_maps_differently_are_not_guessed() -> None:
    """protoc puts the message of a map where its field stands; a client that reads the text has none."""
    before = file("""
        message_type {
          name: "M"
          nested_type { name: "First" }
          nested_type {
            name: "TagsEntry" options { map_entry: true }
            field { name: "key" number: 1 type: TYPE_STRING } field { name: "value" number: 2 type: TYPE_STRING }
          }
          nested_type { name: "Last" }
          field { name: "tags" number: 1 label: LABEL_REPEATED type: TYPE_MESSAGE type_name: ".M.TagsEntry" }
        }
    """)
    found = of(before)
    assert found.at((0, 0)).full_name == "M.First"
    for indexes in ((0, 1), (0, 2)):
        with pytest.raises(UnsupportedSchema, match="on which all clients agree"):
            found.at(indexes)
    with pytest.raises(UnsupportedSchema, match="on which all clients agree"):
        found.indexes("M.Last")


def test_imports_that_everybody_has_need_no_reference() -> None:
    made = file("""
        syntax: "proto3" dependency: ["google/type/date.proto", "confluent/type/decimal.proto", "confluent/meta.proto",
                                      "buf/validate/validate.proto", "google/protobuf/struct.proto"]
        message_type {
          name: "M"
          field { name: "day" number: 1 type_name: ".google.type.Date" }
          field { name: "price" number: 2 type_name: ".confluent.type.Decimal" }
        }
    """)  # without the types of fields, as a registry may write it
    assert columns_of(of(made).at((0,))).simpleString() == (
        "struct<day:struct<year:int,month:int,day:int>,price:struct<value:binary,precision:bigint,scale:int>>"
    )


def test_an_import_that_nobody_has_is_named_if_a_type_is_in_it() -> None:
    made = file(
        'dependency: "a.proto" message_type { name: "M" field { name: "a" number: 1 type_name: ".A" } }'
    )
    with pytest.raises(
        UnsupportedSchema, match=r"is not a schema of Protobuf .*imports a\.proto, which nobody has"
    ):
        of(made)


def test_two_schemas_may_declare_one_name_differently() -> None:
    """The first of two references with one name holds."""
    texts = [
        file(
            f'name: "x.proto" message_type {{ name: "X" field {{ name: "{name}" number: 1 type: TYPE_INT32 }} }}'
        )
        for name in "ab"
    ]
    user = file(
        'dependency: "x.proto" message_type { name: "U" field { name: "x" number: 1 type_name: ".X" } }'
    )
    for first, last in (texts, texts[::-1]):
        found = columns_of(of(first, last, user).at((0,))).simpleString()
        assert found == f"struct<x:struct<{first.message_type[0].field[0].name}:int>>"


HOSTILE: list[tuple[str, str]] = [
    ('dependency: "txmq_schema.proto"', "imports itself"),
    ('dependency: "a.proto"', "a file that imports itself: a.proto"),
    ('dependency: "../../etc/passwd"', "has no message"),
    ('dependency: "google/protobuf/../../os.proto"', "has no message"),
    ("", "has no message"),
    ('syntax: "proto9" message_type { name: "M" }', "is not a schema of Protobuf"),
    ('syntax: "editions" edition: EDITION_99999_TEST_ONLY message_type { name: "M" }', "is not a schema of Protobuf"),
    ('message_type { name: "M" } message_type { name: "M" }', "is not a schema of Protobuf"),
    ('message_type { name: "" }', "is not a schema of Protobuf"),
    ('message_type { name: "M" field { name: "a" number: 0 type: TYPE_INT32 } }', "is not a schema of Protobuf"),
    ('message_type { name: "M" field { name: "a" number: 1 type: TYPE_MESSAGE type_name: ".None" } }', "is not a schema of Protobuf"),
    ('message_type { name: "M" field { name: "a" number: 1 type: TYPE_INT32 } field { name: "b" number: 1 type: TYPE_INT32 } }', "is not a schema of Protobuf"),
    ('message_type { name: "M" field { name: "a" number: 1 type: TYPE_ENUM type_name: ".M" } }', "is not a schema of Protobuf"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "reason"), HOSTILE)
def test_a_hostile_schema_is_refused_in_one_way(text: str, reason: str) -> None:
    circle = [file(f'name: "{a}.proto" dependency: "{b}.proto"') for a, b in ("ab", "ba")]
    with pytest.raises(UnsupportedSchema, match=reason):
        of(*circle, file(text))


def test_a_long_chain_of_imports_is_read_and_one_without_an_end_is_refused() -> None:
    def chain(length: int) -> Descriptors:
        files = [file(f'name: "{at}" dependency: "{at - 1}"') for at in range(1, length)]
        return of(*files, file(f'dependency: "{length - 1}" message_type {{ name: "M" }}'))

    assert chain(50).at((0,)).full_name == "M"
    with pytest.raises(UnsupportedSchema, match="RecursionError"):
        chain(5_000)


@given(st.data())
@examples(150)
def test_damaged_files_are_read_or_refused(data: Any) -> None:
    sound = base64.b64decode(serialized(data.draw(st.sampled_from([ORDER, OLD]))))
    damaged = bytearray(sound)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(damaged)))
        damaged[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
    with contextlib.suppress(UnsupportedSchema):
        found = described(base64.b64encode(bytes(damaged)).decode(), NAMED)
        columns_of(found.at((0,)))


@pytest.mark.parametrize("text", ["", "?", "AA=", "syntax = \"proto3\";", "AAAA", "\u00e9", "AAA\n"])  # fmt: skip
def test_what_is_no_file_is_refused(text: str) -> None:
    with pytest.raises(UnsupportedSchema):
        described(text)


def test_types_that_would_be_endless_need_columns_of_the_caller() -> None:
    node = file('message_type { name: "N" field { name: "next" number: 1 type_name: ".N" } }')
    with pytest.raises(UnsupportedSchema, match="has the type N within itself: give the columns"):
        columns_of(of(node).at((0,)))
    levels = "".join(
        f'message_type {{ name: "M{at}" field {{ name: "a" number: 1 type_name: ".M{at + 1}" }}'
        f' field {{ name: "b" number: 2 type_name: ".M{at + 1}" }} }}'
        for at in range(40)
    )
    bomb = file(levels + 'message_type { name: "M40" field { name: "a" number: 1 type: TYPE_INT32 } }')
    with pytest.raises(UnsupportedSchema, match="has more than 10,000 columns"):
        columns_of(of(bomb).at((0,)))
    with pytest.raises(UnsupportedSchema, match=r"has the group Old\.group"):
        columns_of(of(OLD).at((0,)))
    with pytest.raises(UnsupportedSchema, match="has no field"):
        columns_of(of(file('message_type { name: "M" }')).at((0,)))


def test_a_map_without_a_key_is_damage() -> None:
    made = of(
        file("""
        message_type {
          name: "M"
          field { name: "m" number: 1 label: LABEL_REPEATED type: TYPE_MESSAGE type_name: ".M.E" }
          nested_type { name: "E" options { map_entry: true } field { name: "kez" number: 1 type: TYPE_STRING } field { name: "value" number: 2 type: TYPE_INT32 } }
        }
    """)
    )
    with pytest.raises(UnsupportedSchema, match="which is damaged"):
        columns_of(made.at((0,)))
    columns = StructType([StructField("m", MapType(StringType(), StringType()))])
    for make in (reading, writing):
        with pytest.raises(SchemaMismatch, match="the message M is damaged"):
            make(made.at((0,)), columns)


def test_a_descriptor_set_of_protoc_has_the_file_of_the_message() -> None:
    data = descriptor_set(LINE, ORDER)
    for name, expected in (("shop.Order.Place", (0, 0)), ("shop.Line", (0,)), ("Cancelled", (1,))):
        schema, indexes = of_set(name, data)
        assert indexes == expected
        assert Descriptors.of(schema).at(indexes).full_name.endswith(name)
    for broken, message, reason in (
        (data, "None", "has no message 'None'"),
        (b"\xff", "shop.Order", "is not a descriptor set"),
        (b"", "shop.Order", "has no message"),
        (descriptor_set(ORDER), "shop.Order", "is not a schema of Protobuf"),
        (descriptor_pb2.FileDescriptorSet(file=[FileDescriptorProto(name="a", dependency=["a"])]).SerializeToString(), "a", "has no message"),
    ):  # fmt: skip
        with pytest.raises(UnsupportedSchema, match=reason):
            of_set(message, broken)
    for schema in (None, "shop.Order", ("shop.Order",), ("shop.Order", "/nowhere"), (1, b"")):
        with pytest.raises(OptionError):
            descriptor_of(schema)
