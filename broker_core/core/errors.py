"""Every error that txmq raises, in one tree by cause.

TxmqError
├── OptionError              an option, a schema or a value the user gave
├── DecodeError              a message is not what the schema of its reader says
├── ProtocolError            LocalProtocolError (invalid data of this side), RemoteProtocolError (of the peer)
│   └── ConnectionException  AMQP connection exceptions: reply_code and reply_name of the specification
│       ├── ConnectionForced (320), ConnectionAccessRefused (403)
│       ├── FrameError, MethodSyntaxError, CommandInvalid, ChannelNumberError, UnexpectedFrame,
│       │   ResourceExhausted (501 to 506)
│       └── NotAllowed (530), NotImplementedFeature (540), InternalFault (541)
├── LoginRefused             user, password or token are missing or wrong
├── ConnectionFailed         nothing listens, or the connection broke; retriable
├── Busy                     a limit of what is in progress at once; retriable
├── ResourceShortage         the system is short of files, memory or threads for now; retriable
├── KafkaError               an answer of Kafka that has no class of its own
├── RegistryFailed           a schema registry that does not answer as one; retriable
├── ChannelError             AMQP channel exceptions: reply_code and reply_name of the specification
│   ├── QueueNotFound, ExchangeNotFound (404), AccessRefused (403), ResourceLocked (405)
│   └── PreconditionFailed (406)
├── TransactionError
│   ├── UnknownTransaction, UnknownOutcome, TransactionState (HeuristicOutcome)
│   ├── CheckpointMismatch, BatchGap, MissingBranch, BatchDecided
│   └── NotApplied (NotAppliedYet), Unroutable, TransactionTooLarge
└── StoreError
    ├── CorruptSegment, CorruptCatalog, CorruptRecordBatch, DataLoss, LedgerLost
    ├── DataDirectoryLocked, DataDirectoryFormat, DataDirectoryInvalid
    └── DiskFull, StoreFailed

Every text starts with its code, ``[TXMQ_QUEUE_NOT_FOUND] ...``, as Spark's do, so a text that crossed
Flight, py4j or a Spark exception can be turned back into the same class: see :func:`cause`.
"""

from __future__ import annotations

import re
from typing import ClassVar


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def printable(text: str) -> str:
    """Returns ``text`` as one line for a terminal or a log: each character that cannot be printed is an
    escape of Python, also marks that change the direction of writing and lone surrogates.

    Names come from users. An escape sequence in one would act on the terminal of whoever looks, and a line
    break would forge a line of the log.
    """
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in text
    )


def visible(name: str) -> str:
    """As ``printable``, with escapes for backslashes too, and for a space at either end or behind another."""
    return _UNSEEN.sub(r"\\x20", printable(name.replace("\\", r"\\")))


_UNSEEN = re.compile(r"^ | $|(?<= ) ")
_BY_CODE: dict[str, type[TxmqError]] = {}


class TxmqError(Exception):
    """Root of the tree. ``message`` states what happened to which thing, and what to do; ``str()`` adds the
    code.
    """

    code: ClassVar[str] = "TXMQ_ERROR"
    retriable: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "code" in cls.__dict__:
            _BY_CODE[cls.code] = cls

    def __init__(self, message: str, advice: str = "") -> None:
        """``message`` states what happened to which thing, ``advice`` what to do, if ``message`` does not
        include it.
        """
        self.summary = message
        self.message = f"{message}: {advice}" if advice else message
        super().__init__(self.message)

    def __str__(self) -> str:
        return f"[{self.code}] {self.message}"

    def __reduce__(self) -> tuple[type[TxmqError], tuple[str]]:
        return (type(self), (self.message,))


class OptionError(TxmqError):
    """An unknown, missing, wrong or contradictory option, or a column of the wrong type."""

    code = "TXMQ_OPTION"


class DecodeError(TxmqError):
    """A message whose body is not of the format and the schema that it is decoded with."""

    code = "TXMQ_DECODE"


class ProtocolError(TxmqError):
    """Data that AMQP 0-9-1 does not allow."""

    code = "TXMQ_PROTOCOL"


class LocalProtocolError(ProtocolError):
    """The caller gave a value that does not fit the protocol."""

    code = "TXMQ_PROTOCOL_LOCAL"


class RemoteProtocolError(ProtocolError):
    """The peer sent bytes that do not follow the protocol."""

    code = "TXMQ_PROTOCOL_REMOTE"


class ConnectionException(RemoteProtocolError):
    """An AMQP 0-9-1 connection exception (specification 1.2, constants): the connection is closed with it."""

    code = "TXMQ_AMQP_CONNECTION"
    reply_code: ClassVar[int] = 541
    reply_name: ClassVar[str] = "INTERNAL_ERROR"


class ConnectionForced(ConnectionException):
    """The broker is shutting down."""

    code, reply_code, reply_name = "TXMQ_AMQP_CONNECTION_FORCED", 320, "CONNECTION_FORCED"


