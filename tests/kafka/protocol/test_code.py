"""Kafka's error codes: each is known by its number, and each leads to one of our errors that says what to do."""

from __future__ import annotations

import pytest
from kafka.errors import for_code

from broker_core.core import errors
from broker_core.kafka.protocol.codes import BUSY, COORDINATOR_MOVED, MOVED, UNCLEAR, Code, error_of


def test_the_numbers_are_those_of_kafka() -> None:
    """kafka-python calls some of them by an older name."""
    older = {
        "UNKNOWNSERVER": "UNKNOWN",
        "NOTLEADERORFOLLOWER": "NOTLEADERFORPARTITION",
        "CORRUPTMESSAGE": "CORRUPTRECORD",
        "MESSAGETOOLARGE": "MESSAGESIZETOOLARGE",
        "INVALIDTOPICEXCEPTION": "INVALIDTOPIC",
        "INVALIDCONFIG": "INVALIDCONFIGURATION",
    }
    for code in list(Code):
        name = code.name.replace("_", "").removesuffix("ERROR")
        theirs = for_code(int(code)).__name__.upper().removesuffix("ERROR")
        assert theirs in (name, older.get(name), "NO" if code is Code.NONE else None), code


def test_a_code_that_nobody_knows_keeps_its_number() -> None:
    code = Code(9876)
    assert code == 9876 and code.name == "CODE_9876" and code is not Code.UNKNOWN_SERVER_ERROR
    assert code not in MOVED | BUSY | UNCLEAR | COORDINATOR_MOVED
    assert "CODE_9876" in str(error_of(code, "topic orders"))


def test_a_code_asks_for_one_kind_of_repetition() -> None:
    kinds = (MOVED, COORDINATOR_MOVED, BUSY, UNCLEAR)
    assert sum(map(len, kinds)) == len(frozenset().union(*kinds))


@pytest.mark.parametrize(
    ("code", "kind", "advice"),
    [
        (Code.UNKNOWN_TOPIC_OR_PARTITION, errors.QueueNotFound, "create the topic"),
        (Code.UNKNOWN_TOPIC_ID, errors.QueueNotFound, "create the topic"),
        (Code.SASL_AUTHENTICATION_FAILED, errors.AccessRefused, "the password"),
        (Code.OFFSET_OUT_OF_RANGE, errors.DataLoss, "retention"),
        (Code.MESSAGE_TOO_LARGE, errors.TransactionTooLarge, "max.message.bytes"),
        (Code.PRODUCER_FENCED, errors.TransactionState, "another process"),
        (Code.INVALID_PRODUCER_EPOCH, errors.TransactionState, "another process"),
        (Code.TRANSACTION_ABORTABLE, errors.TransactionState, "only be aborted"),
        (Code.UNSUPPORTED_VERSION, errors.KafkaError, "newer Kafka"),
        (Code.POLICY_VIOLATION, errors.KafkaError, "error codes"),
    ],
)
def test_an_error_names_the_thing_the_code_and_what_to_do(
    code: Code, kind: type[errors.TxmqError], advice: str
) -> None:
    error = error_of(code, "topic orders", "said\n by the broker")
    assert type(error) is kind
    assert f"topic orders: Kafka answers {code.name} (said by the broker): " in str(error) and advice in str(
        error
    )
