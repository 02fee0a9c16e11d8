"""A Delta ledger read without Spark, and the start of an app at a batch of it. The tables are made by
hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from broker_core.core.errors import OptionError
from broker_core.engine import EARLIEST, START, Limit
from broker_core.kafka.protocol.port import TopicPartition
from connector.ledger_file import rows
from connector.ledger_start import COLUMNS, LedgerStart
from connector.options import read_options
from tests.kafka.bench.engine_bench import KafkaBench
from txmq.cli import main

APP = "shop"
Row = tuple[int, str | None, int | None, int | None]  # sequence, log, start, end


class Table:
    """A Delta table without Spark: a commit for each call of ``add``."""

    def __init__(self, place: Path, **configuration: str) -> None:
        self.place, self.version = place, 0
        (place / "_delta_log").mkdir(parents=True)
        self.state: list[dict[str, Any]] = [
            {"protocol": {"minReaderVersion": 1, "minWriterVersion": 2}},
            {"metaData": {"id": "t", "configuration": configuration, "partitionColumns": []}},
        ]
        self.files: list[dict[str, Any]] = []
        self.commit(self.state)

    def commit(self, actions: Sequence[dict[str, Any]]) -> None:
        text = "".join(f"{json.dumps(action)}\n" for action in actions)
        (self.place / "_delta_log" / f"{self.version:020d}.json").write_text(text)
        self.version += 1

    def add(self, found: Sequence[Row], app: str = APP, log_id: str = "", **more: Any) -> str:
        name = f"part {self.version}.parquet"
        table = pa.Table.from_pylist(
            [
                {"app_id": app, "token": f"{app} {number}", "log": log, "start_offset": start,
                 "end_offset": end, "sequence": number, "log_id": log_id}
                for number, log, start, end in found
            ]
        )  # fmt: skip
        pq.write_table(table, self.place / name)
        add = {"path": name.replace(" ", "%20"), "size": 1, "dataChange": True, "partitionValues": {}, **more}
        self.files.append(add)
        self.commit([{"commitInfo": {}}, {"add": add}])
        return str(add["path"])

    def checkpoint(self, parts: int = 1) -> None:
        """Of all that was added, and the commits below are cleaned."""
        actions = [*self.state, *({"add": each} for each in self.files)]
        last = self.version - 1
        names = (
            [f"{last:020d}.checkpoint.parquet"]
            if parts == 1
            else [f"{last:020d}.checkpoint.{part:010d}.{parts:010d}.parquet" for part in range(1, parts + 1)]
        )
        pairs = pa.map_(pa.string(), pa.string())
        schema = pa.schema(
            {
                "add": pa.struct({"path": pa.string(), "partitionValues": pairs}),
                "metaData": pa.struct({"id": pa.string(), "configuration": pairs}),
                "protocol": pa.struct({"minReaderVersion": pa.int32()}),
            }
        )
        for part, name in enumerate(names):
            kept = [
                {kind: {key: _pairs(value) for key, value in said.items() if key in schema.field(kind).type.names}
                 for kind, said in action.items()}
                for action in actions[part::parts]
            ]  # fmt: skip
            pq.write_table(pa.Table.from_pylist(kept, schema), self.place / "_delta_log" / name)
        for version in range(last + 1):
            (self.place / "_delta_log" / f"{version:020d}.json").unlink(missing_ok=True)


def _pairs(value: Any) -> Any:
    return list(value.items()) if isinstance(value, dict) else value


def numbers(table: Table) -> list[int]:
    return sorted(row["sequence"] for row in rows(str(table.place), ("sequence",)))


def test_a_table_is_read_as_its_newest_version_says(tmp_path: Path) -> None:
    table = Table(tmp_path / "with space")
    first = table.add([(1, "in/0", 0, 2)])
    table.add([(2, "in/0", 2, 4), (2, "in/1", 0, 1)])
    assert numbers(table) == [1, 2, 2]
    assert rows(f"file:{table.place}", ("missing", "log"))[0] == {"missing": None, "log": "in/0"}
    table.commit([{"remove": {"path": first}}, {"txn": {"appId": "a", "version": 2}}])
    table.files = table.files[1:]
    assert numbers(table) == [2, 2]
    table.checkpoint()
    assert numbers(table) == [2, 2]
    table.add([(3, None, None, None)])
    assert numbers(table) == [2, 2, 3]
    table.checkpoint(parts=2)
    table.add([(4, "in/0", 4, 5)])
    assert numbers(table) == [2, 2, 3, 4]


def test_what_cannot_be_read_without_spark_is_one_error(tmp_path: Path) -> None:
    def refused(place: object, why: str) -> None:
        with pytest.raises(OptionError, match=why):
            rows(str(place), COLUMNS)

    refused("lake.ledger", "there is no Delta table")
    refused("s3://bucket/ledger", "not on a disk of this host")
    vectors = Table(tmp_path / "vectors")
    vectors.add([(1, "in/0", 0, 2)], deletionVector={"storageType": "u"})
    refused(vectors.place, "deletion vectors.*REORG TABLE")
    refused(Table(tmp_path / "mapped", **{"delta.columnMapping.mode": "name"}).place, "columnMapping=name")
    strange = Table(tmp_path / "strange")
    strange.commit([{"protocol": {"minReaderVersion": 3, "readerFeatures": ["deletionVectors", "later"]}}])
    refused(strange.place, "need Spark: later")
    holes = Table(tmp_path / "holes")
    for number in (1, 2):
        holes.add([(number, "in/0", 0, 2)])
    (holes.place / "_delta_log" / f"{1:020d}.json").unlink()
    refused(holes.place, "is incomplete from version 0 on")
    gone = Table(tmp_path / "gone")
    gone.add([(1, "in/0", 0, 2)])
    (gone.place / "part 1.parquet").unlink()  # vacuumed by hand
    refused(gone.place, "cannot be read here")
    damaged = Table(tmp_path / "damaged")
    damaged.commit([])
    (damaged.place / "_delta_log" / f"{1:020d}.json").write_text("[")
    refused(damaged.place, "cannot be read here")


@pytest.fixture
def ledger(tmp_path: Path) -> tuple[KafkaBench, Table]:
    """Three batches of two messages each; the third one also of another queue."""
    bench = KafkaBench()
    bench.produce(*(f"m{number}".encode() for number in range(6)))
    bench.produce(b"n0", queue="in2")
    ids = bench.engine.log_ids(["in/0", "in2/0"])
    table = Table(tmp_path / "ledger")
    table.add([(1, "in/0", 0, 2)], log_id=ids["in/0"])
    table.add([(2, "in/0", 2, 4)], log_id=ids["in/0"])
    table.add([(3, "in/0", 4, 6)], log_id=ids["in/0"])
    table.add([(3, "in2/0", 0, 1)], log_id=ids["in2/0"])
    return bench, table


def origin(bench: KafkaBench, table: Table, batch: int | None, app: str | None = None) -> dict[str, int]:
    logs = {queue: bench.engine.logs([queue]) for queue in ("in", "in2")}
    found = LedgerStart(str(table.place), batch, app).origin(bench.engine, logs)
    return dict(found.offsets or {})


def test_an_app_begins_where_another_one_was_before_a_batch(ledger: tuple[KafkaBench, Table]) -> None:
    bench, table = ledger
    assert origin(bench, table, 1) == {"in/0": 0, "in2/0": 0}
    assert origin(bench, table, 2) == {"in/0": 2, "in2/0": 0}
    assert origin(bench, table, 3) == {"in/0": 4, "in2/0": 0}
    assert origin(bench, table, 4) == origin(bench, table, None) == {"in/0": 6, "in2/0": 1}
    at = LedgerStart(str(table.place), 2).origin(bench.engine, {"in": ["in/0"]})
    end = bench.engine.claim("again", ["in"], {"in": START}, Limit(), at, "fail")
    assert bench.engine.resolve("again", {"in": START}, end) == {"in/0": (2, 6)}
    with pytest.raises(OptionError, match="the table has batches 1 to 3"):
        origin(bench, table, 5)


def test_a_partition_that_the_ledger_does_not_know_is_read_from_its_beginning(
    ledger: tuple[KafkaBench, Table],
) -> None:
    bench, table = ledger
    at = LedgerStart(str(table.place), 3).origin(bench.engine, {"in": ["in/0", "in/1"]})
    assert at.offsets == {"in/0": 4, "in/1": EARLIEST}


def test_a_ledger_that_cannot_say_where_to_begin_is_one_error(ledger: tuple[KafkaBench, Table]) -> None:
    bench, table = ledger
    table.add([(1, "in/0", 0, 1)], app="other")
    with pytest.raises(OptionError, match="the table has batches of other, shop"):
        origin(bench, table, 1)
    assert origin(bench, table, 2, APP)["in/0"] == 2
    with pytest.raises(OptionError, match="has no batch of queue 'out'"):
        LedgerStart(str(table.place), 1, APP).origin(bench.engine, {"out": ["out/0"]})
    bench.remake("in")
    bench.produce(*(b"x" for _ in range(9)))
    with pytest.raises(OptionError, match="counts other messages of in/0 than this engine has"):
        origin(bench, table, 2, APP)


def test_a_batch_whose_messages_kafka_has_deleted_is_refused(ledger: tuple[KafkaBench, Table]) -> None:
    bench, table = ledger
    bench.client.delete_records({TopicPartition("in", 0): 3})
    with pytest.raises(OptionError, match="begins before what is kept of in/0, which begins at 3"):
        origin(bench, table, 2)
    assert origin(bench, table, 3)["in/0"] == 4


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ('{"ledger": "lake/ledger", "batch": 0}', "batch and app may be left out"),
        ('{"ledger": "lake/ledger", "batch": true}', "batch and app may be left out"),
        ('{"ledger": "lake/ledger", "orders": 3}', "batch and app may be left out"),
        ('{"ledger": ""}', "batch and app may be left out"),
    ],
)
def test_a_wrong_batch_is_refused(value: str, why: str) -> None:
    with pytest.raises(OptionError, match=re.escape(why)):
        read_options(
            {"url": "kafka://h:1", "queue": "in", "appId": "a", "startingOffsets": value}, "stream read"
        )


def test_a_batch_of_a_ledger_is_for_streams_on_kafka() -> None:
    given = {"queue": "in", "startingOffsets": '{"ledger": "lake/ledger", "batch": 17}'}
    found = read_options({**given, "url": "kafka://h:1", "appId": "a"}, "stream read")
    assert found.ledger_start == LedgerStart("lake/ledger", 17)
    with pytest.raises(OptionError, match="for streams on Kafka"):
        read_options({**given, "url": "txmq://h:1", "appId": "a"}, "stream read")
    with pytest.raises(OptionError, match="for streams on Kafka"):
        read_options({**given, "url": "kafka://h:1"}, "batch read")
    named = read_options({"url": "kafka://h:1", "queue": "ledger", "appId": "a",
                          "startingOffsets": '{"ledger": 3}'}, "stream read")  # fmt: skip
    assert named.origin.offsets == {"ledger": 3}, "a queue may have that name"


def test_txmq_ledger_shows_a_table_and_the_engine(
    ledger: tuple[KafkaBench, Table], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, table = ledger
    assert main(["app", "ledger", APP, "--table", str(table.place), "--batch", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(row["sequence"], row["log"], row["start"], row["end"]) for row in found] == [
        (3, "in/0", 4, 6),
        (3, "in2/0", 0, 1),
    ]
    assert main(["app", "ledger", APP]) == 2
    assert "give --url, --data or --table" in capsys.readouterr().err
    assert main(["app", "ledger", APP, "--table", str(tmp_path)]) == 1
    assert "there is no Delta table" in capsys.readouterr().err
