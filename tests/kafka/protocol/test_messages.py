"""Requests and answers as bytes: nonsense is one error, and the versions are those that both sides know."""

from __future__ import annotations

import struct
import uuid
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker_core.core import errors
from broker_core.kafka.protocol import port
from broker_core.kafka.protocol.frame import VersionedRequest
from broker_core.kafka.protocol.port import NodeAddress, Producer, TopicPartition
from broker_core.kafka.protocol.request_codecs import codec_of
from tests.gates import examples

NODE = NodeAddress("node", 9092)
LOG = TopicPartition("orders", 3)
PRODUCER = Producer(2**40, 7)
REQUESTS: list[port.Request[Any]] = [
    port.ApiVersions(),
    port.Metadata(None),
    port.Metadata(("orders",)),
    port.FindCoordinator("id"),
    port.ListOffsets({LOG: port.LATEST}),
    port.Fetch({LOG: 5}),
    port.Fetch({LOG: 5}, {"orders": uuid.UUID(int=7)}),
    port.Produce({LOG: b"batch"}),
    port.Produce({LOG: b"batch"}, "id", implicit=True),
    port.DeleteRecords({LOG: 5}),
    port.InitProducer("id"),
    port.AddPartitions("id", PRODUCER, (LOG,)),
    port.EndTransaction("id", PRODUCER, commit=True),
    port.EndTransaction("id", PRODUCER, commit=True, bump=True),
    port.DescribeTransaction("id"),
    port.CreateTopic("orders", 3, configs={"cleanup.policy": "delete"}),
    port.DeleteTopic("orders"),
    port.DescribeTopic("orders"),
    port.LogSizes((LOG,)),
    port.CommitOffsets("group", {LOG: 5}),
]


def test_every_request_of_the_port_has_a_form() -> None:
    kinds = {
        value for value in vars(port).values() if isinstance(value, type) and issubclass(value, port.Request)
    } - {port.Request}
    assert {type(request) for request in REQUESTS} == kinds
    for request in REQUESTS:
        codec = codec_of(request)
        frame = VersionedRequest(codec, None, NODE).encode(77)
        length, key, version, correlation = struct.unpack_from(">ihhi", frame)
        assert (length, key, correlation) == (
            len(frame) - 4,
            codec.key,
            77,
        ) and codec.low <= version <= codec.high


def test_the_highest_common_version_is_taken() -> None:
    codec = codec_of(port.Metadata(("orders",)))
    for theirs, version in (((0, 10), 10), ((0, 11), 11), ((12, 20), 12)):
        frame = VersionedRequest(codec, {codec.key: theirs}, NODE).encode(1)
        assert struct.unpack_from(">h", frame, 6) == (version,)
    for theirs in ((0, 9), (13, 20)):
        with pytest.raises(errors.KafkaError, match="node:9092 does not speak Metadata of version 10 to 12"):
            VersionedRequest(codec, {codec.key: theirs}, NODE)


@examples(400)
@given(st.sampled_from(REQUESTS), st.binary(max_size=120))
def test_any_bytes_are_an_answer_or_one_error(request: port.Request[Any], body: bytes) -> None:
    message = VersionedRequest(codec_of(request), None, NODE)
    try:
        message.decode(memoryview(struct.pack(">i", 5) + body), 5)
    except errors.RemoteProtocolError as error:
        text = str(error)
    except errors.KafkaError as error:  # ApiVersions with an error code
        text = str(error)
        assert isinstance(request, port.ApiVersions)
    else:
        return
    assert "\n" not in text
