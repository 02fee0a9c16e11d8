"""What is used of kafka-python, imported here and nowhere else: its protocol, its SASL mechanisms and its
errors, all sans-IO.

Not its clients.
Invariant: nothing of kafka-python is known outside ``frame.py``, ``request_codecs.py`` and ``sasl.py``, so it
can be replaced there.
"""

from typing import Any

from kafka.errors import KafkaError as LibraryError
from kafka.net.sasl import get_sasl_mechanism
from kafka.net.sasl.oauth import AbstractTokenProvider
from kafka.protocol.admin import (
    CreateTopicsRequest,
    DeleteRecordsRequest,
    DeleteTopicsRequest,
    DescribeConfigsRequest,
    DescribeLogDirsRequest,
    DescribeTransactionsRequest,
)
from kafka.protocol.consumer import FetchRequest, ListOffsetsRequest, OffsetCommitRequest
from kafka.protocol.metadata import ApiVersionsRequest, FindCoordinatorRequest, MetadataRequest
from kafka.protocol.producer import (
    AddPartitionsToTxnRequest,
    EndTxnRequest,
    InitProducerIdRequest,
    ProduceRequest,
)
from kafka.protocol.sasl import SaslAuthenticateRequest, SaslHandshakeRequest

Answer = Any  # a response, or a part of one: the package has no types

__all__ = [
    "AbstractTokenProvider",
    "AddPartitionsToTxnRequest",
    "Answer",
    "ApiVersionsRequest",
    "CreateTopicsRequest",
    "DeleteRecordsRequest",
    "DeleteTopicsRequest",
    "DescribeConfigsRequest",
    "DescribeLogDirsRequest",
    "DescribeTransactionsRequest",
    "EndTxnRequest",
    "FetchRequest",
    "FindCoordinatorRequest",
    "InitProducerIdRequest",
    "LibraryError",
    "ListOffsetsRequest",
    "MetadataRequest",
    "OffsetCommitRequest",
    "ProduceRequest",
    "SaslAuthenticateRequest",
    "SaslHandshakeRequest",
    "get_sasl_mechanism",
]
