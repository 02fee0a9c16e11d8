"""The port to Kafka: requests as values, and a wire that carries one to one node.

A request is a frozen dataclass that names its answer's type. ``cluster/wire.py`` carries it over sockets,
FakeKafka in the tests answers it in memory, and ``cluster/client.py`` knows which node to ask and when to ask
again.
Not here: versions and bytes (``request_codecs.py``, ``frame.py``).
Invariant: an answer says for each thing that was asked which code it got; a wire raises only where there is
no answer.
"""

from __future__ import annotations

import enum
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from broker_core.core import errors
from broker_core.core.errors import OptionError
from broker_core.kafka.protocol.codes import Code

A = TypeVar("A")
A_co = TypeVar("A_co", covariant=True)

LATEST, EARLIEST = -1, -2  # timestamps of ListOffsets


class Isolation(enum.IntEnum):
    """What a reader sees: everything, or only what is committed, up to the last stable offset (KIP-98)."""

    READ_UNCOMMITTED = 0
    READ_COMMITTED = 1


class NodeAddress(NamedTuple):
    """Where a node listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class TopicPartition(NamedTuple):
    """A partition. As text it is ``orders/3``: a topic's name has no slash."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}"


_LOG = re.compile(r"([^/]+)/(0|[1-9][0-9]{0,8})")


def parse_log(text: str) -> TopicPartition:
    """Returns the log that ``str(log)`` wrote, such as ``orders/3``. Raises OptionError."""
    found = _LOG.fullmatch(text)
    if found is None:
        raise OptionError(
            f"{text!r} is not a log of Kafka",
            "write the queue, a slash and the number of the partition: orders/3",
        )
    return TopicPartition(found[1], int(found[2]))


class Producer(NamedTuple):
    """A producer id and its epoch, of which the highest alone may write (KIP-98, KIP-890)."""

    id: int
    epoch: int


class Request(Generic[A]):
    """What is asked of one node; ``A`` is its answer."""

    __slots__ = ()


AnyRequest = Request[Any]


class Pending(Protocol[A_co]):
    """A request that was sent."""

    def answer(self) -> A_co:
        """Waits for it. Raises Unanswered."""


class Wire(Protocol):
    """Carries requests. Threads may share it, and a forked child may go on with it."""

    def send(self, node: NodeAddress, request: Request[A], lane: str = "") -> Pending[A]:
        """Sends ``request`` and does not wait for its answer. Raises ConnectionFailed: nothing was sent.

        A node answers the requests of one lane in their order, so one that waits, such as a fetch at the end
        of a log, has a lane of its own.
        """

    def close(self) -> None: ...


class Unanswered(errors.ConnectionFailed):
    """The connection broke after a request was sent: the node may have done it, or not."""


# -- the cluster ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ApiVersions(Request["ApiVersionsAnswer"]):
    """ApiVersions: which versions of which requests a node supports, and the features of the cluster
    (KIP-584).
    """


@dataclass(frozen=True, slots=True)
class ApiVersionsAnswer:
    versions: Mapping[int, tuple[int, int]]  # by API key
    levels: Mapping[str, int]  # finalized ones; transaction.version 2 is KIP-890


@dataclass(frozen=True, slots=True)
class Metadata(Request["MetadataAnswer"]):
    """Nodes, and the partitions of ``topics`` (None: of all). Never creates a topic."""

    topics: tuple[str, ...] | None = ()


@dataclass(frozen=True, slots=True)
class PartitionMetadata:
    code: Code
    leader: int  # -1: none for now
    epoch: int


@dataclass(frozen=True, slots=True)
class TopicMetadata:
    code: Code
    id: uuid.UUID
    partitions: Mapping[int, PartitionMetadata]


@dataclass(frozen=True, slots=True)
class MetadataAnswer:
    nodes: Mapping[int, NodeAddress]
    controller: int
    topics: Mapping[str, TopicMetadata]
    cluster: str = ""  # its id, which a cluster keeps for ever


@dataclass(frozen=True, slots=True)
class FindCoordinator(Request["CoordinatorAnswer"]):
    """The node that coordinates a transactional id, or a consumer group."""

    key: str
    group: bool = False


@dataclass(frozen=True, slots=True)
class CoordinatorAnswer:
    code: Code
    node: NodeAddress | None


# -- records -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ListOffsets(Request["dict[TopicPartition, OffsetAnswer]"]):
    """By log: the first offset whose timestamp (ms) is not below the one asked for; LATEST: the end,
    EARLIEST: the begin.
    """

    timestamps: Mapping[TopicPartition, int]
    isolation: Isolation = Isolation.READ_COMMITTED


@dataclass(frozen=True, slots=True)
class OffsetAnswer:
    code: Code
    offset: int  # -1: no record is that young


