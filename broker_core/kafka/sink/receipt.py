"""The receipt of a staged branch: where its records stand, and what a decision must know before it reads
them.

A task makes it, Spark carries it to the driver. No state is kept for a branch, an attempt or a token.
Invariant: a receipt names only records that Kafka has acknowledged.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, get_args

from broker_core.engine import BranchHeader, BranchKind, StagedBranch
from broker_core.errors import LineageConflict, MissingBranch, OptionError
from broker_core.kafka.names import parse_log
from broker_core.kafka.protocol.port import TopicPartition

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
        return json.dumps(values, separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> Receipt:
        """Raises OptionError for a text that :meth:`text` did not write."""
        try:
            values = json.loads(text)
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

    Raises MissingBranch for a branch that was staged under another token, LineageConflict for one of another
    batch.
    """
    for branch, receipt in staged:
        if identity is not None and receipt.token == token and receipt.identity != identity:
            app, query, batch = receipt.identity
            raise LineageConflict(
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
