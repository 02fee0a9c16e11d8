"""Typed messages: what is good and what is broken, and the way of a broken one to its dead-letter exchange."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from broker_core.core.errors import DecodeError, OptionError, cause
from broker_core.message.field_table import Long
from broker_core.message.properties import Properties
from connector.batch.foreach_batch import BatchTransaction
from connector.typed.decode import Decoded, decode
from connector.typed.encode import CONTENT_TYPES, encode
from tests.progress import wait_until
from tests.protobuf_files import LINE as LINE_FILE
from tests.protobuf_files import ORDER as ORDERS
from tests.protobuf_files import descriptor_set
from tests.spark.test_foreach_batch import run

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("interpreted")]

ORDER = "id bigint not null, amount double, name string, price decimal(6,2), at timestamp, n int"
NESTED = f"{ORDER}, where struct<x: int not null, y: int>, lines array<struct<sku: string not null>>, tags map<string, int>"


def frame(spark: SparkSession, bodies: Sequence[bytes | None]) -> DataFrame:
    return spark.createDataFrame(list(enumerate(bodies)), "offset bigint, body binary").coalesce(1)


def told(decoded: Decoded) -> list[Any]:
    """By offset: the decoded values of a good row, or the reason of a rejected one. Each row is one of both."""
    good = {row["offset"]: tuple(row)[1:] for row in decoded.good.collect()}
    rejected = {row["offset"]: row["reason"] for row in decoded.rejected.collect()}
    assert good.keys().isdisjoint(rejected)
    found = {**good, **rejected}
    return [found[offset] for offset in range(len(found))]


# -- Avro and Protobuf without a registry --------------------------------------------------------------------

AVRO = {
    "type": "record",
    "name": "Line",
    "fields": [
        {"name": "sku", "type": ["null", "string"], "default": None},
        {"name": "price", "type": ["null", "double"], "default": None},
    ],
}


@pytest.mark.parametrize(
    ("format", "schema", "reason"),
    [
        ("avro", json.dumps(AVRO), "the body is not Avro of the schema ("),
        (
            "protobuf",
            ("shop.Line", descriptor_set(ORDERS, LINE_FILE)),
            "the body is not Protobuf of the schema (",
        ),
    ],
)
def test_a_damaged_body_of_avro_or_protobuf_is_rejected_without_a_registry_too(
    spark: SparkSession, format: Any, schema: Any, reason: str
) -> None:
    """Spark's functions give a row of nulls for it, and a length of two gigabytes ends the JVM."""
    rows = spark.createDataFrame([("a", 0.5), (None, 1.5)], "sku string, price double").coalesce(1)
    messages = encode(rows, schema, format)
    assert messages.select("properties.content_type").first() == (CONTENT_TYPES[format],)
    sound, second = (bytes(row["body"]) for row in messages.collect())
    huge = b"\2\xf6\xff\xff\xff\x0f" if format == "avro" else b"\x0a\xf6\xff\xff\xff\x07"
    damaged = [sound[:-1], b"\xff" * 9, huge]
    decoded = decode(frame(spark, [sound, None, b"", *damaged, second]), schema, format, keep=["offset"])
    good, null, empty, *rejected, last = told(decoded)
    assert good == ("a", 0.5) and last == (None if format == "avro" else "", 1.5)
    assert (null, empty) == ("the body is null", "the body is empty")
    assert all(each.startswith(reason) for each in rejected), rejected


# -- JSON ----------------------------------------------------------------------------------------------------

