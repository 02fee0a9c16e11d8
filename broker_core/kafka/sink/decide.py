"""Micro-batches of one app on Kafka: opened, decided, released (C1, C4).

The steps are numbered as in docs/commit_rules.md: what is above the commit of the transaction can be
discarded, what is below it can be repeated.
Not here: the rules (``micro_batch/ledger.py``), when memory is believed (``decisions.py``), staging
(``staging.py``).
Invariant: one transaction holds everything that a batch publishes and its ledger entry.
"""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal

from broker_core.core import errors
from broker_core.core.failpoint import here
from broker_core.core.ids import NO_SEQUENCE
from broker_core.core.records import LedgerRecord
from broker_core.engine import REFUSED_ROWS, Committed, OnNewCheckpoint, Opened, StagedBranch
from broker_core.kafka.cluster.client import Client
from broker_core.kafka.journal.journal import AppProgress
from broker_core.kafka.protocol.port import Isolation, TopicPartition
from broker_core.kafka.sink import staged_branches
from broker_core.kafka.sink.decisions import Changes, Decisions, FencedApp
from broker_core.kafka.sink.producer import TIMEOUT_MS, ProducerTransaction, ReadyBatch
from broker_core.kafka.sink.staged_branches import Cleaner, NamedBranch, missing, parse, require
from broker_core.micro_batch.claims.reads import require_range, unread
from broker_core.micro_batch.ledger import Ledger, MicroBatch, new_entry, other_decision, public
from broker_core.micro_batch.opening import open_batch
from broker_core.micro_batch.unapplied import note, note_of

OnUnroutable = Literal["fail", "drop"]

LONGEST_MS = 900_000  # Kafka's default of transaction.max.timeout.ms
SLOWEST = 20_000  # bytes that are published in a millisecond, at least
_EXAMPLES = 3
DELETED = "was deleted from the stage topic"


