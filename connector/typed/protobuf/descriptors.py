"""Protobuf's descriptors: the files of a schema, and the types of message that they declare.

Not here: the registry that has them (``typed/registry/client.py``), values (``read.py``).
Invariant: each schema has a pool of its own. Two schemas may declare different types of one name, and neither
reaches the types of the program.
"""

from __future__ import annotations

import base64
import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from broker_core.core.errors import OptionError
from connector.typed.decode_udf import UnsupportedSchema, fault_text
from connector.typed.registry.client import RegisteredSchema
from connector.typed.registry.wire_format import FIRST, Indexes

if TYPE_CHECKING:
    from google.protobuf.descriptor_pb2 import FileDescriptorProto
    from google.protobuf.descriptor_pool import DescriptorPool

Descriptor = Any  # of google.protobuf

_ROOT = "txmq_schema.proto"  # a schema of a registry has no name; what refers to it has one
_LONGEST_REASON = 300  # characters
# what registries and protoc know without a reference to it
_KNOWN = re.compile(r"(google/(?:protobuf|type)/[a-z_]+)\.proto")
_DECIMAL = "confluent/type/decimal.proto"


def library() -> Any:
    """The modules of protobuf. Raises OptionError if it is not installed."""
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
        from google.protobuf.descriptor import FieldDescriptor
    except ImportError:
        raise OptionError(
            "format 'protobuf' needs the package protobuf", "pip install '.[protobuf]' in a checkout"
        ) from None
    return SimpleNamespace(
        files=descriptor_pb2, pool=descriptor_pool, messages=message_factory, field=FieldDescriptor
    )


@dataclass(frozen=True)
class Descriptors:
    """``file``: the FileDescriptorProto whose messages the indexes count."""

    file: FileDescriptorProto = field(repr=False)
    pool: DescriptorPool = field(repr=False)

    @classmethod
    def of(cls, schema: RegisteredSchema) -> Descriptors:
        """A schema and the files that it imports, each a FileDescriptorProto in base64. Raises
        UnsupportedSchema.
        """
        files: dict[str, FileDescriptorProto] = {}
        for name, each in schema.references:
            files.setdefault(name, _file(name, each))
        file = _file(_ROOT, schema.texts[-1])
        pool, added, missing = library().pool.DescriptorPool(), set[str](), list[str]()
        try:
            _add(pool, file, files, added, missing, ())
        except UnsupportedSchema:
            raise
        except Exception as error:  # of any class, for any damage
            lack = f"; it imports {', '.join(missing)}, which nobody has" if missing else ""
            reason = f"is not a schema of Protobuf ({fault_text(error)}{lack[:_LONGEST_REASON]})"
            raise UnsupportedSchema(reason) from None
        if not file.message_type:
            raise UnsupportedSchema("has no message")
        return cls(file, pool)

    def at(self, indexes: Indexes) -> Descriptor:
        """The type of message of these indexes. Raises UnsupportedSchema."""
        scope, names = self.file.message_type, [self.file.package] if self.file.package else []
        for index in indexes:
            if index >= len(scope):
                raise UnsupportedSchema(f"has no message {list(indexes)}")
            maps = [at for at, each in enumerate(scope) if each.options.map_entry]
            if maps and index >= maps[0]:
                # a map is a message to some clients, which count it, and none to those that read the text
                raise UnsupportedSchema(
                    f"has no message {list(indexes)} on which all clients agree: maps are before it"
                )
            names.append(scope[index].name)
            scope = scope[index].nested_type
        return self.pool.FindMessageTypeByName(".".join(names))

    def indexes(self, message: str | None) -> Indexes:
        """Those of a message, with or without its package; None: the first. Raises UnsupportedSchema."""
        if message is None:
            return FIRST
        found = _indexes(self.file, message)
        if found is None:
            raise UnsupportedSchema(f"has no message {message!r}")
        self.at(found)
        return found