DEEP = 3_000  # levels; Spark's parser takes 1,000
NOT_AN_OBJECT = "the body is not one JSON object"
NO_BRACE = "the body does not begin with {, as a JSON object does"
FOLLOWED = "something follows the JSON object in the body"
NOT_FINITE = "the body has NaN or infinity: JSON has neither"
COMMENT = "the body has a comment, which JSON does not have"
BROKEN: list[tuple[bytes | None, str]] = [
    (None, "the body is null"),
    (b"", "the body is empty"),
    (b" \n", NOT_AN_OBJECT),
    (b"null", NO_BRACE),
    (b'\xff{"id": 1}', "the body is not UTF-8"),
    (b'{"id": 1, "name": "\xff"}', "the body is not UTF-8"),
    # malformed
    (b"{", NOT_AN_OBJECT),
    (b'{"id": 1', NOT_AN_OBJECT),
    (b'{"id": 1,}', NOT_AN_OBJECT),
    (b'{"id": 01}', NOT_AN_OBJECT),
    (b'\xef\xbb\xbf{"id": 1}', "the body begins with a byte order mark"),
    ('{"id": 1}'.encode("utf-16-le"), "the body is UTF-16, not UTF-8"),
    ('{"id": 1}'.encode("utf-16-be"), "the body is UTF-16, not UTF-8"),
    ('\n{"id": 1}'.encode("utf-16-le"), "the body is UTF-16, not UTF-8"),
    ('{"id": 1}'.encode("utf-16"), "the body is UTF-16, not UTF-8"),
    ('\ufeff{"id": 1}'.encode("utf-16-be"), "the body is UTF-16, not UTF-8"),
    *(
        (text.encode("utf-32-" + end), "the body is UTF-32, not UTF-8")
        for end in ("le", "be")
        for text in ("{", "\ufeff{")
    ),
    (b"NaN", NOT_FINITE),
    (b'{"id": -Infinity}', NOT_FINITE),
    (b'/* an order */ {"id": 1}', COMMENT),
    (b'{"id": 1 // one\n,}', COMMENT),
    # what only looks like a cause: within a text, and behind the part that is looked at
    (b'{"id": 1, "z": "// NaN \\\\\\" } x",}', NOT_AN_OBJECT),
    (b'{"id": 1, "z": "' + b'\\\\\\"' * 20_000 + b'" // x', NOT_AN_OBJECT),
    (b'{"id": 1, "z": ' + b"[" * DEEP + b"]" * DEEP + b"}", NOT_AN_OBJECT),
    # another value
    (b"5", NO_BRACE),
    (b'"x"', NO_BRACE),
    (b"[]", NO_BRACE),
    (b'[{"id": 1}]', NO_BRACE),
    # something behind the value
    (b'{"id": 1} x', FOLLOWED),
    (b'{"id": 1}{"id": 2}', FOLLOWED),
    (b'{"id": 1}\x00', FOLLOWED),
    (b'{"id": 1},{"id": 2}', NOT_AN_OBJECT),
    (b'{"id": 1}]', NOT_AN_OBJECT),
    (b'{"id": 1}]}', NOT_AN_OBJECT),
    (b'{"id": 1}],"z":[{"id": 2}', NOT_AN_OBJECT),
    (b'{"id": 1}}', NOT_AN_OBJECT),
    (b'{"id": 1} {}', FOLLOWED),
    (b'{"id": 1} }', NOT_AN_OBJECT),
    (b'{"id": 1, "z": {"a": 1}', NOT_AN_OBJECT),
    (b'{"id": 1, "z": "}', NOT_AN_OBJECT),
    (b'{"id": 1, "z": "\\}', NOT_AN_OBJECT),
    (b'{"id": 1,}', NOT_AN_OBJECT),
    (b'[{"id": 1}', NO_BRACE),
    (b'{"id": 1} // }', COMMENT),
    (b"}", NO_BRACE),
    # types
    (b'{"id": "a"}', "field 'id' is not bigint"),
    (b'{"id": "1"}', "field 'id' is not bigint"),
    (b'{"id": 1.5}', "field 'id' is not bigint"),
    (b'{"id": true}', "field 'id' is not bigint"),
    (b'{"id": 1, "amount": "x"}', "field 'amount' is not double"),
    (b'{"id": 1, "n": 3000000000}', "field 'n' is not int"),
    (b'{"id": 1, "at": "yesterday"}', "field 'at' is not timestamp"),
    (b'{"id": 1, "where": 5}', "field 'where' is not struct<x:int,y:int>"),
    (b'{"id": 1, "tags": {"a": "b"}}', "field 'tags' is not map<string,int>"),
    # numbers
    (b'{"id": 99999999999999999999}', "field 'id' is not bigint"),
    (b'{"id": 1, "amount": 1e400}', "field 'amount' is too large for double"),
    (b'{"id": 1, "amount": "NaN"}', "field 'amount' is not double"),
    (b'{"id": 1, "price": 12345.67}', "field 'price' is not decimal(6,2)"),
    # what is not null
    (b"{}", "field 'id' is missing or null"),
    (b"{" + b" " * 100 + b"}\n", "field 'id' is missing or null"),
    (b'{"ID": 1}', "field 'id' is missing or null"),
    (b'{"id": null, "name": "x"}', "field 'id' is missing or null"),
    (b'{"id": 1, "where": {"y": 1}}', "field 'where.x' is missing or null"),
    (b'{"id": 1, "lines": [{"sku": "a"}, {}]}', "field 'lines[].sku' is missing or null"),
]
NOTHING = (None,) * 8
GOOD: list[tuple[bytes, tuple[Any, ...]]] = [
    (b'{"id": 1}', (1, *NOTHING)),
    (b'\n {"id": 1, "unknown": [1, {}]} \t\r\n', (1, *NOTHING)),
    (b'{"id": 1, "id": 2}', (2, *NOTHING)),  # Spark takes the last
    (b'{"id": 1, "name": 5}', (1, None, "5", *NOTHING[2:])),  # Spark takes any value as text
    ('{"id": 1, "name": "\u00e9\U0001f600"}'.encode(), (1, None, "\u00e9\U0001f600", *NOTHING[2:])),
    (b'{"id": 1, "amount": 1e2, "n": 3}', (1, 100.0, None, None, None, 3, None, None, None)),
    (b'{"id": 1, "where": {"x": 2}, "lines": [{"sku": "a"}]}', (1, *NOTHING[:5], (2, None), [("a",)], None)),
    (b'{"id": 1, "lines": [], "tags": {"a": null}}', (1, *NOTHING[:6], [], {"a": None})),
]