class Decider:
    """Opens and decides the batches of one app, one after another."""

    def __init__(
        self, client: Client, decisions: Decisions, progress: AppProgress, *, cleaner: Cleaner
    ) -> None:
        self._client = client
        self._decisions = decisions
        self._ledger = decisions.ledger
        self._progress = progress
        self._cleaner = cleaner
        self._app = decisions.app_id
        self.fenced = self._fenced = FencedApp(client, decisions)

    # -- C1 --------------------------------------------------------------------------------------------------
    def open(self, batch: MicroBatch, on_new: OnNewCheckpoint, token: str, offset_log: str = "") -> Opened:
        """Opens a batch. Raises CheckpointMismatch, BatchGap."""

        def rule(changes: Changes) -> LedgerRecord | None:
            return open_batch(self._ledger, changes, batch, on_new, offset_log)

        def attempt() -> Opened:
            lineage = Changes()

            def ask() -> LedgerRecord | None:
                nonlocal lineage
                found, lineage = self._decisions.trial(rule)
                return found

            # 1. own the app; 2. decided? next? 3. again behind a fence, unless it is new
            found = self._fenced.answer(ask)
            here("kafka.open.judged")
            if found is not None:
                return Opened(found.sequence, "", self._already(found).entry)
            # 4. a new lineage has a transaction of its own
            if lineage:
                self._written(lineage)
            here("kafka.open.opened")
            return Opened(self._ledger.next_sequence(self._app), token)

        return self._fenced.patiently(attempt)

    # -- C4 --------------------------------------------------------------------------------------------------
    def commit(
        self,
        batch: MicroBatch,
        token: str,
        branches: Sequence[StagedBranch],
        *,
        on_unroutable: OnUnroutable,
        offset_log: str = "",
    ) -> Committed:
        """Decides a batch. Raises CheckpointMismatch, BatchGap, MissingBranch, Unroutable,
        TransactionTooLarge, QueueNotFound, OptionError.
        """
        staged = parse(branches)

        def attempt() -> Committed:
            ranges: dict[str, list[int]] = {}

            def ask() -> LedgerRecord | None:
                nonlocal ranges
                ranges = self._refreshed().ranges_read(*batch[1:])
                require_range(offset_log, branches, reads=bool(ranges))
                entry = self._ledger.decided(batch, offset_log)
                if entry is None:
                    self._ledger.require_ranges(batch, ranges, self._progress.settled)
                else:
                    _require_equal(entry, ranges, self._progress.position())
                return entry

            # 1. own the app, with an epoch whose transaction may last long enough
            lasting_ms = timeout_ms(staged)
            # 2. decided before? 3. order and ranges
            entry = self._fenced.answer(ask, lasting_ms)
            here("kafka.decide.judged")
            if entry is not None:
                return self._already(entry)
            # 4. what the receipts say, before anything is sent
            won = require(staged, token, batch)
            if on_unroutable == "fail":
                require_routable(won)
            self._decisions.learn(self._progress)
            position = self._progress.position()
            record = _new_entry(self._ledger, batch, token, ranges, won, position, offset_log)
            _, changes = self._decisions.trial(lambda changes: self._ledger.decide(changes, record))
            try:
                self._publish(won, changes)
            except errors.MissingBranch:
                # the driver that overtook this one has decided the batch, and cleaned up behind it?
                self._fenced.fence(lasting_ms)
                entry = ask()
                if entry is None:
                    raise
                return self._already(entry)
            # 9. free what no decision can name any more
            self._cleaner.decided(
                (each.receipt.place for each in won), self._ledger.unapplied(self._app), _bytes(won)
            )
            here("kafka.decide.cleaned")
            return Committed(public(record), already=False)

        return self._fenced.patiently(attempt)

    def _already(self, entry: LedgerRecord) -> Committed:
        self._decisions.learn(self._refreshed())
        return Committed(public(self._ledger.by_token(entry.token) or entry), already=True)

    def _publish(self, won: Sequence[NamedBranch], changes: Changes) -> None:
        """Steps 5 to 8: one transaction of the winners and the ledger entry."""
        changes.logs = tuple({log for each in won for log in each.receipt.logs})
        decision = changes.encoded()
        _require_there(self._client, [each for each in won if each.receipt.kind != "publish"])
        published = [each for each in won if each.receipt.logs]
        # 5. all logs join, where Kafka needs it
        self._fenced.lost_ends.require_none(changes.logs)
        transaction = self._fenced.epoch.begin()
        try:
            transaction.join([log for each in published for log in each.receipt.logs] + [self._decisions.log])
            here("kafka.decide.joined")
            # 6. the winners
            last: dict[TopicPartition, ReadyBatch] = {}
            for batches in rounds(self._client, published):
                if last:
                    transaction.append(last)
                last = batches
            here("kafka.decide.published")
            # 7. the decision, with the last of them
            transaction.append({**last, self._decisions.log: decision})
            transaction.wait()
            here("kafka.decide.entered")
            # 8. the commit point
            transaction.commit()
        except (errors.ConnectionFailed, errors.TransactionState):
            raise  # the next fence ends it, whatever has become of it
        except Exception:
            end_quietly(transaction)
            raise
        here("kafka.decide.committed")
        self._take(changes)

    # -- C5 --------------------------------------------------------------------------------------------------
    def publish_refused(
        self, sequence: int, branches: Sequence[str], rows: str, token: str, staged: Sequence[StagedBranch]
    ) -> str:
        """Publishes what is staged as a batch write, and records ``rows`` in the ledger entry. Returns what
        is recorded. Raises UnknownTransaction, MissingBranch, Unroutable.
        """
        receipts, batch = parse(staged), (self._app, sequence, set(branches))

        def attempt() -> str:
            # 1. what was recorded before, by whom ever
            self._fenced.fence(timeout_ms(receipts))
            self._decisions.learn(self._refreshed())
            there = note_of(self._ledger, *batch, REFUSED_ROWS)
            if there is not None:
                return there
            # 2. the rows and the record, in one transaction
            won, at_us = require(receipts, token, None), time.time_ns() // 1000
            require_routable(won)
            _, changes = self._decisions.trial(
                lambda changes: note(self._ledger, changes, *batch, REFUSED_ROWS, at_us, rows)
            )
            self._publish(won, changes)
            return rows

        return self._fenced.patiently(attempt)

    def fence(self) -> None:
        """Ends an open transaction of the app, and takes in what is decided."""
        self._fenced.patiently(self._fenced.fence)

    # -- S6 --------------------------------------------------------------------------------------------------
    def release(self, queue: str, note: Callable[[Mapping[str, int]], None]) -> None:
        """Releases a queue from its app: the running driver loses its epoch. Raises PreconditionFailed. Its
        topic may be deleted.

        1. behind a fence, ``note`` with where each decided range ended; 2. the ledger; 3. the claims. A
        release that is cut off is done again.
        """

        def rule(changes: Changes) -> None:
            last = self._ledger.last(self._app)
            for log in self._progress.logs(queue):
                self._ledger.release(changes, log, last.commit_sequence if last else NO_SEQUENCE)

        def attempt() -> None:
            self._fenced.fence()
            note(self._decisions.consumed())
            here("kafka.release.noted")
            _, changes = self._decisions.trial(rule)
            self._written(changes)

        if queue not in self._refreshed().queues():
            raise errors.PreconditionFailed(
                f"queue {queue!r} is not claimed by app {self._app!r}; `txmq app list` lists the claims"
            )
        self._fenced.patiently(attempt)
        here("kafka.release.decided")
        self._progress.release(queue)

    def _written(self, changes: Changes) -> None:
        self._fenced.write(changes)
        self._take(changes)

    def _take(self, changes: Changes) -> None:
        self._decisions.take(changes)
        if changes.pruned:
            self._progress.forget(changes.pruned)

    def _refreshed(self) -> AppProgress:
        self._progress.refresh()
        return self._progress


