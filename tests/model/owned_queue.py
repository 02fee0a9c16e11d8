"""One queue on disk, with all that may happen to it, against a naive model: a list of messages.

Channels hold, ack, give back and reject while nobody owns the queue; an app claims, reads, decides,
acknowledges, starts anew and is released; messages expire, overflow and are purged; open blocks are sealed,
segments compacted; browsers read in between; the broker is closed or killed at any moment. The model knows no
offsets, runs, blocks or records.
Invariant: a claim reads the same rows until it is acknowledged, and the queue shows what the model holds,
after every step.
"""

from __future__ import annotations

import shutil
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from broker_core.broker.transaction import transaction as transaction_module
from broker_core.core import block as block_module
from broker_core.core.errors import PreconditionFailed, ResourceLocked
from broker_core.engine import START, Limit, Origin, ReadTicket
from broker_core.message.properties import Properties
from broker_core.node.channel import LocalChannel
from broker_core.node.engine import EmbeddedEngine
from broker_core.node.local import LocalBroker
from broker_core.store.durable import DurableStore
from tests.reading import oldest, purgeable

APP = "app"
TTL_S = 5
DEAD = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}
SHAPES: list[dict[str, Any]] = [
    {},
    DEAD,
    {"x-message-ttl": TTL_S * 1000, **DEAD},
    {"x-max-length": 4, **DEAD},
    {"x-max-length": 4, "x-message-ttl": TTL_S * 1000},
    {"x-max-length-bytes": 120, **DEAD},
    {"x-max-length": 6, "x-overflow": "reject-publish"},
    {"x-max-length-bytes": 200, "x-overflow": "reject-publish", "x-message-ttl": TTL_S * 1000, **DEAD},
    {"x-max-priority": 2},
    {"x-max-priority": 2, "x-message-ttl": TTL_S * 1000, **DEAD},
    {"x-queue-type": "quorum"},
]


@dataclass(eq=False)
class Entry:
    body: bytes
    transaction: int
    transient: bool
    priority: int
    deadline_us: int | None
    own_us: int | None = None  # by its own expiration
    state: str = "ready"  # held, settled
    claimed: bool = False


@dataclass(eq=False)
class Claim:
    start: Any
    end: Any
    ranges: Any
    query: str
    batch: int
    entries: list[Entry]
    cursor: int  # where the next claim begins, in the list
    decided: bool = False
    made: bool = True  # since the broker was opened


@dataclass
class App:
    """``ledger``: its sink decides; otherwise its acknowledgements consume."""

    ledger: bool
    origin: Origin
    start: int  # what lies before in the list is skipped
    query: str = field(default_factory=lambda: uuid.uuid4().hex)
    claims: list[Claim] = field(default_factory=list)  # that are not let go of, oldest first
    last: Claim | None = None  # of this lineage
    batches: int = 0
    passed: bool = False  # something of this lineage is consumed: from then on a start is a new checkpoint


class Clock:
    def __init__(self) -> None:
        self.now_us = 1_700_000_000_000_000

    def __call__(self) -> int:
        return self.now_us