def test_a_body_of_json_is_one_object_of_the_schema_or_is_rejected_with_the_reason(
    spark: SparkSession,
) -> None:
    bodies = [body for body, _ in BROKEN] + [body for body, _ in GOOD]
    found = told(decode(frame(spark, bodies), NESTED, keep=["offset"]))
    text = frame(spark, [b'{"id": 1}', b"{"]).selectExpr("offset", "CAST(body AS STRING) AS value")
    assert told(decode(text, ORDER, column="value", keep="offset"))[0][0] == 1
    expected = [reason for _, reason in BROKEN] + [values for _, values in GOOD]
    assert dict(zip(bodies, found, strict=True)) == dict(zip(bodies, expected, strict=True))


@pytest.mark.soak  # two thousand conditions take Spark half a minute
def test_a_schema_may_have_a_thousand_fields_that_are_not_null(spark: SparkSession) -> None:
    names = [f"c{number}" for number in range(1_000)]
    whole = {name: number for number, name in enumerate(names)}
    bodies = [json.dumps(each).encode() for each in (whole, {**whole, "c999": None})]
    decoded = decode(frame(spark, bodies), ", ".join(f"{name} DOUBLE NOT NULL" for name in names))
    assert decoded.good.select("c999").collect() == [(999.0,)]
    (broken,) = decoded.rejected.select("reason").collect()
    assert broken.reason == "field 'c999' is missing or null"