@dataclass(frozen=True, slots=True)
class Fetch(Request["dict[TopicPartition, Fetched]"]):
    """Record batches from the given offsets on.

    ``ids`` are the topics' ids (KIP-516): with them a topic that was deleted and made again is
    UNKNOWN_TOPIC_ID, not other rows. The first batch comes whole even where it is larger than ``max_bytes``
    (KIP-74).
    """

    offsets: Mapping[TopicPartition, int]
    ids: Mapping[str, uuid.UUID] | None = None
    isolation: Isolation = Isolation.READ_COMMITTED
    max_bytes: int = 8 << 20
    max_wait_ms: int = 0
    min_bytes: int = 1


@dataclass(frozen=True, slots=True)
class Fetched:
    code: Code
    high_watermark: int
    last_stable: int
    start: int
    aborted: tuple[tuple[int, int], ...] = ()  # producer id, first offset
    records: memoryview = field(default_factory=lambda: memoryview(b""), repr=False)


@dataclass(frozen=True, slots=True)
class Produce(Request["dict[TopicPartition, Produced]"]):
    """One record batch for each log, answered when all in-sync replicas have it (acks=all).

    With a ``transactional_id`` the batches are stamped with its producer. ``implicit``: the log joins the
    transaction by this request alone (KIP-890, transaction.version 2); else AddPartitions must have been
    answered before.
    """

    batches: Mapping[TopicPartition, bytes | bytearray | memoryview] = field(repr=False)
    transactional_id: str | None = None
    implicit: bool = False
    timeout_ms: int = 30_000


@dataclass(frozen=True, slots=True)
class Produced:
    code: Code
    offset: int  # of the first record; -1 where it failed
    message: str | None = None


@dataclass(frozen=True, slots=True)
class DeleteRecords(Request["dict[TopicPartition, OffsetAnswer]"]):
    """Moves the begin of logs up to the given offsets; the answer has the new begins."""

    before: Mapping[TopicPartition, int]
    timeout_ms: int = 30_000


# -- transactions --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class InitProducer(Request["ProducerAnswer"]):
    """A new epoch for a transactional id; ends an open transaction of the one before. None: a producer
    without transactions.
    """

    transactional_id: str | None
    transaction_ms: int = 60_000  # how long a transaction may be open


@dataclass(frozen=True, slots=True)
class ProducerAnswer:
    code: Code
    producer: Producer


@dataclass(frozen=True, slots=True)
class AddPartitions(Request["dict[TopicPartition, Code]"]):
    """Lets logs join the open transaction; opens it where there is none."""

    transactional_id: str
    producer: Producer
    logs: tuple[TopicPartition, ...]


@dataclass(frozen=True, slots=True)
class EndTransaction(Request["ProducerAnswer"]):
    """Commits or aborts. ``bump``: the answer is the epoch of the next transaction (KIP-890); else the epoch
    stays.
    """

    transactional_id: str
    producer: Producer
    commit: bool
    bump: bool = False


@dataclass(frozen=True, slots=True)
class DescribeTransaction(Request["TransactionAnswer"]):
    transactional_id: str


@dataclass(frozen=True, slots=True)
class TransactionAnswer:
    code: Code
    state: str  # Empty, Ongoing, PrepareCommit, PrepareAbort, CompleteCommit, CompleteAbort, Dead
    producer: Producer
    logs: frozenset[TopicPartition] = frozenset()
    timeout_ms: int = 0  # of its last fence


# -- topics and groups ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one thing of an administrative request ended."""

    code: Code
    message: str | None = None


@dataclass(frozen=True, slots=True)
class CreateTopic(Request[Outcome]):
    """-1: the cluster's defaults (KIP-464)."""

    name: str
    partitions: int = -1
    replication: int = -1
    configs: Mapping[str, str] = field(default_factory=dict)
    timeout_ms: int = 30_000


@dataclass(frozen=True, slots=True)
class DeleteTopic(Request[Outcome]):
    name: str
    timeout_ms: int = 30_000


@dataclass(frozen=True, slots=True)
class DescribeTopic(Request["ConfigsAnswer"]):
    """DescribeConfigs of one topic."""

    name: str
    keys: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class ConfigsAnswer:
    code: Code
    values: Mapping[str, str | None]
    message: str | None = None


@dataclass(frozen=True, slots=True)
class LogSizes(Request["dict[TopicPartition, SizeAnswer]"]):
    """DescribeLogDirs: bytes on the disks of the node; UNKNOWN_TOPIC_OR_PARTITION where it has no replica."""

    logs: tuple[TopicPartition, ...]


@dataclass(frozen=True, slots=True)
class SizeAnswer:
    code: Code
    bytes: int


@dataclass(frozen=True, slots=True)
class CommitOffsets(Request["dict[TopicPartition, Code]"]):
    """The position of a group that has no members, for tools that show its lag."""

    group: str
    offsets: Mapping[TopicPartition, int]
