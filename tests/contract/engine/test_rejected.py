"""What a task that rejects messages needs of an engine: the messages again, and where their queue sends dead letters."""

from __future__ import annotations

import pyarrow as pa
import pytest

from broker_core.core.errors import DataLoss, OptionError
from broker_core.message.properties import Properties
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


def test_without_a_place_that_is_named_a_queue_without_dead_letters_is_one_clear_error(
    bench: EngineBench,
) -> None:
    bench.produce(b"a")
    bench.claim()
    with pytest.raises(OptionError, match="'in' has no dead-letter exchange"):
        list(Rejection.to(APP, None, None, None).messages(bench.engine, [places(bench, 0)]))
