"""Answers of an engine that are kept for a moment, so that many who look cost it as much as one.

Invariant: of each question one caller asks the engine at a time; the others wait for its answer, or for its
failure. At most KEYS answers are kept.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TypeVar, cast

from broker_core.errors import TxmqError

T = TypeVar("T")
KEYS = 1_000
FAILED_S = 1.0


@dataclass(slots=True)
class _Answer:
    lock: threading.Lock = field(default_factory=threading.Lock)
    until_s: float = 0.0
    value: object = None
    error: TxmqError | None = None


class Recent:
    """Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._answers: dict[Hashable, _Answer] = {}

    def __len__(self) -> int:
        return len(self._answers)

    def get(self, key: Hashable, ask: Callable[[], T], keep_s: float, share: float = 0.0) -> T:
        """Returns what ``ask`` has answered at most ``keep_s`` ago, or ``share`` times as long ago as its
        answer took. Raises what it has raised at most FAILED_S ago.
        """
        with self._lock:
            answer = self._answers.get(key)
            if answer is None:
                while len(self._answers) >= KEYS:
                    del self._answers[next(iter(self._answers))]
                answer = self._answers[key] = _Answer()
        with answer.lock:
            if answer.until_s <= self._clock():
                began_s = self._clock()
                answer.value = answer.error = None
                try:
                    answer.value = ask()
                except TxmqError as error:
                    answer.error, keep_s, share = error, FAILED_S, 0.0
                now_s = self._clock()
                answer.until_s = now_s + max(keep_s, share * (now_s - began_s))
            if answer.error is not None:
                raise answer.error.with_traceback(None)
            return cast(T, answer.value)
