"""The error codes of Kafka's answers, and what each means to a caller.

Not here: what a client does about them (``cluster/client.py``), refusals of rights (``cluster/acls.py``).
Source: Kafka protocol guide, "Error Codes".
Invariant: every number is a member; one that this list lacks, of a newer broker, keeps its number and is not
retriable.
"""

from __future__ import annotations

import enum

from broker_core.core import errors


class Code(enum.IntEnum):
    """The codes that the requests of ``port.py`` are answered with."""

    UNKNOWN_SERVER_ERROR = -1
    NONE = 0
    OFFSET_OUT_OF_RANGE = 1
    CORRUPT_MESSAGE = 2
    UNKNOWN_TOPIC_OR_PARTITION = 3
    LEADER_NOT_AVAILABLE = 5
    NOT_LEADER_OR_FOLLOWER = 6
    REQUEST_TIMED_OUT = 7
    REPLICA_NOT_AVAILABLE = 9
    MESSAGE_TOO_LARGE = 10
    NETWORK_EXCEPTION = 13
    COORDINATOR_LOAD_IN_PROGRESS = 14
    COORDINATOR_NOT_AVAILABLE = 15
    NOT_COORDINATOR = 16
    INVALID_TOPIC_EXCEPTION = 17
    RECORD_LIST_TOO_LARGE = 18
    NOT_ENOUGH_REPLICAS = 19
    NOT_ENOUGH_REPLICAS_AFTER_APPEND = 20
    TOPIC_AUTHORIZATION_FAILED = 29
    GROUP_AUTHORIZATION_FAILED = 30
    CLUSTER_AUTHORIZATION_FAILED = 31
    INVALID_TIMESTAMP = 32
    UNSUPPORTED_SASL_MECHANISM = 33
    UNSUPPORTED_VERSION = 35
    TOPIC_ALREADY_EXISTS = 36
    INVALID_PARTITIONS = 37
    INVALID_REPLICATION_FACTOR = 38
    INVALID_CONFIG = 40
    NOT_CONTROLLER = 41
    INVALID_REQUEST = 42
    POLICY_VIOLATION = 44
    OUT_OF_ORDER_SEQUENCE_NUMBER = 45
    DUPLICATE_SEQUENCE_NUMBER = 46
    INVALID_PRODUCER_EPOCH = 47
    INVALID_TXN_STATE = 48
    INVALID_PRODUCER_ID_MAPPING = 49
    INVALID_TRANSACTION_TIMEOUT = 50
    CONCURRENT_TRANSACTIONS = 51
    TRANSACTIONAL_ID_AUTHORIZATION_FAILED = 53
    OPERATION_NOT_ATTEMPTED = 55
    KAFKA_STORAGE_ERROR = 56
    SASL_AUTHENTICATION_FAILED = 58
    UNKNOWN_PRODUCER_ID = 59
    TOPIC_DELETION_DISABLED = 73
    FENCED_LEADER_EPOCH = 74
    UNKNOWN_LEADER_EPOCH = 75
    OFFSET_NOT_AVAILABLE = 78
    INVALID_RECORD = 87
    THROTTLING_QUOTA_EXCEEDED = 89
    PRODUCER_FENCED = 90
    UNKNOWN_TOPIC_ID = 100
    INCONSISTENT_TOPIC_ID = 103
    TRANSACTIONAL_ID_NOT_FOUND = 105
    TRANSACTION_ABORTABLE = 120

    @classmethod
    def _missing_(cls, value: object) -> Code | None:
        if not isinstance(value, int):
            return None
        member = int.__new__(cls, value)
        member._name_, member._value_ = f"CODE_{value}", value
        return member


# The leader is another one, or none for now: ask for the metadata again.
MOVED = frozenset(
    {
        Code.LEADER_NOT_AVAILABLE,
        Code.NOT_LEADER_OR_FOLLOWER,
        Code.REPLICA_NOT_AVAILABLE,
        Code.NETWORK_EXCEPTION,
        Code.KAFKA_STORAGE_ERROR,
        Code.FENCED_LEADER_EPOCH,
        Code.UNKNOWN_LEADER_EPOCH,
        Code.NOT_CONTROLLER,
    }
)
# The coordinator is another one, or is being loaded: ask for it again.
COORDINATOR_MOVED = frozenset(
    {Code.COORDINATOR_LOAD_IN_PROGRESS, Code.COORDINATOR_NOT_AVAILABLE, Code.NOT_COORDINATOR}
)
# Nothing happened; the same request may be answered otherwise a moment later.
BUSY = frozenset(
    {
        Code.CONCURRENT_TRANSACTIONS,
        Code.OFFSET_NOT_AVAILABLE,  # KIP-207: a new leader does not know its end yet
        Code.NOT_ENOUGH_REPLICAS,
        Code.THROTTLING_QUOTA_EXCEEDED,
    }
)
# The request may have been done and may not.
UNCLEAR = frozenset(
    {Code.REQUEST_TIMED_OUT, Code.NOT_ENOUGH_REPLICAS_AFTER_APPEND, Code.UNKNOWN_SERVER_ERROR}
)

GONE = frozenset({Code.UNKNOWN_TOPIC_OR_PARTITION, Code.UNKNOWN_TOPIC_ID})

_FENCED = frozenset(
    {
        Code.PRODUCER_FENCED,
        Code.INVALID_PRODUCER_EPOCH,
        Code.INVALID_TXN_STATE,
        Code.INVALID_PRODUCER_ID_MAPPING,
        Code.UNKNOWN_PRODUCER_ID,
        Code.OUT_OF_ORDER_SEQUENCE_NUMBER,
        Code.DUPLICATE_SEQUENCE_NUMBER,
    }
)


def error_of(code: Code, what: str, message: str | None = None) -> errors.TxmqError:
    """Our error for a final answer; ``what`` is the thing it is about, such as "topic orders"."""
    text = f"{what}: Kafka answers {code.name}" + (f" ({' '.join(message.split())[:300]})" if message else "")
    if code in GONE:
        return errors.QueueNotFound(text, "create the topic, or correct its name")
    if code in (Code.SASL_AUTHENTICATION_FAILED, Code.UNSUPPORTED_SASL_MECHANISM):
        return errors.AccessRefused(text, "correct the mechanism, the user and the password")
    if code is Code.OFFSET_OUT_OF_RANGE:
        return errors.DataLoss(
            text, "its records were deleted by retention; start at an offset that is still there"
        )
    if code in (Code.MESSAGE_TOO_LARGE, Code.RECORD_LIST_TOO_LARGE):
        return errors.TransactionTooLarge(
            text, "raise max.message.bytes of the topic, or write smaller messages"
        )
    if code is Code.TRANSACTION_ABORTABLE:
        return errors.TransactionState(
            text, "this transaction can only be aborted; fence the transactional id and do it again"
        )
    if code in _FENCED:
        return errors.TransactionState(
            text, "another process took this transactional id over, or the transaction was too old"
        )
    if code is Code.INVALID_TRANSACTION_TIMEOUT:
        return errors.KafkaError(
            text, "raise transaction.max.timeout.ms of the brokers, or read fewer rows in a batch"
        )
    if code is Code.INVALID_TIMESTAMP:
        return errors.KafkaError(
            text, "the clock of this machine is ahead of Kafka's, or message.timestamp.*.max.ms is too small"
        )
    if code is Code.UNSUPPORTED_VERSION:
        return errors.KafkaError(text, "this needs a newer Kafka")
    return errors.KafkaError(text, "see the error codes of Kafka's protocol guide")
