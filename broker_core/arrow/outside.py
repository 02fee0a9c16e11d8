"""Arrow data of another process, before anything looks into it.

Arrow trusts what it reads: an offset beyond its buffer is followed by ``nbytes``, ``slice`` or a comparison,
and ends the process. So ``require_valid`` comes first, and what must be known before it (the room that rows
take) is asked of the buffers alone.
"""

from __future__ import annotations

import pyarrow as pa

from broker_core.core.errors import one_line

UNREADABLE = (pa.ArrowException, ValueError, OSError, EOFError)  # what Arrow raises for damaged data


def require_valid(batch: pa.RecordBatch) -> None:
    """Raises ValueError, with one line that says what is wrong, unless every offset and length fits."""
    try:
        batch.validate(full=True)
    except UNREADABLE as error:
        raise ValueError(line(error)) from error


def read_message(data: pa.Buffer, schema: pa.Schema) -> pa.RecordBatch:
    """Returns the rows of one encapsulated message, which are valid. Raises ValueError."""
    try:
        batch = pa.ipc.read_record_batch(data, schema)
    except UNREADABLE as error:
        raise ValueError(line(error)) from error
    require_valid(batch)
    return batch


def read_stream(data: bytes | memoryview) -> list[pa.RecordBatch]:
    """Returns the batches of a stream, which are valid. Raises ValueError."""
    try:
        with pa.ipc.open_stream(data) as stream:
            batches = list(stream)
    except UNREADABLE as error:
        raise ValueError(line(error)) from error
    for batch in batches:
        require_valid(batch)
    return batches


def buffer_bytes(batch: pa.RecordBatch) -> int:
    """Returns the bytes of the buffers of ``batch``, valid or not: no offset is followed."""
    return int(batch.get_total_buffer_size())


def line(error: BaseException) -> str:
    """Returns the text of an error of Arrow as one line, not too long."""
    return one_line(error)[:200]
