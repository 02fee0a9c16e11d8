"""Group commit with a leader and followers: a thread that commits while there is no leader becomes the leader
and commits for all waiting threads.

There is no committer thread: a single commit waits for no other thread. Not here: what a work does
(``broker/``), how a change becomes durable (``store/``), which blocks it reads (``loaded_blocks.py``).

A commit, in this order:
1. plan: under the state lock each waiting work runs, in order, and fills its change, which is encoded. A work
   that raises, or whose change cannot be encoded, fails alone: it is undone in memory, its change dropped. So
   is one that needs a block which is not in memory: its caller loads the block without the lock, and it runs
   again in a later group. Works for which there is no time left are the first of the next group
2. make durable: one ``store.commit`` for all changes of the group
3. show: under the state lock, new entries become visible. After a kill before it the next start shows them
4. answer: all callers of the group; if work is waiting, one of the waiting threads becomes the leader. A
   thread that is woken wakes the next one: fewer compete for the interpreter than if the leader woke all

A waiting thread leads from the moment that ``leads`` is set until its group is done. If an exception from
outside ends it, another thread gets the lead, and the next one is woken. In the main thread signal handlers
wait until :meth:`Committer.run` is over (``deferred_signals.py``).

Invariant: no caller is answered and no change is visible before it is durable. When a work is ``done``, the
earlier works of its origin are. While callers wait, one of them is the leader. Nothing is read from the disk
under the lock. While a work waits for a block, later works of its origin (a channel) wait behind it. After a
failure in 2, memory and disk may differ, so nothing is committed again: all callers get StoreFailed.
"""

from __future__ import annotations

import _thread
import contextlib
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from broker_core.broker.broker import BrokerState
from broker_core.core import failpoint
from broker_core.core.block import NotLoaded
from broker_core.core.change import Change
from broker_core.core.errors import InternalFault, StoreFailed, TxmqError
from broker_core.message import spans
from broker_core.node.commit_listeners import CommitListeners
from broker_core.node.deferred_signals import uninterrupted
from broker_core.node.loaded_blocks import NOTHING, HeldUp, Loaded, LoadedBlocks, Look
from broker_core.store.port import Store

logger = logging.getLogger("txmq.broker")

P = ParamSpec("P")
T = TypeVar("T")
Work = Callable[[BrokerState, Change, int], T]
Gate = Callable[["Waiting"], "Waiter"]

_MAX_GROUP = 1024  # works in one commit
PLAN_S = 0.01  # of the processor, for the works of one commit: others wait for the lock
_TOLERANCE_US = 1_000_000  # of the clock
SLOW_S = 1.0  # a commit that takes longer is logged


def changes(work: Callable[Concatenate[Change, P], T], *args: P.args, **keywords: P.kwargs) -> Work[T]:
    """A work of the rules that needs nothing but the change."""
    return lambda _state, change, _now: work(change, *args, **keywords)


class Waiter(Protocol):
    """Opens when there is an answer, when the caller becomes the leader, or when it must load blocks."""

    def release(self) -> None: ...


class Waiting:
    """A caller: its work, then its answer or error, once it is ``done``. ``gate`` opens when the wait is
    over; None: it does not wait.

    ``leads``: it became the leader, and has not begun to commit. ``wakes``: the thread that it wakes when it
    is woken; itself: it has left. ``missing``: it must :meth:`Committer.load` these blocks, and commit again.
    Works of the same ``origin`` stay in order; None: its caller has no other.
    """

    __slots__ = ("answer", "done", "error", "gate", "leads", "loaded", "missing", "origin", "wakes", "work")

    def __init__(self, work: Work[object], origin: object = None) -> None:
        self.work = work
        self.origin = origin
        self.missing: NotLoaded | None = None
        self.loaded: Loaded = NOTHING
        self.answer: Any = None
        self.error: BaseException | None = None
        self.done = self.leads = False
        self.wakes: Waiting | None = None
        self.gate: Waiter | None = None


