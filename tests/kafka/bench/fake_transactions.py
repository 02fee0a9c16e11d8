"""The transaction coordinator of FakeKafka: the states of a transactional id, for transaction.version 1 and 2
(KIP-98, KIP-890).

Not here: requests, nodes, and when markers are written.
Invariant: only the highest epoch of a producer id changes anything, and each transaction ends by one
decision.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from broker_core.kafka.protocol.codes import Code
from broker_core.kafka.protocol.port import Producer, TopicPartition

MAX_TIMEOUT_MS = 900_000
MAX_EPOCH = 32_767


@dataclass
class FakeTransaction:
    """What is known of one transactional id."""

    producer: Producer
    timeout_s: float
    state: str = "Empty"
    logs: set[TopicPartition] = field(default_factory=set)
    began: float = 0.0
    committing: bool = False

    @property
    def ending(self) -> bool:
        return self.state.startswith("Prepare")

    @property
    def ended(self) -> bool:
        return self.state.startswith("Complete")


class FakeTransactions:
    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._next_id = 1000
        self.all: dict[str, FakeTransaction] = {}

    def new_id(self) -> Producer:
        self._next_id += 1
        return Producer(self._next_id, 0)

    def init(self, key: str, timeout_ms: int) -> tuple[Code, Producer]:
        none = Producer(-1, -1)
        if not 0 < timeout_ms <= MAX_TIMEOUT_MS:
            return Code.INVALID_TRANSACTION_TIMEOUT, none
        known = self.all.get(key)
        if known is None:
            self.all[key] = FakeTransaction(self.new_id(), timeout_ms / 1000)
            return Code.NONE, self.all[key].producer
        if known.state == "Ongoing":
            self._bump(known)  # so the one before can write no more
            self._prepare(known, commit=False)
        if known.ending:
            return Code.CONCURRENT_TRANSACTIONS, none
        self._bump(known)
        known.state, known.timeout_s = "Empty", timeout_ms / 1000
        return Code.NONE, known.producer

    def _bump(self, known: FakeTransaction) -> None:
        producer = known.producer
        known.producer = (
            Producer(producer.id, producer.epoch + 1) if producer.epoch < MAX_EPOCH - 1 else self.new_id()
        )

    def _refused(self, key: str, producer: Producer) -> Code:
        known = self.all.get(key)
        if known is None or known.producer.id != producer.id:
            return Code.INVALID_PRODUCER_ID_MAPPING
        if known.producer.epoch != producer.epoch:
            return Code.PRODUCER_FENCED
        return Code.CONCURRENT_TRANSACTIONS if known.ending else Code.NONE

    def add(self, key: str, producer: Producer, logs: set[TopicPartition]) -> Code:
        if refused := self._refused(key, producer):
            return refused
        known = self.all[key]
        if known.state != "Ongoing":
            known.state, known.began, known.logs = "Ongoing", self._now(), set()
        known.logs |= logs
        return Code.NONE

    def may_write(self, key: str, producer: Producer, log: TopicPartition) -> Code:
        """Before transaction.version 2: the log must have joined (KIP-890, part 1)."""
        if refused := self._refused(key, producer):
            return refused
        known = self.all[key]
        return Code.NONE if known.state == "Ongoing" and log in known.logs else Code.TRANSACTION_ABORTABLE

    def end(self, key: str, producer: Producer, *, commit: bool, bump: bool) -> tuple[Code, Producer]:
        known = self.all.get(key)
        decided = known is not None and (known.ended or known.ending) and known.committing == commit
        if (
            bump
            and known is not None
            and decided
            and (known.producer.id, known.producer.epoch - 1) == producer
        ):
            # the same question again, and nothing was opened since
            return (Code.CONCURRENT_TRANSACTIONS if known.ending else Code.NONE), known.producer
        if refused := self._refused(key, producer):
            return refused, producer
        assert known is not None
        if known.state == "Ongoing":
            if bump:
                self._bump(known)
            self._prepare(known, commit=commit)
        elif bump and known.state != "Ongoing" and not commit:
            self._bump(known)
            known.state, known.committing = "CompleteAbort", False
        elif not decided:
            return Code.INVALID_TXN_STATE, producer
        return Code.NONE, known.producer

    def _prepare(self, known: FakeTransaction, *, commit: bool) -> None:
        known.state, known.committing = ("PrepareCommit" if commit else "PrepareAbort"), commit

    def expire(self) -> None:
        """Aborts what is open for longer than its timeout, and lets its producer write no more."""
        for known in self.all.values():
            if known.state == "Ongoing" and self._now() - known.began > known.timeout_s:
                self._bump(known)
                self._prepare(known, commit=False)

    def complete(self, write: Callable[[TopicPartition, Producer, bool], None]) -> None:
        """Writes the markers of all that is decided."""
        for known in self.all.values():
            if known.ending:
                for log in sorted(known.logs):
                    write(log, known.producer, known.committing)
                known.state = "CompleteCommit" if known.committing else "CompleteAbort"
                known.logs = set()
