"""The Flight contract: what client and server send to each other. Nothing here listens or connects.

====================  ================================================================================
action                body -> results
====================  ================================================================================
``prove``             (a random challenge as a header) -> that the broker has the directory's token
``hello``             nothing -> :class:`Hello`
``engine.<method>``   arguments of the :class:`~broker_core.engine.Engine` method -> its answer
``read``              ReadTicket -> :class:`~broker_core.arrow.rows.ReadPlan`, or few rows (Arrow IPC)
``stage``             :class:`PartHeader`, then one part (an Arrow IPC stream) -> :class:`PartReceipt`
``adopt``             :class:`FileHeader` -> a list of PartReceipt; empty if the broker cannot take the file
``channel.<word>``    :class:`ChannelCall` -> the word's answer
``admin.<word>``      arguments -> the word's answer
====================  ================================================================================

DoGet takes a :class:`Ticket` and streams batches; of a backup, pieces of files (``BACKUP_SCHEMA``), and a
:class:`Manifest` at the end, in the piece of a file without a name.

DoPut's descriptor is the command ``stage`` with the BranchHeader; its schema has no columns. Each message has
one numbered part as its metadata, and is answered by one PartReceipt, once it is durable and named in the
catalog.

Dataclasses cross as JSON, read back by their annotations; bytes as base64, and long ones behind the JSON and
a NUL: they are copied in milliseconds, while base64 in JSON would hold all threads for half a second. An
error crosses as ``[CODE] text`` and is the same class there.

Invariant: every call may be sent twice with the same effect as once. claim: by the recorded claim of a
start; ack, mark_applied, mark_mirrored: they only rise; open_batch, rollback_batch, commit_branches: the
token; commit_batch, resume: the ledger's entry; publish_refused: what that records; stage, adopt: (branch,
part); read: the range that a batch has read; commit, rollback of an xid: its outcome; calls of a channel:
their numbers. A second release of a queue is refused: it has no owner then (``test_flight_duplicates.py``).
"""

from __future__ import annotations

import base64
import collections.abc
import dataclasses
import inspect
import json
import struct
import types
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any, Union, cast, get_args, get_origin

import pyarrow as pa

from broker_core.arrow.part_file import PartFile
from broker_core.arrow.parts import MAX_PART_BYTES, stream_of
from broker_core.arrow.rows import ReadPlan
from broker_core.arrow.stated_size import stated_bytes
from broker_core.core import checks, errors, pieces
from broker_core.engine import AppOperator, BranchHeader, Engine, ReadTicket, Sink, Source

VERSION = 11  # of this contract; a client refuses a broker of another one

SMALL_READ_ROWS = 1024  # so few rows come with the plan
SMALL_READ_BYTES = 1024 * 1024
SMALL_PART_BYTES = 1024 * 1024  # a branch of one part up to this size is staged by one action
MAX_CALL_BYTES = 32 * 1024 * 1024  # of an action that brings no messages
LONG_BYTES = 4 * 1024  # of bytes that come behind the JSON
WAIT_S = 10.0  # the longest time that the server keeps a waiting call


@dataclass(frozen=True, slots=True)
class Hello:
    """The broker. ``run``: of its process. ``id``: of its data directory, "" in memory."""

    version: int
    run: str
    id: str
    directory: str
    pid: int


@dataclass(frozen=True, slots=True)
class Ticket:
    """DoGet: exactly one of these. ``transaction``: of ``browse``, as in ``ReadTicket``."""

    read: ReadTicket | None = None
    browse: tuple[tuple[checks.Name, int, int], ...] | None = None
    branches: tuple[str, ...] | None = None
    backup: bool | None = None
    transaction: bool = False


