"""The small durable records of the broker, one frozen class each. The store keeps every class in its own
table.

A record's key is the tuple of its ``KEY`` fields. A field annotated ``dict`` or ``list`` is stored as JSON,
``bytes`` as a BLOB, everything else as an INTEGER or TEXT. Writing a record replaces the one with the same
key.

Offsets are end-exclusive: ``end`` is the next offset to read. Times are microseconds since the epoch. A
*vector* is a dict from log (queue) to offset, where ``"start"`` is the symbolic start of a stream (S1).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from decimal import Decimal
from typing import Any, ClassVar, Literal

from broker_core.core.address import VHOST
from broker_core.core.ids import BlockId, CommitSequence, QueueId

NEVER = 1 << 62  # after all times
Ranges = dict[str, list[int]]  # log -> [start, end]
_DECIMAL, _BYTES = "\0decimal", "\0bytes"  # no name in a table of arguments starts with this character


@dataclass(frozen=True, slots=True)
class Record:
    TABLE: ClassVar[str]
    KEY: ClassVar[tuple[str, ...]]

    @property
    def key(self) -> tuple[object, ...]:
        return tuple(getattr(self, name) for name in self.KEY)

    @classmethod
    def columns(cls) -> tuple[str, ...]:
        return tuple(field.name for field in fields(cls))


@dataclass(frozen=True, slots=True)
class ExchangeRecord(Record):
    TABLE, KEY = "exchange", ("name", "vhost")
    name: str
    type: str  # direct, fanout, topic, headers
    durable: bool
    auto_delete: bool
    internal: bool
    arguments: dict[str, object]
    vhost: str = VHOST


@dataclass(frozen=True, slots=True)
class QueueRecord(Record):
    TABLE, KEY = "queue", ("queue_id",)
    queue_id: QueueId  # never used again, so a run can never point to a later queue of the same name
    name: str
    durable: bool
    exclusive: bool
    auto_delete: bool
    arguments: dict[str, object]
    vhost: str = VHOST


@dataclass(frozen=True, slots=True)
class BindingRecord(Record):
    TABLE, KEY = "binding", ("exchange", "queue", "routing_key", "arguments", "vhost")
    exchange: str
    queue: str
    routing_key: str
    arguments: dict[str, object]
    vhost: str = VHOST


@dataclass(frozen=True, slots=True)
class ExchangeBindingRecord(Record):
    """From exchange ``source`` to exchange ``destination``."""

    TABLE, KEY = "exchange_binding", ("source", "destination", "routing_key", "arguments", "vhost")
    source: str
    destination: str
    routing_key: str
    arguments: dict[str, object]
    vhost: str = VHOST


@dataclass(frozen=True, slots=True)
class ProgressRecord(Record):
    """The progress of a queue: everything below ``floor`` is settled, everything below ``acked`` may be
    deleted.
    """

    TABLE, KEY = "progress", ("queue_id",)
    queue_id: QueueId
    owner: str  # app_id that holds the claim, "" for none (S6)
    floor: int
    # an owned queue keeps what its source has not acked, and its last range, for Spark's replay
    acked: int
    next_offset: int  # at least this; runs and claims may name higher offsets
    dispatched_below: int  # no entry at or above was ever delivered when the broker was closed cleanly


@dataclass(frozen=True, slots=True)
class HoleRecord(Record):
    """Offsets settled out of order, above the floor."""

    TABLE, KEY = "hole", ("queue_id", "start")
    queue_id: QueueId
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class DeliveryRecord(Record):
    """How often an entry was returned by a consumer (x-delivery-limit); only for an unsettled entry that was
    returned at least once.
    """

    TABLE, KEY = "delivery", ("queue_id", "offset")
    queue_id: QueueId
    offset: int
    count: int


@dataclass(frozen=True, slots=True)
class MessageIdsRecord(Record):
    """The ids of messages that one commit enqueued, for a queue that drops duplicates
    (``queue/message_ids.py``), at the offsets from ``first`` on.
    """

    TABLE, KEY = "message_ids", ("queue_id", "first")
    queue_id: QueueId
    first: int
    committed_at: int
    ids: bytes  # one after the other


@dataclass(frozen=True, slots=True)
class RunRecord(Record):
    """``count`` offsets of a queue from ``first`` on name rows of one block, in the same order.

    ``bitmap`` empty: the rows ``row .. row+count``. Otherwise its set bits (bit i of byte i//8, least
    significant first, counted from row ``row``) are the rows. ``sequence`` NO_SEQUENCE: each row of the
    block has its own commit sequence and time.
    """

    TABLE, KEY = "run", ("queue_id", "first")
    queue_id: QueueId
    first: int
    count: int
    block_id: BlockId
    row: int
    bitmap: bytes
    sequence: CommitSequence
    committed_at: int
    expires_us: int = NEVER  # no message of the block expires before, by an expiration of its own


@dataclass(frozen=True, slots=True)
class ClaimRecord(Record):
    """The durable, immutable result of ``latestOffset`` (S2): (app, whole start vector) -> end vector.

    ``ranges`` are concrete. ``skipped`` and ``redelivered`` store, per log, what was settled or may have been
    sent before the claim, as lists of [start, end], so that every replay reads the same rows.
    """

    TABLE, KEY = "claim", ("app_id", "lineage", "start", "vhost")
    app_id: str
    lineage: int  # counts the checkpoints that the source of this app has seen
    start: str  # canonical JSON of the start vector, with the queues as keys
    end: dict[str, int]
    ranges: dict[str, list[int]]
    skipped: dict[str, list[list[int]]]
    redelivered: dict[str, list[list[int]]]
    position: int  # order of the claims of an app
    vhost: str = VHOST


@dataclass(frozen=True, slots=True)
class OriginRecord(Record):
    """The resolved symbolic start, once per app, lineage and set of queues."""

    TABLE, KEY = "origin", ("app_id", "queues", "vhost")
    app_id: str
    queues: str  # canonical JSON list
    lineage: int
    start: dict[str, int]  # concrete vector
    passed: bool  # a later start than the symbolic one has been seen
    vhost: str = VHOST


@dataclass(frozen=True, slots=True)
class ReadRecord(Record):
    """Which claimed ranges a (query, batch) has read (S4). One row per claim, so that joins of two streams
    work.
    """

    TABLE, KEY = "read", ("app_id", "query_id", "batch_id", "queues", "vhost")
    app_id: str
    query_id: str
    batch_id: int
    queues: str
    ranges: dict[str, list[int]]
    vhost: str = VHOST


@dataclass(frozen=True, slots=True)
class LineageRecord(Record):
    """The checkpoints (query ids) that have committed or opened batches under an app, in order of
    appearance.
    """

    TABLE, KEY = "lineage", ("app_id", "query_id", "vhost")
    app_id: str
    query_id: str
    position: int
    first_batch: int
    vhost: str = VHOST


@dataclass(frozen=True, slots=True)
class AttemptRecord(Record):
    """An open batch attempt: the token under which tasks stage branches."""

    TABLE, KEY = "attempt", ("token", "vhost")
    token: str
    app_id: str  # "" for a batch write, which is a transaction without an app
    query_id: str
    batch_id: int
    opened_at: int  # or about when its last part arrived
    vhost: str = VHOST


@dataclass(frozen=True, slots=True)
class PartRecord(Record):
    """A part of a branch that one Spark task staged: durable, named, invisible.

    Rows are in block ``block_id``, or, if they are few, in ``inline`` (an Arrow IPC stream). ``routes`` maps
    queue ids (as text) to [row, count, bitmap in hex]: the rows of this part for the queue.
    """

    TABLE, KEY = "part", ("branch", "part", "vhost")
    branch: str
    part: int
    token: str
    kind: Literal["publish", "append", "merge", "delete", "overwrite", "after_commit"]
    target: dict[str, object]
    partition: int
    attempt: int
    rows: int
    size_bytes: int
    checksum: int
    block_id: BlockId
    inline: bytes
    routes: dict[str, list[Any]]
    unroutable: int
    examples: list[list[str]]  # at most three [exchange, routing_key] of unroutable messages
    vhost: str = VHOST
    expiration_us: int = NEVER  # the shortest that a message has of its own


@dataclass(frozen=True, slots=True)
class LedgerRecord(Record):
    """One decided micro-batch: the decision on which all later steps depend (docs/transactions.md)."""

    TABLE, KEY = "ledger", ("app_id", "sequence", "vhost")
    app_id: str
    sequence: int  # the app's batches, counted over all lineages; never decreases
    query_id: str
    batch_id: int
    token: str
    ranges: dict[str, list[int]]  # log -> [start, end]; empty if the batch consumed nothing
    messages: int  # consumed
    published: int
    committed_at: int
    commit_sequence: CommitSequence
    branches: list[Any]  # [kind, target, branch, rows] to be applied
    claim_position: int  # the app's newest claim at the decision
    applied: bool
    mirrored: bool
    vhost: str = VHOST
    offset_log: str = ""  # which offsets of sources that are not txmq the batch has; "": none; "?": unknown


@dataclass(frozen=True, slots=True)
class ReleaseRecord(Record):
    """An operator released a queue. Ledger entries up to this commit no longer fix where its next range
    starts.
    """

    TABLE, KEY = "released", ("queue", "vhost")
    queue: str
    commit_sequence: CommitSequence
    vhost: str = VHOST


@dataclass(frozen=True, slots=True)
class ReleaseNoteRecord(Record):
    """How an operator released a queue from an app last, and where the app was then (S6)."""

    TABLE, KEY = "release_note", ("app_id", "queue", "vhost")
    app_id: str
    queue: str
    vhost: str = VHOST
    queue_id: str = ""  # a later queue of this name has another one
    released_at: int = 0
    released_by: str = ""  # "": unknown
    interrupted: bool = False  # something was claimed and undecided, or decided and not applied
    position: int = 0  # of the app's newest claim
    ends: dict[str, int] = field(default_factory=dict)  # log -> first offset that the app had not consumed


@dataclass(frozen=True, slots=True)
class PreparedRecord(Record):
    """A prepared transaction (XA): durable, invisible, transferable, without a timeout. ``xid`` is its key
    (``access/users.py``).
    """

    TABLE, KEY = "prepared", ("xid",)
    xid: str
    prepared_at: int
    publishes: bytes  # Arrow IPC stream of MESSAGE_SCHEMA
    routes: list[Any]  # queue ids for each publish
    settles: list[Any]  # [queue_id, offset, outcome]
    vhost: str = VHOST


HEURISTICALLY = "heuristically_"


@dataclass(frozen=True, slots=True)
class OutcomeRecord(Record):
    """How a named transaction ended: committed or rolled back. ``xid``: its key (``access/users.py``)."""

    TABLE, KEY = "outcome", ("xid",)
    xid: str
    state: str  # committed, rolled_back; behind HEURISTICALLY until who named it has forgotten that
    decided_at: int


@dataclass(frozen=True, slots=True)
class ChannelCommitRecord(Record):
    """The last call by which a channel of another process has committed or prepared. Calls of a channel are
    numbered.
    """

    TABLE, KEY = "channel_commit", ("channel",)
    channel: str
    number: int
    decided_at: int


@dataclass(frozen=True, slots=True)
class ForgottenRecord(Record):
    """A horizon: records of this kind decided up to this time may have been forgotten."""

    TABLE, KEY = "forgotten", ("kind",)
    kind: str
    decided_at: int


@dataclass(frozen=True, slots=True)
class UserRecord(Record):
    """A user. ``password_hash`` is of ``password.py``; ``tags`` are sorted."""

    TABLE, KEY = "user", ("name",)
    name: str
    password_hash: str
    tags: list[str]


@dataclass(frozen=True, slots=True)
class PermissionRecord(Record):
    """What a user may do in a virtual host: a regular expression for each permission."""

    TABLE, KEY = "permission", ("user", "vhost")
    user: str
    vhost: str
    configure: str
    write: str
    read: str


@dataclass(frozen=True, slots=True)
class TopicPermissionRecord(Record):
    """Which routing keys of a topic exchange a user may publish and bind with."""

    TABLE, KEY = "topic_permission", ("user", "vhost", "exchange")
    user: str
    vhost: str
    exchange: str
    write: str
    read: str


@dataclass(frozen=True, slots=True)
class AppUserRecord(Record):
    """The owner of an app: who first claimed or opened it; "": the owner of the data directory."""

    TABLE, KEY = "app_user", ("vhost", "app_id")
    vhost: str
    app_id: str
    user: str


@dataclass(frozen=True, slots=True)
class WriteUserRecord(Record):
    """The owner of a batch write that is open: who staged its first part; "": the owner of the directory."""

    TABLE, KEY = "write_user", ("vhost", "token")
    vhost: str
    token: str
    user: str


@dataclass(frozen=True, slots=True)
class VhostRecord(Record):
    """A virtual host and its limits; -1: none. ``/`` has a record only if it has a limit. ``vhost_id``: the
    number of the commit that made it, which no other one of its name has.
    """

    TABLE, KEY = "vhost", ("name",)
    name: str
    vhost_id: int
    max_queues: int
    max_connections: int
    max_messages: int


@dataclass(frozen=True, slots=True)
class PolicyRecord(Record):
    """What names that ``pattern`` matches obey. ``kind``: policy, operator_policy."""

    TABLE, KEY = "policy", ("vhost", "kind", "name")
    vhost: str
    kind: str
    name: str
    pattern: str
    apply_to: str
    priority: int
    definition: dict[str, object]


@dataclass(frozen=True, slots=True)
class HistoryRecord(Record):
    """What some commits have done, in the order of their numbers ``first`` to ``last``
    (``history/rows.py``). ``packed``: 1, it took the place of several rows; 2: and is compressed.
    """

    TABLE, KEY = "history", ("number",)
    number: int
    first: int
    last: int
    ended_at: int
    packed: int
    commits: bytes


RECORDS: tuple[type[Record], ...] = (
    ExchangeRecord, QueueRecord, BindingRecord, ExchangeBindingRecord, ProgressRecord, HoleRecord,
    DeliveryRecord, MessageIdsRecord, RunRecord, ClaimRecord, OriginRecord, ReadRecord, LineageRecord,
    AttemptRecord, PartRecord, LedgerRecord, ReleaseRecord, ReleaseNoteRecord, PreparedRecord,
    OutcomeRecord, ChannelCommitRecord, ForgottenRecord, UserRecord, PermissionRecord,
    TopicPermissionRecord, AppUserRecord, WriteUserRecord, VhostRecord, PolicyRecord, HistoryRecord,
)  # fmt: skip


# -- JSON ----------------------------------------------------------------------------------------------------
def _tagged(value: object) -> dict[str, str]:
    if isinstance(value, Decimal):
        return {_DECIMAL: str(value)}
    if isinstance(value, bytes):
        return {_BYTES: value.hex()}
    raise TypeError(f"{value!r} cannot be stored")


# Returns one text for equal values: of a field that is a dict or a list, and of keys. It has what AMQP has
# and JSON has not: decimals, bytes. Raises TypeError, ValueError for a value without such a text.
canonical: Callable[[object], str] = json.JSONEncoder(
    sort_keys=True, separators=(",", ":"), allow_nan=False, default=_tagged
).encode


def parse(text: str) -> Any:
    """Returns the value of a canonical text. Raises ValueError."""
    return json.loads(text, object_hook=_untagged if "\\u0000" in text else None)


def _untagged(found: dict[str, object]) -> object:
    if len(found) == 1:
        ((tag, value),) = found.items()
        if tag == _DECIMAL and isinstance(value, str):
            return Decimal(value)
        if tag == _BYTES and isinstance(value, str):
            return bytes.fromhex(value)
    return found