class OwnedQueue(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self._tuned = (transaction_module.INBOX_ROWS, block_module.OPEN_ROWS)
        # small ones: every history has blocks of each kind
        transaction_module.INBOX_ROWS, block_module.OPEN_ROWS = 6, 7
        self.path = Path(tempfile.mkdtemp(prefix="txmq-owned-"))
        self.clock = Clock()
        self.entries: list[Entry] = []
        self.dead: list[tuple[bytes, bool]] = []  # and whether it is transient
        self.app: App | None = None
        self.held: list[tuple[int, Entry]] = []  # by delivery tag
        self.channel: LocalChannel | None = None
        self.browsers: list[tuple[Iterator[pa.RecordBatch], set[bytes]]] = []
        self.sent = self.transactions = 0
        self.has_ledger = False  # the app has decided something
        self.open()

    def open(self) -> None:
        self.store = DurableStore(self.path / "data", roll_bytes=3_000)
        self.local = LocalBroker(self.store, self.clock, upkeep=False)
        self.engine = EmbeddedEngine(self.local)

    def teardown(self) -> None:
        self.local.close()
        shutil.rmtree(self.path)
        transaction_module.INBOX_ROWS, block_module.OPEN_ROWS = self._tuned

    @initialize(shape=st.sampled_from(SHAPES))
    def declare(self, shape: dict[str, Any]) -> None:
        self.shape = shape
        with self.local.channel() as channel:
            channel.queue_declare("in", arguments=shape)
            channel.queue_declare("dead")
            channel.queue_declare("other")

    # -- the model -------------------------------------------------------------------------------------------
    def unsettled(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.state != "settled"]

    def ready(self) -> list[Entry]:
        """In the order in which they go."""
        found = [entry for entry in self.entries if entry.state == "ready" and not entry.claimed]
        if "x-max-priority" in self.shape and self.app is None:
            found.sort(key=lambda entry: -entry.priority)
        return found

    def leave(self, entry: Entry) -> None:
        """Dead-lettered, where the queue says so."""
        entry.state = "settled"
        if DEAD.keys() <= self.shape.keys():
            self.dead.append((entry.body, entry.transient))

    def expire(self, *, sweep: bool) -> None:
        """What is too old at the head; with that, or in a ``sweep``, also what is behind it by an expiration of
        its own, in the order of time.
        """
        now_us = self.clock.now_us
        while (found := self.ready()) and (found[0].deadline_us or now_us + 1) <= now_us:
            self.leave(found[0])
            sweep = True
        late = [each for each in self.ready() if sweep and (each.own_us or now_us + 1) <= now_us]
        for entry in sorted(late, key=lambda each: (each.own_us, self.entries.index(each))):
            self.leave(entry)

    def full(self, messages: int = 0, size_bytes: int = 0) -> bool:
        found = self.ready()
        if len(found) + messages > self.shape.get("x-max-length", 1 << 30):
            return True
        return sum(len(entry.body) for entry in found) + size_bytes > self.shape.get(
            "x-max-length-bytes", 1 << 30
        )

    def overflow(self) -> None:
        while "x-overflow" not in self.shape and self.full():
            self.leave(self.ready()[0])

    # -- messages come and go --------------------------------------------------------------------------------
    @rule(
        count=st.integers(1, 9),
        transient=st.lists(st.booleans(), min_size=9, max_size=9),
        own_s=st.sampled_from([None, None, 2, 11]),
        priorities=st.lists(st.integers(0, 3), min_size=9, max_size=9),
        size=st.sampled_from([20, 20, 60]),
    )
    def publish(
        self, count: int, transient: list[bool], own_s: int | None, priorities: list[int], size: int
    ) -> None:
        self.transactions += 1
        if "x-max-length" in self.shape or "x-max-length-bytes" in self.shape:
            own_s = None
        came: list[Entry] = []
        with self.local.channel() as channel:
            channel.tx_select()
            for at in range(count):
                self.sent += 1
                body = b"%d" % self.sent + b"." * size
                alone = transient[at] and any(transient[at:])
                properties = Properties(
                    delivery_mode=1 if alone else 2,
                    priority=priorities[at],
                    expiration=None if own_s is None else str(own_s * 1000),
                )
                ttls = [
                    ttl
                    for ttl in (own_s, TTL_S if "x-message-ttl" in self.shape else None)
                    if ttl is not None
                ]
                deadline = self.clock.now_us + min(ttls) * 1_000_000 if ttls else None
                own_us = None if own_s is None else self.clock.now_us + own_s * 1_000_000
                came.append(Entry(body, self.transactions, alone, min(priorities[at], 2), deadline, own_us))
                channel.publish(body, routing_key="in", properties=properties.encode())
                channel.publish(b"for another queue %d" % self.sent, routing_key="other")
            refused = "x-overflow" in self.shape and self.full(count, sum(len(entry.body) for entry in came))
            try:
                channel.tx_commit()
                assert not refused, "a full queue took messages"
            except PreconditionFailed:
                assert refused, "a queue with room refused messages"
                return
        for entry in came:
            self.entries.append(entry)
            self.overflow()

    @rule()
    def get(self) -> None:
        if self.channel is None:
            self.channel = self.local.channel()
        if self.app is not None:
            try:
                self.channel.get("in")
                raise AssertionError("an owned queue was got from")
            except ResourceLocked:
                return
        self.expire(sweep=False)
        delivery = self.channel.get("in")
        found = self.ready()
        assert (delivery.body if delivery else None) == (found[0].body if found else None)
        if delivery is not None:
            found[0].state = "held"
            self.held.append((delivery.tag, found[0]))

    @precondition(lambda self: self.held)
    @rule(at=st.integers(0, 1 << 20), how=st.sampled_from(["ack", "requeue", "reject"]))
    def settle(self, at: int, how: str) -> None:
        assert self.channel is not None
        tag, entry = self.held.pop(at % len(self.held))
        if how == "ack":
            self.channel.ack(tag)
            entry.state = "settled"
        elif how == "requeue":
            self.channel.nack(tag)
            entry.state = "ready"
            self.overflow()
        else:
            self.channel.nack(tag, requeue=False)
            self.leave(entry)

    @rule()
    def close_channel(self) -> None:
        """What it holds comes back."""
        if self.channel is not None:
            self.channel.close()
        self.channel = None
        for _, entry in self.held:
            entry.state = "ready"
        self.held.clear()

    @rule()
    def purge(self) -> None:
        skipped = (
            [entry for entry in self.ready() if entry in self.entries[: self.app.start]]
            if self.app
            else self.ready()
        )
        with self.local.channel() as channel:
            try:
                assert channel.queue_purge("in") == len(skipped)
            except ResourceLocked:
                assert self.app is not None and not skipped
        for entry in skipped:
            entry.state = "settled"

    @rule(seconds=st.sampled_from([1, 3, 6]))
    def time(self, seconds: int) -> None:
        # and a little: commits of one moment are a microsecond apart, so no deadline may fall on a moment
        self.clock.now_us += seconds * 1_000_000 + 1_000

    @rule()
    def sweep(self) -> None:
        self.local.upkeep.expire()
        self.expire(sweep=True)

    # -- where the bytes are ---------------------------------------------------------------------------------
    @rule()
    def seal(self) -> None:
        self.local.upkeep.close_open()
        self.local.upkeep.seal()

    @rule()
    def compact(self) -> None:
        self.local.upkeep.compact()

    @rule()
    def forget(self) -> None:
        with self.local.channel() as channel:
            channel.queue_purge("other")

    @rule(clean=st.booleans())
    def reopen(self, clean: bool) -> None:
        if clean:
            self.local.close()
        else:
            self.store.close(clean=False)
        self.held.clear()
        self.channel = None
        self.browsers.clear()
        self.open()
        there = set(self.browse("in"))
        for entry in self.unsettled():
            entry.state = "ready"
            if entry.body not in there:
                assert entry.transient and not entry.claimed, f"{entry.body!r} was lost"
                entry.state = "settled"
        dead = set(self.browse("dead"))
        self.dead = [(body, transient) for body, transient in self.dead if body in dead or not transient]
        for claim in self.app.claims if self.app else []:
            claim.made = False
            self.reread(claim)

    # -- browsers --------------------------------------------------------------------------------------------
    @rule()
    def browser(self) -> None:
        found = self.engine.available(["in"])["in"]
        allowed = {entry.body for entry in self.unsettled()}
        self.browsers.append((self.engine.browse([("in", found.start, found.end)]), allowed))

    @precondition(lambda self: self.browsers)
    @rule()
    def browse_on(self) -> None:
        reading, allowed = self.browsers[0]
        rows = next(reading, None)
        if rows is None:
            del self.browsers[0]
        else:
            assert set(rows.column("body").to_pylist()) <= allowed, (
                "a browser read other rows, or rows without bodies"
            )

    # -- the app ---------------------------------------------------------------------------------------------
    @precondition(lambda self: self.app is None and not self.held)
    @rule(
        ledger=st.booleans(),
        at=st.sampled_from(["earliest", "latest", "middle"]),
        part=st.integers(0, 1 << 20),
    )
    def start(self, ledger: bool, at: str, part: int) -> None:
        origin, start = Origin(), 0
        if at == "latest":
            origin, start = Origin("latest"), len(self.entries)
        elif at == "middle":
            queue = self.local.state.topology.queue("in")
            offset = part % (queue.log.visible_end + 1)
            origin = Origin(offsets={"in": offset})
            there = self.bodies(self.engine.browse([("in", offset, queue.log.visible_end)]))
            start = next(
                (at for at, entry in enumerate(self.entries) if there and entry.body == there[0]),
                len(self.entries),
            )
        self.app = App(ledger, origin, start)
        self.claim(None)

    @precondition(lambda self: self.app is not None)
    @rule(rows=st.sampled_from([None, None, 1, 3]))
    def claim(self, rows: int | None, on_new: Any = "fail") -> None:
        app = self.app
        assert app is not None
        if app.last is not None and app.ledger and not app.last.decided:
            return  # Spark plans the next batch when the last one is in its commit log
        start = app.last.end if app.last else {"in": START}
        cursor = app.last.cursor if app.last else app.start
        end = self.engine.claim(APP, list(start), start, Limit(max_rows=rows), app.origin, on_new, ran=True)
        if app.last is not None:
            self.acknowledged()
        coming = [entry for entry in self.entries[cursor:] if entry.state != "settled"]
        if end == start:
            assert not coming, "messages are there, and no range was claimed"
            return
        claim = Claim(start, end, self.engine.resolve(APP, start, end), app.query, app.batches, [], cursor)
        app.batches += 1
        bodies = self.read(claim)
        claim.entries = coming[: len(bodies)]
        assert bodies == [entry.body for entry in claim.entries], (
            "a claim reads what is not settled, in order"
        )
        assert rows is not None or len(bodies) == len(coming), "a claim without a limit takes all"
        self.check_whole(claim.entries, coming)
        claim.cursor = self.entries.index(claim.entries[-1]) + 1 if claim.entries else cursor
        for entry in claim.entries:
            entry.claimed = True
            entry.transient = False
        app.claims.append(claim)
        app.last = claim
        assert (
            self.engine.claim(APP, list(start), start, Limit(max_rows=1), app.origin, "fail", ran=True) == end
        ), "the same start has the same end"

    def check_whole(self, taken: list[Entry], coming: list[Entry]) -> None:
        """A transaction is split only where it alone is more than the limit."""
        if taken and len(taken) < len(coming) and taken[-1].transaction == coming[len(taken)].transaction:
            assert len({entry.transaction for entry in taken}) == 1, "a transaction was split beside another"

    def acknowledged(self) -> None:
        """What Spark has committed is consumed, unless only the next batch can tell that nothing decides it here:
        that of the first batch of a query, after a restart.
        """
        app = self.app
        assert app is not None and app.last is not None
        app.passed = True
        if app.last.decided or app.last.made or (app.last.batch and not self.has_ledger):
            for claim in app.claims:
                self.consume(claim)
            app.claims = [app.last]

    def consume(self, claim: Claim) -> None:
        assert self.app is not None
        self.app.passed = True
        for entry in claim.entries:
            entry.state = "settled"

    def read(self, claim: Claim) -> list[bytes]:
        slices = tuple((log, first, last) for log, (first, last) in claim.ranges.items())
        return self.bodies(self.engine.read(ReadTicket(APP, claim.query, claim.batch, claim.ranges, slices)))

    def reread(self, claim: Claim) -> None:
        assert self.read(claim) == [entry.body for entry in claim.entries], (
            "a claim reads the same rows, always"
        )

    @precondition(lambda self: self.app is not None and self.app.claims)
    @rule(at=st.integers(0, 1))
    def read_again(self, at: int) -> None:
        assert self.app is not None
        self.reread(self.app.claims[at % len(self.app.claims)])

    @precondition(lambda self: self.app is not None and self.app.ledger and self.app.last is not None)
    @rule()
    def decide(self) -> None:
        app = self.app
        assert app is not None and app.last is not None
        opened = self.engine.open_batch(APP, app.query, app.last.batch, "resume")
        assert (opened.entry is not None) == app.last.decided
        if opened.entry is None:
            self.engine.commit_batch(APP, app.query, app.last.batch, opened.token, [])
            app.last.decided = self.has_ledger = True
            self.consume(app.last)

    @precondition(lambda self: self.app is not None and self.app.last is not None)
    @rule()
    def ack(self) -> None:
        app = self.app
        assert app is not None and app.last is not None
        if app.last.decided or not app.ledger:
            self.engine.ack(APP, app.last.end, ran=True)
            self.acknowledged()

    @precondition(lambda self: self.app is not None and self.app.passed)
    @rule(rows=st.sampled_from([None, 2]))
    def new_checkpoint(self, rows: int | None) -> None:
        """It goes on behind what was decided, or acknowledged: what was claimed and not consumed is claimed
        again.
        """
        assert self.app is not None
        self.app.query, self.app.batches, self.app.last = uuid.uuid4().hex, 0, None
        self.app.passed = False
        self.claim(rows, "resume")

    @precondition(lambda self: self.app is not None)
    @rule()
    def release(self) -> None:
        self.engine.release(APP, "in", force=True)
        self.app = None
        for entry in self.entries:
            entry.claimed = False

    # -- what holds after every step -------------------------------------------------------------------------
    def bodies(self, batches: Iterator[pa.RecordBatch]) -> list[bytes]:
        return [body for batch in batches for body in batch.column("body").to_pylist()]

    def browse(self, name: str) -> list[bytes]:
        found = self.engine.available([name])[name]
        return self.bodies(self.engine.browse([(name, found.start, found.end)]))

    @invariant()
    def shows_what_the_model_holds(self) -> None:
        if not hasattr(self, "shape"):
            return
        assert self.browse("in") == [entry.body for entry in self.unsettled()]
        assert self.browse("dead") == [body for body, _ in self.dead]
        queue = self.local.state.topology.queue("in")
        assert oldest(queue) == purgeable(queue)
        assert queue.messages == len(self.unsettled())
        assert queue.droppable == len(self.ready())
        assert all(
            queue.progress.needed_within(run.first, run.end)
            for run in queue.log.runs_between(0, queue.log.next_offset)
        ), "a run is kept for nothing"
        for app in self.engine.apps():
            if self.app is not None:
                assert app.lag == sum(entry.state != "settled" for entry in self.entries[self.app.start :])