def test_whatever_json_another_parser_refuses_is_rejected_too(spark: SparkSession, seed: int) -> None:
    """Valid bodies with random damage: what is good is what Python's parser reads, and has its values."""
    choice = random.Random(seed)
    pieces = [
        b"{",
        b"}",
        b"[",
        b"]",
        b",",
        b":",
        b'"',
        b"1",
        b"null",
        b" ",
        b"\\",
        b"\n",
        b'{"id":2}',
        b"\xff",
        b"\x00",
    ]
    bodies = []
    for number in range(1_500):
        body = json.dumps(
            {"id": number, "name": choice.choice(["a", 'q"]}', "\u00fc"]), "n": None, "z": [{}]}
        ).encode()
        for _ in range(choice.randrange(3)):
            start = choice.randrange(len(body) + 1)
            body = body[:start] + choice.choice(pieces) + body[start + choice.randrange(3) :]
        bodies.append(body)
    found = told(decode(frame(spark, bodies), "id bigint not null, name string", keep=["offset"]))
    assert 200 < sum(isinstance(one, str) for one in found) < 1_300
    for body, one in zip(bodies, found, strict=True):
        if isinstance(one, tuple):
            read = json.loads(body)
            assert (read["id"], read.get("name")) == one, body
        else:
            assert not _is_order(body), (body, one)


def _is_order(body: bytes) -> bool:
    try:
        read = json.loads(body)
    except ValueError:
        return False
    return type(read) is dict and type(read.get("id")) is int


@pytest.mark.parametrize(
    ("schema", "times"),
    [
        ("id bigint not null, name string", 1),
        (ORDER, 2),  # once more only a body with a number that no decimal takes (``exponents.py``)
    ],
)
def test_a_body_is_parsed_once(spark: SparkSession, schema: str, times: int) -> None:
    """Spark moves a filter below a projection, and would parse for both."""
    good, rejected = decode(frame(spark, [b"{}"]), schema)
    nulls = decode(frame(spark, [b"{}"]), schema, mode="null")
    for each in (good, rejected, nulls, good.where("id > 1").select("name")):
        plan = each._jdf.queryExecution().optimizedPlan().toString()
        assert plan.count("from_json(") == times, plan


# -- CSV -----------------------------------------------------------------------------------------------------

LINE, MISFIT = "the body is not a row of 3 columns", "the body does not fit the schema"
LINES: list[tuple[bytes, Any]] = [
    (b"1,a,2.5", (1, "a", 2.5)),
    (b"1,a,2.5\r\n", (1, "a", 2.5)),
    (b'1,"a,\nb",2', (1, "a,\nb", 2.0)),
    (b"1,,", (1, None, None)),
    (b"", "the body is empty"),
    (b"\xff1,a,2", "the body is not UTF-8"),
    (b"\xef\xbb\xbf1,a,2", "the body begins with a byte order mark"),
    *(
        (text.encode("utf-16-" + end), "the body is UTF-16, not UTF-8")
        for end in ("le", "be")
        for text in ("1,a,2", "\ufeff1,a,2", "1")
    ),
    (b"\n", LINE),
    (b"1,a", LINE),
    (b"1,a,2,3", LINE),
    (b"1,a,2\n3,b,4", LINE),
    (b"1,a,1e400", "field 'amount' is too large for double"),
    (b'1,"a,2', LINE),
    (b"x,a,2", MISFIT),
    (b",a,2", "field 'id' is missing or null"),
]


@pytest.mark.parametrize(
    ("body", "options", "reason"),
    [
        (b"1" + b"," * 1, {}, None),
        (b"1" + b"," * 20_481, {}, "the body is not a row of 2 columns"),  # Spark's limit is 20,480
        (b"1" + b"," * 2_000_000, {}, "the body is not a row of 2 columns"),  # above ours too
        (b'1,"' + b"," * 30_000 + b'"', {}, None),
        (b"1," + b"x" * 3_000_000, {}, None),
        (b"1,2,3,4,5,6,7", {"maxColumns": "5"}, "the body is not a row of 2 columns"),
        (b"1," + b"x" * 100, {"maxCharsPerColumn": "100"}, None),
        (b"1," + b"x" * 101, {"MAXCHARSPERCOLUMN": "100"}, "column 's' has more than 100 characters"),
        (b"1," + b"x" * 1_000, {"maxCharsPerColumn": 100}, "column 's' has more than 100 characters"),
        (b"1,\x00", {}, None),
        (b'"' * 100_000, {}, "the body is not a row of 2 columns"),
        (b"1\ty,z", {"sep": "\\t"}, None),
        (b"1\\y", {"delimiter": "\\\\"}, None),
        (b"1||y", {"sep": "||"}, None),
    ],
)
def test_no_body_of_csv_stops_a_query_whatever_the_limits_of_the_parser_are(
    spark: SparkSession, body: bytes, options: dict[str, str], reason: str | None
) -> None:
    between = body[1:2] if options.keys() & {"sep", "delimiter"} and b"||" not in body else b","
    between = b"||" if b"||" in body else between
    bodies = [b"1%sa" % between, body, b"2%sb" % between]
    found = told(decode(frame(spark, bodies), "i INT, s STRING", "csv", keep=["offset"], options=options))
    assert [found[0], found[2]] == [(1, "a"), (2, "b")]
    assert found[1] == reason if reason else isinstance(found[1], tuple)


