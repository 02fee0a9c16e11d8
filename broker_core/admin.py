"""The port of an operator: queues, exchanges and bindings, and messages by hand. The command line calls it.

Not here: what an operator asks of an app (``engine.py``), and what only the embedded broker has (prepared
transactions, channels: ``client/broker.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from broker_core.core.checks import Name

NOBODY = "User:NAME"  # stands for a user where none is given
LISTED = 10_000  # rows of one list of connections, channels or consumers, the oldest first
PAGE = 1_000  # rows of one page of the history or of the ledger
SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class QueueInfo:
    """One row of ``txmq queue list``."""

    name: str
    messages: int  # committed and not settled
    unacknowledged: int  # of these, held by channels
    next_offset: int  # over all logs, their sum
    consumers: int
    owner: str  # app_id, "" for none
    durable: bool
    arguments: Mapping[str, object] = field(default_factory=dict)
    logs: int = 1
    # since the oldest of ``messages`` was committed, at least; None: there is none, or not known
    oldest_s: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class DamagedMessages:
    """Offsets [start, end) of a queue whose rows are damaged."""

    vhost: str
    queue: str
    start: int
    end: int
    why: str  # the file, the position and the checksums


@dataclass(frozen=True, slots=True)
class SkippedDamage:
    """What ``txmq queue skip-damaged`` leaves out, or would leave out."""

    messages: list[DamagedMessages]
    blocks: int = 0  # damaged ones, also those that are intact in memory


@dataclass(frozen=True, slots=True)
class ExchangeInfo:
    """One row of ``txmq exchange list``; ``name`` "" is the default exchange."""

    name: str
    type: str
    durable: bool
    auto_delete: bool
    internal: bool
    bindings: int
    arguments: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BindingInfo:
    """One row of ``txmq exchange bindings``: from an exchange to a queue or to another exchange."""

    exchange: str
    destination: str
    kind: str  # of the destination: queue or exchange
    routing_key: str
    arguments: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ChannelInfo:
    """One row of ``txmq connection channels``: who holds what. ``open_s``: the age of the open transaction
    ``transaction``, 0 for none; ``publishes``, ``acks`` and ``size_bytes`` are of that. ``unacknowledged``:
    how many deliveries of each queue it holds; ``consumes``: the queues of its consumers."""

    id: str
    listener: str  # amqp, flight or process
    user: str
    address: str
    client: str
    age_s: float
    open_s: float
    publishes: int
    acks: int
    size_bytes: int
    unacknowledged: Mapping[str, int]
    consumes: tuple[str, ...]
    transaction: str = ""


@dataclass(frozen=True, slots=True)
class ConsumerInfo:
    """One row of ``txmq connection consumers``. ``channel``: its id, as ``txmq connection channels`` lists
    it. ``unacknowledged``: deliveries that it holds.
    """

    queue: str
    tag: str
    channel: str
    user: str
    address: str
    client: str
    acks: bool
    exclusive: bool
    active: bool
    prefetch: int
    unacknowledged: int


@dataclass(frozen=True, slots=True)
class ClientInfo:
    """One row of ``txmq connection list``. ``client``: what it calls itself. ``silent_s``: since it last sent
    anything. ``channels`` of Flight: 0, as they do not belong to a connection.
    """

    id: str
    listener: str  # amqp or flight
    user: str
    vhost: str
    address: str
    client: str
    age_s: float
    silent_s: float
    channels: int


@dataclass(frozen=True, slots=True)
class ConnectionInfo:
    """An open connection of AMQP. ``host`` and ``port``: of this end, ``peer_*``: of the client's."""

    name: str
    user: str
    vhost: str
    state: str
    host: str
    port: int
    peer_host: str
    peer_port: int
    tls: bool
    channels: int
    channel_max: int
    frame_max: int
    heartbeat_s: int
    connected_at_ms: int
    client_properties: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Preparation:
    """One line of ``txmq broker setup``."""

    part: str  # topics, or the role that needs a right: driver, executor, operator
    state: str  # of a topic: missing, there, wrong, unknown; of a right: needed, optional
    command: str  # for a shell
    why: str = ""

    @property
    def due(self) -> bool:
        """Whether it is to be run."""
        return self.state not in ("there", "optional")


@dataclass(frozen=True, slots=True)
class UserInfo:
    """One row of ``txmq user list``. ``source``: catalog, file (``--users``), both, or default."""

    name: str
    tags: tuple[str, ...]
    source: str


@dataclass(frozen=True, slots=True)
class PermissionInfo:
    """One row of ``txmq permission list``; ``exchange`` "" for all names, else of a topic exchange, whose
    routing keys ``write`` and ``read`` permit.
    """

    user: str
    vhost: str
    exchange: str
    configure: str
    write: str
    read: str


