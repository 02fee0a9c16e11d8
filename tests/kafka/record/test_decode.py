"""Decoding record batches: equal to kafka-python's own decoder, whatever a client writes, and only what a
reader may see.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker_core.core import errors
from broker_core.kafka.record import decode as module
from broker_core.kafka.record import record_batch
from broker_core.kafka.record.decode import RECORD_BYTES, decode
from broker_core.kafka.record.record_batch import Codec, windows
from tests.gates import examples
from tests.kafka.bench.batches import (
    EVERYTHING,
    LOG,
    TRANSACTIONAL,
    Batch,
    Row,
    Shape,
    log_of,
    marker,
    record,
    rows,
    rows_of_kafka_python,
)
from tests.make import around

SHAPES = st.builds(
    Shape,
    rows=st.sampled_from((1, 2, 3, 64, 65, 200, 700)),
    value=st.sampled_from(("text", "zeros", "random", "records")),
    sizes=st.sampled_from(((100,), (0, 1, 62, 63, 64), (0, 300), (5, 9000), (127, 128, 8190, 8200))),
    nulls=st.sampled_from((0.0, 0.05, 1.0)),
    keys=st.sampled_from((0.0, 0.5, 1.0)),
    headers=st.sampled_from((0.0, 0.3, 1.0)),
    spread_ms=st.sampled_from((0, 1, 1000, 10**9, 10**13)),
    gaps=st.booleans(),
    append_time=st.booleans(),
    codec=st.sampled_from(list(Codec)),
    seed=st.integers(0, 1000),
)
LOGS = st.builds(log_of, st.lists(SHAPES, min_size=1, max_size=6), st.sampled_from((0, 127, 10**12)))


def bytes_of(batches: list[Batch]) -> bytes:
    return b"".join(batch.encoded() for batch in batches)


def reference(batches: list[Batch], start: int = 0, end: int = EVERYTHING) -> list[Row]:
    return rows_of_kafka_python(bytes_of([batch.uncompressed() for batch in batches]), start, end)


@pytest.mark.slow
@examples(80)
@given(LOGS, st.integers(0, 1500), st.integers(0, 1500))
def test_every_record_is_that_of_kafka_python(batches: list[Batch], first: int, count: int) -> None:
    data, base = bytes_of(batches), batches[0].base
    assert rows(decode(data, 0, EVERYTHING, log=LOG)) == reference(batches)
    start, end = base + first, base + first + count
    assert rows(decode(data, start, end, log=LOG)) == reference(batches, start, end)


@pytest.mark.slow
@examples(40)
@given(LOGS)
def test_the_plain_form_reads_the_same_records(batches: list[Batch]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_fast", refuse)
        assert rows(decode(bytes_of(batches), 0, EVERYTHING, log=LOG)) == reference(batches)


def refuse(*_: object) -> None:
    raise ValueError("not this way")


@pytest.mark.parametrize("value", ["text", "zeros", "random", "records"])
@pytest.mark.parametrize("codec", list(Codec))
def test_usual_batches_go_the_fast_way(value: str, codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(300, value, (50, 100, 200), 0.1, 0.5, 0.5, 10**9, codec=codec)
    batches = log_of([shape, Shape(40, codec=codec)] * 3)
    monkeypatch.setattr(module, "_plain", refuse)
    assert rows(decode(bytes_of(batches), 0, EVERYTHING, log=LOG)) == reference(batches)


def test_a_column_that_no_record_uses_is_none() -> None:
    plain = decode(bytes_of(log_of([Shape(100)])), 0, EVERYTHING, log=LOG).records
    assert plain.keys is None and plain.headers is None and plain.values.null_count == 0
    # the keys and headers of rows out of range do not count
    mixed = log_of([Shape(50, keys=1.0, headers=1.0), Shape(50)])
    rest = decode(bytes_of(mixed), 50, EVERYTHING, log=LOG).records
    assert len(rest) == 50 and rest.keys is None and rest.headers is None


def test_times_of_any_distance_are_read() -> None:
    """One, five, eight and ten bytes of delta; the last is for the plain form."""
    deltas = (0, 2**33, -(2**54), 2**62)
    for delta in deltas:
        batch = Batch([Row(0, delta, None, b"x")], base_timestamp=0)
        assert rows(decode(batch.encoded(), 0, 1, log=LOG)) == list(batch.rows)
    together = Batch(
        [Row(number, delta, None, b"x") for number, delta in enumerate(deltas)], base_timestamp=0
    )
    assert rows(decode(together.encoded(), 0, 9, log=LOG)) == list(together.rows)


# -- where the next fetch begins -----------------------------------------------------------------------------


def test_a_batch_that_is_cut_short_is_left_for_the_next_fetch() -> None:
    first, second = log_of([Shape(3), Shape(3, sizes=(20,))])
    whole = first.encoded()
    tail = second.encoded()
    for cut in range(len(tail)):
        found = decode(whole + tail[:cut], 0, EVERYTHING, log=LOG)
        assert found.position == 3 and rows(found) == list(first.rows)
    assert decode(whole + tail, 0, EVERYTHING, log=LOG).position == 6


def test_the_position_passes_offsets_that_hold_no_rows() -> None:
    compacted = Batch([Row(10, 1_700_000_000_000, None, b"x")], base=10, last=19)
    empty = Batch([], base=20, last=24)
    data = compacted.encoded() + empty.encoded() + marker(25, 7, commit=True).encoded()
    found = decode(data, 10, EVERYTHING, log=LOG)
    assert [row.offset for row in rows(found)] == [10] and found.position == 26
    # all that lies between a position and the next batch is compacted away
    assert decode(data, 3, 8, log=LOG).position == 8
    assert decode(b"", 5, 8, log=LOG).position == 5


def test_what_does_not_fit_into_memory_is_left_for_the_next_fetch() -> None:
    batches = log_of([Shape(10, sizes=(1000,), codec=Codec.LZ4)] * 5)
    data, read, position = bytes_of(batches), [], 0
    size = len(batches[0].plain()) + 10 * RECORD_BYTES
    for _ in range(3):
        found = decode(data, position, EVERYTHING, log=LOG, limit=2 * size + 500)
        read += rows(found)
        position = found.position
        data = bytes_of([batch for batch in batches if batch.base >= position])
    assert position == 50 and read == reference(batches)


# -- transactions --------------------------------------------------------------------------------------------


@examples(150)
@given(st.integers(0, 2**32), st.integers(0, 60), st.integers(0, 60))
def test_aborted_transactions_and_markers_are_no_rows(seed: int, first: int, count: int) -> None:
    rng = random.Random(seed)
    log: list[Batch] = []
    began: dict[int, int] = {}
    aborted: list[tuple[int, int, int]] = []  # producer, first offset, offset of the marker
    fate: list[tuple[Row, int | None, int]] = []  # a row, its producer, the first offset of its transaction
    offset = 0
    for step in range(40):
        producer = rng.randrange(3)
        ends = step >= 37 or rng.random() < 0.3
        producer = step - 37 if step >= 37 else producer
        if ends and producer in began:
            commit = rng.random() < 0.5
            log.append(marker(offset, producer, commit=commit))
            if not commit:
                aborted.append((producer, began[producer], offset))
            del began[producer]
        elif step < 37:
            transactional = rng.random() < 0.7
            made = [
                Row(offset + number, 1_700_000_000_000, None, b"%d" % step)
                for number in range(rng.randint(1, 3))
            ]
            log.append(
                Batch(made, offset, attributes=TRANSACTIONAL if transactional else 0, producer=producer)
            )
            if transactional:
                began.setdefault(producer, offset)
            fate += [(row, producer if transactional else None, began.get(producer, -1)) for row in made]
        else:
            continue
        offset = log[-1].last_offset + 1
    lost = {(producer, begin) for producer, begin, _ in aborted}
    start, end = first, first + count
    expected = [
        row for row, producer, begin in fate if (producer, begin) not in lost and start <= row.offset < end
    ]
    # as a broker answers: whole batches from the one with the first offset on, and the aborted transactions
    # that overlap them
    fetched = [batch for batch in log if batch.last_offset >= start]
    overlap = [(producer, begin) for producer, begin, end_marker in aborted if end_marker >= start]
    rng.shuffle(overlap)
    found = decode(bytes_of(fetched), start, end, overlap, log=LOG)
    assert rows(found) == expected
    assert found.position >= min(end, offset)
    uncommitted = decode(bytes_of(fetched), start, end, log=LOG)
    assert rows(uncommitted) == [row for row, _, _ in fate if start <= row.offset < end]


# -- starts of records ---------------------------------------------------------------------------------------


def guesses_of(batches: list[Batch], monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Guesses that were made, and batches that were walked again, while ``batches`` were decoded and found
    equal.
    """
    made, again = [], []
    around(
        monkeypatch, record_batch, "_guess", lambda guess, *a, **k: made.append(guess(*a, **k)) or made[-1]
    )
    around(monkeypatch, record_batch, "_walk_whole", lambda walk, *a: again.append(a) or walk(*a))
    assert rows(decode(bytes_of(batches), 0, EVERYTHING, log=LOG)) == reference(batches)
    monkeypatch.undo()
    return sum(len(places) for places, _ in made), len(again)