def of_set(message: str, data: bytes) -> tuple[RegisteredSchema, Indexes]:
    """A message of a FileDescriptorSet, as protoc writes it: the file that declares it, as a registry has it.
    Raises UnsupportedSchema.
    """
    kind = library().files.FileDescriptorSet
    try:
        files = list(kind.FromString(data).file)
    except Exception as error:  # of any class, for any damage
        raise UnsupportedSchema(f"is not a descriptor set ({fault_text(error)})") from None
    for each in files:
        found = _indexes(each, message)
        if found is not None:
            files_by_name = tuple((other.name, _text(other)) for other in files)
            schema = RegisteredSchema("PROTOBUF", (_text(each),), files_by_name)
            Descriptors.of(schema).at(found)
            return schema, found
    raise UnsupportedSchema(f"has no message {message!r}")


def _text(file: FileDescriptorProto) -> str:
    return base64.b64encode(file.SerializeToString()).decode()


def descriptor_of(schema: Any) -> tuple[str, bytes]:
    """The message name and the descriptor set of a schema of protobuf. Raises OptionError."""
    match schema:
        case (str(message), bytes(descriptor)):
            return message, descriptor
        case (str(message), path):
            try:
                with open(path, "rb") as file:
                    return message, file.read()
            except (OSError, TypeError) as error:
                raise OptionError(
                    f"cannot read the descriptor set {path!r}: {error}", "protoc writes one"
                ) from None
    raise OptionError(
        f"format 'protobuf' got the schema {schema!r:.200}",
        "give (name of the message, descriptor set as bytes or the path of its file)",
    )


def _file(name: str, text: str) -> FileDescriptorProto:
    kind = library().files.FileDescriptorProto
    try:
        file = kind.FromString(base64.b64decode(text, validate=True))
    except Exception as error:  # of any class, for any damage
        raise UnsupportedSchema(f"is not a schema of Protobuf ({fault_text(error)})") from None
    file.name = name
    return file


def _add(
    pool: DescriptorPool,
    file: FileDescriptorProto,
    files: Mapping[str, FileDescriptorProto],
    added: set[str],
    missing: list[str],
    open_: tuple[str, ...],
) -> None:
    """Adds a file behind all that it imports."""
    for name in file.dependency:
        if name in (*open_, file.name):
            raise UnsupportedSchema(f"has a file that imports itself: {name[:100]}")
        if name not in added:
            found = files.get(name) or _well_known(name)
            if found is None:
                # it may be imported for options only, which no value needs
                found = library().files.FileDescriptorProto(name=name)
                missing.append(name)
            _add(pool, found, files, added, missing, (*open_, file.name))
    pool.AddSerializedFile(file.SerializeToString())
    added.add(file.name)


def _well_known(name: str) -> FileDescriptorProto | None:
    """A file that is not registered, because everybody has it; None if it is not such a one."""
    file = library().files.FileDescriptorProto()
    if name == _DECIMAL:
        kinds = library().field
        file.name, file.package, file.syntax = name, "confluent.type", "proto3"
        decimal = file.message_type.add(name="Decimal")
        fields = (("value", kinds.TYPE_BYTES), ("precision", kinds.TYPE_UINT32), ("scale", kinds.TYPE_INT32))
        for number, (each, kind) in enumerate(fields, 1):
            decimal.field.add(name=each, number=number, type=kind, label=kinds.LABEL_OPTIONAL)
        return file
    found = _KNOWN.fullmatch(name)
    if found is None:
        return None
    try:
        module = importlib.import_module(f"{found[1].replace('/', '.')}_pb2")
    except ImportError:  # google.type is a package of its own
        return None
    module.DESCRIPTOR.CopyToProto(file)
    return file


def _indexes(file: FileDescriptorProto, message: str) -> Indexes | None:
    """Those of the message with this name."""
    prefix = f"{file.package}." if file.package else ""
    for name in dict.fromkeys((message.removeprefix(prefix), message)):
        scope, found = file.message_type, []
        for part in name.split("."):
            declared = [each for each in scope if not each.options.map_entry]
            at = next((at for at, each in enumerate(declared) if each.name == part), None)
            if at is None:
                break
            found.append(at)
            scope = declared[at].nested_type
        else:
            return tuple(found)
    return None
