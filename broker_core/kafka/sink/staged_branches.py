"""Staged branches: their receipts, reading them by the offsets in their names, piece by piece, and deleting
staged records that no decision can name any more.

A task makes a receipt, which says where its records stand and what a decision must know before it reads them;
Spark carries it to the driver. No state is kept for a branch, an attempt or a token.

Not here: staging (``staging.py``), which branches are read, and when a batch is decided or applied.
Invariant: a branch is whole, or MissingBranch is raised: every staged record is there with its crc, under the
right key, with the right number, and the checksums of all of them are those of the receipt. A receipt names
only records that Kafka has acknowledged.
Invariant: only records that stand before the last winner of a decided batch are deleted, and none from the
first row on that is still to be applied. A later batch stages behind the winners of the one before, so what
stands before them belongs to attempts that can never be decided.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, get_args

import pyarrow as pa
import xxhash

from broker_core.arrow.outside import read_stream
from broker_core.arrow.parts import branch_checksum, signed
from broker_core.core import errors
from broker_core.core.errors import CheckpointMismatch, MissingBranch, OptionError
from broker_core.core.records import LedgerRecord, canonical
from broker_core.core.records import parse as parse_canonical
from broker_core.engine import BranchHeader, BranchKind, StagedBranch
from broker_core.kafka.cluster.client import Client
from broker_core.kafka.protocol.port import Isolation, TopicPartition, parse_log
from broker_core.kafka.record.compression import inflate
from broker_core.kafka.record.decode import LIMIT, header_pairs, plain_records
from broker_core.kafka.record.record_batch import Head, read_head

# headers of a staged record
TOKEN, APP, QUERY, BATCH, KIND = "token", "app", "query", "batch", "kind"
TOPIC, PARTITION, ROWS, NUMBER = "topic", "partition", "rows", "number"
CLIENT = "client"  # which process has staged it, for operators

_PLACE = re.compile(r"([^@]+)@([^@:]+):((?:\d+-\d+)?(?:,\d+-\d+)*)")


class Span(NamedTuple):
    """Offsets, both inclusive."""

    first: int
    last: int


class BranchPlace(NamedTuple):
    """Where a branch stands. As text it is ``uuid@_txmq.stage.app/3:17-19,24-24``."""

    branch: str
    log: TopicPartition
    spans: tuple[Span, ...]

    def __str__(self) -> str:
        spans = ",".join(f"{first}-{last}" for first, last in self.spans)
        return f"{self.branch}@{self.log}:{spans}"

    @classmethod
    def parse(cls, text: str) -> BranchPlace:
        """Raises OptionError."""
        found = _PLACE.fullmatch(text)
        if found is None:
            raise OptionError(f"{text!r} is not a branch on Kafka", "give a name as a ledger entry has it")
        spans = (span.split("-") for span in filter(None, found[3].split(",")))
        return cls(found[1], parse_log(found[2]), tuple(Span(int(first), int(last)) for first, last in spans))


@dataclass(frozen=True, slots=True)
class Receipt:
    """``logs``: where it publishes. ``reached``: its rows that reach a queue. ``examples``: at most three
    (exchange, routing key) of those that do not. ``topic_id``: of the stage topic, for rows that are applied
    later.
    """

    token: str
    identity: tuple[str, str, int]  # app, query, batch
    kind: BranchKind
    target: Mapping[str, object]
    place: BranchPlace
    records: int
    size_bytes: int
    reached: int = 0
    unroutable: int = 0
    examples: tuple[tuple[str, str], ...] = ()
    logs: tuple[TopicPartition, ...] = ()
    topic_id: uuid.UUID | None = None

    def text(self) -> str:
        values = {name: getattr(self, name) for name in self.__slots__}
        values |= {"place": str(self.place), "logs": [str(log) for log in self.logs]}
        values["topic_id"] = self.topic_id.hex if self.topic_id else ""
        return canonical(values)

    @classmethod
    def parse(cls, text: str) -> Receipt:
        """Raises OptionError for a text that :meth:`text` did not write."""
        try:
            values = parse_canonical(text)
            if values["kind"] not in get_args(BranchKind):
                raise ValueError(values["kind"])
            values |= {
                "identity": tuple(values["identity"]),
                "place": BranchPlace.parse(values["place"]),
                "examples": tuple((exchange, key) for exchange, key in values["examples"]),
                "logs": tuple(parse_log(log) for log in values["logs"]),
                "topic_id": uuid.UUID(str(found)) if (found := values.get("topic_id")) else None,
            }
            return cls(**values)
        except (ValueError, TypeError, LookupError, OptionError):
            raise OptionError(
                f"the receipt of a branch is damaged: {text[:100]!r}", "let Spark run the batch again"
            ) from None


class NamedBranch(NamedTuple):
    """A branch that a commit names, with its receipt."""

    branch: StagedBranch
    receipt: Receipt


def parse(branches: Iterable[StagedBranch]) -> list[NamedBranch]:
    """Returns the branches that have rows. Raises OptionError, MissingBranch for one without a receipt or
    that is named twice, also an empty one.
    """
    found = []
    seen: set[str] = set()
    for branch in branches:
        if branch.branch in seen:
            raise MissingBranch(
                f"branch {branch.branch} is named twice in one commit, which would publish its rows twice. "
                "Nothing was done; name the branch of each task once"
            )
        seen.add(branch.branch)
        if branch.receipt:
            found.append(NamedBranch(branch, Receipt.parse(branch.receipt)))
        elif branch.rows:  # an empty task stages nothing
            raise missing(branch, f"has no receipt for its {branch.rows} rows")
    return found


def require(
    staged: Sequence[NamedBranch], token: str, identity: tuple[str, str, int] | None
) -> Sequence[NamedBranch]:
    """Returns ``staged``. ``identity`` None: of a batch write.

    Raises MissingBranch for a branch that was staged under another token, CheckpointMismatch for one of
    another batch.
    """
    for branch, receipt in staged:
        if identity is not None and receipt.token == token and receipt.identity != identity:
            app, query, batch = receipt.identity
            raise CheckpointMismatch(
                f"branch {branch.branch} was staged for batch {batch} of query {query} and app {app!r}, not "
                f"for batch {identity[2]} of query {identity[1]} and app {identity[0]!r}"
            )
        if receipt.token != token or receipt.place.branch != branch.branch:
            raise missing(branch, f"was staged under token {receipt.token}, not {token}")
    return staged


def missing(branch: StagedBranch, why: str) -> MissingBranch:
    return MissingBranch(
        f"branch {branch.branch} of partition {branch.partition} {why}. Nothing was published; let Spark run "
        "the batch again"
    )


def of(header: BranchHeader) -> tuple[str, str, int]:
    return header.app_id, header.query_id, header.batch_id


def joined(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Returns rising spans with adjacent ones as one."""
    found: list[Span] = []
    for span in spans:
        if found and found[-1].last + 1 == span.first:
            found[-1] = Span(found[-1].first, span.last)
        else:
            found.append(span)
    return tuple(found)


