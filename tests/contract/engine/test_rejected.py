"""What a task that rejects messages needs of an engine: the messages again, and where their queue sends dead letters."""

from __future__ import annotations

import pyarrow as pa
import pytest

from broker_core.core.errors import DataLoss, OptionError, PreconditionFailed
from broker_core.engine import BranchHeader
from broker_core.kafka.engine import KafkaEngine
from broker_core.message.message import MESSAGE_SCHEMA
from broker_core.message.properties import Properties
from broker_core.routing.content import PROPERTIES_BYTES
from connector.reject.dead_letters import Rejection
from tests.contract.engine.bench import APP, EngineBench

COLUMNS = ("queue", "partition", "offset", "reason", "checksum")


def places(bench: EngineBench, *offsets: int) -> pa.RecordBatch:
    names, types = COLUMNS, (pa.string(), pa.int32(), pa.int64(), pa.string(), pa.int64())
    columns = zip(*(("in", 0, offset, "why", None) for offset in offsets), strict=True)
    return pa.RecordBatch.from_arrays(
        [pa.array(column, kind) for column, kind in zip(columns, types, strict=True)], names=list(names)
    )


def test_claimed_messages_become_dead_letters_where_they_are_sent_by_name(bench: EngineBench) -> None:
    bench.produce(b"a", b"b", b"c")
    bench.claim()
    rejection = Rejection.to(APP, None, None, "out")
    (found,) = rejection.messages(bench.engine, [places(bench, 2, 0)])
    assert [tuple(row.values())[:3] for row in found.to_pylist()] == [("", "out", b"a"), ("", "out", b"c")]
    for properties in found.column("properties").to_pylist():
        (death,) = Properties.decode(properties).headers["x-death"]
        assert (death["queue"], death["reason"], death["count"]) == ("in", "rejected", 1)
    with pytest.raises(DataLoss, match="message 7 of queue 'in'"):
        list(rejection.messages(bench.engine, [places(bench, 7)]))


def test_a_message_whose_properties_take_a_whole_frame_becomes_a_dead_letter(bench: EngineBench) -> None:
    """Its death makes them longer than a publish may have them."""

    def written(token: str, rows: pa.RecordBatch) -> None:
        header = BranchHeader(token, token, "publish", {"routing_key": None, "exchange": None})
        bench.engine.commit_branches(token, [bench.engine.stage(header, [rows])])

    def message(size: int) -> pa.RecordBatch:
        properties = Properties(headers={"h": "x" * size}).encode()
        row = {"exchange": "", "routing_key": "in", "body": b"a", "properties": properties}
        return pa.RecordBatch.from_pylist([row], MESSAGE_SCHEMA)

    most = PROPERTIES_BYTES - len(Properties(headers={"h": ""}).encode())
    written("first", message(most))
    bench.claim()
    (found,) = Rejection.to(APP, None, None, "out").messages(bench.engine, [places(bench, 0)])
    assert len(found.column("properties")[0].as_py()) > PROPERTIES_BYTES
    written("second", found)
    assert bench.visible() == [b"a"]
    if isinstance(bench.engine, KafkaEngine):
        return  # whose records may have more
    with pytest.raises(PreconditionFailed, match="put it into the body"):
        written("third", message(most + 1))


def test_without_a_place_that_is_named_a_queue_without_dead_letters_is_one_clear_error(
    bench: EngineBench,
) -> None:
    bench.produce(b"a")
    bench.claim()
    with pytest.raises(OptionError, match="'in' has no dead-letter exchange"):
        list(Rejection.to(APP, None, None, None).messages(bench.engine, [places(bench, 0)]))
