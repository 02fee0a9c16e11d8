"""txmq: a message queue for Spark Structured Streaming in which a micro-batch is one transaction.

The public names. Names that need Spark or Arrow are imported at their first use: a broker runs without Spark,
and Arrow and NumPy are most of the time of an import.
A program that has imported pyspark is warned if the Python that Spark would run cannot load txmq.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from functools import cache
from typing import TYPE_CHECKING, Any

from broker_core import __version__
from broker_core.core.credentials import Credentials
from broker_core.core.errors import (
    AccessRefused,
    BatchDecided,
    BatchGap,
    ChannelError,
    CheckpointMismatch,
    ConnectionFailed,
    CorruptCatalog,
    CorruptSegment,
    DataDirectoryFormat,
    DataDirectoryInvalid,
    DataDirectoryLocked,
    DataLoss,
    DecodeError,
    DiskFull,
    ExchangeNotFound,
    HeuristicOutcome,
    LocalProtocolError,
    MissingBranch,
    OptionError,
    PreconditionFailed,
    ProtocolError,
    QueueNotFound,
    RegistryFailed,
    RemoteProtocolError,
    ResourceLocked,
    ResourceShortage,
    StoreError,
    StoreFailed,
    TransactionError,
    TransactionState,
    TransactionTooLarge,
    TxmqError,
    UnknownOutcome,
    UnknownTransaction,
    Unroutable,
    cause,
)
from broker_core.message.properties import Properties

if TYPE_CHECKING:
    from broker_core.client.broker import BrokerClient, connect
    from broker_core.core.xa.xid import Xid
    from broker_core.launcher import Broker
    from broker_core.message.message import Delivery, Message
    from connector.batch.foreach_batch import transactional
    from connector.conf import recommended_conf
    from connector.ledger.listener import mirror_offsets
    from connector.tables.when import When
    from connector.typed.decode import Decoded, decode
    from connector.typed.encode import encode
    from connector.typed.registry.client import SchemaRegistry
    from txmq.notebook.frames import apps, queues
    from txmq.notebook.observe import Observation, observe

_LAZY = {
    "Broker": "broker_core.launcher",
    "BrokerClient": "broker_core.client.broker",
    "connect": "broker_core.client.broker",
    "Xid": "broker_core.core.xa.xid",
    "Delivery": "broker_core.message.message",
    "Message": "broker_core.message.message",
    "SchemaRegistry": "connector.typed.registry.client",
    "When": "connector.tables.when",
    "Decoded": "connector.typed.decode",
    "decode": "connector.typed.decode",
    "encode": "connector.typed.encode",
    "mirror_offsets": "connector.ledger.listener",
    "recommended_conf": "connector.conf",
    "transactional": "connector.batch.foreach_batch",
    "Observation": "txmq.notebook.observe",
    "apps": "txmq.notebook.frames",
    "observe": "txmq.notebook.observe",
    "queues": "txmq.notebook.frames",
}


_SPARK = ("Decoded", "decode", "encode", "mirror_offsets", "transactional")  # needs a session
_OF_SPARK = ("delta", "pandas", "py4j", "pyspark")  # the packages of the extra


@cache
def _notice() -> None:
    """A RuntimeWarning, once, if Spark's Python cannot load txmq."""
    from connector import workers

    if text := workers.notice():
        warnings.warn(text, RuntimeWarning, stacklevel=3)  # of who names what needs Spark


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'txmq' has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(_LAZY[name]), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in _OF_SPARK:
            raise
        raise ImportError(
            f"txmq.{name} needs Spark, and this Python has no {error.name}: pip install '.[spark]', "
            "or run it with the Python of a platform that brings Spark"
        ) from None
    if name in _SPARK:
        _notice()
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})


__all__ = [
    "AccessRefused", "BatchDecided", "BatchGap", "Broker", "BrokerClient", "ChannelError",
    "CheckpointMismatch", "ConnectionFailed", "CorruptCatalog", "CorruptSegment", "Credentials",
    "DataDirectoryFormat", "DataDirectoryInvalid", "DataDirectoryLocked", "DataLoss", "DecodeError",
    "Decoded", "Delivery", "DiskFull", "ExchangeNotFound", "HeuristicOutcome", "LocalProtocolError",
    "Message", "MissingBranch", "Observation", "OptionError", "PreconditionFailed", "Properties",
    "ProtocolError", "QueueNotFound", "RegistryFailed", "RemoteProtocolError", "ResourceLocked",
    "ResourceShortage", "SchemaRegistry", "StoreError", "StoreFailed", "TransactionError",
    "TransactionState", "TransactionTooLarge", "TxmqError", "UnknownOutcome", "UnknownTransaction",
    "Unroutable", "When", "Xid", "__version__", "apps", "cause", "connect", "decode", "encode",
    "mirror_offsets", "observe", "queues", "recommended_conf", "transactional",
]  # fmt: skip

if "pyspark" in sys.modules:
    _notice()
