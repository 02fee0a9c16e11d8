"""The form of each request of the port in Kafka's protocol, by ``kafka.protocol``, which has every version.

Not here: bytes (``frame.py``); authentication (``sasl.py``).
Invariant: versions from Kafka 3.1 on are spoken (topic ids in a fetch, KIP-516).
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from broker_core.kafka.protocol import port
from broker_core.kafka.protocol.codes import Code, error_of
from broker_core.kafka.protocol.frame import CLIENT_ID, RequestCodec
from broker_core.kafka.protocol.library import (
    AddPartitionsToTxnRequest,
    Answer,
    ApiVersionsRequest,
    CreateTopicsRequest,
    DeleteRecordsRequest,
    DeleteTopicsRequest,
    DescribeConfigsRequest,
    DescribeLogDirsRequest,
    DescribeTransactionsRequest,
    EndTxnRequest,
    FetchRequest,
    FindCoordinatorRequest,
    InitProducerIdRequest,
    ListOffsetsRequest,
    MetadataRequest,
    OffsetCommitRequest,
    ProduceRequest,
)
from broker_core.kafka.protocol.port import NodeAddress, Producer, TopicPartition

NO_ID = uuid.UUID(int=0)
_TOPIC = 2  # the type of a resource whose configs are described

T = TypeVar("T")


def codec_of(request: port.AnyRequest) -> RequestCodec:
    """Raises KeyError for a request that the port does not have."""
    make: Callable[[Any], RequestCodec] = _FORMS[type(request)]
    return make(request)


def _by_topic(logs: Mapping[TopicPartition, T]) -> dict[str, list[tuple[int, T]]]:
    topics: dict[str, list[tuple[int, T]]] = {}
    for log, value in logs.items():
        topics.setdefault(log.topic, []).append((log.partition, value))
    return topics


def _partitions(logs: Iterable[TopicPartition]) -> dict[str, list[int]]:
    return {topic: [number for number, _ in found] for topic, found in _by_topic(dict.fromkeys(logs)).items()}


def _answered(topics: Iterable[Answer], name: str = "partitions") -> Iterator[tuple[TopicPartition, Answer]]:
    """Yields what an answer says of each log, in the field ``name`` of its topic."""
    for topic in topics:
        for part in getattr(topic, name):
            yield TopicPartition(topic.name, part.partition_index), part


# -- the cluster ---------------------------------------------------------------------------------------------


def _features(_: port.ApiVersions) -> RequestCodec:
    def read(answer: Answer) -> port.ApiVersionsAnswer:
        if answer.error_code:
            raise error_of(Code(answer.error_code), "the request ApiVersions")
        versions = {each.api_key: (each.min_version, each.max_version) for each in answer.api_keys}
        return port.ApiVersionsAnswer(
            versions, {each.name: each.max_version_level for each in answer.finalized_features or ()}
        )

    return RequestCodec(
        ApiVersionsRequest, 3, 3, {"client_software_name": CLIENT_ID, "client_software_version": "0.1"}, read
    )


def _metadata(request: port.Metadata) -> RequestCodec:
    topic = MetadataRequest.MetadataRequestTopic
    topics = None if request.topics is None else [topic(topic_id=NO_ID, name=name) for name in request.topics]

    def partition(each: Answer) -> port.PartitionMetadata:
        return port.PartitionMetadata(Code(each.error_code), each.leader_id, each.leader_epoch)

    def read(answer: Answer) -> port.MetadataAnswer:
        return port.MetadataAnswer(
            {each.node_id: NodeAddress(each.host, each.port) for each in answer.brokers},
            answer.controller_id,
            {
                each.name: port.TopicMetadata(
                    Code(each.error_code),
                    each.topic_id,
                    {part.partition_index: partition(part) for part in each.partitions},
                )
                for each in answer.topics
            },
            answer.cluster_id or "",
        )

    fields = {
        "topics": topics,
        "allow_auto_topic_creation": False,
        "include_topic_authorized_operations": False,
    }
    return RequestCodec(MetadataRequest, 10, 12, fields, read)


def _find_coordinator(request: port.FindCoordinator) -> RequestCodec:
    def read(answer: Answer) -> port.CoordinatorAnswer:
        code = Code(answer.error_code)
        return port.CoordinatorAnswer(code, None if code else NodeAddress(answer.host, answer.port))

    return RequestCodec(
        FindCoordinatorRequest, 3, 3, {"key": request.key, "key_type": 0 if request.group else 1}, read
    )


# -- records -------------------------------------------------------------------------------------------------


def _list_offsets(request: port.ListOffsets) -> RequestCodec:
    topic = ListOffsetsRequest.ListOffsetsTopic
    topics = [
        topic(
            name=name,
            partitions=[
                topic.ListOffsetsPartition(
                    partition_index=number, current_leader_epoch=-1, timestamp=timestamp
                )
                for number, timestamp in found
            ],
        )
        for name, found in _by_topic(request.timestamps).items()
    ]

    def read(answer: Answer) -> dict[TopicPartition, port.OffsetAnswer]:
        found = _answered(answer.topics)
        return {log: port.OffsetAnswer(Code(part.error_code), part.offset) for log, part in found}

    # version 5 is the first that answers OFFSET_NOT_AVAILABLE (KIP-207)
    return RequestCodec(
        ListOffsetsRequest,
        5,
        7,
        {"replica_id": -1, "isolation_level": int(request.isolation), "topics": topics},
        read,
    )


def _fetch(request: port.Fetch) -> RequestCodec:
    topic = FetchRequest.FetchTopic
    ids = request.ids
    topics = [
        topic(
            topic=name,
            topic_id=ids[name] if ids else NO_ID,
            partitions=[
                topic.FetchPartition(
                    partition=number,
                    current_leader_epoch=-1,
                    fetch_offset=offset,
                    last_fetched_epoch=-1,
                    log_start_offset=-1,
                    partition_max_bytes=request.max_bytes,
                )
                for number, offset in found
            ],
        )
        for name, found in _by_topic(request.offsets).items()
    ]
    names = {id: name for name, id in ids.items()} if ids else {}

    def read(answer: Answer) -> dict[TopicPartition, port.Fetched]:
        if answer.error_code:
            return {log: port.Fetched(Code(answer.error_code), -1, -1, -1) for log in request.offsets}
        return {
            TopicPartition(names[each.topic_id] if ids else each.topic, part.partition_index): port.Fetched(
                Code(part.error_code),
                part.high_watermark,
                part.last_stable_offset,
                part.log_start_offset,
                tuple(
                    (aborted.producer_id, aborted.first_offset) for aborted in part.aborted_transactions or ()
                ),
                memoryview(part.records if part.records is not None else b""),
            )
            for each in answer.responses
            for part in each.partitions
        }

    fields = {
        "replica_id": -1,
        "max_wait_ms": request.max_wait_ms,
        "min_bytes": request.min_bytes,
        "max_bytes": request.max_bytes,
        "isolation_level": int(request.isolation),
        "session_id": 0,
        "session_epoch": -1,  # no fetch session: each fetch asks for other logs
        "topics": topics,
        "forgotten_topics_data": [],
        "rack_id": "",
    }
    return RequestCodec(FetchRequest, 13 if ids else 12, 13 if ids else 12, fields, read)


def _produce(request: port.Produce) -> RequestCodec:
    topic = ProduceRequest.TopicProduceData
    topics = [
        topic(
            name=name,
            partition_data=[
                topic.PartitionProduceData(index=number, records=batch) for number, batch in found
            ],
        )
        for name, found in _by_topic(request.batches).items()
    ]

    def read(answer: Answer) -> dict[TopicPartition, port.Produced]:
        return {
            TopicPartition(each.name, part.index): port.Produced(
                Code(part.error_code), part.base_offset, part.error_message
            )
            for each in answer.responses
            for part in each.partition_responses
        }

    fields = {
        "transactional_id": request.transactional_id,
        "acks": -1,
        "timeout_ms": request.timeout_ms,
        "topic_data": topics,
    }
    low, high = (12, 12) if request.implicit else (9, 11)
    return RequestCodec(ProduceRequest, low, high, fields, read)


def _delete_records(request: port.DeleteRecords) -> RequestCodec:
    topic = DeleteRecordsRequest.DeleteRecordsTopic
    topics = [
        topic(
            name=name,
            partitions=[
                topic.DeleteRecordsPartition(partition_index=number, offset=offset)
                for number, offset in found
            ],
        )
        for name, found in _by_topic(request.before).items()
    ]

    def read(answer: Answer) -> dict[TopicPartition, port.OffsetAnswer]:
        found = _answered(answer.topics)
        return {log: port.OffsetAnswer(Code(part.error_code), part.low_watermark) for log, part in found}

    return RequestCodec(
        DeleteRecordsRequest, 1, 2, {"topics": topics, "timeout_ms": request.timeout_ms}, read
    )


# -- transactions --------------------------------------------------------------------------------------------


def _init_producer(request: port.InitProducer) -> RequestCodec:
    fields = {
        "transactional_id": request.transactional_id,
        "transaction_timeout_ms": request.transaction_ms,
        "producer_id": -1,
        "producer_epoch": -1,
    }
    return RequestCodec(InitProducerIdRequest, 3, 5, fields, _read_producer)


def _read_producer(answer: Answer) -> port.ProducerAnswer:
    return port.ProducerAnswer(Code(answer.error_code), Producer(answer.producer_id, answer.producer_epoch))


def _add_partitions(request: port.AddPartitions) -> RequestCodec:
    topic = AddPartitionsToTxnRequest.AddPartitionsToTxnTopic
    fields = {
        "v3_and_below_transactional_id": request.transactional_id,
        "v3_and_below_producer_id": request.producer.id,
        "v3_and_below_producer_epoch": request.producer.epoch,
        "v3_and_below_topics": [
            topic(name=name, partitions=numbers) for name, numbers in _partitions(request.logs).items()
        ],
    }

    def read(answer: Answer) -> dict[TopicPartition, Code]:
        found = _answered(answer.results_by_topic_v3_and_below, "results_by_partition")
        return {log: Code(part.partition_error_code) for log, part in found}

    return RequestCodec(AddPartitionsToTxnRequest, 3, 3, fields, read)  # later versions are for brokers


def _end_transaction(request: port.EndTransaction) -> RequestCodec:
    fields = {
        "transactional_id": request.transactional_id,
        "producer_id": request.producer.id,
        "producer_epoch": request.producer.epoch,
        "committed": request.commit,
    }
    if request.bump:
        return RequestCodec(EndTxnRequest, 5, 5, fields, _read_producer)
    return RequestCodec(
        EndTxnRequest,
        3,
        4,
        fields,
        lambda answer: port.ProducerAnswer(Code(answer.error_code), request.producer),
    )


def _describe_transaction(request: port.DescribeTransaction) -> RequestCodec:
    def read(answer: Answer) -> port.TransactionAnswer:
        (found,) = answer.transaction_states
        logs = frozenset(
            TopicPartition(each.topic, number) for each in found.topics for number in each.partitions
        )
        producer = Producer(found.producer_id, found.producer_epoch)
        return port.TransactionAnswer(
            Code(found.error_code), found.transaction_state, producer, logs, found.transaction_timeout_ms
        )

    return RequestCodec(
        DescribeTransactionsRequest, 0, 0, {"transactional_ids": [request.transactional_id]}, read
    )


# -- topics and groups ---------------------------------------------------------------------------------------


def _outcome(found: Iterable[Answer]) -> port.Outcome:
    (one,) = found
    return port.Outcome(Code(one.error_code), one.error_message)


def _create_topic(request: port.CreateTopic) -> RequestCodec:
    topic = CreateTopicsRequest.CreatableTopic
    new_topic = topic(
        name=request.name,
        num_partitions=request.partitions,
        replication_factor=request.replication,
        assignments=[],
        configs=[
            topic.CreatableTopicConfig(name=name, value=value) for name, value in request.configs.items()
        ],
    )
    fields = {"topics": [new_topic], "timeout_ms": request.timeout_ms, "validate_only": False}
    return RequestCodec(CreateTopicsRequest, 5, 7, fields, lambda answer: _outcome(answer.topics))


def _delete_topic(request: port.DeleteTopic) -> RequestCodec:
    fields = {"topic_names": [request.name], "timeout_ms": request.timeout_ms}
    return RequestCodec(DeleteTopicsRequest, 5, 5, fields, lambda answer: _outcome(answer.responses))


def _describe_topic(request: port.DescribeTopic) -> RequestCodec:
    keys = None if request.keys is None else list(request.keys)
    resource = DescribeConfigsRequest.DescribeConfigsResource(
        resource_type=_TOPIC, resource_name=request.name, configuration_keys=keys
    )

    def read(answer: Answer) -> port.ConfigsAnswer:
        (found,) = answer.results
        return port.ConfigsAnswer(
            Code(found.error_code), {each.name: each.value for each in found.configs}, found.error_message
        )

    fields = {"resources": [resource], "include_synonyms": False, "include_documentation": False}
    return RequestCodec(DescribeConfigsRequest, 2, 4, fields, read)


def _log_sizes(request: port.LogSizes) -> RequestCodec:
    topic = DescribeLogDirsRequest.DescribableLogDirTopic
    topics = [topic(topic=name, partitions=numbers) for name, numbers in _partitions(request.logs).items()]

    def read(answer: Answer) -> dict[TopicPartition, port.SizeAnswer]:
        # without the permission the answer has no directories; version 2 has no error code for that
        refused = Code(answer.error_code) if answer.results else Code.CLUSTER_AUTHORIZATION_FAILED
        if refused:
            return dict.fromkeys(request.logs, port.SizeAnswer(refused, 0))
        found = dict.fromkeys(request.logs, port.SizeAnswer(Code.UNKNOWN_TOPIC_OR_PARTITION, 0))
        for directory in answer.results:
            code = Code(directory.error_code)
            if code:
                return dict.fromkeys(request.logs, port.SizeAnswer(code, 0))
            for log, part in _answered(directory.topics):
                if not part.is_future_key:
                    found[log] = port.SizeAnswer(Code.NONE, part.partition_size)
        return found

    return RequestCodec(DescribeLogDirsRequest, 2, 4, {"topics": topics}, read)


def _commit_offsets(request: port.CommitOffsets) -> RequestCodec:
    topic = OffsetCommitRequest.OffsetCommitRequestTopic

    def committed(number: int, offset: int) -> object:
        return topic.OffsetCommitRequestPartition(
            partition_index=number, committed_offset=offset, committed_leader_epoch=-1, committed_metadata=""
        )

    topics = [
        topic(name=name, partitions=[committed(*each) for each in found])
        for name, found in _by_topic(request.offsets).items()
    ]

    def read(answer: Answer) -> dict[TopicPartition, Code]:
        return {log: Code(part.error_code) for log, part in _answered(answer.topics)}

    fields = {
        "group_id": request.group,
        "generation_id_or_member_epoch": -1,
        "member_id": "",
        "group_instance_id": None,
        "topics": topics,
    }
    return RequestCodec(OffsetCommitRequest, 8, 9, fields, read)


_FORMS: dict[type[port.AnyRequest], Callable[[Any], RequestCodec]] = {
    port.ApiVersions: _features,
    port.Metadata: _metadata,
    port.FindCoordinator: _find_coordinator,
    port.ListOffsets: _list_offsets,
    port.Fetch: _fetch,
    port.Produce: _produce,
    port.DeleteRecords: _delete_records,
    port.InitProducer: _init_producer,
    port.AddPartitions: _add_partitions,
    port.EndTransaction: _end_transaction,
    port.DescribeTransaction: _describe_transaction,
    port.CreateTopic: _create_topic,
    port.DeleteTopic: _delete_topic,
    port.DescribeTopic: _describe_topic,
    port.LogSizes: _log_sizes,
    port.CommitOffsets: _commit_offsets,
}
