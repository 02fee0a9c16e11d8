"""Exceptions out of every call: a work is run again and again, and each time the next call inside it raises.

After each failure the whole state must be what it was, so the same work can be tried once more; in the end it
succeeds.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Literal, TypeVar

import broker_core
from broker_core.core.errors import InternalFault
from broker_core.node.local import LocalBroker
from tests.undo.snapshot import difference, snapshot

T = TypeVar("T")
CODE = str(Path(broker_core.__file__).parent)
UNDO = str(Path(CODE) / "core" / "undo.py")
# Exceptions inside end there: a dead letter is made of any message, and when to look at a queue again is only
# planned.
DEAD_LETTER = str(Path(CODE) / "broker" / "message/dead_letter.py")
PLAN = "Expiry.plan"


class Injected(Exception):
    pass


class Faults:
    """``moment``: the exception comes instead of the call, or when it returns, after what it did. ``most``: how often
    it comes out of the calls of one line in one work, infinite for each of them; the second undoes what the first did.
    """

    def __init__(
        self, broker: LocalBroker, moment: Literal["call", "return"], most: float, *roots: object
    ) -> None:
        self._roots = (broker.state, *roots)
        self._moment = moment
        self._most = most
        self._run = broker.committer.run
        broker.committer.run = self._run_faulty  # type: ignore[method-assign]
        self._armed_at = 0  # 0: not armed
        self._where = ""
        self.raised = 0

    def exhaust(self, operation: Callable[[], T]) -> T:
        """The answer of ``operation`` once it succeeds; every failure before it changed nothing."""
        before = snapshot(*self._roots)
        at = 0
        while True:
            at += 1
            self._armed_at, self._where = at, ""
            try:
                answer = operation()
            except InternalFault as fault:
                if not isinstance(fault.__cause__, Injected):
                    raise
                self.raised += 1
                changed = difference(before, snapshot(*self._roots))
                assert not changed, "\n".join(
                    [f"an exception out of call {at}, {self._where}, left behind:", *changed[:20]]
                )
            else:
                assert not self._where, f"the exception out of {self._where} was swallowed"
                return answer
            finally:
                self._armed_at = 0

    def _run_faulty(self, work: Callable[..., T]) -> T:
        return self._run(self._faulty(work) if self._armed_at else work)

    def _faulty(self, work: Callable[..., T]) -> Callable[..., T]:
        calls = 0
        passes = Counter[tuple[CodeType, CodeType | None, int]]()

        def fail(frame: FrameType) -> None:
            self._where = f"{frame.f_code.co_qualname}:{frame.f_lineno}"
            raise Injected(self._where)

        def returns(frame: FrameType, event: str, _arg: Any) -> Any:
            if event == "return":
                fail(frame)
            return returns

        def trace(frame: FrameType, event: str, _arg: Any) -> Any:
            nonlocal calls
            name = frame.f_code.co_filename
            if (
                event != "call"
                or not name.startswith(CODE)
                or name == UNDO
                or frame.f_code.co_flags & inspect.CO_GENERATOR
            ):
                return None  # out of a generator that is let go an exception does not come
            caller = frame.f_back
            place = frame.f_code, caller and caller.f_code, caller.f_lasti if caller else 0
            passes[place] += 1
            if passes[place] > self._most or _ends_within(frame):
                return None
            calls += 1
            if calls == self._armed_at:
                if self._moment == "call":
                    fail(frame)
                return returns
            return None

        def run(state: Any, change: Any, now: int) -> T:
            sys.settrace(trace)
            try:
                return work(state, change, now)
            finally:
                sys.settrace(None)

        return run


def _ends_within(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == DEAD_LETTER or frame.f_code.co_qualname == PLAN:
            return True
        frame = frame.f_back
    return False
