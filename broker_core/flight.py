"""The Flight contract: what client and server say to each other, and nothing that listens or connects.

====================  ==============================================================================================
action                body -> results
====================  ==============================================================================================
``hello``             nothing -> :class:`Hello`
``engine.<method>``   arguments of the :class:`~broker_core.engine.Engine` method -> its answer
``read``              ReadTicket -> :class:`~broker_core.assemble.ReadPlan`, then, where they are few, all rows (an Arrow IPC stream)
``stage``             :class:`PartHeader`, then one part (an Arrow IPC stream) -> :class:`PartReceipt`
``adopt``             :class:`FileHeader` -> a list of PartReceipt; empty where the broker cannot have the file
``channel.<word>``    :class:`ChannelCall` -> the word's answer
``admin.<word>``      arguments -> the word's answer
====================  ==============================================================================================

DoGet takes a :class:`Ticket` and streams batches. DoPut's descriptor is the command ``stage`` with the BranchHeader; each batch
carries its part number and is answered by one PartReceipt, once it is durable and named in the catalog.

Dataclasses cross as JSON, read back by their annotations. An error crosses as ``[CODE] text`` and is the same class there.

Invariant: every call may be sent twice with the same effect as once.
"""

from __future__ import annotations

import base64
import collections.abc
import dataclasses
import inspect
import json
import types
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pyarrow as pa

from broker_core import errors
from broker_core.engine import BranchHeader, Engine, ReadTicket
from broker_core.part_file import PartFile

VERSION = 1  # of this contract; a server refuses another one

SMALL_READ_ROWS = 1024  # so few rows come with the plan
SMALL_READ_BYTES = 1024 * 1024
SMALL_PART_BYTES = 1024 * 1024  # a branch of one part up to this size is staged by one action
WAIT_S = 10.0  # the longest time that the server keeps a waiting call


@dataclass(frozen=True, slots=True)
class Hello:
    """Who answers: ``id`` is that of the data directory ("" for a broker in memory), which a client on the same host compares."""

    version: int
    id: str
    directory: str
    pid: int


@dataclass(frozen=True, slots=True)
class Ticket:
    """DoGet: exactly one of these."""

    read: ReadTicket | None = None
    browse: tuple[tuple[str, int, int], ...] | None = None
    branches: tuple[str, ...] | None = None


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
    """A word said on a channel. ``number`` counts the calls of a channel from 1: the last one sent twice is done once."""

    channel: str
    number: int
    arguments: dict[str, Any]


# -- values ---------------------------------------------------------------------------------------------------------------


def encode(value: Any) -> bytes:
    return json.dumps(_plain(value), separators=(",", ":")).encode()


def decode(kind: Any, data: bytes | pa.Buffer) -> Any:
    """The value of annotation ``kind`` that ``encode`` wrote. Raises RemoteProtocolError."""
    try:
        return _typed(kind, json.loads(bytes(data)) if len(data) else None)
    except (ValueError, TypeError, KeyError) as error:
        raise errors.RemoteProtocolError(f"cannot read a {getattr(kind, '__name__', kind)} from the other side: {error}") from error


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {name: _plain(item) for name, item in zip(value._fields, value, strict=True)}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, collections.abc.Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    raise errors.LocalProtocolError(f"a value of type {type(value).__name__} cannot cross to the broker: {value!r}")


def _typed(kind: Any, value: Any) -> Any:
    if isinstance(value, dict) and len(value) == 1 and "$bytes" in value:
        return base64.b64decode(value["$bytes"])
    if kind is Any:
        return _untyped(value)
    if value is None:
        return None
    if kind is float:
        return float(value)
    if isinstance(kind, type) and (dataclasses.is_dataclass(kind) or hasattr(kind, "_fields")):
        hints = _hints(kind)
        return kind(**{name: _typed(hints[name], item) for name, item in value.items() if name in hints})
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is None or origin is Literal:
        return value
    if origin in (Union, types.UnionType):
        return _typed(_chosen(arguments, value), value)
    if origin is tuple:
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return tuple(_typed(arguments[0], item) for item in value)
        return tuple(_typed(item_kind, item) for item_kind, item in zip(arguments, value, strict=True))
    if origin in (dict, collections.abc.Mapping):
        return {key: _typed(arguments[1], item) for key, item in value.items()}
    return [_typed(arguments[0], item) for item in value]  # list, Sequence


