"""Typed messages with a schema registry: a real HTTP server says what each id is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from broker_core.core.errors import OptionError, RegistryFailed, cause
from connector.batch.foreach_batch import BatchTransaction
from connector.typed.decode import decode
from connector.typed.encode import encode
from connector.typed.registry import client as module
from connector.typed.registry.client import SchemaRegistry
from connector.typed.registry.wire_format import NO_HEADER, header
from tests.connector.typed.test_avro import ORDER, body
from tests.protobuf_files import LINE, descriptor_set, file
from tests.protobuf_files import ORDER as ORDERS
from tests.registry_server import RegistryServer
from tests.spark.test_decode import frame, told
from tests.spark.test_foreach_batch import run

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("interpreted")]

OLD = {"type": "record", "name": "Order", "fields": [{"name": "id", "type": "int"}]}
NAME = {"name": "name", "type": ["null", "string"], "default": None}
NEW = {"type": "record", "name": "Order", "fields": [{"name": "id", "type": "long"}, NAME]}
SET = descriptor_set(LINE)
LIST = {"type": "record", "name": "List", "fields": [{"name": "next", "type": ["null", "List"]}]}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[RegistryServer]:
    monkeypatch.setattr(module, "_WAITS_S", (0.001,))
    made = RegistryServer()
    yield made
    made.close()


def test_a_batch_has_bodies_of_several_ids_and_each_broken_one_its_reason(
    spark: SparkSession, server: RegistryServer
) -> None:
    old, new = server.add("orders", OLD), server.add("orders", NEW)
    text, endless = server.add("text", {}, "JSON"), server.add("list", LIST)
    order = body({"id": 3, "name": "c"}, NEW, new)
    avro: list[tuple[bytes | None, Any]] = [
        (body({"id": 1}, OLD, old), (1, None)),
        (body({"id": 2, "name": "b"}, NEW, new), (2, "b")),
        (None, "the body is null"),
        (b"", "the body is empty"),
        (b"\0\0\0\0", NO_HEADER),
        (b"\1" + order[1:], NO_HEADER),
        (order[5:], NO_HEADER),
        (header(99) + order[5:], "schema id 99 is not in the schema registry"),
        (b"\0\xff\xff\xff\xff\2", "schema id 4294967295 is not in the schema registry"),
        (header(text) + order[5:], f"schema id {text} is JSON, not AVRO"),
        (header(endless) + b"\0", f"schema id {endless} has the type List within itself"),
        (header(new), "the body is not Avro of the schema (EOFError"),
        (order + b"\0", "the body has 1 bytes behind the value"),
        (order, (3, "c")),
    ]
    rows = frame(spark, [sent for sent, _ in avro])
    decoded = decode(rows, format="avro", registry=server.url, subject="orders", keep=["offset"])
    server.close()  # it is not asked again, whatever is executed how often
    for (sent, expected), found in zip(avro, told(decoded), strict=True):
        assert found == expected if isinstance(expected, tuple) else found.startswith(expected), (sent, found)
    assert ("GET", f"/schemas/ids/{(1 << 32) - 1}") not in server.asked


def test_what_encode_registers_decode_reads(spark: SparkSession, server: RegistryServer) -> None:
    rows = spark.range(2).selectExpr(
        "id", "array(struct(id / 2 AS half)) AS list", "map('k', id) AS map", "'key' AS routing_key"
    )
    columns = rows.drop("routing_key").schema
    contract = json.dumps({"type": "object"})
    wanted = {"registry": SchemaRegistry(server.url), "subject": "orders-value"}
    for format, schema in (("avro", None), ("json", contract)):
        messages = encode(rows, schema, format, **wanted).coalesce(1)  # type: ignore[arg-type]
        assert messages.columns == ["routing_key", "body", "properties"]
        written = server.by_id[len(server.by_id)]
        assert schema in (None, written["schema"])
        if format == "avro":
            again = decode(messages, written["schema"], "avro", "fail", registry=server.url)
        else:
            again = decode(messages, columns, "json", "fail", registry=server.url)
        assert sorted(map(tuple, again.collect())) == sorted(map(tuple, rows.drop("routing_key").collect()))
    mixed = (
        encode(rows, None, "avro", **wanted)
        .select("body")
        .union(encode(rows, contract, "json", **wanted).select("body"))
    )
    nulls = decode(mixed, "id bigint", mode="null", registry=server.url).collect()
    assert sorted(str(row["id"]) for row in nulls) == ["0", "1", "None", "None"]
    (row,) = encode(rows.limit(1), contract, "json", **wanted).collect()
    assert row["properties"]["content_type"] == "application/octet-stream"
    with pytest.raises(Exception) as raised:
        encode(rows.selectExpr("IF(id = 1, NULL, id) AS id"), json.dumps(OLD), "avro", **wanted).collect()
    assert "a row does not fit the schema of Avro" in str(cause(raised.value))


def test_a_registry_that_cannot_be_reached_fails_the_batch_and_nothing_is_rejected(
    rig: Any, server: RegistryServer
) -> None:
    rig.declare("in", "dead", "out")
    number, url = server.add("s", {}, "JSON"), server.url
    with rig.broker.channel() as channel:
        for sent in (header(number) + b'{"id": 1}', header(number + 1) + b'{"id": 2}', header(number) + b"x"):
            channel.publish(sent, routing_key="in")

    def fn(batch: DataFrame, tx: BatchTransaction) -> None:
        decoded = decode(batch, "id bigint not null", registry=url)
        tx.publish(decoded.good.selectExpr("CAST(id AS STRING) AS body"), queue="out")
        tx.reject(decoded, queue="dead")

    for answer in (b"<html>", b'{"error_code": 404}'):
        server.broken.append((404, answer))
        with pytest.raises(Exception) as raised:
            run(rig, fn)
        assert type(cause(raised.value)) is RegistryFailed
        assert rig.bodies("dead") == [] and rig.broker.engine.last_entry("app") is None
    run(rig, fn)
    assert rig.bodies("out") == ["1"]
    assert sorted(body[5:] for body in rig.bodies("dead")) == ["x", '{"id": 2}']


def test_a_batch_of_protobuf_has_several_ids_and_messages_and_the_way_back(
    spark: SparkSession, server: RegistryServer
) -> None:
    old = file(
        'syntax: "proto3" message_type { name: "Order" field { name: "id" number: 9 type: TYPE_INT32 } }'
    )
    older = server.add_file("orders", old)
    server.add_file(LINE.name, LINE)
    number, text = server.add_file("orders", ORDERS, LINE.name), server.add("text", {}, "JSON")
    damaged = server.add("damaged", "?", "PROTOBUF")
    server.files[damaged] = "AAAA"
    rows = spark.sql("""SELECT 1L AS id, 'PAID' AS state, timestamp_micros(2) AS at, map('k', 3) AS tags,
                        array(named_struct('sku', 'a', 'price', 0.5D)) AS lines, 'key' AS routing_key""")
    wanted: Any = {"format": "protobuf", "registry": server.url, "subject": "orders"}
    (message,) = encode(rows, **wanted).collect()
    assert (
        message["routing_key"] == "key"
        and message["properties"]["content_type"] == "application/octet-stream"
    )
    order = bytes(message["body"])
    protobuf: list[tuple[bytes | None, Any]] = [
        (order, (1, "PAID")),
        (header(number) + b"\2\2" + b"\x08\5", (5, None)),
        (header(older) + b"\0" + b"\x48\7", (7, None)),
        (None, "the body is null"),
        (b"\1" + order[1:], NO_HEADER),
        (header(99) + order[5:], "schema id 99 is not in the schema registry"),
        (header(text) + order[5:], f"schema id {text} is JSON, not PROTOBUF"),
        (header(damaged) + order[5:], f"schema id {damaged} is not a schema of Protobuf ("),
        (header(number), "the body has no message indexes"),
        (header(number) + b"\2\4", f"schema id {number} has no message [2]"),
        (order[:-1], "the body is not Protobuf of the schema (DecodeError"),
        (order, (1, "PAID")),
    ]
    batch = frame(spark, [sent for sent, _ in protobuf])
    decoded = decode(batch, keep=["offset"], **wanted)
    server.serializes = "never"
    only_text = {"registry": f"{server.url}/", "schema": ("shop.Order", descriptor_set(LINE, ORDERS))}
    own = decode(batch.where("offset < 2"), format="protobuf", mode="null", **only_text)
    server.close()  # it is not asked again, whatever is executed how often
    for (sent, expected), found in zip(protobuf, told(decoded), strict=True):
        if isinstance(expected, tuple):
            row = dict(zip(own.columns, found, strict=True))
            assert (row["id"], row["state"]) == expected
        else:
            assert found.startswith(expected), (sent, found)
    assert row["at"].microsecond == 2 and row["tags"] == {"k": 3} and row["lines"] == [("a", 0.5)]
    assert [each["id"] for each in own.collect()] == [1, None]


def test_json_is_validated_against_the_schema_of_its_id_if_that_is_asked(
    spark: SparkSession, server: RegistryServer
) -> None:
    server.add("line.json", {"required": ["sku"]}, "JSON")
    reference = {"name": "line.json", "subject": "line.json", "version": 1}
    contract = {"properties": {"id": {"minimum": 1}, "lines": {"items": {"$ref": "line.json"}}}}
    number = server.add("orders", contract, "JSON", [reference])
    anything, broken = server.add("any", {}, "JSON"), server.add("broken", {"type": 5}, "JSON")
    bodies: list[tuple[bytes | None, Any]] = [
        (header(number) + b'{"id": 1, "lines": [{"sku": "a"}]}', (1,)),
        (header(number) + b'{"id": 0}', "the body is not valid at $.id: minimum (0 is less than"),
        (header(number) + b'{"id": 1, "lines": [{}]}', "the body is not valid at $.lines[0]: required"),
        (header(number) + b'{"id": "x"}', "field 'id' is not int"),
        (header(number) + b'{"id": 1', "the body is not one JSON object"),
        (header(anything) + b'{"id": 0}', (0,)),
        (header(anything) + b"{'id': 2}", "the body is not JSON (JSONDecodeError"),  # Spark reads it
        (header(broken) + b'{"id": 1}', f"schema id {broken} is not a JSON Schema (at $.type"),
        (header(anything) + b'{"id": "\xff"}', "the body is not UTF-8"),
        (header(anything) + b'{"id": 3, "\\ud800": 1}', (3,)),
        (header(99) + b"{}", "schema id 99 is not in the schema registry"),
        (b"\0\xff\xff\xff\xff{}", "schema id 4294967295 is not in the schema registry"),
        (None, "the body is null"),
    ]
    batch = frame(spark, [sent for sent, _ in bodies])
    decoded = decode(batch, "id int", registry=server.url, validate=True, keep=["offset"])
    text = json.dumps({"properties": {"id": {"maximum": 0}}})
    both: Any = {"registry": server.url, "subject": "small", "validate": True}
    fits, fails = (encode(spark.range(at, at + 1), text, **both) for at in (0, 1))
    server.close()
    for (sent, expected), found in zip(bodies, told(decoded), strict=True):
        assert found == expected if isinstance(expected, tuple) else found.startswith(expected), (sent, found)
    assert bytes(fits.collect()[0]["body"])[5:] == b'{"id":0}'
    with pytest.raises(Exception) as raised:
        fails.collect()
    assert "a row does not fit the JSON Schema: the body is not valid at $.id: maximum" in str(
        cause(raised.value)
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"format": "csv", "schema": "id int"}, "decode supports no registry for format 'csv'"),
        ({"format": "avro"}, "avro with a registry needs a schema or a subject"),
        ({"format": "avro", "schema": "{}", "subject": "s"}, "needs a schema or a subject"),
        ({"format": "avro", "schema": "id int"}, "the schema is not a schema of Avro"),
        ({"format": "avro", "schema": '"string"'}, "the schema is of type string, not a record"),
        ({"format": "avro", "subject": "none"}, "has no subject 'none'"),
        ({"format": "avro", "schema": json.dumps(ORDER), "options": {"a": "b"}}, "got options"),
        ({"schema": "id int", "subject": "s"}, "decode of json got a subject"),
        ({"schema": "id int", "registry": None, "subject": "s"}, "but no registry"),
        ({"schema": "id int", "registry": "registry:8081"}, "the url of the schema registry is invalid"),
        ({"schema": "id int", "column": "text"}, "needs a binary column"),
        (
            {"schema": "id int", "registry": None, "validate": True},
            "validate=True, which is for json with a registry",
        ),
        (
            {"format": "avro", "subject": "none", "validate": True},
            "validate=True, which is for json with a registry",
        ),
        ({"format": "protobuf"}, "protobuf with a registry needs a schema or a subject"),
        ({"format": "protobuf", "schema": "id"}, "is not DDL"),
        ({"format": "protobuf", "schema": "id date"}, "Protobuf has no type for column 'id' of type date"),
        ({"format": "protobuf", "subject": "none"}, "has no subject 'none'"),
        ({"format": "protobuf", "subject": "lines", "options": {"a": "b"}}, "got options"),
        ({"format": "protobuf", "subject": "lines", "schema": "skus string"}, "has no field 'skus'"),
        ({"format": "protobuf", "subject": "lines", "schema": "sku int"}, "field 'sku' is string, not int"),
        ({"format": "protobuf", "schema": ("shop.Line", b"?")}, "the descriptor set is not a descriptor set"),
        ({"format": "protobuf", "schema": ("Order", SET)}, "the descriptor set has no message 'Order'"),
        (
            {"format": "protobuf", "schema": ("shop.Line", SET), "subject": "lines"},
            "a descriptor set and a subject",
        ),
    ],
)
def test_a_wrong_argument_is_one_clear_error(
    spark: SparkSession, server: RegistryServer, arguments: dict[str, Any], text: str
) -> None:
    server.add_file("lines", LINE)
    rows = frame(spark, []).selectExpr("*", "'' AS text")
    with pytest.raises(OptionError) as raised:
        decode(rows, **{"registry": server.url, **arguments})
    assert text in str(raised.value)


def test_what_cannot_be_encoded_is_one_clear_error(spark: SparkSession, server: RegistryServer) -> None:
    server.add_file("lines", LINE)
    rows, both = spark.range(1), {"registry": server.url, "subject": "s"}
    lines = {"registry": server.url, "subject": "lines"}
    for arguments, text in (
        ({"registry": server.url}, "only one of registry and subject"),
        ({"format": "csv", **both}, "encode supports no registry for format 'csv'"),
        ({"format": "json", **both}, "format 'json' got the schema None"),
        ({"format": "avro", "schema": '"string"', **both}, "not a record"),
        ({"schema": '"incompatible"', **both}, "refuses a schema for subject 's'"),
        ({"schema": '{"type": 5}', "validate": True, **both}, "the schema is not a JSON Schema"),
        ({"validate": True}, "validate=True, which is for json with a registry"),
        ({"format": "protobuf", **both}, "has no subject 's'"),
        ({"format": "protobuf", **lines}, "no field for the column 'id'"),
        ({"format": "protobuf", "schema": "Lines", **lines}, "has no message 'Lines'"),
        ({"format": "protobuf", "schema": ("shop.Line", SET), **lines}, "give the name of a message"),
        ({"format": "protobuf", "options": {"a": "b"}, **lines}, "got options"),
    ):
        with pytest.raises(OptionError, match=text):
            encode(rows, **arguments)  # type: ignore[arg-type]
