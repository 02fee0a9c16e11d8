from __future__ import annotations

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st
from kafka.partitioner.default import murmur2 as reference

from broker_core.kafka.record.partitioner import murmur2, partitions_of


def keys(*values: bytes) -> pa.BinaryArray:
    return pa.array(values, pa.binary())


def test_the_hashes_are_those_of_kafkas_own_tests() -> None:
    """``UtilsTest.testMurmur2`` of Kafka."""
    known = {
        b"21": -973932308,
        b"foobar": -790332482,
        b"a-little-bit-long-string": -985981536,
        b"a-little-bit-longer-string": -1486304829,
        b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
        b"abc": 479470107,
    }
    assert murmur2(keys(*known)).astype("int32").tolist() == list(known.values())


@given(st.lists(st.binary(max_size=70)), st.integers(0, 3), st.integers(1, 1000))
def test_each_key_goes_where_a_java_client_sends_it(values: list[bytes], first: int, count: int) -> None:
    column = keys(*values)[first:]
    expected = [(reference(value) & 0x7FFFFFFF) % count for value in values[first:]]
    assert partitions_of(column, count).tolist() == expected