def _untyped(value: Any) -> Any:
    if isinstance(value, dict):
        if len(value) == 1 and "$bytes" in value:
            return base64.b64decode(value["$bytes"])
        return {key: _untyped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_untyped(item) for item in value]
    return value


def _chosen(kinds: tuple[Any, ...], value: Any) -> Any:
    """The member of a union that ``value`` is; the unions of this contract are ``X | None`` and unions of scalars."""
    if isinstance(value, (str, int, float, bool)):
        return Any
    return next(kind for kind in kinds if kind is not type(None) and kind not in (str, int, float, bool))


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


# -- methods --------------------------------------------------------------------------------------------------------------

STREAMS = ("read", "browse", "read_branches", "stage")  # not actions of their own
METHODS = tuple(
    name
    for name, member in vars(Engine).items()
    if inspect.isfunction(member) and not name.startswith("_") and name not in (*STREAMS, "close")
)


@cache
def _signature(method: str) -> tuple[tuple[str, ...], dict[str, Any]]:
    function = getattr(Engine, method)
    return tuple(inspect.signature(function).parameters)[1:], get_type_hints(function)


def encode_arguments(method: str, positional: tuple[Any, ...], named: dict[str, Any]) -> bytes:
    names, _ = _signature(method)
    return encode({**dict(zip(names, positional, strict=False)), **named})


def decode_arguments(method: str, data: bytes | pa.Buffer) -> dict[str, Any]:
    names, hints = _signature(method)
    try:
        arguments = json.loads(bytes(data))
        unknown = sorted(set(arguments) - set(names))
        if unknown:
            raise errors.RemoteProtocolError(f"{method} has no argument {unknown[0]!r}; client and broker are of different versions")
        return {name: _typed(hints[name], value) for name, value in arguments.items()}
    except (ValueError, TypeError, KeyError) as error:
        raise errors.RemoteProtocolError(f"cannot read the arguments of {method}: {error}") from error


def answer_type(method: str) -> Any:
    return _signature(method)[1]["return"]


# -- rows in an action ----------------------------------------------------------------------------------------------------


def encode_rows(batches: collections.abc.Sequence[pa.RecordBatch], schema: pa.Schema) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return sink.getvalue()


def decode_rows(data: pa.Buffer | bytes) -> list[pa.RecordBatch]:
    with pa.ipc.open_stream(data) as reader:
        return list(reader)


def encode_part(header: PartHeader, batch: pa.RecordBatch) -> bytes:
    head = encode(header)
    return b"".join((len(head).to_bytes(4, "little"), head, memoryview(encode_rows([batch], batch.schema))))


def decode_part(data: pa.Buffer) -> tuple[PartHeader, pa.RecordBatch]:
    length = int.from_bytes(bytes(data.slice(0, 4)), "little")
    header: PartHeader = decode(PartHeader, data.slice(4, length))
    (batch,) = decode_rows(data.slice(4 + length))
    return header, batch


# -- errors ---------------------------------------------------------------------------------------------------------------

# Flight appends its own remarks to a text; a line of its own keeps ours apart.
END = "\n"


def error_text(error: BaseException) -> str:
    """What crosses: the text of a TxmqError, or what a failure that is none looks like to the other side."""
    if isinstance(error, errors.TxmqError):
        return str(error).replace("\n", " ") + END
    return str(errors.TxmqError(f"the broker failed: {type(error).__name__}: {' '.join(str(error).split())}")) + END


def error_from(error: BaseException) -> errors.TxmqError | None:
    """The error that crossed as ``error``; None where the connection failed instead."""
    return errors.from_text(str(error))
