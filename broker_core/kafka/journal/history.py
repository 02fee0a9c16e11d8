"""The history of an app's journal: which changes were accepted, and what they and the facts add up to.

Pure: records go in one by one, in the order of the log. A *change* is one record batch of numbered records:
it was computed from the state after version v, says v + 1, and is accepted if no other change said so before
it. Else it is void. A *fact* has no version: it is true whatever stands around it, so facts commute.

Not here: reading and writing the log (``journal.py``).
Invariant: two histories of one log agree on every claim, even where compaction has removed records between,
unless one comes so late that it misses tombstones (``delete.retention.ms``). A key is used once, so no void
record removes an accepted one. What a writer may remove (``garbage``) names void records before accepted
ones, and never all records of the newest change: before a void record a reader finds a change as new.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from broker_core.core.errors import KafkaError
from broker_core.core.records import ClaimRecord, OriginRecord, ReadRecord, Record, ReleaseNoteRecord
from broker_core.core.undo import Undo
from broker_core.kafka.topics.entry import Entry, Row, dumps, fields_of, loads, record_of
from broker_core.micro_batch.claims.claim import Claims

T = TypeVar("T")

CHANGE, READ = "change/", "read/"
KEPT_READS = 1000  # per app, for late drivers
GARBAGE = 64  # so many records are removed with the next change


@dataclass(frozen=True, slots=True)
class PositionRecord(Record):
    """How far an app has read a queue, under the id that the topic had at its first claim."""

    TABLE, KEY = "position", ("app_id", "queue")
    app_id: str
    queue: str
    topic_id: str
    acked: dict[str, int]  # log -> first offset that is not acknowledged


Key = tuple[type[Record], tuple[object, ...]]

KINDS: dict[str, type[Record]] = {
    kind.TABLE: kind for kind in (ClaimRecord, OriginRecord, ReadRecord, ReleaseNoteRecord, PositionRecord)
}


class Proposal:
    """The records of a change that is not accepted yet: the sink of the rules."""

    def __init__(self) -> None:
        self.records: list[Record | Key] = []  # a key: that record is dropped

    def put(self, record: Record) -> None:
        self.records.append(record)

    def drop(self, kind: type[Record], key: tuple[object, ...]) -> None:
        self.records.append((kind, key))


class History:
    """What one app's journal adds up to, up to some position."""

    def __init__(self, app_id: str) -> None:
        self._app_id = app_id
        self._undo = Undo()
        self.claims = Claims(undo=self._undo)
        self.positions: dict[str, PositionRecord] = {}  # by queue
        self.facts: dict[str, object] = {}  # by key; without the reads
        self.version = 0  # of the newest accepted change
        self._newest = ""  # its id
        self._drops: list[str] = []  # the keys of its drops
        self._current: dict[str, Record] = {}  # by key: what holds now
        self._keys: dict[Key, str] = {}  # of what changes have put
        self._reads: dict[tuple[object, ...], list[str]] = {}  # keys of facts by the key of their record
        self._void: dict[str, None] = {}  # keys without a tombstone, oldest first
        self._stale: dict[str, None] = {}  # as above: of accepted records that hold no more

    # -- reading ---------------------------------------------------------------------------------------------

    def apply(self, rows: Iterable[Row]) -> set[str]:
        """Takes in the next records; returns the ids of the changes that were accepted. A log from its
        beginning goes through :func:`surviving` before.
        """
        accepted: set[str] = set()
        for row in rows:
            key = (row.key or b"").decode(errors="replace")
            if row.value is None:
                self._remove(key)
            elif not key.startswith(CHANGE):
                self._fact(key, loads(row.value))
            elif self._accepts(key, found := loads(row.value)):
                accepted.add(self._newest)
                self._take(key, found)
            else:
                self._void[key] = None
        self._undo.begin()  # nothing of this is taken back
        return accepted

    def _accepts(self, key: str, found: object) -> bool:
        if not isinstance(found, dict) or not isinstance(found.get("version"), int):
            raise _other_version(f"a change {found!r}")
        change = key.removeprefix(CHANGE).partition("/")[0]
        if change == self._newest:
            return True
        if found["version"] <= self.version:
            return False
        self.version, self._newest = found["version"], change
        # the version is higher than the position of every claim before, also of those that are gone
        self.claims.raise_position(self._app_id, self.version - 1)
        # until now they have kept the version, and the records that they drop from coming back
        self._stale |= dict.fromkeys(self._drops)
        self._drops = []
        return True

    def _take(self, key: str, found: Mapping[str, Any]) -> None:
        if "drop" in found:
            self._supersede(found["drop"])
            self._drops.append(key)
            return
        table, values = found.get("put") or ("", {})
        if table not in KINDS:
            raise _other_version(f"a record of the kind {table!r}")
        record = record_of(KINDS[table], values)
        natural = (type(record), record.key)
        if natural in self._keys:
            self._supersede(self._keys[natural])
        if isinstance(record, ReadRecord):
            for fact in list(self._reads.get(record.key, ())):
                self._supersede(fact)
        self._keys[natural] = key
        self._hold(key, record)

    def _fact(self, key: str, value: object) -> None:
        if not key.startswith(READ):
            self.facts[key] = value
        elif key not in self._current:
            record = record_of(ReadRecord, value)
            self._stale.pop(key, None)  # a late task wrote it once more
            self._reads.setdefault(record.key, []).append(key)
            self._hold(key, record)

    def _hold(self, key: str, record: Record) -> None:
        self._current[key] = record
        if isinstance(record, PositionRecord):
            self.positions[record.queue] = record
        elif isinstance(record, ClaimRecord | OriginRecord | ReadRecord | ReleaseNoteRecord):
            self.claims.apply(record)

    def _supersede(self, key: str) -> None:
        """An accepted change has replaced or dropped what stands under ``key``."""
        if self._let_go(key):
            self._stale[key] = None

    def _remove(self, key: str) -> None:
        """A tombstone: of what is void or held no more, or of an old fact. This history may still hold it,
        if it comes late and the change that dropped it is compacted away.
        """
        self._void.pop(key, None)
        self._stale.pop(key, None)
        self.facts.pop(key, None)
        self._let_go(key)

    def _let_go(self, key: str) -> bool:
        record = self._current.pop(key, None)
        if record is None:
            return False
        if key.startswith(READ):
            self._reads[record.key].remove(key)
            if not self._reads[record.key]:
                del self._reads[record.key]
        else:
            del self._keys[(type(record), record.key)]
        if isinstance(record, PositionRecord):
            del self.positions[record.queue]
        elif isinstance(record, ClaimRecord | OriginRecord | ReadRecord | ReleaseNoteRecord):
            self.claims.remove(record)
        return True

    # -- writing ---------------------------------------------------------------------------------------------

    def compute(self, work: Callable[[Claims, Proposal], T]) -> tuple[T, Proposal]:
        """Returns the result of ``work`` and what it proposes. Its effect on the claims is taken back,
        because a change counts only where it stands in the log.
        """
        self._undo.begin()
        proposal = Proposal()
        try:
            return work(self.claims, proposal), proposal
        finally:
            self._undo.roll_back()

    def entries(self, proposal: Proposal, change_id: str) -> list[Entry]:
        """Returns ``proposal`` as the records of one batch, with the garbage that goes with it."""
        found: list[Entry] = []
        own: dict[Key, str] = {}
        for record in proposal.records:
            key = f"{CHANGE}{change_id}/{len(found)}"
            value: dict[str, object] = {"version": self.version + 1}
            if isinstance(record, Record):
                value["put"] = [record.TABLE, fields_of(record)]
                own[(type(record), record.key)] = key
            elif (target := own.get(record) or self._keys.get(record)) is not None:
                value["drop"] = target
            else:
                continue
            found.append(Entry(key, dumps(value)))
        return [*found, *(Entry(key, None) for key in self.garbage())] if found else []

    def garbage(self) -> list[str]:
        """Returns the keys that get a tombstone now, in the order in which they must."""
        garbage = [*self._void, *self._stale, *self._old_reads()]
        return garbage if len(garbage) >= GARBAGE else []

    def _old_reads(self) -> Iterator[str]:
        reads = [key for keys in self._reads.values() for key in keys]
        return iter(reads[: max(0, len(reads) - KEPT_READS)])


def read_key(record: ReadRecord, digest: str) -> str:
    """Returns the key of the fact of a read: one for each (query, batch) and ranges, in any process."""
    return f"{READ}{record.query_id}/{record.batch_id}/{digest}"


def surviving(rows: Sequence[Row]) -> list[Row]:
    """Returns a log as compaction leaves it. A reader that begins there must see no record that has a
    tombstone: what made it void may be gone already.
    """
    last = {row.key: row.offset for row in rows}
    return [row for row in rows if last[row.key] == row.offset and row.value is not None]


def _other_version(what: str) -> KafkaError:
    return KafkaError(
        f"the journal has {what}, which this version cannot read",
        "use the version that wrote it, or a newer one",
    )
