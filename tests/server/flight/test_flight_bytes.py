"""Damaged bytes at the Flight listener: actions, tickets, descriptors, streams of rows. The call fails, the
server goes on, memory is bounded.

The broker is a process of its own: a crash inside Arrow would end it.
"""

from __future__ import annotations

import itertools
import json
import random
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pyarrow as pa
import pytest

from broker_core.arrow.parts import MAX_PART_ROWS, stream_of
from broker_core.client.broker import BrokerClient
from broker_core.core import errors
from broker_core.flight import contract
from broker_core.message.message import MESSAGE_SCHEMA
from tests.server.conftest import Served, fill
from tests.server.flight.damaged_arrow import broken, nested_rows
from tests.server.flight.flight_calls import CALLS, HEADER, TICKETS, Raw, messages, part_body

ROOT = Path(__file__).parents[3]
MEGABYTE = 1024 * 1024
HUGE = [2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, -1, 0]
STAGE = {"header": HEADER, "part": 0}
ROWS = bytes(stream_of([messages(b"one", b"two")], MESSAGE_SCHEMA))
# rows of a table may have any type, and Arrow follows the offsets of some for as little as their size
NESTED = [bytes(stream_of([batch], batch.schema)) for batch in nested_rows()]
APPEND = {**HEADER, "kind": "append", "target": {"table": "t"}}


def damaged(source: random.Random, data: bytes) -> bytes:
    """Octets changed, dropped, doubled, put in, cut off, or a size that is a lie."""
    found = bytearray(data)
    for _ in range(source.randint(1, 4)):
        at, length = source.randint(0, len(found)), source.randint(1, 12)
        match source.choice(["change", "drop", "double", "insert", "cut", "lie", "lie"]):
            case "change":
                found[at : at + 1] = source.randbytes(1)
            case "drop":
                del found[at : at + length]
            case "double":
                found[at:at] = found[at : at + length]
            case "insert":
                found[at:at] = source.randbytes(length)
            case "cut":
                del found[at:]
            case "lie":
                at = at // 8 * 8
                size = struct.pack("<q", source.choice(HUGE))
                found[at : at + source.choice((4, 8))] = size[: source.choice((4, 8))]
    return bytes(found)


# -- a stream of parts, message by message -------------------------------------------------------------------


def _field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def _descriptor(header: Any) -> bytes:
    return _field(1, b"\x08\x02" + _field(2, json.dumps(header).encode()))


def put_frames(header: Any, rows: bytes, number: bytes = bytes(8)) -> list[bytes]:
    """The FlightData messages of a DoPut with one part."""
    (schema,) = pa.ipc.MessageReader.open_stream(stream_of([], contract.NO_COLUMNS))
    return [_descriptor(header) + _field(2, bytes(schema.metadata)), _field(3, number + rows)]


def arrow_frames(header: Any, *streams: bytes | pa.Buffer) -> list[bytes]:
    """The same with the messages of Arrow themselves, as other servers of Flight take them."""
    frames = []
    for message in itertools.chain.from_iterable(map(pa.ipc.MessageReader.open_stream, streams)):
        body = bytes(message.body) if message.body is not None else b""
        frames.append(_field(2, bytes(message.metadata)) + _field(3, bytes(8)) + _field(1000, body))
    return [_descriptor(header) + frames[0], *frames[1:]]


class Streams:
    """DoPut with frames of our own."""

    def __init__(self, url: str) -> None:
        self.channel = grpc.insecure_channel(url.removeprefix("txmq://"))
        self._put = self.channel.stream_stream(
            "/arrow.flight.protocol.FlightService/DoPut", lambda data: data, lambda data: data
        )

    def put(self, frames: list[bytes]) -> str:
        """How it failed; "" where it was taken."""
        try:
            list(self._put(iter(frames), wait_for_ready=True, timeout=60))
        except grpc.RpcError as error:
            return f"{error.code()} {error.details()}"
        return ""


# -- the attack ----------------------------------------------------------------------------------------------


