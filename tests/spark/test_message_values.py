"""Every type of Spark as a message: what ``encode`` writes and ``tx.publish`` sends, ``decode`` reads as Spark's own
functions read it, or rejects it with a reason.

Not here: the values (``values.py``), tables (``test_values.py``), bodies that others have made (``test_decode.py``).
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from broker_core.core.errors import OptionError, cause
from connector.sql import nullable
from connector.typed.avro import avro_schema
from connector.typed.decode import Decoded, decode
from connector.typed.encode import encode
from tests.registry_server import RegistryServer
from tests.spark.values import NAMES, PLAIN, Column, Kind, columns, select

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("planned_once")]

ROWS = 4
DEPTHS = (0, 0, 0, 1, 2, 4)
# type -> of a field of Protobuf
PROTOBUF = {"DOUBLE": 1, "FLOAT": 2, "BIGINT": 3, "INT": 5, "BOOLEAN": 8, "STRING": 9, "BINARY": 12}


@pytest.fixture
def server() -> Iterator[RegistryServer]:
    made = RegistryServer()
    yield made
    made.close()


def texts(rows: DataFrame) -> dict[int, str]:
    """Each row by its id."""
    found = rows.select("id", F.expr("hex(CAST(struct(*) AS STRING))").alias("text")).collect()
    return {row["id"]: bytes.fromhex(row["text"]).decode(errors="backslashreplace") for row in found}


def published(rig: Any, messages: DataFrame, name: str) -> DataFrame:
    """The messages, as a queue gives them back."""
    rig.declare(name)
    messages.write.format("txmq").options(url=rig.broker.url, queue=name).mode("append").save()
    found: DataFrame = rig.look(name)
    return found


def failure(act: Callable[[], Any]) -> Exception | None:
    try:
        act()
    except Exception as error:
        return error
    return None


def compared(
    rows: DataFrame,
    plain: Callable[[], dict[int, str]],
    ours: Callable[[], tuple[dict[int, str], dict[int, str]]],
    told: str,
) -> str:
    """What became of the rows. Fails if txmq, whose rows are good or rejected, and plain Spark differ."""
    found: list[tuple[dict[int, str], dict[int, str]]] = []
    if (error := failure(lambda: found.append(ours()))) is not None:
        assert isinstance(cause(error), OptionError), f"no clear error: {str(error)[:1500]}: {told}"
        assert failure(plain), f"refused without need: {cause(error)}: {told}"
        return "refused"
    ((good, rejected),) = found
    given, read = texts(rows), plain()
    assert sorted([*good, *rejected]) == sorted(given), told
    assert good == {number: read[number] for number in good}, told
    for number, reason in rejected.items():
        assert read[number] != given[number] or "NaN" in reason or "large" in reason, f"{reason}: {told}"
    return "rejected" if rejected else "read"


def parts(decoded: DataFrame | Decoded, number: Column) -> tuple[dict[int, str], dict[int, str]]:
    """The good rows, and the reasons of the rejected ones, by the id; ``number``: the id in a rejected body."""
    assert isinstance(decoded, Decoded)
    rejected = decoded.rejected.select(number.cast("int").alias("id"), "reason").collect()
    return texts(decoded.good), {row["id"]: row["reason"] for row in rejected}


def try_json(rig: Any, seed: int) -> str:
    choice = random.Random(seed)
    held = columns(choice, 5, ROWS, DEPTHS, choice.choice([NAMES, PLAIN]))
    told = f"{seed=}\n" + "\n".join(f"{each.ddl}: {each.values}" for each in held)[:3000]
    rows = rig.spark.sql(select(held)).coalesce(1)
    schema = nullable(rows.schema)

    def plain() -> dict[int, str]:
        value = F.from_json(F.to_json(F.struct("*")), schema)
        return texts(rows.select(value.alias("value")).select("value.*"))

    def ours() -> tuple[dict[int, str], dict[int, str]]:
        read = published(rig, encode(rows), f"json-{seed}")
        return parts(decode(read, schema), F.get_json_object(F.col("body").cast("string"), "$.id"))

    return compared(rows, plain, ours, told)


def in_avro(spark: SparkSession, column: Column) -> bool:
    """Whether Avro has its type."""
    try:
        avro_schema(spark.sql(select([column])).schema)
    except OptionError:
        return False
    return True


def try_avro(rig: Any, server: RegistryServer, seed: int) -> str:
    """With a schema registry, both ways are txmq's own."""
    choice = random.Random(seed)
    held = [each for each in columns(choice, 12, ROWS, DEPTHS, PLAIN) if in_avro(rig.spark, each)][:2]
    told = f"{seed=}\n" + "\n".join(f"{each.ddl}: {each.values}" for each in held)[:3000]
    rows = rig.spark.sql(select(held)).coalesce(1)
    wanted: dict[str, Any] = {"registry": server.url, "subject": f"avro-{seed}"}

    read: list[DataFrame] = []
    error = failure(lambda: read.append(published(rig, encode(rows, None, "avro", **wanted), f"avro-{seed}")))
    if error is not None:
        assert isinstance(cause(error), OptionError), f"no clear error: {str(error)[:1500]}: {told}"
        return "refused"
    decoded = decode(read[0], None, "avro", **wanted)
    assert [row["reason"] for row in decoded.rejected.collect()] == [], told
    assert texts(decoded.good) == texts(rows), told
    return "read"