class ConnectionAccessRefused(ConnectionException):
    """The user, its password or the virtual host."""

    code, reply_code, reply_name = "TXMQ_AMQP_CONNECTION_REFUSED", 403, "ACCESS_REFUSED"


class FrameError(ConnectionException):
    code, reply_code, reply_name = "TXMQ_AMQP_FRAME", 501, "FRAME_ERROR"


class MethodSyntaxError(ConnectionException):
    """A frame with an invalid value."""

    code, reply_code, reply_name = "TXMQ_AMQP_SYNTAX", 502, "SYNTAX_ERROR"


class CommandInvalid(ConnectionException):
    code, reply_code, reply_name = "TXMQ_AMQP_COMMAND_INVALID", 503, "COMMAND_INVALID"


class ChannelNumberError(ConnectionException):
    """A channel that is not open, or open already."""

    code, reply_code, reply_name = "TXMQ_AMQP_CHANNEL_NUMBER", 504, "CHANNEL_ERROR"


class UnexpectedFrame(ConnectionException):
    code, reply_code, reply_name = "TXMQ_AMQP_UNEXPECTED_FRAME", 505, "UNEXPECTED_FRAME"


class ResourceExhausted(ConnectionException):
    code, reply_code, reply_name = "TXMQ_AMQP_RESOURCE", 506, "RESOURCE_ERROR"


class NotAllowed(ConnectionException):
    code, reply_code, reply_name = "TXMQ_AMQP_NOT_ALLOWED", 530, "NOT_ALLOWED"


class NotImplementedFeature(ConnectionException):
    code, reply_code, reply_name = "TXMQ_AMQP_NOT_IMPLEMENTED", 540, "NOT_IMPLEMENTED"


class InternalFault(ConnectionException):
    """An exception that no rule expects: a defect of the broker. Only its caller gets it."""

    code, reply_code, reply_name = "TXMQ_AMQP_INTERNAL", 541, "INTERNAL_ERROR"

    @classmethod
    def of(cls, error: Exception) -> InternalFault:
        found = cls(
            "the operation failed by a defect of the broker, and nothing of it was done: report it with the "
            f"broker's log; the broker continues ({type(error).__name__}: {one_line(error)})"
        )
        found.__cause__ = error
        return found


class LoginRefused(TxmqError):
    """User, password or token are missing or wrong."""

    code = "TXMQ_LOGIN_REFUSED"


class ConnectionFailed(TxmqError):
    """No process listens at the address, or the connection broke before an answer arrived."""

    code = "TXMQ_CONNECTION"
    retriable = True


class Busy(TxmqError):
    """The broker has as many calls, or parts of calls, in progress as it takes at once."""

    code = "TXMQ_BUSY"
    retriable = True


class ResourceShortage(TxmqError):
    """The operating system refused the broker an open file, memory, a thread or the access to a file. Nothing
    was done, and it can be tried again.
    """

    code = "TXMQ_RESOURCE_SHORTAGE"
    retriable = True


class KafkaError(TxmqError):
    """Kafka returned an error code that has no class of its own; the text has its name."""

    code = "TXMQ_KAFKA"


class RegistryFailed(TxmqError):
    """A schema registry cannot be reached, or something else answered in its place."""

    code = "TXMQ_REGISTRY"
    retriable = True


class ChannelError(TxmqError):
    """An AMQP 0-9-1 channel exception (specification 1.2, constants)."""

    code = "TXMQ_CHANNEL"
    reply_code: ClassVar[int] = 0
    reply_name: ClassVar[str] = ""


class AccessRefused(ChannelError):
    """The user lacks a permission or a tag."""

    code, reply_code, reply_name = "TXMQ_ACCESS_REFUSED", 403, "ACCESS_REFUSED"


class QueueNotFound(ChannelError):
    """No queue has this name in the virtual host."""

    code, reply_code, reply_name = "TXMQ_QUEUE_NOT_FOUND", 404, "NOT_FOUND"


class ExchangeNotFound(ChannelError):
    """No exchange has this name in the virtual host."""

    code, reply_code, reply_name = "TXMQ_EXCHANGE_NOT_FOUND", 404, "NOT_FOUND"


class ResourceLocked(ChannelError):
    """A queue belongs to an app or to another connection."""

    code, reply_code, reply_name = "TXMQ_RESOURCE_LOCKED", 405, "RESOURCE_LOCKED"


class PreconditionFailed(ChannelError):
    """The state of a queue, an exchange or a channel does not allow the command."""

    code, reply_code, reply_name = "TXMQ_PRECONDITION_FAILED", 406, "PRECONDITION_FAILED"


class TransactionError(TxmqError):
    """Root of the errors of transactions and micro-batches."""

    code = "TXMQ_TRANSACTION"


class UnknownTransaction(TransactionError):
    """No transaction, staged batch or decided batch has this name."""

    code = "TXMQ_UNKNOWN_TRANSACTION"