def _new_entry(
    ledger: Ledger,
    batch: MicroBatch,
    token: str,
    ranges: dict[str, list[int]],
    won: Sequence[NamedBranch],
    claim_position: int,
    offset_log: str,
) -> LedgerRecord:
    """Returns the ledger entry of a batch that publishes and applies ``won``, as of now."""
    return new_entry(
        ledger,
        batch,
        token,
        ranges,
        [
            [each.receipt.kind, dict(each.receipt.target), str(each.receipt.place), each.branch.rows]
            for each in won
            if each.receipt.kind != "publish"
        ],
        messages=sum(end - start for start, end in ranges.values()),
        published=sum(each.receipt.reached for each in won),
        committed_at=time.time_ns() // 1000,
        claim_position=claim_position,
        offset_log=offset_log,
    )


def rounds(client: Client, won: Iterable[NamedBranch]) -> Iterator[dict[TopicPartition, ReadyBatch]]:
    """Yields staged batches, one for each log at a time: Kafka refuses two in a request. At most a few pieces
    are in memory. Raises MissingBranch, before the last round is yielded where a branch is not whole.
    """
    chosen = list(won)
    check = staged_branches.Check(chosen)
    heads: dict[TopicPartition, ReadyBatch] = {}
    try:
        for piece in staged_branches.read(client, [each.receipt.place for each in chosen]):
            waiting: dict[TopicPartition, deque[ReadyBatch]] = {}
            for record in piece:
                check.take(record)
                waiting.setdefault(record.log, deque()).append(ReadyBatch(record.value, record.rows))
            while waiting:
                if heads:
                    yield heads
                heads = {log: queue.popleft() for log, queue in waiting.items()}
                waiting = {log: queue for log, queue in waiting.items() if queue}
    except (errors.DataLoss, errors.QueueNotFound) as error:
        raise errors.MissingBranch(
            f"staged rows were deleted ({error.summary}). Nothing was published; let Spark run the batch "
            "again"
        ) from None
    check.finish()
    if heads:
        yield heads