logger = logging.getLogger(__name__)

PIECE_BYTES = 4 << 20  # of one fetch
LANE = "staged"  # large answers do not hold up what is published meanwhile
EVERY_BYTES = 64 << 20  # of staged rows; Kafka frees whole segments anyway, of 128 MiB


class StagedRecord(NamedTuple):
    branch: str
    value: bytes | memoryview
    headers: Mapping[str, str]

    @property
    def rows(self) -> int:
        return int(self.headers[ROWS])

    @property
    def log(self) -> TopicPartition:
        """Where it is published."""
        return TopicPartition(self.headers[TOPIC], int(self.headers[PARTITION]))


def read(client: Client, places: Iterable[BranchPlace]) -> Iterator[list[StagedRecord]]:
    """Yields the records of the places in pieces; those of one place in their order.

    Records of other branches between them are left out. Raises DataLoss where some were deleted,
    QueueNotFound.
    """
    spans_by_log: dict[TopicPartition, list[Span]] = {}
    for place in places:
        spans_by_log.setdefault(place.log, []).extend(place.spans)
    for spans in spans_by_log.values():
        spans.sort(reverse=True)  # the next one last
    positions = {log: spans[-1].first for log, spans in spans_by_log.items() if spans}
    patience = client.patience()
    with ThreadPoolExecutor(1, "txmq-staged") as ahead:
        fetched = ahead.submit(_fetched, client, dict(positions)) if positions else None
        while fetched is not None:
            found: list[StagedRecord] = []
            moved = False
            for log, data in fetched.result().items():
                spans, before = spans_by_log[log], positions.pop(log)
                position = before
                for head in _heads(data, str(log)):
                    found += _within(head, data, spans, log)
                    position = max(position, head.last_offset + 1)
                moved |= position > before
                if spans:
                    positions[log] = max(position, spans[-1].first)
            if not moved:  # a leader that is new has not caught up yet
                patience.wait(
                    errors.ConnectionFailed(
                        f"{', '.join(map(str, positions))}: what was staged is not shown yet"
                    )
                )
            # it comes while the caller publishes this piece
            fetched = ahead.submit(_fetched, client, dict(positions)) if positions else None
            if found:
                yield found
            if moved:  # the time of the caller does not count
                patience.renew()


