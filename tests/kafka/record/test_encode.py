"""Encoding record batches: kafka-python and the product's own decoder read back what was written."""

from __future__ import annotations

import random

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka.record.default_records import DefaultRecordBatch

from broker_core.core import errors
from broker_core.kafka.record import encode as module
from broker_core.kafka.record.compression import TooLarge, deflate, inflate
from broker_core.kafka.record.decode import decode
from broker_core.kafka.record.encode import encode, encode_headers, encode_large, stamp
from broker_core.kafka.record.record_batch import Codec
from tests.gates import examples
from tests.kafka.bench.batches import EVERYTHING, LOG, Row, rows, rows_of_kafka_python

NOW = 1_700_000_000_000
BYTES = st.one_of(st.none(), st.binary(max_size=3), st.sampled_from((63, 64, 8191, 8192, 70_000)).map(bytes))
HEADERS = st.lists(
    st.tuples(st.text(max_size=4), st.one_of(st.none(), st.binary(max_size=80))), max_size=3
).map(tuple)


def blocks(headers: list[tuple[tuple[str, bytes | None], ...]]) -> pa.BinaryArray:
    return pa.array([encode_headers(each) for each in headers], pa.binary())


@pytest.mark.slow
@examples(150)
@given(
    st.lists(st.tuples(BYTES, BYTES, HEADERS), min_size=1, max_size=8),
    st.integers(1, 40),
    st.booleans(),
    st.booleans(),
)
def test_every_row_is_read_back(
    made: list[tuple[bytes | None, bytes | None, tuple]], times: int, keyed: bool, headed: bool
) -> None:
    made = made * times
    expected = [
        Row(number, NOW, key if keyed else None, value, headers if headed else ())
        for number, (value, key, headers) in enumerate(made)
    ]
    data = encode(
        pa.array([value for value, _, _ in made], pa.binary()),
        timestamp=NOW,
        keys=pa.array([key for _, key, _ in made], pa.binary()) if keyed else None,
        headers=blocks([headers for _, _, headers in made]) if headed else None,
    )
    assert rows_of_kafka_python(data) == expected
    assert rows(decode(data, 0, EVERYTHING, log=LOG)) == expected


@examples(60)
@given(
    st.lists(
        st.tuples(st.binary(max_size=80), BYTES.map(lambda value: value or b""), HEADERS),
        min_size=1,
        max_size=200,
    )
)
def test_large_records_are_written_as_columns_are(made: list[tuple[bytes, bytes, tuple]]) -> None:
    keys, values, headers = zip(*made, strict=True)
    columns = encode(
        pa.array(values, pa.binary()),
        keys=pa.array(keys, pa.binary()),
        headers=blocks(headers),
        timestamp=NOW,
    )
    records = [(key, value, encode_headers(each)) for key, value, each in made]
    assert encode_large(records, timestamp=NOW) == columns


@pytest.mark.parametrize("keyed", [False, True])
def test_offsets_of_three_bytes_are_written(keyed: bool) -> None:
    count = 70_000
    column = pa.array([b"%d" % number for number in range(count)], pa.binary())
    found = decode(
        encode(column, timestamp=NOW, keys=column if keyed else None), 0, EVERYTHING, log=LOG
    ).records
    assert found.offsets.tolist() == list(range(count)) and found.values.equals(column)
    assert (found.keys is None) if not keyed else found.keys.equals(column)


@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 8192, 8193, 20_000])
@pytest.mark.parametrize("width", [1, 54, 55, 63, 64, 8192])
def test_values_of_one_width_are_written_as_those_of_many_are(count: int, width: int) -> None:
    count = min(count, 40_000_000 // width)
    content = random.Random(width).randbytes((count + 3) * width)
    fixed = pa.FixedSizeBinaryArray.from_buffers(pa.binary(width), count + 3, [None, pa.py_buffer(content)])
    values = fixed.cast(pa.binary())[2:-1]
    # keys, also those that are null, are written column by column
    in_columns = encode(values, timestamp=NOW, keys=pa.nulls(count, pa.binary()))
    assert encode(values, timestamp=NOW) == in_columns


@pytest.mark.parametrize("codec", list(Codec))
def test_every_codec_is_read_back(codec: Codec) -> None:
    values = pa.array([random.Random(number).randbytes(number % 300) for number in range(2000)], pa.binary())
    data = encode(values, timestamp=NOW, codec=codec, transactional=True)
    assert data[22] == codec | 0x10
    assert decode(data, 0, EVERYTHING, log=LOG).records.values.equals(values)


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("size", [0, 1, 32_768, 65_536, 65_537, 300_000])
def test_what_is_deflated_inflates_again(codec: Codec, size: int) -> None:
    for content in (bytes(size), random.Random(size).randbytes(size)):
        packed = memoryview(bytes(deflate(codec, memoryview(content))))
        assert bytes(inflate(codec, packed, size)) == content
        if size:
            with pytest.raises(TooLarge):
                inflate(codec, packed, size - 1)


def test_a_sliced_column_is_written_as_it_is_seen() -> None:
    whole = pa.array([None, b"a", None, b"bb", b"", b"ccc"], pa.binary())
    part = whole[2:5]
    data = encode(part, timestamp=NOW, keys=whole[1:4], headers=blocks([(("n", None),)] * 5)[2:])
    assert [(row.key, row.value) for row in rows_of_kafka_python(data)] == [
        (b"a", None),
        (None, b"bb"),
        (b"bb", b""),
    ]


def test_bytes_of_a_null_are_not_written() -> None:
    """A null may lie over bytes: Arrow leaves them where a filter made it."""
    bounds = pa.py_buffer(b"".join(number.to_bytes(4, "little") for number in (0, 3, 6)))
    values = pa.Array.from_buffers(pa.binary(), 2, [pa.py_buffer(b"\x02"), bounds, pa.py_buffer(b"abcdef")])
    assert [row.value for row in rows_of_kafka_python(encode(values, timestamp=NOW))] == [None, b"def"]


def test_a_stamp_puts_a_batch_into_a_transaction() -> None:
    batch = bytearray(encode(pa.array([b"a", b"b"], pa.binary()), timestamp=1, transactional=True))
    stamp(batch, producer_id=2**40, epoch=7, sequence=12, timestamp=NOW)
    read = DefaultRecordBatch(bytes(batch))
    assert read.validate_crc() and read.is_transactional and read.attributes == 0x10
    assert (read.producer_id, read.producer_epoch, read.base_sequence) == (2**40, 7, 12)
    assert [row.timestamp for row in rows(decode(batch, 0, EVERYTHING, log=LOG))] == [NOW, NOW]


def test_what_no_batch_holds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(errors.LocalProtocolError, match="a record batch of 0 rows"):
        encode(pa.array([], pa.binary()), timestamp=NOW)
    monkeypatch.setattr(module, "MAX_RECORD", 100)
    for values in ([b"x", bytes(100)], [bytes(100)] * 2):
        with pytest.raises(errors.TransactionTooLarge, match="the largest of 107"):
            encode(pa.array(values, pa.binary()), timestamp=NOW)
