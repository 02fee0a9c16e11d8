"""Numbers in columns of type decimal: as plain from_json takes them, and the ones whose exponent would keep it
busy for minutes are broken.
"""

from __future__ import annotations

import json
import random
import re
import runpy
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from connector.typed import formats
from connector.typed.decode import decode
from tests.spark.test_decode import frame, told

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("interpreted")]

SCHEMA = (
    "x decimal(10,2), y array<decimal(38,18)>, m map<string, decimal(5,1)>, s struct<z: decimal(6,2)>, "
    "name string, d double, raw binary, at timestamp, n int"
)
# each of them takes plain from_json minutes, or much longer
HUGE = [
    "1e400000000",
    "1E+0400000000",
    "1e-400000000",
    "0e400000000",
    "0.0e-400000000",
    "1" * 500 + "e-900000000",
    '"1e400000000"',
    "'1e400000000'",
    '"-1e-400000000"',
    '"1e4,0,0,0,0,0,0,0,0"',
    '",1,e,400000000"',
    r'"1\u0065400000000"',
    r'"1\u0045\u0034\u0030\u0030\u0030\u0030\u0030\u0030\u0030\u0030"',
    r'"\u0661e400000000"',
    '"1e\u0664\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660"',
    '"' + "0" * 500 + '1e4,000,000,00"',
    '"' + "1" * 200_000 + '"',
]
PLACES = ['{"x":%s}', '{"y":[1, %s]}', '{"m":{"k":%s}}', '{"s":{"z":%s}}', '{"x":%s,"x":1}', '{"x":%s,"y"']


def test_a_number_that_takes_minutes_to_be_rounded_to_a_decimal_is_broken(spark: SparkSession) -> None:
    """In seconds: each alone would hold this test up."""
    bodies = [(place % number).encode() for number in HUGE for place in PLACES]
    found = told(decode(frame(spark, bodies), SCHEMA, keep=["offset"]))
    assert [
        body[:80] for body, reason in zip(bodies, found, strict=True) if not isinstance(reason, str)
    ] == []
    assert found[0] == "field 'x' is not decimal(10,2)"


def test_the_mark_at_the_end_of_a_body_is_no_such_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else every body with a decimal was taken for one that has such a number, in one process of fifteen."""
    monkeypatch.setattr("secrets.token_hex", lambda _: "1e99991e99991e99")
    mark = runpy.run_path(str(formats.__file__))["_MARK"]
    assert re.search(r"[\d.][eE][+-]?\d{4,}", mark) is None


def test_such_a_number_is_taken_where_no_decimal_is_read_from_it(spark: SparkSession) -> None:
    """As plain from_json takes it: in texts, names, other columns, and fields that the schema does not have."""
    bodies = [
        json.dumps(
            {
                "name": f"a {text}, {text}",
                "raw": "12e45678",
                text: 1,
                "else": {"x": text},
                "at": "2026-01-31",
                "x": 1,
            }
        )
        for text in ("1e400000000", '"1e400000000"', "1e4,0,0,0,0", "12E345678", "1" * 1000, r"\u0065400000")
    ]
    bodies += ['{"d":1e-400000,"x":1}', '{"z":1e400000,"x":1}', '{"name":"12e45678","x":1}']
    found = told(decode(frame(spark, [body.encode() for body in bodies]), SCHEMA, keep=["offset"]))
    rows = spark.createDataFrame([(body,) for body in bodies], "body string")
    plain = rows.select(F.from_json("body", SCHEMA).alias("value")).select("value.*").collect()
    assert [each[0] for each in found] == [row.x for row in plain] and None not in [row.x for row in plain]
    assert [each[4:8] for each in found] == [tuple(row)[4:8] for row in plain]


def number(choice: random.Random) -> str:
    """A form of a number, or nearly one."""
    digits = "".join(choice.choices("0123456789", k=choice.choice([1, 2, 5, 9, 20, 38, 40])))
    text = choice.choice(["", "-", "-", "+"] if choice.random() < 0.3 else [""])
    text += digits if choice.random() < 0.2 else digits.lstrip("0") or "0"
    if choice.random() < 0.5:
        text += "." + "".join(choice.choices("0123456789", k=choice.choice([0, 1, 3, 20])))
    if choice.random() < 0.4:
        text += (
            choice.choice("eE") + choice.choice(["", "+", "-"]) + str(choice.choice([0, 3, 17, 40, 308, 999]))
        )
    if choice.random() < 0.1:
        text = choice.choice(
            ["true", "null", "[1]", "{}", '""', '"1 "', '" 1"', '"1,0"', "NaN", '"x"', '"1e"']
        )
    if choice.random() < 0.4 and not text.startswith('"'):
        if choice.random() < 0.2:
            at = choice.randrange(len(text) + 1)
            text = text[:at] + choice.choice([",", " ", r"\u0030", r"\t", "e", "."]) + text[at:]
        quote = choice.choice('"""\'')
        text = f"{quote}{text}{quote}"
    return text


def test_every_form_of_a_number_is_taken_for_a_decimal_as_plain_from_json_takes_it(
    spark: SparkSession, seed: int
) -> None:
    choice = random.Random(seed)
    bodies = [choice.choice(PLACES[:-2]) % number(choice) for _ in range(1000)]
    # an escaped digit may have made an exponent of four, which is broken here alone
    bodies = [body for body in bodies if not re.search(r"[eE][+-]?\d{4}", body.replace(r"\u0030", "0"))]
    found = told(decode(frame(spark, [body.encode() for body in bodies]), SCHEMA, keep=["offset"]))
    rows = spark.createDataFrame([(body,) for body in bodies], "body string").coalesce(1)
    corrupt = f"{SCHEMA}, corrupt string"
    options = {"columnNameOfCorruptRecord": "corrupt", "allowNonNumericNumbers": "false"}
    plain = rows.select(F.from_json("body", corrupt, options).alias("value")).collect()
    taken: list[Any] = [None if row.value.corrupt is not None else tuple(row.value)[:-1] for row in plain]
    assert [
        (body, None if isinstance(row, str) else row) for body, row in zip(bodies, found, strict=True)
    ] == [*zip(bodies, taken, strict=True)]
    assert 100 < taken.count(None) < 900


@pytest.mark.parametrize("separator", [",", ";"])
def test_such_a_number_in_csv_is_broken_too(spark: SparkSession, separator: str) -> None:
    grouped = '"1e4,0,0,0,0,0,0,0"' if separator == "," else "1e4,0,0,0,0,0,0,0"
    bodies = [f"{text}{separator}a" for text in ("1e400000000", "1e-400000000", '"1e400000000"', grouped)]
    bodies += [f"1.5{separator}12e45678", f"1e2{separator}1e4,0" if separator == ";" else "1e2,a"]
    found = told(
        decode(
            frame(spark, [body.encode() for body in bodies]),
            "x decimal(10,2), name string",
            "csv",
            keep=["offset"],
            options={"sep": separator},
        )
    )
    assert found[:4] == ["the body does not fit the schema"] * 4
    assert [row[1] for row in found[4:]] == ["12e45678", "1e4,0" if separator == ";" else "a"]