def test_a_body_of_csv_is_one_row_of_the_schema_or_is_rejected_with_the_reason(spark: SparkSession) -> None:
    bodies = [body for body, _ in LINES]
    decoded = decode(
        frame(spark, bodies), "id bigint not null, name string, amount double", "csv", keep=["offset"]
    )
    assert dict(zip(bodies, told(decoded), strict=True)) == dict(LINES)


# -- modes and arguments -------------------------------------------------------------------------------------


def test_null_leaves_no_value_of_a_broken_message_and_fail_names_the_first(spark: SparkSession) -> None:
    rows = frame(spark, [b'{"id": 1, "name": "a"}', b'{"name": "b"}', b"x"]).selectExpr(
        "'q' AS queue", "0 AS partition", "*"
    )
    nulls = decode(rows, ORDER, mode="null", keep=["offset"]).select("offset", "id", "name").collect()
    assert [tuple(row) for row in nulls] == [(0, 1, "a"), (1, None, None), (2, None, None)]
    failing = decode(rows, ORDER, mode="fail")
    with pytest.raises(Exception) as raised:
        failing.select(F.lit(1)).collect()  # also where no decoded column is used
    error = cause(raised.value)
    assert type(error) is DecodeError
    assert "message 1 of queue 'q' cannot be decoded from 'body' (field 'id' is missing or null)" in str(
        error
    )
    assert decode(rows.limit(1), ORDER, mode="fail").count() == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"schema": "id bigin"}, "the schema 'id bigin' is not DDL"),
        ({"schema": 5}, "the schema is 5"),
        ({"schema": "id int, ID int"}, "the schema has the columns id, ID"),
        ({"format": "xml"}, "decode got the format 'xml': allowed are json, avro, protobuf, csv"),
        ({"mode": "drop"}, "decode got the mode 'drop': allowed are deadLetter, fail, null"),
        ({"column": "value"}, "decode needs the column 'value' (binary or string), and the rows have none"),
        ({"column": "offset"}, "and the rows have bigint"),
        ({"keep": ["queue"]}, "keep names the column 'queue'"),
        ({"schema": "OFFSET int", "keep": "offset"}, "the decoded column 'OFFSET' has the name of a column that is kept"),
        ({"options": {"Mode": "FAILFAST"}}, "option 'Mode' of from_json is txmq's own"),
        *(({"format": "csv", "options": {"sep": sep, "quote": "'"}}, f"Spark refuses sep={sep!r} of from_csv: ") for sep in ("", "\\", "a\\", "a\\0", "\\u0000")),
        ({"format": "csv", "options": {"unescapedQuoteHandling": "RAISE_ERROR"}}, "Spark refuses unescapedQuoteHandling='RAISE_ERROR' of from_csv: "),
        ({"format": "csv", "options": {"multiLine": "x", "comment": "##"}}, "Spark refuses multiLine='x', comment='##' of from_csv: "),
        ({"options": {"timeZone": "Mars"}}, "Spark refuses timeZone='Mars' of from_json: "),
        ({"schema": "d date", "options": {"dateFormat": "YYYY-MM-dd"}}, "Spark refuses dateFormat='YYYY-MM-dd' of from_json: "),
        ({"format": "avro"}, "the schema is not a schema of Avro"),
        ({"format": "avro", "schema": 5}, "format 'avro' got the schema 5"),
        ({"format": "avro", "schema": json.dumps(AVRO), "options": {"a": "b"}}, "decode of avro got options"),
        ({"format": "protobuf", "schema": ("A", b"")}, "the descriptor set has no message 'A'"),
        ({"format": "protobuf"}, "give (name of the message, descriptor set"),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_one_clear_error(
    spark: SparkSession, arguments: dict[str, Any], text: str
) -> None:
    with pytest.raises(OptionError) as raised:
        decode(frame(spark, []), **{"schema": "id int", **arguments})
    assert text in str(raised.value)


