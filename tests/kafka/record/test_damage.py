"""Damaged record batches: one clear error or the right rows, never a wrong one, and never more memory than
the limit allows.
"""

from __future__ import annotations

import random
import tracemalloc
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka.errors import CorruptRecordError, UnsupportedCodecError

from broker_core.core import errors
from broker_core.kafka.record import decode as module
from broker_core.kafka.record.compression import deflate
from broker_core.kafka.record.decode import decode, header_pairs
from broker_core.kafka.record.record_batch import Codec
from tests.gates import examples
from tests.kafka.bench.batches import (
    CONTROL,
    EVERYTHING,
    LOG,
    LOG_APPEND_TIME,
    TRANSACTIONAL,
    Batch,
    Row,
    Shape,
    checked_again,
    marker,
    rows,
    rows_of_kafka_python,
    signed,
)

BATCHES = st.builds(
    Shape,
    rows=st.sampled_from((1, 3, 60, 200)),
    value=st.sampled_from(("text", "zeros", "records")),
    sizes=st.sampled_from(((40,), (0, 63, 64, 200), (5, 9000))),
    nulls=st.sampled_from((0.0, 0.2)),
    keys=st.sampled_from((0.0, 0.5)),
    headers=st.sampled_from((0.0, 0.4)),
    spread_ms=st.sampled_from((0, 1000)),
    gaps=st.booleans(),
    seed=st.integers(0, 1000),
).map(lambda shape: shape.batch(100))