def test_long_batches_are_walked_from_guesses_that_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = log_of([Shape(6000, "random", (50, 100, 150))] * 2)
    made, again = guesses_of(batches, monkeypatch)
    assert made >= 0.9 * len(bytes_of(batches)) / record_batch.STRIDE - 4 and again == 0


def test_a_guess_inside_a_body_makes_no_wrong_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bodies that hold records look like records."""
    fake = b"".join(record(Row(0, 0, None, b"f" * 190), number, 0) for number in range(3))
    batch = Batch([Row(number, 1_700_000_000_000, None, fake) for number in range(600)])
    made, again = guesses_of([batch, *log_of([Shape(3000, "random")], 600)], monkeypatch)
    assert made > 20 and again == 1, "the batch with the wrong guesses is walked again, the other is not"


def forging(first: int) -> list[Row]:
    """Three rows. The body of the first ends with two records that could be the second and third: the forged
    third one reaches to the end of the real one, so that a walker inside the body finds as many records, with
    the right offsets, and gets back in step.
    """
    now = 1_700_000_000_000
    second, third = (Row(first + number, now, None, b"real" * 50) for number in (1, 2))
    behind = b"\0" + record(second, first + 1, 0) + record(third, first + 2, 0)[:-1]
    forged = record(Row(0, now, None, b"forged"), first + 1, 0) + record(
        Row(0, now, None, behind), first + 2, 0
    )
    return [Row(first, now, None, b"-" * 300 + forged[: -len(behind) - 1]), second, third]


def test_a_body_that_forges_the_records_behind_it_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch([row for first in range(0, 300, 3) for row in forging(first)])
    content = batch.plain()
    place = content.index(b"--" + record(Row(0, 1, None, b"forged"), 151, 0)) + 2
    guess = record_batch._guess
    monkeypatch.setattr(record_batch, "_guess", lambda *a, **k: (np.array([place]), np.array([0])))
    data = batch.encoded()
    assert rows(decode(data, 0, EVERYTHING, log=LOG)) == reference([batch])
    monkeypatch.setattr(module, "_plain", refuse)  # the walkers themselves see it: they do not meet
    assert rows(decode(data, 0, EVERYTHING, log=LOG)) == reference([batch])
    # the search itself falls for it, so the proof is what helps
    buffer = np.frombuffer(content[place - 50 :] + bytes(record_batch.PADDING), np.uint8)
    monkeypatch.setattr(record_batch, "STRIDE", 0x20)
    section = record_batch.Section(0, len(content) - place + 50, 149)
    places, _ = guess(buffer, windows(buffer), [section], [0], width=100)
    assert 50 in places


def test_bodies_of_zeros_are_not_guessed_at(monkeypatch: pytest.MonkeyPatch) -> None:
    made, again = guesses_of(log_of([Shape(4000, "zeros")]), monkeypatch)
    assert made == 0 and again == 0


def test_records_of_every_length_are_stepped_over() -> None:
    """Lengths of one, two and three bytes, and many walkers that end at different times."""
    sizes = [*range(50, 70), *range(8150, 8220), 20_000]
    batches: list[Batch] = []
    for number in range(100):
        base = batches[-1].last_offset + 1 if batches else 0
        bodies = (b"y" * sizes[(number + each) % len(sizes)] for each in range(1 + number % 5))
        batches.append(
            Batch([Row(base + each, 1_700_000_000_000, None, body) for each, body in enumerate(bodies)], base)
        )
    assert rows(decode(bytes_of(batches), 0, EVERYTHING, log=LOG)) == reference(batches)


def test_the_columns_are_plain_numpy_and_arrow() -> None:
    found = decode(bytes_of(log_of([Shape(10, headers=1.0, keys=1.0)])), 2, 8, log=LOG).records
    assert found.offsets.dtype == found.timestamps.dtype == np.int64
    for column in (found.values, found.keys, found.headers):
        assert column is not None
        column.validate(full=True)
        assert len(column) == 6


def test_a_first_batch_above_the_limit_is_refused_by_name() -> None:
    data = bytes_of(log_of([Shape(100, codec=Codec.ZSTD)], base=70))
    with pytest.raises(
        errors.TransactionTooLarge, match=r"offset 70 of orders/0 .* 1000 bytes, and the limit is 1000"
    ):
        decode(data, 0, EVERYTHING, log=LOG, limit=1000)
    # many records without content weigh too
    data = bytes_of(log_of([Shape(1000, sizes=(0,), codec=Codec.ZSTD)], base=70))
    with pytest.raises(
        errors.TransactionTooLarge,
        match=r"offset 70 of orders/0 .* bytes in 1000 records, and the limit is 20000",
    ):
        decode(data, 0, EVERYTHING, log=LOG, limit=20_000)