@pytest.mark.soak
def test_a_decode_is_that_of_its_arguments_whatever_was_decoded_before(spark: SparkSession) -> None:
    """A schema that was changed in place, options, the column; with rows that have places, and with others."""
    held = [("in", 0, 0, b'{"a": 1, /**/ "b": "x"}', '{"a": 2, "b": "y"}')]
    rows = spark.createDataFrame(
        held, "queue string, partition int, offset bigint, body binary, other string"
    )
    schema = StructType().add("a", "long")
    for _ in range(2):
        for frame_ in (rows, rows.drop("partition")):
            assert [tuple(row) for row in decode(frame_, schema, column="other").good.collect()] == [(2,)]
            (broken,) = decode(frame_, schema).rejected.collect()
            assert broken["reason"] == COMMENT and broken.asDict().keys() == {*frame_.columns, "reason"}
            lenient = decode(frame_, schema, options={"allowComments": "true"}, keep=["offset"])
            assert [tuple(row) for row in lenient.good.collect()] == [(0, 1)]
            assert decode(frame_, schema, mode="null").collect() == [(None,)]
            assert decode(frame_, "a string", column="other", mode="fail").collect() == [("2",)]
    schema.add("b", "string")
    assert [tuple(row) for row in decode(rows, schema, column="other").good.collect()] == [(2, "y")]


def test_a_column_that_decode_would_add_is_refused(spark: SparkSession) -> None:
    rows = frame(spark, []).selectExpr("*", "'x' AS Reason")
    with pytest.raises(OptionError, match="the rows have a column 'reason'"):
        decode(rows, "id int")
    with pytest.raises(
        OptionError, match="the decoded column 'Txmq_Task' has the name of a column that decode adds"
    ):
        decode(frame(spark, []), "id int, Txmq_Task int")


def test_a_message_may_have_fields_with_the_names_of_columns_that_decode_only_passes(
    spark: SparkSession,
) -> None:
    names = ["txmq_encoded", "txmq_parsed", "reason", "BODY"]
    rows = frame(spark, [json.dumps(dict.fromkeys(names, 7)).encode()])
    schema = ", ".join(f"{name} int" for name in names)
    assert [tuple(row) for row in decode(rows, schema).good.collect()] == [(7, 7, 7, 7)]
    also = ["txmq_broken", "txmq_task"]
    rows = frame(spark, [json.dumps(dict.fromkeys([*names, *also], 7)).encode()])
    schema = ", ".join(f"{name} int" for name in [*names, *also])
    for mode in ("fail", "null"):
        assert [tuple(row) for row in decode(rows, schema, mode=mode).collect()] == [(7,) * 6]


# -- and back ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("format", "content_type"), [("json", "application/json"), ("csv", "text/csv")])
def test_what_encode_writes_decode_reads(spark: SparkSession, format: Any, content_type: str) -> None:
    nested = ("struct(id AS x) AS place", "array('u', NULL) AS tags") if format == "json" else ()
    rows = spark.range(-2, 3).selectExpr(
        "id", "IF(id = 0, NULL, concat('\\'\"', char(10), ', \\\\', id)) AS name", "id / 3 AS amount",
        "timestamp_micros(id * 123456789) AS at", "CAST(id AS decimal(6,2)) AS price", "'key' AS routing_key", *nested,
    )  # fmt: skip
    # one line is one message
    rows = rows if format == "json" else rows.withColumn("name", F.expr("replace(name, char(10), '')"))
    options = {"timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX"}
    messages = encode(rows, format=format, options=options)
    assert messages.columns == ["routing_key", "body", "properties"]
    assert {row[0] for row in messages.select("properties.content_type").collect()} == {content_type}
    wanted = rows.drop("routing_key")
    again = decode(messages, wanted.schema, format, mode="fail", options=options)
    assert sorted(map(tuple, again.collect())) == sorted(map(tuple, wanted.collect()))


