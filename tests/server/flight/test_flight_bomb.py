"""Few bytes of Arrow that state many: they are counted before they are decompressed, after the permission."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from broker_core.arrow.parts import stream_of
from broker_core.arrow.stated_size import stated_bytes
from broker_core.core import errors
from broker_core.core import password as passwords
from broker_core.flight import contract
from broker_core.flight.authorization import Basic
from broker_core.launcher import Broker
from tests.server.conftest import Served
from tests.server.flight.flight_calls import HEADER, Raw, messages, part_body
from tests.server.flight.test_flight_bytes import Streams, arrow_frames, put_frames

MEGABYTE = 1024 * 1024
BOMB_MB = 256
STAGE = {
    "header": {**HEADER, "token": "t", "app_id": "", "kind": "append", "target": {"table": "t"}},
    "part": 0,
}


def stream(*batches: pa.RecordBatch, compression: str | None = "zstd") -> pa.Buffer:
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(sink, batches[0].schema, options=options) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return sink.getvalue()


def zeros(megabytes: int) -> pa.RecordBatch:
    return pa.record_batch({"body": pa.array([b"\0" * (megabytes * MEGABYTE)], pa.large_binary())})


def mixed() -> pa.RecordBatch:
    rows = 1000
    columns = {
        "n": pa.array(range(rows)),
        "text": pa.array([f"row {number}" if number % 3 else None for number in range(rows)]),
        "kind": pa.array(["a", "b"] * (rows // 2)).dictionary_encode(),
        "nested": pa.array([{"list": [number, 1]} for number in range(rows)]),
        "nothing": pa.nulls(rows),
        "view": pa.array(["a view that is longer than it may be inline"] * rows, pa.string_view()),
    }
    return pa.record_batch(columns)


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
@pytest.mark.parametrize("rows", [mixed(), zeros(1), messages(b"one", b"two"), mixed().slice(0, 0)])
def test_the_stated_size_is_that_of_the_rows(rows: pa.RecordBatch, compression: str | None) -> None:
    data = stream(rows, compression=compression)
    read = contract.decode_batch(data)
    taken = read.get_total_buffer_size()
    assert taken <= stated_bytes(data) + 64 * rows.num_columns
    assert stated_bytes(data) <= taken * 1.2 + 1024


def peak_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmHWM"))


def test_a_bomb_is_refused_before_it_is_decompressed(tmp_path: Path) -> None:
    one, three = stream(zeros(BOMB_MB)), stream(*[zeros(BOMB_MB)] * 3)
    assert len(three) < MEGABYTE
    served = Served(tmp_path / "data").start()
    try:
        raw = Raw(served.url)
        assert isinstance(raw.action("stage", part_body(STAGE, stream(zeros(1)))), list), "compressed rows"
        before = peak_mb(served.pid)
        answer = raw.action("stage", part_body(STAGE, one))
        assert isinstance(answer, errors.TransactionTooLarge), answer
        answer = raw.action("stage", part_body(STAGE, three))
        assert isinstance(answer, errors.RemoteProtocolError) and "not 3" in str(answer)
        assert peak_mb(served.pid) - before < BOMB_MB / 4
    finally:
        served.end()


def test_a_bomb_in_a_stream_is_refused_before_it_is_decompressed(tmp_path: Path) -> None:
    """As a part, as rows that Arrow would read itself, and behind a schema without columns."""
    header = {**HEADER, "token": "t", "app_id": "", "kind": "append", "target": {"table": "t"}}
    plain = stream(zeros(1))
    one, three = stream(zeros(BOMB_MB)), stream(*[zeros(BOMB_MB)] * 3)
    words = pa.record_batch({"word": zeros(BOMB_MB).column(0).dictionary_encode()})
    bombs = {
        "a part": (put_frames(header, bytes(one)), "send smaller parts"),
        "three in a part": (put_frames(header, bytes(three)), "not 3"),
        "rows": (arrow_frames(header, one), "1 columns"),
        "a dictionary": (arrow_frames(header, stream(words)), "1 columns"),
        "rows behind no columns": (behind_no_columns(header, one), "a message without a part"),
        "a dictionary behind no columns": (
            behind_no_columns(header, stream(words)),
            "a message without a part",
        ),
    }
    served = Served(tmp_path / "data").start()
    try:
        streams = Streams(served.url)
        assert streams.put(put_frames(header, bytes(plain))) == "", "compressed rows"
        before = peak_mb(served.pid)
        for name, (frames, refusal) in bombs.items():
            assert sum(map(len, frames)) < MEGABYTE
            assert refusal in streams.put(frames), name
        assert peak_mb(served.pid) - before < BOMB_MB / 4
        assert streams.put(put_frames({**header, "branch": "c"}, bytes(plain))) == "", "it goes on"
    finally:
        served.end()


def behind_no_columns(header: object, rows: pa.Buffer) -> list[bytes]:
    first = arrow_frames(header, stream_of([], contract.NO_COLUMNS))
    return first + arrow_frames(header, rows)[1:]


def test_rows_are_not_looked_at_before_the_permission(tmp_path: Path) -> None:
    with Broker.open(tmp_path / "data") as broker:
        for user in ("root", "nobody"):
            broker.accounts.add_user(user, passwords.hashed("pw", passwords.Cost(4)))
        broker.accounts.set_permissions("root", ".*", ".*", ".*")
        damaged = part_body(STAGE, b"no rows")
        answers = [
            Raw(broker.url, Basic(user, "pw").header).action("stage", damaged) for user in ("root", "nobody")
        ]
        assert isinstance(answers[0], errors.RemoteProtocolError)
        assert isinstance(answers[1], errors.AccessRefused)


@pytest.mark.parametrize("item", ["[],", "{},", "1,"])
def test_a_call_of_very_many_values_is_refused_before_it_is_read(tmp_path: Path, item: str) -> None:
    """In Python, a value takes twenty times the bytes of its text."""
    served = Served(tmp_path / "data").start()
    try:
        raw = Raw(served.url)
        raw.action("hello", b"")  # what comes before a login has another limit
        body = f'{{"queues": [{item * (20 * MEGABYTE // len(item))}1]}}'.encode()
        before = peak_mb(served.pid)
        for name in ("engine.logs", "admin.import_definitions", "channel.publish"):
            answer = raw.action(name, body)
            assert isinstance(answer, errors.RemoteProtocolError), answer
            assert "more than 1000000 values" in str(answer)
        assert peak_mb(served.pid) - before < 8 * 20
    finally:
        served.end()


def test_a_call_that_brings_no_messages_has_a_limit_of_bytes(tmp_path: Path) -> None:
    with Broker.open(tmp_path / "data") as broker:
        raw = Raw(broker.url)
        raw.action("hello", b"")
        body = b'{"queues": ["' + b"x" * contract.MAX_CALL_BYTES + b'"]}'
        for answer in (raw.action("engine.logs", body), raw.get(body)):
            assert isinstance(answer, errors.RemoteProtocolError), answer
            assert "the limit is 33554432" in str(answer)