def _fetched(client: Client, positions: Mapping[TopicPartition, int]) -> dict[TopicPartition, memoryview]:
    answers = client.fetching(
        positions, isolation=Isolation.READ_UNCOMMITTED, max_bytes=PIECE_BYTES, lane=LANE
    )()
    return {log: answer.records for log, answer in answers.items()}


def _heads(data: memoryview, log: str) -> Iterator[Head]:
    at = 0
    while (head := read_head(data, at, log)) is not None:
        yield head
        at = head.stop


def _within(head: Head, data: memoryview, spans: list[Span], log: TopicPartition) -> Iterator[StagedRecord]:
    """Yields the records of a batch that lie in the spans, and takes those off that end in it. Few and large,
    so one at a time is the fast way.
    """
    if not spans or head.last_offset < spans[-1].first:
        return
    content = inflate(head.codec, data[head.body], LIMIT)
    for record in plain_records(head, content, str(log)):
        while spans and spans[-1].last < record.offset:
            spans.pop()
        if spans and spans[-1].first <= record.offset:
            headers = {name: (value or b"").decode() for name, value in header_pairs(record.headers)}
            yield StagedRecord((record.key or b"").decode(), record.value or b"", headers)
    while spans and spans[-1].last <= head.last_offset:
        spans.pop()


class Check:
    """Whether what was read of the named branches is what their tasks staged."""

    def __init__(self, branches: Iterable[NamedBranch]) -> None:
        self._open = {each.branch.branch: each for each in branches if each.receipt.records}
        self._seen: dict[str, list[int]] = {branch: [] for branch in self._open}

    def take(self, record: StagedRecord) -> None:
        """Raises MissingBranch."""
        entry = self._open.get(record.branch)
        if entry is None:
            raise errors.MissingBranch(
                f"a staged record of branch {record.branch!r} is in the place of another one. Nothing "
                "was published; let Spark run the batch again"
            )
        seen = self._seen[record.branch]
        if record.headers.get(TOKEN) != entry.receipt.token or record.headers.get(NUMBER) != str(len(seen)):
            raise missing(entry.branch, f"is not what was staged: record {len(seen)} has {record.headers}")
        seen.append(signed(xxhash.xxh3_64_intdigest(record.value)))
        if len(seen) == entry.receipt.records:
            self._close(entry)

    def _close(self, entry: NamedBranch) -> None:
        name = entry.branch.branch
        if branch_checksum(self._seen[name]) != entry.branch.checksum:
            raise missing(entry.branch, "is not what was staged: its checksum differs")
        del self._open[name]

    def finish(self) -> None:
        """Raises MissingBranch for a branch that is not whole."""
        for name, entry in self._open.items():
            raise missing(
                entry.branch, f"has {len(self._seen[name])} of {entry.receipt.records} staged records"
            )