def end_quietly(transaction: ProducerTransaction) -> None:
    """So that readers do not wait for the next fence; where it fails, they do."""
    try:
        transaction.abort()
    except errors.TxmqError:
        pass


def _require_equal(entry: LedgerRecord, ranges: dict[str, list[int]], claim_position: int) -> None:
    """Raises CheckpointMismatch unless a decided batch has read again what it consumed (S4)."""
    if unread(entry, ranges, claim_position):
        return
    if ranges and {log: list(span) for log, span in entry.ranges.items()} != ranges:
        raise other_decision(entry, ranges)


def require_routable(won: Iterable[NamedBranch]) -> None:
    count = 0
    examples: list[tuple[str, str]] = []
    for each in won:
        count += each.receipt.unroutable
        examples += each.receipt.examples
    if count:
        names = ", ".join(
            f"exchange {exchange!r} routing key {key!r}" for exchange, key in examples[:_EXAMPLES]
        )
        raise errors.Unroutable(
            f"{count} messages of the transaction reach no queue ({names}); nothing was published. Bind a "
            "queue, or set onUnroutable=drop"
        )


def _require_there(client: Client, found: Sequence[NamedBranch]) -> None:
    """Raises MissingBranch where rows that are applied later were deleted, also with their topic: one that
    was made again has other rows at their offsets. A fetch from behind the rows names the topic by its id at
    that time, and its answer has the begin of the log: one request, which seldom brings rows.
    """
    there = [each for each in found if each.receipt.records]
    ids: dict[str, uuid.UUID] = {}
    behind: dict[TopicPartition, int] = {}
    for branch, receipt in there:
        place, topic_id = receipt.place, receipt.topic_id
        if not place.spans or not topic_id or ids.setdefault(place.log.topic, topic_id) != topic_id:
            raise missing(branch, DELETED)
        behind[place.log] = max(behind.get(place.log, 0), place.spans[-1].last + 1)
    begins = _begins(client, behind, ids) if there else {}
    for branch, receipt in there:
        begin = begins.get(receipt.place.log)
        if begin is None or receipt.place.spans[0].first < begin:
            raise missing(branch, DELETED)


def _begins(
    client: Client, behind: Mapping[TopicPartition, int], ids: Mapping[str, uuid.UUID]
) -> dict[TopicPartition, int]:
    """Returns the begins of logs; none where one ends before its offset, or a topic has another id."""
    patience = client.patience()
    while True:
        try:
            found = client.fetch(
                behind, ids=ids, isolation=Isolation.READ_UNCOMMITTED, max_bytes=1, lane=staged_branches.LANE
            )
            return {log: each.start for log, each in found.items()}
        except errors.DataLoss:
            return {}
        except errors.QueueNotFound as gone:
            if not _same(client, ids):
                return {}
            patience.wait(gone)  # a node that does not know the topic yet


def _same(client: Client, ids: Mapping[str, uuid.UUID]) -> bool:
    """Whether the topics have these ids."""
    try:
        return all(client.topic(name, fresh=True).id == topic_id for name, topic_id in ids.items())
    except errors.QueueNotFound:
        return False


def _bytes(won: Iterable[NamedBranch]) -> int:
    return sum(each.receipt.size_bytes for each in won)


def timeout_ms(found: Iterable[NamedBranch]) -> int:
    """Returns how long the transaction of these branches may be open. Raises TransactionTooLarge."""
    size = _bytes(each for each in found if each.receipt.logs)
    need = max(TIMEOUT_MS, 3 * size // SLOWEST)
    if need > LONGEST_MS:
        raise errors.TransactionTooLarge(
            f"a micro-batch that publishes {size} bytes: a transaction of Kafka is open for at most "
            f"{LONGEST_MS // 60_000} minutes, which may be too short",
            "read fewer rows in a batch (maxOffsetsPerTrigger)",
        )
    return need
