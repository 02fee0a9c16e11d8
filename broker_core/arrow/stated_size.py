"""How much memory a stream of Arrow takes once it is read, by what its messages state.

Nothing is decompressed. Each compressed buffer begins with its size (Arrow Columnar Format, "Compression"):
Arrow allocates that before it decompresses, and fails if it is not the size.
Not here: whether the data is valid.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pyarrow as pa

_LENGTH = struct.Struct("<q")
_BUFFER = struct.Struct("<qq")  # offset, length
_NOT_COMPRESSED = -1
# fields of the tables Message, DictionaryBatch and RecordBatch, in their order in the format
_HEADER, _DICTIONARY_ROWS, _BUFFERS, _COMPRESSION = 2, 1, 2, 3


def stated_bytes(stream: pa.Buffer) -> int:
    """Returns the bytes of the one batch of a stream, with its dictionaries. Raises ValueError for another
    number of batches, or a size that cannot be; ArrowException for what is no stream.
    """
    size = batches = 0
    for message in _messages(stream):
        kind = message.type
        if kind == "record batch":
            batches += 1
        elif kind != "dictionary":
            continue
        metadata, body = memoryview(message.metadata), memoryview(message.body)
        header = _follow(metadata, _field(metadata, _follow(metadata, 0), _HEADER))
        if kind == "dictionary":
            header = _follow(metadata, _field(metadata, header, _DICTIONARY_ROWS))
        size += sum(_sizes(metadata, body, header))
    if batches != 1:
        raise ValueError(f"the stream must have one batch of rows, not {batches}")
    return size


def _messages(stream: pa.Buffer) -> Iterator[pa.ipc.Message]:
    reader = pa.ipc.MessageReader.open_stream(stream)
    while True:
        try:
            yield reader.read_next_message()
        except StopIteration:
            return


def _sizes(metadata: memoryview, body: memoryview, batch: int) -> Iterator[int]:
    """Yields what each buffer of a RecordBatch takes."""
    place = _field(metadata, batch, _BUFFERS)
    if not place:
        return
    compressed = _field(metadata, batch, _COMPRESSION)
    start = _follow(metadata, place)
    for number in range(_unsigned(metadata, start)):
        offset, length = _BUFFER.unpack_from(metadata, start + 4 + number * _BUFFER.size)
        size = length
        if compressed and length:
            if not 0 <= offset <= len(body) - _LENGTH.size:
                raise ValueError(f"a buffer at {offset} of {len(body)} bytes is stated")
            (stated,) = _LENGTH.unpack_from(body, offset)
            size = length - _LENGTH.size if stated == _NOT_COMPRESSED else stated
        if size < 0:
            raise ValueError(f"a buffer of {size} bytes is stated")
        yield size


# -- tables of FlatBuffers, which pyarrow has verified -------------------------------------------------------


def _unsigned(data: memoryview, at: int) -> int:
    return int.from_bytes(data[at : at + 4], "little")


def _follow(data: memoryview, at: int) -> int:
    """Returns the place to which the offset at ``at`` leads."""
    return at + _unsigned(data, at)


def _field(data: memoryview, table: int, number: int) -> int:
    """Returns the place of a field of a table; 0 if it is missing."""
    fields = table - int.from_bytes(data[table : table + 4], "little", signed=True)
    slot = 4 + 2 * number
    if slot >= int.from_bytes(data[fields : fields + 2], "little"):
        return 0
    offset = int.from_bytes(data[fields + slot : fields + slot + 2], "little")
    return table + offset if offset else 0