BACKUP_SCHEMA = pa.schema([("file", pa.string()), ("piece", pa.binary())])


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a backup consists of: (size, xxh3_64 in hexadecimal) by file."""

    files: dict[str, tuple[int, str]]


@dataclass(frozen=True, slots=True)
class PartHeader:
    header: BranchHeader
    part: int


@dataclass(frozen=True, slots=True)
class FileHeader:
    """Parts ``part``, ``part + 1``, ... of a branch are in a file of the writer."""

    header: BranchHeader
    part: int
    file: PartFile


@dataclass(frozen=True, slots=True)
class PartReceipt:
    """The acknowledgement of a durable part."""

    part: int
    rows: int
    checksum: int


@dataclass(frozen=True, slots=True)
class ChannelCall:
    """A call of a channel. ``number`` counts them from 1: the last call is done once if it is sent twice."""

    channel: str
    number: int
    arguments: dict[str, object]


# -- values --------------------------------------------------------------------------------------------------


_UNREADABLE = (
    *(ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError),
    *(OSError, EOFError),
)


class _Tail:
    """The bytes behind the JSON. Together not more are taken than there are, so an answer is not larger than
    what came.
    """

    __slots__ = ("_data", "_left")

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._left = len(data)

    def take(self, place: object) -> bytes:
        """Returns the bytes at [start, size]. Raises ValueError."""
        start, size = place if isinstance(place, list) and len(place) == 2 else (-1, 0)
        if type(start) is not int or type(size) is not int or not 0 <= start <= len(self._data) - size:
            raise ValueError(f"{checks.show(place)} is no place in {len(self._data)} bytes")
        if not 0 <= size <= self._left:
            raise ValueError("bytes behind the JSON are taken twice")
        self._left -= size
        return bytes(self._data[start : start + size])


def encode(value: object) -> bytes:
    tail = bytearray()
    text = pieces.dumps(_plain(value, tail)).encode()
    return b"".join((text, b"\0", tail)) if tail else text


def decode(kind: Any, data: bytes | pa.Buffer) -> Any:
    """The value of annotation ``kind`` that ``encode`` wrote, of any size: for a client. Raises
    RemoteProtocolError.
    """
    return _decoded(kind, data, json.loads)


def _split(data: bytes | pa.Buffer) -> tuple[bytes, _Tail]:
    """Returns the JSON, which has no NUL, and what is behind it."""
    whole = bytes(data)
    end = whole.find(b"\0")
    return (whole, _Tail(memoryview(b""))) if end < 0 else (whole[:end], _Tail(memoryview(whole)[end + 1 :]))


def _decoded(kind: Any, data: bytes | pa.Buffer, loads: Callable[[bytes], Any]) -> Any:
    try:
        text, tail = _split(data)
        return _typed(kind, loads(text) if text else None, tail)
    except _UNREADABLE as error:
        raise _unreadable(f"a {getattr(kind, '__name__', kind)}", error) from error


def decode_checked(kind: Any, data: bytes | pa.Buffer, call: str) -> Any:
    """The same for a value of ``call``, of not too many values, checked against its annotations. Raises
    RemoteProtocolError.
    """
    value = _decoded(kind, data, pieces.loads)
    try:
        checks.check_of(kind)(value)
    except checks.Mismatch as wrong:
        what = getattr(kind, "__name__", "what came")
        raise errors.RemoteProtocolError(
            f"{call}: {what}{wrong.path} must be {wrong.allowed}, not {checks.show(wrong.value)}"
        ) from None
    return value


def _unreadable(what: str, error: Exception) -> errors.RemoteProtocolError:
    return errors.RemoteProtocolError(
        f"cannot read {what} from the other side: {type(error).__name__}: {str(error)[:200]}"
    )


_MARKS = frozenset({"$bytes", "$decimal", "$map"})


def _plain(value: object, tail: bytearray) -> object:
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if isinstance(value, (bytes, bytearray, memoryview)):
        if len(value) <= LONG_BYTES:
            return {"$bytes": base64.b64encode(value).decode()}
        tail += value
        return {"$bytes": [len(tail) - len(value), len(value)]}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {name: _plain(item, tail) for name, item in zip(value._fields, value, strict=True)}
    if isinstance(value, (list, tuple)):
        return [_plain(item, tail) for item in value]
    if isinstance(value, collections.abc.Mapping):
        plain = {str(key): _plain(item, tail) for key, item in value.items()}
        # {"$bytes": ...} are bytes, {"$map": ...} is a table that would look like them
        return {"$map": plain} if len(plain) == 1 and not _MARKS.isdisjoint(plain) else plain
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name), tail) for field in dataclasses.fields(value)}
    if isinstance(value, Decimal) and isinstance(exponent := value.as_tuple().exponent, int):
        return {"$decimal": [int(value.scaleb(-exponent)), -exponent]}  # as AMQP has it
    raise errors.LocalProtocolError(
        f"a value of type {type(value).__name__} cannot cross to the broker: {value!r}"
    )


def _decimal(unscaled: object, scale: object) -> Decimal:
    if not isinstance(unscaled, int) or unscaled not in range(-(1 << 31), 1 << 31) or scale not in range(256):
        raise ValueError("a decimal of AMQP has 4 bytes, and at most 255 digits behind its point")
    return Decimal(unscaled).scaleb(-cast(int, scale))


def _typed(kind: object, value: object, tail: _Tail) -> object:
    """A value of another form than its annotation is left as it is; the check reports it."""
    if not isinstance(value, (dict, list)):
        return float(value) if kind is float and type(value) is int else value
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _typed(arguments[0], value, tail)
    if isinstance(value, dict):
        if len(value) == 1 and "$bytes" in value:
            found = value["$bytes"]
            return tail.take(found) if isinstance(found, list) else base64.b64decode(found, validate=True)
        if len(value) == 1 and "$decimal" in value:
            return _decimal(*value["$decimal"])
        if isinstance(kind, type) and (dataclasses.is_dataclass(kind) or hasattr(kind, "_fields")):
            hints = checks.hints_of(kind)
            return kind(
                **{name: _typed(hints[name], item, tail) for name, item in value.items() if name in hints}
            )
        if origin in (Union, types.UnionType):
            return _typed(_chosen(arguments, (dict, collections.abc.Mapping)), value, tail)
        inner = arguments[1] if origin in (dict, collections.abc.Mapping) else object
        return {key: _typed(inner, item, tail) for key, item in _unmarked(value).items()}
    if origin in (Union, types.UnionType):
        return _typed(_chosen(arguments, (list, tuple, collections.abc.Sequence)), value, tail)
    if origin is tuple and arguments[-1] is Ellipsis:
        return tuple(_typed(arguments[0], item, tail) for item in value)
    if origin is tuple and len(arguments) == len(value):
        return tuple(_typed(item_kind, item, tail) for item_kind, item in zip(arguments, value, strict=True))
    inner = arguments[0] if origin in (list, collections.abc.Sequence) else object
    return [_typed(inner, item, tail) for item in value]


def _unmarked(value: dict[str, object]) -> dict[str, object]:
    inner = value.get("$map") if len(value) == 1 else None
    return inner if isinstance(inner, dict) else value


def _chosen(kinds: tuple[object, ...], origins: tuple[object, ...]) -> object:
    """The member of a union that takes a value of this form; the unions of this contract are ``X | None`` and
    unions of scalars.
    """
    for kind in kinds:
        of_fields = dataclasses.is_dataclass(kind) or hasattr(kind, "_fields")
        if get_origin(kind) in origins or (dict in origins and of_fields):
            return kind
    return object


# -- methods -------------------------------------------------------------------------------------------------

STREAMS = ("read", "browse", "read_branches", "stage")  # not actions of their own
METHODS = tuple(
    name
    for port in (Source, Sink, AppOperator, Engine)
    for name, member in vars(port).items()
    if inspect.isfunction(member) and not name.startswith("_") and name not in (*STREAMS, "close")
)


def decode_arguments(call: str, function: Callable[..., object], data: bytes | pa.Buffer) -> dict[str, Any]:
    """The arguments of ``function``, checked by its annotations. Raises RemoteProtocolError, OptionError."""
    values, tail = _object(call, data)
    hints = checks.hints_of(function)
    try:
        arguments = {name: _typed(hints.get(name, object), value, tail) for name, value in values.items()}
    except _UNREADABLE as error:
        raise _unreadable(f"the arguments of {call}", error) from error
    checks.check_call(call, function, arguments)
    return arguments


def _object(call: str, data: bytes | pa.Buffer) -> tuple[dict[str, object], _Tail]:
    try:
        text, tail = _split(data)
        value = pieces.loads(text) if text else {}
    except _UNREADABLE as error:
        raise _unreadable(f"the arguments of {call}", error) from error
    if not isinstance(value, dict):
        raise errors.RemoteProtocolError(f"the arguments of {call} must be a dict, not {checks.show(value)}")
    return value, tail


def answer_type(method: str) -> object:
    return checks.hints_of(getattr(Engine, method))["return"]


# -- rows in an action ---------------------------------------------------------------------------------------


def decode_rows(data: pa.Buffer | bytes) -> list[pa.RecordBatch]:
    """Raises RemoteProtocolError."""
    try:
        with pa.ipc.open_stream(data) as reader:
            return list(reader)
    except (pa.ArrowException, *_UNREADABLE) as error:
        raise _unreadable("rows", error) from error


def encode_part(header: PartHeader, batch: pa.RecordBatch) -> bytes:
    return _headed(header, stream_of([batch], batch.schema))


def _headed(header: object, rows: pa.Buffer | bytes) -> bytes:
    head = encode(header)
    return b"".join((len(head).to_bytes(4, "little"), head, memoryview(rows)))


def encode_read(plan: ReadPlan | None, rows: pa.Buffer | bytes = b"") -> bytes:
    """The answer of ``read``. ``plan`` None: these are all rows."""
    return _headed(plan, rows)


def decode_read(data: pa.Buffer) -> tuple[ReadPlan | None, pa.Buffer]:
    """Raises RemoteProtocolError."""
    end = 4 + int.from_bytes(bytes(data[:4]), "little")
    return decode(ReadPlan | None, data.slice(4, end - 4)), data.slice(end)


def decode_part(data: pa.Buffer) -> tuple[PartHeader, pa.Buffer]:
    """Returns the header and the rows as they came: whoever sends them may not, and ``part_bytes`` says what
    they take. Raises RemoteProtocolError.
    """
    length = int.from_bytes(bytes(data[:4]), "little")
    if length > len(data) - 4:
        raise errors.RemoteProtocolError(
            f"stage: a header of {length} bytes was announced, but {max(0, len(data) - 4)} bytes came"
        )
    header: PartHeader = decode_checked(PartHeader, data.slice(4, length), "stage")
    return header, data.slice(4 + length)


_NUMBER = struct.Struct("<q")  # its size keeps the rows behind it aligned
NO_COLUMNS = pa.schema([])  # of a stream of numbered parts


def encode_numbered(part: int, batch: pa.RecordBatch) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    sink.write(_NUMBER.pack(part))
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue()


def decode_numbered(data: pa.Buffer) -> tuple[int, pa.Buffer]:
    """Like ``decode_part``, for a part of a stream: its number, and the rows as they came. Raises
    RemoteProtocolError.
    """
    if len(data) < _NUMBER.size:
        raise errors.RemoteProtocolError(f"put: a part of {len(data)} bytes has no number")
    (part,) = _NUMBER.unpack(memoryview(data)[: _NUMBER.size])
    return part, data.slice(_NUMBER.size)


def part_bytes(rows: pa.Buffer) -> int:
    """Returns how much memory the rows of a part take, which are not read yet. Raises RemoteProtocolError
    (not one batch), TransactionTooLarge.
    """
    try:
        size = stated_bytes(rows)
    except (pa.ArrowException, struct.error, *_UNREADABLE) as error:
        raise _unreadable("rows", error) from error
    if size > max(len(rows), MAX_PART_BYTES):
        raise errors.TransactionTooLarge(
            f"stage: {len(rows)} bytes state that they are {size} bytes of rows; the limit is "
            f"{MAX_PART_BYTES}",
            "send smaller parts",
        )
    return size


def decode_batch(rows: pa.Buffer) -> pa.RecordBatch:
    """Returns the rows of a part, after ``part_bytes``. Raises RemoteProtocolError."""
    (batch,) = decode_rows(rows)
    return batch


# -- errors --------------------------------------------------------------------------------------------------

END = "\n"  # Flight appends remarks to a text; this separates them from ours
TEXT_BYTES = 2_000  # three times as many on their way at most; gRPC refuses answers with 8 kB of it, or 16


def error_text(error: BaseException) -> str:
    """The text to send: of a TxmqError, or of one that describes another exception. A long one loses its
    middle: class, first words and advice arrive.
    """
    if not isinstance(error, errors.TxmqError):
        error = errors.TxmqError(f"the broker failed: {type(error).__name__}: {errors.one_line(error)}")
    text, half = str(error).replace("\n", " ").encode(errors="backslashreplace"), TEXT_BYTES // 2
    cut = text if len(text) <= TEXT_BYTES else text[:half] + b" ... " + text[-half:]
    return cut.decode(errors="ignore") + END


def error_from(error: BaseException) -> errors.TxmqError | None:
    """The error that the other side sent as ``error``; None if the connection failed."""
    return errors.from_text(str(error))