def rows_of(records: Iterable[StagedRecord]) -> Iterator[pa.RecordBatch]:
    """Yields the rows of an append or after_commit branch. Raises MissingBranch for a damaged record."""
    for record in records:
        try:
            rows = read_stream(record.value)
        except ValueError as error:
            raise errors.MissingBranch(
                f"a staged record of branch {record.branch!r} is damaged: {error}. Nothing of it is applied",
                "find the other writer of the stage topic",
            ) from error
        yield from rows


def decided_rows(client: Client, branches: Iterable[str]) -> Iterator[pa.RecordBatch]:
    """Yields the rows of branches of decided batches. Raises MissingBranch."""
    try:
        for place in map(BranchPlace.parse, branches):
            expected = sum(last - first + 1 for first, last in place.spans)
            for piece in read(client, [place]):
                yield from rows_of(record for record in piece if record.branch == place.branch)
                expected -= sum(record.branch == place.branch for record in piece)
            if expected:
                raise errors.DataLoss(f"{expected} staged records of branch {place.branch} are missing")
    except (errors.DataLoss, errors.QueueNotFound) as error:
        raise MissingBranch(
            f"rows of a decided batch are not in the stage topic any more ({error.summary}): they are "
            "applied and freed, or were deleted"
        ) from None


# -- deleting ------------------------------------------------------------------------------------------------


class Cleaner:
    """Cleans the stage topic of one app, now and then. A failure is left to the next time."""

    def __init__(self, client: Client, topic: str, every_bytes: int = EVERY_BYTES) -> None:
        self._client = client
        self._topic = topic
        self._every_bytes = every_bytes
        self._bytes = every_bytes  # decided and not cleaned; so a driver begins with cleaning
        self._ends: dict[TopicPartition, int] = {}  # below: no winner of a later batch
        self._may = False  # delete, as far as is known

    def require_right(self) -> None:
        """Raises AccessRefused where this user may not free staged rows: they would fill the disks."""
        if not self._may:
            self._client.delete_records({TopicPartition(self._topic, 0): 0})  # nothing stands there
            self._may = True

    def decided(self, won: Iterable[BranchPlace], unapplied: Iterable[LedgerRecord], size_bytes: int) -> None:
        """After a decision: its winners are published, or in ``unapplied``, which are all that are not
        applied.
        """
        self._note(won)
        self._bytes += size_bytes
        if self._bytes >= self._every_bytes:
            self.clean(unapplied)

    def applied(self, record: LedgerRecord, unapplied: Iterable[LedgerRecord]) -> None:
        """After a batch has reached its tables."""
        self._note(places_of(record))
        if self._bytes >= self._every_bytes:
            self.clean(unapplied)

    def _note(self, places: Iterable[BranchPlace]) -> None:
        for place in places:
            if place.log.topic == self._topic and place.spans:
                end = place.spans[-1].last + 1
                self._ends[place.log] = max(end, self._ends.get(place.log, 0))

    def clean(self, unapplied: Iterable[LedgerRecord]) -> None:
        before = dict(self._ends)
        for record in unapplied:
            for place in places_of(record):
                if place.log in before and place.spans:
                    before[place.log] = min(before[place.log], place.spans[0].first)
        before = {log: offset for log, offset in before.items() if offset}
        try:
            if before:
                self._client.delete_records(before)
        except errors.AccessRefused as refused:
            logger.warning("staged rows are not freed: %s", refused)
            return
        except (errors.ConnectionFailed, errors.KafkaError, errors.ChannelError):
            return
        except errors.DataLoss:
            pass  # the topic begins behind it already
        # what an unapplied row has held back is deleted another time
        self._ends = {log: end for log, end in self._ends.items() if before.get(log, end) != end}
        self._bytes = 0


def places_of(record: LedgerRecord) -> list[BranchPlace]:
    """Returns where the rows stand that are applied later, without those an operator has skipped."""
    return [BranchPlace.parse(name) for _, target, name, _ in record.branches if "skipped" not in target]