def sendings(source: random.Random) -> tuple[str, bytes, list[bytes]]:
    """An action with its body, or frames of a DoPut."""
    name, arguments = source.choice(CALLS)
    body = json.dumps(arguments).encode()
    match source.choice(["action", "ticket", "part", "put", "rows", "put rows", "random"]):
        case "action":
            if name.startswith("channel."):
                body = json.dumps(
                    {"channel": "c", "number": source.randint(-1, 9), "arguments": arguments}
                ).encode()
            return name, damaged(source, body), []
        case "ticket":
            return "", damaged(source, json.dumps(source.choice(TICKETS)).encode()), []
        case "part":
            whole = part_body(STAGE, ROWS)
            return (
                "stage",
                damaged(source, whole) if source.random() < 0.7 else part_body(STAGE, damaged(source, ROWS)),
                [],
            )
        case "put":
            frames = put_frames(HEADER, ROWS, source.choice([bytes(8), b"", b"x", b"\xff" * 8]))
            if source.random() < 0.5:
                frames = arrow_frames(HEADER, ROWS)
            place = source.randrange(len(frames))
            frames[place] = damaged(source, frames[place])
            return "put", b"", frames[: source.randint(1, len(frames))]
        case "rows":
            header = {**APPEND, "branch": source.randbytes(8).hex()}  # a part is staged once
            return (
                "stage",
                part_body({"header": header, "part": 0}, broken(source, source.choice(NESTED))),
                [],
            )
        case "put rows":
            header = {**APPEND, "branch": source.randbytes(8).hex()}
            return "put", b"", put_frames(header, broken(source, source.choice(NESTED)))
    return (
        source.choice([name, "", "engine.", "channel.__init__", "admin._committed", "é", "x" * 5000]),
        source.randbytes(200),
        [],
    )


def attack(served: Served, seed: int, rounds: int) -> None:
    source = random.Random(seed)
    process = psutil.Process(served.pid)
    with BrokerClient(served.url) as client:
        client.open_batch("app", "q", 0, "fail", token="s")
        fill(client, "in", 3)
        raw, streams = Raw(served.url), Streams(served.url)
        before = process.memory_info().rss
        failed = 0
        for _ in range(rounds):
            name, body, frames = sendings(source)
            try:
                if frames:
                    failed += bool(streams.put(frames))
                elif name:
                    failed += isinstance(raw.action(name, body), errors.TxmqError)
                else:
                    failed += isinstance(raw.get(body), errors.TxmqError)
            except (pa.ArrowException, OSError):  # refused by the library before our code
                failed += 1
        assert failed > rounds / 2
        assert process.is_running()
        assert process.memory_info().rss - before < 200 * MEGABYTE
        assert [info.name for info in client.queues() if info.name == "in"] == ["in"]
        with client.channel() as channel:
            channel.queue_declare("after")
            channel.publish(b"1", routing_key="after")
            assert channel.get("after") is not None


def test_damaged_bytes_at_the_flight_listener_fail_their_call_alone(served: Served, seed: int) -> None:
    served.start()
    attack(served, seed, 1_000)


@pytest.mark.soak
def test_damaged_bytes_at_the_flight_listener_for_long(served: Served, seed: int, rounds: int) -> None:
    served.start()
    for number in range(rounds):
        attack(served, seed + number, 3_000)


def feed(directory: Path, seed: int, rounds: int) -> None:
    """In a process of its own: parts, writers' files and staged records of Kafka."""
    command = [
        sys.executable,
        "-m",
        "tests.server.flight.damaged_arrow",
        str(directory),
        str(seed),
        str(rounds),
    ]
    found = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert found.returncode == 0, found.stderr[-3000:]
    assert found.stdout.endswith(f"of {rounds}\n")


def test_damaged_arrow_data_ends_no_process_at_any_way_in(tmp_path: Path, seed: int) -> None:
    feed(tmp_path, seed, 600)


@pytest.mark.soak
def test_damaged_arrow_data_at_any_way_in_for_long(tmp_path: Path, seed: int, rounds: int) -> None:
    for number in range(rounds):
        feed(tmp_path / str(number), seed + number, 5_000)


# -- one by one ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    broker = Served(tmp_path_factory.mktemp("bytes") / "data").start()
    with BrokerClient(broker.url) as client:
        fill(client, "in", 1)
    yield broker
    broker.end()