def test_encode_keeps_the_properties_of_a_message_and_says_what_the_body_is(spark: SparkSession) -> None:
    rows = spark.range(1).selectExpr(
        "id", "named_struct('content_type', 'old', 'message_id', 'm') AS properties"
    )
    (row,) = encode(rows).collect()
    assert (row["body"], row["properties"].asDict()) == (
        '{"id":0}',
        {"content_type": "application/json", "message_id": "m"},
    )
    with pytest.raises(OptionError, match="encode got no column for the body"):
        encode(rows.select("properties"))
    line: Any = {"format": "protobuf", "schema": ("shop.Line", descriptor_set(LINE_FILE))}
    for arguments, text in (
        ({"format": "avro", "schema": 5}, "format 'avro' got the schema 5"),
        ({"format": "avro", "options": {"a": "b"}}, "encode to avro got options"),
        (line, "the rows do not fit the message: the message shop.Line has no field for the column 'id'"),
        ({**line, "schema": ("A", b"")}, "the descriptor set has no message 'A'"),
    ):
        with pytest.raises(OptionError, match=text):
            encode(rows, **arguments)


# -- dead letters --------------------------------------------------------------------------------------------


def declare_with_dead_letters(rig: Any) -> None:
    rig.declare("dead", "out")
    with rig.broker.channel() as channel:
        channel.exchange_declare("dlx", "topic")
        channel.queue_bind("dead", "dlx", "#")
        channel.queue_declare("in", arguments={"x-dead-letter-exchange": "dlx"})


def messages_of(rig: Any, queue: str) -> list[tuple[bytes, Properties]]:
    engine = rig.broker.engine
    slices = [(log, one.start, one.end) for log, one in engine.available([queue]).items()]
    rows = [row for batch in engine.browse(slices) for row in batch.to_pylist()]
    return [(row["body"], Properties.decode(row["properties"])) for row in rows]


def test_the_good_are_appended_and_the_broken_are_dead_letters_in_one_transaction(
    rig: Any, tmp_path: Any
) -> None:
    declare_with_dead_letters(rig)
    properties = Properties(
        content_type="text/x", headers={"n": Long(3), "list": [1]}, expiration="60000", priority=200
    )
    rig.publish("in", '{"id": 1}', "x", '{"id": 2}', '{"id": "y"}', properties=properties.encode())

    def fn(batch: DataFrame, tx: BatchTransaction) -> None:
        decoded = decode(batch, "id bigint")
        tx.append(decoded.good, str(tmp_path / "lake"))
        tx.reject(decoded)
        assert rig.bodies("dead") == []

    run(rig, fn)
    assert sorted(row["id"] for row in rig.rows_in(str(tmp_path / "lake"))) == [1, 2]
    assert rig.bodies("in") == [] and rig.broker.engine.last_entry("app").published == 2
    found = dict(messages_of(rig, "dead"))
    reasons = {body: died.headers.pop("x-reject-reason") for body, died in found.items()}
    assert reasons == {b"x": NO_BRACE, b'{"id": "y"}': "field 'id' is not bigint"}
    for died in found.values():
        (death,) = died.headers.pop("x-death")
        assert death.pop("time") > 0
        assert death == {
            "count": 1, "reason": "rejected", "queue": "in", "exchange": "", "routing-keys": ["in"],
            "original-expiration": "60000",
        }  # fmt: skip
        assert {name: died.headers.pop(f"x-first-death-{name}") for name in ("queue", "reason", "exchange")} == {
            "queue": "in", "reason": "rejected", "exchange": "",
        }  # fmt: skip
        assert (died.headers, died.content_type, died.priority) == ({"n": 3, "list": [1]}, "text/x", 200)
        assert died.expiration is None


