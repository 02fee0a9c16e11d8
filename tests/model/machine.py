"""The state machine: Hypothesis chooses who takes the next step, and what goes wrong in it.

Not here: what must hold (world.py). One rule does everything, because Hypothesis switches rules off at
random, and a history without producers or without drivers says nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import hypothesis.strategies as st
from hypothesis import note
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.model.wire import MODES
from tests.model.world import World, world

SHAPES = (
    ("publish", "append", "after_commit"),
    ("publish",),
    ("append twice", "publish"),
    ("steps", "publish"),
    ("after_commit",),
)
SOURCES: tuple[dict[str, str], ...] = (
    {},
    {},
    {"startingOffsets": "latest"},
    {"minOffsetsPerTrigger": "3", "maxTriggerDelay": "40ms"},
    {"minOffsetsPerTrigger": "2", "startingOffsets": "latest"},
)
# with and without admission control, once with a wrapper that asks for more ends than it plans
SPARKS: tuple[dict[str, bool], ...] = ({}, {}, {"unadmitted": True}, {"unadmitted": True, "reports": 2})
DRIVERS = 2  # alive at a time
FAR = 150  # steps of one action
LOSSES = 2  # lost and restored checkpoints in one history
LABELS = (
    *(
        "idle",
        "idle",
        "claim",
        "offset log write",
        "ack",
        "resolve",
        "task",
        "open_read",
        "read_plan",
        "stage_part",
        "open_batch",
    ),
    *(
        "commit_batch",
        "commit_batch",
        "unapplied",
        "delta commit",
        "upsert",
        "mark_applied",
        "unmirrored",
        "mark_mirrored",
    ),
    *("commit log write", "commit log write"),
)
STEPS = ("go", "go", *MODES, "zombie")
GO_ON = st.tuples(
    st.just("go on"), st.integers(0, 5), st.sampled_from(LABELS), st.integers(0, 2), st.sampled_from(STEPS)
)
ACTIONS = st.one_of(
    GO_ON,
    GO_ON,
    st.tuples(st.just("small steps"), st.integers(0, 5), st.integers(1, 8)),
    st.tuples(st.just("produce"), st.integers(1, 3), st.integers(0, 2)),
    st.tuples(st.just("start"), st.sampled_from(["fail", "fail", "resume"]), st.sampled_from([None, 3])),
    st.tuples(st.just("kill"), st.integers(0, 5)),
    st.tuples(
        st.sampled_from(
            [
                "crash",
                "seal",
                "mirror",
                "save",
                "restore",
                "lose",
                "release",
                "lose commit log entry",
                "unread",
            ]
        )
    ),
    st.tuples(st.just("busy"), st.integers(1, 5)),
)


class MicroBatches(RuleBasedStateMachine):
    """``losses`` is how often a checkpoint may be lost or an older one restored."""

    losses = LOSSES

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.failed = False
        self.world: World = None  # type: ignore[assignment]

    @initialize(
        sink=st.sampled_from(["foreach", "foreach", "native", "native", "connect", "other"]),
        queues=st.sampled_from([("in",), ("in", "in2")]),
        joined=st.booleans(),
        shape=st.sampled_from(SHAPES),
        ledger_sync=st.booleans(),
        backlog=st.integers(0, 2),
        kept=st.sampled_from([0, 2, 4]),
        source_options=st.sampled_from(SOURCES),
        spark=st.sampled_from(SPARKS),
    )
    def begin(
        self,
        sink: str,
        queues: tuple[str, ...],
        joined: bool,
        shape: tuple[str, ...],
        ledger_sync: bool,
        backlog: int,
        kept: int,
        source_options: dict[str, str],
        spark: dict[str, bool],
    ) -> None:
        if sink == "other":  # a lost checkpoint does double there
            self.losses, shape = 0, SHAPES[0]
        if "reports" in spark:  # a run asks for a few ends that it does not plan, and 1,000 claims are kept
            kept = 0
        options = {
            "sink": sink,
            "queues": queues,
            "joined": joined,
            "shape": shape,
            "ledger_sync": ledger_sync,
        }
        self.world = self.stack.enter_context(
            world(**options, **spark, kept=kept, source_options=source_options)
        )
        for _ in range(backlog):
            self.world.produce(2, 1)
        self.world.start_driver()

    @rule(action=ACTIONS)
    def act(self, action: tuple) -> None:
        what, *how = action
        with self._telling():
            getattr(self, "_" + what.replace(" ", "_"))(*how)

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """A failure comes with the history of steps."""
        try:
            yield
        except BaseException:
            self.failed = True
            note("\n".join(self.world.history[-100:]))
            raise

    def _go_on(self, number: int, label: str, passes: int, mode: str) -> None:
        """Up to the next (or a later) ``label``, and then this one step in a good or a bad way."""
        if not self.world.actors:
            return
        actor = self.world.actors[number % len(self.world.actors)]
        for _ in range(FAR):
            if actor.done:
                return
            if actor.pending == label:
                passes -= 1
                if passes < 0:
                    break
            elif actor.pending == "idle":
                break
            self.world.step(actor)
        if not actor.done:
            self.world.step(actor, mode)

    def _small_steps(self, number: int, steps: int) -> None:
        for _ in range(steps):
            if self.world.actors:
                self.world.step(self.world.actors[number % len(self.world.actors)])

    def _produce(self, first: int, second: int) -> None:
        self.world.produce(first, second)

    def _start(self, on_new: str, limit: int | None) -> None:
        if sum(actor.name.startswith("driver") for actor in self.world.actors) < DRIVERS:
            self.world.start_driver(on_new=on_new, limit=limit)

    def _kill(self, number: int) -> None:
        if self.world.actors:
            self.world.kill(self.world.actors[number % len(self.world.actors)])

    def _crash(self) -> None:
        self.world.crash_engine()

    def _seal(self) -> None:
        self.world.seal()

    def _mirror(self) -> None:
        if self.world.sink == "foreach":
            self.world.start_mirror()

    def _save(self) -> None:
        self.world.save_checkpoint()

    def _restore(self) -> None:
        if self.losses and self.world.saved is not None:
            self.losses -= 1
            self.world.restore_checkpoint()

    def _unread(self) -> None:
        """A batch whose rows Spark's optimizer finds to change nothing."""
        if self.world.sink == "foreach" and not self.losses:  # a lost checkpoint gives such rows again
            self.world.unread_next += 1

    def _busy(self, batches: int) -> None:
        """A first queue with a batch for each transaction, beside a second that is idle."""
        for _ in range(batches):
            self.world.produce(1)
            for actor in [actor for actor in self.world.actors if actor.name.startswith("driver")][:1]:
                for _ in range(FAR):
                    if actor.done or actor.pending == "commit log write":
                        break
                    self.world.step(actor)
                if not actor.done:
                    self.world.step(actor)

    def _lose_commit_log_entry(self) -> None:
        self.world.lose_commit_log_entry()

    def _release(self) -> None:
        """By force, with drivers that know nothing of it. Without resume, a start at the latest message is another."""
        owned = self.world.local.state.topology.queue("in").owner
        if self.losses and owned and self.world.source_options.get("startingOffsets") != "latest":
            self.losses -= 1
            self.world.release(force=True)

    def _lose(self) -> None:
        if self.losses:
            self.losses -= 1
            self.world.lose_checkpoint()

    def teardown(self) -> None:
        with self.stack:
            if self.world is not None and not self.failed:
                with self._telling():
                    self.world.finish()


class OneLineage(MicroBatches):
    """Without lost and restored checkpoints: nothing but a clean restart may be needed, ever."""

    losses = 0
