"""Which partition a key belongs to: murmur2, as Java's default partitioner, for a whole column of keys.

Source: ``org.apache.kafka.common.utils.Utils.murmur2`` and ``BuiltInPartitioner.partitionForKey``.
Invariant: equal keys have equal partitions, and the same ones as every Java client gives them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from broker_core.kafka.record.record_batch import Integers

_SEED, _FACTOR = 0x9747B28C, 0x5BD1E995
_PADDING = 3  # so that four bytes are behind the last one's position


def partitions_of(keys: pa.BinaryArray, count: int) -> Integers:
    """Returns the partition of each key, of ``count``. No key is null."""
    return (murmur2(keys) & 0x7FFFFFFF).astype(np.int64) % count


def murmur2(keys: pa.BinaryArray) -> npt.NDArray[np.uint32]:
    """Returns the hash of each key. The words of all keys are mixed in step, those of the longest last."""
    _, bounds, content = keys.buffers()
    ends = np.frombuffer(bounds, np.int32)[keys.offset : keys.offset + len(keys) + 1].astype(np.int64)
    first, length = ends[:-1], np.diff(ends)
    order = np.argsort(-length, kind="stable")  # the keys with a further word are always the first ones
    first, length = first[order], length[order]
    raw = b"" if content is None else memoryview(content)[: int(ends[-1])]
    data = np.frombuffer(b"".join((raw, bytes(_PADDING))), np.uint8)
    words = np.ndarray((max(len(data) - _PADDING, 0),), np.dtype("<u4"), buffer=data, strides=(1,))

    mixed = np.uint32(_SEED) ^ length.astype(np.uint32)
    whole = length >> 2
    for word in range(int(whole.max(initial=0))):
        active = int(np.searchsorted(-whole, -word))  # keys of more than ``word`` words
        piece = words[first[:active] + 4 * word] * np.uint32(_FACTOR)
        piece ^= piece >> np.uint32(24)
        piece *= np.uint32(_FACTOR)
        mixed[:active] *= np.uint32(_FACTOR)
        mixed[:active] ^= piece
    rest = length & 3
    tail = first + 4 * whole
    for byte in (2, 1, 0):
        among = np.flatnonzero(rest > byte)
        mixed[among] ^= data[tail[among] + byte].astype(np.uint32) << np.uint32(8 * byte)
    among = np.flatnonzero(rest)
    mixed[among] *= np.uint32(_FACTOR)

    mixed ^= mixed >> np.uint32(13)
    mixed *= np.uint32(_FACTOR)
    mixed ^= mixed >> np.uint32(15)
    hashes: npt.NDArray[np.uint32] = np.empty_like(mixed)
    hashes[order] = mixed
    return hashes
