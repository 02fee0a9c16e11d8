"""Files of Protobuf as protoc would describe them, for a registry and for the tests of what reads them."""

from __future__ import annotations

import base64
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from google.protobuf.descriptor_pb2 import FileDescriptorProto


def file(text: str) -> FileDescriptorProto:
    """In the text format of Protobuf."""
    return text_format.Parse(text, FileDescriptorProto())


def serialized(each: FileDescriptorProto) -> str:
    """As ``format=serialized`` of a registry gives it: without a name."""
    made = FileDescriptorProto.FromString(each.SerializeToString())
    made.ClearField("name")
    return base64.b64encode(made.SerializeToString()).decode()


def descriptor_set(*files: FileDescriptorProto) -> bytes:
    return descriptor_pb2.FileDescriptorSet(file=files).SerializeToString()


def message_class(name: str, *files: FileDescriptorProto) -> Any:
    """By google.protobuf alone."""
    pool = descriptor_pool.DescriptorPool()
    known = descriptor_pool.Default()
    for each in files:
        for imported in each.dependency:
            if imported.startswith("google/protobuf/"):
                pool.AddSerializedFile(known.FindFileByName(imported).serialized_pb)
        pool.AddSerializedFile(each.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(name))


LINE = file("""
    name: "shop/line.proto" package: "shop" syntax: "proto3"
    message_type {
      name: "Line"
      field { name: "sku" number: 1 type: TYPE_STRING }
      field { name: "price" number: 2 type: TYPE_DOUBLE }
    }
""")

ORDER = file("""
    name: "shop/order.proto" package: "shop" syntax: "proto3"
    dependency: ["shop/line.proto", "google/protobuf/timestamp.proto", "google/protobuf/duration.proto",
                 "google/protobuf/wrappers.proto"]
    message_type {
      name: "Order"
      field { name: "id" number: 1 type: TYPE_INT64 }
      field { name: "name" number: 2 type: TYPE_STRING oneof_index: 1 proto3_optional: true }
      field { name: "state" number: 3 type: TYPE_ENUM type_name: ".shop.State" }
      field { name: "at" number: 4 type: TYPE_MESSAGE type_name: ".google.protobuf.Timestamp" }
      field { name: "took" number: 5 type: TYPE_MESSAGE type_name: ".google.protobuf.Duration" }
      field { name: "lines" number: 6 label: LABEL_REPEATED type: TYPE_MESSAGE type_name: ".shop.Line" }
      field { name: "tags" number: 7 label: LABEL_REPEATED type: TYPE_MESSAGE type_name: ".shop.Order.TagsEntry" }
      field { name: "card" number: 8 type: TYPE_STRING oneof_index: 0 }
      field { name: "cash" number: 9 type: TYPE_FLOAT oneof_index: 0 }
      field { name: "note" number: 10 type: TYPE_MESSAGE type_name: ".google.protobuf.StringValue" }
      field { name: "ratings" number: 11 label: LABEL_REPEATED type: TYPE_SINT32 }
      field { name: "total" number: 12 type: TYPE_UINT64 }
      field { name: "where" number: 13 type: TYPE_MESSAGE type_name: ".shop.Order.Place" }
      field { name: "raw" number: 14 type: TYPE_BYTES }
      field { name: "paid" number: 15 type: TYPE_BOOL }
      field { name: "shelves" number: 16 label: LABEL_REPEATED type: TYPE_MESSAGE type_name: ".shop.Order.ShelvesEntry" }
      nested_type {
        name: "Place"
        field { name: "x" number: 1 type: TYPE_FIXED32 }
        nested_type { name: "Deep" field { name: "y" number: 1 type: TYPE_SFIXED64 } }
      }
      nested_type {
        name: "TagsEntry" options { map_entry: true }
        field { name: "key" number: 1 type: TYPE_STRING }
        field { name: "value" number: 2 type: TYPE_INT32 }
      }
      nested_type {
        name: "ShelvesEntry" options { map_entry: true }
        field { name: "key" number: 1 type: TYPE_UINT32 }
        field { name: "value" number: 2 type: TYPE_MESSAGE type_name: ".shop.Line" }
      }
      oneof_decl { name: "payment" }
      oneof_decl { name: "_name" }
    }
    message_type {
      name: "Cancelled"
      field { name: "id" number: 1 type: TYPE_INT64 }
    }
    enum_type { name: "State" value { name: "NEW" number: 0 } value { name: "PAID" number: 1 } }
""")

OLD = file("""
    name: "old.proto" syntax: "proto2"
    message_type {
      name: "Old"
      field { name: "id" number: 1 type: TYPE_INT64 label: LABEL_REQUIRED }
      field { name: "text" number: 2 type: TYPE_STRING default_value: "x" }
      field { name: "kind" number: 3 type: TYPE_ENUM type_name: ".Kind" }
      field { name: "group" number: 4 type: TYPE_GROUP type_name: ".Old.Group" }
      nested_type { name: "Group" field { name: "a" number: 1 type: TYPE_INT32 } }
    }
    enum_type { name: "Kind" value { name: "A" number: 1 } value { name: "B" number: 2 } }
""")
