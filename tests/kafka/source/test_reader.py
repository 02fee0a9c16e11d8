"""Rows of ranges: what is visible, what is lost, and records of other clients."""

from __future__ import annotations

import random
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

import pyarrow as pa
import pytest

from broker_core.core import errors
from broker_core.engine import START, ReadTicket
from broker_core.kafka.protocol import port
from broker_core.kafka.protocol.codes import Code
from broker_core.kafka.protocol.port import TopicPartition
from broker_core.kafka.record.encode import encode, encode_headers
from broker_core.kafka.record.headers import OTHERS, of_message
from broker_core.kafka.source import reader
from broker_core.kafka.source.source import KafkaSource
from broker_core.message.field_table import Long
from broker_core.message.message import READ_SCHEMA, READ_WITH_RECORD
from broker_core.message.properties import Properties
from tests.kafka.bench.fake_kafka import LOST, REFUSED, UNANSWERED
from tests.kafka.bench.source_bench import APP, QUEUE, SourceBench, claim, read, read_rows


@pytest.fixture
def bench() -> SourceBench:
    return SourceBench()


def claimed(source: KafkaSource) -> dict[str, tuple[int, int]]:
    return source.resolve(APP, {QUEUE: START}, claim(source))


# -- what is visible -----------------------------------------------------------------------------------------


def test_a_range_is_cut_at_both_ends_of_batches(bench: SourceBench) -> None:
    for number in range(4):
        bench.send(0, *(b"%d%d" % (number, row) for row in range(5)))
    source = bench.source()
    claim(source)
    for first, last in ((0, 20), (3, 4), (3, 17), (5, 10), (7, 7), (19, 20)):
        expected = [b"%d%d" % divmod(offset, 5) for offset in range(first, last)]
        assert read(source, {"orders/0": (first, last)}, query=f"{first}-{last}") == expected