class UnknownOutcome(TransactionError):
    """The outcome of a transaction has been forgotten: it may have been committed, or not."""

    code = "TXMQ_UNKNOWN_OUTCOME"


class TransactionState(TransactionError):
    """The transaction exists but is in another state than the command needs."""

    code = "TXMQ_TRANSACTION_STATE"


class HeuristicOutcome(TransactionState):
    """Somebody else has decided the prepared transaction: XA_HEURCOM or XA_HEURRB, as the text says."""

    code = "TXMQ_HEURISTIC_OUTCOME"


class CheckpointMismatch(TransactionError):
    """A checkpoint, offset or batch does not continue the ledger and the claims of the app."""

    code = "TXMQ_CHECKPOINT_MISMATCH"


class BatchGap(TransactionError):
    """A batch id skips batches that the ledger does not have."""

    code = "TXMQ_BATCH_GAP"


class MissingBranch(TransactionError):
    """A commit names a branch that is not staged, or not with these rows and this checksum."""

    code = "TXMQ_MISSING_BRANCH"


class BatchDecided(TransactionError):
    """A batch that is decided cannot be aborted."""

    code = "TXMQ_BATCH_DECIDED"


class NotApplied(TransactionError):
    """A decided batch whose rows a table does not accept. They are kept until it does, or until an operator
    skips them.
    """

    code = "TXMQ_NOT_APPLIED"


class NotAppliedYet(NotApplied):
    """A decided batch that only a conflict, a full disk or storage that is away keeps from its table: the
    next start applies it.
    """

    code = "TXMQ_NOT_APPLIED_YET"


class Unroutable(TransactionError):
    """Messages of the transaction reach no queue."""

    code = "TXMQ_UNROUTABLE"


class TransactionTooLarge(TransactionError):
    """A message or a transaction is over the broker's limit."""

    code = "TXMQ_TOO_LARGE"


class StoreError(TxmqError):
    """Root of the errors of stored data."""

    code = "TXMQ_STORE"


class CorruptSegment(StoreError):
    """Bytes of a segment do not match their checksum; names file, position and batch."""

    code = "TXMQ_CORRUPT_SEGMENT"


class CorruptCatalog(StoreError):
    """The catalog of the data directory is damaged, or its records contradict each other."""

    code = "TXMQ_CORRUPT_CATALOG"


class CorruptRecordBatch(StoreError):
    """Bytes of a Kafka partition are not a valid record batch; names partition and offset."""

    code = "TXMQ_CORRUPT_RECORD_BATCH"


class DataLoss(StoreError):
    """Messages that a reader has not read yet are gone."""

    code = "TXMQ_DATA_LOSS"


class LedgerLost(DataLoss, QueueNotFound):
    """The topic of Kafka with the claims and decisions of an app is gone."""

    code = "TXMQ_LEDGER_LOST"


class DataDirectoryLocked(StoreError):
    """Another broker has the data directory open."""

    code = "TXMQ_DATA_DIRECTORY_LOCKED"


class DataDirectoryFormat(StoreError):
    """The data directory has another format than this txmq writes."""

    code = "TXMQ_DATA_DIRECTORY_FORMAT"


class DataDirectoryInvalid(StoreError):
    """The path is not a data directory, or cannot be used as one."""

    code = "TXMQ_DATA_DIRECTORY_INVALID"


class DiskFull(StoreError):
    """The disk has no room for what was to be written."""

    code = "TXMQ_DISK_FULL"


class StoreFailed(StoreError):
    """A write failed earlier; the broker accepts no work until it is started again."""

    code = "TXMQ_STORE_FAILED"
    retriable = True

    @classmethod
    def of(cls, error: BaseException) -> StoreFailed:
        """Returns the error of every later call, after ``error`` ended a commit."""
        found = cls(
            "the broker stopped: start it again, it recovers what was committed. A commit failed: "
            f"{one_line(error) or type(error).__name__}"
        )
        found.__cause__ = error
        return found


_TEXT = re.compile(r"\[(TXMQ_[A-Z_]+)\] ([^\n]*)")


def from_text(text: str) -> TxmqError | None:
    """Returns the error whose ``[CODE] message`` is in ``text``; None if there is none."""
    found = _TEXT.search(text)
    if found is None:
        return None
    return _BY_CODE.get(found.group(1), TxmqError)(found.group(2).strip())


def cause(exception: BaseException) -> TxmqError | None:
    """Returns the :class:`TxmqError` behind a Spark, py4j or Flight exception; None if the cause is another
    error.
    """
    seen: set[int] = set()
    pending: list[BaseException | None] = [exception]
    while pending:
        current = pending.pop(0)
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        if isinstance(current, TxmqError):
            return current
        found = from_text(str(current))
        if found is not None:
            return found
        pending += [current.__cause__, current.__context__]
    return None