@dataclass(frozen=True, slots=True)
class VhostInfo:
    """One row of ``txmq vhost list``. ``connections``: of AMQP; ``max_*`` None: no limit."""

    name: str
    queues: int
    connections: int
    messages: int
    max_queues: int | None
    max_connections: int | None
    max_messages: int | None


@dataclass(frozen=True, slots=True)
class Level:
    """How much is in use of something that runs out, or is free where ``name`` says so. ``alarm``: the limit
    is passed.
    """

    name: str
    found: int
    limit: int
    alarm: bool


@dataclass(frozen=True, slots=True)
class BrokerStatus:
    """``txmq status``: a broker as a whole, over all its virtual hosts. ``unapplied``: decided batches that a
    table does not have yet; ``staged``: staged batches that are not decided; ``lag_s``: the age of the
    oldest message that an app has not consumed, at least; None: there is none.
    """

    version: str
    uptime_s: float
    pid: int
    directory: str
    listens: tuple[str, ...]
    levels: tuple[Level, ...]
    vhosts: int
    queues: int
    messages: int
    unacknowledged: int
    connections: int  # of AMQP
    channels: int
    prepared: int
    staged: int
    unapplied: int
    lag_s: float | None = None

    @property
    def alarms(self) -> tuple[str, ...]:
        return tuple(level.name for level in self.levels if level.alarm)


@dataclass(frozen=True, slots=True)
class Skipped:
    """A part of definitions that has no counterpart where it is to go. ``kind``: user, queue, policy, ..."""

    kind: str
    name: str
    vhost: str  # "" where it is of none
    why: str


@dataclass(frozen=True, slots=True)
class Imported:
    """``counts``: how many of each kind are as the definitions say."""

    counts: Mapping[str, int]
    skipped: tuple[Skipped, ...]


@dataclass(frozen=True, slots=True)
class Exported:
    definitions: Mapping[str, object]
    skipped: tuple[Skipped, ...]


class Admin(Protocol):
    """Raises AccessRefused for what the caller may not see as a whole; parts of it are left out."""

    def prepare(
        self, principal: str, apps: Sequence[str], sources: Sequence[str], targets: Sequence[str]
    ) -> list[Preparation]:
        """Returns what is to be done before these apps read and publish to these queues, and whether it is.
        Makes nothing. Raises OptionError.
        """

    def queues(self) -> list[QueueInfo]:
        """Returns every queue, by name."""

    def consumers(self) -> list[ConsumerInfo]:
        """Returns the consumers of AMQP. Raises OptionError if the engine does not know them."""

    def ledger(self, app_id: str = "", sequence: int = 0, limit: int = PAGE) -> list[LedgerInfo]:
        """Returns decided micro-batches that are kept, by app and sequence: the first ``limit`` of those that
        come after ``sequence`` of ``app_id``.
        """

    def history(self, limit: int = PAGE, before: int = 0) -> list[TransactionInfo]:
        """Returns the last commits, the newest first; those ``before`` this number, if it is not 0."""

    def transaction(self, sequence: int) -> TransactionInfo:
        """Returns what a commit did. Raises UnknownTransaction, and OptionError if commits have no number."""

    def message(self, queue: str, offset: int) -> MessageLife:
        """Returns what happened to a message. Raises QueueNotFound."""

    def declare_queue(
        self, name: str, *, durable: bool = True, arguments: Mapping[str, object] | None = None
    ) -> None:
        """Makes a queue. Raises PreconditionFailed for arguments that the engine does not have, or that the
        existing queue does not have.
        """

    def delete_queue(self, name: str) -> None:
        """Deletes a queue, if it exists, with its messages. Raises ResourceLocked."""

    def exchanges(self) -> list[ExchangeInfo]:
        """Returns every exchange, by name."""

    def bindings(self) -> list[BindingInfo]:
        """Returns every binding, by exchange and destination; not those of the default exchange, which
        reaches each queue by its name.
        """

    def declare_exchange(self, name: str, type: str, arguments: Mapping[str, object] | None = None) -> None:
        """Makes an exchange: direct, fanout, topic, headers, x-consistent-hash, x-delayed-message or
        x-message-deduplication.
        """

    def delete_exchange(self, name: str) -> None:
        """Deletes an exchange, if it exists, with its bindings."""

    def bind(
        self, queue: str, exchange: str, routing_key: str = "", arguments: Mapping[str, object] | None = None
    ) -> None:
        """Binds a queue to an exchange. Raises QueueNotFound, ExchangeNotFound."""

    def unbind(
        self, queue: str, exchange: str, routing_key: str = "", arguments: Mapping[str, object] | None = None
    ) -> None:
        """Removes a binding, if it exists."""

    def publish(
        self, bodies: Iterable[bytes], exchange: str = "", routing_key: str = "", properties: bytes = b""
    ) -> int:
        """Publishes one message for each body, all in one transaction, and returns their number. Raises
        Unroutable if some reach no queue.
        """