def test_gaps_of_aborted_data_and_markers_are_no_loss(
    bench: SourceBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a fetch has no visible row at all."""
    monkeypatch.setattr(reader, "FETCH_BYTES", 1)
    expected = []
    rng = random.Random(1)
    for number in range(60):
        body = b"%d" % number
        commit = rng.choice((True, False, None, None))
        if commit is None:
            bench.send(0, body)
        else:
            bench.send_in_transaction(0, body, body, commit=commit)
        expected += [body] * {None: 1, True: 2, False: 0}[commit]
    source = bench.source()
    assert read(source, claimed(source)) == expected


def test_slices_are_read_in_their_order(bench: SourceBench) -> None:
    bench.send(0, b"a", b"b", b"c")
    bench.send(1, b"d", b"e")
    source = bench.source()
    ranges = claimed(source)
    slices = (("orders/1", 1, 2), ("orders/0", 0, 0), ("orders/0", 1, 3), ("orders/1", 0, 1))
    ticket = ReadTicket(APP, "q", 0, ranges, slices)
    assert [row for rows in source.read(ticket) for row in rows.column("body").to_pylist()] == [
        b"e",
        b"b",
        b"c",
        b"d",
    ]


def test_browse_reads_up_to_what_is_stable_and_claims_nothing(bench: SourceBench) -> None:
    bench.send(0, b"a", b"b")
    bench.send_in_transaction(0, b"open", commit=None)
    bench.client.delete_records({TopicPartition(QUEUE, 0): 1})
    found = [
        row
        for rows in bench.source().browse([("orders/0", 0, 99), ("orders/1", 0, 5)])
        for row in rows.to_pylist()
    ]
    assert [row["body"] for row in found] == [b"b"]
    assert set(bench.kafka.topics) == {QUEUE}


# -- S4 ------------------------------------------------------------------------------------------------------


def test_s4_the_read_is_durable_before_its_first_row(bench: SourceBench) -> None:
    bench.send(0, b"a")
    source, task = bench.source(), bench.source()
    ranges = claimed(source)
    rows = task.read(ReadTicket(APP, "q", 3, ranges, (("orders/0", 0, 1),)))
    assert next(rows).num_rows == 1
    source.journal(APP).catch_up()
    assert source.journal(APP).look(lambda claims: claims.ranges_read("q", 3)) == {
        "orders/0": [0, 1],
        "orders/1": [0, 0],
    }
    rows.close()  # type: ignore[attr-defined]


def test_s4_a_queue_that_the_app_never_claimed_is_refused(bench: SourceBench) -> None:
    bench.send(0, b"a")
    with pytest.raises(errors.CheckpointMismatch, match="of which its app has claimed nothing"):
        read(bench.source(), {"orders/0": (0, 1)})


# -- failures ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault",
    [
        REFUSED,
        LOST,
        UNANSWERED,
        Code.NOT_LEADER_OR_FOLLOWER,
        Code.UNKNOWN_TOPIC_ID,
        Code.OFFSET_OUT_OF_RANGE,
        "moved",
    ],
)
@pytest.mark.parametrize("at", [0, 1, 3])
def test_every_row_comes_once_whatever_happens_to_a_fetch(
    bench: SourceBench, fault: Any, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "FETCH_BYTES", 1)
    bodies = [b"%d" % number for number in range(6)]
    for body in bodies:
        bench.send(0, body)
    source = bench.source()
    ranges = claimed(source)

    def moved() -> None:
        log = bench.kafka.log(TopicPartition(QUEUE, 0))
        assert log is not None
        bench.kafka.move_leader(TopicPartition(QUEUE, 0), log.leader % 3 + 1)

    bench.failing([None] * at + [moved if fault == "moved" else fault] * 2, port.Fetch, topic=QUEUE)
    assert read(source, ranges) == bodies


def test_a_leader_that_does_not_come_back_is_an_error(bench: SourceBench) -> None:
    bench.send(0, b"a")
    source = bench.source()
    ranges = claimed(source)
    bench.kafka.move_leader(TopicPartition(QUEUE, 0), -1)
    with pytest.raises(errors.TxmqError, match=r"LEADER_NOT_AVAILABLE|no leader"):
        read(source, ranges)
    bench.kafka.move_leader(TopicPartition(QUEUE, 0), 1)
    with (
        bench.kafka.hidden(TopicPartition(QUEUE, 0)),
        pytest.raises(errors.ConnectionFailed, match="does not show offset 0"),
    ):
        read(source, ranges, query="again")


def test_rows_below_the_retention_are_data_loss_or_skipped(bench: SourceBench) -> None:
    bench.send(0, b"a", b"b")
    bench.send(0, b"c")
    bench.send(1, b"d")
    source = bench.source()
    ranges = claimed(source)
    bench.client.delete_records({TopicPartition(QUEUE, 0): 1})
    with pytest.raises(errors.DataLoss, match="offset 0 of orders/0 is lost: Kafka has 1 to 3"):
        read(source, ranges)
    assert read(source, ranges, query="skip", fail=False) == [b"b", b"c", b"d"]
    bench.client.delete_records({TopicPartition(QUEUE, 0): 3})
    assert read(source, ranges, query="all", fail=False) == [b"d"]
    assert claim(source, {"orders/0": 3, "orders/1": 1}) == {"orders/0": 3, "orders/1": 1}


def test_a_topic_that_is_made_again_while_it_is_read_is_data_loss(
    bench: SourceBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "FETCH_BYTES", 1)
    for body in (b"a", b"b", b"c", b"d"):
        bench.send(0, body)
    source = bench.source()
    ranges = claimed(source)

    def again() -> None:
        bench.client.delete_topic(QUEUE)
        bench.client.create_topic(QUEUE, 2)
        bench.send(0, *[b"other"] * 9)

    for fail, query in ((True, "q"), (False, "skip")):
        bench.failing([None, None, again if fail else None], port.Fetch, topic=QUEUE)
        with pytest.raises(errors.DataLoss, match="deleted and made again"):
            read(source, ranges, query=query, fail=fail)


# -- rows ----------------------------------------------------------------------------------------------------


def only_row(bench: SourceBench) -> Mapping[str, Any]:
    source = bench.source()
    (row,) = read_rows(source, claimed(source))
    return row


def test_what_txmq_sent_is_a_message_again(bench: SourceBench) -> None:
    properties = Properties(
        content_type="text/plain", headers={"n": Long(7), "t": "é"}, message_id="m", priority=3
    )
    bench.send_with(1, b"body", b"key", *of_message("events", properties.encode()))
    row = only_row(bench)
    assert Properties.decode(row["properties"]) == properties
    assert {name: row[name] for name in ("queue", "offset", "exchange", "routing_key", "body", "redelivered")} == {
        "queue": QUEUE, "offset": 0, "exchange": "events", "routing_key": "key", "body": b"body", "redelivered": False,
    }  # fmt: skip
    assert row["timestamp"] == datetime(1970, 1, 1, microsecond=1000, tzinfo=timezone.utc)
    assert row.get("partition", 1) == 1


@pytest.mark.parametrize(
    ("key", "routing_key"),
    [
        (None, QUEUE),
        (b"", ""),
        ("é".encode(), "é"),
        (b"\xff\x00", "0xff00"),
        (b"\0", "\0"),
        (b"k" * 300, "k" * 300),
    ],
)
def test_the_key_of_another_client_is_the_routing_key(
    bench: SourceBench, key: bytes | None, routing_key: str
) -> None:
    bench.send_with(0, None, key)
    row = only_row(bench)
    assert (row["routing_key"], row["body"], row["exchange"], row["properties"]) == (
        routing_key,
        None,
        "",
        b"",
    )


def test_rows_with_and_without_headers_and_keys_stand_side_by_side(bench: SourceBench) -> None:
    rng = random.Random(5)
    expected, records = [], []
    for _ in range(300):
        key = rng.choice([None, b"", b"a", b"\xff"])
        found = rng.choice(
            [
                [],
                [("a", b"1")],
                [("a", None), ("a", b"\xff")],
                [("txmq.exchange", b"x")],
                [("txmq.priority", b"nine")],
            ]
        )
        body = rng.choice([None, b"", b"x" * 50])
        bench.send_with(0, body, key, *found)
        records.append((key, [{"key": name, "value": value} for name, value in found] or None))
        headers: Any = {
            (): {}, ("1",): {"a": "1"}, ("x",): {"a": b"\xff", OTHERS: '[["a",null]]'}, ("p",): {OTHERS: '[["txmq.priority","nine"]]'}, ("e",): {},
        }[() if not found else ("e",) if found[0][0] == "txmq.exchange" else ("p",) if "txmq" in found[0][0] else ("x",) if len(found) > 1 else ("1",)]  # fmt: skip
        expected.append((
            {None: QUEUE, b"": "", b"a": "a", b"\xff": "0xff"}[key], body, "x" if found and found[0][0] == "txmq.exchange" else "", Properties(headers=headers),
        ))  # fmt: skip
    source = bench.source()
    ranges = claimed(source)
    slices = (("orders/0", 0, 140), ("orders/0", 140, 300))
    ticket = ReadTicket(APP, "", -1, ranges, slices, record=True)
    for batches in (source.read(ticket), source.browse(slices, record=True)):
        table = pa.Table.from_batches(batches, READ_WITH_RECORD)
        assert [(row["key"], row["headers"]) for row in table.to_pylist()] == records
    rows = read_rows(source, ranges)
    assert [
        (row["routing_key"], row["body"], row["exchange"], Properties.decode(row["properties"]))
        for row in rows
    ] == expected


@pytest.mark.parametrize(("timestamp", "year"), [(-1, None), (0, 1970), (253_402_300_799_000, 9999)])
def test_a_timestamp_is_that_of_the_record(bench: SourceBench, timestamp: int, year: int | None) -> None:
    bench.send(0, b"a", timestamp=timestamp)
    found = only_row(bench)["timestamp"]
    assert (found and found.year) == year


def test_a_timestamp_beyond_all_calendars_does_not_stop_a_stream(bench: SourceBench) -> None:
    bench.send(0, b"a", timestamp=2**62)
    source = bench.source()
    ranges = claimed(source)
    (rows,) = source.read(ReadTicket(APP, "q", 0, ranges, (("orders/0", 0, 1),)))
    assert rows.schema == READ_SCHEMA and rows.column("body").to_pylist() == [b"a"]
    assert rows.column("timestamp").cast(pa.int64()).to_pylist()[0] > 2**62


def test_a_stream_of_large_and_small_batches_is_read_whole(
    bench: SourceBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "FETCH_BYTES", 20_000)
    rng = random.Random(3)
    expected = []
    for number in range(80):
        bodies = [b"%d" % number + bytes(rng.choice((0, 10, 3000))) for _ in range(rng.choice((1, 5, 40)))]
        batch = encode(
            pa.array(bodies, pa.binary()),
            timestamp=1,
            headers=pa.array([encode_headers([("n", b"%d" % number)])] * len(bodies), pa.binary()),
        )
        bench.client.produce({TopicPartition(QUEUE, number % 2): batch})
        expected += [(number % 2, body) for body in bodies]
    source = bench.source()
    found = read_rows(source, claimed(source))
    for partition in (0, 1):
        wanted = [body for number, body in expected if number == partition]
        size = sum(1 for number, _ in expected if number == 0)
        assert [row["body"] for row in (found[:size] if partition == 0 else found[size:])] == wanted


# -- many partitions -----------------------------------------------------------------------------------------


def test_a_few_rows_of_many_partitions_come_with_few_fetches() -> None:
    bench = SourceBench(partitions=300)
    for number in range(300):
        bench.send(number, b"%d" % number)
    source = bench.source()
    ranges = claimed(source)
    fetches: list[None] = []
    bench.failing([lambda: fetches.append(None)] * 600, port.Fetch, topic=QUEUE)
    assert sorted(read(source, ranges)) == sorted(b"%d" % number for number in range(300))
    leaders = len(bench.kafka.nodes)
    assert len(fetches) <= leaders * -(-300 // reader.FETCH_LOGS)


@pytest.mark.parametrize("seed", range(30))
def test_rows_of_several_partitions_come_once_in_their_order_whatever_has_room_in_a_fetch(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With large and small batches, slices of one log, errors of single fetches, and rows that are lost."""
    rng = random.Random(seed)
    monkeypatch.setattr(reader, "FETCH_BYTES", rng.choice((1, 500, 5_000, 1 << 20)))
    monkeypatch.setattr(reader, "FETCH_LOGS", rng.choice((1, 3, 64)))
    monkeypatch.setattr(reader, "FETCH_ROWS", rng.choice((1, 5, 10_000)))
    bench = SourceBench(partitions=8)
    rows: dict[str, list[bytes]] = {f"{QUEUE}/{number}": [] for number in range(8)}
    for number in range(rng.randrange(80)):
        partition = rng.randrange(8)
        bodies = [b"%d-%d" % (number, row) + bytes(rng.choice((0, 400))) for row in range(rng.choice((1, 4)))]
        bench.send(partition, *bodies)
        rows[f"{QUEUE}/{partition}"] += bodies
    source = bench.source()
    ranges = claimed(source)
    slices = []
    for log, (first, last) in ranges.items():
        cut = rng.randint(first, last)
        slices += [(log, first, cut), (log, cut, last)] if rng.random() < 0.5 else [(log, first, last)]
    rng.shuffle(slices)
    lost = {f"{QUEUE}/{number}": rng.choice((0, 0, 0, 3)) for number in range(8)}
    begins = {log: min(count, len(rows[log])) for log, count in lost.items()}
    bench.client.delete_records({TopicPartition(QUEUE, int(log[-1])): at for log, at in begins.items()})
    faults = [rng.choice((None, None, None, REFUSED, LOST, UNANSWERED)) for _ in range(20)]
    bench.failing(faults, port.Fetch, topic=QUEUE)
    ticket = ReadTicket(APP, "q", 0, ranges, tuple(slices), fail_on_data_loss=False)
    found = [body for each in source.read(ticket) for body in each.column("body").to_pylist()]
    assert found == [
        body
        for log, first, last in slices
        for body in rows[log][max(first, begins[log]) : max(last, begins[log])]
    ]