class CommitCounts:
    """What is durable: groups, their changes, and how long that took. The leader counts, any thread reads."""

    def __init__(self) -> None:
        self.groups = self.changes = 0
        self.durable_s = 0.0
        self.confirmed, self.returned = Counter[str](), Counter[str]()  # of AMQP, by virtual host

    def add(self, changes: int, durable_s: float) -> None:
        self.groups += 1
        self.changes += changes
        self.durable_s += durable_s
        if spans.MODULE in sys.modules:  # looked at here: nothing more where nobody traces
            began_ns = time.time_ns() - int(durable_s * 1e9)
            spans.finished("txmq.group_commit", began_ns, {"txmq.changes": changes})
        if durable_s >= SLOW_S:
            logger.warning("a commit of %d changes took %.1f s to become durable", changes, durable_s)


class Committer:
    """``clock`` returns microseconds since the epoch."""

    def __init__(
        self, state: BrokerState, store: Store, loaded_blocks: LoadedBlocks, clock: Callable[[], int]
    ) -> None:
        self._state = state
        self.loaded_blocks = loaded_blocks
        self._lock = _thread.allocate_lock()  # guards the state
        self.look = Look(state, self._lock)
        self._store = store
        self._clock = clock
        self.listeners = CommitListeners(state)
        self._mutex = _thread.allocate_lock()  # guards the two below
        self.waiting: list[Waiting] = []
        self._led = False
        self._held_up: HeldUp[Waiting] = HeldUp()  # the leader's
        self._last_us = state.loaded.latest_us
        self.failure: StoreFailed | None = None
        self.counts = CommitCounts()
        self.waits: Callable[[], None] = lambda: None  # called by a thread before it waits for a commit

    @uninterrupted
    def run(self, work: Work[T]) -> T:
        """Runs ``work`` in commit order and returns its answer when all its changes are durable.

        Raises what the work raises (a TxmqError: nothing changed), and StoreFailed.
        """
        mine = Waiting(work)
        self._wait(mine)
        while mine.missing is not None:
            self.load(mine)
            self._wait(mine)
        if mine.error is not None:
            if mine.error is self.failure:
                self.check()
            raise mine.error
        answer: T = mine.answer
        return answer

    def read(self, look: Callable[[BrokerState], T]) -> T:
        """Looks without a commit, or in a work if blocks must be loaded from the disk. Raises as ``run``."""
        try:
            with self.look as state:
                return look(state)
        except NotLoaded:
            return self.run(lambda state, _change, _now: look(state))

    def _wait(self, mine: Waiting) -> None:
        """Commits, until ``mine`` is done or must load blocks."""
        mine.gate = None
        try:
            with self._mutex:
                if not self._led:
                    self._led = mine.leads = True  # without a leader no caller waits
                else:
                    gate = mine.gate = _thread.allocate_lock()
                    gate.acquire()
                    self.waiting.append(mine)
            if mine.gate is None:
                self.lead(mine, [mine])
            else:
                self.waits()
                gate.acquire()
                _wake_next(mine)
                if mine.leads:
                    self.lead(mine)
        except BaseException:  # raised in this thread from outside
            self._leave(mine)
            raise

    def load(self, waiting: Waiting) -> None:
        """Loads the blocks that a work needs, in a thread that may wait. Then its caller commits it again."""
        missing, waiting.missing = waiting.missing, None
        if missing is not None:
            waiting.loaded = waiting.loaded or {}
            self.loaded_blocks.load(missing, waiting.loaded, self.look)

    def submit(self, group: list[Waiting], gate: Gate) -> bool:
        """Commits a group of one thread, which must not wait for others. Returns True when its works are
        done, must load blocks, or are held up by a work of the same origin that must: give that a gate. The
        others, for which there was no time left, have a ``gate``.

        False if another thread is the leader: all have one. A gate opens in the leader's thread when the
        caller is done, or when it must call :meth:`lead` or :meth:`load`.
        """
        with self._mutex:
            if self._led:
                for waiting in group:
                    waiting.gate = gate(waiting)
                self.waiting += group
                return False
            self._led = True
        self.lead(group[0], group, gate)
        return True

    def lead(self, mine: Waiting, group: list[Waiting] | None = None, gate: Gate | None = None) -> None:
        """Commits as the leader, and answers: ``group``, which starts with ``mine``; None: it, which waits no
        more, and all that wait now. Who had no turn waits at a ``gate``, before all others.
        """
        done, load, left = (list[Waiting]() for _ in range(3))
        try:
            mine.leads = False
            if group is None:
                group = [mine]
                with self._mutex:
                    group += self.waiting[: _MAX_GROUP - 1]
                    del self.waiting[: _MAX_GROUP - 1]
            self._commit(group, done, load, left)
            for waiting in left:
                waiting.gate = waiting.gate or (gate and gate(waiting))
        except BaseException as error:
            done, load, left = self._held_up.fail([*(group or [mine]), *done]), [], []
            self._fail(error, done)
            if not isinstance(error, Exception):
                raise
        finally:
            for waiting in done:  # before the next leader, who may finish later works of the same origin
                waiting.done = True
            with self._mutex:
                if left:
                    self.waiting[:0] = [waiting for waiting in left if waiting.wakes is not waiting]
                if self.waiting:
                    self._hand_on()
                else:
                    self._led = False
                gates = () if group == [mine] == [*done, *load] else _gates([*done, *load], mine)
            for opened in gates:
                _open(opened)

    def check(self) -> None:
        """Raises StoreFailed after the broker has stopped."""
        failure = self.failure
        if failure is not None:
            raise StoreFailed(failure.message) from failure.__cause__

    def stop(self, error: BaseException) -> None:
        """Stops all commits; waiting callers and ``wait`` get StoreFailed."""
        self._fail(error, [])

    def end(self, error: StoreFailed) -> None:
        """Like ``stop``, and returns when no other thread is in a commit, so the store may be closed."""
        self.stop(error)
        with contextlib.suppress(StoreFailed):
            self.run(lambda _state, _change, _now: None)

    def _hand_on(self) -> None:
        """Under the mutex: makes one of the waiting callers the leader, if there is any."""
        while self.waiting:
            following = self.waiting.pop(0)
            assert following.gate is not None
            following.leads = True
            if _open(following.gate):
                return
        self._led = False

    def _leave(self, mine: Waiting) -> None:
        """A caller stops waiting: its work is withdrawn, or done without it. Another leads in its place."""
        with self._mutex:
            if mine in self.waiting:
                self.waiting.remove(mine)
            elif mine.leads:
                mine.leads = False
                self._hand_on()
            _wake_next(mine)
            mine.wakes = mine

    def _commit(
        self, group: list[Waiting], done: list[Waiting], load: list[Waiting], left: list[Waiting]
    ) -> None:
        """Puts each caller into ``done``: it has an answer, ``load``: it must load blocks, or ``left``."""
        if self.failure is not None:
            raise self.failure
        changes: list[Change] = []
        state, held_up = self._state, self._held_up
        with self.look.turn, self._lock:  # 1. plan
            now_us = max(self._last_us, self._clock() - 1)
            last = time.thread_time() + PLAN_S if held_up or len(group) > 1 else 0.0
            for turn, waiting in enumerate(group):
                if turn and (turn == _MAX_GROUP or time.thread_time() >= last):
                    left += group[turn:]
                    break
                following: Waiting | None = waiting
                if held_up and held_up.take(waiting):
                    continue
                while following is not None:
                    now_us += 1  # commit times always rise: no two works have the same
                    if not self._plan(following, now_us, changes):
                        load.append(following)
                        break
                    done.append(following)
                    following = held_up.next_after(following) if held_up else None
                    if following is not None and time.thread_time() >= last:
                        left.append(following)
                        break
            self.loaded_blocks.loaded = NOTHING
            self._last_us = now_us
            for change in (state.transactions.history.keep(changes, now_us), state.numbers.keep()):
                if change is not None:
                    changes.append(change)
        failpoint.here("committer.planned")
        if changes:
            began = time.monotonic()
            self._store.commit(changes)  # 2. make durable
            self.counts.add(len(changes), time.monotonic() - began)
        failpoint.here("committer.durable")
        touched = [*state.pending_checks.touched]
        if touched:
            with self.look.turn, self._lock:  # 3. show
                state.transactions.publish()
        if touched or state.pending_checks.runnable or state.virtual_hosts.registry.cancelled:
            self.listeners.tell(touched)
        failpoint.here("committer.published")

    def _plan(self, waiting: Waiting, now_us: int, changes: list[Change]) -> bool:
        """Runs a work, or undoes it. Returns False if it must load blocks."""
        change = Change()
        undo = self._state.undo
        undo.begin()
        self.loaded_blocks.loaded = waiting.loaded
        try:
            waiting.answer = waiting.work(self._state, change, now_us)
            if self._state.pending_checks.remembering:  # whichever work has enqueued them
                self._state.messages.admission.record(change, now_us)
            if change.rows or change:
                self._store.encode(change)
                if len(change.effects) or not change.effects.is_plain:
                    self._state.transactions.history.add(change, now_us)
                changes.append(change)
        except NotLoaded as missing:
            undo.roll_back()
            waiting.missing = missing
            self._held_up.begin(waiting)
            return False
        except Exception as error:
            undo.roll_back()
            if isinstance(error, StoreFailed):
                raise
            if not isinstance(error, TxmqError):
                logger.error("a commit was undone after an unexpected exception", exc_info=error)
                error = InternalFault.of(error)
            waiting.error = error
        return True

    def _fail(self, error: BaseException, group: list[Waiting]) -> None:
        if self.failure is None:
            self.failure = error if isinstance(error, StoreFailed) else StoreFailed.of(error)
        for waiting in group:
            waiting.answer, waiting.error = None, self.failure  # an answer of 1. is not durable
        self.listeners.tell(None)