def try_csv(rig: Any, seed: int) -> str:
    """Without nested types, which Spark's CSV does not have."""
    choice = random.Random(seed)
    held = columns(choice, 4, ROWS, (0,), choice.choice([NAMES, PLAIN]))
    told = f"{seed=}\n" + "\n".join(f"{each.ddl}: {each.values}" for each in held)[:3000]
    rows = rig.spark.sql(select(held)).coalesce(1)
    schema = nullable(rows.schema)

    def plain() -> dict[int, str]:
        value = F.from_csv(F.to_csv(F.struct("*")), schema.toDDL())
        return texts(rows.select(value.alias("value")).select("value.*"))

    def ours() -> tuple[dict[int, str], dict[int, str]]:
        read = published(rig, encode(rows, format="csv"), f"csv-{seed}")
        return parts(decode(read, schema, "csv"), F.split(F.col("body").cast("string"), ",")[0])

    return compared(rows, plain, ours, told)


def add_field(message: DescriptorProto, name: str, kind: Kind, *, repeats: bool = False) -> bool:
    """Whether Protobuf has the type; then the message has a field of it."""
    if not re.fullmatch(r"[A-Za-z]\w*", name, re.ASCII):
        return False
    if not kind.names and kind.within:
        return (
            len(kind.within) == 1 and not repeats and add_field(message, name, kind.within[0], repeats=True)
        )
    within = DescriptorProto(name=f"Of{name}")
    if kind.names:
        pairs = zip(kind.names, kind.within, strict=True)
        if not all(not each.within and add_field(within, field, each) for field, each in pairs):
            return False
        message.nested_type.append(within)
    elif kind.ddl not in PROTOBUF:
        return False
    message.field.add(
        name=name,
        number=len(message.field) + 1,
        label=FieldDescriptorProto.LABEL_REPEATED if repeats else FieldDescriptorProto.LABEL_OPTIONAL,
        type=FieldDescriptorProto.TYPE_MESSAGE if kind.names else PROTOBUF[kind.ddl],
        type_name=within.name if kind.names else None,
    )
    return True


def try_protobuf(rig: Any, server: RegistryServer, seed: int) -> str:
    """With a schema registry, both ways are txmq's own. A field that repeats is never null."""
    choice = random.Random(seed)
    message = DescriptorProto(name="Row")
    add_field(message, "id", Kind("INT"))
    held = [
        each
        for each in columns(choice, 24, ROWS, (0, 0, 1), PLAIN)
        if add_field(message, each.name, each.held)
    ]
    told = f"{seed=}\n" + "\n".join(f"{each.ddl}: {each.values}" for each in held)[:3000]
    rows = rig.spark.sql(select(held)).coalesce(1)
    server.add_file(
        f"row-{seed}", FileDescriptorProto(name=f"row-{seed}", syntax="proto2", message_type=[message])
    )
    wanted: dict[str, Any] = {"format": "protobuf", "registry": server.url, "subject": f"row-{seed}"}

    read: list[DataFrame] = []
    error = failure(lambda: read.append(published(rig, encode(rows, **wanted), f"protobuf-{seed}")))
    if error is not None:
        assert isinstance(cause(error), OptionError), f"no clear error: {str(error)[:1500]}: {told}"
        assert "null" in str(error), f"refused without need: {cause(error)}: {told}"
        return "refused"
    decoded = decode(read[0], **wanted)
    assert [row["reason"] for row in decoded.rejected.collect()] == [], told
    repeated = {each.name for each in held if each.held.ddl.startswith("ARRAY")}
    never_null = [
        F.coalesce(F.col(name), F.array().cast(rows.schema[name].dataType)).alias(name)
        if name in repeated
        else name
        for name in rows.columns
    ]
    assert texts(decoded.good) == texts(rows.select(never_null)), told
    return "read"


def test_what_encode_writes_of_any_type_decode_reads_or_rejects(rig: Any) -> None:
    assert {"read", "rejected", "refused"} >= {try_json(rig, seed) for seed in (1, 2, 3)}


@pytest.mark.soak  # tests/connector/typed has Avro
def test_what_encode_writes_as_avro_of_any_type_decode_reads(rig: Any, server: RegistryServer) -> None:
    outcomes = {try_avro(rig, server, seed) for seed in (1, 2, 3, 5)}
    assert "read" in outcomes


@pytest.mark.soak  # tests/connector/typed has Protobuf
def test_what_encode_writes_as_csv_and_protobuf_of_any_type_decode_reads_or_rejects(
    rig: Any, server: RegistryServer
) -> None:
    assert {try_csv(rig, seed) for seed in (2317, 2318)} == {"read", "rejected"}
    assert try_protobuf(rig, server, 2317) == "read"


@pytest.mark.soak
def test_what_encode_writes_of_any_type_decode_reads_or_rejects_soak(
    rig: Any, server: RegistryServer, rounds: int, seed: int
) -> None:
    for number in range(seed, seed + rounds):
        try_json(rig, number)
        try_avro(rig, server, number)
        try_csv(rig, number)
        try_protobuf(rig, server, number)