@dataclass(frozen=True, slots=True)
class PreparedInfo:
    """One row of ``txmq tx list``."""

    xid: str
    age_s: float
    publishes: int
    settles: int
    size_bytes: int
    dropped: int = 0  # messages and acks without effect, because their queue was deleted
    user: str = ""  # who named it, a deleted one with a time; "": the owner of the data directory, or nobody
    to: Mapping[str, int] = field(default_factory=dict)  # messages that it publishes to each queue
    acked: Mapping[str, int] = field(default_factory=dict)  # deliveries of each queue that it settles
    first: tuple[bytes, ...] = ()  # bodies, cut, that the caller may read


@dataclass(frozen=True, slots=True)
class EffectInfo:
    """What a transaction did to ``entries`` of a queue: published, dead_lettered (copies that it put there),
    acknowledged, rejected, returned, expired, overflowed, delivery_limit, purged, consumed (by an app),
    deleted (with the queue). ``ranges``: [start, end) of offsets; not ``exact``: only from the first to the
    last. ``source``: the queue that dead letters left.
    """

    effect: str
    queue: str
    entries: int
    ranges: tuple[tuple[int, int], ...]
    exact: bool = True
    source: str = ""


@dataclass(frozen=True, slots=True)
class TableInfo:
    """Rows that a micro-batch applies to a table. ``refused``: why the table refuses them, for now, or
    SKIPPED: an operator has them. ``version``: of the table, which has them; None: not known.
    """

    table: str
    operation: str
    rows: int
    applied: bool
    refused: str = ""
    version: int | None = None

    @property
    def waits(self) -> bool:
        """Whether the rows are still to be applied."""
        return not self.applied and self.refused != SKIPPED


@dataclass(frozen=True, slots=True)
class TransactionInfo:
    """What a commit did, as far as the caller may see it; ``sequence`` is its number. ``listener``: amqp,
    flight, process, spark, or "" for the broker itself. ``xid``: the name of a named transaction. ``app_id``
    to ``batch_id``: of a micro-batch, ``batch_id`` -1 for others. ``left_out``: entries of further queues.
    """

    sequence: int
    committed_at_us: int
    vhost: str = "/"
    listener: str = ""
    user: str = ""
    client: str = ""
    address: str = ""
    effects: tuple[EffectInfo, ...] = ()
    xid: str = ""
    app_id: str = ""
    query_id: str = ""
    batch_id: int = -1
    ledger_sequence: int = 0
    tables: tuple[TableInfo, ...] = ()
    left_out: int = 0


@dataclass(frozen=True, slots=True)
class HistoryPage:
    """Transactions, the newest first. ``before``: the next call goes on below this number; 0: that is all."""

    transactions: tuple[TransactionInfo, ...]
    before: int = 0


@dataclass(frozen=True, slots=True)
class LedgerInfo:
    """A decided micro-batch, as an operator sees it. ``transaction``: the number of its commit, 0 on Kafka,
    which has none. ``ranges``: what it consumed, by log, [start, end).
    """

    app_id: str
    sequence: int
    query_id: str
    batch_id: int
    transaction: int
    committed_at_us: int
    ranges: Mapping[Name, tuple[int, int]]
    messages: int
    published: int
    applied: bool
    mirrored: bool
    tables: tuple[TableInfo, ...] = ()


@dataclass(frozen=True, slots=True)
class MessageStep:
    """Something that a transaction did to a message. ``certain`` False: it is one of those that the
    transaction may have concerned. ``to``: where its dead letters went, as far as the caller may see it.
    """

    sequence: int
    committed_at_us: int
    effect: str
    certain: bool
    listener: str = ""
    user: str = ""
    client: str = ""
    app_id: str = ""
    batch_id: int = -1
    to: tuple[EffectInfo, ...] = ()


@dataclass(frozen=True, slots=True)
class MessageLife:
    """What happened to a message. ``state``: ready, held (by a channel or a prepared transaction), claimed
    (by an app), settled, unknown (of a queue that is gone). On Kafka, where each app reads it: ready while
    its topic has it, settled when retention has deleted it, unknown where no record has the offset.
    ``since_us``: when the history begins. ``more``: where the next call goes on, "": nowhere.
    """

    queue: str
    offset: int
    state: str
    steps: tuple[MessageStep, ...]
    since_us: int = 0
    more: str = ""


def of_batch(found: LedgerInfo) -> TransactionInfo:
    """Returns the transaction that decided a micro-batch, as far as its ledger tells."""
    spans = sorted(found.ranges.items())
    consumed = [EffectInfo("consumed", log, end - start, ((start, end),)) for log, (start, end) in spans]
    return TransactionInfo(
        sequence=found.transaction,
        committed_at_us=found.committed_at_us,
        listener="spark",
        effects=tuple(consumed),
        app_id=found.app_id,
        query_id=found.query_id,
        batch_id=found.batch_id,
        ledger_sequence=found.sequence,
        tables=found.tables,
    )