def _gates(answered: list[Waiting], mine: Waiting) -> list[Waiter]:
    """Under the mutex: returns the gates to open now. Each thread among the callers wakes the next one."""
    gates: list[Waiter] = []
    thread: Waiting | None = None
    for waiting in answered:
        gate = waiting.gate
        if waiting is mine or gate is None or waiting.wakes is waiting:
            continue
        if type(gate) is not _thread.LockType:
            gates.append(gate)
            continue
        if thread is None:
            gates.append(gate)
        else:
            thread.wakes = waiting
        thread = waiting
    return gates


def _wake_next(mine: Waiting) -> None:
    if mine.wakes is not None and mine.wakes.gate is not None:
        _open(mine.wakes.gate)
        mine.wakes = None


def _open(gate: Waiter) -> bool:
    """Opens a gate; False if the waiting thread has ended (the event loop of a closed server)."""
    try:
        gate.release()
    except RuntimeError:
        return False
    return True


def now_us() -> int:
    """Returns microseconds since the epoch."""
    return time.time_ns() // 1000


class SteadyClock:
    """The time of day, except that it never stops or goes back when that is set back. ``wall`` returns
    microseconds since the epoch. Thread-safe: results of two threads may be slightly out of order.

    If the time of day is more than a second behind the latest result (or the latest commit before a restart),
    the clock runs from there at half speed until the time of day has caught up. Messages then expire late,
    after at most twice their time to live.
    """

    def __init__(
        self,
        wall: Callable[[], int] = now_us,
        *,
        monotonic: Callable[[], int] = time.monotonic_ns,
        latest_us: int = 0,
    ) -> None:
        """``latest_us``: the earliest time that the clock returns."""
        self._wall = wall
        self._monotonic = monotonic
        self._latest_us = latest_us
        # a result and its monotonic time, while the time of day is behind
        self._behind: tuple[int, int] | None = None

    def __call__(self) -> int:
        wall = self._wall()
        behind = self._behind
        if behind is None:
            latest_us = self._latest_us
            if wall >= latest_us:
                self._latest_us = wall
                return wall
            if wall >= latest_us - _TOLERANCE_US:
                return wall
            behind = self._behind = (self._latest_us, self._monotonic())
        base_us, since_ns = behind
        steady = base_us + (self._monotonic() - since_ns) // 2000
        if wall >= steady:
            self._behind = None
            self._latest_us = wall
            return wall
        return steady