def test_a_dead_letter_that_is_rejected_again_counts_its_deaths(rig: Any) -> None:
    declare_with_dead_letters(rig)
    rig.publish("in", "x")

    def fn(batch: DataFrame, tx: BatchTransaction) -> None:
        tx.reject(batch, f"batch {tx.sequence}")

    def back(batch: DataFrame, tx: BatchTransaction) -> None:
        tx.reject(batch, "again", queue="in")

    run(rig, fn)
    run(rig, back, app_id="back", queue="dead", checkpoint="back")
    run(rig, fn)
    ((_, died),) = messages_of(rig, "dead")
    assert [(each["queue"], each["count"]) for each in died.headers["x-death"]] == [("in", 2), ("dead", 1)]
    assert died.headers["x-reject-reason"] == "batch 2"


def test_a_rejected_message_comes_again_after_its_delay_and_at_last_is_a_dead_letter(rig: Any) -> None:
    declare_with_dead_letters(rig)
    with rig.broker.channel() as channel:
        channel.exchange_declare("later", "x-delayed-message", arguments={"x-delayed-type": "direct"})
        channel.queue_bind("in", "later", "in")
    rig.publish("in", "good", "bad")
    tried = rig.notes()

    def fn(batch: DataFrame, tx: BatchTransaction) -> None:
        bad = batch.filter("body = binary('bad')")
        tried.append(bad.count())
        tx.reject(bad, f"batch {tx.sequence}", delay=0.3, attempts=2)
        tx.publish(batch.filter("body != binary('bad')").select("body"), queue="out")

    for _ in range(3):
        wait_until(lambda: "bad" in rig.bodies("in"), "the message comes again")
        assert rig.bodies("dead") == []
        run(rig, fn)
    assert tried[:] == [1, 1, 1]
    assert (rig.bodies("in"), rig.bodies("out")) == ([], ["good"])
    ((body, died),) = messages_of(rig, "dead")
    assert (body, died.headers["x-reject-reason"], died.headers["x-delay"]) == (b"bad", "batch 3", -300)
    assert [(each["queue"], each["count"]) for each in died.headers["x-death"]] == [("in", 3)]


REFUSED: list[tuple[Any, type[Exception], str]] = [
    (lambda batch, tx: tx.reject(batch, "why"), OptionError, "queue 'in' has no dead-letter exchange"),
    (lambda batch, tx: tx.reject(batch), OptionError, "reject got no reason"),
    (lambda batch, tx: tx.reject(batch, 5), OptionError, "the reason 5, which is not text"),
    (lambda batch, tx: tx.reject(batch, "", queue="a", exchange="b"), OptionError, "queue='a' and also exchange"),
    (lambda batch, tx: tx.reject(batch, "", exchange=5), OptionError, "exchange=5, which is not text"),
    (lambda batch, tx: tx.reject(batch.select("body"), "why"), OptionError, "needs the column 'queue' (string)"),
    (
        lambda batch, tx: tx.publish(decode(batch, "body string not null", mode="fail").select("body"), queue="out"),
        DecodeError, "message 0 of queue 'in' cannot be decoded from 'body' (the body does not begin with {",
    ),
]  # fmt: skip


def test_what_cannot_be_rejected_or_decoded_is_one_clear_error_before_the_decision(rig: Any) -> None:
    rig.declare("in", "out")
    rig.publish("in", "a", "b")
    found = rig.notes()

    def fn(batch: DataFrame, tx: BatchTransaction) -> None:
        for refused, _, _ in REFUSED:
            with pytest.raises(Exception) as raised:
                refused(batch, tx)
            found.append(cause(raised.value))
        raise raised.value

    with pytest.raises(Exception) as raised:
        run(rig, fn)
    for (_, kind, text), told in zip(REFUSED, [*found[:-1], cause(raised.value)], strict=True):
        assert type(told) is kind and text in str(told), told
    assert rig.bodies("out") == [] and rig.broker.engine.last_entry("app") is None