def mutated(data: bytes, rng: random.Random, first: int) -> bytes:
    """``data`` with some bytes behind ``first`` changed, cut out, doubled or zeroed."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        at = rng.randrange(first, max(len(changed), first + 1))
        span = rng.choice((1, 1, 2, 9, 100))
        match rng.randrange(5):
            case 0:
                if at < len(changed):
                    changed[at] ^= 1 << rng.randrange(8)
            case 1:
                if at < len(changed):
                    changed[at] = rng.choice((0, 1, 2, 0x7F, 0x80, 0xFF))
            case 2:
                del changed[at : at + span]
            case 3:
                changed[at:at] = changed[at : at + span]
            case _:
                changed[at : at + span] = bytes(len(changed[at : at + span]))
    return bytes(changed)


def outcome(data: bytes) -> list[Row] | None:
    """The rows; None where they are refused, with an error that names the log."""
    try:
        return rows(decode(data, 0, EVERYTHING, log=LOG, limit=1 << 20))
    except (errors.CorruptRecordBatch, errors.TransactionTooLarge) as error:
        text = str(error)
    assert LOG in text and "\n" not in text
    return None


def require_right(found: list[Row] | None, data: bytes) -> None:
    """Rows that were accepted are those of kafka-python, which is stricter only with the names of headers."""
    if found is None:
        return
    try:
        expected = rows_of_kafka_python(data)
    except UnsupportedCodecError:
        expected = []
    except CorruptRecordError as error:
        if "UnicodeDecodeError" in str(error):
            return
        raise AssertionError("kafka-python refuses what was accepted") from error
    assert found == expected


@pytest.mark.slow
@examples(200)
@given(BATCHES, st.integers(0, 2**32))
def test_damaged_records_under_a_right_checksum_are_refused_or_right(batch: Batch, seed: int) -> None:
    content = mutated(batch.plain(), random.Random(seed), 0)
    data = replace(batch, content=content).encoded()
    found = outcome(data)
    require_right(found, data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_fast", refuse)
        assert outcome(data) == found
    for codec in (Codec.LZ4, Codec.SNAPPY, Codec.ZSTD):
        assert outcome(replace(batch, content=content, codec=codec).encoded()) == found


def refuse(*_: object) -> None:
    raise ValueError("not this way")


@pytest.mark.slow
@examples(200)
@given(BATCHES, st.integers(0, 2**32))
def test_damaged_heads_under_a_right_checksum_are_refused_or_right(batch: Batch, seed: int) -> None:
    rng, data = random.Random(seed), bytearray(batch.encoded())
    for _ in range(rng.choice((1, 1, 3))):
        data[rng.choice([*range(16, 17), *range(21, 61)])] = rng.choice(
            (0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256))
        )
    changed = checked_again(bytes(data))
    if changed[22] & (LOG_APPEND_TIME | CONTROL) == 0:
        require_right(outcome(changed), changed)
    else:
        outcome(changed)


@pytest.mark.slow
@examples(100)
@given(BATCHES, st.sampled_from(list(Codec)[1:]), st.integers(0, 2**32))
def test_damaged_compression_is_refused_or_right(batch: Batch, codec: Codec, seed: int) -> None:
    whole = bytes(deflate(codec, memoryview(batch.plain())))
    data = replace(batch, codec=codec).around(mutated(whole, random.Random(seed), 0))
    found = outcome(data)
    if found is not None:
        # a codec without a checksum may inflate to other bytes that are records: then to whole ones, as many,
        # at rising offsets of the batch
        offsets = [row.offset for row in found]
        assert len(offsets) == len(batch.rows)
        assert offsets == sorted(set(offsets))
        assert not offsets or batch.base <= offsets[0] <= offsets[-1] <= batch.last_offset


def test_every_byte_under_the_checksum_counts() -> None:
    whole = Shape(4, headers=1.0, keys=1.0).batch(9).encoded()
    for at in range(16, len(whole)):
        for bit in range(8):
            data = bytearray(whole)
            data[at] ^= 1 << bit
            with pytest.raises(errors.CorruptRecordBatch, match=rf"offset 9 of {LOG}"):
                decode(data, 0, EVERYTHING, log=LOG)


def test_a_fetch_without_a_whole_batch_is_refused() -> None:
    """A broker sends the first batch whole; without an error the reader would fetch the same bytes for
    ever.
    """
    whole = Shape(4).batch(9).encoded()
    for cut in range(1, len(whole)):
        with pytest.raises(
            errors.CorruptRecordBatch, match=f"{cut} bytes of {LOG} are not a whole record batch"
        ):
            decode(whole[:cut], 0, EVERYTHING, log=LOG)


def one(**changes: object) -> Batch:
    return replace(Batch([Row(7, 1_700_000_000_000, b"k", b"value", (("name", b"v"),))], base=7), **changes)


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        (one(magic=1), "its format is 1; only 2"),
        (one(attributes=5), "its codec is 5"),
        (one(count=2), "it says 2 records with offsets 7 to 7"),
        (one(count=-1), "it says -1 records"),
        (one(last=2**31 + 5, count=2**31 - 1), "its content of 20 bytes cannot hold 2147483647 records"),
        (one(count=0), "it says 0 records in 20 bytes"),
        (one(last=2), "it says 1 records with offsets 7 to 2"),
        (one(base=2**63 - 5, last=2**63 - 1, content=b"x"), "it says 1 records with offsets"),
        (one(last=8, count=2, content=one().plain()), "record 1 of 2: a number at byte 20 does not end"),
        (one(content=one().plain() + b"\0" * 7), "7 bytes follow its 1 records"),
        (one(content=b"\x10" + bytes(10)), "record 0 of 1: its headers end 2 bytes before the record, and 0 "
                                           "of them are missing"),
        (one(content=b"\x11" + bytes(10)), "record 0 of 1: its length is -9"),
        (one(content=b"\x80" * 11), "record 0 of 1: a number at byte 10 does not end"),
        (one(content=b"\x0e\1\0\0\1\1\0\0"), "record 0 of 1: its attributes are 0x01"),
        (one(content=b"\x0c\0\0\0\3\1\0"), "record 0 of 1: a field of -2 bytes"),
        (one(content=b"\x0c\0\0\0\1\x40\0"), "record 0 of 1: a field of 32 bytes, and 1 are left"),
        (one(content=b"\x0c\0\0\2\1\1\0"), "record 0 of 1: its offset is 8, behind 6"),
        (one(content=b"\x0c\0\0\1\1\1\0"), "record 0 of 1: its offset is 6, behind 6"),
        (one(content=b"\x0c\0\0\0\1\1\1"), "record 0 of 1: its count of headers is -1"),
        (one(content=b"\x0c\0\0\0\1\1\2"), "record 0 of 1: its headers end 0 bytes before the record, and 1 "
                                           "of them are missing"),
        (one(content=b"\x10\0\0\0\1\1\2\1\0"), "record 0 of 1: a header of -1 bytes"),
        (one(content=b"\x10\0\0\0\1\1\2\0\4"), "record 0 of 1: a header of 2 bytes, and 0 are left"),
        (one(base_timestamp=2**63 - 1, content=b"\x0c\0\2\0\1\1\0"), "record 0 of 1: its timestamp is "
                                                                     "9223372036854775808"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_an_error_says_what_is_damaged(batch: Batch, reason: str) -> None:
    with pytest.raises(errors.CorruptRecordBatch) as caught:
        decode(batch.encoded(), 0, EVERYTHING, log=LOG)
    assert reason in str(caught.value) and f"the record batch at offset {batch.base} of {LOG}" in str(
        caught.value
    )
    assert "kafka-dump-log.sh" in str(caught.value)


def test_batches_out_of_order_are_refused() -> None:
    first, second = Shape(5).batch(10).encoded(), Shape(5).batch(14).encoded()
    with pytest.raises(
        errors.CorruptRecordBatch, match="offset 14 of orders/0 is damaged: it stands behind offset 14"
    ):
        decode(first + second, 0, EVERYTHING, log=LOG)


@pytest.mark.parametrize("content", [b"", b"\x10\0\0\0\x08", b"\x0c\0\0\0\2\1\0", b"\x80" * 12])
def test_a_damaged_marker_is_refused(content: bytes) -> None:
    data = marker(5, 3, commit=False)
    with pytest.raises(
        errors.CorruptRecordBatch, match="offset 5 of orders/0 is damaged: its control record"
    ):
        decode(replace(data, content=content).encoded(), 0, EVERYTHING, [(3, 0)], log=LOG)
    assert data.attributes == TRANSACTIONAL | CONTROL


@pytest.mark.parametrize("codec", list(Codec)[1:])
def test_a_decompression_bomb_stops_at_the_limit(codec: Codec) -> None:
    limit = 1 << 20
    data = one(codec=codec, content=bytes(64 << 20)).encoded()
    tracemalloc.start()
    try:
        with pytest.raises(errors.TransactionTooLarge, match=f"the limit is {limit}"):
            decode(data, 0, EVERYTHING, log=LOG, limit=limit)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * limit + 2 * len(data)


@pytest.mark.slow
def test_a_bomb_of_headers_is_not_built() -> None:
    """A record of many empty headers is checked without an object for each."""
    count = 50_000
    block = signed(count) + b"\0\1" * count
    data = one(content=_framed(block)).encoded()
    tracemalloc.start()
    found = decode(data, 0, EVERYTHING, log=LOG).records
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 12 * len(block)
    assert found.headers is not None and header_pairs(found.headers[0].as_py()) == [("", None)] * count


def _framed(block: bytes) -> bytes:
    body = b"\0\0\0\1\1" + block
    return signed(len(body)) + body