@pytest.fixture
def raw(one: Served) -> Iterator[Raw]:
    yield Raw(one.url)
    with BrokerClient(one.url) as client:
        assert client.queues()[0].messages == 1
        assert client.apps() == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x00\x00",
        b"\xff\xff\xff\xff{}",
        part_body(STAGE, b""),
        part_body(STAGE, ROWS[:50]),
        part_body(STAGE, ROWS[:-60]),
        part_body(STAGE, b"\xff\xff\xff\xff\xff\xff\xff\x7f" + ROWS),
        part_body(STAGE, stream_of([], MESSAGE_SCHEMA)),
        part_body(STAGE, stream_of([messages(b"1"), messages(b"2")], MESSAGE_SCHEMA)),
        part_body({**STAGE, "header": {**HEADER, "target": {"exchange": {"$bytes": "AA=="}}}}, ROWS),
        part_body([STAGE], ROWS),
        b"[" * 100_000,
    ],
)
def test_a_part_that_is_cut_short_or_announces_another_size_is_refused(body: bytes, raw: Raw) -> None:
    assert isinstance(raw.action("stage", body), errors.RemoteProtocolError)


def schemas() -> list[pa.RecordBatch]:
    good = messages(b"1").to_pydict()
    nullable = pa.schema([field.with_nullable(True) for field in MESSAGE_SCHEMA])
    return [
        pa.record_batch({"body": [b"1"]}),
        pa.record_batch({"n": [1]}),
        pa.record_batch([pa.array([1]), *messages(b"1").columns[1:]], names=MESSAGE_SCHEMA.names),
        pa.RecordBatch.from_pydict({**good, "body": [None]}, schema=nullable),
        pa.record_batch({"n": pa.nulls(MAX_PART_ROWS + 1)}),
        messages(b"1", routing_key="k" * 256),
    ]


@pytest.mark.parametrize(
    "batch",
    schemas(),
    ids=["body alone", "other columns", "another type", "a null", "too many", "a long key"],
)
def test_rows_that_are_no_messages_are_refused_by_every_way_in(
    batch: pa.RecordBatch, raw: Raw, one: Served
) -> None:
    rows = bytes(stream_of([batch], batch.schema))
    answer = raw.action("stage", part_body(STAGE, rows))
    assert isinstance(answer, errors.OptionError), answer
    assert "TXMQ_OPTION" in Streams(one.url).put(put_frames(HEADER, rows))


def test_offsets_beyond_their_buffer_are_found_before_a_row_is_looked_at(raw: Raw, one: Served) -> None:
    offsets = struct.pack("<iii", 0, 3, 6)
    assert ROWS.count(offsets) == 1
    rows = ROWS.replace(offsets, struct.pack("<iii", 0, 3, 2**30))
    assert isinstance(raw.action("stage", part_body(STAGE, rows)), errors.OptionError)
    assert "damaged" in Streams(one.url).put(put_frames(HEADER, rows))


@pytest.mark.parametrize("batch", nested_rows(), ids=lambda batch: str(batch.schema.types[0])[:20])
def test_an_offset_of_a_nested_type_is_not_followed_before_it_is_checked(
    batch: pa.RecordBatch, one: Served
) -> None:
    """Each number of the body in turn is too large. ``nbytes`` of such rows ends a process."""
    raw, streams = Raw(one.url), Streams(one.url)
    rows = bytes(stream_of([batch], batch.schema))
    body = rows.rindex(bytes(8), 0, len(rows) - 64) if rows.count(bytes(8)) else len(rows) // 2
    for at in range(body // 2 // 8 * 8, len(rows) - 8, 8):
        header = {**APPEND, "token": "nested", "branch": f"{at}-{batch.schema}"}
        data = rows[:at] + struct.pack("<q", 2**40) + rows[at + 8 :]
        try:
            raw.action("stage", part_body({"header": header, "part": 0}, data))
            streams.put(put_frames({**header, "part": 1}, data))
        except (pa.ArrowException, OSError):
            pass
    with BrokerClient(one.url) as client:
        client.rollback_batch("nested")
        assert client.queues()
